//! Programs that run beside a test.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use portolan_testbed::Node;
use portolan_testbed::process::{self, OnCancel};
use serde_json::Value;

/// Killed when dropped.
pub struct Running(Child);

impl Running {
    pub fn start(command: &mut Command) -> Self {
        Self(command.stderr(Stdio::inherit()).spawn().unwrap())
    }

    /// Something, once it has opened the port.
    pub fn open(&mut self, node: &Node, port: u16) -> Option<()> {
        if let Some(status) = self.0.try_wait().unwrap() {
            panic!("it ended before it opened port {port}: {status}");
        }
        let attached = portolan::Node::attach(node.socket()).unwrap();
        let report = attached.report(portolan::Report::Ports).unwrap();
        let rows = report["ports"].as_array().unwrap();
        let open = |row: &Value| row["port"] == port && row["state"] == "open";
        rows.iter().any(open).then_some(())
    }

    pub fn succeeds(mut self, within: Duration) {
        let ended = process::wait_child(&mut self.0, Instant::now() + within, OnCancel::Stop);
        let status = ended.unwrap().expect("it ends in time");
        assert!(status.success(), "{status}");
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
