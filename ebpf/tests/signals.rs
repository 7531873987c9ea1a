//! Signals while the program is loaded: the kernel then gives up with EAGAIN. Needs root.
#![allow(clippy::unwrap_used, reason = "a test's helpers fail by panicking")]

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use portolan_ebpf::{DEFAULT_ETHERTYPE, Encap, Frames, Steer, SteerConfig};
use rustix::process::{Pid, Signal, kill_process};

const DEADLINE: Duration = Duration::from_secs(60);
/// Loads by one process, and processes: what a process learns of the kernel, it learns with its first.
const LOADS: usize = 30;
const LOADERS: usize = 20;
/// Between a stop and the next; the kernel looks at the program for about a millisecond.
const PAUSES: [u64; 4] = [50, 150, 400, 900];

/// Killed if it has not ended.
struct Loader(Child);

impl Drop for Loader {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

// Processes that load the program, each stopped and told to go on all the time. Expect: they load it.
#[test]
fn a_signal_does_not_keep_the_program_out() {
    let mut stops = 0;
    for _ in 0..LOADERS {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "loader", "--ignored"]);
        command.stdout(Stdio::null());
        let mut loader = Loader(command.spawn().unwrap());
        let pid = Pid::from_child(&loader.0);
        let deadline = Instant::now() + DEADLINE;
        let status = loop {
            if let Some(status) = loader.0.try_wait().unwrap() {
                break status;
            }
            assert!(Instant::now() < deadline, "it does not end");
            kill_process(pid, Signal::STOP).unwrap();
            kill_process(pid, Signal::CONT).unwrap();
            stops += 1;
            std::thread::sleep(Duration::from_micros(PAUSES[stops % PAUSES.len()]));
        };
        assert!(status.success(), "{status}");
    }
    assert!(stops >= 5 * LOADERS, "they were stopped only {stops} times");
}

#[test]
#[ignore = "a process of the test above"]
fn loader() {
    let config = SteerConfig {
        encap: Encap::Ethernet,
        ethertype: DEFAULT_ETHERTYPE,
        udp_base_port: 0,
        queues: 1,
        local_mac: [2, 0, 0, 0, 0, 1],
        local_v4: None,
        local_v6: None,
    };
    for _ in 0..LOADS {
        for frames in [Frames::OfOneBuffer, Frames::OfSeveralBuffers] {
            Steer::load_for(&config, frames).unwrap();
        }
    }
}
