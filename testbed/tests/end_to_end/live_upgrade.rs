//! A running daemon replaced by another build while engines move messages: in place, with a service manager and without; and one that
//! does not fit, refused.

use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Output;

use crate::harness::crowd::{all_go_on, all_is_well, all_talk, talk};
use crate::harness::talker::close_books;
use crate::harness::{Cluster, STEP, books};
use portolan_testbed::{Binaries, DaemonOptions, Lab, ManagerOptions};

/// Another build: the same code, and something behind it that nobody looks at.
fn another_build(directory: &Path, number: u32) -> PathBuf {
    let path = directory.join(format!("portoland-{number}"));
    fs::copy(Binaries::find().unwrap().daemon().unwrap(), &path).unwrap();
    let mut file = fs::OpenOptions::new().append(true).open(&path).unwrap();
    write!(file, "build {number}").unwrap();
    path
}

/// A program that says it is of other versions, or says something else.
fn script(directory: &Path, name: &str, said: &str) -> PathBuf {
    let path = directory.join(name);
    fs::write(&path, format!("#!/bin/sh\necho '{said}'\n")).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path
}

fn upgrade(cluster: &Cluster, binary: &Path) -> Output {
    let mut command = cluster.lab.node(1).portolan();
    command.arg("upgrade").arg(binary).output().unwrap()
}

/// The executables of the engines of node 1.
fn engine_programs(cluster: &Cluster) -> Vec<PathBuf> {
    let pids = cluster.daemon(1).engine_pids().unwrap_or_default();
    let program = |pid| fs::read_link(format!("/proc/{pid}/exe")).ok();
    pids.into_iter().filter_map(program).collect()
}

fn upgrades(options: &DaemonOptions, times: u32) {
    let cluster = Cluster::start_as(Lab::builder(), |_| options.clone());
    let directory = tempfile::tempdir().unwrap();
    fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let mut all = all_talk(&cluster, &[(1, 10), (2, 10), (2, 11)]);

    let pid = cluster.daemon(1).pid();
    for number in 0..times {
        let build = another_build(directory.path(), number);
        let output = upgrade(&cluster, &build);
        assert!(output.status.success(), "{output:?}");
        assert_eq!(fs::read_link(format!("/proc/{pid}/exe")).unwrap(), build);
        // The engines follow, one takeover each.
        crate::harness::until("the engines are of the new build", STEP, || {
            (engine_programs(&cluster) == [build.clone()]).then_some(())
        });
        all_go_on(&mut all);
    }
    assert_eq!(cluster.daemon(1).pid(), pid, "the same process");

    // The same build in another file. Expect: the supervisor runs from there, the engine goes on.
    let engines = cluster.daemon(1).engine_pids().unwrap();
    let copy = directory.path().join("portoland-copy");
    fs::copy(
        directory.path().join(format!("portoland-{}", times - 1)),
        &copy,
    )
    .unwrap();
    let output = upgrade(&cluster, &copy);
    assert!(output.status.success(), "{output:?}");
    assert_eq!(fs::read_link(format!("/proc/{pid}/exe")).unwrap(), copy);
    all_go_on(&mut all);
    assert_eq!(cluster.daemon(1).engine_pids().unwrap(), engines);

    // Those that do not fit. Expect: refused with the reason, and the old one serves.
    let abi = portolan_abi::LEDGER_ABI_VERSION + 1;
    let other = format!(r#"{{"store":1,"ledger":{abi},"port":1,"link":1}}"#);
    for (said, why) in [(other.as_str(), "ledger ABI"), ("hello", "no portoland")] {
        let output = upgrade(&cluster, &script(directory.path(), "other", said));
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && error.contains(why), "{error}");
    }
    let output = upgrade(&cluster, &directory.path().join("nothing"));
    assert!(!output.status.success());
    all_go_on(&mut all);

    all_is_well(all);
}

#[test]
fn ten_upgrades_in_a_row_under_load() {
    let options = DaemonOptions {
        manager: Some(ManagerOptions::default()),
        ..DaemonOptions::default()
    };
    upgrades(&options, 10);
}

#[test]
fn an_upgrade_needs_no_service_manager() {
    upgrades(&DaemonOptions::default(), 3);
}

// A package puts another build in place and the daemon is restarted.
#[test]
fn a_restart_with_another_build_renews_the_engines() {
    let cluster = Cluster::start_managed(Lab::builder().nodes(1));
    let directory = tempfile::tempdir().unwrap();
    fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let mut all = vec![talk(&cluster, (1, 10), &[(1, 10)])];
    all.iter().for_each(|talking| talking.send(true));
    all_go_on(&mut all);
    let build = another_build(directory.path(), 1);
    let manager = cluster.daemon(1).manager().unwrap();
    manager.set_program(&build);
    manager.restart(STEP).unwrap();
    crate::harness::until("the engines are of the new build", STEP, || {
        (engine_programs(&cluster) == [build.clone()]).then_some(())
    });
    all_go_on(&mut all);
    let complaints = books::complaints(&close_books(all, STEP));
    assert!(complaints.is_empty(), "{complaints:#?}");

    // A store of another version. Expect: it says so, with a code of its own, and engines and applications go on.
    let mut all = vec![talk(&cluster, (1, 11), &[(1, 11)])];
    all.iter().for_each(|talking| talking.send(true));
    all_go_on(&mut all);
    manager.hold(true);
    manager.kill().unwrap();
    manager.wait_gone(STEP).unwrap();
    let manifest = fs::read(fd_path(&manager.stored_fd("manifest").unwrap())).unwrap();
    let text = String::from_utf8(manifest).unwrap();
    let other = text.replacen(r#""ledger":"#, r#""ledger":9"#, 1);
    assert_ne!(other, text);
    let replaced = tempfile::NamedTempFile::new().unwrap();
    fs::write(replaced.path(), other).unwrap();
    let file = fs::File::open(replaced.path()).unwrap();
    manager.replace("manifest", file.into()).unwrap();
    manager.hold(false);
    crate::harness::until("it gives up", STEP, || manager.failure());
    let codes: Vec<_> = manager.exits().iter().filter_map(|e| e.code()).collect();
    assert!(
        codes.len() > 1 && codes.iter().all(|code| [0, 4].contains(code)),
        "{codes:?}"
    );
    let log = cluster.daemon(1).log();
    assert!(log.contains("ledger ABI 9"), "{log}");
    all_go_on(&mut all);
}

fn fd_path(fd: &std::os::fd::OwnedFd) -> PathBuf {
    use std::os::fd::AsRawFd;
    format!("/proc/self/fd/{}", fd.as_raw_fd()).into()
}
