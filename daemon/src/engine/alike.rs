//! Sends to one stream behind each other in the ring, taken in one go.
//!
//! Problem: nearly every send follows another that asks for the same, and each was asked again which port it is of, whether it is a send at all and
//! makes sense, which stream it belongs to, whether its peer is up, and where all of that is written down: 400 instructions, half of what a short
//! message of a burst takes from its token to its frame.
//!
//! Idea: once a send was accepted the general way, those behind it that say the same in the same words ([`Alike`]) bring only what is theirs:
//! slot, generation, length, place and tag. Each is named in the ledger while it is worked on, and made durable by [`commit::accept_one`]; that
//! their numbers are used and their ring entries taken is said once, at the end. Whoever dies in between leaves tagged slots, as with a single
//! send. The first that is anything else stays in the ring, unread as far as anybody knows, for the general way.
//!
//! Rejected: to read all tokens first and accept them then (a token that kills an engine would not be the one that the ledger names).
//!
//! Invariants: a slot that is tagged is never taken; a token that the last engine died of never goes this way; not more than [`AT_ONCE`] tokens
//! are untold at once.

use std::sync::atomic::Ordering;

use portolan_abi::ledger::working_token;
use portolan_abi::token::{Alike, SendToken};
use portolan_transport::Endpoint;
use portolan_transport::host::SendRequest;

use super::commit;
use super::host::{EngineHost, send_id};

/// Tokens that are accepted and not told. A successor of this build passes over as many as the ring holds
/// ([`Port::skip_accepted`](super::ports::Port::skip_accepted)), one of the builds before it over 72.
const AT_ONCE: u32 = 64;

/// After `token` was accepted as `send`, accepts at most `most` of those behind it. How many it took.
#[inline]
pub(super) fn take_alike(
    token: &SendToken,
    send: &SendRequest,
    most: u32,
    host: &mut EngineHost,
    endpoint: &mut Endpoint,
) -> u32 {
    #[cfg(test)]
    if host.one_by_one {
        return 0;
    }
    let ledger = host.facts.ledger();
    let number = send.id.port.0;
    let (Some(alike), Some(mut more)) = (Alike::to(token), endpoint.more(send)) else {
        return 0;
    };
    let (now, suspect) = (host.now, host.suspect());
    let Some(port) = host.ports.get_mut(number) else {
        return 0;
    };
    let (record, epoch) = more.record();
    let (facts, working) = (ledger.sends(number), &ledger.header().working_token);
    let (mut taken, mut last) = (0, None);
    while taken < most.min(AT_ONCE)
        && let Some(next) = more.number()
        && let Some((slot, token, fact)) = port.next_alike(&alike, facts)
    {
        let word = working_token(number, slot, token.generation);
        if suspect.is(word) {
            break;
        }
        if !cfg!(feature = "volatile") {
            working.store(word, Ordering::Release);
        }
        let sending = port.take_alike(slot, &token, now);
        let id = send_id(number, slot, token.generation);
        let send = more.next(id, token.len, token.tag);
        commit::accept_one(fact, &sending, &send, record, next);
        more.push(&send);
        (taken, last) = (taken + 1, Some(next));
    }
    if let Some(last) = last {
        commit::accepted_up_to(ledger, port, record, epoch, last);
    }
    #[cfg(test)]
    {
        host.in_one_go += u64::from(taken);
    }
    taken
}
