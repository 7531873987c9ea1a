//! The report for people: one file that needs nothing else.

use std::fmt::Write;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use super::svg::{Axis, Line, Plot, Scale, decades, escaped, steps};
use super::table::shown;
use super::{Results, goals};
use crate::cases::{Case, Size};
use crate::host;
use crate::subjects::metric;

/// Quantiles of the curves, as shares of messages that are slower.
const SLOWER: [(f64, &str); 6] = [
    (1.0, "0 %"),
    (0.5, "50 %"),
    (0.1, "90 %"),
    (0.01, "99 %"),
    (0.001, "99.9 %"),
    (0.0001, "99.99 %"),
];

/// Writes it.
pub fn write(results: &Results, path: &Path) -> Result<()> {
    if let Some(directory) = path.parent() {
        fs::create_dir_all(directory).with_context(|| directory.display().to_string())?;
    }
    fs::write(path, page(results)).with_context(|| path.display().to_string())
}

fn page(results: &Results) -> String {
    let mut out = String::from(
        "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width\"><title>Portolan, compared</title>",
    );
    let _ = write!(out, "<style>{}</style><h1>Portolan, compared</h1>", style());
    let kind = if results.quick { "a quick look: " } else { "" };
    let _ = write!(
        out,
        "<p>{}. {kind}{} turns of every subject at every case, {:.0} s in all. All subjects took turns in one run, on the same veth \
         pair, the same two cores and with the same sizes; values are medians of turns, ratios are of the same turn.</p>",
        escaped(&host::line()),
        results.turns,
        results.took_s
    );
    if let Some(distances) = results.distances() {
        let _ = write!(out, "<p>{}.</p>", escaped(&distances));
    }
    legend(results, &mut out);
    section(
        &mut out,
        "Throughput and latency against size",
        &sweeps(results),
    );
    section(
        &mut out,
        "How latencies are distributed",
        &distributions(results),
    );
    half_power_points(results, &mut out);
    reached(results, &mut out);
    all_lines(results, &mut out);
    if !results.failures.is_empty() {
        out += "<h2>Not measured</h2><table><tr><th>case<th>subject<th>why</tr>";
        for (case, subject, why) in &results.failures {
            let [case, subject, why] = [case, subject, why].map(|text| escaped(text));
            let _ = write!(out, "<tr><td>{case}<td>{subject}<td><pre>{why}</pre></tr>");
        }
        out += "</table>";
    }
    out + "</html>\n"
}

fn legend(results: &Results, out: &mut String) {
    *out += "<h2>Who</h2><table><tr><th><th>subject<th>version<th>how it is run</tr>";
    for (colour, (name, about)) in results.subjects.iter().enumerate() {
        let [shown, version, command] = [name, &about.version, &about.command].map(|s| escaped(s));
        let class = if is_limit(name) { "line limit" } else { "line" };
        let _ = write!(
            out,
            "<tr><td><svg class=\"key\" viewBox=\"0 0 30 8\"><polyline class=\"{class} c{colour}\" points=\"1,4 29,4\"/></svg>\
             <td>{shown}<td>{version}<td>{command}</tr>"
        );
    }
    *out += "</table>";
}

fn is_limit(name: &str) -> bool {
    name.starts_with("limit-")
}

fn section(out: &mut String, title: &str, plots: &[Plot]) {
    if plots.is_empty() {
        return;
    }
    let _ = write!(out, "<h2>{title}</h2><div class=\"plots\">");
    for plot in plots {
        *out += &plot.svg();
    }
    *out += "</div>";
}

/// The papers' curves: FTGM's Figures 7 and 8, and what N/2 is read from.
fn sweeps(results: &Results) -> Vec<Plot> {
    let gigabits = |title: &str, metric| {
        let lines = sweep(results, metric, 1e9, "Gbit/s");
        let greatest = values(&lines).fold(0.0, f64::max);
        let ticks = steps(greatest, |value| format!("{value}"));
        (title.to_owned(), "Gbit/s", Scale::Linear, ticks, lines)
    };
    let ways = sweep(results, metric::ONE_WAY, 1e3, "µs");
    let ticks = decades(values(&ways), |value| format!("{value}"));
    let ways = (
        "One way of a message".to_owned(),
        "µs",
        Scale::Log,
        ticks,
        ways,
    );
    let plots = [
        gigabits("Throughput one way", metric::THROUGHPUT),
        gigabits("Throughput both ways together", metric::BOTH_WAYS),
        ways,
    ];
    let plots = plots.into_iter().filter(|(.., lines)| !lines.is_empty());
    plots
        .map(|(title, label, scale, ticks, lines)| Plot {
            title,
            x: sizes(&lines),
            y: Axis {
                label: label.to_owned(),
                scale,
                ticks,
            },
            lines,
        })
        .collect()
}

fn sweep(results: &Results, metric: &'static str, divisor: f64, unit: &str) -> Vec<Line> {
    let names = results.subjects.iter().map(|(name, _)| name).enumerate();
    let line = |(colour, name): (usize, &String)| {
        let points: Vec<(f64, f64)> = results
            .sweep(name, metric)
            .into_iter()
            .map(|(bytes, value)| (bytes as f64, value / divisor))
            .collect();
        let says = |&(x, y): &(f64, f64)| {
            let text = format!("{name}, {} bytes: {y:.2} {unit}", Size(x as usize));
            (x, y, text)
        };
        (!points.is_empty()).then(|| Line {
            name: name.clone(),
            colour,
            dashed: is_limit(name),
            marks: points.iter().map(says).collect(),
            points,
        })
    };
    names.filter_map(line).collect()
}

fn values(lines: &[Line]) -> impl Iterator<Item = f64> {
    lines.iter().flat_map(|line| &line.points).map(|(_, y)| *y)
}

fn sizes(lines: &[Line]) -> Axis {
    let greatest = lines.iter().flat_map(|line| &line.points);
    let greatest = greatest.map(|(x, _)| *x).fold(1.0, f64::max) as usize;
    let powers = (0..=20).step_by(4).map(|power| 1usize << power);
    let ticks = powers.take_while(|bytes| *bytes <= greatest);
    Axis {
        label: "bytes of a message".to_owned(),
        scale: Scale::Log,
        ticks: ticks
            .map(|bytes| (bytes as f64, Size(bytes).to_string()))
            .collect(),
    }
}

/// How many messages are slower than what, for each ping-pong.
fn distributions(results: &Results) -> Vec<Plot> {
    let cases = results.cases.iter();
    let pings = cases.filter(|case| matches!(case, Case::PingPong { .. }));
    let plots = pings.filter_map(|case| {
        let names = results.subjects.iter().map(|(name, _)| name).enumerate();
        let lines: Vec<Line> = names
            .filter_map(|(colour, name)| distribution(results, case, colour, name))
            .collect();
        let ticks = decades(values(&lines), |value| format!("{value}"));
        (!lines.is_empty()).then(|| Plot {
            title: case.to_string(),
            x: Axis {
                label: "of all messages".to_owned(),
                scale: Scale::Log,
                ticks: SLOWER
                    .map(|(share, name)| (1.0 / share, name.to_owned()))
                    .to_vec(),
            },
            y: Axis {
                label: "at most, µs".to_owned(),
                scale: Scale::Log,
                ticks,
            },
            lines,
        })
    });
    plots.collect()
}

fn distribution(results: &Results, case: &Case, colour: usize, name: &str) -> Option<Line> {
    let times = results.times(case, name, metric::ONE_WAY)?;
    let us = |slower: f64| times.value_at_quantile(1.0 - slower) as f64 / 1e3;
    // Ten points for a decade; none that is a single message's.
    let seen = (0..=40).map(|nth| 10f64.powf(-f64::from(nth) / 10.0));
    let seen = seen.take_while(|slower| slower * times.len() as f64 >= 1.0);
    let points = seen.map(|slower| (1.0 / slower, us(slower))).collect();
    let enough = |slower: f64| slower * times.len() as f64 >= 1.0;
    let marks = SLOWER.iter().filter(|(slower, _)| enough(*slower));
    let marks = marks.map(|&(slower, quantile)| {
        let value = us(slower);
        (
            1.0 / slower,
            value,
            format!("{name}, {quantile}: {value:.2} µs"),
        )
    });
    Some(Line {
        name: name.to_owned(),
        colour,
        dashed: is_limit(name),
        marks: marks.collect(),
        points,
    })
}

fn half_power_points(results: &Results, out: &mut String) {
    let points = results.half_power_points();
    if points.is_empty() {
        return;
    }
    *out += "<h2>N/2</h2><p>The size at which half of the greatest throughput one way is reached (ParaStation2, Table 3).</p>\
             <table><tr><th>subject<th>bytes</tr>";
    for (name, bytes) in points {
        let bytes = bytes.map_or("below the smallest size".to_owned(), |n| format!("{n:.0}"));
        let _ = write!(
            out,
            "<tr><td>{}<td class=\"number\">{bytes}</tr>",
            escaped(&name)
        );
    }
    *out += "</table>";
}

fn reached(results: &Results, out: &mut String) {
    let goals = goals::judge(results);
    if goals.is_empty() {
        return;
    }
    *out += "<h2>Goals</h2><table><tr><th>what<th>found<th>wanted<th></tr>";
    for goal in goals {
        let (class, word) = match goal.is_reached {
            true => ("reached", "reached"),
            false => ("missed", "missed"),
        };
        let [what, found, wanted] = [&goal.what, &goal.found, &goal.wanted].map(|s| escaped(s));
        let _ = write!(
            out,
            "<tr><td>{what}<td class=\"number\">{found}<td class=\"number\">{wanted}<td class=\"{class}\">{word}</tr>"
        );
    }
    *out += "</table>";
}

fn all_lines(results: &Results, out: &mut String) {
    *out += "<h2>All figures</h2><table><tr><th>case<th>subject<th>what<th>value<th>least<th>most<th>p99<th>p99.9<th>ratio to limit<th>note</tr>";
    let mut last = None;
    for line in results.lines() {
        let new = last.replace(line.case) != Some(line.case);
        let class = if new { " class=\"new\"" } else { "" };
        let of = |value: f64| shown(value, line.unit);
        let maybe = |value: Option<f64>| value.map(of).unwrap_or_default();
        let cells = [
            of(line.value),
            of(line.range.0),
            of(line.range.1),
            maybe(line.p99),
            maybe(line.p999),
            line.ratio.map(|r| format!("{r:.2}")).unwrap_or_default(),
        ];
        let cells = cells
            .map(|cell| format!("<td class=\"number\">{cell}"))
            .concat();
        let _ = write!(
            out,
            "<tr{class}><td>{}<td>{}<td>{}{cells}<td>{}</tr>",
            line.case,
            escaped(&line.subject),
            line.metric,
            escaped(&line.note.unwrap_or_default())
        );
    }
    *out += "</table>";
}

/// Colours that can be told apart on light and on dark, also by those who see fewer of them; ours first.
const COLOURS: [&str; 23] = [
    "#d9480f", "#a14a1f", "#e8590c", "#ffa94d", "#827717", "#868e96", "#5c677d", "#343a40",
    "#adb5bd", "#1971c2", "#2f9e44", "#9c36b5", "#e8a100", "#0c8599", "#c2255c", "#66a80f",
    "#4263eb", "#846358", "#20c997", "#f783ac", "#15aabf", "#7a5195", "#3b5bdb",
];

fn style() -> String {
    let mut text = String::from(
        ":root{color-scheme:light dark;--ink:#1c2128;--paper:#fff;--faint:#d7dce2}\
         @media(prefers-color-scheme:dark){:root{--ink:#e6e8eb;--paper:#15181c;--faint:#353b43}}\
         body{font:15px/1.45 system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:76rem;margin:2rem auto;padding:0 1rem}\
         table{border-collapse:collapse;font-size:13px}th,td{text-align:left;padding:2px 10px;vertical-align:top}\
         th{border-bottom:2px solid var(--faint)}tr.new td{border-top:1px solid var(--faint)}\
         .number{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}\
         .reached{color:#2f9e44}.missed{color:#e03131}pre{white-space:pre-wrap;margin:0}\
         .plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(25rem,1fr));gap:1rem}\
         svg{width:100%;height:auto}svg.key{width:30px;height:8px}text{fill:var(--ink);font:11px system-ui,sans-serif}\
         .title{font-size:14px;font-weight:600}.grid{stroke:var(--faint)}\
         .line{fill:none;stroke-width:2;stroke:currentColor}.limit{stroke-dasharray:5 3}.mark{fill:currentColor}",
    );
    for (number, colour) in COLOURS.iter().enumerate() {
        let _ = write!(text, ".c{number}{{color:{colour}}}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::subjects::{About, Figure, unit};

    #[test]
    fn a_page_has_its_plots_and_needs_nothing_else() {
        let subjects =
            ["portolan", "limit-relay-crc"].map(|name| (name.to_owned(), About::default()));
        let cases: Vec<Case> = [64, 1024].map(|bytes| Case::AllSize { bytes }).to_vec();
        let ping = Case::PingPong { bytes: 64 };
        let all = [cases.clone(), vec![ping]].concat();
        let mut results = Results::new(subjects.to_vec(), all, 1, false);
        for (name, _) in subjects {
            for (case, rate) in cases.iter().zip([1e9, 8e9]) {
                let figure = Figure::number(metric::THROUGHPUT, rate, unit::BITS);
                results.add(case, &name, 0, vec![figure]);
            }
            let mut times = crate::actor::histogram().unwrap();
            (1..2000).for_each(|ns| times.record(ns).unwrap());
            results.add(&ping, &name, 0, vec![Figure::times(metric::ONE_WAY, times)]);
        }
        results.fail("pingpong-64", "aeron", "<no>");
        let page = page(&results);
        // The legend's keys, a sweep, a distribution.
        assert_eq!(page.matches("<svg").count(), 2 + 1 + 1);
        assert!(page.contains("Throughput one way") && page.contains("pingpong-64"));
        assert!(page.contains("&lt;no&gt;"));
        for outside in ["http", "src=", "<script", "@import", "url("] {
            assert!(!page.contains(outside), "{outside}");
        }
    }

    #[test]
    fn every_subject_has_a_colour_of_its_own() {
        assert!(crate::subjects::all().len() <= COLOURS.len());
    }
}
