//! Who runs where: engines' cores, the NIC's interrupts, memory nodes, clock rates.

use std::path::Path;

use super::links::LinkFacts;
use super::{Findings, Patient, numbers, read};
use crate::engine_link::Wait;
use crate::supervisor::config::Config;

pub(super) fn look(patient: &Patient, link: &LinkFacts, findings: &mut Findings) {
    let Some(config) = &patient.config else {
        return;
    };
    cores(config, findings);
    let device = format!("/sys/class/net/{}/device", link.name);
    if Path::new(&device).exists() {
        numa(config, &device, findings);
        interrupts(config, &device, findings);
    } else {
        findings.ok(
            "irq",
            format!("{} has no device: no interrupts to place", link.name),
        );
    }
}

/// Cores of their own, at full speed.
fn cores(config: &Config, findings: &mut Findings) {
    let there = std::thread::available_parallelism().map_or(1, usize::from);
    let engines = config.queues.len();
    if config.wait == Wait::Busy && engines >= there {
        findings.bad(
            "cpu",
            format!("{engines} engines spin on {there} cores: nobody else runs"),
            "engine.wait = \"adaptive\", or fewer network.queues",
        );
    }
    if config.wait == Wait::Busy && config.cores.is_empty() {
        findings.warn(
            "cpu",
            "engines spin wherever the scheduler puts them",
            "engine.cores = [2]   # one for each queue, and isolcpus=2 on the kernel's command line",
        );
    }
    let isolated = numbers(&read("/sys/devices/system/cpu/isolated").unwrap_or_default());
    let shared: Vec<usize> = config
        .cores
        .iter()
        .copied()
        .filter(|c| !isolated.contains(c))
        .collect();
    if !shared.is_empty() {
        let list: Vec<String> = shared.iter().map(ToString::to_string).collect();
        let list = list.join(",");
        findings.warn(
            "cpu",
            format!("engines' cores {list} are not isolated: others may run there"),
            format!(
                "isolcpus={list} nohz_full={list}   # kernel command line; or a cpuset of their own"
            ),
        );
    }
    let watched = if config.cores.is_empty() {
        (0..there).collect()
    } else {
        config.cores.clone()
    };
    let governor = |core: &usize| {
        read(format!(
            "/sys/devices/system/cpu/cpu{core}/cpufreq/scaling_governor"
        ))
    };
    let slow = watched
        .iter()
        .find_map(|core| governor(core).filter(|g| g != "performance"));
    match slow {
        Some(governor) => findings.warn(
            "cpu",
            format!("clock rates follow the load (governor `{governor}`): the first message after a pause is slow"),
            "echo performance | tee /sys/devices/system/cpu/cpu*/cpufreq/scaling_governor",
        ),
        None => findings.ok("cpu", format!("{engines} engines, {there} cores, no governor in the way")),
    }
}

fn numa(config: &Config, device: &str, findings: &mut Findings) {
    let node = read(format!("{device}/numa_node")).and_then(|n| n.parse::<i32>().ok());
    let Some(node) = node.filter(|node| *node >= 0) else {
        findings.ok("numa", "one memory node");
        return;
    };
    let near =
        numbers(&read(format!("/sys/devices/system/node/node{node}/cpulist")).unwrap_or_default());
    let far: Vec<usize> = config
        .cores
        .iter()
        .copied()
        .filter(|c| !near.contains(c))
        .collect();
    if far.is_empty() {
        findings.ok(
            "numa",
            format!("the NIC is at memory node {node}, and no engine elsewhere"),
        );
        return;
    }
    findings.warn(
        "numa",
        format!("the NIC is at memory node {node}; cores {far:?} of engines are not"),
        format!(
            "engine.cores = {:?}",
            near.iter().take(config.queues.len()).collect::<Vec<_>>()
        ),
    );
}

/// Interrupts of the NIC on cores that engines spin on take turns with them.
fn interrupts(config: &Config, device: &str, findings: &mut Findings) {
    let Ok(entries) = std::fs::read_dir(format!("{device}/msi_irqs")) else {
        findings.ok("irq", "no message-signalled interrupts to place");
        return;
    };
    let mut clashes = Vec::new();
    for irq in entries
        .flatten()
        .filter_map(|e| e.file_name().to_string_lossy().parse::<u32>().ok())
    {
        let list = format!("/proc/irq/{irq}/effective_affinity_list");
        let on = numbers(&read(list).unwrap_or_default());
        if on.iter().any(|core| config.cores.contains(core)) {
            clashes.push(irq);
        }
    }
    let there = std::thread::available_parallelism().map_or(1, usize::from);
    let free = (0..there).find(|core| !config.cores.contains(core));
    match (config.wait, clashes.first(), free) {
        (Wait::Busy, Some(irq), Some(free)) => findings.warn(
            "irq",
            format!("interrupts {clashes:?} of the NIC are served on cores that engines spin on"),
            format!("echo {free} > /proc/irq/{irq}/smp_affinity_list   # each of them; and stop irqbalance"),
        ),
        _ => findings.ok("irq", "no interrupt of the NIC on a spinning engine's core"),
    }
}
