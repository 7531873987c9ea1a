//! What the network does to frames beside delivering them.

use std::collections::BTreeSet;

use portolan_transport::ident::Nanos;

use crate::harness::rng::Rng;

/// Loss in bursts (Gilbert 1960, Elliott 1963): a good and a bad state, each left with a chance per frame. Per million.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bursts {
    /// From good to bad.
    pub begin_ppm: u32,
    /// From bad to good.
    pub end_ppm: u32,
    /// Loss while bad.
    pub loss_ppm: u32,
}

/// Chances per million, and how late late frames are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Impairment {
    pub loss_ppm: u32,
    pub bursts: Option<Bursts>,
    pub duplicate_ppm: u32,
    pub corrupt_ppm: u32,
    /// Frames that leave the line and arrive up to `late_by_ns` later: others overtake them.
    pub late_ppm: u32,
    pub late_by_ns: Nanos,
    /// Everything takes this much longer.
    pub delay_ns: Nanos,
    /// Frames lost between the engines of a node.
    pub crossing_loss_ppm: u32,
}

/// What becomes of one frame.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Fate {
    pub lost: bool,
    pub copies: u32,
    pub late: Nanos,
}

/// The impairment with its state.
#[derive(Debug)]
pub struct Network {
    pub impairment: Impairment,
    /// Directed pairs of nodes that do not hear each other, by index.
    pub cut: BTreeSet<(u32, u32)>,
    /// Senders whose link is in its bad state.
    bad: Vec<bool>,
    rng: Rng,
}

impl Network {
    pub fn new(nodes: usize, rng: Rng) -> Self {
        Self {
            impairment: Impairment::default(),
            cut: BTreeSet::new(),
            bad: vec![false; nodes],
            rng,
        }
    }

    fn happens(&mut self, ppm: u32) -> bool {
        ppm > 0 && self.rng.below(1_000_000) < u64::from(ppm)
    }

    /// A frame leaves node `from`.
    pub fn fate(&mut self, from: u32, to: u32) -> Fate {
        let impairment = self.impairment;
        let mut fate = Fate {
            copies: 1,
            late: impairment.delay_ns,
            lost: !self.cut.is_empty() && self.cut.contains(&(from, to)),
        };
        if let Some(bursts) = impairment.bursts {
            let turn = if self.bad[from as usize] {
                bursts.end_ppm
            } else {
                bursts.begin_ppm
            };
            if self.happens(turn) {
                self.bad[from as usize] ^= true;
            }
            fate.lost |= self.bad[from as usize] && self.happens(bursts.loss_ppm);
        }
        fate.lost |= self.happens(impairment.loss_ppm);
        if self.happens(impairment.duplicate_ppm) {
            fate.copies = 2;
        }
        fate
    }

    /// How much later one copy is.
    pub fn late(&mut self) -> Nanos {
        let impairment = self.impairment;
        if impairment.late_by_ns > 0 && self.happens(impairment.late_ppm) {
            self.rng.below(impairment.late_by_ns)
        } else {
            0
        }
    }

    /// Which bit of a copy of `len` bytes flips.
    pub fn flips(&mut self, len: usize) -> Option<u64> {
        let flips = self.happens(self.impairment.corrupt_ppm) && len > 0;
        flips.then(|| self.rng.below(len as u64 * 8))
    }

    /// Whether a frame is lost between the engines of a node.
    pub fn loses_crossing(&mut self) -> bool {
        self.happens(self.impairment.crossing_loss_ppm)
    }

    /// All faults are over.
    pub fn heal(&mut self) {
        self.impairment = Impairment::default();
        self.cut.clear();
        self.bad.fill(false);
    }
}
