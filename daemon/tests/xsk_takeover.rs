//! Owners killed in the middle of traffic, again and again, and what it costs
//! to take over compared with starting anew.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod xsk_support;

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use portoland::xsk::{BindMode, UmemLayout, UmemMemfd, Xsk, XskConfig, XskFd};
use rustix::fs::MemfdFlags;
use rustix::mm::{MapFlags, ProtFlags};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use xsk_support::*;

/// Words shared with forked owners: the ownership table and a word of theirs.
struct Shared {
    words: &'static [AtomicU64],
}

impl Shared {
    /// Mapped until the test ends.
    fn new(len: usize) -> Self {
        let fd: OwnedFd = rustix::fs::memfd_create("words", MemfdFlags::CLOEXEC).unwrap();
        let bytes = len * size_of::<AtomicU64>();
        rustix::fs::ftruncate(&fd, bytes as u64).unwrap();
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping of a file of this size, page aligned, never
        // unmapped; its words are accessed as atomics only.
        let words = unsafe {
            let null = std::ptr::null_mut();
            let start =
                rustix::mm::mmap(null, bytes, access, MapFlags::SHARED, fd.as_fd(), 0).unwrap();
            std::slice::from_raw_parts(start.cast::<AtomicU64>(), len)
        };
        Shared { words }
    }
}

/// Words for what an owner says before it gives up.
const FAILURE_WORDS: usize = 32;

/// What an owner tells its parent, in the last shared words.
#[derive(Clone, Copy)]
#[repr(usize)]
enum Word {
    /// Nanoseconds from the start of adoption to its end; 0 until it is over.
    AdoptNs,
    /// The length in bytes of what went wrong; 0 if nothing did.
    Failure,
    /// Frames received, over all lives.
    Received,
    /// Frames damaged, over all lives.
    Damaged,
    /// The next number to send.
    Next,
    /// What went wrong, eight bytes a word, [`FAILURE_WORDS`] of them.
    FailureText,
}

struct Stage {
    config: XskConfig,
    umem: UmemMemfd,
    xsk: XskFd,
    shared: Shared,
    _steer: portolan_ebpf::Steer,
}

impl Stage {
    fn new(config: XskConfig) -> Self {
        let words = Word::FailureText as usize + FAILURE_WORDS;
        let shared = Shared::new(config.layout.chunks() + words);
        let umem = UmemMemfd::create(&config.layout).unwrap();
        let table = &shared.words[..config.layout.chunks()];
        let xsk = XskFd::create(&umem, &config, &bind_options(BindMode::Copy), table).unwrap();
        let steer = steer(OURS, xsk.fd());
        Stage {
            config,
            umem,
            xsk,
            shared,
            _steer: steer,
        }
    }

    fn table(&self) -> &'static [AtomicU64] {
        &self.shared.words[..self.config.layout.chunks()]
    }

    fn word(&self, word: Word) -> &'static AtomicU64 {
        &self.shared.words[self.config.layout.chunks() + word as usize]
    }

    fn adopt(&self) -> Xsk<'static> {
        let fd = self.xsk.fd().try_clone_to_owned().unwrap();
        Xsk::adopt(fd, &self.umem.fd(), self.table(), &self.config).unwrap()
    }

    /// Starts a process that owns the socket until it is killed.
    fn spawn_owner(&self) -> Pid {
        // SAFETY: the child allocates (glibc makes that work after a fork), but
        // neither prints, nor takes a lock of ours, nor returns.
        match unsafe { libc::fork() } {
            0 => {
                // Not to outlive a failed test.
                let _ = rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
                self.own();
                // SAFETY: ends the child without running anything of the parent's.
                unsafe { libc::_exit(0) }
            }
            pid => Pid::from_raw(pid).unwrap(),
        }
    }

    /// The owner's life: adopt, check, then echo traffic in both directions.
    fn own(&self) {
        let start = Instant::now();
        let fd = match self.xsk.fd().try_clone_to_owned() {
            Ok(fd) => fd,
            Err(error) => return self.fail(&format!("no descriptor: {error}")),
        };
        let mut xsk = match Xsk::adopt(fd, &self.umem.fd(), self.table(), &self.config) {
            Ok(xsk) => xsk,
            Err(error) => return self.fail(&format!("adoption: {error}")),
        };
        let adopt_ns = start.elapsed().as_nanos() as u64;
        if let Err(error) = xsk.check_consistency() {
            return self.fail(&format!("after adoption: {error}"));
        }
        if xsk.adopted().implausible > 0 {
            return self.fail(&format!("adopted {:?}", xsk.adopted()));
        }
        self.word(Word::AdoptNs).store(adopt_ns, Ordering::Release);
        loop {
            let damaged = self.word(Word::Damaged);
            let outcome = xsk.receive(32, |segments| {
                if check_frame(&segments.concat()).is_err() {
                    damaged.fetch_add(1, Ordering::Relaxed);
                }
            });
            self.word(Word::Received)
                .fetch_add(outcome.frames as u64, Ordering::Relaxed);
            while xsk.tx_outstanding() < 32 {
                let number = self.word(Word::Next).fetch_add(1, Ordering::Relaxed);
                if !submit(&mut xsk, number, self.length(number)) {
                    break;
                }
            }
            xsk.flush();
            xsk.reap();
            let counters = xsk.counters();
            if counters.rx_bogus_descriptors + counters.tx_bogus_completions > 0 {
                return self.fail(&format!("bogus descriptors: {counters:?}"));
            }
        }
    }

    /// Tells the parent what went wrong.
    fn fail(&self, text: &str) {
        let words = self.text_words();
        let text = &text.as_bytes()[..text.len().min(words.len() * 8)];
        for (word, bytes) in words.iter().zip(text.chunks(8)) {
            let mut padded = [0; 8];
            padded[..bytes.len()].copy_from_slice(bytes);
            word.store(u64::from_ne_bytes(padded), Ordering::Relaxed);
        }
        self.word(Word::Failure)
            .store(text.len() as u64, Ordering::Release);
    }

    /// What an owner said before it gave up.
    fn failure(&self) -> Option<String> {
        let len = self.word(Word::Failure).load(Ordering::Acquire) as usize;
        let bytes: Vec<u8> = (self.text_words().iter())
            .flat_map(|word| word.load(Ordering::Relaxed).to_ne_bytes())
            .collect();
        (len > 0).then(|| String::from_utf8_lossy(&bytes[..len]).into_owned())
    }

    fn text_words(&self) -> &'static [AtomicU64] {
        let first = self.config.layout.chunks() + Word::FailureText as usize;
        &self.shared.words[first..first + FAILURE_WORDS]
    }

    fn length(&self, number: u64) -> usize {
        60 + (number as usize).wrapping_mul(7919) % (self.config.layout.max_frame_len() - 59)
    }

    /// Takes the socket itself and proves that every chunk still works: all
    /// receive chunks filled at once, all slots sent at once.
    fn prove_nothing_leaked(&self, foreign: &mut Foreign) {
        let layout = self.config.layout;
        let mut xsk = self.adopt();
        let deadline = Instant::now() + PATIENCE;
        // Let what is under way arrive.
        let mut quiet_since = Instant::now();
        while quiet_since.elapsed() < Duration::from_millis(20) {
            let mut moved = xsk.receive(64, |_| {}).frames + foreign.receive(|_| {});
            xsk.flush();
            moved += xsk.reap();
            foreign.kick();
            if moved > 0 || !foreign.idle() {
                quiet_since = Instant::now();
            }
            assert!(Instant::now() < deadline, "traffic does not end");
        }
        settle(&mut xsk);
        // All there are, not only as many as an engine without peers wants.
        xsk.keep_filled(u32::MAX);
        xsk.check_consistency().unwrap();

        // Nobody receives. Expect: exactly as many frames as there are chunks
        // wait, so the kernel has every one of them.
        for number in 0..u64::from(layout.rx_chunks()) {
            assert!(foreign.send(&frame(number, 60)));
            foreign.kick();
            // The veth's own queue is short; a completion says it has left it.
            while number % 32 == 31 && !foreign.idle() {
                foreign.kick();
                assert!(Instant::now() < deadline, "frame {number} does not leave");
            }
        }
        let mut next = 0;
        while next < u64::from(layout.rx_chunks()) {
            xsk.receive(1, |segments| {
                assert_eq!(check_frame(segments[0]), Ok(next));
                next += 1;
            });
            foreign.kick();
            assert!(
                Instant::now() < deadline,
                "{next} of {} chunks are left",
                layout.rx_chunks()
            );
        }

        // Every slot can be had at once, and all of them are sent.
        for number in 0..u64::from(layout.tx_slots()) {
            let ready = submit(&mut xsk, number, layout.max_frame_len());
            assert!(ready, "{number} of {} slots are left", layout.tx_slots());
        }
        let mut arrived = 0;
        while arrived < layout.tx_slots() as usize {
            xsk.flush();
            xsk.reap();
            arrived += foreign.receive(|frame| assert!(check_frame(frame).is_ok()));
            assert!(
                Instant::now() < deadline,
                "{arrived} of {} arrived",
                layout.tx_slots()
            );
        }
        settle(&mut xsk);
        xsk.check_consistency().unwrap();
    }
}

/// Kills `rounds` owners, each within its first two milliseconds of traffic.
fn kill_owners(mtu: u32, rounds: u64) {
    let stage = Stage::new(config(mtu, 128));
    let mut foreign = Foreign::create();
    let mut random = 0x9E37_79B9_7F4A_7C15u64;
    let mut adopt_ns = Vec::new();
    let (mut number, mut damaged, mut back) = (0, 0, 0);
    for round in 0..rounds {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        // Every eighth dies at any time from its first instruction on, in the
        // middle of adoption; the others from their first traffic on.
        let in_adoption = round % 8 == 0;
        let lifetime = Duration::from_micros(random % 2000);
        stage.word(Word::AdoptNs).store(0, Ordering::Release);
        let owner = stage.spawn_owner();
        let deadline = Instant::now() + PATIENCE;
        let mut born = in_adoption.then(Instant::now);
        while born.is_none_or(|born| born.elapsed() < lifetime) {
            if born.is_none() && stage.word(Word::AdoptNs).load(Ordering::Acquire) > 0 {
                born = Some(Instant::now());
            }
            while foreign.send(&frame(number, stage.length(number))) {
                number += 1;
                if number % 32 == 0 {
                    break;
                }
            }
            foreign.kick();
            back += foreign.receive(|frame| damaged += usize::from(check_frame(frame).is_err()));
            let failure = stage.failure();
            assert!(failure.is_none(), "round {round}: {failure:?}");
            assert!(
                Instant::now() < deadline,
                "round {round}: the owner does not start"
            );
            // Two cores, and the owner needs one.
            std::thread::yield_now();
        }
        kill_process(owner, Signal::KILL).unwrap();
        waitpid(Some(owner), WaitOptions::empty()).unwrap();
        adopt_ns
            .extend(Some(stage.word(Word::AdoptNs).load(Ordering::Acquire)).filter(|ns| *ns > 0));
        if round % 50 == 49 {
            stage.prove_nothing_leaked(&mut foreign);
        }
    }
    stage.prove_nothing_leaked(&mut foreign);
    let received = stage.word(Word::Received).load(Ordering::Acquire);
    assert_eq!(stage.word(Word::Damaged).load(Ordering::Acquire), 0);
    assert_eq!(damaged, 0);
    assert!(
        received > rounds && back as u64 > rounds,
        "no traffic: {received}, {back}"
    );
    adopt_ns.sort_unstable();
    println!(
        "MTU {mtu}: {rounds} owners killed, {received} frames received and {back} sent back; \
         taking over {} chunks: median {} µs, longest {} µs",
        stage.config.layout.chunks(),
        adopt_ns[adopt_ns.len() / 2] / 1000,
        adopt_ns[adopt_ns.len() - 1] / 1000,
    );
}

#[test]
fn killed_owners_leak_no_chunk() {
    with_veth(1500, || kill_owners(1500, 300));
}

#[test]
fn killed_owners_leak_no_chunk_of_a_jumbo_frame() {
    with_veth(9000, || kill_owners(9000, 200));
}

/// The two figures behind the decision for a layer of our own.
#[test]
fn adopting_is_faster_than_recreating() {
    const ROUNDS: usize = 20;
    with_veth(1500, || {
        // 32 MiB of UMEM.
        let config = XskConfig::new(UmemLayout::new(6144, 2048, 1514).unwrap());
        let mut stage = Stage::new(config);
        let (mut map, mut reconcile, mut recreate) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            let fd = stage.xsk.fd().try_clone_to_owned().unwrap();
            let start = Instant::now();
            let mapped = Xsk::map(fd, &stage.umem.fd(), &config).unwrap();
            map.push(start.elapsed());
            let start = Instant::now();
            let xsk = mapped.adopt(stage.table()).unwrap();
            reconcile.push(start.elapsed());
            xsk.check_consistency().unwrap();
        }
        for _ in 0..ROUNDS {
            // The queue is free only when all of the old socket is gone.
            let table = stage.table();
            let start = Instant::now();
            drop(stage.xsk);
            let umem = UmemMemfd::create(&config.layout).unwrap();
            stage.xsk =
                XskFd::create(&umem, &config, &bind_options(BindMode::Copy), table).unwrap();
            stage.umem = umem;
            drop(stage.adopt());
            recreate.push(start.elapsed());
        }
        let median = |mut times: Vec<Duration>| {
            times.sort_unstable();
            times[times.len() / 2]
        };
        let (map, reconcile, recreate) = (median(map), median(reconcile), median(recreate));
        println!(
            "32 MiB of UMEM, medians: map {map:?}, adopt {reconcile:?}, recreate {recreate:?}"
        );
        assert!(reconcile < Duration::from_millis(5), "{reconcile:?}");
        assert!(map + reconcile < recreate);
    });
}
