//! Aeron as a subject: its C media driver on each node, and an application beside it on the same core, as a daemon of ours has.
//!
//! A Rust crate packages the source. Its own build asks for a newer CMake than Debian 12 has, so the source is compiled as it is, with
//! the machine's C compiler and the definitions that its build would make on Linux.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use portolan_testbed::process;
use serde_json::Value;
use tempfile::TempDir;

use super::foreign;
use super::offloads::{Offloads, Switched};
use super::{About, Figure, Pair, Scene, Side, Started, Subject};
use crate::actor::{Actor, ForeignRole, Role};
use crate::cases::Case;

/// The crate, and the version of what is in it.
const CRATE: &str = "rusteron-media-driver";
const CRATE_VERSION: &str = "0.2.16";
const VERSION: &str = "1.54.0";
/// Bound on finding the source, which may be downloaded.
const FOUND: Duration = Duration::from_secs(120);
/// Bound on compiling it.
const COMPILED: Duration = Duration::from_secs(300);
/// In front of a frame's payload: IP and UDP.
const HEADERS: u32 = 28;
/// Of the driver's sockets: what a kernel allows that was not told otherwise.
const QUEUE: &str = "212992";
/// What Aeron's build would find out on Linux.
const DEFINITIONS: [&str; 12] = [
    "_GNU_SOURCE",
    "_FILE_OFFSET_BITS=64",
    "DISABLE_BOUNDS_CHECKS",
    "HAVE_FALLOCATE",
    "HAVE_POSIX_FALLOCATE",
    "HAVE_DEV_URANDOM",
    "HAVE_ARC4RANDOM",
    "HAVE_POLL",
    "HAVE_EPOLL",
    "HAVE_STRUCT_MMSGHDR",
    "HAVE_RECVMMSG",
    "HAVE_SENDMMSG",
];

/// `aeron`.
#[derive(Default)]
pub struct Aeron {
    built: OnceLock<Result<Built, String>>,
}

/// The programs.
#[derive(Clone)]
struct Built {
    driver: PathBuf,
    library: PathBuf,
}

impl Aeron {
    fn built(&self) -> Result<Built> {
        let built = self
            .built
            .get_or_init(|| build().map_err(|error| format!("{error:#}")));
        built.clone().map_err(|error| anyhow!(error))
    }
}

impl Subject for Aeron {
    fn name(&self) -> &'static str {
        "aeron"
    }

    fn about(&self) -> About {
        About {
            version: format!("{VERSION} ({CRATE} {CRATE_VERSION})"),
            command: format!(
                "aeronmd (AERON_THREADING_MODE=SHARED, yielding, sockets and window of {QUEUE} bytes) and an application on each core, \
                 exclusive publications, bench/peers/aeron.c; ethtool -K {}",
                Offloads::All.words()
            ),
        }
    }

    fn is_extra(&self) -> bool {
        true
    }

    fn offers(&self, case: &Case) -> bool {
        case.is_plain()
    }

    fn start<'a>(&'a self, scene: &'a Scene<'a>, _: &[Case]) -> Result<Box<dyn Started + 'a>> {
        let built = self.built()?;
        let offloads = Switched::to(Offloads::All, scene)?;
        let meeting = tempfile::tempdir().context("temporary directory")?;
        let drivers = [
            Driver::start(&built.driver, scene, Side::One)?,
            Driver::start(&built.driver, scene, Side::Two)?,
        ];
        let [driver_one, driver_two] = &drivers;
        let end = |side: Side, driver: &Driver| {
            let node = scene.node(side);
            let role = Role::Foreign(ForeignRole {
                library: built.library.clone(),
                side: if side == Side::One { 1 } else { 2 },
                device: node.interface(),
                own: node.ipv4().to_string(),
                provider: driver.directory.path().display().to_string(),
                meeting: meeting.path().to_owned(),
                yields: true,
            });
            Actor::start(self.name(), scene.actor(side), &role)
        };
        let two = end(Side::Two, driver_two)?;
        let one = vec![end(Side::One, driver_one)?];
        Ok(Box::new(Running {
            pair: Pair { one, two },
            _drivers: drivers,
            _offloads: offloads,
            _meeting: meeting,
        }))
    }
}

/// A media driver. Dropping it ends it.
struct Driver {
    child: Child,
    /// Where it keeps what it shares with applications.
    directory: TempDir,
}

impl Driver {
    fn start(program: &Path, scene: &Scene<'_>, side: Side) -> Result<Self> {
        use std::os::unix::process::CommandExt;
        let directory = tempfile::tempdir_in("/dev/shm").context("/dev/shm")?;
        // Frames are multiples of 32 bytes.
        let mtu = (scene.mtu() - HEADERS) / 32 * 32;
        let mut command = scene.command(side, program);
        command
            .env("AERON_DIR", directory.path())
            .env("AERON_DIR_DELETE_ON_START", "1")
            .env("AERON_THREADING_MODE", "SHARED")
            .env("AERON_SHARED_IDLE_STRATEGY", "yield")
            .env("AERON_MTU_LENGTH", mtu.to_string())
            .env("AERON_SOCKET_SO_RCVBUF", QUEUE)
            .env("AERON_SOCKET_SO_SNDBUF", QUEUE)
            .env("AERON_RCV_INITIAL_WINDOW_LENGTH", QUEUE)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0);
        let child = command
            .spawn()
            .with_context(|| format!("cannot start {}", process::describe(&command)))?;
        Ok(Self { child, directory })
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        process::kill_group(&mut self.child);
    }
}

/// Ended in this order: first who uses the rest.
struct Running<'a> {
    pair: Pair,
    _drivers: [Driver; 2],
    _offloads: Switched<'a>,
    _meeting: TempDir,
}

impl Started for Running<'_> {
    fn measure(&mut self, case: &Case, lasting: Duration) -> Result<Vec<Figure>> {
        self.pair.measure(case, lasting)
    }
}

/// Compiles what is not there yet.
fn build() -> Result<Built> {
    let directory = foreign::directory()?;
    let source = source(&directory)?;
    let [client, driver] =
        ["aeron-client", "aeron-driver"].map(|part| source.join(part).join("src/main/c"));
    let includes = [&client, &driver].map(|path| {
        let mut option = OsString::from("-I");
        option.push(path);
        option
    });
    let library = directory.join(format!("libaeron-{VERSION}.so"));
    let program = directory.join(format!("aeronmd-{VERSION}"));
    let cc = |out: &Path, what: &[OsString]| -> Result<()> {
        // Whole, or not there.
        let draft = out.with_extension("draft");
        let mut command = Command::new("cc");
        command.args(["-O3", "-DNDEBUG", "-w", "-fPIC", "-fcommon", "-std=gnu11"]);
        command.args(DEFINITIONS.map(|name| format!("-D{name}")));
        command.args(versions()).args(&includes);
        command.arg("-o").arg(&draft).args(what);
        command.args(["-lm", "-ldl", "-lpthread"]);
        process::run_ok(&mut command, COMPILED).context("Aeron cannot be compiled")?;
        fs::rename(&draft, out).with_context(|| out.display().to_string())
    };
    if !library.exists() {
        let mut what = vec![OsString::from("-shared")];
        for part in [&client, &driver] {
            find(part, &mut what)?;
        }
        cc(&library, &what)?;
    }
    let run_path = OsString::from(format!("-Wl,-rpath,{}", directory.display()));
    if !program.exists() {
        let main = driver.join("aeronmd.c").into_os_string();
        let library = library.clone().into_os_string();
        cc(&program, &[main, library, run_path.clone()])?;
    }
    let [client, _] = includes;
    let linked = [client, library.into_os_string(), run_path];
    Ok(Built {
        driver: program,
        library: foreign::compile("aeron", "cc", &linked)?,
    })
}

/// Its version, as its own build would define it.
fn versions() -> Vec<String> {
    let parts = ["MAJOR", "MINOR", "PATCH"]
        .into_iter()
        .zip(VERSION.split('.'));
    let mut all: Vec<String> = parts
        .map(|(name, value)| format!("-DAERON_VERSION_{name}={value}"))
        .collect();
    all.push(format!("-DAERON_VERSION_TXT=\"{VERSION}\""));
    all.push(format!("-DAERON_VERSION_GITSHA=\"{CRATE}\""));
    all
}

/// All C files but the driver's main program.
fn find(directory: &Path, found: &mut Vec<OsString>) -> Result<()> {
    let entries = fs::read_dir(directory).with_context(|| directory.display().to_string())?;
    for entry in entries {
        let path = entry?.path();
        if path.is_dir() {
            find(&path, found)?;
        } else if path.extension().is_some_and(|end| end == "c") && !path.ends_with("aeronmd.c") {
            found.push(path.into_os_string());
        }
    }
    Ok(())
}

/// Where cargo has, or puts, the crate's source.
fn source(directory: &Path) -> Result<PathBuf> {
    let package = directory.join("aeron-source");
    fs::create_dir_all(package.join("src"))?;
    let manifest = package.join("Cargo.toml");
    fs::write(
        &manifest,
        format!(
            "[package]\nname = \"aeron-source\"\nversion = \"0.0.0\"\nedition = \"2021\"\n\n[workspace]\n\n\
             [dependencies]\n{CRATE} = {{ version = \"={CRATE_VERSION}\", default-features = false }}\n"
        ),
    )?;
    fs::write(package.join("src/lib.rs"), "")?;
    let mut command = Command::new("cargo");
    command.args(["metadata", "--format-version", "1", "--manifest-path"]);
    let text = process::run_ok(command.arg(&manifest), FOUND).context("Aeron's source")?;
    let metadata: Value = serde_json::from_str(&text).context("cargo metadata")?;
    let packages = metadata["packages"].as_array().context("packages")?;
    let found = packages.iter().find(|package| package["name"] == CRATE);
    let manifest = found.and_then(|package| package["manifest_path"].as_str());
    let manifest = Path::new(manifest.context("no such package")?);
    let source = manifest.with_file_name("aeron");
    let version = fs::read_to_string(source.join("version.txt")).context("Aeron's version")?;
    ensure!(
        version.trim() == VERSION,
        "{CRATE} {CRATE_VERSION} holds Aeron {version}"
    );
    Ok(source)
}
