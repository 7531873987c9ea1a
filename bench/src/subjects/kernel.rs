//! The kernel's TCP and UDP as subjects.
//!
//! Who spins asks the socket again and again, as latency-bound programs do; the kernel's own busy polling (`SO_BUSY_POLL`) does nothing
//! on a veth pair, which has no NAPI id.

use std::net::SocketAddrV4;
use std::time::Duration;

use anyhow::Result;

use super::offloads::{Offloads, Switched};
use super::{About, Figure, Pair, Scene, Side, Started, Subject};
use crate::actor::{Actor, DATAGRAM, Protocol, Role, SocketRole};
use crate::cases::{Case, Wait};

/// Of both ends.
const PORT: u16 = 7000;
/// In front of a datagram's payload.
const HEADERS: usize = 28;

/// A protocol, and how it is used.
struct Kernel {
    name: &'static str,
    protocol: Protocol,
    blocks: bool,
    offloads: Offloads,
    is_extra: bool,
}

/// All ways of using it.
pub fn all() -> Vec<Box<dyn Subject>> {
    use Offloads::{All, NoSegments};
    use Protocol::{Tcp, Udp, UdpSegments};
    let (spins, blocks) = (false, true);
    let (usual, extra) = (false, true);
    let ways = [
        ("kernel-tcp", Tcp, spins, All, usual),
        ("kernel-tcp-nogso", Tcp, spins, NoSegments, usual),
        ("kernel-udp", Udp, spins, All, usual),
        ("kernel-udp-gso", UdpSegments, spins, All, extra),
        ("kernel-tcp-blocking", Tcp, blocks, All, extra),
        ("kernel-tcp-blocking-nogso", Tcp, blocks, NoSegments, extra),
        ("kernel-udp-blocking", Udp, blocks, All, extra),
    ];
    let boxed = |(name, protocol, blocks, offloads, is_extra)| -> Box<dyn Subject> {
        Box::new(Kernel {
            name,
            protocol,
            blocks,
            offloads,
            is_extra,
        })
    };
    ways.map(boxed).into()
}

impl Subject for Kernel {
    fn name(&self) -> &str {
        self.name
    }

    fn about(&self) -> About {
        let kernel = rustix::system::uname();
        let sockets = match self.protocol {
            Protocol::Tcp => "TCP, TCP_NODELAY, a send per message",
            Protocol::Udp => "UDP, a datagram per message, queues of 4 MiB",
            Protocol::UdpSegments => "UDP, UDP_SEGMENT and UDP_GRO, queues of 4 MiB",
        };
        let waits = match self.blocks {
            true => "sleeps in recv and poll",
            false => "spins on recv(MSG_DONTWAIT)",
        };
        About {
            version: format!("Linux {}", kernel.release().to_string_lossy()),
            command: format!("{sockets}; {waits}; ethtool -K {}", self.offloads.words()),
        }
    }

    fn is_extra(&self) -> bool {
        self.is_extra
    }

    fn offers(&self, case: &Case) -> bool {
        if let Case::Idle { wait } = case {
            // What a wake-up costs with nobody in between. Who is idle is asleep, however a daemon would wait.
            return self.blocks && self.protocol == Protocol::Udp && *wait == Wait::Adaptive;
        }
        let bytes = case.bytes();
        // Nobody is made to wait who sends datagrams: both ways at once, who receives only where it sleeps would lose nine of ten.
        let loses = self.blocks && self.protocol != Protocol::Tcp;
        case.is_plain()
            && !(loses && matches!(case, Case::AllSize { .. }))
            && match self.protocol {
                // It has no messages, so no empty ones.
                Protocol::Tcp => bytes > 0,
                Protocol::Udp => bytes <= DATAGRAM,
                // What is cut must fit into frames; empty pieces are not cut.
                Protocol::UdpSegments => (1..=case.mtu() as usize - HEADERS).contains(&bytes),
            }
    }

    fn start<'a>(&'a self, scene: &'a Scene<'a>, _: &[Case]) -> Result<Box<dyn Started + 'a>> {
        let offloads = Switched::to(self.offloads, scene)?;
        let at = |side: Side| SocketAddrV4::new(scene.node(side).ipv4(), PORT);
        let end = |side: Side| {
            // A connection to come has another port than the last one, of which the kernel thinks for a minute.
            let own = match (self.protocol, side) {
                (Protocol::Tcp, Side::One) => SocketAddrV4::new(*at(side).ip(), 0),
                _ => at(side),
            };
            let role = Role::Socket(SocketRole {
                protocol: self.protocol,
                own,
                other: at(side.other()),
                listens: side == Side::Two,
                blocks: self.blocks,
            });
            Actor::start(self.name, scene.actor(side), &role)
        };
        let two = end(Side::Two)?;
        let one = vec![end(Side::One)?];
        Ok(Box::new(Running {
            pair: Pair { one, two },
            _offloads: offloads,
        }))
    }
}

/// Ended in this order: first who uses the interfaces.
struct Running<'a> {
    pair: Pair,
    _offloads: Switched<'a>,
}

impl Started for Running<'_> {
    fn measure(&mut self, case: &Case, lasting: Duration) -> Result<Vec<Figure>> {
        match case {
            Case::Idle { .. } => {
                let (_, first) = self.pair.after_idling(lasting, || Ok(()))?;
                Ok(vec![first])
            }
            _ => self.pair.measure(case, lasting),
        }
    }
}
