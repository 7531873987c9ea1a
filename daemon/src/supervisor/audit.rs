//! Refusals, for the record: who was told no, to what, and why.
//!
//! One event of kind `attach_refused` per refusal, with the fields `uid`, `gid`, `pid`, `request` and `code`. Who is refused may be so on
//! purpose and as often as he likes, so each user gets [`BURST`] events and then one per [`EVERY`]; his next one tells how many were left out.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use portolan_abi::control::{ErrorCode, Request, Response};

use super::Supervisor;
use super::config::Credentials;
use super::events::{Event, Kind};

/// Events at once.
const BURST: u32 = 10;
/// One more after this.
const EVERY: Duration = Duration::from_secs(1);
/// Users kept apart; more share one allowance.
const MOST_USERS: usize = 256;
/// Nobody's uid (POSIX: `(uid_t) -1`), for those who share.
const SHARED: u32 = u32::MAX;

/// How much of a user may still be recorded.
#[derive(Debug)]
struct Allowance {
    left: u32,
    /// When `left` was true.
    at: Instant,
    left_out: u64,
}

impl Allowance {
    fn full(now: Instant) -> Self {
        Self {
            left: BURST,
            at: now,
            left_out: 0,
        }
    }

    /// What time gives back.
    fn renew(&mut self, now: Instant) {
        let periods = now.saturating_duration_since(self.at).as_nanos() / EVERY.as_nanos();
        let periods = u32::try_from(periods).unwrap_or(u32::MAX);
        if periods > 0 {
            self.left = self.left.saturating_add(periods).min(BURST);
            self.at = now;
        }
    }

    fn is_idle(&self) -> bool {
        self.left == BURST && self.left_out == 0
    }
}

/// Of whom how much may be recorded.
#[derive(Debug, Default)]
pub(super) struct Audit {
    users: HashMap<u32, Allowance>,
}

impl Audit {
    /// May an event be recorded? Then how many were left out before it.
    fn allows(&mut self, uid: u32, now: Instant) -> Option<u64> {
        let mut user = uid;
        if !self.users.contains_key(&uid) && self.users.len() >= MOST_USERS {
            self.users.retain(|_, allowance| {
                allowance.renew(now);
                !allowance.is_idle()
            });
            if self.users.len() >= MOST_USERS {
                user = SHARED;
            }
        }
        let full = || Allowance::full(now);
        let allowance = self.users.entry(user).or_insert_with(full);
        allowance.renew(now);
        match allowance.left.checked_sub(1) {
            Some(left) => {
                allowance.left = left;
                Some(std::mem::take(&mut allowance.left_out))
            }
            None => {
                allowance.left_out += 1;
                None
            }
        }
    }

    /// The event of a refusal, unless it does not matter or this user has had enough of them.
    fn event(&mut self, who: &Credentials, request: &str, refusal: &Response) -> Option<Event> {
        let Response::Error { code, message } = refusal else {
            return None;
        };
        if !matters(*code) {
            return None;
        }
        let left_out = self.allows(who.uid, Instant::now())?;
        let event = Event::new(Kind::AttachRefused, message)
            .field("uid", who.uid)
            .field("gid", who.gids.first().copied())
            .field("pid", who.pid)
            .field("request", request)
            .field("code", format!("{code:?}"));
        Some(match left_out {
            0 => event,
            _ => event.field("left_out", left_out),
        })
    }
}

/// Is it about what somebody may do, and not about what there is?
fn matters(code: ErrorCode) -> bool {
    match code {
        ErrorCode::Denied | ErrorCode::Limit | ErrorCode::AbiMismatch | ErrorCode::BadRequest => {
            true
        }
        ErrorCode::PortInUse
        | ErrorCode::NotFound
        | ErrorCode::Unavailable
        | ErrorCode::Internal => false,
    }
}

/// What a request is called in the record.
pub(super) fn name(request: &Request) -> &'static str {
    match request {
        Request::Attach { .. } => "attach",
        Request::OpenPort { .. } => "open_port",
        Request::ClosePort { .. } => "close_port",
        Request::Fault { .. } => "fault",
        Request::Capture { .. } => "capture",
        Request::Upgrade { .. } => "upgrade",
        _ => "report",
    }
}

impl Supervisor {
    /// Records that somebody is refused something.
    pub(super) fn audit(&mut self, who: &Credentials, request: &str, refusal: &Response) {
        if let Some(event) = self.audit.event(who, request, refusal) {
            self.events.record(event);
        }
    }

    /// A client's request is refused.
    pub(super) fn audit_refusal(&mut self, id: u64, request: &str, refusal: &Response) {
        if let Some(client) = self.clients.get(id)
            && let Some(event) = self.audit.event(&client.who, request, refusal)
        {
            self.events.record(event);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_is_refused_for_ever_is_not_written_down_for_ever() {
        let mut audit = Audit::default();
        let start = Instant::now();
        for _ in 0..BURST {
            assert_eq!(audit.allows(1000, start), Some(0));
        }
        for _ in 0..1000 {
            assert_eq!(audit.allows(1000, start), None);
        }
        // Somebody else is.
        assert_eq!(audit.allows(1001, start), Some(0));
        // Later once more, with the number of those left out.
        let later = start + EVERY;
        assert_eq!(audit.allows(1000, later), Some(1000));
        assert_eq!(audit.allows(1000, later), None);
        // After a long while as before.
        let much_later = later + EVERY * 1000;
        assert_eq!(audit.allows(1000, much_later), Some(1));
        for _ in 1..BURST {
            assert_eq!(audit.allows(1000, much_later), Some(0));
        }
        assert_eq!(audit.allows(1000, much_later), None);
    }

    #[test]
    fn memory_is_bounded_whoever_comes() {
        let mut audit = Audit::default();
        let start = Instant::now();
        for uid in 0..10_000 {
            audit.allows(uid, start);
        }
        assert!(audit.users.len() <= MOST_USERS + 1);
        // The idle are forgotten.
        let later = start + EVERY * 10;
        assert_eq!(audit.allows(20_000, later), Some(0));
        assert!(audit.users.len() <= 2, "{}", audit.users.len());
    }
}
