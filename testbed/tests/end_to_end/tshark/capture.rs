//! Captures: pcap files of Ethernet frames that hold Portolan's, written and read.

use std::fs;
use std::path::{Path, PathBuf};

use portolan_testbed::Encap;

const UDP_PORT: u16 = 28_000;
const MAGIC_NANOSECONDS: u32 = 0xa1b2_3c4d;
const FILE_HEADER: usize = 24;
const PACKET_HEADER: usize = 16;
const ETHERNET: usize = 14;

/// What may lie around a frame.
pub const ENCAPS: [Encap; 3] = [Encap::Ethernet, Encap::Udp4, Encap::Udp6];

/// A capture that is being made, a packet each microsecond.
pub struct Capture {
    bytes: Vec<u8>,
    packets: u32,
}

impl Capture {
    pub fn new() -> Self {
        let mut bytes = MAGIC_NANOSECONDS.to_ne_bytes().to_vec();
        bytes.extend([2u16, 4].map(u16::to_ne_bytes).as_flattened());
        let words = [0u32, 0, 262_144, 1];
        bytes.extend(words.map(u32::to_ne_bytes).as_flattened());
        Self { bytes, packets: 0 }
    }

    /// A frame of the transport in its outer headers.
    pub fn frame(&mut self, encap: Encap, frame: &[u8]) {
        let packet = encapsulate(encap, frame);
        let whole = packet.len();
        self.packet(&packet, whole);
    }

    /// The same, of which the capture holds only so many bytes.
    pub fn cut_frame(&mut self, encap: Encap, frame: &[u8], captured: usize) {
        let packet = encapsulate(encap, frame);
        let outer = packet.len() - frame.len();
        self.packet(&packet[..outer + captured], packet.len());
    }

    fn packet(&mut self, captured: &[u8], whole: usize) {
        let header = [
            1_700_000_000,
            self.packets * 1000,
            captured.len() as u32,
            whole as u32,
        ];
        self.bytes
            .extend(header.map(u32::to_ne_bytes).as_flattened());
        self.bytes.extend(captured);
        self.packets += 1;
    }

    pub fn write(&self, directory: &Path) -> PathBuf {
        let path = directory.join("capture.pcap");
        fs::write(&path, &self.bytes).unwrap();
        path
    }
}

fn encapsulate(encap: Encap, frame: &[u8]) -> Vec<u8> {
    let mut packet = vec![2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1];
    let udp = (frame.len() + 8) as u16;
    let (ethertype, ip) = match encap {
        Encap::Ethernet => (0x88b5u16, vec![]),
        Encap::Udp4 => {
            let mut ip = vec![0x45, 0, 0, 0, 0, 0, 0x40, 0, 64, 17, 0, 0];
            ip[2..4].copy_from_slice(&(udp + 20).to_be_bytes());
            ip.extend([10, 77, 0, 1, 10, 77, 0, 2]);
            (0x0800, ip)
        }
        Encap::Udp6 => {
            let mut ip = vec![0x60, 0, 0, 0, 0, 0, 17, 64];
            ip[4..6].copy_from_slice(&udp.to_be_bytes());
            for node in [1, 2] {
                ip.extend([0xfd, 0x77, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, node]);
            }
            (0x86dd, ip)
        }
    };
    packet.extend(ethertype.to_be_bytes());
    if !ip.is_empty() {
        let header = [50_000, UDP_PORT, udp, 0].map(u16::to_be_bytes);
        let datagram = [header.as_flattened(), frame].concat();
        packet.extend(&ip);
        packet.extend(&datagram[..6]);
        packet.extend(checksum(encap, &ip, &datagram).to_be_bytes());
    }
    packet.extend(frame);
    packet
}

/// Of a datagram; IPv4 goes without (RFC 768), IPv6 cannot (RFC 8200 §8.1).
fn checksum(encap: Encap, ip: &[u8], datagram: &[u8]) -> u16 {
    if encap != Encap::Udp6 {
        return 0;
    }
    let words = ip[8..].chunks(2).chain(datagram.chunks(2));
    let word = |bytes: &[u8]| u64::from(bytes[0]) << 8 | u64::from(*bytes.get(1).unwrap_or(&0));
    let mut sum = 17 + datagram.len() as u64 + words.map(word).sum::<u64>();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    match !(sum as u16) {
        0 => 0xffff,
        sum => sum,
    }
}

/// The transport's frames in what a wire recorded of UDP over IPv4, so far: of the last packet only a part may be there.
pub fn read(path: &Path) -> Vec<Vec<u8>> {
    let bytes = fs::read(path).unwrap();
    let mut rest = &bytes[FILE_HEADER..];
    let mut frames = Vec::new();
    while let Some(word) = rest.get(8..12) {
        let len = u32::from_ne_bytes(word.try_into().unwrap()) as usize;
        let Some(packet) = rest.get(PACKET_HEADER..PACKET_HEADER + len) else {
            break;
        };
        frames.push(packet[ETHERNET + 20 + 8..].to_vec());
        rest = &rest[PACKET_HEADER + len..];
    }
    frames
}
