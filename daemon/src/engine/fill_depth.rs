//! How many buffers the kernel holds to receive into.
//!
//! Problem: the kernel uses what is in the fill ring in turn, so all of it wanders through the caches of both cores, each buffer's lines fetched from far away when it
//! is written and when it is read. So no more should be there than peers may fill before they hear from us again. But most of that sum
//! (`crate::credit_budget`) is what is granted to long messages, and mostly there are none.
//!
//! Idea: buffers for grants are there while a long message is being placed, and a while after, as what was sent twice may still come. One stands in the transport's table
//! from its request on, and the depth is looked at before frames are written, so before the grant leaves. An engine that takes over knows nothing of what its predecessor
//! granted, and begins as if there was one. Who uses a grant later than that, for a message that is no more, and all its credit besides, may lose frames, as on any wire.

use portolan_transport::ident::Nanos;

use crate::credit_budget::CreditBudget;

/// Receive buffers for the handshakes of peers to come, and for acknowledgements beyond what is counted for each.
const FOR_STRANGERS: u64 = 32;
/// What was sent twice comes within a timeout of its sender's, the shortest of which are 2 ms, and the usual ones not much longer. A new depth costs a few microseconds, so not each message
/// has one.
const AFTER_LONG_NS: Nanos = 50_000_000;

/// What the fill ring is to hold.
#[derive(Debug)]
pub struct FillDepth {
    /// For so many peers, the most there were; `None`: not said yet.
    peers: Option<usize>,
    grants: bool,
    grants_until: Nanos,
}

impl FillDepth {
    /// Of an engine that takes over now.
    pub fn new(now: Nanos) -> Self {
        Self {
            peers: None,
            grants: true,
            grants_until: now.saturating_add(AFTER_LONG_NS),
        }
    }

    /// What the ring is to hold from now on, if it is something else: for so many known peers, and perhaps a long message that is being placed.
    #[inline]
    pub fn look(
        &mut self,
        now: Nanos,
        peers: usize,
        long: bool,
        budget: impl FnOnce(usize) -> CreditBudget,
    ) -> Option<u32> {
        if long {
            self.grants_until = now.saturating_add(AFTER_LONG_NS);
        }
        let grants = now < self.grants_until;
        // Who is forgotten may still have its credit: never for fewer than before.
        if grants == self.grants && self.peers.is_some_and(|most| peers <= most) {
            return None;
        }
        let most = self.peers.unwrap_or(0).max(peers);
        (self.peers, self.grants) = (Some(most), grants);
        let budget = budget(most);
        let needed = match grants {
            true => budget.needed(),
            false => budget.unasked(),
        };
        let needed = needed.saturating_add(FOR_STRANGERS);
        Some(u32::try_from(needed).unwrap_or(u32::MAX))
    }
}

#[cfg(test)]
mod tests {
    use portolan_transport::policy::Policy;

    use super::*;

    // The first look of an engine, the second, one after the predecessor's grants; a long message is placed, is whole, for a while and longer; a second peer comes, and goes while there is a
    // long message, then a third. Expect: what is unasked of all peers, and what is granted from the look on that sees the message until a while after the last; nothing said twice, never for fewer peers.
    #[test]
    fn buffers_for_grants_are_there_while_there_are_long_messages() {
        let policy = Policy {
            eager_buffers: 100,
            grant_budget_bytes: 15_000,
            ..Policy::default()
        };
        let mut depth = FillDepth::new(1_000);
        let began = 1_000 + AFTER_LONG_NS;
        let (last, over) = (7 * began, 7 * began + AFTER_LONG_NS);
        let unasked = |peers: u32| 108 * peers + 32;
        for (now, peers, long, expected) in [
            (1_000, 1, false, Some(unasked(1) + 10)),
            (began - 1, 1, false, None),
            (began, 1, false, Some(unasked(1))),
            (2 * began, 1, false, None),
            (3 * began, 1, true, Some(unasked(1) + 10)),
            (last, 1, true, None),
            (over - 1, 1, false, None),
            (over, 1, false, Some(unasked(1))),
            (over + 1, 2, false, Some(unasked(2))),
            (over + 2, 1, true, Some(unasked(2) + 10)),
            (over + 3, 3, false, Some(unasked(3) + 10)),
        ] {
            let budget = |most| CreditBudget::new(&policy, most, 1500, u32::MAX);
            let said = depth.look(now, peers, long, budget);
            assert_eq!(said, expected, "{now}");
        }
    }
}
