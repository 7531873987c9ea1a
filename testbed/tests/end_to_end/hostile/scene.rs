//! Two nodes, a bystander whose traffic must not suffer, and a hostile port beside it.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use portolan_abi::port::PortGeometry;
use portolan_testbed::{Daemon, Lab};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use super::STEP;
use super::neighbour::{Echo, PingPong};
use super::raw_port::RawPort;
use super::watch::Watch;

/// The hostile port, on node 1, and its partner, on node 2.
pub const HOSTILE: u16 = 50;
pub const PARTNER: (u16, u16) = (2, 12);
/// The bystander, on node 1, and its partner, on node 2.
pub const BYSTANDER: u16 = 10;
pub const ECHO: (u16, u16) = (2, 11);

pub const ARENA: u64 = 64 * 1024;

pub fn geometry() -> PortGeometry {
    PortGeometry::new(16, 16, ARENA).unwrap()
}

/// Two nodes with daemons, echoes on node 2, a bystander's traffic between them.
pub struct Scene {
    // Dropped in this order: applications, daemons, lab.
    pub bystander: PingPong,
    _echoes: [Echo; 2],
    pub watches: [Watch; 2],
    pub daemons: [Daemon; 2],
    _lab: Lab,
}

impl Scene {
    pub fn set() -> Self {
        keep_to_two_cores();
        let lab = Lab::builder().name("pthc").build().unwrap();
        let daemons = [1, 2].map(|id| lab.node(id).start_daemon("").unwrap());
        let [one, two] = [daemons[0].socket(), daemons[1].socket()];
        let watches = [Watch::begin(&one), Watch::begin(&two)];
        let echoes = [ECHO.1, PARTNER.1].map(|port| Echo::start(two.clone(), port));
        let bystander = PingPong::start(one, BYSTANDER, ECHO);
        bystander.assert_goes_on();
        Self {
            bystander,
            _echoes: echoes,
            watches,
            daemons,
            _lab: lab,
        }
    }

    pub fn socket(&self) -> PathBuf {
        self.daemons[0].socket()
    }

    pub fn open(&self) -> RawPort {
        open(&self.socket())
    }

    /// Nobody but the hostile port noticed anything.
    #[track_caller]
    pub fn assert_unharmed(&self) {
        self.bystander.assert_goes_on();
        let longest = self.bystander.longest();
        assert!(
            longest < Duration::from_secs(1),
            "the bystander was held up for {longest:?}"
        );
        for watch in &self.watches {
            watch.assert_unharmed();
        }
    }
}

/// This thread, and all it starts. With more cores than that it depends on who is put beside whom how fast the bystander is, by a
/// factor of two, and comparisons of its rate compare that.
fn keep_to_two_cores() {
    let allowed = sched_getaffinity(None).unwrap();
    let mut two = CpuSet::new();
    for core in (0..CpuSet::MAX_CPU)
        .filter(|&core| allowed.is_set(core))
        .take(2)
    {
        two.set(core);
    }
    sched_setaffinity(None, &two).unwrap();
}

/// Opens the hostile port. Its predecessor is gone soon, whatever became of it.
pub fn open(socket: &Path) -> RawPort {
    let deadline = Instant::now() + STEP;
    loop {
        match RawPort::open(socket, Some(HOSTILE), geometry()) {
            Ok(port) => return port,
            Err(error) if Instant::now() > deadline => {
                panic!("port {HOSTILE} never opens: {error}")
            }
            Err(_) => std::thread::sleep(Duration::from_millis(1)),
        }
    }
}
