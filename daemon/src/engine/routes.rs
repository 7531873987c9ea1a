//! How each node is reached.
//!
//! The supervisor resolves neighbours and publishes changes; the transport is told of a node only once frames to it can be built. A
//! node whose neighbour entry is lost keeps its last MAC address: the transport notices silence by itself, and the supervisor follows
//! a node that moves.

use std::collections::BTreeMap;
use std::net::IpAddr;

use crate::engine_link::Route;

use portolan_transport::endpoint::Transmit;

use super::encap::{Encapsulation, REPEATABLE, Target};

/// A resolved route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Hop {
    mac: [u8; 6],
    address: Option<IpAddr>,
}

/// What a change of route means for the transport.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// Nothing.
    None,
    /// The node can be reached now.
    Reachable,
}

/// Routes by node.
#[derive(Debug)]
pub struct Routes {
    own: u16,
    hops: Vec<Option<Hop>>,
    names: BTreeMap<u16, String>,
    /// The last frame whose outer headers were built, and those.
    last: Option<(Transmit, [u8; REPEATABLE])>,
}

impl Routes {
    /// None yet, for this node.
    pub fn new(own: u16) -> Self {
        Self {
            own,
            hops: vec![None; usize::from(u16::MAX) + 1],
            names: BTreeMap::new(),
            last: None,
        }
    }

    /// Adds or changes a route.
    pub fn set(&mut self, route: &Route, encapsulation: &Encapsulation) -> Change {
        self.last = None;
        self.names.insert(route.node, route.name.clone());
        if route.node == self.own {
            // Looped back inside the engines: needs no address.
            return Change::Reachable;
        }
        let place = &mut self.hops[usize::from(route.node)];
        let Some(mac) = route.mac else {
            return Change::None;
        };
        if !encapsulation.reaches(route.address) {
            return Change::None;
        }
        let known = place.is_some();
        *place = Some(Hop {
            mac,
            address: route.address,
        });
        if known {
            Change::None
        } else {
            Change::Reachable
        }
    }

    /// Forgets a node.
    pub fn remove(&mut self, node: u16) {
        self.last = None;
        self.hops[usize::from(node)] = None;
        self.names.remove(&node);
    }

    /// The outer headers of the last frame that had such, if this one is as long and goes the same way.
    #[inline]
    pub fn repeated(&self, frame: &Transmit) -> Option<&[u8; REPEATABLE]> {
        self.last
            .as_ref()
            .filter(|last| last.0 == *frame)
            .map(|last| &last.1)
    }

    /// Remembers the outer headers of a frame, if they can be repeated.
    #[inline]
    pub fn remember(&mut self, frame: Transmit, headers: Option<[u8; REPEATABLE]>) {
        self.last = headers.map(|headers| (frame, headers));
    }

    /// Where frames for a node go; `None` while it is unresolved.
    pub fn target(&self, node: u16, queue: u8, flow: u16, high: bool) -> Option<Target> {
        self.hops[usize::from(node)].map(|hop| Target {
            mac: hop.mac,
            address: hop.address,
            queue,
            flow,
            high,
        })
    }

    /// May a frame that claims to come from `node` carry this outer source address? Unknown nodes are the transport's to refuse.
    pub fn allows(&self, node: u16, source: Option<IpAddr>) -> bool {
        match (&self.hops[usize::from(node)], source) {
            (Some(hop), Some(_)) => hop.address == source,
            _ => true,
        }
    }

    /// Nodes that are known but not resolved.
    pub fn unresolved(&self) -> impl Iterator<Item = (u16, &str)> {
        self.names
            .iter()
            .filter(|(node, _)| **node != self.own && self.hops[usize::from(**node)].is_none())
            .map(|(node, name)| (*node, name.as_str()))
    }
}

#[cfg(test)]
mod tests {
    use portolan_transport::ident::{NodeId, Peer, Priority};

    use super::*;
    use crate::engine::encap::tests::config;
    use crate::engine_link::Encap;

    #[test]
    fn a_node_is_reachable_once_it_is_resolved() {
        let ours = Encapsulation::new(&config(Encap::Udp, [2; 6], Some("10.0.0.1"))).unwrap();
        let mut routes = Routes::new(1);
        let mut route = Route {
            node: 2,
            name: "two".into(),
            mac: None,
            address: Some("10.0.0.2".parse().unwrap()),
        };
        assert_eq!(routes.set(&route, &ours), Change::None);
        assert_eq!(routes.target(2, 0, 0, false), None);
        assert_eq!(routes.unresolved().collect::<Vec<_>>(), [(2, "two")]);
        route.mac = Some([4; 6]);
        assert_eq!(routes.set(&route, &ours), Change::Reachable);
        // It moves. Expect: followed. It is lost. Expect: the last place is kept.
        route.mac = Some([6; 6]);
        assert_eq!(routes.set(&route, &ours), Change::None);
        route.mac = None;
        assert_eq!(routes.set(&route, &ours), Change::None);
        assert_eq!(routes.target(2, 1, 7, true).unwrap().mac, [6; 6]);
        // Outer headers are repeated for as long as no route has changed.
        let frame = Transmit {
            peer: Peer {
                node: NodeId::new(2).unwrap(),
                queue: 1,
            },
            len: 100,
            priority: Priority::High,
            flow: 7,
        };
        let longer = Transmit { len: 101, ..frame };
        let remember = |routes: &mut Routes| {
            routes.remember(frame, Some([1; REPEATABLE]));
            assert_eq!(routes.repeated(&frame), Some(&[1; REPEATABLE]));
            assert_eq!(routes.repeated(&longer), None);
        };
        remember(&mut routes);
        routes.remember(frame, None);
        assert_eq!(routes.repeated(&frame), None);
        remember(&mut routes);
        route.mac = Some([8; 6]);
        routes.set(&route, &ours);
        assert_eq!(routes.repeated(&frame), None);
        remember(&mut routes);
        routes.remove(3);
        assert_eq!(routes.repeated(&frame), None);
        // Another address claims to be node 2.
        assert!(routes.allows(2, Some("10.0.0.2".parse().unwrap())));
        assert!(!routes.allows(2, Some("10.0.0.3".parse().unwrap())));
        routes.remove(2);
        assert_eq!(routes.target(2, 0, 0, false), None);
    }
}
