//! Looks, a millisecond after the other, and what is asked for.

use portolan_transport::policy::Profile;

use super::Wish::{Begin, End, Rest};
use super::judge::{SETTLING, SHORT_TRIAL, TRIAL};
use super::*;

const MS: Nanos = 1_000_000;

/// Looks once a millisecond at so many frames each; what was asked for, and when.
struct Looks {
    poll: BusyPoll,
    now: Nanos,
    frames: u64,
}

impl Looks {
    fn new(compares: bool) -> Self {
        Self::beside(compares, false)
    }

    /// Perhaps of an engine that shares its core.
    fn beside(compares: bool, another: bool) -> Self {
        let mut poll = BusyPoll::new(compares, another);
        assert_eq!(poll.look(1, 0), None);
        Self {
            poll,
            now: 1,
            frames: 0,
        }
    }

    fn see(&mut self, per_ms: u64, looks: u64) -> Vec<(u64, Wish)> {
        let mut asked = Vec::new();
        for nth in 1..=looks {
            self.now += MS;
            self.frames += per_ms;
            asked.extend(
                self.poll
                    .look(self.now, self.frames)
                    .map(|wish| (nth, wish)),
            );
        }
        asked
    }

    fn told(&mut self, on: bool) {
        let socket = on.then(|| std::fs::File::open("/dev/null").unwrap().into());
        self.poll.told(self.now, socket);
        assert_eq!(self.poll.is_on(), on);
    }
}

// Few frames, then many that nobody answers for, then an answer; few again, many for a moment, few. Expect: asked at the look that makes it
// enough, then ever more rarely; asked to be let off at the fourth more than there were with many.
#[test]
fn it_is_asked_for_when_there_are_many_frames_and_ended_when_there_are_few() {
    let warm = u64::from(WARM);
    for compares in [false, true] {
        let mut looks = Looks::new(compares);
        assert_eq!(looks.see(MANY - 1, 100), []);
        let asked = looks.see(MANY, 2_000);
        let begin = [0, 5, 15, 35].map(|later| (warm + later, Begin));
        assert_eq!(asked[..4], begin);
        assert!(asked.len() < 12, "{asked:?}");
        let last = asked.windows(2).last().unwrap();
        assert!(last[1].0 - last[0].0 <= 1_000, "{last:?}");
        looks.told(true);
        assert_eq!(looks.see(MANY + MANY / 2, u64::from(SETTLING + TRIAL)), []);
        assert_eq!(looks.see(FEW, 50), []);
        assert_eq!(looks.see(FEW - 1, 3), []);
        assert_eq!(looks.see(MANY, 1), []);
        assert_eq!(looks.see(0, 5), [(2, End)]);
        looks.told(false);
        assert_eq!(looks.see(0, 100), []);
        assert_eq!(looks.see(MANY, warm), [(warm, Begin)]);
    }
}

// Three looks with many frames and one without, again and again, as for an engine whose core another one has every fourth millisecond; then as many with as without.
// Expect: asked for after 16 more of these than of those, and none the later for frames that came long ago; never.
#[test]
fn an_engine_that_has_its_core_in_turns_asks_as_well() {
    for compares in [false, true] {
        let mut looks = Looks::beside(compares, true);
        let mut asked = Vec::new();
        for round in 0..10 {
            asked.extend(
                looks
                    .see(800, 3)
                    .iter()
                    .map(|(at, wish)| (4 * round + at, *wish)),
            );
            asked.extend(
                looks
                    .see(0, 1)
                    .iter()
                    .map(|(_, wish)| (4 * round + 4, *wish)),
            );
        }
        assert_eq!(asked.first(), Some(&(30, Begin)));
        let mut looks = Looks::beside(compares, true);
        assert_eq!(looks.see(MANY / 2 - 1, 100), []);
        for _ in 0..100 {
            assert_eq!(looks.see(MANY / 2, 1), []);
            assert_eq!(looks.see(0, 1), []);
        }
        // No more than it takes: what was long ago is none.
        assert_eq!(looks.see(MANY / 2, 1_000).first(), Some(&(16, Begin)));
        assert_eq!(looks.see(0, 1_000), []);
    }
}

// The same, going round, at first without a frame for eight looks. Expect: an engine with its core for itself has seen enough; one in company sees the trial to its end, and
// counts what it saw before in as many milliseconds with as without frames.
#[test]
fn in_company_a_few_looks_decide_nothing() {
    for (another, pays) in [(false, false), (true, true)] {
        let mut looks = Looks::beside(true, another);
        let asks = (0..20).any(|_| {
            let asked = looks.see(800, 3);
            looks.see(0, 1);
            !asked.is_empty()
        });
        assert!(asks);
        looks.told(true);
        looks.see(800, u64::from(SETTLING));
        let mut said = looks.see(200, u64::from(SHORT_TRIAL));
        // 613 per millisecond before, and 650 now.
        said.extend(looks.see(800, u64::from(TRIAL - SHORT_TRIAL) + 100));
        let goes_on = said.iter().all(|(_, wish)| *wish != Rest);
        assert_eq!(goes_on, pays, "{said:?}");
    }
}

// Three looks with many frames and one without, before and after. Expect: it does not pay, neither where the one is a pause nor where it is another engine's turn.
#[test]
fn looks_that_count_are_the_same_before_and_after() {
    for another in [false, true] {
        let mut looks = Looks::beside(true, another);
        let see = |looks: &mut Looks, wish| {
            (0..20).any(|_| {
                let asked = looks.see(800, 3);
                looks.see(0, 1);
                asked.iter().any(|(_, asked)| *asked == wish)
            })
        };
        assert!(see(&mut looks, Begin));
        looks.told(true);
        assert!(see(&mut looks, Rest), "{another}");
    }
}

// Going round for minutes. Expect: said again each second, and nothing else.
#[test]
fn a_new_supervisor_hears_of_it() {
    let mut looks = Looks::new(false);
    looks.told(true);
    let said = looks.see(MANY, 10_000);
    assert!((9..=10).contains(&said.len()), "{said:?}");
    assert!(said.iter().all(|(_, wish)| *wish == Begin));
}

// Looks that are late, as after a sleep. Expect: frames are counted per millisecond all the same.
#[test]
fn a_late_look_is_no_reason() {
    let mut looks = Looks::new(false);
    for _ in 0..100 {
        looks.now += 100 * MS;
        looks.frames += 10 * MANY;
        assert_eq!(looks.poll.look(looks.now, looks.frames), None);
    }
}

// Frames of usual and of long MTUs; policies that grant as much as ours, and less. Expect: more than the policy grants where a look brings more; as the policy says.
#[test]
fn a_gulp_is_what_a_look_brings() {
    let (ours, theirs) = (Policy::default(), Profile::Rmpp.policy());
    assert!(gulp(1_514, &ours) < ours.grant_bytes);
    assert!(gulp(9_014, &ours) > 2 * ours.grant_bytes);
    assert_eq!(gulp(9_014, &theirs), 0);
}

// Many frames, and not one in thirty-two more when we go round for them, again and again; what had been kept back comes at once. Expect: asked to be let off for a
// while after a trial, and once more at each pause until somebody answers; the next trial soon, then after twice as long each time, at most after eight
// seconds; soon again after a second with few frames, and after a trial that went well.
#[test]
fn what_does_not_pay_is_ended_and_tried_more_rarely() {
    let (warm, trial) = (u64::from(WARM), u64::from(TRIAL));
    let mut looks = Looks::new(true);
    assert_eq!(looks.see(800, warm), [(warm, Begin)]);
    let vain = |looks: &mut Looks, rest: u64| {
        looks.told(true);
        assert_eq!(looks.see(5_000, u64::from(SETTLING)), []);
        let asked = looks.see(824, trial + 14);
        assert_eq!(asked, [(trial, Rest), (trial + 5, Rest)], "{rest}");
        looks.told(false);
        let asked = looks.see(800, 2 * rest);
        let (first, begins) = asked[0];
        assert!(begins == Begin && asked.iter().all(|(_, wish)| *wish == Begin));
        // The rest began at the verdict, fourteen looks ago; since then there were always many.
        assert_eq!(first, rest - 14);
    };
    for rest in [500, 1_000, 2_000, 4_000, 8_000, 8_000] {
        vain(&mut looks, rest);
    }
    assert_eq!(looks.see(MANY - 1, 1_000), []);
    assert_eq!(looks.see(800, warm), [(warm, Begin)]);
    for rest in [500, 1_000] {
        vain(&mut looks, rest);
    }
    looks.told(true);
    let at = u64::from(SETTLING) + trial + 1_000;
    assert_eq!(looks.see(826, at).last(), Some(&(at, Rest)));
    looks.told(false);
    assert_eq!(looks.see(800, warm), [(warm, Begin)]);
    vain(&mut looks, 500);
}

// Many frames, then fewer from when we ask until we are told, as through an instance that nobody polls; as few when we go round, for a trial. Expect: it does not pay,
// as it is more before that.
#[test]
fn what_comes_once_it_was_asked_for_is_not_what_came_before() {
    let mut looks = Looks::new(true);
    assert_eq!(looks.see(800, u64::from(WARM)).len(), 1);
    looks.see(600, 30);
    looks.told(true);
    assert_eq!(looks.see(700, u64::from(SETTLING)), []);
    let asked = looks.see(700, u64::from(SHORT_TRIAL));
    assert_eq!(asked, [(u64::from(SHORT_TRIAL), Rest)]);
}

// Fewer frames when we go round, by one in nine; by one frame less than that. Expect: ended after a short trial; after a whole one.
#[test]
fn what_is_worse_is_ended_sooner() {
    for (frames, trial) in [(711, SHORT_TRIAL), (712, TRIAL)] {
        let mut looks = Looks::new(true);
        assert_eq!(looks.see(800, u64::from(WARM)).len(), 1);
        looks.told(true);
        assert_eq!(looks.see(MANY, u64::from(SETTLING)), []);
        let asked = looks.see(frames, u64::from(TRIAL));
        assert_eq!(asked.first(), Some(&(u64::from(trial), Rest)), "{frames}");
    }
}

// One frame in thirty-two more, after many, again and again; once not. Expect: it goes on for a second, two, at most eight, each time then compared with what comes by
// itself, also after the one in vain; after a second with few frames it is a second again.
#[test]
fn what_pays_goes_on_and_is_compared_anew() {
    let (warm, trial) = (u64::from(WARM), u64::from(SETTLING + TRIAL));
    let mut looks = Looks::new(true);
    assert_eq!(looks.see(400, 500).len(), 7);
    assert_eq!(looks.see(800, 2 * u64::from(TRIAL)), []);
    let pays = |looks: &mut Looks, good: u64| {
        looks.told(true);
        let said = looks.see(826, trial + good);
        let (last, said) = said.split_last().unwrap();
        assert_eq!(*last, (trial + good, Rest));
        assert!(said.iter().all(|(_, wish)| *wish == Begin));
        looks.told(false);
    };
    for good in [1_000, 2_000, 4_000, 8_000, 8_000] {
        pays(&mut looks, good);
        assert_eq!(looks.see(800, warm), [(warm, Begin)]);
    }
    looks.told(true);
    assert_eq!(looks.see(824, trial), [(trial, Rest)]);
    looks.told(false);
    assert_eq!(looks.see(800, 500), [(500, Begin)]);
    pays(&mut looks, 8_000);
    assert_eq!(looks.see(MANY - 1, 1_000), []);
    assert_eq!(looks.see(800, warm), [(warm, Begin)]);
    pays(&mut looks, 1_000);
}

// Bursts of 40 ms, half as many frames again when we go round, and two looks without any in the middle of each trial. Expect: asked for in each burst as soon as it can be, and let off at its end,
// with no rest: no trial is in vain. One that comes after so long a burst that its trial ends: it pays.
#[test]
fn a_pause_in_a_trial_is_no_evidence() {
    let warm = u64::from(WARM);
    let mut looks = Looks::new(true);
    for _ in 0..5 {
        assert_eq!(looks.see(800, warm), [(warm, Begin)]);
        looks.told(true);
        assert_eq!(looks.see(1_200, 20), []);
        assert_eq!(looks.see(FEW - 1, 2), []);
        assert_eq!(looks.see(1_200, 2), []);
        assert_eq!(looks.see(0, u64::from(CALM)), [(u64::from(CALM), End)]);
        looks.told(false);
        assert_eq!(looks.see(0, 10), []);
    }
    assert_eq!(looks.see(800, warm), [(warm, Begin)]);
    looks.told(true);
    assert_eq!(looks.see(1_200, 20), []);
    assert_eq!(looks.see(FEW - 1, 2), []);
    assert_eq!(looks.see(850, 500), []);
}

// Going round, and few frames as long as we do, again and again; the second time three looks with many come first, the third time four. Expect: in vain at first and the second time, rested for
// longer the second time; an end like others the third time.
#[test]
fn frames_that_come_no_more_as_we_go_round_are_a_trial_in_vain() {
    let (warm, calm) = (u64::from(WARM), u64::from(CALM));
    let mut looks = Looks::new(true);
    assert_eq!(looks.see(800, warm), [(warm, Begin)]);
    for (kept_back, at, rest) in [(0, calm + 1, 500), (3, calm, 1_000)] {
        looks.told(true);
        assert_eq!(looks.see(800, kept_back), []);
        assert_eq!(looks.see(0, calm + 1), [(at, Rest)]);
        looks.told(false);
        assert_eq!(looks.see(800, rest)[0], (rest - 1, Begin));
    }
    looks.told(true);
    assert_eq!(looks.see(800, 4), []);
    assert_eq!(looks.see(0, calm + 1), [(calm, End)]);
}

// Plainly fewer frames when we go round, again and again, and after each trial a pause of three looks, or of four. Expect: rested to the end after three; after four asked for in the next
// burst, but not the fifth time; and never so where another engine has the core in turns.
#[test]
fn a_rest_ends_at_a_pause_unless_it_was_often_in_vain() {
    let warm = u64::from(WARM);
    for (pause, another, early) in [
        (3, false, [false; 5]),
        (4, false, [true, true, true, true, false]),
        (4, true, [false; 5]),
    ] {
        let mut looks = Looks::beside(true, another);
        assert_eq!(looks.see(800, warm), [(warm, Begin)]);
        for (early, rest) in early.into_iter().zip([500, 1_000, 2_000, 4_000, 8_000]) {
            looks.told(true);
            let asked = looks.see(600, u64::from(SETTLING + TRIAL));
            assert_eq!(asked[0].1, Rest);
            looks.told(false);
            looks.see(MANY / 2 - 1, pause);
            let (first, wish) = looks.see(800, rest + 1)[0];
            assert_eq!((first == warm, wish), (early, Begin), "{pause} {rest}");
        }
    }
}
