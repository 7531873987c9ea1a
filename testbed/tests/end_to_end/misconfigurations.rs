//! The mistakes of an administrator's first hour: the rows of `docs/misconfigurations.md`, each made on a real interface. Expect, of each:
//! `portoland` says what the page says, with file, line and remedy, and does not start.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use portolan_testbed::{Binaries, Lab, Node, process};

const PAGE: &str = include_str!("../../../docs/misconfigurations.md");
const WITHIN: Duration = Duration::from_secs(10);
/// Where the page has its sockets.
const RUN: &str = "/run/portolan";

/// A row of the page.
struct Row {
    number: usize,
    what: String,
    /// What of the file is replaced, by what.
    change: Option<(String, String)>,
    /// Done before, in the node's network.
    machine: Option<String>,
    check_finds_it: bool,
    said: String,
}

/// The text between backticks.
fn code(cell: &str) -> Vec<String> {
    let odd = cell.split('`').skip(1).step_by(2);
    odd.map(|text| text.replace('⏎', "\n")).collect()
}

/// A cell of code that holds backticks itself.
fn quoted(cell: &str) -> String {
    let inside = cell.strip_prefix("`` ").and_then(|c| c.strip_suffix(" ``"));
    inside.unwrap_or_else(|| cell.trim_matches('`')).to_owned()
}

fn rows() -> Vec<Row> {
    let table = PAGE.lines().skip_while(|line| !line.starts_with("|---"));
    let lines = table.skip(1).take_while(|line| line.starts_with('|'));
    lines
        .map(|line| {
            let cells: Vec<&str> = line.trim_matches('|').split(" | ").map(str::trim).collect();
            let [number, what, change, machine, finder, said] = cells[..] else {
                panic!("not six cells: {line}");
            };
            let change = match &code(change)[..] {
                [] => None,
                [before, after] => Some((before.clone(), after.clone())),
                other => panic!("{other:?}: {line}"),
            };
            Row {
                number: number.parse().unwrap(),
                what: what.to_owned(),
                change,
                machine: code(machine).first().cloned(),
                check_finds_it: match finder {
                    "check" => true,
                    "start" => false,
                    other => panic!("found by {other}"),
                },
                said: quoted(said),
            }
        })
        .collect()
}

/// The page's configuration.
fn good() -> String {
    let block = PAGE.split("```toml\n").nth(1).unwrap();
    block.split("```").next().unwrap().to_owned()
}

/// Does what is said have all parts of the pattern, in order and with nothing else at either end?
fn matches(pattern: &str, said: &str) -> bool {
    let mut parts = pattern.split('…');
    let first = parts.next().unwrap();
    let Some(mut rest) = said.strip_prefix(first) else {
        return false;
    };
    let mut ends_open = false;
    for part in parts {
        let Some(at) = rest.find(part) else {
            return false;
        };
        rest = &rest[at + part.len()..];
        ends_open = part.is_empty();
    }
    rest.is_empty() || ends_open
}

/// A network like the page's.
fn lab() -> Lab {
    let lab = Lab::builder().name("ptmi").build().unwrap();
    let node = lab.node(1);
    for step in ["down", "name eth1", "up"] {
        let mut ip = node.command("ip");
        ip.args(["link", "set", "dev"]);
        let name = if step == "up" {
            "eth1".to_owned()
        } else {
            node.interface()
        };
        ip.arg(name).args(step.split(' '));
        process::run_ok(&mut ip, WITHIN).unwrap();
    }
    lab
}

/// What it says when it is started or asked to check, without what it logs of a good start; `None` if it is content.
fn complaint(node: &Node, directory: &Path, arguments: &[&str]) -> Option<String> {
    let mut command: Command = node.portoland().unwrap();
    command.args(arguments).current_dir(directory);
    let Ok(finished) = process::run(&mut command, WITHIN) else {
        return Some("it neither refuses nor ends".to_owned());
    };
    if finished.status.success() {
        return None;
    }
    let errors = finished.stderr.lines().filter(|line| {
        ![" INFO ", " WARN "]
            .iter()
            .any(|level| line.contains(level))
    });
    Some(errors.collect::<Vec<_>>().join("\n"))
}

#[test]
fn each_mistake_of_the_page_is_named_as_the_page_says() {
    let rows = rows();
    assert!(rows.len() >= 20, "only {} mistakes", rows.len());
    assert!(rows.iter().zip(1..).all(|(row, n)| row.number == n));
    let mut wrong = Vec::new();
    let mut lab = lab();
    let mut clean = true;
    for row in rows {
        if !clean {
            lab = self::lab();
        }
        clean = row.machine.is_none();
        let node = lab.node(1);
        let directory = lab.directory();
        let place = directory.to_str().unwrap();
        if let Some(command) = &row.machine {
            let command = command.replace(RUN, place);
            process::run_ok(node.command("sh").args(["-c", &command]), WITHIN).unwrap();
        }
        let mut text = good();
        if let Some((before, after)) = &row.change {
            assert_eq!(
                text.matches(before.as_str()).count(),
                1,
                "{}: {before}",
                row.what
            );
            text = text.replacen(before.as_str(), after, 1);
        }
        std::fs::write(directory.join("node.toml"), text.replace(RUN, place)).unwrap();
        let said = row.said.replace(RUN, place);
        let checked = complaint(node, directory, &["check", "node.toml"]);
        let started = complaint(node, directory, &["--config", "node.toml"]);
        let found = |complaint: &Option<String>| {
            let line = complaint
                .as_deref()
                .and_then(|c| c.strip_prefix("portoland: "));
            line.is_some_and(|line| matches(&said, line))
        };
        if !found(&started) || row.check_finds_it != found(&checked) {
            wrong.push(format!(
                "{}. {}\n  page:  {}\n  check: {checked:?}\n  start: {started:?}",
                row.number, row.what, row.said
            ));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

// The page's own configuration, on the page's own machine. Expect: it is checked and runs, so that what the rows show is the mistake's.
#[test]
fn the_configuration_of_the_page_is_good() {
    let lab = lab();
    let node = lab.node(1);
    let place = lab.directory().to_str().unwrap();
    let file = lab.directory().join("node.toml");
    std::fs::write(&file, good().replace(RUN, place)).unwrap();
    assert_eq!(
        complaint(node, lab.directory(), &["check", "node.toml"]),
        None
    );
    let mut daemon = node.portoland().unwrap();
    let mut daemon = daemon.arg("--config").arg(&file).spawn().unwrap();
    let socket = lab.directory().join("node1.sock");
    let deadline = std::time::Instant::now() + WITHIN;
    let asked = loop {
        let mut status = node.command(Binaries::find().unwrap().cli().unwrap());
        status.arg("--socket").arg(&socket).arg("status");
        let finished = process::run(&mut status, WITHIN).unwrap();
        if finished.status.success() || std::time::Instant::now() > deadline {
            break finished;
        }
        assert!(daemon.try_wait().unwrap().is_none(), "it ended");
        std::thread::yield_now();
    };
    daemon.kill().unwrap();
    daemon.wait().unwrap();
    assert!(asked.status.success(), "{}", asked.stderr);
    assert!(asked.stdout.contains("node1"), "{}", asked.stdout);
}
