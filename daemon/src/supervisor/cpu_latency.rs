//! How long idle processors may take to wake, bounded while the daemon runs (`node.cpu_latency_us`).
//!
//! The kernel keeps a bound for as long as who wrote it has the device open (kernel/power/qos.c, `cpu_latency_qos_fops`). So ours ends with the
//! supervisor, however that ends, and begins again with its successor. It concerns every processor of the machine, and of several bounds
//! the least counts.
//!
//! A node works without it: that it is not to be had is said, and is no error.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;

const DEVICE: &str = "/dev/cpu_dma_latency";

/// The bound that we hold, if any.
#[derive(Debug, Default)]
pub(super) struct CpuLatency(Option<Held>);

#[derive(Debug)]
struct Held {
    us: u32,
    /// The bound itself, for as long as it is open.
    _device: File,
}

impl CpuLatency {
    /// Holds so many microseconds from now on, or nothing.
    pub fn bounded(wanted: Option<u32>) -> Self {
        let mut held = Self::default();
        held.bound(wanted);
        held
    }

    /// The same, in place of what was held.
    pub fn bound(&mut self, wanted: Option<u32>) {
        if wanted == self.us() {
            return;
        }
        let Some(us) = wanted else {
            self.0 = None;
            tracing::info!("idle processors sleep as deeply as the machine lets them");
            return;
        };
        // The old one is let go afterwards: in between both count.
        match hold(Path::new(DEVICE), us) {
            Ok(device) => {
                self.0 = Some(Held {
                    us,
                    _device: device,
                });
                tracing::info!(us, "idle processors wake within {us} us");
            }
            Err(error) => {
                self.0 = None;
                let remedy = match error.kind() {
                    io::ErrorKind::NotFound => {
                        "is not there: this kernel has no such bounds, or the service may not see it (docs/nic.md, Cores and interrupts)"
                    }
                    io::ErrorKind::PermissionDenied => {
                        "may not be opened: the service needs a drop-in for that (docs/nic.md, Cores and interrupts)"
                    }
                    _ => "does not take it",
                };
                tracing::warn!(%error, "node.cpu_latency_us is without effect: {DEVICE} {remedy}");
            }
        }
    }

    /// What is held.
    pub fn us(&self) -> Option<u32> {
        self.0.as_ref().map(|held| held.us)
    }
}

fn hold(device: &Path, us: u32) -> io::Result<File> {
    let number = i32::try_from(us).map_err(|_| io::ErrorKind::InvalidInput)?;
    let mut file = OpenOptions::new().write(true).open(device)?;
    // Four bytes are a number as it lies in memory; anything else would be read as text.
    file.write_all(&number.to_ne_bytes())?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    // Expect: a bound is four bytes as the kernel reads them; a number that it has no room for is an error, and so is a device that is not there.
    #[test]
    fn a_bound_is_a_number_in_four_bytes() {
        let file = tempfile::NamedTempFile::new().unwrap();
        drop(hold(file.path(), 20).unwrap());
        assert_eq!(std::fs::read(file.path()).unwrap(), 20i32.to_ne_bytes());
        let too_long = hold(file.path(), u32::MAX).unwrap_err();
        assert_eq!(too_long.kind(), io::ErrorKind::InvalidInput);
        let nowhere = hold(Path::new("/nowhere/at/all"), 20).unwrap_err();
        assert_eq!(nowhere.kind(), io::ErrorKind::NotFound);
    }
}
