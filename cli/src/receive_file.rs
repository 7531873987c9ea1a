//! `recv`: what one `portolan send` sends, to standard output. See `send_file.rs` for the conversation.

use std::fs::File;
use std::io::Write;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use portolan::service::{Kind, Tag};
use portolan::{Address, Event, Message, Node, Port, PortOptions, Priority, SendOptions};

use crate::arguments::Recv;
use crate::progress::Progress;
use crate::send_file::{DEPTH, PIECE};

/// A transfer under way.
struct Transfer {
    from: Address,
    id: u64,
    progress: Progress,
}

pub fn run(node: &Node, options: &Recv) -> anyhow::Result<ExitCode> {
    let mut port = node.open_port(PortOptions {
        arena_bytes: ((DEPTH + 1) * PIECE) as u64,
        ..PortOptions::at(options.port)
    })?;
    for _ in 0..DEPTH {
        let buffer = port.allocate(PIECE)?;
        port.provide_receive_buffer(buffer, Priority::Low)?;
    }
    // Without the standard library's buffer, which would copy every byte.
    let output = rustix::io::dup(std::io::stdout()).context("cannot use standard output")?;
    let mut output = File::from(output);
    let mut transfer: Option<Transfer> = None;
    let mut heard = Instant::now();
    loop {
        let patience = match &transfer {
            None => Duration::MAX,
            Some(_) => options.timeout.saturating_sub(heard.elapsed()),
        };
        let Some(event) = port.blocking_receive(patience)? else {
            let t = transfer.context("the wait for a sender ended")?;
            bail!(
                "{} fell silent after {} bytes: the output is truncated",
                t.from,
                t.progress.bytes()
            );
        };
        let message = match event {
            Event::Received(message) => message,
            other => {
                port.unknown(other);
                continue;
            }
        };
        let tag = Tag::decode(message.tag());
        match (tag, &mut transfer) {
            (Some(tag), None) if tag.kind == Kind::Begin => {
                heard = Instant::now();
                transfer = Some(Transfer {
                    from: message.from(),
                    id: tag.id,
                    progress: Progress::start(options.quiet.quiet),
                });
            }
            (Some(tag), Some(t)) if tag.id == t.id && message.from() == t.from => {
                heard = Instant::now();
                match tag.kind {
                    Kind::Data => {
                        output
                            .write_all(&message)
                            .context("cannot write standard output")?;
                        t.progress.add(message.len());
                        // The time the output took is not the sender's.
                        heard = Instant::now();
                    }
                    Kind::End => return end(port, t, &message, options),
                    _ => {}
                }
            }
            // Somebody else's. A second sender is not answered; its transfer ends when this port closes.
            _ => {}
        }
        port.unknown(Event::Received(message));
    }
}

/// Compares, confirms, leaves.
fn end(
    mut port: Port,
    transfer: &Transfer,
    message: &Message,
    options: &Recv,
) -> anyhow::Result<ExitCode> {
    let written = transfer.progress.bytes();
    let receipt = SendOptions {
        priority: Priority::Low,
        tag: Tag {
            kind: Kind::Receipt,
            id: transfer.id,
        }
        .encode(),
        timeout: Some(options.timeout),
        ..SendOptions::default()
    };
    port.send_bytes(transfer.from, &written.to_le_bytes(), receipt)?;
    let closed = port.close(options.timeout)?;
    let expected: Option<u64> = message[..].try_into().ok().map(u64::from_le_bytes);
    if expected != Some(written) {
        bail!(
            "{} sent {} bytes, {written} arrived: the output is truncated",
            transfer.from,
            expected.map_or("?".into(), |e| e.to_string())
        );
    }
    transfer.progress.finish("received");
    if closed.delivered == 0 && !options.quiet.quiet {
        eprintln!("portolan: all arrived, but the sender may not know it");
    }
    Ok(ExitCode::SUCCESS)
}
