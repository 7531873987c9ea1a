//! Where subjects are placed: two namespaces, one veth pair, two cores.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use portolan_testbed::{Lab, Node};
use rustix::thread::{CpuSet, sched_getaffinity};

use crate::limits::WireRole;

/// One of the two places.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Node 1, on the first core: who sends, or begins.
    One,
    /// Node 2, on the second: who receives, or answers.
    Two,
}

impl Side {
    /// The other.
    pub fn other(self) -> Self {
        match self {
            Self::One => Self::Two,
            Self::Two => Self::One,
        }
    }

    fn index(self) -> usize {
        match self {
            Self::One => 0,
            Self::Two => 1,
        }
    }
}

/// A lab with nothing in it, and where to place things.
pub struct Scene<'a> {
    lab: &'a Lab,
    cores: [usize; 2],
    program: PathBuf,
}

impl<'a> Scene<'a> {
    /// In this lab, on the first two cores this process may run on.
    ///
    /// # Errors
    /// There is only one.
    pub fn new(lab: &'a Lab) -> Result<Self> {
        let allowed = sched_getaffinity(None).context("cores")?;
        let cores: Vec<usize> = (0..CpuSet::MAX_CPU)
            .filter(|&core| allowed.is_set(core))
            .collect();
        ensure!(
            cores.len() >= 2,
            "a comparison needs two cores, one for each node"
        );
        Ok(Self {
            lab,
            cores: [cores[0], cores[1]],
            program: std::env::current_exe().context("path of the running program")?,
        })
    }

    /// The node: its addresses, interface, socket, and commands in its namespace.
    pub fn node(&self, side: Side) -> &'a Node {
        match side {
            Side::One => self.lab.node(1),
            Side::Two => self.lab.node(2),
        }
    }

    /// The core on which everything of a side runs.
    pub fn core(&self, side: Side) -> usize {
        self.cores[side.index()]
    }

    /// Both.
    pub fn cores(&self) -> [usize; 2] {
        self.cores
    }

    /// Of the interfaces.
    pub fn mtu(&self) -> u32 {
        self.lab.spec().mtu
    }

    /// Of the interfaces.
    pub fn queues(&self) -> u16 {
        self.lab.spec().queues
    }

    /// A program in a side's namespace, on its core. Its process id is the program's own.
    pub fn command(&self, side: Side, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = self.node(side).command("taskset");
        command.arg("--cpu-list").arg(self.core(side).to_string());
        command.arg(program);
        command
    }

    /// This program.
    pub fn program(&self) -> &Path {
        &self.program
    }

    /// This program as an actor, in its place.
    pub fn actor(&self, side: Side) -> Command {
        self.command(side, &self.program)
    }

    /// A side's end of the wire.
    ///
    /// # Errors
    /// The lab's MACs cannot be read.
    pub fn wire(&self, side: Side) -> Result<WireRole> {
        let [mac, peer] = [side, side.other()].map(|side| self.node(side).mac());
        Ok(WireRole {
            interface: self.node(side).interface(),
            mac: parse_mac(&mac)?,
            peer: parse_mac(&peer)?,
            mtu: self.mtu(),
            polled: false,
        })
    }
}

fn parse_mac(text: &str) -> Result<[u8; 6]> {
    let mut mac = [0; 6];
    let mut parts = text.split(':');
    for byte in &mut mac {
        let part = parts.next().with_context(|| format!("MAC {text}"))?;
        *byte = u8::from_str_radix(part, 16).with_context(|| format!("MAC {text}"))?;
    }
    ensure!(parts.next().is_none(), "MAC {text}");
    Ok(mac)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mac_is_six_bytes() {
        assert_eq!(parse_mac("02:00:00:00:01:2c").unwrap(), [2, 0, 0, 0, 1, 44]);
        assert!(parse_mac("02:00:00:00:01").is_err());
        assert!(parse_mac("02:00:00:00:01:2c:00").is_err());
    }
}
