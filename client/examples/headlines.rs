//! Keeps the first kilobyte of every long message, and nothing of those longer than a gigabyte.

use std::error::Error;
use std::time::Duration;

use portolan::{Event, Node, PortOptions, Priority, Verdict};

fn main() -> Result<(), Box<dyn Error>> {
    let node = Node::attach_default()?;
    let mut port = node.open_port(PortOptions::at(21).ask_first(1025))?;
    port.on_offer(|offer| match offer.total() {
        0..=0x4000_0000 => Verdict::Shorten(1024),
        _ => Verdict::Refuse,
    });
    for _ in 0..16 {
        let buffer = port.allocate(1024)?;
        port.provide_receive_buffer(buffer, Priority::Low)?;
    }
    while let Some(event) = port.blocking_receive(Duration::MAX)? {
        if let Event::Received(message) = &event {
            println!(
                "{}: {} of {} bytes",
                message.from(),
                message.len(),
                message.total()
            );
        }
        port.unknown(event);
    }
    Ok(())
}
