//! The way toward one node: a buffer, a link of some rate behind it, and a distance.
//!
//! Knows neither clocks nor sockets; frames are whatever its user calls so. A frame is admitted ([`Line::enter`]) or handed
//! back because the buffer is full, and comes out ([`Line::leave`]) when it has been sent at the link's rate and has
//! travelled for the delay. Frames come out in the order they went in, but for those that are late: they wait aside until
//! so many others have overtaken them, or their patience ends, and only then queue for the link.

use std::collections::VecDeque;

use portolan_testbed::{Impairment, LineCounters};

use crate::fates::{Fate, Fates};

const NS_PER_S: u128 = 1_000_000_000;

/// The way toward one node.
#[derive(Debug)]
pub struct Line<F> {
    toward: u16,
    impairment: Impairment,
    fates: Fates,
    /// Whom it is their turn to leave, each with the time; times never fall.
    travelling: VecDeque<(u64, F)>,
    late: VecDeque<Late<F>>,
    /// When the link has sent all that was admitted, in nanoseconds.
    link_free_at: u64,
    /// What became of its frames.
    pub counters: LineCounters,
}

#[derive(Debug)]
struct Late<F> {
    frame: F,
    bytes: usize,
    /// Frames that have yet to overtake it.
    behind: u32,
    /// When it goes on anyway.
    until: u64,
}

impl<F> Line<F> {
    pub fn new(toward: u16, impairment: &Impairment) -> Self {
        Self {
            toward,
            impairment: impairment.clone(),
            fates: Fates::new(impairment, toward),
            travelling: VecDeque::new(),
            late: VecDeque::new(),
            link_free_at: 0,
            counters: LineCounters::default(),
        }
    }

    /// From now on this happens; frames are numbered from 0 again. Those under way arrive as they were to.
    pub fn set(&mut self, impairment: &Impairment) {
        self.impairment = impairment.clone();
        self.fates = Fates::new(impairment, self.toward);
    }

    pub fn cut(&mut self, cut: bool) {
        self.impairment.cut = cut;
    }

    /// A frame comes: what happens to it, counted. `None`: it goes no further.
    pub fn offer(&mut self) -> Option<Fate> {
        self.counters.offered += 1;
        if self.impairment.cut {
            self.counters.cut += 1;
            return None;
        }
        let fate = self.fates.next();
        if fate.lost {
            self.counters.lost += 1;
            return None;
        }
        self.counters.corrupted += u64::from(fate.corrupt.is_some());
        Some(fate)
    }

    /// Admits a frame of so many bytes, or hands it back: there is no room before the link.
    pub fn enter(&mut self, now: u64, frame: F, bytes: usize, late: bool) -> Result<(), F> {
        if self.impairment.rate_bps > 0
            && self.waiting_bytes(now) + bytes as u64 > self.impairment.buffer_bytes
        {
            self.counters.overflowed += 1;
            return Err(frame);
        }
        if late {
            self.counters.reordered += 1;
            self.late.push_back(Late {
                frame,
                bytes,
                behind: self.impairment.reorder_frames,
                until: now + u64::from(self.impairment.reorder_us) * 1000,
            });
        } else {
            self.depart(now, frame, bytes);
            for late in &mut self.late {
                late.behind = late.behind.saturating_sub(1);
            }
        }
        self.release(now);
        Ok(())
    }

    /// The next frame that has arrived by now.
    pub fn leave(&mut self, now: u64) -> Option<F> {
        self.release(now);
        let (due, _) = self.travelling.front()?;
        if *due > now {
            return None;
        }
        self.travelling.pop_front().map(|(_, frame)| frame)
    }

    /// Puts a frame back that could not be handed on: it leaves first.
    pub fn put_back(&mut self, frame: F) {
        self.travelling.push_front((0, frame));
    }

    /// When there is something to do next, in the time of `now`.
    pub fn due(&self) -> Option<u64> {
        let travelling = self.travelling.front().map(|(due, _)| *due);
        let late = self.late.iter().map(|late| late.until).min();
        travelling.into_iter().chain(late).min()
    }

    /// Late frames whose wait is over go on, in their order.
    fn release(&mut self, now: u64) {
        let mut at = 0;
        while let Some(late) = self.late.get(at) {
            if late.behind > 0 && late.until > now {
                at += 1;
            } else if let Some(late) = self.late.remove(at) {
                self.depart(now, late.frame, late.bytes);
            }
        }
    }

    fn depart(&mut self, now: u64, frame: F, bytes: usize) {
        let sending = match self.impairment.rate_bps {
            0 => 0,
            rate => (bytes as u128 * 8 * NS_PER_S).div_ceil(u128::from(rate)) as u64,
        };
        self.link_free_at = self.link_free_at.max(now) + sending;
        let due = self.link_free_at + u64::from(self.impairment.delay_us) * 1000;
        // A delay that was shortened meanwhile lets nobody overtake.
        let due = due.max(self.travelling.back().map_or(0, |(due, _)| *due));
        self.travelling.push_back((due, frame));
    }

    /// Bytes admitted that the link has not sent yet.
    fn waiting_bytes(&self, now: u64) -> u64 {
        let wait = u128::from(self.link_free_at.saturating_sub(now));
        let sent_later = wait * u128::from(self.impairment.rate_bps) / (8 * NS_PER_S);
        let late: usize = self.late.iter().map(|late| late.bytes).sum();
        sent_later as u64 + late as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const US: u64 = 1000;

    fn line(impairment: Impairment) -> Line<u32> {
        Line::new(2, &impairment)
    }

    fn leaving(line: &mut Line<u32>, now: u64) -> Vec<u32> {
        std::iter::from_fn(|| line.leave(now)).collect()
    }

    #[test]
    fn a_plain_line_hands_on_at_once_in_order() {
        let mut line = line(Impairment::default());
        for frame in 0..5 {
            line.enter(10, frame, 1500, false).unwrap();
        }
        assert_eq!(line.due(), Some(10));
        assert_eq!(leaving(&mut line, 10), [0, 1, 2, 3, 4]);
        assert_eq!(line.due(), None);
    }

    #[test]
    fn a_delay_is_kept_to_the_nanosecond_and_never_reorders() {
        let delayed = |delay_us| Impairment {
            delay_us,
            ..Impairment::default()
        };
        let mut line = line(delayed(50));
        line.enter(0, 1, 64, false).unwrap();
        assert!(leaving(&mut line, 50 * US - 1).is_empty());
        // The way becomes shorter: the next one still comes behind.
        line.set(&delayed(0));
        line.enter(10, 2, 64, false).unwrap();
        assert!(leaving(&mut line, 50 * US - 1).is_empty());
        assert_eq!(leaving(&mut line, 50 * US), [1, 2]);
    }

    #[test]
    fn a_rate_spaces_frames_and_its_buffer_is_finite() {
        // 1 Gbit/s: 1250 bytes take 10 µs.
        let mut line = line(Impairment {
            rate_bps: 1_000_000_000,
            buffer_bytes: 5000,
            ..Impairment::default()
        });
        let admitted = (0..10).filter(|frame| line.enter(0, *frame, 1250, false).is_ok());
        assert_eq!(admitted.count(), 4);
        assert_eq!(line.counters.overflowed, 6);
        assert!(leaving(&mut line, 10 * US - 1).is_empty());
        assert_eq!(leaving(&mut line, 10 * US), [0]);
        assert_eq!(leaving(&mut line, 30 * US), [1, 2]);
        // Two have been sent and a half: there is room for two more.
        assert!(line.enter(25 * US, 20, 1250, false).is_ok());
        assert!(line.enter(25 * US, 21, 1250, false).is_ok());
        assert!(line.enter(25 * US, 22, 1250, false).is_err());
        assert_eq!(leaving(&mut line, 60 * US), [3, 20, 21]);
    }

    #[test]
    fn a_late_frame_is_overtaken_by_so_many_or_waits_so_long() {
        let impairment = Impairment {
            reorder_frames: 2,
            reorder_us: 100,
            ..Impairment::default()
        };
        let mut line = line(impairment);
        line.enter(0, 1, 64, true).unwrap();
        line.enter(0, 2, 64, false).unwrap();
        assert_eq!(leaving(&mut line, 0), [2]);
        line.enter(0, 3, 64, false).unwrap();
        assert_eq!(leaving(&mut line, 0), [3, 1]);
        // Nobody comes any more.
        line.enter(0, 4, 64, true).unwrap();
        assert_eq!(line.due(), Some(100 * US));
        assert!(leaving(&mut line, 100 * US - 1).is_empty());
        assert_eq!(leaving(&mut line, 100 * US), [4]);
        assert_eq!(line.counters.reordered, 2);
    }

    #[test]
    fn a_cut_line_carries_nothing_until_it_is_healed() {
        let mut line = line(Impairment::default());
        line.cut(true);
        assert_eq!(line.offer(), None);
        line.cut(false);
        assert_eq!(line.offer(), Some(Fate::default()));
        assert_eq!((line.counters.offered, line.counters.cut), (2, 1));
    }
}
