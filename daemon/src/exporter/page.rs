//! The text format of Prometheus, version 0.0.4, and OpenMetrics 1.0, which is almost the same.

use std::collections::HashMap;
use std::fmt::Write;

use serde_json::Value;

use super::families::{self, Family, Kind};

/// Which of the two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Prometheus, 0.0.4.
    Text,
    /// OpenMetrics 1.0.
    OpenMetrics,
}

impl Format {
    /// For Content-Type.
    pub fn content_type(self) -> &'static str {
        match self {
            Self::Text => "text/plain; version=0.0.4; charset=utf-8",
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }
}

/// Samples of a family: what follows its name, up to the line's end.
#[derive(Debug, Default)]
pub struct Samples {
    lines: HashMap<&'static str, Vec<String>>,
}

impl Samples {
    fn family(name: &str) -> Option<&'static Family> {
        families::all().iter().find(|family| family.name == name)
    }

    fn push(&mut self, family: &'static Family, line: String) {
        self.lines.entry(&family.name).or_default().push(line);
    }

    /// A sample without labels.
    pub fn plain(&mut self, name: &str, value: f64) {
        self.add(name, &[], value);
    }

    /// A sample. What is not declared is left out; a test knows.
    pub fn add(&mut self, name: &str, labels: &[(&str, Value)], value: f64) {
        if let Some(family) = Self::family(name) {
            debug_assert_ne!(family.kind, Kind::Histogram);
            self.push(family, format!("{} {value}", braces(labels, None)));
        }
    }

    /// A histogram as the daemon reports it: bounds and counts of each class.
    pub fn histogram(&mut self, name: &str, labels: &[(&str, Value)], document: &Value) {
        let Some(family) = Self::family(name) else {
            return;
        };
        let numbers = |key: &str| -> Vec<u64> {
            let list = document[key].as_array().into_iter().flatten();
            list.filter_map(Value::as_u64).collect()
        };
        let (bounds, counts) = (numbers("bounds_ns"), numbers("counts"));
        if counts.len() != bounds.len() + 1 {
            return;
        }
        let mut total = 0_u64;
        for (bound, count) in bounds.iter().zip(&counts) {
            total = total.saturating_add(*count);
            let le = format!("{}", *bound as f64 / 1e9);
            self.push(
                family,
                format!("_bucket{} {total}", braces(labels, Some(&le))),
            );
        }
        let total = counts
            .iter()
            .fold(0_u64, |sum, count| sum.saturating_add(*count));
        let sum = document["sum_ns"].as_u64().unwrap_or(0) as f64 / 1e9;
        self.push(
            family,
            format!("_bucket{} {total}", braces(labels, Some("+Inf"))),
        );
        self.push(family, format!("_sum{} {sum}", braces(labels, None)));
        self.push(family, format!("_count{} {total}", braces(labels, None)));
    }

    /// The page.
    pub fn render(&self, format: Format) -> String {
        let mut page = String::new();
        for family in families::all() {
            let Some(lines) = self.lines.get(family.name.as_str()) else {
                continue;
            };
            let name = &family.name;
            let title = match format {
                Format::OpenMetrics => name.strip_suffix("_total").unwrap_or(name),
                Format::Text => name,
            };
            // Writing to a string cannot fail.
            let _ = writeln!(page, "# HELP {title} {}", family.help);
            let _ = writeln!(page, "# TYPE {title} {}", family.kind.name());
            for line in lines {
                let _ = writeln!(page, "{name}{line}");
            }
        }
        if format == Format::OpenMetrics {
            page += "# EOF\n";
        }
        page
    }
}

fn braces(labels: &[(&str, Value)], le: Option<&str>) -> String {
    let each = labels.iter().map(|(name, value)| {
        let text = match value {
            Value::String(text) => escaped(text),
            Value::Null => String::new(),
            other => escaped(&other.to_string()),
        };
        format!("{name}=\"{text}\"")
    });
    let le = le.map(|bound| format!("le=\"{bound}\""));
    let all: Vec<String> = each.chain(le).collect();
    match all.is_empty() {
        true => String::new(),
        false => format!("{{{}}}", all.join(",")),
    }
}

/// Names come from other nodes and from configurations: no line ends, no quotes, not for ever.
fn escaped(text: &str) -> String {
    let mut safe = String::new();
    for character in text.chars().take(128) {
        match character {
            '\\' => safe += "\\\\",
            '"' => safe += "\\\"",
            '\n' => safe += "\\n",
            other if other.is_control() => safe.push('\u{fffd}'),
            other => safe.push(other),
        }
    }
    safe
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn both_formats_are_as_they_should_be() {
        let mut samples = Samples::default();
        samples.plain("portolan_up", 1.0);
        samples.add("portolan_events_total", &[("kind", json!("peer_up"))], 3.0);
        let text = samples.render(Format::Text);
        let expected = "# HELP portolan_up 1 if the daemon answers its exporter.\n\
            # TYPE portolan_up gauge\n\
            portolan_up 1\n\
            # HELP portolan_events_total Events, as `portolan events` shows them.\n\
            # TYPE portolan_events_total counter\n\
            portolan_events_total{kind=\"peer_up\"} 3\n";
        assert_eq!(text, expected);
        let open = samples.render(Format::OpenMetrics);
        assert!(open.contains("# TYPE portolan_events counter\nportolan_events_total{"));
        assert!(open.ends_with("\n# EOF\n"));
    }

    #[test]
    fn classes_are_summed_up() {
        let mut samples = Samples::default();
        let document =
            json!({ "bounds_ns": [1000, 2_000_000], "counts": [1, 2, 4], "sum_ns": 500_000_000 });
        let name = "portolan_supervisor_turn_seconds";
        samples.histogram(name, &[], &document);
        samples.histogram(name, &[], &json!({ "bounds_ns": [1], "counts": [1] }));
        samples.histogram(name, &[], &json!("nonsense"));
        let page = samples.render(Format::Text);
        let lines: Vec<&str> = page.lines().skip(2).collect();
        assert_eq!(
            lines,
            [
                "portolan_supervisor_turn_seconds_bucket{le=\"0.000001\"} 1",
                "portolan_supervisor_turn_seconds_bucket{le=\"0.002\"} 3",
                "portolan_supervisor_turn_seconds_bucket{le=\"+Inf\"} 7",
                "portolan_supervisor_turn_seconds_sum 0.5",
                "portolan_supervisor_turn_seconds_count 7",
            ]
        );
    }

    // A peer calls itself something that would add a line. Expect: it does not.
    #[test]
    fn labels_cannot_break_out() {
        let label = [("name", json!("a\"} 1\nportolan_up 0\r\\"))];
        assert_eq!(
            braces(&label, None),
            "{name=\"a\\\"} 1\\nportolan_up 0\u{fffd}\\\\\"}"
        );
    }
}
