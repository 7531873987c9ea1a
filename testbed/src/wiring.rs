//! Interfaces: the veth pair between two nodes, or the bridge between more, as `Spec` says.
//!
//! What matters here for AF_XDP: native XDP on veth needs at least as many receive queues as the peer has transmit
//! queues, and a sender's transmit queue i becomes the receiver's receive queue i; so both ends always have the same
//! number. The bridge keeps the number too: a forwarded frame leaves by the queue it came in on. Transmit checksum
//! offload is off, or kernel UDP arrives with half a checksum; GRO and segmentation offloads are off, or frames
//! larger than the MTU arrive.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail};

use crate::lab::{Encap, Plan, Spec};
use crate::namespace::{Namespace, STEP};
use crate::process;

/// Prepares a fresh namespace: loopback, quiet IPv6.
pub(crate) fn prepare(namespace: &Namespace, encap: Encap) -> Result<()> {
    let ipv6 = namespace.run_inside(|| -> Result<bool> {
        let all = Path::new("/proc/sys/net/ipv6/conf");
        if !all.exists() {
            return Ok(false);
        }
        for scope in ["all", "default"] {
            for (name, value) in [
                ("disable_ipv6", "0"),
                ("accept_dad", "0"),
                ("accept_ra", "0"),
                ("router_solicitations", "0"),
            ] {
                let file = all.join(scope).join(name);
                fs::write(&file, value).with_context(|| file.display().to_string())?;
            }
        }
        Ok(true)
    })??;
    if !ipv6 && encap == Encap::Udp6 {
        bail!("this kernel has no IPv6");
    }
    namespace.ip("link set lo up")
}

/// Wires all nodes together and brings them up.
pub(crate) fn connect(plan: &Plan, nodes: &[Namespace], bridge: Option<&Namespace>) -> Result<()> {
    if let Some(bridge) = bridge {
        connect_bridge(plan, nodes, bridge)?;
    } else {
        let [one, two] = nodes else {
            bail!("a lab without a bridge has two nodes");
        };
        veth(
            plan,
            (one, &plan.interface(1), &plan.mac(1)),
            (two, &plan.interface(2), &plan.mac(2)),
        )?;
    }
    for (id, namespace) in (1..).zip(nodes) {
        bring_up(plan, id, namespace)?;
    }
    Ok(())
}

fn connect_bridge(plan: &Plan, nodes: &[Namespace], bridge: &Namespace) -> Result<()> {
    bridge.ip("link add bridge type bridge stp_state 0 forward_delay 0 mcast_snooping 0")?;
    for (id, namespace) in (1..).zip(nodes) {
        let port = plan.bridge_port(id);
        veth(
            plan,
            (namespace, &plan.interface(id), &plan.mac(id)),
            (bridge, &port, &plan.bridge_port_mac(id)),
        )?;
        offloads_off(bridge, &port)?;
        bridge.ip(&format!("link set {port} master bridge up"))?;
    }
    bridge.ip(&format!("link set bridge mtu {} up", plan.spec.mtu))
}

/// A veth pair made directly in its two namespaces; each end is (namespace, name, MAC).
fn veth(
    plan: &Plan,
    (here, name, mac): (&Namespace, &str, &str),
    (there, peer, peer_mac): (&Namespace, &str, &str),
) -> Result<()> {
    let Spec { mtu, queues, .. } = plan.spec;
    let both = format!("mtu {mtu} numtxqueues {queues} numrxqueues {queues}");
    here.ip(&format!(
        "link add name {name} address {mac} {both} type veth \
         peer name {peer} address {peer_mac} {both} netns {}",
        there.name()
    ))
}

fn bring_up(plan: &Plan, id: u16, namespace: &Namespace) -> Result<()> {
    let interface = plan.interface(id);
    offloads_off(namespace, &interface)?;
    let (ipv4, ipv6) = (plan.ipv4(id), plan.ipv6(id));
    namespace.ip(&format!("address add {ipv4}/16 dev {interface}"))?;
    if Path::new("/proc/sys/net/ipv6").exists() {
        namespace.ip(&format!("-6 address add {ipv6}/64 dev {interface} nodad"))?;
    }
    namespace.ip(&format!("link set {interface} up"))
}

fn offloads_off(namespace: &Namespace, interface: &str) -> Result<()> {
    let mut command = namespace.command("ethtool");
    command.args([
        "-K", interface, "tx", "off", "gro", "off", "tso", "off", "gso", "off",
    ]);
    process::run_ok(&mut command, STEP).map(drop)
}
