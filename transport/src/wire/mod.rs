//! What travels in a frame: one [`FrameHeader`], then chunk headers, then the chunks' payloads, in order.
//!
//! The layout is `docs/spec/wire.md`.

pub mod chunk;
pub mod frame;

pub use chunk::{Chunk, Payload, StreamRef};
pub use frame::FrameHeader;
