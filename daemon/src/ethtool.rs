//! What a driver says of itself and of its interface: `SIOCETHTOOL` (linux/ethtool.h): requests that only read, and one that switches GRO.
//!
//! Each request is a structure that begins with its command; the kernel fills in the rest. An `unsafe` island of one call.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use rustix::net::{AddressFamily, SocketFlags, SocketType};

const SIOCETHTOOL: libc::c_ulong = 0x8946;
const GDRVINFO: u32 = 0x03;
const GTSO: u32 = 0x1e;
const GGSO: u32 = 0x23;
const GFLAGS: u32 = 0x25;
const GGRO: u32 = 0x2b;
const SGRO: u32 = 0x2c;
const GRXCLSRLCNT: u32 = 0x2e;
const GCHANNELS: u32 = 0x3c;
const FLAG_RXVLAN: u32 = 1 << 8;
const FLAG_LRO: u32 = 1 << 15;
const FLAG_NTUPLE: u32 = 1 << 27;

/// The largest request we make: `struct ethtool_drvinfo` has 196 bytes, `ethtool_rxnfc` 192 and rule locations.
const WORDS: usize = 64;

/// What is switched on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Offloads {
    /// Received segments are merged by the kernel.
    pub gro: bool,
    /// Received segments are merged by the NIC.
    pub lro: bool,
    /// Sent segments are cut by the NIC.
    pub tso: bool,
    /// VLAN tags are taken off.
    pub rxvlan: bool,
    /// Rules may steer flows to queues.
    pub ntuple: bool,
}

/// An interface, asked by name.
pub(crate) struct Ethtool {
    socket: OwnedFd,
    name: [u8; 16],
}

impl Ethtool {
    pub(crate) fn new(interface: &str) -> io::Result<Self> {
        let mut name = [0; 16];
        let bytes = interface.as_bytes();
        let place = name.get_mut(..bytes.len()).filter(|p| p.len() < 16);
        let place = place.ok_or_else(|| io::Error::other("no interface has so long a name"))?;
        place.copy_from_slice(bytes);
        let socket = rustix::net::socket_with(
            AddressFamily::INET,
            SocketType::DGRAM,
            SocketFlags::CLOEXEC,
            None,
        )?;
        Ok(Self { socket, name })
    }

    /// One request whose first words are given.
    fn ask(&self, begin: &[u32]) -> io::Result<[u32; WORDS]> {
        /// `struct ifreq` with a pointer in its union.
        #[repr(C)]
        struct Request {
            name: [u8; 16],
            data: *mut u32,
            rest: [u64; 2],
        }
        let mut data = [0_u32; WORDS];
        for (place, word) in data.iter_mut().zip(begin) {
            *place = *word;
        }
        let mut request = Request {
            name: self.name,
            data: data.as_mut_ptr(),
            rest: [0; 2],
        };
        // SAFETY: `request` is a `struct ifreq` that lives through the call; the kernel writes at most the structure of the command, which
        // is smaller than `data`, to where `data` points. Every bit pattern is valid there.
        let result = unsafe { libc::ioctl(self.socket.as_raw_fd(), SIOCETHTOOL, &raw mut request) };
        if result < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(data)
    }

    fn value(&self, command: u32) -> Option<u32> {
        self.ask(&[command]).ok().map(|data| data[1])
    }

    /// The driver's name.
    pub(crate) fn driver(&self) -> Option<String> {
        let data = self.ask(&[GDRVINFO]).ok()?;
        let bytes: Vec<u8> = data
            .iter()
            .skip(1)
            .take(8)
            .flat_map(|w| w.to_ne_bytes())
            .collect();
        let end = bytes.iter().position(|byte| *byte == 0)?;
        let name = String::from_utf8_lossy(bytes.get(..end)?).into_owned();
        Some(name).filter(|name| !name.is_empty())
    }

    /// Which offloads are on.
    pub(crate) fn offloads(&self) -> Offloads {
        let on = |command| self.value(command).is_some_and(|value| value != 0);
        let flags = self.value(GFLAGS).unwrap_or(0);
        Offloads {
            gro: on(GGRO),
            lro: flags & FLAG_LRO != 0,
            tso: on(GTSO) && on(GGSO),
            rxvlan: flags & FLAG_RXVLAN != 0,
            ntuple: flags & FLAG_NTUPLE != 0,
        }
    }

    /// The index of the interface that has the name now.
    pub(crate) fn index(&self) -> io::Result<u32> {
        let end = self.name.iter().position(|byte| *byte == 0);
        let name = self.name.get(..end.unwrap_or(self.name.len()));
        let name = std::str::from_utf8(name.unwrap_or_default()).map_err(io::Error::other)?;
        Ok(rustix::net::netdevice::name_to_index(&self.socket, name)?)
    }

    /// Switches GRO. Needs CAP_NET_ADMIN.
    pub(crate) fn set_gro(&self, on: bool) -> io::Result<()> {
        self.ask(&[SGRO, on.into()]).map(drop)
    }

    /// Does it check received checksums? Only to know that it answers at all.
    #[cfg(test)]
    pub(crate) fn receives_checksums(&self) -> Option<bool> {
        const GRXCSUM: u32 = 0x14;
        self.value(GRXCSUM).map(|value| value != 0)
    }

    /// How many rules steer flows to queues; `None` if the driver has none.
    pub(crate) fn rules(&self) -> Option<u32> {
        // struct ethtool_rxnfc: cmd, flow_type, data (u64), fs (168 bytes), rule_cnt.
        let data = self.ask(&[GRXCLSRLCNT]).ok()?;
        data.get(RULE_COUNT_AT).copied()
    }

    /// The most queues the driver could have (receiving or both ways); `None` if it does not say.
    pub(crate) fn most_queues(&self) -> Option<u32> {
        // struct ethtool_channels: cmd, max_rx, max_tx, max_other, max_combined, …
        let data = self.ask(&[GCHANNELS]).ok()?;
        Some(data[1].max(data[4])).filter(|most| *most > 0)
    }
}

/// Where `rule_cnt` is, in words: behind `cmd`, `flow_type`, `data` and `struct ethtool_rx_flow_spec`.
const RULE_COUNT_AT: usize = (4 + 4 + 8 + size_of::<FlowSpec>()) / 4;

/// `struct ethtool_rx_flow_spec`, for its size.
#[repr(C)]
struct FlowSpec {
    flow_type: u32,
    h_u: [u8; 52],
    h_ext: [u8; 20],
    m_u: [u8; 52],
    m_ext: [u8; 20],
    ring_cookie: u64,
    location: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    // Loopback has a driver-less ethtool: features answer. A name that is too long is refused before the kernel is asked.
    #[test]
    fn loopback_answers() {
        let lo = Ethtool::new("lo").unwrap();
        assert!(lo.receives_checksums().is_some());
        assert_eq!(lo.rules(), None);
        assert_eq!(lo.index().unwrap(), 1);
        assert!(Ethtool::new("an-interface-name").is_err());
        assert_eq!(size_of::<FlowSpec>(), 168);
    }
}
