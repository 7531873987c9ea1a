//! What a takeover would do for the first time, done before.
//!
//! A page touched for the first time costs a fault, a quarter to half a microsecond; a takeover reads the tables of the ledger from end to end and
//! runs code that a standby never ran. So the standby has the kernel map both ahead (`MADV_POPULATE_READ`, which changes
//! nothing), as far as they would be touched by any engine: the rest of a ledger stays unbacked.
//!
//! And the first checksum of a process asks the processor what it can, which a virtual machine's monitor answers: 50 us (measured on
//! KVM).

use std::sync::atomic::Ordering;

use portolan_abi::ledger::Ledger;
use portolan_transport::wire::crc::{crc32c, crc32c_append};

/// Touches what a takeover reads of the ledger, and computes a checksum each way.
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
}
