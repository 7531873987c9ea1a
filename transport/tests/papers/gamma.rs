//! GAMMA with flow control (002), profile `gamma`: a credit window per sender, restored as a whole by one acknowledgement, and what
//! its size costs (Figure 2). transport.md §9.1, §9.3
//!
//! The paper's window is counted in frames; so is ours, where a message fills a frame.

use portolan_sim::harness::{MIB, Net, SECOND, US, node};
use portolan_sim::puppet::{NOTHING, Puppet};
use portolan_transport::policy::{Policy, Profile};

/// The profile with this window, in frames.
fn policy(window: u32) -> Policy {
    Policy {
        window_messages: window,
        eager_buffers: window,
        eager_budget_buffers: 0,
        ..Profile::Gamma.policy()
    }
}

/// A credit of `credit` frames, and a window that is in nobody's way.
fn puppet(credit: u32) -> Puppet {
    let mut p = Puppet::new(
        Policy {
            window_messages: 64,
            ..policy(credit)
        },
        8,
    );
    p.transcript();
    p
}

/// Goodput of 1000 full frames through a 10 Gbit/s link with a round trip of a few frames, as a fraction of the link.
fn goodput(window: u32) -> f64 {
    const LEN: u32 = 1_360;
    const FRAMES: u32 = 1_000;
    let mut net = Net::with_policy(1, 2, 1, policy(window));
    net.faults.delay = 4 * US;
    net.open(node(1), 1, 1, MIB);
    net.open(node(2), 2, 256, 2_000);
    net.send((1, 1), (2, 2), LEN);
    net.run_until(SECOND, "the streams are open", |net| {
        net.book.borrow().is_settled()
    });
    let start = net.now;
    net.send_many((1, 1), (2, 2), LEN, FRAMES as usize);
    net.run_until(SECOND, "all arrive", |net| {
        net.book.borrow().delivered() == FRAMES as usize + 1
    });
    let bits = f64::from(LEN) * 8.0 * f64::from(FRAMES);
    bits / (net.now - start) as f64 / 10.0
}

// Throughput over the window. Expect the figure's shape: 4 frames hurt substantially, 8 a little, a few tens hardly.
#[test]
fn figure_2_throughput_over_the_window() {
    let curve = [4, 8, 32, 128].map(|window| (window, goodput(window)));
    let free = goodput(256);
    println!("window  of the link  of no window");
    for (window, goodput) in curve {
        println!("{window:6}  {goodput:11.3}  {:12.3}", goodput / free);
    }
    println!("   256  {free:11.3}");
    let of = curve.map(|(_, goodput)| goodput / free);
    let lost = of.map(|of| 1.0 - of);
    assert!(lost[0] > 0.2, "a window of 4 hurts substantially: {of:?}");
    assert!(
        lost[1] < 0.7 * lost[0],
        "a window of 8 has limited impact: {of:?}"
    );
    assert!(
        lost[2] < 0.2 * lost[1] && lost[2] < 0.03,
        "a few tens hardly reduce it: {of:?}"
    );
    assert!(lost[3] < 0.01, "and 128 not at all: {of:?}");
}

// A credit of 8, and 20 frames to send. Expect: 8 go, then none until the receiver says something; whatever it says restores all 8.
#[test]
fn one_acknowledgement_restores_the_whole_credit() {
    let mut p = puppet(8);
    let mut sent = 0;
    for _ in 0..20 {
        sent += p
            .sends(1_300)
            .iter()
            .filter(|l| l.starts_with("EAGER"))
            .count();
    }
    assert_eq!((sent, p.counter("credit_stalls")), (8, 1));
    let outcome = p.says(p.ack(8));
    let eager = outcome.iter().filter(|l| l.starts_with("EAGER")).count();
    assert_eq!(eager, 8, "{outcome:?}");
    let outcome = p.says(p.ack(16));
    let eager = outcome.iter().filter(|l| l.starts_with("EAGER")).count();
    assert_eq!(eager, 4, "{outcome:?}");
}

// Acknowledgements are lost with the credit they carry. Expect: the next one restores what all of them would have.
#[test]
fn a_lost_acknowledgement_loses_no_credit() {
    let mut p = puppet(8);
    for _ in 0..8 {
        p.sends(1_300);
    }
    for base in 1..8 {
        let lost = p.ack(base);
        p.frame(&[lost]);
    }
    for _ in 0..8 {
        assert_eq!(
            p.sends(1_300)
                .iter()
                .filter(|l| l.starts_with("EAGER"))
                .count(),
            0
        );
    }
    let outcome = p.says(p.ack(8));
    let eager = outcome.iter().filter(|l| l.starts_with("EAGER")).count();
    assert_eq!(eager, 8, "{outcome:?}");
}

// The credit is used up. Expect: acknowledgements, grants and granted bytes flow all the same, so nothing can deadlock.
#[test]
fn control_is_never_blocked_by_exhausted_credit() {
    let mut p = puppet(4);
    p.credit = 0; // the puppet gives no more
    for _ in 0..6 {
        p.sends(1_300);
    }
    assert_eq!(p.sends(1_300), NOTHING);
    let (message, request) = (p.eager(0), p.rts(1, 5_000, 1_000));
    let mut outcome = p.says(message);
    outcome.extend(p.waits(100 * US));
    assert!(outcome.contains(&"ACK 1".into()), "{outcome:?}");
    let outcome = p.says(request);
    assert!(
        outcome.iter().any(|l| l.starts_with("CTS 1")),
        "{outcome:?}"
    );
    let data = [(1_000, 2_400), (2_400, 3_800), (3_800, 5_000)];
    let says = data.map(|(from, to)| p.data(1, from, to));
    let outcome: Vec<_> = says.into_iter().flat_map(|say| p.says(say)).collect();
    assert!(outcome.contains(&"MSGEND 1".into()), "{outcome:?}");
    // And a request needs none: it goes without its data, and what is granted goes.
    let outcome = p.waits(100 * US);
    assert!(
        !outcome.iter().any(|l| l.starts_with("EAGER")),
        "{outcome:?}"
    );
}

// Every frame of the endpoint carries a limit that covers what the credit promises: sent so far and the whole credit.
#[test]
fn the_receiver_gives_every_sender_its_credit() {
    let mut p = puppet(8);
    for number in 0..6 {
        let message = p.eager(number);
        p.says(message);
    }
    p.waits(100 * US);
    let heard = p.heard.last().map(|frame| frame.header.credit_limit);
    assert_eq!(heard, Some(6 + 8));
}
