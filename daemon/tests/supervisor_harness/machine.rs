//! The machine a node under test believes it runs on.

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
