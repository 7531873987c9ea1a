//! The stepping of every test run: the shortest conversation, the program as it is built.

use std::process::Command;

#[test]
fn no_instruction_at_which_a_kill_loses_or_doubles_a_message() {
    let output = Command::new(env!("CARGO_BIN_EXE_portolan-steps"))
        .arg("step")
        .output()
        .unwrap();
    let (said, complained) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    println!("{said}");
    assert!(output.status.success(), "{complained}");
    for path in ["accept", "commit", "complete", "adopt"] {
        assert!(
            said.lines().any(|line| line.starts_with(path)),
            "no path {path}"
        );
    }
}
