//! What was sent and what came of one stream, counted: a campaign wants to know how much was lost, doubled or changed, where a test
//! would stop at the first.

use std::collections::BTreeSet;

use portolan::Status;

/// Faults described in words; the rest is only counted.
const NOTES: usize = 8;
/// A number this far ahead was never sent: a tag that was changed.
const FAR: u64 = 1 << 20;

/// A send that was not delivered.
#[derive(Clone, Debug)]
struct Failure {
    number: u64,
    /// Not delivered for certain, or perhaps.
    certain: bool,
    reason: String,
}

/// The sends of one stream.
#[derive(Clone, Debug, Default)]
pub struct Outbox {
    /// One more than the last number used.
    pub next: u64,
    pub delivered: u64,
    failures: Vec<Failure>,
}

impl Outbox {
    pub fn outstanding(&self) -> u64 {
        self.next - self.delivered - self.failures.len() as u64
    }

    pub fn failed(&self) -> u64 {
        self.failures.len() as u64
    }

    pub fn end(&mut self, number: u64, status: Status) {
        let reason = match status {
            Status::Delivered => {
                self.delivered += 1;
                return;
            }
            Status::NotDelivered(reason) | Status::MaybeDelivered(reason) => reason,
        };
        self.failures.push(Failure {
            number,
            certain: matches!(status, Status::NotDelivered(_)),
            reason: format!("{reason:?}"),
        });
    }
}

/// What came of one stream.
#[derive(Clone, Debug, Default)]
pub struct Inbox {
    /// One more than the highest number that came.
    next: u64,
    pub received: u64,
    missing: BTreeSet<u64>,
    pub duplicated: u64,
    pub disordered: u64,
    pub corrupted: u64,
    notes: Vec<String>,
}

impl Inbox {
    /// Something came under this number, as it was sent or not.
    pub fn came(&mut self, number: u64, as_sent: Result<(), String>) {
        self.received += 1;
        if let Err(difference) = as_sent {
            self.corrupted += 1;
            self.note(format!("number {number}: {difference}"));
        }
        if number >= self.next + FAR {
            self.corrupted += 1;
            self.note(format!("number {number} was never sent"));
        } else if number >= self.next {
            self.missing.extend(self.next..number);
            self.next = number + 1;
        } else if self.missing.remove(&number) {
            self.disordered += 1;
            self.note(format!("number {number} came behind {}", self.next - 1));
        } else {
            self.duplicated += 1;
            self.note(format!(
                "number {number} came again, after {}",
                self.next - 1
            ));
        }
    }

    /// What cannot be put right any more. Numbers that are missing may still come, out of order.
    pub fn troubles(&self) -> u64 {
        self.duplicated + self.disordered + self.corrupted + self.missing.len() as u64
    }

    fn note(&mut self, what: String) {
        if self.notes.len() < NOTES {
            self.notes.push(what);
        }
    }
}

/// What became of everything that was sent.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    pub sent: u64,
    pub received: u64,
    /// Reported delivered, and never came; or their sends never ended and they never came.
    pub lost: u64,
    pub duplicated: u64,
    pub corrupted: u64,
    pub disordered: u64,
    /// Sends that ended otherwise than delivered.
    pub failed: u64,
    /// Sends reported *not delivered* that came all the same.
    pub false_reports: u64,
    /// Sends that never ended.
    pub unended: u64,
    /// Streams with messages that were harmed, of which no application was told. Only where integrity was asked for.
    pub unreported: u64,
    pub notes: Vec<String>,
}

impl Tally {
    /// Adds a stream whose sends have all had their time to end.
    pub fn add(&mut self, stream: &str, outbox: &Outbox, inbox: &Inbox) {
        let mut missing: BTreeSet<u64> = inbox.missing.clone();
        missing.extend(inbox.next..outbox.next);
        let mut notes = inbox.notes.clone();
        for failure in &outbox.failures {
            let came = !missing.remove(&failure.number);
            if came && failure.certain {
                self.false_reports += 1;
                notes.push(format!(
                    "number {} was not delivered, and came",
                    failure.number
                ));
            }
            if notes.len() < NOTES {
                notes.push(format!(
                    "number {} ended {}",
                    failure.number, failure.reason
                ));
            }
        }
        // A stray is no message.
        if inbox.next > outbox.next {
            self.corrupted += inbox.next - outbox.next;
            notes.push(format!("{} came, {} were sent", inbox.next, outbox.next));
        }
        if let Some(first) = missing.first() {
            notes.push(format!(
                "{} never came, the first is {first}",
                missing.len()
            ));
        }
        self.sent += outbox.next;
        self.received += inbox.received;
        self.lost += missing.len() as u64;
        self.duplicated += inbox.duplicated;
        self.corrupted += inbox.corrupted;
        self.disordered += inbox.disordered;
        self.failed += outbox.failed();
        self.unended += outbox.outstanding();
        let notes = notes.into_iter().take(NOTES);
        self.notes
            .extend(notes.map(|note| format!("{stream}: {note}")));
    }

    /// Adds what another counted.
    pub fn merge(&mut self, other: Self) {
        self.sent += other.sent;
        self.received += other.received;
        self.lost += other.lost;
        self.duplicated += other.duplicated;
        self.corrupted += other.corrupted;
        self.disordered += other.disordered;
        self.failed += other.failed;
        self.false_reports += other.false_reports;
        self.unended += other.unended;
        self.unreported += other.unreported;
        self.notes.extend(other.notes);
    }

    /// Lost, doubled, changed, out of order, or told wrongly.
    #[cfg(test)]
    fn broken_promises(&self) -> u64 {
        self.lost + self.duplicated + self.corrupted + self.disordered + self.false_reports
    }

    /// What integrity should have reported, and did not: one wrong message handed out is one too many, and what is lost must be told of. Of one
    /// stream, with what was reported at its two ends.
    pub fn is_unreported(&self, reported: u64) -> bool {
        // What never ended was not called delivered either.
        self.duplicated + self.corrupted > 0 || self.lost > self.unended && reported == 0
    }
}

#[cfg(test)]
mod tests {
    use portolan::Reason;

    use super::*;

    fn tally(ends: &[Status], came: &[(u64, bool)]) -> Tally {
        let mut outbox = Outbox::default();
        let mut inbox = Inbox::default();
        for (number, status) in (0..).zip(ends) {
            outbox.next += 1;
            outbox.end(number, *status);
        }
        for &(number, good) in came {
            let as_sent = if good { Ok(()) } else { Err("bad".to_owned()) };
            inbox.came(number, as_sent);
        }
        let mut tally = Tally::default();
        tally.add("1:1 → 2:1", &outbox, &inbox);
        tally
    }

    // Each way of breaking a promise. Expect: counted once, as what it is.
    #[test]
    fn every_broken_promise_is_counted() {
        let delivered = Status::Delivered;
        let not = Status::NotDelivered(Reason::Deadline);
        let maybe = Status::MaybeDelivered(Reason::Deadline);
        let all = [delivered; 3];
        assert_eq!(
            tally(&all, &[(0, true), (1, true), (2, true)]).broken_promises(),
            0
        );
        assert_eq!(tally(&all, &[(0, true), (2, true)]).lost, 1);
        assert_eq!(tally(&all, &[(0, true), (1, true)]).lost, 1);
        let twice = tally(&all, &[(0, true), (1, true), (1, true), (2, true)]);
        assert_eq!((twice.duplicated, twice.broken_promises()), (1, 1));
        let late = tally(&all, &[(0, true), (2, true), (1, true)]);
        assert_eq!((late.disordered, late.broken_promises()), (1, 1));
        let changed = tally(&all, &[(0, true), (1, false), (2, true)]);
        assert_eq!((changed.corrupted, changed.broken_promises()), (1, 1));
        assert!(tally(&all, &[(0, true), (1, true), (2, true), (1 << 30, true)]).corrupted > 0);
        assert!(tally(&all, &[(0, true), (1, true), (2, true), (3, true)]).corrupted > 0);
        let told = tally(&[delivered, not, maybe], &[(0, true)]);
        assert_eq!((told.failed, told.broken_promises()), (2, 0));
        let lied = tally(&[delivered, not], &[(0, true), (1, true)]);
        assert_eq!((lied.false_reports, lied.broken_promises()), (1, 1));
    }

    #[test]
    fn harm_is_unreported_if_it_was_handed_out_or_nobody_was_told() {
        let all = [Status::Delivered; 2];
        assert!(!tally(&all, &[(0, true), (1, true)]).is_unreported(0));
        assert!(tally(&all, &[(0, true)]).is_unreported(0));
        assert!(!tally(&all, &[(0, true)]).is_unreported(1));
        assert!(tally(&all, &[(0, true), (1, false)]).is_unreported(1));
    }

    #[test]
    fn a_send_that_never_ends_is_seen() {
        let mut tally = Tally::default();
        let outbox = Outbox {
            next: 1,
            ..Outbox::default()
        };
        tally.add("", &outbox, &Inbox::default());
        assert_eq!((tally.unended, tally.lost), (1, 1));
    }
}
