//! The limits as subjects.

use std::net::UdpSocket;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Result, anyhow};

use super::offloads::{Offloads, Switched};
use super::{About, Figure, Pair, Scene, Side, Started, Subject};
use crate::actor::{Actor, Role};
use crate::cases::Case;
use crate::limits::{self, ClientRole, Form, RelayRole, WireRole};

const BETWEEN_DATAGRAMS: Duration = Duration::from_millis(5);

/// All limits.
pub fn all() -> Vec<Box<dyn Subject>> {
    vec![
        Box::new(RawXdp),
        Box::new(Switch),
        Box::new(Relay(Form::Bare)),
        Box::new(Relay(Form::Checked)),
        Box::new(PolledRelay),
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
            _polled: None,
        }))
    }
}

/// `limit-switch`: both ends on the core of side one.
struct Switch;

impl Subject for Switch {
    fn name(&self) -> &'static str {
        "limit-switch"
    }

    fn about(&self) -> About {
        About {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            command: "two applications on one core, the relays' shared memory, sched_yield; no relay, no frame".to_owned(),
        }
    }

    fn offers(&self, case: &Case) -> bool {
        matches!(case, Case::PingPong { bytes: 64 })
    }

    fn start<'a>(&'a self, scene: &'a Scene<'a>, _: &[Case]) -> Result<Box<dyn Started + 'a>> {
        let (descriptor, memory) = limits::create()?;
        let end = |in_relays_place| {
            let memory = memory.clone();
            let role = Role::Client(ClientRole {
                memory,
                in_relays_place,
            });
            Actor::start(self.name(), scene.actor(Side::One), &role)
        };
        let two = end(true)?;
        let one = vec![end(false)?];
        Ok(Box::new(Running {
            pair: Pair { one, two },
            _relays: Vec::new(),
            _memories: vec![descriptor],
            _polled: None,
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
        Ok(Box::new(relays(self.name(), scene, self.0, None)?))
    }
}

/// `limit-relay-crc-polled`: the receiver goes round for frames itself, as Portolan's engines do in streams.
struct PolledRelay;

impl Subject for PolledRelay {
    fn name(&self) -> &'static str {
        "limit-relay-crc-polled"
    }

    fn about(&self) -> About {
        let relay = Relay(Form::Checked).about();
        About {
            version: relay.version,
            command: format!(
                "{}; ethtool -K gro on; side two's NAPI instance deferred and polled by its relay",
                relay.command
            ),
        }
    }

    fn offers(&self, case: &Case) -> bool {
        matches!(case, Case::Stream { .. })
    }

    fn start<'a>(&'a self, scene: &'a Scene<'a>, _: &[Case]) -> Result<Box<dyn Started + 'a>> {
        let switched = Switched::to(Offloads::Polled, scene)?;
        let relays = || relays(self.name(), scene, Form::Checked, Some(switched));
        Ok(Box::new(with_datagrams(scene, relays)?))
    }
}

/// Also of who panics.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Does this while side two is sent datagrams.
fn with_datagrams<T>(scene: &Scene<'_>, what: impl FnOnce() -> Result<T>) -> Result<T> {
    let [one, two] = [Side::One, Side::Two].map(|side| scene.node(side));
    let over = AtomicBool::new(false);
    let send = || -> Result<()> {
        let socket = UdpSocket::bind((one.ipv4(), 0))?;
        while !over.load(Ordering::Relaxed) {
            // Nobody listens yet, or not any more.
            let _ = socket.send_to(b"look", (two.ipv4(), limits::POLLED_PORT));
            std::thread::sleep(BETWEEN_DATAGRAMS);
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let sender = scope.spawn(|| one.in_namespace(send));
        let result = {
            let _over = Over(&over);
            what()
        };
        let sent = sender.join();
        sent.map_err(|_| anyhow!("the thread that sends datagrams panicked"))???;
        result
    })
}

fn relays<'a>(
    name: &str,
    scene: &'a Scene<'a>,
    form: Form,
    polled: Option<Switched<'a>>,
) -> Result<Running<'a>> {
    let node = |side| -> Result<(OwnedFd, Actor, Actor)> {
        let (descriptor, memory) = limits::create()?;
        let wire = WireRole {
            polled: polled.is_some() && side == Side::Two,
            ..scene.wire(side)?
        };
        let relay = Role::Relay(RelayRole {
            wire,
            memory: memory.clone(),
            form,
        });
        let mut command = scene.actor(side);
        // As engines are started.
        command.env("GLIBC_TUNABLES", "glibc.pthread.rseq=0");
        let relay = Actor::start(name, command, &relay)?;
        let client = Role::Client(ClientRole {
            memory,
            in_relays_place: false,
        });
        let client = Actor::start(name, scene.actor(side), &client)?;
        Ok((descriptor, relay, client))
    };
    let (memory_two, relay_two, two) = node(Side::Two)?;
    let (memory_one, relay_one, one) = node(Side::One)?;
    Ok(Running {
        pair: Pair {
            one: vec![one],
            two,
        },
        _relays: vec![relay_one, relay_two],
        _memories: vec![memory_one, memory_two],
        _polled: polled,
    })
}

struct Running<'a> {
    pair: Pair,
    _relays: Vec<Actor>,
    _memories: Vec<OwnedFd>,
    /// Longer than they run.
    _polled: Option<Switched<'a>>,
}

impl Started for Running<'_> {
    fn measure(&mut self, case: &Case, lasting: Duration) -> Result<Vec<Figure>> {
        self.pair.measure(case, lasting)
    }
}
