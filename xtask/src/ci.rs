//! `cargo xtask ci`: what a change must pass, here and in CI alike.

use std::process::Command;
use std::time::Duration;

use anyhow::{Result, bail};
use portolan_testbed::process;

use crate::steps::{self, Steps, cargo};
use crate::{book, build, counts, deploy, setup, tests, tidy};

/// Bound on a step that compiles nothing.
const QUICK: Duration = Duration::from_secs(2 * 60);
/// Bound on exploring the interleavings of the rings.
const MODELS: Duration = Duration::from_secs(15 * 60);

/// Every step runs, also after a failed one: one run shows all that is wrong.
pub fn run() -> Result<()> {
    build::require_root()?;
    let mut steps = Steps::default();
    steps.check("what this machine needs", "cargo xtask setup", || {
        setup::run()?;
        rust_components()
    })?;
    steps.run("formatting", cargo("fmt --all --check"), QUICK)?;
    // In the profile that everything is built in: what macros and build scripts depend on is compiled once.
    let profile = build::PROFILE;
    let clippy = format!("clippy --profile {profile} --workspace --all-targets -- -D warnings");
    steps.run("lints", cargo(&clippy), build::BUILD)?;
    steps.check("tidy", "cargo xtask tidy", tidy::run)?;
    // For those who read the source: private items too, and links to them.
    let doc =
        format!("doc --profile {profile} --no-deps --workspace --lib --document-private-items");
    let mut documentation = cargo(&doc);
    let flags = "-D warnings -A rustdoc::private-intra-doc-links";
    documentation.env("RUSTDOCFLAGS", flags);
    steps.run("documentation", documentation, build::BUILD)?;
    if steps.test("models of the rings", models(""), MODELS)? {
        let repeat = format!(
            "RUSTFLAGS=\"--cfg loom\" cargo test -p portolan-abi --profile {profile} --lib loom -- --list"
        );
        steps.check("models are there", &repeat, models_exist)?;
    }
    if tests::add(&mut steps)? {
        book::add(&mut steps)?;
        steps.check("package", "cargo xtask ci", deploy::quick::check)?;
        counts::add(&mut steps)?;
    }
    steps.finish()
}

/// The rings under loom, in a target directory of their own: the flag would rebuild everything else.
fn models(more: &str) -> Command {
    let profile = build::PROFILE;
    let mut command = cargo(&format!(
        "test -p portolan-abi --profile {profile} --lib loom {more}"
    ));
    command.env("RUSTFLAGS", "--cfg loom");
    command.env("CARGO_TARGET_DIR", steps::root().join("target/loom"));
    command
}

/// A filter that matches nothing succeeds too.
fn models_exist() -> Result<()> {
    let list = process::run_ok(&mut models("-- --list"), QUICK)?;
    if !list.lines().any(|line| line.ends_with(": test")) {
        bail!("no test of portolan-abi is named after loom");
    }
    Ok(())
}

/// rustfmt and clippy, which a minimal Rust lacks.
fn rust_components() -> Result<()> {
    for component in ["rustfmt", "clippy"] {
        let probe = if component == "rustfmt" {
            "fmt --version"
        } else {
            "clippy --version"
        };
        let found = process::run(&mut cargo(probe), QUICK).is_ok_and(|f| f.status.success());
        if !found {
            println!("   installing {component}");
            let mut rustup = Command::new("rustup");
            process::run_ok(rustup.args(["component", "add", component]), MODELS)?;
        }
    }
    Ok(())
}
