//! What was sent and what came, per stream, and whether the two agree.

use std::collections::{BTreeMap, BTreeSet};

use portolan::{Address, Priority, Status};
use serde::{Deserialize, Serialize};

/// (node, port, high priority) at the other end.
pub type Lane = (u16, u16, bool);

pub fn lane(address: Address, priority: Priority) -> Lane {
    (address.node.0, address.port.0, priority == Priority::High)
}

/// How a send that was not delivered ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    pub number: u64,
    /// Not delivered for certain, or perhaps delivered.
    pub certain: bool,
    pub reason: String,
}

/// The sends of one stream.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Outbox {
    pub first: u64,
    /// One more than the last number used.
    pub next: u64,
    pub delivered: u64,
    pub failures: Vec<Failure>,
}

impl Outbox {
    pub fn from_number(first: u64) -> Self {
        Self {
            first,
            next: first,
            ..Self::default()
        }
    }

    pub fn outstanding(&self) -> u64 {
        self.next - self.first - self.delivered - self.failures.len() as u64
    }

    pub fn end(&mut self, number: u64, status: Status) {
        match status {
            Status::Delivered => self.delivered += 1,
            Status::NotDelivered(reason) | Status::MaybeDelivered(reason) => {
                self.failures.push(Failure {
                    number,
                    certain: matches!(status, Status::NotDelivered(_)),
                    reason: format!("{reason:?}"),
                });
            }
        }
    }
}

/// What came of one stream.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Inbox {
    /// One more than the last number.
    pub next: u64,
    pub count: u64,
    /// Numbers that were passed over.
    pub missing: Vec<u64>,
}

impl Inbox {
    /// Something came; an error if it had come before, or comes behind a later one.
    pub fn came(&mut self, number: u64) -> Result<(), String> {
        if number < self.next {
            return Err(format!(
                "number {number} came after {}: doubled, or out of order",
                self.next - 1
            ));
        }
        self.missing.extend((self.next..number).take(1000));
        self.next = number + 1;
        self.count += 1;
        Ok(())
    }
}

/// The books of one port.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Books {
    pub node: u16,
    pub port: u16,
    // JSON has no maps with such keys.
    outboxes: Vec<(Lane, Outbox)>,
    inboxes: Vec<(Lane, Inbox)>,
}

impl Books {
    pub fn new(own: Address, outboxes: &[(Lane, Outbox)], inboxes: &BTreeMap<Lane, Inbox>) -> Self {
        Self {
            node: own.node.0,
            port: own.port.0,
            outboxes: outboxes.to_vec(),
            inboxes: inboxes.iter().map(|(k, v)| (*k, v.clone())).collect(),
        }
    }

    pub fn name(&self) -> String {
        format!("{}:{}", self.node, self.port)
    }

    pub fn delivered(&self) -> u64 {
        self.outboxes.iter().map(|(_, o)| o.delivered).sum()
    }

    /// Delivered to ports of other nodes.
    pub fn delivered_across(&self) -> u64 {
        let across = self.outboxes.iter().filter(|(to, _)| to.0 != self.node);
        across.map(|(_, o)| o.delivered).sum()
    }

    pub fn failures(&self) -> impl Iterator<Item = &Failure> {
        self.outboxes.iter().flat_map(|(_, o)| &o.failures)
    }

    fn inbox(&self, from: Lane) -> Inbox {
        let found = self.inboxes.iter().find(|(lane, _)| *lane == from);
        found.map(|(_, inbox)| inbox.clone()).unwrap_or_default()
    }
}

/// Everything that was promised about streams between these ports and is not so. Their sends have all ended.
pub fn complaints(all: &[Books]) -> Vec<String> {
    let mut complaints = Vec::new();
    for sender in all {
        for (to, outbox) in &sender.outboxes {
            let stream = format!("{} → {}:{}", sender.name(), to.0, to.1);
            let Some(receiver) = all.iter().find(|b| (b.node, b.port) == (to.0, to.1)) else {
                continue;
            };
            let inbox = receiver.inbox((sender.node, sender.port, to.2));
            complaints.extend(
                disagreements(outbox, &inbox)
                    .into_iter()
                    .map(|c| format!("{stream}: {c}")),
            );
        }
    }
    complaints
}

fn disagreements(outbox: &Outbox, inbox: &Inbox) -> Vec<String> {
    let mut found = Vec::new();
    if outbox.outstanding() != 0 {
        found.push(format!("{} sends never ended", outbox.outstanding()));
    }
    if inbox.next > outbox.next {
        found.push(format!("{} came, {} were sent", inbox.next, outbox.next));
    }
    let missing: BTreeSet<u64> = inbox
        .missing
        .iter()
        .copied()
        .chain(inbox.next..outbox.next)
        .filter(|number| *number >= outbox.first)
        .collect();
    let failed: BTreeMap<u64, &Failure> = outbox.failures.iter().map(|f| (f.number, f)).collect();
    let lost: Vec<_> = missing.iter().filter(|n| !failed.contains_key(n)).collect();
    if !lost.is_empty() {
        found.push(format!("reported delivered and never came: {lost:?}"));
    }
    for failure in failed.values() {
        if failure.certain && !missing.contains(&failure.number) {
            found.push(format!("{failure:?}, and it came"));
        }
    }
    found
}

#[test]
fn books_that_disagree_are_complained_about() {
    let agree = |failures: &[(u64, bool)], came: &[u64]| {
        let mut outbox = Outbox {
            next: 4,
            ..Outbox::default()
        };
        outbox.delivered = 4 - failures.len() as u64;
        outbox.failures = failures
            .iter()
            .map(|&(number, certain)| Failure {
                number,
                certain,
                reason: String::new(),
            })
            .collect();
        let mut inbox = Inbox::default();
        for &number in came {
            inbox.came(number).unwrap();
        }
        disagreements(&outbox, &inbox).is_empty()
    };
    assert!(agree(&[], &[0, 1, 2, 3]));
    assert!(!agree(&[], &[0, 1, 2]));
    assert!(!agree(&[], &[0, 2, 3]));
    assert!(agree(&[(1, true)], &[0, 2, 3]));
    assert!(!agree(&[(1, true)], &[0, 1, 2, 3]));
    assert!(agree(&[(1, false)], &[0, 1, 2, 3]));
    assert!(agree(&[(3, false)], &[0, 1, 2]));
    assert!(!agree(&[], &[0, 1, 2, 3, 4]));
    let mut inbox = Inbox::default();
    inbox.came(0).unwrap();
    assert!(inbox.came(0).is_err());
}
