//! A message is committed with the length and the bytes that were sent.

use portolan_transport::ident::Nanos;

use super::{Check, Verdict};
use crate::harness::book::{Message, Route, first_difference};

/// The checker.
pub struct Content;

impl Check for Content {
    fn name(&self) -> &'static str {
        "content"
    }

    fn committed(
        &mut self,
        _now: Nanos,
        id: u64,
        message: Option<&Message>,
        route: Route,
        bytes: &[u8],
    ) -> Verdict {
        let Some(message) = message else {
            return Ok(()); // `exactly_once` speaks of it
        };
        if message.delivered_len() as usize != bytes.len() {
            return Err(format!(
                "message {id} has {} bytes on {route:?}: {message:?}",
                bytes.len()
            ));
        }
        match first_difference(id, bytes) {
            Some(at) => Err(format!(
                "message {id}: byte {at} of {} is wrong on {route:?}",
                bytes.len()
            )),
            None => Ok(()),
        }
    }
}
