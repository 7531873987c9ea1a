//! The transport is sans-IO: no operating system, no unsafe code, next to no dependencies.

use std::process::Command;
use std::time::Duration;

use anyhow::Result;
use portolan_testbed::process;

use super::files::Sources;
use crate::steps::cargo;

const FOLDER: &str = "transport/src/";
const LIBRARY: &str = "transport/src/lib.rs";
/// Every crate it may be linked with: checksums, and what `crc-fast` brings with it, none of which does I/O.
const ALLOWED: &[&str] = &[
    "portolan-transport",
    "portolan-crc",
    "crc32c",
    "crc-fast",
    "crypto-common",
    "digest",
    "generic-array",
    "spin",
    "typenum",
];
const WASM: &str = "wasm32-unknown-unknown";
const QUICK: Duration = Duration::from_secs(60);
const BUILD: Duration = Duration::from_secs(5 * 60);

/// What makes it impure.
pub fn check(sources: &Sources) -> Result<Vec<String>> {
    let mut violations = attributes(sources.0.get(LIBRARY).map_or("", String::as_str));
    for (path, text) in sources.with_extension(FOLDER, "rs") {
        if !is_test_file(path) {
            violations.extend(uses_of_std(path, text));
        }
    }
    violations.extend(dependencies()?);
    violations.extend(wasm());
    Ok(violations)
}

fn attributes(library: &str) -> Vec<String> {
    ["#![no_std]", "#![forbid(unsafe_code)]"]
        .into_iter()
        .filter(|attribute| !library.lines().any(|line| line.trim() == *attribute))
        .map(|attribute| format!("{LIBRARY}: {attribute} is missing"))
        .collect()
}

fn is_test_file(path: &str) -> bool {
    path.split('/')
        .any(|part| part == "tests" || part == "tests.rs")
}

/// Lines that name `std` outside the tests at a file's end. The compiler would refuse them as long as the only
/// `extern crate std` is one for tests.
fn uses_of_std(path: &str, text: &str) -> Vec<String> {
    let lines: Vec<&str> = text.lines().map(str::trim).collect();
    let mut violations = Vec::new();
    for (at, line) in lines.iter().enumerate() {
        let for_tests = at > 0 && lines[at - 1] == "#[cfg(test)]";
        if for_tests && line.starts_with("mod ") && line.ends_with('{') {
            break;
        }
        let code = line.split("//").next().unwrap_or_default();
        let names_std = code.split(|c: char| !(c.is_alphanumeric() || c == '_' || c == ':'));
        let uses = names_std
            .into_iter()
            .any(|word| word.trim_start_matches(':').starts_with("std::"))
            || (code.contains("extern crate std") && !for_tests);
        if uses {
            violations.push(format!("{path}:{}: uses std", at + 1));
        }
    }
    violations
}

fn dependencies() -> Result<Vec<String>> {
    let mut tree = cargo("tree -p portolan-transport -e normal --prefix none --format {p}");
    let text = process::run_ok(&mut tree, QUICK)?;
    Ok(text
        .lines()
        .filter_map(|line| line.split_whitespace().next())
        .filter(|name| !ALLOWED.contains(name))
        .map(|name| format!("transport/Cargo.toml: depends on {name}"))
        .collect())
}

/// Builds it for a machine without an operating system, if that target is installed.
fn wasm() -> Option<String> {
    let mut rustup = Command::new("rustup");
    rustup.args(["target", "list", "--installed"]);
    let installed = process::run_ok(&mut rustup, QUICK).unwrap_or_default();
    if !installed.lines().any(|line| line.trim() == WASM) {
        println!("   ({WASM} is not installed: purity is judged by source and dependencies alone)");
        return None;
    }
    let mut build = cargo(&format!("build -p portolan-transport --target {WASM}"));
    let error = process::run_ok(&mut build, BUILD).err()?;
    Some(format!("transport does not build for {WASM}: {error:#}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn std_is_allowed_in_tests_only() {
        let inline =
            "use core::fmt;\n// std:: in words\n#[cfg(test)]\nmod tests {\n use std::vec;\n}\n";
        assert!(uses_of_std("a.rs", inline).is_empty());
        assert!(uses_of_std("a.rs", "#[cfg(test)]\nextern crate std;\n").is_empty());
        assert_eq!(uses_of_std("a.rs", "extern crate std;\n").len(), 1);
        assert_eq!(
            uses_of_std("a.rs", "fn f() -> ::std::io::Error {}\nuse std::fs;\n").len(),
            2
        );
        assert_eq!(uses_of_std("a.rs", "let x: std::time::Instant;\n").len(), 1);
        assert!(is_test_file("transport/src/wire/tests/random.rs"));
        assert!(!is_test_file("transport/src/wire/latests.rs"));
    }

    #[test]
    fn the_attributes_are_required_as_they_are() {
        assert!(attributes("#![no_std]\n#![forbid(unsafe_code)]\n").is_empty());
        assert_eq!(attributes("#![cfg_attr(not(test), no_std)]\n").len(), 2);
    }
}
