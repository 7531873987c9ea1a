//! What a configuration is checked against: this machine's interfaces, accounts and cores, or a test's.

use std::io;
use std::net::IpAddr;

/// A network interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interface {
    /// Its index.
    pub index: u32,
    /// Its MAC.
    pub mac: [u8; 6],
    /// Its MTU.
    pub mtu: u32,
    /// Its addresses.
    pub addresses: Vec<IpAddr>,
    /// Its receive queues; `None` if nobody knows.
    pub rx_queues: Option<u32>,
    /// It is one end of a veth pair.
    pub veth: bool,
}

/// A user.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Account {
    /// User id.
    pub uid: u32,
    /// Primary group.
    pub gid: u32,
}

/// What must be known of a machine.
pub trait Surroundings {
    /// The named interface of this network namespace; `None` if there is none.
    ///
    /// # Errors
    /// The system's.
    fn interface(&self, name: &str) -> io::Result<Option<Interface>>;
    /// A user by name or number.
    fn user(&self, name: &str) -> Option<Account>;
    /// A group by name or number.
    fn group(&self, name: &str) -> Option<u32>;
    /// Cores we may run on.
    fn cores(&self) -> Vec<usize>;
    /// Our own user.
    fn own_uid(&self) -> u32;
}

/// This machine.
#[derive(Debug, Default)]
pub struct ThisMachine;

impl Surroundings for ThisMachine {
    fn interface(&self, name: &str) -> io::Result<Option<Interface>> {
        let Some(link) = super::netlink::link(name)? else {
            return Ok(None);
        };
        Ok(Some(Interface {
            index: link.index,
            mac: link.mac,
            mtu: link.mtu,
            addresses: super::netlink::addresses(link.index)?,
            rx_queues: rx_queues(name),
            veth: link.veth,
        }))
    }

    fn user(&self, name: &str) -> Option<Account> {
        let number = name.parse::<u32>().ok();
        let found = lookup("/etc/passwd", name, number).and_then(|fields| {
            Some(Account {
                uid: fields.get(2)?.parse().ok()?,
                gid: fields.get(3)?.parse().ok()?,
            })
        });
        // A number needs no entry: its group is then the same number.
        found.or_else(|| number.map(|id| Account { uid: id, gid: id }))
    }

    fn group(&self, name: &str) -> Option<u32> {
        let number = name.parse::<u32>().ok();
        let found =
            lookup("/etc/group", name, number).and_then(|fields| fields.get(2)?.parse().ok());
        found.or(number)
    }

    fn cores(&self) -> Vec<usize> {
        let Ok(set) = rustix::thread::sched_getaffinity(None) else {
            return Vec::new();
        };
        (0..rustix::thread::CpuSet::MAX_CPU)
            .filter(|core| set.is_set(*core))
            .collect()
    }

    fn own_uid(&self) -> u32 {
        rustix::process::geteuid().as_raw()
    }
}

/// This machine, for a supervisor that goes on with what a predecessor left: that belongs to the interface as the predecessor knew it. If
/// it is gone or another by now, the supervisor sees to that once it runs ([`super::interface`]).
#[derive(Debug)]
pub struct AsItWas {
    /// The interface's name, and what it was like.
    pub interface: (String, Interface),
}

impl Surroundings for AsItWas {
    fn interface(&self, name: &str) -> io::Result<Option<Interface>> {
        let now = ThisMachine.interface(name)?;
        let (known, was) = &self.interface;
        let same = |now: &Interface| (now.index, now.mac) == (was.index, was.mac);
        if known != name || now.as_ref().is_some_and(same) {
            return Ok(now);
        }
        Ok(Some(was.clone()))
    }

    fn user(&self, name: &str) -> Option<Account> {
        ThisMachine.user(name)
    }

    fn group(&self, name: &str) -> Option<u32> {
        ThisMachine.group(name)
    }

    fn cores(&self) -> Vec<usize> {
        ThisMachine.cores()
    }

    fn own_uid(&self) -> u32 {
        ThisMachine.own_uid()
    }
}

/// The entry of a colon-separated account file by name, or by id in the third field.
fn lookup(file: &str, name: &str, number: Option<u32>) -> Option<Vec<String>> {
    let text = std::fs::read_to_string(file).ok()?;
    text.lines()
        .map(|line| line.split(':').map(str::to_owned).collect::<Vec<_>>())
        .find(|fields| {
            let by_id = number.is_some() && fields.get(2).and_then(|id| id.parse().ok()) == number;
            by_id || fields.first().is_some_and(|first| first == name)
        })
}

/// Receive queues by sysfs, if sysfs shows our network namespace.
fn rx_queues(interface: &str) -> Option<u32> {
    // A name with a slash is no interface; it never comes this far, but costs nothing to refuse.
    if interface.contains('/') {
        return None;
    }
    let entries = std::fs::read_dir(format!("/sys/class/net/{interface}/queues")).ok()?;
    let count = entries
        .flatten()
        .filter(|entry| entry.file_name().to_string_lossy().starts_with("rx-"))
        .count();
    u32::try_from(count).ok().filter(|count| *count > 0)
}
