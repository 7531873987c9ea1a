//! What clients ask for.

use portolan_abi::PORT_ABI_VERSION;
use portolan_abi::control::{ErrorCode, Request, Response};
use portolan_abi::port::{CloseReason, PortGeometry};

use super::Supervisor;
use super::audit;
use super::captures::Wanted;
use super::clients::Pending;
use super::poll::Timer;
use super::ports::{Opening, Phase};
use super::recovery::Cause;
use crate::engine_link::ToEngine;

fn error(code: ErrorCode, message: impl Into<String>) -> Response {
    Response::Error {
        code,
        message: message.into(),
    }
}

/// Names people give must not break lines of logs and messages.
fn printable(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(64).collect()
}

fn check_abi(abi: u32) -> Result<(), Response> {
    if abi == PORT_ABI_VERSION {
        return Ok(());
    }
    let message = format!(
        "the daemon speaks port ABI {PORT_ABI_VERSION}, the client {abi}; use the library of this version"
    );
    Err(error(ErrorCode::AbiMismatch, message))
}

impl Supervisor {
    /// A client's request.
    pub(super) fn on_request(&mut self, id: u64, request: Request) {
        self.statistics.requests += 1;
        let name = audit::name(&request);
        let answer = match request {
            Request::Attach { abi } => check_abi(abi).map(|()| self.this_node()),
            Request::OpenPort {
                abi,
                port,
                geometry,
            } => match check_abi(abi) {
                Ok(()) => return self.request_port(id, port, geometry),
                Err(refusal) => Err(refusal),
            },
            Request::ClosePort { port } => match self.request_close(id, port) {
                Ok(()) => return,
                Err(refusal) => Err(refusal),
            },
            Request::Resolve { node } => self.resolve(&node),
            Request::Status {} => Ok(self.document(self.status())),
            Request::Peers {} => return self.request_peers(id),
            Request::Ports {} => Ok(self.document(self.ports_document())),
            Request::Counters {} => Ok(self.document(self.counters())),
            Request::Events { run, after, wait } => {
                return self.request_events(id, run, after, wait);
            }
            Request::Fault { engine, kind } => self.fault(id, engine, &kind),
            Request::Capture {
                engine,
                snaplen,
                peer,
                buffer_bytes,
            } => {
                let wanted = Wanted {
                    engine,
                    snaplen,
                    peer,
                    buffer_bytes,
                };
                match self.request_capture(id, &wanted) {
                    Ok(()) => return,
                    Err(refusal) => Err(refusal),
                }
            }
            Request::Map {} => {
                let map = self.map();
                Ok(self.document(map))
            }
            Request::Drain { action } => self.request_drain(id, &action),
            Request::Upgrade { binary } => match self.request_upgrade(id, binary.as_deref()) {
                Ok(()) => return,
                Err(refusal) => Err(refusal),
            },
        };
        if let Err(refusal) = &answer {
            self.audit_refusal(id, name, refusal);
        }
        let (Ok(response) | Err(response)) = answer;
        self.finish(id, response, Vec::new());
    }

    fn document(&self, document: serde_json::Value) -> Response {
        Response::Document { document }
    }

    fn node(&self, id: u16, name: &str) -> Response {
        Response::Node {
            id,
            name: name.to_owned(),
            default_timeout_ms: self.config.default_timeout_ms,
        }
    }

    fn this_node(&self) -> Response {
        self.node(self.config.node, &self.config.name)
    }

    fn resolve(&self, node: &str) -> Result<Response, Response> {
        let number = node.parse::<u16>().ok();
        if number == Some(self.config.node) || node == self.config.name {
            return Ok(self.this_node());
        }
        let mut peers = self.routes.values();
        match peers.find(|peer| number == Some(peer.node) || node == peer.name) {
            Some(peer) => Ok(self.node(peer.node, &peer.name)),
            None => Err(error(
                ErrorCode::NotFound,
                format!(
                    "there is no node `{}`; `portolan peers` lists them",
                    printable(node)
                ),
            )),
        }
    }

    /// Opens a port for a client, which is answered when the engine has it.
    pub(super) fn request_port(&mut self, id: u64, port: Option<u16>, geometry: PortGeometry) {
        if let Some(refusal) = self.drain_refusal() {
            return self.finish(id, refusal, Vec::new());
        }
        match self.open_port(id, port, geometry) {
            Ok(Opening::Begun(port)) => {
                if let Some(client) = self.clients.get_mut(id) {
                    client.ports.insert(port);
                }
                self.wait_for(id, Pending::Open(port));
            }
            Ok(Opening::Done(port)) => self.answer_opened(id, port),
            Ok(Opening::HeldBack(until)) => {
                self.wait_for(id, Pending::HeldBack(port, geometry));
                self.poll.set_timer(until, Timer::HeldBack(id));
            }
            Ok(Opening::Wait(port)) => {
                let waits_already = self
                    .clients
                    .get(id)
                    .is_some_and(|client| client.pending.is_some());
                // Waiting again after another was faster does not extend the deadline.
                if !waits_already {
                    self.wait_for(id, Pending::Free(port, geometry));
                }
            }
            Err(refusal) => {
                self.audit_refusal(id, "open_port", &refusal);
                self.finish(id, refusal, Vec::new());
            }
        }
    }

    fn request_close(&mut self, id: u64, port: u16) -> Result<(), Response> {
        let owned = self
            .clients
            .get(id)
            .is_some_and(|client| client.ports.contains(&port));
        let phase = self.ports.get(port).map(|p| p.phase);
        if owned && phase == Some(Phase::Closing) {
            // A predecessor began with it.
            self.wait_for(id, Pending::Close(port));
            return Ok(());
        }
        if !owned || phase != Some(Phase::Open) {
            let message = format!("port {port} is not open on this connection");
            return Err(error(ErrorCode::NotFound, message));
        }
        // First, as the port may be closed at once.
        self.wait_for(id, Pending::Close(port));
        self.close_port(port, CloseReason::ByOwner);
        Ok(())
    }

    fn fault(&mut self, id: u64, engine: u16, kind: &str) -> Result<Response, Response> {
        if self.clients.get(id).is_none_or(|c| c.who.uid != 0) {
            let message = "only root may inject faults";
            return Err(error(ErrorCode::Denied, message));
        }
        let index = usize::from(engine);
        if self.engines.get(index).is_none_or(|e| !e.has_process()) {
            let message =
                format!("there is no engine {engine} running; `portolan status` lists them");
            return Err(error(ErrorCode::NotFound, message));
        }
        // Not twice.
        self.take_request(id);
        match kind {
            "kill" => self.fence(
                index,
                Cause::Fault,
                "is the victim of `portolan fault kill`",
            ),
            "hang" => self.tell_active(index, &ToEngine::Hang, Vec::new()),
            "reset" => self.reset_queue(index, Cause::Reset, "is reset by `portolan fault reset`"),
            other => {
                let message = format!(
                    "there is no fault `{}`; use kill, hang or reset",
                    printable(other)
                );
                return Err(error(ErrorCode::BadRequest, message));
            }
        }
        Ok(Response::Done)
    }
}
