//! A file from one node to another through `portolan send` and `portolan recv`, and whether it is the same file.

use std::fs::File;
use std::io::{BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use portolan_testbed::{Node, cancel};
use serde_json::Value;
use sha2::{Digest, Sha256};

use super::job::{Job, Output};
use super::report;

/// Bound on a receiver's port to open.
const OPEN: Duration = Duration::from_secs(10);
/// What is moved at a time; a multiple of eight.
const BLOCK: usize = 1 << 20;
/// Room left on the disk besides the two copies of the file.
const SPARE: u64 = 256 << 20;

/// The file that is sent: made from its positions, so that each part is unlike every other.
pub struct Source {
    pub path: PathBuf,
    pub bytes: u64,
    pub sha256: String,
}

impl Source {
    /// Makes it in `directory`.
    pub fn make(directory: &Path, bytes: u64) -> Result<Self> {
        let disk = rustix::fs::statvfs(directory).context("statvfs")?;
        let free = disk.f_bavail.saturating_mul(disk.f_frsize);
        if free < 2 * bytes + SPARE {
            bail!(
                "{} has {} MiB free, the file sent and received needs {}: make it smaller with --file-mib",
                directory.display(),
                free >> 20,
                (2 * bytes + SPARE) >> 20
            );
        }
        let path = directory.join("sent");
        let mut file = BufWriter::with_capacity(BLOCK, File::create(&path)?);
        let mut hash = Sha256::new();
        let mut block = vec![0; BLOCK];
        let mut written = 0;
        while written < bytes {
            check_cancel()?;
            for (word, at) in block.chunks_exact_mut(8).zip((written..).step_by(8)) {
                word.copy_from_slice(&scramble(at).to_le_bytes());
            }
            file.write_all(&block)
                .with_context(|| path.display().to_string())?;
            hash.update(&block);
            written += block.len() as u64;
        }
        file.flush().with_context(|| path.display().to_string())?;
        Ok(Self {
            path,
            bytes: written,
            sha256: hex(&hash.finalize()),
        })
    }
}

/// SplitMix64's output function.
fn scramble(at: u64) -> u64 {
    let mut z = at.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

fn check_cancel() -> Result<()> {
    if cancel::requested() {
        bail!("interrupted");
    }
    Ok(())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// SHA-256 of a file's first `bytes` bytes.
pub fn sha256(path: &Path, bytes: u64) -> Result<String> {
    let file = File::open(path).with_context(|| path.display().to_string())?;
    let mut file = BufReader::with_capacity(BLOCK, file.take(bytes));
    let mut hash = Sha256::new();
    let mut block = vec![0; BLOCK];
    loop {
        check_cancel()?;
        match file
            .read(&mut block)
            .with_context(|| path.display().to_string())?
        {
            0 => return Ok(hex(&hash.finalize())),
            length => hash.update(block.get(..length).unwrap_or_default()),
        }
    }
}

/// Both ends of a file under way.
pub struct Transfer<'a> {
    source: &'a Source,
    /// Where it arrives.
    pub received: PathBuf,
    pub receiver: Job,
    pub sender: Job,
    started: Instant,
}

impl<'a> Transfer<'a> {
    /// Opens the receiving port, then starts to send.
    pub fn start(
        source: &'a Source,
        (from, to): (&Node, &Node),
        port: u8,
        directory: &Path,
    ) -> Result<Self> {
        let received = directory.join(format!("received-{}-{port}", to.id()));
        let file = File::create(&received).with_context(|| received.display().to_string())?;
        let mut recv = to.portolan();
        recv.arg("recv").arg(port.to_string());
        let mut receiver = Job::start(&mut recv, Stdio::null(), Output::File(file))?;
        wait_open(to, port, &mut receiver)?;

        let mut send = from.portolan();
        send.arg("send").arg(format!("{}:{port}", to.id()));
        let input = File::open(&source.path).with_context(|| source.path.display().to_string())?;
        let started = Instant::now();
        let label = format!("send {}→{}", from.id(), to.id());
        let sender = Job::start(&mut send, input.into(), Output::Labelled(label, |_| true))?;
        Ok(Self {
            source,
            received,
            receiver,
            sender,
            started,
        })
    }

    /// How much has been written at the receiving end.
    pub fn received_bytes(&self) -> u64 {
        received_bytes(&self.received)
    }

    /// Waits for both ends and compares. Returns what there is to say about it.
    pub fn finish(mut self, within: Duration) -> Result<String> {
        let (source, received, started) = (self.source, self.received.clone(), self.started);
        let show = || show_progress(&received, source.bytes, started);
        self.sender.succeed(within, show)?;
        self.receiver.succeed(within, show)?;
        let seconds = started.elapsed().as_secs_f64();
        report::clear_progress();
        compare(source, &received)?;
        Ok(format!(
            "{} in {seconds:.2} s, {}",
            mib(source.bytes),
            rate(source.bytes, seconds)
        ))
    }
}

fn received_bytes(path: &Path) -> u64 {
    path.metadata().map_or(0, |metadata| metadata.len())
}

fn show_progress(received: &Path, bytes: u64, started: Instant) {
    let so_far = received_bytes(received);
    let seconds = started.elapsed().as_secs_f64();
    report::progress(&format!(
        "{:>3} %  {} of {}  {}",
        so_far * 100 / bytes.max(1),
        mib(so_far),
        mib(bytes),
        rate(so_far, seconds)
    ));
}

/// An error unless the received file is the one that was sent.
pub fn compare(source: &Source, received: &Path) -> Result<()> {
    let length = received_bytes(received);
    if length != source.bytes {
        bail!("{length} bytes received, {} sent", source.bytes);
    }
    let arrived = sha256(received, length)?;
    println!("     SHA-256 sent      {}", source.sha256);
    println!("     SHA-256 received  {arrived}");
    if arrived != source.sha256 {
        bail!("the received file differs from the one sent");
    }
    Ok(())
}

/// Mebibytes, as text.
pub fn mib(bytes: u64) -> String {
    format!("{} MiB", bytes >> 20)
}

fn rate(bytes: u64, seconds: f64) -> String {
    // Exact to 2^53 bytes.
    #[allow(clippy::cast_precision_loss)]
    let per_second = bytes as f64 / seconds.max(1e-9);
    format!(
        "{:.0} MB/s = {:.2} Gbit/s",
        per_second / 1e6,
        per_second * 8.0 / 1e9
    )
}

/// Waits until a node lists the port as open.
fn wait_open(node: &Node, port: u8, receiver: &mut Job) -> Result<()> {
    let deadline = Instant::now() + OPEN;
    loop {
        let ports = node.report("ports")?;
        if lists_port(&ports, port) {
            return Ok(());
        }
        check_cancel()?;
        if !receiver.is_running() {
            receiver.succeed(OPEN, || {})?;
            bail!("the receiver ended before anything was sent");
        }
        if Instant::now() > deadline {
            bail!(
                "port {port} of node {} did not open within {OPEN:?}; ports: {ports}",
                node.id()
            );
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Whether a report of ports lists this one as open.
fn lists_port(report: &Value, port: u8) -> bool {
    entry(report, port).is_some_and(|entry| entry["state"] == "open")
}

fn entry(report: &Value, port: u8) -> Option<&Value> {
    let mut ports = report["ports"].as_array()?.iter();
    ports.find(|entry| entry["port"] == port)
}

/// The queue whose engine serves a node's port.
pub fn queue_of(node: &Node, port: u8) -> Result<usize> {
    let report = node.report("ports")?;
    let queue = entry(&report, port).and_then(|entry| entry["queue"].as_u64());
    let queue = queue.with_context(|| format!("port {port} has no queue: {report}"))?;
    usize::try_from(queue).context("queue")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_the_same_only_if_every_byte_is() {
        let directory = tempfile::tempdir().unwrap();
        let source = Source::make(directory.path(), 2 << 20).unwrap();
        assert_eq!(source.bytes, 2 << 20);
        let copy = directory.path().join("copy");
        std::fs::copy(&source.path, &copy).unwrap();
        compare(&source, &copy).unwrap();
        let mut bytes = std::fs::read(&copy).unwrap();
        bytes[1_500_000] ^= 1;
        std::fs::write(&copy, &bytes).unwrap();
        assert!(compare(&source, &copy).is_err());
        std::fs::write(&copy, &bytes[..1000]).unwrap();
        assert!(compare(&source, &copy).is_err());
        // The untouched part in front is still the same.
        assert_eq!(
            sha256(&copy, 1000).unwrap(),
            sha256(&source.path, 1000).unwrap()
        );
    }

    #[test]
    fn a_port_is_open_when_its_entry_says_so() {
        let report = serde_json::json!({"ports": [{"port": 7, "state": "open"}, {"port": 8, "state": "closing"}]});
        assert!(lists_port(&report, 7));
        assert!(!lists_port(&report, 8));
        assert!(!lists_port(&report, 9));
    }
}
