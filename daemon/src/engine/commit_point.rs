//! The named commit points: one for each durable store of an engine, so that a test can say where an engine died.
//!
//! Every durable store goes through [`store`], and every store of a ring or state word through [`crash_point`] just before it. In a
//! program both are the store and nothing else. In this crate's tests an engine can be made to die before any one of them (`life`),
//! and the name of the point is what a failing test prints. That no point is forgotten is checked from outside: stepping tests
//! kill the program as it is built, after each instruction.
//!
//! Rejected: numbers only (a failure said "store 57", and 57 was another store after every change).

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! points {
    ($($(#[doc = $what:literal])+ $name:ident,)+) => {
        /// Where an engine can die: just before this store.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        pub enum Point { $($(#[doc = $what])+ $name,)+ }

        impl Point {
            /// All of them.
            #[cfg(test)]
            pub(super) const ALL: &[Self] = &[$(Self::$name),+];
        }
    };
}

points! {
    /// Accept a send: a word of the ledger copy.
    AcceptCopy,
    /// Accept a send: the tag, **the accept point**.
    AcceptTag,
    /// Accept a send: the stream's {epoch, next}.
    AcceptNext,
    /// Accept a send: the send ring's consumer.
    AcceptRelease,
    /// Accept a command or refuse a send: how it ends.
    LocalEnd,
    /// Accept a command or refuse a send: the tag.
    LocalTag,
    /// Accept a command or refuse a send: the send ring's consumer.
    LocalRelease,
    /// Complete a send: the event.
    CompleteEvent,
    /// Complete a send: the event ring's producer.
    CompleteProducer,
    /// Complete a send: the tag is freed.
    CompleteTag,
    /// Complete a send: events_settled.
    CompleteSettled,
    /// Take a receive token: its record.
    TakeRecord,
    /// Take receive tokens: the provide ring's consumer.
    TakeRelease,
    /// Ask about a message: the event.
    AskEvent,
    /// Ask about a message: the event ring's producer.
    AskProducer,
    /// Ask about a message: events_settled.
    AskSettled,
    /// Commit a message: the event.
    CommitEvent,
    /// Commit a message: the event ring's producer, **the commit point**.
    CommitProducer,
    /// Commit a message: the stream's {base, bits}.
    CommitBase,
    /// Commit a message: the receive slot's generation.
    CommitSlot,
    /// Commit a message: events_settled.
    CommitSettled,
    /// Commit a number without a message, or forget that it was given up: {base, bits}.
    GiveUpBase,
    /// A sending stream's record: its fields.
    OpenSendFields,
    /// A sending stream's record: its key.
    OpenSendKey,
    /// A sending stream's record is freed.
    FreeSend,
    /// A receiving stream's record: its fields.
    OpenReceiveFields,
    /// A receiving stream's record: its key.
    OpenReceiveKey,
    /// A receiving stream's record is freed; its epoch is below the floor by now.
    FreeReceive,
    /// A stream epoch is drawn.
    DrawEpoch,
    /// A peer's record: its incarnation.
    PeerIncarnation,
    /// A peer's record: the epoch floor.
    PeerFloor,
    /// A peer's record: its key.
    PeerKey,
    /// Open a port: a send record of an earlier generation is cleared.
    OpenClearSend,
    /// Open a port: a receive record of an earlier generation is cleared.
    OpenClearReceive,
    /// Open a port: the ledger speaks of this generation.
    OpenSettled,
    /// Open a port: its state, for the application.
    OpenState,
    /// Close a port: its state, for the application.
    CloseState,
    /// Take over: the engine's epoch.
    EngineEpoch,
    /// Take over: a key that nobody would have written is cleared.
    AdoptClearKey,
    /// Take over: replayed completion, the tag is freed.
    ReplayTag,
    /// Take over: replayed commit, {base, bits}.
    ReplayBase,
    /// Take over: replayed commit, the receive slot's generation.
    ReplaySlot,
    /// Take over: events_settled.
    ReplaySettled,
    /// Take over: ring entries that were accepted are passed over.
    SkipAccepted,
    /// Take over: ring entries that were taken are passed over.
    SkipTaken,
    /// Take over: a tag's number counts as used.
    RestoreNext,
    /// Take over: a word of the inventory.
    Inventory,
    /// Take over: the application's count of takeovers.
    CountRecovery,
}

#[cfg(not(any(test, fuzzing)))]
#[inline(always)]
pub(super) fn crash_point(_: Point) {}
#[cfg(test)]
pub(super) use armed::life;
#[cfg(any(test, fuzzing))]
pub(super) use armed::{crash_point, dies_at};

impl Point {
    /// Is this only ever read by a successor? Without the feature `volatile` nobody asks.
    #[inline(always)]
    fn is_for_successors(self) -> bool {
        matches!(
            self,
            Self::AcceptCopy
                | Self::AcceptTag
                | Self::AcceptNext
                | Self::LocalEnd
                | Self::LocalTag
                | Self::CompleteTag
                | Self::CompleteSettled
                | Self::TakeRecord
                | Self::AskSettled
                | Self::CommitBase
                | Self::CommitSlot
                | Self::CommitSettled
                | Self::GiveUpBase
        )
    }
}

/// One durable fact.
#[inline]
pub(super) fn store(point: Point, fact: &AtomicU64, value: u64) {
    if cfg!(feature = "volatile") && point.is_for_successors() {
        return;
    }
    crash_point(point);
    fact.store(value, Ordering::Release);
}

#[cfg(any(test, fuzzing))]
mod armed {
    use std::cell::Cell;
    use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

    use super::Point;

    thread_local! {
        static COUNTDOWN: Cell<Option<u64>> = const { Cell::new(None) };
    }

    /// The payload of the panic by which a test lets the engine die.
    struct Died(Point);

    pub(in super::super) fn crash_point(point: Point) {
        let Some(left) = COUNTDOWN.get() else { return };
        if left == 0 {
            COUNTDOWN.set(None);
            resume_unwind(Box::new(Died(point)));
        }
        COUNTDOWN.set(Some(left - 1));
    }

    /// Runs `body`, which dies when it has passed `left` points; says where. Without a death `left` is what remains.
    pub(in super::super) fn life<R>(left: &mut u64, body: impl FnOnce() -> R) -> Result<R, Point> {
        COUNTDOWN.set(Some(*left));
        let end = catch_unwind(AssertUnwindSafe(body));
        *left = COUNTDOWN.take().unwrap_or(0);
        end.map_err(|panic| match panic.downcast::<Died>() {
            Ok(died) => died.0,
            Err(panic) => resume_unwind(panic),
        })
    }

    /// Runs `body`, which dies before its `nth` store: where. `None` if it came to its end instead.
    pub(in super::super) fn dies_at(mut nth: u64, body: impl FnOnce()) -> Option<Point> {
        life(&mut nth, body).err()
    }
}
