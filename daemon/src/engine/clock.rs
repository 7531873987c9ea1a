//! The time of a turn: CLOCK_MONOTONIC, and between two looks at it the processor's counter.
//!
//! **Problem.** Every turn asks for the time. The vDSO answers in some 20 ns, and reads the counter behind a fence, so it waits for all that
//! was loaded before; in a turn that comes from another core.
//!
//! **Idea.** No turn needs it that exactly. The kernel is asked once in [`TRUSTED_NS`]; in between the counter's ticks since then are
//! added, which wait for nothing, at the speed that they had over [`MEASURED_NS`].
//!
//! **Invariants.** Time never goes back. It differs from the kernel's by at most [`TRUSTED_NS`], whatever the counter does (a guest that was moved, a sleep, processors
//! that count differently), and by at most a microsecond or so where it counts as it did. How a test breaks them: a counter that jumps, stands still or changes its speed, a
//! process that is kept from its core between two reads.
//!
//! **Rejected.** CLOCK_MONOTONIC_COARSE, 5 ns, but of the last tick, which is up to 10 ms old. The counter alone: the kernel adjusts the speed of its clock.

use portolan_transport::ident::Nanos;

/// How long the counter is gone by.
const TRUSTED_NS: Nanos = 1_000_000;
/// Over how long its speed is measured, at least.
const MEASURED_NS: Nanos = 10_000_000;
/// Two measurements that differ by more than one part in so many are of a counter that jumped.
const STEADY: u64 = 1_000;
/// Ticks that asking the kernel may take; some microseconds.
const UNDISTURBED: u64 = 1 << 13;
const ATTEMPTS: u32 = 3;

/// Where time comes from.
pub trait Source {
    /// The kernel's CLOCK_MONOTONIC.
    fn kernel(&self) -> Nanos;
    /// The counter, or 0 if it is not to be used.
    fn ticks(&self) -> u64;
}

/// The machine's.
pub struct Machine {
    counts: bool,
}

impl Machine {
    /// The counter is used where the kernel goes by it as well. Reads a file.
    pub fn new() -> Self {
        let file = "/sys/devices/system/clocksource/clocksource0/current_clocksource";
        let source = std::fs::read_to_string(file).unwrap_or_default();
        Self {
            counts: cfg!(target_arch = "x86_64") && ["tsc", "kvm-clock"].contains(&source.trim()),
        }
    }
}

impl Source for Machine {
    fn kernel(&self) -> Nanos {
        super::now()
    }

    #[inline]
    fn ticks(&self) -> u64 {
        #[cfg(target_arch = "x86_64")]
        if self.counts {
            // SAFETY: every processor of the architecture has it.
            return unsafe { std::arch::x86_64::_rdtsc() };
        }
        0
    }
}

/// A moment by both.
#[derive(Clone, Copy, Default)]
struct Moment {
    ticks: u64,
    ns: Nanos,
}

/// The clock.
pub struct Clock<S = Machine> {
    source: S,
    asked: Moment,
    /// Ticks since then that the counter is gone by; 0: it is not.
    trusted: u64,
    /// Nanoseconds in 2³² ticks.
    speed: u64,
    /// What was found the last time, and since when it is measured again.
    measured: u64,
    since: Moment,
    latest: Nanos,
}

impl<S: Source> Clock<S> {
    pub fn new(source: S) -> Self {
        Self {
            source,
            asked: Moment::default(),
            trusted: 0,
            speed: 0,
            measured: 0,
            since: Moment::default(),
            latest: 0,
        }
    }

    /// What time it is.
    #[inline]
    pub fn now(&mut self) -> Nanos {
        let passed = self.source.ticks().wrapping_sub(self.asked.ticks);
        let now = match passed < self.trusted {
            true => self.asked.ns + ((passed * self.speed) >> 32),
            false => self.ask(),
        };
        self.latest = self.latest.max(now);
        self.latest
    }

    #[cold]
    fn ask(&mut self) -> Nanos {
        self.trusted = 0;
        for _ in 0..ATTEMPTS {
            let before = self.source.ticks();
            let ns = self.source.kernel();
            let ticks = self.source.ticks();
            self.asked = Moment { ticks, ns };
            if ticks == 0 {
                break;
            }
            // Otherwise we were kept from our core, before or after the kernel looked.
            if ticks.wrapping_sub(before) < UNDISTURBED {
                self.measure();
                break;
            }
        }
        self.asked.ns
    }

    /// How fast it counts, and so how far it is believed.
    fn measure(&mut self) {
        let ns = self.asked.ns.saturating_sub(self.since.ns);
        if ns >= MEASURED_NS {
            let ticks = self.asked.ticks.wrapping_sub(self.since.ticks);
            let speed = (u128::from(ns) << 32) / u128::from(ticks.max(1));
            let speed = u64::try_from(speed).unwrap_or(0);
            let steady = speed.abs_diff(self.measured) <= self.measured / STEADY;
            self.speed = if steady { speed } else { 0 };
            (self.measured, self.since) = (speed, self.asked);
        }
        self.trusted = (TRUSTED_NS << 32).checked_div(self.speed).unwrap_or(0);
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    /// A kernel's clock and a counter, both as told.
    #[derive(Default)]
    struct Told {
        ns: Cell<Nanos>,
        ticks: Cell<u64>,
        /// Passes while the kernel is asked.
        disturbed: Cell<Nanos>,
        asked: Cell<u64>,
    }

    /// Ticks per nanosecond, times ten.
    const FAST: u64 = 23;

    impl Told {
        fn pass(&self, ns: Nanos) {
            self.ns.set(self.ns.get() + ns);
            self.ticks
                .set(self.ticks.get().wrapping_add(ns * FAST / 10));
        }
    }

    impl Source for &Told {
        fn kernel(&self) -> Nanos {
            self.asked.set(self.asked.get() + 1);
            let ns = self.ns.get();
            self.pass(self.disturbed.get());
            ns
        }

        fn ticks(&self) -> u64 {
            self.ticks.get()
        }
    }

    fn told() -> Told {
        let told = Told::default();
        told.ns.set(5_000_000_000);
        // It wraps soon.
        told.ticks.set(u64::MAX - 100_000_000);
        told
    }

    /// Goes on for so long in steps of a few microseconds. Expect: never back, and never further from the kernel than this.
    fn go_on(clock: &mut Clock<&Told>, told: &Told, for_ns: Nanos, within: Nanos) {
        let (end, mut last) = (told.ns.get() + for_ns, 0);
        while told.ns.get() < end {
            told.pass(3_170);
            let now = clock.now();
            assert!(
                now >= last && now.abs_diff(told.ns.get()) <= within,
                "{now} {}",
                told.ns.get()
            );
            last = now;
        }
    }

    // A steady counter that wraps. Expect: right to a few nanoseconds, and the kernel is asked once a millisecond.
    #[test]
    fn the_kernel_is_asked_now_and_then() {
        let told = told();
        let mut clock = Clock::new(&told);
        go_on(&mut clock, &told, 3 * MEASURED_NS, 5);
        let before = told.asked.get();
        go_on(&mut clock, &told, 100 * TRUSTED_NS, 5);
        let asked = told.asked.get() - before;
        assert!((90..=110).contains(&asked), "{asked}");
    }

    // The counter jumps ahead, back, by little and by much, stands still, and runs at another speed. Expect: never back, never wrong by more than a
    // millisecond, and right again soon.
    #[test]
    fn a_counter_that_jumps_is_not_believed_for_long() {
        let told = told();
        let mut clock = Clock::new(&told);
        go_on(&mut clock, &told, 5 * MEASURED_NS, 5);
        let jumps = [300, 100_000, 1_500_000, 1 << 40, u64::MAX / 2];
        for by in jumps.into_iter().flat_map(|by| [by, by.wrapping_neg()]) {
            told.ticks.set(told.ticks.get().wrapping_add(by));
            go_on(&mut clock, &told, 5 * MEASURED_NS, TRUSTED_NS);
            go_on(&mut clock, &told, MEASURED_NS, 5);
        }
        let stood = told.ticks.get();
        for _ in 0..1_000 {
            told.pass(10_000);
            told.ticks.set(stood);
            // As wrong as it stands still; nothing else could tell.
            clock.now();
        }
        told.ticks.set(stood.wrapping_add(TRUSTED_NS * FAST));
        go_on(&mut clock, &told, 5 * MEASURED_NS, TRUSTED_NS);
        go_on(&mut clock, &told, MEASURED_NS, 5);
    }

    // Whenever the kernel is asked, the process loses its core for a while. Expect: it is asked each time, and never wrong by more than that while.
    #[test]
    fn who_was_kept_from_the_core_asks_again() {
        let told = told();
        let mut clock = Clock::new(&told);
        go_on(&mut clock, &told, 5 * MEASURED_NS, 5);
        told.disturbed.set(50_000);
        let before = told.asked.get();
        go_on(&mut clock, &told, 10 * TRUSTED_NS, 50_000);
        assert!(told.asked.get() - before > 3);
        told.disturbed.set(0);
        go_on(&mut clock, &told, 5 * MEASURED_NS, TRUSTED_NS);
        go_on(&mut clock, &told, MEASURED_NS, 5);
    }

    // No counter. Expect: the kernel's time, each time.
    #[test]
    fn without_a_counter_the_kernel_is_asked() {
        struct Kernel;
        impl Source for Kernel {
            fn kernel(&self) -> Nanos {
                super::super::now()
            }
            fn ticks(&self) -> u64 {
                0
            }
        }
        let mut clock = Clock::new(Kernel);
        for _ in 0..1_000 {
            let before = super::super::now();
            let now = clock.now();
            assert!((before..=super::super::now()).contains(&now));
        }
    }

    // The machine's own, for a tenth of a second. Expect: never back, and between the kernel's before and after or nearly so, unless the process was kept from its core.
    #[test]
    fn the_machines_clock_is_the_kernels() {
        let mut clock = Clock::new(Machine::new());
        let begin = super::super::now();
        let (mut last, mut far, mut all) = (0, 0u32, 0u32);
        loop {
            let before = super::super::now();
            let now = clock.now();
            let after = super::super::now();
            assert!(now >= last);
            last = now;
            all += 1;
            far += u32::from(now + 2_000 < before || now > after + 2_000);
            assert!(now + TRUSTED_NS >= before && now <= after + TRUSTED_NS);
            if after - begin > 100_000_000 {
                break;
            }
        }
        assert!(far <= all / 10, "{far} of {all}");
    }
}
