//! Every input in the corpus again, without a fuzzer.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::Path;

/// Runs every file of a target's corpus, in the order of their names.
fn replay(target: &str, run: fn(&[u8])) {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("corpus")
        .join(target);
    let mut files: Vec<_> = std::fs::read_dir(&corpus)
        .unwrap_or_else(|error| panic!("{}: {error}", corpus.display()))
        .map(|entry| entry.unwrap().path())
        .collect();
    files.sort();
    assert!(files.len() > 10, "the corpus of {target} is lost");
    for file in files {
        let input = std::fs::read(&file).unwrap();
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| run(&input))) {
            eprintln!(
                "repeat with: cargo xtask fuzz {target} --replay {}",
                file.display()
            );
            resume_unwind(panic);
        }
    }
}

#[test]
fn frame() {
    replay("frame", crate::frame::run);
}

#[test]
fn control() {
    replay("control", crate::control::run);
}

#[test]
fn conversation() {
    replay("conversation", crate::conversation::run);
}
