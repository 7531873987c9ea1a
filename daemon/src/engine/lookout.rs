//! How often a sender looks how far the kernel is with its frames.

use portolan_transport::ident::Nanos;

use super::path::MAX_ON_VETH;

/// So many descriptors keep the other end busy for a while, in which nobody looks how far it is: each look takes lines from it that it writes for every frame
/// (the completion ring, its lock), and what is found at once would leave in kicks of a frame or two.
const BUSY_WITH: u32 = MAX_ON_VETH / 2;
/// How long: as long as one receiver needs for so many frames that takes one in 0.8 us, which is less than any took (docs/tuning.md). A frame to send waits
/// no longer for room that there is.
const BUSY_NS: Nanos = 25_000;

/// When to look what the kernel has sent.
#[derive(Debug)]
pub struct Lookout {
    /// With so many outstanding it has enough to do for a while.
    busy_with: u32,
    not_before: Nanos,
}

impl Lookout {
    /// Where at most so many descriptors can be with the kernel: if they are few, each that comes back is needed at once.
    pub fn of(most: u32) -> Self {
        Self {
            busy_with: match most >= MAX_ON_VETH {
                true => BUSY_WITH,
                false => u32::MAX,
            },
            not_before: 0,
        }
    }

    /// Whatever was found before.
    pub fn look_now(&mut self) {
        self.not_before = 0;
    }

    /// Whether to look.
    #[inline]
    pub fn is_time(&self, now: Nanos) -> bool {
        now >= self.not_before
    }

    /// So many descriptors were still with it.
    #[inline]
    pub fn found(&mut self, now: Nanos, outstanding: u32) {
        if outstanding >= self.busy_with {
            self.not_before = now.saturating_add(BUSY_NS);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::path::MAX_STAGED;
    use super::*;

    // Looks that find few descriptors with the kernel, and one that finds many; where there can be no more than that, and where there can be more. Expect: the next
    // look at once; only after a while, or when asked to, unless there can be no more.
    #[test]
    fn who_has_much_to_do_is_left_alone_for_a_while() {
        for (most, is_left_alone) in [
            (MAX_STAGED, false),
            (MAX_ON_VETH - 1, false),
            (MAX_ON_VETH, true),
        ] {
            let mut lookout = Lookout::of(most);
            for few in [0, BUSY_WITH - 1] {
                assert!(lookout.is_time(7));
                lookout.found(7, few);
            }
            assert!(lookout.is_time(7));
            lookout.found(7, BUSY_WITH);
            assert_eq!(lookout.is_time(6 + BUSY_NS), !is_left_alone, "{most}");
            assert!(lookout.is_time(7 + BUSY_NS));
            lookout.look_now();
            assert!(lookout.is_time(7));
        }
    }
}
