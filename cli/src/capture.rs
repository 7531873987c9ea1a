//! `capture`: the frames of engines as a pcapng file, for Wireshark.
//!
//! Each engine gives two interfaces: its wire, whole Ethernet frames as they came and went, and its inside, frames that never leave the node.
//! Those have no outer headers, so an Ethernet header of our making goes before them. Frames of several engines are sorted by time: what is younger than
//! [`SETTLED`] waits for the next look.

use std::borrow::Cow;
use std::fs::File;
use std::io::{self, BufWriter, IsTerminal, Write};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, bail};
use pcap_file::pcapng::PcapNgWriter;
use pcap_file::pcapng::blocks::enhanced_packet::{EnhancedPacketBlock, EnhancedPacketOption};
use pcap_file::pcapng::blocks::interface_description::{
    InterfaceDescriptionBlock, InterfaceDescriptionOption,
};
use pcap_file::pcapng::blocks::interface_statistics::{
    InterfaceStatisticsBlock, InterfaceStatisticsOption,
};
use pcap_file::pcapng::blocks::section_header::{SectionHeaderBlock, SectionHeaderOption};
use pcap_file::{DataLink, Endianness};
use portolan::capture::{Capture, CaptureOptions, Passing, Way};
use portolan::{Node, Report};
use rustix::time::{ClockId, clock_gettime};

use crate::arguments::Capture as Options;

/// Frames older than this are written: no engine has an older one that it has not published.
const SETTLED: Duration = Duration::from_millis(2);
/// Between two looks at rings that were empty.
const LOOK: Duration = Duration::from_millis(2);
/// Engines record within this.
const STARTED_WITHIN: Duration = Duration::from_secs(5);
/// Frames taken from one ring before others get a turn.
const BATCH: usize = 4096;
/// The header that frames get which have none: from and to nobody, our EtherType.
const INSIDE_HEADER: [u8; 14] = [2, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0x88, 0xB5];

/// A frame that waits to be written.
struct Frame {
    engine: usize,
    passing: Passing,
    bytes: Vec<u8>,
}

pub fn run(node: &Node, options: &Options) -> anyhow::Result<ExitCode> {
    let engines = match options.engine {
        Some(engine) => vec![engine],
        None => engines_of(node)?,
    };
    if options.write.as_os_str() == "-" && io::stdout().is_terminal() {
        bail!(
            "a capture is no text; name a file, or pipe it: `portolan capture -w - | wireshark -k -i -`"
        );
    }
    let peer = options
        .peer
        .as_ref()
        .map(|name| node.resolve(name))
        .transpose()?
        .map(|id| id.0);
    let mut captures = Vec::new();
    for engine in engines {
        let options = CaptureOptions {
            engine,
            snaplen: options.snaplen,
            peer,
            buffer_bytes: u64::from(options.buffer) << 20,
        };
        captures.push(node.capture(options)?);
    }
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        signal_hook::flag::register(signal, Arc::clone(&stop))?;
    }
    wait_until_on(&captures, &stop)?;
    let output: Box<dyn Write> = if options.write.as_os_str() == "-" {
        Box::new(io::stdout().lock())
    } else {
        let file = File::create(&options.write);
        Box::new(file.with_context(|| format!("{} cannot be written", options.write.display()))?)
    };
    let mut session = Session::begin(captures, BufWriter::with_capacity(1 << 20, output))?;
    eprintln!("capturing; end it with Ctrl-C");
    let ended = session.run(options, &stop);
    session.finish()?;
    ended?;
    Ok(ExitCode::SUCCESS)
}

/// The indices of a node's engines.
fn engines_of(node: &Node) -> anyhow::Result<Vec<u16>> {
    let status = node.report(Report::Status)?;
    let engines = status["engines"]
        .as_array()
        .context("no engines in the status")?;
    Ok((0..engines.len() as u16).collect())
}

fn wait_until_on(captures: &[Capture], stop: &AtomicBool) -> anyhow::Result<()> {
    let deadline = Instant::now() + STARTED_WITHIN;
    for capture in captures {
        while !capture.is_on() && !stop.load(Ordering::Relaxed) {
            if Instant::now() >= deadline {
                bail!(
                    "engine {} does not record within {STARTED_WITHIN:?}; see `portolan status` and the daemon's log",
                    capture.engine()
                );
            }
            capture.pause(LOOK);
        }
    }
    Ok(())
}

fn monotonic() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// A capture under way.
struct Session<W: Write> {
    captures: Vec<Capture>,
    writer: PcapNgWriter<W>,
    waiting: Vec<Frame>,
    /// Nanoseconds of the clock on the wall that the monotonic clock is behind.
    ahead: u64,
    /// Frames written, by interface.
    written: Vec<u64>,
    /// Of each engine, drops that were told.
    told: Vec<u64>,
    epochs: Vec<u32>,
}

impl<W: Write> Session<W> {
    fn begin(captures: Vec<Capture>, output: W) -> anyhow::Result<Self> {
        let section = SectionHeaderBlock {
            // Not the machine's: the crate writes the halves of a statistics block's time in the wrong order otherwise.
            endianness: Endianness::Big,
            options: vec![SectionHeaderOption::UserApplication(
                concat!("portolan ", env!("CARGO_PKG_VERSION")).into(),
            )],
            ..SectionHeaderBlock::default()
        };
        let mut writer = PcapNgWriter::with_section_header(output, section)?;
        for capture in &captures {
            let engine = capture.engine();
            for (name, description) in [
                (format!("engine{engine}"), "on the wire"),
                (format!("engine{engine}-inside"), "inside the node"),
            ] {
                writer.write_pcapng_block(InterfaceDescriptionBlock {
                    linktype: DataLink::ETHERNET,
                    snaplen: capture.snaplen() + INSIDE_HEADER.len() as u32,
                    options: vec![
                        InterfaceDescriptionOption::IfName(name.into()),
                        InterfaceDescriptionOption::IfDescription(
                            format!("Portolan engine {engine}, {description}").into(),
                        ),
                        InterfaceDescriptionOption::IfTsResol(9),
                    ],
                })?;
            }
        }
        let wall = SystemTime::now().duration_since(UNIX_EPOCH)?.as_nanos() as u64;
        Ok(Self {
            written: vec![0; captures.len() * 2],
            told: vec![0; captures.len()],
            epochs: captures.iter().map(Capture::engine_epoch).collect(),
            captures,
            writer,
            waiting: Vec::new(),
            ahead: wall.saturating_sub(monotonic()),
        })
    }

    fn run(&mut self, options: &Options, stop: &AtomicBool) -> anyhow::Result<()> {
        let end = options.duration.map(|duration| Instant::now() + duration);
        loop {
            let over = stop.load(Ordering::Relaxed) || end.is_some_and(|end| Instant::now() >= end);
            let now = monotonic();
            let taken = self.take();
            // Of a capture that is over everything is written.
            let until = if over || taken.is_err() {
                u64::MAX
            } else {
                now.saturating_sub(SETTLED.as_nanos() as u64)
            };
            self.write(until, options.count)?;
            let enough = options
                .count
                .is_some_and(|count| self.written.iter().sum::<u64>() >= count);
            let any = taken?;
            if over || enough {
                return Ok(());
            }
            if !any {
                self.writer.get_mut().flush()?;
                if let Some(capture) = self.captures.first() {
                    capture.pause(LOOK);
                }
            }
        }
    }

    /// Takes what the rings have; true if there was anything.
    fn take(&mut self) -> anyhow::Result<bool> {
        let before = self.waiting.len();
        // What crosses is captured where it comes from, if that engine is captured too.
        let both = self.captures.len() > 1;
        for (engine, capture) in self.captures.iter_mut().enumerate() {
            let mut bytes = Vec::new();
            for _ in 0..BATCH {
                let Some(passing) = capture.next(&mut bytes)? else {
                    break;
                };
                if passing.way != Way::CrossedIn || !both {
                    self.waiting.push(Frame {
                        engine,
                        passing,
                        bytes: std::mem::take(&mut bytes),
                    });
                }
            }
        }
        Ok(self.waiting.len() > before)
    }

    /// Writes frames up to this time, the oldest first.
    fn write(&mut self, until: u64, count: Option<u64>) -> anyhow::Result<()> {
        self.waiting.sort_by_key(|frame| frame.passing.at);
        let due = self
            .waiting
            .partition_point(|frame| frame.passing.at <= until);
        let frames: Vec<Frame> = self.waiting.drain(..due).collect();
        for frame in frames {
            let written: u64 = self.written.iter().sum();
            if count.is_some_and(|count| written >= count) {
                break;
            }
            self.write_frame(frame)?;
        }
        Ok(())
    }

    fn write_frame(&mut self, frame: Frame) -> anyhow::Result<()> {
        let Frame {
            engine,
            passing,
            bytes,
        } = frame;
        let on_wire = matches!(passing.way, Way::Received | Way::Sent);
        let interface = engine * 2 + usize::from(!on_wire);
        let inbound = matches!(passing.way, Way::Received | Way::CrossedIn | Way::Looped);
        let mut options = vec![EnhancedPacketOption::Flags(if inbound { 1 } else { 2 })];
        match passing.way {
            Way::CrossedOut => options.push(EnhancedPacketOption::Comment(
                format!("crosses to engine {}", passing.queue).into(),
            )),
            Way::CrossedIn => options.push(EnhancedPacketOption::Comment(
                format!("came across from engine {}", passing.queue).into(),
            )),
            Way::Received | Way::Sent | Way::Looped => {}
        }
        if let Some(capture) = self.captures.get(engine) {
            let (dropped, epoch) = (capture.counts().dropped, capture.engine_epoch());
            let new = dropped.saturating_sub(self.told[engine]);
            if new > 0 {
                options.push(EnhancedPacketOption::DropCount(new));
                self.told[engine] = dropped;
            }
            if self.epochs[engine] != epoch {
                options.push(EnhancedPacketOption::Comment(
                    format!("by about here the engine was replaced: engine epoch {epoch}").into(),
                ));
                self.epochs[engine] = epoch;
            }
        }
        let (data, original_len) = if on_wire {
            (bytes, passing.length)
        } else {
            let with_header = [INSIDE_HEADER.as_slice(), &bytes].concat();
            (
                with_header,
                passing.length.saturating_add(INSIDE_HEADER.len() as u32),
            )
        };
        self.writer.write_pcapng_block(EnhancedPacketBlock {
            interface_id: interface as u32,
            timestamp: Duration::from_nanos(passing.at.saturating_add(self.ahead)),
            original_len,
            data: Cow::Owned(data),
            options,
        })?;
        self.written[interface] += 1;
        Ok(())
    }

    /// Statistics, and what there is to say.
    fn finish(mut self) -> anyhow::Result<()> {
        let (mut dropped, mut nonsense) = (0, 0);
        for (engine, capture) in self.captures.iter().enumerate() {
            let counts = capture.counts();
            dropped += counts.dropped;
            nonsense += counts.nonsense;
            for interface in [engine * 2, engine * 2 + 1] {
                // Which of the two a dropped frame belongs to is not known: all are told of the wire.
                let lost = if interface % 2 == 0 {
                    counts.dropped
                } else {
                    0
                };
                self.writer.write_pcapng_block(InterfaceStatisticsBlock {
                    interface_id: interface as u32,
                    timestamp: monotonic().saturating_add(self.ahead),
                    options: vec![
                        InterfaceStatisticsOption::IsbIfRecv(self.written[interface] + lost),
                        InterfaceStatisticsOption::IsbIfDrop(lost),
                    ],
                })?;
            }
        }
        self.writer.get_mut().flush()?;
        let written: u64 = self.written.iter().sum();
        eprintln!("{written} frames captured, {dropped} dropped");
        if dropped > 0 {
            eprintln!(
                "for frames that are dropped: a larger --buffer, a smaller --snaplen, or --peer"
            );
        }
        if nonsense > 0 {
            eprintln!("{nonsense} records made no sense and were passed over");
        }
        Ok(())
    }
}
