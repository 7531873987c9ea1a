//! The compiled program into the kernel, with its maps.
//!
//! Problem: while a signal waits the kernel gives up looking at a program, with EAGAIN (`do_check`, kernel/bpf/verifier.c). aya takes that for
//! a refusal. Worse, it loads small programs before ours, once per process, to learn what the kernel can do; one that a signal
//! interrupted is a thing the kernel cannot do, as long as the process lives. Then a daemon would not start because somebody stopped it
//! for a moment, or traced it.
//!
//! Idea: aya-obj reads the object and relocates it; what follows are ten system calls, and none has to ask what the kernel can do: all
//! of it came before 5.15. EAGAIN is asked again.
//!
//! Types for debuggers (BTF) are left out: kernels differ in what they accept of them, and nothing here needs them.

use std::collections::{HashMap, HashSet};
use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use aya_obj::generated::{BPF_F_XDP_HAS_FRAGS, bpf_insn, bpf_map_type, bpf_prog_type};
use aya_obj::{EbpfSectionKind, Map, Object, ProgramSection};

use crate::link::BPF_XDP;
use crate::syscall::{self, Command};
use crate::{STEER_OBJECT, SteerError};

/// Times it is asked again. A signal costs one; the kernel looks at the program for about a millisecond.
const ATTEMPTS: usize = 100;
/// Bytes of a name, with a null byte at the end.
const NAME: usize = 16;
/// Room for what the verifier says.
const LOG: usize = 1 << 16;
/// Each instruction that it looked at; and figures (`BPF_LOG_LEVEL1`, `BPF_LOG_STATS` of linux/bpf_verifier.h).
const LOG_LEVEL: u32 = 1 | 4;

/// The program in the kernel.
pub(crate) struct Loaded {
    pub program: OwnedFd,
    /// The map from queue to socket, the map of counters, and that of errands, which a program of an older build has not.
    pub sockets: OwnedFd,
    pub counters: OwnedFd,
    pub errands: Option<OwnedFd>,
}

/// The part of `union bpf_attr` that `BPF_MAP_CREATE` reads.
#[repr(C)]
struct MapCreate {
    kind: u32,
    key_size: u32,
    value_size: u32,
    max_entries: u32,
    flags: u32,
    inner: u32,
    numa_node: u32,
    name: [u8; NAME],
}

/// The part that `BPF_MAP_UPDATE_ELEM` reads.
#[repr(C)]
struct MapUpdate {
    map: u32,
    pad: u32,
    key: u64,
    value: u64,
    flags: u64,
}

/// The part that `BPF_PROG_LOAD` reads.
#[repr(C)]
struct ProgramLoad {
    kind: u32,
    count: u32,
    instructions: u64,
    license: u64,
    log_level: u32,
    log_size: u32,
    log: u64,
    kernel_version: u32,
    flags: u32,
    name: [u8; NAME],
    ifindex: u32,
    attach_type: u32,
}

/// Loads the program `name` with `config` for its global of that name. The other programs of the object stay out.
///
/// # Errors
/// The system's: [`SteerError::NoPrivilege`], [`SteerError::Kernel`], [`SteerError::System`]. Ours: [`SteerError::Program`].
pub(crate) fn load(name: &str, config: &[u8]) -> Result<Loaded, SteerError> {
    let mut object = Object::parse(STEER_OBJECT).map_err(|error| SteerError::object(&error))?;
    object
        .patch_map_data(HashMap::from([("config", (config, true))]))
        .map_err(|error| SteerError::object(&error))?;
    let mut maps = Vec::with_capacity(object.maps.len());
    for (name, map) in object.maps.drain() {
        let made = create(&name, &map)
            .map_err(|error| SteerError::load(&format!("map `{name}`"), &error))?;
        maps.push((name, map, made));
    }
    let sections: HashSet<usize> = object
        .functions
        .keys()
        .map(|&(section, _)| section)
        .collect();
    let known = maps
        .iter()
        .map(|(name, map, made)| (name.as_str(), made.as_raw_fd(), map));
    object
        .relocate_maps(known, &sections)
        .map_err(|error| SteerError::object(&error))?;
    object
        .relocate_calls(&sections)
        .map_err(|error| SteerError::object(&error))?;

    let missing = |what: &str| SteerError::Program(format!("no {what} in it"));
    let program = object.programs.get(name);
    let program = program.ok_or_else(|| missing("program of that name"))?;
    let ProgramSection::Xdp { frags, .. } = program.section else {
        return Err(missing("XDP program of that name"));
    };
    let function = object.functions.get(&program.function_key());
    let function = function.ok_or_else(|| missing("code of the program"))?;
    let program = verify(name, &function.instructions, &program.license, frags)?;
    let mut take = |name: &str| {
        let place = maps.iter().position(|(known, ..)| known == name);
        let place = place.ok_or_else(|| missing(&format!("map `{name}`")))?;
        Ok(maps.swap_remove(place).2)
    };
    Ok(Loaded {
        program,
        sockets: take("xsks")?,
        counters: take("counters")?,
        errands: Some(take("errands")?),
    })
}

/// A map as the object describes it, with what the object says is in it. Constants are frozen, which makes them the verifier's too.
fn create(name: &str, map: &Map) -> io::Result<OwnedFd> {
    let attr = MapCreate {
        kind: map.map_type(),
        key_size: map.key_size(),
        value_size: map.value_size(),
        max_entries: map.max_entries(),
        flags: map.map_flags(),
        inner: 0,
        numa_node: 0,
        name: short(name),
    };
    // SAFETY: `MapCreate` is the command's prefix of `union bpf_attr`, without a pointer; it returns a descriptor.
    let made = unsafe { syscall::descriptor(Command::MapCreate, &attr) }?;
    let number = made.as_raw_fd().cast_unsigned();
    let data = map.data();
    if !data.is_empty() {
        let fits = map.map_type() == bpf_map_type::BPF_MAP_TYPE_ARRAY as u32
            && map.key_size() as usize == size_of::<u32>()
            && map.value_size() as usize == data.len();
        if !fits {
            return Err(io::Error::other("its data does not fit it"));
        }
        let first = 0u32;
        let attr = MapUpdate {
            map: number,
            pad: 0,
            key: (&raw const first).expose_provenance() as u64,
            value: data.as_ptr().expose_provenance() as u64,
            flags: 0,
        };
        // SAFETY: `MapUpdate` is the command's prefix of `union bpf_attr`; the kernel reads four bytes of the key and as many of the value as
        // the map was made for, which is its length.
        unsafe { syscall::call(Command::MapUpdate, &attr) }?;
    }
    if map.section_kind() == EbpfSectionKind::Rodata {
        // SAFETY: the descriptor is the command's prefix of `union bpf_attr`.
        unsafe { syscall::call(Command::MapFreeze, &number) }?;
    }
    Ok(made)
}

/// Has the kernel verify and translate the program; should it refuse it, once more, to say why.
fn verify(
    name: &str,
    instructions: &[bpf_insn],
    license: &CStr,
    frags: bool,
) -> Result<OwnedFd, SteerError> {
    let verify = |log: &mut [u8]| {
        let attr = ProgramLoad {
            kind: bpf_prog_type::BPF_PROG_TYPE_XDP as u32,
            count: instructions.len() as u32,
            instructions: instructions.as_ptr().expose_provenance() as u64,
            license: license.as_ptr().expose_provenance() as u64,
            log_level: if log.is_empty() { 0 } else { LOG_LEVEL },
            log_size: log.len() as u32,
            log: match log.is_empty() {
                true => 0,
                false => log.as_mut_ptr().expose_provenance() as u64,
            },
            kernel_version: 0,
            flags: if frags { BPF_F_XDP_HAS_FRAGS } else { 0 },
            name: short(name),
            ifindex: 0,
            attach_type: BPF_XDP,
        };
        again(|| {
            // SAFETY: `ProgramLoad` is the command's prefix of `union bpf_attr`; instructions and log are as long as it says, the license
            // ends in a null byte, and all of them live through the call, which returns a descriptor.
            unsafe { syscall::descriptor(Command::ProgramLoad, &attr) }
        })
    };
    verify(&mut []).map_err(|error| {
        let mut log = vec![0; LOG];
        let _ = verify(&mut log);
        let said = CStr::from_bytes_until_nul(&log).unwrap_or_default();
        let what = format!("program `{name}` ({})", said.to_string_lossy());
        SteerError::load(&what, &error)
    })
}

/// Asks again while a signal is in the way.
fn again<T>(mut ask: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    let mut attempts = 1;
    loop {
        match ask() {
            Err(error) if error.raw_os_error() == Some(libc::EAGAIN) && attempts < ATTEMPTS => {
                attempts += 1;
            }
            result => return result,
        }
    }
}

/// As much of a name as the kernel keeps.
fn short(name: &str) -> [u8; NAME] {
    let mut short = [0; NAME];
    for (to, from) in short[..NAME - 1].iter_mut().zip(name.bytes()) {
        *to = from;
    }
    short
}

#[cfg(test)]
mod tests {
    use super::*;

    // A signal in the way a few times, another error, and signals without end. Expect: asked again for the first only, and not for ever.
    #[test]
    fn only_signals_are_waited_out() {
        for (failures, code, attempts) in [
            (4, libc::EAGAIN, 5),
            (1, libc::EPERM, 1),
            (usize::MAX, libc::EAGAIN, ATTEMPTS),
        ] {
            let mut asked = 0;
            let result = again(|| {
                asked += 1;
                match asked > failures {
                    true => Ok(()),
                    false => Err(io::Error::from_raw_os_error(code)),
                }
            });
            assert_eq!(asked, attempts);
            match attempts > failures {
                true => assert!(result.is_ok()),
                false => assert_eq!(result.unwrap_err().raw_os_error(), Some(code)),
            }
        }
    }

    #[test]
    fn a_long_name_ends_in_a_null_byte() {
        assert_eq!(&short("steer_linear")[..13], b"steer_linear\0");
        assert_eq!(&short("a name of many letters"), b"a name of many \0");
    }
}
