//! The program's own code and constants in memory. An `unsafe` island.
//!
//! They are pages of a file, mapped when they are first needed, 64 KiB at a time: a fault each, of one to several microseconds.

use rustix::mm::{Advice, madvise};

/// Bytes per call: a kernel that does not preempt keeps its core for the length of one.
const PIECE: usize = 256 << 10;
const PAGE: usize = 4096;

// By the linker: where the program begins, and where its code ends. Constants lie before or in it.
unsafe extern "C" {
    static __executable_start: u8;
    static etext: u8;
}

/// Has all of it mapped, for a process that must not wait for it later.
pub fn populate() {
    let (start, end) = (&raw const __executable_start, &raw const etext);
    let len = end
        .addr()
        .saturating_sub(start.addr())
        .next_multiple_of(PAGE);
    for from in (0..len).step_by(PIECE) {
        let piece = PIECE.min(len - from);
        // SAFETY: the advice changes no byte, and an address that is not mapped is an error.
        // An error (a hole between segments; a kernel before 5.14) leaves pages to come when they are touched, as ever.
        let _ = unsafe {
            let at = start.wrapping_add(from).cast_mut().cast();
            madvise(at, piece, Advice::LinuxPopulateRead)
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Touching what was populated takes no more faults. Expect: of a program's pages most were not there before, and none is missing afterwards.
    #[test]
    fn code_is_there_before_it_is_needed() {
        let faults = || {
            let text = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
            let after_name = &text[text.rfind(')').unwrap()..];
            after_name
                .split_whitespace()
                .nth(8)
                .unwrap()
                .parse::<u64>()
                .unwrap()
        };
        populate();
        let (start, end) = (&raw const __executable_start, &raw const etext);
        let before = faults();
        let mut sum = 0u64;
        for at in (0..end.addr() - start.addr()).step_by(PAGE) {
            // SAFETY: the program's own bytes, which nobody writes.
            sum += u64::from(unsafe { start.add(at).read_volatile() });
        }
        let taken = faults() - before;
        let pages = (end.addr() - start.addr()) / PAGE;
        assert!(
            sum > 0 && taken < pages as u64 / 100,
            "{taken} faults for {pages} pages"
        );
    }
}
