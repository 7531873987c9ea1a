//! What this kernel can do for us, by its version.

/// A kernel's version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct KernelVersion(pub u32, pub u32);

/// How much works.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Support {
    /// Everything.
    Full,
    /// No jumbo frames, and an engine's socket cannot be taken over.
    Degraded,
    /// Nothing.
    TooOld,
}

/// Jumbo frames in several buffers (6.6), after mapping the rings of a bound socket (6.4).
const FULL: KernelVersion = KernelVersion(6, 6);
const OLDEST: KernelVersion = KernelVersion(5, 15);
/// Longest MTU without several buffers: a page less the kernel's headroom and the Ethernet header.
const SINGLE_BUFFER_MTU: u16 = 3840 - 14;

impl KernelVersion {
    /// The running kernel's.
    pub fn running() -> Option<Self> {
        let name = rustix::system::uname();
        Self::parse(&name.release().to_string_lossy())
    }

    /// Of a release, like `6.18.0-amd64`.
    pub fn parse(release: &str) -> Option<Self> {
        let mut numbers = release.split(|c: char| !c.is_ascii_digit());
        let major = numbers.next()?.parse().ok()?;
        Some(Self(major, numbers.next()?.parse().ok()?))
    }

    /// What works.
    pub fn support(self) -> Support {
        if self >= FULL {
            Support::Full
        } else if self >= OLDEST {
            Support::Degraded
        } else {
            Support::TooOld
        }
    }
}

impl Support {
    /// One line for the log or as an error.
    pub fn describe(self) -> &'static str {
        match self {
            Self::Full => "full support (kernel 6.6 or newer)",
            Self::Degraded => {
                "degraded support (kernel older than 6.6): no frames above 3840 bytes, and an engine that dies may not be replaced"
            }
            Self::TooOld => {
                "kernel older than 5.15: AF_XDP as it is needed is not there; use a newer kernel"
            }
        }
    }

    /// The longest MTU we can use.
    pub fn max_mtu(self) -> u16 {
        match self {
            Self::Full => crate::engine_link::MAX_MTU,
            Self::Degraded | Self::TooOld => SINGLE_BUFFER_MTU,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn support_by_release() {
        for (release, support) in [
            ("6.18.44-fc-v657", Support::Full),
            ("6.6.0", Support::Full),
            ("6.5.13-generic", Support::Degraded),
            ("5.15.0-91", Support::Degraded),
            ("5.14.21", Support::TooOld),
            ("10.0", Support::Full),
        ] {
            let version = KernelVersion::parse(release).unwrap();
            assert_eq!(version.support(), support, "{release}");
        }
        assert_eq!(KernelVersion::parse("six"), None);
    }
}
