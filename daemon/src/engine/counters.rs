//! What an engine counts. One table: the names, the help, and the ledger's counter words.
//!
//! The engine counts in plain `u64`s and copies them to the ledger now and then; the supervisor reads them there at any time, by the
//! order of [`names`]. Counts go on across engines: a successor adds to what it found. The table is the engine's own counters, then
//! those of its layers: `transport_…`, `xsk_…`.

use std::sync::LazyLock;
use std::sync::atomic::Ordering;

use portolan_abi::ledger::{COUNTERS, Ledger};
use portolan_transport::endpoint::Counters as TransportCounters;

use crate::xsk::XskCounters;

use super::encap::EncapError;

portolan_transport::counted! {
    /// Counted by the engine itself since it started.
    pub struct EngineCounters {
        /// Loops of the engine's duty cycle.
        loops,
        /// Loops that found something to do.
        loops_busy,
        /// Times the engine slept.
        sleeps,
        /// Received frames shorter than their outer headers.
        outer_short,
        /// Received frames for another MAC address.
        outer_mac,
        /// Received frames of another EtherType or IP protocol.
        outer_protocol,
        /// Received frames with an impossible IP header, or with IP options.
        outer_ip_header,
        /// Received frames whose IPv4 header checksum is wrong.
        outer_ip_checksum,
        /// Received IP fragments.
        outer_fragment,
        /// Received frames for another IP address.
        outer_address,
        /// Received frames for a UDP port of no engine.
        outer_udp_port,
        /// Received frames with an impossible UDP length.
        outer_udp_length,
        /// Received frames that claim to come from a node whose address is another.
        outer_source,
        /// Frames passed on to the engine of another queue.
        crossed,
        /// Frames from the engine of another queue.
        crossing_received,
        /// Frames lost because the ring to another queue's engine was full.
        crossing_full,
        /// Times another engine's ring made no sense.
        crossing_bad,
        /// Frames to this very engine, handed round without a wire.
        looped_back,
        /// Frames dropped because their node has no route.
        no_route,
        /// Frames dropped because the link is down.
        link_down,
        /// Received frames discarded because two engines in a row died while working on them.
        poisoned_frames,
        /// Send tokens taken.
        send_tokens,
        /// Send tokens that made no sense or were refused at once.
        send_tokens_refused,
        /// Receive tokens taken.
        receive_tokens,
        /// Applications that slept and were woken.
        doorbells,
        /// Alarms fired.
        alarms,
        /// Messages applications were asked about before they were taken.
        offers,
        /// Answers to such questions.
        answers,
        /// Answers to no open question: it was answered before, is over, or never was.
        answers_ignored,
        /// Ports closed because an application broke the rules.
        ports_failed,
    }
}

impl EngineCounters {
    /// Counts a received frame whose outer headers were refused.
    pub fn count_outer(&mut self, error: EncapError) {
        *match error {
            EncapError::Short => &mut self.outer_short,
            EncapError::Mac => &mut self.outer_mac,
            EncapError::Protocol => &mut self.outer_protocol,
            EncapError::IpHeader => &mut self.outer_ip_header,
            EncapError::IpChecksum => &mut self.outer_ip_checksum,
            EncapError::Fragment => &mut self.outer_fragment,
            EncapError::Address => &mut self.outer_address,
            EncapError::UdpPort => &mut self.outer_udp_port,
            EncapError::UdpLength => &mut self.outer_udp_length,
        } += 1;
    }
}

/// Name and help of every counter word of a ledger, in order.
pub fn names() -> Vec<(String, &'static str)> {
    let own = EngineCounters::default().iter().map(|row| ("", row));
    let transport = (TransportCounters::default().iter()).map(|row| ("transport_", row));
    let xsk = XskCounters::default().iter().map(|row| ("xsk_", row));
    let all = own.chain(transport).chain(xsk).take(COUNTERS);
    all.map(|(layer, (name, help, _))| (format!("{layer}{name}"), help))
        .collect()
}

/// The counter words that change with every message of an application, sent or received, and with nothing else.
pub fn messages() -> &'static [usize] {
    static WORDS: LazyLock<Vec<usize>> = LazyLock::new(|| {
        let all = names();
        let counted = ["transport_sends_accepted", "transport_messages_delivered"];
        let place = |name: &&str| all.iter().position(|(known, _)| known == name);
        counted.iter().filter_map(place).collect()
    });
    &WORDS
}

/// The ledger's counter words, added to.
pub struct CounterPage {
    found: [u64; COUNTERS],
}

impl CounterPage {
    /// Goes on from what the ledger says.
    pub fn adopt(ledger: Ledger<'_>) -> Self {
        let words = &ledger.header().counters;
        Self {
            found: std::array::from_fn(|i| words[i].load(Ordering::Relaxed)),
        }
    }

    /// Copies the counters to the ledger.
    pub fn publish(
        &self,
        ledger: Ledger<'_>,
        engine: &EngineCounters,
        transport: &TransportCounters,
        xsk: &XskCounters,
    ) {
        let mut words = ledger.header().counters.iter().zip(&self.found);
        let mut copy = |values: &[u64]| {
            // In this order: who runs out first has taken nothing of the other.
            for (value, (word, found)) in values.iter().zip(words.by_ref()) {
                word.store(found.wrapping_add(*value), Ordering::Relaxed);
            }
        };
        copy(&engine.values());
        copy(&transport.values());
        copy(&xsk.values());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Expect: two words, of these names.
    #[test]
    fn what_counts_messages_is_found() {
        let (names, words) = (names(), messages());
        let found: Vec<&str> = words.iter().map(|word| names[*word].0.as_str()).collect();
        assert_eq!(
            found,
            ["transport_sends_accepted", "transport_messages_delivered"]
        );
    }

    // Expect: each reason moves the counter of its name, and no other.
    #[test]
    fn every_outer_error_has_its_counter() {
        for (error, name) in [
            (EncapError::Short, "outer_short"),
            (EncapError::Mac, "outer_mac"),
            (EncapError::Protocol, "outer_protocol"),
            (EncapError::IpHeader, "outer_ip_header"),
            (EncapError::IpChecksum, "outer_ip_checksum"),
            (EncapError::Fragment, "outer_fragment"),
            (EncapError::Address, "outer_address"),
            (EncapError::UdpPort, "outer_udp_port"),
            (EncapError::UdpLength, "outer_udp_length"),
        ] {
            let mut counters = EngineCounters::default();
            counters.count_outer(error);
            let moved = counters.iter().filter(|(_, _, value)| *value == 1);
            let moved: Vec<_> = moved.map(|(name, _, _)| name).collect();
            assert_eq!(moved, [name]);
        }
    }

    // Expect: what one counter says, and nothing else, is found at the place of its name, on top of what an engine before us left there; also at
    // the ends of the tables.
    #[test]
    fn a_counter_is_published_where_its_name_is() {
        let ledger = crate::engine::ledger_facts::small_ledger();
        let names = names();
        let words = &ledger.header().counters;
        words[0].store(1_000, Ordering::Relaxed);
        let page = CounterPage::adopt(ledger);
        let engine = EngineCounters {
            loops: 1,
            ports_failed: 2,
            ..EngineCounters::default()
        };
        let transport = TransportCounters {
            frames_received: 3,
            memory_faults: 4,
            ..TransportCounters::default()
        };
        let xsk = XskCounters {
            rx_frames: 5,
            corrupt_rings: 6,
            ..XskCounters::default()
        };
        page.publish(ledger, &engine, &transport, &xsk);
        let published: Vec<_> = (names.iter().zip(words))
            .map(|((name, _), word)| (name.as_str(), word.load(Ordering::Relaxed)))
            .filter(|(_, value)| *value != 0)
            .collect();
        let expected = [
            ("loops", 1_001),
            ("ports_failed", 2),
            ("transport_frames_received", 3),
            ("transport_memory_faults", 4),
            ("xsk_rx_frames", 5),
            ("xsk_corrupt_rings", 6),
        ];
        assert_eq!(published, expected);
    }

    #[test]
    fn every_counter_has_a_word_a_name_and_help() {
        let names = names();
        let engine = EngineCounters::default();
        let all = engine.iter().count()
            + TransportCounters::default().iter().count()
            + XskCounters::default().iter().count();
        assert_eq!(names.len(), all, "more counters than the ledger has words");
        let mut unique: Vec<_> = names.iter().map(|(name, _)| name).collect();
        unique.sort();
        unique.dedup();
        assert_eq!(unique.len(), names.len());
        assert!(
            names
                .iter()
                .all(|(name, help)| !name.is_empty() && help.ends_with('.'))
        );
    }
}
