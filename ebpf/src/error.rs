//! What can go wrong, each in one line that says what to do.

use std::error::Error;
use std::io;

use crate::AttachMode;

/// Why steering could not be set up. Every message is one line for the administrator.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SteerError {
    /// The caller's configuration makes no sense.
    #[error("steering: {0}")]
    Config(String),
    /// Capabilities are missing (EPERM, EACCES from the system).
    #[error(
        "no privilege to {0}: run as root or with CAP_NET_ADMIN and CAP_BPF (systemd: AmbientCapabilities=)"
    )]
    NoPrivilege(&'static str),
    /// The kernel cannot do what the program needs.
    #[error("{0}")]
    Kernel(String),
    /// The program's object, built with this crate, cannot be used: a bug of ours.
    #[error("the steering program was refused, please report this: {0}")]
    Program(String),
    /// No interface of that name in this network namespace.
    #[error("no network interface `{0}` here: `ip link` lists them")]
    NoInterface(String),
    /// Another XDP program holds the interface, or one above or below it.
    #[error(
        "another XDP program is attached to {0} (`bpftool net` shows it): stop its owner, or detach it with `ip link set dev {0} xdp off` (or `xdpgeneric off`)"
    )]
    Occupied(String),
    /// The driver runs no XDP programs; generic mode would work.
    #[error("the driver of {0} has no native XDP: attach in generic mode")]
    NoNative(String),
    /// The driver refuses native XDP as the interface is configured now.
    #[error(
        "the driver of {0} refuses native XDP at this configuration ({1}): lower the MTU (`ip link set dev {0} mtu 1500`; of a veth, the peer's), turn off LRO (`ethtool -K {0} lro off`), or attach in generic mode"
    )]
    Refused(String, io::Error),
    /// Fewer queues than the driver needs for native XDP (ENOSPC).
    #[error(
        "{0} has too few queues for native XDP: `ethtool -L {0}` changes them (a veth needs as many receive queues as its peer has transmit queues)"
    )]
    TooFewQueues(String),
    /// This `Steer` is attached already.
    #[error("this steering program is attached already")]
    Attached,
    /// No such entry in the socket map.
    #[error("queue {0} is outside the {1} queues that steering serves")]
    NoQueue(u32, u16),
    /// The descriptor is no AF_XDP socket, or not a bound one.
    #[error("the descriptor for queue {0} is not a bound AF_XDP socket ({1})")]
    NoSocket(u32, io::Error),
    /// Anything else the system refused.
    #[error("cannot {0}: {1}")]
    System(&'static str, io::Error),
}

impl SteerError {
    /// From an object that cannot be read.
    pub(crate) fn object(error: &(dyn Error + 'static)) -> Self {
        Self::Program(one_line(error))
    }

    /// From a load that the system refused: of `what`, with all there is to say about it.
    pub(crate) fn load(what: &str, error: &io::Error) -> Self {
        match error.raw_os_error() {
            Some(libc::EPERM) => Self::NoPrivilege("load the steering program"),
            Some(libc::ENOSYS) => Self::Kernel(
                "this kernel has no bpf system call: it needs CONFIG_BPF_SYSCALL".to_owned(),
            ),
            // The map of AF_XDP sockets is the only unusual one.
            Some(libc::EINVAL) if what == "map `xsks`" => {
                Self::Kernel("this kernel has no AF_XDP: it needs CONFIG_XDP_SOCKETS".to_owned())
            }
            _ => Self::Program(shortened(&format!("{what}: {error}"))),
        }
    }

    /// From a failed attach.
    pub(crate) fn attach(interface: &str, mode: AttachMode, error: io::Error) -> Self {
        let name = interface.to_owned();
        match (error.raw_os_error(), mode) {
            (Some(libc::EPERM | libc::EACCES), _) => {
                Self::NoPrivilege("attach the steering program")
            }
            (Some(libc::ENODEV), _) => Self::NoInterface(name),
            (Some(libc::EBUSY | libc::EEXIST), _) => Self::Occupied(name),
            (Some(libc::EOPNOTSUPP), AttachMode::Native) => Self::NoNative(name),
            (Some(libc::EINVAL | libc::ERANGE), AttachMode::Native) => Self::Refused(name, error),
            (Some(libc::ENOSPC), AttachMode::Native) => Self::TooFewQueues(name),
            _ => Self::System("attach the steering program", error),
        }
    }

    /// From a failed change to the socket map.
    pub(crate) fn socket(queue: u32, error: &(dyn Error + 'static)) -> Self {
        match errno(error) {
            Some(code @ (libc::EOPNOTSUPP | libc::EBADF | libc::ENOTSOCK | libc::EINVAL)) => {
                Self::NoSocket(queue, io::Error::from_raw_os_error(code))
            }
            code => Self::System("change the map of sockets", os_error(code, error)),
        }
    }

    /// From anything else aya does for us.
    pub(crate) fn system(what: &'static str, error: &(dyn Error + 'static)) -> Self {
        Self::System(what, os_error(errno(error), error))
    }
}

/// The system's error number below `error`, if there is one.
fn errno(error: &(dyn Error + 'static)) -> Option<i32> {
    chain(error)
        .filter_map(|error| error.downcast_ref::<io::Error>())
        .find_map(io::Error::raw_os_error)
}

fn os_error(code: Option<i32>, error: &(dyn Error + 'static)) -> io::Error {
    code.map_or_else(
        || io::Error::other(one_line(error)),
        io::Error::from_raw_os_error,
    )
}

fn chain<'a>(error: &'a (dyn Error + 'static)) -> impl Iterator<Item = &'a (dyn Error + 'static)> {
    std::iter::successors(Some(error), |error: &&'a (dyn Error + 'static)| {
        (*error).source()
    })
}

/// The whole chain in one line.
fn one_line(error: &(dyn Error + 'static)) -> String {
    let text: Vec<String> = chain(error).map(ToString::to_string).collect();
    shortened(&text.join(": "))
}

/// In one line of bounded length: the verifier's log alone may fill screens, and its end is what tells.
fn shortened(text: &str) -> String {
    const KEEP: usize = 300;
    let words: Vec<&str> = text.split_whitespace().collect();
    let line = words.join(" ");
    let length = line.chars().count();
    if length <= 2 * KEEP {
        return line;
    }
    let head: String = line.chars().take(KEEP).collect();
    let tail: String = line.chars().skip(length - KEEP).collect();
    format!("{head} ... {tail}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use AttachMode::{Generic, Native};

    fn attach(mode: AttachMode, code: i32) -> SteerError {
        SteerError::attach("eth0", mode, io::Error::from_raw_os_error(code))
    }

    #[test]
    fn attach_errors_say_what_to_do() {
        for (error, hint) in [
            (attach(Native, libc::EBUSY), "xdp off"),
            (attach(Generic, libc::EEXIST), "bpftool net"),
            (attach(Native, libc::EPERM), "CAP_NET_ADMIN and CAP_BPF"),
            (attach(Native, libc::ENODEV), "ip link"),
            (attach(Native, libc::EOPNOTSUPP), "generic"),
            (attach(Native, libc::ERANGE), "mtu"),
            (attach(Native, libc::EINVAL), "mtu"),
            (attach(Native, libc::ENOSPC), "ethtool -L"),
            (attach(Generic, libc::ENOMEM), "attach"),
        ] {
            let text = error.to_string();
            assert!(text.contains(hint), "{text}");
            assert!(!text.contains('\n'), "{text}");
        }
    }

    #[test]
    fn load_errors_say_what_to_do() {
        let no_map = "map `xsks`";
        for (code, what, hint) in [
            (libc::EPERM, no_map, "CAP_BPF"),
            (libc::EINVAL, no_map, "CONFIG_XDP_SOCKETS"),
            (libc::ENOSYS, "", "CONFIG_BPF_SYSCALL"),
            (libc::EINVAL, "program `steer`", "report"),
        ] {
            let error = io::Error::from_raw_os_error(code);
            let text = SteerError::load(what, &error).to_string();
            assert!(text.contains(hint), "{text}");
        }
    }

    // What the verifier says fills screens. Expect: one line, begin and end.
    #[test]
    fn a_long_log_is_one_line() {
        let what = format!("begin\n{}\nR1 is wrong", "0: R1=ctx()\n".repeat(10_000));
        let error = io::Error::from_raw_os_error(libc::EACCES);
        let text = SteerError::load(&what, &error).to_string();
        assert!(
            text.contains("begin 0:") && text.contains("R1 is wrong: Permission"),
            "{text}"
        );
        assert!(text.len() < 1000 && !text.contains('\n'), "{text}");
    }

    // aya wraps the system's error in others; it must still be found.
    #[test]
    fn errno_is_found_through_aya() {
        let error = aya::EbpfError::MapError(aya::maps::MapError::CreateError {
            name: "xsks".to_owned(),
            io_error: io::Error::from_raw_os_error(libc::EBADF),
        });
        let error = SteerError::socket(0, &error);
        assert!(matches!(error, SteerError::NoSocket(0, _)), "{error}");
    }
}
