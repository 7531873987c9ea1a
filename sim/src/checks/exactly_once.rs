//! A message is committed at most once, and only where it was sent.

use portolan_transport::ident::Nanos;

use super::{Check, Verdict};
use crate::harness::book::{Message, Route};

/// The checker. The book itself counts commits.
pub struct ExactlyOnce;

impl Check for ExactlyOnce {
    fn name(&self) -> &'static str {
        "exactly once"
    }

    fn committed(
        &mut self,
        _now: Nanos,
        id: u64,
        message: Option<&Message>,
        route: Route,
        _bytes: &[u8],
    ) -> Verdict {
        let Some(message) = message else {
            return Err(format!("a message nobody sent: tag {id:#x} on {route:?}"));
        };
        if message.route != route {
            return Err(format!("message {id} arrived on {route:?}: {message:?}"));
        }
        if message.commits != 0 {
            return Err(format!("message {id} is delivered twice: {message:?}"));
        }
        Ok(())
    }
}
