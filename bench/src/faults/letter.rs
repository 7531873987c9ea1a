//! The messages of a stream: number n has a length and bytes that follow from the stream and from n, so that its receiver can check
//! every byte of any size, also of one. The number travels in the tag.

use portolan::{Address, Message};
use portolan_testbed::pattern::{self, mix};

/// The longest.
pub const LONGEST: usize = 1 << 20;
/// Half of the mixed messages are at most so long.
const SHORT: usize = 4096;

/// A stream, and how long its messages are.
#[derive(Clone, Copy, Debug)]
pub struct Stream {
    pub from: Address,
    pub to: Address,
    pub sizes: Sizes,
}

/// Lengths of a stream's messages.
#[derive(Clone, Copy, Debug)]
pub enum Sizes {
    /// 1 byte to 1 MiB: half of them up to 4 KiB; within each half the orders of magnitude are equally frequent.
    Mixed,
    /// All alike.
    Fixed(usize),
}

fn word(address: Address) -> u64 {
    u64::from(address.node.0) << 16 | u64::from(address.port.0)
}

impl Stream {
    fn seed(&self, number: u64) -> u64 {
        mix(mix(word(self.from) << 32 | word(self.to)) ^ number)
    }

    /// Bytes of a message.
    pub fn len(&self, number: u64) -> usize {
        let longest = match self.sizes {
            Sizes::Fixed(len) => return len,
            Sizes::Mixed if number % 128 == 17 => return LONGEST,
            Sizes::Mixed if number % 32 == 3 => return 1,
            Sizes::Mixed if number.is_multiple_of(2) => SHORT,
            Sizes::Mixed => LONGEST,
        };
        let chance = (self.seed(number) >> 11) as f64 / (1u64 << 53) as f64;
        ((longest as f64).powf(chance) as usize).clamp(1, longest)
    }

    /// Writes a message.
    pub fn fill(&self, number: u64, bytes: &mut [u8]) {
        pattern::fill(bytes, self.seed(number));
    }

    /// Is this message what was sent? It came to `self.to`.
    pub fn check(&self, message: &Message) -> Result<(), String> {
        let number = message.tag();
        if message.from() != self.from {
            return Err(format!("it names {} as its sender", message.from()));
        }
        let len = self.len(number);
        if message.len() != len {
            return Err(format!("{} bytes, not {len}", message.len()));
        }
        match pattern::first_wrong(message, self.seed(number)) {
            Some(offset) => Err(format!("of {len} bytes, wrong at {offset}")),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_mixed_from_1_byte_to_1_mib() {
        let stream = Stream {
            from: (1, 10).into(),
            to: (2, 10).into(),
            sizes: Sizes::Mixed,
        };
        let sizes: Vec<usize> = (0..1000).map(|number| stream.len(number)).collect();
        assert_eq!(
            (sizes.iter().min(), sizes.iter().max()),
            (Some(&1), Some(&LONGEST))
        );
        for (from, to) in [(2, 64), (64, 4096), (4097, 65_536), (65_537, LONGEST)] {
            let count = sizes
                .iter()
                .filter(|size| (from..=to).contains(*size))
                .count();
            assert!(
                count > 50,
                "{count} of 1000 messages have {from} to {to} bytes"
            );
        }
    }
}
