//! Peers that a configuration names: is there a way, does somebody answer, is the MAC the one that is written down?

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use netlink_packet_route::route::{RouteAttribute, RouteMessage};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};

use super::links::LinkFacts;
use super::{Findings, Patient, daemon};
use crate::engine_link::Encap;
use crate::supervisor::config::{Config, Peer};
use crate::supervisor::format_mac;
use crate::supervisor::netlink::Netlink;

/// A neighbour answers within this.
const ANSWERS_WITHIN: Duration = Duration::from_millis(1500);
/// Between two looks at the table.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// More peers are not asked for one by one.
const MOST: usize = 256;

pub(super) fn look(patient: &Patient, link: &LinkFacts, findings: &mut Findings) {
    let Some(config) = patient
        .config
        .as_ref()
        .filter(|config| config.encap == Encap::Udp)
    else {
        return;
    };
    if !link.up {
        return;
    }
    if let Err(error) = resolve(config, link, findings) {
        let what = format!("neighbours cannot be looked up: {error}");
        findings.warn(
            "neighbours",
            what,
            format!("ip neighbour show dev {}", link.name),
        );
    }
}

fn resolve(config: &Config, link: &LinkFacts, findings: &mut Findings) -> std::io::Result<()> {
    let mut netlink = Netlink::new()?;
    let mut waiting: Vec<(&Peer, IpAddr)> = Vec::new();
    let mut good = 0;
    for peer in config.peers.iter().take(MOST) {
        let Some(address) = peer.address else {
            continue;
        };
        match way_out(&mut netlink, address) {
            Ok(oif) if oif == link.index => {}
            // Link-local addresses are on every link.
            Ok(_) | Err(_) if matches!(address, IpAddr::V6(v6) if v6.is_unicast_link_local()) => {}
            Ok(_) => {
                findings.warn(
                    "neighbours",
                    format!(
                        "{}: the kernel sends to {address} by another interface than {}",
                        who(peer),
                        link.name
                    ),
                    format!(
                        "ip route add {address} dev {}   # or via a router on it",
                        link.name
                    ),
                );
            }
            Err(_) => {
                findings.bad(
                    "neighbours",
                    format!("{}: no way to {address} over {}", who(peer), link.name),
                    format!(
                        "ip route add {address} dev {}   # or via a router",
                        link.name
                    ),
                );
                continue;
            }
        }
        let hop = netlink.route(address, link.index)?.unwrap_or(address);
        waiting.push((peer, hop));
    }
    let mut table = HashMap::new();
    let until = Instant::now() + ANSWERS_WITHIN;
    let mut asked = false;
    loop {
        table.clear();
        for entry in netlink.neighbours()? {
            if let (Some(mac), true) = (entry.mac, entry.ifindex == link.index) {
                table.insert(entry.address, mac);
            }
        }
        let missing = waiting.iter().filter(|(_, hop)| !table.contains_key(hop));
        let missing: Vec<IpAddr> = missing.map(|(_, hop)| *hop).collect();
        if missing.is_empty() || Instant::now() >= until {
            break;
        }
        if !asked {
            asked = true;
            for hop in missing {
                // Without the privilege the table is what there is.
                if netlink.use_neighbour(link.index, hop).is_err() {
                    break;
                }
            }
        }
        std::thread::sleep(LOOK_EVERY);
    }
    for (peer, hop) in waiting {
        match (table.get(&hop), peer.mac) {
            (None, _) => findings.bad(
                "neighbours",
                format!("{}: nobody answers for {hop} on {}", who(peer), link.name),
                format!(
                    "ping -c 1 -I {} {hop}   # is it up, on this segment, with that address?",
                    link.name
                ),
            ),
            (Some(seen), Some(written)) if *seen != written => findings.bad(
                "neighbours",
                format!(
                    "{}: the configuration says MAC {}, but {} answers for {hop}",
                    who(peer),
                    format_mac(&written),
                    format_mac(seen)
                ),
                format!(
                    "mac = \"{}\"   # or leave the line out: it is then looked up",
                    format_mac(seen)
                ),
            ),
            (Some(_), _) => good += 1,
        }
    }
    if good > 0 {
        findings.ok(
            "neighbours",
            format!("{good} of {} peers have a MAC", config.peers.len()),
        );
    }
    Ok(())
}

/// The link by which the kernel would send there; an error if it knows no way.
fn way_out(netlink: &mut Netlink, to: IpAddr) -> std::io::Result<u32> {
    let mut request = RouteMessage::default();
    request.header.address_family = match to {
        IpAddr::V4(_) => AddressFamily::Inet,
        IpAddr::V6(_) => AddressFamily::Inet6,
    };
    request.header.destination_prefix_length = if to.is_ipv4() { 32 } else { 128 };
    request
        .attributes
        .push(RouteAttribute::Destination(to.into()));
    for answer in netlink.ask(RouteNetlinkMessage::GetRoute(request), 0)? {
        if let RouteNetlinkMessage::NewRoute(route) = answer {
            let mut oif = route
                .attributes
                .iter()
                .filter_map(|attribute| match attribute {
                    RouteAttribute::Oif(index) => Some(*index),
                    _ => None,
                });
            return oif
                .next()
                .ok_or_else(|| std::io::Error::other("a route to nowhere"));
        }
    }
    Err(std::io::Error::other("no route"))
}

fn who(peer: &Peer) -> String {
    format!("peer {} ({})", peer.id, daemon::printable(&peer.name))
}
