//! What applications were promised, written down outside of everything under test.
//!
//! Every message gets an id, carried in its tag, or in its first bytes if its application uses no tags ([`NO_TAG`]); the book knows where it comes
//! from, where it must arrive and with which bytes.
//! Hosts report every commit and every completion to it, and its [`Checks`] end the run at the first broken promise.

use std::cell::RefCell;
use std::rc::Rc;

use portolan_transport::host::SendStatus;
use portolan_transport::ident::{BufferId, Nanos, NodeId, PortId, Priority};

use crate::checks::{Checks, TokenStep};

/// One direction of messages: who sends to whom, at which priority.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Route {
    pub from: (NodeId, PortId),
    pub to: (NodeId, PortId),
    pub priority: Priority,
}

/// A message an application sent.
#[derive(Clone, Debug)]
pub struct Message {
    pub route: Route,
    pub len: u32,
    /// When its send is given up.
    pub deadline: Nanos,
    /// How often it was committed to a receiver.
    pub commits: u32,
    /// How its send ended.
    pub status: Option<SendStatus>,
    /// The sender died with its node: nobody waits for a status any more.
    pub abandoned: bool,
    /// No receiver takes a message of this length.
    pub too_long: bool,
    /// The receiver does not want it.
    pub refused: bool,
    /// The receiver asked for no more than this.
    pub shortened: Option<u32>,
}

impl Message {
    /// The bytes its receiver gets.
    pub fn delivered_len(&self) -> u32 {
        self.shortened.map_or(self.len, |len| len.min(self.len))
    }
}

/// All messages of a run.
#[derive(Debug)]
pub struct Book {
    /// The clock of the run, for those who check.
    pub now: Nanos,
    messages: Vec<Message>,
    /// Sends that wait for their status.
    waiting: usize,
    delivered: usize,
    pub checks: Checks,
    /// Nodes whose frames are forged: nothing is promised to or about them.
    pub liars: Vec<NodeId>,
}

/// Every host of a run writes into the same book.
pub type SharedBook = Rc<RefCell<Book>>;

impl Default for Book {
    fn default() -> Self {
        Self {
            now: 0,
            messages: Vec::new(),
            waiting: 0,
            delivered: 0,
            checks: Checks::of_messages(),
            liars: Vec::new(),
        }
    }
}

impl Book {
    pub fn shared() -> SharedBook {
        Rc::new(RefCell::new(Self::default()))
    }

    /// A new message without a deadline; the id is its tag.
    pub fn sent(&mut self, route: Route, len: u32) -> u64 {
        self.sent_until(route, len, Nanos::MAX)
    }

    /// A new message; the id is its tag.
    pub fn sent_until(&mut self, route: Route, len: u32, deadline: Nanos) -> u64 {
        let id = self.messages.len() as u64;
        let message = Message {
            route,
            len,
            deadline,
            commits: 0,
            status: None,
            abandoned: false,
            too_long: false,
            refused: false,
            shortened: None,
        };
        let now = self.now;
        self.checks.ask(|check| check.sent(now, id, &message));
        self.messages.push(message);
        self.waiting += 1;
        id
    }

    /// A receiver committed a message with these bytes: exactly once, in order, unchanged.
    pub fn committed(&mut self, route: Route, id: u64, bytes: &[u8]) {
        if self.is_forged(&route) {
            return;
        }
        let (now, message) = (self.now, self.messages.get_mut(id as usize));
        let known = message.as_deref();
        self.checks
            .ask(|check| check.committed(now, id, known, route, bytes));
        if let Some(message) = message {
            message.commits += 1;
            self.delivered += 1;
        }
    }

    /// A send ended.
    pub fn completed(&mut self, id: u64, status: SendStatus) {
        let (now, forged) = (self.now, self.is_forged(&self.messages[id as usize].route));
        let message = &mut self.messages[id as usize];
        if !forged {
            self.checks
                .ask(|check| check.completed(now, id, message, status));
        }
        if message.status.is_none() && !message.abandoned {
            self.waiting -= 1;
        }
        message.status = Some(status);
    }

    /// A receive token changed hands.
    pub fn token(&mut self, node: NodeId, token: BufferId, priority: Priority, step: TokenStep) {
        self.checks
            .ask(|check| check.token(node, token, priority, step));
    }

    /// A port closed.
    pub fn port_closed(&mut self, node: NodeId, port: PortId) {
        self.checks.ask(|check| check.port_closed(node, port));
    }

    /// Whether one of the ends lies.
    fn is_forged(&self, route: &Route) -> bool {
        [route.from.0, route.to.0]
            .iter()
            .any(|node| self.liars.contains(node))
    }

    /// The node died for good: its sends get no status.
    pub fn abandon(&mut self, node: NodeId) {
        self.checks.tell(|check| check.node_restarted(node));
        for message in &mut self.messages {
            if message.route.from.0 == node && message.status.is_none() && !message.abandoned {
                message.abandoned = true;
                self.waiting -= 1;
            }
        }
    }

    /// No receiver can take it: it may end so.
    pub fn is_too_long(&mut self, id: u64) {
        self.messages[id as usize].too_long = true;
    }

    /// Its receiver does not want it.
    pub fn refused(&mut self, id: u64) {
        if let Some(message) = self.messages.get_mut(id as usize) {
            message.refused = true;
        }
    }

    /// Its receiver takes only the first bytes.
    pub fn shortened(&mut self, id: u64, len: u32) {
        if let Some(message) = self.messages.get_mut(id as usize) {
            message.shortened = Some(len);
        }
    }

    pub fn message(&self, id: u64) -> &Message {
        &self.messages[id as usize]
    }

    pub fn status(&self, id: u64) -> Option<SendStatus> {
        self.messages[id as usize].status
    }

    /// Messages whose sender still waits.
    pub fn waiting(&self) -> Vec<u64> {
        let waits = |m: &Message| m.status.is_none() && !m.abandoned;
        (0..self.messages.len() as u64)
            .filter(|&id| waits(&self.messages[id as usize]))
            .collect()
    }

    /// How many they are.
    pub fn waiting_len(&self) -> usize {
        self.waiting
    }

    pub fn is_settled(&self) -> bool {
        self.waiting == 0
    }

    /// Messages committed.
    pub fn delivered(&self) -> usize {
        self.delivered
    }

    pub fn len(&self) -> usize {
        self.messages.len()
    }

    pub fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }

    /// The run is over and quiet.
    pub fn end_of_run(&mut self) {
        let messages = &self.messages;
        self.checks.ask(|check| check.end_of_run(messages));
    }
}

/// The tag of messages of at least 8 bytes whose application uses none, so that they can travel in one RUN.
pub const NO_TAG: u64 = u64::MAX;

/// Spreads an id over a word, and finds it again.
const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;
const GATHER: u64 = 0xf1de_83e1_9937_733d;
const _: () = assert!(SPREAD.wrapping_mul(GATHER) == 1);

/// Bytes `8 * at..` of message `id`: different between messages and between places.
fn word(id: u64, at: u64) -> [u8; 8] {
    (id ^ at).wrapping_mul(SPREAD).to_le_bytes()
}

/// The message with this tag and these first bytes.
pub fn id_of(tag: u64, bytes: &[u8]) -> u64 {
    match bytes.first_chunk() {
        Some(word) if tag == NO_TAG => u64::from_le_bytes(*word).wrapping_mul(GATHER),
        _ => tag,
    }
}

/// Byte `at` of message `id`.
fn byte(id: u64, at: usize) -> u8 {
    word(id, at as u64 >> 3)[at & 7]
}

/// Fills `to` with bytes `offset..` of message `id`.
pub fn fill(id: u64, offset: u32, to: &mut [u8]) {
    let offset = offset as usize;
    let head = to.len().min(offset.next_multiple_of(8) - offset);
    let (first, rest) = to.split_at_mut(head);
    for (at, to) in (offset..).zip(first) {
        *to = byte(id, at);
    }
    let start = (offset + head) as u64 / 8;
    let mut words = rest.chunks_exact_mut(8);
    let mut at = start;
    for to in &mut words {
        to.copy_from_slice(&word(id, at));
        at += 1;
    }
    let tail = words.into_remainder();
    let last = word(id, at);
    tail.copy_from_slice(&last[..tail.len()]);
}

/// Where `bytes` differ from message `id`.
pub fn first_difference(id: u64, bytes: &[u8]) -> Option<usize> {
    let differs = |(at, part): (u64, &[u8])| {
        let expected = word(id, at);
        let same = part == &expected[..part.len()];
        (!same).then(|| {
            let place = part.iter().zip(expected).position(|(a, b)| *a != b);
            at as usize * 8 + place.unwrap_or(0)
        })
    };
    (0..).zip(bytes.chunks(8)).find_map(differs)
}
