//! How soon each of the machine's processors wakes, which systems under test may say: it is everybody's, so it is given back.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// Where.
pub const DIRECTORY: &str = "/sys/devices/system/cpu";

/// As it was.
pub struct Processors(Vec<(PathBuf, String)>);

impl Processors {
    /// Looks at all of them.
    pub fn remember() -> Result<Self> {
        let mut found = Vec::new();
        for entry in fs::read_dir(DIRECTORY).context(DIRECTORY)? {
            let file = entry?.path().join("power/pm_qos_resume_latency_us");
            // Not a processor, or a kernel without such bounds.
            if let Ok(bound) = fs::read_to_string(&file) {
                found.push((file, bound));
            }
        }
        Ok(Self(found))
    }
}

/// A unit gives the file of each processor to its own user.
fn give_back(file: &Path, bound: &str) -> Result<()> {
    std::os::unix::fs::chown(file, Some(0), Some(0))?;
    Ok(fs::write(file, bound.trim())?)
}

impl Drop for Processors {
    fn drop(&mut self) {
        for (file, bound) in &self.0 {
            if let Err(error) = give_back(file, bound) {
                eprintln!("{}: {error:#}", file.display());
            }
        }
    }
}
