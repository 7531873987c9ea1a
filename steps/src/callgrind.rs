//! Counting instructions with callgrind.

use std::process::Command;

use anyhow::{Context, Result, bail};

/// libc's copies by SSE2 everywhere, whatever the processor has.
const NO_AVX: &str = "glibc.cpu.hwcaps=-AVX2,-AVX,-AVX512F,-AVX_Fast_Unaligned_Load,-ERMS,-FSRM";

/// Instructions that a program takes inside of functions of this name.
pub fn count(program: &Command, inside: &str) -> Result<u64> {
    let output = Command::new("valgrind")
        .args(["--tool=callgrind", "--callgrind-out-file=/dev/null"])
        .arg(format!("--toggle-collect={inside}"))
        .arg(program.get_program())
        .args(program.get_args())
        .env("GLIBC_TUNABLES", NO_AVX)
        .output()
        .context("valgrind (apt install valgrind)")?;
    let said = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        bail!("{program:?} under valgrind failed:\n{said}");
    }
    let collected = said
        .lines()
        .find_map(|line| line.split_once("Collected : "));
    let (_, number) = collected.context("valgrind says no count")?;
    let number = number
        .trim()
        .parse()
        .with_context(|| format!("valgrind counts {number:?}"))?;
    if number == 0 {
        bail!("{program:?} never came into {inside}");
    }
    Ok(number)
}

/// What valgrind calls itself.
pub fn version() -> Result<String> {
    let output = Command::new("valgrind")
        .arg("--version")
        .output()
        .context("valgrind (apt install valgrind)")?;
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}
