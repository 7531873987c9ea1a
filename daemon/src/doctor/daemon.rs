//! The daemon, if it runs: its socket, its engines, its peers as they are.

use std::io;
use std::net::UdpSocket;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::Path;

use portolan::{Node, Report};
use serde_json::Value;

use super::{Findings, Patient};
use crate::engine_link::Encap;
use crate::supervisor::config::Config;
use crate::supervisor::surroundings::{Surroundings, ThisMachine};
use crate::xsk::frame_mtu;

/// Transport bytes that any path carries before more is proved (transport: `ASSUMED`).
const ASSUMED: u64 = 1472;

/// A daemon that answers.
pub(super) struct Running {
    /// Its program is on the interface, as far as it says.
    pub steers: bool,
}

pub(super) fn look(patient: &Patient, findings: &mut Findings) -> Option<Running> {
    let default = Path::new(portolan::DEFAULT_SOCKET);
    let socket = patient
        .config
        .as_ref()
        .map_or(default, |c| c.socket.as_path());
    if let Some(config) = &patient.config {
        permissions(config, findings);
    }
    let node = match Node::attach(socket) {
        Ok(node) => node,
        Err(_) => {
            findings.ok("daemon", format!("none answers at {}", socket.display()));
            if let Some(config) = &patient.config {
                ports_are_free(config, findings);
            }
            return None;
        }
    };
    let mut steers = true;
    match node.report(Report::Status) {
        Ok(status) => {
            steers = status["node"]["interface_state"] != "stripped";
            engines(&status, patient, findings);
            cpu_latency(&status, patient, findings);
            keep_awake(&status, findings);
            if let Ok(ports) = node.report(Report::Ports) {
                super::sharing::look(&status, &ports, findings);
            }
        }
        Err(error) => findings.bad(
            "daemon",
            format!("it is there but does not report: {error}"),
            "journalctl -u portoland -n 50",
        ),
    }
    if let Ok(report) = node.report(Report::Peers) {
        peers(&report, patient, findings);
    }
    if let Ok(map) = node.map() {
        conflicts(&map, findings);
    }
    Some(Running { steers })
}

/// Whom the socket lets in, and whom the access list.
fn permissions(config: &Config, findings: &mut Findings) {
    let path = &config.socket;
    let shown = path.display();
    if let Ok(found) = std::fs::symlink_metadata(path) {
        let mode = found.permissions().mode() & 0o777;
        let wanted = config.socket_mode | 0o600;
        if !found.file_type().is_socket() {
            let what = format!("{shown} is no socket");
            findings.bad(
                "socket",
                what,
                format!("rm {shown}   # or another node.socket"),
            );
            return;
        }
        if mode != wanted {
            findings.warn(
                "socket",
                format!("{shown} has mode {mode:04o}, the configuration says {wanted:04o}"),
                format!("chmod {wanted:04o} {shown}"),
            );
        }
        if config
            .socket_group
            .is_some_and(|group| group != found.gid())
        {
            let group = config.socket_group.unwrap_or_default();
            findings.warn(
                "socket",
                format!(
                    "{shown} belongs to group {}, the configuration says {group}",
                    found.gid()
                ),
                format!("chgrp {group} {shown}"),
            );
        }
    }
    if config.socket_mode & 0o006 != 0o006 && config.socket_group.is_none() {
        findings.warn(
            "socket",
            format!(
                "with mode {:04o} and no group, only root reaches {shown}",
                config.socket_mode
            ),
            "node.socket_group = \"portolan\"   # and usermod -aG portolan USER",
        );
    } else {
        findings.ok(
            "socket",
            format!("{shown}, mode {:04o}", config.socket_mode),
        );
    }
    let own = ThisMachine.own_uid();
    if config.acl == crate::supervisor::config::Acl::closed(own) {
        findings.warn(
            "acl",
            "there is no [[acl]]: only root may open ports",
            "[[acl]] uid = \"any\" ports = \"1-255\"   # or a user, or a group",
        );
    }
}

/// Could a daemon have its UDP ports?
fn ports_are_free(config: &Config, findings: &mut Findings) {
    let (Encap::Udp, Some(address)) = (config.encap, config.address) else {
        return;
    };
    for queue in &config.queues {
        let port = config.udp_port + *queue as u16; // in range, checked
        match UdpSocket::bind((address, port)) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => findings.bad(
                "udp",
                format!("another program has UDP port {port} on {address}"),
                format!("ss -ulpn 'sport = {port}'   # stop it, or another cluster.udp_port on all nodes"),
            ),
            _ => findings.ok("udp", format!("port {port} is free")),
        }
    }
}

/// Whether processors wake as soon as the configuration says.
fn cpu_latency(status: &Value, patient: &Patient, findings: &mut Findings) {
    let wanted = patient.config.as_ref().and_then(|c| c.cpu_latency_us);
    let Some(wanted) = wanted else { return };
    let held = status["node"]["cpu_latency_us"].as_u64();
    if held == Some(wanted.into()) {
        let what = format!("idle processors wake within {wanted} us");
        findings.ok("cpu latency", what);
    } else {
        findings.warn(
            "cpu latency",
            format!("node.cpu_latency_us = {wanted} is not in force"),
            "systemctl reload portoland   # if the journal says that it may not: /usr/share/doc/portolan/examples/latency.conf",
        );
    }
}

/// Whether processors of engines are kept from sleeping, as a daemon whose engines sleep would have it.
fn keep_awake(status: &Value, findings: &mut Findings) {
    let node = &status["node"];
    let ms = node["keep_awake_ms"].as_u64().unwrap_or(0);
    let engines = status["engines"].as_array();
    let sleeps = engines.is_some_and(|all| all.iter().any(|one| one["wait"] == "adaptive"));
    if ms == 0 || !sleeps {
        return;
    }
    match node["keep_awake_refused"].as_str() {
        None => {
            let what = format!("processors of engines do not sleep for {ms} ms after a message");
            findings.ok("keep awake", what);
        }
        Some(why) => findings.warn(
            "keep awake",
            format!("engine.keep_awake_ms is without effect: {}", printable(why)),
            "ExecStartPre= and ReadWritePaths= as the package's unit has them; in a container this is its host's; or engine.keep_awake_ms = 0",
        ),
    }
}

fn engines(status: &Value, patient: &Patient, findings: &mut Findings) {
    let node = &status["node"];
    let name = printable(node["name"].as_str().unwrap_or_default());
    let list = status["engines"]
        .as_array()
        .map(Vec::as_slice)
        .unwrap_or_default();
    let down = list.iter().filter(|engine| engine["state"] != "running");
    let down: Vec<String> = down.map(|engine| engine["queue"].to_string()).collect();
    if down.is_empty() && !list.is_empty() {
        findings.ok(
            "daemon",
            format!("node {} ({name}) runs, {} engines", node["id"], list.len()),
        );
    } else {
        findings.bad(
            "daemon",
            format!("engines {} do not run", down.join(", ")),
            "journalctl -u portoland -n 50   # why; they are started again by themselves",
        );
    }
    let restarts: u64 = list
        .iter()
        .filter_map(|engine| engine["restarts"].as_u64())
        .sum();
    if restarts > 0 {
        findings.warn(
            "daemon",
            format!("engines were replaced {restarts} times since the start"),
            "journalctl -u portoland | grep -i engine",
        );
    }
    if let Some(config) = &patient.config {
        let other =
            node["id"] != u64::from(config.node) || node["cluster"] != config.cluster.as_str();
        if other {
            findings.bad(
                "daemon",
                format!(
                    "node {} of cluster {} runs, the file says otherwise",
                    node["id"], node["cluster"]
                ),
                format!(
                    "systemctl restart portoland   # to take {} up",
                    patient.file.display()
                ),
            );
        }
    }
}

/// What engines say of their peers: those that are not understood, and those whose frames are shorter than ours.
fn peers(report: &Value, patient: &Patient, findings: &mut Findings) {
    let ours = patient.config.as_ref().map(|config| {
        let headers = match (config.encap, config.address) {
            (Encap::Ethernet, _) => 0,
            (Encap::Udp, Some(address)) if address.is_ipv6() => 48,
            (Encap::Udp, _) => 28,
        };
        let mtu = frame_mtu(config.mtu(), config.interface_facts.veth);
        u64::from(mtu).saturating_sub(headers)
    });
    let rows = report["peers"]
        .as_array()
        .map(Vec::as_slice)
        .unwrap_or_default();
    let mut up = 0;
    for row in rows {
        let who = format!(
            "peer {} ({})",
            row["node"],
            printable(row["name"].as_str().unwrap_or(""))
        );
        match row["state"].as_str() {
            Some("incompatible") => {
                let field = printable(row["misfit"].as_str().unwrap_or("policy"));
                let mend = match field.as_str() {
                    "cluster" => "cluster.name = the same on all nodes".to_owned(),
                    "version" => "portolan upgrade   # on the older of the two".to_owned(),
                    field => {
                        format!("transport.{field} or transport.profile = the same on all nodes")
                    }
                };
                findings.bad("peers", format!("{who} is not understood: {field}"), mend);
            }
            Some("up") => {
                up += 1;
                let theirs = row["max_frame"].as_u64().unwrap_or(0);
                // More than any path carries takes a moment to be proved.
                if let Some(ours) = ours.filter(|ours| theirs > 0 && theirs < *ours) {
                    let cause = if theirs == ASSUMED {
                        "a switch in between carries no more, or it is not proved yet"
                    } else {
                        "its MTU is smaller"
                    };
                    findings.warn(
                        "peer mtu",
                        format!("{who} is sent frames of {theirs} bytes where this node could send {ours}: {cause}"),
                        "ip link set dev DEV mtu MTU   # the same on all nodes and switches",
                    );
                }
            }
            _ => {}
        }
    }
    findings.ok("peers", format!("{up} of {} are up", rows.len()));
}

/// What discovery has to say against other nodes.
fn conflicts(map: &Value, findings: &mut Findings) {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    if map["failure"].is_string() {
        findings.bad("discovery", text(&map["failure"]), "ss -ulpn");
    }
    for conflict in map["conflicts"].as_array().into_iter().flatten() {
        let what = format!("{}: {}", text(&conflict["kind"]), text(&conflict["what"]));
        let mend = text(&conflict["mend"]);
        if conflict["severity"] == "bad" {
            findings.bad("discovery", what, mend);
        } else {
            findings.warn("discovery", what, mend);
        }
    }
}

/// A name from another node, as it may be printed.
pub(super) fn printable(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(64).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::Severity;
    use super::*;

    // A daemon whose engines sleep, may keep their processors awake, may not; one whose engines spin; one that is not to. Expect: said well of, and ill of with the reason; else nothing is said.
    #[test]
    fn processors_that_cannot_be_kept_awake_are_worth_a_word() {
        for (wait, ms, refused, severity, words) in [
            ("adaptive", 2000, None, Some(Severity::Ok), "2000 ms"),
            (
                "adaptive",
                2000,
                Some("cpu3: no\x1b"),
                Some(Severity::Warn),
                "cpu3: no",
            ),
            ("busy", 2000, None, None, ""),
            ("adaptive", 0, None, None, ""),
        ] {
            let node = json!({"keep_awake_ms": ms, "keep_awake_refused": refused});
            let status = json!({"node": node, "engines": [{"wait": wait}]});
            let mut findings = Findings::default();
            keep_awake(&status, &mut findings);
            let found = findings.0.first();
            assert_eq!(
                found.map(|finding| finding.severity),
                severity,
                "{wait} {ms}"
            );
            let what = found.map_or("", |finding| finding.what.as_str());
            assert!(what.contains(words) && !what.contains('\x1b'), "{what}");
        }
    }
}
