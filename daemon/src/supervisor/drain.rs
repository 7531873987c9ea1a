//! Draining a node: no new ports, no new sends; what is outstanding ends as it would have; then the node can be stopped and nobody loses
//! anything. What others send to it is taken until it stops: only they can stop that.
//!
//! Outstanding is what the ledgers hold: an accepted send has a tag there until its end was told to the application. So neither an
//! engine's death nor ours changes what is counted.

use std::sync::atomic::Ordering;

use portolan_abi::control::{ErrorCode, Response};
use serde_json::{Value, json};

use super::Supervisor;
use super::ports::Phase;
use crate::engine_link::ToEngine;

impl Supervisor {
    /// Begins, or with `undo` ends, draining; asked again, says how far it is.
    pub(super) fn request_drain(&mut self, id: u64, action: &str) -> Result<Response, Response> {
        let refuse = |code, message: &str| {
            Err(Response::Error {
                code,
                message: message.to_owned(),
            })
        };
        let on = match action {
            "begin" => true,
            "end" => false,
            "look" => return Ok(self.drained()),
            _ => return refuse(ErrorCode::BadRequest, "drain: use begin, end or look"),
        };
        if self
            .clients
            .get(id)
            .is_none_or(|client| client.who.uid != 0)
        {
            return refuse(ErrorCode::Denied, "only root may drain a node");
        }
        if on != self.draining {
            self.draining = on;
            tracing::warn!(
                "{}",
                if on {
                    "the node is being drained: no new ports, no new sends"
                } else {
                    "the node is drained no more"
                }
            );
            self.store_notes();
            for index in 0..self.engines.len() {
                self.tell(index, &ToEngine::Drain { on }, Vec::new());
            }
        }
        Ok(self.drained())
    }

    /// Why no port is opened now, if so.
    pub(super) fn drain_refusal(&self) -> Option<Response> {
        self.draining.then(|| Response::Error {
            code: ErrorCode::Unavailable,
            message: "the node is being drained: no new ports (`portolan drain --undo` ends it)"
                .to_owned(),
        })
    }

    fn drained(&self) -> Response {
        let mut ports: Vec<Value> = Vec::new();
        let mut outstanding = 0;
        for (number, port) in self.ports.iter().filter(|(_, p)| p.phase != Phase::Free) {
            let index = self.config.engine_of(number);
            let Some(engine) = self.engines.get(index) else {
                continue;
            };
            let sends = engine.memory.ledger.ledger().sends(number);
            let open = sends
                .iter()
                .filter(|send| send.tag.load(Ordering::Acquire) != 0);
            let open = open.count();
            outstanding += open;
            if open > 0 {
                ports.push(json!({
                    "port": number,
                    "outstanding": open,
                    "owner_pid": port.owner_pid,
                    "owner_uid": port.owner_uid,
                }));
            }
        }
        let document = json!({
            "draining": self.draining,
            "outstanding": outstanding,
            "safe_to_stop": self.draining && outstanding == 0,
            "ports": ports,
        });
        Response::Document { document }
    }
}
