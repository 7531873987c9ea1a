//! The machine a node under test believes it runs on.

use std::os::fd::OwnedFd;
use std::sync::atomic::AtomicU64;
use std::sync::mpsc::Sender;

use portoland::supervisor::memory::eventfd;
use portoland::supervisor::sockets::{NewSocket, NoSocket, Sockets};
use portoland::supervisor::surroundings::{Account, Interface, Surroundings};

/// One interface, any user, one core.
pub struct Machine;

impl Surroundings for Machine {
    fn interface(&self, _: &str) -> std::io::Result<Option<Interface>> {
        Ok(Some(Interface {
            index: 1,
            mac: [2, 0, 0, 0, 0, 1],
            mtu: 1500,
            addresses: vec!["10.0.0.1".parse().unwrap()],
            rx_queues: Some(8),
            veth: false,
        }))
    }
    fn user(&self, name: &str) -> Option<Account> {
        let id = name.parse().unwrap_or(65534);
        Some(Account { uid: id, gid: id })
    }
    fn group(&self, name: &str) -> Option<u32> {
        name.parse().ok()
    }
    fn cores(&self) -> Vec<usize> {
        vec![0]
    }
    fn own_uid(&self) -> u32 {
        0
    }
}

/// Makes sockets that are none, and says so.
pub struct FakeSockets(pub Sender<Option<OwnedFd>>);

impl Sockets for FakeSockets {
    fn create(
        &mut self,
        _nic_queue: u32,
        umem: Option<&OwnedFd>,
        _ownership: &[AtomicU64],
    ) -> Result<NewSocket, NoSocket> {
        let kept = umem.map(|fd| fd.try_clone().unwrap());
        let new = || eventfd().unwrap().into();
        let made = NewSocket {
            umem: kept
                .as_ref()
                .map_or_else(new, |fd| fd.try_clone().unwrap().into()),
            xsk: new(),
            zero_copy: false,
        };
        self.0.send(kept).unwrap();
        Ok(made)
    }
}
