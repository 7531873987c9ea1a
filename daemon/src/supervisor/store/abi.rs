//! What two builds must agree on for one to go on where the other stopped.
//!
//! A build says it with `portoland abi`; a store says it in its manifest.

use serde::{Deserialize, Serialize};

/// Names and meaning of what is stored, the manifest, and the way of handing over. Raise it with a change of any.
const STORE_VERSION: u32 = 1;
/// What supervisor and engine say to each other (`engine_link.rs`). Raise it with a change that an older end would not understand.
const LINK_VERSION: u32 = 2;

/// Versions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Abi {
    /// Of the store.
    pub store: u32,
    /// Of the ledger.
    pub ledger: u32,
    /// Of a port's memory.
    pub port: u32,
    /// Of the link to an engine.
    pub link: u32,
}

impl Abi {
    /// This build's.
    pub const OURS: Self = Self {
        store: STORE_VERSION,
        ledger: portolan_abi::LEDGER_ABI_VERSION,
        port: portolan_abi::PORT_ABI_VERSION,
        link: LINK_VERSION,
    };

    /// Why a build with `other` and one with this cannot follow each other, if so.
    pub fn misfit(&self, other: &Self) -> Option<String> {
        let versions = [
            ("store", self.store, other.store),
            ("ledger", self.ledger, other.ledger),
            ("port", self.port, other.port),
            ("link", self.link, other.link),
        ];
        let differ: Vec<String> = versions
            .iter()
            .filter(|(_, ours, theirs)| ours != theirs)
            .map(|(what, ours, theirs)| format!("{what} ABI {theirs} where this is {ours}"))
            .collect();
        (!differ.is_empty()).then(|| differ.join(", "))
    }

    /// From what `portoland abi` printed.
    pub fn parse(text: &str) -> Option<Self> {
        serde_json::from_str(text.trim()).ok()
    }
}

/// What `portoland abi` prints: one line of JSON.
pub fn describe() -> String {
    let mut line = serde_json::json!(Abi::OURS);
    if let Some(line) = line.as_object_mut() {
        line.insert("version".to_owned(), env!("CARGO_PKG_VERSION").into());
    }
    line.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_build_fits_itself_and_says_what_does_not() {
        let ours = Abi::parse(&describe()).unwrap();
        assert_eq!(ours, Abi::OURS);
        assert_eq!(ours.misfit(&ours), None);
        let other = Abi {
            ledger: ours.ledger + 1,
            ..ours
        };
        let why = ours.misfit(&other).unwrap();
        assert!(why.contains("ledger") && !why.contains("port"), "{why}");
        assert_eq!(Abi::parse("portoland 9.9"), None);
    }
}
