//! The engine's tests that need a port and a ledger: what survives an engine, in real memory, without processes.

mod alike;
mod answers;
mod crash;
mod ends;
mod hostile;
mod questions;
mod stops;
mod wakes;

use std::os::fd::{AsFd, OwnedFd};

use portolan_abi::ledger::LedgerGeometry;
use portolan_abi::memory::{ClientHalf, EngineHalf, LedgerMapping, create_sealed};
use portolan_abi::port::PortGeometry;
use portolan_transport::host::Durable;
use portolan_transport::ident::{NodeId, PortId, Priority, StreamKey};

use super::host::EngineHost;
use super::ledger_facts::Facts;
use super::ports::PortParts;
use super::restore;

const PORT: u16 = 7;
const GENERATION: u32 = 3;

fn ledger_geometry() -> LedgerGeometry {
    LedgerGeometry {
        peers: 2,
        send_streams: 4,
        receive_streams: 4,
        frames: 8,
    }
}

fn port_geometry() -> PortGeometry {
    PortGeometry::new(2, 2, 8192).unwrap()
}

/// What survives every death.
struct Memory {
    geometry: PortGeometry,
    ledger: OwnedFd,
    client: OwnedFd,
    engine: OwnedFd,
}

impl Memory {
    fn new() -> Self {
        Self::of(port_geometry())
    }

    fn of(geometry: PortGeometry) -> Self {
        let memory = Self {
            geometry,
            ledger: LedgerMapping::create(ledger_geometry()).unwrap(),
            client: create_sealed("c", geometry.client_half_bytes()).unwrap(),
            engine: create_sealed("e", geometry.engine_half_bytes()).unwrap(),
        };
        let ledger = LedgerMapping::map(&memory.ledger, ledger_geometry()).unwrap();
        ledger.ledger().initialise(77);
        let (client, engine) = memory.halves();
        client.initialise();
        engine.initialise(1, PORT);
        memory
    }

    fn halves(&self) -> (ClientHalf, EngineHalf) {
        (
            ClientHalf::map(self.client.as_fd(), self.geometry).unwrap(),
            EngineHalf::map(self.engine.as_fd(), self.geometry, true).unwrap(),
        )
    }

    fn parts(&self) -> PortParts {
        let bell = || rustix::event::eventfd(0, rustix::event::EventfdFlags::NONBLOCK).unwrap();
        PortParts {
            port: PORT,
            generation: GENERATION,
            geometry: self.geometry,
            client: self.client.try_clone().unwrap(),
            engine: self.engine.try_clone().unwrap(),
            event_bell: bell(),
            engine_bell: bell(),
        }
    }

    fn host(&self) -> EngineHost {
        let mapping = LedgerMapping::map(&self.ledger, ledger_geometry()).unwrap();
        let facts = Facts::adopt(Box::leak(Box::new(mapping)).ledger());
        facts.raise_engine_epoch(0);
        EngineHost::new(facts, 1000)
    }

    /// A new engine, from nothing or from what another left.
    fn take_over(&self) -> (EngineHost, Durable) {
        let mut host = self.host();
        restore::take_up_parts(&mut host, self.parts()).unwrap();
        let durable = restore::durable(&mut host);
        (host, durable)
    }
}

fn stream() -> StreamKey {
    StreamKey {
        local: PortId(PORT),
        node: NodeId(2),
        remote: PortId(9),
        priority: Priority::Low,
    }
}
