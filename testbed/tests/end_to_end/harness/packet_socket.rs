//! A packet socket on a node's interface: whole Ethernet frames of one EtherType, by hand.

use std::num::NonZeroU32;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use portolan_testbed::Node;
use rustix::net::{AddressFamily, Protocol, SocketFlags, SocketType};

/// The EtherType of Portolan's frames.
pub const ETHERTYPE: u16 = 0x88b5;

pub fn open(node: &Node, ethertype: u16) -> OwnedFd {
    let name = std::ffi::CString::new(node.interface()).unwrap();
    node.in_namespace(|| {
        let protocol = NonZeroU32::new(u32::from(ethertype.to_be())).map(Protocol::from_raw);
        let socket = rustix::net::socket_with(
            AddressFamily::PACKET,
            SocketType::RAW,
            SocketFlags::CLOEXEC,
            protocol,
        )
        .unwrap();
        // SAFETY: `name` is a string that ends in a null byte and lives through the call.
        let index = unsafe { libc::if_nametoindex(name.as_ptr()) };
        assert_ne!(index, 0);
        let address = libc::sockaddr_ll {
            sll_family: libc::AF_PACKET as u16,
            sll_protocol: ethertype.to_be(),
            sll_ifindex: index.cast_signed(),
            sll_hatype: 0,
            sll_pkttype: 0,
            sll_halen: 0,
            sll_addr: [0; 8],
        };
        // SAFETY: a socket of our own, and an address of the family it wants with its length.
        let bound = unsafe {
            libc::bind(
                socket.as_fd().as_raw_fd(),
                (&raw const address).cast(),
                size_of_val(&address) as libc::socklen_t,
            )
        };
        assert_eq!(bound, 0, "{}", std::io::Error::last_os_error());
        socket
    })
    .unwrap()
}

pub fn header(from: &Node, to: &Node, ethertype: u16) -> [u8; 14] {
    let mut header = [0; 14];
    header[..6].copy_from_slice(&mac(to));
    header[6..12].copy_from_slice(&mac(from));
    header[12..].copy_from_slice(&ethertype.to_be_bytes());
    header
}

fn mac(node: &Node) -> [u8; 6] {
    let text = node.mac();
    let bytes: Vec<u8> = text
        .split(':')
        .map(|byte| u8::from_str_radix(byte, 16).unwrap())
        .collect();
    bytes.try_into().unwrap()
}
