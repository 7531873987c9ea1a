//! The loader: configuration into the program, the program into the kernel and onto an interface.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use aya::maps::{Array, Map, MapData, MapError, PerCpuArray, XskMap};
use aya::util::KernelVersion;

use crate::link::{self, AttachMode};
use crate::object::{self, Loaded};
use crate::{Reason, SteerConfig, SteerError};

/// What a frame consists of when the program sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Frames {
    /// One buffer. In native mode longer frames do not come. In generic mode the kernel copies what is in several into one, and what lacks
    /// room before it: for frames that fit a page that takes it less than to make pages of a pool of them, as it does for the other
    /// (net/core/dev.c, `netif_skb_check_for_xdp`).
    OfOneBuffer,
    /// One or several, from Linux 5.18 on.
    OfSeveralBuffers,
}

/// The program loaded, perhaps attached.
///
/// Dropping it detaches the program, unless a copy of its link ([`Steer::fds`]) is kept elsewhere.
/// A child process that another thread is just starting is such a place until it calls exec: an
/// attach that follows at once may meet [`SteerError::Occupied`] for that moment.
pub struct Steer {
    program: OwnedFd,
    queues: u16,
    xsks: XskMap<MapData>,
    xsks_fd: OwnedFd,
    counters: PerCpuArray<MapData, u64>,
    counters_fd: OwnedFd,
    errands: Option<(Array<MapData, u32>, OwnedFd)>,
    link: Option<OwnedFd>,
}

/// What keeps a loaded and attached program going when its loader is gone, and lets another go on with it.
#[derive(Debug)]
pub struct SteerFds {
    /// The attachment.
    pub link: OwnedFd,
    /// The program.
    pub program: OwnedFd,
    /// The map from queue to socket.
    pub sockets: OwnedFd,
    /// The map of counters.
    pub counters: OwnedFd,
    /// The map of errands; a program of an older build has none.
    pub errands: Option<OwnedFd>,
}

impl Steer {
    /// Goes on with what another process loaded and attached, for so many `queues`.
    ///
    /// # Errors
    /// The caller's: descriptors of something else. The system's.
    pub fn adopt(fds: SteerFds, queues: u16) -> Result<Self, SteerError> {
        let loaded = Loaded {
            program: fds.program,
            sockets: fds.sockets,
            counters: fds.counters,
            errands: fds.errands,
        };
        Self::of(loaded, queues, Some(fds.link))
    }

    fn of(loaded: Loaded, queues: u16, link: Option<OwnedFd>) -> Result<Self, SteerError> {
        let wrong = |error: &(dyn std::error::Error + 'static)| {
            SteerError::system("take over the steering maps", error)
        };
        let map =
            |fd: &OwnedFd| MapData::from_fd(clone_fd(fd.as_fd())?).map_err(|error| wrong(&error));
        let errands = match loaded.errands {
            None => None,
            Some(fd) => {
                let map = Map::Array(map(&fd)?);
                Some((map.try_into().map_err(|error| wrong(&error))?, fd))
            }
        };
        Ok(Self {
            xsks: Map::XskMap(map(&loaded.sockets)?)
                .try_into()
                .map_err(|error| wrong(&error))?,
            counters: Map::PerCpuArray(map(&loaded.counters)?)
                .try_into()
                .map_err(|error| wrong(&error))?,
            program: loaded.program,
            queues,
            xsks_fd: loaded.sockets,
            counters_fd: loaded.counters,
            errands,
            link,
        })
    }

    /// Copies of the descriptors for [`Steer::adopt`]; `None` before [`Steer::attach`]. The program stays attached as long as any
    /// copy of the link is open.
    ///
    /// # Errors
    /// The system's: [`SteerError::System`].
    pub fn fds(&self) -> Result<Option<SteerFds>, SteerError> {
        let Some(link) = &self.link else {
            return Ok(None);
        };
        Ok(Some(SteerFds {
            link: clone_fd(link.as_fd())?,
            program: clone_fd(self.program.as_fd())?,
            sockets: clone_fd(self.xsks_fd.as_fd())?,
            counters: clone_fd(self.counters_fd.as_fd())?,
            errands: match &self.errands {
                Some((_, fd)) => Some(clone_fd(fd.as_fd())?),
                None => None,
            },
        }))
    }

    /// The index of the interface the program is attached to; 0 if it is not, or not any more: the interface is gone, or somebody
    /// detached it.
    ///
    /// # Errors
    /// The system's: [`SteerError::System`].
    pub fn attached_to(&self) -> Result<u32, SteerError> {
        self.link.as_ref().map_or(Ok(0), |link| {
            link::attached_to(link.as_fd())
                .map_err(|error| SteerError::System("ask about the attachment", error))
        })
    }

    /// Loads the program with this configuration, for frames of several buffers, into the kernel. Needs CAP_BPF and
    /// CAP_NET_ADMIN.
    ///
    /// # Errors
    /// The caller's: [`SteerError::Config`]. The system's: [`SteerError::NoPrivilege`],
    /// [`SteerError::Kernel`], [`SteerError::System`]. Ours: [`SteerError::Program`].
    pub fn load(config: &SteerConfig) -> Result<Self, SteerError> {
        Self::load_for(config, Frames::OfSeveralBuffers)
    }

    /// The same, for frames that consist of this when the program sees them.
    ///
    /// # Errors
    /// As [`Steer::load`].
    pub fn load_for(config: &SteerConfig, frames: Frames) -> Result<Self, SteerError> {
        let version = KernelVersion::current().map_err(|error| {
            SteerError::Kernel(format!("cannot tell the kernel's version: {error}"))
        })?;
        let name = program_for(version, frames)?;
        let loaded = object::load(name, &config.rodata()?)?;
        Self::of(loaded, config.queues, None)
    }

    /// Attaches the program to `interface` of the calling thread's network namespace. Never
    /// replaces another program. If [`AttachMode::Native`] is refused the caller may try
    /// [`AttachMode::Generic`].
    ///
    /// # Errors
    /// The caller's: [`SteerError::Attached`], [`SteerError::NoInterface`]. The system's:
    /// [`SteerError::Occupied`], [`SteerError::NoNative`], [`SteerError::Refused`],
    /// [`SteerError::TooFewQueues`], [`SteerError::NoPrivilege`], [`SteerError::System`].
    pub fn attach(&mut self, interface: &str, mode: AttachMode) -> Result<(), SteerError> {
        if self.link.is_some() {
            return Err(SteerError::Attached);
        }
        let index = link::interface_index(interface)
            .ok_or_else(|| SteerError::NoInterface(interface.to_owned()))?;
        let link = link::create(self.program.as_fd(), index, mode)
            .map_err(|error| SteerError::attach(interface, mode, error))?;
        self.link = Some(link);
        Ok(())
    }

    /// Lets go of the interface, or of what is left of it, also if copies of the link ([`Steer::fds`]) are kept elsewhere. The program
    /// and its maps stay loaded for another [`Steer::attach`].
    pub fn detach(&mut self) {
        if let Some(link) = self.link.take() {
            // It was on none any more: as good.
            let _ = link::detach(link.as_fd());
        }
    }

    /// Sends our frames of `queue` to `xsk`, an AF_XDP socket bound to that queue, in place of
    /// any socket before it. The entry goes away with the socket's last descriptor.
    ///
    /// # Errors
    /// The caller's: [`SteerError::NoQueue`], [`SteerError::NoSocket`]. The system's:
    /// [`SteerError::System`].
    pub fn insert(&mut self, queue: u32, xsk: BorrowedFd<'_>) -> Result<(), SteerError> {
        self.check_queue(queue)?;
        self.xsks
            .set(queue, xsk.as_raw_fd(), 0)
            .map_err(|error| SteerError::socket(queue, &error))
    }

    /// From now on drops and counts our frames of `queue`. Removing what is not there is fine.
    ///
    /// # Errors
    /// The caller's: [`SteerError::NoQueue`]. The system's: [`SteerError::System`].
    pub fn remove(&mut self, queue: u32) -> Result<(), SteerError> {
        self.check_queue(queue)?;
        self.xsks
            .unset(queue)
            .map_err(|error| SteerError::socket(queue, &error))
    }

    /// The next frame of ours on `queue` is not for its socket: it becomes an empty UDP datagram to this port of everybody here, for a
    /// socket of the kernel's that is to have received through that queue. Port 0: no frame is, if none has been yet.
    ///
    /// # Errors
    /// The caller's: [`SteerError::NoQueue`]. The system's: [`SteerError::System`], also for the program of an older build, which runs no
    /// errands.
    pub fn send_on_errand(&mut self, queue: u32, port: u16) -> Result<(), SteerError> {
        self.check_queue(queue)?;
        let what = "ask the program for a frame";
        let Some((errands, _)) = &mut self.errands else {
            let older = io::Error::other("it is of an older build; stop and start the daemon");
            return Err(SteerError::System(what, older));
        };
        let port = u32::from(port.to_be());
        errands
            .set(queue, port, 0)
            .map_err(|error| SteerError::system(what, &error))
    }

    /// Frames by reason since the load, all CPUs together, in the order of [`Reason::ALL`].
    ///
    /// # Errors
    /// The system's: [`SteerError::System`].
    pub fn counters(&self) -> Result<Vec<(Reason, u64)>, SteerError> {
        let read = |reason: &Reason| {
            let per_cpu = match self.counters.get(&(*reason as u32), 0) {
                // The program of an older build, which knows fewer reasons.
                Err(MapError::KeyNotFound | MapError::OutOfBounds { .. }) => {
                    return Ok((*reason, 0));
                }
                other => other
                    .map_err(|error| SteerError::system("read the steering counters", &error))?,
            };
            let sum = per_cpu.iter().fold(0u64, |sum, n| sum.wrapping_add(*n));
            Ok((*reason, sum))
        };
        Reason::ALL.iter().map(read).collect()
    }

    fn check_queue(&self, queue: u32) -> Result<(), SteerError> {
        if queue < u32::from(self.queues) {
            return Ok(());
        }
        Err(SteerError::NoQueue(queue, self.queues))
    }
}

impl fmt::Debug for Steer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Steer")
            .field("queues", &self.queues)
            .field("link", &self.link)
            .finish_non_exhaustive()
    }
}

/// The program of the object that this kernel loads (5.15 is the oldest).
fn program_for(version: KernelVersion, frames: Frames) -> Result<&'static str, SteerError> {
    if version < KernelVersion::new(5, 15, 0) {
        return Err(SteerError::Kernel(format!(
            "kernel {version} is too old: AF_XDP as Portolan uses it needs 5.15 or newer"
        )));
    }
    // XDP programs for frames of several buffers came with 5.18.
    if version < KernelVersion::new(5, 18, 0) || frames == Frames::OfOneBuffer {
        return Ok("steer_linear");
    }
    Ok("steer")
}

fn clone_fd(fd: BorrowedFd<'_>) -> Result<OwnedFd, SteerError> {
    fd.try_clone_to_owned()
        .map_err(|error: io::Error| SteerError::System("copy a descriptor", error))
}

/// The name of a loaded BPF program; `None` if there is none of that id, or we may not ask.
pub fn program_name(id: u32) -> Option<String> {
    let mut loaded = aya::programs::loaded_programs().filter_map(Result::ok);
    let program = loaded.find(|program| program.id() == id)?;
    program.name_as_str().map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn program_by_kernel() {
        let program = |minor, frames| program_for(KernelVersion::new(5, minor, 0), frames);
        assert!(program(14, Frames::OfSeveralBuffers).is_err());
        assert!(program(14, Frames::OfOneBuffer).is_err());
        for frames in [Frames::OfOneBuffer, Frames::OfSeveralBuffers] {
            assert_eq!(program(15, frames).unwrap(), "steer_linear");
        }
        assert_eq!(program(18, Frames::OfSeveralBuffers).unwrap(), "steer");
        assert_eq!(program(18, Frames::OfOneBuffer).unwrap(), "steer_linear");
    }
}
