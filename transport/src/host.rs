//! What the transport asks of its surroundings: client memory, tokens, and the durable facts with their order.
//!
//! The engine implements [`Host`] over shared memory and the ledger; the simulator and the tests over vectors. Each durable
//! method is one step of the order of transport.md §13.1; the implementation, not the endpoint, performs the single stores inside it,
//! so that the order of stores is written down in exactly one place.

use alloc::vec::Vec;

use crate::ident::{BufferId, Peer, PortId, Priority, RecordId, SendId, StreamKey};
use crate::policy::AckMode;

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
    /// When its delivery is acknowledged.
    pub ack: AckMode,
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
    /// The receiving application refused it on its first chunk (RMPP's up-call).
    Refused = 12,
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
    /// The message's number.
    pub number: u32,
    /// What the stream's record says with this commit: [`after_commit`] of what it said before.
    pub base: u32,
    /// The second half of it.
    pub bits: u32,
    /// Bytes delivered.
    pub len: u32,
    /// Bytes the sender sent: more than `len` if the application shortened the message.
    pub total: u32,
    /// The sender's tag.
    pub tag: u64,
}

/// A message's first chunk, shown to the application before it is accepted (RMPP's up-call, 001).
#[derive(Clone, Copy, Debug)]
pub struct Offer<'a> {
    /// From (remote) and to (local).
    pub stream: StreamKey,
    /// The stream's record, as in [`Delivery`]: what is remembered of the offer goes with it.
    pub record: RecordId,
    /// The stream's epoch.
    pub epoch: u32,
    /// The message's number.
    pub number: u32,
    /// Its length.
    pub total: u32,
    /// The sender's tag.
    pub tag: u64,
    /// The first bytes that came, their checksum verified; perhaps none.
    pub first: &'a [u8],
}

/// What the application wants of an offered message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// All of it.
    Accept,
    /// Its first bytes only: so many, at most `total`.
    Shorten(u32),
    /// Nothing: the send ends as NotDelivered(Refused).
    Refuse,
    /// It is being asked: the message is treated as one without a buffer until
    /// [`Endpoint::offer_answered`](crate::Endpoint::offer_answered) is called for the stream.
    Undecided,
}

/// A receiving record after number `number` was committed: `base`, the lowest number not committed, and `bits`. The low half of
/// `bits` looks back: bit i says that `base - 1 - i` was given up by its sender, who has not confirmed that it knows. The high half
/// looks ahead: bit 16 + i says that `base + 1 + i` is committed, which only happens where messages commit in order of arrival.
///
/// `given_up`: the number was committed without a delivery, and its sender does not know; such numbers commit only at `base`.
/// The one place where this word is computed: for the endpoint, and for a host that replays commits it had not settled.
pub fn after_commit(base: u32, bits: u32, number: u32, given_up: bool) -> (u32, u32) {
    let (mut behind, mut ahead) = (bits & 0xffff, bits >> 16);
    let distance = number.wrapping_sub(base);
    if distance > 16 {
        return (base, bits); // committed before, or nothing that was ever accepted
    }
    if distance > 0 {
        ahead |= 1 << (distance - 1);
        return (base, behind | ahead << 16);
    }
    let mut base = base;
    let mut lowest = u32::from(given_up);
    loop {
        base = base.wrapping_add(1);
        behind = (behind << 1) & 0xffff | core::mem::take(&mut lowest);
        let next = ahead & 1 != 0;
        ahead >>= 1;
        if !next {
            return (base, behind | ahead << 16);
        }
    }
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

    /// **Accept** (transport.md §4.1, §13.1): ledger copy of the token → tag {generation, number} (the accept point) → the stream
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

    /// The same without the checksum, for who computes one over several payloads.
    #[inline]
    fn copy_payload(
        &mut self,
        send: SendId,
        offset: u32,
        to: &mut [u8],
    ) -> Result<(), MemoryFault> {
        self.read_payload(send, offset, to).map(|_| ())
    }

    /// **Complete a send**: event → producer index → tag freed → events_settled.
    fn complete(&mut self, send: SendId, status: SendStatus);

    /// Completes sends of one port that were delivered, in this order. A host may tell of several at once.
    fn complete_delivered(&mut self, port: PortId, sends: impl Iterator<Item = SendId>) {
        let _ = port;
        for send in sends {
            self.complete(send, SendStatus::Delivered);
        }
    }

    // ---- receiving ----

    /// Whether [`Host::offer`] is to be called for the port's messages. It costs a second look at their first bytes.
    fn wants_offers(&self, port: PortId) -> bool {
        let _ = port;
        false
    }

    /// Asks the application about a message's first chunk, if [`Host::wants_offers`]. The same message may be offered again: when it
    /// was undecided, lost its buffer to another, or when a predecessor of this engine died before it was committed.
    fn offer(&mut self, offer: &Offer<'_>) -> Verdict {
        let _ = offer;
        Verdict::Accept
    }

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

    /// The same without the checksum, for payload that was verified.
    #[inline]
    fn place_payload(
        &mut self,
        buffer: BufferId,
        offset: u32,
        from: &[u8],
    ) -> Result<(), MemoryFault> {
        self.write_payload(buffer, offset, from).map(|_| ())
    }

    /// **Commit**: event → producer index (the commit point) → stream {base, bits} → slot generation → events_settled. Never
    /// blocks: the event ring holds every token. Only after it returns may the number be acknowledged. An error means the port
    /// closed under us: nothing was committed.
    fn commit(&mut self, delivery: &Delivery) -> Result<(), MemoryFault>;

    /// Commits a number without a delivery (a NULL or a MSGDROP), or forgets a confirmed NULL: the stream record's {base, bits}
    /// becomes this pair, in one store.
    fn commit_base(&mut self, record: RecordId, epoch: u32, base: u32, bits: u32);

    // ---- durable records ----

    /// The next stream epoch from the durable counter, after so many that are left out; never the same twice in one incarnation.
    fn draw_epoch(&mut self, leave_out: u32) -> u32;

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

    /// A receiving stream's record, {epoch}, {base, no bits}, tagged with the peer's incarnation.
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

    /// What [`Host::store_peer`] stored last of this peer: for one that was idle and forgotten.
    fn load_peer(&self, peer: Peer) -> Option<(u64, u32)>;
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
    /// What [`after_commit`] says of it.
    pub bits: u32,
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
