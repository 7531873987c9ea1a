//! FTGM's Tables 1, 2 and 3 with our figures beside theirs.

use super::cost::Cost;
use super::flips::category::Category;
use super::outcome::Outcome;
use super::report::table;

/// FTGM's Table 1 in percent: "our work", and Iyer et al.
fn paper(category: Category) -> [f64; 2] {
    match category {
        Category::LocalHung => [28.6, 23.4],
        Category::Corrupted => [18.3, 12.7],
        Category::RemoteHung => [0.0, 1.2],
        Category::Restart => [0.0, 3.1],
        Category::HostCrash => [0.6, 0.4],
        Category::Other => [1.2, 1.1],
        Category::NoImpact => [51.3, 58.1],
    }
}

/// The paper's order of rows.
const ROWS: [Category; 7] = [
    Category::LocalHung,
    Category::Corrupted,
    Category::RemoteHung,
    Category::Restart,
    Category::HostCrash,
    Category::Other,
    Category::NoImpact,
];

/// Single bits flipped in machine code; nothing if none were.
pub fn one(outcomes: &[Outcome]) -> Option<String> {
    let flips: Vec<_> = outcomes
        .iter()
        .filter_map(|outcome| Some((outcome.kind.as_str(), outcome.flips.as_ref()?)))
        .collect();
    if flips.is_empty() {
        return None;
    }
    let mut heading = vec![
        "% of flips".to_owned(),
        "FTGM".to_owned(),
        "Iyer".to_owned(),
    ];
    heading.extend(flips.iter().map(|(kind, _)| (*kind).to_owned()));
    let mut rows = vec![heading];
    for category in ROWS {
        let mut row = vec![category.name().to_owned()];
        row.extend(paper(category).map(|percent| format!("{percent:.1}")));
        let ours = flips.iter().map(|(_, table)| table.percent(category));
        row.extend(ours.map(|percent| format!("{percent:.1}")));
        rows.push(row);
    }
    let row = |name: &str,
               paper: [&str; 2],
               figure: &dyn Fn(&super::flips::category::Table) -> String| {
        let mut row = vec![name.to_owned()];
        row.extend(paper.map(str::to_owned));
        row.extend(flips.iter().map(|(_, table)| figure(table)));
        row
    };
    rows.push(row("flips", ["1000", "1000"], &|t| t.flips.to_string()));
    rows.push(row("engines lost", ["286", "-"], &|t| {
        t.replaced.to_string()
    }));
    rows.push(row("of these recovered", ["281", "-"], &|t| {
        t.recovered.to_string()
    }));
    rows.push(row("silent ports, engine beating", ["-", "-"], &|t| {
        t.silent.to_string()
    }));
    rows.push(row("damage that outlived it", ["-", "-"], &|t| {
        t.down.to_string()
    }));
    rows.push(row("harm not reported", ["-", "-"], &|t| {
        t.unreported.to_string()
    }));
    Some(format!(
        "Table 1: bits flipped in the code\n\n{}",
        table(&rows)
    ))
}

/// What recovery costs while nothing fails.
pub fn two(cost: &Cost) -> String {
    let rows = [
        ["", "GM", "FTGM", "Portolan"],
        [
            "bandwidth, MB/s",
            "92.4",
            "92.0",
            &format!("{:.0}", cost.bandwidth_mb_s),
        ],
        [
            "latency, us",
            "11.5",
            "13.0",
            &format!("{:.1}", cost.latency_us),
        ],
        [
            "host, send, us",
            "0.30",
            "0.55",
            &format!("{:.2}", cost.send_us),
        ],
        [
            "host, receive, us",
            "0.75",
            "1.15",
            &format!("{:.2}", cost.receive_us),
        ],
        [
            "LANai; engine, send, us",
            "6.0",
            "6.8",
            &format!("{:.2}", cost.engine_us[0]),
        ],
        [
            "engine, receive, us",
            "",
            "",
            &format!("{:.2}", cost.engine_us[1]),
        ],
    ];
    let rows: Vec<Vec<String>> = rows
        .iter()
        .map(|row| row.map(str::to_owned).to_vec())
        .collect();
    format!("Table 2: per message\n\n{}", table(&rows))
}

/// Recovery against the number of open ports; nothing if it was not measured.
pub fn three(outcomes: &[Outcome]) -> Option<String> {
    let ours: Vec<(u64, &Outcome)> = outcomes
        .iter()
        .filter_map(|outcome| Some((outcome.open_ports?, outcome)))
        .collect();
    let ((fewest, first), (most, last)) = (ours.first()?, ours.last()?);
    let mut heading = vec!["median, us".to_owned(), "FTGM".to_owned()];
    heading.extend(ours.iter().map(|(ports, _)| format!("{ports} ports")));
    let mut rows = vec![heading];
    let mut row = |name: &str, paper: &str, figure: &dyn Fn(&Outcome) -> String| {
        let mut row = vec![name.to_owned(), paper.to_owned()];
        row.extend(ours.iter().map(|(_, outcome)| figure(outcome)));
        rows.push(row);
    };
    row("fault detection", "800", &|o| o.detect.median_text());
    row("FTD recovery; taking over", "765000", &|o| {
        o.takeover.median_text()
    });
    row("pause of the application", "1665800", &|o| {
        o.outage.median_text()
    });
    let slope = match most > fewest {
        true => {
            (last.takeover.quantile(0.5) - first.takeover.quantile(0.5)) / (most - fewest) as f64
        }
        false => 0.0,
    };
    Some(format!(
        "Table 3: recovery against open ports\n\n{}\nPer port: FTGM 900000 us, Portolan {slope:.2} us.\n",
        table(&rows)
    ))
}
