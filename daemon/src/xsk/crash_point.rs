//! Where an owner can die: called before every access to memory that is shared
//! with the kernel or a successor.
//!
//! Outside this crate's unit tests it is nothing. In them a test can let the
//! kernel's side run at any such point, or let the owner die there.

#[cfg(not(test))]
#[inline(always)]
pub(super) fn crash_point() {}

#[cfg(test)]
pub(super) use armed::{Died, crash_point, with_hook};

#[cfg(test)]
mod armed {
    use std::cell::RefCell;
    use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

    /// The owner has died at a crash point.
    #[derive(Debug)]
    pub(crate) struct Died;

    /// Called at each crash point; false lets the owner die there.
    type Hook = Box<dyn FnMut() -> bool>;

    thread_local! {
        static HOOK: RefCell<Option<Hook>> = const { RefCell::new(None) };
    }

    pub(crate) fn crash_point() {
        // Taken out while it runs: the hook itself may touch the rings.
        let Some(mut hook) = HOOK.with(|cell| cell.borrow_mut().take()) else {
            return;
        };
        if !hook() {
            resume_unwind(Box::new(Died));
        }
        HOOK.with(|cell| *cell.borrow_mut() = Some(hook));
    }

    /// Runs `body` with `hook` called at every crash point.
    pub(crate) fn with_hook<R>(
        hook: impl FnMut() -> bool + 'static,
        body: impl FnOnce() -> R,
    ) -> Result<R, Died> {
        HOOK.with(|cell| *cell.borrow_mut() = Some(Box::new(hook)));
        let result = catch_unwind(AssertUnwindSafe(body));
        HOOK.with(|cell| cell.borrow_mut().take());
        result.map_err(|panic| match panic.downcast::<Died>() {
            Ok(died) => *died,
            // A failed assertion, not a death.
            Err(panic) => resume_unwind(panic),
        })
    }
}
