//! The loader and the program on a real interface: a veth pair between two network namespaces,
//! an AF_XDP socket (xsk-rs, not ours) on one end, the kernel's own traffic beside. Needs root.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test's helpers fail by panicking"
)]

use std::fs::File;
use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::num::NonZeroU32;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use portolan_ebpf::{AttachMode, DEFAULT_ETHERTYPE, Encap, Reason, Steer, SteerConfig, SteerError};
use rustix::thread::{CapabilitySet, CapabilitySets, LinkNameSpaceType};
use xsk_rs::config::{BindFlags, Interface, LibxdpFlags, SocketConfig, UmemConfig};
use xsk_rs::{FillQueue, FrameDesc, RxQueue, Socket, TxQueue, Umem};

const DEADLINE: Duration = Duration::from_secs(5);
const BASE: u16 = 7400;
const NEAR: &str = "pt-near";
const FAR: &str = "pt-far";
const NEAR_V4: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 1);
const NEAR_V6: Ipv6Addr = Ipv6Addr::new(0xfd77, 0, 0, 0, 0, 0, 0, 1);

fn run(command: &str) -> String {
    let words: Vec<&str> = command.split_whitespace().collect();
    let output = Command::new(words[0]).args(&words[1..]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command}: {said}");
    String::from_utf8(output.stdout).unwrap()
}

/// Two namespaces, `pt-near` and `pt-far` the ends of the cable between them.
struct Cable {
    near: String,
    far: String,
}

impl Cable {
    fn new(mtu: u32) -> Self {
        assert!(
            rustix::process::geteuid().is_root(),
            "this test makes network namespaces: run it as root (`cargo xtask test`)"
        );
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let prefix = format!("pt-ebpf-{}-{number}", std::process::id());
        let cable = Self {
            near: format!("{prefix}-near"),
            far: format!("{prefix}-far"),
        };
        let (near, far) = (&cable.near, &cable.far);
        run(&format!("ip netns add {near}"));
        run(&format!("ip netns add {far}"));
        run(&format!(
            "ip link add {NEAR} netns {near} mtu {mtu} type veth peer name {FAR} netns {far} mtu {mtu}"
        ));
        for (ns, device, host) in [(near, NEAR, 1), (far, FAR, 2)] {
            run(&format!(
                "ip -n {ns} addr add 10.77.0.{host}/24 dev {device}"
            ));
            run(&format!(
                "ip -n {ns} addr add fd77::{host}/64 dev {device} nodad"
            ));
            run(&format!("ip -n {ns} link set {device} up"));
            run(&format!("ip -n {ns} link set lo up"));
        }
        cable
    }

    fn in_near<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        in_namespace(&self.near, work)
    }

    fn in_far<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        in_namespace(&self.far, work)
    }
}

impl Drop for Cable {
    fn drop(&mut self) {
        for ns in [&self.near, &self.far] {
            let _ = Command::new("ip").args(["netns", "del", ns]).status();
        }
    }
}

/// Runs `work` on a thread of its own in the namespace. Sockets made there stay there.
fn in_namespace<T: Send>(name: &str, work: impl FnOnce() -> T + Send) -> T {
    let thread = || {
        let namespace = File::open(format!("/run/netns/{name}")).unwrap();
        let network = Some(LinkNameSpaceType::Network);
        rustix::thread::move_into_link_name_space(namespace.as_fd(), network).unwrap();
        work()
    };
    thread::scope(|scope| match scope.spawn(thread).join() {
        Ok(result) => result,
        Err(panic) => std::panic::resume_unwind(panic),
    })
}

fn near_mac() -> [u8; 6] {
    let link = run(&format!("ip -o link show {NEAR}"));
    let mut words = link
        .split_whitespace()
        .skip_while(|word| *word != "link/ether");
    let mac = words.nth(1).unwrap();
    let bytes: Vec<u8> = mac
        .split(':')
        .map(|byte| u8::from_str_radix(byte, 16).unwrap())
        .collect();
    bytes.try_into().unwrap()
}

/// Ours is what arrives at `pt-near`; call it there.
fn config() -> SteerConfig {
    SteerConfig {
        encap: Encap::Udp,
        ethertype: DEFAULT_ETHERTYPE,
        udp_base_port: BASE,
        queues: 1,
        local_mac: near_mac(),
        local_v4: Some(NEAR_V4),
        local_v6: Some(NEAR_V6),
    }
}

/// An AF_XDP socket on queue 0 of `pt-near`, in copy mode.
struct Endpoint {
    rx: RxQueue,
    umem: Umem,
    _tx: TxQueue,
    _fill: FillQueue,
    _completion: xsk_rs::CompQueue,
}

impl Endpoint {
    fn bind() -> Self {
        let frames = NonZeroU32::new(64).unwrap();
        let (umem, descriptors) = Umem::new(UmemConfig::default(), frames, false).unwrap();
        let config = SocketConfig::builder()
            .libxdp_flags(LibxdpFlags::XSK_LIBXDP_FLAGS_INHIBIT_PROG_LOAD)
            .bind_flags(BindFlags::XDP_COPY)
            .build();
        let interface: Interface = NEAR.parse().unwrap();
        // SAFETY: nothing else is bound with this UMEM.
        let (tx, rx, rings) = unsafe { Socket::new(config, &umem, &interface, 0) }.unwrap();
        let (mut fill, completion) = rings.unwrap();
        // SAFETY: the descriptors are this UMEM's and used for nothing else.
        assert_eq!(unsafe { fill.produce(&descriptors) }, descriptors.len());
        Self {
            rx,
            umem,
            _tx: tx,
            _fill: fill,
            _completion: completion,
        }
    }

    fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: `rx` keeps the socket open, and the result borrows `self`.
        unsafe { BorrowedFd::borrow_raw(self.rx.fd().as_raw_fd()) }
    }

    /// The next frame; fails the test if there is none in time.
    fn receive(&mut self) -> Vec<u8> {
        let mut descriptor = FrameDesc::default();
        let timeout = i32::try_from(DEADLINE.as_millis()).unwrap();
        // SAFETY: the ring is this socket's and its frames are `umem`'s.
        let got = unsafe { self.rx.poll_and_consume_one(&mut descriptor, timeout) }.unwrap();
        assert_eq!(got, 1, "no frame reached the AF_XDP socket");
        // SAFETY: the kernel handed the frame over; it is not given back to the fill ring.
        unsafe { self.umem.data(&descriptor) }.contents().to_vec()
    }
}

fn count(steer: &Steer, reason: Reason) -> u64 {
    let counters = steer.counters().unwrap();
    counters.iter().find(|(r, _)| *r == reason).unwrap().1
}

/// Waits until the counter says `expected`.
fn await_count(steer: &Steer, reason: Reason, expected: u64) {
    let deadline = Instant::now() + DEADLINE;
    while count(steer, reason) != expected {
        assert!(
            Instant::now() < deadline,
            "{reason:?} is not {expected}: {:?}",
            steer.counters()
        );
        thread::yield_now();
    }
}

/// A UDP socket of the kernel with a bounded receive.
fn kernel_socket(address: IpAddr, port: u16) -> UdpSocket {
    let socket = UdpSocket::bind(SocketAddr::new(address, port)).unwrap();
    socket.set_read_timeout(Some(DEADLINE)).unwrap();
    socket
}

fn received(socket: &UdpSocket) -> Vec<u8> {
    let mut bytes = [0; 2048];
    let len = socket.recv(&mut bytes).unwrap();
    bytes[..len].to_vec()
}

fn assert_nothing_received(socket: &UdpSocket) {
    socket.set_nonblocking(true).unwrap();
    let error = socket.recv(&mut [0; 2048]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::WouldBlock);
    socket.set_nonblocking(false).unwrap();
}

fn send(from: &UdpSocket, to: impl Into<IpAddr>, port: u16, message: &[u8]) {
    from.send_to(message, SocketAddr::new(to.into(), port))
        .unwrap();
}

/// A megabyte through TCP to `pt-near`, every byte checked.
fn tcp_transfer(cable: &Cable) {
    let data: Vec<u8> = (0..1 << 20).map(|i: u32| (i % 251) as u8).collect();
    let listener = cable.in_near(|| TcpListener::bind((NEAR_V4, BASE)).unwrap());
    thread::scope(|scope| {
        scope.spawn(|| {
            cable.in_far(|| {
                let to = SocketAddr::new(NEAR_V4.into(), BASE);
                let mut stream = TcpStream::connect_timeout(&to, DEADLINE).unwrap();
                stream.set_write_timeout(Some(DEADLINE)).unwrap();
                stream.write_all(&data).unwrap();
            });
        });
        let (mut stream, _) = listener.accept().unwrap();
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        let mut got = Vec::new();
        stream.read_to_end(&mut got).unwrap();
        assert!(got == data, "TCP delivered something else");
    });
}

fn steer_on_a_cable(mode: AttachMode) {
    let cable = Cable::new(1500);
    let (mut steer, mut endpoint) = cable.in_near(|| {
        let mut steer = Steer::load(&config()).unwrap();
        steer.attach(NEAR, mode).unwrap();
        let endpoint = Endpoint::bind();
        steer.insert(0, endpoint.fd()).unwrap();
        (steer, endpoint)
    });
    let any = IpAddr::from(Ipv6Addr::UNSPECIFIED);
    let (ours, next) = cable.in_near(|| (kernel_socket(any, BASE), kernel_socket(any, BASE + 1)));
    let (far_v4, far_v6) = cable.in_far(|| {
        let v6 = kernel_socket(any, 0);
        (kernel_socket(Ipv4Addr::UNSPECIFIED.into(), 0), v6)
    });

    // The kernel's own traffic on the interface: ARP, neighbour discovery, ICMP, TCP, UDP.
    let far = &cable.far;
    run(&format!(
        "ip netns exec {far} ping -n -q -c 3 -i 0.01 -W 5 {NEAR_V4}"
    ));
    run(&format!(
        "ip netns exec {far} ping -n -q -c 3 -i 0.01 -W 5 {NEAR_V6}"
    ));
    tcp_transfer(&cable);
    send(&far_v4, NEAR_V4, BASE + 1, b"not ours");
    assert_eq!(received(&next), b"not ours");
    assert_eq!(count(&steer, Reason::Redirected), 0);
    assert_eq!(count(&steer, Reason::NoSocket), 0);

    // Ours, in both families. Expect: whole in the AF_XDP socket, nothing in the kernel's.
    send(&far_v4, NEAR_V4, BASE, b"ours over IPv4");
    let frame = endpoint.receive();
    assert_eq!(frame[..6], cable.in_near(near_mac));
    assert_eq!(frame.len(), 42 + 14);
    assert_eq!(&frame[42..], b"ours over IPv4");
    send(&far_v6, NEAR_V6, BASE, b"ours over IPv6");
    assert_eq!(&endpoint.receive()[62..], b"ours over IPv6");
    assert_eq!(count(&steer, Reason::Redirected), 2);
    assert_nothing_received(&ours);

    // The queue loses its socket. Expect: dropped and counted, still nothing for the kernel.
    steer.remove(0).unwrap();
    steer.remove(0).unwrap();
    send(&far_v4, NEAR_V4, BASE, b"nobody there");
    await_count(&steer, Reason::NoSocket, 1);
    assert_nothing_received(&ours);

    // The socket comes back. Expect: steered again.
    steer.insert(0, endpoint.fd()).unwrap();
    send(&far_v4, NEAR_V4, BASE, b"again");
    assert_eq!(&endpoint.receive()[42..47], b"again");

    // The loader goes, and another goes on from the descriptors it left. Expect: attached all the while, counters as they were,
    // the socket still in the map, and the map the new one's to change.
    let redirected = count(&steer, Reason::Redirected);
    let left = steer.fds().unwrap().unwrap();
    drop(steer);
    send(&far_v4, NEAR_V4, BASE, b"orphan");
    assert_eq!(&endpoint.receive()[42..48], b"orphan");
    let queues = cable.in_near(config).queues;
    let mut steer = Steer::adopt(left, queues).unwrap();
    assert_ne!(steer.attached_to().unwrap(), 0);
    assert_eq!(count(&steer, Reason::Redirected), redirected + 1);
    steer.remove(0).unwrap();
    send(&far_v4, NEAR_V4, BASE, b"nobody there");
    await_count(&steer, Reason::NoSocket, 2);
    steer.insert(0, endpoint.fd()).unwrap();
    assert!(steer.insert(queues.into(), endpoint.fd()).is_err());

    // Ours while pings run. Expect: each goes its own way.
    run(&format!(
        "ip netns exec {far} ping -n -q -c 3 -i 0.01 -W 5 {NEAR_V4}"
    ));

    // The loader goes. Expect: detached, the kernel has the port. Another test's child may hold the
    // link's descriptor until it calls exec, so this may take more than one frame.
    drop(steer);
    ours.set_read_timeout(Some(Duration::from_millis(50)))
        .unwrap();
    let deadline = Instant::now() + DEADLINE;
    loop {
        assert!(Instant::now() < deadline, "still attached");
        send(&far_v4, NEAR_V4, BASE, b"for the kernel");
        let mut bytes = [0; 64];
        if let Ok(len) = ours.recv(&mut bytes) {
            assert_eq!(&bytes[..len], b"for the kernel");
            break;
        }
    }
}

// A socket of the kernel's is to receive through the queue of an interface that has a NAPI instance: it gets a frame of ours. Expect: that one, empty, and the
// socket knows the instance; the next frame comes to the AF_XDP socket.
#[test]
fn a_frame_teaches_a_socket_its_napi_instance() {
    let cable = Cable::new(1500);
    let near = &cable.near;
    run(&format!(
        "ip netns exec {near} ethtool -K {NEAR} gro on tx off"
    ));
    run(&format!(
        "ip netns exec {} ethtool -K {FAR} tso off gso off tx off",
        cable.far
    ));
    let (mut steer, mut endpoint, student) = cable.in_near(|| {
        let mut steer = Steer::load(&config()).unwrap();
        steer.attach(NEAR, AttachMode::Generic).unwrap();
        let endpoint = Endpoint::bind();
        steer.insert(0, endpoint.fd()).unwrap();
        let student = kernel_socket(Ipv4Addr::UNSPECIFIED.into(), 0);
        (steer, endpoint, student)
    });
    let port = student.local_addr().unwrap().port();
    assert!(matches!(
        steer.send_on_errand(1, port),
        Err(SteerError::NoQueue(1, 1))
    ));
    steer.send_on_errand(0, port).unwrap();
    let far = cable.in_far(|| kernel_socket(Ipv4Addr::UNSPECIFIED.into(), 0));
    send(&far, NEAR_V4, BASE, b"lost");
    assert_eq!(received(&student), b"");
    assert_eq!(count(&steer, Reason::PassErrand), 1);
    let mut id: libc::c_int = 0;
    let mut len = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: the option's value is an int, as long as it says.
    let got = unsafe {
        libc::getsockopt(
            student.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_INCOMING_NAPI_ID,
            std::ptr::from_mut(&mut id).cast(),
            &mut len,
        )
    };
    assert_eq!(got, 0);
    assert_ne!(id, 0, "it has received through no NAPI instance");
    send(&far, NEAR_V4, BASE, b"steered");
    assert!(endpoint.receive().ends_with(b"steered"));
    assert_nothing_received(&student);
}

#[test]
fn native_mode() {
    steer_on_a_cable(AttachMode::Native);
}

#[test]
fn generic_mode() {
    steer_on_a_cable(AttachMode::Generic);
}

// A jumbo cable takes the program natively, as "xdp.frags" promises.
#[test]
fn native_at_mtu_9000() {
    let cable = Cable::new(9000);
    cable.in_near(|| {
        let mut steer = Steer::load(&config()).unwrap();
        steer.attach(NEAR, AttachMode::Native).unwrap();
    });
}

// A second program, in either mode. Expect: refused with the way out, the first stays.
#[test]
fn never_replaces_another_program() {
    let cable = Cable::new(1500);
    cable.in_near(|| {
        let mut first = Steer::load(&config()).unwrap();
        first.attach(NEAR, AttachMode::Native).unwrap();
        assert!(matches!(
            first.attach(NEAR, AttachMode::Native),
            Err(SteerError::Attached)
        ));
        let mut second = Steer::load(&config()).unwrap();
        for mode in [AttachMode::Native, AttachMode::Generic] {
            let error = second.attach(NEAR, mode).unwrap_err();
            assert!(matches!(error, SteerError::Occupied(_)), "{error}");
        }
        // A copy of the link outlives the loader. Expect: attached until the copy is closed.
        let link = first.fds().unwrap().unwrap().link;
        drop(first);
        assert!(matches!(
            second.attach(NEAR, AttachMode::Native),
            Err(SteerError::Occupied(_))
        ));
        drop(link);
        let deadline = Instant::now() + DEADLINE;
        while let Err(error) = second.attach(NEAR, AttachMode::Native) {
            assert!(matches!(error, SteerError::Occupied(_)), "{error}");
            assert!(Instant::now() < deadline, "still attached");
            thread::yield_now();
        }
        assert!(second.fds().unwrap().is_some());
    });
}

#[test]
fn bad_interfaces_and_sockets_are_refused() {
    let cable = Cable::new(1500);
    cable.in_near(|| {
        let mut steer = Steer::load(&config()).unwrap();
        for name in [
            "pt-nowhere",
            "",
            "a\0b",
            "a-name-longer-than-any-interface",
            FAR,
        ] {
            let error = steer.attach(name, AttachMode::Native).unwrap_err();
            assert!(matches!(error, SteerError::NoInterface(_)), "{error}");
        }
        let error = steer.attach("lo", AttachMode::Native).unwrap_err();
        assert!(matches!(error, SteerError::NoNative(_)), "{error}");
        // Fewer receive queues than the peer has transmit queues.
        run(
"ip link add pt-one numrxqueues 1 numtxqueues 1 type veth peer name pt-many numrxqueues 2 numtxqueues 2");
        let error = steer.attach("pt-one", AttachMode::Native).unwrap_err();
        assert!(matches!(error, SteerError::TooFewQueues(_)), "{error}");

        let file = File::open("/dev/null").unwrap();
        let udp = kernel_socket(Ipv4Addr::LOCALHOST.into(), 0);
        for fd in [file.as_fd(), udp.as_fd()] {
            let error = steer.insert(0, fd).unwrap_err();
            assert!(matches!(error, SteerError::NoSocket(0, _)), "{error}");
        }
        let endpoint = Endpoint::bind();
        for queue in [1, 64, u32::MAX] {
            let error = steer.insert(queue, endpoint.fd()).unwrap_err();
            assert!(matches!(error, SteerError::NoQueue(..)), "{error}");
            let error = steer.remove(queue).unwrap_err();
            assert!(matches!(error, SteerError::NoQueue(..)), "{error}");
        }
    });
}

// Each capability alone is not enough, both are.
#[test]
fn needs_two_capabilities() {
    let cable = Cable::new(1500);
    let both = CapabilitySet::NET_ADMIN | CapabilitySet::BPF;
    let attempt = |keep: CapabilitySet| {
        cable.in_near(|| {
            let config = config();
            // Of this thread only, and it ends here.
            let none = CapabilitySet::empty();
            let sets = CapabilitySets {
                effective: keep,
                permitted: keep,
                inheritable: none,
            };
            rustix::thread::set_capabilities(None, sets).unwrap();
            Steer::load(&config)?.attach(NEAR, AttachMode::Native)
        })
    };
    for too_little in [
        CapabilitySet::empty(),
        CapabilitySet::NET_ADMIN,
        CapabilitySet::BPF,
    ] {
        let error = attempt(too_little).unwrap_err();
        assert!(
            matches!(error, SteerError::NoPrivilege(_)),
            "{too_little:?}: {error}"
        );
    }
    attempt(both).unwrap();
}
