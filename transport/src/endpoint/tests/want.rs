//! A receiver with fewer buffers than its sender has messages.

use super::*;

/// Messages of one frame, or of several, to a receiver with so many buffers, each of which it has again when it was used. What was dropped for want of one.
fn dropped(len: usize, buffers: u32, messages: usize) -> u64 {
    let mut pair = Pair::new(1472);
    pair.sides[1].host.tokens.clear();
    pair.provide(1, buffers);
    for _ in 0..messages {
        pair.send(0, 2, len, Nanos::MAX);
    }
    let mut back = 0;
    while !pair.all_settled() {
        assert!(pair.now < 10 * SECOND && pair.step());
        // The application needs a while.
        let used = pair.sides[1].host.delivered.len();
        if used - back >= buffers as usize / 2 {
            pair.provide(1, (used - back) as u32);
            back = used;
        }
    }
    pair.check_deliveries();
    assert_eq!(pair.sides[1].host.delivered.len(), messages);
    pair.sides[1].endpoint.counters().no_buffer
}

// Four hundred messages and 8, 32, 128 buffers, half of which are always with the application; short messages, and such that are asked for. Expect: all come, and few are sent in vain:
// for each that is taken no more than two.
#[test]
fn not_everything_is_sent_again_for_each_buffer() {
    for len in [100, 1300, 40_000] {
        for buffers in [8, 32, 128] {
            let dropped = dropped(len, buffers, 400);
            assert!(dropped <= 800, "{len} bytes, {buffers} buffers: {dropped}");
        }
    }
}
