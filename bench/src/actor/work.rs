//! What actors do, the same for every subject.

use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use hdrhistogram::Histogram;

use super::orders::{Orders, Phase};
use super::{Answer, Arrival, Ends, Flow, Job, Totals};

/// Messages handed over, or taken, before an actor looks at anything else.
const BURST: usize = 64;
/// Bound on one message, and on the first.
const ARRIVED: Duration = Duration::from_secs(5);
/// Silence after which nothing is under way any more: who relays has passed on what it had.
const SILENCE: Duration = Duration::from_millis(3);
/// The same while something is missing: then it is lost.
const LONG_SILENCE: Duration = Duration::from_millis(300);
/// Looks at an empty ring between two looks at the clock.
const LOOKS: u32 = 1024;
/// The longest way that is told apart.
const LONGEST_NS: u64 = 10_000_000_000;

/// Does one job after the other.
///
/// # Errors
/// Only that nobody listens any more: what goes wrong in a job is answered.
pub fn serve(ends: &mut impl Ends, orders: &Orders) -> Result<()> {
    orders.answer(&Answer::Ready)?;
    while let Some(job) = orders.next() {
        let answer = match perform(ends, &job, orders) {
            Ok(()) => Answer::Done,
            Err(error) => Answer::Failed(format!("{job:?}: {error:#}")),
        };
        orders.answer(&answer)?;
    }
    Ok(())
}

fn perform(ends: &mut impl Ends, job: &Job, orders: &Orders) -> Result<()> {
    match *job {
        Job::Stamp | Job::Await | Job::Startup { .. } => return ends.special(job, orders),
        Job::PingPong { bytes, .. } | Job::Echo { bytes } | Job::Flow { bytes, .. } => {
            ends.prepare(bytes)?;
        }
    }
    orders.ready()?;
    match *job {
        Job::PingPong { bytes, lasting } => {
            let ways = ping(ends, bytes, Duration::from_nanos(lasting))?;
            orders.answer(&Answer::Ways(counts(&ways)))?;
            until_over(orders, || {
                ends.receive(0)?;
                ends.pause();
                Ok(())
            })
        }
        Job::Echo { bytes } => until_over(orders, || match ends.receive(0)? {
            Some(_) => hand_over(ends, bytes),
            None => {
                ends.pause();
                Ok(())
            }
        }),
        Job::Flow {
            bytes,
            send,
            receive,
            lasting,
        } => {
            let tally = receive.then(|| Tally::new(ends.count(), Duration::from_nanos(lasting)));
            flow(ends, bytes, send, tally, orders)
        }
        _ => Ok(()),
    }
}

/// A histogram of times in nanoseconds.
pub fn histogram() -> Result<Histogram<u64>> {
    Ok(Histogram::new_with_bounds(1, LONGEST_NS, 3)?)
}

/// What a histogram holds.
pub fn counts(ways: &Histogram<u64>) -> Vec<(u64, u64)> {
    ways.iter_recorded()
        .map(|step| (step.value_iterated_to(), step.count_at_value()))
        .collect()
}

fn until_over(orders: &Orders, mut step: impl FnMut() -> Result<()>) -> Result<()> {
    while orders.phase() != Phase::Over {
        step()?;
    }
    Ok(())
}

/// There and back for so long; ways after the first quarter.
fn ping(ends: &mut impl Ends, bytes: usize, lasting: Duration) -> Result<Histogram<u64>> {
    let mut ways = histogram()?;
    let mut began = Instant::now();
    let warm = began + lasting / 4;
    let end = warm + lasting;
    loop {
        hand_over(ends, bytes)?;
        let arrival = arrival(ends, began)?;
        ensure!(
            arrival.bytes == bytes,
            "{} bytes came back of {bytes}",
            arrival.bytes
        );
        let now = Instant::now();
        if began >= warm {
            ways.saturating_record((now - began).as_nanos() as u64 / 2);
        }
        if now >= end {
            // A message may be longer under way than all of it was to last.
            if ways.is_empty() {
                ways.saturating_record((now - began).as_nanos() as u64 / 2);
            }
            return Ok(ways);
        }
        began = now;
    }
}

fn hand_over(ends: &mut impl Ends, bytes: usize) -> Result<()> {
    let mut looks = 0u32;
    let mut deadline = None;
    while !ends.send(0, bytes)? {
        // Room comes by what ends.
        if let Some(early) = ends.receive(0)? {
            bail!("{} bytes came out of turn", early.bytes);
        }
        ends.pause();
        looks = looks.wrapping_add(1);
        if looks.is_multiple_of(LOOKS) {
            let deadline = *deadline.get_or_insert_with(|| Instant::now() + ARRIVED);
            ensure!(
                Instant::now() < deadline,
                "a message cannot be sent within {ARRIVED:?}"
            );
        }
    }
    Ok(())
}

fn arrival(ends: &mut impl Ends, began: Instant) -> Result<Arrival> {
    let mut looks = 0u32;
    loop {
        if let Some(arrival) = ends.receive(0)? {
            return Ok(arrival);
        }
        ends.pause();
        looks = looks.wrapping_add(1);
        if looks.is_multiple_of(LOOKS) {
            ensure!(
                began.elapsed() < ARRIVED,
                "a message did not come back within {ARRIVED:?}"
            );
        }
    }
}

fn flow(
    ends: &mut impl Ends,
    bytes: usize,
    send: bool,
    mut tally: Option<Tally>,
    orders: &Orders,
) -> Result<()> {
    let mut totals = Totals::default();
    let missed_before = ends.missed();
    let (mut settled, _) = orders.quiet();
    let mut quiet_since = None;
    loop {
        let phase = orders.phase();
        if phase == Phase::Over {
            return Ok(());
        }
        let mut moved = false;
        for end in 0..ends.count() {
            if send {
                for _ in 0..BURST {
                    let goes_on = phase == Phase::Running || ends.partial(end);
                    if !goes_on || !ends.send(end, bytes)? {
                        break;
                    }
                    totals.sent += 1;
                    moved = true;
                }
            }
            for _ in 0..BURST {
                let Some(arrival) = ends.receive(end)? else {
                    break;
                };
                moved = true;
                totals.came += 1;
                totals.came_bytes += arrival.bytes as u64;
                if let Some(tally) = &mut tally {
                    tally.add(end, arrival);
                }
            }
        }
        if let Some(tally) = &mut tally
            && let Some(mut flow) = tally.look(Instant::now())?
        {
            flow.missed = ends.missed().saturating_sub(missed_before);
            orders.answer(&Answer::Flow(flow))?;
        }
        if moved {
            quiet_since = None;
            continue;
        }
        let (told, expected) = orders.quiet();
        if phase == Phase::Quiet && settled != told && ends.settled()? {
            let now = Instant::now();
            let silence = match expected.is_some_and(|count| totals.came < count) {
                true => LONG_SILENCE,
                false => SILENCE,
            };
            if now - *quiet_since.get_or_insert(now) >= silence {
                settled = told;
                orders.answer(&Answer::Settled(totals))?;
            }
        }
        ends.pause();
    }
}

/// Counts what comes: from a quarter of the time after the first message on, for so long. It begins and ends with a message, so that
/// few long ones are measured as well as many short ones.
struct Tally {
    lasting: Duration,
    /// When something came last, or it began.
    last: Instant,
    state: Counting,
    /// Something came since the last look.
    is_fresh: bool,
    messages: u64,
    bytes: u64,
    /// By end and source.
    shares: Vec<(usize, u32, u64)>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Counting {
    NothingYet,
    Warm(Instant),
    Since(Instant),
    Told,
}

impl Tally {
    fn new(ends: usize, lasting: Duration) -> Self {
        Self {
            lasting,
            last: Instant::now(),
            state: Counting::NothingYet,
            is_fresh: false,
            messages: 0,
            bytes: 0,
            shares: Vec::with_capacity(ends),
        }
    }

    fn add(&mut self, end: usize, arrival: Arrival) {
        self.is_fresh = true;
        self.messages += 1;
        self.bytes += arrival.bytes as u64;
        let same = |share: &&mut (usize, u32, u64)| share.0 == end && share.1 == arrival.source;
        match self.shares.iter_mut().find(same) {
            Some((.., count)) => *count += 1,
            None => self.shares.push((end, arrival.source, 1)),
        }
    }

    /// Once the time is over, what was counted.
    fn look(&mut self, now: Instant) -> Result<Option<Flow>> {
        if self.state == Counting::Told {
            return Ok(None);
        }
        if !std::mem::take(&mut self.is_fresh) {
            ensure!(now - self.last < ARRIVED, "nothing came within {ARRIVED:?}");
            return Ok(None);
        }
        self.last = now;
        match self.state {
            Counting::NothingYet => self.state = Counting::Warm(now + self.lasting / 4),
            Counting::Warm(until) if now >= until => {
                (self.messages, self.bytes) = (0, 0);
                // Sources that have been seen keep their place: who sends nothing from now on counts with nothing.
                self.shares.iter_mut().for_each(|share| share.2 = 0);
                self.state = Counting::Since(now);
            }
            Counting::Since(since) if now - since >= self.lasting => {
                self.state = Counting::Told;
                return Ok(Some(Flow {
                    messages: self.messages,
                    bytes: self.bytes,
                    ns: (now - since).as_nanos() as u64,
                    shares: self.shares.iter().map(|share| share.2).collect(),
                    missed: 0,
                }));
            }
            _ => {}
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(source: u32) -> Arrival {
        Arrival { bytes: 10, source }
    }

    // Messages before the window, in it and after it. Expect: only those in it count, up to the one that ends it, and a source that fell
    // silent has a share of 0.
    #[test]
    fn only_what_comes_in_the_window_counts() {
        let lasting = Duration::from_millis(100);
        let mut tally = Tally::new(1, lasting);
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        tally.add(0, message(1));
        tally.add(0, message(2));
        assert!(tally.look(at(0)).unwrap().is_none());
        tally.add(0, message(1));
        assert!(tally.look(at(25)).unwrap().is_none());
        for _ in 0..6 {
            tally.add(0, message(1));
        }
        assert!(tally.look(at(124)).unwrap().is_none());
        // Nothing came: it goes on until something does.
        assert!(tally.look(at(126)).unwrap().is_none());
        tally.add(0, message(1));
        let flow = tally.look(at(225)).unwrap().unwrap();
        assert_eq!((flow.messages, flow.bytes), (7, 70));
        assert_eq!(flow.ns, 200_000_000);
        assert_eq!(flow.shares, [7, 0]);
        tally.add(0, message(1));
        assert!(tally.look(at(500)).unwrap().is_none());
    }

    // Nothing at all, and nothing any more. Expect: an error, not a wait without end, nor a low figure.
    #[test]
    fn silence_is_an_error() {
        let mut tally = Tally::new(1, Duration::from_millis(1));
        let now = Instant::now();
        assert!(tally.look(now + ARRIVED * 2).is_err());
        let mut tally = Tally::new(1, Duration::from_millis(1));
        tally.add(0, message(1));
        assert!(tally.look(now).unwrap().is_none());
        assert!(tally.look(now + ARRIVED * 2).is_err());
    }
}
