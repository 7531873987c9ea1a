//! Where the daemon and the command line tool were built.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

/// Names the directory of `portoland` and `portolan` where they are not beside the running program.
pub const BIN_DIR_VARIABLE: &str = "PORTOLAN_BIN_DIR";

/// The programs a lab runs.
#[derive(Clone, Debug)]
pub struct Binaries {
    directory: PathBuf,
}

impl Binaries {
    /// The programs in `directory`; whether they exist is looked at when they are needed.
    pub fn in_directory(directory: impl Into<PathBuf>) -> Self {
        Self {
            directory: directory.into(),
        }
    }

    /// The programs in `$PORTOLAN_BIN_DIR`, else beside the running program (`target/<profile>/`, also for a test
    /// in `target/<profile>/deps/`).
    pub fn find() -> Result<Self> {
        if let Some(directory) = std::env::var_os(BIN_DIR_VARIABLE) {
            return Ok(Self::in_directory(directory));
        }
        let program = std::env::current_exe().context("path of the running program")?;
        let mut directory = program.parent().unwrap_or(Path::new("/"));
        if directory
            .file_name()
            .is_some_and(|n| n == "deps" || n == "examples")
        {
            directory = directory.parent().unwrap_or(directory);
        }
        Ok(Self::in_directory(directory))
    }

    /// The daemon.
    pub fn daemon(&self) -> Result<PathBuf> {
        self.existing("portoland")
    }

    /// The command line tool.
    pub fn cli(&self) -> Result<PathBuf> {
        self.existing("portolan")
    }

    /// The wire of impaired labs.
    pub fn wire(&self) -> Result<PathBuf> {
        self.existing("portolan-wire")
    }

    /// Where they are looked for.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    fn existing(&self, name: &str) -> Result<PathBuf> {
        let path = self.directory.join(name);
        if !path.is_file() {
            bail!(
                "there is no {}: build it with `cargo build --workspace --bins` (with the profile of the tests), \
                 run everything with `cargo xtask test`, or name its directory in {BIN_DIR_VARIABLE}",
                path.display()
            );
        }
        Ok(path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_daemon_is_reported_with_what_to_do() {
        let empty = tempfile::tempdir().unwrap();
        let error = Binaries::in_directory(empty.path()).daemon().unwrap_err();
        assert!(error.to_string().contains("cargo build --workspace --bins"));
    }

    #[test]
    fn a_test_looks_one_directory_above_deps() {
        let found = Binaries::find().unwrap();
        assert_ne!(found.directory().file_name().unwrap(), "deps");
    }
}
