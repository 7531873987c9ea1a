//! The fault campaigns: engines are killed, hung, stopped, blocked and damaged while two nodes exchange messages, and what was promised
//! is checked.
//!
//! Four ports on each of two nodes send each other messages of 1 byte to 1 MiB in both directions; every byte follows from the message's
//! number, so loss, doubling, change and disorder are seen for what they are ([`letter`], [`books`]). One port more receives a message every
//! 50 us; the longest gap between its deliveries around a fault is the outage ([`steady`]). Detection and takeover are the daemon's own
//! times, on the clock we read too ([`victim`]).
//!
//! | file | noun |
//! |---|---|
//! | `scene.rs` | one campaign's world: lab, daemons, load |
//! | `load.rs`, `letter.rs`, `books.rs`, `meter.rs` | the load, its messages, what was sent and what came |
//! | `steady.rs` | the port outages are measured on |
//! | `victim.rs` | an engine in its daemon's status |
//! | `fault.rs`, `tracee.rs`, `text.rs` | ways to hurt an engine; a process sent astray; its machine code |
//! | `deaths.rs`, `alarms.rs`, `links.rs`, `supervisors.rs` | campaigns: faults that end engines; what must alarm nobody; interfaces; supervisors |
//! | `flips/` | the paper's experiment: bits flipped in the machine code |
//! | `cost.rs` | what each message costs while nothing fails |
//! | `plan.rs` | which campaigns run, and how large |
//! | `tables.rs` | FTGM's tables with our figures beside |
//! | `outcome.rs`, `report.rs`, `progress.rs` | what came of it |

mod alarms;
mod books;
mod clock;
mod cost;
mod deaths;
mod fault;
mod flips;
mod gaps;
mod letter;
mod links;
mod load;
mod meter;
mod outcome;
mod plan;
mod progress;
mod random;
mod report;
mod scene;
mod steady;
mod supervisors;
mod tables;
mod text;
mod tracee;
mod victim;

use anyhow::{Result, bail};
use portolan_testbed::cancel;

use crate::company::Company;

use outcome::Outcome;
pub use plan::Options;
use progress::Progress;
use report::Report;

/// Runs the campaigns, prints and writes the report.
///
/// # Errors
/// What kept it from running; and anything lost, doubled, changed or not recovered.
pub fn run(options: &Options) -> Result<()> {
    let plan = options.plan();
    let setting = options.setting();
    let costs = options.costs(&plan);
    let mut expected_s: f64 = plan.iter().map(plan::Item::expected_s).sum();
    expected_s += if costs { cost::EXPECTED_S } else { 0.0 };
    let company = Company::meet();
    let mut progress = Progress::new(expected_s);
    let mut report = Report::new(options.seed());
    if costs {
        progress.begin("cost", 1, cost::EXPECTED_S);
        report.set_cost(cost::measure(&setting)?);
        progress.end();
        report.keep(options.json())?;
    }
    for item in &plan {
        progress.begin(item.name(), item.count(), item.expected_s());
        let outcome = deaths::timed(|| item.run(&setting, &mut progress));
        progress.end();
        let outcome = match outcome {
            Err(error) if !cancel::requested() => Outcome::broken(item.name(), &error)?,
            other => other?,
        };
        println!("{}", report::line(&outcome));
        report.add(outcome);
        report.keep(options.json())?;
    }
    print!("\n{}", report.text());
    company.warn();
    let complaints = report.complaints();
    if !complaints.is_empty() {
        bail!("not as promised:\n  {}", complaints.join("\n  "));
    }
    Ok(())
}
