//! What the library puts behind a message's bytes, and the messages it sends for itself.
//!
//! A **seal** follows the payload; a **note** is a message of its own. Little-endian, 8 bytes of checksum last:
//!
//! | seal | bytes | | note | bytes |
//! |---|---|---|---|---|
//! | session | 0–7 | | session | 0–7 |
//! | sequence | 8–11 | | three numbers | 8–19 |
//! | sequence less limit | 12–13 | | kind, priority spoken of | 20 |
//! | flags: priority, receipt wanted | 14 | | magic | 21–22 |
//! | version | 15 | | checksum | 23–30 |
//! | from node, to node | 16–19 | | | |
//! | from port, to port | 20, 21 | | | |
//! | magic | 22–23 | | | |
//! | checksum | 24–31 | | | |
//!
//! The checksum is XXH3, 64 bits, over everything before it, seeded with the tag. It is no CRC on purpose: the engines compute CRC32C
//! over the same bytes, and a fault that fools one linear code shall not fool its twin. A chance change passes with 2⁻⁶⁴. It is no
//! signature: who wants to forge one can.
//!
//! A note is a byte shorter than a seal, so no sealed message fits a buffer meant for notes: an engine gives a message the smallest
//! buffer that holds it, and notes and messages never take each other's as long as there are some of both.

use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

use crate::names::{Address, NodeId, PortId, Priority};

/// Bytes of a seal.
pub(crate) const SEAL: usize = 32;
/// Bytes of a note.
pub(crate) const NOTE: usize = SEAL - 1;

const CHECKSUM: usize = 8;
const VERSION: u8 = 1;
const SEAL_MAGIC: u16 = 0x5ea1;
const NOTE_MAGIC: u16 = 0x907e;
const HIGH: u8 = 1;
const RECEIPT_WANTED: u8 = 2;

/// What a seal says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Seal {
    pub(crate) session: u64,
    pub(crate) sequence: u32,
    /// All of the session below this sequence has ended: `sequence` less this.
    pub(crate) back: u16,
    pub(crate) receipt_wanted: bool,
    pub(crate) priority: Priority,
    pub(crate) from: Address,
    pub(crate) to: Address,
}

/// Why a message carries no seal that is right.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Broken {
    /// Nothing that looks like one.
    Unsealed,
    /// Bytes and checksum disagree.
    Changed,
}

fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut out = [0; N];
    if let Some(found) = bytes.get(at..at + N) {
        out.copy_from_slice(found);
    }
    out
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(array(bytes, at))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(array(bytes, at))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(array(bytes, at))
}

impl Seal {
    fn fields(&self) -> [u8; SEAL - CHECKSUM] {
        let mut out = [0; SEAL - CHECKSUM];
        out[..8].copy_from_slice(&self.session.to_le_bytes());
        out[8..12].copy_from_slice(&self.sequence.to_le_bytes());
        out[12..14].copy_from_slice(&self.back.to_le_bytes());
        out[14] = self.priority.code() | u8::from(self.receipt_wanted) << 1;
        out[15] = VERSION;
        out[16..18].copy_from_slice(&self.from.node.0.to_le_bytes());
        out[18..20].copy_from_slice(&self.to.node.0.to_le_bytes());
        // Ports are below 256.
        out[20] = self.from.port.0 as u8;
        out[21] = self.to.port.0 as u8;
        out[22..].copy_from_slice(&SEAL_MAGIC.to_le_bytes());
        out
    }

    /// Writes the seal into the last [`SEAL`] bytes; what is before them is the payload.
    pub(crate) fn write(&self, sealed: &mut [u8], tag: u64) {
        let Some(at) = sealed.len().checked_sub(SEAL) else {
            return;
        };
        let sum_at = sealed.len() - CHECKSUM;
        sealed[at..sum_at].copy_from_slice(&self.fields());
        let sum = xxh3_64_with_seed(&sealed[..sum_at], tag);
        sealed[sum_at..].copy_from_slice(&sum.to_le_bytes());
    }

    /// What the last [`SEAL`] bytes say, if all bytes and the tag are as they were when they were sealed.
    pub(crate) fn read(sealed: &[u8], tag: u64) -> Result<Self, Broken> {
        let at = sealed.len().checked_sub(SEAL).ok_or(Broken::Unsealed)?;
        let sum_at = sealed.len() - CHECKSUM;
        let fields = &sealed[at..sum_at];
        let right = xxh3_64_with_seed(&sealed[..sum_at], tag) == u64_at(sealed, sum_at);
        let looks = u16_at(fields, 22) == SEAL_MAGIC;
        match (right, looks) {
            (true, true) if fields[15] == VERSION => Ok(Self {
                session: u64_at(fields, 0),
                sequence: u32_at(fields, 8),
                back: u16_at(fields, 12),
                receipt_wanted: fields[14] & RECEIPT_WANTED != 0,
                priority: if fields[14] & HIGH != 0 {
                    Priority::High
                } else {
                    Priority::Low
                },
                from: Address {
                    node: NodeId(u16_at(fields, 16)),
                    port: PortId(fields[20].into()),
                },
                to: Address {
                    node: NodeId(u16_at(fields, 18)),
                    port: PortId(fields[21].into()),
                },
            }),
            (false, true) => Err(Broken::Changed),
            _ => Err(Broken::Unsealed),
        }
    }
}

/// What a note is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Note {
    /// From a receiver: what it has of the session.
    Receipt(Receipt),
    /// From a sender: what became of its sends; a receipt, please.
    Statement(Statement),
}

/// What a receiver has of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Receipt {
    pub(crate) session: u64,
    /// Priority of the stream that is spoken of.
    pub(crate) priority: Priority,
    /// The receiving port's own session: another one knows nothing of what its predecessor had.
    pub(crate) receiver: u64,
    /// It knows the stream from this sequence on.
    pub(crate) start: u32,
    /// Everything from there up to here was received, given up by its sender, or is counted in `lost`.
    pub(crate) upto: u32,
    /// Messages its sender was told are delivered, and that never came.
    pub(crate) lost: u32,
}

/// What became of a session's sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Statement {
    pub(crate) session: u64,
    /// Priority of the stream that is spoken of.
    pub(crate) priority: Priority,
    /// Of those below `upto` that the receiver has not heard of, these, and no others, were given up.
    pub(crate) first: u32,
    /// How many, from `first` on.
    pub(crate) count: u32,
    /// Their sender was told that they were *not* delivered, not *perhaps*.
    pub(crate) certain: bool,
    /// All below have ended.
    pub(crate) upto: u32,
}

const RECEIPT: u8 = 1;
const STATEMENT: u8 = 2;
const CERTAIN: u8 = 8;
const KINDS: u8 = 0x06;

/// The seed of a note's checksum: beside the tag, both addresses, which a note has no room for.
fn seed(tag: u64, from: Address, to: Address) -> u64 {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&tag.to_le_bytes());
    for (chunk, word) in
        bytes[8..]
            .chunks_mut(2)
            .zip([from.node.0, from.port.0, to.node.0, to.port.0])
    {
        chunk.copy_from_slice(&word.to_le_bytes());
    }
    xxh3_64(&bytes)
}

impl Note {
    /// As the bytes of a message, and its tag.
    pub(crate) fn write(&self, from: Address, to: Address) -> ([u8; NOTE], u64) {
        let (session, priority, numbers, kind, tag) = match *self {
            Self::Receipt(r) => {
                let numbers = [r.start, r.upto, r.lost];
                (r.session, r.priority, numbers, RECEIPT << 1, r.receiver)
            }
            Self::Statement(s) => {
                let kind = STATEMENT << 1 | if s.certain { CERTAIN } else { 0 };
                (s.session, s.priority, [s.first, s.count, s.upto], kind, 0)
            }
        };
        let mut out = [0; NOTE];
        out[..8].copy_from_slice(&session.to_le_bytes());
        for (chunk, number) in out[8..20].chunks_mut(4).zip(numbers) {
            chunk.copy_from_slice(&number.to_le_bytes());
        }
        out[20] = kind | priority.code();
        out[21..23].copy_from_slice(&NOTE_MAGIC.to_le_bytes());
        let sum = xxh3_64_with_seed(&out[..NOTE - CHECKSUM], seed(tag, from, to));
        out[NOTE - CHECKSUM..].copy_from_slice(&sum.to_le_bytes());
        (out, tag)
    }

    /// What a message of [`NOTE`] bytes says, if it is a note from and to these ports, and unchanged.
    pub(crate) fn read(bytes: &[u8], tag: u64, from: Address, to: Address) -> Result<Self, Broken> {
        if bytes.len() != NOTE || u16_at(bytes, 21) != NOTE_MAGIC {
            return Err(Broken::Unsealed);
        }
        let sum = xxh3_64_with_seed(&bytes[..NOTE - CHECKSUM], seed(tag, from, to));
        if sum != u64_at(bytes, NOTE - CHECKSUM) {
            return Err(Broken::Changed);
        }
        let session = u64_at(bytes, 0);
        let [a, b, c] = [8, 12, 16].map(|at| u32_at(bytes, at));
        let priority = Priority::from_code(bytes[20] & HIGH).ok_or(Broken::Unsealed)?;
        match (bytes[20] & KINDS) >> 1 {
            RECEIPT => Ok(Self::Receipt(Receipt {
                session,
                priority,
                receiver: tag,
                start: a,
                upto: b,
                lost: c,
            })),
            STATEMENT => Ok(Self::Statement(Statement {
                session,
                priority,
                first: a,
                count: b,
                certain: bytes[20] & CERTAIN != 0,
                upto: c,
            })),
            _ => Err(Broken::Unsealed),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn seal() -> Seal {
        Seal {
            session: 0x0123_4567_89ab_cdef,
            sequence: u32::MAX,
            back: 300,
            receipt_wanted: true,
            priority: Priority::High,
            from: (1, 255).into(),
            to: (u16::MAX - 1, 0).into(),
        }
    }

    fn notes() -> [Note; 2] {
        [
            Note::Receipt(Receipt {
                session: 1,
                priority: Priority::High,
                receiver: u64::MAX - 2,
                start: 3,
                upto: 4,
                lost: 5,
            }),
            Note::Statement(Statement {
                session: 9,
                priority: Priority::Low,
                first: 8,
                count: 7,
                certain: true,
                upto: 6,
            }),
        ]
    }

    proptest! {
        // A sealed message of any length. Expect: it is read as written; with any one bit of payload, seal or tag turned, cut short, or
        // lengthened, it is not.
        #[test]
        fn any_change_is_seen(len in 0usize..3000, tag in any::<u64>(), bit in any::<prop::sample::Index>(),
            cut in 1usize..100, tag_bit in 0u32..64) {
            let mut bytes: Vec<u8> = (0..len + SEAL).map(|i| (i * 31) as u8).collect();
            seal().write(&mut bytes, tag);
            prop_assert_eq!(Seal::read(&bytes, tag), Ok(seal()));
            prop_assert_eq!(Seal::read(&bytes, tag ^ 1 << tag_bit), Err(Broken::Changed));
            let bit = bit.index(bytes.len() * 8);
            let mut changed = bytes.clone();
            changed[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(Seal::read(&changed, tag).is_err());
            let short = bytes.len().saturating_sub(cut);
            prop_assert!(Seal::read(&bytes[..short], tag).is_err());
            bytes.resize(len + SEAL + cut, 0);
            prop_assert!(Seal::read(&bytes, tag).is_err());
        }

        // Any bytes. Expect: no panic, and never a seal or a note.
        #[test]
        fn noise_is_no_seal(bytes in proptest::collection::vec(any::<u8>(), 0..100), tag in any::<u64>()) {
            prop_assert!(Seal::read(&bytes, tag).is_err());
            prop_assert!(Note::read(&bytes, tag, (1, 2).into(), (3, 4).into()).is_err());
        }

        // A note. Expect: read as written; with any bit of bytes or tag turned, or between other ports, it is not.
        #[test]
        fn a_changed_note_is_seen(which in 0usize..2, bit in 0usize..NOTE * 8, tag_bit in 0u32..64) {
            let (from, to) = ((1, 2).into(), (3, 4).into());
            let note = notes()[which];
            let (bytes, tag) = note.write(from, to);
            prop_assert_eq!(Note::read(&bytes, tag, from, to), Ok(note));
            prop_assert!(Note::read(&bytes, tag ^ 1 << tag_bit, from, to).is_err());
            prop_assert!(Note::read(&bytes, tag, to, from).is_err());
            let mut changed = bytes;
            changed[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(Note::read(&changed, tag, from, to).is_err());
        }
    }
}
