//! Our address, where the file does not name one.

use std::io;
use std::net::IpAddr;
use std::path::Path;

use portoland::supervisor::config::Config;
use portoland::supervisor::surroundings::{Account, Interface, Surroundings};

use super::{GOOD, Machine};

/// The machine, with other addresses on its interface.
struct With(&'static [&'static str]);

impl Surroundings for With {
    fn interface(&self, name: &str) -> io::Result<Option<Interface>> {
        let addresses: Vec<IpAddr> = self.0.iter().map(|text| text.parse().unwrap()).collect();
        let found = Machine.interface(name)?;
        Ok(found.map(|facts| Interface { addresses, ..facts }))
    }
    fn user(&self, name: &str) -> Option<Account> {
        Machine.user(name)
    }
    fn group(&self, name: &str) -> Option<u32> {
        Machine.group(name)
    }
    fn cores(&self) -> Vec<usize> {
        Machine.cores()
    }
    fn own_uid(&self) -> u32 {
        Machine.own_uid()
    }
}

fn address(addresses: &'static [&'static str]) -> Result<Option<IpAddr>, String> {
    let (head, _) = GOOD.split_once("[[peer]]").unwrap();
    let text = head.replace("address = \"10.77.0.1\"\n", "");
    let config = Config::parse(Path::new("node.toml"), &text, &With(addresses));
    config
        .map(|config| config.address)
        .map_err(|errors| errors.to_string())
}

// An interface with one address needs no second mention of it. Expect: that one; IPv4 where there are both.
#[test]
fn the_only_address_is_ours() {
    let found = |text: &str| Ok(Some(text.parse().unwrap()));
    assert_eq!(address(&["10.77.0.9"]), found("10.77.0.9"));
    assert_eq!(
        address(&["fe80::1", "10.77.0.9", "fd77::1"]),
        found("10.77.0.9")
    );
    assert_eq!(address(&["fe80::1", "fd77::1"]), found("fd77::1"));
}

// None, or a choice. Expect: the line of the interface, what there is, and what to do.
#[test]
fn more_than_one_is_for_the_administrator_to_choose() {
    let line = 1 + GOOD
        .lines()
        .position(|line| line.starts_with("interface"))
        .unwrap();
    let error = address(&["10.77.0.1", "10.77.0.2"]).unwrap_err();
    assert!(error.starts_with(&format!("node.toml:{line}:")), "{error}");
    assert!(
        error.contains("10.77.0.1, 10.77.0.2; name the one to use in network.address"),
        "{error}"
    );
    let error = address(&["fe80::1"]).unwrap_err();
    assert!(error.contains("none (`ip addr add`)"), "{error}");
}
