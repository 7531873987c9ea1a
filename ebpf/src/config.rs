//! What the program takes for ours, checked, and its form in the program's read-only data.

use std::net::{Ipv4Addr, Ipv6Addr};

use crate::SteerError;

/// The most queues, and so sockets, one program serves: `MAX_QUEUES` in `steer.bpf.c`.
pub const MAX_QUEUES: u16 = 64;

/// The EtherType of Portolan frames unless configured otherwise (IEEE 802, local experiments 1).
pub const DEFAULT_ETHERTYPE: u16 = 0x88B5;

/// EtherTypes whose capture would cut the host off: IPv4, ARP, IPv6, 802.1Q, 802.1ad.
const RESERVED_ETHERTYPES: [u16; 5] = [0x0800, 0x0806, 0x86DD, 0x8100, 0x88A8];

const FAMILY_V4: u8 = 1;
const FAMILY_V6: u8 = 2;

/// How Portolan frames travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encap {
    /// Directly in Ethernet frames with an EtherType of their own.
    Ethernet,
    /// In UDP over IPv4 or IPv6.
    Udp,
}

/// Which frames are ours. Fixed while the program is loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SteerConfig {
    /// How frames travel; decides which of the fields below count.
    pub encap: Encap,
    /// EtherType for [`Encap::Ethernet`], usually [`DEFAULT_ETHERTYPE`].
    pub ethertype: u16,
    /// First UDP destination port; queue *q* has the port base + *q*.
    pub udp_base_port: u16,
    /// Number of queues, 1 to [`MAX_QUEUES`]: the ports `base .. base + queues` are ours.
    pub queues: u16,
    /// The interface's own MAC address; all zero: any unicast address.
    pub local_mac: [u8; 6],
    /// Our IPv4 address. `None`: no IPv4 frame is ours, unless both addresses are `None`.
    pub local_v4: Option<Ipv4Addr>,
    /// Our IPv6 address. `None`: no IPv6 frame is ours, unless both addresses are `None`:
    /// then any destination address of either family is, also of traffic this host only routes.
    pub local_v6: Option<Ipv6Addr>,
}

impl SteerConfig {
    /// Size of [`Self::rodata`]: `sizeof(struct steer_config)`.
    pub const RODATA_LEN: usize = 36;

    /// Checks the configuration and lays it out as `struct steer_config` of `steer.bpf.c`.
    ///
    /// # Errors
    /// [`SteerError::Config`], the caller's fault: says which value is wrong.
    pub fn rodata(&self) -> Result<[u8; Self::RODATA_LEN], SteerError> {
        self.check()?;
        let families = match (self.local_v4, self.local_v6) {
            (None, None) => FAMILY_V4 | FAMILY_V6,
            (v4, v6) => v4.map_or(0, |_| FAMILY_V4) | v6.map_or(0, |_| FAMILY_V6),
        };
        let v4 = self.local_v4.map_or([0; 4], |address| address.octets());
        let v6 = self.local_v6.map_or([0; 16], |address| address.octets());
        let mut data = [0; Self::RODATA_LEN];
        data[0..6].copy_from_slice(&self.local_mac);
        data[6..8].copy_from_slice(&self.ethertype.to_be_bytes());
        data[8..12].copy_from_slice(&v4);
        data[12..28].copy_from_slice(&v6);
        data[28..30].copy_from_slice(&self.udp_base_port.to_ne_bytes());
        data[30..32].copy_from_slice(&self.queues.to_ne_bytes());
        data[32] = match self.encap {
            Encap::Ethernet => 0,
            Encap::Udp => 1,
        };
        data[33] = families;
        Ok(data)
    }

    fn check(&self) -> Result<(), SteerError> {
        let refuse = |reason: String| Err(SteerError::Config(reason));
        if self.queues == 0 || self.queues > MAX_QUEUES {
            return refuse(format!(
                "queues must be 1 to {MAX_QUEUES}, not {}",
                self.queues
            ));
        }
        if self.local_mac[0] & 1 != 0 {
            return refuse("the local MAC must not be a multicast address".to_owned());
        }
        match self.encap {
            Encap::Ethernet => {
                if self.ethertype < 0x600 || RESERVED_ETHERTYPES.contains(&self.ethertype) {
                    return refuse(format!(
                        "EtherType {:#06x} is not free to use",
                        self.ethertype
                    ));
                }
            }
            Encap::Udp => {
                let last = u32::from(self.udp_base_port) + u32::from(self.queues) - 1;
                if self.udp_base_port == 0 || last > u32::from(u16::MAX) {
                    return refuse(format!(
                        "UDP ports {} to {last} do not all lie in 1 to 65535",
                        self.udp_base_port
                    ));
                }
                let v4 = self
                    .local_v4
                    .is_some_and(|a| a.is_unspecified() || a.is_multicast() || a.is_broadcast());
                let v6 = self
                    .local_v6
                    .is_some_and(|a| a.is_unspecified() || a.is_multicast());
                if v4 || v6 {
                    return refuse("the local IP address must be a unicast address".to_owned());
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn udp() -> SteerConfig {
        SteerConfig {
            encap: Encap::Udp,
            ethertype: DEFAULT_ETHERTYPE,
            udp_base_port: 0x1234,
            queues: 4,
            local_mac: [2, 0, 0, 0, 0, 1],
            local_v4: Some(Ipv4Addr::new(10, 1, 0, 2)),
            local_v6: None,
        }
    }

    #[test]
    fn bad_values_are_refused() {
        type Spoil = fn(&mut SteerConfig);
        let cases: [(&str, Spoil); 9] = [
            ("no queue", |c| c.queues = 0),
            ("too many queues", |c| c.queues = MAX_QUEUES + 1),
            ("multicast MAC", |c| c.local_mac[0] = 1),
            ("port 0", |c| c.udp_base_port = 0),
            ("ports beyond 65535", |c| c.udp_base_port = 65533),
            ("0.0.0.0", |c| c.local_v4 = Some(Ipv4Addr::UNSPECIFIED)),
            ("multicast address", |c| c.local_v6 = "ff02::1".parse().ok()),
            ("IPv4's EtherType", |c| {
                (c.encap, c.ethertype) = (Encap::Ethernet, 0x0800)
            }),
            ("a length, no EtherType", |c| {
                (c.encap, c.ethertype) = (Encap::Ethernet, 1500)
            }),
        ];
        assert!(udp().rodata().is_ok());
        for (name, spoil) in cases {
            let mut config = udp();
            spoil(&mut config);
            assert!(
                matches!(config.rodata(), Err(SteerError::Config(_))),
                "{name}"
            );
        }
        let last_port = SteerConfig {
            udp_base_port: 65532,
            ..udp()
        };
        assert!(last_port.rodata().is_ok());
    }

    #[test]
    fn layout_of_the_rodata() {
        let data = udp().rodata().unwrap();
        assert_eq!(data[..12], [2, 0, 0, 0, 0, 1, 0x88, 0xB5, 10, 1, 0, 2]);
        assert_eq!(
            data[28..32],
            [0x1234u16.to_ne_bytes(), 4u16.to_ne_bytes()].concat()
        );
        assert_eq!(data[32..], [1, FAMILY_V4, 0, 0]);
    }
}
