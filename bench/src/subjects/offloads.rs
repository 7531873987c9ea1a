//! What the interfaces do for the kernel's own protocols.
//!
//! A lab's interfaces do nothing of the kind, because frames of others are to look as they do on a wire. Peers are measured as their
//! users run them, so with what a veth pair does unless told otherwise, and without segmentation: as if each frame were one of the MTU.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use portolan_testbed::{cancel, process};

use super::{Scene, Side};

/// Bound on ethtool.
const STEP: Duration = Duration::from_secs(20);

const PAUSE: Duration = Duration::from_millis(10);

/// What interfaces do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Offloads {
    /// Checksums are left out, streams cross in pieces of up to 64 KiB.
    All,
    /// Checksums are left out, streams cross in frames.
    NoSegments,
    /// Nothing, but frames have a NAPI instance, and at side two it leaves going round to whoever polls.
    Polled,
    /// Nothing.
    None,
}

impl Offloads {
    /// As ethtool is told.
    pub fn words(self) -> &'static str {
        match self {
            Self::All => "tx on sg on tso on gso on gro on",
            Self::NoSegments => "tx on sg on tso off gso off gro off",
            Self::Polled => "tx off gro on tso off gso off",
            Self::None => "tx off gro off tso off gso off",
        }
    }
}

/// Interfaces that do something else than a lab's usually do. Dropping it changes them back.
pub struct Switched<'a> {
    scene: &'a Scene<'a>,
    deferred: bool,
}

impl<'a> Switched<'a> {
    /// Both interfaces.
    pub fn to(offloads: Offloads, scene: &'a Scene<'a>) -> Result<Self> {
        let deferred = offloads == Offloads::Polled;
        let switched = Self { scene, deferred };
        switched.switch(offloads)?;
        if deferred {
            switched.defer(true)?;
        }
        switched.wait_until_up()?;
        Ok(switched)
    }

    /// The kernel says of new interfaces only after a moment that they are up, and UCX takes no others.
    fn wait_until_up(&self) -> Result<()> {
        let deadline = Instant::now() + STEP;
        for side in [Side::One, Side::Two] {
            let node = self.scene.node(side);
            let state = format!("/sys/class/net/{}/operstate", node.interface());
            let is_up = || -> Result<bool> {
                let said = process::run_ok(node.command("cat").arg(&state), STEP)?;
                Ok(said.trim() == "up")
            };
            while !is_up()? {
                ensure!(Instant::now() < deadline, "{} is not up", node.interface());
                std::thread::sleep(PAUSE);
            }
        }
        Ok(())
    }

    fn switch(&self, to: Offloads) -> Result<()> {
        for side in [Side::One, Side::Two] {
            let node = self.scene.node(side);
            let mut command = node.command("ethtool");
            command.args(["-K", &node.interface()]);
            command.args(to.words().split_ascii_whitespace());
            process::run_ok(&mut command, STEP)?;
        }
        Ok(())
    }

    /// Whether the kernel goes round at side two while somebody else does. `ip netns exec` mounts sysfs for the namespace.
    fn defer(&self, to: bool) -> Result<()> {
        let node = self.scene.node(Side::Two);
        let (rounds, pause_ns) = if to { (1, 2_000_000) } else { (0, 0) };
        let script = format!(
            "cd /sys/class/net/{} && echo {rounds} > napi_defer_hard_irqs && echo {pause_ns} > gro_flush_timeout",
            node.interface()
        );
        let mut command = node.command("sh");
        command.args(["-c", &script]);
        process::run_ok(&mut command, STEP).map(drop)
    }
}

impl Drop for Switched<'_> {
    fn drop(&mut self) {
        // Who is told to stop takes the lab down anyway.
        let restored = match self.deferred {
            true => self.defer(false),
            false => Ok(()),
        };
        if let Err(error) = restored.and_then(|()| self.switch(Offloads::None))
            && !cancel::requested()
        {
            eprintln!("interfaces keep their offloads: {error:#}");
        }
    }
}
