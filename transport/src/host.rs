//! What the transport asks of its surroundings: client memory, tokens, and the durable facts with their order.
//!
//! The engine implements [`Host`] over shared memory and the ledger; the simulator and the tests over vectors. Each durable
//! method is one step of the order of `RECOVERY.md`; the implementation, not the endpoint, performs the single stores inside it,
//! so that the order of stores is written down in exactly one place.

use alloc::vec::Vec;

use crate::ident::{BufferId, Peer, PortId, Priority, RecordId, SendId, StreamKey};

/// A send as the host validated it. Payload stays with the host and is read by [`Host::read_payload`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SendRequest {
    /// The token, returned by [`Host::complete`].
    pub id: SendId,
    /// From, to and priority.
    pub stream: StreamKey,
    /// Bytes, 0 to 4 GiB − 1.
    pub len: u32,
    /// Carried to the receiver beside the payload.
    pub tag: u64,
    /// When the send is given up with [`Reason::Deadline`]; `u64::MAX` for never.
    pub deadline: u64,
}

/// How a send ended. Never a guess.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SendStatus {
    /// The receiving engine committed it to the receiver's buffer.
    Delivered,
    /// It was not and will never be delivered.
    NotDelivered(Reason),
    /// It cannot be known: the peer restarted or cannot be reached.
    MaybeDelivered(Reason),
}

/// Why a send was not, or perhaps not, delivered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Reason {
    /// The receiving port is not open, or was closed.
    PortClosed = 1,
    /// The receiver can never hold a message of this length.
    TooLong = 2,
    /// The send's deadline passed.
    Deadline = 3,
    /// The peer came back with a new incarnation.
    PeerRestarted = 4,
    /// No answer from the peer for `unreachable_after`.
    Unreachable = 5,
    /// The application cancelled it.
    Cancelled = 6,
    /// Dropped by `drop_sends` after an earlier send of the stream failed.
    Dropped = 7,
    /// The payload's memory could not be read.
    BadMemory = 8,
    /// No such node, or no route to it.
    NoRoute = 9,
    /// The peers' versions or policies cannot work together.
    Incompatible = 10,
    /// A table is full (streams, peers); the sender may try again later.
    NoResources = 11,
}

/// A message placed, verified and next in its stream's order: [`Host::commit`] makes it the application's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Delivery {
    /// The buffer that holds it.
    pub buffer: BufferId,
    /// From (remote) and to (local).
    pub stream: StreamKey,
    /// The stream's record.
    pub record: RecordId,
    /// The stream's epoch.
    pub epoch: u32,
    /// The message's number; the record's base becomes `number + 1`.
    pub number: u32,
    /// Bytes.
    pub len: u32,
    /// The sender's tag.
    pub tag: u64,
}

/// Why no buffer was claimed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoBuffer {
    /// The port is not open.
    PortClosed,
    /// No token at this priority is large enough now; one may come.
    NotNow,
    /// The port can never hold a message of this length.
    TooLong,
}

/// Client memory that could not be read or written; the host closes the port with a named reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryFault;

/// A table of durable records is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableFull;

/// The surroundings of an [`crate::Endpoint`].
pub trait Host {
    // ---- sending ----

    /// **Accept** (RECOVERY, *Accept a send*): ledger copy of the token → tag {generation, number} (the accept point) → the stream
    /// record's {epoch, next = number + 1} → the send ring's consumer index. After it returns the number is used, whatever dies.
    fn accept(&mut self, send: &SendRequest, record: RecordId, epoch: u32, number: u32);

    /// Copies payload bytes `offset..offset + to.len()` of an accepted send into `to` and returns the CRC32C of the bytes copied
    /// (of the private copy, so a client that changes its memory meanwhile only hurts its own message).
    fn read_payload(
        &mut self,
        send: SendId,
        offset: u32,
        to: &mut [u8],
    ) -> Result<u32, MemoryFault>;

    /// **Complete a send**: event → producer index → tag freed → events_settled.
    fn complete(&mut self, send: SendId, status: SendStatus);

    // ---- receiving ----

    /// Takes the receive token with the smallest size class that holds `len` bytes at `priority`.
    fn claim(&mut self, port: PortId, priority: Priority, len: u32) -> Result<BufferId, NoBuffer>;

    /// Gives back a claimed token that no commit used.
    fn release(&mut self, buffer: BufferId);

    /// Writes verified or still unverified payload into a claimed buffer and returns the CRC32C of the bytes written.
    fn write_payload(
        &mut self,
        buffer: BufferId,
        offset: u32,
        from: &[u8],
    ) -> Result<u32, MemoryFault>;

    /// **Commit**: event → producer index (the commit point) → stream {base, nulled << 1} → slot generation → events_settled. Never
    /// blocks: the event ring holds every token. Only after it returns may the number be acknowledged. An error means the port
    /// closed under us: nothing was committed.
    fn commit(&mut self, delivery: &Delivery) -> Result<(), MemoryFault>;

    /// Commits a number without a delivery (a NULL or a MSGDROP), or forgets a confirmed NULL: the stream record's {base, nulled}
    /// becomes this pair, in one store.
    fn commit_base(&mut self, record: RecordId, epoch: u32, base: u32, nulled: u32);

    // ---- durable records ----

    /// The next stream epoch from the durable counter; never the same twice in one incarnation.
    fn draw_epoch(&mut self) -> u32;

    /// A sending stream's record, {epoch, next}, tagged with the peer's incarnation.
    fn open_send_record(
        &mut self,
        stream: StreamKey,
        incarnation: u64,
        epoch: u32,
        next: u32,
    ) -> Result<RecordId, TableFull>;

    /// Frees a sending stream's record.
    fn free_send_record(&mut self, record: RecordId);

    /// A receiving stream's record, {epoch}, {base, no nulled}, tagged with the peer's incarnation.
    fn open_receive_record(
        &mut self,
        stream: StreamKey,
        incarnation: u64,
        epoch: u32,
        base: u32,
    ) -> Result<RecordId, TableFull>;

    /// Frees a receiving stream's record, after the peer's floor was raised past its epoch.
    fn free_receive_record(&mut self, record: RecordId);

    /// Stores what is known of a peer: its incarnation and the epoch floor below which a START is refused.
    fn store_peer(&mut self, peer: Peer, incarnation: u64, floor: u32) -> Result<(), TableFull>;
}

/// What a ledger held when an engine took over: the arguments of [`crate::Endpoint::restore`].
#[derive(Clone, Debug, Default)]
pub struct Durable {
    /// Peers with their incarnation and epoch floor.
    pub peers: Vec<(Peer, u64, u32)>,
    /// Sending streams.
    pub sending: Vec<RestoredSendStream>,
    /// Receiving streams.
    pub receiving: Vec<RestoredReceiveStream>,
    /// Accepted sends that are not complete, in any order.
    pub sends: Vec<RestoredSend>,
}

/// A sending stream as the ledger held it; `next` already includes the newest tag.
#[derive(Clone, Copy, Debug)]
pub struct RestoredSendStream {
    /// Its record.
    pub record: RecordId,
    /// Its key.
    pub stream: StreamKey,
    /// The incarnation of the peer it was opened to.
    pub incarnation: u64,
    /// Its epoch.
    pub epoch: u32,
    /// The next number to use.
    pub next: u32,
}

/// A receiving stream as the ledger held it.
#[derive(Clone, Copy, Debug)]
pub struct RestoredReceiveStream {
    /// Its record.
    pub record: RecordId,
    /// Its key.
    pub stream: StreamKey,
    /// The incarnation of the peer that opened it.
    pub incarnation: u64,
    /// Its epoch.
    pub epoch: u32,
    /// The next number to commit.
    pub base: u32,
    /// Bit i: number `base - 1 - i` was given up by its sender, who has not confirmed that it knows.
    pub nulled: u32,
    /// The port's instance that opened the record is closed (even if the port is open again): the stream answers PortClosed and
    /// never delivers to the port's next owner.
    pub closed: bool,
}

/// An accepted send as the ledger held it.
#[derive(Clone, Copy, Debug)]
pub struct RestoredSend {
    /// The send.
    pub request: SendRequest,
    /// Its stream's record.
    pub record: RecordId,
    /// Its number.
    pub number: u32,
}
