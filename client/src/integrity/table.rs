//! The streams of a port, by the address at their other end and their priority; bounded.
//!
//! A full table forgets the first stream that can be spared and was not used since the hand last passed it (a clock, as page caches have).

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use crate::names::{Address, NodeId, PortId, Priority};

/// Most streams in each direction.
pub(crate) const STREAMS: usize = 4096;

/// Spreads one word.
#[derive(Default)]
pub(crate) struct Spread(u64);

impl Hasher for Spread {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(byte.into());
        }
    }

    fn write_u64(&mut self, word: u64) {
        let x = (self.0 ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = x ^ x >> 32;
    }
}

fn key(address: Address, priority: Priority) -> u64 {
    u64::from(address.node.0) << 32 | u64::from(address.port.0) << 8 | u64::from(priority.code())
}

#[derive(Debug)]
struct Entry<T> {
    key: u64,
    recent: bool,
    stream: T,
}

#[derive(Debug)]
pub(crate) struct Table<T> {
    index: HashMap<u64, u32, BuildHasherDefault<Spread>>,
    entries: Vec<Entry<T>>,
    hand: usize,
    last: (u64, u32),
    most: usize,
}

impl<T> Table<T> {
    pub(crate) fn new(most: usize) -> Self {
        Self {
            index: HashMap::default(),
            entries: Vec::new(),
            hand: 0,
            // No such key.
            last: (u64::MAX, 0),
            most,
        }
    }

    /// Where this stream is.
    pub(crate) fn find(&mut self, address: Address, priority: Priority) -> Option<u32> {
        let key = key(address, priority);
        if self.last.0 != key {
            self.last = (key, *self.index.get(&key)?);
        }
        if let Some(entry) = self.entries.get_mut(self.last.1 as usize) {
            entry.recent = true;
        }
        Some(self.last.1)
    }

    /// Where it is from now on. If the table is full, one that `spare` lets go of makes room.
    pub(crate) fn insert(
        &mut self,
        address: Address,
        priority: Priority,
        stream: T,
        spare: impl Fn(&T) -> bool,
    ) -> Option<u32> {
        let key = key(address, priority);
        let entry = Entry {
            key,
            recent: true,
            stream,
        };
        let at = if self.entries.len() < self.most {
            self.entries.push(entry);
            self.entries.len() - 1
        } else {
            let at = self.spared(spare)?;
            self.index.remove(&self.entries[at].key);
            self.entries[at] = entry;
            at
        };
        self.index.insert(key, at as u32);
        self.last = (key, at as u32);
        Some(at as u32)
    }

    fn spared(&mut self, spare: impl Fn(&T) -> bool) -> Option<usize> {
        for _ in 0..2 * self.entries.len() {
            let at = self.hand;
            self.hand = (at + 1) % self.entries.len();
            let entry = &mut self.entries[at];
            if !std::mem::take(&mut entry.recent) && spare(&entry.stream) {
                return Some(at);
            }
        }
        None
    }

    pub(crate) fn get(&mut self, at: u32) -> Option<&mut T> {
        self.entries.get_mut(at as usize).map(|e| &mut e.stream)
    }

    /// Whose stream it is.
    pub(crate) fn name(&self, at: u32) -> Option<(Address, Priority)> {
        let key = self.entries.get(at as usize)?.key;
        let address = Address {
            node: NodeId((key >> 32) as u16),
            port: PortId((key >> 8) as u16),
        };
        Some((address, Priority::from_code(key as u8)?))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    // More streams than there is room for. Expect: one that can be spared and was not used lately makes room; if none can, none does.
    #[test]
    fn a_full_table_forgets_what_it_can_spare() {
        let mut table = Table::new(3);
        for port in 0..3u16 {
            table
                .insert((1, port).into(), Priority::High, port, |_| false)
                .unwrap();
        }
        let new = (2, 9).into();
        assert_eq!(table.insert(new, Priority::Low, 9, |_| false), None);
        // The hand has passed all; only 0 is used since.
        assert!(table.find((1, 0).into(), Priority::High).is_some());
        let at = table.insert(new, Priority::Low, 9, |_| true).unwrap();
        assert_eq!(table.name(at), Some((new, Priority::Low)));
        assert_eq!(table.find(new, Priority::Low), Some(at));
        assert_eq!(table.find(new, Priority::High), None);
        assert!(table.find((1, 0).into(), Priority::High).is_some());
        assert_eq!(table.find((1, 1).into(), Priority::High), None);
        assert_eq!(*table.get(at).unwrap(), 9);
    }
}
