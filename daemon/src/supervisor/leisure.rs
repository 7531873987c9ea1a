//! A supervisor that comes back makes way for those who never went.
//!
//! Problem: it comes to processors that its engines and their applications use, and has some milliseconds of work before it looks after
//! anything: being loaded, its configuration, mapping ledgers, going on with what it was left. An ordinary process that has just been born is
//! given whole turns (1.4 ms with two processors), and who wakes meanwhile on that processor waits, since it has had its share and the newcomer
//! has not; an engine that gives the processor away does not even wake, so nobody looks again before the next tick. Applications see
//! a gap, though nothing that carries their messages has failed.
//!
//! Idea: **as long as nobody waits for it, it takes its time.** Until it looks after its engines it is nice and asks for short turns, so that whoever
//! wants the processor is chosen before it, and a timer interrupts it after each [`TURN`], from its first instruction on (`entry.rs`). Then it pauses for
//! [`PAUSE`], so that of some ten thousand deliveries one is late; it heeds meanwhile whoever might need it: an engine that has died or says
//! something, an application that connects or asks. As soon as one does there are no pauses any more, and a turn's end only has the kernel choose
//! anew who runs (`watchdog/background.rs` says how).
//!
//! A turn costs something by itself: its signal, its switches, and caches and translations that others have used since the last, 15 to 50 us. In turns of
//! 35 us each 10 ms it needed 470 of them and 45 to 80 ms of a core for 3 ms of work. And each that is not very short makes one delivery late, however long it
//! lasts. So there are few and long ones, two to five in all, though not so long that the delivery is among the latest of a thousand.
//!
//! An epoll watches them: to ask poll(2) about twelve descriptors, whose lines have left the caches each time, took a fifth of all it did.
//!
//! Rejected: SCHED_IDLE, with which it comes back after 44 to 200 ms instead of 9 to 21 and is hardly less in the way; a thread before all
//! ordinary ones that has the kernel choose, for each time it wakes it takes a processor from somebody, in all as long as the supervisor
//! itself; to choose less often (each turn is a gap) or more often (each choice costs some 45 us of cold caches); short pauses of a turn or two,
//! which only stretch what is in the way; turns so short that a gap they make is like any other, for there are so many then that p99 is 2 to 3 % longer,
//! and ten to fifteen of 400 us, with which it is as much (`docs/faults.md`); and a niceness set in the unit, which nobody would end.
//!
//! What must hold: there is an end for certain. It is nice, not idle, so among busy processes it has its turns; and the timer's handler, which then
//! runs before anything else, makes it an ordinary one without pauses after [`AT_MOST`], or [`AT_MOST_WAITED_FOR`] after somebody began to wait. An
//! engine that *hangs* meanwhile says nothing: its detection begins when leisure ends. Threads born meanwhile are as nice: [`Leisure::end`] sees to
//! them. Children are not: they take turns like engines before they are another program (`portolan::turns::short`). Calls the signal interrupts are
//! restarted by the kernel, or by whoever made them where it does not (EINTR). One that is not restarted but fails, loading a program into the
//! kernel (bpf(2), EAGAIN), would never end or be taken for a refusal: [`undisturbed`].

#[cfg(target_arch = "x86_64")]
mod entry;

use std::time::Duration;

use rustix::io::Errno;
use rustix::process::{Pid, getpriority_process, setpriority_process};

/// A node without a supervisor's eyes for so long is what peace may cost; its watchdog's are open earlier. Coming back takes 2 to 5 ms of a core
/// in these turns, so two to five pauses.
const AT_MOST: Duration = Duration::from_secs(5);
/// And what a busy machine may cost who waits.
const AT_MOST_WAITED_FOR: Duration = Duration::from_millis(40);
/// Between turns as long as nobody waits.
const PAUSE: Duration = Duration::from_millis(800);
/// Weighs a ninth of an ordinary one (`sched_prio_to_weight`, kernel/sched/core.c). With 15 it comes back later and is no less in the way.
const NICE: i32 = 10;
/// The kernel's least.
const SHORT: Duration = Duration::from_micros(100);
/// From one pause to the next, of the processor.
const TURN: Duration = Duration::from_micros(1000);
/// Who has had so much of the processor has had its turn. If others came in between, as those do who wake for each message, it goes on for what is left: it would
/// get nowhere otherwise. A little less than a turn, since clocks are read at different moments.
const ENOUGH: Duration = Duration::from_micros(950);
/// The signals of one turn; with as many it ends, whatever is left of it.
const SIGNALS: u32 = 8;
/// From one choice to the next, if there are no pauses.
const CHOICE: Duration = Duration::from_micros(120);
/// Who has had less of the processor since the last choice goes on.
const RAN: Duration = Duration::from_micros(60);

/// What began at the first instruction, if there is something to go on with and we may be ordinary again afterwards.
#[derive(Debug)]
pub struct Leisure(());

impl Leisure {
    /// The one of this process; for its first thread.
    pub fn begun() -> Self {
        Self(())
    }

    /// From now on everybody here runs like others, or as it chose.
    pub fn end(&mut self) {
        #[cfg(target_arch = "x86_64")]
        if let Some(ended) = entry::end() {
            everybody_is_ordinary();
            let entry::Ended { pauses, waited_for } = ended;
            tracing::info!(pauses, waited_for, "made way for others until now");
        }
    }
}

impl Drop for Leisure {
    fn drop(&mut self) {
        self.end();
    }
}

/// Does something that signals would have fail.
pub fn undisturbed<R>(work: impl FnOnce() -> R) -> R {
    #[cfg(target_arch = "x86_64")]
    let _quiet = entry::Quiet::begin();
    work()
}

fn everybody_is_ordinary() {
    let threads = match std::fs::read_dir("/proc/self/task") {
        Ok(threads) => threads,
        Err(error) => return tracing::error!("the supervisor stays nice: {error}"),
    };
    let names = threads
        .flatten()
        .filter_map(|t| t.file_name().into_string().ok());
    for thread in names.filter_map(|name| Pid::from_raw(name.parse().ok()?)) {
        if getpriority_process(Some(thread)) != Ok(NICE) {
            continue;
        }
        match setpriority_process(Some(thread), 0) {
            // It has ended: as good.
            Ok(()) | Err(Errno::SRCH) => {}
            Err(error) => tracing::error!("a thread of the supervisor stays nice: {error}"),
        }
    }
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests;
