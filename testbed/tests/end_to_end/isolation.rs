//! An application never sees the memory of another one, of an engine or of the supervisor: processes of different users attach to one
//! daemon and try (docs/threat-model.md).

mod attempts;

use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::harness::worker::{Parent, Worker, work};
use crate::harness::{Cluster, STEP};
use crate::hostile::raw_port::RawPort;
use portolan_abi::port::PortGeometry;
use portolan_testbed::Lab;
use serde::{Deserialize, Serialize};

/// Users nobody is.
const VICTIM: u32 = 48_101;
const THIEF: u32 = 48_102;
/// The victim's port, which the thief has after it; and the thief's first one.
const PORT: u16 = 60;
const OTHER: u16 = 62;
const ARENA: u64 = 256 * 1024;
const SECRET: &[u8; 16] = b"victim's secret!";
const MARK: &[u8; 16] = b"the thief's own.";

#[derive(Serialize, Deserialize)]
struct Place {
    socket: PathBuf,
    port: u16,
}

/// What the thief knows, all of it true.
#[derive(Serialize, Deserialize)]
struct Booty {
    /// Processes and their names.
    processes: Vec<(i32, String)>,
    /// The inodes of the victim's memory.
    inodes: Vec<u64>,
}

fn geometry() -> PortGeometry {
    PortGeometry::new(16, 16, ARENA).unwrap()
}

/// Where `needle` is in a port's arena.
fn found(port: &RawPort, needle: &[u8]) -> Option<usize> {
    let mut bytes = vec![0; ARENA as usize];
    port.client.read_arena(0, &mut bytes).unwrap();
    bytes.windows(needle.len()).position(|at| at == needle)
}

fn fill(port: &RawPort, with: &[u8; 16]) {
    let bytes = with.repeat(ARENA as usize / with.len());
    port.client.write_arena(0, &bytes).unwrap();
}

// ---- the parts ----

// Opens a port, fills it with a secret and works; closes it when told, and keeps what it had mapped.
#[test]
#[ignore = "a worker of the tests below"]
fn victim() {
    work(|place: Place, parent: &Parent| {
        let mut port = RawPort::open(&place.socket, Some(place.port), geometry()).unwrap();
        port.exchange((1, place.port), STEP).unwrap();
        fill(&port, SECRET);
        parent.answer(&attempts::inodes(&port));
        assert_eq!(parent.order(), "close");
        let number = port.number;
        let request = portolan_abi::control::Request::ClosePort { port: number };
        let (response, _) = port.control.ask(&request).unwrap();
        parent.answer(&format!("{response:?}"));
        assert_eq!(parent.order(), "look");
        // Its old memory is still its own, and nobody else's.
        let own = found(&port, SECRET).is_some();
        parent.answer(&(own, found(&port, MARK)));
        parent.order();
    });
}

// Opens a port of its own, tries everything, then opens the port that was the victim's.
#[test]
#[ignore = "a worker of the tests below"]
fn thief() {
    work(|place: Place, parent: &Parent| {
        let mut port = RawPort::open(&place.socket, Some(place.port), geometry()).unwrap();
        port.exchange((1, place.port), STEP).unwrap();
        parent.answer(&"attached");
        let booty: Booty = serde_json::from_str(&parent.order()).unwrap();
        let mut got = attempts::on_processes(&booty.processes);
        got.extend(attempts::on_own_descriptors(&port, &booty.inodes));
        got.extend(attempts::on_the_daemon(&place.socket, PORT));
        got.extend(attempts::with_tokens(&place.socket, SECRET));
        parent.answer(&got);
        if parent.order() == "reuse" {
            let again = RawPort::open(&place.socket, Some(PORT), geometry()).unwrap();
            let mut bytes = vec![0; ARENA as usize];
            again.client.read_arena(0, &mut bytes).unwrap();
            let clean = bytes.iter().all(|byte| *byte == 0);
            let fresh = attempts::inodes(&again)
                .iter()
                .all(|inode| !booty.inodes.contains(inode));
            fill(&again, MARK);
            parent.answer(&(clean, fresh));
            parent.order();
        }
    });
}

// ---- the tests ----

/// This binary where every user may run it.
struct Stage {
    _directory: tempfile::TempDir,
    binary: PathBuf,
    cluster: Cluster,
}

impl Stage {
    fn set() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let all = |path: &Path| {
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
        };
        all(directory.path());
        let binary = directory.path().join("isolation");
        std::fs::copy(std::env::current_exe().unwrap(), &binary).unwrap();
        all(&binary);
        let cluster = Cluster::start_with(Lab::builder().nodes(1), "");
        Self {
            _directory: directory,
            binary,
            cluster,
        }
    }

    /// A worker that belongs to this user from its first instruction.
    fn worker(&self, name: &str, uid: u32, port: u16) -> Worker {
        let mut command = Command::new(&self.binary);
        command.uid(uid).gid(uid).current_dir("/");
        let socket = self.cluster.daemon(1).socket();
        Worker::start_command(
            command,
            &format!("isolation::{name}"),
            &Place { socket, port },
        )
    }

    fn processes(&self, victim: &Worker) -> Vec<(i32, String)> {
        let daemon = self.cluster.daemon(1);
        let mut processes = vec![
            (victim.pid(), "the victim".to_owned()),
            (daemon.pid(), "the supervisor".to_owned()),
        ];
        let status = daemon.status().unwrap();
        let service = status["node"]["service_pid"].as_i64().unwrap();
        processes.push((i32::try_from(service).unwrap(), "the service".to_owned()));
        for engine in daemon.engine_pids().unwrap() {
            processes.push((engine, "an engine".to_owned()));
        }
        processes
    }
}

// Two users, one daemon. The thief knows every process and descriptor there is. Expect: he gets nothing, neither while the victim works
// nor from the port number he has after it; nor does the victim see what he writes there.
#[test]
fn an_application_never_sees_anothers_memory() {
    let stage = Stage::set();
    let mut victim = stage.worker("victim", VICTIM, PORT);
    let inodes: Vec<u64> = victim.answer(STEP);
    let mut thief = stage.worker("thief", THIEF, OTHER);
    assert_eq!(thief.answer::<String>(STEP), "attached");
    let booty = Booty {
        processes: stage.processes(&victim),
        inodes,
    };
    thief.order(&serde_json::to_string(&booty).unwrap());
    let got: Vec<String> = thief.answer(STEP);
    assert!(got.is_empty(), "the thief got: {got:#?}");

    victim.order("close");
    assert_eq!(victim.answer::<String>(STEP), "Done");
    thief.order("reuse");
    let (clean, fresh): (bool, bool) = thief.answer(STEP);
    assert!(clean, "the arena of port {PORT} has old data in it");
    assert!(fresh, "the memory of port {PORT} is its last owner's");
    victim.order("look");
    let (own, marks): (bool, Option<usize>) = victim.answer(STEP);
    assert!(own, "the victim's memory changed under it");
    assert_eq!(marks, None, "the victim sees what its successor writes");
}

// A thief who is the user that engines and service run as, which no application should be. Expect: the memory of engines and supervisor
// and of other users is closed to him all the same.
#[test]
fn nor_does_one_of_the_engines_own_user() {
    let stage = Stage::set();
    let victim = stage.worker("victim", VICTIM, PORT);
    let inodes: Vec<u64> = victim.answer(STEP);
    let mut thief = stage.worker("thief", attempts::NOBODY, OTHER);
    assert_eq!(thief.answer::<String>(STEP), "attached");
    let mut processes = stage.processes(&victim);
    // An ordinary process of his own user: he may trace it, and it has only what a client of port 0 has.
    processes.retain(|(_, name)| name != "the service");
    thief.order(&serde_json::to_string(&Booty { processes, inodes }).unwrap());
    let got: Vec<String> = thief.answer(STEP);
    assert!(got.is_empty(), "the thief got: {got:#?}");
    thief.order("leave");
}

// Names that whoever shares the network namespace could connect to. Expect: none; there is one socket, and it has a path and a mode.
#[test]
fn the_daemon_has_no_abstract_socket() {
    let stage = Stage::set();
    let node = stage.cluster.lab.node(1);
    let mut command = node.command("cat");
    let sockets = portolan_testbed::process::run_ok(command.arg("/proc/net/unix"), STEP).unwrap();
    let named: Vec<&str> = sockets
        .lines()
        .skip(1)
        .filter_map(|line| line.split_whitespace().nth(7))
        .collect();
    let socket = node.socket().display().to_string();
    assert!(named.contains(&socket.as_str()), "{sockets}");
    let strange: Vec<&&str> = named.iter().filter(|name| **name != socket).collect();
    assert!(strange.is_empty(), "{strange:?}");
}
