//! What kind of program the daemon is, before it runs.

#![allow(clippy::unwrap_used)]

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use object::read::elf::{ElfFile64, ProgramHeader};
use object::{Endianness, elf};
use rustix::process::{Pid, WaitId, WaitIdOptions, waitid};

// The build's wrapper (`.cargo/rustc`) not called, or without effect. Expect: no loader is asked for, and addresses are still chosen by the kernel.
#[test]
fn the_daemon_needs_no_loader_and_can_be_anywhere() {
    let file = std::fs::read(env!("CARGO_BIN_EXE_portoland")).unwrap();
    let file = ElfFile64::<Endianness>::parse(&*file).unwrap();
    let endian = file.endian();
    let types = file.elf_program_headers().iter().map(|h| h.p_type(endian));
    assert!(types.into_iter().all(|kind| kind != elf::PT_INTERP));
    assert_eq!(file.elf_header().e_type.get(endian), elf::ET_DYN);
}

/// How nice `portoland --version` is when it is dead, in such an environment; `None` if it took too long to tell.
fn niceness_with(environment: &[(&str, &str)]) -> Option<i32> {
    let began = Instant::now();
    let mut child = Command::new(env!("CARGO_BIN_EXE_portoland"))
        .arg("--version")
        .env_clear()
        .envs(environment.iter().copied())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let dead = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
    let pid = Pid::from_raw(child.id() as i32).unwrap();
    waitid(WaitId::Pid(pid), dead).unwrap();
    let took = began.elapsed();
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    assert!(child.wait().unwrap().success());
    // proc_pid_stat(5): the nineteenth field; the third follows the name.
    let nice = stat.rsplit(')').next().unwrap().split_whitespace().nth(16);
    (took < Duration::from_millis(40)).then(|| nice.unwrap().parse().unwrap())
}

// Environments that announce something to inherit, and others that are close to it. Expect: in the former the program is nice from its first
// instruction on; it ends here without having come to where that ends. After 40 ms it is ordinary by itself, which tells nothing.
#[cfg(target_arch = "x86_64")]
#[test]
fn whoever_comes_back_makes_way_from_the_first_instruction_on() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let cases: [(&[(&str, &str)], i32); 12] = [
        (&[], 0),
        (&[("A", "")], 0),
        (&[("LISTEN_FD", "1"), ("LISTEN_FDNAMES", "x")], 0),
        (&[("LISTEN_FDSX", "1"), ("XLISTEN_FDS", "1")], 0),
        (&[("PORTOLAN", ""), ("PORTOLAN_HANDOVE", "R=")], 0),
        (&[("LISTEN_FDS", "0")], 10),
        (&[("A", "b"), ("LISTEN_FDS", ""), ("Z", "b")], 10),
        (&[("LISTEN_FDNAMES", ""), ("LISTEN_FDS", "1")], 10),
        (
            &[("LISTEN_FDS", "1"), ("LISTEN_FDNAMES", "xsk-0:listener")],
            10,
        ),
        (&[("LISTEN_FDNAMES", "listener")], 0),
        (&[("PORTOLAN_HANDOVER", "")], 10),
        (&[("PORTOLAN_HANDOVEN", "x"), ("PORTOLAN_HANDOVER", "")], 10),
    ];
    // Whatever the test has been given.
    rustix::process::setpriority_process(None, 0).unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    for (environment, expected) in cases {
        let nice = std::iter::from_fn(|| {
            assert!(Instant::now() < deadline, "40 ms for `--version`, always");
            Some(niceness_with(environment))
        });
        let nice = nice.flatten().next().unwrap();
        assert_eq!(nice, expected, "{environment:?}");
    }
}
