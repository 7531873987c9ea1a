//! Places at which a supervisor dies on purpose, so that tests can see each of them survived.
//!
//! `PORTOLAN_DIE_AT=POINT` in its environment kills it with SIGKILL when it comes there, `POINT/3` the third time. Without it a point
//! costs a comparison, and none is where messages pass.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

/// Names the point, and perhaps which time.
pub const VARIABLE: &str = "PORTOLAN_DIE_AT";

struct Fate {
    point: String,
    left: AtomicU32,
}

fn fate() -> Option<&'static Fate> {
    static FATE: OnceLock<Option<Fate>> = OnceLock::new();
    let fate = FATE.get_or_init(|| {
        let text = std::env::var(VARIABLE).ok()?;
        let (point, left) = match text.split_once('/') {
            Some((point, times)) => (point, times.parse().ok()?),
            None => (text.as_str(), 1),
        };
        Some(Fate {
            point: point.to_owned(),
            left: AtomicU32::new(left),
        })
    });
    fate.as_ref()
}

/// The supervisor is at this point.
pub fn reached(point: &str) {
    if let Some(fate) = fate()
        && fate.point == point
        && fate.left.fetch_sub(1, Ordering::Relaxed) == 1
    {
        // What comes next is not reached: the signal is ours and cannot be blocked.
        let _ =
            rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
    }
}
