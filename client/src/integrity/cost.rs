//! What integrity adds to a message, measured in the library alone:
//! `cargo test --release -p portolan --lib -- --ignored --nocapture integrity_costs`.

#![allow(clippy::unwrap_used)]

use std::time::Instant;

use super::tests::{address, book, talk};
use super::*;
use crate::names::Priority::Low;

#[test]
#[ignore = "a measurement"]
fn integrity_costs() {
    const ROUNDS: u32 = 50;
    println!("     bytes    seal ns   check ns   end ns");
    for len in [
        0usize,
        8,
        48,
        64,
        256,
        1024,
        4096,
        16 << 10,
        64 << 10,
        256 << 10,
        1 << 20,
        4 << 20,
    ] {
        let (mut a, mut b) = (book(10, 1), book(11, 2));
        let batch = (4 << 20) / (len + 64 * 1024) + 4;
        let mut bytes = vec![7; len + SEAL];
        let mut best = [u128::MAX; 3];
        for _ in 0..ROUNDS {
            let mut sums = [0; 3];
            for _ in 0..batch {
                for _ in 0..8 {
                    let mut times = [Instant::now(); 4];
                    let options = SendOptions::default();
                    times[0] = Instant::now();
                    let at = a.may_send(address(11), Low).unwrap();
                    a.seal(at, 0, &options, &mut bytes);
                    times[1] = Instant::now();
                    assert!(matches!(
                        b.message(&bytes, address(10), Low, 0),
                        Judgement::Deliver
                    ));
                    times[2] = Instant::now();
                    a.ended(0, Status::Delivered);
                    times[3] = Instant::now();
                    for i in 0..3 {
                        sums[i] += (times[i + 1] - times[i]).as_nanos();
                    }
                }
            }
            for i in 0..3 {
                best[i] = best[i].min(sums[i] / (8 * batch as u128));
            }
            talk(&mut a, &mut b);
        }
        let clock = {
            let start = Instant::now();
            for _ in 0..1000 {
                std::hint::black_box(Instant::now());
            }
            start.elapsed().as_nanos() / 1000
        };
        let [seal, check, end] = best.map(|ns| ns.saturating_sub(clock));
        println!("{len:>10} {seal:>10} {check:>10} {end:>8}");
    }
}
