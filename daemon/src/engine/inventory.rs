//! The tokens that an engine finds to be its own when it takes over, for the application ([`Inventory`]): what it was never told of and nobody
//! holds was lost in a damaged engine.

use std::sync::atomic::{AtomicU32, Ordering, fence};

use portolan_abi::port::Inventory;
use portolan_abi::{MAX_RECEIVE_TOKENS, MAX_SEND_TOKENS};

use super::commit_point::{Point, crash_point};

/// Which tokens of a port they are: a bit for each slot.
#[derive(Default)]
pub(super) struct Held {
    sends: [u64; MAX_SEND_TOKENS as usize / 64],
    receives: [u64; MAX_RECEIVE_TOKENS as usize / 64],
}

impl Held {
    pub fn send(&mut self, slot: u32) {
        Self::set(&mut self.sends, slot);
    }

    pub fn receive(&mut self, slot: u32) {
        Self::set(&mut self.receives, slot);
    }

    fn set(words: &mut [u64], slot: u32) {
        if let Some(word) = words.get_mut(slot as usize / 64) {
            *word |= 1 << (slot % 64);
        }
    }

    /// Writes what a takeover found, the `of`th: up to where in the rings of sends, buffers and events, and the tokens.
    pub fn write(&self, inventory: &Inventory, [sends, provides, events]: [u32; 3], of: u32) {
        let store = |word: &AtomicU32, value| {
            crash_point(Point::Inventory);
            word.store(value, Ordering::Relaxed);
        };
        // SYNC(inventory): whoever reads any of it while it changes sees that.
        store(&inventory.of, 0);
        fence(Ordering::Release);
        store(&inventory.sends, sends);
        store(&inventory.provides, provides);
        store(&inventory.events, events);
        let sends = inventory.sends_held.iter().zip(&self.sends);
        let receives = inventory.receives_held.iter().zip(&self.receives);
        for (word, held) in sends.chain(receives) {
            crash_point(Point::Inventory);
            word.store(*held, Ordering::Relaxed);
        }
        crash_point(Point::Inventory);
        inventory.of.store(of, Ordering::Release);
    }
}
