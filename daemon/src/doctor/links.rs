//! The interface itself: there, up, long enough frames, no foreign XDP program, no bond or bridge above it.

use netlink_packet_core::NLM_F_DUMP;
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{LinkAttribute, LinkFlags, LinkInfo, LinkMessage};

use portolan_ebpf::AttachMode;

use super::Findings;
use super::daemon::Running;
use crate::supervisor::netlink::{self, Netlink};

/// Names of our program, with and without frames of several buffers.
const OUR_PROGRAMS: [&str; 2] = ["steer", "steer_linear"];

/// A link of this network namespace.
#[derive(Clone, Debug, Default)]
pub(super) struct LinkFacts {
    pub name: String,
    pub index: u32,
    pub mtu: u32,
    pub up: bool,
    pub carrier: bool,
    /// `veth`, `vlan`, `bond` …; `None`: a device.
    pub kind: Option<String>,
    /// The bond or bridge it belongs to.
    pub master: Option<u32>,
    /// The link it stands on.
    pub parent: Option<u32>,
    pub program: Option<u32>,
    pub generic: bool,
}

fn facts(link: LinkMessage) -> LinkFacts {
    let flags = link.header.flags;
    let mut found = LinkFacts {
        index: link.header.index,
        up: flags.contains(LinkFlags::Up),
        carrier: flags.contains(LinkFlags::LowerUp),
        ..LinkFacts::default()
    };
    for attribute in link.attributes {
        match attribute {
            LinkAttribute::IfName(name) => found.name = name,
            LinkAttribute::Mtu(mtu) => found.mtu = mtu,
            LinkAttribute::Controller(master) => found.master = Some(master).filter(|m| *m > 0),
            LinkAttribute::Link(parent) => found.parent = Some(parent).filter(|p| *p > 0),
            LinkAttribute::LinkInfo(infos) => {
                for info in infos {
                    if let LinkInfo::Kind(kind) = info {
                        found.kind = Some(kind.to_string());
                    }
                }
            }
            LinkAttribute::Xdp(facts) => {
                let (program, mode) = netlink::xdp(&facts);
                (found.program, found.generic) = (program, mode == Some(AttachMode::Generic));
            }
            _ => {}
        }
    }
    found
}

/// Every link of this network namespace.
pub(super) fn all() -> std::io::Result<Vec<LinkFacts>> {
    let request = RouteNetlinkMessage::GetLink(LinkMessage::default());
    let answers = Netlink::new()?.ask(request, NLM_F_DUMP)?;
    let links = answers.into_iter().filter_map(|answer| match answer {
        RouteNetlinkMessage::NewLink(link) => Some(facts(link)),
        _ => None,
    });
    Ok(links.collect())
}

/// The interface, if it is there.
pub(super) fn look(
    name: &str,
    running: Option<&Running>,
    findings: &mut Findings,
) -> Option<LinkFacts> {
    let links = match all() {
        Ok(links) => links,
        Err(error) => {
            let what = format!("links cannot be listed: {error}");
            findings.bad(
                "interface",
                what,
                "run as root, in the daemon's network namespace",
            );
            return None;
        }
    };
    let Some(link) = links.iter().find(|link| link.name == name) else {
        let what = format!("there is no interface {name} in this network namespace");
        findings.bad("interface", what, "ip link");
        return None;
    };
    state(link, findings);
    mtu(link, findings);
    program(link, running, findings);
    company(link, &links, findings);
    Some(link.clone())
}

fn state(link: &LinkFacts, findings: &mut Findings) {
    let name = &link.name;
    if !link.up {
        findings.bad(
            "interface",
            format!("{name} is set down: no socket can be bound to it"),
            format!("ip link set dev {name} up"),
        );
    } else if !link.carrier {
        findings.bad(
            "interface",
            format!("{name} has no carrier: no frame comes or goes"),
            format!("ethtool {name}   # then the cable, and the other end"),
        );
    } else {
        findings.ok("interface", format!("{name} is up, with a carrier"));
    }
}

fn mtu(link: &LinkFacts, findings: &mut Findings) {
    let (name, mtu) = (&link.name, link.mtu);
    let set = format!("ip link set dev {name} mtu 1500");
    match mtu {
        ..576 => {
            let what = format!("{name} has an MTU of {mtu}; nothing works below 576");
            findings.bad("mtu", what, set);
        }
        576..1500 => {
            let what =
                format!("{name} has an MTU of {mtu}: frames are short, so messages are slow");
            findings.warn("mtu", what, set);
        }
        _ => findings.ok("mtu", format!("{mtu}")),
    }
}

fn program(link: &LinkFacts, running: Option<&Running>, findings: &mut Findings) {
    let name = &link.name;
    let Some(id) = link.program else {
        if running.is_some() {
            findings.bad(
                "xdp",
                format!(
                    "no XDP program is on {name} although the daemon runs: no frame reaches it"
                ),
                "systemctl restart portoland",
            );
        } else {
            findings.ok("xdp", format!("no XDP program is on {name}"));
        }
        return;
    };
    let program = portolan_ebpf::program_name(id).unwrap_or_default();
    // A daemon's program has no name: the kernel takes one only from those who may trace.
    let ours = running.map_or_else(|| OUR_PROGRAMS.contains(&program.as_str()), |r| r.steers);
    let off = if link.generic {
        "xdpgeneric off"
    } else {
        "xdp off"
    };
    if !ours {
        findings.bad(
            "xdp",
            format!("another XDP program, `{program}` (id {id}), is on {name}: only one can be"),
            format!("ip link set dev {name} {off}"),
        );
    } else if running.is_none() {
        findings.warn(
            "xdp",
            format!("our program (id {id}) is on {name}, but no daemon answers on this configuration's socket"),
            "ss -xlp | grep portolan   # who holds it; then stop that daemon",
        );
    } else if link.generic && link.kind.as_deref() == Some("veth") {
        findings.ok(
            "xdp",
            format!("our program (id {id}) is on {name}, generic, which is the faster way on veth"),
        );
    } else if link.generic {
        findings.warn(
            "xdp",
            format!("our program runs in generic mode on {name}: the kernel makes a buffer for each frame first"),
            format!("ethtool -i {name}   # a driver with native XDP; or network.xdp = \"native\" to learn why not"),
        );
    } else {
        findings.ok("xdp", format!("our program (id {id}) is on {name}, native"));
    }
}

/// Bonds, bridges and VLANs.
fn company(link: &LinkFacts, links: &[LinkFacts], findings: &mut Findings) {
    let name = &link.name;
    let kind = link.kind.as_deref().unwrap_or("device");
    match kind {
        "bond" | "team" => findings.warn(
            "links",
            format!("{name} is a {kind}: frames of one flow may come by any of its ports, in generic mode or copied"),
            "network.interface = \"one of its ports, with an address of its own\"",
        ),
        "vlan" | "macvlan" | "ipvlan" | "bridge" | "vxlan" | "tun" => findings.warn(
            "links",
            format!("{name} is a {kind}: XDP runs in generic mode there, and every frame is copied"),
            "network.interface = \"the interface below it\"",
        ),
        _ => findings.ok("links", format!("{name} is a {kind}")),
    }
    if let Some(master) = link.master {
        let above = links.iter().find(|other| other.index == master);
        let above = above.map_or_else(|| format!("link {master}"), |m| m.name.clone());
        findings.bad(
            "links",
            format!("{name} belongs to {above}, which takes its frames: addresses and answers are {above}'s"),
            format!("ip link set dev {name} nomaster"),
        );
    }
    let vlans = links
        .iter()
        .filter(|other| other.parent == Some(link.index) && other.kind.as_deref() == Some("vlan"));
    let vlans: Vec<&str> = vlans.map(|vlan| vlan.name.as_str()).collect();
    let Ok(ethtool) = crate::ethtool::Ethtool::new(name) else {
        return;
    };
    if !vlans.is_empty() && ethtool.offloads().rxvlan {
        findings.warn(
            "links",
            format!(
                "{} on {name}, whose driver takes VLAN tags off: their frames look like ours",
                vlans.join(", ")
            ),
            format!("ethtool -K {name} rxvlan off"),
        );
    }
}
