//! Why the program did what it did with a frame: one table for code, counters and documentation.

/// Declares [`Reason`] from the table; the order is that of `enum steer_reason` in `steer.bpf.c`.
macro_rules! reasons {
    ($($reason:ident $name:literal $help:literal,)*) => {
        /// What became of a frame, and why; the index of a per-CPU packet counter.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(u32)]
        pub enum Reason {
            $(#[doc = $help] $reason,)*
        }

        impl Reason {
            /// Every reason, in counter order.
            pub const ALL: &'static [Reason] = &[$(Reason::$reason,)*];

            /// The counter's name.
            pub const fn name(self) -> &'static str {
                match self { $(Reason::$reason => $name,)* }
            }

            /// One sentence for people and metrics.
            pub const fn help(self) -> &'static str {
                match self { $(Reason::$reason => $help,)* }
            }
        }
    };
}

reasons! {
    Redirected "redirected" "Ours, redirected to the queue's socket (which may still be full).",
    NoSocket "no_socket" "Ours, on a queue without a socket: dropped.",
    PassNotOurs "pass_not_ours" "Another EtherType, protocol or port: passed.",
    PassGroup "pass_group" "Our EtherType or port, but broadcast or multicast: passed.",
    PassOtherMac "pass_other_mac" "Our EtherType or port, but another destination MAC: passed.",
    PassOtherAddress "pass_other_address" "Our port, but another destination address: passed.",
    PassVlan "pass_vlan" "VLAN-tagged: passed.",
    PassFragment "pass_fragment" "An IP fragment: passed.",
    PassIpOptions "pass_ip_options" "UDP behind IPv4 options, or IPv6 extension headers: passed.",
    PassTruncated "pass_truncated" "Ends inside the Ethernet, IP or UDP header: passed.",
    PassErrand "pass_errand" "Ours, made a datagram for a socket that is to be polled: passed.",
}

#[cfg(test)]
mod tests {
    use super::Reason;

    // A counter is an index: names and order in C and Rust must be the same.
    #[test]
    fn table_is_the_one_in_c() {
        let source = include_str!("bpf/steer.bpf.c");
        let start = source.find("enum steer_reason {").unwrap();
        let table = &source[start..][..source[start..].find('}').unwrap()];
        let in_c: Vec<String> = table
            .lines()
            .filter_map(|line| line.trim().strip_prefix("STEER_"))
            .map(|name| name.trim_end_matches(',').to_lowercase())
            .collect();
        let mut in_rust: Vec<String> = Reason::ALL.iter().map(|r| r.name().to_owned()).collect();
        in_rust.push("reasons".to_owned());
        assert_eq!(in_c, in_rust);
        for (index, reason) in Reason::ALL.iter().enumerate() {
            assert_eq!(*reason as usize, index);
        }
    }
}
