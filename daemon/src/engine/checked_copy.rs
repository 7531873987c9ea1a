//! Copying a payload and computing its CRC32C, in one pass where the processor can. An `unsafe` island.
//!
//! One side of every payload is an arena that its application may change at any time, so the checksum must be of the bytes that were
//! copied. To compute it of the copy afterwards is slow: the stores wait for their lines, and the loads of the checksum for the stores.
//! Out of a cold arena, in bursts of 32 frames to buffers 4 KiB apart, half a megabyte of other memory read between bursts, ns:
//!
//! | bytes | copied, then `crc32c` | one pass, registers of 16 | 32 | 64 | processor |
//! |---:|---:|---:|---:|---:|---|
//! | 1,392 | 270 | | | 135 | EPYC with AVX-512 |
//! | 1,392 | 196 | 135 | 102 | | EPYC, Zen 3, which has no AVX-512 |
//! | 3,394 | 455 | 305 | 192 | | the same |
//! | 8,896 | 1,576 | 1,075 | 737 | | the same |
//!
//! Idea: with multiplication without carry, bytes are loaded, stored and folded while they are in registers ("Fast CRC Computation for
//! Generic Polynomials Using PCLMULQDQ Instruction", Intel, 2009): as a polynomial, 16 bytes with `d` bits after them are
//! `first · x^(d+64) + second · x^d`, and both powers may be taken modulo the CRC's polynomial. Four registers are folded over each other
//! side by side, then into one, then into 16 bytes, of which the processor's own CRC instruction makes the rest. Registers are as wide as
//! the processor multiplies: 64 bytes with AVX-512, 32 with AVX2 and VPCLMULQDQ, else 16. Of short payloads the CRC instruction (SSE 4.2)
//! makes all: eight bytes in three cycles, one after the other, which is less than folding takes to begin and end. Processors without
//! any of that copy first.

use std::ptr::NonNull;

use portolan_crc::crc32c;

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

/// [`copy_out`] without the checksum: of several payloads that get one together, once they are ours.
///
/// # Safety
/// As [`copy_out`].
#[inline]
pub(super) unsafe fn plain_out(from: NonNull<u8>, to: &mut [u8]) {
    // SAFETY: the caller's promise; a slice can be written.
    unsafe { plain(from.as_ptr().cast_const(), to.as_mut_ptr(), to.len()) }
}

/// [`copy_in`] without the checksum: of a payload that was checked.
///
/// # Safety
/// As [`copy_in`].
#[inline]
pub(super) unsafe fn plain_in(from: &[u8], to: NonNull<u8>) {
    // SAFETY: the caller's promise; a slice can be read.
    unsafe { plain(from.as_ptr(), to.as_ptr(), from.len()) }
}

/// Copies. Few bytes without a call: the first so many and the last so many, which may be partly the same.
///
/// # Safety
/// `len` bytes can be read from `from` and written to `to`, and do not overlap.
#[inline(always)]
unsafe fn plain(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: the caller's promise; each arm's constant is at most the lengths it is for.
    unsafe {
        match len {
            0 => {}
            1 => ends::<1>(from, to, len),
            2..=4 => ends::<2>(from, to, len),
            5..=8 => ends::<4>(from, to, len),
            9..=16 => ends::<8>(from, to, len),
            17..=32 => ends::<16>(from, to, len),
            33..=64 => ends::<32>(from, to, len),
            65..=128 => ends::<64>(from, to, len),
            _ => std::ptr::copy_nonoverlapping(from, to, len),
        }
    }
}

/// Copies the first and the last `N` bytes: all, if there are at most twice as many.
///
/// # Safety
/// As above, and `N` is not more than `len`.
#[inline(always)]
unsafe fn ends<const N: usize>(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: both ends are within `len`, by the caller's promise.
    unsafe {
        std::ptr::copy_nonoverlapping(from, to, N);
        std::ptr::copy_nonoverlapping(from.add(len - N), to.add(len - N), N);
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod one_pass {
    #[cfg(test)]
    pub fn widths() -> [(&'static str, usize, super::tests::Copier); 0] {
        []
    }

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

    use portolan_crc::x_to_the;

    /// Up to this length eight bytes at a time.
    const SHORT: usize = 128;

    /// What the two halves of 16 bytes are multiplied with to count `bits` later: the first in the low half, which is where it is loaded
    /// to. A product without carry of reflected halves is one power too high, hence the 1.
    const fn later(bits: u32) -> [u64; 2] {
        let (first, second) = (x_to_the(bits + 64 - 1), x_to_the(bits - 1));
        [(first as u64) << 32, (second as u64) << 32]
    }

    /// Copies and returns the CRC32C of what was copied; `None` if nothing was, as the processor lacks what it takes.
    ///
    /// # Safety
    /// `len` bytes can be read from `from` and written to `to`, and do not overlap.
    #[inline(always)]
    pub unsafe fn copy(from: *const u8, to: *mut u8, len: usize) -> Option<u32> {
        if !has!("sse4.2") {
            return None;
        }
        if len <= SHORT {
            // SAFETY: the caller's promise; the processor was checked.
            return Some(unsafe { copy_short(from, to, len) });
        }
        if !has!("pclmulqdq") {
            return None;
        }
        let wide = has!("vpclmulqdq");
        // SAFETY: the caller's promise; the lengths and the processor were checked.
        Some(unsafe {
            if wide && len >= zmm::LEAST && has!("avx512f") && has!("avx512vl") {
                zmm::copy(from, to, len)
            } else if wide && has!("avx2") {
                ymm::copy(from, to, len)
            } else {
                xmm::copy(from, to, len)
            }
        })
    }

    // What registers of any width have to have at least.
    const _: () = assert!(xmm::LEAST <= SHORT && ymm::LEAST <= SHORT);

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

    /// Copying with registers of one width: a module with what the width needs, and `copy`.
    macro_rules! width {
        ($name:ident, $features:literal, $($register:item)+) => {
            mod $name {
                use std::arch::x86_64::*;

                use super::{copy_rest, fold_16, later, once};

                /// Bytes of a register.
                const REGISTER: usize = size_of::<Register>();
                /// Bytes of four, which are folded side by side.
                const ROUND: usize = 4 * REGISTER;
                /// The shortest payload that can be copied so.
                pub const LEAST: usize = ROUND;

                $($register)+

                /// Copies and returns the CRC32C of what was copied.
                ///
                /// # Safety
                /// As above, of at least [`LEAST`] bytes, and the processor has these features.
                #[target_feature(enable = $features)]
                pub unsafe fn copy(from: *const u8, to: *mut u8, len: usize) -> u32 {
                    // SAFETY: what is moved ends at `len` at most; each use sees to that.
                    let register = |at: usize| unsafe {
                        let bytes = from.add(at).cast::<Register>().read_unaligned();
                        to.add(at).cast::<Register>().write_unaligned(bytes);
                        bytes
                    };

                    let mut a = begun(register(0));
                    let (mut b, mut c, mut d) =
                        (register(REGISTER), register(2 * REGISTER), register(3 * REGISTER));
                    let mut at = ROUND;
                    let by = each(const { later(8 * ROUND as u32) });
                    while at + ROUND <= len {
                        a = fold(a, by, register(at));
                        b = fold(b, by, register(at + REGISTER));
                        c = fold(c, by, register(at + 2 * REGISTER));
                        d = fold(d, by, register(at + 3 * REGISTER));
                        at += ROUND;
                    }
                    let by = each(const { later(8 * REGISTER as u32) });
                    let mut rest = fold(fold(fold(a, by, b), by, c), by, d);
                    while at + REGISTER <= len {
                        rest = fold(rest, by, register(at));
                        at += REGISTER;
                    }

                    let mut last = to_16(rest);
                    while at + 16 <= len {
                        // SAFETY: as above.
                        let bytes = unsafe {
                            let bytes = _mm_loadu_si128(from.add(at).cast());
                            _mm_storeu_si128(to.add(at).cast(), bytes);
                            bytes
                        };
                        last = fold_16(last, once(const { later(128) }), bytes);
                        at += 16;
                    }
                    let mut crc = _mm_crc32_u64(0, _mm_cvtsi128_si64(last) as u64);
                    crc = _mm_crc32_u64(crc, _mm_extract_epi64::<1>(last) as u64);
                    // SAFETY: as above; `at` is within `len`.
                    !unsafe { copy_rest(crc as u32, from.add(at), to.add(at), len - at) }
                }
            }
        };
    }

    width! { zmm, "avx512f,avx512vl,vpclmulqdq,pclmulqdq,sse4.2",
        type Register = __m512i;

        /// A CRC begins with all ones, which are added to its first four bytes.
        #[target_feature(enable = "avx512f")]
        fn begun(bytes: Register) -> Register {
            _mm512_xor_si512(bytes, _mm512_zextsi128_si512(_mm_cvtsi32_si128(-1)))
        }

        #[target_feature(enable = "avx512f")]
        fn each(halves: [u64; 2]) -> Register {
            _mm512_broadcast_i32x4(once(halves))
        }

        /// Each 16 bytes counted later, and what comes there added.
        #[target_feature(enable = "avx512f,vpclmulqdq")]
        fn fold(bytes: Register, by: Register, next: Register) -> Register {
            let first = _mm512_clmulepi64_epi128::<0x00>(bytes, by);
            let second = _mm512_clmulepi64_epi128::<0x11>(bytes, by);
            _mm512_ternarylogic_epi64::<0x96>(first, second, next) // exclusive or of the three
        }

        #[target_feature(enable = "avx512f,pclmulqdq")]
        fn to_16(bytes: Register) -> __m128i {
            let by = once(const { later(128) });
            let mut last = _mm512_castsi512_si128(bytes);
            last = fold_16(last, by, _mm512_extracti32x4_epi32::<1>(bytes));
            last = fold_16(last, by, _mm512_extracti32x4_epi32::<2>(bytes));
            fold_16(last, by, _mm512_extracti32x4_epi32::<3>(bytes))
        }
    }

    width! { ymm, "avx2,vpclmulqdq,pclmulqdq,sse4.2",
        type Register = __m256i;

        #[target_feature(enable = "avx2")]
        fn begun(bytes: Register) -> Register {
            _mm256_xor_si256(bytes, _mm256_zextsi128_si256(_mm_cvtsi32_si128(-1)))
        }

        #[target_feature(enable = "avx2")]
        fn each(halves: [u64; 2]) -> Register {
            _mm256_broadcastsi128_si256(once(halves))
        }

        #[target_feature(enable = "avx2,vpclmulqdq")]
        fn fold(bytes: Register, by: Register, next: Register) -> Register {
            let first = _mm256_clmulepi64_epi128::<0x00>(bytes, by);
            let second = _mm256_clmulepi64_epi128::<0x11>(bytes, by);
            _mm256_xor_si256(_mm256_xor_si256(first, next), second)
        }

        #[target_feature(enable = "avx2,pclmulqdq")]
        fn to_16(bytes: Register) -> __m128i {
            let by = once(const { later(128) });
            fold_16(_mm256_castsi256_si128(bytes), by, _mm256_extracti128_si256::<1>(bytes))
        }
    }

    width! { xmm, "pclmulqdq,sse4.2",
        type Register = __m128i;

        #[target_feature(enable = "sse2")]
        fn begun(bytes: Register) -> Register {
            _mm_xor_si128(bytes, _mm_cvtsi32_si128(-1))
        }

        #[target_feature(enable = "sse2")]
        fn each(halves: [u64; 2]) -> Register {
            once(halves)
        }

        #[target_feature(enable = "sse2,pclmulqdq")]
        fn fold(bytes: Register, by: Register, next: Register) -> Register {
            fold_16(bytes, by, next)
        }

        #[target_feature(enable = "sse2")]
        fn to_16(bytes: Register) -> __m128i {
            bytes
        }
    }

    #[target_feature(enable = "sse2")]
    fn once([first, second]: [u64; 2]) -> __m128i {
        _mm_set_epi64x(second as i64, first as i64)
    }

    /// 16 bytes counted later, and what comes there added.
    #[target_feature(enable = "sse2,pclmulqdq")]
    fn fold_16(bytes: __m128i, by: __m128i, next: __m128i) -> __m128i {
        let first = _mm_clmulepi64_si128::<0x00>(bytes, by);
        let second = _mm_clmulepi64_si128::<0x11>(bytes, by);
        _mm_xor_si128(_mm_xor_si128(first, next), second)
    }

    /// Each width this processor has, by name.
    #[cfg(test)]
    pub fn widths() -> Vec<(&'static str, usize, super::tests::Copier)> {
        let mut all: Vec<(&str, usize, super::tests::Copier)> = Vec::new();
        if has!("pclmulqdq") && has!("sse4.2") {
            all.push(("16", xmm::LEAST, xmm::copy));
            if has!("vpclmulqdq") && has!("avx2") {
                all.push(("32", ymm::LEAST, ymm::copy));
            }
            if has!("vpclmulqdq") && has!("avx512f") && has!("avx512vl") {
                all.push(("64", zmm::LEAST, zmm::copy));
            }
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    pub type Copier = unsafe fn(*const u8, *mut u8, usize) -> u32;

    /// Every short length and some longer ones, at odd places on both sides. Expect: all is copied, and nothing beside it is touched.
    #[test]
    fn copies_whole_without_a_checksum() {
        let from: Vec<u8> = (0..1_003).map(|at| (at * at / 7 + at * 31) as u8).collect();
        let mut to = [0; 1_100];
        for len in (0..300).chain(900..1_000) {
            let (from, skip) = (&from[len % 3..][..len], 1 + len % 67);
            let mut check = |how: &str, copy: &dyn Fn(&mut [u8])| {
                to[..skip + len + 1].fill(0xa5);
                copy(&mut to[skip..][..len]);
                assert_eq!(&to[skip..][..len], from, "{len} bytes, {how}");
                let mut beside = to[..skip].iter().chain(&to[skip + len..][..1]);
                assert!(beside.all(|byte| *byte == 0xa5), "{len} bytes, {how}");
            };
            check("out", &|to| {
                // SAFETY: slices of the same length, of a vector and an array.
                unsafe { plain_out(NonNull::from(from).cast(), to) }
            });
            check("in", &|to| {
                // SAFETY: as above.
                unsafe { plain_in(from, NonNull::from(to).cast()) }
            });
        }
    }

    /// Every length there is a way for, at odd places on both sides, with every width this processor has, against the library's checksum; and
    /// nothing beside it is touched.
    #[test]
    fn copies_whole_and_checksums_what_it_copied() {
        const MOST: usize = 9_100;
        let from: Vec<u8> = (0..MOST + 3)
            .map(|at| (at * at / 7 + at * 31) as u8)
            .collect();
        let mut to = vec![0; MOST + 68];
        for len in (0..1_100).chain(1_380..1_420).chain(8_870..MOST) {
            let (from, skip) = (&from[len % 3..][..len], len % 67);
            let mut check = |how: &str, copy: &dyn Fn(&mut [u8]) -> u32| {
                to[..skip + len + 1].fill(0xa5);
                let crc = copy(&mut to[skip..][..len]);
                assert_eq!(crc, crc32c(from), "checksum of {len} bytes, {how}");
                assert_eq!(&to[skip..][..len], from, "{len} bytes, {how}");
                let mut beside = to[..skip].iter().chain(&to[skip + len..][..1]);
                assert!(beside.all(|byte| *byte == 0xa5), "{len} bytes, {how}");
            };
            check("out", &|to| {
                // SAFETY: slices of the same length, of two vectors.
                unsafe { copy_out(NonNull::from(from).cast(), to) }
            });
            check("in", &|to| {
                // SAFETY: as above.
                unsafe { copy_in(from, NonNull::from(to).cast()) }
            });
            for (width, least, copy) in one_pass::widths() {
                if len >= least {
                    check(width, &|to| {
                        // SAFETY: as above, and long enough.
                        unsafe { copy(from.as_ptr(), to.as_mut_ptr(), len) }
                    });
                }
            }
        }
    }
}
