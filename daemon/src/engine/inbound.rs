//! What becomes of a received frame: outer headers off, who sent it and for which queue, and on to the transport or across.

use std::net::IpAddr;

use portolan_transport::Endpoint;
use portolan_transport::ident::Nanos;

use crate::xsk::MAX_SEGMENTS;

use super::counters::EngineCounters;
use super::encap::{EncapError, Encapsulation, Inner, REPEATABLE};
use super::host::EngineHost;
use super::path::{Neighbour, cross};
use super::routes::Routes;

/// The outer headers of the last frame whose were looked at and in order, its length, and what they said: they say it again of the next frame that is as long.
#[derive(Debug, Default)]
pub(super) struct Seen(Option<([u8; REPEATABLE], usize, Inner)>);

impl Seen {
    /// [`Encapsulation::parse`].
    #[inline]
    fn parse(
        &mut self,
        encap: &Encapsulation,
        first: &[u8],
        total: usize,
    ) -> Result<Inner, EncapError> {
        if let Some((headers, len, inner)) = &self.0
            && first.first_chunk() == Some(headers)
            && total == *len
            && first.len() <= total
        {
            return Ok(*inner);
        }
        let inner = encap.parse(first, total)?;
        // Those of IPv4, which are as long: behind shorter ones is what differs, and longer ones are not compared to their end.
        let whole = first.first_chunk().filter(|_| inner.at == REPEATABLE);
        self.0 = whole.map(|headers| (*headers, total, inner));
        Ok(inner)
    }
}

/// What a received frame meets.
pub(super) struct Inbound<'p> {
    pub(super) now: Nanos,
    pub(super) queue: u8,
    pub(super) encap: &'p Encapsulation,
    pub(super) seen: &'p mut Seen,
    pub(super) routes: &'p Routes,
    pub(super) neighbours: &'p mut Vec<Neighbour>,
    pub(super) endpoint: &'p mut Endpoint,
    pub(super) host: &'p mut EngineHost,
    pub(super) counters: &'p mut EngineCounters,
}

impl Inbound<'_> {
    /// A frame as it came from the wire.
    #[inline]
    pub(super) fn frame(&mut self, segments: &[&[u8]]) {
        let total = segments.iter().map(|segment| segment.len()).sum();
        let first = segments.first().copied().unwrap_or_default();
        let inner = match self.seen.parse(self.encap, first, total) {
            Ok(inner) => inner,
            Err(error) => return self.counters.count_outer(error),
        };
        if let [only] = segments {
            self.transport_frame(&[inside(only, inner.at, inner.len)], inner.source);
        } else {
            self.long_frame(segments, &inner);
        }
    }

    /// One of several segments.
    #[inline(never)]
    fn long_frame(&mut self, segments: &[&[u8]], inner: &Inner) {
        let mut trimmed: [&[u8]; MAX_SEGMENTS] = [&[]; MAX_SEGMENTS];
        let count = trim(segments, inner, &mut trimmed);
        self.transport_frame(trimmed.get(..count).unwrap_or_default(), inner.source);
    }

    /// The transport frame inside. Sender and receiving queue are read before anything is verified (wire.md §2): they only decide who
    /// gets to look.
    #[inline]
    fn transport_frame(&mut self, segments: &[&[u8]], source: Option<IpAddr>) {
        if let Some(header) = segments.first().and_then(|first| first.first_chunk::<14>()) {
            let sender = u16::from_be_bytes([header[8], header[9]]);
            if !self.routes.allows(sender, source) {
                self.counters.outer_source += 1;
                return;
            }
            let queue = header[13];
            if queue != self.queue && usize::from(queue) <= self.neighbours.len() {
                return cross(queue, segments, self.neighbours, self.counters);
            }
        }
        // Refusals are counted by the transport.
        let _ = self.endpoint.handle_frame(self.now, segments, self.host);
    }
}

/// What is left of a segment without its first bytes, and at most so many of it.
#[inline]
fn inside(segment: &[u8], from: usize, most: usize) -> &[u8] {
    let bytes = segment.get(from..).unwrap_or_default();
    bytes.get(..most).unwrap_or(bytes)
}

/// Cuts the outer headers and what follows the transport frame off; returns how many segments are left, the first of them perhaps
/// empty.
fn trim<'s>(segments: &[&'s [u8]], inner: &Inner, to: &mut [&'s [u8]; MAX_SEGMENTS]) -> usize {
    let mut left = inner.len;
    let mut count = 0;
    for (index, (segment, place)) in segments.iter().zip(to.iter_mut()).enumerate() {
        let from = if index == 0 { inner.at } else { 0 };
        let bytes = inside(segment, from, left);
        if bytes.is_empty() && index > 0 {
            break;
        }
        left -= bytes.len();
        *place = bytes;
        count = index + 1;
    }
    count
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::encap::Target;
    use super::super::encap::tests::config;
    use super::*;
    use crate::engine_link::Encap;

    /// A frame of so many bytes inside, and who receives it.
    fn framed(kind: Encap, len: usize) -> (Encapsulation, Vec<u8>) {
        let (ours, theirs) = ("10.0.0.1", "10.0.0.2");
        let receiver = Encapsulation::new(&config(kind, [1; 6], Some(ours))).unwrap();
        let sender = Encapsulation::new(&config(kind, [2; 6], Some(theirs))).unwrap();
        let mut frame = vec![0xa5; sender.overhead() + len];
        let target = Target {
            mac: [1; 6],
            address: Some(ours.parse().unwrap()),
            queue: 0,
            flow: 3,
            high: false,
        };
        sender.build(&mut frame, &target).unwrap();
        (receiver, frame)
    }

    proptest! {
        // After a frame in order, one with bytes of its headers changed, cut short or lengthened, or the same again. Expect: what is found is what would be found
        // without the frame before it, and so after the next that is in order.
        #[test]
        fn a_frame_is_judged_as_if_none_had_come_before(
            ethernet: bool,
            len in 0usize..200,
            flips in prop::collection::vec((0usize..60, any::<u8>()), 0..3),
            shown in 0usize..300,
            more in prop_oneof![Just(0usize), 0usize..100],
            less in prop_oneof![Just(0usize), 0usize..100],
        ) {
            let kind = if ethernet { Encap::Ethernet } else { Encap::Udp };
            let (encap, frame) = framed(kind, len);
            let mut seen = Seen::default();
            let mut other = frame.clone();
            for (at, flip) in flips {
                if let Some(byte) = other.get_mut(at) {
                    *byte ^= flip;
                }
            }
            let shown = &other[..shown.min(other.len())];
            for (first, total) in [(&frame[..], frame.len()), (shown, (other.len() + more).saturating_sub(less)), (&frame[..], frame.len())] {
                prop_assert_eq!(seen.parse(&encap, first, total), encap.parse(first, total));
            }
        }
    }

    // Frames over IPv6, whose outer headers are longer than what is remembered. Expect: the second, for a port that is not ours, is refused.
    #[test]
    fn longer_headers_are_looked_at_each_time() {
        let config = config(Encap::Udp, [1; 6], Some("fd00::1"));
        let encap = Encapsulation::new(&config).unwrap();
        let mut frame = vec![0; encap.overhead() + 64];
        let target = Target {
            mac: [1; 6],
            address: Some("fd00::1".parse().unwrap()),
            queue: 0,
            flow: 3,
            high: false,
        };
        encap.build(&mut frame, &target).unwrap();
        let mut seen = Seen::default();
        assert!(seen.parse(&encap, &frame, frame.len()).is_ok());
        frame[57] ^= 0xff;
        let refused = seen.parse(&encap, &frame, frame.len());
        assert_eq!(refused, Err(EncapError::UdpPort));
    }

    #[test]
    fn what_surrounds_a_transport_frame_is_cut_off() {
        let inner = |at, len| Inner {
            at,
            len,
            source: None,
        };
        let cut = |segments: &[&'static [u8]], inner: Inner| {
            let mut to: [&[u8]; MAX_SEGMENTS] = [&[]; MAX_SEGMENTS];
            let count = trim(segments, &inner, &mut to);
            to[..count].iter().map(|s| s.to_vec()).collect::<Vec<_>>()
        };
        assert_eq!(cut(&[b"hhABCpp"], inner(2, 3)), [b"ABC".to_vec()]);
        assert_eq!(
            cut(&[b"hhABC", b"DE", b"Fp"], inner(2, 6)),
            [&b"ABC"[..], b"DE", b"F"]
        );
        assert_eq!(cut(&[b"hhABC", b"pp"], inner(2, 3)), [b"ABC".to_vec()]);
        assert_eq!(cut(&[b"hh", b"AB"], inner(2, 2)), [&b""[..], b"AB"]);
        assert_eq!(cut(&[b"hh"], inner(2, 0)), [b"".to_vec()]);
    }
}
