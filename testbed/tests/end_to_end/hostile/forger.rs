//! A node without a daemon: frames made and read by hand, sent on the real path from the node's own network.

use std::io::ErrorKind;
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

use portolan_abi::event::Certainty;
use portolan_abi::port::PortGeometry;
use portolan_testbed::{Encap, Lab, Node};
use portolan_transport::wire::chunk::{Hello, PolicyWire, Received};
use portolan_transport::wire::{self, Chunk, FrameHeader, FrameWriter};
use rustix::net::{RecvFlags, SendFlags};

use super::STEP;
use super::raw_port::RawPort;
use crate::harness::packet_socket::{self, ETHERTYPE};

const UDP_PORT: u16 = 28_000;
const IPV4_UDP: usize = 20 + 8;

/// How frames get to node 1.
enum Way {
    Udp { socket: UdpSocket, to: SocketAddr },
    Ethernet { socket: OwnedFd, header: [u8; 14] },
}

/// A forged node, associated with the engine of node 1.
pub struct Forger {
    way: Way,
    node: u16,
    incarnation: u64,
    /// Node 1's HELLO: who it is and what both must agree on.
    theirs: Theirs,
    sent_buffers: u32,
    hellos: usize,
    /// Our clock.
    started: Instant,
    /// The newest time stamp of node 1: a limit of ours counts only if it was written knowing what node 1 had sent.
    echo: u32,
}

#[derive(Clone, Copy, Default)]
struct Theirs {
    incarnation: u64,
    cluster: u64,
    policy: PolicyWire,
    max_frame: u16,
}

impl Forger {
    /// Becomes node `id` of the lab towards node 1, whose engine is made to introduce itself.
    pub fn meet(lab: &Lab, id: u16, socket: &Path) -> Self {
        let mut forger = Self {
            way: Way::open(lab, id),
            node: id,
            incarnation: 0x1234_5678_9abc_def0,
            theirs: Theirs::default(),
            sent_buffers: 0,
            hellos: 0,
            echo: 0,
            started: Instant::now(),
        };
        // A send to us makes node 1 say HELLO; it ends delivered when it believes in us.
        let geometry = PortGeometry::new(4, 4, 4096).unwrap();
        let mut port = RawPort::open(socket, Some(61), geometry).unwrap();
        let reference = port.send_inline(0, (id, 60), b"who are you?");
        let deadline = Instant::now() + STEP;
        let outcome = loop {
            forger.pump();
            if let Some(outcome) = port.wait_sent(reference, Duration::from_millis(2)) {
                break outcome;
            }
            let hellos = forger.hellos;
            assert!(Instant::now() < deadline, "no association, {hellos} HELLOs");
        };
        assert_eq!(outcome.certainty, Certainty::Delivered, "{outcome:?}");
        port.close().unwrap();
        forger
    }

    /// A frame of these chunks, each with its payload, as a correct peer would send it.
    pub fn build(&self, chunks: &[(Chunk<'_>, &[u8])]) -> Vec<u8> {
        let mut bytes = vec![0; usize::from(self.theirs.max_frame.max(576))];
        let mut writer = FrameWriter::new(&mut bytes);
        for (chunk, _) in chunks {
            writer.push(chunk).unwrap();
        }
        let mut writer = writer.finish_headers();
        for (index, (_, payload)) in chunks.iter().enumerate() {
            writer.payload_mut(index).copy_from_slice(payload);
        }
        let header = FrameHeader {
            src_node: self.node,
            dst_node: 1,
            src_queue: 0,
            dst_queue: 0,
            src_incarnation: self.incarnation as u32,
            dst_incarnation: self.theirs.incarnation as u32,
            engine_epoch: 1,
            sent_buffers: self.sent_buffers,
            credit_limit: 100_000,
            sent_at: self.started.elapsed().as_nanos() as u32 | 1,
            echo: self.echo,
            ..FrameHeader::default()
        };
        let len = writer.finish(&header);
        bytes.truncate(len);
        bytes
    }

    /// A HELLO of ours that asks node 1 to answer.
    pub fn hello(&self) -> Chunk<'static> {
        Chunk::Hello(self.introduction())
    }

    fn introduction(&self) -> Hello<'static> {
        Hello {
            incarnation: self.incarnation,
            echo: self.theirs.incarnation,
            cluster: self.theirs.cluster,
            wire_min: 1,
            wire_max: 1,
            queues: 1,
            max_frame: self.theirs.max_frame,
            window: 64,
            policy: self.theirs.policy,
            unasked: 0,
            features: 0,
            name: "forger",
        }
    }

    /// Sends bytes as the payload of one datagram or Ethernet frame.
    pub fn send(&mut self, frame: &[u8]) {
        match &self.way {
            Way::Udp { socket, to } => {
                assert_eq!(socket.send_to(frame, *to).unwrap(), frame.len());
            }
            Way::Ethernet { socket, header } => {
                let bytes = [header, frame].concat();
                rustix::net::send(socket, &bytes, SendFlags::empty()).unwrap();
            }
        }
    }

    /// Counts one more credit-bearing frame, for the next that is built.
    pub fn count_frame(&mut self) {
        self.sent_buffers += 1;
    }

    /// Reads what node 1 has sent: answers its HELLOs and acknowledges its messages, as a correct peer would. Returns how many
    /// frames there were.
    pub fn pump(&mut self) -> usize {
        let mut frames = 0;
        let mut buffer = vec![0; 16 * 1024];
        while let Some(len) = self.way.receive(&mut buffer) {
            frames += 1;
            let segments = [&buffer[..len]];
            let frame = wire::parse(&segments).expect("node 1 sends well-formed frames");
            self.echo = frame.header().sent_at;
            for (chunk, _) in frame.chunks() {
                self.answer(&chunk);
            }
        }
        frames
    }

    fn answer(&mut self, chunk: &Chunk<'_>) {
        match chunk {
            Chunk::Hello(hello) => {
                self.hellos += 1;
                self.theirs = Theirs {
                    incarnation: hello.incarnation,
                    cluster: hello.cluster,
                    policy: hello.policy,
                    max_frame: hello.max_frame,
                };
                let answer = Chunk::HelloAck(self.introduction());
                self.send(&self.build(&[(answer, &[])]));
            }
            Chunk::Eager { stream, number, .. } => {
                let answer = Chunk::Ack {
                    stream: *stream,
                    base: number.wrapping_add(1),
                    received: Received::default(),
                };
                self.send(&self.build(&[(answer, &[])]));
            }
            Chunk::PathProbe { size, nonce } => {
                let (size, nonce) = (*size, *nonce);
                self.send(&self.build(&[(Chunk::PathAck { size, nonce }, &[])]));
            }
            _ => {}
        }
    }
}

impl Way {
    fn open(lab: &Lab, id: u16) -> Self {
        let (from, to) = (lab.node(id), lab.node(1));
        match lab.spec().encap {
            Encap::Udp4 => Self::udp(
                (from.ipv4(), UDP_PORT).into(),
                (to.ipv4(), UDP_PORT).into(),
                from,
            ),
            Encap::Udp6 => Self::udp(
                (from.ipv6(), UDP_PORT).into(),
                (to.ipv6(), UDP_PORT).into(),
                from,
            ),
            Encap::Ethernet => Self::Ethernet {
                socket: packet_socket::open(from, ETHERTYPE),
                header: packet_socket::header(from, to, ETHERTYPE),
            },
        }
    }

    fn udp(local: SocketAddr, to: SocketAddr, node: &Node) -> Self {
        let socket = node
            .in_namespace(|| UdpSocket::bind(local).unwrap())
            .unwrap();
        socket.set_nonblocking(true).unwrap();
        Self::Udp { socket, to }
    }

    fn receive(&self, buffer: &mut [u8]) -> Option<usize> {
        match self {
            Self::Udp { socket, .. } => match socket.recv(buffer) {
                Ok(len) => Some(len),
                Err(error) if error.kind() == ErrorKind::WouldBlock => None,
                Err(error) => panic!("{error}"),
            },
            Self::Ethernet { socket, .. } => {
                match rustix::net::recv(socket, &mut *buffer, RecvFlags::DONTWAIT) {
                    Ok((len, _)) => {
                        let frame = len.checked_sub(14).expect("an Ethernet header");
                        buffer.copy_within(14..len, 0);
                        Some(frame)
                    }
                    Err(rustix::io::Errno::AGAIN) => None,
                    Err(error) => panic!("{error}"),
                }
            }
        }
    }
}

/// Sends whole Ethernet frames of any length from a node to node 1.
pub struct RawEthernet {
    socket: OwnedFd,
    headers: Vec<u8>,
}

impl RawEthernet {
    /// Ethernet, IPv4 and UDP headers for transport frames of exactly `len` bytes from `from` to `to`.
    pub fn udp4(from: &Node, to: &Node, len: usize) -> Self {
        let mut headers = packet_socket::header(from, to, 0x0800).to_vec();
        let total = u16::try_from(IPV4_UDP + len).unwrap().to_be_bytes();
        let mut ip = [
            0x45, 0, total[0], total[1], 0, 0, 0x40, 0, 64, 17, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
        ];
        ip[12..16].copy_from_slice(&from.ipv4().octets());
        ip[16..].copy_from_slice(&to.ipv4().octets());
        let mut sum: u32 = ip
            .chunks(2)
            .map(|word| u32::from(u16::from_be_bytes([word[0], word[1]])))
            .sum();
        sum = (sum & 0xffff) + (sum >> 16);
        sum = (sum & 0xffff) + (sum >> 16);
        ip[10..12].copy_from_slice(&(!(sum as u16)).to_be_bytes());
        headers.extend_from_slice(&ip);
        for word in [UDP_PORT, UDP_PORT, 8 + len as u16, 0] {
            headers.extend_from_slice(&word.to_be_bytes());
        }
        Self {
            socket: packet_socket::open(from, 0x0800),
            headers,
        }
    }

    /// The first `len` bytes of headers and transport frame together; at least an Ethernet header.
    pub fn send_cut(&self, frame: &[u8], len: usize) {
        let bytes = [&self.headers, frame].concat();
        rustix::net::send(&self.socket, &bytes[..len], SendFlags::empty()).unwrap();
    }

    /// Bytes of the headers.
    pub fn header_len(&self) -> usize {
        self.headers.len()
    }
}
