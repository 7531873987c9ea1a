//! Long messages at the receiver: which bytes came.
//!
//! Problem: a message of up to 4 GiB − 1 arrives in frames that are lost, doubled and reordered, straight into the application's
//! buffer. RMPP's RTS/CTS (001); transport.md §8.1, §14; wire.md §5; who may send how much of it is in `grants`.
//!
//! Idea: every chunk names its offset, so it is placed where it belongs whatever came before (selective recovery without the copy
//! the papers feared); a short sorted list of ranges remembers what matched its checksum.
//!
//! Rejected: a bitmap of packets (their size is the sender's, and changes with the path); RMPP's restart at sequence 1.
//!
//! Invariants: ranges are sorted, disjoint and do not touch; a counted range is never written again; received ≤ granted ≤ total.

use crate::ident::{BufferId, Nanos, Priority};
use crate::policy::Policy;
use crate::wire::chunk::{MAX_RANGES, Range};

/// Ranges remembered per message; a chunk that would need one more is dropped.
const RANGES_MAX: usize = 32;

/// The list is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RangesFull;

/// A bounded set of bytes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RangeSet {
    ranges: [Range; RANGES_MAX],
    len: usize,
}

impl RangeSet {
    fn get(&self) -> &[Range] {
        &self.ranges[..self.len]
    }

    /// The first part of `range` that is not in the set.
    pub(super) fn first_gap(&self, range: Range) -> Option<Range> {
        let mut from = range.from;
        for have in self.get() {
            if have.from > from {
                return (from < range.to).then(|| Range {
                    from,
                    to: range.to.min(have.from),
                });
            }
            from = from.max(have.to);
        }
        (from < range.to).then_some(Range { from, to: range.to })
    }

    /// Whether [`RangeSet::insert`] would succeed.
    pub(super) fn has_room(&self, range: Range) -> bool {
        let touches = |have: &Range| have.from <= range.to && range.from <= have.to;
        self.len < RANGES_MAX || self.get().iter().any(touches)
    }

    /// Adds a range that is not in the set.
    pub(super) fn insert(&mut self, range: Range) -> Result<(), RangesFull> {
        let at = self
            .get()
            .iter()
            .take_while(|have| have.to < range.from)
            .count();
        let mut merged = range;
        let mut end = at;
        while let Some(have) = self.get().get(end)
            && have.from <= merged.to
        {
            merged.from = merged.from.min(have.from);
            merged.to = merged.to.max(have.to);
            end += 1;
        }
        if end == at {
            if self.len == RANGES_MAX {
                return Err(RangesFull);
            }
            self.ranges.copy_within(at..self.len, at + 1);
            self.len += 1;
        } else {
            self.ranges.copy_within(end..self.len, at + 1);
            self.len -= end - at - 1;
        }
        self.ranges[at] = merged;
        Ok(())
    }

    /// One past the last byte of the set.
    pub(super) fn end(&self) -> u32 {
        self.get().last().map_or(0, |range| range.to)
    }

    /// The first holes below `limit`.
    pub(super) fn missing(&self, limit: u32) -> ([Range; MAX_RANGES], u8) {
        let (mut holes, mut count) = ([Range::default(); MAX_RANGES], 0);
        let mut from = 0;
        while count < MAX_RANGES
            && let Some(hole) = self.first_gap(Range { from, to: limit })
        {
            holes[count] = hole;
            count += 1;
            from = hole.to;
        }
        (holes, count as u8)
    }
}

/// A long message being placed.
#[derive(Clone, Copy, Debug)]
pub(super) struct LongMessage {
    /// The stream's slot.
    pub stream: u32,
    pub number: u32,
    pub buffer: BufferId,
    pub priority: Priority,
    pub total: u32,
    /// Bytes whose checksum matched.
    pub received: u32,
    pub ranges: RangeSet,
    /// Bytes below this may be sent.
    pub granted: u32,
    /// Those below this may be sent on credit, unasked.
    pub unasked: u32,
    /// A CTS goes out with the next frame; `true` inside asks for all that is missing below `granted`.
    pub cts: Option<bool>,
    /// The next CTS names the holes below.
    pub report: u32,
    /// When missing bytes were last asked for, or first seen missing.
    pub asked_at: Option<Nanos>,
    /// One past the highest byte received then: holes below are old.
    pub seen: u32,
    /// Order of acceptance.
    pub age: u64,
    /// When bytes of it came last, or more was granted.
    pub heard_at: Nanos,
    /// It was granted and said nothing for so long that others have what it was granted.
    pub silent: bool,
}

impl LongMessage {
    pub(super) fn is_complete(&self) -> bool {
        self.received == self.total
    }

    /// The first bytes come without a grant.
    pub(super) fn expect_unasked(&mut self, policy: &Policy) {
        self.unasked = policy.unasked().min(self.total);
        self.granted = self.granted.max(self.unasked);
    }

    /// Bytes under way that count: not those that credit pays for.
    pub(super) fn counted(&self) -> u64 {
        match self.silent {
            true => 0,
            false => u64::from(self.granted - self.received.max(self.unasked).min(self.granted)),
        }
    }

    /// Whether it should get more: less than half a grant is under way.
    pub(super) fn is_hungry(&self, policy: &Policy) -> bool {
        let under_way = self.granted - self.received;
        self.granted < self.total && under_way <= policy.grant_bytes / 2 && !self.silent
    }

    /// How much more; at least a byte if it is hungry.
    pub(super) fn wanted(&self, policy: &Policy) -> u64 {
        let more = policy
            .grant_bytes
            .saturating_sub(self.granted - self.received);
        u64::from(more.max(1).min(self.total - self.granted))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(from: u32, to: u32) -> Range {
        Range { from, to }
    }

    #[test]
    fn ranges_merge_and_show_their_holes() {
        let mut set = RangeSet::default();
        for (from, to) in [(10, 20), (30, 40), (50, 60)] {
            set.insert(range(from, to)).unwrap();
        }
        assert_eq!(set.first_gap(range(12, 35)), Some(range(20, 30)));
        assert_eq!(set.first_gap(range(30, 40)), None);
        assert_eq!(
            &set.missing(60).0[..3],
            &[range(0, 10), range(20, 30), range(40, 50)]
        );
        set.insert(range(20, 30)).unwrap(); // closes the hole between two
        assert_eq!(set.len, 2);
        set.insert(range(0, 10)).unwrap();
        set.insert(range(40, 50)).unwrap();
        assert_eq!((set.len, set.end(), set.missing(60).1), (1, 60, 0));
    }

    #[test]
    fn a_full_list_still_merges() {
        let mut set = RangeSet::default();
        for i in 0..RANGES_MAX as u32 {
            set.insert(range(i * 10, i * 10 + 5)).unwrap();
        }
        assert_eq!(set.insert(range(1_000, 1_001)), Err(RangesFull));
        set.insert(range(5, 10)).unwrap();
        set.insert(range(1_000, 1_001)).unwrap();
    }
}
