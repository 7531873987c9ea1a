//! Applications that talk while something is done to their nodes, and their books afterwards.

use portolan::{Address, PortOptions, Priority};
use rustix::process::{Pid, Signal, kill_process};

use super::talker::{Manner, Talker, Talking, close_books};
use super::{Cluster, STEP, books};

/// Letters each must deliver and hear after one thing is done before the next.
const BETWEEN: u64 = 100;

/// Kills a process.
pub fn kill(pid: i32) {
    kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
}

/// A talker at (node, port), with a stream of each priority to each of these.
pub fn talk(cluster: &Cluster, at: (u16, u16), to: &[(u16, u16)]) -> Talking {
    let options = PortOptions {
        arena_bytes: 32 << 20,
        ..PortOptions::at(at.1)
    };
    let to: Vec<_> = to
        .iter()
        .flat_map(|&to| [Priority::Low, Priority::High].map(|p| (Address::from(to), p)))
        .collect();
    let manner = Manner {
        longest: 20_000,
        ..Manner::default()
    };
    Talking::start(Talker::new(cluster.open(at.0, options), &to, manner).unwrap())
}

/// Everybody talks to everybody.
pub fn all_talk(cluster: &Cluster, everybody: &[(u16, u16)]) -> Vec<Talking> {
    let mut all: Vec<Talking> = everybody
        .iter()
        .map(|&at| talk(cluster, at, everybody))
        .collect();
    begin(&mut all);
    all
}

/// Now that every port is open.
pub fn begin(all: &mut [Talking]) {
    all.iter().for_each(|talking| talking.send(true));
    all_go_on(all);
}

/// Everybody goes on: delivers, and hears.
pub fn all_go_on(all: &mut [Talking]) {
    for talking in all {
        talking.deliver(BETWEEN, STEP);
        talking.hear(BETWEEN, STEP);
    }
}

/// The books of all agree, and no send failed.
pub fn all_is_well(all: Vec<Talking>) {
    let books = close_books(all, STEP);
    let complaints = books::complaints(&books);
    assert!(complaints.is_empty(), "{complaints:#?}");
    for book in &books {
        let failures: Vec<_> = book.failures().collect();
        assert!(failures.is_empty(), "{}: {failures:#?}", book.name());
    }
}
