//! Tests on fake rings: no kernel, no privilege.

mod deaths;
mod dialogues;
