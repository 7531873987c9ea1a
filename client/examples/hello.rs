//! Says hello to port 9 of node 2, and prints what comes to our own until a second passes in silence.
use std::time::Duration;

use portolan::{Event, Node, PortOptions, Priority, SendOptions};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let node = Node::attach_default()?;
    let mut port = node.open_port(PortOptions::at(9))?;

    // Messages come into buffers that were offered for them: at each priority, in the sizes expected.
    for _ in 0..16 {
        let buffer = port.allocate(4096)?;
        port.provide_receive_buffer(buffer, Priority::Low)?;
    }

    port.send_bytes((2, 9), b"hello, node 2", SendOptions::default())?;

    while let Some(event) = port.blocking_receive(Duration::from_secs(1))? {
        match event {
            Event::Received(message) => {
                println!("{} bytes from {}", message.len(), message.from());
                let priority = message.priority();
                port.provide_receive_buffer(message.into_buffer(), priority)?;
            }
            Event::Sent(sent) => println!("to {}: {}", sent.to, sent.status),
            other => port.unknown(other),
        }
    }
    port.close(Duration::from_secs(1))?;
    Ok(())
}
