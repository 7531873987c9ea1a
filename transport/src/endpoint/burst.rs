//! Short messages in a row, into one frame.
//!
//! Problem: a frame holds a dozen and more short messages, and each took the whole turn of its stream: is anything lost, does anything follow a
//! request, what holds the stream back, what does the message need, what does the credit cover. Some 230 instructions, to which the answer was the
//! same each time.
//!
//! Idea: if nothing of the stream is out of the ordinary, and it goes on with what never went out, then that stays so while the frame is being
//! written: only the message, its room and the credit are looked at again. Whatever is not the next short message of the plainest kind ends it,
//! and [`StreamWriter::turn`] decides as if nobody had looked. Of a RUN only its first message is asked even that: those behind it that are
//! like it are counted, as far as there is room, and written in one go. It must not be possible to tell from the frames which way a message went
//! (`tests/shortcuts.rs`).
//!
//! Rejected: the same for what is sent again, which is rare and has reasons to stop of its own.

use super::send_stream::{MessageState, SendStream};
use super::turn::{EAGER_HEADER, Source, StreamWriter};
use crate::wire::frame::FRAME_HEADER_LEN;
use crate::wire::{Form, Payload};

impl SendStream {
    /// Nothing of it is lost, asked for, held back or owed, and its receiver knows it: the next message goes out for the first time.
    #[inline]
    pub(super) fn goes_straight_on(&self) -> bool {
        let wants = self.not_ready.is_some() || self.regained.is_some();
        let held = self.stalled || self.paused || self.holding || wants;
        self.cursor == self.high
            && self.established
            && !(held || self.lost || self.reopen)
            && self.follows.is_none()
            && self.record.is_some()
    }
}

impl StreamWriter<'_, '_, '_> {
    /// After the message in front of `index` went into a RUN, the chunk `at`: as many as follow it, are like it, and have room there. How many.
    #[inline]
    fn more_of_run(
        &mut self,
        stream: &mut SendStream,
        index: usize,
        end: usize,
        at: usize,
    ) -> usize {
        let room = self.w.room_in(Form::More).unwrap_or(0);
        let charged = self.space - room;
        let most = (self.w).run_takes(room.min(self.credit.saturating_sub(charged)));
        let Some(&last) = stream.queue.get(index.wrapping_sub(1)) else {
            return 0;
        };
        let waiting = stream.queue.range(index..end.min(index + most));
        let count = waiting.take_while(|next| last.is_followed_by(next)).count();
        if count == 0 || self.w.push_more(count).is_err() {
            return 0;
        }
        let (sender, now) = (self.sender, self.now);
        let mut number = stream.base.wrapping_add(index as u32);
        let messages = stream.queue.range_mut(index..index + count);
        self.plan.sources.extend(messages.map(|message| {
            message.goes_whole(now);
            let source = Source::of(at, sender, number, message.id);
            number = number.wrapping_add(1);
            source
        }));
        count
    }

    /// Writes first chunks as long as each is the next short message. True if it wrote any.
    pub(super) fn burst(&mut self, stream: &mut SendStream) -> bool {
        if !stream.goes_straight_on() {
            return false;
        }
        #[cfg(test)]
        if self.shortcuts.off {
            return false;
        }
        let (name, base) = (stream.wire(), stream.base);
        let first = stream.cursor.wrapping_sub(base) as usize;
        let end = stream.queue.len().min(self.window as usize);
        let mut index = first;
        while index < end {
            let Some(message) = stream.queue.get_mut(index) else {
                break;
            };
            let len = message.len as usize;
            // In a frame of its own, as `StreamWriter::first` asks.
            let alone = FRAME_HEADER_LEN + EAGER_HEADER + len;
            if message.state != MessageState::Live || alone > self.space.min(self.credit) {
                break;
            }
            let number = base.wrapping_add(index as u32);
            let form = (self.w).form(&name, number, message.tag, message.ack, len);
            let Some(room) = self.w.room_in(form) else {
                break;
            };
            if len > room || self.space - room + len > self.credit {
                break;
            }
            let payload = Payload {
                len: len as u16,
                crc: 0,
            };
            let (tag, ack, id) = (message.tag, message.ack, message.id);
            let pushed = self.w.push_eager(form, &name, number, tag, ack, payload);
            let Ok(at) = pushed else {
                break;
            };
            self.plan.add(at, self.sender, number, id, 0, len);
            message.goes_whole(self.now);
            index += 1;
            if form.is_of_run() {
                index += self.more_of_run(stream, index, end, at);
            }
        }
        if index == first {
            return false;
        }
        self.counters.chunks_sent += (index - first) as u64;
        #[cfg(test)]
        {
            self.shortcuts.bursts += (index - first) as u64;
        }
        (self.plan.charged, self.plan.asks) = (true, true);
        stream.cursor = base.wrapping_add(index as u32);
        stream.high = stream.cursor;
        true
    }
}
