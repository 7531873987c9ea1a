//! What the five papers say, as tests named after their tables and figures.
//!
//! Each runs under the profile of its paper, most of them frame by frame against one endpoint ([`portolan_sim::puppet`]): `>` is what
//! the test's puppet sends, `<` what the endpoint sends. Numbers count from the stream's first.

#![allow(clippy::expect_used)]

mod ftgm;
mod gamma;
mod go_back_n;
mod parastation2;
mod rmpp;

use portolan_sim::puppet::Puppet;

/// Compares a dialogue with what was said since the last comparison.
#[track_caller]
fn dialogue(p: &mut Puppet, expected: &str) {
    let expected: Vec<&str> = expected
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty())
        .collect();
    let heard = p.transcript();
    let heard: Vec<&str> = heard.iter().map(|line| line.trim()).collect();
    assert_eq!(heard, expected, "\n{}\n", heard.join("\n"));
}
