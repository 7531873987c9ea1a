//! `portolan capture`, end to end: what it writes is what the engines counted, tshark with our dissector understands all of it, and it goes
//! on when an engine is killed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use crate::harness::exchange::{between, options};
use crate::harness::{Cluster, STEP, until};
use crate::tshark::{Passes, rows};
use portolan::{Port, PortOptions};
use portolan_testbed::{Lab, process};
use rustix::process::{Pid, Signal, kill_process};

/// Sizes of messages: within a frame, some frames, many.
const SIZES: [usize; 5] = [0, 64, 1400, 20_000, 200_000];
/// Nothing is under way any more when nothing was counted for so long.
const QUIET: Duration = Duration::from_millis(300);

/// A capture in a process of its own.
struct Running {
    child: Child,
    said: PathBuf,
    file: PathBuf,
}

impl Running {
    /// On node 1, and every engine records.
    fn start(cluster: &Cluster, directory: &Path, arguments: &[&str]) -> Self {
        let (said, file) = (directory.join("said"), directory.join("capture.pcapng"));
        let mut command = cluster.lab.node(1).portolan();
        command.arg("capture").arg("-w").arg(&file).args(arguments);
        let child = command
            .stdin(Stdio::null())
            .stderr(fs::File::create(&said).unwrap())
            .spawn()
            .unwrap();
        until("the capture begins", STEP, || {
            let text = fs::read_to_string(&said).unwrap();
            text.contains("capturing").then_some(())
        });
        Self { child, said, file }
    }

    /// Until something that passes is written: every engine has its ring.
    fn grows(&self, ports: &mut [portolan::Port; 2]) {
        let length = || fs::metadata(&self.file).unwrap().len();
        let before = length();
        until("frames are written", STEP, || {
            let [one, two] = ports;
            between(one, two, &[8], STEP);
            (length() > before).then_some(())
        });
    }

    /// Ctrl-C; what it said, and the file.
    fn end(mut self) -> (String, PathBuf) {
        kill_process(Pid::from_child(&self.child), Signal::INT).unwrap();
        let deadline = Instant::now() + STEP;
        let ended = process::wait_child(&mut self.child, deadline, process::OnCancel::Stop);
        let said = fs::read_to_string(&self.said).unwrap();
        let status = ended.unwrap().expect("the capture ends when interrupted");
        assert!(status.success(), "{said}");
        (said, self.file.clone())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Frames that node 1's engines received, sent, looped back and handed across (or would have, had the ring had room), when nothing moves any more.
fn counted(cluster: &Cluster) -> [u64; 4] {
    let look = || {
        let report = cluster.lab.node(1).report("counters").unwrap();
        let engines = report["engines"].as_array().unwrap().clone();
        let sum = |name: &str| -> u64 {
            let values = engines
                .iter()
                .map(|e| e["counters"][name].as_u64().unwrap());
            values.sum()
        };
        let [received, sent, looped_back] =
            ["xsk_rx_frames", "xsk_tx_frames", "looped_back"].map(sum);
        [
            received,
            sent,
            looped_back,
            sum("crossed") + sum("crossing_full"),
        ]
    };
    let mut last = (look(), Instant::now());
    until("traffic ends", STEP, || {
        let now = look();
        if now != last.0 {
            last = (now, Instant::now());
        }
        (last.1.elapsed() >= QUIET).then_some(now)
    })
}

/// What tshark says of each packet: interface, direction (1 in, 2 out), comments. None is malformed, by anybody's word, and each is ours.
fn understood(file: &Path) -> Vec<(String, String, Vec<String>)> {
    let names = [
        "frame.interface_name",
        "frame.packet_flags_direction",
        "frame.comment",
        "portolan.malformed",
        "_ws.malformed",
        "_ws.col.Protocol",
    ];
    let value = |cell: &[String]| cell.first().cloned().unwrap_or_default();
    let rows = rows(file, Passes::Two, &names);
    let each = rows.into_iter().enumerate().map(|(nth, row)| {
        assert!(row[3].is_empty() && row[4].is_empty(), "{nth}: {row:?}");
        assert_eq!(value(&row[5]), "Portolan", "{nth}: {row:?}");
        let direction = value(&row[1])
            .trim_start_matches("0x")
            .trim_start_matches('0')
            .to_owned();
        (value(&row[0]), direction, row[2].clone())
    });
    each.collect()
}

fn on(rows: &[(String, String, Vec<String>)], interface: &str, direction: &str) -> u64 {
    let ends = |name: &str| name.ends_with("-inside") == (interface == "inside");
    rows.iter()
        .filter(|(name, way, _)| ends(name) && way == direction)
        .count() as u64
}

fn talk(ports: &mut [Port; 2]) {
    let [one, two] = ports;
    between(one, two, &SIZES, STEP);
}

// Messages to another node, within an engine and between the engines of a node. Expect: every frame that was counted is in the file, each
// once, on its interface with its direction; nothing dropped, nothing malformed.
#[test]
fn what_is_written_is_what_passed() {
    let directory = tempfile::tempdir().unwrap();
    let cluster = Cluster::start(Lab::builder().nodes(2).queues(2));
    let before = counted(&cluster);
    let capture = Running::start(&cluster, directory.path(), &[]);
    let open = |node, port| cluster.open(node, options(port, 200_000));
    let far = &mut [open(1, 10), open(2, 10)];
    talk(far);
    // Ports 20 and 22 are one engine's, 21 is the other's.
    talk(&mut [open(1, 20), open(1, 22)]);
    talk(&mut [open(1, 24), open(1, 21)]);
    let after = counted(&cluster);
    let (said, file) = capture.end();
    let passed: Vec<u64> = after.iter().zip(before).map(|(a, b)| a - b).collect();
    assert!(passed.iter().all(|frames| *frames > 0), "{passed:?}");
    let rows = understood(&file);
    let written = [
        on(&rows, "wire", "1"),
        on(&rows, "wire", "2"),
        on(&rows, "inside", "1"),
        on(&rows, "inside", "2"),
    ];
    assert_eq!(written.as_slice(), passed.as_slice(), "{said}");
    let total: u64 = written.iter().sum();
    assert!(
        said.contains(&format!("{total} frames captured, 0 dropped")),
        "{said}"
    );
    println!("{total} frames: {written:?}");
}

// An engine is killed while frames are captured and messages flow. Expect: the messages arrive, the capture goes on with the successor and
// says where it began.
#[test]
fn a_capture_goes_on_with_the_next_engine() {
    let directory = tempfile::tempdir().unwrap();
    let cluster = Cluster::start(Lab::builder().nodes(2));
    let capture = Running::start(
        &cluster,
        directory.path(),
        &["--engine", "0", "--peer", "2"],
    );
    let open = |node, port| cluster.open(node, options(port, 200_000));
    let ports = &mut [open(1, 10), open(2, 10)];
    talk(ports);
    capture.grows(ports);
    talk(ports);
    let engine = cluster.daemon(1).engine_pids().unwrap()[0];
    kill_process(Pid::from_raw(engine).unwrap(), Signal::KILL).unwrap();
    talk(ports);
    let inside = &mut [open(1, 20), open(1, 22)];
    talk(inside);
    counted(&cluster);
    let (said, file) = capture.end();
    assert!(said.contains(" 0 dropped"), "{said}");
    let rows = understood(&file);
    let replaced = rows
        .iter()
        .position(|(_, _, comments)| comments.iter().any(|text| text.contains("engine epoch 2")));
    let at = replaced.unwrap_or_else(|| panic!("no word of the successor: {said}"));
    assert!(at > 10 && rows.len() - at > 10, "{at} of {}", rows.len());
    // Only frames of node 2 were asked for.
    assert!(rows.iter().all(|(name, ..)| name == "engine0"));
}

// The supervisor is killed while frames are captured. Expect: the capture goes on by itself with the next one, and has every frame but those that
// passed before the engine had the next ring.
#[test]
fn a_capture_goes_on_with_the_next_supervisor() {
    let directory = tempfile::tempdir().unwrap();
    let cluster = Cluster::start_managed(Lab::builder().nodes(2));
    let idle = counted(&cluster);
    let capture = Running::start(&cluster, directory.path(), &[]);
    let open = |node, port| cluster.open(node, options(port, 200_000));
    let ports = &mut [open(1, 10), open(2, 10)];
    talk(ports);
    let until_then = counted(&cluster);
    let manager = cluster.daemon(1).manager().unwrap();
    let start = manager.kill().unwrap();
    manager.wait_ready(start, STEP).unwrap();
    capture.grows(ports);
    let from_then = counted(&cluster);
    talk(ports);
    let after = counted(&cluster);
    let (said, file) = capture.end();
    let rows = understood(&file);
    for (nth, direction) in ["1", "2"].into_iter().enumerate() {
        let written = on(&rows, "wire", direction);
        let certain = until_then[nth] - idle[nth] + after[nth] - from_then[nth];
        let wanted = certain..=after[nth] - idle[nth];
        assert!(
            wanted.contains(&written),
            "{written}, not {wanted:?}: {said}"
        );
    }
}

// Snaplen, count and a small ring that overflows. Expect: short frames, as many as wanted, and drops that are told.
#[test]
fn little_is_written_where_little_is_wanted() {
    let directory = tempfile::tempdir().unwrap();
    let cluster = Cluster::start(Lab::builder().nodes(2));
    let capture = Running::start(&cluster, directory.path(), &["-s", "64", "-c", "20"]);
    let open = |node, port| {
        cluster.open(
            node,
            PortOptions {
                ..options(port, 200_000)
            },
        )
    };
    talk(&mut [open(1, 10), open(2, 10)]);
    let Running { said, file, .. } = &capture;
    until("the capture ends by itself", STEP, || {
        let text = fs::read_to_string(said).unwrap();
        text.contains("20 frames captured").then_some(())
    });
    let names = ["frame.cap_len", "frame.len"];
    let lengths = rows_of_cut_frames(file, &names);
    assert_eq!(lengths.len(), 20);
    assert!(lengths.iter().all(|[kept, _]| *kept <= 64), "{lengths:?}");
    assert!(lengths.iter().any(|[_, whole]| *whole > 64), "{lengths:?}");
}

/// Numbers of each packet; that cut ones are told as such is for another test.
fn rows_of_cut_frames(file: &Path, names: &[&str; 2]) -> Vec<[u64; 2]> {
    let arguments = ["-T", "fields", "-e", names[0], "-e", names[1]];
    let text = crate::tshark::run(file, Passes::One, &arguments);
    let each = text.lines().map(|line| {
        let mut cells = line.split('\t').map(|cell| cell.parse().unwrap());
        [cells.next().unwrap(), cells.next().unwrap()]
    });
    each.collect()
}
