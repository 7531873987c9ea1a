//! The papers' policies, by name.

use super::{Ack, AckRule, Congestion, OnTimeout, Order, Policy, Recovery};

/// A named policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Profile {
    /// ParaStation2 (000): window 8, every packet acknowledged by itself and at once, NACK for each out of order, go back N.
    ParaStation2,
    /// RMPP (001): the sender alone recovers, by timer and whole message; messages commit in order of arrival.
    Rmpp,
    /// GAMMA (002): a credit of 32 frames that one acknowledgement restores. The paper leaves recovery to the user; here it is Tam's.
    Gamma,
    /// Tam's go-back-N with Stall (003 §4.2), window 64: at least the bandwidth-delay product.
    GbnStall,
    /// FTGM over GM (004): go-back-N per port pair, acknowledged at once after the commit.
    Ftgm,
    /// Ours.
    Default,
}

impl Profile {
    /// All of them.
    pub const ALL: [Self; 6] = [
        Self::ParaStation2,
        Self::Rmpp,
        Self::Gamma,
        Self::GbnStall,
        Self::Ftgm,
        Self::Default,
    ];

    /// As the configuration writes it.
    pub fn name(self) -> &'static str {
        match self {
            Self::ParaStation2 => "parastation2",
            Self::Rmpp => "rmpp",
            Self::Gamma => "gamma",
            Self::GbnStall => "gbn-stall",
            Self::Ftgm => "ftgm",
            Self::Default => "default",
        }
    }

    /// The profile of this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|profile| profile.name() == name)
    }

    /// What the paper describes; its timers, windows and budgets where it names none are the default's.
    pub fn policy(self) -> Policy {
        // What the papers have in common: a timer that sends data again, frames of their own, no congestion response.
        let paper = Policy {
            on_timeout: OnTimeout::Resend,
            coalesce: false,
            congestion: Congestion::None,
            unasked_bytes: 0,
            ..DEFAULT
        };
        match self {
            Self::ParaStation2 => Policy {
                window_messages: 8,
                recovery: Recovery::GoBackN { stall: false },
                ack: Ack::Immediate,
                ack_rule: AckRule::Exact,
                ..paper
            },
            Self::Rmpp => Policy {
                window_messages: 16,
                recovery: Recovery::WholeMessage,
                ack: Ack::Immediate,
                order: Order::Arrival,
                // 16 packets (MAX_DATA_PKTS) of the longest frame a standard path carries.
                grant_bytes: 16 * 1408,
                ..paper
            },
            Self::Gamma => Policy {
                window_messages: 32,
                recovery: Recovery::GoBackN { stall: true },
                ack: Ack::Delayed { delay_us: 50 },
                eager_buffers: 32,
                ..paper
            },
            Self::GbnStall => Policy {
                window_messages: 64,
                recovery: Recovery::GoBackN { stall: true },
                ack: Ack::Delayed { delay_us: 50 },
                ..paper
            },
            Self::Ftgm => Policy {
                window_messages: 64,
                recovery: Recovery::GoBackN { stall: false },
                ack: Ack::Immediate,
                ..paper
            },
            Self::Default => DEFAULT,
        }
    }
}

const DEFAULT: Policy = Policy {
    window_messages: 512,
    recovery: Recovery::Selective,
    on_timeout: OnTimeout::Probe,
    ack: Ack::Delayed { delay_us: 50 },
    ack_rule: AckRule::Cumulative,
    order: Order::Number,
    coalesce: true,
    eager_buffers: 256,
    eager_budget_buffers: 0,
    unasked_bytes: 16 * 1024,
    grant_bytes: 256 * 1024,
    grant_budget_bytes: 512 * 1024,
    crowd: 64,
    rto_min_us: 2_000,
    rto_max_us: 200_000,
    congestion: Congestion::DelayAndLoss { target_us: 200 },
    unreachable_after_ms: 5_000,
    stream_idle_ms: 60_000,
    peer_idle_ms: 300_000,
};
