//! `[[quota]]`: what one user may have at the same time, so that nobody can take everything.
//!
//! Without a word in the configuration a user may have half of each total of `[limits]`, rounded up; root, who could change the
//! configuration, has only the totals. A rule for `"any"` says what everybody but root may have; a rule for one user changes that for him.
//! What a rule does not mention is as without it.

use std::collections::HashMap;
use std::fmt;

use toml::Spanned;

use super::Limits;
use super::acl::Subject;
use super::check::subject;
use super::checker::Checker;
use super::file;
use crate::supervisor::surroundings::Surroundings;

/// What users share out among themselves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resource {
    /// Ports that are not free.
    Ports,
    /// Connections on the socket.
    Connections,
    /// Send tokens of all ports.
    SendTokens,
    /// Receive tokens of all ports.
    ReceiveTokens,
    /// Bytes of the arenas of all ports.
    ArenaBytes,
}

impl Resource {
    /// All of them, in the order of [`Amounts`].
    pub const ALL: [Self; 5] = [
        Self::Ports,
        Self::Connections,
        Self::SendTokens,
        Self::ReceiveTokens,
        Self::ArenaBytes,
    ];

    /// Its key in the configuration.
    pub fn key(self) -> &'static str {
        match self {
            Self::Ports => "ports",
            Self::Connections => "connections",
            Self::SendTokens => "send_tokens",
            Self::ReceiveTokens => "receive_tokens",
            Self::ArenaBytes => "arena_bytes",
        }
    }

    /// As people call it.
    fn name(self) -> &'static str {
        match self {
            Self::Ports => "ports",
            Self::Connections => "connections",
            Self::SendTokens => "send tokens",
            Self::ReceiveTokens => "receive tokens",
            Self::ArenaBytes => "bytes of arena",
        }
    }
}

/// So much of each resource: what a user has, wants, or may have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Amounts([u64; Resource::ALL.len()]);

impl Amounts {
    /// No bound on anything.
    const UNBOUNDED: Self = Self([u64::MAX; Resource::ALL.len()]);

    /// Of this resource.
    pub fn get(&self, resource: Resource) -> u64 {
        self.0[resource as usize]
    }

    /// The same with so much of this resource.
    #[must_use]
    pub fn with(mut self, resource: Resource, amount: u64) -> Self {
        self.0[resource as usize] = amount;
        self
    }

    /// Both together.
    #[must_use]
    pub fn plus(mut self, more: &Self) -> Self {
        for (mine, theirs) in self.0.iter_mut().zip(more.0) {
            *mine = mine.saturating_add(theirs);
        }
        self
    }
}

/// A quota that a request would exceed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exceeded {
    /// The user.
    pub uid: u32,
    /// Of what.
    pub resource: Resource,
    /// What the user has.
    pub used: u64,
    /// What was asked for.
    pub wanted: u64,
    /// The quota.
    pub most: u64,
    /// The rule to change.
    named: bool,
}

impl fmt::Display for Exceeded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            uid,
            resource,
            used,
            wanted,
            most,
            named,
        } = self;
        let (name, key) = (resource.name(), resource.key());
        write!(
            f,
            "quota: uid {uid} has {used} of its {most} {name} and asks for {wanted} more; give some back, or raise `{key}` of "
        )?;
        if *named {
            write!(f, "[[quota]] uid = {uid}")?;
        } else {
            f.write_str("[[quota]] uid = \"any\"")?;
        }
        f.write_str(" in the daemon's configuration")
    }
}

/// What each user may have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Quotas {
    any: Amounts,
    named: HashMap<u32, Amounts>,
}

impl Quotas {
    /// What a user may have.
    pub fn of(&self, uid: u32) -> Amounts {
        match self.named.get(&uid) {
            Some(amounts) => *amounts,
            None if uid == 0 => Amounts::UNBOUNDED,
            None => self.any,
        }
    }

    /// May a user that has `used` have `wanted` as well?
    ///
    /// # Errors
    /// The first quota that would be exceeded.
    pub fn check(&self, uid: u32, used: &Amounts, wanted: &Amounts) -> Result<(), Exceeded> {
        let most = self.of(uid);
        let exceeds = |resource: &Resource| {
            let sum = used.get(*resource).saturating_add(wanted.get(*resource));
            wanted.get(*resource) > 0 && sum > most.get(*resource)
        };
        match Resource::ALL.into_iter().find(exceeds) {
            None => Ok(()),
            Some(resource) => Err(Exceeded {
                uid,
                resource,
                used: used.get(resource),
                wanted: wanted.get(resource),
                most: most.get(resource),
                named: self.named.contains_key(&uid),
            }),
        }
    }
}

/// What there is of each resource altogether.
fn totals(limits: &Limits) -> Amounts {
    let ports = u64::from(limits.ports);
    Amounts::default()
        .with(Resource::Ports, ports)
        .with(Resource::Connections, limits.clients as u64)
        .with(
            Resource::SendTokens,
            ports * u64::from(portolan_abi::MAX_SEND_TOKENS),
        )
        .with(
            Resource::ReceiveTokens,
            ports * u64::from(portolan_abi::MAX_RECEIVE_TOKENS),
        )
        .with(Resource::ArenaBytes, limits.arena_bytes_total)
}

/// A rule over what would be without it.
fn apply(
    checker: &mut Checker<'_>,
    rule: &file::Quota,
    base: Amounts,
    totals: &Amounts,
) -> Amounts {
    let values = [
        &rule.ports,
        &rule.connections,
        &rule.send_tokens,
        &rule.receive_tokens,
        &rule.arena_bytes,
    ];
    let mut amounts = base;
    for (resource, value) in Resource::ALL.into_iter().zip(values) {
        let Some(value) = value else { continue };
        let what = format!("quota.{}", resource.key());
        let most = i64::try_from(totals.get(resource)).unwrap_or(i64::MAX);
        let number = checker.number(&what, Some(value), 0..=most, 0);
        amounts = amounts.with(resource, number as u64);
    }
    amounts
}

pub(super) fn quotas(
    checker: &mut Checker<'_>,
    rules: &[file::Quota],
    limits: &Limits,
    surroundings: &dyn Surroundings,
) -> Quotas {
    let totals = totals(limits);
    let half = Amounts(totals.0.map(|total| total.div_ceil(2)));
    let mut lines: HashMap<Subject, usize> = HashMap::new();
    let mut users: Vec<(u32, &file::Quota)> = Vec::new();
    let mut any = half;
    for rule in rules {
        let found = subject(checker, "user", &rule.uid, |name| {
            surroundings.user(name).map(|user| Subject::Uid(user.uid))
        });
        let Some(subject) = found else { continue };
        let span = Spanned::span(&rule.uid);
        let line = checker.line(&span);
        if let Some(first) = lines.insert(subject, line) {
            let message = format!(
                "quota of {} is given in line {first} already; give it once",
                rule.uid.get_ref()
            );
            checker.complain(span, message);
            continue;
        }
        match subject {
            Subject::Uid(uid) => users.push((uid, rule)),
            Subject::Any | Subject::Gid(_) => any = apply(checker, rule, half, &totals),
        }
    }
    let named = users.into_iter().map(|(uid, rule)| {
        let base = if uid == 0 { Amounts::UNBOUNDED } else { any };
        (uid, apply(checker, rule, base, &totals))
    });
    let named = named.collect();
    Quotas { any, named }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn quotas() -> Quotas {
        let any = Amounts([2, 3, 32, 64, 8192]);
        let alice = any.with(Resource::Ports, 4);
        Quotas {
            any,
            named: HashMap::from([(1000, alice)]),
        }
    }

    #[test]
    fn up_to_the_quota_and_no_further() {
        let quotas = quotas();
        let port = Amounts([1, 0, 16, 16, 4096]);
        let two = port.plus(&port);
        assert_eq!(quotas.check(7, &port, &port), Ok(()));
        let error = quotas.check(7, &two, &port).unwrap_err();
        assert_eq!((error.resource, error.most), (Resource::Ports, 2));
        assert_eq!(
            error.to_string(),
            "quota: uid 7 has 2 of its 2 ports and asks for 1 more; give some back, or raise `ports` of [[quota]] uid = \"any\" in the \
             daemon's configuration"
        );
        // Alice may have four ports, but no more tokens than others.
        let error = quotas.check(1000, &two, &port).unwrap_err();
        assert_eq!((error.resource, error.used), (Resource::SendTokens, 32));
        assert!(error.to_string().contains("[[quota]] uid = 1000"));
        // Root, whom no rule names.
        assert_eq!(quotas.check(0, &two, &Amounts::UNBOUNDED), Ok(()));
        // What is not asked for is not refused, though less is allowed now than the user has.
        let connection = Amounts([0, 1, 0, 0, 0]);
        assert_eq!(quotas.check(7, &two.plus(&two), &connection), Ok(()));
    }
}
