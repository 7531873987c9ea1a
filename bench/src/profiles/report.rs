//! What was measured: medians of the rounds, as tables for people and as JSON for programs.

use std::collections::BTreeMap;
use std::fmt::Write;

use hdrhistogram::Histogram;
use serde::Serialize;
use serde_json::{Value, json};

/// How it was measured.
#[derive(Clone, Debug, Serialize)]
pub struct Settings {
    pub mtu: u32,
    pub delay_us: u32,
    /// 0: what the machine carries.
    pub rate_mbit: u64,
    pub short_bytes: usize,
    pub long_bytes: usize,
    pub latency_rate: u32,
    pub measure_ms: u64,
    pub long_ms: u64,
    pub rounds: u32,
    /// Changes to every profile.
    pub set: Vec<String>,
}

/// One round of one profile at one loss.
pub struct Cell {
    pub short_bps: f64,
    pub long_bps: f64,
    pub latency: Histogram<u64>,
}

/// Everything.
pub struct Report {
    settings: Settings,
    losses: Vec<f64>,
    /// Profiles in the order they came, and by profile and loss every round.
    profiles: Vec<&'static str>,
    rounds: BTreeMap<(&'static str, usize), Vec<Cell>>,
    /// Frames the wire was too slow for.
    pub missed: u64,
    pub took_s: u64,
}

/// One figure of each cell.
struct Figure {
    title: String,
    case: &'static str,
    metric: &'static str,
    unit: &'static str,
    of: fn(&Cell) -> f64,
    /// From the unit to what the table shows.
    shown: fn(f64) -> String,
}

impl Report {
    pub fn new(settings: Settings, losses: &[f64]) -> Self {
        Self {
            settings,
            losses: losses.to_vec(),
            profiles: Vec::new(),
            rounds: BTreeMap::new(),
            missed: 0,
            took_s: 0,
        }
    }

    pub fn add(&mut self, profile: &'static str, loss: f64, cell: Cell) {
        if !self.profiles.contains(&profile) {
            self.profiles.push(profile);
        }
        let column = self
            .losses
            .iter()
            .position(|l| l.to_bits() == loss.to_bits());
        let place = (profile, column.unwrap_or(usize::MAX));
        self.rounds.entry(place).or_default().push(cell);
    }

    fn figures(&self) -> [Figure; 4] {
        let Settings {
            short_bytes,
            long_bytes,
            latency_rate,
            ..
        } = self.settings;
        let mbit = |bps: f64| format!("{:.0}", bps / 1e6);
        let us = |ns: f64| format!("{:.0}", ns / 1e3);
        [
            Figure {
                title: format!("Goodput of {short_bytes}-byte messages, Mbit/s"),
                case: "profile-short",
                metric: "goodput",
                unit: "bit/s",
                of: |cell| cell.short_bps,
                shown: mbit,
            },
            Figure {
                title: format!("Goodput of {long_bytes}-byte messages, Mbit/s"),
                case: "profile-long",
                metric: "goodput",
                unit: "bit/s",
                of: |cell| cell.long_bps,
                shown: mbit,
            },
            Figure {
                title: format!(
                    "p99 of the one-way latency of {short_bytes}-byte messages at {latency_rate}/s, µs"
                ),
                case: "profile-latency",
                metric: "p99",
                unit: "ns",
                of: |cell| cell.latency.value_at_quantile(0.99) as f64,
                shown: us,
            },
            Figure {
                title: "p50 of the same, µs".to_owned(),
                case: "profile-latency",
                metric: "p50",
                unit: "ns",
                of: |cell| cell.latency.value_at_quantile(0.5) as f64,
                shown: us,
            },
        ]
    }

    fn median(&self, profile: &'static str, column: usize, figure: &Figure) -> f64 {
        let cells = self.rounds.get(&(profile, column));
        let mut values: Vec<f64> = cells.into_iter().flatten().map(figure.of).collect();
        median(&mut values)
    }

    /// Tables, a row per profile, a column per loss.
    pub fn markdown(&self) -> String {
        let settings = &self.settings;
        let rate = match settings.rate_mbit {
            0 => "as fast as this machine carries".to_owned(),
            rate => format!("{rate} Mbit/s"),
        };
        let mut text = format!(
            "Two nodes on one machine, veth through a user-space wire, MTU {}, {rate}, {} µs added each way; \
             medians of {} rounds of {} ms, {} ms for long messages.\n",
            settings.mtu, settings.delay_us, settings.rounds, settings.measure_ms, settings.long_ms
        );
        for change in &settings.set {
            let _ = writeln!(text, "Every profile with {change}.");
        }
        if self.missed > 0 {
            let missed = self.missed;
            let _ = writeln!(
                text,
                "The wire was too slow for {missed} frames: they count as loss on top."
            );
        }
        for figure in self.figures() {
            let _ = write!(text, "\n{}\n\n| loss |", figure.title);
            for loss in &self.losses {
                let _ = write!(text, " {loss} % |");
            }
            let _ = write!(text, "\n|---|{}\n", "---:|".repeat(self.losses.len()));
            for profile in &self.profiles {
                let _ = write!(text, "| {profile} |");
                for column in 0..self.losses.len() {
                    let value = self.median(profile, column, &figure);
                    let _ = write!(text, " {} |", (figure.shown)(value));
                }
                text.push('\n');
            }
        }
        text
    }

    /// Every median.
    pub fn json(&self) -> Value {
        let mut results = Vec::new();
        for figure in self.figures() {
            for profile in &self.profiles {
                for (column, loss) in self.losses.iter().enumerate() {
                    results.push(json!({
                        "case": figure.case,
                        "subject": profile,
                        "loss": loss / 100.0,
                        "metric": figure.metric,
                        "value": self.median(profile, column, &figure),
                        "unit": figure.unit,
                        "samples": self.rounds.get(&(*profile, column)).map_or(0, Vec::len),
                    }));
                }
            }
        }
        json!({
            "settings": self.settings,
            "missed": self.missed,
            "took_s": self.took_s,
            "results": results,
        })
    }
}

/// The middle one, or the mean of the two in the middle; 0 of none.
fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    match values {
        [] => 0.0,
        values if values.len() % 2 == 1 => values[values.len() / 2],
        values => f64::midpoint(values[values.len() / 2 - 1], values[values.len() / 2]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cell(short_bps: f64, latency: u64) -> Cell {
        let mut histogram = Histogram::new(3).unwrap();
        histogram.record(latency).unwrap();
        Cell {
            short_bps,
            long_bps: 0.0,
            latency: histogram,
        }
    }

    #[test]
    fn medians_stand_in_their_row_and_column() {
        let settings = Settings {
            mtu: 1500,
            delay_us: 0,
            rate_mbit: 0,
            short_bytes: 1024,
            long_bytes: 65_536,
            latency_rate: 1000,
            measure_ms: 1,
            long_ms: 1,
            rounds: 3,
            set: Vec::new(),
        };
        let mut report = Report::new(settings, &[0.0, 0.01]);
        for bps in [9e6, 1e6, 5e6] {
            report.add("ftgm", 0.0, cell(bps, 1000));
            report.add("ftgm", 0.01, cell(bps / 10.0, 2000));
        }
        let text = report.markdown();
        assert!(
            text.contains("| loss | 0 % | 0.01 % |\n|---|---:|---:|\n| ftgm | 5 | 0 |"),
            "{text}"
        );
        assert!(text.contains("| ftgm | 1 | 2 |"), "{text}");
        let json = report.json();
        assert_eq!(json["results"][1]["loss"], 0.0001);
        assert_eq!(json["results"][1]["value"], 500_000.0);
    }

    #[test]
    fn the_median_of_an_even_number_is_between() {
        assert!((median(&mut [4.0, 1.0, 2.0, 100.0]) - 3.0).abs() < 1e-9);
        assert!(median(&mut []).abs() < 1e-9);
    }
}
