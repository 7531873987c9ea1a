//! What happens to each frame: a function of seed, receiving node and the frame's number, nothing else.
//!
//! Every kind of fate draws its own word from a counter-based generator (SplitMix64's finisher over number and kind). So raising
//! the probability of one kind leaves the others' victims as they are, and what happened to frame 1000 can be known without
//! having seen the 999 before it. The exception is loss in bursts, which goes on from the frame that began it.

use portolan_testbed::Impairment;

/// One frame's fate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Fate {
    /// It does not arrive.
    pub lost: bool,
    /// It arrives with a wrong bit, the one this word chooses.
    pub corrupt: Option<u64>,
    /// It arrives twice.
    pub duplicate: bool,
    /// It arrives after frames that follow it.
    pub late: bool,
}

/// The fates of the frames toward one node, in order.
#[derive(Debug)]
pub struct Fates {
    key: u64,
    number: u64,
    /// Frames of a burst that are still to be lost.
    doomed: u32,
    burst: u32,
    loss: Chance,
    corrupt: Chance,
    duplicate: Chance,
    late: Chance,
}

impl Fates {
    pub fn new(impairment: &Impairment, toward: u16) -> Self {
        Self {
            key: mix(impairment.seed ^ mix(u64::from(toward))),
            number: 0,
            doomed: 0,
            burst: impairment.burst.max(1),
            loss: Chance::new(burst_begins(impairment)),
            corrupt: Chance::new(impairment.corrupt),
            duplicate: Chance::new(impairment.duplicate),
            late: Chance::new(impairment.reorder),
        }
    }

    /// The next frame's.
    pub fn next(&mut self) -> Fate {
        let number = self.number;
        self.number += 1;
        let word = |kind: u64| mix(self.key ^ mix(number.wrapping_mul(8) + kind));
        let lost = self.doomed > 0 || self.loss.hits(word(0));
        if lost {
            self.doomed = match self.doomed {
                0 => self.burst - 1,
                left => left - 1,
            };
            return Fate {
                lost,
                ..Fate::default()
            };
        }
        Fate {
            lost,
            corrupt: self.corrupt.hits(word(1)).then(|| word(2)),
            duplicate: self.duplicate.hits(word(3)),
            late: self.late.hits(word(4)),
        }
    }
}

/// The probability with which a frame that is not part of a burst begins one, so that in the long run `loss` of all are lost.
fn burst_begins(impairment: &Impairment) -> f64 {
    let (loss, burst) = (impairment.loss, f64::from(impairment.burst.max(1)));
    if loss <= 0.0 {
        return 0.0;
    }
    loss / (loss + burst * (1.0 - loss))
}

/// A probability, to be held against a random word.
#[derive(Debug)]
enum Chance {
    Sometimes(u64),
    Always,
}

impl Chance {
    fn new(probability: f64) -> Self {
        if probability >= 1.0 {
            return Self::Always;
        }
        // A product below 2^64; the cast saturates anyway.
        Self::Sometimes((probability * 18_446_744_073_709_551_616.0) as u64)
    }

    fn hits(&self, word: u64) -> bool {
        match self {
            Self::Sometimes(below) => word < *below,
            Self::Always => true,
        }
    }
}

/// The finisher of SplitMix64.
fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ x >> 31
}

#[cfg(test)]
mod tests {
    use super::*;

    const FRAMES: usize = 100_000;

    fn fates(impairment: &Impairment) -> Vec<Fate> {
        let mut fates = Fates::new(impairment, 2);
        (0..FRAMES).map(|_| fates.next()).collect()
    }

    fn share(fates: &[Fate], what: impl Fn(&Fate) -> bool) -> f64 {
        fates.iter().filter(|fate| what(fate)).count() as f64 / fates.len() as f64
    }

    fn all_kinds(seed: u64) -> Impairment {
        Impairment {
            loss: 0.1,
            corrupt: 0.02,
            duplicate: 0.3,
            reorder: 0.001,
            ..Impairment::default().seeded(seed)
        }
    }

    #[test]
    fn every_kind_has_its_share() {
        let fates = fates(&all_kinds(7));
        // Four standard deviations of the binomial distribution.
        let near = |share: f64, p: f64| {
            let bound = 4.0 * (p * (1.0 - p) / FRAMES as f64).sqrt();
            assert!((share - p).abs() < bound, "{share}, not {p}");
        };
        near(share(&fates, |f| f.lost), 0.1);
        near(share(&fates, |f| f.corrupt.is_some()), 0.9 * 0.02);
        near(share(&fates, |f| f.duplicate), 0.9 * 0.3);
        near(share(&fates, |f| f.late), 0.9 * 0.001);
    }

    #[test]
    fn the_seed_decides() {
        assert_eq!(fates(&all_kinds(7)), fates(&all_kinds(7)));
        assert_ne!(fates(&all_kinds(7)), fates(&all_kinds(8)));
        let mut other_way = Fates::new(&all_kinds(7), 1);
        let back: Vec<Fate> = (0..FRAMES).map(|_| other_way.next()).collect();
        assert_ne!(fates(&all_kinds(7)), back);
    }

    #[test]
    fn nothing_never_and_certainty_always() {
        assert!(
            fates(&Impairment::default())
                .iter()
                .all(|fate| *fate == Fate::default())
        );
        assert!(fates(&Impairment::loss(1.0)).iter().all(|fate| fate.lost));
    }

    #[test]
    fn bursts_are_of_their_length_and_lose_the_share() {
        let impairment = Impairment {
            burst: 5,
            ..Impairment::loss(0.05)
        };
        let fates = fates(&impairment);
        let lost = share(&fates, |fate| fate.lost);
        assert!((lost - 0.05).abs() < 0.01, "{lost}");
        let runs: Vec<usize> = fates
            .chunk_by(|one, next| one.lost == next.lost)
            .filter(|run| run[0].lost)
            .map(<[Fate]>::len)
            .collect();
        // The last may be cut off by the end of the list.
        assert!(
            runs[..runs.len() - 1].iter().all(|run| run % 5 == 0),
            "{runs:?}"
        );
        assert!(runs.contains(&5));
    }
}
