//! `limit-raw-xdp`: frames, out of one socket and into the other, as fast as two spinning processes can.

use anyhow::Result;

use super::WireRole;
use super::socket::{Label, Payload, Socket};
use crate::actor::{Arrival, Ends};

/// Frames after which the kernel is kicked, and what came is looked at, whether the message at hand is sent or not.
const KICK: usize = 64;

/// An application that is alone with its socket.
pub struct Raw {
    socket: Socket,
    /// Bytes of the message at hand that are still to be sent.
    left: Option<usize>,
    /// Messages that came whole and were not taken yet.
    came: Vec<usize>,
    /// Bytes of the message that has not come whole.
    partial: usize,
}

impl Raw {
    pub fn open(role: &WireRole) -> Result<Self> {
        Ok(Self {
            socket: Socket::open(role)?,
            left: None,
            came: Vec::with_capacity(256),
            partial: 0,
        })
    }
}

impl Ends for Raw {
    fn prepare(&mut self, _bytes: usize) -> Result<()> {
        while self.socket.receive(|_, _| {}) {}
        (self.left, self.partial) = (None, 0);
        self.came.clear();
        Ok(())
    }

    fn send(&mut self, _end: usize, bytes: usize) -> Result<bool> {
        let mut left = self.left.unwrap_or(bytes);
        loop {
            let payload = left.min(self.socket.frame_payload());
            let label = Label {
                message: bytes as u32,
                payload: payload as u32,
                crc: 0,
                at: (bytes - left) as u32,
            };
            if !self.socket.stage(label, Payload::Anything(payload)) {
                self.left = Some(left);
                self.socket.flush();
                return Ok(false);
            }
            left -= payload;
            let batch = self.socket.staged() >= KICK;
            if batch {
                self.socket.flush();
            }
            if left == 0 {
                self.left = None;
                return Ok(true);
            }
            if batch {
                self.left = Some(left);
                return Ok(false);
            }
        }
    }

    fn partial(&self, _end: usize) -> bool {
        self.left.is_some()
    }

    fn receive(&mut self, _end: usize) -> Result<Option<Arrival>> {
        self.socket.flush();
        if self.came.is_empty() {
            let (came, partial) = (&mut self.came, &mut self.partial);
            self.socket.receive(|label, _| {
                let Some(label) = label else { return };
                // The end of the last one was lost. What came of it came nevertheless.
                if label.at == 0 && *partial > 0 {
                    came.push(std::mem::take(partial));
                }
                *partial += label.payload as usize;
                if label.is_last() {
                    came.push(std::mem::take(partial));
                }
            });
        }
        // In no order: nobody asks which of them it was.
        let bytes = self.came.pop();
        Ok(bytes.map(|bytes| Arrival { bytes, source: 0 }))
    }

    fn settled(&mut self) -> Result<bool> {
        Ok(self.left.is_none())
    }

    fn pause(&mut self) {
        std::hint::spin_loop();
    }

    fn missed(&self) -> u64 {
        self.socket.missed()
    }
}
