//! A lab's directory below `/run/portolan`, and whether its owner still lives.
//!
//! `owner.lock` in it is held with flock(2) as long as the owning process lives; the kernel lets go when it dies,
//! however it dies. So "this lock can be taken" means "this lab is abandoned", whatever became of the process id.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context, Result, bail};

use crate::namespace::Namespace;

/// Sockets, configurations and logs of every lab.
const ROOT: &str = "/run/portolan";
const OWNER_LOCK: &str = "owner.lock";

/// The directory of one lab; removed with [`RunDir::remove`].
#[derive(Debug)]
pub(crate) struct RunDir {
    path: PathBuf,
    /// Held while the lab is owned by this process; a lab that stays up has none.
    _owner: Option<File>,
}

impl RunDir {
    /// A fresh directory `<prefix><pid>x<n>` owned by this process. The caller holds [`lock`].
    pub fn create_owned(prefix: &str) -> Result<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(1);
        loop {
            let number = NEXT.fetch_add(1, Ordering::Relaxed);
            let path = Path::new(ROOT).join(format!("{prefix}{}x{number}", std::process::id()));
            match fs::create_dir(&path) {
                Ok(()) => {}
                // Another PID namespace that shares /run may use our number.
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => continue,
                Err(error) => return Err(error).with_context(|| path.display().to_string()),
            }
            open_to_all(&path)?;
            let owner = File::create(path.join(OWNER_LOCK)).context("owner.lock")?;
            owner.lock().context("owner.lock")?;
            return Ok(Self {
                path,
                _owner: Some(owner),
            });
        }
    }

    /// The directory `name` of a lab that stays up; an error when it exists. The caller holds [`lock`].
    pub fn create_lasting(name: &str) -> Result<Self> {
        let dir = Self::lasting(name);
        if dir.path.exists() {
            bail!("the lab in {} exists already", dir.path.display());
        }
        fs::create_dir(&dir.path).with_context(|| dir.path.display().to_string())?;
        open_to_all(&dir.path)?;
        Ok(dir)
    }

    /// The directory of a lab that stays up, whether it exists or not.
    pub fn lasting(name: &str) -> Self {
        Self {
            path: Path::new(ROOT).join(name),
            _owner: None,
        }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its last component.
    pub fn name(&self) -> String {
        let name = self.path.file_name().unwrap_or_default();
        name.to_string_lossy().into_owned()
    }

    pub fn remove(&self) -> Result<()> {
        match fs::remove_dir_all(&self.path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(error).with_context(|| self.path.display().to_string())
            }
            _ => Ok(()),
        }
    }
}

/// Applications of any user must be able to reach the sockets.
fn open_to_all(path: &Path) -> Result<()> {
    fs::set_permissions(path, fs::Permissions::from_mode(0o755))
        .with_context(|| path.display().to_string())
}

/// The namespaces of the lab `name` begin with this.
pub(crate) fn namespace_prefix(name: &str) -> String {
    format!("{name}n")
}

/// One lab at a time is made or swept on a machine. Held until the file is dropped.
pub(crate) fn lock() -> Result<File> {
    if !rustix::process::geteuid().is_root() {
        bail!("a lab makes network namespaces and loads eBPF programs: run this as root");
    }
    fs::create_dir_all(ROOT).with_context(|| ROOT.to_owned())?;
    open_to_all(Path::new(ROOT))?;
    let path = Path::new(ROOT).join(".testbed.lock");
    let file = OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .open(&path)
        .with_context(|| path.display().to_string())?;
    file.lock().context("lock of the testbed")?;
    Ok(file)
}

/// Removes every lab whose process has died without cleaning up. Returns their names.
pub fn sweep() -> Result<Vec<String>> {
    let held = lock()?;
    Ok(sweep_holding(&held))
}

/// [`sweep`] for a caller that holds the lock. What cannot be removed is reported and left for the next time.
pub(crate) fn sweep_holding(_held: &File) -> Vec<String> {
    let mut swept = Vec::new();
    let Ok(labs) = fs::read_dir(ROOT) else {
        return swept;
    };
    for lab in labs.flatten() {
        let Ok(owner) = OpenOptions::new()
            .write(true)
            .open(lab.path().join(OWNER_LOCK))
        else {
            continue;
        };
        match owner.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock | TryLockError::Error(_)) => continue,
        }
        let name = lab.file_name().to_string_lossy().into_owned();
        match remove_abandoned(&name) {
            Ok(()) => swept.push(name),
            Err(error) => eprintln!("the abandoned lab {name} cannot be removed: {error:#}"),
        }
    }
    swept
}

fn remove_abandoned(name: &str) -> Result<()> {
    let prefix = namespace_prefix(name);
    for namespace in Namespace::list(|n| n.starts_with(&prefix)) {
        namespace.remove()?;
    }
    RunDir::lasting(name).remove()
}
