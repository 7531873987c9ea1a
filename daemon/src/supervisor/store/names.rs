//! What a stored descriptor is: its name in the manager's store.
//!
//! A name is at most 255 characters without a colon (sd_notify(3)). Numbers in it are decimal. A name nobody of this version writes is
//! not ours.

use std::fmt;
use std::str::FromStr;

/// Which of a port's descriptors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum PortPart {
    /// The client half.
    Client,
    /// The engine half.
    Engine,
    /// The end of the event doorbell that the engine rings.
    Ring,
    /// The end that the application hears.
    Hear,
    /// The engine's doorbell.
    Bell,
}

impl PortPart {
    /// All of them.
    pub const ALL: [Self; 5] = [
        Self::Client,
        Self::Engine,
        Self::Ring,
        Self::Hear,
        Self::Bell,
    ];

    fn word(self) -> &'static str {
        match self {
            Self::Client => "client",
            Self::Engine => "engine",
            Self::Ring => "ring",
            Self::Hear => "hear",
            Self::Bell => "bell",
        }
    }
}

/// Which life of a port a descriptor belongs to, and who asked for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PortLife {
    /// The port.
    pub port: u16,
    /// Its generation.
    pub generation: u32,
    /// The connection that asked for it.
    pub client: u64,
    /// The number of its request; 0: it had none.
    pub request: u64,
}

/// What a stored descriptor is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Name {
    /// What the rest belongs to: versions, build, configuration.
    Manifest,
    /// The lock against a second supervisor.
    Lock,
    /// The socket applications connect to.
    Listener,
    /// The kernel's socket that holds the UDP port of a NIC queue.
    Udp(u16),
    /// The attachment of the XDP program.
    XdpLink,
    /// The program.
    XdpProgram,
    /// The map from queue to socket.
    XdpSockets,
    /// The map of counters.
    XdpCounters,
    /// The map of its errands.
    XdpErrands,
    /// An engine's ledger.
    Ledger(u8),
    /// Its UMEM.
    Umem(u8),
    /// Its socket.
    Xsk(u8),
    /// What others ring to wake it.
    Wake(u8),
    /// The ring from one engine to another.
    Crossing(u8, u8),
    /// Our end of the link to an engine's process: queue, launch, and its build.
    Link(u8, u32, u32),
    /// The pidfd of an engine's process: queue, launch.
    Process(u8, u32),
    /// The pidfd of the service.
    Service,
    /// What was found and what is drained.
    Notes,
    /// A connection.
    Client(u64),
    /// A port's memory and doorbells.
    Port(PortLife, PortPart),
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Manifest => f.write_str("manifest"),
            Self::Lock => f.write_str("lock"),
            Self::Listener => f.write_str("listener"),
            Self::Udp(queue) => write!(f, "udp-{queue}"),
            Self::XdpLink => f.write_str("xdp-link"),
            Self::XdpProgram => f.write_str("xdp-program"),
            Self::XdpSockets => f.write_str("xdp-sockets"),
            Self::XdpCounters => f.write_str("xdp-counters"),
            Self::XdpErrands => f.write_str("xdp-errands"),
            Self::Ledger(queue) => write!(f, "ledger-{queue}"),
            Self::Umem(queue) => write!(f, "umem-{queue}"),
            Self::Xsk(queue) => write!(f, "xsk-{queue}"),
            Self::Wake(queue) => write!(f, "wake-{queue}"),
            Self::Crossing(from, to) => write!(f, "crossing-{from}-{to}"),
            Self::Link(queue, launch, build) => write!(f, "link-{queue}-{launch}-{build}"),
            Self::Process(queue, launch) => write!(f, "pidfd-{queue}-{launch}"),
            Self::Service => f.write_str("service"),
            Self::Notes => f.write_str("notes"),
            Self::Client(id) => write!(f, "client-{id}"),
            Self::Port(life, part) => write!(
                f,
                "port-{}-{}-{}-{}-{}",
                life.port,
                life.generation,
                life.client,
                life.request,
                part.word()
            ),
        }
    }
}

impl FromStr for Name {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let words: Vec<&str> = text.split('-').collect();
        let name = match *words.as_slice() {
            ["manifest"] => Self::Manifest,
            ["lock"] => Self::Lock,
            ["listener"] => Self::Listener,
            ["udp", queue] => Self::Udp(number(queue)?),
            ["xdp", "link"] => Self::XdpLink,
            ["xdp", "program"] => Self::XdpProgram,
            ["xdp", "sockets"] => Self::XdpSockets,
            ["xdp", "counters"] => Self::XdpCounters,
            ["xdp", "errands"] => Self::XdpErrands,
            ["ledger", queue] => Self::Ledger(number(queue)?),
            ["umem", queue] => Self::Umem(number(queue)?),
            ["xsk", queue] => Self::Xsk(number(queue)?),
            ["wake", queue] => Self::Wake(number(queue)?),
            ["crossing", from, to] => Self::Crossing(number(from)?, number(to)?),
            ["link", queue, launch, build] => {
                Self::Link(number(queue)?, number(launch)?, number(build)?)
            }
            ["pidfd", queue, launch] => Self::Process(number(queue)?, number(launch)?),
            ["service"] => Self::Service,
            ["notes"] => Self::Notes,
            ["client", id] => Self::Client(number(id)?),
            ["port", port, generation, client, request, part] => {
                let life = PortLife {
                    port: number(port)?,
                    generation: number(generation)?,
                    client: number(client)?,
                    request: number(request)?,
                };
                let part = PortPart::ALL.into_iter().find(|one| one.word() == part);
                Self::Port(life, part.ok_or(())?)
            }
            _ => return Err(()),
        };
        // One name, one spelling: `ledger-01` is none of ours.
        if name.to_string() == text {
            Ok(name)
        } else {
            Err(())
        }
    }
}

fn number<T: FromStr>(text: &str) -> Result<T, ()> {
    text.parse().map_err(|_| ())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_they_are_written() {
        let life = PortLife {
            port: 255,
            generation: u32::MAX,
            client: u64::MAX,
            request: u64::MAX,
        };
        let mut all = vec![
            Name::Manifest,
            Name::Lock,
            Name::Listener,
            Name::Udp(3),
            Name::XdpLink,
            Name::XdpProgram,
            Name::XdpSockets,
            Name::XdpCounters,
            Name::XdpErrands,
            Name::Ledger(63),
            Name::Umem(0),
            Name::Xsk(1),
            Name::Wake(2),
            Name::Crossing(0, 1),
            Name::Link(0, u32::MAX, u32::MAX),
            Name::Process(0, 17),
            Name::Service,
            Name::Notes,
            Name::Client(u64::MAX),
        ];
        all.extend(PortPart::ALL.map(|part| Name::Port(life, part)));
        for name in all {
            let text = name.to_string();
            assert!(text.len() <= 255 && !text.contains(':'), "{text}");
            assert_eq!(text.parse(), Ok(name), "{text}");
        }
    }

    #[test]
    fn what_we_did_not_write_is_not_ours() {
        for text in [
            "",
            "stored",
            "ledger",
            "ledger-",
            "ledger-256",
            "ledger-01",
            "ledger-+1",
            "ledger-1-1",
            "port-1-2-3-4",
            "port-1-2-3-4-ro",
            "client--1",
            "xdp-other",
        ] {
            assert_eq!(text.parse::<Name>(), Err(()), "{text}");
        }
    }
}
