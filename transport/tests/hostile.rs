//! Frames from a node that lies under valid checksums. Expect: no panic, no broken contract with the host, and the messages between
//! honest nodes arrive as ever.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use portolan_sim::harness::*;
use portolan_transport::ident::Peer;
use portolan_transport::wire::reseal;

/// First bytes of a bare frame, wire.md §2.1.
const BARE: &[u8] = b"PB";
/// The liar.
const LIAR: u16 = 3;

/// A number that may be mistaken for another, near the old one or far from everything.
fn make_extreme(rng: &mut Rng, word: &mut [u8]) {
    let old = u32::from_be_bytes([word[0], word[1], word[2], word[3]]);
    let near = old.wrapping_add(rng.below(9) as u32).wrapping_sub(4);
    let (max, high, any) = (u32::MAX, 1 << 31, rng.clone().u32());
    let value: u32 = *rng.pick(&[0, 1, max, max - 1, high, high - 1, near, near, any]);
    word.copy_from_slice(&value.to_be_bytes());
}

/// The same of a bare frame: ports, association, time stamp, epoch, number, offset, checksum, or its payload.
fn forge_bare(rng: &mut Rng, frame: &mut [u8]) {
    match rng.below(10) {
        8 => rng.mutate(&mut frame[40..]),
        _ => {
            let at = *rng.pick(&[4, 12, 16, 20, 24, 28, 28, 28, 32]);
            make_extreme(rng, &mut frame[at..at + 4]);
        }
    }
    reseal(frame);
}

/// Tampers with a frame of the liar's. Who it says it is and whom it is for mostly stay, so that the lie is heard.
fn forge(rng: &mut Rng, frame: &mut [u8]) {
    if frame.starts_with(BARE) {
        return forge_bare(rng, frame);
    }
    let header = frame[..48].to_vec();
    let len = usize::from(u16::from_be_bytes([frame[4], frame[5]])).min(frame.len());
    match rng.below(10) {
        // Numbers of chunks become extreme.
        0..=5 if len > 48 => {
            for _ in 0..1 + rng.below(3) {
                let at = 48 + rng.below((len - 48) as u64 / 4) as usize * 4;
                make_extreme(rng, &mut frame[at..at + 4]);
            }
        }
        // Kinds are exchanged, flags flipped.
        6 if len > 48 => {
            frame[48] = 1 + rng.below(24) as u8;
            frame[49] ^= 1 << rng.below(3);
        }
        // The engine's epoch, credits, time stamps.
        7 => {
            let at = *rng.pick(&[24, 28, 32, 36, 40]);
            let value = *rng.pick(&[0, 1, u32::MAX, 1 << 31]);
            frame[at..at + 4].copy_from_slice(&u32::to_be_bytes(value));
        }
        // The payload.
        8 => rng.mutate(&mut frame[len..]),
        _ => rng.mutate(frame),
    }
    // Let the frame through the first checks, most of the time; a raised engine epoch would silence the honest half for ever.
    frame[..3].copy_from_slice(&header[..3]);
    frame[8..16].copy_from_slice(&header[8..16]);
    if rng.chance(900) {
        frame[16..24].copy_from_slice(&header[16..24]);
    }
    if rng.chance(950) {
        frame[24..28].copy_from_slice(&header[24..28]);
    }
    reseal(frame);
}

// Node 3 talks to everybody; each of its frames is also sent in several forged versions.
#[test]
fn forged_frames() {
    let bare = AtomicUsize::new(0);
    seeds("hostile", "forged_frames", 20, |seed| {
        let mut rng = Rng::new(seed);
        let mut net = Net::new(seed, 3, 1);
        net.book.borrow_mut().liars.push(node(LIAR));
        for id in 1..=3 {
            net.open(node(id), 1, 6, MIB);
        }
        let mut honest = Vec::new();
        net.record(true);
        for round in 0..40 {
            let len = *rng.pick(&[0, 10, 1000, 4000, 100_000]);
            net.send((3, 1), (1, 1), len);
            net.send((1, 1), (3, 1), len);
            honest.push(net.send((1, 1), (2, 1), len));
            honest.push(net.send((2, 1), (1, 1), len));
            for _ in 0..10 {
                let time = rng.below(50 * US);
                net.run_for(time);
                let sent = net.record(true);
                for (to, frame) in sent
                    .iter()
                    .filter(|(_, frame)| frame[8..10] == LIAR.to_be_bytes())
                {
                    bare.fetch_add(usize::from(frame.starts_with(BARE)), Relaxed);
                    for _ in 0..3 {
                        let mut frame = frame.clone();
                        forge(&mut rng, &mut frame);
                        net.inject(*to, frame);
                    }
                }
            }
            if round == 20 {
                net.kill(
                    Peer {
                        node: node(1),
                        queue: 0,
                    },
                    MS,
                );
            }
        }
        net.record(false);
        net.run_until(60 * SECOND, "honest messages", |net| {
            honest.iter().all(|m| net.status(*m).is_some())
        });
        let book = net.book.borrow();
        assert!(honest.iter().all(|m| book.message(*m).commits == 1));
    });
    let bare = bare.into_inner();
    assert!(bare > 100, "{bare} bare frames");
}

// Bytes at random, and frames cut anywhere. Expect: counted, nothing else.
#[test]
fn noise() {
    let mut rng = Rng::new(9);
    let mut net = pair();
    net.record(true);
    net.send((1, 1), (2, 2), 3000);
    net.settle(SECOND);
    let frames = net.record(false);
    for _ in 0..2000 {
        let (to, mut frame) = rng.pick(&frames).clone();
        match rng.below(3) {
            0 => frame.truncate(rng.below(frame.len() as u64) as usize),
            1 => rng.mutate(&mut frame),
            _ => frame.iter_mut().for_each(|b| *b = rng.u64() as u8),
        }
        net.inject(to, frame);
        net.run_for(US);
    }
    net.send((1, 1), (2, 2), 3000);
    net.settle(SECOND);
    all_delivered(&net);
}
