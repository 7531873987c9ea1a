//! What is said of sends that are under way: go on after a failed one, drop those behind it, give one up.

use portolan_abi::token::{Opcode, SendToken};

use crate::error::SendError;
use crate::event::SendHandle;
use crate::names::{Address, Priority};
use crate::port::Port;
use crate::tokens::Use;

impl Port {
    /// Lets the stream to `to` go on after a send of it failed: later sends are sent in spite of the gap.
    pub fn resume_sending(
        &mut self,
        to: impl Into<Address>,
        priority: Priority,
    ) -> Result<(), SendError> {
        self.stream_command(Opcode::ResumeSending, to.into(), priority)
    }

    /// Ends all waiting sends of the stream to `to` after one failed, each as not delivered ([`crate::Reason::Dropped`]) unless it
    /// already was. The stream then goes on with what is sent next.
    pub fn drop_sends(
        &mut self,
        to: impl Into<Address>,
        priority: Priority,
    ) -> Result<(), SendError> {
        self.stream_command(Opcode::DropSends, to.into(), priority)
    }

    fn stream_command(
        &mut self,
        opcode: Opcode,
        to: Address,
        priority: Priority,
    ) -> Result<(), SendError> {
        if !to.is_valid() {
            return Err(SendError::BadAddress);
        }
        self.command(opcode, to, priority, 0)?;
        if let Some(book) = &mut self.integrity {
            book.went_on(to, priority);
        }
        Ok(())
    }

    /// Gives up a send. It still ends with an event, as cancelled, or as whatever happened first. `false` if it has ended already.
    pub fn cancel(&mut self, handle: SendHandle) -> Result<bool, SendError> {
        self.usable()?;
        if !self.send_book.holds(handle) {
            return Ok(false);
        }
        self.cancel_named(handle.token().encode())?;
        Ok(true)
    }

    pub(crate) fn cancel_named(&mut self, name: u64) -> Result<(), SendError> {
        let nobody = (0, 0).into();
        self.command(Opcode::Cancel, nobody, Priority::Low, name)
    }

    pub(crate) fn command(
        &mut self,
        opcode: Opcode,
        to: Address,
        priority: Priority,
        name: u64,
    ) -> Result<(), SendError> {
        self.usable()?;
        let slot = self.send_book.next(true).ok_or(SendError::NoToken)?;
        let token = SendToken {
            generation: slot.generation,
            opcode,
            priority: priority.code(),
            flags: 0,
            node: to.node.0,
            port: to.port.0,
            len: 0,
            arena_offset: name,
            tag: 0,
            timeout_us: 0,
        };
        self.push_token(slot, &token, &[], Use::Command);
        Ok(())
    }
}
