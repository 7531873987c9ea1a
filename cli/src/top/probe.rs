//! Latencies as an application sees them: pings of the peers' own services, from a port of our own.

use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use portolan::service::SERVICE_PORT;
use portolan::{Address, Node, NodeId, Port, PortId};
use serde_json::{Value, json};

use crate::ping::{self, Outcome};

/// Pings of each peer in an interval, at most.
const PINGS: u64 = 100;
/// An answer that takes longer is lost.
const LOST: Duration = Duration::from_millis(200);

/// A port to ping from.
pub struct Probe {
    port: Port,
    next: u64,
}

impl Probe {
    /// Opens it.
    pub fn open(node: &Node) -> anyhow::Result<Self> {
        let port = ping::open(
            node,
            64,
            portolan::Priority::High,
            portolan::Wait::default(),
        )?;
        Ok(Self {
            port,
            next: ping::random_id(),
        })
    }

    /// Pings every peer that is up, or may be, in turns until then.
    pub fn measure(&mut self, peers: &Value, until: Instant) -> anyhow::Result<Value> {
        let peers = peers["peers"].as_array().map_or(&[][..], Vec::as_slice);
        let mut nodes: Vec<u16> = (peers.iter())
            .filter(|peer| peer["state"] == "up" || peer["state"] == "idle")
            .filter_map(|peer| u16::try_from(peer["node"].as_u64()?).ok())
            .collect();
        nodes.dedup();
        let mut rows = Vec::new();
        for node in nodes {
            let mut times = Histogram::<u64>::new_with_bounds(1, 60_000_000_000, 3)?;
            let mut lost = 0_u64;
            while times.len() + lost < PINGS && Instant::now() < until && lost < 3 {
                let to = Address {
                    node: NodeId(node),
                    port: PortId(SERVICE_PORT),
                };
                self.next = self.next.wrapping_add(1) & (u64::MAX >> 8);
                let options = ping::options(self.next, portolan::Priority::High, LOST);
                match ping::one(&mut self.port, to, &[7; 64], self.next, options, LOST)? {
                    Outcome::Answered(rtt) => times.saturating_record(rtt.as_nanos() as u64),
                    Outcome::Lost(_) => lost += 1,
                }
            }
            rows.push(json!({
                "node": node,
                "answered": times.len(),
                "lost": lost,
                "rtt_ns": ping::percentiles(&times, 1.0),
            }));
        }
        Ok(rows.into())
    }
}
