//! What must survive an engine: its ledger, UMEM, socket and eventfds; and the memory of ports.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use portolan_abi::ledger::{LedgerGeometry, pair, unpair};
use portolan_abi::memory::{
    ClientHalf, EngineHalf, LedgerMapping, create_sealed, reopen_read_only,
};
use portolan_abi::port::{CloseReason, PortGeometry, state};
use rustix::event::EventfdFlags;
use rustix::net::{AddressFamily, SocketFlags, SocketType};

use super::store::PortPart;
use crate::engine::crossing::CROSSING_BYTES;

/// What one engine works on, whichever process that is.
pub struct QueueMemory {
    /// The ledger's memfd.
    pub ledger_fd: Arc<OwnedFd>,
    /// The ledger.
    pub ledger: LedgerMapping,
    /// Its layout.
    pub geometry: LedgerGeometry,
    /// The UMEM's memfd.
    pub umem: Arc<OwnedFd>,
    /// The AF_XDP socket.
    pub xsk: Arc<OwnedFd>,
    /// What other engines ring.
    pub wake: Arc<OwnedFd>,
    /// The NIC works on the UMEM itself.
    pub zero_copy: bool,
}

/// Makes the ledger of one engine, initialised.
///
/// # Errors
/// The system's.
pub fn create_ledger(
    geometry: LedgerGeometry,
    incarnation: u64,
) -> io::Result<(OwnedFd, LedgerMapping)> {
    let fd = LedgerMapping::create(geometry)?;
    let mapping = LedgerMapping::map(&fd, geometry)?;
    mapping.ledger().initialise(incarnation);
    Ok((fd, mapping))
}

impl QueueMemory {
    /// The ledger, mapped once more.
    ///
    /// # Errors
    /// The system's.
    pub fn map_again(&self) -> io::Result<LedgerMapping> {
        LedgerMapping::map(&*self.ledger_fd, self.geometry)
    }

    /// The port's life as journalled: {generation, state}.
    pub fn port_life(&self, port: u16) -> (u32, u32) {
        let record = self.ledger.ledger().ports().get(usize::from(port));
        record.map_or((0, 0), |record| unpair(record.life.load(Ordering::Acquire)))
    }

    /// Journals the port's life. One store, ours alone.
    pub fn set_port_life(&self, port: u16, generation: u32, state: u32) {
        if let Some(record) = self.ledger.ledger().ports().get(usize::from(port)) {
            record
                .life
                .store(pair(generation, state), Ordering::Release);
        }
    }
}

/// The rings by which frames cross between the engines of this node.
pub struct Crossings {
    engines: usize,
    /// From engine i to engine j at `i * engines + j`; none from one to itself.
    rings: Vec<Option<Arc<OwnedFd>>>,
}

impl Crossings {
    /// Makes the rings between `engines` engines.
    ///
    /// # Errors
    /// The system's.
    pub fn create(engines: usize) -> io::Result<Self> {
        let mut rings = Vec::with_capacity(engines * engines);
        for index in 0..engines * engines {
            let itself = index / engines == index % engines;
            let ring = (!itself).then(|| create_sealed("portolan-crossing", CROSSING_BYTES));
            rings.push(ring.transpose()?.map(Arc::new));
        }
        Ok(Self { engines, rings })
    }

    /// A predecessor's rings; `None` if one is missing.
    pub fn restore(engines: usize, mut left: BTreeMap<(u8, u8), OwnedFd>) -> Option<Self> {
        let mut rings = Vec::with_capacity(engines * engines);
        for index in 0..engines * engines {
            let (from, to) = (index / engines, index % engines);
            let ring = left.remove(&(from as u8, to as u8));
            if ring.is_none() && from != to {
                return None;
            }
            rings.push(ring.map(Arc::new));
        }
        Some(Self { engines, rings })
    }

    /// Every ring, by the engines it leads from and to.
    pub fn iter(&self) -> impl Iterator<Item = ((u8, u8), Arc<OwnedFd>)> + '_ {
        self.rings.iter().enumerate().filter_map(|(index, ring)| {
            let ends = ((index / self.engines) as u8, (index % self.engines) as u8);
            Some((ends, Arc::clone(ring.as_ref()?)))
        })
    }

    /// The descriptors for one engine, in the order of `ToEngine::Start`.
    pub fn of(&self, engine: usize) -> impl Iterator<Item = Arc<OwnedFd>> + '_ {
        let ring = |from: usize, to: usize| self.rings.get(from * self.engines + to);
        (0..self.engines)
            .flat_map(move |other| [ring(other, engine), ring(engine, other)])
            .filter_map(|ring| ring.and_then(Clone::clone))
    }
}

/// An eventfd that never blocks.
///
/// # Errors
/// The system's.
pub fn eventfd() -> io::Result<OwnedFd> {
    let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
    Ok(rustix::event::eventfd(0, flags)?)
}

/// The memory and doorbells of one port.
#[derive(Debug)]
pub struct PortMemory {
    /// Layout.
    pub geometry: PortGeometry,
    client_half: Arc<OwnedFd>,
    engine_half: Arc<OwnedFd>,
    /// Engine → application: the end that rings, and the application's. A stream socket pair and not an eventfd, because an
    /// application could make an eventfd blocking for whoever rings it (see `engine/bell.rs`).
    event_doorbell: [Arc<OwnedFd>; 2],
    engine_doorbell: Arc<OwnedFd>,
}

impl PortMemory {
    /// Makes the memory of a port, ready for its engine. The geometry is valid.
    ///
    /// # Errors
    /// The system's.
    pub fn create(node: u16, port: u16, geometry: PortGeometry) -> io::Result<Self> {
        let client_half = create_sealed("portolan-client-half", geometry.client_half_bytes())?;
        let engine_half = create_sealed("portolan-engine-half", geometry.engine_half_bytes())?;
        ClientHalf::map(client_half.as_fd(), geometry)?.initialise();
        EngineHalf::map(engine_half.as_fd(), geometry, true)?.initialise(node, port);
        let (ringing, hearing) = rustix::net::socketpair(
            AddressFamily::UNIX,
            SocketType::STREAM,
            SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
            None,
        )?;
        Ok(Self {
            geometry,
            client_half: Arc::new(client_half),
            engine_half: Arc::new(engine_half),
            event_doorbell: [Arc::new(ringing), Arc::new(hearing)],
            engine_doorbell: Arc::new(eventfd()?),
        })
    }

    /// The memory of a port that a predecessor made, from what it stored. Its layout is what the engine half says, as far as sizes agree. Nothing is mapped: a
    /// supervisor that comes back does this for every port, on processors that carry messages.
    ///
    /// # Errors
    /// It is not the memory of one port; or the system's.
    pub fn restore(node: u16, port: u16, parts: [OwnedFd; 5]) -> io::Result<Self> {
        let [client_half, engine_half, ringing, hearing, bell] = parts;
        let geometry = EngineHalf::recognise(engine_half.as_fd(), node, port)?;
        ClientHalf::verify(client_half.as_fd(), &geometry)?;
        Ok(Self {
            geometry,
            client_half: Arc::new(client_half),
            engine_half: Arc::new(engine_half),
            event_doorbell: [Arc::new(ringing), Arc::new(hearing)],
            engine_doorbell: Arc::new(bell),
        })
    }

    /// What must be stored, for [`Self::restore`].
    pub fn parts(&self) -> [(PortPart, Arc<OwnedFd>); 5] {
        let [ringing, hearing] = &self.event_doorbell;
        [
            (PortPart::Client, Arc::clone(&self.client_half)),
            (PortPart::Engine, Arc::clone(&self.engine_half)),
            (PortPart::Ring, Arc::clone(ringing)),
            (PortPart::Hear, Arc::clone(hearing)),
            (PortPart::Bell, Arc::clone(&self.engine_doorbell)),
        ]
    }

    /// Writes our words in the engine half again if an engine that went wrong has written over them; says whether it had.
    ///
    /// # Errors
    /// The system's.
    pub fn mend(&self, node: u16, port: u16) -> io::Result<bool> {
        EngineHalf::mend(self.engine_half.as_fd(), self.geometry, node, port)
    }

    /// The descriptors for the engine.
    pub fn for_engine(&self) -> Vec<Arc<OwnedFd>> {
        self.fds(&self.engine_half, &self.event_doorbell[0])
    }

    /// The descriptors for the application: the engine half read-only.
    ///
    /// # Errors
    /// The system's.
    pub fn for_application(&self) -> io::Result<Vec<Arc<OwnedFd>>> {
        let read_only = Arc::new(reopen_read_only(self.engine_half.as_fd())?);
        Ok(self.fds(&read_only, &self.event_doorbell[1]))
    }

    fn fds(&self, engine_half: &Arc<OwnedFd>, events: &Arc<OwnedFd>) -> Vec<Arc<OwnedFd>> {
        [
            &self.client_half,
            engine_half,
            events,
            &self.engine_doorbell,
        ]
        .map(Arc::clone)
        .to_vec()
    }

    /// Tells the application that the port is open, unless its engine has already told it more.
    ///
    /// # Errors
    /// The system's.
    pub fn mark_open(&self) -> io::Result<()> {
        let half = EngineHalf::map(self.engine_half.as_fd(), self.geometry, true)?;
        let (opening, open) = (u64::from(state::OPENING), u64::from(state::OPEN));
        let word = &half.header().state;
        // Either way it is not OPENING any more.
        let _ = word.compare_exchange(opening, open, Ordering::AcqRel, Ordering::Acquire);
        Ok(())
    }

    /// Tells the application that the port is closed and wakes it, for an engine that could not.
    ///
    /// # Errors
    /// The system's.
    pub fn mark_closed(&self, reason: CloseReason) -> io::Result<()> {
        let half = EngineHalf::map(self.engine_half.as_fd(), self.geometry, true)?;
        let word = &half.header().state;
        let (_, now) = unpair(word.load(Ordering::Acquire));
        if now != state::CLOSED {
            word.store(pair(reason as u32, state::CLOSED), Ordering::Release);
        }
        crate::engine::bell::ring(self.event_doorbell[0].as_fd());
        // Who naps looks again by himself in a moment: his half is his, and no place for a supervisor to write.
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crossings_are_ordered_as_start_says() {
        let crossings = Crossings::create(3).unwrap();
        let ring = |from: usize, to: usize| crossings.rings[from * 3 + to].clone().unwrap();
        let of_one: Vec<Arc<OwnedFd>> = crossings.of(1).collect();
        let expected = [ring(0, 1), ring(1, 0), ring(2, 1), ring(1, 2)];
        assert_eq!(of_one.len(), expected.len());
        for (a, b) in of_one.iter().zip(&expected) {
            assert!(Arc::ptr_eq(a, b));
        }
        assert_eq!(Crossings::create(1).unwrap().of(0).count(), 0);
    }

    #[test]
    fn an_engine_that_closed_a_port_is_not_overruled() {
        let geometry = PortGeometry::new(4, 4, 4096).unwrap();
        let memory = PortMemory::create(1, 7, geometry).unwrap();
        let half = EngineHalf::map(memory.engine_half.as_fd(), geometry, true).unwrap();
        let word = || unpair(half.header().state.load(Ordering::Acquire));
        memory.mark_open().unwrap();
        assert_eq!(word(), (0, state::OPEN));
        // The engine closes it for cause.
        let closed = pair(CloseReason::RingJump as u32, state::CLOSED);
        half.header().state.store(closed, Ordering::Release);
        memory.mark_open().unwrap();
        memory.mark_closed(CloseReason::OwnerGone).unwrap();
        assert_eq!(word(), (CloseReason::RingJump as u32, state::CLOSED));
    }

    fn copies(memory: &PortMemory) -> [OwnedFd; 5] {
        memory.parts().map(|(_, fd)| fd.try_clone().unwrap())
    }

    // A port's parts, for the same and for another port and node; with another port's client half; with a head over which an engine has
    // written, word by word. Expect: only the first is gone on with.
    #[test]
    fn only_a_ports_own_memory_is_gone_on_with() {
        let geometry = PortGeometry::new(4, 8, 8192).unwrap();
        let memory = PortMemory::create(1, 7, geometry).unwrap();
        assert_eq!(
            PortMemory::restore(1, 7, copies(&memory)).unwrap().geometry,
            geometry
        );
        assert!(PortMemory::restore(2, 7, copies(&memory)).is_err());
        assert!(PortMemory::restore(1, 8, copies(&memory)).is_err());
        let larger = PortGeometry::new(4, 8, 16384).unwrap();
        let other = PortMemory::create(1, 7, larger).unwrap();
        let [strange, ..] = copies(&other);
        let mut parts = copies(&memory);
        parts[0] = strange;
        assert!(PortMemory::restore(1, 7, parts).is_err());
        let half = EngineHalf::map(memory.engine_half.as_fd(), geometry, true).unwrap();
        let header = half.header();
        let halves = [
            &header.version,
            &header.send_tokens,
            &header.receive_tokens,
            &header.port,
            &header.node,
        ];
        for word in halves {
            word.fetch_xor(1 << 20, Ordering::Relaxed);
            assert!(PortMemory::restore(1, 7, copies(&memory)).is_err());
            assert!(memory.mend(1, 7).unwrap());
            assert!(!memory.mend(1, 7).unwrap());
        }
        // Another geometry that fits the client half as well.
        let tempting = PortGeometry::new(4, 64, 8192).unwrap();
        assert_eq!(tempting.client_half_bytes(), geometry.client_half_bytes());
        assert_ne!(tempting.engine_half_bytes(), geometry.engine_half_bytes());
        header.receive_tokens.store(64, Ordering::Relaxed);
        assert!(PortMemory::restore(1, 7, copies(&memory)).is_err());
        assert!(memory.mend(1, 7).unwrap());
        for word in [&header.magic, &header.arena_bytes] {
            word.fetch_xor(1 << 12, Ordering::Relaxed);
            assert!(PortMemory::restore(1, 7, copies(&memory)).is_err());
            assert!(memory.mend(1, 7).unwrap());
        }
        assert!(PortMemory::restore(1, 7, copies(&memory)).is_ok());
    }

    // What is no memory at all, or of no size. Expect: an error.
    #[test]
    fn what_is_no_memory_is_refused() {
        let [a, b] = [(); 2].map(|()| create_sealed("portolan-test", 0).unwrap());
        let bells = [(); 3].map(|()| eventfd().unwrap());
        let [c, d, e] = bells;
        assert!(PortMemory::restore(1, 7, [a, b, c, d, e]).is_err());
        let [a, b, c, d, e] = [(); 5].map(|()| eventfd().unwrap());
        assert!(PortMemory::restore(1, 7, [a, b, c, d, e]).is_err());
    }
}
