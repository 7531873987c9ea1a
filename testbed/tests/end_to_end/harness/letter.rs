//! Messages that name who sent them to whom and the how-manieth they are, filled with bytes that follow from that.

use anyhow::{Result, ensure};
use portolan::{Address, Message, Priority};

use super::pattern;

/// Bytes of the shortest.
pub const HEADER: usize = 24;

fn word(address: Address) -> u64 {
    u64::from(address.node.0) << 16 | u64::from(address.port.0)
}

fn header(from: Address, to: Address, priority: Priority, number: u64) -> [u64; 3] {
    let high = u64::from(priority == Priority::High);
    [word(from) << 32 | word(to), high, number]
}

fn seed(header: [u64; 3]) -> u64 {
    header.iter().fold(0, |seed, &x| pattern::mix(seed ^ x))
}

/// The letter as it should be.
pub fn write(from: Address, to: Address, priority: Priority, number: u64, len: usize) -> Vec<u8> {
    let header = header(from, to, priority, number);
    let mut bytes = vec![0; len.max(HEADER)];
    for (chunk, word) in bytes.chunks_mut(8).zip(header) {
        chunk.copy_from_slice(&word.to_le_bytes());
    }
    pattern::fill(&mut bytes[HEADER..], seed(header));
    bytes
}

/// The number of a letter that came to `own`, if all of it is as it was written.
pub fn read(message: &Message, own: Address) -> Result<u64> {
    ensure!(
        message.len() >= HEADER,
        "{} bytes are no letter",
        message.len()
    );
    let number = message.tag();
    let expected = header(message.from(), own, message.priority(), number);
    let mut words = message[..HEADER].chunks(8).map(|chunk| {
        let mut word = [0; 8];
        word.copy_from_slice(chunk);
        u64::from_le_bytes(word)
    });
    let found: [u64; 3] = std::array::from_fn(|_| words.next().unwrap_or_default());
    ensure!(
        found == expected,
        "cross-talk: {own} received from {} a letter {found:x?}, not {expected:x?}",
        message.from()
    );
    if let Some(offset) = pattern::first_wrong(&message[HEADER..], seed(expected)) {
        anyhow::bail!(
            "letter {number} from {} of {} bytes is wrong at {}",
            message.from(),
            message.len(),
            HEADER + offset
        );
    }
    Ok(number)
}
