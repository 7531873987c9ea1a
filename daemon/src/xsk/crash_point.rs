//! Where an owner can die: called before every access to memory that is shared
//! with the kernel or a successor.
//!
//! Outside this crate's unit tests it is nothing. In them a test can let the
//! kernel's side run at any such point, or let the owner die there.

#[cfg(not(test))]
#[inline(always)]
pub(super) fn crash_point() {}

#[cfg(test)]
pub(super) use armed::crash_point;

#[cfg(test)]
mod armed {
    use std::cell::RefCell;

    type Hook = Box<dyn FnMut()>;

    thread_local! {
        static HOOK: RefCell<Option<Hook>> = const { RefCell::new(None) };
    }

    pub(crate) fn crash_point() {
        // Taken out while it runs: the hook itself may touch the rings.
        let Some(mut hook) = HOOK.with(|cell| cell.borrow_mut().take()) else {
            return;
        };
        hook();
        HOOK.with(|cell| *cell.borrow_mut() = Some(hook));
    }
}
