//! The port that receives steadily, on which outages are measured: a short message every 50 us from node 1 to node 2.
//!
//! An outage is the longest gap between two deliveries around a fault, seen by the receiving application, less the median gap without
//! one. Both ends ask for short turns, as an application would that cares for its latency. The gap holds all there is: noticing, fencing,
//! taking over, waking whoever slept, and what has to be sent again. The machine's own noise is in it too, so the same figure is taken for
//! spans without a fault and reported beside it.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use hdrhistogram::Histogram;
use portolan::{Event, Port, PortOptions, Priority, SendError, SendOptions, Wait};

use super::books::{Inbox, Outbox};
use super::clock::{now_ns, ns, sleep_until};
use super::letter::{Sizes, Stream};
use super::meter::{Meter, Orders};
use super::outcome::Times;

/// From one message to the next.
pub const INTERVAL: Duration = Duration::from_micros(50);
/// Bytes of each: inside the token.
pub const BYTES: usize = 32;
/// Shorter gaps are only counted.
const REMARKABLE_NS: u64 = 150_000;
/// How long the receiver waits before it looks at its orders.
const LOOK: Duration = Duration::from_millis(20);
/// Sends and buffers under way: what comes in an outage of 50 ms.
const TOKENS: u32 = 247;
const BUFFERS: u32 = 1000;

/// When the deliveries came.
#[derive(Debug)]
pub struct Gaps {
    /// Every gap, in nanoseconds.
    all: Histogram<u64>,
    /// The same since `begin_span`.
    span: Histogram<u64>,
    /// (from, to) of the remarkable ones.
    long: Vec<(u64, u64)>,
    last_ns: u64,
}

/// The log of the steady port, shared with who injects faults.
#[derive(Debug)]
pub struct GapLog(Mutex<Gaps>);

impl GapLog {
    fn new() -> Result<Self> {
        let all = Histogram::new_with_bounds(1, 60_000_000_000, 3)?;
        Ok(Self(Mutex::new(Gaps {
            span: all.clone(),
            all,
            long: Vec::new(),
            last_ns: 0,
        })))
    }

    fn gaps(&self) -> MutexGuard<'_, Gaps> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn delivered(&self, at_ns: u64) {
        let mut gaps = self.gaps();
        let last = std::mem::replace(&mut gaps.last_ns, at_ns);
        if last == 0 {
            return;
        }
        gaps.all.saturating_record(at_ns.saturating_sub(last));
        gaps.span.saturating_record(at_ns.saturating_sub(last));
        if at_ns.saturating_sub(last) >= REMARKABLE_NS {
            gaps.long.push((last, at_ns));
        }
    }

    /// The median gap so far.
    pub fn median_ns(&self) -> u64 {
        self.gaps().all.value_at_quantile(0.5)
    }

    /// From here on gaps are counted by `add_span_to` too.
    pub fn begin_span(&self) {
        self.gaps().span.reset();
    }

    /// Adds every gap that ended since `begin_span`.
    pub fn add_span_to(&self, times: &mut Times) {
        times.add(&self.gaps().span);
    }

    /// The longest gap that touches this span, which lies in the past; 0 if none was remarkable.
    pub fn longest_ns(&self, from_ns: u64, to_ns: u64) -> u64 {
        self.longest(from_ns, to_ns)
            .map_or(0, |(from, to)| to - from)
    }

    /// When the longest gap that touches this span ended.
    pub fn longest_end_ns(&self, from_ns: u64, to_ns: u64) -> Option<u64> {
        self.longest(from_ns, to_ns).map(|(_, to)| to)
    }

    fn longest(&self, from_ns: u64, to_ns: u64) -> Option<(u64, u64)> {
        let gaps = self.gaps();
        // Nothing came since: a gap that is not over.
        let open = (gaps.last_ns > 0 && gaps.last_ns + REMARKABLE_NS < to_ns)
            .then_some((gaps.last_ns, to_ns));
        let all = gaps.long.iter().copied().chain(open);
        all.filter(|(from, to)| *to > from_ns && *from < to_ns)
            .max_by_key(|(from, to)| to - from)
    }

    /// Gaps before this time are of no interest any more.
    pub fn forget_before(&self, ns: u64) {
        self.gaps().long.retain(|(_, to)| *to >= ns);
    }
}

/// Options of the two ports.
pub fn options(port: u16, sealed: bool) -> PortOptions {
    PortOptions {
        send_tokens: TOKENS,
        receive_tokens: BUFFERS,
        arena_bytes: 1 << 20,
        // Spinning would take the core from an engine.
        wait: Wait::Adaptive {
            spin: Duration::ZERO,
        },
        integrity: super::load::integrity(sealed),
        ..PortOptions::at(port)
    }
}

/// The steady stream, running.
pub struct Steady {
    pub log: Arc<GapLog>,
    pub sender: Arc<Meter>,
    pub receiver: Arc<Meter>,
    stream: Stream,
    send: JoinHandle<Outbox>,
    receive: JoinHandle<Inbox>,
}

impl Steady {
    /// Starts both ends.
    pub fn start(from: Port, mut to: Port, orders: &Arc<Orders>) -> Result<Self> {
        let stream = Stream {
            from: from.address(),
            to: to.address(),
            sizes: Sizes::Fixed(BYTES),
        };
        while to.receive_tokens() > 0 {
            let buffer = to.allocate(BYTES)?;
            to.provide_receive_buffer(buffer, Priority::High)?;
        }
        let log = Arc::new(GapLog::new()?);
        let [sender, receiver] = [(); 2].map(|()| Arc::<Meter>::default());
        let receive = {
            let (log, meter, orders) = (log.clone(), receiver.clone(), orders.clone());
            spawn("steady receiver", move || {
                portolan::turns::short();
                let mut inbox = Inbox::default();
                if let Err(error) = receive(to, &stream, &mut inbox, &log, &meter, &orders) {
                    orders.give_up(format!("{} (steady): {error:#}", stream.to));
                }
                inbox
            })?
        };
        let send = {
            let (meter, orders) = (sender.clone(), orders.clone());
            spawn("steady sender", move || {
                portolan::turns::short();
                let mut outbox = Outbox::default();
                if let Err(error) = send(from, &stream, &mut outbox, &meter, &orders) {
                    orders.give_up(format!("{} (steady): {error:#}", stream.from));
                }
                outbox
            })?
        };
        Ok(Self {
            log,
            sender,
            receiver,
            stream,
            send,
            receive,
        })
    }

    /// Waits for both threads, which were told to leave, and hands back their books and what integrity reported.
    pub fn join(self) -> Result<(Stream, Outbox, Inbox, u64)> {
        let join = |_| anyhow::anyhow!("a thread of the steady port panicked");
        let outbox = self.send.join().map_err(join)?;
        let inbox = self.receive.join().map_err(join)?;
        let meters = [&self.sender, &self.receiver];
        let reported = meters.map(|meter| meter.reported.load(Ordering::Relaxed));
        Ok((self.stream, outbox, inbox, reported.iter().sum()))
    }
}

fn spawn<T: Send + 'static>(
    name: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<JoinHandle<T>> {
    let thread = std::thread::Builder::new()
        .name(name.to_owned())
        .spawn(work);
    thread.context("thread of the steady port")
}

fn receive(
    mut port: Port,
    stream: &Stream,
    inbox: &mut Inbox,
    log: &GapLog,
    meter: &Meter,
    orders: &Orders,
) -> Result<()> {
    loop {
        let leave = orders.is_over();
        let wait = if leave { Duration::ZERO } else { LOOK };
        if orders.is_quiet() {
            meter.integrity(&mut port, orders)?;
        }
        let event = port.blocking_receive(wait)?;
        event.iter().for_each(|event| meter.event(event));
        match event {
            Some(Event::Received(message)) => {
                log.delivered(now_ns());
                inbox.came(message.tag(), stream.check(&message));
                meter.received.fetch_add(1, Ordering::Relaxed);
                meter.troubles.store(inbox.troubles(), Ordering::Relaxed);
                let buffer = message.into_buffer();
                if let Err(refused) = port.provide_receive_buffer(buffer, Priority::High) {
                    bail!("a buffer is not taken back: {}", refused.error);
                }
            }
            Some(other) => port.unknown(other),
            None if leave => return Ok(()),
            None => {}
        }
        meter.anomalies.store(port.anomalies(), Ordering::Relaxed);
    }
}

fn send(
    mut port: Port,
    stream: &Stream,
    outbox: &mut Outbox,
    meter: &Meter,
    orders: &Orders,
) -> Result<()> {
    // The kernel may otherwise wake us 50 us late on purpose.
    rustix::thread::set_current_timer_slack(std::num::NonZeroU64::new(1)).context("timer slack")?;
    let interval = ns(INTERVAL);
    let mut due = now_ns();
    let mut bytes = [0; BYTES];
    loop {
        let leave = orders.is_over();
        meter.outstanding.fetch_add(1, Ordering::SeqCst);
        if !orders.is_quiet() && port.send_tokens() > 0 {
            let number = outbox.next;
            stream.fill(number, &mut bytes);
            let options = SendOptions {
                priority: Priority::High,
                tag: number,
                timeout: Some(super::load::SEND_TIMEOUT),
                ..SendOptions::default()
            };
            match port.send_bytes(stream.to, &bytes, options) {
                Ok(_) => outbox.next += 1,
                Err(SendError::NoToken) => {}
                Err(error) => return Err(error).context("send"),
            }
        }
        if orders.is_quiet() {
            meter.integrity(&mut port, orders)?;
        }
        let mut handled = 0;
        while let Some(event) = port.receive()? {
            handled += 1;
            meter.event(&event);
            if let Event::Sent(sent) = &event {
                outbox.end(sent.tag, sent.status);
            }
            port.unknown(event);
        }
        meter
            .outstanding
            .store(outbox.outstanding(), Ordering::SeqCst);
        meter.failed.store(outbox.failed(), Ordering::Relaxed);
        meter.anomalies.store(port.anomalies(), Ordering::Relaxed);
        if leave && handled == 0 {
            return Ok(());
        }
        // Whoever was late does not hurry: what follows a pause must not look like a burst.
        due = (due + interval).max(now_ns());
        sleep_until(due);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Deliveries every 50 us, then a pause, then one that is not over. Expect: each found in the spans it touches and in no other.
    #[test]
    fn the_longest_gap_of_a_span_is_found() {
        let log = GapLog::new().unwrap();
        let us = |us: u64| us * 1000;
        for at in (50..=1000).step_by(50).chain((5000..=6000).step_by(50)) {
            log.delivered(us(at));
        }
        assert_eq!(log.median_ns() / 1000, 50);
        assert_eq!(log.longest_ns(us(100), us(900)), 0);
        assert_eq!(log.longest_ns(us(900), us(1100)), us(4000));
        assert_eq!(log.longest_ns(us(4000), us(6000)), us(4000));
        assert_eq!(log.longest_end_ns(us(4000), us(6000)), Some(us(5000)));
        assert_eq!(log.longest_ns(us(5500), us(6100)), 0);
        assert_eq!(log.longest_ns(us(5500), us(9000)), us(3000));
        log.forget_before(us(5500));
        assert_eq!(log.longest_ns(us(900), us(1100)), 0);
    }

    // Deliveries 50 us apart, then a span begins, in which the first comes after 50 us and five more 80 us apart. Expect: these six, added
    // as often as they are asked for.
    #[test]
    fn a_span_has_the_gaps_since_it_began() {
        let log = GapLog::new().unwrap();
        let mut at = 1;
        for gap in [[50_000; 10].as_slice(), &[80_000; 5]] {
            log.begin_span();
            for gap in gap {
                log.delivered(at);
                at += gap;
            }
        }
        log.delivered(at);
        let mut times = Times::new().unwrap();
        log.add_span_to(&mut times);
        log.add_span_to(&mut times);
        assert_eq!(times.samples(), 12);
        assert!((times.quantile(0.5) - 80.0).abs() < 0.1);
    }
}
