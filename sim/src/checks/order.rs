//! Messages of a stream are committed in the order they were sent.
//!
//! A policy with order of arrival commits a message when it is whole, even while an earlier long one is under way. First chunks
//! still come in number order, and the durable bitmap ahead of the base holds [`AHEAD`] numbers, so that is how many may overtake.

use std::collections::BTreeMap;

use portolan_transport::ident::Nanos;

use super::{Check, Verdict};
use crate::harness::book::{Message, Route};

/// Most messages that may overtake one under order of arrival.
const AHEAD: usize = 16;

/// The checker.
#[derive(Default)]
pub struct Order {
    /// Messages are committed as they arrive.
    arrival: bool,
    /// Per stream, the newest commits, ascending; only the newest one without `arrival`.
    newest: BTreeMap<Route, Vec<u64>>,
}

impl Order {
    /// For policies with order of arrival.
    pub fn of_arrival() -> Self {
        Self {
            arrival: true,
            ..Self::default()
        }
    }
}

impl Check for Order {
    fn name(&self) -> &'static str {
        "order"
    }

    fn committed(
        &mut self,
        _now: Nanos,
        id: u64,
        _message: Option<&Message>,
        route: Route,
        _bytes: &[u8],
    ) -> Verdict {
        let newest = self.newest.entry(route).or_default();
        let behind = newest.partition_point(|other| *other < id);
        let overtakers = newest.len() - behind;
        let allowed = if self.arrival { AHEAD } else { 0 };
        if overtakers > allowed {
            return Err(format!(
                "message {id} came after {:?} on {route:?}",
                &newest[behind..]
            ));
        }
        newest.insert(behind, id);
        if newest.len() > 2 * allowed + 1 {
            newest.remove(0);
        }
        Ok(())
    }
}
