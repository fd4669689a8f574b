//! What callers ask of a shard, and how they are answered. Every request answers its callers when it is
//! dropped, so no path through a shard, its shutdown or its panic can leave a caller waiting.

use super::errands::Errand;
use super::shared::Shared;
use super::turn::Turn;
use super::value::Lease;
use crate::call::Call;
use crate::key::{Key, OwnedKey};
use crate::memory::{Extent, ExtentList, GRANULE_BYTES};
use crate::{Error, Result};
use std::sync::Arc;
use std::time::Instant;

/// An answer to one position of a call.
pub(crate) enum Answer {
    /// To a fetch: the value, pinned; or `None` if the origin has no such key.
    Value(Result<Option<Lease>>),
    /// To a reservation.
    Reserved(Result<Reservation>),
    /// To a commit or an invalidation: how many values it concerned.
    Done(Result<u64>),
}

/// One position of one call that a shard owes an answer. Dropped without one, it answers `ShutDown`.
pub(crate) struct Waiter {
    call: Arc<Call<Answer>>,
    position: u32,
    on_drop: Option<fn(Error) -> Answer>,
}

impl Waiter {
    /// `failed` says which kind of answer an error is.
    pub(crate) fn new(call: Arc<Call<Answer>>, position: u32, failed: fn(Error) -> Answer) -> Self {
        Self { call, position, on_drop: Some(failed) }
    }

    /// Delivers. An answer that the caller no longer waits for is dropped, which releases what it holds.
    pub(crate) fn answer(mut self, answer: Answer) {
        self.on_drop = None;
        drop(self.call.complete(self.position, answer));
    }

    pub(crate) fn fail(mut self, error: Error) {
        if let Some(failed) = self.on_drop.take() {
            drop(self.call.complete(self.position, failed(error)));
        }
    }

    /// True if the caller has given up.
    pub(crate) fn is_gone(&self) -> bool {
        self.call.is_abandoned(self.position)
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        if let Some(failed) = self.on_drop.take() {
            drop(self.call.complete(self.position, failed(Error::ShutDown)));
        }
    }
}

/// One key to be fetched.
pub(crate) struct Fetch {
    pub(crate) hash: u64,
    pub(crate) key: OwnedKey,
    /// Nobody for a prefetch.
    pub(crate) waiter: Option<Waiter>,
}

/// One key of those that are wanted together.
pub(crate) struct Member {
    pub(crate) hash: u64,
    pub(crate) key: OwnedKey,
    pub(crate) waiter: Waiter,
    /// The value, if the caller found it.
    pub(crate) lease: Option<Lease>,
    /// Bytes of the value when it was last heard of.
    pub(crate) len: Option<u64>,
}

impl Member {
    /// Gives out the value if it is there, else the error.
    pub(crate) fn settle(self, error: &Error) {
        self.waiter
            .answer(Answer::Value(self.lease.map_or_else(|| Err(error.clone()), |lease| Ok(Some(lease)))));
    }
}

/// What to forget.
pub(crate) enum Scope {
    Key(u64, OwnedKey),
    /// Keys that start with these bytes, within the namespace.
    Prefix(OwnedKey),
    Namespace(crate::Namespace),
    All,
}

impl Scope {
    pub(crate) fn covers(&self, key: Key<'_>) -> bool {
        match self {
            Scope::Key(_, own) => own.borrow() == key,
            Scope::Prefix(prefix) => {
                prefix.namespace == key.namespace && key.bytes.starts_with(&prefix.bytes)
            }
            Scope::Namespace(namespace) => *namespace == key.namespace,
            Scope::All => true,
        }
    }
}

/// One message to a shard.
pub(crate) enum Request {
    /// Find or fetch keys.
    Fetch { keys: Vec<Fetch>, deadline: Instant },
    /// Find or fetch keys whose values are to be held together. With a turn where other shards have some of them too.
    Group { members: Vec<Member>, turn: Option<Turn>, deadline: Instant },
    /// Find room for a value that the caller will write.
    Reserve { hash: u64, key: OwnedKey, len: u64, deadline: Instant, waiter: Waiter },
    /// The caller has written: publish.
    Commit { reservation: Reservation, crc32c: u32, waiter: Waiter },
    /// Forget values.
    Invalidate { scope: Scope, waiter: Waiter },
    /// Change the settings of a namespace.
    SetNamespace { namespace: crate::Namespace, settings: crate::NamespaceSettings, waiter: Waiter },
    /// Change the arena to so many blocks. Answered when that is done.
    Resize { blocks: u32, waiter: Waiter },
    /// Other shards, who may help out.
    Meet(Vec<Arc<Shared>>),
    /// Receive a part for another shard.
    Assist(Errand),
    /// End.
    Shutdown,
}

impl Request {
    /// Answers everybody who waits for it with an error.
    pub(crate) fn fail(self, error: &Error) {
        match self {
            Request::Fetch { keys, .. } => {
                for waiter in keys.into_iter().filter_map(|fetch| fetch.waiter) {
                    waiter.fail(error.clone());
                }
            }
            Request::Group { members, .. } => members.into_iter().for_each(|member| member.settle(error)),
            Request::Reserve { waiter, .. }
            | Request::Commit { waiter, .. }
            | Request::Invalidate { waiter, .. }
            | Request::SetNamespace { waiter, .. }
            | Request::Resize { waiter, .. } => waiter.fail(error.clone()),
            Request::Meet(_) | Request::Assist(_) | Request::Shutdown => {}
        }
    }
}

/// Room in the arena that a caller fills on its own thread: the copying of a put is not the shard's work.
///
/// Dropped without a commit it goes back to the shard.
pub(crate) struct Reservation {
    shared: Arc<Shared>,
    slot: u32,
    extents: ExtentList,
    len: u64,
    committed: bool,
}

impl Reservation {
    pub(crate) fn new(shared: Arc<Shared>, slot: u32, extents: ExtentList, len: u64) -> Self {
        Self { shared, slot, extents, len, committed: false }
    }

    /// Copies the value in, from as many pieces as there are, and returns its CRC32C. The pieces must have
    /// the length that was reserved.
    pub(crate) fn write(&mut self, pieces: &[&[u8]]) -> u32 {
        debug_assert_eq!(pieces.iter().map(|p| p.len() as u64).sum::<u64>(), self.len);
        let mut crc = 0;
        let mut extents = self.extents.iter();
        let mut room: (*mut u8, usize) = (std::ptr::null_mut(), 0);
        for piece in pieces {
            let mut piece = *piece;
            while !piece.is_empty() {
                if room.1 == 0 {
                    let Some(&Extent { start, len }) = extents.next() else { return crc };
                    let base = self.shared.arena.ptr(Extent { start, len });
                    room = (base.as_ptr(), len as usize * GRANULE_BYTES);
                }
                let bytes = piece.len().min(room.1);
                // SAFETY: the extents belong to this reservation alone until it is committed or dropped, and
                // `shared` keeps the arena mapped; the caller's slice cannot overlap memory it never saw.
                unsafe { crate::memory::copy::copy(room.0, piece.as_ptr(), bytes) };
                crc = crate::checksum::crc32c_append(crc, &piece[..bytes]);
                // SAFETY: within the extent, or one past its end.
                room = (unsafe { room.0.add(bytes) }, room.1 - bytes);
                piece = &piece[bytes..];
            }
        }
        crc
    }

    /// The shard that it belongs to.
    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Shard: takes over what was reserved.
    pub(crate) fn commit(mut self) -> u32 {
        self.committed = true;
        self.slot
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if self.committed || self.shared.fork.forked() {
            return;
        }
        if self.shared.dropped_reservations.push(self.slot).is_err() {
            unreachable!("a slot is reserved once, and the queue holds every slot");
        }
        self.shared.bell.ring();
    }
}
