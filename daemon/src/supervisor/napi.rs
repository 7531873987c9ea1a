//! When the kernel goes round for frames by itself: the NAPI instance of a queue, over generic netlink (family `netdev`,
//! Documentation/netlink/specs/netdev.yaml; Documentation/networking/napi.rst).
//!
//! Messages are written by hand: there are three, of two attributes each.

use std::io;

use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_GENERIC};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use std::time::Duration;

/// Where the kernel says which number a family has (`GENL_ID_CTRL`, `CTRL_CMD_GETFAMILY` of linux/genetlink.h).
const CONTROL: (u16, u8) = (16, 3);
const CONTROL_FAMILY_ID: u16 = 1;
const CONTROL_FAMILY_NAME: u16 = 2;

/// `NETDEV_CMD_NAPI_GET`, `NETDEV_CMD_NAPI_SET` and attributes of an instance (linux/netdev.h).
const GET: u8 = 11;
const SET: u8 = 14;
const IFINDEX: u16 = 1;
const ID: u16 = 2;
const DEFER_HARD_IRQS: u16 = 5;
const GRO_FLUSH_TIMEOUT: u16 = 6;

/// `NLM_F_REQUEST`, `NLM_F_ACK`, `NLM_F_DUMP`; `NLMSG_ERROR`, `NLMSG_DONE`.
const REQUEST: u16 = 1;
const ACK: u16 = 4;
const DUMP: u16 = 0x300;
const ERROR: u16 = 2;
const DONE: u16 = 3;

const HEADER: usize = 16;
const GENERIC_HEADER: usize = 4;
const ATTRIBUTE_HEADER: usize = 4;
/// The kernel answers at once.
const PATIENCE: Duration = Duration::from_secs(1);

/// What an instance does once it has found no more frames.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Deferral {
    /// It goes round so many times more, unasked, before it has itself called again.
    pub rounds: u32,
    /// With so many nanoseconds before each, unless a process polls it meanwhile.
    pub pause_ns: u32,
}

/// The kernel's answerer.
pub struct Napi {
    socket: Socket,
    family: u16,
}

impl Napi {
    /// Asks for the family.
    ///
    /// # Errors
    /// The system's: `NotFound` before Linux 6.3.
    pub fn new() -> io::Result<Self> {
        let mut socket = Socket::new(NETLINK_GENERIC)?;
        socket.bind_auto()?;
        socket.connect(&SocketAddr::new(0, 0))?;
        set_socket_timeout(&socket, Timeout::Recv, Some(PATIENCE))?;
        let mut napi = Self {
            socket,
            family: CONTROL.0,
        };
        let name = attribute(CONTROL_FAMILY_NAME, b"netdev\0");
        let answers = napi.ask(CONTROL.1, ACK, &name)?;
        let id = answers.iter().find_map(|a| find(a, CONTROL_FAMILY_ID));
        let id = id.and_then(|id| Some(u16::from_ne_bytes(*id.first_chunk()?)));
        napi.family = id.ok_or_else(|| io::Error::other("the kernel's answer names no family"))?;
        Ok(napi)
    }

    /// Sets what an instance does from now on. Needs CAP_NET_ADMIN.
    ///
    /// # Errors
    /// The system's: `ENOENT` for one that is not there, `EOPNOTSUPP` before Linux 6.13.
    pub fn set(&mut self, id: u32, deferral: Deferral) -> io::Result<()> {
        let attributes = [
            attribute(ID, &id.to_ne_bytes()),
            attribute(DEFER_HARD_IRQS, &deferral.rounds.to_ne_bytes()),
            attribute(GRO_FLUSH_TIMEOUT, &deferral.pause_ns.to_ne_bytes()),
        ];
        self.ask(SET, ACK, &attributes.concat()).map(drop)
    }

    /// The instances of an interface, and what they do.
    ///
    /// # Errors
    /// The system's.
    pub fn of_interface(&mut self, ifindex: u32) -> io::Result<Vec<(u32, Deferral)>> {
        let answers = self.ask(GET, DUMP, &attribute(IFINDEX, &ifindex.to_ne_bytes()))?;
        let instance = |answer: &Vec<u8>| {
            let word = |kind| {
                // Of four bytes or, the longer kind, eight.
                let value = find(answer, kind)?;
                Some(u32::from_ne_bytes(*value.first_chunk()?))
            };
            let deferral = Deferral {
                rounds: word(DEFER_HARD_IRQS).unwrap_or(0),
                pause_ns: word(GRO_FLUSH_TIMEOUT).unwrap_or(0),
            };
            Some((word(ID)?, deferral))
        };
        Ok(answers.iter().filter_map(instance).collect())
    }

    /// Asks, and collects the attributes of every answer.
    fn ask(&mut self, command: u8, flags: u16, attributes: &[u8]) -> io::Result<Vec<Vec<u8>>> {
        let len = HEADER + GENERIC_HEADER + attributes.len();
        let mut message = Vec::with_capacity(len);
        message.extend((len as u32).to_ne_bytes());
        message.extend(self.family.to_ne_bytes());
        message.extend((REQUEST | flags).to_ne_bytes());
        // Sequence and sender: one question at a time, from this socket.
        message.extend([0; 8]);
        message.extend([command, 1, 0, 0]);
        message.extend(attributes);
        self.socket.send(&message, 0)?;
        let mut answers = Vec::new();
        loop {
            let (packet, _) = self.socket.recv_from_full()?;
            let mut rest = packet.as_slice();
            while let Some((kind, body, further)) = split(rest) {
                rest = further;
                match kind {
                    DONE => return Ok(answers),
                    ERROR => {
                        let code = body.first_chunk().map_or(0, |c| i32::from_ne_bytes(*c));
                        return match code {
                            0 => Ok(answers),
                            code => Err(io::Error::from_raw_os_error(-code)),
                        };
                    }
                    _ => answers.push(body.get(GENERIC_HEADER..).unwrap_or_default().to_vec()),
                }
            }
        }
    }
}

/// The first message of a packet, its kind and body, and what follows it.
fn split(packet: &[u8]) -> Option<(u16, &[u8], &[u8])> {
    let len = u32::from_ne_bytes(*packet.first_chunk()?) as usize;
    let kind = u16::from_ne_bytes([*packet.get(4)?, *packet.get(5)?]);
    let body = packet.get(HEADER..len)?;
    let further = packet.get(len.next_multiple_of(4)..).unwrap_or_default();
    Some((kind, body, further))
}

fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    let len = ATTRIBUTE_HEADER + value.len();
    let mut bytes = Vec::with_capacity(len.next_multiple_of(4));
    bytes.extend((len as u16).to_ne_bytes());
    bytes.extend(kind.to_ne_bytes());
    bytes.extend(value);
    bytes.resize(len.next_multiple_of(4), 0);
    bytes
}

/// The value of the first attribute of this kind.
fn find(mut attributes: &[u8], kind: u16) -> Option<&[u8]> {
    loop {
        let [a, b, c, d] = *attributes.first_chunk()?;
        let len = usize::from(u16::from_ne_bytes([a, b]));
        let value = attributes.get(ATTRIBUTE_HEADER..len)?;
        if u16::from_ne_bytes([c, d]) == kind {
            return Some(value);
        }
        attributes = attributes.get(len.next_multiple_of(4)..)?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_are_found_and_nonsense_is_not() {
        let both = [attribute(1, b"abc"), attribute(2, &7u32.to_ne_bytes())].concat();
        assert_eq!(both.len(), 16);
        assert_eq!(find(&both, 1), Some(&b"abc"[..]));
        assert_eq!(find(&both, 2), Some(&7u32.to_ne_bytes()[..]));
        assert_eq!(find(&both, 3), None);
        // Lengths that reach beyond the end, or do not even cover their own header.
        for len in [0u16, 3, 17, u16::MAX] {
            let mut bad = both.clone();
            bad[..2].copy_from_slice(&len.to_ne_bytes());
            assert_eq!(find(&bad, 2), None, "{len}");
        }
        for len in [0u32, 15, 17, u32::MAX] {
            let mut bad = vec![0; 16];
            bad[..4].copy_from_slice(&len.to_ne_bytes());
            assert_eq!(split(&bad), None, "{len}");
        }
    }

    // The kernel is asked for an instance that is not there. Expect: its answer, not ours.
    #[test]
    fn the_kernel_answers() {
        let mut napi = Napi::new().unwrap();
        let refused = napi.set(u32::MAX, Deferral::default()).unwrap_err();
        let code = refused.raw_os_error();
        // Or, without a capability: not even that.
        let known = [
            libc::ENOENT,
            libc::EPERM,
            libc::EOPNOTSUPP,
            libc::ERANGE,
            libc::EINVAL,
        ];
        assert!(code.is_some_and(|code| known.contains(&code)), "{refused}");
    }
}
