//! One switch between all nodes: finite shared buffers, an egress queue per port and class, high strictly before low.
//!
//! Idea: shared memory under a dynamic threshold (Choudhury and Hahne, 1998): a queue may hold at most `alpha` times what is
//! free, so that one congested port leaves room for others, and the fuller the switch, the less a newcomer gets. Order within a
//! class of a port is first in, first out.
//!
//! Rejected: a buffer per port (incast is mild then); a fabric of several switches (where congestion happens is the last hop).

use std::collections::VecDeque;

use portolan_transport::ident::Nanos;

/// What the wires and the switch can do.
#[derive(Clone, Copy, Debug)]
pub struct Hardware {
    /// Bits per second of every link.
    pub link_bits_per_s: u64,
    /// From a node to the switch, or back, nanoseconds.
    pub propagation_ns: Nanos,
    /// Bytes around the transport's on the wire: Ethernet with preamble, gap and checksum, IPv4, UDP.
    pub overhead_bytes: u64,
    /// The switch's memory.
    pub shared_buffer_bytes: u64,
    /// A queue may hold this many 256ths of the memory that is free.
    pub alpha_256ths: u64,
    /// Receive buffers of 3,840 bytes an engine's ring holds.
    pub receive_ring_buffers: u32,
    /// Transmit descriptors outstanding per engine.
    pub transmit_ring: u32,
    /// An engine's time per frame, in or out, nanoseconds.
    pub frame_cost_ns: Nanos,
    /// And per 1,024 bytes.
    pub kib_cost_ns: Nanos,
}

impl Default for Hardware {
    /// 25 Gbit/s, a round trip of 10 µs, 16 MiB of switch memory.
    fn default() -> Self {
        Self {
            link_bits_per_s: 25_000_000_000,
            propagation_ns: 2_500,
            overhead_bytes: 66,
            shared_buffer_bytes: 16 << 20,
            alpha_256ths: 256,
            receive_ring_buffers: 4_096,
            transmit_ring: 32,
            frame_cost_ns: 100,
            kib_cost_ns: 60,
        }
    }
}

impl Hardware {
    /// How long a frame of `len` transport bytes keeps a link busy.
    pub fn wire_time(&self, len: u32) -> Nanos {
        let bits = (u64::from(len) + self.overhead_bytes) * 8;
        (bits * 1_000_000_000).div_ceil(self.link_bits_per_s)
    }

    /// How long an engine works on it.
    pub fn cost(&self, len: u32) -> Nanos {
        self.frame_cost_ns + u64::from(len) * self.kib_cost_ns / 1_024
    }
}

#[derive(Debug, Default)]
struct Port {
    /// Frames and their bytes, by class.
    queues: [VecDeque<(u32, u32)>; 2],
    bytes: [u64; 2],
    /// Until when the wire is busy.
    free_at: Nanos,
    /// Somebody will call when it is free.
    called: bool,
    /// Bytes that left on the wire.
    carried: u64,
}

/// What becomes of a frame that reached the switch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ingress {
    /// It leaves at once and has left at this time.
    Leaves(Nanos),
    /// It waits; the port wants to be called at this time, if somebody is not on his way already.
    Waits(Option<Nanos>),
    /// There was no room.
    Dropped,
}

/// The switch.
#[derive(Debug)]
pub struct Switch {
    hardware: Hardware,
    ports: Vec<Port>,
    used: u64,
    /// Frames dropped for want of memory, by class.
    pub dropped: [u64; 2],
    /// The most memory ever used.
    pub most_used: u64,
}

impl Switch {
    pub fn new(hardware: Hardware, ports: usize) -> Self {
        Self {
            hardware,
            ports: (0..ports).map(|_| Port::default()).collect(),
            used: 0,
            dropped: [0; 2],
            most_used: 0,
        }
    }

    /// Bytes that left on a port's wire.
    pub fn carried(&self, port: usize) -> u64 {
        self.ports[port].carried
    }

    /// A frame of `len` bytes for `port` arrived.
    pub fn ingress(&mut self, now: Nanos, port: u32, class: u8, frame: u32, len: u32) -> Ingress {
        let (hardware, used) = (self.hardware, self.used);
        let out = &mut self.ports[port as usize];
        if out.free_at <= now && out.queues.iter().all(VecDeque::is_empty) {
            out.free_at = now + hardware.wire_time(len);
            out.carried += u64::from(len) + hardware.overhead_bytes;
            return Ingress::Leaves(out.free_at);
        }
        let class = usize::from(class.min(1));
        let free = hardware.shared_buffer_bytes.saturating_sub(used);
        let threshold = free * hardware.alpha_256ths / 256;
        if u64::from(len) > free || out.bytes[class] + u64::from(len) > threshold {
            self.dropped[class] += 1;
            return Ingress::Dropped;
        }
        self.used += u64::from(len);
        self.most_used = self.most_used.max(self.used);
        out.bytes[class] += u64::from(len);
        out.queues[class].push_back((frame, len));
        let call = !out.called;
        out.called = true;
        Ingress::Waits(call.then_some(out.free_at.max(now)))
    }

    /// The port is free: its next frame and when that has left; and when to call again, if more wait.
    pub fn egress(&mut self, now: Nanos, port: u32) -> Option<(u32, Nanos, bool)> {
        let out = &mut self.ports[port as usize];
        out.called = false;
        let class = usize::from(!out.queues[1].is_empty());
        let (frame, len) = out.queues[class].pop_front()?;
        out.bytes[class] -= u64::from(len);
        self.used -= u64::from(len);
        out.carried += u64::from(len) + self.hardware.overhead_bytes;
        out.free_at = out.free_at.max(now) + self.hardware.wire_time(len);
        out.called = out.queues.iter().any(|queue| !queue.is_empty());
        Some((frame, out.free_at, out.called))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn switch(memory: u64) -> Switch {
        let hardware = Hardware {
            shared_buffer_bytes: memory,
            ..Hardware::default()
        };
        Switch::new(hardware, 2)
    }

    // One frame on the wire, then low and high. Expect: high leaves first, each class in its order.
    #[test]
    fn high_first() {
        let mut switch = switch(1 << 20);
        let Ingress::Leaves(first) = switch.ingress(0, 0, 0, 1, 1_000) else {
            panic!("an idle port");
        };
        assert_eq!(
            switch.ingress(0, 0, 0, 2, 1_000),
            Ingress::Waits(Some(first))
        );
        for (class, frame) in [(0, 3), (1, 4), (1, 5)] {
            assert_eq!(
                switch.ingress(0, 0, class, frame, 1_000),
                Ingress::Waits(None)
            );
        }
        // Another port is not in the way of anybody.
        assert!(matches!(
            switch.ingress(0, 1, 0, 9, 1_000),
            Ingress::Leaves(_)
        ));
        let mut now = first;
        let mut left = Vec::new();
        while let Some((frame, at, more)) = switch.egress(now, 0) {
            assert_eq!(more, left.len() < 3);
            assert_eq!(at, now + Hardware::default().wire_time(1_000));
            (now, _) = (at, left.push(frame));
        }
        assert_eq!(left, [4, 5, 2, 3]);
    }

    // One port is flooded. Expect: it gets half of the memory (alpha 1), and the other port still has room.
    #[test]
    fn dynamic_threshold() {
        let mut switch = switch(100_000);
        let fate = (0..200)
            .map(|frame| switch.ingress(0, 0, 0, frame, 1_000))
            .collect::<Vec<_>>();
        let kept = fate
            .iter()
            .filter(|f| matches!(f, Ingress::Waits(_)))
            .count();
        assert!((49..=51).contains(&kept), "{kept}");
        assert_eq!(switch.dropped[0] as usize, 199 - kept);
        let other = (0..10).map(|frame| switch.ingress(0, 1, 0, frame, 1_000));
        assert_eq!(other.filter(|f| *f == Ingress::Dropped).count(), 0);
    }
}
