//! Who may open which ports.

use portolan_abi::PORTS;

/// Whom a rule admits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Subject {
    /// Everybody who can reach the socket.
    Any,
    /// A user.
    Uid(u32),
    /// The members of a group.
    Gid(u32),
}

/// A set of ports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PortSet([u64; PORTS as usize / 64]);

impl PortSet {
    /// Every port applications can have.
    pub fn all() -> Self {
        let mut set = Self([u64::MAX; PORTS as usize / 64]);
        set.0[0] &= !1;
        set
    }

    /// Adds a port; false if it was there already.
    pub fn insert(&mut self, port: u16) -> bool {
        let Some(word) = self.0.get_mut(usize::from(port) / 64) else {
            return false;
        };
        let bit = 1 << (port % 64);
        let fresh = *word & bit == 0;
        *word |= bit;
        fresh
    }

    /// Is it in?
    pub fn contains(&self, port: u16) -> bool {
        self.0
            .get(usize::from(port) / 64)
            .is_some_and(|word| word & (1 << (port % 64)) != 0)
    }

    /// Parses `"7"`, `"1-255"` or `"1-9,20"`.
    ///
    /// # Errors
    /// What is wrong with it, in half a sentence.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut set = Self::default();
        for part in text.split(',') {
            let (first, last) = match part.split_once('-') {
                Some((first, last)) => (number(first)?, number(last)?),
                None => (number(part)?, number(part)?),
            };
            if first > last {
                return Err(format!("the range {first}-{last} runs backwards"));
            }
            for port in first..=last {
                if !set.insert(port) {
                    return Err(format!("port {port} is named twice"));
                }
            }
        }
        Ok(set)
    }
}

fn number(text: &str) -> Result<u16, String> {
    let text = text.trim();
    match text.parse::<u16>() {
        Ok(0) => Err("port 0 is the daemon's own".to_owned()),
        Ok(port) if port < PORTS => Ok(port),
        _ => Err(format!("`{text}` is no port")),
    }
}

/// Who asks, as the kernel vouches for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Credentials {
    /// Process; 0 if it lives in another pid namespace.
    pub pid: i32,
    /// User.
    pub uid: u32,
    /// Group, and supplementary groups.
    pub gids: Vec<u32>,
}

/// The access list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Acl {
    rules: Vec<(Subject, PortSet)>,
}

impl Acl {
    /// A list of these rules: what no rule admits is denied.
    pub fn new(rules: Vec<(Subject, PortSet)>) -> Self {
        Self { rules }
    }

    /// The list of a configuration that has none: root and the daemon's own user, all ports.
    pub fn closed(own_uid: u32) -> Self {
        let rule = |uid| (Subject::Uid(uid), PortSet::all());
        Self::new(vec![rule(0), rule(own_uid)])
    }

    /// May they open this port?
    pub fn allows(&self, who: &Credentials, port: u16) -> bool {
        self.rules.iter().any(|(subject, ports)| {
            let meant = match subject {
                Subject::Any => true,
                Subject::Uid(uid) => *uid == who.uid,
                Subject::Gid(gid) => who.gids.contains(gid),
            };
            meant && ports.contains(port)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn who(uid: u32, gids: &[u32]) -> Credentials {
        Credentials {
            pid: 1,
            uid,
            gids: gids.to_vec(),
        }
    }

    #[test]
    fn port_sets() {
        let set = PortSet::parse("1-3, 64,255").unwrap();
        let members: Vec<u16> = (0..300).filter(|port| set.contains(*port)).collect();
        assert_eq!(members, [1, 2, 3, 64, 255]);
        assert!(!PortSet::all().contains(0));
        assert!(PortSet::all().contains(1) && PortSet::all().contains(255));
        for (text, complaint) in [
            ("", "no port"),
            ("0", "the daemon's own"),
            ("256", "no port"),
            ("5-3", "backwards"),
            ("1-5,3", "port 3 is named twice"),
            ("1-", "no port"),
            ("-1", "no port"),
            ("x", "no port"),
        ] {
            let error = PortSet::parse(text).unwrap_err();
            assert!(error.contains(complaint), "{text}: {error}");
        }
    }

    #[test]
    fn rules_admit_and_nothing_else_does() {
        let acl = Acl::new(vec![
            (Subject::Uid(1000), PortSet::parse("1-9").unwrap()),
            (Subject::Gid(50), PortSet::parse("20").unwrap()),
            (Subject::Any, PortSet::parse("30").unwrap()),
        ]);
        assert!(acl.allows(&who(1000, &[1000]), 9));
        assert!(!acl.allows(&who(1000, &[1000]), 10));
        assert!(!acl.allows(&who(1001, &[1000]), 9));
        // By a supplementary group.
        assert!(acl.allows(&who(7, &[7, 50]), 20));
        assert!(!acl.allows(&who(50, &[7]), 20));
        assert!(acl.allows(&who(7, &[7]), 30));
        // The list decides, also for root; and port 0 is nobody's.
        assert!(!acl.allows(&who(0, &[0]), 1));
        assert!(!acl.allows(&who(1000, &[1000]), 0));
    }

    #[test]
    fn without_a_list_root_and_ourselves() {
        let acl = Acl::closed(33);
        assert!(acl.allows(&who(0, &[0]), 255));
        assert!(acl.allows(&who(33, &[33]), 1));
        assert!(!acl.allows(&who(1000, &[0, 33]), 1));
        assert!(!acl.allows(&who(0, &[0]), 0));
    }
}
