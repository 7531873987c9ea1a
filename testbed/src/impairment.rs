//! What an impaired lab does to the frames between its nodes, and how many it did it to.
//!
//! The kernel's own way, netem, may be missing; a switch that loses, doubles, damages, overtakes, delays and throttles is
//! built here instead ([`crate::Wire`]). Every decision follows from the seed and the number of the frame on its way: the
//! same seed and the same sequence of frames meet the same fate.

use std::collections::BTreeMap;

use anyhow::{Result, bail};
use serde::{Deserialize, Serialize};

/// What happens to the Portolan frames toward one node. The default is nothing at all.
///
/// In this order: a frame is cut off, or lost; else it may be damaged, may be doubled, may be overtaken; then it queues for
/// the link's rate, if the buffer before it has room, and then it travels.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Impairment {
    /// What the decisions follow from, together with the receiving node's id and the frame's number since this was set.
    pub seed: u64,
    /// Probability that a frame is lost.
    pub loss: f64,
    /// How many frames in a row are lost at once; `loss` stays the share of all frames.
    pub burst: u32,
    /// Probability that a frame arrives twice.
    pub duplicate: f64,
    /// Probability that one bit of a frame, somewhere behind the Ethernet header, is wrong.
    pub corrupt: f64,
    /// Probability that a frame is overtaken by those that follow it.
    pub reorder: f64,
    /// By how many.
    pub reorder_frames: u32,
    /// How long an overtaken frame waits for them at most, in microseconds.
    pub reorder_us: u32,
    /// How long every frame travels at least, in microseconds.
    pub delay_us: u32,
    /// Rate of the link in bits of Ethernet frames per second; 0: as fast as it goes.
    pub rate_bps: u64,
    /// Bytes that may wait for that rate; what comes on top is dropped.
    pub buffer_bytes: u64,
    /// The link is down: nothing arrives.
    pub cut: bool,
}

impl Default for Impairment {
    fn default() -> Self {
        Self {
            seed: 1,
            loss: 0.0,
            burst: 1,
            duplicate: 0.0,
            corrupt: 0.0,
            reorder: 0.0,
            reorder_frames: 3,
            reorder_us: 500,
            delay_us: 0,
            rate_bps: 0,
            buffer_bytes: 1 << 20,
            cut: false,
        }
    }
}

impl Impairment {
    /// Only loss.
    pub fn loss(probability: f64) -> Self {
        Self {
            loss: probability,
            ..Self::default()
        }
    }

    /// The same with another seed.
    #[must_use]
    pub fn seeded(self, seed: u64) -> Self {
        Self { seed, ..self }
    }

    /// Whether it makes sense.
    ///
    /// # Errors
    /// The field that does not, and what it may be.
    pub fn check(&self) -> Result<()> {
        for (name, probability) in [
            ("loss", self.loss),
            ("duplicate", self.duplicate),
            ("corrupt", self.corrupt),
            ("reorder", self.reorder),
        ] {
            if !(0.0..=1.0).contains(&probability) {
                bail!("{name} is {probability}; it is a probability, 0 to 1");
            }
        }
        if self.burst == 0 {
            bail!("burst is 0; the shortest is 1 frame");
        }
        if self.rate_bps > 0 && self.buffer_bytes == 0 {
            bail!("buffer_bytes is 0; a link with a rate needs room for a frame");
        }
        Ok(())
    }
}

/// What became of the Portolan frames toward one node, since the lab was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LineCounters {
    /// Frames that came.
    pub offered: u64,
    /// Frames and copies of frames handed to the node's interface.
    pub carried: u64,
    /// Their bytes.
    pub carried_bytes: u64,
    /// Dropped because the link was cut.
    pub cut: u64,
    /// Dropped by `loss`.
    pub lost: u64,
    /// Carried with a wrong bit.
    pub corrupted: u64,
    /// Carried twice.
    pub duplicated: u64,
    /// Overtaken.
    pub reordered: u64,
    /// Dropped because the buffer before the link's rate was full.
    pub overflowed: u64,
    /// Dropped because the wire's own memory was full: more under way than it is made for.
    pub crowded: u64,
    /// Dropped by the kernel on the way into the node's interface.
    pub refused: u64,
}

/// The counters of a whole wire.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WireCounters {
    /// By receiving node.
    pub toward: BTreeMap<u16, LineCounters>,
    /// Frames the wire was too slow to take from the nodes' interfaces: anything but 0 spoils a measurement.
    pub missed: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nonsense_is_refused_by_name() {
        let refused = |impairment: Impairment| impairment.check().unwrap_err().to_string();
        assert!(refused(Impairment::loss(1.5)).starts_with("loss is 1.5"));
        assert!(refused(Impairment::loss(f64::NAN)).starts_with("loss"));
        let without_burst = Impairment {
            burst: 0,
            ..Impairment::default()
        };
        assert!(refused(without_burst).starts_with("burst"));
        let without_room = Impairment {
            rate_bps: 1,
            buffer_bytes: 0,
            ..Impairment::default()
        };
        assert!(refused(without_room).starts_with("buffer_bytes"));
        Impairment::default().check().unwrap();
        Impairment::loss(1.0).check().unwrap();
    }
}
