//! Portolan leaves the kernel what is the kernel's: ping, TCP and UDP on the same interface work all the while Portolan does.

use std::io::{Read, Write};
use std::net::{IpAddr, TcpListener, TcpStream, UdpSocket};
use std::time::Instant;

use crate::harness::talker::{Manner, Talker, Talking, close_books};
use crate::harness::{Cluster, STEP, books, pattern};
use portolan::{PortOptions, Priority};
use portolan_testbed::{Encap, Lab, Node, process};

const TCP_BYTES: usize = 32 << 20;
const DATAGRAMS: u64 = 500;
/// Letters heard while a kernel job runs: it did run beside ours.
const BESIDE: u64 = 100;

fn ping(from: &Node, to: IpAddr) {
    let mut command = from.command("ping");
    let to = to.to_string();
    command.args(["-q", "-c", "100", "-i", "0.005", "-W", "5", &to]);
    let text = process::run_ok(&mut command, STEP).unwrap();
    assert!(text.contains(" 0% packet loss"), "{text}");
}

fn tcp(from: &Node, to: &Node, address: IpAddr, port: u16) {
    let mut sent = vec![0; TCP_BYTES];
    pattern::fill(&mut sent, u64::from(port));
    let listener = to
        .in_namespace(|| TcpListener::bind((address, port)).unwrap())
        .unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let connect = || TcpStream::connect_timeout(&(address, port).into(), STEP).unwrap();
            let mut stream = from.in_namespace(connect).unwrap();
            stream.set_write_timeout(Some(STEP)).unwrap();
            stream.write_all(&sent).unwrap();
        });
        let (mut stream, _) = listener.accept().unwrap();
        stream.set_read_timeout(Some(STEP)).unwrap();
        let mut received = Vec::with_capacity(TCP_BYTES);
        stream.read_to_end(&mut received).unwrap();
        assert!(received == sent);
    });
}

/// Datagrams to a port that is not ours, one at a time, each sent back.
fn udp(from: &Node, to: &Node, ours: IpAddr, theirs: IpAddr, port: u16) {
    let bind = |address: IpAddr, port: u16| {
        move || {
            let socket = UdpSocket::bind((address, port)).unwrap();
            socket.set_read_timeout(Some(STEP)).unwrap();
            socket
        }
    };
    let server = to.in_namespace(bind(theirs, port)).unwrap();
    let client = from.in_namespace(bind(ours, 0)).unwrap();
    client.connect((theirs, port)).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut bytes = [0; 1500];
            for _ in 0..DATAGRAMS {
                let (len, back) = server.recv_from(&mut bytes).unwrap();
                server.send_to(&bytes[..len], back).unwrap();
            }
        });
        for number in 0..DATAGRAMS {
            let mut sent = vec![0; (number * 7 % 1200) as usize];
            pattern::fill(&mut sent, number);
            client.send(&sent).unwrap();
            let mut received = [0; 1500];
            let len = client.recv(&mut received).unwrap();
            assert!(received[..len] == sent);
        }
    });
}

fn both_go_on(encap: Encap) {
    let cluster = Cluster::start(Lab::builder().encap(encap));
    let (one, two) = (cluster.lab.node(1), cluster.lab.node(2));
    let port = |node| cluster.open(node, PortOptions::at(9));
    let (first, second) = (port(1), port(2));
    let talk = |port: portolan::Port, to| {
        let to = [(to, Priority::Low), (to, Priority::High)];
        let talking = Talking::start(Talker::new(port, &to, Manner::default()).unwrap());
        talking.send(true);
        talking
    };
    let (at_one, at_two) = (first.address(), second.address());
    let mut all = vec![talk(first, at_two), talk(second, at_one)];
    for talking in &mut all {
        talking.hear(BESIDE, STEP);
    }

    let (v4, v6): ([IpAddr; 2], [IpAddr; 2]) = (
        [one.ipv4().into(), two.ipv4().into()],
        [one.ipv6().into(), two.ipv6().into()],
    );
    let jobs: [(&str, &dyn Fn()); 7] = [
        ("ping", &|| ping(one, v4[1])),
        ("ping back, IPv6", &|| ping(two, v6[0])),
        ("TCP", &|| tcp(one, two, v4[1], 5001)),
        ("TCP back, IPv6", &|| tcp(two, one, v6[0], 5002)),
        ("UDP", &|| udp(one, two, v4[0], v4[1], 5003)),
        ("UDP, IPv6", &|| udp(two, one, v6[1], v6[0], 5004)),
        // The neighbours of our own ports.
        ("UDP, 27999", &|| udp(one, two, v4[0], v4[1], 27_999)),
    ];
    for (name, job) in jobs {
        let before: Vec<u64> = all.iter().map(Talking::received).collect();
        // Again and again, until enough letters came while it ran.
        let deadline = Instant::now() + STEP;
        loop {
            job();
            let mut heard = all.iter_mut().zip(&before).map(|(talking, before)| {
                talking.check();
                talking.received() - before
            });
            if heard.all(|letters| letters >= BESIDE) {
                break;
            }
            assert!(Instant::now() < deadline, "{name}: no letters beside it");
        }
    }
    let books = close_books(all, STEP);
    assert_eq!(books::complaints(&books), [""; 0]);
    for book in &books {
        assert_eq!(book.failures().count(), 0, "{book:?}");
        assert!(book.delivered() > 0);
    }
}

#[test]
fn ping_tcp_and_udp_beside_udp() {
    both_go_on(Encap::Udp4);
}

#[test]
fn ping_tcp_and_udp_beside_udp_on_ipv6() {
    both_go_on(Encap::Udp6);
}

#[test]
fn ping_tcp_and_udp_beside_ethernet() {
    both_go_on(Encap::Ethernet);
}

// The UDP ports of the daemon are its own: nobody else gets them while it runs.
#[test]
fn the_daemons_udp_ports_are_held() {
    let cluster = Cluster::start(Lab::builder().queues(2));
    let node = cluster.lab.node(1);
    for port in [28_000, 28_001] {
        let bound = node
            .in_namespace(|| UdpSocket::bind((node.ipv4(), port)))
            .unwrap();
        assert!(bound.is_err(), "{port}");
    }
}
