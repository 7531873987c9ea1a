//! Every frame that comes into the wire, in a file that Wireshark reads: before anything happens to it, so with what is lost after.
//!
//! The file is pcap's oldest format with nanoseconds. A tap cannot do this: frames that AF_XDP takes or sends are in no socket buffer,
//! and packet sockets see nothing else.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};

use crate::umem::{Frame, Memory};

const MAGIC_NANOSECONDS: u32 = 0xa1b2_3c4d;
const LONGEST: u32 = 262_144;
const ETHERNET: u32 = 1;

/// A file that is being written.
#[derive(Debug)]
pub struct Recorder(BufWriter<File>);

impl Recorder {
    /// Begins a file, or begins it anew.
    pub fn begin(path: &Path) -> Result<Self> {
        let file = File::create(path).with_context(|| path.display().to_string())?;
        let mut out = BufWriter::new(file);
        out.write_all(&MAGIC_NANOSECONDS.to_ne_bytes())?;
        out.write_all(&2u16.to_ne_bytes())?;
        out.write_all(&4u16.to_ne_bytes())?;
        for word in [0, 0, LONGEST, ETHERNET] {
            out.write_all(&word.to_ne_bytes())?;
        }
        Ok(Self(out))
    }

    /// Adds a frame.
    pub fn frame(&mut self, memory: &Memory, frame: &Frame) -> Result<()> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH)?;
        let bytes = frame.bytes() as u32;
        for word in [now.as_secs() as u32, now.subsec_nanos(), bytes, bytes] {
            self.0.write_all(&word.to_ne_bytes())?;
        }
        for piece in memory.pieces(frame) {
            self.0.write_all(piece)?;
        }
        Ok(())
    }

    /// What came so far is in the file.
    pub fn flush(&mut self) -> Result<()> {
        self.0.flush().context("recording")
    }
}
