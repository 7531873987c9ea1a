//! docs/spec/transport.md, section by section: one test or more for each rule that neither the chunk matrix nor the papers' tests
//! show, frame by frame against one endpoint. Tests are named after their section.

#![allow(clippy::expect_used)]

mod bare;
mod late;
mod lies;
mod peers;
mod profiles;
mod receiving;
mod sending;
mod traffic;
mod unasked;

use portolan_sim::puppet::{OUR_INCARNATION, Puppet};
use portolan_transport::policy::{Ack, Policy};

/// The default, acknowledged at once.
fn policy() -> Policy {
    Policy {
        ack: Ack::Immediate,
        ..Policy::default()
    }
}

fn puppet() -> Puppet {
    Puppet::new(policy(), 8)
}

/// The puppet's next incarnation.
const REBORN: u64 = 0x0003_0000_0000_0033;

/// The puppet comes back with another incarnation, and both sides greet.
fn reborn(p: &mut Puppet) -> Vec<String> {
    (p.incarnation, p.header.src_incarnation) = (REBORN, REBORN as u32);
    p.established = false;
    p.says(p.hello(0));
    p.says(p.hello_ack(OUR_INCARNATION))
}

/// Whether some line starts so.
fn any(lines: &[String], start: &str) -> bool {
    lines.iter().any(|line| line.starts_with(start))
}
