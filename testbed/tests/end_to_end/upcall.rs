//! RMPP's up-call between real nodes: an application is asked on a message's first chunk, takes all of it, its beginning, or nothing,
//! and gets what it asked for; also if engines are killed while the question is open.

use std::collections::{BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use crate::harness::{Cluster, STEP, pattern, until};
use portolan::{
    AckMode, Event, Message, Offer, Port, PortOptions, Priority, Reason, Report, SendOptions, Sent,
    Status, Verdict,
};
use portolan_testbed::{Encap, Impairment, Lab};
use rustix::process::{Pid, Signal, kill_process};

const SENDER: u16 = 9;
const RECEIVER: u16 = 5;

/// Where messages come from, and a port that is asked about each of at least `least` bytes.
struct Pair {
    cluster: Cluster,
    one: Port,
    two: Port,
    receiver: u16,
}

fn options(port: u16) -> PortOptions {
    PortOptions {
        arena_bytes: 32 << 20,
        ..PortOptions::at(port)
    }
}

impl Pair {
    fn start(cluster: Cluster, least: usize) -> Self {
        let receiver = cluster.lab.nodes().len() as u16;
        Self {
            one: cluster.open(1, options(SENDER)),
            two: cluster.open(receiver, options(RECEIVER).ask_first(least)),
            cluster,
            receiver,
        }
    }

    fn two_nodes() -> Self {
        Self::start(Cluster::start(Lab::builder()), 0)
    }

    fn send(&mut self, len: usize, tag: u64, timeout: Duration) {
        let mut bytes = vec![0; len];
        pattern::fill(&mut bytes, tag);
        let options = SendOptions {
            tag,
            timeout: Some(timeout),
            ..SendOptions::default()
        };
        let to = (self.receiver, RECEIVER);
        self.one.send_bytes(to, &bytes, options).unwrap();
    }

    fn provide(&mut self, len: usize) {
        let buffer = self.two.allocate(len).unwrap();
        let provided = self.two.provide_receive_buffer(buffer, Priority::Low);
        provided.unwrap();
    }

    fn offer(&mut self) -> Offer {
        match self.two.blocking_receive(STEP).unwrap() {
            Some(Event::Offered(offer)) => offer,
            other => panic!("no offer but {other:?}"),
        }
    }

    /// The next message, which must be the beginning of what was sent.
    fn message(&mut self) -> Message {
        match self.two.blocking_receive(STEP).unwrap() {
            Some(Event::Received(message)) => {
                assert_eq!(pattern::first_wrong(&message, message.tag()), None);
                message
            }
            other => panic!("no message but {other:?}"),
        }
    }

    /// How the next send ended; its stream goes on.
    fn sent(&mut self) -> Sent {
        match self.one.blocking_receive(STEP).unwrap() {
            Some(Event::Sent(sent)) => {
                if !sent.status.is_delivered() {
                    self.one.resume_sending(sent.to, sent.priority).unwrap();
                }
                sent
            }
            other => panic!("no end of a send but {other:?}"),
        }
    }

    /// Nothing waits at either port, and nothing confused them.
    fn nothing_is_left(&mut self) {
        for port in [&mut self.one, &mut self.two] {
            assert!(port.receive().unwrap().is_none());
            assert_eq!(port.anomalies(), 0);
        }
        assert_eq!(self.one.sends_outstanding(), 0);
    }
}

/// The beginning of what was sent under this tag.
fn beginning(tag: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len.next_multiple_of(8)];
    pattern::fill(&mut bytes, tag);
    bytes.truncate(len);
    bytes
}

/// Every length with every verdict. A shortened message finds a buffer of its shortened length only, a refused one none at all.
fn each_gets_what_it_asked_for(cluster: Cluster) {
    let mut pair = Pair::start(cluster, 0);
    let mut tag = 0;
    for total in [
        0usize,
        1,
        15,
        16,
        17,
        80,
        81,
        1000,
        1500,
        4096,
        70_000,
        1 << 20,
    ] {
        let mut cuts = vec![
            0,
            1,
            total / 2,
            total.saturating_sub(1),
            total,
            total + 1000,
        ];
        cuts.extend([100, 2000, 65_536]);
        cuts.retain(|&cut| cut <= total + 1000);
        let verdicts = cuts.into_iter().map(Verdict::Shorten);
        for verdict in verdicts.chain([Verdict::Accept, Verdict::Refuse]) {
            tag += 1;
            pair.send(total, tag, STEP);
            let offer = pair.offer();
            assert_eq!(
                (offer.from(), offer.priority()),
                (pair.one.address(), Priority::Low)
            );
            assert_eq!((offer.total(), offer.tag()), (total, tag));
            let first = offer.first();
            assert_eq!(first, &beginning(tag, total)[..first.len()]);
            assert!(!first.is_empty() || total == 0 || total > 1500, "{total}");
            let wanted = match verdict {
                Verdict::Accept => Some(total),
                Verdict::Shorten(cut) => Some(cut.min(total)),
                Verdict::Refuse => None,
            };
            if let Some(wanted) = wanted {
                pair.provide(wanted);
            }
            match verdict {
                Verdict::Accept => pair.two.accept(offer),
                Verdict::Shorten(cut) => pair.two.shorten(offer, cut),
                Verdict::Refuse => pair.two.refuse(offer),
            }
            .unwrap();
            let expected = match wanted {
                Some(_) => Status::Delivered,
                None => Status::NotDelivered(Reason::Refused),
            };
            if let Some(wanted) = wanted {
                let message = pair.message();
                let got = (message.len(), message.total(), message.tag());
                assert_eq!(got, (wanted, total, tag), "{verdict:?}");
            }
            let end = pair.sent();
            assert_eq!(
                (end.status, end.tag),
                (expected, tag),
                "{verdict:?} of {total}"
            );
        }
    }
    pair.nothing_is_left();
    // They are published now and then.
    for name in ["offers", "answers"] {
        until(name, STEP, || (counter(&pair, name) >= tag).then_some(()));
    }
}

/// A counter of the receiver's engine.
fn counter(pair: &Pair, name: &str) -> u64 {
    let report = pair.cluster.attach(pair.receiver).report(Report::Counters);
    let report = report.unwrap();
    let value = report["engines"][0]["counters"][name].as_u64();
    value.unwrap_or_else(|| panic!("no {name} in {report}"))
}

#[test]
fn refused_shortened_and_accepted_between_nodes() {
    each_gets_what_it_asked_for(Cluster::start(Lab::builder()));
}

#[test]
fn refused_shortened_and_accepted_over_ethernet_with_jumbo_frames() {
    let builder = Lab::builder().encap(Encap::Ethernet).mtu(9000);
    each_gets_what_it_asked_for(Cluster::start(builder));
}

#[test]
fn refused_shortened_and_accepted_inside_a_node() {
    each_gets_what_it_asked_for(Cluster::start(Lab::builder().nodes(1)));
}

// Only messages of 1000 bytes and more are asked about. Expect: shorter ones come unasked.
#[test]
fn short_messages_come_unasked() {
    let mut pair = Pair::start(Cluster::start(Lab::builder()), 1000);
    for (tag, total) in [(1, 0), (2, 999), (3, 1000), (4, 50_000)] {
        pair.provide(50_000);
        pair.send(total, tag, STEP);
        if total >= 1000 {
            let offer = pair.offer();
            assert_eq!(offer.total(), total);
            pair.two.accept(offer).unwrap();
        }
        assert_eq!(pair.message().len(), total);
        assert!(pair.sent().status.is_delivered());
    }
    pair.nothing_is_left();
}

/// A stream of messages of all lengths, a dozen under way, and a handler that decides by the tag. Each comes as the handler said, in
/// order if the profile has one, and each send ends so.
fn a_handler_decides(cluster: Cluster, messages: u64, ordered: bool) {
    let mut pair = Pair::start(cluster, 0);
    let wish = |tag: u64, total: usize| match tag % 4 {
        0 => Verdict::Refuse,
        1 => Verdict::Shorten(total / 3),
        _ => Verdict::Accept,
    };
    pair.two
        .on_offer(move |offer| wish(offer.tag(), offer.total()));
    for _ in 0..24 {
        pair.provide(40_000);
    }
    let total = |tag: u64| (pattern::mix(tag) % [40, 3000, 40_000][tag as usize % 3]) as usize;
    let (mut next, mut under_way) = (1, BTreeSet::new());
    let mut expected: VecDeque<u64> = (1..=messages).filter(|tag| tag % 4 != 0).collect();
    let deadline = Instant::now() + 3 * STEP;
    while next <= messages || !under_way.is_empty() || !expected.is_empty() {
        assert!(
            Instant::now() < deadline,
            "{under_way:?} not ended, {} to come",
            expected.len()
        );
        while next <= messages && pair.one.sends_outstanding() < 12 {
            pair.send(total(next), next, 3 * STEP);
            under_way.insert(next);
            next += 1;
        }
        while let Some(event) = pair.one.receive().unwrap() {
            if let Event::Sent(sent) = &event {
                // A refusal may be heard before earlier messages are delivered.
                assert!(under_way.remove(&sent.tag), "{} ended twice", sent.tag);
                let status = match wish(sent.tag, 0) {
                    Verdict::Refuse => Status::NotDelivered(Reason::Refused),
                    _ => Status::Delivered,
                };
                assert_eq!(sent.status, status);
            }
            pair.one.unknown(event);
        }
        while let Some(event) = pair.two.receive().unwrap() {
            let Event::Received(message) = &event else {
                panic!("{event:?}")
            };
            let tag = message.tag();
            let place = expected.iter().position(|next| *next == tag);
            assert!(
                place == Some(0) || place.is_some() && !ordered,
                "{tag} came"
            );
            expected.retain(|next| *next != tag);
            let wanted = match wish(tag, total(tag)) {
                Verdict::Shorten(cut) => cut,
                _ => total(tag),
            };
            assert_eq!((message.len(), message.total()), (wanted, total(tag)));
            assert_eq!(pattern::first_wrong(message, tag), None);
            pair.two.unknown(event);
        }
        std::thread::yield_now();
    }
    pair.nothing_is_left();
}

#[test]
fn a_handler_decides_about_a_stream() {
    a_handler_decides(Cluster::start(Lab::builder()), 400, true);
}

// The wire loses and doubles; profiles that tell what is refused at once, acknowledge each message, or leave everything to the sender's
// timer and commit in order of arrival. Expect: the same.
#[test]
fn a_handler_decides_over_an_impaired_wire() {
    for (profile, ordered) in [("default", true), ("parastation2", true), ("rmpp", false)] {
        let impairment = Impairment {
            seed: 11,
            loss: 0.02,
            duplicate: 0.01,
            ..Impairment::default()
        };
        let builder = Lab::builder().impaired(impairment);
        let profile = format!("[transport]\nprofile = \"{profile}\"");
        a_handler_decides(Cluster::start_with(builder, &profile), 100, ordered);
    }
}

// A question nobody answers. Expect: the send's own timeout ends it, definitely not delivered; the answer that comes too late changes
// nothing, and the next message is asked about and comes.
#[test]
fn a_question_that_is_ignored_ends_with_the_send() {
    let mut pair = Pair::two_nodes();
    pair.provide(1000);
    for (tag, total) in [(1, 100), (2, 100_000)] {
        pair.send(total, tag, Duration::from_millis(200));
        let ignored = pair.offer();
        assert_eq!(ignored.tag(), tag);
        assert_eq!(pair.sent().status, Status::NotDelivered(Reason::Deadline));
        pair.two.accept(ignored).unwrap();
    }
    pair.send(500, 3, STEP);
    let offer = pair.offer();
    assert_eq!(offer.tag(), 3);
    pair.two.accept(offer).unwrap();
    let message = pair.message();
    assert_eq!((message.len(), message.tag()), (500, 3));
    assert!(pair.sent().status.is_delivered());
    pair.nothing_is_left();
}

/// When an engine is killed.
#[derive(Clone, Copy, Debug)]
enum Kill {
    /// While the application thinks.
    BeforeTheAnswer,
    /// As soon as it has answered.
    AfterTheAnswer,
}

// Either node's engine is killed while the question is open or just answered. Expect: the application is asked once, the message comes
// once and as it said, or is refused, and the sender hears so.
#[test]
fn answers_survive_the_engines() {
    let mut pair = Pair::two_nodes();
    let verdicts = [Verdict::Accept, Verdict::Shorten(700), Verdict::Refuse];
    let mut tag = 0;
    for node in [2, 1] {
        for kill in [Kill::BeforeTheAnswer, Kill::AfterTheAnswer] {
            for verdict in verdicts {
                for total in [1000, 200_000] {
                    tag += 1;
                    survive(&mut pair, node, kill, verdict, total, tag);
                }
            }
        }
    }
    pair.nothing_is_left();
}

fn survive(pair: &mut Pair, node: u16, kill: Kill, verdict: Verdict, total: usize, tag: u64) {
    let what = format!("{verdict:?} of {total}, engine of node {node} killed {kill:?}");
    let wanted = match verdict {
        Verdict::Accept => Some(total),
        Verdict::Shorten(cut) => Some(cut),
        Verdict::Refuse => None,
    };
    pair.send(total, tag, 3 * STEP);
    let offer = pair.offer();
    assert_eq!(offer.tag(), tag, "{what}");
    if let Some(wanted) = wanted {
        pair.provide(wanted);
    }
    let daemon = pair.cluster.daemon(node);
    let pid = daemon.engine_pids().unwrap()[0];
    let die = || kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
    let replaced = |status: &serde_json::Value| {
        let engine = &status["engines"][0];
        engine["state"] == "running" && engine["pid"] != pid
    };
    let wait = || daemon.wait_status("the engine is replaced", STEP, replaced);
    if let Kill::BeforeTheAnswer = kill {
        die();
        wait().unwrap();
    }
    match verdict {
        Verdict::Accept => pair.two.accept(offer),
        Verdict::Shorten(cut) => pair.two.shorten(offer, cut),
        Verdict::Refuse => pair.two.refuse(offer),
    }
    .unwrap();
    if let Kill::AfterTheAnswer = kill {
        die();
        wait().unwrap();
    }
    // The successor may have to ask again: whoever receives answers it without the application.
    let deadline = Instant::now() + STEP;
    let (mut came, mut end) = (None, None);
    while came.is_some() != wanted.is_some() || end.is_none() {
        assert!(
            Instant::now() < deadline,
            "{what}: came {came:?}, ended {end:?}"
        );
        match pair.two.receive().unwrap() {
            Some(Event::Received(message)) => {
                assert!(came.is_none(), "{what}: twice");
                assert_eq!(pattern::first_wrong(&message, tag), None, "{what}");
                came = Some((message.len(), message.total(), message.tag()));
            }
            Some(other) => panic!("{what}: {other:?}"),
            None => {}
        }
        match pair.one.receive().unwrap() {
            Some(Event::Sent(sent)) => {
                end = Some(sent.status);
                if !sent.status.is_delivered() {
                    pair.one.resume_sending(sent.to, sent.priority).unwrap();
                }
            }
            Some(other) => panic!("{what}: {other:?}"),
            None => {}
        }
        std::thread::yield_now();
    }
    assert_eq!(came, wanted.map(|wanted| (wanted, total, tag)), "{what}");
    let status = match verdict {
        Verdict::Refuse => Status::NotDelivered(Reason::Refused),
        Verdict::Accept | Verdict::Shorten(_) => Status::Delivered,
    };
    assert_eq!(end, Some(status), "{what}");
}

// Sends of every acknowledgement mode, short and long. Expect: each is delivered.
#[test]
fn every_acknowledgement_mode_delivers() {
    let mut pair = Pair::start(Cluster::start(Lab::builder()), 1 << 30);
    for ack in [AckMode::Policy, AckMode::Immediate, AckMode::Lazy] {
        for total in [10, 1000, 100_000] {
            pair.provide(total);
            let to = (2, RECEIVER);
            let options = SendOptions {
                ack,
                timeout: Some(STEP),
                ..SendOptions::default()
            };
            let bytes = beginning(0, total);
            pair.one.send_bytes(to, &bytes, options).unwrap();
            assert_eq!(pair.message().len(), total, "{ack:?}");
            assert!(pair.sent().status.is_delivered(), "{ack:?}");
        }
    }
    pair.nothing_is_left();
}
