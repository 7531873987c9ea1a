//! Whom an engine wakes, and how.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use portolan_abi::doorbell;
use portolan_abi::memory::ClientHalf;
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType};

use super::super::commit_point::dies_at;
use super::super::host::EngineHost;
use super::super::ports::Port;
use super::{Memory, PORT, restore};

const LONG: Duration = Duration::from_secs(30);

/// A port that an engine bound to this core took up, the application's half of it and its end of its doorbell.
fn port(memory: &Memory, core: Option<usize>) -> (EngineHost, Arc<ClientHalf>, OwnedFd) {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (ours, theirs) =
        rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
    let mut host = memory.host();
    host.core = core;
    let mut parts = memory.parts();
    parts.event_bell = ours;
    restore::take_up_parts(&mut host, parts).unwrap();
    (host, Arc::new(memory.halves().0), theirs)
}

fn served(host: &mut EngineHost) -> &mut Port {
    host.ports.get_mut(PORT).unwrap()
}

/// Something happens that the application is to know.
fn publish(host: &mut EngineHost, client: &ClientHalf, at: u64) {
    client.header().alarm_at.store(at, Ordering::Relaxed);
    assert!(served(host).fire_alarm(at));
}

fn rings(bell: &OwnedFd) -> usize {
    let mut heard = [0; 64];
    rustix::net::recv(bell.as_fd(), &mut heard[..], RecvFlags::empty())
        .map_or(0, |(_, bytes)| bytes / 8)
}

/// Somebody naps, deep in the kernel; then `wake` happens. Returns whether that ended the nap.
fn nap(client: &Arc<ClientHalf>, wake: impl FnOnce()) -> bool {
    let (tell, told) = channel();
    let sleeper = std::thread::spawn({
        let client = Arc::clone(client);
        move || {
            let word = &client.header().waiting;
            doorbell::announce_nap(word);
            tell.send(rustix::thread::gettid().as_raw_nonzero())
                .unwrap();
            doorbell::nap(word, u64::try_from(LONG.as_nanos()).unwrap())
        }
    });
    let id = told.recv_timeout(LONG).unwrap();
    let deadline = Instant::now() + LONG;
    // FUTEX_WAIT, shared, for 2: not one of the standard library's.
    let futex = libc::SYS_futex.to_string();
    let naps = || {
        let call = std::fs::read_to_string(format!("/proc/self/task/{id}/syscall"));
        let call = call.unwrap_or_default();
        let words: Vec<&str> = call.split(' ').collect();
        matches!(words[..], [number, _, "0x0", "0x2", ..] if number == futex)
    };
    while !naps() {
        assert!(Instant::now() < deadline, "it never naps");
        std::thread::yield_now();
    }
    wake();
    sleeper.join().unwrap()
}

// Nothing was published; something, to one who is awake, who sleeps on his doorbell, who naps. Expect: each is woken in his way and no other, once; and what says
// that somebody sleeps on his doorbell is left for him to take back.
#[test]
fn everybody_is_woken_as_he_sleeps() {
    let memory = Memory::new();
    let (mut host, client, bell) = port(&memory, None);
    let word = &client.header().waiting;
    publish(&mut host, &client, 1);
    assert!(!served(&mut host).wake_if_wanted());
    doorbell::announce(word);
    assert!(!served(&mut host).wake_if_wanted(), "for nothing");
    publish(&mut host, &client, 2);
    assert!(served(&mut host).wake_if_wanted());
    assert_eq!(rings(&bell), 1);
    assert!(doorbell::seems_asleep(word));
    publish(&mut host, &client, 3);
    assert!(nap(&client, || assert!(served(&mut host).wake_if_wanted())));
    assert!(!doorbell::seems_asleep(word));
    assert_eq!(rings(&bell), 0);
}

// An engine dies between taking back what says that somebody naps and waking him; its successor wakes everybody. Expect: he is woken.
#[test]
fn a_successor_wakes_whom_his_predecessor_was_waking() {
    let memory = Memory::new();
    let (mut host, client, bell) = port(&memory, None);
    let woken = nap(&client, || {
        doorbell::withdraw(&client.header().waiting);
        served(&mut host).wake();
    });
    assert!(woken);
    assert_eq!(rings(&bell), 1);
}

// One who is woken, then is awake when something is published. Expect: he is taken for one who is about to sleep for a while, not for ever, and only
// if something was published.
#[test]
fn who_slept_is_expected_to_sleep_again() {
    let memory = Memory::new();
    let (mut host, client, _bell) = port(&memory, None);
    let word = &client.header().waiting;
    publish(&mut host, &client, 1);
    assert!(!served(&mut host).seems_sleepy());
    doorbell::announce(word);
    assert!(served(&mut host).seems_sleepy());
    assert!(served(&mut host).wake_if_wanted());
    assert!(!served(&mut host).seems_sleepy(), "nothing was published");
    doorbell::withdraw(word);
    let mut occasions = 0;
    for at in 2..100 {
        publish(&mut host, &client, at);
        occasions += usize::from(served(&mut host).seems_sleepy());
        assert!(!served(&mut host).wake_if_wanted());
    }
    assert_eq!(occasions, 4);
}

// Engines with a core of their own and without, one after the other. Expect: applications can tell which core, and that this very engine wakes those that nap.
#[test]
fn an_engine_says_where_it_is_and_whom_it_wakes() {
    let memory = Memory::new();
    for (recovered, core) in [Some(3), None, Some(0)].into_iter().enumerate() {
        let (_host, ..) = port(&memory, core);
        let (_, engine) = memory.halves();
        let header = engine.header();
        assert_eq!(
            header.core.load(Ordering::Relaxed),
            core.map_or(0, |core| core as u32 + 1)
        );
        assert_eq!(
            header.faults_recovered.load(Ordering::Relaxed) as usize,
            recovered
        );
        assert_eq!(
            header.naps_of.load(Ordering::Relaxed) as usize,
            recovered + 1
        );
    }
}

// An engine dies before any of its stores while it takes a port over, and one of an older build, which knows only how to count, comes after it. Expect: an application does not
// take that one for one that wakes those that nap.
#[test]
fn an_older_engine_is_not_taken_for_one_that_wakes() {
    for nth in 0.. {
        let memory = Memory::new();
        drop(port(&memory, None));
        let died = dies_at(nth, || drop(port(&memory, None)));
        let (_, engine) = memory.halves();
        let recovered = engine
            .header()
            .faults_recovered
            .fetch_add(1, Ordering::Relaxed)
            + 1;
        let naps_of = engine.header().naps_of.load(Ordering::Relaxed);
        assert_ne!(naps_of, recovered + 1, "dead before {died:?}");
        if died.is_none() {
            assert!(nth > 2, "only {nth} crash points");
            break;
        }
    }
}
