//! The up-call (transport.md §5.7): undecided, accepted, shortened, refused, and woken by the answer to the very stream that waits for it.

use alloc::collections::BTreeMap;

use super::*;
use SendStatus::{Delivered, NotDelivered};

fn asking(frame: u16) -> Pair {
    let mut pair = Pair::new(frame);
    pair.sides[1].host.verdicts = Some(BTreeMap::new());
    pair
}

impl Pair {
    fn says(&mut self, slot: u32, verdict: Verdict) {
        let side = &mut self.sides[1];
        let verdicts = side.host.verdicts.as_mut().unwrap();
        verdicts.insert(u64::from(slot), verdict);
        side.endpoint.offer_answered(self.now, key(1));
    }

    fn offered(&self) -> usize {
        self.sides[1].host.offered.len()
    }
}

// Short and long messages, with every verdict. Expect: each is offered, waits while it is undecided, and comes as it was asked for.
#[test]
fn every_verdict_on_every_length() {
    for len in [0, 1, 100, 1400, 50_000, 1 << 20] {
        let mut pair = asking(1472);
        let cut = len / 3;
        let verdicts = [
            Verdict::Accept,
            Verdict::Shorten(cut),
            Verdict::Refuse,
            Verdict::Shorten(0),
        ];
        for (index, verdict) in verdicts.into_iter().enumerate() {
            let slot = pair.send(0, 2, len as usize, Nanos::MAX);
            let before = pair.offered();
            assert!(pair.run_until(SECOND, |pair| pair.offered() > before));
            let delivered = pair.sides[1].host.delivered.len();
            assert!(!pair.run_until(SECOND / 10, |pair| pair.all_settled()));
            assert_eq!(pair.sides[1].host.delivered.len(), delivered);
            pair.says(slot, verdict);
            assert!(
                pair.run_until(SECOND, Pair::all_settled),
                "{verdict:?} of {len}"
            );
            let statuses = pair.statuses(0);
            let status = statuses[index];
            if verdict == Verdict::Refuse {
                assert_eq!(status, NotDelivered(Reason::Refused));
                pair.resume(0, 2);
                continue;
            }
            assert_eq!(status, Delivered);
            let (delivery, bytes) = pair.sides[1].host.delivered.last().unwrap();
            let wanted = match verdict {
                Verdict::Shorten(cut) => cut,
                _ => len,
            };
            assert_eq!((delivery.len, delivery.total), (wanted, len));
            let sent = &pair.sides[0].host.payloads[&slot];
            assert_eq!(&sent[..wanted as usize], &bytes[..]);
        }
        assert_eq!(pair.sides[1].host.delivered.len(), 3);
    }
}

// One stream waits for a token longer than any there is, another for an answer, in this order. Expect: the answer lets the second go on at once.
#[test]
fn an_answer_wakes_the_stream_it_is_for() {
    let mut pair = asking(1472);
    pair.sides[1].host.fits = Some(1000);
    // The node's own messages to itself make the first stream.
    let first = pair.send(1, 2, 1400, Nanos::MAX);
    let verdicts = pair.sides[1].host.verdicts.as_mut().unwrap();
    verdicts.insert(u64::from(first), Verdict::Accept);
    assert!(pair.run_until(SECOND, |pair| pair.offered() > 0));
    let second = pair.send(0, 2, 100, Nanos::MAX);
    let offered = |pair: &Pair| pair.sides[1].host.offered.contains(&u64::from(second));
    assert!(pair.run_until(SECOND, offered));
    // Long enough for the timers to back off.
    assert!(!pair.run_until(SECOND, Pair::all_settled));
    // Its own probes are far apart by now.
    pair.says(second, Verdict::Accept);
    let came = |pair: &Pair| {
        let delivered = &pair.sides[1].host.delivered;
        delivered.iter().any(|d| d.0.tag == u64::from(second))
    };
    assert!(pair.run_until(5 * LATENCY, came));
}

// The answer's READY is lost, and only a buffer of the shortened length is there. Expect: the sender's probe finds out, although the whole
// message would find no buffer.
#[test]
fn a_lost_ready_is_made_good_for_a_shortened_message() {
    let mut pair = asking(1472);
    pair.sides[1].host.fits = Some(1000);
    let slot = pair.send(0, 2, 50_000, Nanos::MAX);
    assert!(pair.run_until(SECOND, |pair| pair.offered() > 0));
    pair.says(slot, Verdict::Shorten(1000));
    pair.loss = 1000;
    assert!(!pair.run_until(10 * LATENCY, |pair| pair.offered() > 1));
    pair.loss = 0;
    assert!(pair.run_until(SECOND, Pair::all_settled));
    assert_eq!(pair.statuses(0), [Delivered]);
    assert_eq!(pair.sides[1].host.delivered[0].0.len, 1000);
}
