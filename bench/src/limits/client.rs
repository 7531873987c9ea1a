//! The application of a relay.

use anyhow::Result;

use super::ClientRole;
use super::shared::{Consumer, INLINE, Producer, Toward};
use crate::actor::{Arrival, Ends};

/// An application that has a relay send and receive for it, or that stands in the relay's place: then two of them talk with nobody in between.
pub struct Client {
    out: Producer,
    back: Consumer,
    message: [u8; INLINE],
    inline: [u8; INLINE],
}

impl Client {
    pub fn open(role: &ClientRole) -> Result<Self> {
        let (there, here) = match role.in_relays_place {
            false => (Toward::Relay, Toward::Application),
            true => (Toward::Application, Toward::Relay),
        };
        Ok(Self {
            out: Producer::open(&role.memory, there)?,
            back: Consumer::open(&role.memory, here)?,
            message: [7; INLINE],
            inline: [0; INLINE],
        })
    }
}

impl Ends for Client {
    fn prepare(&mut self, _bytes: usize) -> Result<()> {
        while self.back.peek().is_some() {
            self.back.pop();
        }
        Ok(())
    }

    fn send(&mut self, _end: usize, bytes: usize) -> Result<bool> {
        if !self.out.has_room() {
            return Ok(false);
        }
        match self.message.get(..bytes) {
            Some(inline) => self.out.push(bytes, None, inline),
            None => {
                // As a buffer that was filled before.
                let Some(at) = self.out.reserve(bytes) else {
                    return Ok(false);
                };
                self.out.push(bytes, Some(at), &[]);
            }
        }
        Ok(true)
    }

    fn receive(&mut self, _end: usize) -> Result<Option<Arrival>> {
        let Some(entry) = self.back.peek() else {
            return Ok(None);
        };
        if let Some(inline) = self.inline.get_mut(..entry.bytes) {
            self.back.inline(inline);
        }
        self.back.pop();
        let bytes = entry.bytes;
        Ok(Some(Arrival { bytes, source: 0 }))
    }

    fn settled(&mut self) -> Result<bool> {
        Ok(self.out.is_empty())
    }

    fn pause(&mut self) {
        rustix::thread::sched_yield();
    }

    fn missed(&self) -> u64 {
        self.back.dropped()
    }
}
