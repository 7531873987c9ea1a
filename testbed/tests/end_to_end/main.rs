//! Portolan as a whole: real daemons and engines over AF_XDP in network namespaces, real applications, real signals.
//!
//! One program, because to link each of these takes longer than many of them run. They run one at a time (`--test-threads=1`): two
//! cores carry one such test.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod application_death;
mod busy_poll;
mod capture;
mod configuration;
mod discovery;
mod dissector;
mod doctor;
mod drain;
mod engine_death;
mod fairness;
mod harness;
mod hostile;
mod hostile_client;
mod hostile_frames;
mod hostile_socket;
mod impaired;
mod integrity;
mod interface;
mod isolation;
mod keep_awake;
mod kernel_traffic;
mod lab;
mod live_upgrade;
mod messages;
mod misconfigurations;
mod monitoring;
mod privilege;
mod queues;
mod rarities;
mod supervisor_restart;
mod tshark;
mod upcall;
mod waiting;
mod wire;
