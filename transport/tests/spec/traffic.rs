//! §7 to §11: repair by time, long messages, credit, congestion, frames. transport.md §7.1, §7.5, §7.6, §8.1, §8.2, §8.3, §9.1, §9.2, §10, §11.1,
//! §11.2

use portolan_sim::harness::{MS, US};
use portolan_sim::puppet::{NOTHING, Puppet};
use portolan_transport::ident::Priority;
use portolan_transport::policy::{AckRule, Congestion, OnTimeout, Order, Policy, Recovery};

use crate::{any, policy, puppet};

// What left before the echoed frame and is not reported is lost; what left with it or after is not. No timer is needed, for
// retransmissions neither. transport.md §7.1
#[test]
fn s7_1_the_loss_horizon() {
    let mut p = puppet();
    p.rtt = 40 * US;
    p.sends(100);
    p.waits(40 * US);
    p.says(p.ack(1));
    p.sends(100); // lost
    p.waits(40 * US);
    p.sends(100);
    p.echo = p.last_heard();
    p.sends(100); // on its way
    p.waits(40 * US);
    assert_eq!(
        p.says(p.ack_with(1, &[2])),
        ["EAGER 1, 100 bytes", "retransmits +1", "losses_found +1"]
    );
    // That is lost, too: an answer that echoes what left after it says so.
    p.echo = None;
    p.waits(40 * US);
    p.sends(100);
    p.waits(40 * US);
    let outcome = p.says(p.ack_with(1, &[2, 3, 4]));
    assert!(any(&outcome, "EAGER 1"), "{outcome:?}");
    assert_eq!(p.counter("timeouts"), 0);
}

// What left less than a reorder window before the echoed frame may merely have been overtaken. Expect: it is given the rest of the
// window, and not sent again if it comes meanwhile. transport.md §7.1
#[test]
fn s7_1_the_reorder_window() {
    for comes in [true, false] {
        let mut p = puppet();
        p.rtt = 40 * US;
        for base in 0..8 {
            p.sends(100);
            p.waits(40 * US);
            p.says(p.ack(base + 1));
        }
        p.sends(100);
        p.waits(3 * US);
        p.sends(100);
        p.waits(40 * US);
        p.echo = p.last_heard();
        assert_eq!(p.says(p.ack_with(8, &[9])), NOTHING);
        if comes {
            p.says(p.ack(10));
        }
        let outcome = p.waits(20 * US);
        assert_eq!(any(&outcome, "EAGER 8"), !comes, "{outcome:?}");
        assert_eq!(p.counter("timeouts"), 0);
    }
}

// The timer asks, with headers, and doubles; equal bounds make it fixed; a policy may make it send data. transport.md §7.5
#[test]
fn s7_5_the_timer() {
    let silence = |policy: Policy| {
        let mut p = Puppet::new(policy, 0);
        p.sends(100);
        let (start, mut at, mut kinds) = (p.now, Vec::new(), Vec::new());
        while at.len() < 5 {
            let outcome = p.waits(100 * US);
            if let Some(line) = outcome.first() {
                at.push((p.now - start) / (100 * US));
                kinds.push(line.split(' ').next().unwrap_or_default().to_string());
            }
        }
        let gaps: Vec<u64> = at.windows(2).map(|pair| pair[1] - pair[0]).collect();
        (gaps, kinds)
    };
    let (gaps, kinds) = silence(policy());
    assert!(gaps.windows(2).all(|g| g[1] >= 2 * g[0] - 2), "{gaps:?}");
    assert!(kinds.iter().all(|kind| kind == "PROBE"), "{kinds:?}");
    let (gaps, kinds) = silence(Policy {
        rto_max_us: policy().rto_min_us,
        on_timeout: OnTimeout::Resend,
        ..policy()
    });
    assert!(
        gaps.iter().all(|gap| gap.abs_diff(gaps[0]) <= 1),
        "{gaps:?}"
    );
    assert!(kinds.iter().all(|kind| kind == "EAGER"), "{kinds:?}");
}

// Bytes are placed where they belong in whatever order they come. What a grant that predates a retransmission calls missing is not sent
// twice. transport.md §8.1
#[test]
fn s8_1_bytes_by_offset() {
    let mut p = puppet();
    let request = p.rts(0, 5_000, 0);
    p.says(request);
    for from in [4_000, 1_000, 3_000, 0, 2_000] {
        let data = p.data(0, from, from + 1_000);
        p.says(data);
    }
    assert_eq!(p.delivered(), 1);

    let mut p = puppet();
    p.rtt = 40 * US;
    p.sends(1_370 + 3 * 1_382);
    p.waits(40 * US);
    p.says(p.cts(0, 1_370 + 3 * 1_382, &[]));
    p.waits(40 * US);
    // Nor is what may still stand before a slow link: the rest of a batch whose first frame has arrived. Each has its own stamp.
    p.echo = p.last_heard().map(|stamp| stamp - 2);
    let waits = p.cts(0, 1_370 + 3 * 1_382, &[(2_752, 1_370 + 3 * 1_382)]);
    assert_eq!(p.says(waits), NOTHING);
    let asks = p.cts(0, 1_370 + 3 * 1_382, &[(1_370, 2_752)]);
    assert!(any(&p.says(asks.clone()), "DATA 0 1370..2752"));
    assert_eq!(p.says(asks.clone()), NOTHING);
    p.echo = None;
    p.waits(40 * US);
    assert!(any(&p.says(asks), "DATA 0 1370..2752"));
}

// Messages commit in order of arrival: a later one did, then the engine died that had accepted an earlier one. Nothing more follows, so only
// PROBE can bring it up. Expect: it is asked for. transport.md §7.5
#[test]
fn s7_5_probe_beyond_a_gap() {
    let policy = Policy {
        recovery: Recovery::GoBackN { stall: false },
        ack_rule: AckRule::Exact,
        order: Order::Arrival,
        on_timeout: OnTimeout::Probe,
        window_messages: 8,
        ..policy()
    };
    let mut p = Puppet::new(policy, 16);
    let (long, short) = (p.rts(0, 5_000, 100), p.eager(1));
    p.says(long);
    assert!(any(&p.says(short), "delivers 1"));
    p.dies();
    p.is_restored();
    p.greets();
    let probe = p.probe(1, 100);
    let outcome = p.says(probe);
    assert!(any(&outcome, "NACK 0"), "{outcome:?}");
}

// The receiver's new engine waits for numbers we settled. Expect: NULL for them, once, however often answers say so that were written before
// those NULLs came; and again after. transport.md §7.6
#[test]
fn s7_6_numbers_only_the_sender_settled() {
    for nack in [false, true] {
        let mut p = Puppet::new(
            Policy {
                recovery: Recovery::GoBackN { stall: false },
                ..policy()
            },
            16,
        );
        for _ in 0..20 {
            p.sends(100);
        }
        p.waits(40 * US);
        p.says(p.ack(20));
        p.waits(US);
        p.sends(100);
        let waits_for = |p: &mut Puppet, number| {
            p.waits(40 * US);
            let outcome = match nack {
                true => p.says(p.nack(number, 1)),
                false => p.says(p.ack(number)),
            };
            outcome.iter().filter(|one| one.starts_with("NULL")).count()
        };
        p.echo = p.last_heard();
        assert_eq!(waits_for(&mut p, 3), 8);
        // As before, and from elsewhere: both were written before.
        assert_eq!(waits_for(&mut p, 3), 0);
        assert_eq!(waits_for(&mut p, 5), 0);
        p.echo = p.last_heard();
        assert_eq!(waits_for(&mut p, 11), 8);
        p.echo = p.last_heard();
        assert_eq!(waits_for(&mut p, 19), 1);
    }
}

// Shortest remaining first, out of one budget; the longest is not starved. transport.md §8.2
#[test]
fn s8_2_shortest_remaining_first() {
    let mut p = Puppet::new(
        Policy {
            grant_bytes: 20_000,
            grant_budget_bytes: 40_000,
            ..policy()
        },
        8,
    );
    let requests: Vec<_> = [400_000, 300_000, 25_000]
        .into_iter()
        .zip(0..)
        .map(|(total, number)| p.rts(number, total, 0))
        .collect();
    let mut granted = [0; 3];
    let mut note = |lines: Vec<String>| {
        for line in lines {
            if let Some((number, to)) = line
                .strip_prefix("CTS ")
                .and_then(|grant| grant.split_once(" to "))
            {
                let number: usize = number.parse().expect("a number");
                granted[number] = to.parse::<u32>().expect("a limit");
            }
        }
        granted
    };
    for request in requests {
        note(p.says(request));
    }
    let mut sent = 0;
    // The short one is served at once, and to its end, before the others get more.
    let before = note(Vec::new());
    while sent < 25_000 {
        let to = note(Vec::new())[2];
        assert!(to > sent, "the shortest waits: {before:?}");
        let next = (sent + 1_000).min(to);
        let data = p.data(2, sent, next);
        note(p.says(data));
        sent = next;
    }
    let after = note(Vec::new());
    assert_eq!(after[2], 25_000);
    assert!(after[0] > 0, "the oldest has its floor: {after:?}");
}

// More long messages wait than `crowd`: frames say so; who hears it sends requests without data. transport.md §8.3
#[test]
fn s8_3_crowds() {
    let mut p = Puppet::new(
        Policy {
            crowd: 2,
            ..policy()
        },
        8,
    );
    let mut crowded = Vec::new();
    for number in 0..4 {
        let request = p.rts(number, 50_000, 100);
        p.says(request);
        crowded.push(p.heard.iter().any(|frame| frame.header.crowded));
    }
    assert_eq!(crowded, [false, false, true, true]);
    p.header.crowded = true;
    p.says_all(Vec::new());
    assert_eq!(p.sends(50_000), ["RTS 0 start 0, 0 of 50000 bytes"]);
    p.header.crowded = false;
    p.says_all(Vec::new());
    assert_eq!(p.sends(50_000), ["RTS 1 start 0, 1370 of 50000 bytes"]);
}

// RETURN-CREDIT: what is unused is counted as sent, and so given back. transport.md §9.2
#[test]
fn s9_2_unused_credit_is_returned() {
    let mut p = puppet();
    p.sends(100);
    let before = p.heard[0].header.sent_buffers;
    p.credit = 0;
    p.header.return_credit = true;
    p.says(p.ack(1));
    p.header.return_credit = false;
    let message = p.eager(0);
    p.says(message);
    let after = p.heard[0].header.sent_buffers;
    assert!(after.wrapping_sub(before) > 1, "{before} to {after}");
    let status = p.endpoint.peers().next().expect("a peer");
    assert_eq!(status.credit, 0);
}

// Inside a frame: handshake, answers, control, messages. transport.md §11.1
#[test]
fn s11_1_order_inside_a_frame() {
    let mut p = puppet();
    p.sends(100);
    p.says(p.ack(1));
    let (message, hello) = (p.eager(0), p.hello(portolan_sim::puppet::OUR_INCARNATION));
    let drop = p.msg_drop(1, portolan_transport::host::Reason::TooLong);
    p.sends(100);
    let far = p.eager(0).ports(10, 5).start(None);
    let outcome = p.says_all(vec![message, drop, hello.into(), far]);
    let answers: Vec<&str> = outcome
        .iter()
        .map(String::as_str)
        .filter(|line| line.starts_with(|c: char| c.is_ascii_uppercase()))
        .collect();
    assert_eq!(
        answers,
        [
            "HELLO-ACK from us to them",
            "REFUSED",
            "ACK 1",
            "DROP-CONFIRM 1"
        ]
    );
    assert_eq!(p.heard.len(), 1);
}

// High goes before low, wherever they were asked for first; low is not starved. transport.md §11.2
#[test]
fn s11_2_priorities() {
    let mut p = Puppet::new(
        Policy {
            window_messages: 1,
            ..policy()
        },
        0,
    );
    // Both wait for the handshake of a restarted peer.
    p.sends(100);
    p.sends(1_000);
    p.priority = Priority::High;
    p.sends(1_000);
    let outcome = crate::reborn(&mut p);
    let order: Vec<bool> = outcome
        .iter()
        .filter(|line| line.starts_with("EAGER"))
        .map(|line| line.ends_with("high"))
        .collect();
    assert!(
        !order.is_empty() && order.is_sorted_by_key(|high| !high),
        "{outcome:?}"
    );
    p.waits(MS);
}

/// The puppet acknowledges all but these after a round trip of `rtt`; returns how many new frames that lets go.
fn round(p: &mut Puppet, sent: &mut u32, rtt: u64, lost: bool) -> u32 {
    p.rtt = rtt;
    p.waits(rtt);
    let answer = match lost {
        true => p.ack_with(*sent - 2, &[*sent - 1]),
        false => p.ack(*sent),
    };
    let outcome = p.says(answer);
    let frames = outcome.iter().filter(|line| line.starts_with("EAGER"));
    let frames = frames.count() as u32 - u32::from(lost);
    *sent += frames;
    frames
}

// Unasked traffic follows the delay: all the credit below the target, ever less above it, and all again. Loss at low delay is corruption
// and changes nothing; silence leaves one buffer. transport.md §10
#[test]
fn s10_unasked_traffic_follows_the_delay() {
    let mut p = Puppet::new(
        Policy {
            congestion: Congestion::Delay { target_us: 50 },
            coalesce: false,
            eager_buffers: 16,
            window_messages: 64,
            ..policy()
        },
        0,
    );
    p.sends(1_000);
    p.rtt = 10 * US;
    p.waits(10 * US);
    p.says(p.ack(1));
    for _ in 0..1_000 {
        p.sends(1_000);
    }
    let mut sent = 17;
    for _ in 0..3 {
        assert_eq!(round(&mut p, &mut sent, 20 * US, false), 16);
    }
    let lossy = round(&mut p, &mut sent, 20 * US, true);
    assert!(lossy >= 15, "{lossy} after a loss");
    let busy: Vec<u32> = (0..6)
        .map(|_| round(&mut p, &mut sent, 500 * US, false))
        .collect();
    assert!(busy[5] <= 2 && busy.is_sorted_by(|a, b| a >= b), "{busy:?}");
    let free: Vec<u32> = (0..200)
        .map(|_| round(&mut p, &mut sent, 20 * US, false))
        .collect();
    assert!(
        free.contains(&16) || p.endpoint.unsettled() == 0,
        "{free:?}"
    );
}

// A timer that sends data again, and credit for two messages. Both are lost, a third waits for credit; the second is given up at its deadline, which holds
// back the third; then there is credit. Expect: the first goes again, though what wanted credit may not. transport.md §7.4, §7.5
#[test]
fn s7_5_credit_that_nobody_waits_for_any_more() {
    let policy = Policy {
        recovery: Recovery::WholeMessage,
        on_timeout: OnTimeout::Resend,
        order: Order::Arrival,
        window_messages: 16,
        coalesce: false,
        ..policy()
    };
    let mut p = Puppet::stranger(policy, 8, 1458);
    p.credit = 2;
    p.greets();
    p.sends(100);
    let until = p.now + MS;
    assert!(any(&p.sends_until(100, until), "EAGER 1"));
    assert_eq!(p.sends(100), ["credit_stalls +1"]);
    p.waits(MS + MS / 2);
    p.credit = 8;
    let outcome = p.says_all(Vec::new());
    let later = p.waits(20 * MS);
    assert!(
        any(&outcome, "EAGER 0") || any(&later, "EAGER 0"),
        "{outcome:?} {later:?}"
    );
}
