//! `portoland doctor`: looks at everything on a machine that Portolan's traffic depends on, and names for each thing that is not as it should
//! be the command that mends it.
//!
//! It changes nothing but one thing: peers that the kernel has not resolved are asked for, as sending to them would. It needs no daemon; if
//! one runs, what it says of itself is looked at too. A configuration that is wrong ends nothing: what does not depend on it is looked at
//! all the same. It is part of the daemon's program, not of the tool's, because it reads the configuration with the daemon's own checks;
//! `portolan doctor` runs it.
//!
//! Facts come from rtnetlink, `SIOCETHTOOL`, `/sys` and `/proc`; no other program is run.

mod daemon;
mod links;
mod neighbours;
mod nic;
mod placement;
mod sharing;
mod system;
mod wakeup;

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::supervisor::config::Config;
use crate::supervisor::surroundings::ThisMachine;

/// Where the configuration is if nobody says otherwise.
pub const DEFAULT_CONFIG: &str = "/etc/portolan/portolan.toml";

/// How bad it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// As it should be.
    Ok,
    /// It works, slower or less surely than it could.
    Warn,
    /// It does not work like this.
    Bad,
}

/// One thing that was looked at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// What was looked at: a stable word.
    pub check: &'static str,
    /// How bad it is.
    pub severity: Severity,
    /// What was found.
    pub what: String,
    /// The command that mends it, or the line of the configuration.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mend: Option<String>,
}

/// All that was found, in the order of looking.
#[derive(Debug, Default)]
pub struct Findings(Vec<Finding>);

impl Findings {
    fn add(&mut self, check: &'static str, severity: Severity, what: String, mend: Option<String>) {
        self.0.push(Finding {
            check,
            severity,
            what,
            mend,
        });
    }

    fn ok(&mut self, check: &'static str, what: impl Into<String>) {
        self.add(check, Severity::Ok, what.into(), None);
    }

    fn warn(&mut self, check: &'static str, what: impl Into<String>, mend: impl Into<String>) {
        self.add(check, Severity::Warn, what.into(), Some(mend.into()));
    }

    fn bad(&mut self, check: &'static str, what: impl Into<String>, mend: impl Into<String>) {
        self.add(check, Severity::Bad, what.into(), Some(mend.into()));
    }

    fn worst(&self) -> Severity {
        let severities = self.0.iter().map(|finding| finding.severity);
        severities.max().unwrap_or(Severity::Ok)
    }

    fn count(&self, severity: Severity) -> usize {
        let of_it = self.0.iter().filter(|f| f.severity == severity);
        of_it.count()
    }
}

/// What the looks are about.
struct Patient {
    file: PathBuf,
    /// The configuration, if it is good.
    config: Option<Config>,
    /// The interface it names, good or not.
    interface: Option<String>,
}

impl Patient {
    fn read(file: &Path, findings: &mut Findings) -> Self {
        let check = format!("portoland check {}", file.display());
        let (config, interface) = match Config::load(file, &ThisMachine) {
            Ok(config) => {
                findings.ok("configuration", format!("{}: good", file.display()));
                let interface = config.interface.clone();
                (Some(config), Some(interface))
            }
            Err(errors) => {
                for error in errors.0 {
                    findings.bad("configuration", error.to_string(), check.clone());
                }
                (None, interface_of(file))
            }
        };
        Self {
            file: file.to_owned(),
            config,
            interface,
        }
    }
}

/// The interface a configuration names that may be wrong otherwise.
fn interface_of(file: &Path) -> Option<String> {
    let table: toml::Table = std::fs::read_to_string(file).ok()?.parse().ok()?;
    let name = table.get("network")?.get("interface")?.as_str()?;
    // As a part of paths below /sys.
    let good = !name.is_empty() && name.len() < 16 && !name.contains('/') && !name.starts_with('.');
    good.then(|| name.to_owned())
}

/// Looks at everything.
fn examine(file: &Path) -> Findings {
    let mut findings = Findings::default();
    let patient = Patient::read(file, &mut findings);
    system::look(&patient, &mut findings);
    let running = daemon::look(&patient, &mut findings);
    if let Some(interface) = &patient.interface {
        let link = links::look(interface, running.as_ref(), &mut findings);
        if let Some(link) = link {
            nic::look(&patient, &link, &mut findings);
            placement::look(&patient, &link, &mut findings);
            wakeup::look(&patient, &mut findings);
            neighbours::look(&patient, &link, &mut findings);
        }
    }
    findings
}

/// Looks, prints, and says whether nothing bad was found.
///
/// # Errors
/// Standard output cannot be written.
pub fn run(file: &Path, json: bool) -> anyhow::Result<bool> {
    let findings = examine(file);
    let text = if json {
        let document = serde_json::json!({ "worst": findings.worst(), "findings": findings.0 });
        serde_json::to_string_pretty(&document)? + "\n"
    } else {
        let out = std::io::stdout();
        let coloured =
            std::io::IsTerminal::is_terminal(&out) && std::env::var_os("NO_COLOR").is_none();
        render(&findings, coloured)
    };
    std::io::Write::write_all(&mut std::io::stdout(), text.as_bytes())?;
    Ok(findings.worst() < Severity::Bad)
}

/// For people.
fn render(findings: &Findings, coloured: bool) -> String {
    let width = findings.0.iter().map(|f| f.check.len()).max().unwrap_or(0);
    let mut text = String::new();
    for finding in &findings.0 {
        let (word, colour) = match finding.severity {
            Severity::Ok => ("ok  ", "32"),
            Severity::Warn => ("warn", "33"),
            Severity::Bad => ("BAD ", "31"),
        };
        let word = if coloured {
            format!("\x1b[{colour}m{word}\x1b[0m")
        } else {
            word.to_owned()
        };
        // One line each, whatever a name from outside contains.
        let clean = |text: &str| -> String { text.chars().filter(|c| !c.is_control()).collect() };
        let _ = writeln!(
            text,
            "{word}  {:width$}  {}",
            finding.check,
            clean(&finding.what)
        );
        if let Some(mend) = &finding.mend {
            let _ = writeln!(text, "      {:width$}  mend: {}", "", clean(mend));
        }
    }
    let (warn, bad) = (
        findings.count(Severity::Warn),
        findings.count(Severity::Bad),
    );
    let _ = writeln!(
        text,
        "{} looked at, {bad} bad, {warn} to improve",
        findings.0.len()
    );
    text
}

/// A small file of /sys or /proc, trimmed.
fn read(path: impl AsRef<Path>) -> Option<String> {
    Some(std::fs::read_to_string(path).ok()?.trim().to_owned())
}

/// A list of numbers as the kernel writes it: `0-3,8`.
fn numbers(list: &str) -> Vec<usize> {
    let mut all = Vec::new();
    for part in list.split(',').map(str::trim) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        if let (Ok(first), Ok(last)) = (first.parse::<usize>(), last.parse::<usize>()) {
            all.extend((first..=last).take(4096));
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_lists_of_numbers() {
        assert_eq!(numbers("0-3,8"), [0, 1, 2, 3, 8]);
        assert_eq!(numbers("5"), [5]);
        assert!(numbers("").is_empty() && numbers("3-1").is_empty());
    }

    // Expect: aligned, the mending below, a sum; and a control character from outside moves no line.
    #[test]
    fn findings_are_lines() {
        let mut findings = Findings::default();
        findings.ok("kernel", "6.6");
        findings.bad("mtu", "too\nsmall", "ip link set dev eth1 mtu 1500");
        let text = render(&findings, false);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "ok    kernel  6.6");
        assert_eq!(lines[1], "BAD   mtu     toosmall");
        assert_eq!(
            lines[2],
            "              mend: ip link set dev eth1 mtu 1500"
        );
        assert_eq!(lines[3], "2 looked at, 1 bad, 0 to improve");
        assert!(render(&findings, true).contains("\x1b[31mBAD"));
        assert_eq!(findings.worst(), Severity::Bad);
    }
}
