//! The configuration read again while the node runs (SIGHUP, `systemctl reload`).
//!
//! **Idea.** What is only asked at a request (the access list, limits on ports and connections), what engines hear of as it changes (peers)
//! and how much is logged can change at once. Everything else engines, memory or the kernel were made for. So the two files are compared key by
//! key, as they are written: a key of [`LIVE`] is applied, any other is refused by its name with what it takes to have it. A key that
//! this file does not know is refused, so one that is new is never forgotten in silence.
//!
//! A file with an error changes nothing.
//!
//! **Not touched**: ports that are open stay open, whatever the access list and quotas say now; connections beyond a lower limit stay.

use std::collections::BTreeSet;
use std::os::fd::OwnedFd;
use std::time::Instant;

use toml::Table;

use super::Supervisor;
use super::config::{Config, ConfigErrors, Peer};
use super::neighbours::Neighbours;
use super::poll::{EventFlags, Source};
use crate::engine_link::{Route, ToEngine};

/// Keys that change while the node runs.
const LIVE: [&str; 10] = [
    "acl",
    "peer",
    "quota",
    "limits.ports",
    "limits.arena_bytes_per_port",
    "limits.arena_bytes_total",
    "limits.clients",
    "log.level",
    "node.cpu_latency_us",
    "engine.keep_awake_ms",
];
/// Keys that a restart applies without ending anything (beside the live ones); all others begin the node anew.
const AT_RESTART: [&str; 3] = ["recovery", "metrics", "network.busy_poll"];
/// Keys of the socket, which outlives a restart.
const AT_STOP: [&str; 2] = ["node.socket_mode", "node.socket_group"];

/// Reads the configuration again, given the one in force.
pub type Load = Box<dyn Fn(&Config) -> Result<Config, ConfigErrors>>;

/// How a supervisor hears that it is to read its configuration again, and does.
pub struct Reload {
    /// Readable when it is to.
    pub signal: OwnedFd,
    /// Reads and checks the file.
    pub load: Load,
}

/// What the new file changes.
#[derive(Debug, Default, PartialEq, Eq)]
struct Changes {
    live: Vec<String>,
    restart: Vec<String>,
    stop: Vec<String>,
    anew: Vec<String>,
}

impl Changes {
    fn between(old: &Table, new: &Table) -> Self {
        let mut changes = Self::default();
        for key in changed(old, new) {
            let is = |all: &[&str]| {
                let section = key.split('.').next().unwrap_or_default();
                all.iter().any(|one| *one == key || *one == section)
            };
            let list = if is(&LIVE) {
                &mut changes.live
            } else if is(&AT_STOP) {
                &mut changes.stop
            } else if is(&AT_RESTART) {
                &mut changes.restart
            } else {
                &mut changes.anew
            };
            list.push(key);
        }
        changes
    }
}

/// The keys in which two files differ, by section.
fn changed(old: &Table, new: &Table) -> Vec<String> {
    let names =
        |a: &Table, b: &Table| -> BTreeSet<String> { a.keys().chain(b.keys()).cloned().collect() };
    let empty = Table::new();
    let mut keys = Vec::new();
    for section in names(old, new) {
        let (before, after) = (old.get(&section), new.get(&section));
        if before == after {
            continue;
        }
        let table = |value: Option<&toml::Value>| match value {
            None => Some(empty.clone()),
            Some(value) => value.as_table().cloned(),
        };
        match (table(before), table(after)) {
            (Some(a), Some(b)) => {
                let differs = |key: &String| a.get(key) != b.get(key);
                keys.extend(
                    names(&a, &b)
                        .into_iter()
                        .filter(differs)
                        .map(|key| format!("{section}.{key}")),
                );
            }
            // A list of tables: as a whole.
            _ => keys.push(section),
        }
    }
    // A list that is there now and was not, or the other way round.
    for list in ["peer", "acl", "quota"] {
        if old.get(list) != new.get(list) && !keys.iter().any(|key| key == list) {
            keys.push(list.to_owned());
        }
    }
    keys
}

/// Takes over one key, so that the next file is compared with what is in force.
fn note(written: &mut Table, new: &Table, key: &str) {
    let (section, name) = key.split_once('.').unwrap_or((key, ""));
    if name.is_empty() {
        match new.get(section) {
            Some(value) => written.insert(section.to_owned(), value.clone()),
            None => written.remove(section),
        };
        return;
    }
    let value = new.get(section).and_then(|table| table.get(name));
    let table = written
        .entry(section)
        .or_insert_with(|| Table::new().into());
    if let Some(table) = table.as_table_mut() {
        match value {
            Some(value) => table.insert(name.to_owned(), value.clone()),
            None => table.remove(name),
        };
    }
}

/// How engines and the resolver of neighbours follow a new list.
#[derive(Debug, PartialEq, Eq)]
struct PeerChanges {
    gone: Vec<u16>,
    set: Vec<Peer>,
}

impl PeerChanges {
    fn between(old: &[Peer], new: &[Peer]) -> Self {
        let gone = old
            .iter()
            .filter(|peer| !new.iter().any(|p| p.id == peer.id));
        let set = new.iter().filter(|peer| !old.contains(peer));
        Self {
            gone: gone.map(|peer| peer.id).collect(),
            set: set.cloned().collect(),
        }
    }
}

impl Supervisor {
    /// Told to read the configuration again.
    pub(super) fn on_reload(&mut self, now: Instant) {
        let Some(reload) = &self.reload else {
            return;
        };
        // Only that we were told matters.
        let _ = rustix::io::read(&reload.signal, &mut [0; 64]);
        if self.stopping || self.left {
            return;
        }
        match (reload.load)(&self.config) {
            Ok(new) => self.apply(new, now),
            Err(errors) => {
                for error in &errors.0 {
                    tracing::error!("{error}");
                }
                tracing::error!(
                    "not reloaded: nothing has changed; correct the file and reload again"
                );
            }
        }
    }

    fn apply(&mut self, new: Config, now: Instant) {
        let mut changes = Changes::between(&self.config.written, &new.written);
        let room = (self.config.limits.peers as usize).max(self.config.peers.len());
        if new.peers.len() > room {
            changes.live.retain(|key| key != "peer");
            changes.anew.push("peer".to_owned());
            tracing::warn!(
                peers = new.peers.len(),
                room,
                "more peers than memory is laid out for: set limits.peers to as many as there will ever be"
            );
        }
        for key in &changes.live {
            note(&mut self.config.written, &new.written, key);
        }
        let has = |key: &str| changes.live.iter().any(|one| one == key);
        if has("acl") {
            self.config.acl = new.acl;
        }
        // What no rule says follows from the limits.
        self.config.quotas = new.quotas;
        let (limits, wanted) = (&mut self.config.limits, new.limits);
        limits.ports = wanted.ports;
        limits.arena_bytes_per_port = wanted.arena_bytes_per_port;
        limits.arena_bytes_total = wanted.arena_bytes_total;
        limits.clients = wanted.clients;
        if has("log.level") {
            self.config.log_level = new.log_level;
            crate::logging::set_level(new.log_level);
        }
        // Also when nothing changed: what could not be held before is tried again.
        self.config.cpu_latency_us = new.cpu_latency_us;
        self.cpu_latency.bound(new.cpu_latency_us);
        self.config.keep_awake = new.keep_awake;
        self.look_after_processors(now);
        if has("peer") {
            self.change_peers(new.peers, now);
        }
        let list = |keys: &[String]| keys.join(", ");
        for (keys, takes) in [
            (&changes.restart, "a restart, which ends nothing"),
            (
                &changes.stop,
                "a stop and a start: ports close, peers are told",
            ),
            (
                &changes.anew,
                "a restart that begins the node anew: ports close, peers are told",
            ),
        ] {
            if !keys.is_empty() {
                let refused = list(keys);
                tracing::warn!(refused, "not changed: {refused}: that takes {takes}");
            }
        }
        let applied = list(&changes.live);
        tracing::info!(applied, "configuration reloaded");
    }

    /// Engines are told of each change, the resolver begins anew.
    fn change_peers(&mut self, peers: Vec<Peer>, now: Instant) {
        let changes = PeerChanges::between(&self.config.peers, &peers);
        self.config.peers = peers;
        for node in changes.gone {
            tracing::info!(node, "no peer any more");
            self.routes.remove(&node);
            for index in 0..self.engines.len() {
                self.tell(index, &ToEngine::RemoveNode { node }, Vec::new());
            }
        }
        for peer in changes.set {
            // Who is where it was has the MAC it had.
            let known = self.routes.get(&peer.id);
            let known = known.filter(|route| route.address == peer.address);
            let mac = peer.mac.or_else(|| known.and_then(|route| route.mac));
            self.publish_route(Route {
                node: peer.id,
                name: peer.name,
                mac,
                address: peer.address,
            });
        }
        if !self.resolves_neighbours {
            return;
        }
        if let Some(old) = self.neighbours.take() {
            self.poll.remove(old.watch());
        }
        match Neighbours::new(&self.config) {
            Ok(Some(neighbours)) => {
                let watched = self
                    .poll
                    .add(neighbours.watch(), Source::Neighbours, EventFlags::IN);
                if let Err(error) = watched {
                    tracing::error!(%error, "neighbours are not watched: restart the daemon");
                }
                self.neighbours = Some(neighbours);
                self.look_after_neighbours(now);
            }
            Ok(None) => {}
            Err(error) => {
                tracing::error!(%error, "neighbours are not resolved: restart the daemon")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(text: &str) -> Table {
        toml::from_str(text).unwrap()
    }

    fn changes(old: &str, new: &str) -> Changes {
        Changes::between(&table(old), &table(new))
    }

    #[test]
    fn every_change_has_its_name_and_its_price() {
        let old =
            "[node]\nid = 1\n[engine]\ncores = [1]\n[limits]\nports = 9\n[[acl]]\nports = \"1\"";
        let new = "[node]\nid = 2\nsocket_mode = \"0600\"\n[limits]\nports = 8\npeers = 7\n[recovery]\nstandby = false\n[metrics]\nlisten = \"[::1]:9\"\n[[quota]]\nports = 1\n[log]\nlevel = \"debug\"\n[[peer]]\nid = 2\n[new]\nx = 1";
        let found = changes(old, new);
        assert_eq!(
            found.live,
            ["acl", "limits.ports", "log.level", "peer", "quota"]
        );
        assert_eq!(found.restart, ["metrics.listen", "recovery.standby"]);
        assert_eq!(found.stop, ["node.socket_mode"]);
        // What nobody has heard of is not forgotten.
        assert_eq!(
            found.anew,
            ["engine.cores", "limits.peers", "new.x", "node.id"]
        );
    }

    #[test]
    fn nothing_changed() {
        let text = "[node]\nid = 1\n[[acl]]\nports = \"1\"\n";
        assert_eq!(
            changes(text, &format!("# said better\n{text}")),
            Changes::default()
        );
    }

    #[test]
    fn what_was_applied_is_no_change_any_more_and_what_was_refused_is() {
        let mut old = table("[node]\nid = 1\n[[acl]]\nports = \"1\"");
        let new = table("[node]\nid = 2\n[limits]\nports = 8\n[[peer]]\nid = 3");
        for key in Changes::between(&old, &new).live {
            note(&mut old, &new, &key);
        }
        let left = Changes::between(&old, &new);
        assert_eq!(left.live, Vec::<String>::new());
        assert_eq!(left.anew, ["node.id"]);
    }

    #[test]
    fn peers_that_come_go_and_move() {
        let peer = |id, name: &str| Peer {
            id,
            name: name.to_owned(),
            address: None,
            mac: None,
        };
        let old = [peer(2, "two"), peer(3, "three"), peer(4, "four")];
        let new = [peer(2, "two"), peer(3, "drei"), peer(5, "five")];
        let found = PeerChanges::between(&old, &new);
        assert_eq!(found.gone, [4]);
        assert_eq!(found.set, [peer(3, "drei"), peer(5, "five")]);
    }
}
