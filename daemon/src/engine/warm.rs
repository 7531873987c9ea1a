//! What a takeover would do for the first time, done before. An `unsafe` island.
//!
//! A page touched for the first time costs a fault. A takeover that finds nothing prepared takes some fifty of them, half of its time
//! (270 us, and 130 without them, on a virtual machine). So a standby touches what a takeover will:
//!
//! - the ledger, as far as any engine reads it; the rest stays unbacked ([`up`]);
//! - rings and slots of each port, and the ledger's records of its tokens ([`port`]); not the arenas, which are the applications' and large;
//! - its own code and constants: a standby has never run what serves;
//! - memory for the tables that are made at the takeover. The allocator is told not to give it back.
//!
//! All of it is read, or is the process's own: nothing that others see changes.
//!
//! And the first checksum of a process asks the processor what it can, which a virtual machine's monitor answers: 50 us (measured on
//! KVM).

use std::sync::atomic::Ordering;

use portolan_abi::ledger::Ledger;
use portolan_crc::{crc32c, crc32c_append};

use super::ports::Port;
use crate::image;

/// The tables of a takeover of six ports touch some 25 pages; many ports and peers need more.
const HEAP_BYTES: usize = 512 << 10;
const PAGE: usize = 4096;

/// Touches what a takeover needs whatever the ports, and computes a checksum each way.
pub(super) fn up(ledger: Ledger<'_>) {
    let mut sum = 0u64;
    let peers = ledger.peers().iter().map(|record| &record.key);
    let sending = ledger.send_streams().iter().map(|record| &record.key);
    let receiving = ledger.receive_streams().iter().map(|record| &record.key);
    let ports = ledger.ports().iter().map(|record| &record.life);
    for word in peers
        .chain(sending)
        .chain(receiving)
        .chain(ports)
        .chain(ledger.frames())
    {
        sum = sum.wrapping_add(word.load(Ordering::Relaxed));
    }
    let crc = crc32c_append(crc32c(&sum.to_ne_bytes()), &[1]);
    std::hint::black_box((sum, crc));
    image::populate();
    heap();
}

/// Touches what serving a port needs.
pub(super) fn port(ledger: Ledger<'_>, port: &Port) {
    let sends = ledger.sends(port.number()).iter();
    let receives = ledger.receives(port.number()).iter();
    let mut sum = port.touch();
    for word in sends.map(|fact| &fact.tag).chain(receives) {
        sum = sum.wrapping_add(word.load(Ordering::Relaxed));
    }
    std::hint::black_box(sum);
}

/// Has memory ready for what will be allocated.
fn heap() {
    let bytes = HEAP_BYTES as libc::c_int;
    // SAFETY: these set numbers of the allocator's. If it refuses, memory comes page by page, as ever.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, bytes.saturating_mul(2));
        libc::mallopt(libc::M_TRIM_THRESHOLD, bytes.saturating_mul(4));
    }
    let mut block: Vec<u8> = Vec::with_capacity(HEAP_BYTES);
    for page in block.spare_capacity_mut().chunks_mut(PAGE) {
        if let Some(byte) = page.first_mut() {
            byte.write(0);
        }
    }
    std::hint::black_box(&mut block);
}
