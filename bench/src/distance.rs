//! How far the two cores are from each other, which decides what everything costs that goes from one node to the other.
//!
//! Problem: the processors of a virtual machine are threads of its host, which moves them. On an EPYC guest a cache line went to the other core and back
//! in 55 ns at one moment (one core for both, so it seems), in 130 at the next (one cache), in 560 a second later (another socket), and streams
//! were a third slower then. Two turns that met different distances are not to be compared, and nobody saw it.
//!
//! Idea: ask just before and just after each measurement, and say what was found. Who compares two builds can have each measurement wait until the cores are near
//! (`--near`).

use std::hint::spin_loop;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, sched_setaffinity};

/// A line that takes longer there and back comes from another socket: within one, 50 to 200 ns are usual, between two 350 and more.
pub const NEAR_NS: u64 = 250;

/// Times that are taken, of so many ways there and back each.
const TIMES: usize = 50;
const WAYS: u32 = 60;
/// Who shares a core with somebody who has it for longer is not there.
const PATIENCE: Duration = Duration::from_millis(50);
/// Looks between two looks at the clock.
const LOOKS: u32 = 1 << 12;
/// How long a measurement waits for cores that are near, and how long between two looks.
const NEAR_WITHIN: Duration = Duration::from_secs(2);
const NEAR_EVERY: Duration = Duration::from_millis(10);

/// A number in a cache line of its own, and in the pair of lines that some processors fetch.
#[repr(align(128))]
#[derive(Default)]
struct Line(AtomicU32);

/// Nanoseconds that a cache line takes from the first core to the second and back. Others may use the cores meanwhile: it is the lower quartile of some
/// fifty times. None if one of them cannot be had.
pub fn round_trip([here, there]: [usize; 2]) -> Option<u64> {
    let (ask, answer, over) = (Line::default(), Line::default(), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let is_there = go_to(there);
            let mut seen = 0;
            while is_there && !over.load(Ordering::Relaxed) {
                let asked = ask.0.load(Ordering::Acquire);
                if asked != seen {
                    seen = asked;
                    answer.0.store(seen, Ordering::Release);
                }
            }
        });
        let asker = scope.spawn(|| {
            let times = go_to(here).then(|| times(&ask, &answer)).flatten();
            over.store(true, Ordering::Relaxed);
            times
        });
        let mut times = asker.join().ok().flatten()?;
        times.sort_unstable();
        times.get(times.len() / 4).copied()
    })
}

/// Waits, but not for ever, until the cores are near each other; tells how far they are then.
pub fn when_near(cores: [usize; 2]) -> Option<u64> {
    let deadline = Instant::now() + NEAR_WITHIN;
    loop {
        let found = round_trip(cores);
        if found.is_none_or(|ns| ns <= NEAR_NS) || Instant::now() >= deadline {
            return found;
        }
        std::thread::sleep(NEAR_EVERY);
    }
}

/// Has the calling thread run on that core.
fn go_to(core: usize) -> bool {
    let mut set = CpuSet::new();
    set.set(core);
    sched_setaffinity(None, &set).is_ok()
}

/// Nanoseconds there and back, time after time; none if an answer does not come.
fn times(ask: &Line, answer: &Line) -> Option<Vec<u64>> {
    let deadline = Instant::now() + PATIENCE;
    let mut times = Vec::with_capacity(TIMES);
    let mut asked = 0;
    while times.len() < TIMES {
        let began = Instant::now();
        for _ in 0..WAYS {
            asked += 1;
            ask.0.store(asked, Ordering::Release);
            let mut looks = 0u32;
            while answer.0.load(Ordering::Acquire) != asked {
                spin_loop();
                looks += 1;
                if looks.is_multiple_of(LOOKS) && Instant::now() >= deadline {
                    return None;
                }
            }
        }
        times.push(began.elapsed().as_nanos() as u64 / u64::from(WAYS));
    }
    Some(times)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use rustix::thread::sched_getaffinity;

    use super::*;

    // Two cores, and one that does not exist. Expect: what light and memory allow; nothing, and an end.
    #[test]
    fn a_line_takes_its_time_between_two_cores() {
        let allowed = sched_getaffinity(None).unwrap();
        let cores: Vec<usize> = (0..CpuSet::MAX_CPU)
            .filter(|&core| allowed.is_set(core))
            .collect();
        // Beside others a core may not be had at once.
        let found = (0..100).find_map(|_| round_trip([cores[0], cores[1]]));
        assert!((10..100_000).contains(&found.unwrap()), "{found:?}");
        let nowhere = CpuSet::MAX_CPU - 1;
        assert_eq!(round_trip([cores[0], nowhere]), None);
        assert_eq!(round_trip([nowhere, cores[1]]), None);
    }
}
