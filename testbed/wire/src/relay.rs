//! The loop: take frames from every interface, decide, delay, hand them to the interface they are for.
//!
//! It serves all sockets in turn in batches, and sleeps in `poll` when nothing came for a moment and nothing is due. On a
//! machine with fewer cores than processes it is one more that competes, so while it waits for something near it yields.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use portolan_testbed::WireCounters;
use portolan_testbed::wire::{WireAnswer, WireRequest, WireSpec};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::control::Control;
use crate::line::Line;
use crate::recorder::Recorder;
use crate::side::{BATCH, Side};
use crate::umem::{Frame, Memory};

/// Idle for this long it sleeps.
const AWAKE: Duration = Duration::from_micros(30);
/// What is due within this is not slept for.
const NEAR: u64 = 60_000;
/// Before the nodes it connects.
const NICE: i32 = -15;
/// Turns between two looks at the control socket while there is work.
const CONTROL_EVERY: u32 = 256;

/// Everything the wire has.
pub struct Relay {
    memory: Memory,
    sides: Vec<Side>,
    /// By receiving side.
    lines: Vec<Line<Frame>>,
    recorder: Option<Recorder>,
    began: Instant,
    came: Vec<Frame>,
}

impl Relay {
    pub fn new(spec: &WireSpec) -> Result<Self> {
        let mut memory = Memory::new()?;
        let open = |side| Side::open(side, spec, &mut memory);
        let sides: Vec<Side> = spec.sides.iter().map(open).collect::<Result<_>>()?;
        let lines = spec
            .sides
            .iter()
            .map(|side| Line::new(side.node, &spec.impairment))
            .collect();
        Ok(Self {
            memory,
            sides,
            lines,
            recorder: None,
            began: Instant::now(),
            came: Vec::with_capacity(BATCH),
        })
    }

    /// Carries frames until it is killed.
    pub fn run(mut self, control: &Control) -> Result<()> {
        // Sleeps shorter than the kernel's usual slack of 50 µs.
        let slack = std::num::NonZeroU64::new(1);
        rustix::thread::set_current_timer_slack(slack).context("timer slack")?;
        // A wire does not wait for a core.
        rustix::process::setpriority_process(None, NICE).context("priority")?;
        let mut last_work = self.now();
        let mut turns = 0u32;
        loop {
            let now = self.now();
            let worked = self.turn(now);
            turns = turns.wrapping_add(1);
            if turns.is_multiple_of(CONTROL_EVERY) {
                control.serve(|request| self.answer(request));
            }
            if worked {
                last_work = now;
            } else if now - last_work > AWAKE.as_nanos() as u64 && self.sleep(control)? {
                control.serve(|request| self.answer(request));
            } else {
                rustix::thread::sched_yield();
            }
        }
    }

    fn now(&self) -> u64 {
        self.began.elapsed().as_nanos() as u64
    }

    /// One look at everything. Whether there was anything to do.
    fn turn(&mut self, now: u64) -> bool {
        let mut work = 0;
        for side in 0..self.sides.len() {
            for queue in 0..self.sides[side].queues.len() {
                let mut came = std::mem::take(&mut self.came);
                let queue = &mut self.sides[side].queues[queue];
                work += queue.receive(&mut self.memory, &mut came);
                for frame in came.drain(..) {
                    self.decide(now, frame);
                }
                self.came = came;
            }
        }
        for (line, side) in self.lines.iter_mut().zip(&mut self.sides) {
            while let Some(frame) = line.leave(now) {
                let bytes = frame.bytes() as u64;
                if let Err(frame) = side.queues[frame.queue].send(frame) {
                    line.put_back(frame);
                    break;
                }
                line.counters.carried += 1;
                line.counters.carried_bytes += bytes;
                work += 1;
            }
            for queue in &mut side.queues {
                let refused = queue.flush(&mut self.memory);
                line.counters.refused += refused;
                line.counters.carried -= refused;
                queue.refill(&mut self.memory);
                work += usize::from(queue.must_kick());
            }
        }
        work > 0
    }

    /// What becomes of a frame that came.
    fn decide(&mut self, now: u64, mut frame: Frame) {
        if let Some(recorder) = &mut self.recorder
            && let Err(error) = recorder.frame(&self.memory, &frame)
        {
            eprintln!("nothing more is recorded: {error:#}");
            self.recorder = None;
        }
        let head = self.memory.head(&frame);
        let to = self
            .sides
            .iter()
            .position(|side| head.starts_with(&side.mac));
        // For nobody here.
        let Some(line) = to.and_then(|to| self.lines.get_mut(to)) else {
            return self.memory.drop_frame(&frame);
        };
        let Some(fate) = line.offer() else {
            return self.memory.drop_frame(&frame);
        };
        if !self.memory.has_room() {
            line.counters.crowded += 1;
            return self.memory.drop_frame(&frame);
        }
        if let Some(word) = fate.corrupt {
            self.memory.corrupt(&mut frame, word);
        }
        let twin = if fate.duplicate {
            self.memory.copy(&frame)
        } else {
            None
        };
        let bytes = frame.bytes();
        if let Err(frame) = line.enter(now, frame, bytes, fate.late) {
            self.memory.drop_frame(&frame);
        }
        if let Some(twin) = twin {
            match line.enter(now, twin, bytes, false) {
                Ok(()) => line.counters.duplicated += 1,
                Err(twin) => self.memory.drop_frame(&twin),
            }
        }
    }

    /// Sleeps until a frame or a request comes or something is due. Whether it was a request; false at once when there is
    /// no time to sleep.
    fn sleep(&self, control: &Control) -> Result<bool> {
        let due = self.lines.iter().filter_map(Line::due).min();
        let left = due.map(|due| due.saturating_sub(self.now()));
        if left.is_some_and(|left| left < NEAR) {
            return Ok(false);
        }
        // Awake a little early, to yield until then.
        let timeout = left.map(|left| Duration::from_nanos(left - NEAR / 2));
        let timeout = timeout.map(Timespec::try_from).transpose()?;
        let mut fds = vec![PollFd::new(control, PollFlags::IN)];
        let queues = self.sides.iter().flat_map(|side| &side.queues);
        fds.extend(queues.map(|queue| PollFd::from_borrowed_fd(queue.fd(), PollFlags::IN)));
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => Ok(!fds[0].revents().is_empty()),
            Err(error) => Err(error).context("poll"),
        }
    }

    fn answer(&mut self, request: WireRequest) -> WireAnswer {
        let toward = match &request {
            WireRequest::Set { toward, .. } | WireRequest::Cut { toward, .. } => *toward,
            WireRequest::Record { .. } | WireRequest::Counters => None,
        };
        if let Err(error) = self.record(&request) {
            return WireAnswer::Refused(format!("{error:#}"));
        }
        if let Some(node) = toward
            && !self.sides.iter().any(|side| side.node == node)
        {
            return WireAnswer::Refused(format!("there is no node {node}"));
        }
        let meant = |side: &Side| toward.is_none_or(|node| side.node == node);
        for (line, _) in self
            .lines
            .iter_mut()
            .zip(&self.sides)
            .filter(|(_, side)| meant(side))
        {
            match &request {
                WireRequest::Set { impairment, .. } => {
                    if let Err(error) = impairment.check() {
                        return WireAnswer::Refused(error.to_string());
                    }
                    line.set(impairment);
                }
                WireRequest::Cut { cut, .. } => line.cut(*cut),
                WireRequest::Record { .. } | WireRequest::Counters => {}
            }
        }
        WireAnswer::Done(self.counters())
    }

    /// What came before any request is in its file; some requests end that file, or begin another.
    fn record(&mut self, request: &WireRequest) -> Result<()> {
        if let Some(recorder) = &mut self.recorder {
            recorder.flush()?;
        }
        if let WireRequest::Record { file } = request {
            self.recorder = file.as_deref().map(Recorder::begin).transpose()?;
        }
        Ok(())
    }

    fn counters(&self) -> WireCounters {
        let by_node = |(line, side): (&Line<Frame>, &Side)| (side.node, line.counters);
        let queues = self.sides.iter().flat_map(|side| &side.queues);
        WireCounters {
            toward: self.lines.iter().zip(&self.sides).map(by_node).collect(),
            missed: queues.map(|queue| queue.missed()).sum(),
        }
    }
}
