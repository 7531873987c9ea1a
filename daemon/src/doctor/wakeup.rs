//! How long an idle processor takes to wake, measured: what the first message after a pause waits for, once for each processor on its way that sleeps.

use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use super::{Findings, Patient};
use crate::engine_link::Wait;

/// Times it is woken, and how long it sleeps before each: deep sleeps come after some tens of milliseconds.
const TIMES: usize = 5;
const ASLEEP: Duration = Duration::from_millis(200);
/// Whoever may use its processor at all has been woken so many times within this.
const WITHIN: Duration = Duration::from_secs(6);
/// Longer is worth a word. The lightest sleep of real processors takes 1 or 2 us, to which the kernel's own way of waking a thread comes.
const LONG: Duration = Duration::from_micros(30);

pub(super) fn look(patient: &Patient, findings: &mut Findings) {
    let Some(config) = &patient.config else {
        return;
    };
    if config.wait != Wait::Adaptive {
        findings.ok("wake-up", "engines never sleep");
        return;
    }
    match measure(config.cores.first().copied()) {
        Ok(Some(median)) => judge(median, config.cpu_latency_us, config.keep_awake, findings),
        Ok(None) => findings.ok("wake-up", "one processor: nobody to wake it"),
        Err(error) => findings.warn(
            "wake-up",
            format!("how long an idle processor takes to wake cannot be measured: {error}"),
            "portolan doctor   # again, as root",
        ),
    }
}

fn judge(median: Duration, bound: Option<u32>, keep_awake: Duration, findings: &mut Findings) {
    let us = median.as_micros();
    let what = format!("an idle processor takes {us} us to wake");
    match bound {
        _ if median <= LONG => findings.ok("wake-up", what),
        Some(0) => findings.warn(
            "wake-up",
            format!("{what}, although node.cpu_latency_us = 0"),
            "systemctl reload-or-restart portoland   # it is in force while the daemon runs",
        ),
        _ if keep_awake.is_zero() => findings.warn(
            "wake-up",
            format!("{what}: the first message after a pause waits for that, and for each processor on its way"),
            "engine.keep_awake_ms = 2000, or node.cpu_latency_us = 2, in a virtual machine 0   # which costs power: docs/nic.md, Cores and interrupts",
        ),
        _ => findings.ok(
            "wake-up",
            format!("{what}: the first message waits for that after more than {} ms without one", keep_awake.as_millis()),
        ),
    }
}

/// The median of some times that a thread on this processor, or on any, is woken by one on another; `None` if we may use only one.
fn measure(core: Option<usize>) -> Result<Option<Duration>, String> {
    let allowed = sched_getaffinity(None).map_err(|error| error.to_string())?;
    let all: Vec<usize> = (0..CpuSet::MAX_CPU)
        .filter(|c| allowed.is_set(*c))
        .collect();
    let sleeper = core
        .filter(|core| all.contains(core))
        .or(all.last().copied());
    let waker = all.iter().copied().find(|core| Some(*core) != sleeper);
    let (Some(sleeper), Some(waker)) = (sleeper, waker) else {
        return Ok(None);
    };
    // Without room: who rings hands the time over to who waits for it.
    let (ring, bell) = sync_channel(0);
    let (tell, told) = sync_channel(2);
    let complain = tell.clone();
    // Nobody joins them: one that never gets its processor, as somebody spins there in real time, is left behind.
    thread::spawn(move || tell.send(sleep(sleeper, &bell)));
    thread::spawn(move || {
        if let Err(error) = wake(waker, &ring) {
            let _ = complain.send(Err(error));
        }
    });
    let mut times = told
        .recv_timeout(WITHIN)
        .map_err(|_| format!("nobody gets processor {sleeper} or {waker}"))??;
    times.sort_unstable();
    let median = times.get(times.len() / 2).copied();
    median
        .map(Some)
        .ok_or_else(|| format!("nobody rang on processor {waker}"))
}

/// How long each ring took to wake us, until nobody rings any more.
fn sleep(core: usize, bell: &Receiver<Instant>) -> Result<Vec<Duration>, String> {
    bind(core)?;
    let mut times = Vec::new();
    while let Ok(rung) = bell.recv() {
        times.push(rung.elapsed());
    }
    Ok(times)
}

/// Rings now and then.
fn wake(core: usize, ring: &SyncSender<Instant>) -> Result<(), String> {
    bind(core)?;
    for _ in 0..TIMES {
        thread::sleep(ASLEEP);
        // Who sleeps no longer says why itself.
        if ring.send(Instant::now()).is_err() {
            break;
        }
    }
    Ok(())
}

/// Has this thread run on one processor.
fn bind(core: usize) -> Result<(), String> {
    let mut cores = CpuSet::new();
    cores.set(core);
    sched_setaffinity(None, &cores).map_err(|error| format!("processor {core}: {error}"))
}

#[cfg(test)]
mod tests {
    use super::super::Severity;
    use super::*;

    // Expect: as many times as were asked for, of which the middle one is more than nothing and less than the pause between two; or nothing, where there is one processor.
    #[test]
    fn a_processor_is_woken() {
        let processors = thread::available_parallelism().unwrap().get();
        match measure(Some(0)).unwrap() {
            Some(median) => assert!(median > Duration::ZERO && median < ASLEEP, "{median:?}"),
            None => assert_eq!(processors, 1),
        }
    }

    #[test]
    fn a_long_time_is_worth_a_word() {
        let (asleep, kept) = (Duration::ZERO, Duration::from_millis(2000));
        for (us, bound, awake, severity, words) in [
            (30, None, asleep, Severity::Ok, "takes 30 us to wake"),
            (31, None, asleep, Severity::Warn, "after a pause"),
            (31, Some(20), asleep, Severity::Warn, "after a pause"),
            (31, Some(0), kept, Severity::Warn, "although node.cpu"),
            (31, Some(20), kept, Severity::Ok, "after more than 2000 ms"),
        ] {
            let mut findings = Findings::default();
            judge(Duration::from_micros(us), bound, awake, &mut findings);
            let [finding] = findings.0.as_slice() else {
                panic!("{findings:?}")
            };
            assert_eq!(finding.severity, severity, "{us}");
            assert!(finding.what.contains(words), "{}", finding.what);
        }
    }
}
