//! Whether an engine that shows no sign of life hangs.
//!
//! Problem: an engine that was merely not given a core looks like one that hangs. Its heartbeat stands still, too; on a busy
//! machine for tens of milliseconds. Wall time alone would kill the innocent.
//!
//! Idea: judge by the engine's own CPU clock. An engine that *used* `hang_after` of CPU time without coming round once hangs, whoever
//! else was running. One that uses none must say why by its state: *runnable* means that it waits for a core and is
//! never judged; *stopped* or *blocked* is judged by wall time, `stuck_after`. Half way to either bound it is challenged: asked to copy a
//! magic word (FTGM, section 4.1), which it does at the end of a loop. One that sleeps says until when, and is left alone until
//! `stuck_after` later.
//!
//! | seen | judged by | bound |
//! |---|---|---|
//! | heartbeat changed, or challenge answered | | all counts start anew |
//! | asleep until t, and t + stuck is not over | | |
//! | CPU clock advanced | CPU time since the first look at this heartbeat | `hang_after` |
//! | CPU clock stands, stopped or blocked | wall time in which every look saw it so | `stuck_after` |
//! | CPU clock stands, runnable | | never |
//!
//! What the clocks can do to us: the CPU clock lags by up to a tick (4 ms at 250 Hz) while the process runs, so up to a tick of
//! what was used before the first look may be counted as used since: `hang_after` must be well above one. Interrupts that hit the engine
//! are charged to it. The wall clock jumps when the whole machine was stopped, and the watchdog itself may be late; so no step between two
//! looks counts for more than twice the time between looks that was asked for.
//!
//! Pure: no clock, no process.

/// When an engine is thought to hang. Nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// Its own CPU time without a sign of life.
    pub hang_after_ns: u64,
    /// Wall time without one while it is stopped or blocked.
    pub stuck_after_ns: u64,
    /// It is challenged before.
    pub challenge: bool,
}

impl Bounds {
    /// The time between two looks.
    pub fn period_ns(&self) -> u64 {
        self.hang_after_ns.min(self.stuck_after_ns) / 4
    }
}

/// What is seen of an engine at one look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Look {
    /// CLOCK_MONOTONIC.
    pub now_ns: u64,
    /// The heartbeat word.
    pub heartbeat: u64,
    /// It has answered the last challenge.
    pub answered: bool,
}

/// What has to be asked of the kernel, if it comes to that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Condition {
    /// CPU time used.
    pub cpu_ns: u64,
    /// It could run: `R` in /proc/PID/stat.
    pub runnable: bool,
}

/// What to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Nothing.
    Innocent,
    /// Ask it for a sign of life.
    Challenge,
    /// It runs and does not come round: fence it.
    Hangs,
    /// It is stopped or blocked: fence it.
    Stuck,
}

const SLEEPING: u64 = portolan_abi::ledger::HEARTBEAT_SLEEPING;

/// The case of one engine.
#[derive(Debug)]
pub struct Judge {
    bounds: Bounds,
    heartbeat: u64,
    /// When the heartbeat was last seen to change.
    last_beat_ns: u64,
    last_look_ns: u64,
    /// CPU time when this heartbeat was seen for the second time.
    cpu_at_first: Option<u64>,
    cpu_at_last: u64,
    blocked_ns: u64,
    challenged: bool,
}

impl Judge {
    /// A new case: the engine has just said that it serves.
    pub fn new(bounds: Bounds, now_ns: u64, heartbeat: u64) -> Self {
        Self {
            bounds,
            heartbeat,
            last_beat_ns: now_ns,
            last_look_ns: now_ns,
            cpu_at_first: None,
            cpu_at_last: 0,
            blocked_ns: 0,
            challenged: false,
        }
    }

    /// When the heartbeat was last seen to change.
    pub fn last_beat_ns(&self) -> u64 {
        self.last_beat_ns
    }

    /// Looks. `ask` is called only if the heartbeat stands still; it returns `None` if the kernel does not say.
    pub fn look(&mut self, look: Look, ask: impl FnOnce() -> Option<Condition>) -> Verdict {
        let step = look.now_ns.saturating_sub(self.last_look_ns);
        let step = step.min(2 * self.bounds.period_ns());
        self.last_look_ns = look.now_ns;
        if look.heartbeat != self.heartbeat {
            self.heartbeat = look.heartbeat;
            self.last_beat_ns = look.now_ns;
            return self.acquit();
        }
        if self.challenged && look.answered {
            return self.acquit();
        }
        if look.heartbeat & SLEEPING != 0 {
            let wakes_at = look.heartbeat & !SLEEPING;
            if look.now_ns < wakes_at.saturating_add(self.bounds.stuck_after_ns) {
                return self.acquit();
            }
        }
        let Some(condition) = ask() else {
            return self.acquit();
        };
        let Some(first) = self.cpu_at_first else {
            self.cpu_at_first = Some(condition.cpu_ns);
            self.cpu_at_last = condition.cpu_ns;
            return Verdict::Innocent;
        };
        let stands = condition.cpu_ns == self.cpu_at_last;
        self.cpu_at_last = condition.cpu_ns;
        if stands && !condition.runnable {
            self.blocked_ns += step;
        } else {
            self.blocked_ns = 0;
        }
        let used_ns = condition.cpu_ns.saturating_sub(first);
        if used_ns >= self.bounds.hang_after_ns {
            return self.sentence(Verdict::Hangs);
        }
        if self.blocked_ns >= self.bounds.stuck_after_ns {
            return self.sentence(Verdict::Stuck);
        }
        let half_way = used_ns >= self.bounds.hang_after_ns / 2
            || self.blocked_ns >= self.bounds.stuck_after_ns / 2;
        if half_way && self.bounds.challenge && !self.challenged {
            self.challenged = true;
            return Verdict::Challenge;
        }
        Verdict::Innocent
    }

    /// Nobody is fenced who was not asked, even if the bound was passed at once.
    fn sentence(&mut self, verdict: Verdict) -> Verdict {
        if self.bounds.challenge && !self.challenged {
            self.challenged = true;
            return Verdict::Challenge;
        }
        verdict
    }

    fn acquit(&mut self) -> Verdict {
        self.cpu_at_first = None;
        self.blocked_ns = 0;
        self.challenged = false;
        Verdict::Innocent
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;
    const BOUNDS: Bounds = Bounds {
        hang_after_ns: 20 * MS,
        stuck_after_ns: 100 * MS,
        challenge: true,
    };

    /// What an engine does between two looks.
    #[derive(Clone, Copy)]
    enum Does {
        /// Comes round.
        Beats,
        /// Runs all the time, without.
        Spins,
        /// Waits for a core.
        Starves,
        /// Is stopped or blocked.
        Stands,
        /// Has gone to sleep for so long.
        Sleeps(u64),
    }
    use Does::*;

    struct Case {
        judge: Judge,
        now: u64,
        heartbeat: u64,
        cpu: u64,
        answers: bool,
    }

    impl Case {
        fn new(bounds: Bounds) -> Self {
            let (now, heartbeat) = (1_000 * MS, 7);
            Self {
                judge: Judge::new(bounds, now, heartbeat),
                now,
                heartbeat,
                cpu: 50 * MS,
                answers: false,
            }
        }

        /// One step of so long, then a look.
        fn step(&mut self, does: Does, long: u64) -> Verdict {
            self.now += long;
            match does {
                Beats => {
                    self.heartbeat = (self.heartbeat & !SLEEPING) + 1;
                    self.cpu += long;
                }
                Spins => self.cpu += long,
                Starves | Stands => {}
                Sleeps(for_ns) => self.heartbeat = SLEEPING | (self.now + for_ns),
            }
            let look = Look {
                now_ns: self.now,
                heartbeat: self.heartbeat,
                answered: self.answers,
            };
            let condition = Condition {
                cpu_ns: self.cpu,
                runnable: matches!(does, Beats | Spins | Starves),
            };
            self.judge.look(look, || Some(condition))
        }

        /// Until something is decided; how long that took.
        fn until(&mut self, does: Does, verdict: Verdict) -> u64 {
            let start = self.now;
            let period = self.judge.bounds.period_ns();
            for _ in 0..10_000 {
                let decided = self.step(does, period);
                if decided == verdict {
                    return self.now - start;
                }
                assert!(
                    matches!(decided, Verdict::Innocent | Verdict::Challenge),
                    "{decided:?}"
                );
            }
            panic!("never {verdict:?}");
        }

        /// Never accused in so many looks.
        fn goes_free(&mut self, does: &[Does], times: usize) {
            let period = self.judge.bounds.period_ns();
            for _ in 0..times {
                for does in does {
                    assert_eq!(self.step(*does, period), Verdict::Innocent);
                }
            }
        }
    }

    #[test]
    fn who_spins_is_challenged_half_way_and_then_sentenced() {
        let mut case = Case::new(BOUNDS);
        case.goes_free(&[Beats], 100);
        let challenged = case.until(Spins, Verdict::Challenge);
        let sentenced = challenged + case.until(Spins, Verdict::Hangs);
        assert!((10 * MS..=20 * MS).contains(&challenged), "{challenged}");
        assert!((20 * MS..=30 * MS).contains(&sentenced), "{sentenced}");
    }

    #[test]
    fn who_stands_is_stuck_by_wall_time() {
        let mut case = Case::new(BOUNDS);
        case.goes_free(&[Beats], 100);
        let challenged = case.until(Stands, Verdict::Challenge);
        let sentenced = challenged + case.until(Stands, Verdict::Stuck);
        assert!((50 * MS..=65 * MS).contains(&challenged), "{challenged}");
        assert!((100 * MS..=115 * MS).contains(&sentenced), "{sentenced}");
    }

    // Runnable, never running, for minutes. And a little progress now and then, as on a machine where everything is slow.
    #[test]
    fn who_waits_for_a_core_is_never_judged() {
        let mut case = Case::new(BOUNDS);
        case.goes_free(&[Starves], 100_000);
        case.goes_free(&[Starves, Starves, Starves, Beats], 10_000);
    }

    // Stopped for less than the bound, then let go, a thousand times; once it waits for a core first.
    #[test]
    fn short_pauses_are_forgiven() {
        let mut case = Case::new(BOUNDS);
        let quiet = [Stands; 9];
        let mut pause = quiet.to_vec();
        pause.push(Beats);
        case.goes_free(&pause, 1000);
        let mut waits = quiet.to_vec();
        waits.push(Starves);
        case.goes_free(&waits, 1000);
    }

    #[test]
    fn an_answer_is_a_sign_of_life() {
        for (does, verdict) in [(Spins, Verdict::Hangs), (Stands, Verdict::Stuck)] {
            let mut case = Case::new(BOUNDS);
            case.goes_free(&[Beats], 2);
            case.until(does, Verdict::Challenge);
            case.answers = true;
            assert_eq!(case.step(does, MS), Verdict::Innocent);
            // And everything starts anew, with another challenge.
            case.answers = false;
            let again = case.until(does, Verdict::Challenge) + case.until(does, verdict);
            assert!(again >= BOUNDS.hang_after_ns, "{again}");
        }
    }

    #[test]
    fn who_sleeps_is_left_alone_until_long_after() {
        let mut case = Case::new(BOUNDS);
        assert_eq!(case.step(Sleeps(1000 * MS), MS), Verdict::Innocent);
        let overslept = case.until(Stands, Verdict::Stuck);
        assert!(
            (1200 * MS..=1220 * MS).contains(&overslept),
            "{}",
            overslept / MS
        );
        // It woke, and waits for a core.
        let mut case = Case::new(BOUNDS);
        case.step(Sleeps(1000 * MS), MS);
        case.goes_free(&[Starves], 10_000);
        // It woke and hangs before it could say so.
        let mut case = Case::new(BOUNDS);
        case.step(Sleeps(10 * MS), MS);
        let hung = case.until(Spins, Verdict::Hangs);
        assert!(hung <= 110 * MS + 30 * MS, "{}", hung / MS);
    }

    // The machine was stopped for an hour, or the watchdog was. Expect: no more counted than a step, challenge before sentence.
    #[test]
    fn a_jump_of_the_clock_accuses_nobody() {
        let hour = 3_600_000 * MS;
        let mut case = Case::new(BOUNDS);
        case.goes_free(&[Beats, Stands, Stands], 2);
        assert_eq!(case.step(Stands, hour), Verdict::Innocent);
        assert_eq!(case.step(Beats, MS), Verdict::Innocent);
        // CPU time in a jump is real, but it is asked first.
        case.step(Spins, MS);
        assert_eq!(case.step(Spins, hour), Verdict::Challenge);
        assert_eq!(case.step(Beats, MS), Verdict::Innocent);
    }

    // A tick of CPU time from before is booked after the first look. Expect: not taken for a hang.
    #[test]
    fn a_clock_that_lags_by_a_tick_is_survived() {
        let mut case = Case::new(BOUNDS);
        for _ in 0..1000 {
            case.goes_free(&[Stands], 1);
            case.cpu += 4 * MS;
            case.goes_free(&[Stands, Beats], 1);
        }
    }

    #[test]
    fn without_challenges_the_bounds_alone_decide() {
        let bounds = Bounds {
            challenge: false,
            ..BOUNDS
        };
        let mut case = Case::new(bounds);
        assert!(case.until(Spins, Verdict::Hangs) <= 30 * MS);
        let mut case = Case::new(bounds);
        assert!(case.until(Stands, Verdict::Stuck) <= 115 * MS);
    }

    #[test]
    fn who_is_unknown_to_the_kernel_is_not_judged() {
        let mut judge = Judge::new(BOUNDS, 0, 0);
        for now_ns in (0..10_000).map(|n| n * 5 * MS) {
            let look = Look {
                now_ns,
                heartbeat: 0,
                answered: false,
            };
            assert_eq!(judge.look(look, || None), Verdict::Innocent);
        }
    }
}
