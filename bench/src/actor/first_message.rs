//! What a message costs after a second without any, to somebody asleep: whoever it is, the same questions.

use std::time::Duration;

use anyhow::Result;
use rustix::time::{ClockId, clock_gettime};

use super::{Answer, Orders, Phase};

/// How often somebody asleep looks at his orders.
pub const LOOK: Duration = Duration::from_millis(200);
/// Length of a message.
pub const BYTES: usize = 64;

/// Somebody who sends, and sleeps until something comes.
pub trait Sleeper {
    /// Sends a message.
    ///
    /// # Errors
    /// What kept it.
    fn send(&mut self, message: &[u8; BYTES]) -> Result<()>;

    /// Sleeps for [`LOOK`] at most, or until a message comes: when that was, and its first bytes.
    ///
    /// # Errors
    /// What went wrong.
    fn sleep(&mut self) -> Result<Option<(u64, [u8; 8])>>;
}

/// The machine's own time, the same for every process.
pub fn now() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec.cast_unsigned() * 1_000_000_000 + now.tv_nsec.cast_unsigned()
}

/// A message when the word is given, after one that made both ends known to each other.
pub fn stamp(sleeper: &mut impl Sleeper, orders: &Orders) -> Result<()> {
    sleeper.send(&stamped(0))?;
    orders.ready()?;
    sleeper.send(&stamped(now()))
}

fn stamped(stamp: u64) -> [u8; BYTES] {
    let mut message = [0; BYTES];
    message[..8].copy_from_slice(&stamp.to_le_bytes());
    message
}

/// How old stamps are when they come.
pub fn await_stamp(sleeper: &mut impl Sleeper, orders: &Orders) -> Result<()> {
    orders.ready()?;
    while orders.phase() != Phase::Over {
        if let Some((came, stamp)) = sleeper.sleep()?
            && stamp != [0; 8]
        {
            let way = came.saturating_sub(u64::from_le_bytes(stamp));
            orders.answer(&Answer::Ways(vec![(way, 1)]))?;
        }
    }
    Ok(())
}
