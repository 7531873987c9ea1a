//! `portolan-wire FILE`: carries Portolan's frames between the interfaces of a lab and impairs them on the way.
//!
//! Started by [`portolan_testbed::Lab`] in the namespace of an impaired lab's bridge, told by a
//! [`portolan_testbed::wire::WireSpec`] in FILE, ended by SIGKILL like everything in a lab; it keeps nothing that would
//! outlive it.
//!
//! ```text
//! node 1 ═ veth ═ port1 ─ steer ─ AF_XDP ─┐                    ┌─ AF_XDP ─ port2 ═ veth ═ node 2
//!                          │ not ours      └─ line toward 2 ──▶─┘
//!                          └────────────────── bridge ───────────────────
//! ```
//!
//! One UMEM serves all sockets, so a frame is received, delayed and sent on without being copied; only a frame that is
//! doubled is. Each frame leaves by the queue it came in on, as on the bridge, so engines of several queues stay apart.
//!
//! **On xsk-rs**, as everything of ours that must be independent of `daemon/src/xsk`: what the daemon's own rings do wrong
//! must not be undone by the same mistake here. Rejected: packet sockets, because they see a frame only after the steering
//! program would have, cannot take it from the bridge, and so carry it twice; eBPF on tcx, because it cannot hold a frame back.

mod control;
mod fates;
mod line;
mod recorder;
mod relay;
mod side;
mod umem;

use anyhow::{Context, Result};
use portolan_testbed::wire::WireSpec;

fn main() -> Result<()> {
    let file = std::env::args_os().nth(1);
    let file = file.context("give the file that says what to do: portolan-wire FILE")?;
    let text = std::fs::read_to_string(&file).with_context(|| file.display().to_string())?;
    let spec: WireSpec = serde_json::from_str(&text).context("what to do")?;
    let control = control::Control::listen(&spec.control)?;
    relay::Relay::new(&spec)?.run(&control)
}
