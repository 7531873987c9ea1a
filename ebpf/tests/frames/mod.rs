//! Crafted frames, layer by layer, and the two ends they travel between.

use std::net::{Ipv4Addr, Ipv6Addr};

pub const OUR_MAC: [u8; 6] = [0x02, 0x50, 0x54, 0x4c, 0x00, 0x01];
pub const OTHER_MAC: [u8; 6] = [0x02, 0x50, 0x54, 0x4c, 0x00, 0x02];
pub const BROADCAST: [u8; 6] = [0xff; 6];
/// The group address of [`GROUP_V4`].
pub const GROUP_MAC: [u8; 6] = [0x01, 0x00, 0x5e, 0x00, 0x00, 0x05];

pub const OUR_V4: Ipv4Addr = Ipv4Addr::new(10, 1, 0, 2);
pub const OTHER_V4: Ipv4Addr = Ipv4Addr::new(10, 1, 0, 3);
pub const GROUP_V4: Ipv4Addr = Ipv4Addr::new(224, 0, 0, 5);
pub const OUR_V6: Ipv6Addr = Ipv6Addr::new(0xfd00, 1, 0, 0, 0, 0, 0, 2);
pub const OTHER_V6: Ipv6Addr = Ipv6Addr::new(0xfd00, 1, 0, 0, 0, 0, 0, 3);

pub const IPV4: u16 = 0x0800;
pub const ARP: u16 = 0x0806;
pub const VLAN: u16 = 0x8100;
pub const IPV6: u16 = 0x86DD;
pub const QINQ: u16 = 0x88A8;
pub const PORTOLAN: u16 = 0x88B5;

pub const HOP_BY_HOP: u8 = 0;
pub const ICMP: u8 = 1;
pub const TCP: u8 = 6;
pub const UDP: u8 = 17;
pub const ROUTING: u8 = 43;
pub const FRAGMENT: u8 = 44;
pub const ICMPV6: u8 = 58;
pub const DESTINATION: u8 = 60;

/// IPv4's flags, as they stand above the fragment offset.
pub const DONT_FRAGMENT: u16 = 0x4000;
pub const MORE_FRAGMENTS: u16 = 0x2000;

/// What a message might look like; the program must not care.
pub fn payload(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 7 + 3) as u8).collect()
}

pub fn ethernet(to: [u8; 6], ethertype: u16, rest: &[u8]) -> Vec<u8> {
    let from = [0x02, 0, 0, 0, 0, 0x99];
    [&to[..], &from, &ethertype.to_be_bytes(), rest].concat()
}

/// A tag between the addresses and the EtherType of `frame`.
pub fn tagged(tag: u16, vlan: u16, frame: &[u8]) -> Vec<u8> {
    [
        &frame[..12],
        &tag.to_be_bytes(),
        &vlan.to_be_bytes(),
        &frame[12..],
    ]
    .concat()
}

pub fn ipv4(to: Ipv4Addr, protocol: u8, rest: &[u8]) -> Vec<u8> {
    ipv4_with(to, protocol, DONT_FRAGMENT, &[], rest)
}

/// `options` in multiples of four bytes; `fragment` is flags and offset.
pub fn ipv4_with(
    to: Ipv4Addr,
    protocol: u8,
    fragment: u16,
    options: &[u8],
    rest: &[u8],
) -> Vec<u8> {
    assert!(options.len().is_multiple_of(4) && options.len() <= 40);
    let header = 20 + options.len();
    let mut out = vec![0x40 | (header / 4) as u8, 0];
    out.extend(((header + rest.len()) as u16).to_be_bytes());
    out.extend([0x12, 0x34]);
    out.extend(fragment.to_be_bytes());
    out.extend([64, protocol, 0, 0]);
    out.extend([10, 1, 0, 1]);
    out.extend(to.octets());
    out.extend(options);
    out.extend(rest);
    out
}

pub fn ipv6(to: Ipv6Addr, next_header: u8, rest: &[u8]) -> Vec<u8> {
    let mut out = vec![0x60, 0, 0, 0];
    out.extend((rest.len() as u16).to_be_bytes());
    out.extend([next_header, 64]);
    out.extend("fd00:1::1".parse::<Ipv6Addr>().unwrap().octets());
    out.extend(to.octets());
    out.extend(rest);
    out
}

/// An IPv6 extension header of eight bytes; a fragment header if `next_header` came from one.
pub fn extension(next_header: u8, last_six: [u8; 6], rest: &[u8]) -> Vec<u8> {
    [&[next_header, 0], &last_six[..], rest].concat()
}

pub fn udp(port: u16, rest: &[u8]) -> Vec<u8> {
    let mut out = 40000u16.to_be_bytes().to_vec();
    out.extend(port.to_be_bytes());
    out.extend((8 + rest.len() as u16).to_be_bytes());
    out.extend([0, 0]);
    out.extend(rest);
    out
}

/// Ours over IPv4, 42 bytes of headers.
pub fn ours_v4(port: u16, len: usize) -> Vec<u8> {
    ethernet(OUR_MAC, IPV4, &ipv4(OUR_V4, UDP, &udp(port, &payload(len))))
}

/// Ours over IPv6, 62 bytes of headers.
pub fn ours_v6(port: u16, len: usize) -> Vec<u8> {
    ethernet(OUR_MAC, IPV6, &ipv6(OUR_V6, UDP, &udp(port, &payload(len))))
}
