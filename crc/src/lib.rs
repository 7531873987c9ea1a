//! CRC32C (Castagnoli, RFC 3720 appendix B.4), and joining the checksums of two pieces.
//!
//! Two crates, because neither is good at everything. `crc-fast` multiplies without carry, with AVX-512 where there is any: 1,400
//! bytes in 18 ns and 8,900 in 80, where `crc32c`, which has the instruction of SSE 4.2, takes 83 and 403; it is also faster for the
//! few bytes of a short message. But what it takes to go on from a checksum costs it 16 ns, which a frame's header would pay each time.
//!
//! A payload may straddle receive buffers and is checked while it is copied piece by piece (wire.md §5), so the checksums of the
//! pieces are joined afterwards. The `crc32c` crate's combine squares 32×32 matrices for every bit of the length (zlib's old
//! method, microseconds); here `x^(8·len) mod P` comes out of a table per byte of the length and costs one multiplication each.
//!
//! A frame's headers are a few words, of which the first are made in registers: [`crc32c_of_words`] has the instruction in place and calls nobody.
//! That is the only `unsafe`: intrinsics of a processor that the whole build is for (`.cargo/rustc`), which the transport, who has no `unsafe`, cannot call.
#![no_std]

use crc_fast::{CrcAlgorithm, Digest};

/// Whether this processor has the instruction that the build is for, if it is for one.
pub fn is_supported() -> bool {
    #[cfg(all(target_arch = "x86_64", target_feature = "sse4.2"))]
    {
        /// SSE 4.2 in ECX of leaf 1 (Intel SDM, CPUID).
        const SSE4_2: u32 = 1 << 20;
        // SAFETY: every processor of the architecture has CPUID and this leaf.
        #[allow(unused_unsafe)]
        let features = unsafe { core::arch::x86_64::__cpuid(1) };
        features.ecx & SSE4_2 != 0
    }
    #[cfg(not(all(target_arch = "x86_64", target_feature = "sse4.2")))]
    true
}

/// Going on over this many bytes is `crc-fast`'s, 16 ns included.
const LONG: usize = 512;

/// The CRC32C of these bytes.
#[inline]
pub fn crc32c(bytes: &[u8]) -> u32 {
    crc_fast::crc32_iscsi(bytes)
}

/// The CRC32C of `a ‖ bytes` from `crc32c(a)`.
#[inline]
pub fn crc32c_append(crc: u32, bytes: &[u8]) -> u32 {
    // 0 is the checksum of nothing, and of whatever else has it: to go on from it is to begin.
    if crc == 0 {
        return crc32c(bytes);
    }
    if bytes.len() < LONG {
        return ::crc32c::crc32c_append(crc, bytes);
    }
    let mut digest = Digest::new_with_init_state(CrcAlgorithm::Crc32Iscsi, u64::from(!crc));
    digest.update(bytes);
    digest.finalize() as u32
}

/// Goes on over eight bytes, of which the lowest is the first, from and to a state that is inverted at neither end.
#[cfg(all(target_arch = "x86_64", target_feature = "sse4.2"))]
#[inline(always)]
fn step(state: u64, word: u64) -> u64 {
    // SAFETY: the build is for processors that have the instruction.
    unsafe { core::arch::x86_64::_mm_crc32_u64(state, word) }
}

/// The CRC32C of these words, the highest byte of each first, and then these bytes, without a call: for some hundred bytes at most.
#[cfg(all(target_arch = "x86_64", target_feature = "sse4.2"))]
#[inline(always)]
pub fn crc32c_of_words<const N: usize>(words: &[u64; N], bytes: &[u8]) -> u32 {
    let state = words
        .iter()
        .fold(u64::from(u32::MAX), |state, word| step(state, word.to_be()));
    let (more, rest) = bytes.as_chunks::<8>();
    let state = more
        .iter()
        .fold(state, |state, word| step(state, u64::from_le_bytes(*word)));
    let (half, rest) = rest.as_chunks::<4>();
    let state = half.iter().fold(state as u32, |state, word| {
        // SAFETY: as above.
        unsafe { core::arch::x86_64::_mm_crc32_u32(state, u32::from_le_bytes(*word)) }
    });
    let state = rest.iter().fold(state, |state, byte| {
        // SAFETY: as above.
        unsafe { core::arch::x86_64::_mm_crc32_u8(state, *byte) }
    });
    !state
}

/// The CRC32C of these words, the highest byte of each first, and then these bytes.
#[cfg(not(all(target_arch = "x86_64", target_feature = "sse4.2")))]
#[inline(always)]
pub fn crc32c_of_words<const N: usize>(words: &[u64; N], bytes: &[u8]) -> u32 {
    crc32c_append(crc32c(words.map(u64::to_be_bytes).as_flattened()), bytes)
}

/// The polynomial, reflected.
const POLYNOMIAL: u32 = 0x82f6_3b78;

/// `x⁰` in the reflected representation.
const ONE: u32 = 1 << 31;

/// `POWERS[byte][i]` is `x^(8 · i · 256^byte) mod P`.
static POWERS: [[u32; 256]; 4] = powers();

/// The CRC32C of `a ‖ b` from `crc32c(a)`, `crc32c(b)` and the length of `b`.
#[inline]
pub fn crc32c_combine(a: u32, b: u32, b_len: u32) -> u32 {
    let mut shifted = a;
    for (table, digit) in POWERS.iter().zip(b_len.to_le_bytes()) {
        if digit != 0 {
            shifted = multiply(table[usize::from(digit)], shifted);
        }
    }
    shifted ^ b
}

/// `x^n mod P`, reflected: the coefficient of `x^i` is bit `31 - i`.
pub const fn x_to_the(mut n: u32) -> u32 {
    let mut power = ONE;
    let mut square = ONE >> 1;
    while n > 0 {
        if n & 1 == 1 {
            power = multiply(power, square);
        }
        square = multiply(square, square);
        n >>= 1;
    }
    power
}

/// `a · b mod P`, both reflected.
const fn multiply(a: u32, b: u32) -> u32 {
    let mut product = 0;
    let mut shifted = b;
    let mut bit = 0;
    while bit < 32 {
        product ^= shifted & 0u32.wrapping_sub((a >> (31 - bit)) & 1);
        shifted = (shifted >> 1) ^ (POLYNOMIAL & 0u32.wrapping_sub(shifted & 1));
        bit += 1;
    }
    product
}

const fn powers() -> [[u32; 256]; 4] {
    let mut tables = [[0; 256]; 4];
    let mut step = x_to_the(8);
    let mut byte = 0;
    while byte < 4 {
        tables[byte][0] = ONE;
        let mut i = 1;
        while i < 256 {
            tables[byte][i] = multiply(tables[byte][i - 1], step);
            i += 1;
        }
        step = multiply(tables[byte][255], step);
        byte += 1;
    }
    tables
}

#[cfg(test)]
mod tests {
    extern crate std;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn crc_combines(a in prop::collection::vec(any::<u8>(), 0..3000), b in prop::collection::vec(any::<u8>(), 0..3000)) {
            let whole = crc32c(&[a.clone(), b.clone()].concat());
            prop_assert_eq!(crc32c_combine(crc32c(&a), crc32c(&b), b.len() as u32), whole);
        }

        // Every length there is in a frame, begun and gone on from, both of the ways that `crc32c_append` goes. Expect: what another
        // crate says.
        #[test]
        fn crc_goes_on(bytes in prop::collection::vec(any::<u8>(), 0..9100), cut: prop::sample::Index) {
            let whole = ::crc32c::crc32c(&bytes);
            prop_assert_eq!(crc32c(&bytes), whole);
            let (a, b) = bytes.split_at(cut.index(bytes.len() + 1));
            prop_assert_eq!(crc32c_append(crc32c(a), b), whole);
            prop_assert_eq!(crc32c_append(0, &bytes), whole);
        }

        // Against the crate's own slow combine, for lengths no test would allocate.
        #[test]
        fn crc_combines_any_length(a: u32, b: u32, len: u32) {
            prop_assert_eq!(crc32c_combine(a, b, len), ::crc32c::crc32c_combine(a, b, len as usize));
        }

        // Expect: the checksum of words and bytes is that of all the bytes, one after the other.
        #[test]
        fn words_and_bytes_are_bytes(words: [u64; 6], bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let all = [words.map(u64::to_be_bytes).as_flattened(), &bytes].concat();
            prop_assert_eq!(crc32c_of_words(&words, &bytes), crc32c(&all));
            prop_assert_eq!(crc32c_of_words(&[], &bytes), crc32c(&bytes));
        }
    }

    // Here. Expect: what the build is for, for else no test would have come so far.
    #[test]
    fn this_processor_is_supported() {
        assert!(is_supported());
    }

    // RFC 3720, B.4.
    #[test]
    fn the_examples_of_the_rfc() {
        for (byte, crc) in [(0, 0x8a91_36aa), (0xff, 0x62a8_ab43)] {
            assert_eq!(crc32c_of_words(&[], &[byte; 32]), crc);
            assert_eq!(crc32c(&[byte; 32]), crc);
        }
    }
}
