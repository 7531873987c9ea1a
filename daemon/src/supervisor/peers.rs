//! What the engines know of their peers, collected when somebody asks.
//!
//! One round of questions at a time; who asks while one is under way gets its result. It ends when every engine has answered or
//! died, or after a while with what there is.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use portolan_abi::control::Response;
use serde_json::{Value, json};

use super::Supervisor;
use super::clients::Pending;
use super::engines::Engine;
use super::poll::Timer;
use crate::engine_link::{PeerReport, ToEngine};

/// Engines answer within this.
const ROUND: Duration = Duration::from_millis(500);
/// More reports from one engine are not believed.
const MAX_REPORTS: usize = 4096;

/// A round of questions.
#[derive(Debug, Default)]
pub struct PeersRound {
    id: u64,
    waiting: BTreeSet<usize>,
    /// What was said: by which engine, of whom.
    pub(super) reports: Vec<(usize, PeerReport)>,
    ends: Option<Instant>,
}

impl Supervisor {
    /// A client asks for the peers.
    pub(super) fn request_peers(&mut self, client: u64) {
        self.wait_for(client, Pending::Peers);
        self.begin_peers_round();
    }

    /// Asks the engines, unless they are being asked.
    pub(super) fn begin_peers_round(&mut self) {
        if self.peers_round.ends.is_some() {
            return;
        }
        let running = self.engines.iter().enumerate();
        let running = running.filter(|(_, engine)| Engine::is_running(engine));
        let ends = Instant::now() + ROUND;
        let id = self.peers_round.id + 1;
        self.peers_round = PeersRound {
            id,
            waiting: running.map(|(index, _)| index).collect(),
            reports: Vec::new(),
            ends: Some(ends),
        };
        for index in self.peers_round.waiting.clone() {
            self.tell_active(index, &ToEngine::QueryPeers { id }, Vec::new());
        }
        self.poll.set_timer(ends, Timer::Peers);
        self.end_round_if_complete();
    }

    /// An engine's answer.
    pub(super) fn on_peers(&mut self, index: usize, id: u64, reports: Vec<PeerReport>) {
        let round = &mut self.peers_round;
        if id != round.id || !round.waiting.remove(&index) {
            return;
        }
        let known = reports.into_iter().take(MAX_REPORTS);
        round.reports.extend(known.map(|report| (index, report)));
        self.end_round_if_complete();
    }

    /// An engine that died answers no more.
    pub(super) fn forget_peers_of(&mut self, index: usize) {
        if self.peers_round.waiting.remove(&index) {
            self.end_round_if_complete();
        }
    }

    /// The timer of a round fired.
    pub(super) fn on_peers_timer(&mut self, now: Instant) {
        if self.peers_round.ends.is_some_and(|ends| ends <= now) {
            self.end_round();
        }
    }

    fn end_round_if_complete(&mut self) {
        if self.peers_round.ends.is_some() && self.peers_round.waiting.is_empty() {
            self.end_round();
        }
    }

    fn end_round(&mut self) {
        self.peers_round.ends = None;
        self.peers_round.waiting.clear();
        self.peers_were_seen();
        let document = self.peers_document();
        for client in self.clients.waiting(|pending| *pending == Pending::Peers) {
            let document = document.clone();
            self.finish(client, Response::Document { document }, Vec::new());
        }
    }

    fn peers_document(&self) -> Value {
        let mut rows = Vec::new();
        let mut reported = BTreeSet::new();
        let mut reports: Vec<_> = self.peers_round.reports.iter().collect();
        reports.sort_by_key(|(engine, report)| (report.node, report.queue, *engine));
        for (engine, report) in reports {
            reported.insert(report.node);
            rows.push(self.row(report, Some(*engine)));
        }
        // Those no engine has talked to yet.
        let others = self.routes.values().filter(|r| r.node != self.config.node);
        for peer in others {
            if reported.contains(&peer.node) {
                continue;
            }
            let resolved = peer.mac.is_some();
            let silent = PeerReport {
                node: peer.node,
                queue: 0,
                name: peer.name.clone(),
                state: if resolved { "idle" } else { "unresolved" }.to_owned(),
                rtt_ns: 0,
                outstanding: 0,
                incarnation: 0,
                engine_epoch: 0,
                max_frame: 0,
                misfit: None,
            };
            rows.push(self.row(&silent, None));
        }
        json!({ "peers": rows })
    }

    fn row(&self, report: &PeerReport, engine: Option<usize>) -> Value {
        let route = self.routes.get(&report.node);
        let name = match route {
            Some(route) if report.name.is_empty() => &route.name,
            _ => &report.name,
        };
        json!({
            "node": report.node,
            "name": name,
            "queue": report.queue,
            "engine": engine,
            "state": report.state,
            "misfit": report.misfit,
            "rtt_ns": report.rtt_ns,
            "outstanding": report.outstanding,
            "mac": route.and_then(|route| route.mac).map(|mac| super::format_mac(&mac)),
            "address": route.and_then(|route| route.address),
            "max_frame": report.max_frame,
            "engine_epoch": report.engine_epoch,
            "incarnation": format!("{:016x}", report.incarnation),
        })
    }
}
