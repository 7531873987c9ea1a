//! The few questions we ask the kernel over rtnetlink: links, addresses, neighbours, routes.

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd};

use netlink_packet_core::{
    NLM_F_ACK, NLM_F_CREATE, NLM_F_DUMP, NLM_F_REQUEST, NetlinkHeader, NetlinkMessage,
    NetlinkPayload,
};
use netlink_packet_route::address::{AddressAttribute, AddressMessage};
use netlink_packet_route::link::{
    InfoKind, LinkAttribute, LinkExtentMask, LinkFlags, LinkInfo, LinkMessage, LinkXdp, XdpAttached,
};
use netlink_packet_route::neighbour::{
    NeighbourAddress, NeighbourAttribute, NeighbourFlags, NeighbourMessage, NeighbourState,
};
use netlink_packet_route::route::{RouteAddress, RouteAttribute, RouteMessage, RouteVia};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_ROUTE};
use portolan_ebpf::AttachMode;

/// Larger than any packet the kernel makes for a dump.
const BUFFER: usize = 64 * 1024;
/// `RTNLGRP_LINK`, `RTNLGRP_NEIGH`.
const GROUP_LINKS: u32 = 1;
const GROUP_NEIGHBOURS: u32 = 3;

/// What we need to know of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Link {
    /// Its index.
    pub index: u32,
    /// Its MAC; zeros if it has none.
    pub mac: [u8; 6],
    /// Its MTU.
    pub mtu: u32,
    /// Somebody set it up.
    pub up: bool,
    /// And it has a carrier.
    pub carrier: bool,
    /// The id of the XDP program on it.
    pub program: Option<u32>,
    /// Where that program runs.
    pub xdp: Option<AttachMode>,
    /// It is one end of a veth pair.
    pub veth: bool,
}

/// The id of a link's XDP program and where it runs; no mode for one on the device itself, where ours never is.
pub fn xdp(facts: &[LinkXdp]) -> (Option<u32>, Option<AttachMode>) {
    let (mut program, mut mode) = (None, None);
    for fact in facts {
        match fact {
            LinkXdp::ProgId(id) => program = Some(*id).filter(|id| *id > 0),
            LinkXdp::Attached(XdpAttached::Driver) => mode = Some(AttachMode::Native),
            LinkXdp::Attached(XdpAttached::SocketBuffer) => mode = Some(AttachMode::Generic),
            _ => {}
        }
    }
    (program, mode)
}

/// That something about a link is not as before.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinkChange {
    /// Its index.
    pub index: u32,
    /// Its name.
    pub name: Option<String>,
    /// It is gone.
    pub removed: bool,
}

/// An entry of the neighbour table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Neighbour {
    /// On this link.
    pub ifindex: u32,
    /// Who.
    pub address: IpAddr,
    /// Its MAC, if the entry is valid.
    pub mac: Option<[u8; 6]>,
    /// Must be confirmed before long.
    pub stale: bool,
}

/// A netlink socket.
pub struct Netlink {
    socket: Socket,
    sequence: u32,
}

impl Netlink {
    /// A socket for questions.
    ///
    /// # Errors
    /// The system's.
    pub fn new() -> io::Result<Self> {
        let mut socket = Socket::new(NETLINK_ROUTE)?;
        socket.bind_auto()?;
        socket.connect(&SocketAddr::new(0, 0))?;
        let timeout = Some(std::time::Duration::from_secs(2));
        rustix::net::sockopt::set_socket_timeout(
            &socket,
            rustix::net::sockopt::Timeout::Recv,
            timeout,
        )?;
        Ok(Self {
            socket,
            sequence: 0,
        })
    }

    /// Asks and collects every answer; an error of the kernel is an error.
    pub(crate) fn ask(
        &mut self,
        message: RouteNetlinkMessage,
        flags: u16,
    ) -> io::Result<Vec<RouteNetlinkMessage>> {
        self.sequence = self.sequence.wrapping_add(1);
        let mut header = NetlinkHeader::default();
        header.flags = NLM_F_REQUEST | flags;
        header.sequence_number = self.sequence;
        let mut request = NetlinkMessage::new(header, NetlinkPayload::from(message));
        request.finalize();
        let mut bytes = vec![0; request.buffer_len()];
        request.serialize(&mut bytes);
        self.socket.send(&bytes, 0)?;

        let mut answers = Vec::new();
        loop {
            let packet = receive(&self.socket)?;
            for message in parse(&packet) {
                if message.header.sequence_number != self.sequence {
                    continue;
                }
                match message.payload {
                    NetlinkPayload::Done(_) => return Ok(answers),
                    NetlinkPayload::Error(error) => {
                        return error.code.map_or(Ok(answers), |_| Err(error.to_io()));
                    }
                    NetlinkPayload::InnerMessage(inner) => {
                        answers.push(inner);
                        // One answer to a question that is no dump ends it.
                        if flags & (NLM_F_DUMP | NLM_F_ACK) == 0 {
                            return Ok(answers);
                        }
                    }
                    _ => {}
                }
            }
        }
    }

    /// The whole neighbour table.
    ///
    /// # Errors
    /// The system's.
    pub fn neighbours(&mut self) -> io::Result<Vec<Neighbour>> {
        let request = RouteNetlinkMessage::GetNeighbour(NeighbourMessage::default());
        let answers = self.ask(request, NLM_F_DUMP)?;
        Ok(answers.iter().filter_map(neighbour).collect())
    }

    /// The way to an address out of a link: the router to send to, or `None` for the address itself.
    ///
    /// # Errors
    /// The system's; no route is one.
    pub fn route(&mut self, to: IpAddr, ifindex: u32) -> io::Result<Option<IpAddr>> {
        let mut request = RouteMessage::default();
        request.header.address_family = family(to);
        request.header.destination_prefix_length = if to.is_ipv4() { 32 } else { 128 };
        request
            .attributes
            .push(RouteAttribute::Destination(to.into()));
        request.attributes.push(RouteAttribute::Oif(ifindex));
        for answer in self.ask(RouteNetlinkMessage::GetRoute(request), 0)? {
            if let RouteNetlinkMessage::NewRoute(route) = answer {
                return Ok(gateway(&route));
            }
        }
        Err(io::Error::other("the kernel's answer names no route"))
    }

    /// Has the kernel resolve or confirm a neighbour as if it had to send there (`NTF_USE`). Needs CAP_NET_ADMIN.
    ///
    /// # Errors
    /// The system's.
    pub fn use_neighbour(&mut self, ifindex: u32, address: IpAddr) -> io::Result<()> {
        let mut request = NeighbourMessage::default();
        request.header.family = family(address);
        request.header.ifindex = ifindex;
        request.header.flags = NeighbourFlags::Use;
        request
            .attributes
            .push(NeighbourAttribute::Destination(address.into()));
        let flags = NLM_F_ACK | NLM_F_CREATE;
        self.ask(RouteNetlinkMessage::NewNeighbour(request), flags)
            .map(drop)
    }
}

/// A socket that hears of every change of the neighbour table.
pub struct NeighbourWatch {
    socket: Socket,
}

impl NeighbourWatch {
    /// Begins to listen.
    ///
    /// # Errors
    /// The system's.
    pub fn new() -> io::Result<Self> {
        let socket = listen(GROUP_NEIGHBOURS)?;
        Ok(Self { socket })
    }

    /// The next changes. `Ok(None)`: no more for now.
    ///
    /// # Errors
    /// ENOBUFS when changes were lost and the table must be read again; other errors of the system.
    pub fn changes(&self) -> io::Result<Option<Vec<Neighbour>>> {
        match receive(&self.socket) {
            Ok(packet) => {
                let inner =
                    parse(&packet)
                        .into_iter()
                        .filter_map(|message| match message.payload {
                            NetlinkPayload::InnerMessage(inner) => neighbour(&inner),
                            _ => None,
                        });
                Ok(Some(inner.collect()))
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(error),
        }
    }
}

impl AsFd for NeighbourWatch {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// A socket that hears of every change of a link.
pub struct LinkWatch {
    socket: Socket,
}

impl LinkWatch {
    /// Begins to listen.
    ///
    /// # Errors
    /// The system's.
    pub fn new() -> io::Result<Self> {
        let socket = listen(GROUP_LINKS)?;
        Ok(Self { socket })
    }

    /// The next changes. `Ok(None)`: no more for now.
    ///
    /// # Errors
    /// ENOBUFS when changes were lost; other errors of the system.
    pub fn changes(&self) -> io::Result<Option<Vec<LinkChange>>> {
        match receive(&self.socket) {
            Ok(packet) => Ok(Some(
                parse(&packet).into_iter().filter_map(link_change).collect(),
            )),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(error),
        }
    }
}

impl AsFd for LinkWatch {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

fn link_change(message: NetlinkMessage<RouteNetlinkMessage>) -> Option<LinkChange> {
    let NetlinkPayload::InnerMessage(inner) = message.payload else {
        return None;
    };
    let (link, removed) = match inner {
        RouteNetlinkMessage::NewLink(link) => (link, false),
        RouteNetlinkMessage::DelLink(link) => (link, true),
        _ => return None,
    };
    // A bridge says so of a port that leaves it, with its own family: the link stays.
    let removed = removed && link.header.interface_family == AddressFamily::Unspec;
    let index = link.header.index;
    let name = link
        .attributes
        .into_iter()
        .find_map(|attribute| match attribute {
            LinkAttribute::IfName(name) => Some(name),
            _ => None,
        });
    Some(LinkChange {
        index,
        name,
        removed,
    })
}

fn listen(group: u32) -> io::Result<Socket> {
    let mut socket = Socket::new(NETLINK_ROUTE)?;
    socket.bind_auto()?;
    socket.add_membership(group)?;
    socket.set_non_blocking(true)?;
    Ok(socket)
}

fn receive(socket: &Socket) -> io::Result<Vec<u8>> {
    let mut packet = Vec::with_capacity(BUFFER);
    loop {
        match socket.recv(&mut packet, 0) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            received => return received.map(|_| packet),
        }
    }
}

/// The messages of a packet; what cannot be parsed is left out.
fn parse(packet: &[u8]) -> Vec<NetlinkMessage<RouteNetlinkMessage>> {
    let mut messages = Vec::new();
    let mut rest = packet;
    while rest.len() >= 16 {
        let claimed = u32::from_ne_bytes([rest[0], rest[1], rest[2], rest[3]]) as usize;
        if claimed < 16 || claimed > rest.len() {
            break;
        }
        if let Ok(message) = NetlinkMessage::deserialize(&rest[..claimed]) {
            messages.push(message);
        }
        rest = rest.get(claimed.next_multiple_of(4)..).unwrap_or_default();
    }
    messages
}

fn family(address: IpAddr) -> AddressFamily {
    if address.is_ipv4() {
        AddressFamily::Inet
    } else {
        AddressFamily::Inet6
    }
}

/// What a message says of a neighbour; a deleted entry is one without a MAC.
fn neighbour(message: &RouteNetlinkMessage) -> Option<Neighbour> {
    let (entry, deleted) = match message {
        RouteNetlinkMessage::NewNeighbour(entry) => (entry, false),
        RouteNetlinkMessage::DelNeighbour(entry) => (entry, true),
        _ => return None,
    };
    let mut address = None;
    let mut mac = None;
    for attribute in &entry.attributes {
        match attribute {
            NeighbourAttribute::Destination(NeighbourAddress::Inet(ip)) => {
                address = Some(IpAddr::V4(*ip))
            }
            NeighbourAttribute::Destination(NeighbourAddress::Inet6(ip)) => {
                address = Some(IpAddr::V6(*ip))
            }
            NeighbourAttribute::LinkLocalAddress(bytes) => {
                mac = <[u8; 6]>::try_from(bytes.as_slice()).ok()
            }
            _ => {}
        }
    }
    let state = entry.header.state;
    use NeighbourState::{Delay, Noarp, Permanent, Probe, Reachable, Stale};
    let valid = !deleted && matches!(state, Reachable | Stale | Delay | Probe | Permanent | Noarp);
    Some(Neighbour {
        ifindex: entry.header.ifindex,
        address: address?,
        mac: mac.filter(|_| valid),
        stale: matches!(state, Stale),
    })
}

fn gateway(route: &RouteMessage) -> Option<IpAddr> {
    route
        .attributes
        .iter()
        .find_map(|attribute| match attribute {
            RouteAttribute::Gateway(RouteAddress::Inet(ip)) => Some(IpAddr::V4(*ip)),
            RouteAttribute::Gateway(RouteAddress::Inet6(ip)) => Some(IpAddr::V6(*ip)),
            // An IPv4 route by way of an IPv6 router.
            RouteAttribute::Via(RouteVia::Inet6(ip)) => Some(IpAddr::V6(*ip)),
            _ => None,
        })
}

/// The named link.
///
/// # Errors
/// The system's.
pub fn link(name: &str) -> io::Result<Option<Link>> {
    // Longer than any: the kernel would refuse the question.
    if name.len() >= libc::IFNAMSIZ {
        return Ok(None);
    }
    let mut request = LinkMessage::default();
    // Of this link alone, a node may have hundreds; and without its statistics, which are the longest part.
    request.attributes = vec![
        LinkAttribute::IfName(name.to_owned()),
        LinkAttribute::ExtMask(vec![LinkExtentMask::SkipStats]),
    ];
    let answers = match Netlink::new()?.ask(RouteNetlinkMessage::GetLink(request), 0) {
        Err(error) if error.raw_os_error() == Some(libc::ENODEV) => return Ok(None),
        answers => answers?,
    };
    for answer in answers {
        let RouteNetlinkMessage::NewLink(link) = answer else {
            continue;
        };
        let mut found = Link {
            index: link.header.index,
            mac: [0; 6],
            mtu: 0,
            up: link.header.flags.contains(LinkFlags::Up),
            carrier: link.header.flags.contains(LinkFlags::LowerUp),
            program: None,
            xdp: None,
            veth: false,
        };
        let mut ours = false;
        for attribute in &link.attributes {
            match attribute {
                // It may be found by another of its names.
                LinkAttribute::IfName(text) => ours = text == name,
                LinkAttribute::Mtu(mtu) => found.mtu = *mtu,
                LinkAttribute::Xdp(facts) => (found.program, found.xdp) = xdp(facts),
                LinkAttribute::LinkInfo(facts) => {
                    found.veth = facts.contains(&LinkInfo::Kind(InfoKind::Veth));
                }
                LinkAttribute::Address(bytes) => {
                    found.mac = <[u8; 6]>::try_from(bytes.as_slice()).unwrap_or_default();
                }
                _ => {}
            }
        }
        if ours {
            return Ok(Some(found));
        }
    }
    Ok(None)
}

/// The addresses of a link.
///
/// # Errors
/// The system's.
pub fn addresses(index: u32) -> io::Result<Vec<IpAddr>> {
    let request = RouteNetlinkMessage::GetAddress(AddressMessage::default());
    let mut found = Vec::new();
    for answer in Netlink::new()?.ask(request, NLM_F_DUMP)? {
        let RouteNetlinkMessage::NewAddress(entry) = answer else {
            continue;
        };
        if entry.header.index != index {
            continue;
        }
        // On a point-to-point link `Address` is the other end's, `Local` ours.
        let local = entry
            .attributes
            .iter()
            .find_map(|attribute| match attribute {
                AddressAttribute::Local(ip) => Some(*ip),
                _ => None,
            });
        let address = entry
            .attributes
            .iter()
            .find_map(|attribute| match attribute {
                AddressAttribute::Address(ip) => Some(*ip),
                _ => None,
            });
        found.extend(local.or(address));
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    // The loopback interface, and names that no link has: unknown, too long, none. Expect: found, and `None`.
    #[test]
    fn a_link_is_found_by_its_name() {
        let loopback = link("lo").unwrap().unwrap();
        let index = std::fs::read_to_string("/sys/class/net/lo/ifindex").unwrap();
        assert_eq!(loopback.index.to_string(), index.trim());
        let mtu = std::fs::read_to_string("/sys/class/net/lo/mtu").unwrap();
        assert_eq!(loopback.mtu.to_string(), mtu.trim());
        for name in ["no-such-link", "longer-than-a-name-may-be", ""] {
            assert_eq!(link(name).unwrap(), None, "{name:?}");
        }
    }
}
