//! `portolan doctor`: the daemon's program looks, as it reads configurations with its own checks. It is the one beside this tool, else the
//! one in the path.

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::arguments::Doctor;

/// Becomes `portoland doctor`; returns only why it cannot.
pub fn run(options: &Doctor) -> anyhow::Error {
    let program = daemon();
    let mut command = Command::new(&program);
    command.arg("doctor").arg("--config").arg(&options.config);
    if options.format.json {
        command.arg("--json");
    }
    let error = command.exec();
    anyhow::Error::new(error).context(format!(
        "{} cannot be run: install it beside portolan, or name its directory in PATH",
        program.display()
    ))
}

fn daemon() -> PathBuf {
    let own = std::env::current_exe().ok();
    let beside = own
        .as_deref()
        .and_then(Path::parent)
        .map(|d| d.join("portoland"));
    match beside {
        Some(path) if path.is_file() => path,
        _ => PathBuf::from("portoland"),
    }
}
