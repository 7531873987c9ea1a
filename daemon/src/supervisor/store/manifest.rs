//! Which versions, build and configuration a store belongs to: one JSON document in a sealed memfd, the first thing stored and the first
//! thing read.

use std::fs::File;
use std::io::{self, Write};
use std::net::IpAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;

use object::Endianness;
use object::elf::{ELF_NOTE_GNU, FileHeader64, NT_GNU_BUILD_ID};
use object::read::ReadCache;
use object::read::elf::{FileHeader, ProgramHeader};
use rustix::fs::{MemfdFlags, SealFlags};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::abi::Abi;
use crate::engine_link::MAX_MTU;
use crate::supervisor::config::Config;
use crate::supervisor::surroundings::Interface;

/// How much of an executable is read at once: while the kernel copies, nobody else has the core.
const PIECE: usize = 16 * 1024;
/// Longer than any manifest.
const LONGEST: usize = 64 * 1024;

/// The document.
#[derive(Debug, Serialize, Deserialize)]
pub struct Manifest {
    /// Versions.
    pub abi: Abi,
    /// The node's incarnation.
    pub incarnation: u64,
    /// What of the configuration cannot change while its engines run.
    pub basis: Map<String, Value>,
}

/// Only the versions: what of a manifest every version can read.
#[derive(Deserialize)]
struct Versions {
    abi: Abi,
}

/// Why a manifest is of no use.
#[derive(Debug)]
pub enum Unreadable {
    /// It is of other versions.
    Versions(Abi),
    /// It is none.
    Nonsense,
}

impl Manifest {
    /// Writes it down.
    ///
    /// # Errors
    /// The system's.
    pub fn write(&self) -> io::Result<OwnedFd> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let mut file = File::from(rustix::fs::memfd_create("portolan-manifest", flags)?);
        file.write_all(&serde_json::to_vec(self)?)?;
        let all = SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&file, all)?;
        Ok(file.into())
    }

    /// Reads it back.
    ///
    /// # Errors
    /// Why it is of no use.
    pub fn read(fd: &OwnedFd) -> Result<Self, Unreadable> {
        let read = || -> io::Result<Vec<u8>> {
            let file = File::from(fd.as_fd().try_clone_to_owned()?);
            let length = file.metadata()?.len().min(LONGEST as u64);
            let mut bytes = vec![0; length as usize];
            let length = file.read_at(&mut bytes, 0)?;
            bytes.truncate(length);
            Ok(bytes)
        };
        let bytes = read().map_err(|_| Unreadable::Nonsense)?;
        match serde_json::from_slice::<Versions>(&bytes) {
            Ok(Versions { abi }) if abi == Abi::OURS => {
                serde_json::from_slice(&bytes).map_err(|_| Unreadable::Nonsense)
            }
            Ok(Versions { abi }) => Err(Unreadable::Versions(abi)),
            Err(_) => Err(Unreadable::Nonsense),
        }
    }

    /// What is not as `basis` says; empty if all is.
    pub fn changes(&self, basis: &Map<String, Value>) -> Vec<String> {
        let mut names: Vec<&String> = self.basis.keys().chain(basis.keys()).collect();
        names.sort();
        names.dedup();
        names.retain(|name| self.basis.get(*name) != basis.get(*name));
        names.into_iter().cloned().collect()
    }
}

/// What engines are told once, and what memory and sockets are made for.
pub fn basis(config: &Config, mtu: u16, frames: u32) -> Map<String, Value> {
    let facts = &config.interface_facts;
    let all = json!({
        "node.id": config.node,
        "node.name": config.name,
        "node.socket": config.socket,
        "node.user": config.user.uid,
        "cluster.name": config.cluster,
        "cluster.encap": config.encap,
        "cluster.udp_port": config.udp_port,
        "network.interface": [json!(config.interface), json!(facts.index), json!(facts.mac)],
        "network.address": config.address,
        "network.queues": config.queues,
        "network.mode": format!("{:?}", config.copy_mode),
        "network.xdp": format!("{:?}", config.xdp_mode),
        "mtu": mtu,
        "engine.wait": config.wait,
        "engine.cores": config.cores,
        "engine.umem_frames": config.umem_frames,
        "engine.default_timeout_ms": config.default_timeout_ms,
        "transport": config.transport,
        "limits": config.ledger_geometry(frames),
    });
    match all {
        Value::Object(all) => all,
        _ => Map::new(),
    }
}

/// The interface of a basis: its name, and what it was like. Its MTU is what memory is laid out for.
pub fn interface(basis: &Map<String, Value>) -> Option<(String, Interface)> {
    let [name, index, mac] = basis.get("network.interface")?.as_array()?.as_slice() else {
        return None;
    };
    // More than there is makes no sense.
    let mtu = basis.get("mtu")?.as_u64()?;
    let mtu = u32::try_from(mtu)
        .ok()
        .filter(|mtu| *mtu <= u32::from(MAX_MTU))?;
    let address: Option<IpAddr> =
        serde_json::from_value(basis.get("network.address")?.clone()).ok()?;
    let facts = Interface {
        index: index.as_u64()?.try_into().ok()?,
        mac: serde_json::from_value(mac.clone()).ok()?,
        mtu,
        addresses: address.into_iter().collect(),
        rx_queues: None,
        veth: false,
    };
    Some((name.as_str()?.to_owned(), facts))
}

/// Tells our executable from others; a copy is the same build. 0, which is nobody's, if that cannot be found out.
pub fn build() -> u32 {
    let exe = File::open("/proc/self/exe");
    exe.and_then(build_of).unwrap_or(0)
}

/// What the linker has computed from the code (its build id), and how the file ends. Not a checksum of all of it, unless the linker computed
/// nothing: that takes 7 ms of a core, and a supervisor that comes back comes to cores that are in use.
fn build_of(exe: File) -> io::Result<u32> {
    let length = exe.metadata()?.len();
    let id = build_id(&exe).map(|id| crc32c::crc32c(&id));
    let (mut sum, mut at) = match id {
        Some(sum) => (
            crc32c::crc32c_append(sum, &length.to_ne_bytes()),
            length.saturating_sub(PIECE as u64),
        ),
        None => (0, 0),
    };
    let mut bytes = [0; PIECE];
    loop {
        match exe.read_at(&mut bytes, at)? {
            0 => return Ok(sum),
            read => {
                sum = crc32c::crc32c_append(sum, bytes.get(..read).unwrap_or_default());
                at += read as u64;
            }
        }
    }
}

/// The linker's note, by the program headers: reading all that a file has to say of itself takes its symbols into memory, half a megabyte
/// (or more, with debug information).
fn build_id(exe: &File) -> Option<Vec<u8>> {
    let cache = ReadCache::new(exe);
    let header = FileHeader64::<Endianness>::parse(&cache).ok()?;
    let endian = header.endian().ok()?;
    for segment in header.program_headers(endian, &cache).ok()? {
        let Ok(Some(mut notes)) = segment.notes(endian, &cache) else {
            continue;
        };
        while let Ok(Some(note)) = notes.next() {
            let is_id = note.name() == ELF_NOTE_GNU && note.n_type(endian) == NT_GNU_BUILD_ID;
            if is_id && !note.desc().is_empty() {
                return Some(note.desc().to_vec());
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use object::Object;

    use super::*;

    fn manifest(abi: Abi) -> Manifest {
        let basis = [("mtu".to_owned(), json!(1500))].into_iter().collect();
        Manifest {
            abi,
            incarnation: u64::MAX,
            basis,
        }
    }

    #[test]
    fn a_manifest_is_read_as_written() {
        let fd = manifest(Abi::OURS).write().unwrap();
        let read = Manifest::read(&fd).unwrap();
        assert_eq!(read.incarnation, u64::MAX);
        assert!(read.changes(&read.basis.clone()).is_empty());
        let other = [("mtu".to_owned(), json!(9000))].into_iter().collect();
        assert_eq!(read.changes(&other), ["mtu"]);
        // Sealed: nobody changes it under us.
        assert!(File::from(fd).write_at(b"x", 0).is_err());
    }

    // What a node is made for names its interface; anything else does not.
    #[test]
    fn an_interface_is_read_from_a_basis() {
        let basis = |interface: Value, mtu: Value, address: Value| {
            let all = [
                ("network.interface", interface),
                ("mtu", mtu),
                ("network.address", address),
            ];
            let named = all.map(|(name, value)| (name.to_owned(), value));
            interface_of(named)
        };
        fn interface_of(all: [(String, Value); 3]) -> Option<(String, Interface)> {
            interface(&all.into_iter().collect())
        }
        let good = json!(["eth0", 7, [2, 0, 0, 0, 0, 1]]);
        let (name, facts) = basis(good.clone(), json!(1500), json!("10.0.0.1")).unwrap();
        assert_eq!((name.as_str(), facts.index, facts.mtu), ("eth0", 7, 1500));
        assert_eq!(facts.mac, [2, 0, 0, 0, 0, 1]);
        assert_eq!(facts.addresses, ["10.0.0.1".parse::<IpAddr>().unwrap()]);
        let bare = basis(good.clone(), json!(1500), Value::Null).unwrap();
        assert!(bare.1.addresses.is_empty());
        for (interface, mtu) in [
            (json!("eth0"), json!(1500)),
            (json!(["eth0", -1, [2, 0, 0, 0, 0, 1]]), json!(1500)),
            (json!(["eth0", 7, [2]]), json!(1500)),
            (good.clone(), json!(70_000)),
            (good, json!("much")),
        ] {
            assert!(basis(interface, mtu, Value::Null).is_none());
        }
    }

    // A copy of this test's program, one with something behind it, one with another build id, and files that no linker made. Expect: only the copy is
    // the same.
    #[test]
    fn a_build_is_told_from_others() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("build");
        let of = |path: &std::path::Path| build_of(File::open(path).unwrap()).unwrap();
        let ours = build();
        assert_ne!(ours, 0);
        std::fs::copy(std::env::current_exe().unwrap(), &path).unwrap();
        assert_eq!(of(&path), ours);
        let mut file = File::options().append(true).open(&path).unwrap();
        file.write_all(b"more").unwrap();
        assert_ne!(of(&path), ours);
        // Another id, if this test's linker computes one.
        let mut bytes = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        let id = object::File::parse(&*bytes).unwrap().build_id().unwrap();
        if let Some(id) = id.map(<[u8]>::to_vec) {
            let at = bytes.windows(id.len()).position(|piece| piece == id);
            bytes[at.unwrap()] ^= 1;
            std::fs::write(&path, &bytes).unwrap();
            assert_ne!(of(&path), ours);
        }
        let mut text = vec![b'x'; 3 * PIECE];
        std::fs::write(&path, &text).unwrap();
        let before = of(&path);
        text[10] = b'y';
        std::fs::write(&path, &text).unwrap();
        assert_ne!(of(&path), before);
    }

    #[test]
    fn another_version_is_told_from_nonsense() {
        let other = Abi {
            store: 99,
            ..Abi::OURS
        };
        let fd = manifest(other).write().unwrap();
        assert!(matches!(
            Manifest::read(&fd),
            Err(Unreadable::Versions(abi)) if abi == other
        ));
        let nothing = File::open("/dev/null").unwrap().into();
        assert!(matches!(
            Manifest::read(&nothing),
            Err(Unreadable::Nonsense)
        ));
    }
}
