//! The engine as a process, seen from the other end of its link: a supervisor that is not there, goes away, or talks nonsense.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::os::fd::OwnedFd;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use portoland::engine_link::{FromEngine, MAX_PACKET};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};

const PATIENCE: Duration = Duration::from_secs(20);

struct Engine {
    link: OwnedFd,
    process: Child,
}

impl Engine {
    /// The shell gives it our socket as descriptor 3.
    fn start() -> Self {
        let flags = SocketFlags::CLOEXEC;
        let kind = SocketType::SEQPACKET;
        let (link, theirs) =
            rustix::net::socketpair(AddressFamily::UNIX, kind, flags, None).unwrap();
        let process = Command::new("/bin/sh")
            .args(["-c", "exec \"$0\" engine 3<&0 0</dev/null"])
            .arg(env!("CARGO_BIN_EXE_portoland"))
            .stdin(Stdio::from(theirs))
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        Self { link, process }
    }

    fn send(&self, packet: &[u8]) {
        rustix::net::send(&self.link, packet, SendFlags::NOSIGNAL).unwrap();
    }

    fn fatal(&self) -> String {
        let timeout = Timespec::try_from(PATIENCE).unwrap();
        let mut fds = [PollFd::new(&self.link, PollFlags::IN)];
        assert_eq!(rustix::event::poll(&mut fds, Some(&timeout)).unwrap(), 1);
        let mut packet = vec![0; MAX_PACKET];
        let (_, len) = rustix::net::recv(&self.link, &mut packet[..], RecvFlags::empty()).unwrap();
        match serde_json::from_slice(&packet[..len]).unwrap() {
            FromEngine::Fatal { message } => message,
            other => panic!("{other:?}"),
        }
    }

    fn exit_code(mut self) -> Option<i32> {
        drop(self.link);
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.process.try_wait().unwrap() {
                return status.code();
            }
            if Instant::now() > deadline {
                self.process.kill().unwrap();
                panic!("the engine did not leave");
            }
            std::thread::yield_now();
        }
    }
}

#[test]
fn an_engine_started_by_hand_says_so() {
    let output = Command::new("/bin/sh")
        .args(["-c", "exec \"$0\" engine 3<&-"])
        .arg(env!("CARGO_BIN_EXE_portoland"))
        .output()
        .unwrap();
    assert!(!output.status.success());
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(text.contains("started by its supervisor"), "{text}");
}

#[test]
fn an_engine_whose_supervisor_goes_away_leaves() {
    assert_eq!(Engine::start().exit_code(), Some(0));
}

#[test]
fn an_engine_that_is_told_nonsense_says_what_and_leaves() {
    for (packet, says) in [
        (&b"nonsense"[..], "makes no sense"),
        (br#"{"to_engine":"take_over"}"#, "must be Start"),
        (START, "no descriptor for the ledger"),
    ] {
        let engine = Engine::start();
        engine.send(packet);
        let message = engine.fatal();
        assert!(message.contains(says), "{message}");
        assert_eq!(engine.exit_code(), Some(1));
    }
}

const START: &[u8] = br#"{"to_engine":"start","node":1,"name":"a","cluster":1,"incarnation":1,"queue":0,"queues":1,
    "ledger":{"peers":1,"send_streams":1,"receive_streams":1,"frames":64},"encap":"udp","udp_port":28000,
    "mac":[2,0,0,0,0,1],"address":"10.0.0.1","mtu":1500,"wait":"adaptive","core":null,"rx_frames":32,
    "ring_entries":32,"default_timeout_ms":1000}"#;
