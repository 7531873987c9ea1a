//! What was found out, turn by turn, and what it comes to.

mod goals;
mod html;
mod json;
mod markdown;
mod svg;
mod table;

use std::collections::BTreeMap;

use hdrhistogram::Histogram;

use crate::cases::Case;
use crate::distance::NEAR_NS;
use crate::statistics::{half_power_point, median, range};
use crate::subjects::{About, Figure, Value, metric, unit};

pub use html::write as write_html;
pub use json::write as write_json;
pub use markdown::write as write_markdown;
pub use table::table;

/// Sizes that a curve has at least, for N/2 to be read from it.
const CURVE: usize = 5;

/// Everything that was measured.
pub struct Results {
    /// Who was measured, in the order of the tables.
    pub subjects: Vec<(String, About)>,
    /// What, in order.
    pub cases: Vec<Case>,
    /// By case, subject and metric.
    series: BTreeMap<(usize, usize, &'static str), Series>,
    /// By case, subject and turn: how far the cores were from each other before and after, in nanoseconds there and back.
    distances: BTreeMap<(usize, usize, usize), [Option<u64>; 2]>,
    /// What could not be measured: case, subject, why.
    pub failures: Vec<(String, String, String)>,
    /// How long it took, in seconds.
    pub took_s: f64,
    /// Turns that were asked for.
    pub turns: usize,
    /// Whether it was but a look.
    pub quick: bool,
}

/// One metric of one subject at one case.
#[derive(Default)]
struct Series {
    /// By turn; of times, the median.
    turns: BTreeMap<usize, f64>,
    unit: &'static str,
    /// All turns together, and each turn's own quantiles.
    times: Option<Histogram<u64>>,
    p99: Vec<f64>,
    p999: Vec<f64>,
    samples: u64,
    notes: Vec<String>,
}

/// What one turn gave.
#[derive(Clone, Copy, Debug)]
pub struct Turn {
    /// Which.
    pub turn: usize,
    /// Of times, the median.
    pub value: f64,
    /// How far the cores were from each other before and after, in nanoseconds there and back.
    pub around: [Option<u64>; 2],
}

/// A line of a report.
#[derive(Clone, Debug)]
pub struct Line {
    /// What was asked.
    pub case: Case,
    /// Who answered.
    pub subject: String,
    /// Which of the answers.
    pub metric: &'static str,
    /// Of the values.
    pub unit: &'static str,
    /// The median of the turns; of times, of their medians.
    pub value: f64,
    /// The least and the greatest of the turns.
    pub range: (f64, f64),
    /// Medians of the turns' quantiles, of times.
    pub p99: Option<f64>,
    /// As above.
    pub p999: Option<f64>,
    /// Turns.
    pub turns: usize,
    /// Each of them.
    pub by_turn: Vec<Turn>,
    /// Messages, of times; turns otherwise.
    pub samples: u64,
    /// The median of the turns' ratios to the limit of the case.
    pub ratio: Option<f64>,
    /// What should be known beside it.
    pub note: Option<String>,
}

impl Results {
    /// Nothing yet.
    pub fn new(
        subjects: Vec<(String, About)>,
        cases: Vec<Case>,
        turns: usize,
        quick: bool,
    ) -> Self {
        Self {
            subjects,
            cases,
            series: BTreeMap::new(),
            distances: BTreeMap::new(),
            failures: Vec::new(),
            took_s: 0.0,
            turns,
            quick,
        }
    }

    /// What a subject answered in a turn.
    pub fn add(&mut self, case: &Case, subject: &str, turn: usize, figures: Vec<Figure>) {
        let Some((case, subject)) = self.place(case, subject) else {
            return;
        };
        for figure in figures {
            let place = (case, subject, figure.metric);
            self.series.entry(place).or_default().add(turn, figure);
        }
    }

    /// How far the cores were from each other before that turn and after it.
    pub fn at_distance(
        &mut self,
        case: &Case,
        subject: &str,
        turn: usize,
        around: [Option<u64>; 2],
    ) {
        if let Some((case, subject)) = self.place(case, subject) {
            self.distances.insert((case, subject, turn), around);
        }
    }

    fn place(&self, case: &Case, subject: &str) -> Option<(usize, usize)> {
        Some((
            self.cases.iter().position(|known| known == case)?,
            self.subjects.iter().position(|(name, _)| name == subject)?,
        ))
    }

    /// How far the cores were from each other, in a sentence.
    pub fn distances(&self) -> Option<String> {
        let all = self.distances.values().flatten().flatten();
        let all: Vec<f64> = all.map(|&ns| ns as f64).collect();
        let (least, most) = range(&all)?;
        let is_far = |around: &&[Option<u64>; 2]| around.iter().flatten().any(|&ns| ns > NEAR_NS);
        let far = self.distances.values().filter(is_far).count();
        Some(format!(
            "A cache line went to the other core and back in {least:.0} to {most:.0} ns, median {:.0}; in {far} of {} measurements it took more than \
             {NEAR_NS} before or after",
            median(&all)?,
            self.distances.len()
        ))
    }

    /// What a subject could not answer.
    pub fn fail(&mut self, case: &str, subject: &str, why: &str) {
        self.failures
            .push((case.to_owned(), subject.to_owned(), why.to_owned()));
    }

    /// By case, subject and metric, in order.
    pub fn lines(&self) -> Vec<Line> {
        let line =
            |(&(case, subject, metric), series): (&(usize, usize, &'static str), &Series)| {
                let values: Vec<f64> = series.turns.values().copied().collect();
                let known = *self.cases.get(case)?;
                Some(Line {
                    case: known,
                    subject: self.subjects.get(subject)?.0.clone(),
                    metric,
                    unit: series.unit,
                    value: median(&values)?,
                    range: range(&values)?,
                    p99: median(&series.p99),
                    p999: median(&series.p999),
                    turns: values.len(),
                    by_turn: self.by_turn(case, subject, series),
                    samples: series.samples,
                    ratio: self.ratio(case, metric, series, &known),
                    note: series.notes.first().cloned(),
                })
            };
        self.series.iter().filter_map(line).collect()
    }

    fn by_turn(&self, case: usize, subject: usize, series: &Series) -> Vec<Turn> {
        let turn = |(&turn, &value): (&usize, &f64)| Turn {
            turn,
            value,
            around: (self.distances.get(&(case, subject, turn)).copied()).unwrap_or_default(),
        };
        series.turns.iter().map(turn).collect()
    }

    /// Each turn held against the limit's own of that turn, which the machine's mood has met alike; then the median.
    fn ratio(
        &self,
        case: usize,
        metric: &'static str,
        series: &Series,
        known: &Case,
    ) -> Option<f64> {
        let limit = known.limit()?;
        let limit = self.subjects.iter().position(|(name, _)| name == limit)?;
        self.series.get(&(case, limit, metric))?.ratio_of(series)
    }

    /// One subject held against another, each turn against the same turn's; then the median.
    pub fn between(
        &self,
        case: &Case,
        metric: &'static str,
        one: &str,
        other: &str,
    ) -> Option<f64> {
        let case = self.cases.iter().position(|known| known == case)?;
        let series = |name: &str| {
            let subject = self.subjects.iter().position(|(known, _)| known == name)?;
            self.series.get(&(case, subject, metric))
        };
        series(other)?.ratio_of(series(one)?)
    }

    /// All times of a subject at a case.
    pub fn times(
        &self,
        case: &Case,
        subject: &str,
        metric: &'static str,
    ) -> Option<&Histogram<u64>> {
        let case = self.cases.iter().position(|known| known == case)?;
        let subject = self.subjects.iter().position(|(name, _)| name == subject)?;
        self.series.get(&(case, subject, metric))?.times.as_ref()
    }

    /// (bytes, value) over the sizes of the sweep.
    pub fn sweep(&self, subject: &str, metric: &'static str) -> Vec<(usize, f64)> {
        let lines = self.lines();
        let of = |line: &Line| match line.case {
            Case::AllSize { bytes } if line.subject == subject && line.metric == metric => {
                Some((bytes, line.value))
            }
            _ => None,
        };
        lines.iter().filter_map(of).collect()
    }

    /// N/2 of each subject that the sweep was measured of.
    pub fn half_power_points(&self) -> Vec<(String, Option<f64>)> {
        let names = self.subjects.iter().map(|(name, _)| name);
        let point = |name: &String| {
            let curve = self.sweep(name, metric::THROUGHPUT);
            // Between two sizes far apart a line says nothing.
            (curve.len() >= CURVE).then(|| (name.clone(), half_power_point(&curve)))
        };
        names.filter_map(point).collect()
    }
}

impl Series {
    /// The median of what `other` was in each turn, over what this was in it.
    fn ratio_of(&self, other: &Self) -> Option<f64> {
        let of = |(turn, value): (&usize, &f64)| {
            let own = self.turns.get(turn)?;
            (*own > 0.0).then(|| value / own)
        };
        median(&other.turns.iter().filter_map(of).collect::<Vec<_>>())
    }

    fn add(&mut self, turn: usize, figure: Figure) {
        self.notes.extend(figure.note);
        match figure.value {
            Value::Number(number, unit) => {
                self.turns.insert(turn, number);
                self.unit = unit;
                self.samples += 1;
            }
            Value::Times(times) => {
                let quantile = |q| times.value_at_quantile(q) as f64;
                self.turns.insert(turn, quantile(0.5));
                self.p99.push(quantile(0.99));
                self.p999.push(quantile(0.999));
                self.unit = unit::NS;
                self.samples += times.len();
                match &mut self.times {
                    // Same bounds, so nothing is out of range.
                    Some(all) => drop(all.add(&times)),
                    none => *none = Some(times),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn results() -> Results {
        let subjects = ["portolan", "limit-relay"].map(|name| (name.to_owned(), About::default()));
        let case = Case::PingPong { bytes: 64 };
        Results::new(subjects.to_vec(), vec![case], 3, true)
    }

    fn times(values: &[u64]) -> Figure {
        let mut histogram = crate::actor::histogram().unwrap();
        values
            .iter()
            .for_each(|&value| histogram.record(value).unwrap());
        Figure::times(metric::ONE_WAY, histogram)
    }

    // A machine that slows down from turn to turn. Expect: ratios of what was measured in the same turn, not of medians.
    #[test]
    fn ratios_are_of_the_same_turn() {
        let case = Case::PingPong { bytes: 64 };
        let mut results = results();
        for (turn, (ours, limit)) in [(100, 50), (300, 200), (900, 400)].into_iter().enumerate() {
            results.add(&case, "portolan", turn, vec![times(&[ours])]);
            results.add(&case, "limit-relay", turn, vec![times(&[limit])]);
        }
        let lines = results.lines();
        assert_eq!(lines[0].subject, "portolan");
        assert!((lines[0].value - 300.0).abs() < 1.0);
        assert!((lines[0].ratio.unwrap() - 2.0).abs() < 0.01);
        assert!((lines[1].ratio.unwrap() - 1.0).abs() < 1e-9);
        assert_eq!(lines[0].turns, 3);
    }

    #[test]
    fn a_turn_that_the_limit_did_not_finish_has_no_ratio() {
        let case = Case::PingPong { bytes: 64 };
        let mut results = results();
        results.add(&case, "portolan", 0, vec![times(&[100])]);
        assert_eq!(results.lines()[0].ratio, None);
        results.add(&case, "limit-relay", 1, vec![times(&[100])]);
        assert_eq!(results.lines()[0].ratio, None);
    }

    // One turn near by, one that ended far away, one in which a core could not be had. Expect: each turn's distances beside its value, and the sum of it.
    #[test]
    fn turns_know_how_far_the_cores_were() {
        let case = Case::PingPong { bytes: 64 };
        let mut results = results();
        assert_eq!(results.distances(), None);
        let all = [
            [Some(50), Some(130)],
            [Some(140), Some(560)],
            [None, Some(90)],
        ];
        for (turn, around) in all.into_iter().enumerate() {
            results.add(&case, "portolan", turn, vec![times(&[10])]);
            results.at_distance(&case, "portolan", turn, around);
        }
        let lines = results.lines();
        let found: Vec<_> = lines[0].by_turn.iter().map(|turn| turn.around).collect();
        assert_eq!(found, all);
        let text = results.distances().unwrap();
        assert!(
            text.contains("50 to 560 ns, median 130; in 1 of 3"),
            "{text}"
        );
    }

    #[test]
    fn all_turns_make_one_distribution() {
        let case = Case::PingPong { bytes: 64 };
        let mut results = results();
        results.add(&case, "portolan", 0, vec![times(&[10, 20])]);
        results.add(&case, "portolan", 1, vec![times(&[30])]);
        let all = results.times(&case, "portolan", metric::ONE_WAY).unwrap();
        assert_eq!(all.len(), 3);
        assert_eq!(results.lines()[0].samples, 3);
    }
}
