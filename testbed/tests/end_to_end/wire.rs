//! The wire of an impaired lab, without any daemon: every impairment is measured on frames made by hand.

use std::collections::BTreeMap;
use std::net::UdpSocket;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use crate::harness::packet_socket::{self, ETHERTYPE};
use crate::harness::{STEP, pattern, until};
use portolan_testbed::{Encap, Impairment, Lab, LineCounters, process};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{RecvFlags, SendFlags};

/// Frames of one measurement.
const FRAMES: u64 = 20_000;
/// Frames sent before the wire is asked what became of them: no ring on the way is so short.
const BATCH: u64 = 128;
const HEADER: usize = 14;

/// Two packet sockets, node 1's and node 2's, in a lab that carries Ethernet.
struct Ends {
    lab: Lab,
    sockets: [OwnedFd; 2],
}

/// A frame as it came: its number, and what of it is not as it was sent, as the number of wrong bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Arrival {
    number: u64,
    wrong_bits: u32,
}

impl Ends {
    fn new(mtu: u32, impairment: Impairment) -> Self {
        let lab = Lab::builder().encap(Encap::Ethernet).mtu(mtu);
        let lab = lab.impaired(impairment).build().unwrap();
        let sockets = [1, 2].map(|node| {
            let socket = packet_socket::open(lab.node(node), ETHERTYPE);
            // A batch of jumbo frames, whatever the system's limit is.
            rustix::net::sockopt::set_socket_recv_buffer_size_force(&socket, 8 << 20).unwrap();
            socket
        });
        Self { lab, sockets }
    }

    fn header(&self, to: u16) -> [u8; HEADER] {
        let from = self.lab.node(3 - to);
        packet_socket::header(from, self.lab.node(to), ETHERTYPE)
    }

    /// Frame `number` toward a node, of so many bytes behind the Ethernet header.
    fn frame(&self, to: u16, number: u64, bytes: usize) -> Vec<u8> {
        let mut frame = self.header(to).to_vec();
        frame.resize(HEADER + bytes, 0);
        frame[HEADER..HEADER + 8].copy_from_slice(&number.to_be_bytes());
        pattern::fill(&mut frame[HEADER + 8..], number);
        frame
    }

    fn send(&self, to: u16, frame: &[u8]) {
        let socket = &self.sockets[usize::from(3 - to) - 1];
        let sent = rustix::net::send(socket, frame, SendFlags::empty()).unwrap();
        assert_eq!(sent, frame.len());
    }

    /// What has come to a node. Frames of `bytes` are expected in the order they were sent, more or less, from `next` on.
    fn receive(&self, at: u16, bytes: usize, next: u64) -> Option<Arrival> {
        let mut frame = vec![0; 10_000];
        let socket = &self.sockets[usize::from(at) - 1];
        let len = match rustix::net::recv(socket, &mut *frame, RecvFlags::DONTWAIT) {
            Ok((len, _)) => len,
            Err(rustix::io::Errno::AGAIN) => return None,
            Err(error) => panic!("{error}"),
        };
        assert_eq!(len, HEADER + bytes);
        frame.truncate(len);
        let number = u64::from_be_bytes(frame[HEADER..HEADER + 8].try_into().unwrap());
        // The number itself may be what is wrong: then one near by is right.
        let near = (next.saturating_sub(BATCH)..next + BATCH).chain([number]);
        let wrong = |number: u64| {
            let sent = self.frame(at, number, bytes);
            let bits = frame.iter().zip(&sent).map(|(a, b)| (a ^ b).count_ones());
            bits.sum::<u32>()
        };
        let wrong_bits = wrong(number);
        let (number, wrong_bits) = if wrong_bits == 0 {
            (number, 0)
        } else {
            let candidates = near.map(|number| (number, wrong(number)));
            candidates.min_by_key(|(_, bits)| *bits).unwrap()
        };
        Some(Arrival { number, wrong_bits })
    }

    fn counters(&self, toward: u16) -> LineCounters {
        let counters = self.lab.wire().counters().unwrap();
        assert_eq!(counters.missed, 0, "the wire is too slow for this test");
        counters.toward[&toward]
    }

    /// Sends `frames` frames toward node 2 under an impairment and collects what comes, all of it.
    fn measure(&self, impairment: &Impairment, frames: u64, bytes: usize) -> Measured {
        self.lab.wire().set(impairment).unwrap();
        let before = self.counters(2);
        let mut arrivals = Vec::new();
        for number in 0..frames {
            self.send(2, &self.frame(2, number, bytes));
            if number % BATCH == BATCH - 1 || number + 1 == frames {
                // What is to come has come when the wire has decided on all of it and handed on what it decided to.
                let counters = soon("every frame is settled", || {
                    while let Some(arrival) = self.receive(2, bytes, number) {
                        arrivals.push(arrival);
                    }
                    let counters = since(&before, &self.counters(2));
                    (counters.offered == number + 1 && counters.carried == settled(&counters))
                        .then_some(counters)
                });
                soon("it has come", || {
                    while let Some(arrival) = self.receive(2, bytes, number) {
                        arrivals.push(arrival);
                    }
                    (arrivals.len() as u64 == counters.carried).then_some(())
                });
            }
        }
        Measured {
            arrivals,
            counters: since(&before, &self.counters(2)),
        }
    }
}

/// [`until`] without a pause: what takes microseconds, hundreds of times.
#[track_caller]
fn soon<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + STEP;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < deadline, "{what}: not within {STEP:?}");
        std::thread::yield_now();
    }
}

/// Frames and copies that must have been carried when nothing is under way any more.
fn settled(counters: &LineCounters) -> u64 {
    let dropped = counters.lost + counters.cut + counters.overflowed;
    assert_eq!((counters.crowded, counters.refused), (0, 0));
    counters.offered - dropped + counters.duplicated
}

fn since(before: &LineCounters, after: &LineCounters) -> LineCounters {
    LineCounters {
        offered: after.offered - before.offered,
        carried: after.carried - before.carried,
        carried_bytes: after.carried_bytes - before.carried_bytes,
        cut: after.cut - before.cut,
        lost: after.lost - before.lost,
        corrupted: after.corrupted - before.corrupted,
        duplicated: after.duplicated - before.duplicated,
        reordered: after.reordered - before.reordered,
        overflowed: after.overflowed - before.overflowed,
        crowded: after.crowded - before.crowded,
        refused: after.refused - before.refused,
    }
}

struct Measured {
    arrivals: Vec<Arrival>,
    counters: LineCounters,
}

impl Measured {
    fn numbers(&self) -> Vec<u64> {
        self.arrivals.iter().map(|arrival| arrival.number).collect()
    }
}

/// `count` of `of` is `probability`, to within four standard deviations.
#[track_caller]
fn assert_share(count: u64, of: u64, probability: f64) {
    let (count, of) = (count as f64, of as f64);
    let deviation = (of * probability * (1.0 - probability)).sqrt();
    let expected = of * probability;
    assert!(
        (count - expected).abs() < 4.0 * deviation,
        "{count} of {of}, not about {expected}"
    );
}

#[test]
fn loss_is_of_its_share_and_the_same_for_the_same_seed() {
    let ends = Ends::new(1500, Impairment::default());
    let all = ends.measure(&Impairment::default(), 2000, 64);
    assert_eq!(all.numbers(), (0..2000).collect::<Vec<_>>());

    let lossy = Impairment::loss(0.1).seeded(42);
    let first = ends.measure(&lossy, FRAMES, 64);
    assert_share(first.counters.lost, FRAMES, 0.1);
    assert_eq!(first.arrivals.len() as u64, FRAMES - first.counters.lost);
    assert!(first.numbers().is_sorted());
    let again = ends.measure(&lossy, FRAMES, 64);
    assert_eq!(first.numbers(), again.numbers());
    let other = ends.measure(&lossy.clone().seeded(43), 2000, 64);
    assert_ne!(first.numbers()[..other.arrivals.len()], other.numbers());
    // Bytes do not matter, numbers do.
    let longer = ends.measure(&lossy, 2000, 1500);
    assert_eq!(longer.numbers(), first.numbers()[..longer.arrivals.len()]);
}

#[test]
fn doubled_frames_come_twice_in_a_row() {
    let ends = Ends::new(1500, Impairment::default());
    let impairment = Impairment {
        duplicate: 0.05,
        ..Impairment::default()
    };
    let measured = ends.measure(&impairment, FRAMES, 64);
    assert_share(measured.counters.duplicated, FRAMES, 0.05);
    let mut numbers = measured.numbers();
    assert!(numbers.is_sorted());
    assert_eq!(numbers.len() as u64, FRAMES + measured.counters.duplicated);
    numbers.dedup();
    assert_eq!(numbers, (0..FRAMES).collect::<Vec<_>>());
    assert!(measured.arrivals.iter().all(|a| a.wrong_bits == 0));
}

fn one_bit_is_wrong(mtu: u32, frames: u64) {
    let ends = Ends::new(mtu, Impairment::default());
    let impairment = Impairment {
        corrupt: 0.05,
        ..Impairment::default()
    };
    let measured = ends.measure(&impairment, frames, mtu as usize);
    assert_share(measured.counters.corrupted, frames, 0.05);
    assert_eq!(measured.numbers(), (0..frames).collect::<Vec<_>>());
    let mut wrong: BTreeMap<u32, u64> = BTreeMap::new();
    for arrival in &measured.arrivals {
        *wrong.entry(arrival.wrong_bits).or_default() += 1;
    }
    let corrupted = measured.counters.corrupted;
    assert_eq!(wrong, [(0, frames - corrupted), (1, corrupted)].into());
}

#[test]
fn a_damaged_frame_has_one_wrong_bit() {
    one_bit_is_wrong(1500, 5000);
}

#[test]
fn a_damaged_jumbo_frame_has_one_wrong_bit() {
    one_bit_is_wrong(9000, 2000);
}

#[test]
fn an_overtaken_frame_comes_after_so_many_others() {
    let ends = Ends::new(1500, Impairment::default());
    let impairment = Impairment {
        reorder: 0.01,
        reorder_frames: 3,
        ..Impairment::default()
    };
    let measured = ends.measure(&impairment, FRAMES, 64);
    assert_share(measured.counters.reordered, FRAMES, 0.01);
    let numbers = measured.numbers();
    let overtaken = numbers.windows(2).filter(|pair| pair[1] < pair[0]);
    // Two in a row come together.
    assert!(overtaken.count() as u64 > measured.counters.reordered / 2);
    for (place, number) in numbers.iter().enumerate() {
        let by = numbers[..place].iter().filter(|other| *other > number);
        assert!(by.take(9).count() <= 3, "frame {number} at {place}");
    }
    let mut sorted = numbers;
    sorted.sort_unstable();
    assert_eq!(sorted, (0..FRAMES).collect::<Vec<_>>());
}

#[test]
fn jumbo_frames_cross_whole_also_when_doubled_and_overtaken() {
    let ends = Ends::new(9000, Impairment::default());
    let impairment = Impairment {
        duplicate: 0.2,
        reorder: 0.1,
        ..Impairment::default()
    };
    let measured = ends.measure(&impairment, 2000, 9000);
    assert!(measured.arrivals.iter().all(|a| a.wrong_bits == 0));
    assert_share(measured.counters.duplicated, 2000, 0.2);
    assert_share(measured.counters.reordered, 2000, 0.1);
}

/// The time until a frame has come to a node.
fn arrival(ends: &Ends, to: u16, number: u64) -> Duration {
    let began = Instant::now();
    ends.send(to, &ends.frame(to, number, 100));
    let came = soon("the frame", || ends.receive(to, 100, number));
    assert_eq!(came.number, number);
    began.elapsed()
}

#[test]
fn a_delay_is_the_least_a_frame_takes() {
    let ends = Ends::new(1500, Impairment::default());
    let undelayed = (0..100)
        .map(|number| arrival(&ends, 2, number))
        .min()
        .unwrap();
    let delay = Duration::from_millis(5);
    assert!(undelayed < delay, "{undelayed:?}");
    let delayed = Impairment {
        delay_us: 5000,
        ..Impairment::default()
    };
    // Only one way.
    ends.lab.wire().set_toward(2, &delayed).unwrap();
    for number in 0..20 {
        let took = arrival(&ends, 2, number);
        assert!(took >= delay, "{took:?}");
    }
    let back = (0..20)
        .map(|number| arrival(&ends, 1, number))
        .min()
        .unwrap();
    assert!(back < delay, "{back:?}");
}

#[test]
fn a_rate_holds_and_its_buffer_is_finite() {
    const BYTES: usize = 1250 - HEADER;
    let ends = Ends::new(1500, Impairment::default());
    // 1250 bytes take 1 ms.
    let mut slow = Impairment {
        rate_bps: 10_000_000,
        ..Impairment::default()
    };
    let began = Instant::now();
    let measured = ends.measure(&slow, 100, BYTES);
    assert_eq!(measured.arrivals.len(), 100);
    let took = began.elapsed();
    assert!(took >= Duration::from_millis(100), "{took:?}");

    // Ten fit, and as many as the link sends while the others come.
    slow.buffer_bytes = 10 * 1250;
    slow.rate_bps /= 10;
    ends.lab.wire().set(&slow).unwrap();
    let before = ends.counters(2);
    let began = Instant::now();
    for number in 0..100 {
        ends.send(2, &ends.frame(2, number, BYTES));
    }
    let all = soon("all are offered", || {
        let counters = since(&before, &ends.counters(2));
        (counters.offered == 100).then_some(counters)
    });
    let sent = 1 + began.elapsed().as_millis() as u64 / 10;
    let admitted = 100 - all.overflowed;
    assert!(
        (10..=10 + sent).contains(&admitted),
        "{admitted} admitted while {sent} were sent"
    );
    // A test that takes longer than sending everything would show nothing.
    assert!(sent < 80, "{sent}");
    let mut numbers = Vec::new();
    soon("what was admitted", || {
        numbers.extend(ends.receive(2, BYTES, 0).map(|arrival| arrival.number));
        (numbers.len() as u64 == admitted).then_some(())
    });
    // A finite buffer drops what comes last.
    assert_eq!(numbers[..10], (0..10).collect::<Vec<_>>());
}

fn readable(socket: &OwnedFd, within: Duration) -> bool {
    let within = Timespec::try_from(within).unwrap();
    poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&within)).unwrap() > 0
}

#[test]
fn a_link_is_cut_one_way_and_healed() {
    let ends = Ends::new(1500, Impairment::default());
    let wire = ends.lab.wire();
    wire.cut_toward(2).unwrap();
    ends.send(2, &ends.frame(2, 1, 64));
    arrival(&ends, 1, 2);
    until("the frame is dropped", STEP, || {
        (ends.counters(2).cut == 1).then_some(())
    });
    assert!(!readable(&ends.sockets[1], Duration::ZERO));
    wire.heal().unwrap();
    arrival(&ends, 2, 3);
    // Both ways.
    wire.cut().unwrap();
    ends.send(1, &ends.frame(1, 4, 64));
    until("the frame is dropped", STEP, || {
        (ends.counters(1).cut == 1).then_some(())
    });
    assert!(wire.cut_toward(3).is_err());
}

#[test]
fn what_is_not_portolans_crosses_unimpaired() {
    let lab = Lab::builder().impaired(Impairment::loss(1.0)).mtu(9000);
    let lab = lab.build().unwrap();
    for to in [
        lab.node(2).ipv4().to_string(),
        lab.node(2).ipv6().to_string(),
    ] {
        let mut ping = lab.node(1).command("ping");
        // Across as whole frames of the MTU, with address resolution before.
        ping.args(["-q", "-c", "20", "-i", "0.01", "-W", "5", "-s", "8900", &to]);
        let text = process::run_ok(&mut ping, STEP).unwrap();
        assert!(text.contains(" 0% packet loss"), "{text}");
    }
    let counters = lab.wire().counters().unwrap();
    assert!(
        counters.toward.values().all(|line| line.offered == 0),
        "{counters:?}"
    );
}

fn datagrams_are_impaired(encap: Encap) {
    let lab = Lab::builder().encap(encap).impaired(Impairment::default());
    let lab = lab.build().unwrap();
    let open = |node: u16, port: u16| {
        let node = lab.node(node);
        node.in_namespace(|| match encap {
            Encap::Udp6 => UdpSocket::bind((node.ipv6(), port)).unwrap(),
            _ => UdpSocket::bind((node.ipv4(), port)).unwrap(),
        })
        .unwrap()
    };
    let (from, to) = (open(1, 4000), open(2, 28_000));
    to.set_read_timeout(Some(STEP)).unwrap();
    let address = to.local_addr().unwrap();
    let mut buffer = [0; 100];
    from.send_to(b"first", address).unwrap();
    assert_eq!(to.recv(&mut buffer).unwrap(), 5);
    lab.wire().set(&Impairment::loss(1.0)).unwrap();
    from.send_to(b"second", address).unwrap();
    until("it is lost", STEP, || {
        let counters = lab.wire().counters().unwrap();
        (counters.toward[&2].lost == 1).then_some(())
    });
    lab.wire().set(&Impairment::default()).unwrap();
    from.send_to(b"the third", address).unwrap();
    assert_eq!(to.recv(&mut buffer).unwrap(), 9);
}

#[test]
fn datagrams_over_ipv4_are_impaired() {
    datagrams_are_impaired(Encap::Udp4);
}

#[test]
fn datagrams_over_ipv6_are_impaired() {
    datagrams_are_impaired(Encap::Udp6);
}

#[test]
fn nonsense_is_refused_before_and_while_it_runs() {
    let error = Lab::builder()
        .impaired(Impairment::loss(2.0))
        .build()
        .unwrap_err();
    assert!(error.to_string().contains("loss is 2"), "{error:#}");
    let jumbo = Lab::builder().impaired(Impairment::default()).mtu(16_000);
    assert!(jumbo.build().is_err());
    let lab = Lab::builder()
        .impaired(Impairment::default())
        .build()
        .unwrap();
    assert!(lab.wire().set(&Impairment::loss(-1.0)).is_err());
    assert!(lab.wire().set_toward(9, &Impairment::default()).is_err());
}
