//! A relay: messages of its application become frames, frames become messages of its application. No more than that.
//!
//! In the bare form payloads that do not fit into a slot do not travel: frames have the right length and whatever content. In the
//! checked form each is copied once on each side, and its CRC32C is computed on the copy, which is then in the cache. What is wrong
//! with a frame is counted and otherwise ignored: a limit has no recovery to pay for.

use anyhow::Result;
use portolan::turns::{self, Patience};
use portolan_crc::{crc32c, crc32c_append};

use super::shared::{Consumer, INLINE, Producer, Toward};
use super::socket::{Label, Payload, Socket};
use super::{Form, RelayRole};
use crate::actor::{Answer, Orders, Phase};

/// Frames after which the kernel is kicked, and messages taken before what came is looked at.
const KICK: usize = 64;
/// Empty looks before the core is given away, while that pays: about as long as an engine of Portolan looks then. It learns as an engine does, so that
/// neither is luckier than the other; with the core given away at every empty look the relay took 4.1 us where it takes 3.1 so.
const LOOKS: u64 = 40;
/// Empty looks between two reports of what was dropped: that is a system call.
const TELL: u32 = 4096;
/// How often the core is given away for an application that has no room, before its message is dropped: it may be gone.
const PATIENCE: u32 = 1_000_000;

/// Relays until there is nobody left to relay for.
///
/// # Errors
/// What kept it from that.
pub fn run(role: &RelayRole, orders: &Orders) -> Result<()> {
    let mut outward = Outward {
        application: Consumer::open(&role.memory, Toward::Relay)?,
        form: role.form,
        sent: 0,
    };
    let mut inward = Inward {
        application: Producer::open(&role.memory, Toward::Application)?,
        form: role.form,
        message: None,
        wrong: 0,
    };
    let mut socket = Socket::open(&role.wire)?;
    orders.answer(&Answer::Ready)?;
    let mut idle = 0u32;
    let mut looks = 0u64;
    let mut patience = Patience::new(LOOKS);
    while orders.phase() != Phase::Over {
        looks = looks.wrapping_add(1);
        let sent = outward.turn(&mut socket);
        let came = inward.application.has_room()
            && socket.receive(|label, bytes| inward.piece(label, bytes));
        let gives_way = patience.ends(looks, sent || came, sent, came, false);
        if !sent && !came {
            idle = idle.wrapping_add(1);
            if idle.is_multiple_of(TELL) {
                let dropped = socket.missed() + inward.wrong;
                inward.application.tell_dropped(dropped);
            }
        }
        if gives_way {
            turns::give_way(|| !inward.application.is_empty());
        }
    }
    Ok(())
}

/// From the application to the wire.
struct Outward {
    application: Consumer,
    form: Form,
    /// Bytes of the oldest message that were sent.
    sent: usize,
}

impl Outward {
    /// Sends some of what waits. Whether there was anything.
    fn turn(&mut self, socket: &mut Socket) -> bool {
        let mut inline = [0; INLINE];
        let mut worked = false;
        for _ in 0..KICK {
            let Some(entry) = self.application.peek() else {
                break;
            };
            let left = entry.bytes - self.sent;
            let len = left.min(socket.frame_payload());
            let payload = if let Some(inline) = inline.get_mut(..entry.bytes) {
                self.application.inline(inline);
                Payload::Copied(inline)
            } else {
                match self.form {
                    Form::Bare => Payload::Anything(len),
                    Form::Checked => {
                        Payload::Copied(self.application.payload(entry.at + self.sent, len))
                    }
                }
            };
            let crc = match (self.form, payload) {
                // Brings it into the cache that it is copied from next.
                (Form::Checked, Payload::Copied(bytes)) => crc32c(bytes),
                _ => 0,
            };
            let label = Label {
                message: entry.bytes as u32,
                payload: len as u32,
                crc,
                at: self.sent as u32,
            };
            if !socket.stage(label, payload) {
                break;
            }
            worked = true;
            self.sent += len;
            if len == left {
                self.application.pop();
                self.sent = 0;
            }
        }
        socket.flush();
        worked
    }
}

/// From the wire to the application.
struct Inward {
    application: Producer,
    form: Form,
    message: Option<Message>,
    /// Frames whose CRC was wrong, messages with something missing, messages nobody had room for.
    wrong: u64,
}

/// A message that is coming.
struct Message {
    bytes: usize,
    came: usize,
    /// Where it goes, unless it is short or nowhere.
    at: Option<usize>,
    inline: [u8; INLINE],
    /// The frame at hand: what is still to come of it, its CRC as it should be and as it is so far.
    frame: Label,
    left: usize,
    crc: u32,
}

impl Inward {
    fn piece(&mut self, label: Option<Label>, bytes: &[u8]) {
        if let Some(label) = label {
            self.begin_frame(label);
        }
        let Some(message) = &mut self.message else {
            return;
        };
        let to = message.came;
        if let Some(inline) = message.inline.get_mut(to..to + bytes.len())
            && message.bytes <= INLINE
        {
            inline.copy_from_slice(bytes);
        } else if let Some(at) = message.at {
            let room = self.application.room(at + to, bytes.len());
            room.copy_from_slice(&bytes[..room.len()]);
        }
        if self.form == Form::Checked {
            // What was copied is in the cache, whichever of the two is read.
            message.crc = crc32c_append(message.crc, bytes);
        }
        message.came += bytes.len();
        message.left = message.left.saturating_sub(bytes.len());
        if message.left == 0 {
            self.end_frame();
        }
    }

    fn begin_frame(&mut self, frame: Label) {
        let bytes = frame.message as usize;
        if frame.at == 0
            && let Some(lost) = self.message.take()
        {
            self.wrong += 1;
            if lost.at.is_some() {
                self.application.take_back();
            }
        }
        let message = self.message.get_or_insert(Message {
            bytes,
            came: 0,
            at: None,
            inline: [0; INLINE],
            frame,
            left: 0,
            crc: 0,
        });
        if message.came == 0 && bytes > INLINE && self.form == Form::Checked {
            let mut patience = PATIENCE;
            message.at = self.application.reserve(bytes);
            while message.at.is_none() && patience > 0 {
                rustix::thread::sched_yield();
                patience -= 1;
                message.at = self.application.reserve(bytes);
            }
        }
        (message.frame, message.crc) = (frame, 0);
        message.left = frame.payload as usize;
    }

    fn end_frame(&mut self) {
        let Some(message) = &self.message else { return };
        if self.form == Form::Checked && message.crc != message.frame.crc {
            self.wrong += 1;
        }
        if !message.frame.is_last() {
            return;
        }
        let Some(message) = self.message.take() else {
            return;
        };
        if message.came != message.bytes {
            self.wrong += 1;
        }
        let mut patience = PATIENCE;
        while !self.application.has_room() {
            rustix::thread::sched_yield();
            patience -= 1;
            if patience == 0 {
                self.wrong += 1;
                if message.at.is_some() {
                    self.application.take_back();
                }
                return;
            }
        }
        let inline = message.inline.get(..message.bytes).unwrap_or_default();
        self.application.push(message.came, message.at, inline);
    }
}
