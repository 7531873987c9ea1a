//! One engine: a poll loop over its sockets, its ports and the transport.

pub mod crossing;
