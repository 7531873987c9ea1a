//! Well-behaved applications, by the client library: those who must not notice anything.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use portolan::{Event, Node, Port, PortOptions, Priority, SendOptions};

use super::STEP;

/// A thread that is told to stop, and whose panic is ours.
struct Worker {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    fn start(work: impl FnOnce(&AtomicBool) + Send + 'static) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let flag = Arc::clone(&stop);
        let thread = std::thread::spawn(move || work(&flag));
        Self {
            stop,
            thread: Some(thread),
        }
    }

    fn finish(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take()
            && let Err(panic) = thread.join()
            && !std::thread::panicking()
        {
            std::panic::resume_unwind(panic);
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.finish();
    }
}

/// How long a worker waits for an event before it looks whether it is to stop.
const TURN: Duration = Duration::from_millis(20);

/// Sends back every message of up to 2048 bytes; longer ones end here. Peers may misbehave.
pub struct Echo {
    _worker: Worker,
}

impl Echo {
    const BUFFER: usize = 64 * 1024;
    const LONGEST: usize = 2048;

    pub fn start(socket: PathBuf, number: u16) -> Self {
        let (ready, is_ready) = std::sync::mpsc::channel();
        let worker = Worker::start(move |stop| {
            let node = Node::attach(&socket).unwrap();
            let mut port = node.open_port(PortOptions::at(number)).unwrap();
            for _ in 0..64 {
                let buffer = port.allocate(Self::BUFFER).unwrap();
                port.provide_receive_buffer(buffer, Priority::Low).unwrap();
            }
            ready.send(()).unwrap();
            while !stop.load(Ordering::Relaxed) {
                if let Some(event) = port.blocking_receive(TURN).unwrap() {
                    Self::answer(&mut port, event);
                }
            }
        });
        is_ready
            .recv_timeout(STEP)
            .expect("the echo opens its port");
        Self { _worker: worker }
    }

    fn answer(port: &mut Port, event: Event) {
        let back = match event {
            Event::Received(message) => {
                let (from, len) = (message.from(), message.len());
                let buffer = message.into_buffer();
                if len > Self::LONGEST {
                    buffer
                } else {
                    // Whoever does not take its echo soon has none.
                    let options = SendOptions {
                        timeout: Some(Duration::from_millis(500)),
                        ..SendOptions::default()
                    };
                    match port.send(from, buffer, len, options) {
                        Ok(_) => return,
                        Err(refused) => refused.buffer,
                    }
                }
            }
            Event::Sent(sent) => {
                if !sent.status.is_delivered() {
                    port.resume_sending(sent.to, sent.priority).unwrap();
                }
                match sent.buffer {
                    Some(buffer) => buffer,
                    None => return,
                }
            }
            other => return port.unknown(other),
        };
        port.provide_receive_buffer(back, Priority::Low).unwrap();
    }
}

/// Sends 64 bytes to an echo, checks what comes back, and again.
pub struct PingPong {
    worker: Worker,
    rounds: Arc<AtomicU64>,
    longest_ns: Arc<AtomicU64>,
}

impl PingPong {
    pub fn start(socket: PathBuf, number: u16, to: (u16, u16)) -> Self {
        let rounds = Arc::new(AtomicU64::new(0));
        let longest_ns = Arc::new(AtomicU64::new(0));
        let (count, longest) = (Arc::clone(&rounds), Arc::clone(&longest_ns));
        let worker = Worker::start(move |stop| {
            let node = Node::attach(&socket).unwrap();
            let mut port = node.open_port(PortOptions::at(number)).unwrap();
            for _ in 0..8 {
                let buffer = port.allocate(256).unwrap();
                port.provide_receive_buffer(buffer, Priority::Low).unwrap();
            }
            let mut sequence = 0u64;
            while !stop.load(Ordering::Relaxed) {
                sequence += 1;
                let began = Instant::now();
                Self::round(&mut port, to, sequence);
                let took = u64::try_from(began.elapsed().as_nanos()).unwrap();
                longest.fetch_max(took, Ordering::Relaxed);
                count.fetch_add(1, Ordering::Relaxed);
            }
        });
        Self {
            worker,
            rounds,
            longest_ns,
        }
    }

    fn round(port: &mut Port, to: (u16, u16), sequence: u64) {
        let sent: Vec<u8> = (0..8)
            .flat_map(|i| (sequence ^ (0x0101_0101_0101_0101 * i)).to_le_bytes())
            .collect();
        port.send_bytes(to, &sent, SendOptions::default()).unwrap();
        let (mut back, mut delivered) = (false, false);
        while !(back && delivered) {
            match port.blocking_receive(STEP).unwrap() {
                Some(Event::Received(message)) => {
                    // Nobody else knows what to send here: a message that is not the echo is cross-talk.
                    assert_eq!(message.from(), to.into());
                    assert_eq!(&*message, sent, "of round {sequence}");
                    assert!(!back, "twice in round {sequence}");
                    back = true;
                    let buffer = message.into_buffer();
                    port.provide_receive_buffer(buffer, Priority::Low).unwrap();
                }
                Some(Event::Sent(sent)) => {
                    assert!(sent.status.is_delivered(), "{}", sent.status);
                    delivered = true;
                }
                Some(other) => port.unknown(other),
                None => panic!("round {sequence} does not end: back {back}, delivered {delivered}"),
            }
        }
    }

    /// Rounds so far.
    pub fn rounds(&self) -> u64 {
        self.rounds.load(Ordering::Relaxed)
    }

    /// The longest round since this was asked last.
    pub fn longest(&self) -> Duration {
        Duration::from_nanos(self.longest_ns.swap(0, Ordering::Relaxed))
    }

    /// Waits for some more rounds: traffic goes on.
    #[track_caller]
    pub fn assert_goes_on(&self) {
        let enough = self.rounds() + 20;
        super::watch::wait_until("the bystander's traffic goes on", STEP, || {
            self.rounds() >= enough
                || self
                    .worker
                    .thread
                    .as_ref()
                    .is_none_or(JoinHandle::is_finished)
        });
        assert!(self.rounds() >= enough, "the bystander gave up");
    }
}
