//! `cargo xtask tidy`: the repository's own rules, those no other tool knows.

mod files;
mod papers;
mod spec;
mod transport;

use anyhow::{Result, bail};

use crate::steps::root;

/// Checks everything and lists every violation.
pub fn run() -> Result<()> {
    let root = root();
    let sources = files::Sources::read(&root)?;
    let mut violations = Vec::new();
    for (what, found) in [
        (
            "no file longer than its limit",
            files::too_long(&sources, &root)?,
        ),
        ("no leftovers", files::leftovers(&sources)),
        (
            "every test the README names exists",
            papers::check(&sources),
        ),
        (
            "the specification and the code cite each other",
            spec::check(&sources),
        ),
        ("the transport is pure", transport::check(&sources)?),
    ] {
        let mark = if found.is_empty() { "ok" } else { "FAILED" };
        println!("   {what}: {mark}");
        violations.extend(found);
    }
    for violation in &violations {
        println!("     {violation}");
    }
    if !violations.is_empty() {
        bail!("{} violations", violations.len());
    }
    Ok(())
}
