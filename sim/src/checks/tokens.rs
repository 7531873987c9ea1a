//! A receive token is free, claimed by the engine, or the application's again: never two of these, never none.

use std::collections::BTreeMap;

use portolan_transport::ident::{BufferId, NodeId, PortId, Priority};

use super::{Check, TokenStep, Verdict};
use crate::harness::book::Message;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Free,
    Claimed,
}

/// The checker: where each token is that was provided and not delivered yet.
#[derive(Default)]
pub struct Tokens {
    places: BTreeMap<(NodeId, PortId, u32), Place>,
}

impl Check for Tokens {
    fn name(&self) -> &'static str {
        "tokens"
    }

    fn token(
        &mut self,
        node: NodeId,
        token: BufferId,
        _priority: Priority,
        step: TokenStep,
    ) -> Verdict {
        let name = (node, token.port, token.slot);
        let (before, after) = match step {
            TokenStep::Provided => (None, Some(Place::Free)),
            TokenStep::Claimed => (Some(Place::Free), Some(Place::Claimed)),
            TokenStep::Released => (Some(Place::Claimed), Some(Place::Free)),
            TokenStep::Withdrawn => (Some(Place::Claimed), None),
            TokenStep::Delivered => (Some(Place::Claimed), None),
        };
        let found = match after {
            Some(place) => self.places.insert(name, place),
            None => self.places.remove(&name),
        };
        if found != before {
            return Err(format!(
                "node {}, port {}, token {}: {step:?} while it was {found:?}",
                node.0, token.port.0, token.slot
            ));
        }
        Ok(())
    }

    fn port_closed(&mut self, node: NodeId, port: PortId) -> Verdict {
        self.places
            .retain(|name, place| (name.0, name.1) != (node, port) || *place == Place::Claimed);
        Ok(())
    }

    fn node_restarted(&mut self, node: NodeId) {
        self.places.retain(|name, _| name.0 != node);
    }

    fn end_of_run(&mut self, _messages: &[Message]) -> Verdict {
        match self
            .places
            .iter()
            .find(|(_, place)| **place == Place::Claimed)
        {
            Some(((node, port, slot), _)) => Err(format!(
                "node {}, port {}, token {slot} is claimed for nothing",
                node.0, port.0
            )),
            None => Ok(()),
        }
    }
}
