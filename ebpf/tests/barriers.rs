//! What the verifier adds to a program that is loaded without CAP_PERFMON, as the daemon loads it. Needs root.
#![allow(clippy::unwrap_used, reason = "a test's helpers fail by panicking")]

use libbpf_rs::query::{ProgInfoIter, ProgInfoQueryOptions};
use portolan_ebpf::{Encap, Frames, Steer, SteerConfig};
use rustix::thread::{CapabilitySet, capabilities, set_capabilities};

/// `BPF_ST | BPF_NOSPEC` of include/linux/filter.h: nothing behind it begins before what is ahead of it has ended.
const BARRIER: u8 = 0xc2;
const INSTRUCTION: usize = 8;

/// Loads the program, as somebody who may see what the kernel speculates about, or who may not.
fn load(frames: Frames, may_see: bool) -> Steer {
    let load = move || {
        let mut sets = capabilities(None).unwrap();
        if !may_see {
            for revealing in [CapabilitySet::SYS_ADMIN, CapabilitySet::PERFMON] {
                sets.effective.remove(revealing);
            }
        }
        set_capabilities(None, sets).unwrap();
        let config = SteerConfig {
            encap: Encap::Udp,
            ethertype: 0,
            udp_base_port: 7_000,
            queues: 1,
            local_mac: [2, 0, 0, 0, 0, 1],
            local_v4: Some([10, 0, 0, 1].into()),
            local_v6: None,
        };
        Steer::load_for(&config, frames).unwrap()
    };
    // Capabilities are a thread's.
    std::thread::spawn(load).join().unwrap()
}

/// The programs this process holds, by what the kernel calls them.
fn held() -> Vec<u32> {
    let mut ids = Vec::new();
    for info in std::fs::read_dir("/proc/self/fdinfo").unwrap() {
        // One of them is gone already: the directory's.
        let told = std::fs::read_to_string(info.unwrap().path()).unwrap_or_default();
        let id = told.lines().find_map(|line| line.strip_prefix("prog_id:"));
        ids.extend(id.map(|id| id.trim().parse::<u32>().unwrap()));
    }
    ids
}

/// Barriers in the one program that this process holds, as the verifier made it.
fn barriers() -> usize {
    let ids = held();
    assert_eq!(ids.len(), 1, "{ids:?}");
    let options = ProgInfoQueryOptions::default().include_xlated_prog_insns(true);
    let program = ProgInfoIter::with_query_opts(options).find(|program| ids.contains(&program.id));
    let code = program.unwrap().xlated_prog_insns;
    assert!(
        code.len() > 100 * INSTRUCTION,
        "{} bytes of code; net.core.bpf_jit_harden at 2 withholds it",
        code.len()
    );
    (code
        .iter()
        .step_by(INSTRUCTION)
        .filter(|code| **code == BARRIER))
    .count()
}

// The program, loaded with CAP_PERFMON and without. Expect: no barrier; one, which is where a frame that is not ours is counted, as its reason is a key on the
// stack. One in front of ours would wait for each frame's first bytes.
#[test]
fn nothing_waits_in_front_of_a_frame_of_ours() {
    let told = std::fs::read_to_string("/proc/cmdline").unwrap();
    let unguarded = told
        .split_whitespace()
        .any(|word| word == "mitigations=off");
    for frames in [Frames::OfOneBuffer, Frames::OfSeveralBuffers] {
        for (may_see, expected) in [(true, 0), (false, usize::from(!unguarded))] {
            let _steer = load(frames, may_see);
            assert_eq!(barriers(), expected, "{frames:?}, CAP_PERFMON: {may_see}");
        }
    }
}
