//! Ports of a node that is being drained: every send is refused with a reason that says so; what was accepted before, commands and
//! answers go their way.

use portolan_abi::event::{Certainty, Outcome, reason};
use portolan_transport::Endpoint;
use portolan_transport::ident::{Nanos, PortId};

use super::counters::EngineCounters;
use super::host::{EngineHost, Order};
use super::serve;

/// How a send ends that came too late.
const DRAINED: Outcome = Outcome {
    certainty: Certainty::NotDelivered,
    reason: reason::DRAINING,
};

/// As [`serve::serve_port`], of a node that is being drained.
#[inline(never)]
pub(super) fn serve_port(
    now: Nanos,
    number: u16,
    host: &mut EngineHost,
    endpoint: &mut Endpoint,
    counters: &mut EngineCounters,
) -> bool {
    let ledger = host.facts.ledger();
    let Some(port) = host.ports.get_mut(number) else {
        return false;
    };
    let provided = port.take_provided(ledger);
    for _ in 0..provided {
        counters.receive_tokens += 1;
        endpoint.buffer_provided(now, PortId(number));
    }
    serve::ask_those_turned_away(now, port, endpoint);
    let waiting = match port.fault() {
        None => port.sends_waiting(),
        Some(_) => 0,
    };
    for _ in 0..waiting {
        let Some(taken) = host.take_token(number) else {
            break;
        };
        counters.send_tokens += 1;
        match host.order(number, &taken, now) {
            Order::Send(send) => {
                counters.send_tokens_refused += 1;
                host.finish_locally(send.id, DRAINED);
            }
            order => serve::carry_out(now, order, host, endpoint, counters),
        }
        host.finish_token();
    }
    provided > 0 || waiting > 0
}
