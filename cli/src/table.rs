//! Aligned columns, numbers to the right.

use serde_json::Value;

use crate::paint::{Paint, Style, style_of};

/// Rows of text under a heading.
pub struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    pub fn new(heading: &[&str]) -> Self {
        Self {
            rows: vec![heading.iter().map(|h| (*h).to_string()).collect()],
        }
    }

    pub fn row(&mut self, cells: Vec<String>) {
        self.rows.push(cells);
    }

    /// As [`Self::render`], the first row apart: a title rather than headings.
    pub fn render_ragged(&self, paint: Paint) -> String {
        let (title, rows) = match self.rows.split_first() {
            Some((title, rows)) => (title.join(" "), rows),
            None => return String::new(),
        };
        let width = rows
            .iter()
            .filter_map(|r| r.first())
            .map(|c| c.chars().count())
            .max();
        let width = width.unwrap_or(0);
        let mut text = paint.paint(Style::Heading, &title) + "\n";
        for row in rows {
            let (key, rest) = match row.split_first() {
                Some((key, rest)) => (key.as_str(), rest.join("  ")),
                None => continue,
            };
            let rest = paint.paint(style_of(key, &rest), &rest);
            text += &format!("{key:width$}  {rest}\n");
        }
        text
    }

    /// The lines, each with its end.
    pub fn render(&self) -> String {
        self.paint(Paint::NONE)
    }

    /// The lines, each with its end; headings and words that tell a state in colours.
    pub fn paint(&self, paint: Paint) -> String {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let widths: Vec<usize> = (0..columns)
            .map(|c| {
                let cells = self.rows.iter().filter_map(|r| r.get(c));
                cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
            })
            .collect();
        let numeric: Vec<bool> = (0..columns)
            .map(|c| {
                let cells = self.rows.iter().skip(1).filter_map(|r| r.get(c));
                cells.clone().any(|cell| cell != "-")
                    && cells.clone().all(|cell| {
                        cell == "-" || cell.starts_with(|first: char| first.is_ascii_digit())
                    })
            })
            .collect();
        let mut text = String::new();
        for (number, row) in self.rows.iter().enumerate() {
            let mut line = String::new();
            let last = row.iter().rposition(|cell| !cell.is_empty());
            for (c, cell) in row.iter().enumerate() {
                let pad = " ".repeat(widths[c] - cell.chars().count());
                let gap = if c == 0 { "" } else { "  " };
                let (before, after) = if numeric[c] {
                    (pad, String::new())
                } else {
                    (String::new(), pad)
                };
                let after = if last == Some(c) {
                    String::new()
                } else {
                    after
                };
                let heading = self.rows.first().and_then(|row| row.get(c));
                let style = match number {
                    0 => Style::Heading,
                    _ => heading.map_or(Style::Plain, |heading| style_of(heading, cell)),
                };
                line += &format!("{gap}{before}{}{after}", paint.paint(style, cell));
            }
            text += line.trim_end();
            text.push('\n');
        }
        text
    }
}

/// A value for people. Control characters do not reach the terminal: names come from other nodes.
pub fn plain(value: &Value) -> String {
    let text = match value {
        Value::Null => "-".into(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    text.chars()
        .map(|c| if c.is_control() { '\u{fffd}' } else { c })
        .collect()
}

/// Nanoseconds for people.
pub fn duration(ns: f64) -> String {
    if ns < 10_000.0 {
        format!("{ns:.0} ns")
    } else if ns < 10_000_000.0 {
        format!("{:.1} us", ns / 1e3)
    } else if ns < 10e9 {
        format!("{:.1} ms", ns / 1e6)
    } else {
        format!("{:.1} s", ns / 1e9)
    }
}

/// Bytes per second for people.
pub fn rate(bytes_per_second: f64) -> String {
    if bytes_per_second < 1e6 {
        format!("{:.1} kB/s", bytes_per_second / 1e3)
    } else if bytes_per_second < 1e9 {
        format!("{:.1} MB/s", bytes_per_second / 1e6)
    } else {
        format!("{:.2} GB/s", bytes_per_second / 1e9)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_align() {
        let mut table = Table::new(&["node", "name", "rtt"]);
        table.row(vec!["2".into(), "b".into(), "1.0 us".into()]);
        table.row(vec!["100".into(), "long-name".into(), "-".into()]);
        let expected =
            "node  name          rtt\n   2  b          1.0 us\n 100  long-name       -\n";
        assert_eq!(table.render(), expected);
    }

    // A node calls itself something that would move the cursor. Expect: it does not.
    #[test]
    fn control_characters_stay_out() {
        assert_eq!(plain(&"a\u{1b}[2J\n".into()), "a\u{fffd}[2J\u{fffd}");
    }
}
