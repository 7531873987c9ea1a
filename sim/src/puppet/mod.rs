//! A hand-driven peer: one real [`Endpoint`] over a [`TestHost`], and a test that plays the engine at the other end, frame by frame.
//!
//! Problem: the papers' tables and figures, and the specification, speak of single chunks: this one arrives, that one is answered,
//! and nothing else happens. A cluster of two endpoints never says anything wrong, late or twice on demand.
//!
//! Idea: [`Puppet::says`] puts chunks into a frame, gives it to the endpoint, lets it answer, and returns *everything* that
//! happened as lines of text, which the test compares with what must happen: answers in capitals (`ACK 1`), what the host did
//! (`delivers 0`, `completes 2 Delivered`), why the frame was dropped (`dropped: WrongIncarnation`) and which counters moved
//! (`duplicates +1`). So *nothing else happened* is part of every comparison. Numbers are shown relative to the first of their
//! stream, epochs relative to the first epoch, because all of them start just before they wrap (transport.md §1.2).
//!
//! [`Puppet::transcript`] has both sides' chunks since the last call, for figures that are dialogues.
//!
//! What the host's book promises is kept here too: the puppet's messages have ids and contents, so that a doubled, changed or
//! reordered delivery ends the test, and the puppet counts as having received what it acknowledges. After every step the
//! endpoint's own consistency is checked.
//!
//! Who is who (transport.md §1.1):
//!
//! | who | node | engine | port |
//! |---|---|---|---|
//! | the endpoint | 1 | queue 1 of 2 | [`OURS`], open; [`SHUT`], never open; [`FOREIGN`], of the node's other engine |
//! | the puppet | 2 | queue 0 of 1 | [`THEIRS`] |

#![allow(missing_docs)] // names that say what they do, for tests
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // it is all test

mod say;
mod text;
mod works;

use std::collections::{BTreeMap, BTreeSet};

use portolan_transport::endpoint::{Config, FrameError};
use portolan_transport::host::SendStatus;
use portolan_transport::ident::{Nanos, Peer, PortId, Priority, SendId, StreamKey};
use portolan_transport::policy::{Order, Policy};
use portolan_transport::wire::{FrameHeader, Rows};
use portolan_transport::{Endpoint, Host as _};

use crate::checks;
use crate::harness::book::{Book, SharedBook};
use crate::harness::host::TestHost;
use crate::harness::{US, node};

pub use say::Say;
pub use text::NOTHING;

/// The endpoint's open port.
pub const OURS: u16 = 5;
/// A port of the endpoint's engine that nobody opened.
pub const SHUT: u16 = 7;
/// A port of the other engine of the endpoint's node.
pub const FOREIGN: u16 = 4;
/// The puppet's port.
pub const THEIRS: u16 = 9;
/// The endpoint's incarnation.
pub const OUR_INCARNATION: u64 = 0x0001_0000_0000_0011;
/// The puppet's.
pub const THEIR_INCARNATION: u64 = 0x0002_0000_0000_0022;
/// Number 0 of every stream, in transcripts.
pub const FIRST: u32 = u32::MAX - 1;
/// Epoch 0 of both sides, in transcripts.
pub const EPOCH: u32 = u32::MAX - 3;
/// The endpoint's first engine epoch, and the puppet's.
pub const ENGINE: u32 = u32::MAX - 1;
/// The longest message the endpoint's port takes.
pub const MAX_LEN: u32 = 1 << 20;

/// Counters that say what the other lines say, or only that there was traffic.
const QUIET: [&str; 25] = [
    "frames_received",
    "frames_sent",
    "bytes_received",
    "bytes_sent",
    "chunks_received",
    "chunks_sent",
    "hellos_sent",
    "resets_sent",
    "frames_wrong_incarnation",
    "frames_stale_engine",
    "frames_not_associated",
    "frames_not_for_us",
    "frames_unknown_peer",
    "frames_malformed",
    "sends_accepted",
    "sends_delivered",
    "sends_failed",
    "sends_maybe",
    "messages_delivered",
    "bytes_delivered",
    "nacks_sent",
    "nacks_received",
    "probes_sent",
    "acks_sent",
    "grants_sent",
];

/// A frame the endpoint sent.
#[derive(Clone, Debug)]
pub struct Heard {
    /// Of a bare frame, what that says of one.
    pub header: FrameHeader,
    pub bare: bool,
    pub len: usize,
    /// Its chunks.
    pub lines: Vec<String>,
    /// And their payloads.
    pub payloads: Vec<Vec<u8>>,
}

/// See the module's text.
pub struct Puppet {
    pub now: Nanos,
    pub endpoint: Endpoint,
    pub host: TestHost,
    pub book: SharedBook,
    pub config: Config,
    /// What the puppet's frames say; time stamps and credits are filled in for each.
    pub header: FrameHeader,
    /// The puppet's incarnation in full.
    pub incarnation: u64,
    /// Receive buffers the puppet gives.
    pub credit: u32,
    /// First bytes of a long message that the puppet takes without a grant, in units of 256.
    pub unasked: u8,
    /// What its HELLO says that it reads.
    pub features: u32,
    /// How it writes messages in a row.
    pub rows: Rows,
    /// The wire's part of a round trip: frames take so long to be heard.
    pub rtt: Nanos,
    /// What the puppet echoes instead of the newest time stamp it heard.
    pub echo: Option<u32>,
    /// Priority of the streams the puppet talks about.
    pub priority: Priority,
    /// The epoch of the puppet's stream, and the endpoint's newest.
    pub epoch: u32,
    pub our_epoch: u32,
    /// The endpoint answered on the puppet's stream: START is not needed.
    pub established: bool,
    /// Frames heard since the last step began.
    pub heard: Vec<Heard>,
    newest: (u32, Nanos),
    sent_buffers: u32,
    seen_buffers: u32,
    transcript: Vec<String>,
    counted: BTreeMap<&'static str, u64>,
    /// Ids of the puppet's messages, by number since `FIRST`.
    theirs: Vec<u64>,
    /// Lengths of them that are not the usual.
    lengths: BTreeMap<u32, u32>,
    /// Ids of the endpoint's, in order of their numbers, with their length.
    ours: Vec<(u64, u32, SendId)>,
    /// Which of them the puppet has, and which it never will.
    has: BTreeSet<u32>,
    never: BTreeSet<u32>,
    dead: bool,
}

impl Puppet {
    /// An endpoint with `tokens` receive tokens of [`MAX_LEN`] at [`OURS`], greeted by the puppet.
    pub fn new(policy: Policy, tokens: usize) -> Self {
        let mut puppet = Self::stranger(policy, tokens, 1458);
        puppet.greets();
        puppet
    }

    /// The same, with frames up to `max_frame` and nobody greeted yet.
    pub fn stranger(policy: Policy, tokens: usize, max_frame: u16) -> Self {
        policy.validate().expect("a policy that can work");
        let config = Config {
            node: node(1),
            queue: 1,
            queues: 2,
            incarnation: OUR_INCARNATION,
            engine_epoch: ENGINE,
            cluster: 0xc1,
            name: "one".into(),
            max_frame,
            max_peers: 8,
            first_number: FIRST,
            policy,
        };
        let now = 7_000 * US;
        let book = Book::shared();
        if policy.order == Order::Arrival {
            let order = checks::order::Order::of_arrival();
            book.borrow_mut().checks.replace(Box::new(order));
        }
        let mut host = TestHost::new(node(1), book.clone(), EPOCH);
        host.open_port(PortId(OURS), MAX_LEN);
        let mut endpoint = Endpoint::new(config.clone(), now);
        endpoint.set_node(now, node(2), max_frame);
        endpoint.port_opened(PortId(OURS));
        let header = FrameHeader {
            src_node: 2,
            dst_node: 1,
            src_queue: 0,
            dst_queue: 1,
            src_incarnation: THEIR_INCARNATION as u32,
            dst_incarnation: OUR_INCARNATION as u32,
            engine_epoch: ENGINE,
            ..FrameHeader::default()
        };
        let mut puppet = Self {
            now,
            endpoint,
            host,
            book,
            config,
            header,
            incarnation: THEIR_INCARNATION,
            credit: policy.eager_buffers,
            unasked: 0,
            features: 0,
            rows: Rows::InFull,
            rtt: US,
            echo: None,
            priority: Priority::Low,
            epoch: EPOCH,
            our_epoch: EPOCH,
            established: false,
            heard: Vec::new(),
            newest: (0, 0),
            sent_buffers: 0,
            seen_buffers: 0,
            transcript: Vec::new(),
            counted: BTreeMap::new(),
            theirs: Vec::new(),
            lengths: BTreeMap::new(),
            ours: Vec::new(),
            has: BTreeSet::new(),
            never: BTreeSet::new(),
            dead: false,
        };
        for _ in 0..tokens {
            puppet.provides(MAX_LEN);
        }
        puppet
    }

    /// HELLO and its answers; afterwards both sides know each other.
    pub fn greets(&mut self) {
        let echo = self.says(self.hello(0));
        assert!(
            echo.iter().any(|line| line.starts_with("HELLO-ACK")),
            "{echo:?}"
        );
        if echo.iter().any(|line| line.starts_with("HELLO ")) {
            self.says(self.hello_ack(OUR_INCARNATION));
        } else {
            self.says(self.hello(OUR_INCARNATION));
        }
        let up = self.endpoint.peers().next().map(|peer| peer.state);
        assert_eq!(up, Some(portolan_transport::endpoint::PeerState::Up));
        self.transcript.clear();
    }

    // ---- steps: each returns everything that happened ----

    /// The puppet sends one frame with this.
    pub fn says(&mut self, say: impl Into<Say>) -> Vec<String> {
        self.says_all(vec![say.into()])
    }

    /// One frame with all of these.
    pub fn says_all(&mut self, says: Vec<Say>) -> Vec<String> {
        let frame = self.frame(&says);
        for say in &says {
            self.transcript.push(format!("> {}", self.text(&say.chunk)));
            self.receives(&say.chunk);
        }
        self.says_bytes(&frame)
    }

    /// A frame as these bytes.
    pub fn says_bytes(&mut self, frame: &[u8]) -> Vec<String> {
        self.now += US;
        self.step(|endpoint, now, host| endpoint.handle_frame(now, &[frame], host))
    }

    /// The application at [`OURS`] sends a message of `len` bytes to [`THEIRS`].
    pub fn sends(&mut self, len: u32) -> Vec<String> {
        self.sends_until(len, Nanos::MAX)
    }

    pub fn sends_until(&mut self, len: u32, deadline: Nanos) -> Vec<String> {
        let route = self.route(true);
        let (id, send) = self.host.post(route, len, deadline);
        self.ours.push((id, len, send));
        self.step(|_, _, _| Ok(()))
    }

    /// It sends several at once.
    pub fn sends_many(&mut self, count: usize, len: u32) -> Vec<String> {
        for _ in 0..count {
            let (id, send) = self.host.post(self.route(true), len, Nanos::MAX);
            self.ours.push((id, len, send));
        }
        self.step(|_, _, _| Ok(()))
    }

    /// The application gives its send of this number up.
    pub fn cancels(&mut self, number: u32) -> Vec<String> {
        let (_, _, send) = self.ours[number as usize];
        let key = self.key();
        self.step(|endpoint, now, _| {
            endpoint.cancel(now, send, key);
            Ok(())
        })
    }

    /// The application provides a receive token.
    pub fn provides(&mut self, len: u32) -> Vec<String> {
        let priority = self.priority;
        self.host.provide(PortId(OURS), priority, len);
        self.step(|endpoint, now, _| {
            endpoint.buffer_provided(now, PortId(OURS));
            Ok(())
        })
    }

    /// The application's port closes.
    pub fn closes_port(&mut self) -> Vec<String> {
        self.host.close_port(PortId(OURS));
        self.step(|endpoint, now, host| {
            endpoint.port_closed(now, PortId(OURS), host);
            Ok(())
        })
    }

    /// After a failed send, the application goes on.
    pub fn resumes(&mut self) -> Vec<String> {
        let key = self.key();
        self.step(|endpoint, now, _| {
            endpoint.resume_sending(now, key);
            Ok(())
        })
    }

    /// Time passes; timers fire.
    pub fn waits(&mut self, time: Nanos) -> Vec<String> {
        let end = self.now + time;
        self.heard.clear();
        let mut lines = self.settle(Ok(()));
        while let Some(due) = self.endpoint.poll_timeout().filter(|due| *due <= end) {
            self.now = due.max(self.now + 1);
            let now = self.now;
            let result = self.run(|endpoint, _, host| {
                endpoint.handle_timeout(now, host);
                Ok(())
            });
            lines.extend(self.settle(result));
        }
        self.now = self.now.max(end);
        lines
    }

    /// The engine dies now, with everything volatile.
    pub fn dies(&mut self) {
        self.dead = true;
        self.transcript.push("  the engine dies".into());
    }

    /// The engine will die at its n-th store from now.
    pub fn dies_at(&mut self, step: u64) {
        self.host.die_after = Some(step);
    }

    pub fn is_dead(&self) -> bool {
        self.dead
    }

    /// Another engine takes over from the ledger.
    pub fn is_restored(&mut self) -> Vec<String> {
        assert!(std::mem::take(&mut self.dead), "nobody died");
        self.host.engine_died();
        self.config.engine_epoch = self.config.engine_epoch.wrapping_add(1);
        self.endpoint = Endpoint::restore(self.config.clone(), self.now, &self.host.durable());
        self.counted.clear();
        self.transcript.push("  another engine takes over".into());
        let max_frame = self.config.max_frame;
        let open = self.host.open_ports();
        let closed = self.host.closed_ports();
        self.step(|endpoint, now, host| {
            endpoint.set_node(now, node(2), max_frame);
            open.into_iter().for_each(|port| endpoint.port_opened(port));
            for port in closed {
                endpoint.port_closed(now, port, host);
            }
            Ok(())
        })
    }

    /// Any other call.
    pub fn step(
        &mut self,
        call: impl FnOnce(&mut Endpoint, Nanos, &mut TestHost) -> Result<(), FrameError>,
    ) -> Vec<String> {
        self.heard.clear();
        let result = self.run(call);
        self.settle(result)
    }

    // ---- what is known ----

    /// Both sides' chunks since the last call, `>` the puppet's, `<` the endpoint's.
    pub fn transcript(&mut self) -> Vec<String> {
        std::mem::take(&mut self.transcript)
    }

    /// Messages committed to the application at [`OURS`].
    pub fn delivered(&self) -> usize {
        let book = self.book.borrow();
        let is_in = |id: &&u64| book.message(**id).commits > 0;
        self.theirs.iter().filter(is_in).count()
    }

    /// Status of the endpoint's send of this number.
    pub fn status(&self, number: u32) -> Option<SendStatus> {
        self.book.borrow().status(self.ours[number as usize].0)
    }

    /// A counter's value.
    pub fn counter(&self, name: &str) -> u64 {
        let found = self.endpoint.counters().iter().find(|c| c.0 == name);
        found.unwrap_or_else(|| panic!("no counter {name}")).2
    }

    /// The stream from [`OURS`] to [`THEIRS`], as the endpoint's application names it.
    pub fn key(&self) -> StreamKey {
        StreamKey {
            local: PortId(OURS),
            node: node(2),
            remote: PortId(THEIRS),
            priority: self.priority,
        }
    }

    /// The newest time stamp the puppet heard.
    pub fn last_heard(&self) -> Option<u32> {
        Some(self.newest.0)
    }

    /// The puppet as a peer.
    pub fn peer(&self) -> Peer {
        Peer {
            node: node(2),
            queue: 0,
        }
    }

    /// The durable epoch floor of the puppet's streams.
    pub fn floor(&self) -> u32 {
        self.host
            .load_peer(self.peer())
            .map_or(0, |(_, floor)| floor)
    }
}
