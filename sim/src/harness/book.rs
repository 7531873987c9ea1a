//! What applications were promised, written down outside of everything under test.
//!
//! Every message gets an id, carried in its tag; the book knows where it comes from, where it must arrive and with which bytes.
//! Hosts report every commit and every completion to it, and it panics at the first broken promise.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use portolan_transport::host::SendStatus;
use portolan_transport::ident::{NodeId, PortId, Priority};

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
    /// How often it was committed to a receiver.
    pub commits: u32,
    /// How its send ended.
    pub status: Option<SendStatus>,
    /// The sender died with its node: nobody waits for a status any more.
    pub abandoned: bool,
}

/// All messages of a run.
#[derive(Debug, Default)]
pub struct Book {
    messages: Vec<Message>,
    /// The newest message committed per route; messages of a route are committed in the order they were sent.
    newest: BTreeMap<Route, u64>,
    /// Nodes whose frames are forged: nothing is promised to or about them.
    pub liars: Vec<NodeId>,
}

/// Every host of a run writes into the same book.
pub type SharedBook = Rc<RefCell<Book>>;

impl Book {
    pub fn shared() -> SharedBook {
        Rc::new(RefCell::new(Self::default()))
    }

    /// A new message; the id is its tag.
    pub fn sent(&mut self, route: Route, len: u32) -> u64 {
        self.messages.push(Message {
            route,
            len,
            commits: 0,
            status: None,
            abandoned: false,
        });
        self.messages.len() as u64 - 1
    }

    /// A receiver committed a message with these bytes: exactly once, in order, unchanged.
    pub fn committed(&mut self, route: Route, id: u64, bytes: &[u8]) {
        if self.is_forged(&route) {
            return;
        }
        let Some(message) = self.messages.get_mut(id as usize) else {
            panic!("a message nobody sent: tag {id:#x} on {route:?}")
        };
        assert_eq!(message.route, route, "message {id} arrived elsewhere");
        assert_eq!(message.len as usize, bytes.len(), "message {id}: length");
        assert_eq!(first_difference(id, bytes), None, "message {id}: content");
        assert_eq!(
            message.commits, 0,
            "message {id} was delivered twice: {message:?}"
        );
        assert!(
            !matches!(message.status, Some(SendStatus::NotDelivered(_))),
            "message {id} is delivered after its sender was told it would not be: {message:?}"
        );
        message.commits = 1;
        if let Some(newest) = self.newest.insert(route, id) {
            assert!(newest < id, "message {id} came after {newest} on {route:?}");
        }
    }

    /// A send ended.
    pub fn completed(&mut self, id: u64, status: SendStatus) {
        let forged = self.is_forged(&self.messages[id as usize].route);
        let message = &mut self.messages[id as usize];
        assert_eq!(
            message.status, None,
            "message {id} completed twice, now {status:?}"
        );
        match status {
            _ if forged => {}
            SendStatus::Delivered => assert_eq!(
                message.commits, 1,
                "message {id} is not delivered: {message:?}"
            ),
            SendStatus::NotDelivered(_) => {
                assert_eq!(
                    message.commits, 0,
                    "message {id} was delivered, now {status:?}: {message:?}"
                );
            }
            SendStatus::MaybeDelivered(_) => {}
        }
        message.status = Some(status);
    }

    /// Whether one of the ends lies.
    fn is_forged(&self, route: &Route) -> bool {
        [route.from.0, route.to.0]
            .iter()
            .any(|node| self.liars.contains(node))
    }

    /// The node died for good: its sends get no status.
    pub fn abandon(&mut self, node: NodeId) {
        for message in &mut self.messages {
            if message.route.from.0 == node && message.status.is_none() {
                message.abandoned = true;
            }
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

    pub fn is_settled(&self) -> bool {
        self.messages
            .iter()
            .all(|m| m.status.is_some() || m.abandoned)
    }

    pub fn delivered(&self) -> usize {
        self.messages.iter().filter(|m| m.commits > 0).count()
    }

    pub fn len(&self) -> usize {
        self.messages.len()
    }

    pub fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }
}

/// Byte `at` of message `id`: different between messages and between places.
fn byte(id: u64, at: usize) -> u8 {
    let word = (id ^ (at as u64 >> 3)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (word >> (8 * (at & 7))) as u8
}

/// Fills `to` with bytes `offset..` of message `id`.
pub fn fill(id: u64, offset: u32, to: &mut [u8]) {
    for (at, to) in to.iter_mut().enumerate() {
        *to = byte(id, offset as usize + at);
    }
}

fn first_difference(id: u64, bytes: &[u8]) -> Option<usize> {
    bytes
        .iter()
        .enumerate()
        .position(|(at, &b)| b != byte(id, at))
}
