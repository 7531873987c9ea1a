//! `portolan map`: who is there, and what is wrong with it. Ends with 1 if nodes are in each other's way.

use std::fmt::Write as _;
use std::io::Write;
use std::process::ExitCode;

use portolan::Node;
use serde_json::Value;

use crate::table::{Table, plain};

/// Prints the map.
pub fn show(node: &Node, json: bool) -> anyhow::Result<ExitCode> {
    let map = node.map()?;
    let text = if json {
        format!("{map:#}\n")
    } else {
        render(&map)
    };
    std::io::stdout().lock().write_all(text.as_bytes())?;
    let bad = list(&map, "conflicts")
        .iter()
        .any(|c| c["severity"] == "bad");
    Ok(if bad {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    })
}

fn list<'v>(map: &'v Value, key: &str) -> &'v [Value] {
    map[key].as_array().map_or(&[], Vec::as_slice)
}

fn render(map: &Value) -> String {
    let mut text = format!(
        "cluster {}, discovery {}\n",
        plain(&map["cluster"]),
        plain(&map["discovery"])
    );
    if let Some(failure) = map["failure"].as_str() {
        let _ = writeln!(text, "{failure}");
    }
    let keys = [
        "node", "name", "state", "learned", "address", "mac", "mtu", "queues", "profile",
    ];
    let mut table = Table::new(&keys);
    for node in list(map, "nodes") {
        table.row(keys.iter().map(|key| plain(&node[*key])).collect());
    }
    text += &table.render();
    for conflict in list(map, "conflicts") {
        let _ = writeln!(
            text,
            "{}: {}: {}\n      mend: {}",
            plain(&conflict["severity"]),
            plain(&conflict["kind"]),
            plain(&conflict["what"]),
            plain(&conflict["mend"])
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_map_with_a_conflict() {
        let text = render(&json!({
            "cluster": "hpc", "discovery": "multicast", "failure": null,
            "nodes": [{"node": 1, "name": "one", "state": "self"}, {"node": 2, "name": "two", "state": "here", "mtu": 1500}],
            "conflicts": [{"kind": "mtu", "severity": "warn", "what": "differs", "mend": "ip link"}],
        }));
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "cluster hpc, discovery multicast");
        assert!(
            lines[3].contains("two") && lines[3].contains("1500"),
            "{text}"
        );
        assert_eq!(lines[4], "warn: mtu: differs");
        assert_eq!(lines[5], "      mend: ip link");
    }
}
