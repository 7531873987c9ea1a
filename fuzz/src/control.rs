//! Target `control`: what others say to the supervisor (and it to engines), and what people write into its configuration.
//!
//! The input's first byte chooses the document. Expected: no panic; a request or message that was understood, written again, is understood
//! the same; a configuration that is refused is refused with a line that exists and words for people, one that is accepted keeps its own
//! limits.

use std::fmt::Debug;
use std::io;
use std::net::IpAddr;
use std::path::Path;

use portolan_abi::control::{Request, Response};
use portoland::engine_link::{FromEngine, ToEngine};
use portoland::supervisor::config::{Config, PortSet};
use portoland::supervisor::surroundings::{Account, Interface, Surroundings};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::input::Input;

/// One input.
pub fn run(input: &[u8]) {
    let mut input = Input::new(input);
    let which = input.u8() % 6;
    let bytes = input.rest();
    match which {
        0 => {
            if let Some(Request::OpenPort { geometry, .. }) = understood::<Request>(bytes)
                && geometry.is_valid()
            {
                // A valid geometry never overflows its own layout.
                assert!(geometry.client_half_bytes() as u64 > geometry.arena_bytes);
                assert!(geometry.engine_half_bytes() > geometry.event_ring());
            }
        }
        1 => drop(understood::<FromEngine>(bytes)),
        2 => drop(understood::<ToEngine>(bytes)),
        // Documents hold any JSON, whose numbers need not survive to the last digit.
        3 => drop(serde_json::from_slice::<Response>(bytes)),
        4 => configuration(&String::from_utf8_lossy(bytes)),
        _ => ports(&String::from_utf8_lossy(bytes)),
    }
}

fn understood<T: Serialize + DeserializeOwned + PartialEq + Debug>(bytes: &[u8]) -> Option<T> {
    let value: T = serde_json::from_slice(bytes).ok()?;
    let text = serde_json::to_vec(&value);
    let again = text.and_then(|text| serde_json::from_slice::<T>(&text));
    match again {
        Ok(again) => assert_eq!(again, value),
        Err(error) => panic!("{value:?} cannot be written and read: {error}"),
    }
    Some(value)
}

fn configuration(text: &str) {
    match Config::parse(Path::new("portolan.toml"), text, &Machine) {
        Ok(config) => {
            assert!(config.engines() > 0 && config.engines() <= 64);
            for port in 0..portolan_abi::PORTS {
                assert!(config.engine_of(port) < usize::from(config.engines()));
            }
            assert!(config.mtu() > 0);
            assert_eq!(config.cluster_id(), config.cluster_id());
        }
        Err(errors) => {
            assert!(!errors.0.is_empty(), "refused without a reason");
            let lines = text.split('\n').count().max(1);
            for error in &errors.0 {
                assert!(!error.message.is_empty());
                assert!(
                    error.line.is_none_or(|line| (1..=lines).contains(&line)),
                    "{error}"
                );
            }
        }
    }
}

fn ports(text: &str) {
    if let Ok(set) = PortSet::parse(text) {
        let all = PortSet::all();
        let mut some = false;
        for port in 0..u16::MAX {
            assert!(!set.contains(port) || all.contains(port));
            some |= set.contains(port);
        }
        assert!(some, "a set of no port: {text:?}");
    }
}

/// A machine with two interfaces, no accounts but these, and two cores.
struct Machine;

impl Surroundings for Machine {
    fn interface(&self, name: &str) -> io::Result<Option<Interface>> {
        if name == "broken" {
            return Err(io::Error::other("no such luck"));
        }
        let addresses = ["10.77.0.1", "fd77::1"];
        Ok(matches!(name, "eth0" | "lo").then(|| Interface {
            index: 7,
            mac: [2, 0, 0, 0, 0, 1],
            mtu: if name == "lo" { 65536 } else { 1500 },
            addresses: addresses
                .iter()
                .filter_map(|a| a.parse::<IpAddr>().ok())
                .collect(),
            rx_queues: (name == "eth0").then_some(4),
            veth: false,
        }))
    }

    fn user(&self, name: &str) -> Option<Account> {
        let account = |id| Account { uid: id, gid: id };
        match name {
            "root" => Some(account(0)),
            "alice" => Some(account(1000)),
            _ => name.parse().ok().map(account),
        }
    }

    fn group(&self, name: &str) -> Option<u32> {
        if name == "wheel" {
            Some(10)
        } else {
            name.parse().ok()
        }
    }

    fn cores(&self) -> Vec<usize> {
        vec![0, 1]
    }

    fn own_uid(&self) -> u32 {
        0
    }
}
