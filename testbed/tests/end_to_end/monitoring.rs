//! What an administrator watches, on two real nodes: metrics over HTTP, events, `portolan top`. Every metric is made to move here, or the table
//! in `monitoring/moved.rs` names the test that does.

mod moved;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpStream, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::harness::exchange::{between, exchange, options};
use crate::harness::{Cluster, STEP, until};
use portolan::SendOptions;
use portolan_testbed::{DaemonOptions, Lab, ManagerOptions, Node, process};
use serde_json::Value;

const METRICS: &str = "[metrics]\nlisten = \"127.0.0.1:9464\"\n";
/// Bound on an exchange of messages.
const LIST: Duration = Duration::from_secs(30);

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Says this to the exporter of a node, and what it answers, if it is there.
fn http(node: &Node, request: &str) -> Option<String> {
    let request = request.to_owned();
    node.in_namespace(move || {
        let mut stream = TcpStream::connect("127.0.0.1:9464").ok()?;
        stream.set_read_timeout(Some(STEP)).ok()?;
        stream.write_all(request.as_bytes()).ok()?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).ok()?;
        Some(answer)
    })
    .unwrap()
}

/// A node's page, without the head of the answer.
fn page(node: &Node) -> String {
    until("a page of metrics", STEP, || {
        let answer = http(node, "GET /metrics HTTP/1.1\r\n\r\n")?;
        let (head, page) = answer.split_once("\r\n\r\n")?;
        assert!(head.starts_with("HTTP/1.1 200 OK"), "{head}");
        page.contains("portolan_up 1").then(|| page.to_owned())
    })
}

/// What each family of a page says.
fn families(page: &str) -> BTreeMap<String, Vec<String>> {
    let mut all: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut current = String::new();
    for line in page.lines() {
        if let Some(rest) = line.strip_prefix("# TYPE ") {
            current = rest.split(' ').next().unwrap().to_owned();
        } else if !line.starts_with('#') {
            assert!(line.starts_with(&current), "{line} under {current}");
            all.entry(current.clone())
                .or_default()
                .push(line.to_owned());
        }
    }
    all
}

fn portolan(node: &Node, arguments: &[&str]) -> String {
    process::run_ok(node.portolan().args(arguments), STEP).unwrap()
}

fn json(node: &Node, report: &str) -> Value {
    serde_json::from_str(&portolan(node, &[report, "--json"])).unwrap()
}

fn events(node: &Node) -> Vec<Value> {
    let lines = portolan(node, &["events", "--json"]);
    lines
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

/// Waits until such an event is remembered.
fn await_event(node: &Node, kind: &str) -> Value {
    until(kind, STEP, || {
        events(node).into_iter().find(|event| event["kind"] == kind)
    })
}

/// A command that runs until it is dropped, and its lines.
struct Following(Child, std::sync::mpsc::Receiver<String>);

impl Following {
    fn start(command: &mut Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let (tell, told) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            lines
                .map_while(Result::ok)
                .try_for_each(|line| tell.send(line))
        });
        Self(child, told)
    }

    fn line(&self, wanted: &str) -> String {
        let deadline = std::time::Instant::now() + STEP;
        loop {
            let left = deadline.saturating_duration_since(std::time::Instant::now());
            let line = self
                .1
                .recv_timeout(left)
                .unwrap_or_else(|_| panic!("no line with {wanted}"));
            if line.contains(wanted) {
                return line;
            }
        }
    }
}

impl Drop for Following {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Frames for node 1's engine that are none, from the other node's kernel.
fn send_nonsense(cluster: &Cluster) {
    let (from, to) = (cluster.lab.node(2).ipv4(), cluster.lab.node(1).ipv4());
    let nonsense = move || {
        let socket = UdpSocket::bind((from, 0)).unwrap();
        for bytes in [&[][..], &[0; 8], &[0; 200], &[0xff; 1000]] {
            socket.send_to(bytes, (to, 28_000)).unwrap();
        }
    };
    cluster.lab.node(2).in_namespace(nonsense).unwrap();
}

// Two nodes at work: messages of all kinds, an engine killed, nonsense on the wire, an interface down and up, a node restarted, requests
// refused. Expect: the events tell it, `top` shows it, and every metric that says so here moves.
#[test]
fn whoever_watches_sees_what_happens() {
    let mut cluster = Cluster::start_with(Lab::builder(), METRICS);
    let before = page(cluster.lab.node(1));
    let follower = Following::start(
        cluster
            .lab
            .node(1)
            .portolan()
            .args(["events", "--follow", "--json"]),
    );

    let node = cluster.lab.node(1);
    without_a_buffer(&cluster);
    // Messages, short and long, to others and to oneself, and into nothing.
    let mut one = cluster.open(1, options(9, 1 << 20));
    let mut two = cluster.open(2, options(5, 1 << 20));
    let sizes = [0, 1, 80, 81, 1400, 9000, 70_000, 1 << 20];
    between(&mut one, &mut two, &sizes, LIST);
    let own = one.address();
    exchange(&mut one, own, &[0, 100, 70_000], LIST).unwrap();
    follower.line("port_opened");
    drop(two);
    let lost = process::run(node.portolan().args(["ping", "2:77", "-c", "3"]), STEP).unwrap();
    assert!(!lost.status.success());
    portolan(node, &["ping", "2", "-c", "200"]);
    send_nonsense(&cluster);
    assert!(
        !process::run(node.portolan().args(["ping", "99"]), STEP)
            .unwrap()
            .status
            .success()
    );
    let up = follower.line("peer_up");
    assert!(up.contains("\"peer\":2"), "{up}");

    // `top`, while there is something to see.
    let mut load = Following::start(node.portolan().args(["ping", "2", "-c", "1000000"]));
    let top = portolan(
        node,
        &["top", "--once", "--interval", "0.5", "--json", "--probe"],
    );
    let top: Value = serde_json::from_str(&top).unwrap();
    assert!(
        top["engines"][0]["sends_per_s"].as_f64().unwrap() > 10.0,
        "{top}"
    );
    assert!(
        top["engines"][0]["cpu_percent"].as_f64().unwrap() > 0.0,
        "{top}"
    );
    assert_eq!(top["peers"][0]["state"], "up", "{top}");
    let took = &top["engines"][0]["send_latency_ns"];
    assert!(
        took["p99"].as_u64() >= took["p50"].as_u64() && took["p50"].as_u64() > Some(0),
        "{top}"
    );
    let latency = &top["latency"][0]["rtt_ns"];
    assert!(
        latency["p99"].as_u64() >= latency["p50"].as_u64() && latency["p50"].as_u64() > Some(0),
        "{top}"
    );
    let nine = top["ports"]
        .as_array()
        .unwrap()
        .iter()
        .find(|port| port["port"] == 9)
        .unwrap();
    assert!(
        nine["buffers_offered"].as_u64() <= nine["receive_tokens"].as_u64(),
        "{top}"
    );
    let _ = load.0.kill();
    drop(load);
    let text = portolan(node, &["top", "--count", "2", "--interval", "0.1"]);
    assert_eq!(text.matches("node 1 (").count(), 2, "{text}");
    assert!(
        !text.contains('\u{1b}'),
        "colours without a terminal: {text:?}"
    );

    // An engine dies.
    portolan(node, &["fault", "kill", "0"]);
    let died = follower.line("engine_died");
    assert!(died.contains("\"cause\":\"fault\""), "{died}");
    let recovered: Value = serde_json::from_str(&follower.line("engine_recovered")).unwrap();
    assert!(
        recovered["fields"]["takeover_ns"].as_u64().unwrap() > 0,
        "{recovered}"
    );
    follower.line("standby_ready");
    portolan(node, &["ping", "2", "-c", "10"]);

    // The interface goes and comes.
    let interface = node.interface();
    for (state, word) in [("down", "is down"), ("up", "is up")] {
        let mut ip = node.command("ip");
        process::run_ok(ip.args(["link", "set", "dev", &interface, state]), STEP).unwrap();
        follower.line(word);
        let in_order = format!(
            "portolan_interface_up{{interface=\"{interface}\",state=\"{state}\"}} {}",
            u8::from(state == "up")
        );
        until("the page says so", STEP, || {
            page(node).contains(&in_order).then_some(())
        });
    }

    // The other node restarts and knows nothing of what was.
    let (_, rest) = cluster.stop(2);
    cluster = rest;
    let _again = cluster.lab.node(2).start_daemon(METRICS).unwrap();
    let node = cluster.lab.node(1);
    until("the restarted node answers", STEP, || {
        let ping = process::run(
            node.portolan()
                .args(["ping", "2", "-c", "5", "--timeout", "0.5"]),
            STEP,
        );
        ping.unwrap().status.success().then_some(())
    });
    let restarted = await_event(node, "peer_restarted");
    assert_eq!(restarted["peer"], 2, "{restarted}");

    // Whoever is no scraper.
    assert!(
        http(node, "GET / HTTP/1.1\r\n\r\n")
            .unwrap()
            .starts_with("HTTP/1.1 404")
    );
    assert!(
        http(node, "nonsense\r\n\r\n")
            .unwrap()
            .starts_with("HTTP/1.1 400")
    );

    // `--since` leaves out what was before.
    assert_eq!(
        portolan(node, &["events", "--since", "2100-01-01T00:00:00Z"]),
        ""
    );
    let people = portolan(node, &["events", "--since", "10m"]);
    assert!(
        people.contains("engine_recovered") && people.contains("takeover="),
        "{people}"
    );

    check_moved(&before, node);
    check_promtool(&page(node));
    check_documents(node, &top);
    if let Some(directory) = std::env::var_os("PORTOLAN_RECORD") {
        record(&cluster, Path::new(&directory));
    }
}

/// A message each way that nobody has a buffer for, until both sides were told so.
fn without_a_buffer(cluster: &Cluster) {
    let mut ports = [1, 2].map(|node| cluster.open(node, options(11, 4096)));
    let [one, two] = &mut ports;
    let addresses = [one.address(), two.address()];
    for (port, to) in [(one, addresses[1]), (two, addresses[0])] {
        port.send_bytes(to, &[1], SendOptions::default()).unwrap();
    }
    let told = |page: &str, name: &str| {
        let name = format!("portolan_transport_nacks_{name}_total");
        let mut lines = page.lines().filter(|line| line.starts_with(&name));
        lines.any(|line| !line.ends_with(" 0"))
    };
    until("both are told that there is no buffer", STEP, || {
        let page = page(cluster.lab.node(1));
        (told(&page, "sent") && told(&page, "received")).then_some(())
    });
}

// A supervisor dies under a follower. Expect: it goes on with the next one.
#[test]
fn who_follows_events_outlives_the_supervisor() {
    let lab = Lab::builder().build().unwrap();
    let options = DaemonOptions {
        manager: Some(ManagerOptions::default()),
        ..DaemonOptions::default()
    };
    let node = lab.node(1);
    let daemon = node.start_daemon_with(&options).unwrap();
    let follower = Following::start(node.portolan().args(["events", "--follow", "--json"]));
    follower.line("node_up");
    let start = daemon.manager().unwrap().kill().unwrap();
    daemon.manager().unwrap().wait_ready(start, STEP).unwrap();
    follower.line("node_up");
    portolan(node, &["fault", "kill", "0"]);
    follower.line("engine_died");
}

/// What docs/monitoring.md shows: the commands as they look on a terminal 140 columns wide, colours and all.
fn record(cluster: &Cluster, directory: &Path) {
    let node = cluster.lab.node(1);
    let load = Following::start(node.portolan().args(["ping", "2", "-c", "100000000"]));
    for (name, arguments) in [
        ("status", "status"),
        ("peers", "peers"),
        ("ports", "ports"),
        ("top", "top --once --probe"),
        ("events", "events"),
    ] {
        let program = node.portolan();
        let program = program.get_program().to_str().unwrap().to_owned()
            + &program
                .get_args()
                .map(|argument| format!(" {}", argument.to_str().unwrap()))
                .collect::<String>();
        let line = format!("stty cols 140; {program} {arguments}");
        let mut script = Command::new("script");
        script
            .args(["-qec", &line, "/dev/null"])
            .env("TERM", "xterm");
        script.env("PORTOLAN_SOCKET", node.socket());
        let text = process::run_ok(&mut script, STEP).unwrap();
        fs::write(directory.join(name), text).unwrap();
    }
    drop(load);
}

/// Everything that is said to move here has moved; engines publish their counters now and then.
fn check_moved(before: &str, node: &Node) {
    let before = families(before);
    let moved = |now: &BTreeMap<String, Vec<String>>| -> BTreeSet<String> {
        let moved = now
            .iter()
            .filter(|(name, lines)| before.get(*name) != Some(*lines));
        moved.map(|(name, _)| name.clone()).collect()
    };
    let wanted: BTreeSet<String> = moved::HERE.iter().map(|name| (*name).to_owned()).collect();
    let mut missing = BTreeSet::new();
    let deadline = std::time::Instant::now() + STEP;
    let mut seen = BTreeSet::new();
    while std::time::Instant::now() < deadline {
        seen = moved(&families(&page(node)));
        missing = wanted.difference(&seen).cloned().collect();
        if missing.is_empty() {
            break;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    for more in seen.difference(&wanted) {
        println!("moved as well: {more}");
    }
    assert!(missing.is_empty(), "these did not move: {missing:?}");
    let now = families(&page(node));
    for name in moved::STEADY {
        assert!(now.contains_key(*name), "{name} is not on the page");
    }
}

/// Debian's linter of metrics, if it is here.
fn check_promtool(page: &str) {
    let promtool = |arguments: &[&str]| {
        Command::new("promtool")
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
    };
    let Ok(mut child) = promtool(&["check", "metrics"]) else {
        panic!("promtool is missing: apt-get install --no-install-recommends prometheus");
    };
    child
        .stdin
        .take()
        .unwrap()
        .write_all(page.as_bytes())
        .unwrap();
    let output = child.wait_with_output().unwrap();
    let said = [output.stdout, output.stderr].concat();
    assert!(
        output.status.success() && said.is_empty(),
        "{}",
        String::from_utf8_lossy(&said)
    );
    let rules = root().join("deploy/prometheus/portolan.rules.yml");
    let output = promtool(&["check", "rules", rules.to_str().unwrap()])
        .unwrap()
        .wait_with_output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

/// Every place of a document that holds something: `engines[].state`.
fn places(value: &Value, at: &str, found: &mut BTreeSet<String>) {
    match value {
        Value::Object(map) => {
            for (key, value) in map {
                let dot = if at.is_empty() { "" } else { "." };
                places(value, &format!("{at}{dot}{key}"), found);
            }
        }
        Value::Array(list) if list.iter().any(Value::is_object) => {
            for value in list {
                places(value, &format!("{at}[]"), found);
            }
        }
        _ => {
            found.insert(at.to_owned());
        }
    }
}

/// docs/json.md lists what is there, and what it lists is there.
fn check_documents(node: &Node, top: &Value) {
    let page = fs::read_to_string(root().join("docs/json.md")).unwrap();
    let event = await_event(node, "engine_recovered");
    let mut documents: Vec<(&str, Value)> = ["status", "peers", "ports", "counters"]
        .map(|report| (report, json(node, report)))
        .into();
    documents.push(("top", top.clone()));
    documents.push(("events", event));
    for (name, document) in documents {
        let section = page
            .split("\n## ")
            .find(|section| section.starts_with(&format!("`portolan {name}")));
        let section = section.unwrap_or_else(|| panic!("docs/json.md has no section for {name}"));
        let rows = section
            .lines()
            .filter_map(|line| line.strip_prefix("| `")?.split('`').next());
        let listed: BTreeSet<String> = rows.map(str::to_owned).collect();
        let mut there = BTreeSet::new();
        places(&document, "", &mut there);
        let exists = |row: &String| match row.strip_suffix('*') {
            Some(stem) => there.iter().any(|place| place.starts_with(stem)),
            // An object that is null at times has its parts listed.
            None => there
                .iter()
                .any(|place| place == row || place.starts_with(&format!("{row}."))),
        };
        let gone: Vec<&String> = listed.iter().filter(|row| !exists(row)).collect();
        assert!(
            gone.is_empty(),
            "docs/json.md, {name}, lists what is not there: {gone:#?}"
        );
    }
}

/// The names of metrics in a text.
fn named(text: &str) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for (start, _) in text.match_indices("portolan_") {
        let rest = &text[start..];
        let end = rest
            .find(|c: char| !c.is_ascii_alphanumeric() && c != '_')
            .unwrap_or(rest.len());
        names.insert(rest[..end].to_owned());
    }
    names
}

/// The names of docs/metrics.md, which a test of the daemon holds to be all.
fn declared() -> BTreeMap<String, String> {
    let page = fs::read_to_string(root().join("docs/metrics.md")).unwrap();
    let rows = page
        .lines()
        .filter_map(|line| line.strip_prefix("| `portolan_"));
    let rows = rows.map(|row| {
        let (name, rest) = row.split_once('`').unwrap();
        let kind = rest.trim_start_matches(" | ").split(' ').next().unwrap();
        (format!("portolan_{name}"), kind.to_owned())
    });
    let all: BTreeMap<String, String> = rows.collect();
    assert!(all.len() > 100);
    all
}

#[test]
fn every_metric_of_dashboard_and_rules_exists() {
    let declared = declared();
    for file in [
        "deploy/grafana/portolan.json",
        "deploy/prometheus/portolan.rules.yml",
    ] {
        let text = fs::read_to_string(root().join(file)).unwrap();
        let names = named(&text);
        assert!(names.len() > 5, "{file}: {names:?}");
        for name in names {
            let of_histogram = ["_bucket", "_sum", "_count"].iter().any(|suffix| {
                let family = name
                    .strip_suffix(suffix)
                    .and_then(|family| declared.get(family));
                family.is_some_and(|kind| kind == "histogram")
            });
            assert!(
                of_histogram || declared.contains_key(&name),
                "{file} names {name}, which is no metric"
            );
        }
        if file.ends_with("json") {
            let dashboard: Value = serde_json::from_str(&text).unwrap();
            assert!(dashboard["panels"].as_array().unwrap().len() > 8);
        }
    }
}

// Expect: every declared metric moves here or in the test that is named, which speaks of its counter.
#[test]
fn every_metric_moves_in_some_test() {
    let mut left: BTreeSet<String> = declared().into_keys().collect();
    for name in moved::HERE {
        assert!(
            left.remove(*name),
            "{name} is declared once and said to move once"
        );
    }
    for (file, counters) in moved::ELSEWHERE {
        let text = fs::read_to_string(root().join(file)).unwrap();
        for counter in *counters {
            let own = format!("portolan_{counter}_total");
            let engine = format!("portolan_engine_{counter}_total");
            assert!(
                left.remove(&own) || left.remove(&engine),
                "{counter}: not declared, or said to move twice"
            );
            let word = counter
                .trim_start_matches("transport_")
                .trim_start_matches("xsk_");
            let word = word.trim_start_matches("malformed_");
            assert!(text.contains(word), "{file} does not speak of {counter}");
        }
    }
    for name in moved::STEADY {
        assert!(left.remove(*name), "{name} is declared once and named once");
    }
    assert!(
        left.is_empty(),
        "moved/HERE or ELSEWHERE should name {left:#?}"
    );
}
