//! Fault-free cost first: once tables and queues have grown to the load, no message and no frame allocates.
//!
//! Two endpoints send to each other, both ways at once, through a link that may lose frames; hosts and link are arrays made beforehand. An
//! allocator counts what this thread asks it for between the warm-up and the end.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::backtrace::Backtrace;
use std::cell::Cell;
use std::sync::atomic::{AtomicBool, Ordering};

use portolan_transport::Endpoint;
use portolan_transport::endpoint::Config;
use portolan_transport::host::{
    Delivery, Host, MemoryFault, NoBuffer, SendRequest, SendStatus, TableFull,
};
use portolan_transport::ident::{
    BufferId, Nanos, NodeId, Peer, PortId, Priority, RecordId, SendId, StreamKey,
};
use portolan_transport::policy::{AckMode, Profile};
use portolan_transport::wire::crc32c;

thread_local! {
    /// Allocations of this thread since counting began; `None` while nobody counts.
    static COUNT: Cell<Option<u64>> = const { Cell::new(None) };
}

/// Show where each allocation comes from: PORTOLAN_TRACE is set.
static SHOW: AtomicBool = AtomicBool::new(false);

/// The system's allocator, watched.
struct Counting;

fn count() {
    // Threads that end have no cell any more.
    let _ = COUNT.try_with(|count| {
        if let Some(so_far) = count.take() {
            if SHOW.load(Ordering::Relaxed) {
                eprintln!("{}", Backtrace::force_capture());
            }
            count.set(Some(so_far + 1));
        }
    });
}

// SAFETY: every call is passed on unchanged to the system's allocator, which keeps the contract.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: as the caller promised.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: as the caller promised.
        unsafe { System.dealloc(at, layout) }
    }
    unsafe fn realloc(&self, at: *mut u8, layout: Layout, len: usize) -> *mut u8 {
        count();
        // SAFETY: as the caller promised.
        unsafe { System.realloc(at, layout, len) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Allocations of `work`.
fn allocations(work: impl FnOnce()) -> u64 {
    COUNT.set(Some(0));
    work();
    COUNT.take().expect("counting")
}

const PORT: PortId = PortId(1);
const LONGEST: usize = 100_000;
/// Sends under way and buffers offered, per side.
const SENDS: usize = 32;
const BUFFERS: usize = 8;
/// Frames on the link.
const IN_FLIGHT: usize = 4096;
const FRAME: usize = 1458;
const DELAY: Nanos = 5_000;

static PAYLOAD: [u8; LONGEST] = [0x5a; LONGEST];

/// Surroundings without a single list that grows.
struct LeanHost {
    /// Send slots in use.
    sending: [bool; SENDS],
    generation: u32,
    free: [bool; BUFFERS],
    memory: Vec<Vec<u8>>,
    /// Buffers consumed, to be offered again.
    consumed: u32,
    delivered: u64,
    completed: u64,
    epoch: u32,
    peer: Option<(u64, u32)>,
}

impl LeanHost {
    fn new() -> Self {
        Self {
            sending: [false; SENDS],
            generation: 1,
            free: [true; BUFFERS],
            memory: vec![vec![0; LONGEST]; BUFFERS],
            consumed: 0,
            delivered: 0,
            completed: 0,
            epoch: 7,
            peer: None,
        }
    }
}

impl Host for LeanHost {
    fn accept(&mut self, _: &SendRequest, _: RecordId, _: u32, _: u32) {}
    fn read_payload(&mut self, _: SendId, at: u32, to: &mut [u8]) -> Result<u32, MemoryFault> {
        to.copy_from_slice(&PAYLOAD[at as usize..][..to.len()]);
        Ok(crc32c(to))
    }
    fn complete(&mut self, send: SendId, status: SendStatus) {
        assert_eq!(status, SendStatus::Delivered);
        assert!(std::mem::take(&mut self.sending[send.slot as usize]));
        self.completed += 1;
    }
    fn claim(&mut self, port: PortId, _: Priority, len: u32) -> Result<BufferId, NoBuffer> {
        assert!(len as usize <= LONGEST);
        let slot = self
            .free
            .iter()
            .position(|free| *free)
            .ok_or(NoBuffer::NotNow)?;
        self.free[slot] = false;
        Ok(BufferId {
            port,
            slot: slot as u32,
            generation: 1,
        })
    }
    fn release(&mut self, buffer: BufferId) {
        assert!(!std::mem::replace(
            &mut self.free[buffer.slot as usize],
            true
        ));
    }
    fn write_payload(&mut self, to: BufferId, at: u32, from: &[u8]) -> Result<u32, MemoryFault> {
        self.memory[to.slot as usize][at as usize..][..from.len()].copy_from_slice(from);
        Ok(crc32c(from))
    }
    fn commit(&mut self, delivery: &Delivery) -> Result<(), MemoryFault> {
        self.release(delivery.buffer);
        self.consumed += 1;
        self.delivered += 1;
        Ok(())
    }
    fn commit_base(&mut self, _: RecordId, _: u32, _: u32, _: u32) {}
    fn draw_epoch(&mut self, _: u32) -> u32 {
        self.epoch += 1;
        self.epoch
    }
    fn open_send_record(
        &mut self,
        _: StreamKey,
        _: u64,
        _: u32,
        _: u32,
    ) -> Result<RecordId, TableFull> {
        Ok(RecordId(0))
    }
    fn free_send_record(&mut self, _: RecordId) {}
    fn open_receive_record(
        &mut self,
        _: StreamKey,
        _: u64,
        _: u32,
        _: u32,
    ) -> Result<RecordId, TableFull> {
        Ok(RecordId(1))
    }
    fn free_receive_record(&mut self, _: RecordId) {}
    fn store_peer(&mut self, _: Peer, incarnation: u64, floor: u32) -> Result<(), TableFull> {
        self.peer = Some((incarnation, floor));
        Ok(())
    }
    fn load_peer(&self, _: Peer) -> Option<(u64, u32)> {
        self.peer
    }
}

/// A frame under way.
struct Flight {
    at: Nanos,
    to: usize,
    len: usize,
    bytes: [u8; FRAME],
}

/// Two endpoints and the link between them.
struct Pair {
    now: Nanos,
    ends: [(Endpoint, LeanHost); 2],
    /// A ring: frames arrive in the order they were sent.
    flights: Vec<Flight>,
    first: usize,
    count: usize,
    loss_permille: u64,
    random: u64,
    sent: u64,
}

fn node(end: usize) -> NodeId {
    NodeId(end as u16 + 1)
}

impl Pair {
    fn new(profile: Profile, loss_permille: u64) -> Self {
        let end = |index| {
            let config = Config {
                node: node(index),
                queue: 0,
                queues: 1,
                incarnation: 77 + index as u64,
                engine_epoch: 1,
                cluster: 3,
                name: "lean".to_owned(),
                max_frame: FRAME as u16,
                max_peers: 4,
                first_number: u32::MAX - 100,
                policy: profile.policy(),
            };
            let mut endpoint = Endpoint::new(config, 1);
            endpoint.set_node(1, node(1 - index), FRAME as u16);
            endpoint.port_opened(PORT);
            (endpoint, LeanHost::new())
        };
        let empty = || Flight {
            at: 0,
            to: 0,
            len: 0,
            bytes: [0; FRAME],
        };
        Self {
            now: 1,
            ends: [end(0), end(1)],
            flights: (0..IN_FLIGHT).map(|_| empty()).collect(),
            first: 0,
            count: 0,
            loss_permille,
            random: 9,
            sent: 0,
        }
    }

    fn lose(&mut self) -> bool {
        self.random = self
            .random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (self.random >> 33) % 1000 < self.loss_permille
    }

    /// Sends `messages` from each side, as many at once as there are slots, until all have ended.
    fn exchange(&mut self, messages: u64, len: impl Fn(u64) -> u32) {
        let (mut left, mut turns) = ([messages; 2], 0u64);
        let ends = |pair: &Self| pair.ends.each_ref().map(|end| end.1.completed + messages);
        let done = ends(self);
        while self
            .ends
            .iter()
            .zip(done)
            .any(|(end, done)| end.1.completed < done)
        {
            turns += 1;
            assert!(turns < 1000 * messages + 1_000_000, "it does not end");
            for (end, left) in left.iter_mut().enumerate() {
                self.submit(end, left, &len);
            }
            self.turn();
        }
    }

    fn submit(&mut self, end: usize, left: &mut u64, len: impl Fn(u64) -> u32) {
        let (endpoint, host) = &mut self.ends[end];
        while *left > 0
            && let Some(slot) = host.sending.iter().position(|busy| !busy)
        {
            *left -= 1;
            host.sending[slot] = true;
            host.generation = host.generation.wrapping_add(1).max(1);
            let request = SendRequest {
                id: SendId {
                    port: PORT,
                    slot: slot as u32,
                    generation: host.generation,
                },
                stream: StreamKey {
                    local: PORT,
                    node: node(1 - end),
                    remote: PORT,
                    priority: Priority::Low,
                },
                len: len(*left),
                tag: *left,
                deadline: u64::MAX,
                ack: AckMode::Policy,
            };
            endpoint.submit(self.now, &request, host).expect("accepted");
        }
    }

    /// What happens now; then the clock goes on to what happens next.
    fn turn(&mut self) {
        while self.count > 0 && self.flights[self.first].at <= self.now {
            let flight = &self.flights[self.first];
            let (endpoint, host) = &mut self.ends[flight.to];
            let frame = [&flight.bytes[..flight.len]];
            endpoint
                .handle_frame(self.now, &frame, host)
                .expect("a frame of ours");
            self.first = (self.first + 1) % IN_FLIGHT;
            self.count -= 1;
        }
        for end in 0..2 {
            let (endpoint, host) = &mut self.ends[end];
            for _ in 0..std::mem::take(&mut host.consumed) {
                endpoint.buffer_provided(self.now, PORT);
            }
            if endpoint.poll_timeout().is_some_and(|at| at <= self.now) {
                endpoint.handle_timeout(self.now, host);
            }
            self.transmit(end);
        }
        let timeouts = self
            .ends
            .iter()
            .filter_map(|end| end.0.poll_timeout())
            .min();
        let arrival = (self.count > 0).then(|| self.flights[self.first].at);
        let next = timeouts.into_iter().chain(arrival).min();
        self.now = next.unwrap_or(self.now + DELAY).max(self.now + 1);
    }

    fn transmit(&mut self, end: usize) {
        while self.count < IN_FLIGHT {
            let place = (self.first + self.count) % IN_FLIGHT;
            let (endpoint, host) = &mut self.ends[end];
            let flight = &mut self.flights[place];
            let Some(sent) = endpoint.poll_transmit(self.now, &mut flight.bytes, host) else {
                return;
            };
            (flight.at, flight.to, flight.len) = (self.now + DELAY, 1 - end, sent.len);
            self.sent += 1;
            if !self.lose() {
                self.count += 1;
            }
        }
    }
}

/// Warm-up and measurement of one case. The warm-up is longer and loses more: queues grow to the worst that happens, and a worse burst
/// than any before would count as an allocation, though no message has one of its own.
fn measure(name: &str, profile: Profile, loss: u64, messages: u64, len: fn(u64) -> u32) -> u64 {
    let mut pair = Pair::new(profile, 3 * loss);
    pair.exchange(messages * if loss == 0 { 1 } else { 3 }, len);
    pair.loss_permille = loss;
    let frames = pair.sent;
    let counted = allocations(|| pair.exchange(messages, len));
    println!(
        "{:>13}, {loss:>3} permille lost, {name}: {counted} allocations, {} messages, {} frames",
        profile.name(),
        2 * messages,
        pair.sent - frames,
    );
    counted
}

// Small, long and mixed messages in both directions, under every profile, without loss and with it. Expect: no allocation.
#[test]
fn the_common_path_does_not_allocate() {
    SHOW.store(
        std::env::var_os("PORTOLAN_TRACE").is_some(),
        Ordering::Relaxed,
    );
    let mut all = 0;
    for profile in Profile::ALL {
        for loss in [0, 20] {
            all += measure("small", profile, loss, 3000, |n| (n % 200) as u32);
            all += measure("long", profile, loss, 100, |n| 20_000 + (n % 30_000) as u32);
            let mixed = |n: u64| {
                if n.is_multiple_of(8) {
                    30_000
                } else {
                    (n % 3000) as u32
                }
            };
            all += measure("mixed", profile, loss, 1500, mixed);
        }
    }
    assert_eq!(all, 0, "allocations; PORTOLAN_TRACE=1 shows where");
}

// The allocator counts at all.
#[test]
fn an_allocation_is_noticed() {
    assert!(allocations(|| drop(std::hint::black_box(vec![1u8; 10]))) == 1);
}
