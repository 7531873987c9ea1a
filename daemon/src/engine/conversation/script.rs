//! What happens in a conversation, deaths aside. Each script leads through paths that others do not reach.

use portolan_abi::port::READS_ENDS;
use portolan_transport::ident::Nanos;
use portolan_transport::policy::{Order, Policy, Profile};

use super::application::Message;
use super::memory::TOKENS;

const MS: Nanos = 1_000_000;

/// A conversation.
#[derive(Clone, Debug)]
pub struct Script {
    pub name: &'static str,
    pub policy: Policy,
    pub to_peer: Vec<Message>,
    pub to_subject: Vec<Message>,
    /// The subject's application gives commands too.
    pub commands: bool,
    /// Which events its library reads.
    pub reads: u32,
    /// Receive tokens it keeps out, and from when on.
    pub buffers: u32,
    pub buffers_from: Nanos,
    /// Frames lost on their way to and from the subject, by number.
    pub lose_in: Vec<usize>,
    pub lose_out: Vec<usize>,
    /// Every frame to the subject comes again, so much later.
    pub late_in: Vec<Nanos>,
    /// When the subject's port is closed, and opened again.
    pub close_at: Option<Nanos>,
    pub reopen_at: Option<Nanos>,
    /// Sends may end otherwise than Delivered.
    pub may_fail: bool,
    /// Messages may commit out of the order of their numbers.
    pub any_order: bool,
}

/// A message at low priority, sent as soon as there is room.
fn low(len: u32) -> Message {
    Message {
        len,
        priority: 0,
        at: 0,
        timeout_us: 0,
    }
}

fn high(len: u32) -> Message {
    Message {
        priority: 1,
        ..low(len)
    }
}

fn at(at_ms: u64, message: Message) -> Message {
    Message {
        at: at_ms * MS,
        ..message
    }
}

impl Script {
    fn of(name: &'static str, profile: Profile) -> Self {
        let policy = Policy {
            // Long enough that no script of some milliseconds meets them by accident.
            unreachable_after_ms: 5_000,
            stream_idle_ms: 60_000,
            ..profile.policy()
        };
        Self {
            name,
            policy,
            to_peer: Vec::new(),
            to_subject: Vec::new(),
            commands: false,
            // Not of every version: the end of each send has an event of its own.
            reads: match profile {
                Profile::Default => READS_ENDS,
                _ => 0,
            },
            buffers: TOKENS,
            buffers_from: 0,
            lose_in: Vec::new(),
            lose_out: Vec::new(),
            late_in: Vec::new(),
            close_at: None,
            reopen_at: None,
            may_fail: false,
            any_order: policy.order == Order::Arrival,
        }
    }

    /// A message each way: the shortest that has every step of accept, commit and complete in it.
    pub fn short(profile: Profile) -> Self {
        Self {
            to_peer: vec![low(64)],
            to_subject: vec![low(64)],
            ..Self::of("short", profile)
        }
    }

    /// Sends of all lengths, at both priorities, with commands between them.
    pub fn sending(profile: Profile) -> Self {
        Self {
            to_peer: [0, 8, 100, 2048, 64, 1, 2000]
                .map(low)
                .into_iter()
                .chain([high(8)])
                .collect(),
            commands: true,
            ..Self::of("sending", profile)
        }
    }

    /// Receives of all lengths, at both priorities; a frame is lost on the way.
    pub fn receiving(profile: Profile) -> Self {
        Self {
            to_subject: [0, 8, 100, 2048, 64, 1, 2000]
                .map(low)
                .into_iter()
                .chain([high(8)])
                .collect(),
            lose_in: vec![5],
            ..Self::of("receiving", profile)
        }
    }

    /// A long message loses a frame while short ones after it arrive: where the order is that of arrival, they commit ahead of the
    /// base.
    pub fn ahead() -> Self {
        Self {
            to_subject: vec![low(64), low(2048), low(8), low(16)],
            lose_in: vec![5, 6],
            ..Self::of("ahead", Profile::Rmpp)
        }
    }

    /// Buffers come late and are few: messages are turned away, and called again when a token and with it credit returns.
    pub fn credit(profile: Profile) -> Self {
        Self {
            to_subject: vec![low(8), low(500), low(8), low(2048), low(8), low(8)],
            buffers: 2,
            buffers_from: 4 * MS,
            ..Self::of("credit", profile)
        }
    }

    /// A message is given up because there is no buffer for it; its number is committed without it.
    pub fn given_up(profile: Profile) -> Self {
        let hurried = Message {
            timeout_us: 3_000,
            ..low(8)
        };
        Self {
            to_subject: vec![hurried, hurried, at(30, low(8)), at(30, low(100))],
            buffers_from: 25 * MS,
            may_fail: true,
            ..Self::of("given up", profile)
        }
    }

    /// Streams fall idle, are closed, and opened again under a new epoch; every frame comes again many
    /// times, before and after that.
    pub fn idle(profile: Profile) -> Self {
        let mut script = Self::of("idle", profile);
        script.policy.stream_idle_ms = 10;
        Self {
            to_peer: vec![low(8), at(60, low(8)), at(60, low(100))],
            to_subject: vec![low(8), at(60, low(8)), at(60, low(100))],
            // Also at once after a death that left the epoch half forgotten, before its sender repeats that it is closed.
            late_in: (5..40).map(|late| late * MS / 2).chain([35 * MS]).collect(),
            ..script
        }
    }

    /// The subject's port is closed under way and opened again.
    pub fn closing(profile: Profile) -> Self {
        Self {
            to_peer: vec![
                low(8),
                low(2048),
                at(2, low(8)),
                at(2, low(100)),
                at(30, low(8)),
            ],
            to_subject: vec![
                low(8),
                low(2048),
                at(2, low(8)),
                at(2, low(100)),
                at(30, low(8)),
            ],
            close_at: Some(2 * MS + MS / 10),
            reopen_at: Some(10 * MS),
            may_fail: true,
            ..Self::of("closing", profile)
        }
    }

    /// All of them.
    pub fn all() -> Vec<Self> {
        let mut all = vec![Self::ahead()];
        for profile in [Profile::Default, Profile::Gamma, Profile::ParaStation2] {
            all.push(Self::credit(profile));
        }
        for profile in [Profile::Default, Profile::Rmpp] {
            all.extend([
                Self::sending(profile),
                Self::receiving(profile),
                Self::given_up(profile),
                Self::idle(profile),
                Self::closing(profile),
            ]);
        }
        all
    }
}
