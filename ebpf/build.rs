//! Compiles `src/bpf/steer.bpf.c` with clang. Failure is one line that says what to install.

use std::env;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

const SOURCE: &str = "src/bpf/steer.bpf.c";
const INSTALL: &str = "`apt-get install clang libbpf-dev` or `cargo xtask setup`";

fn main() -> ExitCode {
    println!("cargo::rerun-if-changed={SOURCE}");
    println!("cargo::rerun-if-env-changed=CLANG");
    match compile() {
        Ok(warnings) => {
            for line in warnings.lines() {
                println!("cargo::warning={line}");
            }
            ExitCode::SUCCESS
        }
        Err(reason) => {
            println!("cargo::error={reason}");
            ExitCode::FAILURE
        }
    }
}

/// Returns what clang had to say, which is nothing unless it warns.
fn compile() -> Result<String, String> {
    let variable = |name: &str| env::var(name).map_err(|error| format!("{name}: {error}"));
    let object = PathBuf::from(variable("OUT_DIR")?).join("steer.bpf.o");
    let clang = env::var("CLANG").unwrap_or_else(|_| "clang".to_owned());
    let target = match variable("CARGO_CFG_TARGET_ENDIAN")?.as_str() {
        "big" => "bpfeb",
        _ => "bpfel",
    };

    let mut command = Command::new(&clang);
    command
        .args(["-target", target, "-O2", "-g", "-mcpu=v3"])
        .args(["-Wall", "-Wextra"])
        // Keeps the build directory out of the debug information, and so out of the daemon.
        .arg(format!(
            "-ffile-prefix-map={}=.",
            variable("CARGO_MANIFEST_DIR")?
        ));
    // Debian keeps <asm/*.h> in a directory that clang searches only for the host's own target.
    let multiarch = format!(
        "/usr/include/{}-linux-gnu",
        variable("CARGO_CFG_TARGET_ARCH")?
    );
    if Path::new(&multiarch).is_dir() {
        command.args(["-idirafter", &multiarch]);
    }
    let output = command
        .args(["-c", SOURCE, "-o"])
        .arg(&object)
        .output()
        .map_err(|error| format!("cannot run `{clang}` ({error}); install it with {INSTALL}"))?;

    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    if output.status.success() {
        return Ok(said);
    }
    let first = said
        .lines()
        .find(|line| line.contains("error"))
        .unwrap_or("clang failed without a message");
    if first.contains("file not found") {
        return Err(format!("{first}; install the headers with {INSTALL}"));
    }
    Err(format!("{first} (clang 14 or newer is needed; {INSTALL})"))
}
