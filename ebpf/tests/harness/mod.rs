//! The program in libbpf's hands, run on one frame at a time.

use libbpf_rs::{Error, MapCore as _, MapFlags, Object, ObjectBuilder, ProgramInput};
use portolan_ebpf::{DEFAULT_ETHERTYPE, Encap, Reason, STEER_OBJECT, SteerConfig};

use crate::frames::{OUR_MAC, OUR_V4, OUR_V6};

pub const XDP_DROP: u32 = 1;
pub const XDP_PASS: u32 = 2;

pub const BASE: u16 = 7400;
pub const QUEUES: u16 = 4;
pub const LAST: u16 = BASE + QUEUES - 1;

/// The two programs of the object must never differ.
const PROGRAMS: [&str; 2] = ["steer", "steer_linear"];

pub fn udp_config() -> SteerConfig {
    SteerConfig {
        encap: Encap::Udp,
        ethertype: DEFAULT_ETHERTYPE,
        udp_base_port: BASE,
        queues: QUEUES,
        local_mac: OUR_MAC,
        local_v4: Some(OUR_V4),
        local_v6: Some(OUR_V6),
    }
}

pub fn ethernet_config() -> SteerConfig {
    SteerConfig {
        encap: Encap::Ethernet,
        ..udp_config()
    }
}

/// The object loaded by libbpf with one configuration.
pub struct Harness(Object);

impl Harness {
    pub fn new(config: &SteerConfig) -> Self {
        Self::load(Some(config))
    }

    /// The program as it was compiled.
    pub fn unconfigured() -> Self {
        Self::load(None)
    }

    fn load(config: Option<&SteerConfig>) -> Self {
        assert!(
            rustix::process::geteuid().is_root(),
            "this test loads an XDP program: run it as root (`cargo xtask test`)"
        );
        let mut object = ObjectBuilder::default().open_memory(STEER_OBJECT).unwrap();
        if let Some(config) = config {
            let mut rodata = object
                .maps_mut()
                .find(|map| map.name().to_string_lossy().ends_with(".rodata"))
                .unwrap();
            let rodata = rodata.initial_value_mut().unwrap();
            rodata.copy_from_slice(&config.rodata().unwrap());
        }
        Self(object.load().unwrap())
    }

    fn counters(&self) -> Vec<u64> {
        let map = self.0.maps().find(|map| map.name() == "counters").unwrap();
        let sum = |reason: &Reason| {
            let key = (*reason as u32).to_ne_bytes();
            let cpus = map.lookup_percpu(&key, MapFlags::ANY).unwrap().unwrap();
            cpus.iter()
                .map(|cpu| u64::from_ne_bytes(cpu[..8].try_into().unwrap()))
                .sum()
        };
        Reason::ALL.iter().map(sum).collect()
    }

    /// The verdict on `frame` and the one reason counted for it.
    pub fn run(&self, program: &str, frame: &[u8]) -> Result<(u32, Reason), Error> {
        let before = self.counters();
        let (verdict, out) = self.outcome(program, frame)?;
        assert_eq!(out, frame, "the frame changed");
        let moved: Vec<Reason> = (Reason::ALL.iter().zip(before).zip(self.counters()))
            .flat_map(|((reason, before), after)| vec![*reason; (after - before) as usize])
            .collect();
        assert_eq!(moved.len(), 1, "counted {moved:?}");
        Ok((verdict, moved[0]))
    }

    /// Sends the next frame of ours to this port, as the loader does.
    pub fn send_on_errand(&self, queue: u32, port: u16) {
        let map = self.0.maps().find(|map| map.name() == "errands").unwrap();
        let port = u32::from(port.to_be()).to_ne_bytes();
        map.update(&queue.to_ne_bytes(), &port, MapFlags::ANY)
            .unwrap();
    }

    /// What becomes of `frame`: the verdict, and its bytes.
    pub fn outcome(&self, program: &str, frame: &[u8]) -> Result<(u32, Vec<u8>), Error> {
        let program = self.0.progs_mut().find(|p| p.name() == program).unwrap();
        let mut out = vec![0; frame.len()];
        let input = ProgramInput {
            data_in: Some(frame),
            data_out: Some(&mut out),
            ..ProgramInput::default()
        };
        let output = program.test_run(input)?;
        let len = output.data.map(|data| data.len());
        assert_eq!(len, Some(frame.len()), "the frame's length changed");
        Ok((output.return_value, out))
    }

    /// `frame` gets the verdict that belongs to `reason`, from both programs.
    pub fn expect(&self, name: &str, frame: &[u8], reason: Reason) {
        let verdict = if reason == Reason::NoSocket {
            XDP_DROP
        } else {
            XDP_PASS
        };
        for program in PROGRAMS {
            let got = self.run(program, frame).unwrap();
            assert_eq!(got, (verdict, reason), "{name} ({program})");
        }
    }
}
