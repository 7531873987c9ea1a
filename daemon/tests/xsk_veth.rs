//! Our AF_XDP layer on a veth pair, with an xsk-rs endpoint as the other side.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod xsk_support;

use std::time::{Duration, Instant};

use portoland::xsk::{
    BindMode, BindOptions, KickOutcome, RxOutcome, UmemMemfd, Xsk, XskError, XskFd,
};
use xsk_support::*;

/// Frame lengths from the shortest to the MTU's, deterministic and varied.
fn length(number: u64, mtu: u32) -> usize {
    let longest = mtu as usize + 14;
    match number % 8 {
        0 => longest,
        1 => 60,
        _ => 60 + (number as usize).wrapping_mul(2654435761) % (longest - 59),
    }
}

/// Numbered frames, both ways at once, each checked byte by byte.
fn both_ways(mtu: u32, total: u64) {
    let ours = Ours::create(mtu, 256);
    let mut foreign = Foreign::create();
    let mut xsk = ours.adopt().unwrap();
    assert_eq!(xsk.adopted().rx_kernel, ours.config.layout.rx_chunks());
    assert!(!xsk.zero_copy());

    let (mut sent, mut received, mut foreign_sent, mut foreign_received) = (0, 0, 0, 0);
    let mut deadline = Instant::now() + PATIENCE;
    while received < total || foreign_received < total {
        // Windows small enough that no queue on the way (the veth's holds 256) overflows.
        while sent < total
            && sent - foreign_received < 64
            && submit(&mut xsk, sent, length(sent, mtu))
        {
            sent += 1;
        }
        assert!(matches!(
            xsk.flush(),
            KickOutcome::Sent | KickOutcome::Idle | KickOutcome::Pending
        ));
        while foreign_sent < total
            && foreign_sent - received < 64
            && foreign.send(&frame(foreign_sent, length(foreign_sent, mtu)))
        {
            foreign_sent += 1;
        }
        foreign.kick();

        let outcome = xsk.receive(64, |segments| {
            let whole = segments.concat();
            assert_eq!(check_frame(&whole), Ok(received));
            assert_eq!(whole.len(), length(received, mtu));
            received += 1;
        });
        assert_eq!(outcome.dropped, 0);
        xsk.reap();
        let progress = outcome.frames
            + foreign.receive(|frame| {
                assert_eq!(check_frame(frame), Ok(foreign_received));
                assert_eq!(frame.len(), length(foreign_received, mtu));
                foreign_received += 1;
            });
        if progress > 0 {
            deadline = Instant::now() + PATIENCE;
        }
        assert!(
            Instant::now() < deadline,
            "stuck at {received} and {foreign_received}"
        );
    }
    settle(&mut xsk);
    xsk.check_consistency().unwrap();
    let (counters, statistics) = (xsk.counters(), xsk.statistics().unwrap());
    assert_eq!((counters.rx_frames, counters.tx_frames), (total, total));
    assert_eq!(
        counters.rx_bogus_descriptors + counters.tx_bogus_completions,
        0
    );
    assert_eq!((statistics.rx_dropped, statistics.tx_invalid_descs), (0, 0));
}

#[test]
fn frames_go_both_ways() {
    with_veth(1500, || both_ways(1500, 20_000));
}

#[test]
fn jumbo_frames_go_both_ways() {
    with_veth(9000, || both_ways(9000, 10_000));
}

#[test]
fn each_mistake_in_binding_is_named() {
    with_veth(1500, || {
        let config = config(1500, 64);
        let umem = UmemMemfd::create(&config.layout).unwrap();
        let table = new_table(&config.layout);
        let good = BindOptions {
            busy_patience: Duration::ZERO,
            ..bind_options(BindMode::Copy)
        };
        let create = |bind: &BindOptions| XskFd::create(&umem, &config, bind, &table);

        let error = create(&BindOptions {
            ifindex: 4711,
            ..good
        })
        .unwrap_err();
        assert!(
            matches!(error, XskError::NoSuchInterface { ifindex: 4711 }),
            "{error}"
        );
        let error = create(&BindOptions { queue: 99, ..good }).unwrap_err();
        assert!(
            matches!(error, XskError::NoSuchQueue { queue: 99, .. }),
            "{error}"
        );
        let error = create(&BindOptions {
            mode: BindMode::ZeroCopy,
            ..good
        })
        .unwrap_err();
        assert!(
            matches!(error, XskError::ZeroCopyUnsupported { .. }),
            "{error}"
        );

        // A veth has no zero-copy. Expect: the better mode is the other one.
        let xsk = create(&BindOptions {
            mode: BindMode::Auto,
            busy_patience: PATIENCE,
            ..good
        });
        let xsk = xsk.unwrap();
        assert!(!xsk.zero_copy());

        // Somebody has the queue, and keeps it, and then does not.
        let error = create(&good).unwrap_err();
        assert!(
            matches!(error, XskError::QueueBusy { queue: 0, .. }),
            "{error}"
        );
        drop(xsk);
        create(&BindOptions {
            busy_patience: PATIENCE,
            ..good
        })
        .unwrap();
    });
}

#[test]
fn missing_privilege_and_memlock_are_named() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities};

    with_veth(1500, || {
        let config = config(1500, 64);
        let umem = UmemMemfd::create(&config.layout).unwrap();
        let table = new_table(&config.layout);
        let bind = bind_options(BindMode::Copy);
        // Capabilities belong to this thread alone.
        let all = capabilities(None).unwrap();
        let without = |capability| CapabilitySets {
            effective: all.effective - capability,
            ..all
        };

        // The limit is the whole process's, but root's other threads are above it.
        let limit = getrlimit(Resource::Memlock);
        setrlimit(
            Resource::Memlock,
            Rlimit {
                current: Some(65536),
                maximum: limit.maximum,
            },
        )
        .unwrap();
        set_capabilities(None, without(CapabilitySet::IPC_LOCK)).unwrap();
        let error = XskFd::create(&umem, &config, &bind, &table).unwrap_err();
        setrlimit(Resource::Memlock, limit).unwrap();
        assert!(matches!(error, XskError::MemlockTooSmall { .. }), "{error}");

        set_capabilities(None, without(CapabilitySet::NET_RAW)).unwrap();
        let error = XskFd::create(&umem, &config, &bind, &table).unwrap_err();
        assert!(
            matches!(
                error,
                XskError::NoPrivilege {
                    capability: "CAP_NET_RAW",
                    ..
                }
            ),
            "{error}"
        );

        // An engine has no capability at all. Expect: it adopts all the same.
        set_capabilities(None, all).unwrap();
        let ours = Ours::create(1500, 64);
        set_capabilities(
            None,
            CapabilitySets {
                effective: CapabilitySet::empty(),
                ..all
            },
        )
        .unwrap();
        ours.adopt().unwrap();
        set_capabilities(None, all).unwrap();
    });
}

#[test]
fn what_does_not_fit_together_is_refused() {
    with_veth(9000, || {
        let config = config(9000, 64);
        let umem = UmemMemfd::create(&config.layout).unwrap();
        let table = new_table(&config.layout);
        let bind = bind_options(BindMode::Copy);
        let misuse = |result: Result<XskFd, XskError>| matches!(result, Err(XskError::Misuse(_)));

        let single = BindOptions { sg: false, ..bind };
        assert!(misuse(XskFd::create(&umem, &config, &single, &table)));
        assert!(misuse(XskFd::create(&umem, &config, &bind, &table[1..])));
        let other = UmemMemfd::create(&xsk_support::config(1500, 64).layout).unwrap();
        assert!(misuse(XskFd::create(&other, &config, &bind, &table)));

        let xsk = XskFd::create(&umem, &config, &bind, &table).unwrap();
        let fd = || xsk.fd().try_clone_to_owned().unwrap();
        assert!(matches!(
            Xsk::adopt(fd(), &umem.fd(), &table[1..], &config),
            Err(XskError::Misuse(_))
        ));
        assert!(matches!(
            Xsk::adopt(fd(), &other.fd(), &table, &config),
            Err(XskError::Misuse(_))
        ));
        let file = std::fs::File::open("/dev/null").unwrap();
        assert!(Xsk::adopt(file.into(), &umem.fd(), &table, &config).is_err());
    });
}

#[test]
fn a_link_that_goes_down_pauses_and_one_that_is_removed_ends() {
    with_veth(1500, || {
        let ours = Ours::create(1500, 64);
        let mut foreign = Foreign::create();
        let mut xsk = ours.adopt().unwrap();

        // Down. Expect: paused, the frame kept. Up again: it goes out.
        ip(&format!("link set {OURS} down"));
        assert!(submit(&mut xsk, 1, 60));
        assert_eq!(xsk.flush(), KickOutcome::LinkDown);
        assert_eq!(xsk.tx_outstanding(), 1);
        ip(&format!("link set {OURS} up"));
        let deadline = Instant::now() + PATIENCE;
        let mut arrived = Vec::new();
        while arrived.is_empty() {
            xsk.flush();
            foreign.receive(|frame| arrived.push(check_frame(frame)));
            assert!(Instant::now() < deadline);
        }
        assert_eq!(arrived, [Ok(1)]);
        settle(&mut xsk);
        assert_eq!(xsk.take_error(), None);

        // Removed. Expect: an error to take, and nothing can be sent any more.
        ip(&format!("link delete {OURS}"));
        let deadline = Instant::now() + PATIENCE;
        while xsk.take_error().is_none() {
            assert!(Instant::now() < deadline);
            std::thread::yield_now();
        }
        assert!(submit(&mut xsk, 2, 60));
        assert_eq!(xsk.flush(), KickOutcome::Rebuild);
        assert_eq!(xsk.receive(10, |_| {}), RxOutcome::default());
    });
}
