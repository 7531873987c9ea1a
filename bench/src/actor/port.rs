//! Portolan's ends: applications that poll their ports and give the core away when nothing comes, or leave waiting to the library.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use portolan::{
    Address, Buffer, Event, INLINE_BYTES, Node, Port, PortOptions, Priority, SendError,
    SendOptions, Sent, Wait,
};

use super::{Arrival, Ends, Job, Orders, PortRole, port_alone};
use crate::cases::window;

/// Buffers offered, or sends under way, at most.
const BUFFERS: usize = 1024;
const SENDS: usize = 511;
/// How long who blocks sleeps before he looks at his orders.
const SLEEP: Duration = Duration::from_millis(5);
/// Messages that ended looked through before anything else.
const ENDED: usize = 512;

/// All ports of one application.
pub struct Ports {
    role: PortRole,
    node: Node,
    ends: Vec<End>,
    message: Vec<u8>,
}

struct End {
    port: Port,
    to: Address,
    /// Where messages too long for a token are sent from, those that are not under way.
    idle: Vec<Buffer>,
    /// Sends have ended since anything was waited for: there is room for others.
    room: bool,
}

impl Ports {
    pub fn new(role: PortRole) -> Result<Self> {
        let node = Node::attach(&role.socket).context("attach")?;
        Ok(Self {
            role,
            node,
            ends: Vec::new(),
            message: vec![7; INLINE_BYTES],
        })
    }

    fn open(&self, number: u16, to: (u16, u16), bytes: usize) -> Result<End> {
        let ports = self.role.ports.len();
        let [buffers, sends] = [BUFFERS, SENDS].map(|most| window(bytes * ports).min(most));
        let room = (buffers + sends) * (bytes.next_multiple_of(64) + 64);
        let mut port = self.node.open_port(PortOptions {
            send_tokens: sends as u32,
            receive_tokens: buffers as u32,
            arena_bytes: room as u64 + (1 << 16),
            wait: match self.role.blocks {
                true => Wait::default(),
                false => Wait::Yield,
            },
            ..PortOptions::at(number)
        })?;
        for _ in 0..buffers {
            // Touched before it is measured, as the limits' memory is.
            let mut buffer = port.allocate(bytes)?;
            buffer.fill(0);
            port.provide_receive_buffer(buffer, Priority::Low)?;
        }
        let mut idle = Vec::new();
        if bytes > INLINE_BYTES {
            for _ in 0..sends {
                let mut buffer = port.allocate(bytes)?;
                buffer.fill(7);
                idle.push(buffer);
            }
        }
        Ok(End {
            port,
            to: to.into(),
            idle,
            room: false,
        })
    }
}

impl Ends for Ports {
    /// Ports of their own for each job, because buffers that were offered cannot be taken back.
    fn prepare(&mut self, bytes: usize) -> Result<()> {
        for mut end in self.ends.drain(..) {
            end.idle.clear();
            end.port.close(Duration::from_secs(1))?;
        }
        let ports = self.role.ports.iter();
        let ends = ports.map(|&(own, to)| self.open(own, to, bytes));
        self.ends = ends.collect::<Result<_>>()?;
        Ok(())
    }

    fn count(&self) -> usize {
        self.ends.len()
    }

    fn send(&mut self, end: usize, bytes: usize) -> Result<bool> {
        let end = self.ends.get_mut(end).context("no such end")?;
        if end.port.send_tokens() == 0 {
            return Ok(false);
        }
        if let Some(message) = self.message.get(..bytes) {
            return match end.port.send_bytes(end.to, message, SendOptions::default()) {
                Ok(_) => Ok(true),
                Err(SendError::NoToken) => Ok(false),
                Err(error) => Err(error.into()),
            };
        }
        let Some(buffer) = end.idle.pop() else {
            return Ok(false);
        };
        end.port
            .send(end.to, buffer, bytes, SendOptions::default())?;
        Ok(true)
    }

    fn receive(&mut self, end: usize) -> Result<Option<Arrival>> {
        let end = self.ends.get_mut(end).context("no such end")?;
        for _ in 0..ENDED {
            match end.port.receive()? {
                None => break,
                Some(Event::Received(message)) => {
                    let arrival = Arrival {
                        bytes: message.len(),
                        source: u32::from(message.from().node.0) << 16
                            | u32::from(message.from().port.0),
                    };
                    end.port
                        .provide_receive_buffer(message.into_buffer(), Priority::Low)?;
                    return Ok(Some(arrival));
                }
                Some(Event::Sent(Sent { status, buffer, .. })) => {
                    ensure!(status.is_delivered(), "a send ended {status}");
                    end.room = true;
                    if let Some(buffer) = buffer {
                        end.idle.push(buffer);
                    }
                }
                Some(event) => end.port.unknown(event),
            }
        }
        Ok(None)
    }

    fn pause(&mut self) {
        match self.ends.as_mut_slice() {
            [end] if self.role.blocks => {
                // Who has room for another message does not wait for an event, which may never come.
                if !std::mem::take(&mut end.room) {
                    // What is wrong with the port is seen when it is used next.
                    let _ = end.port.wait(SLEEP);
                }
            }
            _ => rustix::thread::sched_yield(),
        }
    }

    fn settled(&mut self) -> Result<bool> {
        Ok(self
            .ends
            .iter()
            .all(|end| end.port.sends_outstanding() == 0))
    }

    fn special(&mut self, job: &Job, orders: &Orders) -> Result<()> {
        // With ports of its own.
        self.ends.clear();
        let (own, to) = *self.role.ports.first().context("no port")?;
        port_alone::perform(&self.role.socket, own, to.into(), job, orders)
    }
}
