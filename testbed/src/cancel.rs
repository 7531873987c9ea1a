//! One flag for the whole process: "somebody wants us to stop".
//!
//! A program with a signal handler (`cargo xtask demo`) sets it; every wait in this crate looks at it and gives up,
//! except those that clean up.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

/// The flag itself, to be handed to a signal handler.
pub fn flag() -> &'static Arc<AtomicBool> {
    static FLAG: OnceLock<Arc<AtomicBool>> = OnceLock::new();
    FLAG.get_or_init(Arc::default)
}

/// Whether somebody wants us to stop.
pub fn requested() -> bool {
    flag().load(Ordering::Relaxed)
}
