//! `network.discovery`: how nodes that are not in the file are found.

use std::net::IpAddr;

use toml::Value;

use super::checker::Checker;
use super::file::File;
use crate::engine_link::Encap;

/// Most seeds; each knows all others.
const MOST_SEEDS: usize = 64;
/// Peers that memory is laid out for when nobody knows how many there will be.
const EXPECTED: usize = 16;

/// How other nodes are found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum DiscoveryMode {
    /// They are in the file, all of them.
    #[default]
    Static,
    /// They announce themselves on the segment.
    Multicast,
    /// They are asked for at these addresses.
    Seeds(Vec<IpAddr>),
}

impl DiscoveryMode {
    /// For people and scripts.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Static => "static",
            Self::Multicast => "multicast",
            Self::Seeds(_) => "seeds",
        }
    }

    /// Peers to be ready for, if so many are in the file.
    pub(super) fn expected(&self, peers: usize) -> usize {
        match self {
            Self::Static => peers,
            Self::Multicast | Self::Seeds(_) => peers.max(EXPECTED),
        }
    }
}

pub(super) fn discovery(
    checker: &mut Checker<'_>,
    file: &File,
    own: Option<IpAddr>,
    udp_port: i64,
) -> DiscoveryMode {
    let Some(value) = &file.network.discovery else {
        return DiscoveryMode::Static;
    };
    let mode = match value.get_ref() {
        Value::String(text) if text == "static" => return DiscoveryMode::Static,
        Value::String(text) if text == "multicast" => DiscoveryMode::Multicast,
        Value::Array(list) if (1..=MOST_SEEDS).contains(&list.len()) => {
            let addresses = list
                .iter()
                .map(|seed| seed.as_str().and_then(|s| s.parse::<IpAddr>().ok()));
            match addresses.collect::<Option<Vec<_>>>() {
                Some(seeds) => DiscoveryMode::Seeds(seeds),
                None => {
                    let message = "network.discovery: a seed is no IPv4 or IPv6 address; write them as [\"10.0.1.5\", \"10.0.2.5\"]";
                    checker.complain(value.span(), message);
                    return DiscoveryMode::Static;
                }
            }
        }
        _ => {
            let message = format!(
                "network.discovery is {}; use \"static\", \"multicast\" or 1 to {MOST_SEEDS} addresses of nodes as [\"10.0.1.5\"]",
                value.get_ref()
            );
            checker.complain(value.span(), message);
            return DiscoveryMode::Static;
        }
    };
    if udp_port < 2 {
        let message =
            "network.discovery uses the UDP port below cluster.udp_port; set that to 2 or more";
        checker.complain(value.span(), message);
    }
    if let DiscoveryMode::Seeds(seeds) = &mode {
        let ethernet = file
            .cluster
            .encap
            .as_ref()
            .is_some_and(|e| *e.get_ref() == Encap::Ethernet);
        if ethernet {
            let message = "network.discovery with seeds needs encap udp: Ethernet frames pass no router; use \"multicast\"";
            checker.complain(value.span(), message);
        } else if let Some(seed) = seeds
            .iter()
            .find(|seed| own.is_some_and(|own| own.is_ipv4() != seed.is_ipv4()))
        {
            let message = format!(
                "{seed} is of another IP version than network.address; use one version in a cluster"
            );
            checker.complain(value.span(), message);
        }
    }
    mode
}
