//! Gaps between deliveries around faults, and without: do they differ by more than noise?
//!
//! Every gap counts, not only the longest. Each fault's span is followed by one as long without a fault, and a campaign's spans are kept in ten parts, in the
//! order in which they were, so each part has its own picture of what the machine did meanwhile with a fault and without one. By how much a quantile differs from part to part
//! without a fault is noise. The difference a fault makes is the mean of the ten ratios, with its interval of confidence (Student's t for pairs): neighbours in
//! time are compared, so what drifts in a quarter of an hour is in neither.

use anyhow::Result;
use serde_json::{Map, Value, json};

use super::outcome::{Outcome, Times};
use super::report::table;

const PARTS: usize = 10;

/// The quantiles that are reported.
const QUANTILES: [(&str, f64); 5] = [
    ("p50", 0.5),
    ("p90", 0.9),
    ("p99", 0.99),
    ("p99.9", 0.999),
    ("p99.99", 0.9999),
];

/// Student's t of 95 % of both sides, by degrees of freedom from 1 on.
const T_95: [f64; PARTS - 1] = [
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262,
];

/// The gaps of a part of a campaign.
#[derive(Clone, Debug)]
pub struct Part {
    pub around: Times,
    pub without: Times,
}

/// The gaps of a campaign.
#[derive(Clone, Debug)]
pub struct Gaps {
    parts: Vec<Part>,
    /// Faults of the campaign.
    count: u64,
}

/// What faults change of a quantile, in percent of what it is without.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Difference {
    mean: f64,
    /// Half of the interval in which the truth is with 95 % confidence.
    half_width: f64,
}

impl Gaps {
    pub fn new(count: u64) -> Result<Self> {
        let part = |_| -> Result<Part> {
            Ok(Part {
                around: Times::new()?,
                without: Times::new()?,
            })
        };
        Ok(Self {
            parts: (0..PARTS).map(part).collect::<Result<_>>()?,
            count,
        })
    }

    /// Where the spans of a fault belong; the first is 0.
    pub fn part(&mut self, number: u64) -> &mut Part {
        let part = number as usize * PARTS / (self.count as usize).max(1);
        &mut self.parts[part.min(PARTS - 1)]
    }

    fn all(&self, which: impl Fn(&Part) -> &Times) -> Option<Times> {
        let mut all = which(self.parts.first()?).clone();
        for part in self.parts.iter().skip(1) {
            all.merge(which(part));
        }
        Some(all)
    }

    /// Of the parts in which both are known.
    fn pairs(&self, quantile: f64) -> Vec<[f64; 2]> {
        let pair = |part: &Part| {
            let both = [&part.around, &part.without];
            (both.iter().all(|times| times.samples() > 0))
                .then(|| both.map(|times| times.quantile(quantile)))
        };
        self.parts.iter().filter_map(pair).collect()
    }

    fn difference(&self, quantile: f64) -> Option<Difference> {
        let of = |[around, without]: &[f64; 2]| (around / without - 1.0) * 100.0;
        let all: Vec<f64> = self.pairs(quantile).iter().map(of).collect();
        let t = T_95.get(all.len().checked_sub(2)?)?;
        let count = all.len() as f64;
        let mean = all.iter().sum::<f64>() / count;
        let variance = all.iter().map(|one| (one - mean).powi(2)).sum::<f64>() / (count - 1.0);
        let half_width = t * (variance / count).sqrt();
        Some(Difference { mean, half_width })
    }

    /// The least and the most of a quantile among the parts without a fault.
    fn noise(&self, quantile: f64) -> Option<[f64; 2]> {
        let without = self.pairs(quantile).into_iter().map(|[_, without]| without);
        Some([without.clone().reduce(f64::min)?, without.reduce(f64::max)?])
    }

    pub fn json(&self) -> Value {
        let quantiles = |times: Option<Times>| {
            let times = times?;
            let of = |(name, quantile): &(&str, f64)| {
                ((*name).to_owned(), times.quantile(*quantile).into())
            };
            let mut object: Map<_, Value> = QUANTILES.iter().map(of).collect();
            object.insert("max".into(), times.max().into());
            object.insert("samples".into(), times.samples().into());
            Some(object)
        };
        let differences = QUANTILES.iter().filter_map(|(name, quantile)| {
            let Difference { mean, half_width } = self.difference(*quantile)?;
            let value = json!({"mean": mean, "half_width_95": half_width});
            Some(((*name).to_owned(), value))
        });
        let noise = QUANTILES.iter().filter_map(|(name, quantile)| {
            Some(((*name).to_owned(), self.noise(*quantile)?.into()))
        });
        json!({
            "around_faults": quantiles(self.all(|part| &part.around)),
            "without": quantiles(self.all(|part| &part.without)),
            "without_by_tenths": noise.collect::<Map<_, Value>>(),
            "difference_percent": differences.collect::<Map<_, Value>>(),
        })
    }
}

/// Gaps with and without a fault; nothing if nobody compared them.
pub fn tables(outcomes: &[Outcome]) -> Option<String> {
    let all = outcomes.iter().filter_map(|outcome| {
        let gaps = outcome.gaps.as_ref()?;
        let [around, without] = [
            gaps.all(|part| &part.around)?,
            gaps.all(|part| &part.without)?,
        ];
        let heading = [
            "gaps, us",
            &outcome.kind,
            "without",
            "tenths without",
            "difference",
        ];
        let mut rows = vec![heading.map(str::to_owned).to_vec()];
        for (name, quantile) in QUANTILES {
            let [around, without] = [&around, &without].map(|times| times.quantile(quantile));
            rows.push(vec![
                name.to_owned(),
                format!("{around:.0}"),
                format!("{without:.0}"),
                gaps.noise(quantile)
                    .map_or("-".to_owned(), |[least, most]| {
                        format!("{least:.0} to {most:.0}")
                    }),
                gaps.difference(quantile).map_or("-".to_owned(), |known| {
                    format!("{:+.1} ± {:.1} %", known.mean, known.half_width)
                }),
            ]);
        }
        let mut row = |name: &str, figure: &dyn Fn(&Times) -> String| {
            let empty = String::new();
            rows.push(vec![
                name.to_owned(),
                figure(&around),
                figure(&without),
                empty.clone(),
                empty,
            ]);
        };
        row("max", &|times| format!("{:.0}", times.max()));
        row("gaps", &|times| times.samples().to_string());
        Some(table(&rows))
    });
    let all: Vec<String> = all.collect();
    (!all.is_empty()).then(|| {
        format!(
            "Every gap around faults, and in spans as long without. Difference: the mean of ten parts of the campaign, ± its 95 % confidence\n\n{}",
            all.join("\n")
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of twenty faults with a gap of 100 us each in the spans without, and in those around faults what this says.
    fn twenty(around_us: impl Fn(u64) -> u64) -> Gaps {
        let mut gaps = Gaps::new(20).unwrap();
        for number in 0..20 {
            let part = gaps.part(number);
            part.around.record(around_us(number) * 1000);
            part.without.record(100_000);
        }
        gaps
    }

    fn about(value: f64, expected: f64) -> bool {
        (value - expected).abs() < 0.2
    }

    // The first half as without a fault, the second a tenth longer. Expect: 5 %, and an interval made by hand: t of 9 degrees of freedom times the
    // deviation of five zeros and five tens (5.27) through the root of ten.
    #[test]
    fn what_a_fault_changes_has_an_interval() {
        let known = twenty(|number| if number < 10 { 100 } else { 110 });
        let known = known.difference(0.5).unwrap();
        assert!(about(known.mean, 5.0), "{known:?}");
        assert!(
            about(known.half_width, 2.262 * 5.27 / 10f64.sqrt()),
            "{known:?}"
        );
    }

    // Each span around a fault 3 % longer than the one that follows. Expect: 3 %, hardly any doubt.
    #[test]
    fn a_small_difference_that_is_always_there_is_found() {
        let known = twenty(|_| 103).difference(0.99).unwrap();
        assert!(
            about(known.mean, 3.0) && known.half_width < 0.2,
            "{known:?}"
        );
    }

    // A fault only, then three. Expect: nothing is said of what one shows; three are three parts.
    #[test]
    fn few_faults_show_little() {
        let mut one = Gaps::new(1).unwrap();
        one.part(0).around.record(1000);
        one.part(0).without.record(1000);
        assert_eq!(one.difference(0.5), None);
        let mut three = Gaps::new(3).unwrap();
        for number in 0..3 {
            three.part(number).around.record(1000);
            three.part(number).without.record(1000);
        }
        assert_eq!(three.pairs(0.5).len(), 3);
        let none = Difference {
            mean: 0.0,
            half_width: 0.0,
        };
        assert_eq!(three.difference(0.5), Some(none));
    }

    // More faults than were announced. Expect: they belong to the last part.
    #[test]
    fn every_fault_has_a_part() {
        let mut gaps = Gaps::new(2).unwrap();
        gaps.part(7).around.record(1000);
        assert_eq!(gaps.parts[PARTS - 1].around.samples(), 1);
    }
}
