//! What is done to two systems, in order, and what must come of it.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use super::container::Container;
use super::load::Load;

/// Bound on each thing that is asked of a system.
const WITHIN: Duration = Duration::from_secs(60);
/// `systemd-analyze security` may say this much, in tenths.
const MOST_EXPOSED: f64 = 3.0;
/// The names of the quick start.
const NAMES: [&str; 2] = ["node1", "node2"];

/// Everything.
pub fn all(systems: &mut [Container; 2], commands: &[Vec<String>; 2]) -> Result<()> {
    step(
        "quick start: from bare systems to the first message",
        || quick_start(systems, commands),
    )?;
    for system in &*systems {
        step("systemd's opinion", || judged_by_systemd(system))?;
    }
    let [one, two] = systems;
    let load = Load::start([one, two], NAMES);
    step("traffic", || load.goes_on())?;
    step("systemctl restart", || {
        restarted(one)?;
        load.goes_on()
    })?;
    step("kill -9 of the supervisor", || {
        supervisor_killed(one)?;
        load.goes_on()
    })?;
    step("kill -9 of an engine", || {
        engine_killed(one)?;
        load.goes_on()
    })?;
    step("upgrade of the package", || {
        upgraded(one)?;
        load.goes_on()
    })?;
    step("systemctl reload with another access list", || {
        reloaded(one)?;
        load.goes_on()
    })?;
    step("processors of engines", || {
        load.goes_on()?;
        processors(one, two)
    })?;
    step("the drop-in for node.cpu_latency_us", || {
        kept_awake(one)?;
        load.goes_on()
    })?;
    step("/var/log is full", || log_full(two, &load))?;
    let runs = load.stop()?;
    println!("   {runs} runs of allsize --verify, none failed");
    step("an instance of portoland@.service instead", || {
        instance(one)
    })?;
    step("a system reboots", || rebooted(systems))?;
    for system in &*systems {
        step("purge", || purged(system))?;
    }
    Ok(())
}

fn step(what: &str, work: impl FnOnce() -> Result<()>) -> Result<()> {
    let started = Instant::now();
    work().with_context(|| what.to_owned())?;
    println!("   {:>5.1} s  {what}", started.elapsed().as_secs_f64());
    Ok(())
}

/// Node by node, except the last command, which needs both.
fn quick_start(systems: &[Container; 2], commands: &[Vec<String>; 2]) -> Result<()> {
    let mut last = Vec::new();
    for (system, commands) in systems.iter().zip(commands) {
        let (first_message, before) = commands.split_last().context("no command")?;
        for (index, command) in before.iter().enumerate() {
            system.ok(command, WITHIN)?;
            if index == 0 {
                let state = system.run("systemctl is-active portoland", WITHIN)?.stdout;
                ensure!(
                    state.trim() == "inactive",
                    "the package has started something: {state}"
                );
                // What it brings is a configuration that fits as soon as the interface is there.
                system.ok("portoland check /etc/portolan/portolan.toml", WITHIN)?;
                system.ok(
                    "man_page=/usr/share/man/man8/portoland.8.gz; test -s $man_page",
                    WITHIN,
                )?;
            }
        }
        system.ok("portoland check /etc/portolan/portolan.toml", WITHIN)?;
        last.push((system, first_message));
    }
    for (system, command) in last {
        let said = system.ok(command, WITHIN)?;
        ensure!(!said.trim().is_empty(), "{command} said nothing");
        if system.name == NAMES[0] {
            print!("{}", indented(&said));
        }
    }
    Ok(())
}

fn indented(text: &str) -> String {
    text.lines()
        .map(|line| format!("     | {line}\n"))
        .collect()
}

fn judged_by_systemd(system: &Container) -> Result<()> {
    for unit in ["portoland.service", "portoland@eth0.service"] {
        let done = system.run(&format!("systemd-analyze verify --man=no {unit}"), WITHIN)?;
        let said = done.stdout + &done.stderr;
        ensure!(
            done.status.success() && said.trim().is_empty(),
            "verify {unit}: {said}"
        );
    }
    let said = system.ok(
        "systemd-analyze security --no-pager portoland.service",
        WITHIN,
    )?;
    let level = said.lines().last().and_then(|line| line.split(": ").nth(1));
    let level: f64 = level
        .and_then(|rest| rest.split_whitespace().next())
        .and_then(|number| number.parse().ok())
        .with_context(|| said.clone())?;
    ensure!(level <= MOST_EXPOSED, "exposure {level}\n{said}");
    println!("     | exposure {level}");
    Ok(())
}

fn main_pid(system: &Container) -> Result<u32> {
    let said = system.ok(
        "systemctl show --property=MainPID --value portoland",
        WITHIN,
    )?;
    said.trim().parse().with_context(|| said.clone())
}

/// The processes that are engines, oldest first.
fn engines(system: &Container) -> Result<Vec<u32>> {
    let script = "grep -lx portoland-eng /proc/[0-9]*/comm 2>/dev/null || true";
    let said = system.ok(script, WITHIN)?;
    let pid = |line: &str| line.split('/').nth(2)?.parse().ok();
    let mut all: Vec<u32> = said.lines().filter_map(pid).collect();
    ensure!(!all.is_empty(), "no engine runs");
    all.sort_unstable();
    Ok(all)
}

/// The process that serves queue 0, as the daemon reports it.
fn serving(system: &Container) -> Result<u32> {
    let said = system.ok("portolan status --json", WITHIN)?;
    let status: serde_json::Value = serde_json::from_str(&said)?;
    let pid = status["engines"][0]["pid"].as_u64();
    pid.and_then(|pid| pid.try_into().ok())
        .with_context(|| said)
}

fn another_supervisor(system: &Container, than: u32) -> Result<()> {
    let script = format!(
        "test $(systemctl show -p MainPID --value portoland) -ne {than} && systemctl is-active -q portoland && portolan status >/dev/null"
    );
    system.wait_for("another supervisor", &script, WITHIN)
}

fn restarted(system: &Container) -> Result<()> {
    let (supervisor, engine) = (main_pid(system)?, serving(system)?);
    system.ok("systemctl restart portoland", WITHIN)?;
    another_supervisor(system, supervisor)?;
    ensure!(
        serving(system)? == engine,
        "the engine was replaced by a restart of the supervisor"
    );
    Ok(())
}

fn supervisor_killed(system: &Container) -> Result<()> {
    let (supervisor, engine) = (main_pid(system)?, serving(system)?);
    system.ok(&format!("kill -9 {supervisor}"), WITHIN)?;
    another_supervisor(system, supervisor)?;
    ensure!(
        serving(system)? == engine,
        "the engine died with the supervisor"
    );
    Ok(())
}

fn engine_killed(system: &Container) -> Result<()> {
    let engine = serving(system)?;
    system.ok(&format!("kill -9 {engine}"), WITHIN)?;
    let script = format!(
        "portolan status --json | grep '\"pid\"' | grep -qv {engine} && ! test -d /proc/{engine}"
    );
    system.wait_for("another engine", &script, WITHIN)?;
    ensure!(serving(system)? != engine, "a dead engine serves");
    Ok(())
}

fn upgraded(system: &Container) -> Result<()> {
    let (supervisor, before) = (main_pid(system)?, engines(system)?);
    system.ok("apt-get install -y /srv/next.deb", WITHIN)?;
    let version = system.ok("dpkg-query -W -f '${Version}' portolan", WITHIN)?;
    ensure!(version == super::NEXT, "version {version}");
    another_supervisor(system, supervisor)?;
    // The daemon is another build, so each engine is replaced in its turn.
    let old: Vec<String> = before
        .iter()
        .map(|pid| format!("! test -d /proc/{pid}"))
        .collect();
    system.wait_for("engines of the new build", &old.join(" && "), WITHIN)
}

/// The configuration's line for the group, changed and back.
fn reloaded(system: &Container) -> Result<()> {
    system.ok("useradd --groups portolan alice", WITHIN)?;
    let ask = "timeout 1 runuser -u alice -- portolan recv 9 -q";
    let may = |expected: bool| -> Result<()> {
        let script = format!(
            "{ask} 2>&1 | grep -q 'not for uid'{}",
            if expected { "; test $? -ne 0" } else { "" }
        );
        system.wait_for(&format!("alice may: {expected}"), &script, WITHIN)
    };
    may(true)?;
    system.ok(
        "sed -i -e 's/^gid = \"portolan\"/gid = \"nogroup\"/' -e 's/^wait = .*/wait = \"yield\"/' /etc/portolan/portolan.toml && systemctl reload portoland",
        WITHIN,
    )?;
    may(false)?;
    // What it could not change it names.
    let journal = "journalctl -u portoland --no-pager -o cat | grep -q 'not changed: engine.wait'";
    system.wait_for("the journal names engine.wait", journal, WITHIN)?;
    let fields =
        "journalctl PORTOLAN_REFUSED=engine.wait --no-pager -o cat | grep -q 'not changed'";
    system.wait_for("as a field", fields, WITHIN)?;
    system.ok(
        "sed -i -e 's/^gid = \"nogroup\"/gid = \"portolan\"/' -e 's/^wait = .*/wait = \"adaptive\"/' /etc/portolan/portolan.toml && systemctl reload portoland",
        WITHIN,
    )?;
    may(true)?;
    // A file with an error is refused in the face of who reloads.
    system.ok("echo 'nonsense = 1' >> /etc/portolan/portolan.toml", WITHIN)?;
    let done = system.run("systemctl reload portoland", WITHIN)?;
    ensure!(
        !done.status.success(),
        "a broken configuration was reloaded"
    );
    system.ok(
        "sed -i '$d' /etc/portolan/portolan.toml && systemctl reload portoland",
        WITHIN,
    )?;
    Ok(())
}

/// While there are messages, processors of engines are kept awake, though the service is nobody's root and sees the kernel's settings as they are. Both nodes are on this machine:
/// a processor that one keeps awake the other lets be.
fn processors(one: &Container, two: &Container) -> Result<()> {
    let driver = std::fs::read_to_string("/sys/devices/system/cpu/cpuidle/current_driver");
    if matches!(driver.unwrap_or_default().trim(), "" | "none") {
        println!("   skipped: processors of this machine know no states");
        return Ok(());
    }
    let end = Instant::now() + WITHIN;
    let mut said = [String::new(), String::new()];
    while Instant::now() < end {
        for (said, system) in said.iter_mut().zip([one, two]) {
            let status = system.ok("portolan status --json", WITHIN)?;
            let status: serde_json::Value = serde_json::from_str(&status)?;
            let node = &status["node"];
            ensure!(node["keep_awake_refused"].is_null(), "{node}");
            let kept = node["kept_awake"].as_array();
            if kept.is_some_and(|kept| !kept.is_empty()) {
                return Ok(());
            }
            *said = node.to_string();
        }
    }
    bail!("no processor is kept awake: {said:?}")
}

/// The device that the service does not see otherwise, by the example that the package brings.
fn kept_awake(system: &Container) -> Result<()> {
    const DEVICE: &str = "/dev/cpu_dma_latency";
    let Ok(device) = rustix::fs::stat(DEVICE).map(|stat| stat.st_rdev) else {
        println!("   skipped: this kernel bounds no wake-ups");
        return Ok(());
    };
    // A node of its own: the drop-in gives it away.
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    system.ok(&format!("mknod -m 600 {DEVICE} c {major} {minor}"), WITHIN)?;
    const DIRECTORY: &str = "/etc/systemd/system/portoland.service.d";
    let restart = "systemctl daemon-reload && systemctl restart portoland";
    let says = |what: &str, number: &str| {
        let script = format!("portolan status --json | grep -q '\"cpu_latency_us\": *{number}'");
        system.wait_for(what, &script, WITHIN)
    };
    says("no bound by default", "null")?;
    system.ok(
        "sed -i 's/^#cpu_latency_us = .*/cpu_latency_us = 70/' /etc/portolan/portolan.toml && systemctl reload portoland",
        WITHIN,
    )?;
    let journal =
        "journalctl -u portoland --no-pager -o cat | grep -q 'cpu_latency_us is without effect'";
    system.wait_for("the journal says that it has no effect", journal, WITHIN)?;
    let copy = format!(
        "mkdir -p {DIRECTORY} && cp /usr/share/doc/portolan/examples/latency.conf {DIRECTORY}/"
    );
    system.ok(&format!("{copy} && {restart}"), WITHIN)?;
    says("the bound", "70")?;
    system.ok(
        &format!("rm -r {DIRECTORY} && sed -i 's/^cpu_latency_us = .*/#cpu_latency_us = 20/' /etc/portolan/portolan.toml && {restart}"),
        WITHIN,
    )?;
    says("no bound any more", "null")
}

fn log_full(system: &Container, load: &Load) -> Result<()> {
    system.ok(
        "journalctl --flush; dd if=/dev/zero of=/var/log/fill bs=64k status=none || true",
        WITHIN,
    )?;
    let full = system.run("echo more > /var/log/more", WITHIN)?;
    ensure!(!full.status.success(), "/var/log is not full");
    let supervisor = main_pid(system)?;
    system.ok("systemctl restart portoland", WITHIN)?;
    another_supervisor(system, supervisor)?;
    engine_killed(system)?;
    load.goes_on()?;
    system.ok("rm -f /var/log/fill /var/log/more", WITHIN)?;
    load.goes_on()
}

/// Traffic with another system, once it is possible.
fn flows(system: &Container, other: &str) -> Result<()> {
    let script = format!("portolan allsize --verify --max 64K --count 3 {other} >/dev/null");
    system.wait_for("traffic", &script, WITHIN)
}

/// The unit for one interface of several serves, is restarted without its engine, and gives the node back.
fn instance(system: &Container) -> Result<()> {
    system.ok(
        "systemctl disable --now portoland && cp /etc/portolan/portolan.toml /etc/portolan/eth0.toml && systemctl start portoland@eth0",
        WITHIN,
    )?;
    flows(system, NAMES[1])?;
    let engine = serving(system)?;
    system.ok("systemctl restart portoland@eth0", WITHIN)?;
    flows(system, NAMES[1])?;
    ensure!(
        serving(system)? == engine,
        "the engine was replaced by a restart of the instance"
    );
    system.ok(
        "systemctl stop portoland@eth0 && rm /etc/portolan/eth0.toml && systemctl enable --now portoland",
        WITHIN,
    )?;
    flows(system, NAMES[1])
}

/// Sends that were under way to a system that reboots end with that reason, and then it goes on.
fn rebooted(systems: &mut [Container; 2]) -> Result<()> {
    let [one, two] = systems;
    // A system takes longer to come back than a node is waited for.
    one.ok(
        "printf '[transport]\\nunreachable_after_ms = 120000\\n' >> /etc/portolan/portolan.toml && systemctl restart portoland",
        WITHIN,
    )?;
    flows(one, NAMES[1])?;
    let mut send =
        one.command("head -c 100000000000 /dev/zero | portolan send node2 --timeout 120 -q");
    let mut receive = two.command("portolan recv --timeout 120 -q > /dev/null");
    let spawn = |command: &mut std::process::Command| -> Result<std::process::Child> {
        let piped = std::process::Stdio::piped;
        std::os::unix::process::CommandExt::process_group(command, 0);
        Ok(command.stdout(piped()).stderr(piped()).spawn()?)
    };
    let mut receiver = spawn(&mut receive)?;
    let mut sender = spawn(&mut send)?;
    let result = (|| {
        let port = "portolan ports --json | grep -q '\"port\": *7\\b'";
        two.wait_for("the receiver's port", port, WITHIN)?;
        two.reboot()?;
        another_supervisor(two, 0)?;
        let end = Instant::now() + WITHIN;
        let ended = portolan_testbed::process::wait_child(
            &mut sender,
            end,
            portolan_testbed::process::OnCancel::Stop,
        )?;
        let Some(status) = ended else {
            bail!("a send to a node that rebooted does not end");
        };
        let mut said = String::new();
        if let Some(mut stderr) = sender.stderr.take() {
            std::io::Read::read_to_string(&mut stderr, &mut said)?;
        }
        ensure!(
            !status.success() && said.contains("restarted"),
            "{status}: {said}"
        );
        print!("{}", indented(&said));
        Ok(())
    })();
    for child in [&mut sender, &mut receiver] {
        portolan_testbed::process::kill_group(child);
    }
    result?;
    for (system, other) in [(&*one, NAMES[1]), (&*two, NAMES[0])] {
        flows(system, other)?;
    }
    Ok(())
}

/// A name that systemd still remembers, without a file, is nothing (`not-found`).
fn purged(system: &Container) -> Result<()> {
    system.ok("apt-get purge -y portolan", WITHIN)?;
    let left = "find / -xdev \\( -iname '*portolan*' -o -iname '*portoland*' \\) -not -path '/proc/*' -not -path '/sys/*' -not -path '/root/*' -not -path '/srv/*'; \
        getent passwd portolan portoland; getent group portolan; grep -hx 'portolan.*' /proc/[0-9]*/comm; ip -d link show eth0 | grep xdp; \
        find /run -xdev -iname '*portolan*' -not -path '/run/systemd/*'; systemctl list-units --all --plain --no-legend 'portoland*' | grep -v ' not-found '";
    let said = system.run(left, WITHIN)?.stdout;
    ensure!(said.trim().is_empty(), "left behind:\n{said}");
    Ok(())
}
