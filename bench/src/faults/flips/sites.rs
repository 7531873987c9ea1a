//! Where bits are flipped: instructions of the send and of the receive path that traffic really executes.
//!
//! FTGM flipped bits in `send_chunk`, "a serial piece of code that is executed each time a message is sent out, \[so\] we are assured that
//! all the faults are activated". Compiled Rust is not serial: much of a function's code is for errors. So an engine that carries
//! traffic is single-stepped first, and only bytes of instructions that it executed are candidates. Rejected: all bytes of the
//! functions, which mostly shows that code that does not run does no harm.
//!
//! An instruction's length is taken from where the next one began; of one that always jumps, the first two bytes are candidates.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::sys::ptrace;
use nix::sys::signal::Signal;
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use portolan_testbed::cancel;

use crate::faults::random::Random;
use crate::faults::text::{Function, Program};

/// Longest instruction of x86-64.
const LONGEST: u64 = 15;
/// What is taken of an instruction that always jumps.
const JUMP: u64 = 2;
/// Steps in a row; then it runs freely for a while, or it would only ever work off what came meanwhile.
const BURST: u32 = 2000;
/// How long it runs freely at most.
const FREE: Duration = Duration::from_millis(4);

/// The two paths.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Path {
    /// From a token to a frame on the wire: accept, transmit.
    Send,
    /// From a frame to an event: receive, commit.
    Receive,
}

/// Functions by parts of their names, as the linker has them: each name component behind its length.
const SEND: &[&str] = &[
    "6engine5serve10serve_port",
    "6engine5serve12serve_tokens",
    "6engine5serve6submit",
    "6engine5ports4Port9take_send",
    "6engine4path4Path8transmit",
    "6engine5encap13Encapsulation5build",
    "6engine12checked_copy",
    "8endpoint6submit",
    "8endpoint8transmit",
    "8endpoint4turn",
    "8endpoint11send_stream",
    "4wire6writer",
    "4wire5codec6encode",
    "3xsk8transmit",
];
const RECEIVE: &[&str] = &[
    "6engine4path4Path7receive",
    "6engine7inbound",
    "6engine5encap13Encapsulation5parse",
    "6engine12checked_copy",
    "12handle_frame",
    "13receive_frame",
    "8endpoint7arrival",
    "8endpoint6accept",
    "8endpoint4data",
    "8endpoint6commit",
    "8endpoint14receive_stream",
    "8endpoint12long_message",
    "4wire5parse",
    "4wire5codec6decode",
    "4wire5plain",
    "3xsk7receive",
];
/// Of the implementation of `transport::Host`, whose names hold the trait's: by method.
const HOST: &str = "host..Host";
const HOST_SEND: &[&str] = &["6accept", "4read", "8complete"];
const HOST_RECEIVE: &[&str] = &["5claim", "13write_payload", "6commit"];

impl Path {
    pub fn name(self) -> &'static str {
        match self {
            Self::Send => "send",
            Self::Receive => "receive",
        }
    }

    fn holds(self, function: &Function) -> bool {
        let name = &function.name;
        let (parts, methods) = match self {
            Self::Send => (SEND, HOST_SEND),
            Self::Receive => (RECEIVE, HOST_RECEIVE),
        };
        let ours = name.contains("portoland") || name.contains("portolan_transport");
        let is_part = parts.iter().any(|part| name.contains(part));
        let is_method = name.contains(HOST) && methods.iter().any(|m| name.contains(m));
        ours && !name.contains("drop_in_place") && (is_part || is_method)
    }
}

/// Executed instructions of one path: (address in the file, bytes).
#[derive(Clone, Debug)]
pub struct Sites {
    instructions: Vec<(u64, u64)>,
    bytes: u64,
    functions: usize,
}

impl Sites {
    /// Of the instructions that were executed, those of a path.
    pub fn of(path: Path, program: &Program, executed: &Executed) -> Result<Self> {
        let mut sites = Self {
            instructions: Vec::new(),
            bytes: 0,
            functions: 0,
        };
        for function in program.functions.iter().filter(|f| path.holds(f)) {
            let range = function.address..function.address + function.bytes;
            let before = sites.instructions.len();
            for (address, length) in executed.0.range(range) {
                sites.instructions.push((*address, *length));
                sites.bytes += length;
            }
            sites.functions += usize::from(sites.instructions.len() > before);
        }
        if sites.bytes == 0 {
            bail!(
                "the {} path was never executed: is this the release build, with its symbols?",
                path.name()
            );
        }
        Ok(sites)
    }

    pub fn describe(&self) -> String {
        format!(
            "{} bytes of {} instructions in {} functions",
            self.bytes,
            self.instructions.len(),
            self.functions
        )
    }

    /// Any bit: (address in the file, bit of the byte).
    pub fn pick(&self, random: &mut Random) -> Result<(u64, u32)> {
        let mut byte = random.below(self.bytes);
        for (address, length) in &self.instructions {
            if byte < *length {
                return Ok((address + byte, random.below(8) as u32));
            }
            byte -= length;
        }
        bail!("no bit to flip")
    }
}

/// Instructions of a program that were executed: address in the file → bytes.
#[derive(Debug, Default)]
pub struct Executed(BTreeMap<u64, u64>);

impl Executed {
    /// Follows a process, which runs `program` moved by `shift`, instruction by instruction, at random moments.
    #[cfg(target_arch = "x86_64")]
    pub fn follow(
        &mut self,
        pid: i32,
        program: &Program,
        shift: u64,
        span: Duration,
        random: &mut Random,
    ) -> Result<()> {
        let pid = Pid::from_raw(pid);
        let first = program.functions.first().map_or(0, |f| f.address);
        let last = program.functions.last().map_or(0, |f| f.address + f.bytes);
        ptrace::seize(pid, ptrace::Options::empty()).context("ptrace: seize")?;
        let end = Instant::now() + span;
        let mut followed = Ok(());
        while followed.is_ok() && Instant::now() < end && !cancel::requested() {
            followed = self.burst(pid, shift, first..last);
            std::thread::sleep(random.span(FREE));
        }
        // To be let go of it must be stopped; it may have been killed meanwhile.
        let _ = ptrace::interrupt(pid).map(|()| stopped(pid));
        let _ = ptrace::detach(pid, None);
        followed
    }

    #[cfg(target_arch = "x86_64")]
    fn burst(&mut self, pid: Pid, shift: u64, program: std::ops::Range<u64>) -> Result<()> {
        ptrace::interrupt(pid).context("ptrace: interrupt")?;
        stopped(pid)?;
        let mut before = None;
        for _ in 0..BURST {
            let registers = ptrace::getregs(pid).context("ptrace: registers")?;
            let here = registers.rip.wrapping_sub(shift);
            if let Some(before) = before {
                self.executed(before, here);
            }
            before = program.contains(&here).then_some(here);
            ptrace::step(pid, None).context("ptrace: step")?;
            stopped(pid)?;
        }
        ptrace::cont(pid, None).context("ptrace: continue")
    }

    /// One instruction, and the one after it.
    fn executed(&mut self, at: u64, next: u64) {
        let length = next.wrapping_sub(at);
        let length = if (1..=LONGEST).contains(&length) {
            length
        } else {
            JUMP
        };
        // What jumps a short way forward looks longer than it is; so does what jumps far, if it is shorter than assumed.
        let known = self.0.entry(at).or_insert(length);
        *known = match *known {
            JUMP => length,
            longer if length == JUMP => longer,
            longer => longer.min(length),
        };
    }

    #[cfg(not(target_arch = "x86_64"))]
    pub fn follow(
        &mut self,
        _: i32,
        _: &Program,
        _: u64,
        _: Duration,
        _: &mut Random,
    ) -> Result<()> {
        bail!("instructions are followed on x86-64 only")
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }
}

/// Waits for the next stop; an error if the process ended.
fn stopped(pid: Pid) -> Result<()> {
    match waitpid(pid, Some(WaitPidFlag::__WALL)).context("ptrace: wait")? {
        WaitStatus::Stopped(_, Signal::SIGTRAP) | WaitStatus::PtraceEvent(..) => Ok(()),
        WaitStatus::Stopped(..) => Ok(()),
        ended => bail!("the process that is followed ended: {ended:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn function(name: &str, address: u64) -> Function {
        Function {
            name: name.to_owned(),
            address,
            bytes: 100,
        }
    }

    // Some instructions were executed, in functions of both paths and of none. Expect: every bit of every executed instruction of the path can
    // be picked, and no other.
    #[test]
    fn only_executed_bytes_of_the_path_are_picked() {
        let program = Program::with_functions(vec![
            function("_ZN18portolan_transport8endpoint8transmit4pollE", 1000),
            function("_ZN18portolan_transport8endpoint12handle_frameE", 2000),
            function("_ZN3foo8endpoint8transmitE", 3000),
        ]);
        let executed = Executed([(1010, 3), (1050, 2), (2010, 4), (3010, 5)].into());
        let sites = Sites::of(Path::Send, &program, &executed).unwrap();
        let mut random = Random::new(3);
        let mut seen: Vec<u64> = (0..500)
            .map(|_| sites.pick(&mut random).unwrap().0)
            .collect();
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen, [1010, 1011, 1012, 1050, 1051]);
        assert!(Sites::of(Path::Receive, &program, &Executed::default()).is_err());
    }
}
