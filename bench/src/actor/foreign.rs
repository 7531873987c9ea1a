//! Libraries that Portolan is compared with, each behind the functions of `bench/peers/peer.h`. An `unsafe` island.
//!
//! They are built on the machine they run on, when they are asked for, and loaded here; so whoever does not ask needs none of them. The
//! loop that drives them is the one that drives everybody.
//!
//! The two sides tell each other their addresses by files in a directory that both see: written when a side is opened, read when the
//! first job is prepared, which is after both are open.

use std::ffi::{CStr, CString, c_char, c_int};
use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW, Symbol};
use serde::{Deserialize, Serialize};

use super::{Arrival, Ends};
use crate::cases::window;

/// Bytes of an address at most.
const ADDRESS: usize = 64 << 10;

/// One end of a library.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ForeignRole {
    /// The shared object.
    pub library: PathBuf,
    /// 1 or 2.
    pub side: u8,
    /// The interface, and its address.
    pub device: String,
    /// As above.
    pub own: String,
    /// Which of the library's transports.
    pub provider: String,
    /// Where the two sides find each other's addresses.
    pub meeting: PathBuf,
    /// Whether it has to give its core away: something of the library runs beside.
    pub yields: bool,
}

type Open = unsafe extern "C" fn(
    c_int,
    *const c_char,
    *const c_char,
    *const c_char,
    *mut u8,
    *mut usize,
) -> c_int;

/// A library that was opened.
pub struct Foreign {
    role: ForeignRole,
    is_connected: bool,
    connect: Symbol<unsafe extern "C" fn(*const u8, usize) -> c_int>,
    prepare: Symbol<unsafe extern "C" fn(usize, usize) -> c_int>,
    send: Symbol<unsafe extern "C" fn() -> c_int>,
    receive: Symbol<unsafe extern "C" fn() -> i64>,
    settled: Symbol<unsafe extern "C" fn() -> c_int>,
    close: Symbol<unsafe extern "C" fn()>,
    error: Symbol<unsafe extern "C" fn() -> *const c_char>,
    /// Never unloaded: what it started may still run.
    _library: std::mem::ManuallyDrop<Library>,
}

impl Foreign {
    /// Loads it and opens it.
    ///
    /// # Errors
    /// It cannot be loaded, or its own.
    pub fn open(role: ForeignRole) -> Result<Self> {
        let what = || role.library.display().to_string();
        // SAFETY: built from `bench/peers`, whose objects do nothing when they are loaded; what they are linked with, people load.
        let library = unsafe { Library::open(Some(&role.library), RTLD_NOW | RTLD_GLOBAL) };
        let library = library.with_context(what)?;
        // SAFETY: of the types that `peer.h` declares.
        let (open, foreign) = unsafe {
            let open: Symbol<Open> = library.get(b"peer_open\0")?;
            let foreign = Self {
                is_connected: false,
                connect: library.get(b"peer_connect\0")?,
                prepare: library.get(b"peer_prepare\0")?,
                send: library.get(b"peer_send\0")?,
                receive: library.get(b"peer_receive\0")?,
                settled: library.get(b"peer_settled\0")?,
                close: library.get(b"peer_close\0")?,
                error: library.get(b"peer_error\0")?,
                _library: std::mem::ManuallyDrop::new(library),
                role,
            };
            (open, foreign)
        };
        let role = &foreign.role;
        let texts = [&role.device, &role.own, &role.provider].map(|text| CString::new(&**text));
        let [device, own, provider] = texts;
        let (device, own, provider) = (device?, own?, provider?);
        let mut address = vec![0; ADDRESS];
        let mut len = address.len();
        // SAFETY: texts that end with 0 and live during the call, and `len` bytes to write to.
        let opened = unsafe {
            open(
                c_int::from(role.side),
                device.as_ptr(),
                own.as_ptr(),
                provider.as_ptr(),
                address.as_mut_ptr(),
                &raw mut len,
            )
        };
        if opened != 0 {
            return Err(foreign.explain("cannot be opened"));
        }
        address.truncate(len);
        let path = foreign.address_of(role.side);
        // Whole, or not there.
        let draft = path.with_extension("draft");
        fs::write(&draft, &address).with_context(|| draft.display().to_string())?;
        fs::rename(&draft, &path).with_context(|| path.display().to_string())?;
        Ok(foreign)
    }

    fn address_of(&self, side: u8) -> PathBuf {
        self.role.meeting.join(format!("side-{side}"))
    }

    /// An error with what the library says.
    fn explain(&self, what: &str) -> anyhow::Error {
        // SAFETY: a text that ends with 0 and is not changed while we, its only thread, read it.
        let said = unsafe { CStr::from_ptr((self.error)()) };
        anyhow::anyhow!("{what}: {}", said.to_string_lossy())
    }

    fn connect(&mut self) -> Result<()> {
        let path = self.address_of(3 - self.role.side);
        let address = fs::read(&path).with_context(|| path.display().to_string())?;
        // SAFETY: `len` bytes that live during the call, which is all that it looks at them.
        match unsafe { (self.connect)(address.as_ptr(), address.len()) } {
            0 => self.is_connected = true,
            _ => return Err(self.explain("cannot be connected")),
        }
        Ok(())
    }
}

impl Ends for Foreign {
    fn prepare(&mut self, bytes: usize) -> Result<()> {
        if !self.is_connected {
            self.connect()?;
        }
        // SAFETY: opened and connected, and called by its only thread.
        match unsafe { (self.prepare)(bytes, window(bytes)) } {
            0 => Ok(()),
            _ => Err(self.explain("cannot be prepared")),
        }
    }

    fn send(&mut self, _end: usize, _bytes: usize) -> Result<bool> {
        // SAFETY: prepared for messages of this length.
        match unsafe { (self.send)() } {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(self.explain("cannot send")),
        }
    }

    fn receive(&mut self, _end: usize) -> Result<Option<Arrival>> {
        // SAFETY: prepared.
        match unsafe { (self.receive)() } {
            -1 => Ok(None),
            bytes => match usize::try_from(bytes) {
                Ok(bytes) => Ok(Some(Arrival { bytes, source: 0 })),
                Err(_) => Err(self.explain("cannot receive")),
            },
        }
    }

    fn pause(&mut self) {
        match self.role.yields {
            true => rustix::thread::sched_yield(),
            false => std::hint::spin_loop(),
        }
    }

    fn settled(&mut self) -> Result<bool> {
        // SAFETY: prepared.
        match unsafe { (self.settled)() } {
            0 => Ok(false),
            1 => Ok(true),
            _ => bail!(self.explain("does not settle")),
        }
    }
}

impl Drop for Foreign {
    fn drop(&mut self) {
        // SAFETY: opened, and not used after this.
        unsafe { (self.close)() }
    }
}
