//! `[[quota]]`: who may have how much, and what is wrong with a quota.

use portoland::supervisor::config::{Config, Resource};

use super::{GOOD, each_is_named, parse};

fn most(config: &Config, uid: u32) -> [u64; 5] {
    Resource::ALL.map(|resource| config.quotas.of(uid).get(resource))
}

const HALF: [u64; 5] = [128, 512, 65_280, 130_560, 2 << 30];

// Expect: half for everybody and no bound for root; rules over that, each for what it mentions.
#[test]
fn a_quota_is_what_it_says() {
    let config = parse(GOOD).unwrap();
    assert_eq!(most(&config, 1000), HALF);
    assert_eq!(most(&config, 0), [u64::MAX; 5]);
    let text = format!(
        "{GOOD}[[quota]]\nuid = \"alice\"\nports = 255\n[[quota]]\nuid = \"any\"\nports = 4\narena_bytes = 1048576\n\
         [[quota]]\nuid = 0\nconnections = 9\n[[quota]]\nuid = 7\nports = 0\n"
    );
    let config = parse(&text).unwrap();
    let [_, connections, sends, receives, _] = HALF;
    assert_eq!(most(&config, 1), [4, connections, sends, receives, 1 << 20]);
    assert_eq!(
        most(&config, 1000),
        [255, connections, sends, receives, 1 << 20]
    );
    assert_eq!(most(&config, 7)[0], 0);
    assert_eq!(
        most(&config, 0),
        [u64::MAX, 9, u64::MAX, u64::MAX, u64::MAX]
    );
}

#[test]
fn each_mistake_is_named_with_its_line() {
    const PLACE: &str = "[limits]\nclients = 1024\n";
    each_is_named(&[
        (
            PLACE,
            "[[quota]]\nuid = \"any\"\nports = 256\n",
            "ports = 256",
            "quota.ports is 256",
            "0 to 255",
        ),
        (
            PLACE,
            "[[quota]]\nuid = \"any\"\nconnections = -1\n",
            "connections = -1",
            "quota.connections is -1",
            "0 to 1024",
        ),
        (
            PLACE,
            "[[quota]]\nuid = \"nemo\"\nports = 1\n",
            "nemo",
            "no user \"nemo\"",
            "a name, a number or \"any\"",
        ),
        (
            PLACE,
            "[[quota]]\nuid = \"alice\"\nports = 1\n[[quota]]\nuid = 1000\nports = 2\n",
            "uid = 1000",
            "quota of 1000 is given in line 23 already",
            "give it once",
        ),
        (
            PLACE,
            "[[quota]]\nuid = \"any\"\nmemory = 1\n",
            "memory = 1",
            "unknown field `memory`",
            "spelling",
        ),
        (
            PLACE,
            "[[quota]]\nports = 1\n",
            "[[quota]]",
            "missing field `uid`",
            "add it",
        ),
    ]);
}
