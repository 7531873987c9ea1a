//! Counts that were accepted, per architecture, in a file that is committed.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

const ABOUT: &str = "\
# Instructions per message, or per operation, as `cargo xtask counts --accept` found them. Whoever changes a number
# says why in the commit. See steps/src/counts/mod.rs.

";

/// What a count depends on besides the code.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Conditions {
    pub compiler: String,
    pub valgrind: String,
}

impl fmt::Display for Conditions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {}", self.compiler, self.valgrind)
    }
}

/// Of one architecture.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Counts {
    conditions: Conditions,
    instructions: BTreeMap<String, f64>,
}

/// The file: all architectures, of which this one matters.
#[derive(Clone, Debug, Default)]
pub struct Baseline {
    all: BTreeMap<String, Counts>,
}

impl Baseline {
    pub fn new(conditions: Conditions, instructions: BTreeMap<String, f64>) -> Self {
        let here = Counts {
            conditions,
            instructions,
        };
        Self {
            all: BTreeMap::from([(std::env::consts::ARCH.to_owned(), here)]),
        }
    }

    /// Empty if there is no file.
    pub fn read(path: &Path) -> Result<Self> {
        let text = match std::fs::read_to_string(path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return Ok(Self::default());
            }
            read => read.with_context(|| path.display().to_string())?,
        };
        let all = toml::from_str(&text).with_context(|| path.display().to_string())?;
        Ok(Self { all })
    }

    /// Writes this architecture's counts and leaves the others'.
    pub fn write(self, path: &Path) -> Result<()> {
        let mut whole = Self::read(path)?;
        whole.all.extend(self.all);
        let text = toml::to_string(&whole.all).context("writing the baseline")?;
        std::fs::write(path, format!("{ABOUT}{text}")).with_context(|| path.display().to_string())
    }

    fn here(&self) -> Option<&Counts> {
        self.all.get(std::env::consts::ARCH)
    }

    pub fn is_empty(&self) -> bool {
        self.here().is_none()
    }

    pub fn conditions(&self) -> Option<&Conditions> {
        self.here().map(|counts| &counts.conditions)
    }

    pub fn count(&self, name: &str) -> Option<f64> {
        self.here()?.instructions.get(name).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Accepted here: what another architecture counted stays.
    #[test]
    fn architectures_keep_their_counts() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("instructions.toml");
        assert!(Baseline::read(&path).unwrap().is_empty());
        let conditions = Conditions {
            compiler: "rustc 1".to_owned(),
            valgrind: "valgrind-3".to_owned(),
        };
        let mut other = Baseline::new(conditions.clone(), BTreeMap::from([("a".to_owned(), 1.5)]));
        let counts = other.all.remove(std::env::consts::ARCH).unwrap();
        other.all.insert("pdp11".to_owned(), counts);
        other.write(&path).unwrap();
        let here = BTreeMap::from([("a".to_owned(), 2.5)]);
        Baseline::new(conditions.clone(), here)
            .write(&path)
            .unwrap();
        let read = Baseline::read(&path).unwrap();
        assert_eq!(read.count("a"), Some(2.5));
        assert_eq!(read.conditions(), Some(&conditions));
        assert_eq!(read.all["pdp11"].instructions["a"], 1.5);
    }
}
