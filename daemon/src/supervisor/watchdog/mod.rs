//! The watchdog: a thread that notices when an engine is dead or does not come round, and has its standby take over before anybody else
//! knows.
//!
//! Problem: everything the supervisor does is done in one thread, which may be opening a port or resolving a neighbour when an engine
//! dies, and which has to wait for its turn on a busy machine. Every microsecond of that is an application's pause.
//!
//! Idea: a thread of its own, before all ordinary ones (SCHED_FIFO), which holds per queue what a takeover needs and no more: the serving
//! process, the ledger, a standby's link. It sleeps on the death words of all ledgers ([`crate::engine`]'s `death.rs`) and on one word of
//! its own, by which the main thread tells of changes. When the kernel says that an engine will never run again, it sends
//! [`crate::engine_link::TAKE_OVER`] and *then* tells the main thread, which keeps the books ([`Seen`]).
//!
//! | post | | leaves it by |
//! |---|---|---|
//! | nobody serves | | the main thread's [`Watchdog::watch`] |
//! | one serves, no standby | | its death → nobody serves; [`Watchdog::arm`] |
//! | one serves, a standby is armed | | its death → the standby serves, none is armed; [`Watchdog::disarm`] |
//!
//! Who takes the standby out of its post, under the post's lock, sends the takeover: so it is sent once. The main thread disarms a standby
//! before it lets anything happen that must not end in an adoption, or while a change has not reached it.
//!
//! Whether an engine hangs, `judge.rs` decides; here it is asked for its heartbeat, challenged, and fenced. Then its death is a death like
//! any other.
//!
//! The pidfd is the main thread's: it tells of those whose death word said nothing (they died before they held it, or scribbled on
//! it), only later.
//!
//! While a process runs in the background, it is also what keeps others from waiting for it (`background.rs`).
//!
//! Rejected: an epoll set of pidfds (half a millisecond late and more, see `death.rs`); letting standbys watch the serving engine
//! themselves (they would have to be believed, and could not be held back).

pub mod background;
pub mod judge;
pub mod vitals;

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use portolan_abi::memory::LedgerMapping;
use rustix::net::SendFlags;

use super::recovery::Cause;
use crate::engine_link::TAKE_OVER;
use background::Background;
use judge::{Bounds, Condition, Judge, Look, Verdict};

/// Before standbys and all ordinary processes.
const WATCHDOG_PRIORITY: i32 = 20;
/// Standbys wait and take over at this.
pub const STANDBY_PRIORITY: i32 = 10;
/// Looks at everything at least so often.
const LONGEST_WAIT_NS: u64 = 1_000_000_000;
/// A process that was killed and is not dead by then is stuck in the kernel.
const FENCED_WITHIN_NS: u64 = 1_000_000_000;
/// Without a way to wait for death words: so often.
const POLL_NS: u64 = 1_000_000;
/// `FUTEX_OWNER_DIED` of linux/futex.h.
const OWNER_DIED: u32 = 0x4000_0000;

/// CLOCK_MONOTONIC in nanoseconds.
pub fn now_ns() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    (time.tv_sec as u64)
        .saturating_mul(1_000_000_000)
        .saturating_add(time.tv_nsec as u64)
}

/// A process in its post.
#[derive(Debug)]
pub struct Watched {
    /// Which launch of its queue.
    pub launch: u32,
    /// Its process.
    pub pid: i32,
    /// Its pidfd.
    pub exit: OwnedFd,
}

/// A standby that may take over.
#[derive(Debug)]
pub struct Armed {
    /// The process.
    pub process: Watched,
    /// Our end of its link.
    pub link: OwnedFd,
}

/// What the watchdog saw or did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seen {
    /// A serving process shows no sign of life and was sent SIGKILL.
    Fenced {
        /// Its queue.
        queue: u8,
        /// Its launch.
        launch: u32,
        /// Why.
        cause: Cause,
        /// When.
        at_ns: u64,
    },
    /// It was, and does not die: it is stuck in the kernel.
    WillNotDie {
        /// Its queue.
        queue: u8,
        /// Its launch.
        launch: u32,
    },
    /// A serving process will never run again.
    Death {
        /// Its queue.
        queue: u8,
        /// Its launch.
        launch: u32,
        /// When.
        at_ns: u64,
        /// When its heartbeat was last seen to change, if it was watched for that.
        last_beat_ns: Option<u64>,
        /// The launch of the standby that was told to take over.
        promoted: Option<u32>,
    },
}

/// What one queue's watch needs.
struct Post {
    ledger: LedgerMapping,
    places: Mutex<Places>,
}

#[derive(Default)]
struct Places {
    serving: Option<Arc<Watched>>,
    /// It has said that it serves, so it should come round.
    judged: bool,
    standby: Option<Armed>,
}

impl Places {
    fn serve(&mut self, process: Watched) -> Option<Arc<Watched>> {
        self.judged = false;
        self.serving.replace(Arc::new(process))
    }
}

impl Post {
    /// Holders do a few assignments; none can panic.
    fn places(&self) -> MutexGuard<'_, Places> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn death_word(&self) -> &AtomicU32 {
        &self.ledger.ledger().header().death
    }
}

struct Shared {
    posts: Vec<Post>,
    background: Mutex<Background>,
    /// Changes with everything the thread must look at.
    changes: AtomicU32,
    stop: AtomicBool,
}

impl Shared {
    /// Holders call the kernel a few times; none can panic.
    fn background(&self) -> MutexGuard<'_, Background> {
        self.background
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn changed(&self) {
        self.changes.fetch_add(1, Ordering::Release);
        vitals::wake(&self.changes);
    }
}

/// The main thread's hold on the watchdog.
pub struct Watchdog {
    shared: Arc<Shared>,
    seen: Receiver<Seen>,
    bell: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl Watchdog {
    /// Starts the thread, with the ledger of every queue.
    ///
    /// # Errors
    /// The system's.
    pub fn start(ledgers: Vec<LedgerMapping>, bounds: Bounds) -> io::Result<Self> {
        let post = |ledger| Post {
            ledger,
            places: Mutex::default(),
        };
        let shared = Arc::new(Shared {
            posts: ledgers.into_iter().map(post).collect(),
            background: Mutex::default(),
            changes: AtomicU32::new(0),
            stop: AtomicBool::new(false),
        });
        let bell = Arc::new(super::memory::eventfd()?);
        let (tell, seen) = channel();
        let guard = Guard {
            shared: Arc::clone(&shared),
            cases: shared.posts.iter().map(|_| None).collect(),
            bounds,
            tell,
            bell: Arc::clone(&bell),
        };
        let thread = std::thread::Builder::new()
            .name("watchdog".to_owned())
            .spawn(move || guard.run())?;
        Ok(Self {
            shared,
            seen,
            bell,
            thread: Some(thread),
        })
    }

    /// Readable when there is something for [`Self::next`].
    pub fn bell(&self) -> &OwnedFd {
        &self.bell
    }

    /// What it saw or did since, oldest first. Comes before anything the processes concerned say.
    pub fn next(&self) -> Option<Seen> {
        self.seen.try_recv().ok()
    }

    /// The bell has been heard.
    pub fn quiet(&self) {
        // Nothing rang: as good.
        let _ = rustix::io::read(&*self.bell, &mut [0; 8]);
    }

    fn post(&self, queue: u8) -> Option<&Post> {
        self.shared.posts.get(usize::from(queue))
    }

    /// This process serves now, or has been told to take over.
    pub fn watch(&self, queue: u8, process: Watched) {
        if let Some(post) = self.post(queue) {
            let before = post.places().serve(process);
            drop(before);
            self.shared.changed();
        }
    }

    /// This process has said that it serves: from now on it should come round.
    pub fn expect_beats(&self, queue: u8, launch: u32) {
        if let Some(post) = self.post(queue) {
            let mut places = post.places();
            places.judged = places.serving.as_ref().is_some_and(|p| p.launch == launch);
            drop(places);
            self.shared.changed();
        }
    }

    /// The main thread sees to this death itself. False: the watchdog has seen it already and says so.
    pub fn forget(&self, queue: u8, launch: u32) -> bool {
        let Some(post) = self.post(queue) else {
            return false;
        };
        let taken = {
            let mut places = post.places();
            let is_it = places.serving.as_ref().is_some_and(|p| p.launch == launch);
            is_it.then(|| places.serving.take())
        };
        taken.is_some()
    }

    /// This process runs, or will run, when nobody else wants to: nobody waits for it, for so long at most.
    pub fn in_background(&self, pid: i32, at_most: Duration) {
        let until = now_ns().saturating_add(u64::try_from(at_most.as_nanos()).unwrap_or(u64::MAX));
        self.shared.background().add(pid, until);
        self.shared.changed();
    }

    /// This standby takes over when the serving process dies.
    pub fn arm(&self, queue: u8, standby: Armed) {
        if let Some(post) = self.post(queue) {
            let before = post.places().standby.replace(standby);
            drop(before);
        }
    }

    /// No standby takes over from now on. False: there was none, or it has just been told to.
    pub fn disarm(&self, queue: u8) -> bool {
        self.post(queue)
            .is_some_and(|post| post.places().standby.take().is_some())
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        self.shared.changed();
        if let Some(thread) = self.thread.take() {
            // It cannot panic; if it did, it is gone as well.
            let _ = thread.join();
        }
    }
}

/// How a process is judged.
struct Case {
    launch: u32,
    judge: Judge,
    next_look_ns: u64,
    /// What it was asked last; 0: nothing yet.
    asked: u64,
    /// When it was sent SIGKILL.
    fenced_at_ns: Option<u64>,
    reported: bool,
}

/// The thread.
struct Guard {
    shared: Arc<Shared>,
    cases: Vec<Option<Case>>,
    bounds: Bounds,
    tell: Sender<Seen>,
    bell: Arc<OwnedFd>,
}

impl Guard {
    fn run(mut self) {
        if let Err(error) = vitals::make_urgent(0, WATCHDOG_PRIORITY) {
            tracing::warn!(
                "the watchdog runs like everybody else, so a busy machine delays takeovers: {error}; grant CAP_SYS_NICE"
            );
        }
        let shared = Arc::clone(&self.shared);
        while !shared.stop.load(Ordering::Acquire) {
            // Before the look: what changes later ends the wait at once.
            let changes = shared.changes.load(Ordering::Acquire);
            let mut words = vec![(&shared.changes, changes)];
            let mut until = now_ns() + LONGEST_WAIT_NS;
            for (queue, post) in (0..).zip(&shared.posts) {
                if let Some((value, next)) = self.look(queue, post) {
                    words.push((post.death_word(), value));
                    until = until.min(next);
                }
            }
            if let Some(next) = shared.background().interrupt(now_ns()) {
                until = until.min(next);
            }
            if !vitals::wait_for_any(words.into_iter(), until) {
                std::thread::sleep(Duration::from_nanos(POLL_NS));
            }
        }
    }

    /// Looks after one queue; returns the value of its death word by which that was done, and when to look again.
    fn look(&mut self, queue: u8, post: &Post) -> Option<(u32, u64)> {
        let (serving, judged) = {
            let places = post.places();
            (places.serving.clone()?, places.judged)
        };
        let word = post.death_word().load(Ordering::Acquire);
        let never = u64::MAX;
        // It may also be the predecessor's, if its successor does not hold the word yet: the kernel knows.
        if word & OWNER_DIED != 0 && vitals::is_ending(serving.pid, serving.exit.as_fd()) {
            self.on_death(queue, post, &serving);
            return Some((post.death_word().load(Ordering::Acquire), never));
        }
        let next = if judged {
            self.judge(queue, post, &serving)
        } else {
            never
        };
        Some((word, next))
    }

    /// Looks whether an engine comes round; returns when to look again.
    fn judge(&mut self, queue: u8, post: &Post, serving: &Watched) -> u64 {
        let now = now_ns();
        let header = post.ledger.ledger().header();
        let heartbeat = header.heartbeat.load(Ordering::Acquire);
        let bounds = self.bounds;
        let Some(place) = self.cases.get_mut(usize::from(queue)) else {
            return u64::MAX;
        };
        let case = match place {
            Some(case) if case.launch == serving.launch => case,
            place => place.insert(Case {
                launch: serving.launch,
                judge: Judge::new(bounds, now, heartbeat),
                next_look_ns: now,
                asked: 0,
                fenced_at_ns: None,
                reported: false,
            }),
        };
        if let Some(fenced_at_ns) = case.fenced_at_ns {
            let launch = serving.launch;
            if !case.reported && now >= fenced_at_ns + FENCED_WITHIN_NS {
                case.reported = true;
                self.tell(Seen::WillNotDie { queue, launch });
            }
            return now + FENCED_WITHIN_NS;
        }
        if now < case.next_look_ns {
            return case.next_look_ns;
        }
        let look = Look {
            now_ns: now,
            heartbeat,
            answered: case.asked != 0 && header.response.load(Ordering::Acquire) == case.asked,
        };
        let verdict = case.judge.look(look, || condition(serving.pid));
        // Asleep: not worth waking for as often.
        let asleep = heartbeat & portolan_abi::ledger::HEARTBEAT_SLEEPING != 0;
        let period = if asleep {
            bounds.period_ns().max(bounds.stuck_after_ns / 4)
        } else {
            bounds.period_ns()
        };
        let next = now + period;
        case.next_look_ns = next;
        let cause = match verdict {
            Verdict::Innocent => return next,
            Verdict::Challenge => {
                // Any word but the last one's answer.
                case.asked = header
                    .response
                    .load(Ordering::Acquire)
                    .wrapping_add(1)
                    .max(1);
                header.challenge.store(case.asked, Ordering::Release);
                return next;
            }
            Verdict::Hangs => Cause::Hang,
            Verdict::Stuck => Cause::Stuck,
        };
        case.fenced_at_ns = Some(now);
        self.tell(Seen::Fenced {
            queue,
            launch: serving.launch,
            cause,
            at_ns: now,
        });
        // Dead already: as good.
        let _ = rustix::process::pidfd_send_signal(&serving.exit, rustix::process::Signal::KILL);
        // Dying takes a moment of its own on a core, which on a busy machine it would wait for.
        let _ = vitals::make_urgent(serving.pid, STANDBY_PRIORITY);
        next
    }

    fn tell(&self, seen: Seen) {
        if self.tell.send(seen).is_ok() {
            ring(&self.bell);
        }
    }

    fn on_death(&self, queue: u8, post: &Post, dead: &Watched) {
        let case = self.cases.get(usize::from(queue)).and_then(Option::as_ref);
        let case = case.filter(|case| case.launch == dead.launch);
        let mut places = post.places();
        if places
            .serving
            .as_ref()
            .is_none_or(|p| p.launch != dead.launch)
        {
            return;
        }
        let before = places.serving.take();
        let standby = places.standby.take();
        let promoted = standby.as_ref().map(|standby| standby.process.launch);
        // First, so that the main thread knows before it hears the standby answer.
        let seen = Seen::Death {
            queue,
            launch: dead.launch,
            at_ns: now_ns(),
            last_beat_ns: case.map(|case| case.judge.last_beat_ns()),
            promoted,
        };
        let told = self.tell.send(seen).is_ok();
        if let Some(Armed { process, link }) = standby {
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            // It was armed with nothing unread before it, so there is room. If it is dead, its own death follows.
            let _ = rustix::net::send(&link, TAKE_OVER, flags);
            places.serve(process);
        }
        drop(places);
        drop(before);
        // Taking down its page tables keeps its processor for a millisecond and more, from applications and perhaps from the successor;
        // nobody waits for that any more. A number that is nobody's by now cannot be asked: then it is over. Out of descriptors: then it is in the way.
        if !vitals::is_readable(dead.exit.as_fd())
            && let Ok(exit) = dead.exit.try_clone()
        {
            let until = now_ns() + background::LONGEST_NS;
            let _ = self.shared.background().lay_out(dead.pid, exit, until);
        }
        if told {
            ring(&self.bell);
        }
    }
}

/// What the kernel says of a process that shows no sign of life.
fn condition(pid: i32) -> Option<Condition> {
    Some(Condition {
        runnable: vitals::vitals(pid)?.state == b'R',
        cpu_ns: vitals::cpu_time_ns(pid)?,
    })
}

fn ring(bell: &OwnedFd) {
    // Full: it rings already.
    let _ = rustix::io::write(bell, &1u64.to_ne_bytes());
}
