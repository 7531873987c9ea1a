//! Where in the file things are said, so that what shows only when the daemon starts is told with its line, too.

use std::fmt;
use std::path::PathBuf;

use toml::Spanned;

use super::checker::Checker;
use super::file::File;
use crate::xsk::XskError;
use portolan_ebpf::SteerError;

/// A value that the machine may turn out not to go with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Key {
    /// `cluster.udp_port`
    UdpPort,
    /// `node.socket`
    Socket,
    /// `network.interface`
    Interface,
    /// `network.address`
    Address,
    /// `network.queues`
    Queues,
    /// `network.mode`
    Mode,
    /// `network.xdp`
    Xdp,
    /// `engine.umem_frames`
    UmemFrames,
}

/// Lines of values; of one that is not in the file, that of the one beside it that must be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Places {
    file: PathBuf,
    lines: [usize; 8],
}

impl Places {
    pub(super) fn find(checker: &Checker<'_>, file: &File) -> Self {
        fn span<T>(value: Option<&Spanned<T>>) -> Option<std::ops::Range<usize>> {
            value.map(Spanned::span)
        }
        let (network, node) = (&file.network, &file.node);
        let line = |given: Option<std::ops::Range<usize>>, beside: &Spanned<String>| {
            checker.line(&given.unwrap_or_else(|| beside.span()))
        };
        let interface = &network.interface;
        Self {
            file: checker.file.to_owned(),
            lines: [
                line(span(file.cluster.udp_port.as_ref()), &file.cluster.name),
                line(span(node.socket.as_ref()), &node.name),
                line(None, interface),
                line(span(network.address.as_ref()), interface),
                line(span(network.queues.as_ref()), interface),
                line(span(network.mode.as_ref()), interface),
                line(span(network.xdp.as_ref()), interface),
                line(span(file.engine.umem_frames.as_ref()), &node.name),
            ],
        }
    }

    /// A complaint with its place: `FILE:LINE: what; what to do`.
    pub fn error(&self, key: Key, what: impl fmt::Display) -> anyhow::Error {
        let line = self.lines.get(key as usize).copied().unwrap_or(1);
        anyhow::anyhow!("{}:{line}: {what}", self.file.display())
    }

    /// A complaint of the steering, with its place if the file is at fault.
    pub fn steering(&self, error: SteerError) -> anyhow::Error {
        match error {
            SteerError::Occupied(_) | SteerError::NoInterface(_) => {
                self.error(Key::Interface, error)
            }
            SteerError::NoNative(_) | SteerError::Refused(..) | SteerError::TooFewQueues(_) => {
                self.error(Key::Xdp, error)
            }
            other => other.into(),
        }
    }

    /// A complaint about a socket, with its place if the file is at fault.
    pub fn socket(&self, error: XskError) -> anyhow::Error {
        match error {
            XskError::NoSuchInterface { .. } | XskError::InterfaceDown { .. } => {
                self.error(Key::Interface, error)
            }
            XskError::NoSuchQueue { .. } | XskError::QueueBusy { .. } => {
                self.error(Key::Queues, error)
            }
            XskError::ZeroCopyUnsupported { .. } => self.error(Key::Mode, error),
            XskError::MemlockTooSmall { .. } => self.error(Key::UmemFrames, error),
            other => other.into(),
        }
    }
}
