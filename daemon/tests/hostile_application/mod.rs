//! An application that opens a port as anyone may, and then follows no rule.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::Ordering;

use portolan_abi::PORT_ABI_VERSION;
use portolan_abi::control::{MAX_RESPONSE_PACKET, Request, Response};
use portolan_abi::memory::Mapping;
use portolan_abi::port::PortGeometry;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendFlags, SocketAddrUnix, SocketType,
};

pub struct Application {
    pub memory: Mapping,
    pub geometry: PortGeometry,
    pub bells: Vec<OwnedFd>,
    _connection: OwnedFd,
}

impl Application {
    pub fn open(socket: &Path, port: u16) -> Option<Self> {
        let connection =
            rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
        rustix::net::connect(&connection, &SocketAddrUnix::new(socket).unwrap()).unwrap();
        let geometry = PortGeometry::new(16, 16, 16 * 4096).unwrap();
        let request = serde_json::to_vec(&Request::OpenPort {
            abi: PORT_ABI_VERSION,
            port: Some(port),
            geometry,
        })
        .unwrap();
        let mut none = SendAncillaryBuffer::new(&mut []);
        let flags = SendFlags::NOSIGNAL;
        rustix::net::sendmsg(&connection, &[IoSlice::new(&request)], &mut none, flags).unwrap();
        let mut packet = vec![0; MAX_RESPONSE_PACKET];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let received = rustix::net::recvmsg(
            &connection,
            &mut [IoSliceMut::new(&mut packet)],
            &mut control,
            RecvFlags::CMSG_CLOEXEC,
        )
        .unwrap();
        let mut fds: Vec<OwnedFd> = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                fds.extend(rights);
            }
        }
        match serde_json::from_slice(&packet[1..received.bytes]).unwrap() {
            Response::PortOpened { geometry, .. } => Some(Self {
                memory: Mapping::new(fds[0].as_fd(), geometry.client_half_bytes(), true).unwrap(),
                geometry,
                bells: fds.split_off(2),
                _connection: connection,
            }),
            // Its last instance is still being closed.
            _ => None,
        }
    }

    /// Overwrites the whole half, but not the rings' indices if `tame`.
    pub fn scribble(&self, mut next: impl FnMut() -> u64, tame: bool) {
        let bytes = self.geometry.arena();
        for (at, word) in self.memory.words(0, bytes / 8).iter().enumerate() {
            if !(tame && at * 8 < 4096) {
                word.store(next(), Ordering::Relaxed);
            }
        }
    }

    /// Advances both rings' producers and rings the engine.
    pub fn produce(&self, count: u32) {
        let word = &self.memory.words(64, 1)[0];
        let (sends, provides) = (
            word.load(Ordering::Relaxed) as u32,
            word.load(Ordering::Relaxed) >> 32,
        );
        let provides = (provides as u32).wrapping_add(count);
        word.store(
            u64::from(provides) << 32 | u64::from(sends.wrapping_add(count)),
            Ordering::Release,
        );
        let _ = rustix::io::write(&self.bells[1], &1u64.to_ne_bytes());
    }
}
