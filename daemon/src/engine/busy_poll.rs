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
//! | | frames come by themselves | we go round |
//! |---|---|---|
//! | many for [`WARM`] looks | ask | |
//! | few for [`CALM`] looks | | ask to be let off |
//! | told so | begin | once more, for what came meanwhile; end |
//!
//! A look is what counts a millisecond of work. An engine that goes round does not sleep: nobody else would see a frame come.
//!
//! **Rejected.** To go by bytes: what it costs is a system call and a queue per frame, and frames of 9,000 bytes are not faster for it (docs/tuning.md).

use std::os::fd::OwnedFd;

use portolan_transport::ident::Nanos;
use rustix::net::RecvFlags;

/// Frames per millisecond that are many: more than an exchange of short messages has, or a stream of them; and few.
const MANY: u64 = 200;
const FEW: u64 = 60;
/// Looks in a row.
const WARM: u32 = 2;
const CALM: u32 = 4;
/// Between two questions at first, which may find the supervisor learning; twice as long after each, up to the other.
const PAUSE_NS: Nanos = 5_000_000;
const LONG_PAUSE_NS: Nanos = 1_000_000_000;

/// Whether we go round, and whether it would be worth it.
#[derive(Default)]
pub struct BusyPoll {
    /// Polled; `None`: frames come by themselves.
    socket: Option<OwnedFd>,
    /// The last look, and frames by then.
    seen: Option<(Nanos, u64)>,
    /// Looks that were for a change.
    in_a_row: u32,
    ask_at: Nanos,
    pause: Nanos,
}

impl BusyPoll {
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
        self.socket = socket;
        (self.in_a_row, self.pause) = (0, PAUSE_NS);
        self.ask_at = now.saturating_add(PAUSE_NS);
    }

    /// Looks at how many frames have come by now, about each millisecond. Says what to ask for.
    pub fn look(&mut self, now: Nanos, frames: u64) -> Option<bool> {
        let (since, before) = self.seen.replace((now, frames))?;
        let milliseconds = (now.saturating_sub(since) / 1_000_000).max(1);
        let per_ms = frames.saturating_sub(before) / milliseconds;
        let (change, enough) = match self.is_on() {
            true => (per_ms < FEW, CALM),
            false => (per_ms >= MANY, WARM),
        };
        self.in_a_row = if change { self.in_a_row + 1 } else { 0 };
        if now < self.ask_at {
            return None;
        }
        if self.in_a_row >= enough {
            let pause = self.pause.clamp(PAUSE_NS, LONG_PAUSE_NS);
            self.ask_at = now.saturating_add(pause);
            self.pause = pause.saturating_mul(2);
            return Some(!self.is_on());
        }
        // For a supervisor that was replaced: its successor knows nothing of it.
        if self.is_on() && now >= self.ask_at.saturating_add(LONG_PAUSE_NS) {
            self.ask_at = now;
            return Some(true);
        }
        None
    }
}

/// Has the kernel go round once for the queue that this socket has received through. Errors are the socket's, and there are none that matter.
pub(crate) fn go_round(socket: &OwnedFd) {
    let nothing: &mut [u8] = &mut [];
    let _ = rustix::net::recv(socket, nothing, RecvFlags::DONTWAIT);
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Nanos = 1_000_000;

    /// Looks once a millisecond at so many frames each; what was asked for, and when.
    struct Looks {
        poll: BusyPoll,
        now: Nanos,
        frames: u64,
    }

    impl Looks {
        fn new() -> Self {
            let mut poll = BusyPoll::default();
            assert_eq!(poll.look(1, 0), None);
            Self {
                poll,
                now: 1,
                frames: 0,
            }
        }

        fn see(&mut self, per_ms: u64, looks: u64) -> Vec<(u64, bool)> {
            let mut asked = Vec::new();
            for nth in 1..=looks {
                self.now += MS;
                self.frames += per_ms;
                asked.extend(self.poll.look(self.now, self.frames).map(|on| (nth, on)));
            }
            asked
        }

        fn told(&mut self, on: bool) {
            let socket = on.then(|| std::fs::File::open("/dev/null").unwrap().into());
            self.poll.told(self.now, socket);
            assert_eq!(self.poll.is_on(), on);
        }
    }

    // Few frames, then many that nobody answers for, then an answer; few again, many for a moment, few. Expect: asked at the second look, then ever more
    // rarely; asked to be let off at the fourth in a row.
    #[test]
    fn it_is_asked_for_when_there_are_many_frames_and_ended_when_there_are_few() {
        let mut looks = Looks::new();
        assert_eq!(looks.see(MANY - 1, 100), []);
        let asked = looks.see(MANY, 2_000);
        assert_eq!(asked[..4], [(2, true), (7, true), (17, true), (37, true)]);
        assert!(asked.len() < 12, "{asked:?}");
        let last = asked.windows(2).last().unwrap();
        assert!(last[1].0 - last[0].0 <= 1_000, "{last:?}");
        looks.told(true);
        assert_eq!(looks.see(FEW, 50), []);
        assert_eq!(looks.see(FEW - 1, 3), []);
        assert_eq!(looks.see(MANY, 1), []);
        assert_eq!(looks.see(0, 5), [(4, false)]);
        looks.told(false);
        assert_eq!(looks.see(0, 100), []);
        assert_eq!(looks.see(MANY, 2), [(2, true)]);
    }

    // Going round for minutes. Expect: said again each second, and nothing else.
    #[test]
    fn a_new_supervisor_hears_of_it() {
        let mut looks = Looks::new();
        looks.told(true);
        let said = looks.see(MANY, 10_000);
        assert!((9..=10).contains(&said.len()), "{said:?}");
        assert!(said.iter().all(|(_, on)| *on));
    }

    // Looks that are late, as after a sleep. Expect: frames are counted per millisecond all the same.
    #[test]
    fn a_late_look_is_no_reason() {
        let mut looks = Looks::new();
        for _ in 0..10 {
            looks.now += 100 * MS;
            looks.frames += 10 * MANY;
            assert_eq!(looks.poll.look(looks.now, looks.frames), None);
        }
    }
}
