//! What travels in a frame: one [`FrameHeader`], then chunk headers, then the chunks' payloads, in order.
//!
//! The layout is `docs/spec/wire.md`. [`parse()`] checks everything it can before anything is believed: after it returned `Ok` no
//! accessor panics and every chunk is well formed. [`FrameWriter`] is its inverse. Payload is checked by whoever copies it.

pub mod bare;
pub mod chunk;
mod codec;
pub mod error;
mod fields;
pub mod frame;
mod lone;
mod parse;
mod plain;
mod seal;
mod writer;

pub(crate) use bare::BareHeaders;
pub use chunk::{Chunk, Payload, Rows, StreamRef};
pub use error::WireError;
pub use frame::FrameHeader;
pub(crate) use frame::{Ends, Words};
pub(crate) use lone::{LoneAnswer, LoneMessage};
pub(crate) use parse::Short;
pub use parse::{Chunks, Frame, Parts, PayloadView, parse};
pub(crate) use plain::{DATA_LEN, Form, eager_header_len};
pub use portolan_crc::{crc32c, crc32c_combine};
pub use seal::{header_area_len, reseal};
pub use writer::{FrameWriter, Full, HEADER_AREA_MAX, MAX_CHUNKS, PayloadWriter};

#[cfg(test)]
pub(crate) mod tests;
