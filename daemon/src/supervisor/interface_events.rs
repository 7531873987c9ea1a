//! What is done when something happens to the interface; what it means is judged in [`super::interface`].
//!
//! - *Down and up*: nothing. Sockets and program stay; sends wait, or end when their peers are given up.
//! - *MTU*: every process of a queue is outdated. A standby with the new one is prepared, and when it is ready the serving process is
//!   fenced, as for an upgrade: a pause of about a millisecond. The memory stays laid out for the MTU the node was made with.
//! - *Program detached*: attached again, with its map as it is. If another program sits there, ours is tried again at every look.
//! - *Gone*: engines go on without a device, so that sends end as they do when a peer cannot be reached; nobody else is started, since a
//!   socket without a device cannot be mapped. When an interface of the name is up: a new program (it knows the MAC), new UMEM and socket for every
//!   queue ([`super::escalation::Tier::Rebuild`]), the own route told to everybody, the manifest written anew. The ledgers, and with them
//!   the incarnation, ports and applications, stay.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Supervisor;
use super::events::{Event, Kind, Severity};
use super::interface::{Look, State, Todo};
use super::netlink::{self, Link};
use super::poll::Timer;
use super::recovery::Cause;
use super::store::Name;
use super::store::abi::Abi;
use super::store::manifest::{self, Manifest};
use crate::engine_link::Route;

/// Without a message it is looked at all the same.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Something could not be done: tried again.
const TRY_AGAIN: Duration = Duration::from_millis(100);
/// Packets of changes taken in before others get a turn.
const PACKETS_PER_TURN: usize = 64;
/// Looks in a row, each after something was done.
const LOOKS_PER_TURN: usize = 3;

/// When to look next, and what was said last.
#[derive(Debug, Default)]
pub struct Looks {
    next: Option<Instant>,
    removed: bool,
    complaint: Option<String>,
}

impl Supervisor {
    /// Some link changed.
    pub(super) fn on_links(&mut self, now: Instant) {
        let Some(links) = &self.links else {
            return;
        };
        let mut concerned = false;
        for _ in 0..PACKETS_PER_TURN {
            match links.changes() {
                Ok(None) => break,
                Ok(Some(changes)) => {
                    for change in changes {
                        let name = change.name.as_deref();
                        let ours = &self.config.interface;
                        concerned |= self.interface.concerns(change.index, name, ours);
                        self.looks.removed |= change.removed && self.interface.is_at(change.index);
                    }
                }
                Err(error) => {
                    // Changes were lost (ENOBUFS): look.
                    tracing::debug!(%error, "changes of links were lost");
                    concerned = true;
                }
            }
        }
        if concerned {
            self.look_at_interface(now);
        }
    }

    /// From time to time.
    pub(super) fn on_interface_timer(&mut self, now: Instant) {
        if self.looks.next.is_some_and(|at| at <= now) {
            self.look_at_interface(now);
        }
    }

    /// Looks at the interface, and does what is to be done.
    pub(super) fn look_at_interface(&mut self, now: Instant) {
        if self.links.is_none() || self.stopping {
            return;
        }
        let mut left = false;
        for _ in 0..LOOKS_PER_TURN {
            let todo = self.judge_interface(now);
            left = !todo.is_empty();
            let mut done = false;
            for one in todo {
                done |= self.do_about_interface(one, now);
            }
            if !done {
                break;
            }
        }
        let next = now + if left { TRY_AGAIN } else { LOOK_EVERY };
        if !left {
            self.looks.complaint = None;
        }
        self.looks.next = Some(next);
        self.poll.set_timer(next, Timer::Interface);
    }

    fn judge_interface(&mut self, now: Instant) -> Vec<Todo> {
        let name = &self.config.interface;
        let link = match netlink::link(name) {
            Ok(link) => link,
            Err(error) => {
                tracing::warn!(%error, interface = name, "the interface cannot be looked at");
                return Vec::new();
            }
        };
        let look = Look {
            link,
            attached_to: self.steering.attached_to(),
            removed: std::mem::take(&mut self.looks.removed),
        };
        let before = (self.interface.state(), self.interface.takes_sockets());
        let todo = self.interface.judge(&look);
        let state = self.interface.state();
        if state != before.0 {
            let (severity, text) = match state {
                State::Up => (Severity::Info, "the interface is up"),
                State::Down => (
                    Severity::Warning,
                    "the interface is down, or its MTU is below 576: nothing is sent or received until that changes",
                ),
                State::Stripped => (
                    Severity::Warning,
                    "our XDP program is not on the interface: no frame reaches us",
                ),
                State::Gone => (
                    Severity::Warning,
                    "the interface is gone: the node goes on when there is one of that name and it is up",
                ),
            };
            let event = Event::new(Kind::InterfaceChanged, text)
                .severity(severity)
                .field("interface", name.as_str())
                .field("state", state.name())
                .field("before", before.0.name())
                .field("mtu", look.link.map(|link| link.mtu))
                .field("program", look.link.and_then(|link| link.program));
            self.events.record(event);
        }
        if self.interface.takes_sockets() && !before.1 {
            for index in 0..self.engines.len() {
                self.do_not_wait(index, now);
            }
        }
        if let (State::Stripped, Some(program)) = (state, look.link.and_then(|l| l.program)) {
            self.complain(&format!(
                "another XDP program, id {program}, sits on {}: `bpftool prog show id {program}` says whose it is, `ip link set dev {} xdp off` takes it off; ours follows by itself",
                self.config.interface, self.config.interface
            ));
        }
        todo
    }

    /// Says a thing once until everything is in order again.
    fn complain(&mut self, text: &str) {
        if self.looks.complaint.as_deref() != Some(text) {
            tracing::error!("{text}");
            self.looks.complaint = Some(text.to_owned());
        }
    }

    /// True: it is done.
    fn do_about_interface(&mut self, todo: Todo, now: Instant) -> bool {
        match todo {
            Todo::Attach => self.attach_again(),
            Todo::Mtu(mtu) => {
                self.change_mtu(mtu);
                true
            }
            Todo::Rebuild(link) => self.rebuild_on(&link, now),
        }
    }

    fn attach_again(&mut self) -> bool {
        match self.steering.attach_again(&self.config) {
            Ok(()) => {
                let text = "our XDP program is attached again";
                let event = Event::new(Kind::InterfaceChanged, text);
                let interface = self.config.interface.as_str();
                self.events.record(event.field("interface", interface));
                self.store_steering();
                true
            }
            Err(error) => {
                // If another program is there, that has been said.
                if self.looks.complaint.is_none() {
                    self.complain(&format!("our XDP program cannot be attached: {error}"));
                }
                false
            }
        }
    }

    /// A successor must find what is attached now.
    fn store_steering(&mut self) {
        let all: Vec<(Name, Arc<OwnedFd>)> = (self.steering.to_store().into_iter())
            .map(|(name, fd)| (name, Arc::new(fd)))
            .collect();
        for (name, _) in &all {
            self.store.remove(name);
        }
        if let Err(error) = self.store.put_all(&all) {
            tracing::error!("steering cannot be stored: {error}");
        }
    }

    /// Engines of another MTU take over, as soon as there are any.
    fn change_mtu(&mut self, mtu: u16) {
        let before = self.interface.mtu();
        let event = Event::new(Kind::InterfaceChanged, "the MTU has changed")
            .field("interface", self.config.interface.as_str())
            .field("before", before)
            .field("mtu", mtu);
        self.events.record(event);
        self.interface.told(mtu);
        for index in 0..self.engines.len() {
            let Some(engine) = self.engines.get(index) else {
                continue;
            };
            let queue = engine.index;
            let serves = engine.active.is_some();
            let standby = engine.standby.as_ref().map(|process| process.launch);
            let launches: Vec<u32> = engine.launches().collect();
            for launch in launches {
                self.outdated.insert((queue, launch), Cause::Interface);
            }
            if !serves {
                // A standby that is there serves first, and is then replaced.
                continue;
            }
            if let Some(launch) = standby {
                // If it has just been told to take over it is the one to be replaced.
                if self.disarm(index) {
                    self.fence_process(index, launch, "was made for another MTU");
                }
            } else if !self.config.recovery.standby {
                self.fence(index, Cause::Interface, "was made for another MTU");
            }
        }
    }

    /// Makes everything anew that is bound to the interface.
    fn rebuild_on(&mut self, link: &Link, now: Instant) -> bool {
        let name = self.config.interface.clone();
        let mut config = self.config.clone();
        config.interface_facts.index = link.index;
        config.interface_facts.mac = link.mac;
        config.interface_facts.mtu = link.mtu;
        if let Err(error) = self.steering.load_anew(&config) {
            self.complain(&format!(
                "the XDP program for {name} cannot be loaded: {error}"
            ));
            return false;
        }
        let text = "another interface of our name: sockets and steering are made anew";
        let event = Event::new(Kind::InterfaceChanged, text)
            .field("interface", name)
            .field("index", link.index)
            .field("mac", super::format_mac(&link.mac))
            .field("mtu", link.mtu);
        self.events.record(event);
        self.config = config;
        self.interface.rebuilt(link);
        self.sockets.moved(link.index);
        self.store_manifest();
        if let Some(neighbours) = &mut self.neighbours
            && let Err(error) = neighbours.moved(link.index)
        {
            tracing::warn!(%error, "the neighbour table cannot be read");
        }
        self.rediscover();
        self.look_after_neighbours(now);
        let own = self.routes.get(&self.config.node).cloned();
        if let Some(own) = own.filter(|own| own.mac != Some(link.mac)) {
            let mac = Some(link.mac);
            self.publish_route(Route { mac, ..own });
        }
        for index in 0..self.engines.len() {
            self.rebuild_queue(index, now);
        }
        true
    }

    /// What the node is made for has changed: a successor must agree.
    fn store_manifest(&mut self) {
        let frames = self.engines.first().map(|e| e.memory.geometry.frames);
        let manifest = Manifest {
            abi: Abi::OURS,
            incarnation: self.incarnation,
            basis: manifest::basis(&self.config, self.mtu, frames.unwrap_or_default()),
        };
        let stored = manifest.write().map_err(Into::into).and_then(|fd| {
            self.store.remove(&Name::Manifest);
            self.store.put(Name::Manifest, &Arc::new(fd))
        });
        if let Err(error) = stored {
            tracing::error!("the manifest cannot be stored: {error}");
        }
    }
}
