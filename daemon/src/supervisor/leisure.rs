//! A supervisor that comes back makes way for those who never went.
//!
//! Problem: it comes to processors that its engines and their applications use, and has some milliseconds of work before it looks after
//! anything: being loaded, its configuration, mapping ledgers, going on with what it was left. An ordinary process that has just been born is
//! given whole turns (1.4 ms with two processors), and who wakes meanwhile on that processor waits, since it has had its share and the newcomer
//! has not. Applications see a gap, though nothing that carries their messages has failed.
//!
//! Idea: until it looks after its engines it runs when nobody else wants the processor (SCHED_IDLE); whoever wakes then runs at once. A machine
//! without any idle time must not keep it from its engines, so a thread before all ordinary ones ends this after [`AT_MOST`], and until then
//! sees to it that nobody waits for it who gave a processor away (`watchdog/background.rs`).
//!
//! Rejected: a nice value, which does not make anybody who wakes run at once; and a policy set in the unit, which nobody would end.
//!
//! What must hold: there is an end for certain. So the thread that ends it begins it, once it runs before ordinary ones, and waits for
//! nothing but time. Threads that are born meanwhile are born idle; [`Leisure::end`] sees to them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::store::inherit;
use super::watchdog::{STANDBY_PRIORITY, background, vitals};

/// A node without a supervisor's eyes for so long is what a busy machine may cost; its watchdog's are open earlier. Coming back takes 4 to 5 ms of
/// a core.
const AT_MOST: Duration = Duration::from_millis(40);

/// As long as it lives, or for [`AT_MOST`], the thread that began it runs when nobody else wants to.
#[derive(Debug)]
pub struct Leisure {
    over: Arc<AtomicBool>,
    guard: Option<JoinHandle<()>>,
}

impl Leisure {
    /// Begins it for the calling thread, if others may be at work already. To be called first of all: being loaded was the longest part.
    pub fn begin() -> Self {
        if inherit::is_announced() {
            Self::begin_for(AT_MOST)
        } else {
            Self {
                over: Arc::default(),
                guard: None,
            }
        }
    }

    /// Unless somebody has chosen how we run, or we may not choose when it ends.
    fn begin_for(at_most: Duration) -> Self {
        let over = Arc::new(AtomicBool::new(false));
        let whose = rustix::thread::gettid().as_raw_pid();
        let guard = vitals::is_ordinary(whose).then(|| {
            let over = Arc::clone(&over);
            let work = move || guard(whose, at_most, &over);
            std::thread::Builder::new()
                .name("leisure".to_owned())
                .spawn(work)
        });
        Self {
            over,
            // Without a thread it goes as well, at others' expense.
            guard: guard.and_then(Result::ok),
        }
    }

    /// From now on everybody here runs like others, or as it chose.
    pub fn end(&mut self) {
        let Some(guard) = self.guard.take() else {
            return;
        };
        self.over.store(true, Ordering::Release);
        guard.thread().unpark();
        // It cannot panic; if it did, it is gone as well.
        let _ = guard.join();
        // Nobody is born idle any more.
        let Ok(threads) = std::fs::read_dir("/proc/self/task") else {
            return;
        };
        let names = threads
            .flatten()
            .filter_map(|t| t.file_name().into_string().ok());
        for thread in names.filter_map(|name| name.parse().ok()) {
            if vitals::is_idle(thread) {
                // It may have ended: as good.
                let _ = vitals::make_ordinary(thread);
            }
        }
    }
}

impl Drop for Leisure {
    fn drop(&mut self) {
        self.end();
    }
}

fn guard(whose: i32, at_most: Duration, over: &AtomicBool) {
    let until = Instant::now() + at_most;
    if vitals::make_urgent(0, STANDBY_PRIORITY).is_err() || vitals::make_idle(whose).is_err() {
        return;
    }
    while !over.load(Ordering::Acquire) {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            break;
        }
        // Without the right to, it has its turns.
        let _ = background::interrupt(whose);
        std::thread::park_timeout(left.min(Duration::from_nanos(background::EVERY_NS)));
    }
    if let Err(error) = vitals::make_ordinary(whose) {
        tracing::error!("the supervisor runs only when nobody else wants to: {error}");
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::sync::{Mutex, MutexGuard, PoisonError};

    use super::*;

    /// Whoever ends it ends it for every thread there is, another test's too.
    fn alone() -> MutexGuard<'static, ()> {
        static ONE: Mutex<()> = Mutex::new(());
        ONE.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does this test have the right to choose?
    fn may() -> bool {
        std::thread::spawn(|| vitals::make_urgent(0, STANDBY_PRIORITY).is_ok())
            .join()
            .unwrap()
    }

    fn wait_until(what: &str, condition: impl Fn() -> bool) {
        let deadline = Instant::now() + Duration::from_secs(10);
        while !condition() {
            assert!(Instant::now() < deadline, "never: {what}");
            std::thread::yield_now();
        }
    }

    // A thread begins, another is born meanwhile, the first ends it. Expect: both idle in between, both ordinary afterwards.
    #[test]
    fn whoever_was_idle_is_ordinary_afterwards() {
        if !may() {
            return;
        }
        let _alone = alone();
        let own = || rustix::thread::gettid().as_raw_pid();
        let mut leisure = Leisure::begin_for(Duration::from_secs(3600));
        wait_until("idle", || vitals::is_idle(own()));
        let (tell, tid) = channel();
        let (stay, left) = channel::<()>();
        let born = std::thread::spawn(move || {
            tell.send(own()).unwrap();
            // Until the other end is dropped.
            let _ = left.recv();
        });
        let other = tid.recv().unwrap();
        assert!(vitals::is_idle(other));
        leisure.end();
        assert!(vitals::is_ordinary(own()));
        assert!(vitals::is_ordinary(other));
        drop(stay);
        born.join().unwrap();
    }

    // Nobody ends it. Expect: it ends by itself, and ending it then does no harm.
    #[test]
    fn it_does_not_last() {
        if !may() {
            return;
        }
        let _alone = alone();
        let own = rustix::thread::gettid().as_raw_pid();
        let mut leisure = Leisure::begin_for(Duration::from_millis(50));
        // Not seen idle for certain: on a busy machine it does not run meanwhile.
        wait_until("over", || {
            leisure.guard.as_ref().is_some_and(JoinHandle::is_finished)
        });
        assert!(vitals::is_ordinary(own));
        leisure.end();
        assert!(vitals::is_ordinary(own));
    }
}
