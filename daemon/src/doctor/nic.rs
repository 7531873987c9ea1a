//! The NIC behind the interface: its driver, its offloads, and whether frames reach the queues that engines serve.

use super::links::LinkFacts;
use super::{Findings, Patient};
use crate::engine_link::Encap;
use crate::ethtool::{Ethtool, Offloads};
use crate::supervisor::config::Config;

/// Drivers known to do AF_XDP zero-copy (Documentation/networking/af_xdp.rst, kernel 6.6).
const ZERO_COPY: [&str; 8] = [
    "i40e",
    "ice",
    "igb",
    "igc",
    "ixgbe",
    "mlx5_core",
    "stmmaceth",
    "ena",
];
/// Drivers that are software: there is nothing to steer and nothing to place.
const SOFTWARE: [&str; 4] = ["veth", "dummy", "tun", "bridge"];

pub(super) fn look(patient: &Patient, link: &LinkFacts, findings: &mut Findings) {
    let name = &link.name;
    let ethtool = match Ethtool::new(name) {
        Ok(ethtool) => ethtool,
        Err(error) => {
            let what = format!("{name} cannot be asked: {error}");
            findings.warn("driver", what, format!("ethtool -i {name}"));
            return;
        }
    };
    let driver = ethtool.driver().unwrap_or_else(|| "unknown".to_owned());
    let software = SOFTWARE.contains(&driver.as_str());
    if software {
        findings.ok("driver", format!("{driver}: software, frames are copied"));
    } else if ZERO_COPY.contains(&driver.as_str()) {
        findings.ok("driver", format!("{driver}: native XDP and zero-copy"));
    } else {
        let what =
            format!("{driver}: not among the drivers known for zero-copy; frames are copied");
        let known = ZERO_COPY.join(", ");
        findings.warn("driver", what, format!("a NIC of one of: {known}"));
    }
    offloads(name, &driver, ethtool.offloads(), findings);
    if let Some(config) = &patient.config {
        queues(config, &ethtool, software, findings);
    }
}

/// What merges or cuts frames. GRO does neither: a program in the driver sees frames before it, and with one in the stack the kernel leaves it out
/// (`netif_elide_gro`, linux/netdevice.h). On a veth it makes a NAPI instance, which engines may poll.
fn offloads(name: &str, driver: &str, on: Offloads, findings: &mut Findings) {
    let software = SOFTWARE.contains(&driver);
    let veth = driver == "veth";
    let mut fine = true;
    if on.lro {
        fine = false;
        findings.bad(
            "offloads",
            format!("{name} merges what it receives (LRO): native XDP is refused, or frames come longer than the MTU"),
            format!("ethtool -K {name} lro off"),
        );
    }
    if software && on.tso {
        fine = false;
        findings.warn(
            "offloads",
            format!("{name} passes segments longer than the MTU to its other end (TSO, GSO): its XDP program drops them"),
            format!("ethtool -K {name} tso off gso off"),
        );
    }
    if fine {
        let what = match veth && on.gro {
            true => format!(
                "nothing merges or cuts our frames; engines may go round for those of {name} themselves (GRO)"
            ),
            false => "nothing merges or cuts our frames".to_owned(),
        };
        findings.ok("offloads", what);
    }
}

/// Do frames reach queues that have an engine?
fn queues(config: &Config, ethtool: &Ethtool, software: bool, findings: &mut Findings) {
    let name = &config.interface;
    let Some(there) = config.interface_facts.rx_queues else {
        findings.warn(
            "queues",
            format!("nobody says how many queues {name} has"),
            format!("ethtool -l {name}"),
        );
        return;
    };
    let ours = config.queues.len() as u32;
    let serve = format!("{ours} of {there} receive queues of {name} have an engine");
    if there == ours {
        if ours == 1 || software {
            findings.ok("queues", serve);
            return;
        }
    } else if software && there > ours {
        findings.warn(
            "queues",
            format!("{serve}: frames that come on another are dropped"),
            format!("ethtool -L {name} rx {ours} tx {ours}   # at both ends"),
        );
        return;
    }
    let rules = ethtool.rules();
    if ethtool.offloads().ntuple && rules.is_some_and(|rules| rules >= ours) {
        let rules = rules.unwrap_or(0);
        findings.ok(
            "queues",
            format!("{serve}, and {rules} rules steer flows (`ethtool -n {name}`)"),
        );
        return;
    }
    let most = ethtool.most_queues().unwrap_or(there);
    if config.encap == Encap::Ethernet || (rules.is_none() && ours == 1) {
        findings.warn(
            "queues",
            format!("{serve} (at most {most}), and the NIC chooses among them (RSS): what comes on another is dropped"),
            format!("ethtool -L {name} combined {ours}"),
        );
        return;
    }
    let family = if config.address.is_some_and(|a| a.is_ipv6()) {
        "udp6"
    } else {
        "udp4"
    };
    let steps = config.queues.iter().map(|queue| {
        let port = u32::from(config.udp_port) + queue;
        format!("ethtool -N {name} flow-type {family} dst-port {port} action {queue}")
    });
    let steps: Vec<String> = std::iter::once(format!("ethtool -K {name} ntuple on"))
        .chain(steps)
        .collect();
    findings.warn(
        "queues",
        format!("{serve}, and nothing steers each engine's UDP port to its queue: RSS chooses, and frames on a wrong queue cost a crossing or are dropped"),
        steps.join(" && "),
    );
}
