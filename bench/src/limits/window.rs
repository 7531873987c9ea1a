//! No more frames than the other end has room for.
//!
//! Problem: between two sockets are rings, of 256 frames in the veth pair and of so many chunks as the receiver gave. Who sends on while
//! the receiver is not on its core overflows them, and a limit that loses frames says little: neither what it moves nor what it could.
//!
//! Idea: each frame carries its number and the number of the last frame that was taken of the other direction. At most [`WINDOW`] are
//! under way. Who only receives says what he took once in a quarter of that, in a frame of its own, which has no number: a word. That is the least that
//! anyone must do who wants to lose nothing; numbers tell for certain whether anything was lost. Words take places as well, four at most: one for each
//! quarter that was taken while the other end took nothing.
//!
//! Frames that the machine loses all the same are not sent again. They leave the window when a later one is taken, or, if there is no
//! later one, after [`GIVEN_UP`], so that a loss costs a stream time and is seen, but does not end it.

use std::time::{Duration, Instant};

/// Frames under way, words among them. The veth pair's own ring has as many places, so it does not overflow either.
pub const UNDER_WAY: u32 = 256;
/// Words among them.
const WORDS: u32 = 4;
/// Frames with a number under way.
const WINDOW: u32 = UNDER_WAY - WORDS;
/// Frames taken before they are told of.
const QUARTER: u32 = WINDOW / WORDS;
/// What was not taken for so long never will be.
const GIVEN_UP: Duration = Duration::from_millis(500);
/// Looks at a closed window between two looks at the clock.
const LOOKS: u32 = 4096;

/// What a frame carries for the window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    /// Its number; 0: it only tells.
    number: u32,
    /// The number of the last frame of the other direction that was taken.
    taken: u32,
}

/// Bytes of a stamp.
pub const STAMP: usize = 8;

impl Stamp {
    pub fn to_bytes(self) -> [u8; STAMP] {
        let mut bytes = [0; STAMP];
        bytes[..4].copy_from_slice(&self.number.to_ne_bytes());
        bytes[4..].copy_from_slice(&self.taken.to_ne_bytes());
        bytes
    }

    pub fn read(bytes: &[u8]) -> Option<Self> {
        let number = u32::from_ne_bytes(*bytes.first_chunk()?);
        let taken = u32::from_ne_bytes(*bytes.get(4..)?.first_chunk()?);
        Some(Self { number, taken })
    }
}

/// Both directions of a socket. Numbers begin with 1; no run has four thousand million frames.
#[derive(Default)]
pub struct Window {
    /// The last number sent, and the last that the other end took.
    sent: u32,
    taken: u32,
    /// The last number that came, and the last that the other end was told of.
    came: u32,
    told: u32,
    missing: u64,
    /// Looks at the window while it was closed, and since when it is.
    looks: u32,
    since: Option<Instant>,
}

impl Window {
    /// Whether another frame may be sent.
    pub fn is_open(&mut self) -> bool {
        if self.sent - self.taken < WINDOW {
            return true;
        }
        self.looks = self.looks.wrapping_add(1);
        if self.looks.is_multiple_of(LOOKS) {
            let now = Instant::now();
            if now - *self.since.get_or_insert(now) >= GIVEN_UP {
                (self.taken, self.since) = (self.sent, None);
                return true;
            }
        }
        false
    }

    /// What the next frame carries.
    pub fn next(&self) -> Stamp {
        Stamp {
            number: self.sent + 1,
            taken: self.came,
        }
    }

    /// What a frame carries that only tells what was taken.
    pub fn word(&self) -> Stamp {
        Stamp {
            number: 0,
            taken: self.came,
        }
    }

    /// A frame with this was sent.
    pub fn sent(&mut self, stamp: Stamp) {
        self.sent = self.sent.max(stamp.number);
        self.told = stamp.taken;
    }

    /// A frame with this came. Whether there is more in it.
    pub fn came(&mut self, stamp: Stamp) -> bool {
        if stamp.taken > self.taken && stamp.taken <= self.sent {
            (self.taken, self.since) = (stamp.taken, None);
        }
        if stamp.number <= self.came {
            return false;
        }
        self.missing += u64::from(stamp.number - self.came - 1);
        self.came = stamp.number;
        true
    }

    /// Whether the other end waits, or will soon, for word of what was taken.
    pub fn owes(&self) -> bool {
        self.came - self.told >= QUARTER
    }

    /// Frames that were skipped.
    pub fn missing(&self) -> u64 {
        self.missing
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // A sender without end, a receiver that takes nothing for a while. Expect: a window of frames and no more; when some were taken,
    // a word of it, and as many again.
    #[test]
    fn no_more_is_under_way_than_fits() {
        let (mut one, mut two) = (Window::default(), Window::default());
        let mut wire = Vec::new();
        let fill = |one: &mut Window, wire: &mut Vec<Stamp>| {
            while one.is_open() {
                let stamp = Stamp::read(&one.next().to_bytes()).unwrap();
                one.sent(stamp);
                wire.push(stamp);
            }
        };
        fill(&mut one, &mut wire);
        assert_eq!(wire.len() as u32, WINDOW);
        let mut total = 0;
        for _ in 0..20 {
            for stamp in wire.drain(..QUARTER as usize) {
                assert!(!two.owes());
                assert!(two.came(stamp));
            }
            total += QUARTER;
            assert!(two.owes());
            let word = two.word();
            two.sent(word);
            assert!(!two.owes());
            assert!(!one.came(word), "there is nothing in it");
            fill(&mut one, &mut wire);
            assert_eq!(wire.len() as u32, WINDOW);
        }
        assert_eq!((two.came, two.missing()), (total, 0));
    }

    // One sends as much as it may; two takes that, says so in words, and sends as much as it may, while one takes nothing. Expect: no more frames on the way
    // to one, whatever they carry, than there are places; and again, with the ends changed.
    #[test]
    fn words_take_places_too() {
        let mut ends = [Window::default(), Window::default()];
        let mut wires = [Vec::new(), Vec::new()];
        for turn in 0..20 {
            let (one, two) = (turn % 2, 1 - turn % 2);
            while ends[one].is_open() {
                let stamp = ends[one].next();
                ends[one].sent(stamp);
                wires[two].push(stamp);
            }
            for stamp in std::mem::take(&mut wires[two]) {
                ends[two].came(stamp);
                if ends[two].owes() {
                    let word = ends[two].word();
                    ends[two].sent(word);
                    wires[one].push(word);
                }
            }
            while ends[two].is_open() {
                let stamp = ends[two].next();
                ends[two].sent(stamp);
                wires[one].push(stamp);
            }
            assert!(
                wires[one].len() <= UNDER_WAY as usize,
                "{}",
                wires[one].len()
            );
            for stamp in std::mem::take(&mut wires[one]) {
                ends[one].came(stamp);
            }
        }
    }

    // Every frame tells; between two who both send nobody needs a word of its own.
    #[test]
    fn who_sends_tells_by_the_way() {
        let (mut one, mut two) = (Window::default(), Window::default());
        for _ in 0..10 * WINDOW {
            for [from, to] in [[0, 1], [1, 0]] {
                let both = [&mut one, &mut two];
                assert!(both[from].is_open() && !both[from].owes());
                let stamp = both[from].next();
                both[from].sent(stamp);
                assert!(both[to].came(stamp));
            }
        }
    }

    // Two of three frames are lost. Expect: counted when the third comes, which makes room for all.
    #[test]
    fn what_was_lost_is_counted_and_makes_room() {
        let (mut one, mut two) = (Window::default(), Window::default());
        for _ in 0..3 {
            let stamp = one.next();
            one.sent(stamp);
        }
        let last = Stamp {
            number: 3,
            taken: 0,
        };
        assert!(two.came(last));
        assert_eq!(two.missing(), 2);
        one.came(two.word());
        assert_eq!(one.sent, one.taken);
    }
}
