//! UCX, libfabric and Open MPI as subjects: each behind a small library of our own writing (`bench/peers/*.c`), which is compiled when it is first
//! asked for, against what the machine has installed.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use portolan_testbed::process;

use super::mpi::Job;
use super::offloads::{Offloads, Switched};
use super::{About, Figure, Pair, Scene, Side, Started, Subject};
use crate::actor::{Actor, ForeignRole, Role};
use crate::cases::Case;

/// Bound on compiling one.
const COMPILED: Duration = Duration::from_secs(60);

/// A library, and the transport of it that is meant.
struct Foreign {
    name: &'static str,
    /// The file in `bench/peers` without its ending.
    source: &'static str,
    compiler: &'static str,
    /// What it is linked with.
    libraries: &'static str,
    /// As pkg-config knows it.
    package: &'static str,
    provider: &'static str,
    how: &'static str,
    built: OnceLock<Result<PathBuf, String>>,
}

/// All of them.
pub fn all() -> Vec<Box<dyn Subject>> {
    let foreign = |name, source, compiler, libraries, package, provider, how| -> Box<dyn Subject> {
        Box::new(Foreign {
            name,
            source,
            compiler,
            libraries,
            package,
            provider,
            how,
            built: OnceLock::new(),
        })
    };
    let fabric = |name, provider| {
        let how = "FI_EP_RDM, fi_tsend and fi_trecv";
        foreign(
            name,
            "libfabric",
            "cc",
            "-lfabric",
            "libfabric",
            provider,
            how,
        )
    };
    vec![
        foreign(
            "ucx-tcp",
            "ucx",
            "cc",
            "-lucp -lucs",
            "ucx",
            "tcp",
            "UCX_TLS=tcp, ucp_tag_send_nbx and ucp_tag_recv_nbx",
        ),
        fabric("libfabric-tcp", "tcp;ofi_rxm"),
        fabric("libfabric-rxd", "udp;ofi_rxd"),
        foreign("openmpi-tcp", "mpi", "mpicc", "", "ompi", "", Job::COMMAND),
    ]
}

impl Foreign {
    /// The compiled library; compiled once.
    fn library(&self) -> Result<PathBuf> {
        let built = self.built.get_or_init(|| {
            let compiled = self.compile();
            compiled.map_err(|error| format!("{error:#}"))
        });
        built.clone().map_err(|error| anyhow!(error))
    }

    fn compile(&self) -> Result<PathBuf> {
        let libraries = self.libraries.split_ascii_whitespace();
        let libraries: Vec<OsString> = libraries.map(OsString::from).collect();
        compile(self.source, self.compiler, &libraries)
            .with_context(|| format!("{} cannot be built; --peers installs it", self.name))
    }

    fn role(&self, scene: &Scene<'_>, side: Side, meeting: PathBuf) -> Result<Role> {
        let node = scene.node(side);
        Ok(Role::Foreign(ForeignRole {
            library: self.library()?,
            side: match side {
                Side::One => 1,
                Side::Two => 2,
            },
            device: node.interface(),
            own: node.ipv4().to_string(),
            provider: self.provider.to_owned(),
            meeting,
            yields: false,
        }))
    }
}

/// Where what is built for peers lies: beside this program.
pub fn directory() -> Result<PathBuf> {
    let program = std::env::current_exe().context("path of the running program")?;
    let directory = program.with_file_name("peers");
    std::fs::create_dir_all(&directory).with_context(|| directory.display().to_string())?;
    Ok(directory)
}

/// Compiles a file of `bench/peers`, given without its ending, to a library that actors can load.
pub fn compile(source: &str, compiler: &str, linked: &[OsString]) -> Result<PathBuf> {
    let sources = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("peers");
    let library = directory()?.join(format!("libpeer-{source}.so"));
    let mut command = Command::new(compiler);
    command
        .args(["-O2", "-shared", "-fPIC", "-o"])
        .arg(&library);
    command
        .arg(sources.join(format!("{source}.c")))
        .args(linked);
    process::run_ok(&mut command, COMPILED)?;
    Ok(library)
}

impl Subject for Foreign {
    fn name(&self) -> &str {
        self.name
    }

    fn about(&self) -> About {
        let mut command = Command::new("pkg-config");
        let version = process::run_ok(command.args(["--modversion", self.package]), COMPILED);
        let version = version.map_or("not installed".to_owned(), |text| text.trim().to_owned());
        let provider = match self.provider {
            "" => String::new(),
            provider => format!(" of {provider}"),
        };
        About {
            version: format!("{} {version}", self.package),
            command: format!(
                "{}{provider}, spins; bench/peers/{}.c; ethtool -K {}",
                self.how,
                self.source,
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
        self.library()?;
        let offloads = Switched::to(Offloads::All, scene)?;
        let meeting = tempfile::tempdir().context("temporary directory")?;
        let role = |side| self.role(scene, side, meeting.path().to_owned());
        if self.source == "mpi" {
            let roles = [role(Side::One)?, role(Side::Two)?];
            let (job, [one, two]) = Job::start(self.name, scene, meeting.path(), &roles)?;
            return Ok(Box::new(Running {
                pair: Pair {
                    one: vec![one],
                    two,
                },
                _job: Some(job),
                _offloads: offloads,
                _meeting: meeting,
            }));
        }
        let end = |side| {
            let mut command = scene.actor(side);
            // UCX writes its log to standard output, where answers go.
            command.env("UCX_LOG_FILE", "stderr");
            // libfabric leaves a file where it crashes.
            command.current_dir(meeting.path());
            Actor::start(self.name, command, &role(side)?)
        };
        let two = end(Side::Two)?;
        let one = vec![end(Side::One)?];
        Ok(Box::new(Running {
            pair: Pair { one, two },
            _job: None,
            _offloads: offloads,
            _meeting: meeting,
        }))
    }
}

/// Ended in this order: first who uses the rest.
struct Running<'a> {
    pair: Pair,
    _job: Option<Job>,
    _offloads: Switched<'a>,
    _meeting: tempfile::TempDir,
}

impl Started for Running<'_> {
    fn measure(&mut self, case: &Case, lasting: Duration) -> Result<Vec<Figure>> {
        self.pair.measure(case, lasting)
    }
}
