//! Every verdict of the program on crafted frames, through libbpf and `BPF_PROG_TEST_RUN`.
//!
//! No socket is in the map here, so a frame that is ours is dropped as `no_socket`; `veth.rs` has
//! real sockets. Every run also checks that exactly one counter moved, by one, and that the frame
//! came back as it went in. Needs root.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test's helpers fail by panicking"
)]

mod frames;
mod harness;

use std::net::{Ipv4Addr, Ipv6Addr};

use frames::*;
use harness::*;
use libbpf_rs::ErrorKind;
use portolan_ebpf::{Reason, SteerConfig};

type Case = (&'static str, Vec<u8>, Reason);

fn check(config: &SteerConfig, cases: Vec<Case>) {
    let harness = Harness::new(config);
    for (name, frame, reason) in cases {
        harness.expect(name, &frame, reason);
    }
}

/// A UDP datagram for us, shortened as needed below.
fn datagram() -> Vec<u8> {
    udp(BASE, &payload(64))
}

fn v4(packet: Vec<u8>) -> Vec<u8> {
    ethernet(OUR_MAC, IPV4, &packet)
}

fn v6(packet: Vec<u8>) -> Vec<u8> {
    ethernet(OUR_MAC, IPV6, &packet)
}

#[test]
fn udp_over_ipv4() {
    use Reason::*;
    let group = |mac, to| ethernet(mac, IPV4, &ipv4(to, UDP, &datagram()));
    let fragment = |bits| v4(ipv4_with(OUR_V4, UDP, bits, &[], &datagram()));
    let options = |n| v4(ipv4_with(OUR_V4, UDP, 0, &vec![1; n], &datagram()));
    let mut bad_version = ours_v4(BASE, 64);
    bad_version[14] = 0x55;
    let mut short_header = ours_v4(BASE, 64);
    short_header[14] = 0x44;
    check(
        &udp_config(),
        vec![
            ("ours, first port", ours_v4(BASE, 64), NoSocket),
            ("ours, last port", ours_v4(LAST, 64), NoSocket),
            ("ours, no payload", ours_v4(BASE, 0), NoSocket),
            ("ours, full frame", ours_v4(BASE, 1472), NoSocket),
            ("ours, DF clear", fragment(0), NoSocket),
            ("ours, reserved flag set", fragment(0x8000), NoSocket),
            ("port below the range", ours_v4(BASE - 1, 64), PassNotOurs),
            ("port above the range", ours_v4(LAST + 1, 64), PassNotOurs),
            ("port 0", ours_v4(0, 64), PassNotOurs),
            ("port 65535", ours_v4(65535, 64), PassNotOurs),
            (
                "routed: another address",
                v4(ipv4(OTHER_V4, UDP, &datagram())),
                PassOtherAddress,
            ),
            (
                "another MAC",
                ethernet(OTHER_MAC, IPV4, &ipv4(OUR_V4, UDP, &datagram())),
                PassOtherMac,
            ),
            (
                "broadcast",
                group(BROADCAST, Ipv4Addr::BROADCAST),
                PassOtherAddress,
            ),
            (
                "our address in a broadcast frame",
                group(BROADCAST, OUR_V4),
                PassGroup,
            ),
            (
                "our address in a multicast frame",
                group(GROUP_MAC, OUR_V4),
                PassGroup,
            ),
            (
                "TCP to our port",
                v4(ipv4(OUR_V4, TCP, &datagram())),
                PassNotOurs,
            ),
            ("ICMP", v4(ipv4(OUR_V4, ICMP, &payload(64))), PassNotOurs),
            ("options, 4 bytes", options(4), PassIpOptions),
            ("options, 40 bytes", options(40), PassIpOptions),
            ("first fragment", fragment(MORE_FRAGMENTS), PassFragment),
            (
                "middle fragment",
                fragment(MORE_FRAGMENTS | 100),
                PassFragment,
            ),
            ("last fragment", fragment(100), PassFragment),
            ("last fragment, offset 1", fragment(1), PassFragment),
            ("last fragment, offset 8191", fragment(0x1fff), PassFragment),
            (
                "fragment with options",
                v4(ipv4_with(OUR_V4, UDP, 1, &[1; 4], &datagram())),
                PassFragment,
            ),
            ("version 5", bad_version, PassNotOurs),
            ("header length 4", short_header, PassNotOurs),
            (
                "IPv6's EtherType",
                ethernet(OUR_MAC, IPV6, &ipv4(OUR_V4, UDP, &datagram())),
                PassNotOurs,
            ),
        ],
    );
}

#[test]
fn udp_over_ipv6() {
    use Reason::*;
    let behind =
        |header, last_six| v6(ipv6(OUR_V6, header, &extension(UDP, last_six, &datagram())));
    let fragment = |bits: u16| {
        let [high, low] = bits.to_be_bytes();
        behind(FRAGMENT, [high, low, 0, 0, 0, 9])
    };
    let group = [0x33, 0x33, 0, 0, 0, 1];
    let all_nodes: Ipv6Addr = "ff02::1".parse().unwrap();
    // Equal to ours but for one of its four words.
    let nearly = |word: usize| {
        let mut segments = OUR_V6.segments();
        segments[word * 2] ^= 0x0100;
        v6(ipv6(segments.into(), UDP, &datagram()))
    };
    let mut bad_version = ours_v6(BASE, 64);
    bad_version[14] = 0x40;
    check(
        &udp_config(),
        vec![
            ("ours, first port", ours_v6(BASE, 64), NoSocket),
            ("ours, last port", ours_v6(LAST, 64), NoSocket),
            ("ours, no payload", ours_v6(BASE, 0), NoSocket),
            ("ours, full frame", ours_v6(BASE, 1452), NoSocket),
            ("port below the range", ours_v6(BASE - 1, 64), PassNotOurs),
            ("port above the range", ours_v6(LAST + 1, 64), PassNotOurs),
            (
                "routed: another address",
                v6(ipv6(OTHER_V6, UDP, &datagram())),
                PassOtherAddress,
            ),
            ("another first word", nearly(0), PassOtherAddress),
            ("another second word", nearly(1), PassOtherAddress),
            ("another third word", nearly(2), PassOtherAddress),
            ("another fourth word", nearly(3), PassOtherAddress),
            (
                "another MAC",
                ethernet(OTHER_MAC, IPV6, &ipv6(OUR_V6, UDP, &datagram())),
                PassOtherMac,
            ),
            (
                "our address in a multicast frame",
                ethernet(group, IPV6, &ipv6(OUR_V6, UDP, &datagram())),
                PassGroup,
            ),
            (
                "multicast",
                ethernet(group, IPV6, &ipv6(all_nodes, UDP, &datagram())),
                PassOtherAddress,
            ),
            (
                "TCP to our port",
                v6(ipv6(OUR_V6, TCP, &datagram())),
                PassNotOurs,
            ),
            (
                "neighbour discovery",
                ethernet(group, IPV6, &ipv6(all_nodes, ICMPV6, &payload(24))),
                PassNotOurs,
            ),
            (
                "hop-by-hop options",
                behind(HOP_BY_HOP, [1, 4, 0, 0, 0, 0]),
                PassIpOptions,
            ),
            (
                "destination options",
                behind(DESTINATION, [1, 4, 0, 0, 0, 0]),
                PassIpOptions,
            ),
            ("routing header", behind(ROUTING, [0; 6]), PassIpOptions),
            ("first fragment", fragment(1), PassFragment),
            ("middle fragment", fragment(800 | 1), PassFragment),
            ("last fragment", fragment(800), PassFragment),
            ("atomic fragment", fragment(0), PassFragment),
            ("version 4", bad_version, PassNotOurs),
            (
                "IPv4's EtherType",
                ethernet(OUR_MAC, IPV4, &ipv6(OUR_V6, UDP, &datagram())),
                PassNotOurs,
            ),
        ],
    );
}

#[test]
fn udp_steering_leaves_other_ethertypes() {
    use Reason::*;
    let qinq = tagged(QINQ, 200, &tagged(VLAN, 100, &ours_v4(BASE, 64)));
    check(
        &udp_config(),
        vec![
            (
                "ARP for everybody",
                ethernet(BROADCAST, ARP, &payload(46)),
                PassNotOurs,
            ),
            (
                "ARP to us",
                ethernet(OUR_MAC, ARP, &payload(28)),
                PassNotOurs,
            ),
            (
                "Portolan over Ethernet",
                ethernet(OUR_MAC, PORTOLAN, &payload(64)),
                PassNotOurs,
            ),
            (
                "802.3 length",
                ethernet(OUR_MAC, 64, &payload(64)),
                PassNotOurs,
            ),
            (
                "802.1Q, IPv4",
                tagged(VLAN, 100, &ours_v4(BASE, 64)),
                PassVlan,
            ),
            (
                "802.1Q, IPv6",
                tagged(VLAN, 100, &ours_v6(BASE, 64)),
                PassVlan,
            ),
            (
                "802.1Q, priority only",
                tagged(VLAN, 0xe000, &ours_v4(BASE, 64)),
                PassVlan,
            ),
            ("802.1ad", tagged(QINQ, 200, &ours_v4(BASE, 64)), PassVlan),
            ("802.1ad around 802.1Q", qinq, PassVlan),
            (
                "802.1Q, nothing behind",
                ethernet(OUR_MAC, VLAN, &[]),
                PassVlan,
            ),
        ],
    );
}

#[test]
fn ethernet_steering() {
    use Reason::*;
    let ours = ethernet(OUR_MAC, PORTOLAN, &payload(64));
    check(
        &ethernet_config(),
        vec![
            ("ours", ours.clone(), NoSocket),
            (
                "ours, full frame",
                ethernet(OUR_MAC, PORTOLAN, &payload(1500)),
                NoSocket,
            ),
            (
                "another MAC",
                ethernet(OTHER_MAC, PORTOLAN, &payload(64)),
                PassOtherMac,
            ),
            (
                "broadcast",
                ethernet(BROADCAST, PORTOLAN, &payload(64)),
                PassGroup,
            ),
            (
                "multicast",
                ethernet(GROUP_MAC, PORTOLAN, &payload(64)),
                PassGroup,
            ),
            (
                "next EtherType",
                ethernet(OUR_MAC, PORTOLAN + 1, &payload(64)),
                PassNotOurs,
            ),
            (
                "EtherType, bytes swapped",
                ethernet(OUR_MAC, 0xB588, &payload(64)),
                PassNotOurs,
            ),
            ("802.1Q", tagged(VLAN, 100, &ours), PassVlan),
            (
                "802.1ad around 802.1Q",
                tagged(QINQ, 200, &tagged(VLAN, 100, &ours)),
                PassVlan,
            ),
            ("ARP", ethernet(BROADCAST, ARP, &payload(46)), PassNotOurs),
            ("UDP to our port, IPv4", ours_v4(BASE, 64), PassNotOurs),
            ("UDP to our port, IPv6", ours_v6(BASE, 64), PassNotOurs),
        ],
    );
    let other = SteerConfig {
        ethertype: 0x88B6,
        ..ethernet_config()
    };
    check(
        &other,
        vec![
            (
                "the EtherType configured",
                ethernet(OUR_MAC, 0x88B6, &payload(64)),
                NoSocket,
            ),
            ("the default EtherType", ours, PassNotOurs),
        ],
    );
}

#[test]
fn what_is_not_configured_is_any() {
    use Reason::*;
    let any_mac = SteerConfig {
        local_mac: [0; 6],
        ..udp_config()
    };
    check(
        &any_mac,
        vec![
            (
                "any MAC",
                ethernet(OTHER_MAC, IPV4, &ipv4(OUR_V4, UDP, &datagram())),
                NoSocket,
            ),
            (
                "any MAC, but no broadcast",
                ethernet(BROADCAST, IPV4, &ipv4(OUR_V4, UDP, &datagram())),
                PassGroup,
            ),
            (
                "any MAC, but no multicast",
                ethernet(GROUP_MAC, IPV4, &ipv4(OUR_V4, UDP, &datagram())),
                PassGroup,
            ),
        ],
    );
    let any_address = SteerConfig {
        local_v4: None,
        local_v6: None,
        ..udp_config()
    };
    check(
        &any_address,
        vec![
            (
                "any address, IPv4",
                v4(ipv4(OTHER_V4, UDP, &datagram())),
                NoSocket,
            ),
            (
                "any address, IPv6",
                v6(ipv6(OTHER_V6, UDP, &datagram())),
                NoSocket,
            ),
            (
                "any address, but no multicast",
                ethernet(GROUP_MAC, IPV4, &ipv4(GROUP_V4, UDP, &datagram())),
                PassGroup,
            ),
            (
                "any address, another MAC",
                ethernet(OTHER_MAC, IPV4, &ipv4(OTHER_V4, UDP, &datagram())),
                PassOtherMac,
            ),
        ],
    );
    // An address in one family only: the other family is left to the kernel altogether.
    check(
        &SteerConfig {
            local_v6: None,
            ..udp_config()
        },
        vec![
            ("IPv4 only: ours", ours_v4(BASE, 64), NoSocket),
            ("IPv4 only: IPv6", ours_v6(BASE, 64), PassNotOurs),
        ],
    );
    check(
        &SteerConfig {
            local_v4: None,
            ..udp_config()
        },
        vec![
            ("IPv6 only: ours", ours_v6(BASE, 64), NoSocket),
            ("IPv6 only: IPv4", ours_v4(BASE, 64), PassNotOurs),
        ],
    );
    let top = SteerConfig {
        udp_base_port: 65532,
        ..udp_config()
    };
    check(
        &top,
        vec![
            ("last port of all", ours_v4(65535, 64), NoSocket),
            ("no wrap to port 0", ours_v4(0, 64), PassNotOurs),
            ("just below", ours_v4(65531, 64), PassNotOurs),
        ],
    );
}

/// The kernel refuses to run a program on fewer bytes; no driver hands out less either.
const SHORTEST: usize = 14;

// A frame of ours cut at every length. Expect: passed while a header is incomplete, ours after.
#[test]
fn truncated_at_every_length() {
    let tcp = v4(ipv4(OUR_V4, TCP, &payload(20)));
    let cases: [(&str, SteerConfig, Vec<u8>, usize, Reason); 4] = [
        (
            "IPv4",
            udp_config(),
            ours_v4(BASE, 24),
            14 + 20 + 8,
            Reason::NoSocket,
        ),
        (
            "IPv6",
            udp_config(),
            ours_v6(BASE, 24),
            14 + 40 + 8,
            Reason::NoSocket,
        ),
        (
            "Ethernet",
            ethernet_config(),
            ethernet(OUR_MAC, PORTOLAN, &payload(50)),
            14,
            Reason::NoSocket,
        ),
        ("TCP", udp_config(), tcp, 14 + 20, Reason::PassNotOurs),
    ];
    for (name, config, frame, headers, whole) in cases {
        let harness = Harness::new(&config);
        for len in SHORTEST..=frame.len() {
            let reason = if len < headers {
                Reason::PassTruncated
            } else {
                whole
            };
            harness.expect(&format!("{name}, {len} bytes"), &frame[..len], reason);
        }
    }
}

#[test]
fn kernel_runs_nothing_on_less_than_an_ethernet_header() {
    let harness = Harness::new(&udp_config());
    for len in 0..SHORTEST {
        let error = harness.run("steer", &ours_v4(BASE, 0)[..len]).unwrap_err();
        assert_eq!(
            error.kind(),
            ErrorKind::InvalidInput,
            "{len} bytes: {error}"
        );
    }
}

// Every header byte inverted in turn. Expect: exactly the bytes that say whose it is decide.
#[test]
fn each_header_byte_decides_or_does_not() {
    let v4_decides = [0..6, 12..15, 20..22, 23..24, 30..34, 36..38];
    let v6_decides = [0..6, 12..15, 20..21, 38..54, 56..58];
    let harness = Harness::new(&udp_config());
    let cases = [
        ("IPv4", ours_v4(BASE, 8), &v4_decides[..]),
        ("IPv6", ours_v6(BASE, 8), &v6_decides[..]),
    ];
    for (name, ours, decides) in cases {
        for at in 0..ours.len() {
            let mut frame = ours.clone();
            frame[at] ^= 0xff;
            let (_, reason) = harness.run("steer", &frame).unwrap();
            let decided = decides.iter().any(|range| range.contains(&at));
            assert_eq!(
                reason != Reason::NoSocket,
                decided,
                "{name}, byte {at}: {reason:?}"
            );
        }
    }
}

// A frame that fills several buffers. Expect: steered by its first.
#[test]
fn jumbo_frames() {
    let harness = Harness::new(&udp_config());
    for frame in [ours_v4(BASE, 8972), ours_v6(LAST, 8952)] {
        let got = harness.run("steer", &frame).unwrap();
        assert_eq!(got, (XDP_DROP, Reason::NoSocket));
    }
    let foreign = v4(ipv4(OTHER_V4, UDP, &udp(BASE, &payload(8972))));
    let got = harness.run("steer", &foreign).unwrap();
    assert_eq!(got, (XDP_PASS, Reason::PassOtherAddress));
}

// A frame of ours is wanted at a port; one of others comes, one that is too short, and two of ours. Expect: the first of ours that is long enough becomes an empty
// datagram from nobody to everybody, with a checksum that is right, and is passed on; all the others are what they always are.
#[test]
fn one_frame_is_sent_on_an_errand() {
    let short = ethernet(OUR_MAC, PORTOLAN, &payload(20));
    let ours = ethernet(OUR_MAC, PORTOLAN, &payload(64));
    for (config, ours) in [
        (ethernet_config(), &ours),
        (udp_config(), &ours_v4(BASE, 64)),
        (udp_config(), &ours_v6(LAST, 64)),
    ] {
        for program in ["steer", "steer_linear"] {
            let harness = Harness::new(&config);
            harness.send_on_errand(0, 0x1234);
            harness.send_on_errand(1, 0x1234);
            let run = |frame: &[u8]| harness.run(program, frame).unwrap();
            let foreign = v4(ipv4(OTHER_V4, UDP, &datagram()));
            assert_eq!(run(&foreign).0, XDP_PASS);
            if config == ethernet_config() {
                // Then nobody is any the wiser, and has to ask again.
                assert_eq!(run(&short), (XDP_DROP, Reason::NoSocket));
                assert_eq!(run(ours), (XDP_DROP, Reason::NoSocket));
                harness.send_on_errand(0, 0x1234);
            }
            let (verdict, out) = harness.outcome(program, ours).unwrap();
            assert_eq!(verdict, XDP_PASS);
            assert_eq!(out[..12], ours[..12]);
            assert_eq!(out[42..], ours[42..]);
            let header = &out[14..34];
            let words = header
                .chunks_exact(2)
                .map(|w| u32::from(w[0]) << 8 | u32::from(w[1]));
            let sum: u32 = words.sum();
            assert_eq!(
                (sum & 0xffff) + (sum >> 16),
                0xffff,
                "checksum of {header:x?}"
            );
            assert_eq!(out[12..20], [8, 0, 0x45, 0, 0, 28, 0, 0]);
            assert_eq!(
                (out[23], &out[26..34]),
                (17, &[0, 0, 0, 0, 255, 255, 255, 255][..])
            );
            assert_eq!(out[34..42], [0, 0, 0x12, 0x34, 0, 8, 0, 0]);
            assert_eq!(run(ours), (XDP_DROP, Reason::NoSocket), "once");
        }
    }
}

// As compiled, without a configuration. Expect: not one frame is taken.
#[test]
fn unconfigured_program_takes_nothing() {
    let harness = Harness::unconfigured();
    for frame in [
        ours_v4(0, 64),
        ours_v6(0, 64),
        ethernet(OUR_MAC, PORTOLAN, &payload(64)),
        ethernet(OUR_MAC, 0, &payload(64)),
    ] {
        harness.expect("unconfigured", &frame, Reason::PassNotOurs);
    }
}
