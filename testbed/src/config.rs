//! The configuration file of a node's daemon.

use anyhow::{Context, Result};
use toml::{Table, Value};

use crate::lab::{Encap, Plan};

/// The first UDP port; queue q listens on this plus q.
pub(crate) const UDP_PORT: u16 = 28_000;
const UMEM_FRAMES: i64 = 8192;

/// The configuration of node `id`, with `overrides` (TOML) merged over it.
pub(crate) fn render(plan: &Plan, id: u16, overrides: &str) -> Result<String> {
    let mut config = base(plan, id);
    merge_toml(&mut config, overrides)?;
    toml::to_string(&config).context("configuration to TOML")
}

/// Merges TOML text over a table: tables by key, everything else (arrays too) replaced.
pub fn merge_toml(into: &mut Table, overrides: &str) -> Result<()> {
    let overrides: Table = overrides.parse().context("overrides of a configuration")?;
    merge(into, overrides);
    Ok(())
}

fn merge(into: &mut Table, from: Table) {
    for (key, value) in from {
        match (into.get_mut(&key), value) {
            (Some(Value::Table(old)), Value::Table(new)) => merge(old, new),
            (_, value) => {
                into.insert(key, value);
            }
        }
    }
}

/// A table from its entries.
macro_rules! table {
    ($($key:literal = $value:expr),* $(,)?) => {
        Table::from_iter([$(($key.to_owned(), Value::from($value))),*])
    };
}

fn base(plan: &Plan, id: u16) -> Table {
    let spec = &plan.spec;
    let encap = match spec.encap {
        Encap::Udp4 | Encap::Udp6 => "udp",
        Encap::Ethernet => "ethernet",
    };
    let queues: Vec<Value> = (0..i64::from(spec.queues)).map(Value::from).collect();
    let mut network = table! {
        "interface" = plan.interface(id),
        "queues" = queues,
        "mode" = "auto",
    };
    if let Some(address) = plan.address(id) {
        network.insert("address".to_owned(), address.to_string().into());
    }
    let peers: Vec<Value> = (1..=spec.nodes)
        .filter(|&peer| peer != id)
        .map(|peer| Value::Table(peer_entry(plan, peer)))
        .collect();
    let acl = vec![Value::Table(table! { "uid" = "any", "ports" = "1-255" })];
    table! {
        "cluster" = table! { "name" = plan.name.clone(), "encap" = encap, "udp_port" = i64::from(UDP_PORT) },
        "node" = table! {
            "id" = i64::from(id),
            "name" = node_name(id),
            "socket" = plan.socket(id).display().to_string(),
            "socket_mode" = "0666",
            "user" = "nobody",
        },
        "network" = network,
        // Processors are the whole machine's: who tests that keeps some awake.
        "engine" = table! { "wait" = "adaptive", "umem_frames" = UMEM_FRAMES, "keep_awake_ms" = 0 },
        "peer" = peers,
        "acl" = acl,
    }
}

fn peer_entry(plan: &Plan, peer: u16) -> Table {
    let mut entry = table! {
        "id" = i64::from(peer),
        "name" = node_name(peer),
        "mac" = plan.mac(peer),
    };
    if let Some(address) = plan.address(peer) {
        entry.insert("address".to_owned(), address.to_string().into());
    }
    entry
}

/// What people call a node.
pub(crate) fn node_name(id: u16) -> String {
    format!("ptl{id}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::binaries::Binaries;
    use crate::lab::Spec;

    fn plan(nodes: u16, encap: Encap) -> Plan {
        Plan {
            name: "lab".into(),
            spec: Spec {
                nodes,
                queues: 2,
                mtu: 1500,
                encap,
                impairment: None,
            },
            directory: "/run/portolan/lab".into(),
            namespace_prefix: "ptl".into(),
            binaries: Binaries::in_directory("/nowhere"),
        }
    }

    fn parsed(plan: &Plan, id: u16, overrides: &str) -> Table {
        render(plan, id, overrides).unwrap().parse().unwrap()
    }

    #[test]
    fn a_udp_node_knows_its_peers_addresses_and_macs() {
        let config = parsed(&plan(300, Encap::Udp4), 2, "");
        assert_eq!(config["network"]["address"].as_str(), Some("10.77.0.2"));
        assert_eq!(config["network"]["queues"].as_array().unwrap().len(), 2);
        assert_eq!(
            config["node"]["socket"].as_str(),
            Some("/run/portolan/lab/2.sock")
        );
        let peers = config["peer"].as_array().unwrap();
        assert_eq!(peers.len(), 299);
        let last = peers.last().unwrap();
        assert_eq!(last["address"].as_str(), Some("10.77.1.44"));
        assert_eq!(last["mac"].as_str(), Some("02:00:00:00:01:2c"));
    }

    #[test]
    fn an_ethernet_node_has_no_addresses() {
        let config = parsed(&plan(2, Encap::Ethernet), 1, "");
        assert_eq!(config["cluster"]["encap"].as_str(), Some("ethernet"));
        assert!(config["network"].get("address").is_none());
        assert!(config["peer"][0].get("address").is_none());
        assert_eq!(config["peer"][0]["mac"].as_str(), Some("02:00:00:00:00:02"));
    }

    #[test]
    fn overrides_merge_tables_and_replace_everything_else() {
        let overrides = "[engine]\nwait = \"busy\"\n[[acl]]\nuid = 7\nports = \"9\"\n";
        let config = parsed(&plan(2, Encap::Udp6), 1, overrides);
        assert_eq!(config["engine"]["wait"].as_str(), Some("busy"));
        assert_eq!(config["engine"]["umem_frames"].as_integer(), Some(8192));
        assert_eq!(config["acl"].as_array().unwrap().len(), 1);
        assert_eq!(config["acl"][0]["uid"].as_integer(), Some(7));
        assert!(render(&plan(2, Encap::Udp6), 1, "not toml").is_err());
    }
}
