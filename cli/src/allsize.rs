//! `allsize`: messages of every power of two, and one less and one more, to an echo and back, like gm_allsize.

use std::io::Write;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use portolan::service::{Kind, Tag};
use portolan::{Address, Buffer, Event, Node, Port, PortOptions, Priority, SendOptions};
use serde_json::{Value, json};

use crate::arguments::Allsize;
use crate::ping::random_id;
use crate::table::{duration, rate};

/// Bytes sent at each size, about, if no count is given.
const BYTES_PER_SIZE: u32 = 4 << 20;

struct Sweep<'p> {
    port: &'p mut Port,
    to: Address,
    verify: bool,
    timeout: Duration,
    id: u64,
    /// Comes back with each send.
    buffer: Option<Buffer>,
}

/// Figures of one size.
struct Figures {
    bytes: u32,
    rounds: u32,
    /// Half the round trip, nanoseconds: shortest, middle, longest.
    one_way_ns: [f64; 3],
}

impl Figures {
    fn bytes_per_second(&self) -> f64 {
        f64::from(self.bytes) * 1e9 / self.one_way_ns[1].max(1.0)
    }

    fn json(&self) -> Value {
        let [min, p50, max] = self.one_way_ns.map(|ns| ns.round() as u64);
        json!({
            "bytes": self.bytes,
            "rounds": self.rounds,
            "one_way_ns": { "min": min, "p50": p50, "max": max },
            "bytes_per_second": self.bytes_per_second().round() as u64,
        })
    }
}

pub fn run(node: &Node, options: &Allsize) -> anyhow::Result<ExitCode> {
    if options.min > options.max {
        bail!("--min {} is more than --max {}", options.min, options.max);
    }
    let to = options.target.resolve(node)?;
    let slot = u64::from(options.max).next_multiple_of(4096) + 4096;
    let mut port = node.open_port(PortOptions {
        arena_bytes: 3 * slot,
        wait: options.wait.wait(),
        ..PortOptions::default()
    })?;
    for _ in 0..2 {
        let buffer = port.allocate(options.max as usize)?;
        port.provide_receive_buffer(buffer, Priority::Low)?;
    }
    let buffer = Some(port.allocate(options.max as usize)?);
    let mut sweep = Sweep {
        port: &mut port,
        to,
        verify: options.verify,
        timeout: options.timeout,
        id: random_id(),
        buffer,
    };
    let mut out = std::io::stdout().lock();
    let mut done = Vec::new();
    let mut failure = None;
    if !options.format.json {
        writeln!(
            out,
            "{:>12} {:>7} {:>11} {:>11} {:>12}",
            "bytes", "rounds", "one way", "slowest", "rate"
        )?;
    }
    for bytes in sizes(options.min, options.max) {
        let rounds = options
            .count
            .unwrap_or_else(|| (BYTES_PER_SIZE / bytes.max(1)).clamp(3, 100))
            .max(1);
        match sweep.size(bytes, rounds) {
            Ok(figures) => {
                if !options.format.json {
                    writeln!(
                        out,
                        "{bytes:>12} {rounds:>7} {:>11} {:>11} {:>12}",
                        duration(figures.one_way_ns[1]),
                        duration(figures.one_way_ns[2]),
                        rate(figures.bytes_per_second())
                    )?;
                }
                done.push(figures);
            }
            Err(error) => {
                failure = Some(error.context(format!("at {bytes} bytes")));
                break;
            }
        }
    }
    let ok = failure.is_none();
    if options.format.json {
        let sizes: Vec<Value> = done.iter().map(Figures::json).collect();
        let document = json!({
            "target": to.to_string(),
            "verify": options.verify,
            "ok": ok,
            "error": failure.as_ref().map(|e| format!("{e:#}")),
            "sizes": sizes,
        });
        writeln!(out, "{document:#}")?;
    } else if ok {
        let checked = if options.verify {
            ", every byte checked"
        } else {
            ""
        };
        writeln!(out, "{} sizes to {to} and back{checked}", done.len())?;
    }
    drop(sweep);
    match failure {
        Some(error) => Err(error),
        None => {
            port.close(Duration::ZERO)?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// `min`, `max`, and between them every power of two with its neighbours.
fn sizes(min: u32, max: u32) -> Vec<u32> {
    let mut sizes: Vec<u32> = (0..32)
        .flat_map(|shift| {
            let power = 1u32 << shift;
            [power - 1, power, power.saturating_add(1)]
        })
        .chain([min, max])
        .filter(|size| (min..=max).contains(size))
        .collect();
    sizes.sort_unstable();
    sizes.dedup();
    sizes
}

impl Sweep<'_> {
    fn size(&mut self, bytes: u32, rounds: u32) -> anyhow::Result<Figures> {
        let mut times = Vec::with_capacity(rounds as usize);
        for _ in 0..rounds {
            times.push(self.round_trip(bytes as usize)?.as_nanos() as f64 / 2.0);
        }
        times.sort_unstable_by(f64::total_cmp);
        let (min, max) = (times.first().copied(), times.last().copied());
        Ok(Figures {
            bytes,
            rounds,
            one_way_ns: [
                min.unwrap_or(0.0),
                times.get(times.len() / 2).copied().unwrap_or(0.0),
                max.unwrap_or(0.0),
            ],
        })
    }

    /// There and back once. Both the send's end and the answer must come.
    fn round_trip(&mut self, bytes: usize) -> anyhow::Result<Duration> {
        self.id = self.id.wrapping_add(1) & (u64::MAX >> 8);
        let seed = self.id ^ (bytes as u64) << 32;
        let mut buffer = self.buffer.take().context("the send buffer is out")?;
        if self.verify {
            fill(&mut buffer[..bytes], seed);
        }
        let tag = |kind| Tag { kind, id: self.id }.encode();
        let answer_tag = tag(Kind::AllsizeReply);
        let options = SendOptions {
            priority: Priority::Low,
            tag: tag(Kind::Allsize),
            timeout: Some(self.timeout),
            ..SendOptions::default()
        };
        let start = Instant::now();
        self.port.send(self.to, buffer, bytes, options)?;
        let mut rtt = None;
        while rtt.is_none() || self.buffer.is_none() {
            let left = self.timeout.saturating_sub(start.elapsed());
            match self.port.blocking_receive(left)? {
                Some(Event::Received(message)) => {
                    let at = start.elapsed();
                    if message.from() == self.to && message.tag() == answer_tag {
                        check(&message, bytes, self.verify.then_some(seed))?;
                        rtt = Some(at);
                    }
                    self.port.unknown(Event::Received(message));
                }
                Some(Event::Sent(sent)) => {
                    if !sent.status.is_delivered() {
                        bail!("the message to {}: {}", self.to, sent.status);
                    }
                    self.buffer = sent.buffer;
                }
                Some(other) => self.port.unknown(other),
                None => bail!("{} did not answer within {:?}", self.to, self.timeout),
            }
        }
        rtt.context("no answer")
    }
}

fn check(answer: &[u8], bytes: usize, seed: Option<u64>) -> anyhow::Result<()> {
    if answer.len() != bytes {
        bail!("{bytes} bytes were sent, {} came back", answer.len());
    }
    if let Some(seed) = seed
        && let Some((at, expected, got)) = mismatch(answer, seed)
    {
        bail!("byte {at} of {bytes} came back as {got:#04x}, it was {expected:#04x}");
    }
    Ok(())
}

/// A pattern in which every 8 bytes depend on the message and on their place (SplitMix64).
fn word(seed: u64, index: u64) -> [u8; 8] {
    let mut z = seed
        .wrapping_mul(0xd605_bbb5_8c8a_bbd5)
        .wrapping_add(index.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (z ^ (z >> 31)).to_le_bytes()
}

fn fill(bytes: &mut [u8], seed: u64) {
    for (i, chunk) in bytes.chunks_mut(8).enumerate() {
        let word = word(seed, i as u64);
        chunk.copy_from_slice(&word[..chunk.len()]);
    }
}

/// The first byte that differs: where, what it should be, what it is.
fn mismatch(bytes: &[u8], seed: u64) -> Option<(usize, u8, u8)> {
    for (i, chunk) in bytes.chunks(8).enumerate() {
        let word = word(seed, i as u64);
        if chunk != &word[..chunk.len()] {
            let at = chunk.iter().zip(&word).position(|(a, b)| a != b)?;
            return Some((i * 8 + at, word[at], chunk[at]));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_powers_and_their_neighbours() {
        assert_eq!(sizes(1, 9), [1, 2, 3, 4, 5, 7, 8, 9]);
        assert_eq!(sizes(0, 1), [0, 1]);
        assert_eq!(sizes(100, 100), [100]);
        let all = sizes(0, u32::MAX);
        assert_eq!(all.last(), Some(&u32::MAX));
        assert!(all.contains(&(1 << 31)) && all.is_sorted());
    }

    // A pattern, and each kind of damage to it: one bit, a shift, another message's bytes, too few. Expect: found, and where.
    #[test]
    fn damage_is_found() {
        for len in [0, 1, 7, 8, 9, 4099] {
            let mut bytes = vec![0; len];
            fill(&mut bytes, 5);
            assert!(check(&bytes, len, Some(5)).is_ok());
            assert!(check(&bytes, len + 1, None).is_err());
            for at in (0..len).step_by(61) {
                bytes[at] ^= 0x10;
                let (found, expected, got) = mismatch(&bytes, 5).unwrap();
                assert_eq!((found, got), (at, expected ^ 0x10));
                bytes[at] ^= 0x10;
            }
            if len > 1 {
                assert!(check(&bytes, len, Some(6)).is_err());
            }
        }
        let mut bytes = vec![0; 64];
        fill(&mut bytes, 5);
        bytes.rotate_left(8);
        assert_eq!(mismatch(&bytes, 5).map(|m| m.0), Some(0));
    }
}
