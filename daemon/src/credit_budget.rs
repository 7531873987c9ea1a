//! The sum that keeps the receive ring from overflowing (transport.md §9.1, §9.2).
//!
//! Every active peer node may at any time fill its eager credit and its control reserve unasked, and long messages fill what was
//! granted. All of it is counted in UMEM buffers and must fit into the receive share, or the configuration is refused. Where the
//! policy bounds the sum of all eager credit, peers beyond it have none and only the bound counts. An engine that goes round grants more than the sum has (`engine/busy_poll/`): what
//! it has no buffer for yet waits in the veth's queue. Once it ends, until that is used up, what overflows is lost as on any wire.
//!
//! The same sum, for the peers there are, is how deep an engine keeps its fill ring, without the grants while there are none (`engine/fill_depth.rs`).

use portolan_transport::policy::Policy;

/// Buffers per peer for frames that carry no data: acknowledgements, credits, handshakes.
const CONTROL_BUFFERS: u64 = 8;
/// Bytes of a frame that one received UMEM buffer holds.
const BUFFER_BYTES: u64 = 3840;
const ETHERNET_HEADER: u64 = 14;

/// The sum, term by term.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CreditBudget {
    /// Active peers.
    pub peers: u64,
    /// Buffers each may fill unasked.
    pub eager: u64,
    /// Bound on those of all peers together; 0: none.
    pub eager_budget: u64,
    /// Buffers each may fill with control frames.
    pub control: u64,
    /// Buffers granted to long messages.
    pub grants: u64,
    /// Receive buffers there are.
    pub receive: u64,
}

impl CreditBudget {
    /// The sum for a policy.
    pub fn new(policy: &Policy, peers: usize, mtu: u16, receive: u32) -> Self {
        let mtu = u64::from(mtu.max(256));
        let frames = u64::from(policy.grant_budget_bytes).div_ceil(mtu);
        Self {
            peers: peers as u64,
            eager: u64::from(policy.eager_buffers),
            eager_budget: u64::from(policy.eager_budget_buffers),
            control: CONTROL_BUFFERS,
            grants: frames * (mtu + ETHERNET_HEADER).div_ceil(BUFFER_BYTES),
            receive: u64::from(receive),
        }
    }

    /// Buffers that may be filled at once.
    pub fn needed(&self) -> u64 {
        self.unasked() + self.grants
    }

    /// Of these, the ones that need no grant.
    pub fn unasked(&self) -> u64 {
        let unbounded = self.peers * self.eager;
        let eager = match self.eager_budget {
            0 => unbounded,
            budget => unbounded.min(budget),
        };
        eager + self.peers * self.control
    }

    /// Does it fit?
    pub fn fits(&self) -> bool {
        self.needed() <= self.receive
    }
}

impl std::fmt::Display for CreditBudget {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            peers,
            eager,
            eager_budget,
            control,
            grants,
            receive,
        } = self;
        let needed = self.needed();
        if (1..peers * eager).contains(eager_budget) {
            write!(
                f,
                "{eager_budget} eager of all peers + {peers} peers x {control} control"
            )?;
        } else {
            write!(f, "{peers} peers x ({eager} eager + {control} control)")?;
        }
        write!(
            f,
            " + {grants} grants = {needed} of {receive} receive buffers"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sum_at_its_boundary() {
        let policy = Policy {
            eager_buffers: 100,
            grant_budget_bytes: 15_000,
            ..Policy::default()
        };
        // 2 × 108 + 10 = 226.
        let at = |receive| CreditBudget::new(&policy, 2, 1500, receive);
        assert!(at(226).fits());
        assert!(!at(225).fits());
        assert_eq!(
            at(225).to_string(),
            "2 peers x (100 eager + 8 control) + 10 grants = 226 of 225 receive buffers"
        );
        // With a bound on all eager credit: 150 + 2 x 8 + 10 = 176.
        let policy = Policy {
            eager_budget_buffers: 150,
            ..policy
        };
        let at = |receive| CreditBudget::new(&policy, 2, 1500, receive);
        assert!(at(176).fits());
        assert!(!at(175).fits());
        assert_eq!(
            at(175).to_string(),
            "150 eager of all peers + 2 peers x 8 control + 10 grants = 176 of 175 receive buffers"
        );
        assert_eq!(CreditBudget::new(&policy, 1, 1500, 1).needed(), 118);
        // A frame of 9000 bytes takes three buffers.
        assert_eq!(CreditBudget::new(&policy, 1, 9000, 999).grants, 6);
    }
}
