//! The limits as subjects.

use std::os::fd::OwnedFd;
use std::time::Duration;

use anyhow::Result;

use super::{About, Figure, Pair, Scene, Side, Started, Subject};
use crate::actor::{Actor, Role};
use crate::cases::Case;
use crate::limits::{self, ClientRole, Form, RelayRole};

/// All limits.
pub fn all() -> Vec<Box<dyn Subject>> {
    vec![
        Box::new(RawXdp),
        Box::new(Relay(Form::Bare)),
        Box::new(Relay(Form::Checked)),
    ]
}

/// `limit-raw-xdp`.
struct RawXdp;

impl Subject for RawXdp {
    fn name(&self) -> &'static str {
        "limit-raw-xdp"
    }

    fn about(&self) -> About {
        About {
            version: "xsk-rs 0.11".to_owned(),
            command: "two processes, spinning, AF_XDP in copy mode, no protocol".to_owned(),
        }
    }

    fn offers(&self, case: &Case) -> bool {
        case.is_plain()
    }

    fn start<'a>(&'a self, scene: &'a Scene<'a>, _: &[Case]) -> Result<Box<dyn Started + 'a>> {
        let end = |side| {
            let role = Role::Raw(scene.wire(side)?);
            Actor::start(self.name(), scene.actor(side), &role)
        };
        let two = end(Side::Two)?;
        let one = vec![end(Side::One)?];
        Ok(Box::new(Running {
            pair: Pair { one, two },
            _relays: Vec::new(),
            _memories: Vec::new(),
        }))
    }
}

/// `limit-relay` and `limit-relay-crc`.
struct Relay(Form);

impl Subject for Relay {
    fn name(&self) -> &'static str {
        match self.0 {
            Form::Bare => "limit-relay",
            Form::Checked => "limit-relay-crc",
        }
    }

    fn about(&self) -> About {
        let does = match self.0 {
            Form::Bare => "payloads do not travel",
            Form::Checked => "payloads copied once per side, CRC32C computed on both",
        };
        About {
            version: "xsk-rs 0.11".to_owned(),
            command: format!(
                "two relays and two applications over shared memory, sched_yield, no protocol; {does}"
            ),
        }
    }

    fn offers(&self, case: &Case) -> bool {
        case.is_plain()
    }

    fn start<'a>(&'a self, scene: &'a Scene<'a>, _: &[Case]) -> Result<Box<dyn Started + 'a>> {
        let node = |side| -> Result<(OwnedFd, Actor, Actor)> {
            let (descriptor, memory) = limits::create()?;
            let relay = Role::Relay(RelayRole {
                wire: scene.wire(side)?,
                memory: memory.clone(),
                form: self.0,
            });
            let mut command = scene.actor(side);
            // As engines are started.
            command.env("GLIBC_TUNABLES", "glibc.pthread.rseq=0");
            let relay = Actor::start(self.name(), command, &relay)?;
            let client = Role::Client(ClientRole { memory });
            let client = Actor::start(self.name(), scene.actor(side), &client)?;
            Ok((descriptor, relay, client))
        };
        let (memory_two, relay_two, two) = node(Side::Two)?;
        let (memory_one, relay_one, one) = node(Side::One)?;
        Ok(Box::new(Running {
            pair: Pair {
                one: vec![one],
                two,
            },
            _relays: vec![relay_one, relay_two],
            _memories: vec![memory_one, memory_two],
        }))
    }
}

struct Running {
    pair: Pair,
    _relays: Vec<Actor>,
    _memories: Vec<OwnedFd>,
}

impl Started for Running {
    fn measure(&mut self, case: &Case, lasting: Duration) -> Result<Vec<Figure>> {
        self.pair.measure(case, lasting)
    }
}
