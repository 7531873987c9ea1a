//! Going round for frames ourselves, instead of having whoever sends do it.
//!
//! **Problem.** Behind a veth the kernel's way of a frame to our socket runs on the core that sent it, with all the rest of the sender's
//! work: that is what bounds a stream, while the receiver waits for it.
//!
//! **Idea.** Where the interface has a NAPI instance, it can be told not to go round by itself as long as a process does
//! (Documentation/networking/napi.rst, *Busy polling*). The sender then only puts frames into a queue, and the rest of their way runs on our core. Each of our looks
//! is a system call, and a frame waits for it, so this is for when there are many: an engine that sees many asks its supervisor, which may do what it
//! takes (`supervisor/busy_poll.rs`), and goes round from the answer on until it is told otherwise.
//!
//! Whether that brings more depends on who is busier: several senders spread the kernel's work over their cores, and one receiver would do all of it. So
//! an engine counts frames before and after, and asks to be let off if there are not more ([`Judge`]); it tries again later, and now and then while it goes
//! round, as senders come and go.
//!
//! | | frames come by themselves | we go round |
//! |---|---|---|
//! | many for [`WARM`] looks more than not | ask | |
//! | few for [`CALM`] looks more than not | | ask to be let off |
//! | not more frames after [`TRIAL`] looks than before, or plainly fewer after [`SHORT_TRIAL`] | | ask to be let off, for [`RETRY_NS`] and longer \* |
//! | more, for [`BELIEVED_NS`] and longer | | ask to be let off, to compare anew \* |
//! | told so | begin | once more, for what came meanwhile; end |
//!
//! \* And the instance given up, if the interface has it for our sake: frames that come by themselves take longer through one.
//!
//! A look is what counts a millisecond of work. An engine that goes round does not sleep: nobody else would see a frame come.
//!
//! **Rejected.** To go by bytes or by the kind of work: what it brings is a matter of cores, and these are not ours to see.

use std::os::fd::OwnedFd;

use portolan_transport::ident::Nanos;
use portolan_transport::policy::Policy;
use rustix::net::RecvFlags;

/// Frames that the kernel takes in a row when we go round. It does so twice, the second time as it lets go of the instance (`busy_poll_stop`).
pub(crate) const BUDGET: u32 = 32;
/// Most frames that one look brings.
pub const FRAMES_PER_LOOK: u32 = 2 * BUDGET;
/// Frames per millisecond that are many: more than an exchange of short messages has, or a stream of them; and few. Half as many for an engine that shares its core.
const MANY: u64 = 200;
const FEW: u64 = 60;
/// Looks with so many more than with fewer, or the other way round. Not in a row: of two engines on one core each has it for a millisecond or three, and sees nothing of
/// the other's.
const WARM: u32 = 16;
const CALM: u32 = 4;
/// Looks that are compared with those before; the first ones are not, as what comes then had been kept back.
const TRIAL: u32 = 32;
const SETTLING: u32 = 16;
/// So many of them are enough where there are fewer than eight frames for nine of before.
const SHORT_TRIAL: u32 = 8;
const WORSE: (u64, u64) = (9, 8);
/// It pays if there are more than thirty-three for thirty-two.
const BETTER: (u64, u64) = (33, 32);
/// How long a trial is believed that went well, and one that did not: twice and four times as long each time (of the second, each time in a row), up to the third,
/// until there were few frames for [`CALM_NS`]. The second is not long at first, as what shares a machine with us may decide a trial the wrong way (docs/tuning.md);
/// nor is it short, as a trial takes some 50 ms in which a stream may be a quarter slower: 3 % of the time between two.
const BELIEVED_NS: Nanos = 1_000_000_000;
const RETRY_NS: Nanos = 500_000_000;
const LONGEST_NS: Nanos = 8_000_000_000;
const CALM_NS: Nanos = 1_000_000_000;
/// Between two questions at first, which may find the supervisor learning; twice as long after each, up to the other.
const PAUSE_NS: Nanos = 5_000_000;
const LONG_PAUSE_NS: Nanos = 1_000_000_000;

/// What an engine would have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wish {
    /// Go round.
    Begin,
    /// Not any more, as there are few frames.
    End,
    /// Not for now, as it brings nothing, or to see whether it does.
    Rest,
}

/// Whether we go round, and whether it would be worth it.
pub struct BusyPoll {
    /// Polled; `None`: frames come by themselves.
    socket: Option<OwnedFd>,
    /// The last look, and frames by then.
    seen: Option<(Nanos, u64)>,
    /// Looks that were for a change, without as many that were not; no more than it takes.
    for_change: u32,
    ask_at: Nanos,
    pause: Nanos,
    judge: Option<Judge>,
    /// Asked to begin: what comes from now on may come through an instance already.
    begins: bool,
    shares_core: bool,
}

/// Frames over some time.
#[derive(Clone, Copy, Default)]
struct Rate {
    frames: u64,
    ns: Nanos,
}

impl Rate {
    fn add(&mut self, frames: u64, ns: Nanos) {
        self.frames = self.frames.saturating_add(frames);
        self.ns = self.ns.saturating_add(ns);
    }

    /// Counts what was long ago for less.
    fn fade(&mut self) {
        if self.ns > u64::from(2 * TRIAL) * 1_000_000 {
            (self.frames, self.ns) = (self.frames / 2, self.ns / 2);
        }
    }

    /// Whether there are more of these than so many for so many of the other.
    fn beats(self, other: Self, (more, than): (u64, u64)) -> bool {
        let ours = u128::from(self.frames) * u128::from(other.ns) * u128::from(than);
        let theirs = u128::from(other.frames) * u128::from(self.ns) * u128::from(more);
        ours > theirs
    }
}

/// What came of a trial.
#[derive(Clone, Copy, Default)]
enum Verdict {
    #[default]
    Open,
    /// For so long.
    Pays(Nanos),
    DoesNot,
}

/// Compares what came by itself with what came since we go round.
#[derive(Default)]
struct Judge {
    /// Of looks that were for asking.
    before: Rate,
    /// Since it settled.
    now: Rate,
    /// Looks since we go round.
    looks: u32,
    verdict: Verdict,
    /// Not asked before.
    rest_until: Nanos,
    /// How long the last trial that went well is believed; the last one that did not, or 0 after one that did.
    believed: Nanos,
    rested: Nanos,
    /// How long there were few frames.
    calm: Nanos,
}

impl Judge {
    /// Frames come by themselves, and there are many of them now, or were `of_late`. They do not count any more once we have asked to `begin`.
    fn without(&mut self, many: bool, of_late: bool, begins: bool, frames: u64, ns: Nanos) {
        if !of_late {
            self.before = Rate::default();
        } else if !begins {
            self.before.add(frames, ns);
            self.before.fade();
        }
        if many {
            self.calm = 0;
        } else {
            self.calm = self.calm.saturating_add(ns);
            if self.calm >= CALM_NS {
                (self.believed, self.rested) = (0, 0);
            }
        }
    }

    /// We go round. Says if we should not any more.
    fn with(&mut self, now: Nanos, frames: u64, ns: Nanos, short: bool) -> bool {
        match self.verdict {
            Verdict::Open => {}
            Verdict::Pays(until) => return now >= until,
            Verdict::DoesNot => return true,
        }
        self.looks = self.looks.saturating_add(1);
        if self.looks <= SETTLING {
            return false;
        }
        self.now.add(frames, ns);
        let worse =
            short && self.looks >= SETTLING + SHORT_TRIAL && self.before.beats(self.now, WORSE);
        if self.looks < SETTLING + TRIAL && !worse {
            return false;
        }
        let pays = self.now.beats(self.before, BETTER);
        let longer =
            |last: Nanos, times, least| last.saturating_mul(times).clamp(least, LONGEST_NS);
        if pays {
            (self.believed, self.rested) = (longer(self.believed, 2, BELIEVED_NS), 0);
            self.verdict = Verdict::Pays(now.saturating_add(self.believed));
        } else {
            self.rested = longer(self.rested, 4, RETRY_NS);
            self.verdict = Verdict::DoesNot;
            self.rest_until = now.saturating_add(self.rested);
        }
        !pays
    }

    /// We begin to, or end.
    fn changed(&mut self, begins: bool) {
        (self.looks, self.now, self.verdict) = (0, Rate::default(), Verdict::Open);
        if !begins {
            self.before = Rate::default();
        }
    }
}

impl BusyPoll {
    /// `compares`: ends it where it does not pay. `shares_core`: with another engine, whose turns make single looks say little.
    pub fn new(compares: bool, shares_core: bool) -> Self {
        Self {
            socket: None,
            seen: None,
            for_change: 0,
            ask_at: 0,
            pause: 0,
            judge: compares.then(Judge::default),
            begins: false,
            shares_core,
        }
    }

    /// Whether we go round.
    #[inline]
    pub fn is_on(&self) -> bool {
        self.socket.is_some()
    }

    /// Goes round once, if that is ours to do.
    #[inline]
    pub fn go_round(&self) {
        if let Some(socket) = &self.socket {
            go_round(socket);
        }
    }

    /// Told to begin, with this, or to end.
    pub fn told(&mut self, now: Nanos, socket: Option<OwnedFd>) {
        if socket.is_none() {
            if !self.is_on() {
                return;
            }
            // From now on frames come by themselves; those that came before do not.
            self.go_round();
        }
        if socket.is_some() != self.is_on()
            && let Some(judge) = &mut self.judge
        {
            judge.changed(socket.is_some());
        }
        self.socket = socket;
        self.begins = false;
        (self.for_change, self.pause) = (0, PAUSE_NS);
        self.ask_at = now.saturating_add(PAUSE_NS);
    }

    /// Looks at how many frames have come by now, about each millisecond. Says what to ask for.
    pub fn look(&mut self, now: Nanos, frames: u64) -> Option<Wish> {
        let (since, before) = self.seen.replace((now, frames))?;
        let (frames, ns) = (frames.saturating_sub(before), now.saturating_sub(since));
        let per_ms = frames / (ns / 1_000_000).max(1);
        let of_core = per_ms << u32::from(self.shares_core);
        let (change, enough) = match self.is_on() {
            true => (of_core < FEW, CALM),
            false => (of_core >= MANY, WARM),
        };
        let for_change = match change {
            true => (self.for_change + 1).min(enough),
            false => self.for_change.saturating_sub(1),
        };
        self.for_change = for_change;
        let mut asks = for_change == enough;
        let mut wish = match self.is_on() {
            true => Wish::End,
            false => Wish::Begin,
        };
        if let Some(judge) = &mut self.judge {
            if self.socket.is_none() {
                let of_late = for_change > 0;
                self.begins &= of_late;
                judge.without(change, of_late, self.begins, frames, ns);
                asks &= now >= judge.rest_until;
            } else if judge.with(now, frames, ns, !self.shares_core) {
                (asks, wish) = (true, Wish::Rest);
            }
        }
        if now < self.ask_at {
            return None;
        }
        if asks {
            self.begins = wish == Wish::Begin;
            let pause = self.pause.clamp(PAUSE_NS, LONG_PAUSE_NS);
            self.ask_at = now.saturating_add(pause);
            self.pause = pause.saturating_mul(2);
            return Some(wish);
        }
        // For a supervisor that was replaced: its successor knows nothing of it.
        if self.is_on() && now >= self.ask_at.saturating_add(LONG_PAUSE_NS) {
            self.ask_at = now;
            return Some(Wish::Begin);
        }
        None
    }
}

/// What a long message is granted at least by who goes round, where frames are at most so long: as much as a look brings, at an MTU of 9,000 twice what it is granted otherwise. With less
/// its sender has nothing that it may send while we read. Nothing of the kind where the policy is to grant less than ours does.
pub fn gulp(frame: usize, policy: &Policy) -> u32 {
    match policy.grant_bytes < Policy::default().grant_bytes {
        true => 0,
        false => frame as u32 * FRAMES_PER_LOOK,
    }
}

/// Has the kernel go round once for the queue that this socket has received through. Errors are the socket's, and there are none that matter.
pub(crate) fn go_round(socket: &OwnedFd) {
    let nothing: &mut [u8] = &mut [];
    let _ = rustix::net::recv(socket, nothing, RecvFlags::DONTWAIT);
}

#[cfg(test)]
mod tests {
    use super::Wish::{Begin, End, Rest};
    use portolan_transport::policy::Profile;

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
    // while after a trial, and once more at each pause until somebody answers; the next trial soon, then after four times as long each time, at most after eight
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
        for rest in [500, 2_000, 8_000, 8_000] {
            vain(&mut looks, rest);
        }
        assert_eq!(looks.see(MANY - 1, 1_000), []);
        assert_eq!(looks.see(800, warm), [(warm, Begin)]);
        for rest in [500, 2_000] {
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
}
