//! Plots: lines over axes, as SVG that stands inside a page.
//!
//! Small enough to be written here: two kinds of axis, lines and dots. A crate for plots would bring fonts and backends for pictures
//! that are a few polylines; and colours belong to the page's style sheet, which knows whether the reader's screen is dark.

use std::fmt::Write;

/// Size of the whole picture, and room around the area that is plotted.
const WIDTH: f64 = 560.0;
const HEIGHT: f64 = 340.0;
const LEFT: f64 = 64.0;
const RIGHT: f64 = 16.0;
const TOP: f64 = 34.0;
const BOTTOM: f64 = 46.0;

/// How values become places.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scale {
    /// Equal steps are equally far apart.
    Linear,
    /// Equal factors are.
    Log,
}

/// One axis: what it shows, and the ticks, each a value and its name. The outermost ticks and values are its ends.
#[derive(Clone, Debug)]
pub struct Axis {
    pub label: String,
    pub scale: Scale,
    pub ticks: Vec<(f64, String)>,
}

/// One line.
#[derive(Clone, Debug)]
pub struct Line {
    pub name: String,
    /// Number of its colour.
    pub colour: usize,
    /// Limits are dashed: nobody can use them.
    pub dashed: bool,
    pub points: Vec<(f64, f64)>,
    /// Points that are marked, each with what it says when pointed at.
    pub marks: Vec<(f64, f64, String)>,
}

/// A plot.
#[derive(Clone, Debug)]
pub struct Plot {
    pub title: String,
    pub x: Axis,
    pub y: Axis,
    pub lines: Vec<Line>,
}

impl Axis {
    fn ends(&self, values: impl Iterator<Item = f64>) -> (f64, f64) {
        let ticks = self.ticks.iter().map(|(value, _)| *value);
        let all = ticks.chain(values).filter(|value| value.is_finite());
        let (low, high) = all.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| {
            (low.min(value), high.max(value))
        });
        match low < high {
            true => (low, high),
            false => (0.0, 1.0),
        }
    }

    /// Where a value lies between the ends, from 0 to 1.
    fn place(&self, value: f64, (low, high): (f64, f64)) -> f64 {
        let of = |value: f64| match self.scale {
            Scale::Linear => value,
            Scale::Log => value.max(f64::MIN_POSITIVE).ln(),
        };
        ((of(value) - of(low)) / (of(high) - of(low))).clamp(0.0, 1.0)
    }
}

impl Plot {
    /// As an `<svg>` element.
    pub fn svg(&self) -> String {
        let points = || self.lines.iter().flat_map(|line| &line.points);
        let xs = self.x.ends(points().map(|(x, _)| *x));
        let ys = self.y.ends(points().map(|(_, y)| *y));
        let across = |x: f64| LEFT + self.x.place(x, xs) * (WIDTH - LEFT - RIGHT);
        let up = |y: f64| HEIGHT - BOTTOM - self.y.place(y, ys) * (HEIGHT - TOP - BOTTOM);
        let mut out = format!(
            "<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{0}\">\
             <text class=\"title\" x=\"{LEFT}\" y=\"18\">{0}</text>",
            escaped(&self.title)
        );
        for (value, name) in &self.x.ticks {
            let (x, bottom) = (across(*value), HEIGHT - BOTTOM);
            let _ = write!(
                out,
                "<line class=\"grid\" x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{TOP}\" y2=\"{bottom}\"/>\
                 <text class=\"tick\" x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
                bottom + 15.0,
                escaped(name)
            );
        }
        for (value, name) in &self.y.ticks {
            let (y, right) = (up(*value), WIDTH - RIGHT);
            let _ = write!(
                out,
                "<line class=\"grid\" x1=\"{LEFT}\" x2=\"{right}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/>\
                 <text class=\"tick\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
                LEFT - 6.0,
                y + 4.0,
                escaped(name)
            );
        }
        let _ = write!(
            out,
            "<text class=\"label\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>\
             <text class=\"label\" transform=\"translate(14 {:.1}) rotate(-90)\" text-anchor=\"middle\">{}</text>",
            f64::midpoint(LEFT, WIDTH - RIGHT),
            HEIGHT - 10.0,
            escaped(&self.x.label),
            f64::midpoint(TOP, HEIGHT - BOTTOM),
            escaped(&self.y.label)
        );
        for line in &self.lines {
            let places = line.points.iter();
            let places = places.map(|(x, y)| format!("{:.1},{:.1}", across(*x), up(*y)));
            let class = if line.dashed { "line limit" } else { "line" };
            let _ = write!(
                out,
                "<polyline class=\"{class} c{}\" points=\"{}\"><title>{}</title></polyline>",
                line.colour,
                places.collect::<Vec<_>>().join(" "),
                escaped(&line.name)
            );
            for (x, y, says) in &line.marks {
                let _ = write!(
                    out,
                    "<circle class=\"mark c{}\" cx=\"{:.1}\" cy=\"{:.1}\" r=\"3.5\"><title>{}</title></circle>",
                    line.colour,
                    across(*x),
                    up(*y),
                    escaped(says)
                );
            }
        }
        out + "</svg>"
    }
}

/// Ticks at powers of ten, from the one below the least to the one above the greatest.
pub fn decades(
    values: impl Iterator<Item = f64>,
    name: impl Fn(f64) -> String,
) -> Vec<(f64, String)> {
    let logs = values.filter(|value| *value > 0.0).map(f64::log10);
    let (low, high) = logs.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| {
        (low.min(value), high.max(value))
    });
    if low > high {
        return Vec::new();
    }
    let powers = low.floor() as i32..=high.ceil() as i32;
    powers
        .map(|power| 10f64.powi(power))
        .map(|value| (value, name(value)))
        .collect()
}

/// Ticks from 0 to above the greatest, at steps of 1, 2 or 5 times a power of ten, not more than eight of them.
pub fn steps(greatest: f64, name: impl Fn(f64) -> String) -> Vec<(f64, String)> {
    if !(greatest.is_finite() && greatest > 0.0) {
        return Vec::new();
    }
    let power = 10f64.powf((greatest / 8.0).log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].map(|factor| factor * power);
    let step = step
        .into_iter()
        .find(|step| greatest / step <= 8.0)
        .unwrap_or(greatest);
    let count = (greatest / step).ceil() as u32;
    (0..=count)
        .map(|n| f64::from(n) * step)
        .map(|value| (value, name(value)))
        .collect()
}

/// Text for a page.
pub fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out += "&amp;",
            '<' => out += "&lt;",
            '>' => out += "&gt;",
            '"' => out += "&quot;",
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn axis(scale: Scale) -> Axis {
        Axis {
            label: String::new(),
            scale,
            ticks: Vec::new(),
        }
    }

    #[test]
    fn equal_factors_are_equally_far_apart_on_a_logarithmic_axis() {
        let place = |value| axis(Scale::Log).place(value, (1.0, 10_000.0));
        assert!((place(100.0) - 0.5).abs() < 1e-9);
        assert!(
            place(0.0).abs() < 1e-9,
            "what has no logarithm lies at the end"
        );
        let place = |value| axis(Scale::Linear).place(value, (0.0, 10.0));
        assert!((place(2.5) - 0.25).abs() < 1e-9);
    }

    #[test]
    fn ticks_enclose_what_is_plotted() {
        let name = |value: f64| format!("{value}");
        let ticks = decades([3.0, 450.0].into_iter(), name);
        assert_eq!(
            ticks.iter().map(|t| t.0).collect::<Vec<_>>(),
            [1.0, 10.0, 100.0, 1000.0]
        );
        let ticks = steps(23.0, name);
        assert_eq!(ticks.last().unwrap().0, 25.0);
        assert!(ticks.len() <= 9);
        assert!(steps(0.0, name).is_empty());
        assert!(decades([0.0].into_iter(), name).is_empty());
    }

    #[test]
    fn a_plot_holds_each_line_and_what_is_written_cannot_break_the_page() {
        let plot = Plot {
            title: "<script>".to_owned(),
            x: axis(Scale::Log),
            y: axis(Scale::Linear),
            lines: vec![Line {
                name: "a & b".to_owned(),
                colour: 3,
                dashed: false,
                points: vec![(1.0, 1.0), (10.0, 2.0)],
                marks: vec![(10.0, 2.0, "here".to_owned())],
            }],
        };
        let svg = plot.svg();
        assert!(!svg.contains("<script>"), "{svg}");
        assert!(svg.contains("a &amp; b") && svg.contains("c3"), "{svg}");
        assert_eq!(svg.matches("<polyline").count(), 1);
        assert!(svg.contains("<title>here</title>"), "{svg}");
    }
}
