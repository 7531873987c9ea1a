//! CRC32C (Castagnoli, RFC 3720 appendix B.4), and joining the checksums of two pieces.
//!
//! A payload may straddle receive buffers and is checked while it is copied piece by piece (wire.md §5), so the checksums of the
//! pieces are joined afterwards. The `crc32c` crate's combine squares 32×32 matrices for every bit of the length (zlib's old
//! method, microseconds); here `x^(8·len) mod P` comes out of a table per byte of the length and costs one multiplication each.

pub use ::crc32c::{crc32c, crc32c_append};

/// The polynomial, reflected.
const POLYNOMIAL: u32 = 0x82f6_3b78;

/// `x⁰` in the reflected representation.
const ONE: u32 = 1 << 31;

/// `POWERS[byte][i]` is `x^(8 · i · 256^byte) mod P`.
static POWERS: [[u32; 256]; 4] = powers();

/// The CRC32C of `a ‖ b` from `crc32c(a)`, `crc32c(b)` and the length of `b`.
pub fn crc32c_combine(a: u32, b: u32, b_len: u32) -> u32 {
    let mut shifted = a;
    for (table, digit) in POWERS.iter().zip(b_len.to_le_bytes()) {
        if digit != 0 {
            shifted = multiply(table[usize::from(digit)], shifted);
        }
    }
    shifted ^ b
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
    let mut step = ONE >> 8; // x⁸
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
