//! The owner and the kernel, move by move.

use rustix::io::Errno;

use super::super::crash_point::with_hook;
use super::super::fake::{FakeDoorbell, FakeSocket, KernelOp, read_stamp, stamp_frame};
use super::super::layout::{CHUNK_SIZE, UmemLayout};
use super::super::ownership::Record;
use super::super::ring::{CONTINUED, Descriptor};
use super::super::{KickOutcome, RxOutcome, Xsk, XskError};

const CHUNK: u64 = CHUNK_SIZE as u64;

fn socket() -> FakeSocket {
    FakeSocket::new(UmemLayout::new(8, 4, 9014).unwrap(), 0)
}

fn deliver(socket: &FakeSocket, segments: usize) {
    deliver_halfway(socket, segments);
    socket.kernel.borrow_mut().act(KernelOp::ReleaseFill);
}

/// The kernel has not said yet what it took from the fill ring for it.
fn deliver_halfway(socket: &FakeSocket, segments: usize) {
    socket.kernel.borrow_mut().act(KernelOp::Deliver {
        segments,
        at_once: true,
    });
}

/// The driver takes everything from the fill ring, so that there is room.
fn take_fill(socket: &FakeSocket) {
    for _ in 0..8 {
        socket.kernel.borrow_mut().act(KernelOp::TakeFill);
    }
    socket.kernel.borrow_mut().act(KernelOp::ReleaseFill);
}

fn send(xsk: &mut Xsk<'_, FakeDoorbell>, stamp: u64, len: usize) {
    let slot = xsk.tx_slot().unwrap();
    stamp_frame(&mut xsk.tx_buffer(&slot)[..len], stamp);
    xsk.submit(slot, len);
}

fn complete_all(socket: &FakeSocket) {
    for _ in 0..16 {
        socket
            .kernel
            .borrow_mut()
            .act(KernelOp::Complete { newest: false });
    }
}

#[test]
fn a_fresh_table_gives_every_receive_chunk_to_the_kernel() {
    let socket = socket();
    let xsk = socket.adopt().unwrap();
    assert_eq!(xsk.adopted().rx_ours, 8);
    assert_eq!(xsk.adopted().tx_slots_free, 4);
    assert_eq!(socket.kernel.borrow().fill.entries().len(), 8);
    xsk.check_consistency().unwrap();
}

#[test]
fn jumbo_frames_arrive_as_segments_and_leave_as_descriptors() {
    let socket = socket();
    let mut xsk = socket.adopt().unwrap();

    // Three segments arrive. Expect: one frame of three slices, chunks refilled.
    deliver(&socket, 3);
    let outcome = xsk.receive(10, |segments| {
        assert_eq!(
            segments.iter().map(|s| s.len()).collect::<Vec<_>>(),
            [3840, 3840, 60]
        );
        assert_eq!(read_stamp(&segments.concat()), 0);
    });
    assert_eq!(
        outcome,
        RxOutcome {
            frames: 1,
            dropped: 0,
            more: false
        }
    );

    // 9014 bytes are sent. Expect: three descriptors, all but the last continued,
    // published by flush and not before.
    send(&mut xsk, 7, 9014);
    assert!(socket.kernel.borrow().tx.entries().is_empty());
    assert_eq!(xsk.tx_outstanding(), 3);
    socket.kernel.borrow_mut().answers.push_back(Errno::NOBUFS);
    assert_eq!(xsk.flush(), KickOutcome::NoBuffers);
    let entries = socket.kernel.borrow().tx.entries();
    let shape: Vec<_> = entries.iter().map(|e| (e.len, e.options)).collect();
    assert_eq!(shape, [(4096, CONTINUED), (4096, CONTINUED), (822, 0)]);

    assert_eq!(xsk.flush(), KickOutcome::Sent);
    assert_eq!(socket.kernel.borrow().sent, [(7, 9014)]);
    complete_all(&socket);
    assert_eq!(xsk.reap(), 3);
    assert_eq!(xsk.tx_outstanding(), 0);
    xsk.check_consistency().unwrap();
}

#[test]
fn frames_that_are_not_whole_wait_and_those_too_long_are_dropped() {
    let socket = socket();
    let mut xsk = socket.adopt().unwrap();
    take_fill(&socket);
    let piece = |chunk: u64, options| Descriptor {
        addr: chunk * CHUNK + 256,
        len: 100,
        options,
    };

    // Two of three segments. Expect: nothing is received, nothing released.
    socket
        .kernel
        .borrow()
        .rx
        .push(&[piece(0, CONTINUED), piece(1, CONTINUED)]);
    let outcome = xsk.receive(10, |_| unreachable!());
    assert_eq!(
        outcome,
        RxOutcome {
            frames: 0,
            dropped: 0,
            more: false
        }
    );
    assert_eq!(socket.kernel.borrow().rx.entries().len(), 2);

    // The third comes. Expect: the frame.
    socket.kernel.borrow().rx.push(&[piece(2, 0)]);
    let outcome = xsk.receive(10, |segments| assert_eq!(segments.len(), 3));
    assert_eq!(outcome.frames, 1);

    // A frame of five segments, then a good one. Expect: dropped, received.
    let five = [3, 4, 5, 6].map(|chunk| piece(chunk, CONTINUED));
    socket.kernel.borrow().rx.push(&five);
    socket.kernel.borrow().rx.push(&[piece(7, 0), piece(0, 0)]);
    let outcome = xsk.receive(10, |segments| assert_eq!(segments.len(), 1));
    assert_eq!(
        outcome,
        RxOutcome {
            frames: 1,
            dropped: 1,
            more: false
        }
    );
    assert_eq!(xsk.counters().rx_too_many_segments, 1);
    assert_eq!(xsk.counters().rx_bogus_descriptors, 0);
}

#[test]
fn a_frame_as_large_as_the_ring_is_skipped_without_waiting() {
    let socket = socket();
    let mut xsk = socket.adopt().unwrap();
    take_fill(&socket);
    let piece = |chunk: u64, options| Descriptor {
        addr: chunk * CHUNK + 256,
        len: 100,
        options,
    };
    let all: Vec<_> = (0..8).map(|chunk| piece(chunk, CONTINUED)).collect();
    socket.kernel.borrow().rx.push(&all);
    assert_eq!(xsk.receive(10, |_| unreachable!()).frames, 0);
    assert!(socket.kernel.borrow().rx.entries().is_empty());
    // Its end, and a frame of its own behind it.
    socket.kernel.borrow().rx.push(&[piece(0, 0), piece(1, 0)]);
    assert_eq!(
        xsk.receive(10, |_| {}),
        RxOutcome {
            frames: 1,
            dropped: 1,
            more: false
        }
    );
}

#[test]
fn the_budget_limits_frames_and_says_that_there_are_more() {
    let socket = socket();
    let mut xsk = socket.adopt().unwrap();
    for _ in 0..5 {
        deliver(&socket, 1);
    }
    assert_eq!(
        xsk.receive(2, |_| {}),
        RxOutcome {
            frames: 2,
            dropped: 0,
            more: true
        }
    );
    assert_eq!(
        xsk.receive(0, |_| {}),
        RxOutcome {
            frames: 0,
            dropped: 0,
            more: true
        }
    );
    assert_eq!(
        xsk.receive(3, |_| {}),
        RxOutcome {
            frames: 3,
            dropped: 0,
            more: false
        }
    );
    assert_eq!(xsk.counters().rx_frames, 5);
}

#[test]
fn bogus_receive_descriptors_are_counted_and_never_trusted() {
    let socket = socket();
    let mut xsk = socket.adopt().unwrap();
    let bogus = [
        // Outside the UMEM; a transmit chunk; over the chunk's end; empty.
        Descriptor {
            addr: u64::MAX,
            len: 100,
            options: 0,
        },
        Descriptor {
            addr: 9 * CHUNK,
            len: 100,
            options: 0,
        },
        Descriptor {
            addr: 256,
            len: 4000,
            options: 0,
        },
        Descriptor {
            addr: 256,
            len: 0,
            options: 0,
        },
    ];
    socket.kernel.borrow().rx.push(&bogus);
    let outcome = xsk.receive(10, |_| unreachable!());
    assert_eq!(
        outcome,
        RxOutcome {
            frames: 0,
            dropped: 4,
            more: false
        }
    );
    assert_eq!(xsk.counters().rx_bogus_descriptors, 4);

    // The same chunk twice in one frame. Expect: taken once.
    let twice = Descriptor {
        addr: 256,
        len: 100,
        options: CONTINUED,
    };
    socket.kernel.borrow().rx.push(&[
        twice,
        Descriptor {
            options: 0,
            ..twice
        },
    ]);
    assert_eq!(xsk.receive(10, |_| unreachable!()).dropped, 1);
    assert_eq!(xsk.counters().rx_bogus_descriptors, 5);
    assert_eq!(xsk.counters().rx_bad_frames, 5);
}

#[test]
fn bogus_completions_are_counted_and_never_trusted() {
    let socket = socket();
    let mut xsk = socket.adopt().unwrap();
    send(&mut xsk, 1, 60);
    let slot_addr = socket.kernel.borrow().tx.memory().read(0).addr;

    // Completed before it was published; a receive chunk; not a chunk's start;
    // a chunk at rest; outside. Expect: nothing is taken back.
    let idle = if slot_addr == 8 * CHUNK {
        11 * CHUNK
    } else {
        8 * CHUNK
    };
    socket
        .kernel
        .borrow()
        .completion
        .push(&[slot_addr, 0, slot_addr + 1, idle, u64::MAX]);
    assert_eq!(xsk.reap(), 5);
    assert_eq!(xsk.counters().tx_bogus_completions, 5);
    assert_eq!(xsk.tx_outstanding(), 1);

    // Completed twice. Expect: taken back once.
    xsk.flush();
    complete_all(&socket);
    socket.kernel.borrow().completion.push(&[slot_addr]);
    xsk.reap();
    assert_eq!(xsk.counters().tx_completions, 1);
    assert_eq!(xsk.counters().tx_bogus_completions, 6);
    xsk.check_consistency().unwrap();
}

#[test]
fn slots_come_back_by_completion_or_unused() {
    let socket = socket();
    let mut xsk = socket.adopt().unwrap();
    let slots: Vec<_> = std::iter::from_fn(|| xsk.tx_slot()).collect();
    assert_eq!(slots.len(), 4);
    xsk.check_consistency().unwrap();
    for slot in slots {
        assert_eq!(xsk.tx_buffer(&slot).len(), 9014);
        xsk.abandon(slot);
    }
    // Lengths no frame has. Expect: counted, the slot free again.
    for len in [0, 9015, usize::MAX] {
        let slot = xsk.tx_slot().unwrap();
        xsk.submit(slot, len);
    }
    assert_eq!(xsk.counters().tx_bad_lengths, 3);
    assert_eq!(xsk.tx_outstanding(), 0);
    assert_eq!(xsk.flush(), KickOutcome::Idle);
    assert_eq!(socket.kernel.borrow().kicks, 0);
    xsk.check_consistency().unwrap();
}

#[test]
fn each_answer_to_a_kick_is_acted_upon() {
    let kicked = |answers: &[Errno]| {
        let socket = socket();
        let mut xsk = socket.adopt().unwrap();
        send(&mut xsk, 1, 60);
        socket.kernel.borrow_mut().answers.extend(answers);
        let outcome = xsk.flush();
        let kicks = socket.kernel.borrow().kicks;
        let again = xsk.flush();
        (outcome, kicks, again, *xsk.counters())
    };
    // EAGAIN: drained and kicked again, a bounded number of times.
    let (outcome, kicks, _, counters) = kicked(&[Errno::AGAIN, Errno::AGAIN]);
    assert_eq!(
        (outcome, kicks, counters.kick_eagain),
        (KickOutcome::Sent, 3, 2)
    );
    let (outcome, kicks, again, _) = kicked(&[Errno::AGAIN; 8]);
    assert_eq!(
        (outcome, kicks, again),
        (KickOutcome::Pending, 8, KickOutcome::Sent)
    );
    // EBUSY: one frame lost and counted, and no more until the next flush.
    let (outcome, kicks, _, counters) = kicked(&[Errno::BUSY]);
    assert_eq!(
        (outcome, kicks, counters.kick_ebusy),
        (KickOutcome::Full, 1, 1)
    );
    // Later, and when the link is up: the frame is still there.
    let (outcome, _, again, counters) = kicked(&[Errno::NOBUFS]);
    assert_eq!(
        (outcome, again, counters.kick_enobufs),
        (KickOutcome::NoBuffers, KickOutcome::Sent, 1)
    );
    let (outcome, _, again, counters) = kicked(&[Errno::NETDOWN]);
    assert_eq!((outcome, again), (KickOutcome::LinkDown, KickOutcome::Sent));
    assert_eq!(counters.kick_enetdown, 1);
    // The end of the socket: no further system call.
    let (outcome, _, again, counters) = kicked(&[Errno::NXIO]);
    assert_eq!(
        (outcome, again, counters.kicks),
        (KickOutcome::Rebuild, outcome, 1)
    );
    let (outcome, _, again, counters) = kicked(&[Errno::BADF]);
    assert_eq!(
        (outcome, again, counters.kicks),
        (KickOutcome::Failed(Errno::BADF), outcome, 1)
    );
    assert_eq!(counters.kick_failed, 1);
}

#[test]
fn a_successor_sends_what_was_published_and_forgets_what_was_staged() {
    let socket = socket();
    let mut xsk = socket.adopt().unwrap();
    socket.kernel.borrow_mut().answers.push_back(Errno::NETDOWN);
    send(&mut xsk, 1, 9014);
    assert_eq!(xsk.flush(), KickOutcome::LinkDown);
    send(&mut xsk, 2, 9014);
    drop(xsk);

    let mut xsk = socket.adopt().unwrap();
    assert_eq!(xsk.adopted().tx_kernel, 3);
    assert_eq!(xsk.adopted().unpublished, 3);
    assert_eq!(xsk.adopted().tx_slots_free, 3);
    assert_eq!(xsk.flush(), KickOutcome::Sent);
    assert_eq!(socket.kernel.borrow().sent, [(1, 9014)]);
}

#[test]
fn a_table_or_rings_that_cannot_be_true_do_not_break_the_successor() {
    // Records nobody writes. Expect: counted, the chunks never used again.
    let socket = FakeSocket::new(UmemLayout::new(8, 4, 1514).unwrap(), 0);
    drop(socket.adopt().unwrap());
    let store = |chunk: usize, word| {
        socket.table[chunk].store(word, std::sync::atomic::Ordering::Release);
    };
    store(0, u64::MAX);
    store(1, Record::Transmit(0).encode());
    store(8, Record::Fill(0).encode());
    store(9, 1 << 40);
    let mut xsk = socket.adopt().unwrap();
    assert_eq!(xsk.adopted().implausible, 4);
    assert_eq!(xsk.adopted().tx_slots_free, 2);
    assert!(xsk.check_consistency().is_err());
    send(&mut xsk, 1, 60);
    assert_eq!(xsk.flush(), KickOutcome::Sent);
    drop(xsk);

    // A table that calls the kernel's chunks ours. Expect: the fill ring never
    // overflows, whatever is in it.
    (0..8).for_each(|chunk| store(chunk, 0));
    let xsk = socket.adopt().unwrap();
    assert_eq!(xsk.adopted().rx_ours, 8);
    assert_eq!(socket.kernel.borrow().fill.entries().len(), 8);
    drop(xsk);

    // A table of another size, indices that jumped. Expect: refused.
    socket.kernel.borrow().rx.set(100, 0);
    assert!(matches!(
        socket.adopt().map(drop),
        Err(XskError::Corrupt(_))
    ));
}

// The receive ring's index jumps while it is used. Expect: counted, nothing read, and no end of it.
#[test]
fn an_index_that_jumps_is_counted() {
    let socket = socket();
    let mut xsk = socket.adopt().unwrap();
    socket.kernel.borrow().rx.set(100, 0);
    let mut seen = 0;
    let outcome = xsk.receive(8, |_| seen += 1);
    assert_eq!((outcome.frames, outcome.dropped, seen), (0, 0, 0));
    assert_eq!(xsk.counters().corrupt_rings, 1);
    assert_eq!(xsk.counters().rx_wakeups, 0);
    xsk.wake_rx();
    assert_eq!(xsk.counters().rx_wakeups, 1);
}

// A frame is delivered, but the kernel has not yet said what it took from the fill ring for it, as between the two stores of `xsk_flush`. Expect: the check waits
// for that; if it never comes, the chunk is named with both of its places.
#[test]
fn a_chunk_that_is_seen_halfway_is_looked_at_again() {
    let socket = socket();
    let xsk = socket.adopt().unwrap();
    deliver_halfway(&socket, 1);
    let (kernel, mut looks) = (socket.kernel.clone(), 0);
    let goes_on_later = move || {
        looks += 1;
        if looks == 50 {
            kernel.borrow_mut().act(KernelOp::ReleaseFill);
        }
        true
    };
    let checked = with_hook(goes_on_later, || xsk.check_consistency());
    assert_eq!(checked.unwrap(), Ok(()));

    deliver_halfway(&socket, 1);
    let error = xsk.check_consistency().unwrap_err().to_string();
    assert!(
        error.contains("in the fill ring and in the receive ring"),
        "{error}"
    );
}

#[test]
fn every_counter_has_a_name_and_a_help_text() {
    let socket = socket();
    let table: Vec<_> = socket.adopt().unwrap().counters().iter().collect();
    assert!(table.len() > 10);
    assert!(table.iter().all(|(name, help, value)| !name.is_empty()
        && help.len() > 5
        && !help.starts_with(' ')
        && *value == 0));
}

// More chunks than the fill ring is to hold; then it is to hold more, then fewer again. Expect: as many as asked for, at least the least, never more than
// there are, and, where there are so many, 15 more, so that it need be filled at each sixteenth frame only; those beyond are used up as frames come, and
// none is lost. It never holds fewer than asked for.
#[test]
fn the_fill_ring_is_as_deep_as_it_is_to_be() {
    let socket = FakeSocket::new(UmemLayout::new(4_096, 4, 1_514).unwrap(), 0);
    let mut xsk = socket.adopt().unwrap();
    let filled = || socket.kernel.borrow().fill.entries().len();
    assert_eq!(filled(), 256);
    for (asked, held) in [(1, 271), (3_000, 3_015), (4_081, 4_096), (u32::MAX, 4_096)] {
        xsk.keep_filled(asked);
        assert_eq!(filled(), held);
        xsk.check_consistency().unwrap();
    }
    xsk.keep_filled(0);
    for _ in 0..3_840 + 100 {
        deliver(&socket, 1);
        assert_eq!(xsk.receive(1, |_| ()).frames, 1);
    }
    let mut fills = 0;
    let mut before = filled();
    for _ in 0..160 {
        deliver(&socket, 1);
        assert_eq!(xsk.receive(1, |_| ()).frames, 1);
        assert!((256..=271).contains(&filled()), "{}", filled());
        fills += u32::from(filled() >= before);
        before = filled();
    }
    assert_eq!(fills, 10);
    xsk.check_consistency().unwrap();
    // No more than so many, whatever is asked for; until that ends.
    xsk.fill_at_most(64);
    for _ in 0..300 {
        deliver(&socket, 1);
        assert_eq!(xsk.receive(1, |_| ()).frames, 1);
    }
    assert!((64..=79).contains(&filled()), "{}", filled());
    xsk.keep_filled(300);
    assert!((64..=79).contains(&filled()), "{}", filled());
    xsk.fill_at_most(u32::MAX);
    assert_eq!(filled(), 315);
    xsk.check_consistency().unwrap();
    // One more would be one too many: filled at every frame.
    xsk.keep_filled(4_082);
    for _ in 0..20 {
        deliver(&socket, 1);
        assert_eq!(xsk.receive(1, |_| ()).frames, 1);
        assert_eq!(filled(), 4_082);
    }
    xsk.check_consistency().unwrap();
}
