//! Random bytes, half messages and 10,000 connections on the client socket. Everybody is served or refused within a bound, nobody
//! waits for ever, and a well-behaved client is served throughout.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::harness::random::Random;
use crate::hostile::STEP;
use crate::hostile::control::Control;
use crate::hostile::raw_port::RawPort;
use crate::hostile::watch::{Watch, wait_until};
use portolan_abi::PORT_ABI_VERSION;
use portolan_abi::control::{ErrorCode, MAX_REQUEST_BYTES, Request, Response};
use portolan_abi::port::PortGeometry;
use portolan_testbed::{Daemon, Lab};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Longest a well-behaved request may take, whatever the others do.
const SERVED_WITHIN: Duration = Duration::from_secs(2);

fn geometry() -> PortGeometry {
    PortGeometry::new(4, 4, 4096).unwrap()
}

/// A client that attached before the trouble began and asks for its daemon's name and a port, again and again.
struct Customer {
    stop: Arc<AtomicBool>,
    served: Arc<AtomicU64>,
    longest_us: Arc<AtomicU64>,
    thread: Option<JoinHandle<()>>,
}

impl Customer {
    fn start(socket: PathBuf, port: u16) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let served = Arc::new(AtomicU64::new(0));
        let longest_us = Arc::new(AtomicU64::new(0));
        let (flag, count, longest) = (stop.clone(), served.clone(), longest_us.clone());
        let control = Control::connect(&socket).unwrap();
        let thread = std::thread::spawn(move || {
            while !flag.load(Ordering::Relaxed) {
                let began = Instant::now();
                Self::visit(&control, port);
                let took = began.elapsed();
                longest.fetch_max(took.as_micros() as u64, Ordering::Relaxed);
                assert!(took < 3 * SERVED_WITHIN, "served only after {took:?}");
                count.fetch_add(1, Ordering::Relaxed);
                std::thread::sleep(Duration::from_millis(2));
            }
        });
        Self {
            stop,
            served,
            longest_us,
            thread: Some(thread),
        }
    }

    fn visit(control: &Control, port: u16) {
        let abi = PORT_ABI_VERSION;
        let (node, _) = control.ask(&Request::Attach { abi }).unwrap();
        assert!(matches!(node, Response::Node { id: 1, .. }), "{node:?}");
        let open = Request::OpenPort {
            abi,
            port: Some(port),
            geometry: geometry(),
        };
        let (opened, descriptors) = control.ask(&open).unwrap();
        assert!(matches!(opened, Response::PortOpened { .. }), "{opened:?}");
        assert_eq!(descriptors.len(), 4);
        let (closed, _) = control.ask(&Request::ClosePort { port }).unwrap();
        assert_eq!(closed, Response::Done);
    }

    /// It is being served, and was all the time since this was asked last.
    #[track_caller]
    fn assert_served(&self) {
        let enough = self.served.load(Ordering::Relaxed) + 3;
        wait_until("a well-behaved client is served", STEP, || {
            self.served.load(Ordering::Relaxed) >= enough
                || self.thread.as_ref().is_none_or(JoinHandle::is_finished)
        });
        assert!(self.served.load(Ordering::Relaxed) >= enough, "it gave up");
        let longest = Duration::from_micros(self.longest_us.swap(0, Ordering::Relaxed));
        assert!(longest < SERVED_WITHIN, "it had to wait for {longest:?}");
        eprintln!("a well-behaved client waited for {longest:?} at most");
    }
}

impl Drop for Customer {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(Err(panic)) = self.thread.take().map(JoinHandle::join)
            && !std::thread::panicking()
        {
            std::panic::resume_unwind(panic);
        }
    }
}

struct Scene {
    customer: Customer,
    watch: Watch,
    /// Descriptors of the supervisor with nobody but the customer there.
    descriptors: usize,
    daemon: Daemon,
    lab: Lab,
}

impl Scene {
    fn set() -> Self {
        let lab = Lab::builder().name("pths").build().unwrap();
        let daemon = lab.node(1).start_daemon("").unwrap();
        let socket = daemon.socket();
        let watch = Watch::begin(&socket);
        let descriptors = count_descriptors(&daemon);
        let customer = Customer::start(socket, 20);
        customer.assert_served();
        Self {
            customer,
            watch,
            descriptors,
            daemon,
            lab,
        }
    }

    fn socket(&self) -> PathBuf {
        self.daemon.socket()
    }

    /// The daemon is as it was, and takes new clients.
    #[track_caller]
    fn assert_unharmed(&self) {
        self.customer.assert_served();
        self.watch.assert_unharmed();
        let newcomer = RawPort::open(&self.socket(), Some(21), geometry()).unwrap();
        newcomer.close().unwrap();
        // The customer's connection and its port may come on top.
        wait_until("every descriptor is closed again", STEP, || {
            count_descriptors(&self.daemon) <= self.descriptors + 12
        });
    }
}

fn count_descriptors(daemon: &Daemon) -> usize {
    std::fs::read_dir(format!("/proc/{}/fd", daemon.pid()))
        .unwrap()
        .count()
}

/// What a connection got for what it sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Fate {
    Served,
    Refused,
    Closed,
}

/// Sends one packet and waits for what becomes of it.
fn fate(control: &Control, packet: &[u8]) -> Fate {
    match control.send(packet, &[]) {
        Ok(()) => answer(control),
        Err(error) if is_closed(error.kind()) => Fate::Closed,
        Err(error) => panic!("the request is not taken: {error}"),
    }
}

fn answer(control: &Control) -> Fate {
    match control.receive() {
        Ok(None) => Fate::Closed,
        Ok(Some(answer)) => match serde_json::from_slice(&answer.document).unwrap() {
            Response::Error { code, message } => {
                assert!(code != ErrorCode::Internal, "{message}");
                assert!(
                    !message.is_empty() && !message.contains('\n'),
                    "{message:?}"
                );
                Fate::Refused
            }
            _ => Fate::Served,
        },
        Err(error) if is_closed(error.kind()) => Fate::Closed,
        Err(error) => panic!("neither served nor refused: {error}"),
    }
}

fn is_closed(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::BrokenPipe | ErrorKind::ConnectionReset)
}

fn requests() -> Vec<Request> {
    vec![
        Request::Attach {
            abi: PORT_ABI_VERSION,
        },
        Request::OpenPort {
            abi: PORT_ABI_VERSION,
            port: Some(99),
            geometry: geometry(),
        },
        Request::ClosePort { port: 99 },
        Request::Resolve {
            node: "ptl2".to_owned(),
        },
        Request::Status {},
        Request::Counters {},
    ]
}

fn connect(socket: &Path) -> Control {
    Control::connect(socket).unwrap()
}

// Packets of random bytes and random lengths, also none and too many, several on each connection. Expect: an error or the end of the
// connection, each time at once.
#[test]
fn random_bytes_are_refused() {
    let scene = Scene::set();
    let socket = scene.socket();
    let mut random = Random::new(u64::from(std::process::id()));
    let mut fates = BTreeMap::<Fate, usize>::new();
    for _ in 0..500 {
        let control = connect(&socket);
        for _ in 0..4 {
            let mut packet = vec![0; random.below(2 * MAX_REQUEST_BYTES)];
            random.fill(&mut packet);
            let fate = fate(&control, &packet);
            *fates.entry(fate).or_default() += 1;
            if fate == Fate::Closed {
                break;
            }
        }
    }
    eprintln!("{fates:?}");
    assert!(!fates.contains_key(&Fate::Served));
    scene.assert_unharmed();
}

// Requests cut off at every length, with every byte flipped, doubled in one packet, nested, huge, with keys nobody knows. Expect: as
// above; what happens to be a request is served.
#[test]
fn half_messages_are_refused() {
    let scene = Scene::set();
    let socket = scene.socket();
    let mut packets = Vec::new();
    for request in requests() {
        let whole = serde_json::to_vec(&request).unwrap();
        packets.extend((0..whole.len()).map(|len| whole[..len].to_vec()));
        for at in 0..whole.len() {
            let mut flipped = whole.clone();
            flipped[at] ^= 0xff;
            packets.push(flipped);
        }
        packets.push([whole.clone(), whole.clone()].concat());
        let mut unknown = whole.clone();
        unknown.truncate(whole.len() - 1);
        unknown.extend_from_slice(br#","surprise":1}"#);
        packets.push(unknown);
        let mut padded = whole;
        padded.resize(MAX_REQUEST_BYTES + 1, b' ');
        packets.push(padded);
    }
    packets.push(vec![b'['; MAX_REQUEST_BYTES]);
    packets.push(br#"{"request":"#.repeat(300));
    packets.push(vec![b'9'; MAX_REQUEST_BYTES]);
    packets.push(br#"{"request":"close_port","port":-1}"#.to_vec());
    packets.push(br#"{"request":"close_port","port":1e400}"#.to_vec());
    packets.push(br#"{"request":"close_port","port":99999999999999999999}"#.to_vec());
    packets.push(b"\xff\xfe\x00".to_vec());
    let name = "x".repeat(MAX_REQUEST_BYTES - 64);
    packets.push(serde_json::to_vec(&Request::Resolve { node: name }).unwrap());

    let mut fates = BTreeMap::<Fate, usize>::new();
    for packet in &packets {
        let fate = fate(&connect(&socket), packet);
        *fates.entry(fate).or_default() += 1;
        let text = String::from_utf8_lossy(packet);
        assert!(fate != Fate::Served, "served: {text}");
    }
    eprintln!("{} packets: {fates:?}", packets.len());
    scene.assert_unharmed();
}

// Descriptors sent along with requests, as many as a packet takes. Expect: none of them stays with the daemon.
#[test]
fn descriptors_sent_along_are_closed() {
    let scene = Scene::set();
    let socket = scene.socket();
    let file = std::fs::File::open("/dev/null").unwrap();
    for packet in [
        serde_json::to_vec(&requests()[0]).unwrap(),
        b"nonsense".to_vec(),
    ] {
        for count in [1, 4, 16, 253] {
            for _ in 0..5 {
                let control = connect(&socket);
                let descriptors = vec![file.as_fd(); count];
                if control.send(&packet, &descriptors).is_ok() {
                    answer(&control);
                }
            }
        }
    }
    scene.assert_unharmed();
}

// Clients that ask and never take an answer. Expect: the daemon stops reading them; others are served.
#[test]
fn clients_that_never_read_hold_up_nobody() {
    let scene = Scene::set();
    let socket = scene.socket();
    let ask = serde_json::to_vec(&Request::Counters {}).unwrap();
    let deaf: Vec<Control> = (0..32)
        .map(|_| {
            let control = connect(&socket);
            // Until its own queue is full, or the daemon has had enough.
            for _ in 0..10_000 {
                if control.send_now(&ask).is_err() {
                    break;
                }
            }
            control
        })
        .collect();
    scene.customer.assert_served();
    scene.customer.assert_served();
    drop(deaf);
    scene.assert_unharmed();
}

const CONNECTIONS: usize = 10_000;

/// As many descriptors as we may have.
fn raise_limit() -> usize {
    let limit = getrlimit(Resource::Nofile);
    let (_, maximum) = (limit.current, limit.maximum);
    let wanted = Rlimit {
        current: maximum,
        maximum,
    };
    setrlimit(Resource::Nofile, wanted).unwrap();
    maximum.map_or(usize::MAX, |maximum| maximum as usize)
}

// 10,000 connections at once. Expect: each is served or refused within its bound; a client that was there before is served all the
// time; when they are gone, newcomers are served again.
#[test]
fn ten_thousand_connections_at_once() {
    let limit = raise_limit();
    assert!(
        limit > CONNECTIONS + 200,
        "this test needs {CONNECTIONS} descriptors and may have {limit}: raise `ulimit -Hn`"
    );
    let scene = Scene::set();
    let socket = scene.socket();
    let attach = serde_json::to_vec(&requests()[0]).unwrap();
    let began = Instant::now();
    let mut connections = Vec::with_capacity(CONNECTIONS);
    let mut fates = BTreeMap::<Fate, usize>::new();
    for _ in 0..CONNECTIONS {
        let control = connect(&socket);
        *fates.entry(fate(&control, &attach)).or_default() += 1;
        connections.push(control);
    }
    eprintln!("{fates:?} in {:?}", began.elapsed());
    assert!(fates.contains_key(&Fate::Served), "{fates:?}");
    scene.customer.assert_served();
    // They all die at once.
    drop(connections);
    scene.assert_unharmed();
    // There are more than `limits.clients`: `supervisor_connections_refused` of the metrics.
    let counters = scene.lab.node(1).report("counters").unwrap();
    let turned_away = &counters["supervisor"]["connections_turned_away"];
    assert!(turned_away.as_u64() > Some(0), "{counters}");
}

// 10,000 connections that come, ask half or nothing, and go. Expect: as above.
#[test]
fn ten_thousand_connections_one_after_another() {
    let scene = Scene::set();
    let socket = scene.socket();
    let open = serde_json::to_vec(&requests()[1]).unwrap();
    let mut random = Random::new(u64::from(std::process::id()));
    for _ in 0..CONNECTIONS {
        let control = connect(&socket);
        match random.below(4) {
            0 => {}
            1 => drop(control.send(&open[..random.below(open.len())], &[])),
            // A port is being opened for somebody who has gone.
            2 => drop(control.send(&open, &[])),
            _ => drop(control.send(&[], &[])),
        }
    }
    scene.assert_unharmed();
}
