//! What can go wrong, whose fault it is and what to do about it.
//!
//! Both tables, [`classify`] for setting up and [`kick_verdict`] for sending,
//! are pure functions of the errno (AF_XDP.md, *Sending*, *Binding*), so that
//! every row can be tested on any kernel.

use rustix::io::Errno;

/// A step of creating or adopting a socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// Creating the UMEM's memfd.
    CreateUmem,
    /// Mapping the UMEM.
    MapUmem,
    /// `socket(AF_XDP)`.
    Socket,
    /// `XDP_UMEM_REG`: pins the UMEM.
    RegisterUmem,
    /// Setting a ring's size.
    SizeRings,
    /// Mapping a ring.
    MapRings,
    /// `bind` to a queue.
    Bind,
    /// Asking for offsets, options or statistics.
    Query,
}

impl std::fmt::Display for Operation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Operation::CreateUmem => "creating the UMEM",
            Operation::MapUmem => "mapping the UMEM",
            Operation::Socket => "creating an AF_XDP socket",
            Operation::RegisterUmem => "registering the UMEM",
            Operation::SizeRings => "setting the ring sizes",
            Operation::MapRings => "mapping the rings",
            Operation::Bind => "binding to the queue",
            Operation::Query => "querying the AF_XDP socket",
        })
    }
}

/// How to move frames between the NIC and the UMEM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum BindMode {
    /// The kernel copies (`XDP_COPY`): any driver.
    Copy,
    /// The NIC works on the UMEM (`XDP_ZEROCOPY`): fails if the driver cannot.
    ZeroCopy,
    /// Zero-copy, and copy if the driver refuses that.
    #[default]
    Auto,
}

/// What was being attempted; the context an errno is read in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Attempt {
    pub(super) ifindex: u32,
    pub(super) queue: u32,
    pub(super) mode: BindMode,
    pub(super) sg: bool,
    pub(super) umem_bytes: usize,
}

/// Why a socket could not be created or adopted. One line each, with the remedy.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum XskError {
    /// The kernel has no AF_XDP.
    #[error(
        "this kernel has no AF_XDP sockets ({errno}): use a kernel of at least 5.15 with CONFIG_XDP_SOCKETS=y"
    )]
    NoAfXdp {
        /// What the kernel said.
        errno: Errno,
    },
    /// A capability is missing.
    #[error(
        "{operation}: no privilege ({errno}): grant {capability} to portoland (AmbientCapabilities= in its unit) or run it as root"
    )]
    NoPrivilege {
        /// What needed it.
        operation: Operation,
        /// The capability.
        capability: &'static str,
        /// What the kernel said.
        errno: Errno,
    },
    /// The UMEM may not be pinned.
    #[error(
        "registering the UMEM: {umem_bytes} bytes may not be locked in memory ({errno}): raise LimitMEMLOCK= above that, or grant CAP_IPC_LOCK"
    )]
    MemlockTooSmall {
        /// Bytes to lock.
        umem_bytes: usize,
        /// What the kernel said.
        errno: Errno,
    },
    /// The interface is gone.
    #[error(
        "interface index {ifindex} does not exist in this network namespace: check the interface's name in the configuration"
    )]
    NoSuchInterface {
        /// Its index.
        ifindex: u32,
    },
    /// The interface is down.
    #[error("interface index {ifindex} is down: `ip link set up` it")]
    InterfaceDown {
        /// Its index.
        ifindex: u32,
    },
    /// The queue does not exist.
    #[error("queue {queue} of interface index {ifindex} was refused ({errno}): most likely the interface has fewer queues; compare `ethtool -l`{}", bind_hint(.sg, .mode))]
    NoSuchQueue {
        /// The interface's index.
        ifindex: u32,
        /// The queue.
        queue: u32,
        /// Scatter/gather was asked for, which kernels before 6.6 refuse alike.
        sg: bool,
        /// The mode asked for; some drivers refuse zero-copy alike.
        mode: BindMode,
        /// What the kernel said.
        errno: Errno,
    },
    /// Another socket has the queue.
    #[error(
        "queue {queue} of interface index {ifindex} is in use by another AF_XDP socket: stop its owner (`ss --xdp -p`), or configure another queue"
    )]
    QueueBusy {
        /// The interface's index.
        ifindex: u32,
        /// The queue.
        queue: u32,
    },
    /// Zero-copy was required and is not to be had.
    #[error(
        "the driver of interface index {ifindex} cannot do AF_XDP zero-copy on queue {queue} ({errno}): configure `copy` or `auto`"
    )]
    ZeroCopyUnsupported {
        /// The interface's index.
        ifindex: u32,
        /// The queue.
        queue: u32,
        /// What the kernel said.
        errno: Errno,
    },
    /// The kernel cannot hand over a bound socket.
    #[error(
        "this kernel refuses to map the rings of a bound AF_XDP socket: taking over a socket needs a kernel of at least 6.4"
    )]
    CannotAdopt,
    /// The memory of a socket or its ownership table cannot be true.
    #[error("{0}: this socket cannot be adopted, recreate it")]
    Corrupt(&'static str),
    /// Called with something that makes no sense.
    #[error("{0}")]
    Misuse(&'static str),
    /// Any other error of the system.
    #[error("{operation}: {errno}")]
    System {
        /// What failed.
        operation: Operation,
        /// What the kernel said.
        errno: Errno,
    },
}

fn bind_hint(sg: &bool, mode: &BindMode) -> &'static str {
    match (sg, mode) {
        (true, BindMode::ZeroCopy) => {
            "; or the kernel is older than 6.6 and has no jumbo frames, or the driver refuses zero-copy: try `copy`"
        }
        (true, _) => "; or the kernel is older than 6.6 and has no jumbo frames",
        (false, BindMode::ZeroCopy) => "; or the driver refuses zero-copy: try `copy`",
        (false, _) => "",
    }
}

/// What an errno of a set-up step means.
pub(super) fn classify(operation: Operation, errno: Errno, attempt: &Attempt) -> XskError {
    let Attempt {
        ifindex,
        queue,
        mode,
        sg,
        umem_bytes,
    } = *attempt;
    match (operation, errno) {
        (Operation::Socket, Errno::AFNOSUPPORT | Errno::SOCKTNOSUPPORT | Errno::PROTONOSUPPORT) => {
            XskError::NoAfXdp { errno }
        }
        (Operation::Socket, Errno::PERM | Errno::ACCESS) => XskError::NoPrivilege {
            operation,
            capability: "CAP_NET_RAW",
            errno,
        },
        (Operation::RegisterUmem, Errno::NOBUFS | Errno::NOMEM | Errno::PERM | Errno::AGAIN) => {
            XskError::MemlockTooSmall { umem_bytes, errno }
        }
        (Operation::Bind, Errno::NODEV) => XskError::NoSuchInterface { ifindex },
        (Operation::Bind, Errno::NETDOWN) => XskError::InterfaceDown { ifindex },
        (Operation::Bind, Errno::INVAL | Errno::NXIO) => XskError::NoSuchQueue {
            ifindex,
            queue,
            sg,
            mode,
            errno,
        },
        (Operation::Bind, Errno::BUSY) => XskError::QueueBusy { ifindex, queue },
        (Operation::Bind, Errno::OPNOTSUPP) if mode != BindMode::Copy => {
            XskError::ZeroCopyUnsupported {
                ifindex,
                queue,
                errno,
            }
        }
        (Operation::Bind, Errno::PERM | Errno::ACCESS) => XskError::NoPrivilege {
            operation,
            capability: "CAP_NET_RAW",
            errno,
        },
        (Operation::MapRings, Errno::BUSY) => XskError::CannotAdopt,
        _ => XskError::System { operation, errno },
    }
}

/// True if a failed zero-copy bind is worth another try with copying.
pub(super) fn refused_zero_copy(errno: Errno) -> bool {
    // virtio-net without iommu_platform says EINVAL. A queue that does not
    // exist does too; the second try then says so again.
    matches!(errno, Errno::OPNOTSUPP | Errno::INVAL | Errno::NOSYS)
}

/// What to do after a transmit kick failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum KickVerdict {
    /// Budget spent or completion ring full: drain completions, kick again.
    Again,
    /// One frame was dropped below us, and completed: count it, and leave those who are to take the rest a moment.
    FrameLost,
    /// No memory for buffers: later.
    Later,
    /// The link is down: pause.
    LinkDown,
    /// The socket has lost its queue: rebuild it.
    Rebuild,
    /// Something else: stop using the socket.
    Failed,
}

/// What an errno of a transmit kick means.
pub(super) fn kick_verdict(errno: Errno) -> KickVerdict {
    match errno {
        Errno::AGAIN | Errno::INTR => KickVerdict::Again,
        Errno::BUSY => KickVerdict::FrameLost,
        Errno::NOBUFS | Errno::NOMEM => KickVerdict::Later,
        Errno::NETDOWN => KickVerdict::LinkDown,
        Errno::NXIO | Errno::NODEV => KickVerdict::Rebuild,
        _ => KickVerdict::Failed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ATTEMPT: Attempt = Attempt {
        ifindex: 7,
        queue: 3,
        mode: BindMode::Copy,
        sg: false,
        umem_bytes: 33_554_432,
    };

    #[test]
    fn each_errno_says_what_to_do() {
        let zero_copy = Attempt {
            mode: BindMode::ZeroCopy,
            ..ATTEMPT
        };
        let jumbo = Attempt {
            sg: true,
            ..ATTEMPT
        };
        #[rustfmt::skip]
        let table: &[(Operation, Errno, Attempt, &str)] = &[
            (Operation::Socket, Errno::AFNOSUPPORT, ATTEMPT, "CONFIG_XDP_SOCKETS"),
            (Operation::Socket, Errno::SOCKTNOSUPPORT, ATTEMPT, "CONFIG_XDP_SOCKETS"),
            (Operation::Socket, Errno::PERM, ATTEMPT, "grant CAP_NET_RAW"),
            (Operation::RegisterUmem, Errno::NOBUFS, ATTEMPT, "33554432 bytes may not be locked"),
            (Operation::RegisterUmem, Errno::NOMEM, ATTEMPT, "raise LimitMEMLOCK="),
            (Operation::RegisterUmem, Errno::PERM, ATTEMPT, "grant CAP_IPC_LOCK"),
            (Operation::Bind, Errno::NODEV, ATTEMPT, "interface index 7 does not exist"),
            (Operation::Bind, Errno::NETDOWN, ATTEMPT, "is down"),
            (Operation::Bind, Errno::INVAL, ATTEMPT, "queue 3 of interface index 7 was refused"),
            (Operation::Bind, Errno::NXIO, ATTEMPT, "ethtool -l"),
            (Operation::Bind, Errno::INVAL, jumbo, "older than 6.6"),
            (Operation::Bind, Errno::INVAL, zero_copy, "try `copy`"),
            (Operation::Bind, Errno::BUSY, ATTEMPT, "in use by another AF_XDP socket"),
            (Operation::Bind, Errno::OPNOTSUPP, zero_copy, "configure `copy` or `auto`"),
            (Operation::Bind, Errno::PERM, ATTEMPT, "grant CAP_NET_RAW"),
            (Operation::MapRings, Errno::BUSY, ATTEMPT, "at least 6.4"),
            // What nobody foresaw is at least named.
            (Operation::Bind, Errno::IO, ATTEMPT, "binding to the queue: "),
            (Operation::SizeRings, Errno::INVAL, ATTEMPT, "setting the ring sizes: "),
        ];
        for (operation, errno, attempt, expected) in table {
            let message = classify(*operation, *errno, attempt).to_string();
            assert!(
                message.contains(expected),
                "{operation:?} {errno:?}: {message}"
            );
            assert!(!message.contains('\n'), "one line: {message}");
        }
    }

    #[test]
    fn each_kick_errno_has_its_verdict() {
        for (errno, verdict) in [
            (Errno::AGAIN, KickVerdict::Again),
            (Errno::INTR, KickVerdict::Again),
            (Errno::BUSY, KickVerdict::FrameLost),
            (Errno::NOBUFS, KickVerdict::Later),
            (Errno::NOMEM, KickVerdict::Later),
            (Errno::NETDOWN, KickVerdict::LinkDown),
            (Errno::NXIO, KickVerdict::Rebuild),
            (Errno::NODEV, KickVerdict::Rebuild),
            (Errno::BADF, KickVerdict::Failed),
            (Errno::INVAL, KickVerdict::Failed),
            (Errno::OPNOTSUPP, KickVerdict::Failed),
        ] {
            assert_eq!(kick_verdict(errno), verdict, "{errno:?}");
        }
    }
}
