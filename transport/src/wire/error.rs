//! Why a frame was dropped before anything in it was believed, wire.md §7.

use core::fmt;

macro_rules! reasons {
    ($($(#[doc = $doc:literal])+ $reason:ident = $name:literal, $help:literal;)+) => {
        /// Why a frame is not one; each is counted by its [`WireError::index`].
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u8)]
        pub enum WireError { $($(#[doc = $doc])+ $reason,)+ }

        impl WireError {
            /// Every reason, in the stable order of [`WireError::index`].
            pub const ALL: &[WireError] = &[$(WireError::$reason),+];

            /// The stable name counters and logs use.
            pub const fn name(self) -> &'static str {
                match self { $(WireError::$reason => $name,)+ }
            }

            /// One sentence for people.
            pub const fn help(self) -> &'static str {
                match self { $(WireError::$reason => $help,)+ }
            }
        }
    };
}

reasons! {
    /// Fewer bytes in the first segment than a frame header.
    Truncated = "truncated", "the frame is shorter than its header";
    /// More bytes than any frame may have.
    TooLong = "too_long", "the frame is longer than 65535 bytes";
    /// The magic number is not ours.
    Magic = "magic", "the frame does not start with our magic number";
    /// A version this build does not speak.
    Version = "version", "the frame's wire version is not one this build speaks";
    /// `header_len` is below the frame header's own length or beyond the first segment.
    HeaderLength = "header_length", "the header length is impossible or leaves the first buffer";
    /// The header CRC does not match.
    HeaderCrc = "header_crc", "the checksum over frame and chunk headers does not match";
    /// A chunk's length is below 4, no multiple of 4 or leaves the header area.
    ChunkLength = "chunk_length", "a chunk header's length is impossible";
    /// The chunks do not fill the header area exactly.
    ChunkCount = "chunk_count", "the chunk count does not match the header length";
    /// A chunk is too short for its kind, or a field has a value its kind forbids.
    ChunkField = "chunk_field", "a chunk header is too short for its kind or holds an impossible value";
    /// The payloads want more bytes than the frame has.
    PayloadLength = "payload_length", "the payloads are longer than the frame";
    /// Bytes follow the payloads that neither padding nor a path probe explains.
    Trailing = "trailing", "bytes follow the last payload";
}

impl WireError {
    /// Position in [`WireError::ALL`].
    pub const fn index(self) -> usize {
        self as usize
    }
}

impl fmt::Display for WireError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.help())
    }
}

impl core::error::Error for WireError {}
