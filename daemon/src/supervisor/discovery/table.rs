//! Who is there, and what is wrong with it: a judgement of what was heard and when. No socket, no clock.
//!
//! **A node at a second place** has moved, or its id is taken twice. Told apart by whether the first place is silent: nobody who announces
//! himself every second is silent for [`SILENT`]. The same incarnation is the same process, so it has moved at once. Until it is known
//! the first place is believed.
//!
//! **The table of the configuration** is never overruled: what contradicts it is named.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use portolan_transport::policy::{Policy, misfit_name};
use serde_json::{Value, json};

use super::packet::Announcement;
use crate::engine_link::Route;
use crate::supervisor::format_mac;

/// Who announces himself every second is not there when nothing was heard of him for so long.
pub const SILENT: Duration = Duration::from_millis(3500);
/// Something that was seen once is told for so long.
const TOLD_FOR: Duration = Duration::from_secs(10);
/// That a node has moved, for longer.
const MOVED_TOLD_FOR: Duration = Duration::from_secs(600);
/// Nodes and troubles beyond are not noted.
const MOST_NODES: usize = 4096;
const MOST_TROUBLES: usize = 512;

/// What may be wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// Two nodes have one id.
    DuplicateId,
    /// Two nodes have one name.
    DuplicateName,
    /// Another cluster is on this wire.
    OtherCluster,
    /// A node is somewhere else than before.
    Moved,
    /// It is somewhere else than the configuration says.
    Table,
    /// Its MTU is another.
    Mtu,
    /// Its versions and ours have none in common.
    Version,
    /// Its policy does not go with ours.
    Policy,
    /// It speaks over another encapsulation or port.
    Encap,
}

impl Kind {
    /// For people and scripts: what it is called, and how bad it is.
    fn words(self) -> (&'static str, &'static str) {
        match self {
            Self::DuplicateId => ("duplicate id", "bad"),
            Self::DuplicateName => ("duplicate name", "bad"),
            Self::OtherCluster => ("other cluster", "warn"),
            Self::Moved => ("moved", "warn"),
            Self::Table => ("table", "bad"),
            Self::Mtu => ("mtu", "warn"),
            Self::Version => ("version", "bad"),
            Self::Policy => ("policy", "bad"),
            Self::Encap => ("encapsulation", "bad"),
        }
    }
}

#[derive(Debug)]
struct Trouble {
    what: String,
    mend: String,
    until: Instant,
}

/// A second place a node was heard from.
#[derive(Debug)]
struct Claim {
    place: Place,
    incarnation: u64,
    at: Instant,
}

type Place = ([u8; 6], Option<IpAddr>);

#[derive(Debug)]
struct Entry {
    said: Announcement,
    heard: Instant,
    claim: Option<Claim>,
    fits: bool,
}

fn place(said: &Announcement) -> Place {
    (said.mac, said.address)
}

fn shown((mac, address): &Place) -> String {
    match address {
        Some(address) => format!("{address} ({})", format_mac(mac)),
        None => format_mac(mac),
    }
}

/// What is known of all nodes.
#[derive(Debug)]
pub struct Table {
    policy: Policy,
    /// Peers of the configuration: address, MAC.
    fixed: BTreeMap<u16, (Option<IpAddr>, Option<[u8; 6]>)>,
    nodes: BTreeMap<u16, Entry>,
    troubles: BTreeMap<(Kind, u16, u64), Trouble>,
}

impl Table {
    /// Of a node with this policy and these peers in its configuration.
    pub fn new(policy: Policy, fixed: BTreeMap<u16, (Option<IpAddr>, Option<[u8; 6]>)>) -> Self {
        Self {
            policy,
            fixed,
            nodes: BTreeMap::new(),
            troubles: BTreeMap::new(),
        }
    }

    fn note(&mut self, now: Instant, kind: Kind, who: (u16, u64), what: String, mend: &str) {
        let key = (kind, who.0, who.1);
        if self.troubles.len() >= MOST_TROUBLES && !self.troubles.contains_key(&key) {
            return;
        }
        let told_for = if kind == Kind::Moved {
            MOVED_TOLD_FOR
        } else {
            TOLD_FOR
        };
        let trouble = Trouble {
            what,
            mend: mend.to_owned(),
            until: now + told_for,
        };
        if self.troubles.insert(key, trouble).is_none()
            && let Some(new) = self.troubles.get(&key)
        {
            tracing::warn!(
                node = who.0,
                "{}: {}; {}",
                kind.words().0,
                new.what,
                new.mend
            );
        }
    }

    /// Somebody said this; we would say `own`. Returns how it is reached if that is new.
    pub fn hear(&mut self, now: Instant, own: &Announcement, said: Announcement) -> Option<Route> {
        let node = said.node;
        let at = shown(&place(&said));
        if (said.cluster, &said.cluster_name) != (own.cluster, &own.cluster_name) {
            let what = format!(
                "cluster `{}` is on this wire too: its node {node} ({}) at {at}, UDP port {}",
                said.cluster_name, said.name, said.udp_port
            );
            let mend = "one cluster.name for all, or another cluster.udp_port for each cluster";
            self.note(now, Kind::OtherCluster, (node, said.cluster), what, mend);
            return None;
        }
        if node == own.node {
            if said.incarnation != own.incarnation {
                let what = format!("node {node} is also `{}` at {at}", said.name);
                let mend = "give one of them another node.id and restart it";
                self.note(now, Kind::DuplicateId, (node, 0), what, mend);
            }
            return None;
        }
        let moved = match self.place(now, &said) {
            Ok(moved) => moved,
            Err(()) => return None,
        };
        let fits = self.judge(now, own, &said);
        if !self.nodes.contains_key(&node) && self.nodes.len() >= MOST_NODES {
            return None;
        }
        let before = self.nodes.get(&node).map(|e| (e.fits, e.said.name.clone()));
        let same = before == Some((fits, said.name.clone())) && !moved;
        let route = Route {
            node,
            name: said.name.clone(),
            mac: Some(said.mac),
            address: said.address,
        };
        let claim = self
            .nodes
            .get_mut(&node)
            .and_then(|entry| entry.claim.take());
        let claim = claim.filter(|claim| !moved && now.duration_since(claim.at) < SILENT);
        self.nodes.insert(
            node,
            Entry {
                said,
                heard: now,
                claim,
                fits,
            },
        );
        (fits && !same && !self.fixed.contains_key(&node)).then_some(route)
    }

    /// Is it where it was? `Ok(true)`: it has moved; an error: it is not believed.
    fn place(&mut self, now: Instant, said: &Announcement) -> Result<bool, ()> {
        let Some(entry) = self.nodes.get_mut(&said.node) else {
            return Ok(false);
        };
        let (old, new) = (place(&entry.said), place(said));
        let (node, name) = (said.node, entry.said.name.clone());
        if old == new {
            let other = entry.claim.as_ref();
            let other = other.filter(|claim| now.duration_since(claim.at) < SILENT);
            if let Some(claim) = other
                && claim.incarnation != said.incarnation
            {
                let what = format!(
                    "node {node} ({name}) is at {} and at {}",
                    shown(&old),
                    shown(&claim.place)
                );
                let mend = "give one of them another node.id and restart it";
                self.note(now, Kind::DuplicateId, (node, 0), what, mend);
            }
            return Ok(false);
        }
        let gone = now.duration_since(entry.heard) >= SILENT;
        if !gone && said.incarnation != entry.said.incarnation {
            entry.claim = Some(Claim {
                place: new,
                incarnation: said.incarnation,
                at: now,
            });
            return Err(());
        }
        let what = format!(
            "node {node} ({name}) has moved from {} to {}",
            shown(&old),
            shown(&new)
        );
        let mend = "nothing, if somebody moved it; else find out who has its id";
        self.note(now, Kind::Moved, (node, 0), what, mend);
        Ok(true)
    }

    /// Can we talk to it? What keeps us from it, or is not as it should be, is noted anew.
    fn judge(&mut self, now: Instant, own: &Announcement, said: &Announcement) -> bool {
        let node = said.node;
        let who = format!("node {node} ({})", said.name);
        for kind in [
            Kind::Mtu,
            Kind::Version,
            Kind::Policy,
            Kind::Encap,
            Kind::Table,
            Kind::DuplicateName,
        ] {
            // Only what is not true any more; what is stays known since when it was.
            let still = match kind {
                Kind::Mtu => said.mtu != own.mtu,
                Kind::Version => said.wire.0 > own.wire.1 || said.wire.1 < own.wire.0,
                Kind::Policy => self.policy.misfit(&said.policy).is_some(),
                Kind::Encap => (said.udp, said.udp_port) != (own.udp, own.udp_port),
                Kind::Table => self.contradicts(said),
                Kind::DuplicateName => self.namesake(own, said).is_some(),
                _ => false,
            };
            if !still {
                self.troubles.remove(&(kind, node, 0));
                continue;
            }
            let (what, mend) = match kind {
                Kind::Mtu => (
                    format!("{who} has an MTU of {}, this node {}", said.mtu, own.mtu),
                    "ip link set dev DEV mtu MTU   # the same on all nodes",
                ),
                Kind::Version => (
                    format!(
                        "{who} speaks versions {} to {} of the wire, this node {} to {}",
                        said.wire.0, said.wire.1, own.wire.0, own.wire.1
                    ),
                    "portolan upgrade   # on the older of the two",
                ),
                Kind::Policy => {
                    let field = self
                        .policy
                        .misfit(&said.policy)
                        .map_or("policy", misfit_name);
                    (
                        format!(
                            "{who} has profile `{}`, this node `{}`: {field} differs",
                            said.profile, own.profile
                        ),
                        "transport.profile = the same on all nodes",
                    )
                }
                Kind::Encap => (
                    format!(
                        "{who} travels in {} at port {}, this node in {} at port {}",
                        encap(said),
                        said.udp_port,
                        encap(own),
                        own.udp_port
                    ),
                    "cluster.encap and cluster.udp_port = the same on all nodes",
                ),
                Kind::Table => (
                    format!(
                        "{who} says it is at {}; the configuration says otherwise",
                        shown(&place(said))
                    ),
                    "correct the [[peer]], or leave it out",
                ),
                _ => (
                    format!(
                        "{who} has the name of node {}",
                        self.namesake(own, said).unwrap_or(0)
                    ),
                    "give one of them another node.name",
                ),
            };
            self.note(now, kind, (node, 0), what, mend);
        }
        let bars = [
            Kind::Version,
            Kind::Policy,
            Kind::Encap,
            Kind::DuplicateName,
        ];
        !bars
            .iter()
            .any(|kind| self.troubles.contains_key(&(*kind, node, 0)))
    }

    fn contradicts(&self, said: &Announcement) -> bool {
        self.fixed.get(&said.node).is_some_and(|(address, mac)| {
            // A MAC behind a router is the router's, so only of Ethernet it is compared.
            (said.udp && *address != said.address)
                || (!said.udp && mac.is_some_and(|mac| mac != said.mac))
        })
    }

    fn namesake(&self, own: &Announcement, said: &Announcement) -> Option<u16> {
        if said.name == own.name {
            return Some(own.node);
        }
        let mut others = self.nodes.values().filter(|e| e.said.node < said.node);
        let other = others.find(|entry| entry.said.name == said.name)?;
        Some(other.said.node)
    }

    /// Addresses of nodes that were heard of lately, from `skip` on and round again.
    pub fn addresses(&self, now: Instant, skip: usize, most: usize) -> Vec<IpAddr> {
        let here = self
            .nodes
            .values()
            .filter(|e| now.duration_since(e.heard) < SILENT);
        let all: Vec<IpAddr> = here.filter_map(|entry| entry.said.address).collect();
        let from = skip % all.len().max(1);
        all.iter()
            .cycle()
            .skip(from)
            .take(most.min(all.len()))
            .copied()
            .collect()
    }

    /// What `portolan map` shows of it.
    pub fn document(&mut self, now: Instant) -> (Vec<Value>, Vec<Value>) {
        self.troubles.retain(|_, trouble| trouble.until > now);
        let nodes = self.nodes.values().map(|entry| {
            let said = &entry.said;
            let silent = now.duration_since(entry.heard);
            json!({
                "node": said.node,
                "name": said.name,
                "state": if silent < SILENT { "here" } else { "silent" },
                "usable": entry.fits,
                "learned": if self.fixed.contains_key(&said.node) { "table" } else { "announced" },
                "address": said.address,
                "mac": format_mac(&said.mac),
                "mtu": said.mtu,
                "queues": said.queues,
                "udp_port": said.udp_port,
                "profile": said.profile,
                "wire": [said.wire.0, said.wire.1],
                "incarnation": format!("{:016x}", said.incarnation),
                "heard_ms_ago": silent.as_millis() as u64,
            })
        });
        let nodes = nodes.collect();
        let troubles = self.troubles.iter().map(|((kind, node, _), trouble)| {
            let (word, severity) = kind.words();
            json!({
                "kind": word,
                "severity": severity,
                "node": node,
                "what": trouble.what,
                "mend": trouble.mend,
            })
        });
        (nodes, troubles.collect())
    }
}

fn encap(said: &Announcement) -> &'static str {
    if said.udp { "UDP" } else { "Ethernet" }
}

#[cfg(test)]
mod tests {
    use super::super::packet::tests::announcement;
    use super::*;

    struct Scene {
        table: Table,
        own: Announcement,
        now: Instant,
    }

    impl Scene {
        fn new() -> Self {
            let fixed = BTreeMap::from([(9, (Some("10.0.0.9".parse().unwrap()), None))]);
            let own = Announcement {
                policy: Policy::default().wire(),
                ..announcement(1)
            };
            Self {
                table: Table::new(Policy::default(), fixed),
                own,
                now: Instant::now(),
            }
        }

        fn after(&mut self, ms: u64) -> &mut Self {
            self.now += Duration::from_millis(ms);
            self
        }

        fn hear(&mut self, node: u16, change: impl FnOnce(&mut Announcement)) -> Option<Route> {
            let mut said = announcement(node);
            said.policy = self.own.policy;
            change(&mut said);
            self.table.hear(self.now, &self.own, said)
        }

        fn troubles(&mut self) -> Vec<String> {
            let (_, troubles) = self.table.document(self.now);
            troubles
                .iter()
                .map(|t| t["kind"].as_str().unwrap().to_owned())
                .collect()
        }
    }

    fn at(place: u8, incarnation: u64) -> impl FnOnce(&mut Announcement) {
        move |said| {
            said.address = Some(format!("10.0.1.{place}").parse().unwrap());
            said.mac[4] = place;
            said.incarnation = incarnation;
        }
    }

    #[test]
    fn a_node_is_found_once() {
        let mut scene = Scene::new();
        let route = scene.hear(2, |_| {}).unwrap();
        assert_eq!((route.node, route.name.as_str()), (2, "n2"));
        assert_eq!(scene.after(1000).hear(2, |_| {}), None);
        // One of the configuration is heard and changes nothing.
        assert_eq!(scene.hear(9, |_| {}), None);
        assert!(scene.troubles().is_empty());
        // Our own announcement comes back.
        let own = scene.own.clone();
        assert_eq!(scene.table.hear(scene.now, &own, own.clone()), None);
        assert!(scene.troubles().is_empty());
    }

    // Somebody else with our id. Expect: named, nothing learned.
    #[test]
    fn our_id_twice() {
        let mut scene = Scene::new();
        assert_eq!(scene.hear(1, at(7, 77)), None);
        assert_eq!(scene.troubles(), ["duplicate id"]);
        // It goes away.
        scene.after(10_001);
        assert!(scene.troubles().is_empty());
    }

    // Two others with one id, both alive. Expect: the first stays, the id is named as taken twice.
    #[test]
    fn another_id_twice() {
        let mut scene = Scene::new();
        scene.hear(2, at(2, 20)).unwrap();
        for _ in 0..5 {
            assert_eq!(scene.after(500).hear(2, at(3, 30)), None);
            assert_eq!(scene.after(500).hear(2, at(2, 20)), None);
        }
        assert_eq!(scene.troubles(), ["duplicate id"]);
    }

    // A node at another place: after a silence, or as the same process at once. Expect: followed.
    #[test]
    fn a_node_that_moves() {
        let mut scene = Scene::new();
        scene.hear(2, at(2, 20)).unwrap();
        assert_eq!(scene.after(1000).hear(2, at(3, 30)), None);
        let route = scene.after(2500).hear(2, at(3, 30)).unwrap();
        assert_eq!(route.address, Some("10.0.1.3".parse().unwrap()));
        let route = scene.after(10).hear(2, at(4, 30)).unwrap();
        assert_eq!(route.mac, Some([2, 0, 0, 0, 4, 2]));
        assert_eq!(scene.troubles(), ["moved"]);
    }

    // Each thing that keeps nodes apart, and one that does not. Expect: named, and forgotten when it is mended; then it is found.
    #[test]
    fn nodes_that_do_not_fit() {
        type Change = fn(&mut Announcement);
        let cases: [(Change, &str, bool); 6] = [
            (|said| said.mtu = 9000, "mtu", true),
            (|said| said.wire = (2, 3), "version", false),
            (|said| said.policy.recovery = 1, "policy", false),
            (|said| said.udp_port = 28_001, "encapsulation", false),
            (|said| said.name = "n1".into(), "duplicate name", false),
            (|said| said.cluster = 18, "other cluster", false),
        ];
        for (change, kind, found) in cases {
            let mut scene = Scene::new();
            assert_eq!(scene.hear(2, change).is_some(), found, "{kind}");
            assert_eq!(scene.troubles(), [kind]);
            assert_eq!(scene.after(100).hear(2, |_| {}).is_some(), !found, "{kind}");
            if kind != "other cluster" {
                assert!(scene.troubles().is_empty(), "{kind}");
            }
        }
        let mut scene = Scene::new();
        scene.hear(9, at(5, 50));
        assert_eq!(scene.troubles(), ["table"]);
    }

    // More nodes and clusters than anybody has. Expect: bounded.
    #[test]
    fn a_flood_is_bounded() {
        let mut scene = Scene::new();
        for node in 2..5000 {
            scene.hear(node, |said| said.mtu = 9000);
            scene.hear(node, |said| said.cluster = u64::from(node) << 8);
        }
        assert_eq!(scene.table.nodes.len(), MOST_NODES);
        assert_eq!(scene.table.troubles.len(), MOST_TROUBLES);
        let addresses = scene.table.addresses(scene.now, 3, 16);
        assert_eq!(addresses.len(), 16);
    }
}
