//! Two processes, one ball. `pingpong` waits at port 20; `pingpong NODE` serves to that node and prints the mean round trip.
//!
//! ```text
//! cargo run --example pingpong            # on node 2
//! cargo run --example pingpong -- 2       # on node 1
//! ```

use std::error::Error;
use std::time::{Duration, Instant};

use portolan::{Event, Node, PortOptions, Priority, SendOptions};

const PORT: u16 = 20;
const ROUNDS: u32 = 10_000;

fn main() -> Result<(), Box<dyn Error>> {
    let node = Node::attach_default()?;
    let server = std::env::args().nth(1);
    let mut port = node.open_port(match server {
        Some(_) => PortOptions::default(),
        None => PortOptions::at(PORT),
    })?;
    for _ in 0..16 {
        let buffer = port.allocate(64)?;
        port.provide_receive_buffer(buffer, Priority::High)?;
    }
    let options = SendOptions {
        priority: Priority::High,
        ..SendOptions::default()
    };
    let mut rounds = 0;
    let start = Instant::now();
    if let Some(server) = &server {
        port.send_bytes((node.resolve(server)?.0, PORT), b"ball", options)?;
    } else {
        println!("waiting at {}", port.address());
    }
    while let Some(event) = port.blocking_receive(Duration::MAX)? {
        match event {
            Event::Received(ball) => {
                rounds += 1;
                if server.is_some() && rounds == ROUNDS {
                    break;
                }
                port.send_bytes(ball.from(), &ball, options)?;
                port.unknown(Event::Received(ball));
            }
            Event::Sent(sent) if !sent.status.is_delivered() => {
                return Err(sent.status.to_string().into());
            }
            other => port.unknown(other),
        }
    }
    println!("{:?} per round trip", start.elapsed() / ROUNDS);
    port.close(Duration::from_secs(1))?;
    Ok(())
}
