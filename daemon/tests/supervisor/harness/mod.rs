//! A supervisor in a thread, with engines and clients played by the test.
#![allow(dead_code, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod machine;

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use machine::{FakeSockets, Machine};
use portolan_abi::PORT_ABI_VERSION;
use portolan_abi::control::{ErrorCode, Request, Response};
use portolan_abi::ledger::LedgerGeometry;
use portolan_abi::memory::LedgerMapping;
use portolan_abi::port::PortGeometry;
use portoland::engine_link::{FromEngine, MAX_PACKET, ToEngine};
use portoland::supervisor::config::Config;
use portoland::supervisor::kernel::Support;
use portoland::supervisor::memory::{Crossings, QueueMemory, create_ledger, eventfd};
use portoland::supervisor::reload::Reload;
use portoland::supervisor::spawn::{Child, Launcher, Urgency};
use portoland::supervisor::steering::NoSteering;
use portoland::supervisor::store::Store;
use portoland::supervisor::{Parts, Supervisor};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

/// Nothing here takes this long.
pub const DEADLINE: Duration = Duration::from_secs(10);

/// An engine process, played by the test.
pub struct FakeEngine {
    pub queue: u8,
    link: Option<OwnedFd>,
    exit: OwnedFd,
    fate: Arc<Mutex<Fate>>,
}

/// What the launcher was asked to do with a process.
#[derive(Default)]
struct Fate {
    killed: bool,
    urgencies: Vec<Urgency>,
}

pub const READY: FromEngine = FromEngine::Ready {
    adopted_in_ns: 1,
    ready_at_ns: 1,
};

/// What an engine was told, with the descriptors.
pub type Told = (ToEngine, Vec<OwnedFd>);

impl FakeEngine {
    /// The next message.
    pub fn told(&self) -> Told {
        let link = self.link.as_ref().unwrap();
        assert!(
            readable(link.as_fd(), DEADLINE),
            "the engine is told nothing"
        );
        let (bytes, fds) = receive(link.as_fd(), MAX_PACKET);
        (serde_json::from_slice(&bytes).expect("a message"), fds)
    }

    /// Nothing waits to be read.
    pub fn told_nothing(&self) -> bool {
        !readable(
            self.link.as_ref().unwrap().as_fd(),
            Duration::from_millis(50),
        )
    }

    /// Reads the briefing, up to and with `StandBy`.
    pub fn briefing(&self) -> Vec<Told> {
        let mut all = Vec::new();
        loop {
            let told = self.told();
            let last = told.0 == ToEngine::StandBy;
            all.push(told);
            if last {
                return all;
            }
        }
    }

    /// Reads the briefing and stands by.
    pub fn stand_by(self) -> Self {
        self.briefing();
        self.say(&FromEngine::StandingBy);
        self
    }

    /// Is told to take over, and does.
    pub fn take_over(self) -> Self {
        assert_eq!(self.told().0, ToEngine::TakeOver);
        self.say(&READY);
        self
    }

    /// Reads the briefing, and serves when it may.
    pub fn ready(self) -> Self {
        self.stand_by().take_over()
    }

    pub fn say(&self, message: &FromEngine) {
        self.say_bytes(&serde_json::to_vec(message).unwrap());
    }

    pub fn say_bytes(&self, bytes: &[u8]) {
        let link = self.link.as_ref().unwrap();
        rustix::net::send(link, bytes, SendFlags::NOSIGNAL).unwrap();
    }

    /// The port of an `OpenPort`, and its generation.
    pub fn told_to_open(&self) -> (u16, u32, Vec<OwnedFd>) {
        match self.told() {
            (
                ToEngine::OpenPort {
                    port, generation, ..
                },
                fds,
            ) => (port, generation, fds),
            other => panic!("not OpenPort: {other:?}"),
        }
    }

    /// Dies, as a process does: the link first, then the pidfd.
    pub fn die(mut self) {
        self.link = None;
        rustix::io::write(&self.exit, &1u64.to_ne_bytes()).unwrap();
    }

    /// Closes its link and lives on.
    pub fn hang_up(&mut self) {
        self.link = None;
    }

    /// Dies with its descriptors still open: the pidfd first.
    pub fn exit_only(&self) {
        rustix::io::write(&self.exit, &1u64.to_ne_bytes()).unwrap();
    }

    pub fn was_killed(&self) -> bool {
        self.fate.lock().unwrap().killed
    }

    /// How urgent it was said to be since it was started.
    pub fn urgencies(&self) -> Vec<Urgency> {
        self.fate.lock().unwrap().urgencies.clone()
    }

    /// Waits to be killed; the launcher has then let it die.
    pub fn wait_killed(&self) {
        let end = Instant::now() + DEADLINE;
        while !self.was_killed() {
            assert!(Instant::now() < end, "the engine was not killed");
            std::thread::yield_now();
        }
    }
}

struct FakeLauncher {
    engines: Sender<FakeEngine>,
    fates: Vec<(i32, Arc<Mutex<Fate>>, OwnedFd)>,
    next_pid: i32,
    /// Whom to take for the service.
    service_pid: Option<i32>,
}

impl FakeLauncher {
    fn of(&self, child: &Child) -> (&Mutex<Fate>, &OwnedFd) {
        let (_, fate, exit) = (self.fates.iter())
            .find(|(pid, ..)| *pid == child.pid)
            .unwrap();
        (fate, exit)
    }
}

impl Launcher for FakeLauncher {
    fn engine(&mut self, queue: u8, _urgency: Urgency) -> std::io::Result<(Child, OwnedFd)> {
        let (ours, theirs) = rustix::net::socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )?;
        let exit = eventfd()?;
        let fate = Arc::<Mutex<Fate>>::default();
        self.next_pid += 1;
        let pid = self.next_pid;
        self.fates.push((pid, Arc::clone(&fate), exit.try_clone()?));
        let engine = FakeEngine {
            queue,
            link: Some(theirs),
            exit: exit.try_clone()?,
            fate,
        };
        self.engines.send(engine).map_err(std::io::Error::other)?;
        Ok((Child { pid, exit }, ours))
    }

    fn service(&mut self) -> std::io::Result<Option<Child>> {
        let Some(pid) = self.service_pid else {
            return Ok(None);
        };
        let exit = eventfd()?;
        self.fates.push((pid, Arc::default(), exit.try_clone()?));
        Ok(Some(Child { pid, exit }))
    }

    fn kill(&mut self, child: &Child) -> std::io::Result<()> {
        let (fate, exit) = self.of(child);
        fate.lock().unwrap().killed = true;
        rustix::io::write(exit, &1u64.to_ne_bytes())?;
        Ok(())
    }

    fn schedule(&mut self, child: &Child, urgency: Urgency) -> std::io::Result<()> {
        self.of(child).0.lock().unwrap().urgencies.push(urgency);
        Ok(())
    }

    fn reap(&mut self, _child: &Child) -> String {
        "played".to_owned()
    }
}

/// What may be different from test to test.
#[derive(Default)]
pub struct Options {
    pub queues: u8,
    /// TOML after the rest.
    pub more: String,
    /// This very process is the service.
    pub we_are_the_service: bool,
}

/// A supervisor in a thread.
pub struct Node {
    directory: tempfile::TempDir,
    engines: Receiver<FakeEngine>,
    /// Per socket made: the UMEM it was made over, unless a new one.
    pub sockets: Receiver<Option<OwnedFd>>,
    stop: OwnedFd,
    hung_up: OwnedFd,
    thread: Option<JoinHandle<std::io::Result<()>>>,
    ledgers: Vec<LedgerMapping>,
}

const GEOMETRY: LedgerGeometry = LedgerGeometry {
    peers: 16,
    send_streams: 16,
    receive_streams: 16,
    frames: 16,
};

pub fn port_geometry() -> PortGeometry {
    PortGeometry::new(16, 16, 64 * 1024).unwrap()
}

impl Node {
    pub fn start(options: &Options) -> Self {
        let directory = tempfile::tempdir().unwrap();
        std::fs::set_permissions(directory.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
        let queues = options.queues.max(1);
        let list: Vec<u8> = (0..queues).collect();
        let text = format!(
            "[cluster]\nname = \"t\"\n[node]\nid = 1\nname = \"one\"\nsocket = \"{}/sock\"\n[network]\ninterface = \"x\"\naddress = \"10.0.0.1\"\nqueues = {list:?}\n{}",
            directory.path().display(),
            options.more
        );
        let config = Config::parse(Path::new("test.toml"), &text, &Machine)
            .unwrap_or_else(|errors| panic!("{errors}"));
        let mut ledgers = Vec::new();
        let memory = config.queues.iter().map(|_| {
            let (fd, ledger) = create_ledger(GEOMETRY, 7).unwrap();
            ledgers.push(LedgerMapping::map(&fd, GEOMETRY).unwrap());
            QueueMemory {
                ledger_fd: fd.into(),
                ledger,
                geometry: GEOMETRY,
                umem: eventfd().unwrap().into(),
                xsk: eventfd().unwrap().into(),
                wake: eventfd().unwrap().into(),
                zero_copy: false,
            }
        });
        let memory = memory.collect();
        let (stop, theirs) = pair();
        let (sender, engines) = channel();
        let (made, sockets) = channel();
        let own_pid = i32::try_from(std::process::id()).unwrap();
        let service_pid = options.we_are_the_service.then_some(own_pid);
        let listener = listen(&config.socket);
        let (reload, hung_up) = pair();
        let file = directory.path().join("node.toml");
        std::fs::write(&file, &text).unwrap();
        let thread = std::thread::spawn(move || {
            let reload = Reload {
                signal: reload,
                load: Box::new(move |_| Config::load(&file, &Machine)),
            };
            Supervisor::new(Parts {
                incarnation: 7,
                mtu: 1500,
                kernel: Support::Full,
                queues: memory,
                crossings: Crossings::create(usize::from(queues)).unwrap(),
                listener,
                stop: theirs,
                launcher: Box::new(FakeLauncher {
                    engines: sender,
                    fates: Vec::new(),
                    next_pid: 1_000_000_000,
                    service_pid,
                }),
                sockets: Box::new(FakeSockets(made)),
                steering: Box::new(NoSteering),
                resolve_neighbours: false,
                watch_interface: false,
                store: Store::default(),
                leave: None,
                build: 1,
                reload: Some(reload),
                config,
            })?
            .run(|| ())
            .map(drop)
        });
        Self {
            directory,
            engines,
            sockets,
            stop,
            hung_up,
            thread: Some(thread),
            ledgers,
        }
    }

    /// A node with one engine that serves, and no standby.
    pub fn ready(options: &Options) -> (Self, FakeEngine) {
        let node = Self::start(&Options {
            more: format!("{}[recovery]\nstandby = false\n", options.more),
            ..*options
        });
        let engine = node.next_engine().ready();
        (node, engine)
    }

    /// A node with one engine that serves and one that stands by.
    pub fn ready_twice(options: &Options) -> (Self, FakeEngine, FakeEngine) {
        let node = Self::start(options);
        let engine = node.next_engine().ready();
        let standby = node.next_engine().stand_by();
        (node, engine, standby)
    }

    pub fn socket(&self) -> PathBuf {
        self.directory.path().join("sock")
    }

    /// The next engine that is started.
    pub fn next_engine(&self) -> FakeEngine {
        self.engines
            .recv_timeout(DEADLINE)
            .expect("no engine was started")
    }

    pub fn no_engine_within(&self, time: Duration) -> bool {
        self.engines.recv_timeout(time).is_err()
    }

    pub fn client(&self) -> Client {
        Client::connect(&self.socket())
    }

    /// A client with this user and group: credentials belong to threads.
    pub fn client_as(&self, uid: u32, gid: u32) -> Client {
        let path = self.socket();
        let thread = std::thread::spawn(move || {
            let gid = rustix::process::Gid::from_raw(gid);
            let uid = rustix::process::Uid::from_raw(uid);
            rustix::thread::set_thread_groups(&[]).unwrap();
            rustix::thread::set_thread_res_gid(gid, gid, gid).unwrap();
            rustix::thread::set_thread_res_uid(uid, uid, uid).unwrap();
            Client::connect(&path)
        });
        thread.join().unwrap()
    }

    /// {generation, state} of a port in the journal.
    pub fn life(&self, queue: usize, port: u16) -> (u32, u32) {
        let word = &self.ledgers[queue].ledger().ports()[usize::from(port)].life;
        portolan_abi::ledger::unpair(word.load(std::sync::atomic::Ordering::Acquire))
    }

    /// Changes the configuration file.
    pub fn rewrite(&self, change: impl FnOnce(String) -> String) {
        let file = self.directory.path().join("node.toml");
        let text = std::fs::read_to_string(&file).unwrap();
        std::fs::write(file, change(text)).unwrap();
    }

    /// Asks it to read its configuration again.
    pub fn reload(&self) {
        rustix::io::write(&self.hung_up, b"x").unwrap();
    }

    /// Asks it to stop.
    pub fn ask_to_stop(&self) {
        rustix::io::write(&self.stop, b"x").unwrap();
    }

    /// Waits for its end.
    pub fn join(mut self) {
        let thread = self.thread.take().unwrap();
        let end = Instant::now() + DEADLINE;
        while !thread.is_finished() {
            assert!(Instant::now() < end, "the supervisor does not stop");
            std::thread::yield_now();
        }
        thread.join().unwrap().unwrap();
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        // Twice: the engines played here do not leave by themselves.
        let _ = rustix::io::write(&self.stop, b"x");
        if let Some(thread) = self.thread.take() {
            let end = Instant::now() + DEADLINE;
            while !thread.is_finished() && Instant::now() < end {
                let _ = rustix::io::write(&self.stop, b"x");
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }
}

fn pair() -> (OwnedFd, OwnedFd) {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap()
}

fn listen(path: &Path) -> OwnedFd {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket =
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    rustix::net::bind(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o666)).unwrap();
    rustix::net::listen(&socket, 4096).unwrap();
    socket
}

/// A connection to the supervisor.
pub struct Client {
    pub socket: OwnedFd,
}

impl Client {
    pub fn connect(path: &Path) -> Self {
        let socket = rustix::net::socket_with(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )
        .unwrap();
        rustix::net::connect(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
        Self { socket }
    }

    pub fn send_bytes(&self, bytes: &[u8]) {
        rustix::net::send(&self.socket, bytes, SendFlags::NOSIGNAL).unwrap();
    }

    pub fn send_with_fds(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
        let bytes = [IoSlice::new(bytes)];
        rustix::net::sendmsg(&self.socket, &bytes, &mut control, SendFlags::NOSIGNAL).unwrap();
    }

    pub fn send(&self, request: &Request) {
        self.send_bytes(&serde_json::to_vec(request).unwrap());
    }

    /// The next response; `None` if the connection ended.
    pub fn answer(&self) -> Option<(Response, Vec<OwnedFd>)> {
        let mut text = Vec::new();
        loop {
            assert!(readable(self.socket.as_fd(), DEADLINE), "no answer");
            let (bytes, fds) = receive(self.socket.as_fd(), 32 * 1024 + 1);
            let (first, rest) = bytes.split_first()?;
            assert!(bytes.len() <= 32 * 1024);
            text.extend_from_slice(rest);
            match first {
                0 => return Some((serde_json::from_slice(&text).unwrap(), fds)),
                1 => assert!(fds.is_empty()),
                other => panic!("first byte {other}"),
            }
        }
    }

    pub fn ask(&self, request: &Request) -> (Response, Vec<OwnedFd>) {
        self.send(request);
        self.answer().expect("the connection ended")
    }

    /// The code of an expected refusal.
    pub fn refused(&self, request: &Request) -> ErrorCode {
        match self.ask(request).0 {
            Response::Error { code, message } => {
                assert!(!message.contains('\n') && !message.is_empty());
                code
            }
            other => panic!("not refused: {other:?}"),
        }
    }

    pub fn no_answer_yet(&self) -> bool {
        !readable(self.socket.as_fd(), Duration::from_millis(50))
    }

    /// Opens a port, with the test as its engine.
    pub fn open(&self, engine: &FakeEngine, port: u16) -> Vec<OwnedFd> {
        self.send(&open(Some(port)));
        let (number, generation, ..) = engine.told_to_open();
        assert_eq!(number, port);
        engine.say(&FromEngine::PortOpened { port, generation });
        match self.answer() {
            Some((Response::PortOpened { port: opened, .. }, fds)) if opened == port => fds,
            other => panic!("not opened: {other:?}"),
        }
    }
}

pub fn open(port: Option<u16>) -> Request {
    Request::OpenPort {
        abi: PORT_ABI_VERSION,
        port,
        geometry: port_geometry(),
    }
}

fn readable(fd: BorrowedFd<'_>, within: Duration) -> bool {
    let mut fds = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
    let timeout = rustix::event::Timespec {
        tv_sec: within.as_secs() as i64,
        tv_nsec: within.subsec_nanos().into(),
    };
    poll(&mut fds, Some(&timeout)).unwrap() > 0
}

fn receive(socket: BorrowedFd<'_>, most: usize) -> (Vec<u8>, Vec<OwnedFd>) {
    let mut bytes = vec![0; most];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut slices = [IoSliceMut::new(&mut bytes)];
    let length =
        match rustix::net::recvmsg(socket, &mut slices, &mut control, RecvFlags::CMSG_CLOEXEC) {
            Ok(message) => message.bytes,
            Err(rustix::io::Errno::CONNRESET) => 0,
            Err(error) => panic!("{error}"),
        };
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    bytes.truncate(length);
    (bytes, fds)
}
