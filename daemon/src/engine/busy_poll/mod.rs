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
//! an engine counts frames before and after, and asks to be let off if there are not more (`judge.rs`); it tries again later, and now and then while it goes
//! round, as senders come and go.
//!
//! | | frames come by themselves | we go round |
//! |---|---|---|
//! | many for [`WARM`] looks more than not | ask | |
//! | few for [`CALM`] looks more than not | | ask to be let off |
//! | it does not pay, or is to be compared anew | | ask to be let off \* |
//! | told so | begin | once more, for what came meanwhile; end |
//!
//! \* And the instance given up, if the interface has it for our sake: frames that come by themselves take longer through one.
//!
//! A look is what counts a millisecond of work. An engine that goes round does not sleep: nobody else would see a frame come.
//!
//! **Rejected.** To go by bytes or by the kind of work: what it brings is a matter of cores, and these are not ours to see.

mod judge;

use std::os::fd::OwnedFd;

use judge::{Amount, Judge, Rate};
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

impl BusyPoll {
    /// `compares`: ends it where it does not pay. `shares_core`: with another engine, whose turns make single looks say little.
    pub fn new(compares: bool, shares_core: bool) -> Self {
        Self {
            socket: None,
            seen: None,
            for_change: 0,
            ask_at: 0,
            pause: 0,
            judge: compares.then(|| Judge::new(!shares_core)),
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
        let seen = Rate {
            frames: frames.saturating_sub(before),
            ns: now.saturating_sub(since),
        };
        let per_ms = seen.frames / (seen.ns / 1_000_000).max(1);
        let of_core = per_ms << u32::from(self.shares_core);
        let amount = match of_core {
            MANY.. => Amount::Many,
            FEW.. => Amount::Some,
            _ => Amount::Few,
        };
        let (change, enough) = match self.is_on() {
            true => (amount == Amount::Few, CALM),
            false => (amount == Amount::Many, WARM),
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
                judge.without(seen, amount, of_late, self.begins);
                asks &= judge.allows(now);
            } else if judge.with(now, seen, amount, asks) {
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
mod tests;
