//! What the project set out to reach, held against what was found. A goal whose cases were not measured is not judged.

use super::{Line, Results};
use crate::cases::{Case, Wait};
use crate::subjects::metric;

/// A goal and what became of it.
#[derive(Clone, Debug)]
pub struct Goal {
    /// What is measured.
    pub what: String,
    /// The value.
    pub found: String,
    /// The bound.
    pub wanted: String,
    /// Whether it is kept.
    pub is_reached: bool,
}

enum Bound {
    AtMost(f64),
    AtLeast(f64),
    Below(f64),
}

/// What is said of a ratio to a limit that dropped frames.
const PROVES_NOTHING: &str = " (the limit dropped frames: proves nothing)";

/// Every goal that can be judged. To be faster than a limit that dropped frames is no merit: such a goal is not reached.
pub fn judge(results: &Results) -> Vec<Goal> {
    let lines = results.lines();
    let ours = |case: &Case, metric| find(&lines, case, "portolan", metric);
    let mut goals = Vec::new();
    let mut add = |what: String, found: Option<f64>, bound: Bound, show: &dyn Fn(f64) -> String| {
        let Some(found) = found else { return };
        let (is_kept, wanted) = match bound {
            Bound::AtMost(most) => (found <= most, format!("at most {}", show(most))),
            Bound::Below(bound) => (found < bound, format!("below {}", show(bound))),
            Bound::AtLeast(least) => (found >= least, format!("at least {}", show(least))),
        };
        let is_reached = is_kept && !what.ends_with(PROVES_NOTHING);
        goals.push(Goal {
            what,
            found: show(found),
            wanted,
            is_reached,
        });
    };
    let ratio = |value: f64| format!("{value:.3}");
    let held_against = |case: &Case, limit: &str, metric| {
        let limit_line = find(&lines, case, limit, metric);
        let doubt = match limit_line.is_some_and(|line| line.note.is_some()) {
            true => PROVES_NOTHING,
            false => "",
        };
        format!("{case}, ratio to {limit}{doubt}")
    };

    let ping = Case::PingPong { bytes: 64 };
    let way = ours(&ping, metric::ONE_WAY);
    let relay = find(&lines, &ping, "limit-relay", metric::ONE_WAY);
    let found = way.and_then(|line| line.ratio);
    add(
        format!("{ping}, ratio to limit-relay"),
        found,
        Bound::AtMost(1.15),
        &ratio,
    );
    if let (Some(ours), Some(relay)) = (way.and_then(tail), relay.and_then(tail)) {
        let what = format!("{ping}, p99.9/p50 over limit-relay's");
        add(what, Some(ours / relay), Bound::AtMost(2.0), &ratio);
    }
    for peer in ["libfabric-tcp", "libfabric-rxd", "openmpi-tcp"] {
        let found = results.between(&ping, metric::ONE_WAY, "portolan", peer);
        let what = format!("{ping}, ratio to {peer}");
        add(what, found, Bound::Below(1.0), &ratio);
    }
    if let (Some(relay), Some(raw)) = (relay, find(&lines, &ping, "limit-raw-xdp", metric::ONE_WAY))
    {
        let what = format!(
            "{ping}, limit-relay over limit-raw-xdp (about 2.5: the limit is no straw man)"
        );
        add(
            what,
            Some(relay.value / raw.value),
            Bound::AtMost(2.8),
            &ratio,
        );
        // How many ways of a frame two switches take differs from processor to processor; that a relay has them does not.
        if let Some(switch) = find(&lines, &ping, "limit-switch", metric::ONE_WAY) {
            let what = format!("{ping}, limit-relay over limit-raw-xdp and two of limit-switch");
            let least = raw.value + 2.0 * switch.value;
            add(what, Some(relay.value / least), Bound::AtMost(1.25), &ratio);
        }
    }

    let rate = Case::Rate { bytes: 64 };
    let messages = ours(&rate, metric::RATE);
    let millions = |value: f64| format!("{:.3} M/s", value / 1e6);
    add(
        rate.to_string(),
        messages.map(|line| line.value),
        Bound::AtLeast(3e6),
        &millions,
    );
    let frames = messages.and_then(|line| line.ratio);
    add(
        held_against(&rate, "limit-raw-xdp", metric::RATE),
        frames,
        Bound::AtLeast(1.0),
        &ratio,
    );

    let found = results.between(&rate, metric::RATE, "portolan", "ucx-tcp");
    let what = format!("{rate}, ratio to ucx-tcp");
    add(what, found, Bound::AtLeast(8.0), &ratio);

    for case in results.cases.iter() {
        let Case::Stream { bytes, mtu } = case else {
            continue;
        };
        if *bytes != 1 << 20 {
            continue;
        }
        let found = ours(case, metric::THROUGHPUT).and_then(|line| line.ratio);
        let what = held_against(case, "limit-relay-crc", metric::THROUGHPUT);
        add(what, found, Bound::AtLeast(0.95), &ratio);
        // Our engines may go round for frames, so a limit that does is the harder one.
        let polled = "limit-relay-crc-polled";
        let found = results.between(case, metric::THROUGHPUT, "portolan", polled);
        let what = format!("{case}, ratio to {polled}");
        add(what, found, Bound::AtLeast(0.95), &ratio);
        // However its users wait for it: asleep in its calls it is the faster one with segmentation offload, awake without.
        let against: &[&str] = match mtu {
            9000 => &[
                "kernel-tcp-nogso",
                "kernel-tcp-blocking-nogso",
                "kernel-tcp",
                "kernel-tcp-blocking",
            ],
            _ => &["kernel-tcp-nogso", "kernel-tcp-blocking-nogso"],
        };
        for peer in against {
            let found = results.between(case, metric::THROUGHPUT, "portolan", peer);
            let what = format!("{case}, ratio to {peer}");
            add(what, found, Bound::AtLeast(1.0), &ratio);
        }
    }
    let points = results.half_power_points();
    let point = points.iter().find(|(name, _)| name == "portolan");
    let bytes = |value: f64| format!("{value:.0} bytes");
    add(
        "N/2".to_owned(),
        point.and_then(|(_, bytes)| *bytes),
        Bound::AtMost(1000.0),
        &bytes,
    );

    for case in [Case::FanIn { senders: 4 }, Case::Ports { ports: 16 }] {
        let found = ours(&case, metric::FAIRNESS).map(|line| line.value);
        add(format!("{case}, Jain"), found, Bound::AtLeast(0.98), &ratio);
    }
    // Two cores gain nothing by more engines; they are to lose nothing either.
    let case = Case::Queues { queues: 2 };
    let found = ours(&case, metric::THROUGHPUT).and_then(|line| line.ratio);
    let what = format!("{case}, ratio to one engine");
    add(what, found, Bound::AtLeast(0.95), &ratio);
    let wait = Wait::Adaptive;
    let idle = Case::Idle { wait };
    let percent = |value: f64| format!("{:.2} % of a core", value * 100.0);
    let us = |value: f64| format!("{:.1} us", value / 1e3);
    // As it is by default, and where processors of engines sleep at once, which an administrator may choose.
    for (subject, how) in [("portolan", ""), ("portolan-asleep", ", processors asleep")] {
        let of = |metric| find(&lines, &idle, subject, metric).map(|line| line.value);
        let share = of(metric::IDLE_CPU);
        add(format!("{idle}{how}"), share, Bound::AtMost(0.01), &percent);
        let what = format!("{idle}{how}, first message");
        add(what, of(metric::FIRST), Bound::AtMost(100e3), &us);
    }
    goals
}

fn find<'a>(lines: &'a [Line], case: &Case, subject: &str, metric: &str) -> Option<&'a Line> {
    let is = |line: &&Line| line.case == *case && line.subject == subject && line.metric == metric;
    lines.iter().find(is)
}

/// p99.9 over p50.
fn tail(line: &Line) -> Option<f64> {
    line.p999.map(|p999| p999 / line.value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::subjects::{About, Figure, unit};

    // Three million messages per second are the goal. Expect: reached at it, missed just below, not judged without a measurement.
    #[test]
    fn a_goal_is_judged_by_what_was_measured() {
        let rate = Case::Rate { bytes: 64 };
        let judged = |messages: Option<f64>| {
            let subjects = vec![("portolan".to_owned(), About::default())];
            let mut results = Results::new(subjects, vec![rate], 1, false);
            if let Some(messages) = messages {
                let figure = Figure::number(metric::RATE, messages, unit::PER_SECOND);
                results.add(&rate, "portolan", 0, vec![figure]);
            }
            judge(&results)
        };
        assert!(judged(Some(3e6))[0].is_reached);
        assert!(!judged(Some(2.999e6))[0].is_reached);
        assert!(judged(None).is_empty());
        // Nothing was held against the wire, so nothing is said of that.
        assert_eq!(judged(Some(3e6)).len(), 1);
    }

    // Eight times as many messages as UCX are the goal, and a shorter way than libfabric's. Expect: each judged by the turns, at its bound.
    #[test]
    fn peers_are_held_against_turn_by_turn() {
        let (rate, ping) = (Case::Rate { bytes: 64 }, Case::PingPong { bytes: 64 });
        let judged = |ucx: f64, fabric: u64| {
            let names = ["portolan", "ucx-tcp", "libfabric-tcp"];
            let subjects = names.map(|name| (name.to_owned(), About::default()));
            let mut results = Results::new(subjects.to_vec(), vec![rate, ping], 2, false);
            // A machine that slows down to the half changes no ratio.
            for (turn, speed) in [(0, 1.0), (1, 0.5)] {
                for (name, messages) in [("portolan", 8e6), ("ucx-tcp", ucx)] {
                    let figure = Figure::number(metric::RATE, messages * speed, unit::PER_SECOND);
                    results.add(&rate, name, turn, vec![figure]);
                }
                for (name, way) in [("portolan", 4000), ("libfabric-tcp", fabric)] {
                    let mut times = crate::actor::histogram().unwrap();
                    times.record((way as f64 / speed) as u64).unwrap();
                    results.add(
                        &ping,
                        name,
                        turn,
                        vec![Figure::times(metric::ONE_WAY, times)],
                    );
                }
            }
            let goals = judge(&results);
            ["ucx", "libfabric-tcp"].map(|name| {
                let goal = goals.iter().find(|goal| goal.what.contains(name));
                goal.unwrap().is_reached
            })
        };
        assert_eq!(judged(1e6, 8000), [true, true]);
        assert_eq!(judged(1.01e6, 4000), [false, false]);
    }

    // A relay, the wire and a switch, in us. Expect: no straw man at a quarter more than the wire and two switches, one above that, however many times the wire it takes.
    #[test]
    fn a_relay_is_held_against_its_parts() {
        let ping = Case::PingPong { bytes: 64 };
        let judged = |ways: [u64; 3]| {
            let names = ["limit-relay", "limit-raw-xdp", "limit-switch"];
            let subjects = names.map(|name| (name.to_owned(), About::default()));
            let mut results = Results::new(subjects.to_vec(), vec![ping], 1, false);
            for (name, way) in names.into_iter().zip(ways) {
                let mut times = crate::actor::histogram().unwrap();
                times.record(way).unwrap();
                results.add(&ping, name, 0, vec![Figure::times(metric::ONE_WAY, times)]);
            }
            let goals = judge(&results);
            let goal = goals.iter().find(|goal| goal.what.contains("switch"));
            goal.unwrap().is_reached
        };
        assert!(judged([4_200, 1_200, 1_200]));
        assert!(!judged([4_600, 1_200, 1_200]));
        assert!(judged([4_600, 1_200, 1_400]));
    }

    // Twice as many messages as the wire's limit moves frames; in one run that limit dropped some. Expect: reached only in the other.
    #[test]
    fn a_limit_that_dropped_frames_proves_nothing() {
        let rate = Case::Rate { bytes: 64 };
        let judged = |note: Option<String>| {
            let subjects = ["portolan", "limit-raw-xdp"].map(|n| (n.to_owned(), About::default()));
            let mut results = Results::new(subjects.to_vec(), vec![rate], 1, false);
            let figure = |value| Figure::number(metric::RATE, value, unit::PER_SECOND);
            results.add(&rate, "portolan", 0, vec![figure(2e6)]);
            results.add(&rate, "limit-raw-xdp", 0, vec![figure(1e6).with_note(note)]);
            let goals = judge(&results);
            let goal = goals.iter().find(|goal| goal.what.contains("raw-xdp"));
            goal.unwrap().is_reached
        };
        assert!(judged(None));
        assert!(!judged(Some("7 frames found no room".to_owned())));
    }
}
