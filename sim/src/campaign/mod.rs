//! Random runs: [`plan`] draws one from a seed, [`workload`] is its applications, [`run`] takes it through, [`parallel`] does many.

pub mod parallel;
pub mod plan;
pub mod run;
pub mod workload;
