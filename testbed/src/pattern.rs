//! Bytes that follow from a seed: what a message is made of, so that its receiver can check every byte.

const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// The finisher of SplitMix64: every bit of the result hangs on every bit of `x`.
pub fn mix(x: u64) -> u64 {
    let x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ x >> 31
}

fn word(seed: u64, index: usize) -> [u8; 8] {
    mix(seed.wrapping_add((index as u64).wrapping_mul(GOLDEN))).to_le_bytes()
}

/// Fills `bytes` with what follows from `seed`.
pub fn fill(bytes: &mut [u8], seed: u64) {
    for (index, chunk) in bytes.chunks_mut(8).enumerate() {
        chunk.copy_from_slice(&word(seed, index)[..chunk.len()]);
    }
}

/// The offset of the first byte that is wrong to within eight.
pub fn first_wrong(bytes: &[u8], seed: u64) -> Option<usize> {
    bytes
        .chunks(8)
        .enumerate()
        .find(|(index, chunk)| **chunk != word(seed, *index)[..chunk.len()])
        .map(|(index, _)| index * 8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flipped_bit_is_found() {
        let mut bytes = vec![0; 1003];
        fill(&mut bytes, 7);
        assert_eq!(first_wrong(&bytes, 7), None);
        assert_eq!(first_wrong(&bytes, 8), Some(0));
        bytes[1002] ^= 1;
        assert_eq!(first_wrong(&bytes, 7), Some(1000));
    }
}
