//! What a node says of itself, as it travels: docs/discovery.md. It comes from anybody, so it is checked before anything of it is believed,
//! and bounded: a packet that is read whole has no name longer than 63 bytes and at most [`MOST_KNOWN`] addresses of others.
//!
//! A later version appends: who reads takes the fields it knows and passes over the rest. So a version and its predecessor understand each
//! other, in both directions, as far as the older one goes.

use std::net::IpAddr;

use portolan_transport::wire::chunk::PolicyWire;

/// How a packet begins.
const MAGIC: [u8; 4] = *b"PTLM";
/// The version we write.
pub const VERSION: u8 = 1;
/// The oldest we read.
const OLDEST: u8 = 1;
/// Longest packet we read; ours has at most 526 bytes, which fits into any MTU we accept.
pub const LONGEST: usize = 1400;
/// Most addresses of others in one packet.
pub const MOST_KNOWN: usize = 16;
/// Longest name.
const LONGEST_NAME: usize = 63;

/// What a node says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Announcement {
    /// Whoever hears it should say so at once: the sender has just begun.
    pub ask: bool,
    /// Hash of the cluster's name.
    pub cluster: u64,
    /// The cluster's name.
    pub cluster_name: String,
    /// Node id.
    pub node: u16,
    /// Node name.
    pub name: String,
    /// Its incarnation.
    pub incarnation: u64,
    /// Versions of the wire it speaks.
    pub wire: (u8, u8),
    /// Frames travel in UDP, else in Ethernet.
    pub udp: bool,
    /// Its engines.
    pub queues: u8,
    /// UDP port of queue 0.
    pub udp_port: u16,
    /// Its MTU.
    pub mtu: u16,
    /// Its MAC.
    pub mac: [u8; 6],
    /// Its address, for UDP.
    pub address: Option<IpAddr>,
    /// What of its policy others must share.
    pub policy: PolicyWire,
    /// The profile's name.
    pub profile: String,
    /// Where it knows others to be.
    pub known: Vec<IpAddr>,
}

/// Why a packet is not read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unread {
    /// It is none of ours, or damaged.
    Nonsense,
    /// It is of a version we do not know, of a node that may be named.
    Version(u8),
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, length: usize) -> Result<&'a [u8], Unread> {
        let (taken, rest) = self.0.split_at_checked(length).ok_or(Unread::Nonsense)?;
        self.0 = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Unread> {
        self.take(N)?.try_into().map_err(|_| Unread::Nonsense)
    }

    fn byte(&mut self) -> Result<u8, Unread> {
        Ok(self.array::<1>()?[0])
    }

    fn short(&mut self) -> Result<u16, Unread> {
        Ok(u16::from_be_bytes(self.array()?))
    }

    fn long(&mut self) -> Result<u64, Unread> {
        Ok(u64::from_be_bytes(self.array()?))
    }

    /// A name as configurations have them.
    fn name(&mut self) -> Result<String, Unread> {
        let length = usize::from(self.byte()?);
        let bytes = self.take(length)?;
        let good = |byte: &u8| byte.is_ascii_alphanumeric() || b"._-".contains(byte);
        if !(1..=LONGEST_NAME).contains(&length) || !bytes.iter().all(good) {
            return Err(Unread::Nonsense);
        }
        Ok(String::from_utf8_lossy(bytes).into_owned())
    }

    fn address(&mut self) -> Result<Option<IpAddr>, Unread> {
        let address: IpAddr = match self.byte()? {
            0 => return Ok(None),
            4 => self.array::<4>()?.into(),
            6 => self.array::<16>()?.into(),
            _ => return Err(Unread::Nonsense),
        };
        let one_node =
            !address.is_unspecified() && !address.is_multicast() && !address.is_loopback();
        one_node.then_some(Some(address)).ok_or(Unread::Nonsense)
    }
}

fn put_name(bytes: &mut Vec<u8>, name: &str) {
    let name = name.as_bytes();
    let name = name.get(..name.len().min(LONGEST_NAME)).unwrap_or_default();
    bytes.push(name.len() as u8); // at most 63
    bytes.extend_from_slice(name);
}

fn put_address(bytes: &mut Vec<u8>, address: Option<IpAddr>) {
    match address {
        None => bytes.push(0),
        Some(IpAddr::V4(address)) => {
            bytes.push(4);
            bytes.extend_from_slice(&address.octets());
        }
        Some(IpAddr::V6(address)) => {
            bytes.push(6);
            bytes.extend_from_slice(&address.octets());
        }
    }
}

impl Announcement {
    /// As it travels.
    pub fn write(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(LONGEST);
        bytes.extend_from_slice(&MAGIC);
        bytes.push(VERSION);
        bytes.push(u8::from(self.ask) | u8::from(self.udp) << 1);
        bytes.extend_from_slice(&self.cluster.to_be_bytes());
        bytes.extend_from_slice(&self.node.to_be_bytes());
        bytes.extend_from_slice(&self.incarnation.to_be_bytes());
        bytes.extend_from_slice(&[self.wire.0, self.wire.1, self.queues]);
        bytes.extend_from_slice(&self.udp_port.to_be_bytes());
        bytes.extend_from_slice(&self.mtu.to_be_bytes());
        bytes.extend_from_slice(&self.mac);
        let policy = &self.policy;
        bytes.extend_from_slice(&[policy.recovery, policy.ack_rule, policy.order]);
        put_address(&mut bytes, self.address);
        put_name(&mut bytes, &self.name);
        put_name(&mut bytes, &self.cluster_name);
        put_name(&mut bytes, &self.profile);
        let known = self.known.iter().take(MOST_KNOWN);
        bytes.push(known.len() as u8); // at most MOST_KNOWN
        for address in known {
            put_address(&mut bytes, Some(*address));
        }
        seal(&mut bytes);
        bytes
    }

    /// Reads a packet.
    ///
    /// # Errors
    /// Why it is not believed.
    pub fn read(packet: &[u8]) -> Result<Self, Unread> {
        let body = packet.len().checked_sub(4).ok_or(Unread::Nonsense)?;
        if packet.len() > LONGEST {
            return Err(Unread::Nonsense);
        }
        let (body, sum) = packet.split_at(body);
        let mut r = Reader(body);
        if r.array()? != MAGIC || crc32c::crc32c(body).to_be_bytes() != *sum {
            return Err(Unread::Nonsense);
        }
        let version = r.byte()?;
        if version < OLDEST {
            return Err(Unread::Version(version));
        }
        let flags = r.byte()?;
        let said = Self {
            ask: flags & 1 != 0,
            udp: flags & 2 != 0,
            cluster: r.long()?,
            node: r.short()?,
            incarnation: r.long()?,
            wire: (r.byte()?, r.byte()?),
            queues: r.byte()?,
            udp_port: r.short()?,
            mtu: r.short()?,
            mac: r.array()?,
            policy: PolicyWire {
                recovery: r.byte()?,
                ack_rule: r.byte()?,
                order: r.byte()?,
            },
            address: r.address()?,
            name: r.name()?,
            cluster_name: r.name()?,
            profile: r.name()?,
            known: {
                let count = usize::from(r.byte()?);
                if count > MOST_KNOWN {
                    return Err(Unread::Nonsense);
                }
                let mut known = Vec::with_capacity(count);
                for _ in 0..count {
                    known.extend(r.address()?);
                }
                known
            },
        };
        // What follows is of a later version.
        let fine = (1..=65_534).contains(&said.node)
            && said.incarnation != 0
            && said.wire.0 <= said.wire.1
            && (1..=64).contains(&said.queues)
            && said.udp_port > 0
            && said.mtu >= 576
            && said.mac[0] & 1 == 0
            && said.mac != [0; 6]
            && said.udp == said.address.is_some()
            && !said.name.bytes().all(|byte| byte.is_ascii_digit());
        fine.then_some(said).ok_or(Unread::Nonsense)
    }
}

fn seal(bytes: &mut Vec<u8>) {
    let sum = crc32c::crc32c(bytes);
    bytes.extend_from_slice(&sum.to_be_bytes());
}

#[cfg(test)]
pub(super) mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    /// What node `node` would say.
    pub fn announcement(node: u16) -> Announcement {
        Announcement {
            ask: false,
            cluster: 17,
            cluster_name: "lab".into(),
            node,
            name: format!("n{node}"),
            incarnation: 1000 + u64::from(node),
            wire: (1, 1),
            udp: true,
            queues: 2,
            udp_port: 28_000,
            mtu: 1500,
            mac: [2, 0, 0, 0, 0, node as u8],
            address: Some(Ipv4Addr::from((10 << 24) | u32::from(node)).into()),
            policy: PolicyWire {
                recovery: 3,
                ack_rule: 1,
                order: 1,
            },
            profile: "default".into(),
            known: vec!["10.0.0.9".parse().unwrap(), "fd00::9".parse().unwrap()],
        }
    }

    #[test]
    fn it_is_read_as_it_is_written() {
        let said = announcement(2);
        assert_eq!(Announcement::read(&said.write()), Ok(said.clone()));
        let mut longest = Announcement {
            name: "n".repeat(63),
            cluster_name: "c".repeat(63),
            profile: "p".repeat(63),
            known: vec!["fd00::1".parse().unwrap(); MOST_KNOWN],
            address: None,
            udp: false,
            ..said
        };
        assert_eq!(longest.write().len(), 510);
        assert_eq!(Announcement::read(&longest.write()).as_ref(), Ok(&longest));
        longest.node = 0;
        assert_eq!(Announcement::read(&longest.write()), Err(Unread::Nonsense));
    }

    // A later version: its number is higher, and it says more at the end. Expect: what we know of it is read. One that is older than
    // what we read is named.
    #[test]
    fn the_next_version_is_understood_and_one_too_old_is_named() {
        let said = announcement(2);
        let mut bytes = said.write();
        bytes.truncate(bytes.len() - 4);
        bytes[4] = VERSION + 1;
        bytes.extend_from_slice(b"something new");
        seal(&mut bytes);
        assert_eq!(Announcement::read(&bytes), Ok(said));
        bytes.truncate(bytes.len() - 4);
        bytes[4] = OLDEST - 1;
        seal(&mut bytes);
        assert_eq!(Announcement::read(&bytes), Err(Unread::Version(OLDEST - 1)));
    }

    // Every byte flipped, every length cut, with a good sum: Expect: never a panic, and never a name that is none.
    #[test]
    fn whatever_comes_is_bounded() {
        let whole = announcement(2).write();
        let body = &whole[..whole.len() - 4];
        for cut in 0..body.len() {
            let mut bytes = body[..cut].to_vec();
            seal(&mut bytes);
            assert!(Announcement::read(&bytes).is_err(), "{cut}");
            assert!(Announcement::read(&body[..cut]).is_err());
        }
        for at in 0..body.len() {
            for value in [0, 1, 63, 64, 127, 255] {
                let mut bytes = body.to_vec();
                bytes[at] = value;
                seal(&mut bytes);
                if let Ok(said) = Announcement::read(&bytes) {
                    assert!(said.name.len() <= 63 && said.known.len() <= MOST_KNOWN);
                    assert!(said.node != 0 && said.mtu >= 576);
                }
            }
            // Without a good sum nothing is believed.
            let mut bytes = whole.clone();
            bytes[at] ^= 0x40;
            assert!(Announcement::read(&bytes).is_err());
        }
    }
}
