//! What ports and supervisor ask of a running engine.

use std::sync::atomic::Ordering;

use portolan_abi::event::{Certainty, Outcome, reason};
use portolan_abi::ledger::Ledger;
use portolan_abi::port::CloseReason;
use portolan_abi::token::Opcode;
use portolan_transport::Endpoint;
use portolan_transport::endpoint::{Misfit, PeerState};
use portolan_transport::host::{SendRequest, SendStatus};
use portolan_transport::ident::{Nanos, NodeId, PortId};

use crate::engine_link::{FromEngine, PeerReport, Route, ToEngine};

use super::Engine;
use super::alike::take_alike;
use super::briefing::{open_port, port_parts};
use super::commit;
use super::control::{Incoming, Link};
use super::counters::EngineCounters;
use super::host::{EngineHost, Order};
use super::ports::{Port, Taken};
use super::routes::Change;
use super::tap::Tap;

/// Loops between two looks at the applications' alarms.
const ALARM_LOOPS: u64 = 16;
/// Link messages handled before the next loop.
const MESSAGES_PER_TURN: usize = 16;
/// Peers in one report, so that it fits into a packet.
const REPORTED_PEERS: usize = 150;

/// How a send ends that a node gets while it is being drained.
const DRAINED: Outcome = Outcome {
    certainty: Certainty::NotDelivered,
    reason: reason::DRAINING,
};

/// Fault injection: stops looping, for ever.
pub(super) fn hang() -> ! {
    loop {
        std::hint::spin_loop();
    }
}

/// Takes a bounded number of tokens from a port and does what they ask; true if there were any.
///
/// Buffers come before anything is transmitted, so that what is sent to this node finds them. But if the port has some left and sends to others, they are
/// behind its sends, for which somebody may wait, and [`serve_buffers`] takes them once those have gone.
#[inline]
pub(super) fn serve_port(
    now: Nanos,
    number: u16,
    host: &mut EngineHost,
    endpoint: &mut Endpoint,
    counters: &mut EngineCounters,
) -> bool {
    // Most looks at a port find nothing.
    let wants = |port: &Port| port.has_work() || port.questions.turned_some_away();
    host.ports.get(number).is_some_and(wants) && serve_tokens(now, number, host, endpoint, counters)
}

#[inline(never)]
fn serve_tokens(
    now: Nanos,
    number: u16,
    host: &mut EngineHost,
    endpoint: &mut Endpoint,
    counters: &mut EngineCounters,
) -> bool {
    let ledger = host.facts.ledger();
    let Some(port) = host.ports.get_mut(number) else {
        return false;
    };
    let mut any = false;
    if port.buffers.is_empty() || !port.has_sends() {
        any = take_buffers(now, port, ledger, endpoint, counters);
    }
    ask_those_turned_away(now, port, endpoint);
    let waiting = match port.fault() {
        None => port.sends_waiting(),
        Some(_) => 0,
    };
    let mut to_us = false;
    let mut left = waiting;
    while left > 0 {
        any = true;
        let Some(taken) = host.take_token(number) else {
            break;
        };
        counters.send_tokens += 1;
        left -= 1;
        match taken {
            // Nearly all are; they need not be told from other orders again.
            Taken::Token(slot, token) if token.opcode == Opcode::Send => {
                to_us |= token.node == endpoint.config().node.0;
                let send = host.request(number, slot, &token, now);
                let accepted = submit(now, &send, host, endpoint, counters);
                if accepted && left > 0 {
                    let more = take_alike(&token, &send, left, host, endpoint);
                    counters.send_tokens += u64::from(more);
                    left -= more;
                }
            }
            taken => {
                let order = host.order(number, &taken, now);
                carry_out(now, order, host, endpoint, counters);
            }
        }
        host.finish_token();
    }
    if to_us {
        serve_buffers(now, number, host, endpoint, counters);
    }
    any
}

/// Takes the buffers that were behind a port's sends.
#[inline]
pub(super) fn serve_buffers(
    now: Nanos,
    number: u16,
    host: &mut EngineHost,
    endpoint: &mut Endpoint,
    counters: &mut EngineCounters,
) {
    let ledger = host.facts.ledger();
    if let Some(port) = host.ports.get_mut(number) {
        take_buffers(now, port, ledger, endpoint, counters);
    }
}

/// Takes a bounded number of a port's receive tokens; true if there were any.
fn take_buffers(
    now: Nanos,
    port: &mut Port,
    ledger: Ledger<'_>,
    endpoint: &mut Endpoint,
    counters: &mut EngineCounters,
) -> bool {
    let taken = port.take_provided(ledger);
    for _ in 0..taken {
        counters.receive_tokens += 1;
        endpoint.buffer_provided(now, PortId(port.number()));
    }
    taken > 0
}

/// Whether it was accepted; if not, it has ended.
#[inline]
fn submit(
    now: Nanos,
    send: &SendRequest,
    host: &mut EngineHost,
    endpoint: &mut Endpoint,
    counters: &mut EngineCounters,
) -> bool {
    let end = if host.draining {
        DRAINED
    } else {
        match endpoint.submit(now, send, host) {
            Ok(()) => return true,
            Err(reason) => commit::outcome(SendStatus::NotDelivered(reason)),
        }
    };
    counters.send_tokens_refused += 1;
    host.finish_locally(send.id, end);
    false
}

/// There was no room to ask about every message that came; as soon as there is, those that wait are offered again.
fn ask_those_turned_away(now: Nanos, port: &mut Port, endpoint: &mut Endpoint) {
    if !port.questions.turned_some_away() {
        return;
    }
    let read = port.events_read();
    for _ in 0..port.questions.room_again(read) {
        endpoint.buffer_provided(now, PortId(port.number()));
    }
}

#[cold]
fn carry_out(
    now: Nanos,
    order: Order,
    host: &mut EngineHost,
    endpoint: &mut Endpoint,
    counters: &mut EngineCounters,
) {
    match order {
        Order::Send(send) => _ = submit(now, &send, host, endpoint, counters),
        Order::Resume(id, stream) => {
            endpoint.resume_sending(now, stream);
            host.finish_locally(id, commit::DONE);
        }
        Order::Drop(id, stream) => {
            endpoint.drop_sends(now, stream, host);
            host.finish_locally(id, commit::DONE);
        }
        Order::Cancel(id, target) => {
            if let Some((target, stream)) = target {
                endpoint.cancel(now, target, stream);
            }
            host.finish_locally(id, commit::DONE);
        }
        Order::Answer(id, answer) => {
            let served = host.ports.get_mut(id.port.0);
            match served.and_then(|port| port.questions.answer(&answer)) {
                Some(stream) => {
                    counters.answers += 1;
                    endpoint.offer_answered(now, stream);
                }
                None => counters.answers_ignored += 1,
            }
            host.finish_locally(id, commit::DONE);
        }
        Order::Refuse(id) => {
            counters.send_tokens_refused += 1;
            host.finish_locally(id, commit::REFUSED_TOKEN);
        }
    }
}

impl Engine {
    /// Takes tokens from every port, a bounded number each; true if there were any.
    pub(super) fn serve_ports(&mut self, now: Nanos, link: &mut Link) -> bool {
        let mut any = false;
        let mut failed = false;
        let path = &mut self.path;
        for nth in 0..path.host.ports.count() {
            let Some(number) = path.host.ports.number(nth) else {
                break;
            };
            let (host, endpoint) = (&mut path.host, &mut path.endpoint);
            any |= serve_port(now, number, host, endpoint, &mut path.counters);
            failed |= (path.host.ports.get(number)).is_some_and(|p| p.fault().is_some());
        }
        if failed {
            self.close_failed(now, link);
        }
        any
    }

    /// Takes the buffers that were behind sends.
    pub(super) fn serve_buffers(&mut self, now: Nanos) {
        let path = &mut self.path;
        for nth in 0..path.host.ports.count() {
            if let Some(number) = path.host.ports.number(nth) {
                let (host, endpoint) = (&mut path.host, &mut path.endpoint);
                serve_buffers(now, number, host, endpoint, &mut path.counters);
            }
        }
    }

    /// Closes the ports whose applications broke the rules, and says so.
    fn close_failed(&mut self, now: Nanos, link: &mut Link) {
        let failed: Vec<(u16, u32, CloseReason)> = (self.path.host.ports.iter())
            .filter_map(|port| Some((port.number(), port.generation(), port.fault()?)))
            .collect();
        for (port, generation, reason) in failed {
            self.path.counters.ports_failed += 1;
            self.close_port(now, port, reason);
            link.send(&FromEngine::PortClosed {
                port,
                generation,
                reason,
            });
        }
    }

    fn close_port(&mut self, now: Nanos, number: u16, reason: CloseReason) {
        let path = &mut self.path;
        path.endpoint
            .port_closed(now, PortId(number), &mut path.host);
        if let Some(port) = path.host.ports.remove(number) {
            self.waiter.forget_bell(port.engine_bell());
            port.close(reason);
            self.excuse(now, port.geometry().arena_bytes);
        }
    }

    /// Fires alarms, and wakes the applications that sleep and have something new; true if there were any.
    pub(super) fn wake_applications(&mut self, now: Nanos) -> bool {
        let mut any = false;
        let alarms = self.path.counters.loops.is_multiple_of(ALARM_LOOPS);
        for nth in 0..self.path.host.ports.count() {
            let number = self.path.host.ports.number(nth);
            let Some(port) = number.and_then(|number| self.path.host.ports.get_mut(number)) else {
                continue;
            };
            if alarms && port.fire_alarm(now) {
                self.path.counters.alarms += 1;
            }
            if port.wake_if_wanted() {
                self.path.counters.doorbells += 1;
                any = true;
            }
        }
        any
    }

    /// Adds or changes a route, and tells the transport of nodes that can be reached now.
    pub(super) fn set_route(&mut self, now: Nanos, route: &Route) {
        let Some(node) = NodeId::new(route.node) else {
            return;
        };
        if self.path.routes.set(route, &self.path.encap) == Change::Reachable {
            let max_frame = self.path.encap.max_frame();
            self.path.endpoint.set_node(now, node, max_frame);
        }
    }

    /// Nobody holds the other end of the link, neither a supervisor nor who keeps its descriptors: the node is stopped for good.
    /// Applications and peers are told, as far as one turn goes.
    fn tell_everybody(&mut self, now: Nanos) {
        let numbers: Vec<u16> = self.path.host.ports.iter().map(Port::number).collect();
        for number in numbers {
            self.close_port(now, number, CloseReason::Administrator);
        }
        self.path.lookout.look_now();
        self.path.transmit(now);
        self.path.full_until = 0;
        self.path.kick(now);
    }

    /// Handles what came over the link. False: leave.
    pub(super) fn control(&mut self, now: Nanos, link: &mut Link) -> anyhow::Result<bool> {
        link.flush();
        for _ in 0..MESSAGES_PER_TURN {
            let (message, fds) = match link.receive(false)? {
                Incoming::Message(message, fds) => (message, fds),
                Incoming::Nothing => return Ok(true),
                Incoming::Closed => {
                    self.tell_everybody(now);
                    return Ok(false);
                }
            };
            // What it asks for may have to be transmitted first.
            self.waiter.stay_awake();
            match message {
                ToEngine::Route(route) => self.set_route(now, &route),
                ToEngine::RemoveNode { node } => {
                    self.path.routes.remove(node);
                    if let Some(node) = NodeId::new(node) {
                        let path = &mut self.path;
                        path.endpoint.remove_node(now, node, &mut path.host);
                    }
                }
                ToEngine::OpenPort {
                    port,
                    generation,
                    geometry,
                } => {
                    let parts = port_parts(port, generation, geometry, fds)?;
                    open_port(&mut self.path.host, &self.waiter, parts)?;
                    self.path.endpoint.port_opened(PortId(port));
                    link.send(&FromEngine::PortOpened { port, generation });
                }
                ToEngine::ClosePort {
                    port,
                    generation,
                    reason,
                } => {
                    let served = self.path.host.ports.get(port);
                    if served.is_some_and(|port| port.generation() == generation) {
                        self.close_port(now, port, reason);
                    }
                    link.send(&FromEngine::PortClosed {
                        port,
                        generation,
                        reason,
                    });
                }
                ToEngine::QueryPeers { id } => {
                    let peers = self.peers();
                    link.send(&FromEngine::Peers { id, peers });
                }
                ToEngine::Tap { id, geometry, peer } => {
                    let there = self.path.tap.as_ref().map(|tap| tap.id());
                    if there != Some(id) {
                        self.untap(now);
                        self.path.tap = Tap::map(id, geometry, peer, &fds);
                        let epoch =
                            self.ledger.header().engine_epoch.load(Ordering::Acquire) as u32;
                        if let Some(tap) = &mut self.path.tap {
                            tap.begin(epoch);
                        }
                    }
                }
                ToEngine::Untap => self.untap(now),
                ToEngine::Drain { on } => self.path.host.draining = on,
                ToEngine::BusyPoll { on } => {
                    let socket = fds.into_iter().next().filter(|_| on);
                    self.path.told_to_go_round(now, socket);
                }
                ToEngine::Stop => return Ok(false),
                ToEngine::Hang => hang(),
                // Of a supervisor that does not know how far we are: it was restarted.
                ToEngine::StandBy | ToEngine::TakeOver => {}
                ToEngine::Start(_) => {
                    anyhow::bail!("a message that belongs to the start came later")
                }
            }
        }
        // There may be more.
        self.next_control = 0;
        Ok(true)
    }

    /// Records frames no longer.
    fn untap(&mut self, now: Nanos) {
        if let Some(tap) = self.path.tap.take() {
            tap.end();
            self.excuse(now, tap.bytes());
        }
    }

    /// Tells the supervisor which ports are served, after a takeover.
    pub(super) fn report_ports(&self, link: &mut Link) {
        for port in self.path.host.ports.iter() {
            link.send(&FromEngine::PortOpened {
                port: port.number(),
                generation: port.generation(),
            });
        }
    }

    fn peers(&self) -> Vec<PeerReport> {
        let routes = &self.path.routes;
        let known = self.path.endpoint.peers().map(|peer| PeerReport {
            node: peer.peer.node.0,
            queue: peer.peer.queue,
            name: peer.name.to_owned(),
            state: match peer.state {
                PeerState::Idle => "idle",
                PeerState::Connecting => "connecting",
                PeerState::Up => "up",
                PeerState::Incompatible => "incompatible",
            }
            .to_owned(),
            rtt_ns: peer.rtt_ns,
            outstanding: u64::from(peer.in_flight),
            incarnation: peer.incarnation,
            engine_epoch: peer.engine_epoch,
            max_frame: peer.max_frame,
            misfit: peer.misfit.map(|misfit| {
                match misfit {
                    Misfit::Cluster => "cluster",
                    Misfit::Version => "version",
                    Misfit::Policy(field) => field,
                }
                .to_owned()
            }),
        });
        let unresolved = routes.unresolved().map(|(node, name)| PeerReport {
            node,
            queue: 0,
            name: name.to_owned(),
            state: "unresolved".to_owned(),
            rtt_ns: 0,
            outstanding: 0,
            incarnation: 0,
            engine_epoch: 0,
            max_frame: 0,
            misfit: None,
        });
        known.chain(unresolved).take(REPORTED_PEERS).collect()
    }
}
