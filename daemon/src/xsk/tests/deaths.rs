//! Arbitrary interleavings of an owner, the kernel and death at any store.
//!
//! Safety: no chunk is ever in two places, no frame is overwritten while the
//! other side reads it, none is sent twice. Liveness: at the end every frame
//! delivered was received, every published frame sent, every chunk is back.

use std::cell::Cell;
use std::rc::Rc;

use proptest::prelude::*;

use super::super::crash_point::{Died, with_hook};
use super::super::fake::{FakeDoorbell, FakeSocket, KernelOp, read_stamp, stamp_frame};
use super::super::layout::UmemLayout;
use super::super::{KickOutcome, Xsk};

type FakeXsk<'t> = Xsk<'t, FakeDoorbell>;

/// What happens next.
#[derive(Debug, Clone)]
enum Op {
    Receive {
        budget: usize,
    },
    Send {
        frames: usize,
        len: usize,
    },
    Abandon,
    Flush,
    Reap,
    Kernel(KernelOp),
    /// The owner dies so many crash points from now, its successor (while
    /// adopting or later) so many after that.
    Die {
        after: u32,
        again: Option<u32>,
    },
}

fn kernel_op() -> impl Strategy<Value = KernelOp> {
    prop_oneof![
        Just(KernelOp::TakeFill),
        (1..=5usize, any::<bool>())
            .prop_map(|(segments, at_once)| KernelOp::Deliver { segments, at_once }),
        Just(KernelOp::ReleaseFill),
        Just(KernelOp::TakeTx),
        any::<bool>().prop_map(|newest| KernelOp::Complete { newest }),
    ]
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        3 => (1..40usize).prop_map(|budget| Op::Receive { budget }),
        3 => (1..4usize, prop_oneof![Just(60usize), Just(4096), Just(4097), Just(9014)])
            .prop_map(|(frames, len)| Op::Send { frames, len }),
        1 => Just(Op::Abandon),
        2 => Just(Op::Flush),
        2 => Just(Op::Reap),
        6 => kernel_op().prop_map(Op::Kernel),
        2 => (0..60u32, proptest::option::of(0..60u32))
            .prop_map(|(after, again)| Op::Die { after, again }),
    ]
}

/// The world beside the socket: what a test knows across deaths.
struct World {
    socket: &'static FakeSocket,
    /// Crash points left to live, per life; the last life is endless.
    lives: Rc<Cell<[Option<u32>; 2]>>,
    /// For the kernel's steps at crash points.
    random: Rc<Cell<u64>>,
    next_stamp: u64,
    seen: Vec<u64>,
    deaths: u32,
}

impl World {
    /// Runs `body` with the kernel running and death lurking at every crash point.
    fn risk<R>(&mut self, body: impl FnOnce() -> R) -> Result<R, Died> {
        let (lives, random) = (self.lives.clone(), self.random.clone());
        let kernel = self.socket.kernel.clone();
        let result = with_hook(
            move || {
                // xorshift: the case's seed decides, so a failure reproduces.
                let mut x = random.get();
                x ^= x << 13;
                x ^= x >> 7;
                x ^= x << 17;
                random.set(x);
                let ops = [
                    KernelOp::TakeFill,
                    KernelOp::Deliver {
                        segments: 1 + (x >> 40) as usize % 3,
                        at_once: x & 64 != 0,
                    },
                    KernelOp::ReleaseFill,
                    KernelOp::TakeTx,
                    KernelOp::Complete {
                        newest: x & 128 != 0,
                    },
                ];
                if x & 1 == 0 {
                    kernel.borrow_mut().act(ops[(x >> 8) as usize % ops.len()]);
                }
                match lives.get() {
                    [Some(0), next] => {
                        lives.set([next, None]);
                        false
                    }
                    [Some(left), next] => {
                        lives.set([Some(left - 1), next]);
                        true
                    }
                    [None, _] => true,
                }
            },
            body,
        );
        self.deaths += u32::from(result.is_err());
        result
    }

    fn adopt(&mut self) -> FakeXsk<'static> {
        let socket = self.socket;
        loop {
            if let Ok(xsk) = self.risk(|| socket.adopt().unwrap()) {
                assert_eq!(xsk.adopted().implausible, 0);
                return xsk;
            }
        }
    }

    fn user_step(&mut self, xsk: &mut FakeXsk<'static>, op: &Op) -> Result<(), Died> {
        match op {
            Op::Receive { budget } => {
                let seen = Rc::new(std::cell::RefCell::new(Vec::new()));
                let sink = seen.clone();
                let result = self.risk(|| {
                    xsk.receive(*budget, |segments| {
                        sink.borrow_mut().push(read_stamp(&segments.concat()));
                    })
                });
                self.seen.extend(seen.borrow().iter());
                result.map(drop)
            }
            Op::Send { frames, len } => {
                let first = self.next_stamp;
                self.next_stamp += *frames as u64;
                self.risk(|| {
                    for stamp in first..first + *frames as u64 {
                        let Some(slot) = xsk.tx_slot() else { break };
                        stamp_frame(&mut xsk.tx_buffer(&slot)[..*len], stamp);
                        xsk.submit(slot, *len);
                    }
                })
            }
            Op::Abandon => self.risk(|| {
                if let Some(slot) = xsk.tx_slot() {
                    xsk.abandon(slot);
                }
            }),
            Op::Flush => self.risk(|| xsk.flush()).map(drop),
            Op::Reap => self.risk(|| xsk.reap()).map(drop),
            Op::Kernel(op) => {
                self.socket.kernel.borrow_mut().act(*op);
                Ok(())
            }
            Op::Die { after, again } => {
                self.lives.set([Some(*after), *again]);
                Ok(())
            }
        }
    }

    /// Every chunk exactly once: in the kernel's world or in one of our lists.
    fn check(&self, xsk: &FakeXsk<'static>) {
        let kernel = self.socket.kernel.clone();
        // The kernel goes on, but not before receive and fill ring were looked at once.
        let mut looks = 0;
        let goes_on = move || {
            looks += 1;
            if looks > 2 {
                kernel.borrow_mut().act(KernelOp::ReleaseFill);
            }
            true
        };
        with_hook(goes_on, || xsk.check_consistency())
            .unwrap()
            .unwrap();
        let kernel = self.socket.kernel.borrow();
        let mut occurrences = kernel.occurrences();
        for chunk in &xsk.refill {
            occurrences[*chunk as usize] += 1;
        }
        let layout = xsk.layout();
        let (receive, transmit) = occurrences.split_at(layout.rx_chunks() as usize);
        assert!(
            receive.iter().all(|n| *n == 1),
            "receive chunks: {receive:?}"
        );
        assert!(
            transmit.iter().all(|n| *n <= 1),
            "transmit chunks: {transmit:?}"
        );
        let at_kernel: usize = transmit.iter().sum::<usize>() + xsk.tx.staged() as usize;
        assert_eq!(at_kernel, xsk.tx_outstanding() as usize);
    }
}

/// Returns how often the owner died.
fn run(ops: &[Op], seed: u64, index: u32) -> u32 {
    let layout = UmemLayout::new(12, 4, 9014).unwrap();
    // Leaked so that owners need no lifetime; a few kilobytes per case.
    let socket: &'static FakeSocket = Box::leak(Box::new(FakeSocket::new(layout, index)));
    let mut world = World {
        socket,
        lives: Rc::new(Cell::new([None, None])),
        random: Rc::new(Cell::new(seed | 1)),
        next_stamp: 0,
        seen: Vec::new(),
        deaths: 0,
    };
    let mut xsk = world.adopt();
    world.check(&xsk);
    for op in ops {
        if world.user_step(&mut xsk, op).is_err() {
            drop(xsk);
            xsk = world.adopt();
        }
        world.check(&xsk);
    }

    // Calm: everything that was under way arrives, everything comes home.
    world.lives.set([None, None]);
    assert!(matches!(xsk.flush(), KickOutcome::Idle | KickOutcome::Sent));
    for _ in 0..layout.tx_chunks() {
        socket
            .kernel
            .borrow_mut()
            .act(KernelOp::Complete { newest: false });
    }
    xsk.reap();
    assert_eq!(xsk.tx_outstanding(), 0);
    assert_eq!(xsk.free_slots.len(), layout.tx_slots() as usize);
    while !socket.kernel.borrow().rx.entries().is_empty() {
        xsk.receive(100, |segments| {
            world.seen.push(read_stamp(&segments.concat()))
        });
    }
    world.check(&xsk);

    let kernel = socket.kernel.borrow();
    assert_received(&kernel.delivered, &world.seen, world.deaths);
    let mut stamps: Vec<u64> = kernel.sent.iter().map(|(stamp, _)| *stamp).collect();
    assert!(stamps.is_sorted(), "sent out of order");
    stamps.dedup();
    assert_eq!(stamps.len(), kernel.sent.len(), "a frame was sent twice");
    assert_eq!(xsk.counters().rx_bogus_descriptors, 0);
    assert_eq!(xsk.counters().tx_bogus_completions, 0);
    world.deaths
}

/// Every delivered frame was seen, in order, and more than once only after a
/// death. Frames of five segments are dropped, as a whole.
fn assert_received(delivered: &[(u64, usize)], seen: &[u64], deaths: u32) {
    let mut expected = delivered
        .iter()
        .filter(|(_, len)| *len <= 4 * 3840)
        .map(|(stamp, _)| *stamp);
    let mut highest = None;
    let mut steps_back = 0;
    for stamp in seen {
        if highest.is_none_or(|highest| *stamp > highest) {
            assert_eq!(Some(*stamp), expected.next(), "a frame was lost");
            highest = Some(*stamp);
        } else {
            steps_back += 1;
        }
    }
    assert_eq!(expected.next(), None, "a frame was lost");
    assert!(
        deaths > 0 || steps_back == 0,
        "a frame was received twice without a death"
    );
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3000, ..ProptestConfig::default() })]

    #[test]
    fn no_chunk_leaks_or_doubles_wherever_the_owner_dies(
        ops in proptest::collection::vec(op(), 1..60),
        seed in any::<u64>(),
        index in prop_oneof![Just(0), Just(u32::MAX - 20), any::<u32>()],
    ) {
        run(&ops, seed, index);
    }
}

/// A script in which everything happens.
fn busy_round() -> [Op; 13] {
    let deliver = |segments| {
        Op::Kernel(KernelOp::Deliver {
            segments,
            at_once: true,
        })
    };
    [
        deliver(1),
        deliver(3),
        Op::Send {
            frames: 2,
            len: 9014,
        },
        Op::Flush,
        deliver(2),
        Op::Receive { budget: 2 },
        Op::Send { frames: 1, len: 60 },
        Op::Kernel(KernelOp::TakeTx),
        Op::Kernel(KernelOp::Complete { newest: false }),
        Op::Receive { budget: 40 },
        Op::Flush,
        Op::Kernel(KernelOp::Complete { newest: true }),
        Op::Reap,
    ]
}

/// One busy script, its owner killed at each of its crash points in turn.
#[test]
fn the_owner_dies_at_every_store_of_a_busy_script() {
    let round = busy_round();
    for after in 0..400 {
        for again in [None, Some(0), Some(7), Some(20)] {
            let mut ops = vec![Op::Die { after, again }];
            ops.extend(round.iter().cloned().cycle().take(3 * round.len()));
            run(&ops, u64::from(after) << 8 | 5, 0);
        }
    }
}

/// One socket taken over again and again, each time from an owner that died somewhere in a busy script, every third time from one that died
/// while it took over. Expect: after 10,000 takeovers and a wrap of all indices every chunk is there once (checked after each step).
#[test]
fn ten_thousand_takeovers_leak_no_chunk() {
    const TAKEOVERS: u32 = 10_000;
    let round = busy_round();
    let mut ops = Vec::new();
    for n in 0..TAKEOVERS {
        ops.push(Op::Die {
            after: n * 7 % 61,
            again: n.is_multiple_of(3).then_some(n % 23),
        });
        ops.extend(round.iter().cloned());
    }
    let deaths = run(&ops, 5, u32::MAX - 20_000);
    assert!(deaths >= TAKEOVERS, "only {deaths} takeovers");
}
