//! The application of a relay.

use anyhow::Result;

use super::ClientRole;
use super::shared::{Consumer, INLINE, Producer, Toward};
use crate::actor::{Arrival, Ends};

/// An application that has a relay send and receive for it, or that stands in the relay's place: then two of them talk with nobody in between.
pub struct Client {
    to_relay: Producer,
    from_relay: Consumer,
    message: [u8; INLINE],
    inline: [u8; INLINE],
}

impl Client {
    pub fn open(role: &ClientRole) -> Result<Self> {
        let (out, back) = match role.in_relays_place {
            false => (Toward::Relay, Toward::Application),
            true => (Toward::Application, Toward::Relay),
        };
        Ok(Self {
            to_relay: Producer::open(&role.memory, out)?,
            from_relay: Consumer::open(&role.memory, back)?,
            message: [7; INLINE],
            inline: [0; INLINE],
        })
    }
}

impl Ends for Client {
    fn prepare(&mut self, _bytes: usize) -> Result<()> {
        while self.from_relay.peek().is_some() {
            self.from_relay.pop();
        }
        Ok(())
    }

    fn send(&mut self, _end: usize, bytes: usize) -> Result<bool> {
        if !self.to_relay.has_room() {
            return Ok(false);
        }
        match self.message.get(..bytes) {
            Some(inline) => self.to_relay.push(bytes, None, inline),
            None => {
                // As a buffer that was filled before.
                let Some(at) = self.to_relay.reserve(bytes) else {
                    return Ok(false);
                };
                self.to_relay.push(bytes, Some(at), &[]);
            }
        }
        Ok(true)
    }

    fn receive(&mut self, _end: usize) -> Result<Option<Arrival>> {
        let Some(entry) = self.from_relay.peek() else {
            return Ok(None);
        };
        if let Some(inline) = self.inline.get_mut(..entry.bytes) {
            self.from_relay.inline(inline);
        }
        self.from_relay.pop();
        let bytes = entry.bytes;
        Ok(Some(Arrival { bytes, source: 0 }))
    }

    fn settled(&mut self) -> Result<bool> {
        Ok(self.to_relay.is_empty())
    }

    fn pause(&mut self) {
        rustix::thread::sched_yield();
    }

    fn missed(&self) -> u64 {
        self.from_relay.dropped()
    }
}
