//! Copying a payload and computing its CRC32C, in one pass where the processor can. An `unsafe` island.
//!
//! One side of every payload is an arena that its application may change at any time, so the checksum must be of the bytes that were
//! copied. To compute it of the copy afterwards is slow: the stores wait for their lines, and the loads of the checksum for the stores. A
//! frame of 1,392 bytes out of a cold arena takes 270 ns so, and 135 in one pass (AMD EPYC; bursts of 32 frames to buffers 4 KiB apart,
//! half a megabyte of other memory read between bursts).
//!
//! Idea: with AVX-512 and its multiplication without carry, 64 bytes are loaded, stored and folded while they are in registers ("Fast CRC
//! Computation for Generic Polynomials Using PCLMULQDQ Instruction", Intel, 2009): as a polynomial, 16 bytes with `d` bits after them are
//! `first · x^(d+64) + second · x^d`, and both powers may be taken modulo the CRC's polynomial. Four registers are folded over each other
//! side by side, then into one, then into 16 bytes, of which the processor's own CRC instruction makes the rest. Of short payloads that
//! instruction (SSE 4.2) makes all: eight bytes in three cycles, one after the other, which is less than folding takes to begin and
//! end. Lengths in between, and other processors, copy first: nothing is to be gained, or nothing to gain it with.

use std::ptr::NonNull;

use portolan_transport::wire::crc::crc32c;

/// Copies out of memory that others may change meanwhile, in which case it is unspecified what is copied. The CRC32C of what was.
///
/// # Safety
/// As many bytes as `to` has can be read from `from`, and none of them is `to`'s.
#[inline]
pub(super) unsafe fn copy_out(from: NonNull<u8>, to: &mut [u8]) -> u32 {
    let (from, len) = (from.as_ptr().cast_const(), to.len());
    // SAFETY: the caller's promise; a slice can be written.
    match unsafe { one_pass::copy(from, to.as_mut_ptr(), len) } {
        Some(crc) => crc,
        None => {
            // SAFETY: as above.
            unsafe { std::ptr::copy_nonoverlapping(from, to.as_mut_ptr(), len) };
            crc32c(to)
        }
    }
}

/// Copies into memory that others may change meanwhile. The CRC32C of what was copied.
///
/// # Safety
/// As many bytes as `from` has can be written to `to`, and none of them is `from`'s.
#[inline]
pub(super) unsafe fn copy_in(from: &[u8], to: NonNull<u8>) -> u32 {
    // SAFETY: the caller's promise; a slice can be read.
    match unsafe { one_pass::copy(from.as_ptr(), to.as_ptr(), from.len()) } {
        Some(crc) => crc,
        None => {
            // SAFETY: as above.
            unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to.as_ptr(), from.len()) };
            crc32c(from)
        }
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod one_pass {
    /// # Safety
    /// None is needed: nothing is copied.
    pub unsafe fn copy(_from: *const u8, _to: *mut u8, _len: usize) -> Option<u32> {
        None
    }
}

#[cfg(target_arch = "x86_64")]
mod one_pass {
    use std::arch::is_x86_feature_detected as has;
    use std::arch::x86_64::*;

    use portolan_transport::wire::crc::x_to_the;

    /// Bytes of a register.
    const REGISTER: usize = 64;
    /// Bytes of four, which are folded side by side.
    const ROUND: usize = 4 * REGISTER;
    /// From this length on one pass is faster.
    const LONG: usize = ROUND;
    /// Up to this length as well, eight bytes at a time.
    const SHORT: usize = 128;

    /// What the two halves of 16 bytes are multiplied with to count `bits` later: the first in the low half, which is where it is loaded
    /// to. A product without carry of reflected halves is one power too high, hence the 1.
    const fn later(bits: u32) -> [u64; 2] {
        let (first, second) = (x_to_the(bits + 64 - 1), x_to_the(bits - 1));
        [(first as u64) << 32, (second as u64) << 32]
    }

    /// Copies and returns the CRC32C of what was copied; `None` if nothing was, as the processor lacks what it takes or it is too short.
    ///
    /// # Safety
    /// `len` bytes can be read from `from` and written to `to`, and do not overlap.
    #[inline(always)]
    pub unsafe fn copy(from: *const u8, to: *mut u8, len: usize) -> Option<u32> {
        if len <= SHORT {
            // SAFETY: the caller's promise; the processor was checked.
            return has!("sse4.2").then(|| unsafe { copy_short(from, to, len) });
        }
        let can = len >= LONG
            && has!("avx512f")
            && has!("avx512vl")
            && has!("vpclmulqdq")
            && has!("pclmulqdq")
            && has!("sse4.2");
        // SAFETY: the caller's promise; the length and the processor were checked.
        can.then(|| unsafe { copy_long(from, to, len) })
    }

    /// The same, of few bytes.
    ///
    /// # Safety
    /// As above, and the processor has this feature.
    #[inline]
    #[target_feature(enable = "sse4.2")]
    unsafe fn copy_short(from: *const u8, to: *mut u8, len: usize) -> u32 {
        // SAFETY: the caller's promise.
        !unsafe { copy_rest(!0, from, to, len) }
    }

    /// Copies and goes on from a checksum's inner state, eight bytes after the other.
    ///
    /// # Safety
    /// As above.
    #[inline]
    #[target_feature(enable = "sse4.2")]
    unsafe fn copy_rest(crc: u32, from: *const u8, to: *mut u8, len: usize) -> u32 {
        let (mut crc, mut at) = (u64::from(crc), 0);
        while at + 8 <= len {
            // SAFETY: what is moved ends at `len` at most.
            let word = unsafe { from.add(at).cast::<u64>().read_unaligned() };
            // SAFETY: as above.
            unsafe { to.add(at).cast::<u64>().write_unaligned(word) };
            crc = _mm_crc32_u64(crc, word);
            at += 8;
        }
        let mut crc = crc as u32;
        while at < len {
            // SAFETY: as above.
            let byte = unsafe { from.add(at).read() };
            // SAFETY: as above.
            unsafe { to.add(at).write(byte) };
            crc = _mm_crc32_u8(crc, byte);
            at += 1;
        }
        crc
    }

    /// The same, of at least [`LONG`] bytes.
    ///
    /// # Safety
    /// As above, and the processor has these features.
    #[target_feature(enable = "avx512f,avx512vl,vpclmulqdq,pclmulqdq,sse4.2")]
    unsafe fn copy_long(from: *const u8, to: *mut u8, len: usize) -> u32 {
        // SAFETY: what is moved ends at `len` at most; each use sees to that.
        let wide = |at: usize| unsafe {
            let bytes = _mm512_loadu_si512(from.add(at).cast());
            _mm512_storeu_si512(to.add(at).cast(), bytes);
            bytes
        };
        // SAFETY: as above.
        let narrow = |at: usize| unsafe {
            let bytes = _mm_loadu_si128(from.add(at).cast());
            _mm_storeu_si128(to.add(at).cast(), bytes);
            bytes
        };

        // A CRC begins with all ones, which are added to its first four bytes.
        let ones = _mm512_zextsi128_si512(_mm_cvtsi32_si128(-1));
        let mut a = _mm512_xor_si512(wide(0), ones);
        let (mut b, mut c, mut d) = (wide(64), wide(128), wide(192));
        let mut at = ROUND;
        let by = four_times(const { later(8 * ROUND as u32) });
        while at + ROUND <= len {
            a = fold_wide(a, by, wide(at));
            b = fold_wide(b, by, wide(at + 64));
            c = fold_wide(c, by, wide(at + 128));
            d = fold_wide(d, by, wide(at + 192));
            at += ROUND;
        }
        let by = four_times(const { later(8 * REGISTER as u32) });
        let mut rest = fold_wide(fold_wide(fold_wide(a, by, b), by, c), by, d);
        while at + REGISTER <= len {
            rest = fold_wide(rest, by, wide(at));
            at += REGISTER;
        }

        let by = once(const { later(128) });
        let mut last = _mm512_castsi512_si128(rest);
        last = fold_narrow(last, by, _mm512_extracti32x4_epi32::<1>(rest));
        last = fold_narrow(last, by, _mm512_extracti32x4_epi32::<2>(rest));
        last = fold_narrow(last, by, _mm512_extracti32x4_epi32::<3>(rest));
        while at + 16 <= len {
            last = fold_narrow(last, by, narrow(at));
            at += 16;
        }
        let mut crc = _mm_crc32_u64(0, _mm_cvtsi128_si64(last) as u64);
        crc = _mm_crc32_u64(crc, _mm_extract_epi64::<1>(last) as u64);
        // SAFETY: as above; `at` is within `len`.
        !unsafe { copy_rest(crc as u32, from.add(at), to.add(at), len - at) }
    }

    #[target_feature(enable = "avx512f")]
    fn four_times(halves: [u64; 2]) -> __m512i {
        _mm512_broadcast_i32x4(once(halves))
    }

    #[target_feature(enable = "sse2")]
    fn once([first, second]: [u64; 2]) -> __m128i {
        _mm_set_epi64x(second as i64, first as i64)
    }

    /// Each 16 bytes counted later, and what comes there added.
    #[target_feature(enable = "avx512f,vpclmulqdq")]
    fn fold_wide(bytes: __m512i, by: __m512i, next: __m512i) -> __m512i {
        let first = _mm512_clmulepi64_epi128::<0x00>(bytes, by);
        let second = _mm512_clmulepi64_epi128::<0x11>(bytes, by);
        _mm512_ternarylogic_epi64::<0x96>(first, second, next) // exclusive or of the three
    }

    #[target_feature(enable = "sse2,pclmulqdq")]
    fn fold_narrow(bytes: __m128i, by: __m128i, next: __m128i) -> __m128i {
        let first = _mm_clmulepi64_si128::<0x00>(bytes, by);
        let second = _mm_clmulepi64_si128::<0x11>(bytes, by);
        _mm_xor_si128(_mm_xor_si128(first, second), next)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every length there is a way for, at odd places on both sides, against the library's checksum; and nothing beside it is touched.
    #[test]
    fn copies_whole_and_checksums_what_it_copied() {
        const MOST: usize = 9_100;
        let from: Vec<u8> = (0..MOST + 3)
            .map(|at| (at * at / 7 + at * 31) as u8)
            .collect();
        let mut to = vec![0; MOST + 68];
        for len in (0..1_100).chain(1_380..1_420).chain(8_870..MOST) {
            let (from, skip) = (&from[len % 3..][..len], len % 67);
            for out in [true, false] {
                to[..skip + len + 1].fill(0xa5);
                let place = &mut to[skip..][..len];
                // SAFETY: slices of the same length, of two vectors.
                let crc = unsafe {
                    if out {
                        copy_out(NonNull::from(from).cast(), place)
                    } else {
                        copy_in(from, NonNull::from(place).cast())
                    }
                };
                assert_eq!(crc, crc32c(from), "checksum of {len} bytes");
                assert_eq!(&to[skip..][..len], from, "{len} bytes");
                assert!(
                    to[..skip]
                        .iter()
                        .chain(&to[skip + len..][..1])
                        .all(|byte| *byte == 0xa5)
                );
            }
        }
    }
}
