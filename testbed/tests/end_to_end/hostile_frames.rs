//! Frames with every byte the checksums cover flipped in turn, and at every truncated length, sent to an engine on the real path by a
//! peer it is associated with. Expect: each is counted by its reason and dropped, nothing of it is delivered, the intact frame is.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::hostile::STEP;
use crate::hostile::forger::{Forger, RawEthernet};
use crate::hostile::neighbour::{Echo, PingPong};
use crate::hostile::raw_port::RawPort;
use crate::hostile::watch::{Watch, counters};
use portolan_abi::event::{Event, EventKind};
use portolan_abi::port::PortGeometry;
use portolan_testbed::{Encap, Lab};
use portolan_transport::policy::AckMode;
use portolan_transport::wire::{self, Chunk, Payload, StreamRef, WireError, crc32c};

/// The attacked port of node 1, and the forged node with its port.
const TARGET: u16 = 20;
const NODES: u16 = 3;
const FORGER: u16 = 3;
const FORGED: u16 = 77;
const STREAM: StreamRef = StreamRef {
    sender_port: FORGED,
    receiver_port: TARGET,
    priority: 0,
    epoch: 5,
};
/// Just before the wrap, like everything else.
const FIRST: u32 = u32::MAX;
/// Frames sent before their counters are looked at: far fewer than the receive ring holds.
const BATCH: usize = 32;
/// What counts a payload whose checksum does not match.
const CORRUPT: &str = "payloads_corrupt";
/// What counts frames that claim to come from a node whose address is another (wire.md §2: read before the checksum).
const SOURCE: &str = "outer_source";
/// What counts first chunks that were accepted before. The bystander's may be among them.
const DUPLICATE: &str = "duplicates";

fn payload(bytes: &[u8]) -> Payload {
    Payload {
        len: u16::try_from(bytes.len()).unwrap(),
        crc: crc32c(bytes),
    }
}

/// Bytes that are not all alike.
fn text(len: usize, seed: u8) -> Vec<u8> {
    (0..len)
        .map(|i| (i as u8).wrapping_mul(31) ^ seed)
        .collect()
}

/// Why the engine must drop this frame: a reason of the wire's, or the payload's checksum. None: it is intact.
fn verdict(frame: &[u8]) -> Option<&'static str> {
    match wire::parse(&[frame]) {
        Err(error) => Some(error.name()),
        Ok(parsed) => parsed
            .chunks()
            .any(|(_, view)| !view.verify())
            .then_some(CORRUPT),
    }
}

/// The same, said again without the parser, for one byte flipped.
fn flip_verdicts(frame: &[u8], at: usize) -> &'static [WireError] {
    let header_len = usize::from(u16::from_be_bytes([frame[4], frame[5]]));
    match at {
        0 | 1 => &[WireError::Magic],
        2 => &[WireError::Version],
        4 | 5 => &[WireError::HeaderLength, WireError::HeaderCrc],
        _ if at < header_len => &[WireError::HeaderCrc],
        _ => &[],
    }
}

/// The same for a frame cut off.
fn cut_verdict(frame: &[u8], len: usize) -> WireError {
    let header_len = usize::from(u16::from_be_bytes([frame[4], frame[5]]));
    if len < wire::frame::FRAME_HEADER_LEN {
        WireError::Truncated
    } else if len < header_len {
        WireError::HeaderLength
    } else {
        WireError::PayloadLength
    }
}

/// Where a frame is broken: everywhere; in the payload of a jumbo frame here and there.
fn places(frame: &[u8]) -> Vec<usize> {
    let step = if frame.len() > 1500 { 37 } else { 1 };
    let every = frame.len().min(200);
    (0..every)
        .chain((every..frame.len()).step_by(step))
        .collect()
}

/// Every broken form of a frame, with the reason for which it must be dropped.
fn broken(frame: &[u8], encap: Encap) -> Vec<(Vec<u8>, &'static str)> {
    let mut all = Vec::new();
    for at in places(frame) {
        for mask in [0x01, 0x80, 0xff] {
            let mut flipped = frame.to_vec();
            flipped[at] ^= mask;
            let sender = u16::from_be_bytes([flipped[8], flipped[9]]);
            if encap != Encap::Ethernet && sender != FORGER && (1..=NODES).contains(&sender) {
                all.push((flipped, SOURCE));
                continue;
            }
            let reason = verdict(&flipped).expect("a broken frame");
            let expected = flip_verdicts(frame, at);
            assert!(
                expected.iter().any(|error| error.name() == reason)
                    || expected.is_empty() && reason == CORRUPT,
                "byte {at}: {reason}"
            );
            all.push((flipped, reason));
        }
    }
    for len in places(frame) {
        let cut = frame[..len].to_vec();
        let reason = verdict(&cut).expect("a broken frame");
        assert_eq!(reason, cut_verdict(frame, len).name(), "cut to {len}");
        all.push((cut, reason));
    }
    all
}

/// The counters that frames are dropped by.
struct Reasons<'a> {
    socket: &'a Path,
}

impl Reasons<'_> {
    /// Their values, by the name the wire gives the reason.
    fn read(&self) -> BTreeMap<&'static str, u64> {
        let counters = counters(self.socket);
        let names = WireError::ALL.iter().map(|error| error.name());
        names
            .chain([CORRUPT, SOURCE, DUPLICATE])
            .map(|name| (name, find(&counters, name)))
            .collect()
    }

    /// Waits until exactly what was sent was counted since `before`.
    fn await_counted(
        &self,
        before: &BTreeMap<&'static str, u64>,
        sent: &BTreeMap<&'static str, u64>,
    ) {
        let deadline = Instant::now() + STEP;
        loop {
            let now = self.read();
            let counted: BTreeMap<_, _> = now
                .iter()
                .map(|(name, value)| (*name, value - before[name]))
                .filter(|(_, more)| *more > 0)
                .collect();
            let enough = |name: &&str, sent: u64| counted.get(name) == Some(&sent);
            let others = counted
                .keys()
                .any(|name| *name != DUPLICATE && !sent.contains_key(name));
            if !others && sent.iter().all(|(name, count)| enough(name, *count)) {
                return;
            }
            assert!(
                Instant::now() < deadline,
                "sent {sent:?}, counted {counted:?}"
            );
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// The counter of a reason: its name, with something in front.
#[track_caller]
fn find(counters: &BTreeMap<String, u64>, name: &str) -> u64 {
    let suffix = match name {
        SOURCE => name.to_owned(),
        CORRUPT | DUPLICATE => format!("transport_{name}"),
        _ => format!("_malformed_{name}"),
    };
    let mut found = counters.iter().filter(|(key, _)| key.ends_with(&suffix));
    let Some((_, value)) = found.next() else {
        panic!("no counter for `{name}` in {:?}", counters.keys());
    };
    let second = found.next();
    assert!(second.is_none(), "two counters for `{name}`: {second:?}");
    *value
}

/// The port that is attacked, with buffers offered.
struct Target(RawPort);

impl Target {
    const BUFFER: u64 = 8192;

    fn open(socket: &Path) -> Self {
        let geometry = PortGeometry::new(4, 16, 16 * Self::BUFFER).unwrap();
        let mut port = RawPort::open(socket, Some(TARGET), geometry).unwrap();
        for slot in 0..16 {
            port.provide(slot, u64::from(slot) * Self::BUFFER, Self::BUFFER as u32);
        }
        Self(port)
    }

    #[track_caller]
    fn assert_nothing(&mut self) {
        let event = self.0.poll();
        assert!(event.is_none(), "delivered: {event:?}");
        assert_eq!(self.0.closed(), None);
    }

    #[track_caller]
    fn assert_receives(&mut self, message: &[u8], tag: u64) {
        let event = self
            .0
            .wait_event(STEP)
            .expect("the intact frame is delivered");
        let Event {
            kind: EventKind::Received,
            node,
            port,
            len,
            tag: received,
            slot,
            ..
        } = event
        else {
            panic!("{event:?}");
        };
        assert_eq!((node, port, received), (FORGER, FORGED, tag));
        let mut bytes = vec![0; len as usize];
        let at = u64::from(slot) * Self::BUFFER;
        self.0.client.read_arena(at, &mut bytes).unwrap();
        assert!(bytes == message, "other bytes were delivered");
        self.0.provide(slot, at, Self::BUFFER as u32);
    }
}

/// A forger, its target, and what is counted.
struct Assault<'a> {
    encap: Encap,
    forger: Forger,
    target: Target,
    reasons: Reasons<'a>,
    count: usize,
}

impl Assault<'_> {
    /// Sends every broken form of a frame and sees each counted.
    fn send_broken(&mut self, frame: &[u8]) {
        let all = broken(frame, self.encap);
        self.send_all(&all);
    }

    /// The same for a request to send. The first with a corrupt payload opens the message without its payload; the others are the
    /// same request again, counted as that too, whose first bytes would be news if they matched.
    fn send_broken_request(&mut self, frame: &[u8]) {
        let (corrupt, others): (Vec<_>, _) = broken(frame, self.encap)
            .into_iter()
            .partition(|(_, reason)| *reason == CORRUPT);
        self.send_all(&others);
        self.send_all(&corrupt);
    }

    fn send_all(&mut self, all: &[(Vec<u8>, &'static str)]) {
        for batch in all.chunks(BATCH) {
            let before = self.reasons.read();
            let mut sent = BTreeMap::new();
            for (bytes, reason) in batch {
                self.forger.send(bytes);
                *sent.entry(*reason).or_default() += 1;
            }
            self.reasons.await_counted(&before, &sent);
            self.forger.pump();
            self.target.assert_nothing();
        }
        self.count += all.len();
    }

    /// Sends an intact frame with bytes of a long message.
    fn send_data(&mut self, number: u32, message: &[u8], from: usize, to: usize) {
        let frame = self.data(number, message, from, to);
        self.forger.send(&frame);
    }

    fn data(&mut self, number: u32, message: &[u8], from: usize, to: usize) -> Vec<u8> {
        self.forger.count_frame();
        let bytes = &message[from..to];
        let chunk = Chunk::Data {
            stream: STREAM,
            number,
            offset: from as u32,
            unasked: false,
            payload: payload(bytes),
        };
        self.forger.build(&[(chunk, bytes)])
    }
}

fn every_broken_frame_is_counted_and_dropped(encap: Encap, mtu: u32) {
    let lab = Lab::builder()
        .name("pthf")
        .nodes(NODES)
        .mtu(mtu)
        .encap(encap)
        .build()
        .unwrap();
    let daemons = [1, 2].map(|id| lab.node(id).start_daemon("").unwrap());
    let socket = daemons[0].socket();
    let watch = Watch::begin(&socket);
    let _echo = Echo::start(daemons[1].socket(), 11);
    let bystander = PingPong::start(socket.clone(), 10, (2, 11));
    bystander.assert_goes_on();

    let mut assault = Assault {
        encap,
        target: Target::open(&socket),
        forger: Forger::meet(&lab, FORGER, &socket),
        reasons: Reasons { socket: &socket },
        count: 0,
    };

    // A whole message, behind a chunk without payload.
    let message = text(150, 1);
    assault.forger.count_frame();
    let beside = Chunk::PathAck { size: 64, nonce: 9 };
    let eager = Chunk::Eager {
        stream: STREAM,
        start: Some(FIRST),
        number: FIRST,
        tag: 0x7a67,
        ack: AckMode::Policy,
        payload: payload(&message),
    };
    let frame = assault.forger.build(&[(beside, &[]), (eager, &message)]);
    assault.send_broken(&frame);
    assault.forger.send(&frame);
    assault.target.assert_receives(&message, 0x7a67);
    // Again, which is old: not delivered twice.
    assault.forger.send(&frame);

    // A long message: its request with the first bytes, then the rest.
    let message = text(600, 2);
    let number = FIRST.wrapping_add(1);
    assault.forger.count_frame();
    let rts = Chunk::Rts {
        stream: STREAM,
        start: Some(number),
        number,
        tag: 0x1096,
        ack: AckMode::Policy,
        total: 600,
        unasked: false,
        payload: payload(&message[..200]),
    };
    let frame = assault.forger.build(&[(rts, &message[..200])]);
    assault.send_broken_request(&frame);
    assault.forger.send(&frame);
    assault.send_data(number, &message, 400, 600);
    let frame = assault.data(number, &message, 200, 400);
    assault.send_broken(&frame);
    assault.forger.send(&frame);
    assault.send_data(number, &message, 0, 200);
    assault.target.assert_receives(&message, 0x1096);

    // A handshake.
    let frame = assault.forger.build(&[(assault.forger.hello(), &[])]);
    assault.send_broken(&frame);
    assault.forger.send(&frame);

    // Without any chunk: the header alone.
    let frame = assault.forger.build(&[]);
    assault.send_broken(&frame);

    // A message of 8000 bytes in one frame, which comes in three receive buffers.
    if mtu > 1500 {
        let message = text(8000, 4);
        let number = FIRST.wrapping_add(2);
        assault.forger.count_frame();
        let eager = Chunk::Eager {
            stream: STREAM,
            start: Some(number),
            number,
            tag: 4,
            ack: AckMode::Policy,
            payload: payload(&message),
        };
        let frame = assault.forger.build(&[(eager, &message)]);
        assault.send_broken(&frame);
        assault.forger.send(&frame);
        assault.target.assert_receives(&message, 4);
    }

    assault.target.assert_nothing();
    bystander.assert_goes_on();
    watch.assert_unharmed();
    eprintln!(
        "{encap}: {} broken frames, each counted by its reason and dropped",
        assault.count
    );
}

#[test]
fn every_broken_frame_is_counted_and_dropped_over_udp4() {
    every_broken_frame_is_counted_and_dropped(Encap::Udp4, 1500);
}

#[test]
fn every_broken_frame_is_counted_and_dropped_over_udp6() {
    every_broken_frame_is_counted_and_dropped(Encap::Udp6, 1500);
}

#[test]
fn every_broken_frame_is_counted_and_dropped_over_ethernet() {
    every_broken_frame_is_counted_and_dropped(Encap::Ethernet, 1500);
}

#[test]
fn every_broken_jumbo_frame_is_counted_and_dropped() {
    // Frames of three pages, all of which are worth it on a veth.
    every_broken_frame_is_counted_and_dropped(Encap::Udp4, 11_698);
    every_broken_frame_is_counted_and_dropped(Encap::Ethernet, 11_698);
}

// Whole Ethernet frames cut off anywhere, though the IP and UDP headers still promise all of it. Expect: nothing delivered, the
// engine lives, and the whole frame is delivered.
#[test]
fn datagrams_shorter_than_they_say_are_dropped() {
    let lab = Lab::builder().name("pthf").nodes(NODES).build().unwrap();
    let daemons = [1, 2].map(|id| lab.node(id).start_daemon("").unwrap());
    let socket = daemons[0].socket();
    let watch = Watch::begin(&socket);
    let _echo = Echo::start(daemons[1].socket(), 11);
    let bystander = PingPong::start(socket.clone(), 10, (2, 11));
    let mut target = Target::open(&socket);
    let mut forger = Forger::meet(&lab, FORGER, &socket);

    let message = text(100, 3);
    forger.count_frame();
    let eager = Chunk::Eager {
        stream: STREAM,
        start: Some(FIRST),
        number: FIRST,
        tag: 1,
        ack: AckMode::Policy,
        payload: payload(&message),
    };
    let frame = forger.build(&[(eager, &message)]);
    let raw = RawEthernet::udp4(lab.node(FORGER), lab.node(1), frame.len());
    let whole = raw.header_len() + frame.len();
    for _ in 0..3 {
        for len in 14..whole {
            raw.send_cut(&frame, len);
            if len % BATCH == 0 {
                forger.pump();
            }
        }
        bystander.assert_goes_on();
        target.assert_nothing();
    }
    raw.send_cut(&frame, whole);
    target.assert_receives(&message, 1);
    target.assert_nothing();
    watch.assert_unharmed();
}
