//! The real transport on both ends, and an engine that stops before any one store: of a life, and of its successors' takeovers.
//!
//! Every script of the laboratory ([`Script`]) is run as often as the subject stores anything, and dies before another store each
//! time. What its successors store while they take over is searched to the end: from the memory a death left, every store of the
//! takeover may be the one before which the successor dies, and so on from what that leaves, until nothing new is found. Images that
//! differ only in the number of engines so far are the same. Expect, of every one of them: each message once, each send with the status
//! it deserves.

use std::collections::{BTreeSet, HashSet};

use portolan_transport::policy::Profile;

use super::super::commit_point::{Point, life};
use super::super::conversation::{
    Image, Memories, Memory, Risk, Safe, Script, TakeOver, Work, World,
};

thread_local! {
    static MEMORIES: Memories = Memories::default();
}

/// Says which case it was if the case fails.
struct Case(String);

impl Drop for Case {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("case: {}", self.0);
        }
    }
}

/// Dies before a store of one life after the other; then, if there is an image, its successor finds that instead of what it left.
struct Stops<'i> {
    /// Stores left in each life to come, the next one last.
    lives: Vec<u64>,
    died: Vec<Point>,
    found: Option<&'i Image>,
}

impl<'i> Stops<'i> {
    fn before(lives: &[u64], found: Option<&'i Image>) -> Self {
        Self {
            lives: lives.iter().rev().copied().collect(),
            died: Vec::new(),
            found,
        }
    }
}

impl Risk for Stops<'_> {
    fn run<R>(&mut self, _: Work, memory: &Memory, body: impl FnOnce() -> R) -> Option<R> {
        let Some(left) = self.lives.last_mut() else {
            if let Some(image) = self.found.take() {
                memory.restore(image);
            }
            return Some(body());
        };
        match life(left, body) {
            Ok(result) => Some(result),
            Err(point) => {
                self.lives.pop();
                self.died.push(point);
                None
            }
        }
    }
}

/// Dies before the `nth` store; then every memory that dying successors can leave is looked for.
struct Search {
    stops: Stops<'static>,
    /// Where each died, what the last one left.
    found: Vec<(Vec<Point>, Image)>,
    points: BTreeSet<Point>,
    takeovers: u64,
    searched: bool,
}

impl Search {
    fn after(nth: u64) -> Self {
        Self {
            stops: Stops::before(&[nth], None),
            found: Vec::new(),
            points: BTreeSet::new(),
            takeovers: 0,
            searched: false,
        }
    }

    fn from(&mut self, take_over: TakeOver, memory: &Memory) {
        let left = memory.image();
        let mut seen = HashSet::from([memory.essence(&left)]);
        let mut next = vec![(Vec::new(), left.clone())];
        while let Some((way, image)) = next.pop() {
            for nth in 0.. {
                memory.restore(&image);
                self.takeovers += 1;
                let Err(point) = life(&mut { nth }, || take_over.run(memory)) else {
                    break;
                };
                self.points.insert(point);
                let image = memory.image();
                if seen.insert(memory.essence(&image)) {
                    let way: Vec<_> = way.iter().copied().chain([point]).collect();
                    self.found.push((way.clone(), image.clone()));
                    next.push((way, image));
                }
            }
        }
        memory.restore(&left);
    }
}

impl Risk for Search {
    fn run<R>(&mut self, work: Work, memory: &Memory, body: impl FnOnce() -> R) -> Option<R> {
        if let Work::TakeOver(take_over) = work
            && self.stops.lives.is_empty()
            && !self.searched
        {
            self.searched = true;
            self.from(take_over, memory);
        }
        self.stops.run(work, memory, body)
    }
}

/// What was looked at.
#[derive(Debug, Default)]
struct Seen {
    points: BTreeSet<Point>,
    deaths: u64,
    takeovers: u64,
    images: u64,
}

impl Seen {
    /// A death before every store, and everything its successors can leave while they take over.
    fn every_stop(&mut self, memories: &Memories, script: &Script) {
        let name = script.name;
        for nth in 0.. {
            let mut case = Case(format!("{name}, dead before store {nth}"));
            let mut search = Search::after(nth);
            World::run(memories, script, &mut search);
            let Some(&point) = search.stops.died.first() else {
                return;
            };
            self.points.insert(point);
            self.points.extend(&search.points);
            self.deaths += 1;
            self.takeovers += search.takeovers;
            for (way, image) in &search.found {
                self.images += 1;
                case.0 = format!(
                    "{name}, dead before store {nth}, {point:?}, then taking over, {way:?}"
                );
                World::run(memories, script, &mut Stops::before(&[nth], Some(image)));
            }
        }
    }

    /// Two lives that end before any store of each, the first of them before every `stride`-th.
    fn every_two(&mut self, memories: &Memories, script: &Script, stride: usize) {
        for first in (0..).step_by(stride) {
            for second in 0.. {
                let name = script.name;
                let _case = Case(format!(
                    "{name}, dead before store {first}, then before {second}"
                ));
                let mut stops = Stops::before(&[first, second], None);
                World::run(memories, script, &mut stops);
                self.deaths += stops.died.len() as u64;
                self.points.extend(&stops.died);
                match stops.died.len() {
                    0 => return,
                    1 => break,
                    _ => {}
                }
            }
        }
    }
}

// Nobody dies. Expect: every script comes to its end, and goes where it is meant to go.
#[test]
fn scripts_lead_where_they_should() {
    MEMORIES.with(|memories| {
        for script in Script::all() {
            let _case = Case(script.name.to_owned());
            let world = World::run(memories, &script, &mut Safe);
            assert_eq!(world.deaths(), 0);
            let counter = |name| world.counter(name);
            let reached = match script.name {
                "idle" => counter("streams_opened") >= 2,
                "given up" => counter("messages_delivered") < 4,
                "ahead" => world.ahead > 0,
                "sending" => (script.reads > 0) == (world.told_of_several() > 0),
                _ => true,
            };
            assert!(reached);
        }
    });
}

#[test]
fn an_engine_that_stops_between_any_two_stores_loses_and_doubles_nothing() {
    let mut seen = Seen::default();
    MEMORIES.with(|memories| {
        for script in Script::all() {
            seen.every_stop(memories, &script);
        }
        for profile in Profile::ALL {
            seen.every_two(memories, &Script::short(profile), 1);
        }
        seen.every_two(memories, &Script::ahead(), 1);
        seen.every_two(memories, &Script::closing(Profile::Default), 7);
    });
    println!(
        "{} deaths, {} takeovers that died, {} memories left by them",
        seen.deaths, seen.takeovers, seen.images
    );
    // Questions have tests of their own; a port that is closed leaves no sends; a key that nobody would have written is no stop's doing.
    let elsewhere = [
        Point::AskEvent,
        Point::AskProducer,
        Point::AskSettled,
        Point::OpenClearSend,
        Point::AdoptClearKey,
    ];
    let missed: Vec<_> = (Point::ALL.iter())
        .filter(|point| !seen.points.contains(point) && !elsewhere.contains(point))
        .collect();
    assert!(missed.is_empty(), "nobody died before {missed:?}");
    assert!(seen.deaths > 10_000 && seen.images > 500, "{seen:?}");
}
