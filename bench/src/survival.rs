//! What it costs, while nobody dies, that an engine can die: one-way latency of short messages with the daemon as it is, and with one
//! that keeps nothing for a successor (the feature `volatile`: no ledger stores beyond those it needs itself, no heartbeat).
//!
//! FTGM (004) paid 13 % of GM's latency. The difference here is smaller than a machine's mood from one minute to the next, so the two
//! take turns, in another order each round, each in a lab of its own; what is reported is the ratio of the medians, and how the rounds'
//! ratios scatter. Both applications are one thread that sends, waits for the message at the other node, and sends it back: half of that is a
//! way, and no third wake-up is in it.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use hdrhistogram::Histogram;
use portolan::{Address, Event, Node, Port, PortOptions, Priority, SendError, SendOptions};
use portolan_testbed::{Binaries, Lab, cancel};

use crate::company::Company;

/// What is measured and how.
#[derive(Args, Clone, Debug)]
pub struct Options {
    /// Directory of the programs built with the feature `volatile`
    without: PathBuf,
    /// Rounds of both
    #[arg(long, default_value_t = 31, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Messages there and back in each turn
    #[arg(long, default_value_t = 20_000, value_parser = clap::value_parser!(u32).range(100..))]
    messages: u32,
    /// Bytes of a message
    #[arg(long, default_value_t = 64)]
    bytes: usize,
    /// TOML added to the configuration of both
    #[arg(long, default_value = "")]
    config: String,
}

/// Bound on one message.
const ARRIVED: Duration = Duration::from_secs(5);
/// The longest way that is told apart.
const LONGEST_NS: u64 = 1_000_000_000;
const PORTS: [u16; 2] = [10, 11];

/// Measures and prints.
///
/// # Errors
/// What kept it from measuring.
pub fn run(options: &Options) -> Result<()> {
    let both = [Binaries::find()?, Binaries::in_directory(&options.without)];
    for binaries in &both {
        binaries.daemon()?;
    }
    let company = Company::meet();
    let mut medians = [const { Vec::new() }; 2];
    let mut ratios = Vec::new();
    for round in 0..options.rounds {
        let first = round as usize % 2;
        let mut way = [0.0; 2];
        for which in [first, 1 - first] {
            if cancel::requested() {
                bail!("interrupted");
            }
            let latencies = measure(options, both[which].clone())
                .with_context(|| both[which].directory().display().to_string())?;
            way[which] = latencies.value_at_quantile(0.5) as f64;
            medians[which].push(way[which]);
        }
        ratios.push(way[0] / way[1]);
        eprintln!(
            "round {} of {}: {:.0} ns, {:.0} ns without, ratio {:.4}",
            round + 1,
            options.rounds,
            way[0],
            way[1],
            way[0] / way[1]
        );
    }
    let [with, without] = medians.map(|mut all| quantile(&mut all, 0.5));
    println!(
        "one-way latency of {} bytes, medians of {} rounds:",
        options.bytes, options.rounds
    );
    println!("  as it is            {with:>8.0} ns");
    println!("  nothing survives    {without:>8.0} ns");
    println!(
        "  what survives costs {:>8.0} ns, {:.1} % (FTGM 13 %)",
        with - without,
        100.0 * (with / without - 1.0)
    );
    let [low, middle, high] = [0.25, 0.5, 0.75].map(|q| 100.0 * (quantile(&mut ratios, q) - 1.0));
    println!("  round by round      {middle:>8.1} %, quartiles {low:.1} % and {high:.1} %");
    company.warn();
    Ok(())
}

fn quantile(all: &mut [f64], q: f64) -> f64 {
    all.sort_by(f64::total_cmp);
    let at = (all.len() - 1) as f64 * q;
    all.get(at.round() as usize).copied().unwrap_or(f64::NAN)
}

/// One turn of one build.
fn measure(options: &Options, binaries: Binaries) -> Result<Histogram<u64>> {
    let lab = Lab::builder().binaries(binaries).build()?;
    let daemons = [1, 2].map(|node| lab.node(node).start_daemon(&options.config));
    let [one, two] = daemons;
    let _daemons = [one?, two?];
    let open = |node: u16, port: u16| -> Result<Port> {
        let attached = Node::attach(lab.node(node).socket())?;
        let mut port = attached.open_port(PortOptions::at(port))?;
        for _ in 0..4 {
            let buffer = port.allocate(options.bytes)?;
            port.provide_receive_buffer(buffer, Priority::Low)?;
        }
        Ok(port)
    };
    let mut here = open(1, PORTS[0])?;
    let mut there = open(2, PORTS[1])?;
    let (to_there, to_here) = (there.address(), here.address());
    let message = vec![7; options.bytes];
    let mut latencies = Histogram::new_with_bounds(1, LONGEST_NS, 3)?;
    for nth in 0..options.messages + options.messages / 10 {
        let began = Instant::now();
        pass(&mut here, &mut there, to_there, &message)?;
        pass(&mut there, &mut here, to_here, &message)?;
        // The first ones make the nodes known to each other.
        if nth >= options.messages / 10 {
            latencies.saturating_record(began.elapsed().as_nanos() as u64 / 2);
        }
    }
    drop((here, there));
    lab.remove()?;
    Ok(latencies)
}

/// A message from one port to the other.
fn pass(from: &mut Port, to: &mut Port, address: Address, message: &[u8]) -> Result<()> {
    let deadline = Instant::now() + ARRIVED;
    loop {
        match from.send_bytes(address, message, SendOptions::default()) {
            Ok(_) => break,
            Err(SendError::NoToken | SendError::ArenaFull(_)) => drain(from)?,
            Err(error) => return Err(error.into()),
        }
        ensure!(Instant::now() < deadline, "no send token comes back");
    }
    loop {
        match to.receive()? {
            Some(Event::Received(received)) => {
                ensure!(&received[..] == message, "another message came");
                to.provide_receive_buffer(received.into_buffer(), Priority::Low)?;
                return Ok(());
            }
            Some(event) => ended(to, event)?,
            None => {
                // Engines and this thread share two cores.
                std::thread::yield_now();
                ensure!(Instant::now() < deadline, "a message does not arrive");
            }
        }
    }
}

/// Takes what ended.
fn drain(port: &mut Port) -> Result<()> {
    while let Some(event) = port.receive()? {
        ended(port, event)?;
    }
    std::thread::yield_now();
    Ok(())
}

fn ended(port: &mut Port, event: Event) -> Result<()> {
    match event {
        Event::Sent(sent) => {
            ensure!(sent.status.is_delivered(), "a send ended {}", sent.status);
        }
        event => port.unknown(event),
    }
    Ok(())
}
