//! The outer headers: Ethernet, or Ethernet with IPv4 or IPv6 and UDP.
//!
//! Implements wire.md's *Encapsulation*. Building writes the headers in front of a transport frame that already lies in the buffer;
//! parsing finds the transport frame again and refuses, by reason, every frame whose outer headers are not what our peers send.
//!
//! - UDP port = base + receiving queue; the source port is the flow's, so that NICs and switches spread flows (RSS, ECMP).
//! - DF is set and the identification 0 (RFC 6864): a path that cannot carry a frame must not cut it.
//! - The IPv4 header checksum is verified. L4 checksums are not: virtual links leave them half done (AF_XDP.md), and the frame's own
//!   CRC32C is stronger. We send the IPv4 UDP checksum as 0 (RFC 768) and compute the IPv6 one (RFC 8200 §8.1).
//!
//! Invariant: `parse` never reads beyond the first segment and never returns a range outside the frame.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::engine_link::{Encap, EngineConfig};

/// Local experimental EtherType 1 (IEEE 802).
pub const ETHERTYPE_PORTOLAN: u16 = 0x88B5;
const ETHERTYPE_IPV4: u16 = 0x0800;
const ETHERTYPE_IPV6: u16 = 0x86DD;
const PROTOCOL_UDP: u8 = 17;
const HOP_LIMIT: u8 = 64;
const DONT_FRAGMENT: u16 = 0x4000;
/// More-fragments flag and fragment offset.
const FRAGMENT_MASK: u16 = 0x3FFF;
/// Source ports are drawn from the dynamic range, RFC 6335 §6.
const FIRST_SOURCE_PORT: u16 = 49_152;

const ETHERNET: usize = 14;
const IPV4: usize = 20;
const IPV6: usize = 40;
const UDP: usize = 8;

/// Bytes of headers that may be repeated, [`Encapsulation::repeatable`].
pub const REPEATABLE: usize = ETHERNET + IPV4 + UDP;

/// Why a received frame's outer headers were refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EncapError {
    /// Shorter than its headers.
    Short,
    /// For another MAC address.
    Mac,
    /// Another EtherType or IP protocol.
    Protocol,
    /// IP version, header length or total length make no sense, or the header carries options.
    IpHeader,
    /// The IPv4 header checksum is wrong.
    IpChecksum,
    /// A fragment.
    Fragment,
    /// For another IP address.
    Address,
    /// For a UDP port that is none of this node's.
    UdpPort,
    /// The UDP length makes no sense.
    UdpLength,
}

/// Where in a received frame the transport's part is, and who claims to have sent it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Inner {
    /// Offset of the transport frame in the first segment.
    pub at: usize,
    /// Its bytes. With Ethernet encapsulation this includes the link's padding.
    pub len: usize,
    /// Outer source address.
    pub source: Option<IpAddr>,
}

/// Where a frame goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Target {
    /// Next hop.
    pub mac: [u8; 6],
    /// Address, for UDP; of the same family as ours.
    pub address: Option<IpAddr>,
    /// Queue at the peer.
    pub queue: u8,
    /// Of the flow; see [`portolan_transport::endpoint::Transmit`].
    pub flow: u16,
    /// High priority: DSCP EF (RFC 3246) instead of the default.
    pub high: bool,
}

#[derive(Clone, Copy, Debug)]
enum Outer {
    Ethernet,
    V4(Ipv4Addr),
    V6(Ipv6Addr),
}

/// This engine's outer headers.
#[derive(Clone, Debug)]
pub struct Encapsulation {
    outer: Outer,
    mac: [u8; 6],
    udp_port: u16,
    queues: u8,
    mtu: u16,
}

impl Encapsulation {
    /// From the engine's configuration; `None` if UDP lacks an address or the port range overflows.
    pub fn new(config: &EngineConfig) -> Option<Self> {
        let outer = match (config.encap, config.address) {
            (Encap::Ethernet, _) => Outer::Ethernet,
            (Encap::Udp, Some(IpAddr::V4(address))) => Outer::V4(address),
            (Encap::Udp, Some(IpAddr::V6(address))) => Outer::V6(address),
            (Encap::Udp, None) => return None,
        };
        config
            .udp_port
            .checked_add(u16::from(config.queues.max(1)) - 1)?;
        Some(Self {
            outer,
            mac: config.mac,
            udp_port: config.udp_port,
            queues: config.queues.max(1),
            mtu: crate::xsk::frame_mtu(config.mtu, config.veth),
        })
    }

    /// Bytes of the outer headers.
    pub fn overhead(&self) -> usize {
        match self.outer {
            Outer::Ethernet => ETHERNET,
            Outer::V4(_) => ETHERNET + IPV4 + UDP,
            Outer::V6(_) => ETHERNET + IPV6 + UDP,
        }
    }

    /// Longest transport frame that the interface's MTU, which counts all behind the Ethernet header, leaves room for, and that is worth sending.
    pub fn max_frame(&self) -> u16 {
        self.mtu.saturating_sub((self.overhead() - ETHERNET) as u16)
    }

    /// Can frames for this address be built at all?
    pub fn reaches(&self, address: Option<IpAddr>) -> bool {
        match (self.outer, address) {
            (Outer::Ethernet, _) => true,
            (Outer::V4(_), Some(IpAddr::V4(_))) | (Outer::V6(_), Some(IpAddr::V6(_))) => true,
            (Outer::V4(_) | Outer::V6(_), _) => false,
        }
    }

    /// Writes the outer headers in front of the transport frame at `frame[overhead()..]`. `None` if the target's address is not of
    /// our family or the frame is too long for the headers' length fields.
    pub fn build(&self, frame: &mut [u8], target: &Target) -> Option<()> {
        let inner = frame.len().checked_sub(self.overhead())?;
        let udp_len = u16::try_from(inner + UDP).ok()?;
        frame.get_mut(..6)?.copy_from_slice(&target.mac);
        frame[6..12].copy_from_slice(&self.mac);
        let ports = (
            FIRST_SOURCE_PORT | (target.flow & 0x3FFF),
            self.udp_port.checked_add(u16::from(target.queue))?,
        );
        // DSCP EF, or default.
        let class = if target.high { 46 << 2 } else { 0u8 };
        match (self.outer, target.address) {
            (Outer::Ethernet, _) => put16(frame, 12, ETHERTYPE_PORTOLAN),
            (Outer::V4(from), Some(IpAddr::V4(to))) => {
                put16(frame, 12, ETHERTYPE_IPV4);
                let total = udp_len.checked_add(IPV4 as u16)?;
                write_ipv4(&mut frame[ETHERNET..], from, to, total, class);
                write_udp(&mut frame[ETHERNET + IPV4..], ports, udp_len);
            }
            (Outer::V6(from), Some(IpAddr::V6(to))) => {
                put16(frame, 12, ETHERTYPE_IPV6);
                write_ipv6(&mut frame[ETHERNET..], from, to, udp_len, class);
                let udp = &mut frame[ETHERNET + IPV6..];
                write_udp(udp, ports, udp_len);
                let checksum = udp_v6_checksum(from, to, udp);
                put16(udp, 6, checksum);
            }
            (Outer::V4(_) | Outer::V6(_), _) => return None,
        }
        Some(())
    }

    /// The headers of a frame just built, if they fit the next one as well that is as long and goes the same way: not where they depend on what is in it.
    pub fn repeatable(&self, frame: &[u8]) -> Option<[u8; REPEATABLE]> {
        match self.outer {
            Outer::V4(_) => frame.first_chunk().copied(),
            // Built as quickly as copied; with a checksum over all of it.
            Outer::Ethernet | Outer::V6(_) => None,
        }
    }

    /// Finds the transport frame in a received frame of `total` bytes whose headers lie in `first`.
    pub fn parse(&self, first: &[u8], total: usize) -> Result<Inner, EncapError> {
        if first.len() < self.overhead() || total < first.len() {
            return Err(EncapError::Short);
        }
        if first[..6] != self.mac {
            return Err(EncapError::Mac);
        }
        let (ethertype, packet) = (get16(first, 12), &first[ETHERNET..]);
        let behind = total - ETHERNET;
        match self.outer {
            Outer::Ethernet => {
                if ethertype != ETHERTYPE_PORTOLAN {
                    return Err(EncapError::Protocol);
                }
                Ok(Inner {
                    at: ETHERNET,
                    len: behind,
                    source: None,
                })
            }
            Outer::V4(local) => {
                if ethertype != ETHERTYPE_IPV4 {
                    return Err(EncapError::Protocol);
                }
                let source = check_ipv4(packet, behind, local)?;
                self.check_udp(&packet[IPV4..], usize::from(get16(packet, 2)) - IPV4)
                    .map(|len| Inner {
                        at: ETHERNET + IPV4 + UDP,
                        len,
                        source: Some(source.into()),
                    })
            }
            Outer::V6(local) => {
                if ethertype != ETHERTYPE_IPV6 {
                    return Err(EncapError::Protocol);
                }
                let source = check_ipv6(packet, behind, local)?;
                self.check_udp(&packet[IPV6..], usize::from(get16(packet, 4)))
                    .map(|len| Inner {
                        at: ETHERNET + IPV6 + UDP,
                        len,
                        source: Some(source.into()),
                    })
            }
        }
    }

    /// Bytes of the datagram's payload; `ip_payload` is what the IP header says lies behind it, already known to be in the frame.
    fn check_udp(&self, udp: &[u8], ip_payload: usize) -> Result<usize, EncapError> {
        let queue = get16(udp, 2).wrapping_sub(self.udp_port);
        if queue >= u16::from(self.queues) {
            return Err(EncapError::UdpPort);
        }
        let len = usize::from(get16(udp, 4));
        if len < UDP || len != ip_payload {
            return Err(EncapError::UdpLength);
        }
        Ok(len - UDP)
    }
}

fn get16(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

fn put16(bytes: &mut [u8], at: usize, value: u16) {
    bytes[at..at + 2].copy_from_slice(&value.to_be_bytes());
}

fn check_ipv4(packet: &[u8], behind: usize, local: Ipv4Addr) -> Result<Ipv4Addr, EncapError> {
    if packet[0] != 0x45 {
        return Err(EncapError::IpHeader);
    }
    if fold(sum(0, &packet[..IPV4])) != 0xFFFF {
        return Err(EncapError::IpChecksum);
    }
    let total = usize::from(get16(packet, 2));
    if total < IPV4 + UDP || total > behind {
        return Err(EncapError::IpHeader);
    }
    if get16(packet, 6) & FRAGMENT_MASK != 0 {
        return Err(EncapError::Fragment);
    }
    if packet[9] != PROTOCOL_UDP {
        return Err(EncapError::Protocol);
    }
    if packet[16..20] != local.octets() {
        return Err(EncapError::Address);
    }
    Ok(Ipv4Addr::new(
        packet[12], packet[13], packet[14], packet[15],
    ))
}

fn check_ipv6(packet: &[u8], behind: usize, local: Ipv6Addr) -> Result<Ipv6Addr, EncapError> {
    if packet[0] >> 4 != 6 {
        return Err(EncapError::IpHeader);
    }
    let payload = usize::from(get16(packet, 4));
    if payload < UDP || payload + IPV6 > behind {
        return Err(EncapError::IpHeader);
    }
    match packet[6] {
        PROTOCOL_UDP => {}
        44 => return Err(EncapError::Fragment),
        _ => return Err(EncapError::Protocol),
    }
    if packet[24..40] != local.octets() {
        return Err(EncapError::Address);
    }
    let mut source = [0; 16];
    source.copy_from_slice(&packet[8..24]);
    Ok(source.into())
}

fn write_ipv4(packet: &mut [u8], from: Ipv4Addr, to: Ipv4Addr, total: u16, class: u8) {
    packet[0] = 0x45;
    packet[1] = class;
    put16(packet, 2, total);
    put16(packet, 4, 0);
    put16(packet, 6, DONT_FRAGMENT);
    packet[8] = HOP_LIMIT;
    packet[9] = PROTOCOL_UDP;
    put16(packet, 10, 0);
    packet[12..16].copy_from_slice(&from.octets());
    packet[16..20].copy_from_slice(&to.octets());
    let checksum = !fold(sum(0, &packet[..IPV4]));
    put16(packet, 10, checksum);
}

fn write_ipv6(packet: &mut [u8], from: Ipv6Addr, to: Ipv6Addr, payload: u16, class: u8) {
    packet[0] = 0x60 | class >> 4;
    packet[1] = class << 4;
    put16(packet, 2, 0);
    put16(packet, 4, payload);
    packet[6] = PROTOCOL_UDP;
    packet[7] = HOP_LIMIT;
    packet[8..24].copy_from_slice(&from.octets());
    packet[24..40].copy_from_slice(&to.octets());
}

fn write_udp(udp: &mut [u8], ports: (u16, u16), len: u16) {
    put16(udp, 0, ports.0);
    put16(udp, 2, ports.1);
    put16(udp, 4, len);
    put16(udp, 6, 0);
}

/// RFC 8200 §8.1: over the pseudo header and the whole datagram, never 0.
fn udp_v6_checksum(from: Ipv6Addr, to: Ipv6Addr, datagram: &[u8]) -> u16 {
    let mut total = sum(0, &from.octets());
    total = sum(total, &to.octets());
    total = sum(total, &(datagram.len() as u32).to_be_bytes());
    total = sum(total, &[0, 0, 0, PROTOCOL_UDP]);
    match !fold(sum(total, datagram)) {
        0 => 0xFFFF,
        checksum => checksum,
    }
}

/// Adds big-endian 16-bit words (RFC 1071), four bytes at a time; cannot overflow within 2³² words.
fn sum(start: u64, bytes: &[u8]) -> u64 {
    let mut total = start;
    let mut words = bytes.chunks_exact(4);
    for word in &mut words {
        total += u64::from(u32::from_be_bytes([word[0], word[1], word[2], word[3]]));
    }
    let mut last = [0; 4];
    let rest = words.remainder();
    last[..rest.len()].copy_from_slice(rest);
    total + u64::from(u32::from_be_bytes(last))
}

/// Folds a sum to 16 bits with end-around carry.
fn fold(mut total: u64) -> u16 {
    while total >> 16 != 0 {
        total = (total & 0xFFFF) + (total >> 16);
    }
    total as u16
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use portolan_abi::ledger::LedgerGeometry;

    use crate::engine_link::Wait;

    const PEER_MAC: [u8; 6] = [2, 0, 0, 0, 0, 2];
    const MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];

    pub(in super::super) fn config(
        encap: Encap,
        mac: [u8; 6],
        address: Option<&str>,
    ) -> EngineConfig {
        EngineConfig {
            node: 1,
            name: "a".into(),
            cluster: 1,
            incarnation: 1,
            queue: 0,
            queues: 2,
            ledger: LedgerGeometry {
                peers: 1,
                send_streams: 1,
                receive_streams: 1,
                frames: 1,
            },
            encap,
            udp_port: 4_800,
            mac,
            address: address.map(|a| a.parse().unwrap()),
            mtu: 1500,
            umem_mtu: 0,
            wait: Wait::Busy,
            core: None,
            rx_frames: 1,
            ring_entries: 1,
            default_timeout_ms: 1,
            transport: crate::transport_policy::TransportPolicy::default(),
            first_epoch: 0,
            veth: false,
            compares_polling: false,
            shares_core: false,
            keep_awake_ms: 0,
        }
    }

    fn pair(kind: &str) -> (Encapsulation, Encapsulation, Target) {
        let (encap, ours, theirs) = match kind {
            "ethernet" => (Encap::Ethernet, None, None),
            "v4" => (Encap::Udp, Some("10.1.2.3"), Some("10.1.2.4")),
            _ => (Encap::Udp, Some("fd00::1"), Some("fd00::2")),
        };
        let target = Target {
            mac: PEER_MAC,
            address: theirs.map(|a| a.parse().unwrap()),
            queue: 1,
            flow: 0xBEEF,
            high: true,
        };
        (
            Encapsulation::new(&config(encap, MAC, ours)).unwrap(),
            Encapsulation::new(&config(encap, PEER_MAC, theirs)).unwrap(),
            target,
        )
    }

    fn built(sender: &Encapsulation, target: &Target, payload: usize) -> Vec<u8> {
        let mut frame = vec![0; sender.overhead() + payload];
        for (i, byte) in frame[sender.overhead()..].iter_mut().enumerate() {
            *byte = i as u8 ^ 0x5A;
        }
        sender.build(&mut frame, target).unwrap();
        frame
    }

    // An MTU of 9000 on a NIC and on a veth. Expect: all of it, and as much as fills two pages (`xsk/pages.rs`), both with the outer headers.
    #[test]
    fn frames_are_as_long_as_is_worth_it() {
        for (veth, longest) in [(false, 8972), (true, 7574)] {
            let mut config = config(Encap::Udp, MAC, Some("10.1.2.3"));
            (config.mtu, config.veth) = (9000, veth);
            assert_eq!(Encapsulation::new(&config).unwrap().max_frame(), longest);
        }
    }

    #[test]
    fn what_one_end_builds_the_other_parses() {
        for kind in ["ethernet", "v4", "v6"] {
            let (sender, receiver, target) = pair(kind);
            for payload in [0, 1, 40, 41, 1400, usize::from(sender.max_frame())] {
                let frame = built(&sender, &target, payload);
                let inner = receiver.parse(&frame, frame.len()).unwrap();
                assert_eq!(
                    (inner.at, inner.len),
                    (sender.overhead(), payload),
                    "{kind}"
                );
                let source = match kind {
                    "ethernet" => None,
                    "v4" => Some("10.1.2.3".parse().unwrap()),
                    _ => Some("fd00::1".parse().unwrap()),
                };
                assert_eq!(inner.source, source);
                // A longer frame of several segments: only the first is looked at.
                if payload > 100 {
                    let inner = receiver
                        .parse(&frame[..64.max(inner.at)], frame.len())
                        .unwrap();
                    assert_eq!(inner.len, payload);
                }
            }
        }
    }

    // Headers of one frame in front of another that is as long. Expect: as if they had been built for it; where they depend on what is in it, they are not to be had.
    #[test]
    fn what_can_be_repeated_fits_the_next_frame() {
        for kind in ["ethernet", "v4", "v6"] {
            let (sender, receiver, target) = pair(kind);
            let first = built(&sender, &target, 1_400);
            let mut next = first.clone();
            let at = sender.overhead();
            next[at..].reverse();
            sender.build(&mut next, &target).unwrap();
            let headers = sender.repeatable(&first);
            assert_eq!(headers.is_some(), kind == "v4");
            if let Some(headers) = headers {
                let mut repeated = next.clone();
                repeated[..at].fill(0xEE);
                repeated[..REPEATABLE].copy_from_slice(&headers);
                assert_eq!(repeated, next);
                assert!(receiver.parse(&repeated, repeated.len()).is_ok());
            }
        }
    }

    #[test]
    fn every_truncated_length_is_refused() {
        for kind in ["v4", "v6"] {
            let (sender, receiver, target) = pair(kind);
            let frame = built(&sender, &target, 100);
            for len in 0..frame.len() {
                assert!(receiver.parse(&frame[..len], len).is_err(), "{kind} {len}");
            }
            // The link padded it: what is behind the datagram is not ours.
            let mut padded = frame.clone();
            padded.extend([0; 7]);
            assert_eq!(receiver.parse(&padded, padded.len()).unwrap().len, 100);
        }
        let (sender, receiver, target) = pair("ethernet");
        let frame = built(&sender, &target, 0);
        for len in 0..frame.len() {
            assert_eq!(receiver.parse(&frame[..len], len), Err(EncapError::Short));
        }
    }

    #[test]
    fn each_outer_field_is_refused_by_its_reason() {
        let (sender, receiver, target) = pair("v4");
        let frame = built(&sender, &target, 64);
        let refused = |at: usize, value: u8, fix: bool| {
            let mut frame = frame.clone();
            frame[at] = value;
            if fix {
                put16(&mut frame, 24, 0);
                let checksum = !fold(sum(0, &frame[14..34]));
                put16(&mut frame, 24, checksum);
            }
            receiver.parse(&frame, frame.len()).unwrap_err()
        };
        assert_eq!(refused(0, 0xFF, false), EncapError::Mac);
        assert_eq!(refused(12, 0x86, false), EncapError::Protocol);
        assert_eq!(refused(14, 0x46, true), EncapError::IpHeader);
        assert_eq!(refused(14, 0x65, true), EncapError::IpHeader);
        assert_eq!(refused(16, 0x10, true), EncapError::IpHeader);
        assert_eq!(refused(22, 1, false), EncapError::IpChecksum);
        assert_eq!(refused(20, 0x20, true), EncapError::Fragment);
        assert_eq!(refused(21, 1, true), EncapError::Fragment);
        assert_eq!(refused(23, 6, true), EncapError::Protocol);
        assert_eq!(refused(33, 9, true), EncapError::Address);
        assert_eq!(refused(36, 0, false), EncapError::UdpPort);
        assert_eq!(refused(37, frame[37] + 1, false), EncapError::UdpPort);
        assert_eq!(refused(39, 7, false), EncapError::UdpLength);

        let (sender, receiver, target) = pair("v6");
        let frame = built(&sender, &target, 64);
        for (at, value, reason) in [
            (14, 0x45, EncapError::IpHeader),
            (18, 0xFF, EncapError::IpHeader),
            (20, 44, EncapError::Fragment),
            (20, 0, EncapError::Protocol),
            (53, 0xEE, EncapError::Address),
            (56, 0, EncapError::UdpPort),
            (59, 3, EncapError::UdpLength),
        ] {
            let mut frame = frame.clone();
            frame[at] = value;
            assert_eq!(receiver.parse(&frame, frame.len()), Err(reason), "{at}");
        }
    }

    #[test]
    fn checksums_are_those_of_the_rfcs() {
        // RFC 1071 §3's example.
        let words = [0, 1, 0xF2, 3, 0xF4, 0xF5, 0xF6, 0xF7];
        assert_eq!(fold(sum(0, &words)), 0xDDF2);
        let (sender, _, target) = pair("v6");
        for payload in [0, 1, 2, 3, 999] {
            let frame = built(&sender, &target, payload);
            let udp = &frame[54..];
            let mut total = sum(0, &frame[22..54]);
            total = sum(total, &(udp.len() as u32).to_be_bytes());
            total = sum(total, &[0, 0, 0, 17]);
            assert_eq!(fold(sum(total, udp)), 0xFFFF);
        }
    }

    #[test]
    fn a_target_of_another_family_is_refused() {
        let (sender, _, mut target) = pair("v4");
        target.address = Some("fd00::2".parse().unwrap());
        assert_eq!(sender.build(&mut [0; 100], &target), None);
        assert!(!sender.reaches(target.address));
        target.address = None;
        assert_eq!(sender.build(&mut [0; 100], &target), None);
    }
}
