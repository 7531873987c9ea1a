//! Cases asked of actors: the same questions, whoever they are.

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use hdrhistogram::Histogram;

use super::{Figure, metric, unit};
use crate::actor::{Actor, Answer, Flow, Job, Order, Totals};
use crate::cases::Case;
use crate::statistics::jain;

/// Bound on an answer beyond the time that is measured: one message may take as long as actors wait for it.
const GRACE: Duration = Duration::from_secs(10);

/// Actors on side one, most often one, and one on side two.
pub struct Pair {
    /// Who sends, or begins.
    pub one: Vec<Actor>,
    /// Who receives, or answers.
    pub two: Actor,
}

impl Pair {
    /// Asks a case.
    ///
    /// # Errors
    /// What went wrong with an actor, or a case that actors cannot answer in general.
    pub fn measure(&mut self, case: &Case, lasting: Duration) -> Result<Vec<Figure>> {
        let bytes = case.bytes();
        match case {
            Case::PingPong { .. } => Ok(vec![self.ping_pong(bytes, lasting)?]),
            Case::Rate { .. } => Ok(vec![self.one_way(bytes, lasting)?.0]),
            Case::Stream { .. } => Ok(vec![self.one_way(bytes, lasting)?.1]),
            Case::AllSize { .. } => Ok(vec![
                self.ping_pong(bytes, lasting)?,
                self.one_way(bytes, lasting)?.1,
                self.both_ways(bytes, lasting)?,
            ]),
            Case::FanIn { senders: pairs }
            | Case::Ports { ports: pairs }
            | Case::Queues { queues: pairs } => self.fairness(bytes, usize::from(*pairs), lasting),
            Case::Idle { .. } | Case::Startup => bail!("{case} is not asked of actors in general"),
        }
    }

    /// Nothing to do for so long, then a message to somebody asleep. What `watched` says before and after the time without work, and how long
    /// the message took.
    ///
    /// # Errors
    /// What went wrong with an actor, or with who watches.
    pub fn after_idling<W>(
        &mut self,
        lasting: Duration,
        watched: impl Fn() -> Result<W>,
    ) -> Result<([W; 2], Figure)> {
        self.two.prepare(Job::Await)?;
        self.first()?.prepare(Job::Stamp)?;
        self.two.order(Order::Go)?;
        // What the first message left to do is done.
        std::thread::sleep(lasting / 4);
        let before = watched()?;
        std::thread::sleep(lasting);
        let after = watched()?;
        self.first()?.order(Order::Go)?;
        let way = match self.two.answer(GRACE)? {
            Answer::Ways(way) => way,
            other => bail!("a way was expected, not {other:?}"),
        };
        match self.first()?.answer(GRACE)? {
            Answer::Done => {}
            other => bail!("a sender says {other:?}"),
        }
        self.two.stop()?;
        let first = Figure::times(metric::FIRST, histogram(&way)?);
        Ok(([before, after], first))
    }

    fn first(&mut self) -> Result<&mut Actor> {
        self.one.first_mut().context("nobody on side one")
    }

    fn ping_pong(&mut self, bytes: usize, lasting: Duration) -> Result<Figure> {
        let ns = nanoseconds(lasting);
        self.two.prepare(Job::Echo { bytes })?;
        self.first()?
            .prepare(Job::PingPong { bytes, lasting: ns })?;
        self.two.order(Order::Go)?;
        self.first()?.order(Order::Go)?;
        let ways = match self.first()?.answer(lasting * 2 + GRACE)? {
            Answer::Ways(ways) => ways,
            other => bail!("ways were expected, not {other:?}"),
        };
        self.first()?.stop()?;
        self.two.stop()?;
        Ok(Figure::times(metric::ONE_WAY, histogram(&ways)?))
    }

    /// What came at side two, and what should be known beside it.
    fn flow(&mut self, bytes: usize, lasting: Duration) -> Result<(Flow, Option<String>)> {
        let job = |send, receive| Job::Flow {
            bytes,
            send,
            receive,
            lasting: nanoseconds(lasting),
        };
        self.two.prepare(job(false, true))?;
        for actor in &mut self.one {
            actor.prepare(job(true, false))?;
        }
        self.two.order(Order::Go)?;
        for actor in &mut self.one {
            actor.order(Order::Go)?;
        }
        let flow = self.two.flow(lasting)?;
        let mut sent = 0;
        for actor in &mut self.one {
            sent += actor.settle(None)?.sent;
        }
        let came = self.two.settle(Some(sent))?;
        for actor in &mut self.one {
            actor.stop()?;
        }
        self.two.stop()?;
        let lost = lost(sent, &came, bytes)?;
        let note = lost.or_else(|| missed(&flow));
        Ok((flow, note))
    }

    /// Messages, and payload.
    fn one_way(&mut self, bytes: usize, lasting: Duration) -> Result<(Figure, Figure)> {
        let (flow, note) = self.flow(bytes, lasting)?;
        let seconds = flow.ns as f64 / 1e9;
        let messages = flow.messages as f64 / seconds;
        let bits = flow.bytes as f64 * 8.0 / seconds;
        Ok((
            Figure::number(metric::RATE, messages, unit::PER_SECOND).with_note(note.clone()),
            Figure::number(metric::THROUGHPUT, bits, unit::BITS).with_note(note),
        ))
    }

    fn both_ways(&mut self, bytes: usize, lasting: Duration) -> Result<Figure> {
        let (send, receive) = (true, true);
        let job = Job::Flow {
            bytes,
            send,
            receive,
            lasting: nanoseconds(lasting),
        };
        self.two.prepare(job)?;
        self.first()?.prepare(job)?;
        self.two.order(Order::Go)?;
        self.first()?.order(Order::Go)?;
        let flows = [self.first()?.flow(lasting)?, self.two.flow(lasting)?];
        // Both are told before anybody is waited for: who is sent to without end does not settle. Each goes on taking what the other has under way.
        let expected = None;
        self.first()?.order(Order::Quiet { expected })?;
        self.two.order(Order::Quiet { expected })?;
        let from_one = self.first()?.settled()?.sent;
        let from_two = self.two.settled()?.sent;
        let two = self.two.settle(Some(from_one))?;
        let one = self.first()?.settle(Some(from_two))?;
        let lost = lost(from_one, &two, bytes)?.or(lost(from_two, &one, bytes)?);
        self.first()?.stop()?;
        self.two.stop()?;
        let bits = flows
            .iter()
            .map(|flow| flow.bytes as f64 * 8e9 / flow.ns as f64);
        let [one, two] = &flows;
        let note = lost.or_else(|| missed(one)).or_else(|| missed(two));
        Ok(Figure::number(metric::BOTH_WAYS, bits.sum(), unit::BITS).with_note(note))
    }

    /// Of so many pairs of ports.
    fn fairness(&mut self, bytes: usize, pairs: usize, lasting: Duration) -> Result<Vec<Figure>> {
        let (flow, note) = self.flow(bytes, lasting)?;
        let bits = flow.bytes as f64 * 8e9 / flow.ns as f64;
        Ok(vec![
            Figure::number(
                metric::FAIRNESS,
                jain(&shares(&flow.shares, pairs)?),
                unit::ONE,
            ),
            Figure::number(metric::THROUGHPUT, bits, unit::BITS).with_note(note),
        ])
    }
}

/// What each of so many pairs had. Nobody saw anything of who had nothing, and that is where fairness is worst.
fn shares(seen: &[u64], pairs: usize) -> Result<Vec<f64>> {
    if seen.len() > pairs {
        bail!("{} pairs of ports talked, of {pairs}", seen.len());
    }
    let mut shares: Vec<f64> = seen.iter().map(|&share| share as f64).collect();
    shares.resize(pairs, 0.0);
    Ok(shares)
}

impl Actor {
    fn flow(&mut self, lasting: Duration) -> Result<Flow> {
        match self.answer(lasting * 2 + GRACE)? {
            Answer::Flow(flow) => Ok(flow),
            other => bail!("a flow was expected, not {other:?}"),
        }
    }
}

/// What is said of messages that never came.
///
/// # Errors
/// More came than were sent, or others.
fn lost(sent: u64, came: &Totals, bytes: usize) -> Result<Option<String>> {
    let (messages, whole) = (came.came, came.came * bytes as u64);
    ensure!(
        messages <= sent,
        "{messages} messages came, {sent} were sent"
    );
    ensure!(
        came.came_bytes == whole || messages < sent,
        "{} bytes came, not {whole}",
        came.came_bytes
    );
    let lost = sent - messages;
    Ok((lost > 0).then(|| format!("{lost} of {sent} messages were lost")))
}

fn missed(flow: &Flow) -> Option<String> {
    (flow.missed > 0).then(|| format!("{} frames found no room", flow.missed))
}

/// A histogram of times and how often each was seen.
///
/// # Errors
/// None that can be met: the bounds are good.
pub fn histogram(times: &[(u64, u64)]) -> Result<Histogram<u64>> {
    let mut histogram = crate::actor::histogram()?;
    for &(time, count) in times {
        histogram.saturating_record_n(time, count);
    }
    Ok(histogram)
}

/// A duration, for an actor.
pub fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    // Three of four senders had something, the fourth was never heard of. Expect: it counts as one that had nothing.
    #[test]
    fn who_was_never_heard_of_counts_against_fairness() {
        let shares = shares(&[5, 5, 5], 4).unwrap();
        assert!((jain(&shares) - 0.75).abs() < 1e-9);
        assert!(super::shares(&[1, 1, 1], 2).is_err());
    }

    // What was sent held against what came. Expect: a word where some are missing, an error where there are more, or other bytes.
    #[test]
    fn messages_that_never_came_are_told() {
        let came = |came, came_bytes| Totals {
            sent: 0,
            came,
            came_bytes,
        };
        assert_eq!(lost(5, &came(5, 50), 10).unwrap(), None);
        let said = lost(5, &came(3, 30), 10).unwrap().unwrap();
        assert!(said.starts_with("2 of 5"), "{said}");
        assert!(lost(5, &came(6, 60), 10).is_err());
        assert!(lost(5, &came(5, 49), 10).is_err());
    }
}
