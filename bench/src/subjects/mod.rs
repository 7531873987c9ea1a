//! Subjects: whose speed is measured.
//!
//! A subject is a pair of processes, or more, placed in the two namespaces of one veth pair, on the same two cores as every other
//! subject. The bench starts it for a group of cases, asks it one case after the other, and drops it, which must leave the interfaces
//! as they were found and no process behind: the next subject is started on them a moment later.
//!
//! One is written on [`Pair`], with actors of this program, so that everybody is measured by the same loop. To be measured it must be in the
//! list that [`all`] makes.

mod aeron;
mod foreign;
mod kernel;
mod limits;
mod mpi;
mod offloads;
mod pair;
mod portolan;
mod scene;

use std::time::Duration;

use anyhow::Result;
use hdrhistogram::Histogram;

use crate::cases::Case;
pub use pair::Pair;
pub use scene::{Scene, Side};

/// Who is measured.
pub trait Subject {
    /// As DESIGN §9 names it.
    fn name(&self) -> &str;

    /// What it is: its version, and how it is run.
    fn about(&self) -> About;

    /// Whether it is measured only with `--peers`, or when it is named.
    fn is_extra(&self) -> bool {
        false
    }

    /// Whether it has an answer to this case.
    fn offers(&self, case: &Case) -> bool;

    /// Starts it, ready to be asked these cases, all of which it offers. Whatever it changes of the scene is changed back when what is
    /// returned is dropped.
    ///
    /// # Errors
    /// Why it cannot be started.
    fn start<'a>(&'a self, scene: &'a Scene<'a>, cases: &[Case]) -> Result<Box<dyn Started + 'a>>;
}

/// A subject that was started. Dropping it ends it.
pub trait Started {
    /// Answers a case, measured for about so long. A size of [`Case::AllSize`] has three answers, other cases one or more.
    ///
    /// # Errors
    /// Why there is no answer.
    fn measure(&mut self, case: &Case, lasting: Duration) -> Result<Vec<Figure>>;
}

/// What a report says of a subject.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct About {
    /// Of the software.
    pub version: String,
    /// How it is run, as one would type it, or in words.
    pub command: String,
}

/// One answer.
#[derive(Clone, Debug)]
pub struct Figure {
    /// What it is: one of the constants of [`metric`].
    pub metric: &'static str,
    /// How much.
    pub value: Value,
    /// What should be known beside it, if anything.
    pub note: Option<String>,
}

/// How much.
#[derive(Clone, Debug)]
pub enum Value {
    /// Times in nanoseconds.
    Times(Histogram<u64>),
    /// A number and its unit: one of the constants of [`mod@unit`].
    Number(f64, &'static str),
}

impl Figure {
    /// Times in nanoseconds.
    pub fn times(metric: &'static str, times: Histogram<u64>) -> Self {
        Self {
            metric,
            value: Value::Times(times),
            note: None,
        }
    }

    /// A number.
    pub fn number(metric: &'static str, number: f64, unit: &'static str) -> Self {
        Self {
            metric,
            value: Value::Number(number, unit),
            note: None,
        }
    }

    /// With something that should be known beside it.
    pub fn with_note(self, note: Option<String>) -> Self {
        Self { note, ..self }
    }
}

/// What figures are called.
pub mod metric {
    /// Half a round trip, in nanoseconds.
    pub const ONE_WAY: &str = "one_way_ns";
    /// Messages per second, one way.
    pub const RATE: &str = "messages";
    /// Payload per second, one way.
    pub const THROUGHPUT: &str = "throughput";
    /// Payload per second, both ways together while both send.
    pub const BOTH_WAYS: &str = "throughput_both_ways";
    /// Jain's index.
    pub const FAIRNESS: &str = "jain";
    /// Processor time of an idle node, in shares of a core.
    pub const IDLE_CPU: &str = "idle_cpu";
    /// Time for which the kernel polled instead of having idle processors of engines sleep, in shares of one.
    pub const IDLE_POLLED: &str = "idle_polled";
    /// The first message after idling, in nanoseconds.
    pub const FIRST: &str = "first_message_ns";
    /// Attaching, in nanoseconds.
    pub const ATTACH: &str = "attach_ns";
    /// Opening a port, in nanoseconds.
    pub const OPEN: &str = "open_ns";
    /// From an open port to the first answer, in nanoseconds.
    pub const FIRST_ANSWER: &str = "first_round_trip_ns";
}

/// What numbers are of.
pub mod unit {
    /// Nanoseconds.
    pub const NS: &str = "ns";
    /// Messages per second.
    pub const PER_SECOND: &str = "1/s";
    /// Bits of payload per second.
    pub const BITS: &str = "bit/s";
    /// A share, or an index.
    pub const ONE: &str = "1";
}

/// Everyone, in the order of the tables.
pub fn all() -> Vec<Box<dyn Subject>> {
    let mut subjects: Vec<Box<dyn Subject>> = vec![
        Box::new(portolan::Portolan::AllQueues),
        Box::new(portolan::Portolan::Ethernet),
        Box::new(portolan::Portolan::Unpolled),
        Box::new(portolan::Portolan::Blocking),
        Box::new(portolan::Portolan::Asleep),
        Box::new(portolan::Portolan::OneEngine),
    ];
    subjects.extend(limits::all());
    subjects.extend(kernel::all());
    subjects.extend(foreign::all());
    subjects.push(Box::new(aeron::Aeron::default()));
    subjects
}
