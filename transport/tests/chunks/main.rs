//! Every chunk kind of wire.md §4 in every situation: past, in order, future, malformed, of a wrong incarnation, at a wrong port.
//!
//! An endpoint is spoken to chunk by chunk ([`portolan_sim::puppet`]), and each test compares *everything* that happened: what is
//! answered, what the host did, which counters moved. The matrix below is complete by construction: a situation without its
//! function does not compile.
//!
//! A case is a conversation up to a point, the chunk that is right there, and what must come of it. Malformed, misdirected and
//! foreign variants of the chunk are said first and must leave the conversation where it was: then the right one still has
//! exactly its own outcome. Where a situation has no literal meaning for a kind, the test says which one it stands for.

#![allow(clippy::expect_used)]

mod answers;
mod endings;
mod handshake;
mod messages;
mod requests;

use portolan_sim::puppet::{FOREIGN, OURS, Puppet, SHUT, Say, THEIRS};
use portolan_transport::policy::{Ack, Policy, Recovery};
use portolan_transport::wire::frame::FRAME_HEADER_LEN;
use portolan_transport::wire::{WireError, reseal};

macro_rules! matrix {
    ($($group:ident: $($kind:ident)+;)+) => { $($(
        mod $kind {
            use super::$group::$kind as kind;
            #[test]
            fn past() { kind::past(); }
            #[test]
            fn in_order() { kind::case().holds(); }
            #[test]
            fn future() { kind::future(); }
            #[test]
            fn malformed() { kind::malformed(); }
            #[test]
            fn wrong_incarnation() { kind::wrong_incarnation(); }
            #[test]
            fn wrong_port() { kind::wrong_port(); }
        }
    )+)+ };
}

matrix! {
    handshake: hello hello_ack reset path_probe path_ack;
    messages: eager next run rts data;
    requests: probe null drop_confirm close;
    answers: cts msg_end ack nack ready;
    endings: msg_drop null_ack port_closed closed refused resume;
}

/// Messages under way per stream.
const WINDOW: u32 = 8;

/// Ours, but acknowledged at once, so that an answer is heard in the step that caused it.
fn policy() -> Policy {
    Policy {
        recovery: Recovery::Selective,
        window_messages: WINDOW,
        ack: Ack::Immediate,
        ..Policy::default()
    }
}

/// An endpoint that took message 0 of the puppet's stream, acknowledged it, and expects message 1.
fn receiver() -> Puppet {
    let mut p = Puppet::new(policy(), 4);
    let first = p.eager(0);
    assert_eq!(p.says(first), ["delivers 0", "ACK 1", "streams_opened +1"]);
    p
}

/// An endpoint whose message 0 the puppet acknowledged and whose message 1, of `len` bytes, waits for its answer.
fn sender(len: u32) -> Puppet {
    let mut p = Puppet::new(policy(), 4);
    assert_eq!(p.sends(100), ["EAGER 0 start 0, 100 bytes"]);
    assert_eq!(p.says(p.ack(1)), ["completes 0 Delivered"]);
    p.sends(len);
    p
}

/// A conversation, what is said next, and what comes of it.
struct Case {
    p: Puppet,
    say: Say,
    /// What is behind it in its frame, and what is said as well.
    behind: Vec<Say>,
    /// Where in the frame the chunk is that the case is about.
    at: usize,
    outcome: Vec<&'static str>,
}

impl Case {
    fn new<const N: usize>(p: Puppet, say: Say, outcome: [&'static str; N]) -> Self {
        Self {
            p,
            say,
            behind: Vec::new(),
            at: FRAME_HEADER_LEN,
            outcome: outcome.to_vec(),
        }
    }

    /// All that is said.
    fn all(&self) -> Vec<Say> {
        [std::slice::from_ref(&self.say), &self.behind].concat()
    }

    /// It does come of it.
    fn holds(mut self) {
        let all = self.all();
        assert_eq!(self.p.says_all(all), self.outcome);
    }

    /// The chunk with some bytes of its header changed is refused for this reason, and nothing else happens.
    fn refuses(
        &mut self,
        error: WireError,
        change: impl FnOnce(&mut Vec<u8>),
        nothing: &[&'static str],
    ) {
        let counter = format!("malformed_{}", error.name());
        let before = self.p.counter(&counter);
        let mut frame = self.p.frame(&self.all());
        change(&mut frame);
        reseal(&mut frame);
        let mut expected = vec![format!("dropped: Wire({error:?})")];
        expected.extend(nothing.iter().map(|line| String::from(*line)));
        assert_eq!(self.p.says_bytes(&frame), expected);
        assert_eq!(self.p.counter(&counter), before + 1);
    }

    /// What the parser refuses of every kind: a length that cuts the last field off, one that is no multiple of 4, one that leaves
    /// the header area, and a payload where the kind has none or none where it has one. wire.md §3, §6
    fn refuses_shapes(self) -> Self {
        self.refuses_shapes_cut_by(4)
    }

    /// The same of a kind whose last field is so long, with what may be missing behind it.
    fn refuses_shapes_cut_by(mut self, last: i16) -> Self {
        let field = WireError::ChunkField;
        let at = self.at;
        let length = |frame: &mut Vec<u8>, by: i16| {
            let len = i16::from_be_bytes([frame[at + 2], frame[at + 3]]) + by;
            frame[at + 2..at + 4].copy_from_slice(&len.to_be_bytes());
        };
        self.refuses(field, |frame| length(frame, -last), &[]);
        self.refuses(WireError::ChunkLength, |frame| length(frame, 2), &[]);
        self.refuses(WireError::ChunkLength, |frame| length(frame, 4), &[]);
        self.refuses(field, |frame| frame[at + 1] ^= 1, &[]);
        self
    }

    /// The same, and ports that no node has. `stream` is where the chunk names its stream.
    fn refuses_ports(mut self, stream: usize) -> Self {
        for port in [stream, stream + 2] {
            let change = |frame: &mut Vec<u8>| frame[port] = 1;
            self.refuses(WireError::ChunkField, change, &[]);
        }
        self.refuses_shapes()
    }

    /// Frames that name another incarnation of either side are dropped and answered by RESET; the right one is then heard as
    /// if nothing had been. transport.md §2.3
    fn wrong_incarnation(mut self) {
        for (src, dst) in [(1, 0), (0, 1)] {
            let right = self.p.header;
            self.p.header.src_incarnation ^= src;
            self.p.header.dst_incarnation ^= dst;
            let outcome = ["dropped: WrongIncarnation", "RESET incarnation"];
            assert_eq!(self.p.says_all(self.all()), outcome);
            self.p.header = right;
        }
        self.holds();
    }

    /// The chunk between other ports: one of ours that is shut, one of our other engine's, and one of theirs that never spoke.
    /// `ours_first`: the kind travels on our streams.
    fn elsewhere(
        mut self,
        ours_first: bool,
        shut: &[&str],
        foreign: &[&str],
        theirs: &[&str],
    ) -> Self {
        let other = THEIRS + 1;
        for ((our, their), outcome) in [
            ((SHUT, THEIRS), shut),
            ((FOREIGN, THEIRS), foreign),
            ((OURS, other), theirs),
        ] {
            let elsewhere = |say: Say| match ours_first {
                true => say.ports(our, their),
                false => say.ports(their, our),
            };
            let all = self.all().into_iter().map(elsewhere).collect();
            assert_eq!(self.p.says_all(all), outcome, "ports {our} and {their}");
        }
        self
    }
}
