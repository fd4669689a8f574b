//! The front for callers with an event loop of their own: submit operations, poll completions.
//!
//! One [`CompletionQueue`] belongs to one thread at a time. Submitting never waits and never fails: whatever happens
//! to a position, a completion says so. Hits complete at submission, so none waits behind a fill. Polling makes no
//! system call; who would rather sleep arms the queue and puts its descriptor (an eventfd) into epoll, io_uring or
//! `poll`.
//!
//! The engine does not write into a caller's buffer behind its back: copying forms copy inside
//! [`CompletionQueue::poll`], on the caller's thread. That is why buffers are borrowed for as long as the queue lives
//! and come back with their completion.

use super::Cache;
use super::core::{Core, Front, Miss, copy_range, copy_whole, hit};
use super::wait::{Pending, count_of, reservation_of, value_of};
use crate::bell::Bell;
use crate::deadline::Deadline;
use crate::key::Key;
use crate::shard::Lease;
use crate::shard::request::Answer;
use crate::{Error, Result};
use crossbeam_queue::SegQueue;
use std::collections::VecDeque;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;
use std::time::Instant;

/// Where the bytes of a value go.
#[derive(Debug)]
pub enum Target<'b> {
    /// Nowhere: the caller gets a lease.
    Lease,
    /// Into one buffer, at least as long as the value.
    Into(&'b mut [u8]),
    /// Into several, one after the other; together at least as long as the value.
    Scatter(Vec<&'b mut [u8]>),
    /// A range of the value: as many bytes as the buffer has.
    Range {
        /// First byte of the value.
        offset: u64,
        /// Where to copy it.
        into: &'b mut [u8],
    },
}

/// What became of one position.
#[derive(Debug)]
#[non_exhaustive]
pub enum Outcome {
    /// The value, pinned.
    Lease(Lease),
    /// The value, or the range, was copied.
    Copied {
        /// Length of the whole value.
        value_bytes: u64,
    },
    /// The origin has no such key.
    Absent,
    /// The value was put.
    Put,
    /// So many keys are being fetched.
    Prefetching(usize),
}

/// The end of one position of one operation.
#[derive(Debug)]
pub struct Completion<'b> {
    /// What the caller gave the operation.
    pub user_data: u64,
    /// Position in the operation's batch; 0 for single ones.
    pub position: usize,
    /// True for the last completion of the operation.
    pub last: bool,
    /// The buffers of a get, given back.
    pub target: Option<Target<'b>>,
    /// How it went.
    pub result: Result<Outcome>,
}

/// Names an operation of one queue, for [`CompletionQueue::cancel`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct OperationId(u64);

/// Of an operation that was complete when it was submitted: names none that can be cancelled.
const COMPLETED: OperationId = OperationId(u64::MAX);

/// Submits operations and collects their completions. See the module's documentation.
///
/// `Send`, not `Sync`. Dropping it gives up on whatever is under way. It may outlive the cache's handle; operations then
/// complete with [`Error::ShutDown`].
///
/// ```
/// # use hotslice::{Cache, CompletionQueue, Config, Outcome, Target};
/// # use std::time::Duration;
/// # let cache = Cache::open(Config::new(64 << 20))?;
/// # cache.put("a", b"value", Duration::from_secs(1))?;
/// let mut buffer = [0; 16];
/// let mut queue = CompletionQueue::new(&cache, 128)?;
/// queue.get("a", Target::Into(&mut buffer), 7, Duration::from_secs(1));
/// let completion = queue.poll().expect("a hit completes at submission");
/// assert_eq!(completion.user_data, 7);
/// assert!(matches!(completion.result, Ok(Outcome::Copied { value_bytes: 5 })));
/// drop(queue);
/// assert_eq!(&buffer[..5], b"value");
/// # Ok::<(), hotslice::Error>(())
/// ```
pub struct CompletionQueue<'b> {
    core: Arc<Core>,
    signal: Arc<Signal>,
    done: VecDeque<Completion<'b>>,
    slots: Vec<Slot<'b>>,
    free: Vec<u32>,
    operations_max: usize,
    armed: bool,
}

/// What shards touch: which operations have something to collect, and how to wake their owner.
struct Signal {
    ready: SegQueue<u32>,
    bell: Bell,
}

struct Slot<'b> {
    /// Goes up with every operation, so that an old [`OperationId`] names nothing.
    generation: u32,
    operation: Option<Operation<'b>>,
}

/// An operation with positions that are not completed.
struct Operation<'b> {
    user_data: u64,
    deadline: Deadline,
    pending: Pending,
    kind: Kind<'b>,
}

enum Kind<'b> {
    /// Every position of the call: its position in the batch, and where its bytes go (taken once completed).
    Get {
        positions: Vec<(usize, Option<Target<'b>>)>,
        left: usize,
    },
    Put {
        pieces: Vec<&'b [u8]>,
    },
}

impl<'b> CompletionQueue<'b> {
    /// A queue with room for `operations_max` operations under way; one more completes with
    /// [`Error::TooManyOperations`]. Hits do not count.
    pub fn new(cache: &Cache, operations_max: usize) -> Result<Self> {
        let signal = Signal { ready: SegQueue::new(), bell: Bell::new()? };
        Ok(Self {
            core: cache.core.clone(),
            signal: Arc::new(signal),
            done: VecDeque::new(),
            slots: Vec::new(),
            free: Vec::new(),
            operations_max: operations_max.min(u32::MAX as usize),
            armed: false,
        })
    }

    /// Reads one value. The deadline is as for [`Cache::get`].
    #[inline]
    pub fn get<'k>(
        &mut self,
        key: impl Into<Key<'k>>,
        target: Target<'b>,
        user_data: u64,
        deadline: impl Into<Deadline>,
    ) -> OperationId {
        let key = key.into();
        let found = key.check().and_then(|key| {
            let (hash, shared) = self.core.shard_of(key)?;
            Ok(hit(shared, hash, key).ok_or(hash))
        });
        match found {
            Ok(Ok(lease)) => self.deliver(user_data, 0, true, target, Ok(Some(lease))),
            Err(error) => self.deliver(user_data, 0, true, target, Err(error)),
            Ok(Err(hash)) => {
                let miss = Miss::new(0, hash, key);
                return self.fetch(&[miss], vec![(0, Some(target))], user_data, deadline.into());
            }
        }
        COMPLETED
    }

    /// Reads many values: one completion per position, hits first.
    pub fn get_batch<'k>(
        &mut self,
        reads: impl IntoIterator<Item = (Key<'k>, Target<'b>)>,
        user_data: u64,
        deadline: impl Into<Deadline>,
    ) -> OperationId {
        let (keys, targets): (Vec<_>, Vec<_>) = reads.into_iter().map(|(key, to)| (key, Some(to))).unzip();
        let mut targets: Vec<Option<Target<'b>>> = targets;
        let (mut hits, mut failed) = (Vec::with_capacity(keys.len()), Vec::new());
        let mut misses = self.core.look_up(
            keys.len(),
            |i| keys[i],
            |position, lease| hits.push((position, Ok(Some(lease)))),
            |position, error| failed.push((position, Err(error))),
        );
        let count = hits.len() + failed.len();
        for (i, (position, result)) in hits.into_iter().chain(failed).enumerate() {
            let last = misses.is_empty() && i + 1 == count;
            if let Some(target) = targets[position].take() {
                self.deliver(user_data, position, last, target, result);
            }
        }
        if misses.is_empty() {
            return COMPLETED;
        }
        for miss in &mut misses {
            miss.hold = matches!(targets[miss.position], Some(Target::Lease));
        }
        let positions = misses.iter().map(|miss| (miss.position, targets[miss.position].take())).collect();
        self.fetch(&misses, positions, user_data, deadline.into())
    }

    /// Puts a value that lies in one or more pieces, as [`Cache::put_gather`]. The pieces are copied inside
    /// [`CompletionQueue::poll`], when there is room for them.
    pub fn put<'k>(
        &mut self,
        key: impl Into<Key<'k>>,
        pieces: Vec<&'b [u8]>,
        user_data: u64,
        deadline: impl Into<Deadline>,
    ) -> OperationId {
        let deadline = deadline.into();
        let len = pieces.iter().map(|piece| piece.len() as u64).sum();
        let started = self.slot().and_then(|slot| {
            let pending = self.core.reserve(key.into(), len, deadline, self.front(slot));
            pending.map(|pending| (slot, pending)).inspect_err(|_| self.free.push(slot))
        });
        match started {
            Ok((slot, pending)) => {
                self.begin(slot, Operation { user_data, deadline, pending, kind: Kind::Put { pieces } })
            }
            Err(error) => {
                self.refuse(vec![(0, None)], user_data, &error);
                COMPLETED
            }
        }
    }

    /// Starts to fetch what is not there, as [`Cache::prefetch`]. Completes at submission.
    pub fn prefetch(&mut self, keys: &[Key<'_>], user_data: u64) {
        let result = self.core.prefetch(keys).map(Outcome::Prefetching);
        self.done.push_back(Completion { user_data, position: 0, last: true, target: None, result });
    }

    /// Gives up on what is left of an operation: each of its positions completes with [`Error::Cancelled`], unless its
    /// answer is here already. Returns how many positions that were; none if the operation is over. A put may take effect
    /// all the same.
    pub fn cancel(&mut self, id: OperationId) -> usize {
        let (slot, generation) = (id.0 as u32, (id.0 >> 32) as u32);
        if self.slots.get(slot as usize).is_none_or(|slot| slot.generation != generation) {
            return 0;
        }
        self.collect(slot);
        let Some(operation) = self.take(slot) else { return 0 };
        let left: Vec<_> = match operation.kind {
            Kind::Get { positions, .. } => {
                positions.into_iter().filter(|(_, target)| target.is_some()).collect()
            }
            Kind::Put { .. } => vec![(0, None)],
        };
        let count = left.len();
        self.refuse(left, operation.user_data, &Error::Cancelled);
        count
    }

    /// Completes positions with an error.
    fn refuse(&mut self, positions: Vec<(usize, Option<Target<'b>>)>, user_data: u64, error: &Error) {
        let count = positions.len();
        for (i, (position, target)) in positions.into_iter().enumerate() {
            let (last, result) = (i + 1 == count, Err(error.clone()));
            self.done.push_back(Completion { user_data, position, last, target, result });
        }
    }

    /// The next completion, if there is one. No system call, unless the queue was armed and rung.
    #[inline]
    pub fn poll(&mut self) -> Option<Completion<'b>> {
        if self.armed {
            self.disarm();
        }
        while self.done.is_empty() {
            let slot = self.signal.ready.pop()?;
            self.collect(slot);
        }
        self.done.pop_front()
    }

    /// Announces that the caller will wait for the descriptor to become readable. False, and nothing is announced, if
    /// there is something to poll right now. The next [`CompletionQueue::poll`] takes the announcement back and resets
    /// the descriptor.
    pub fn arm(&mut self) -> bool {
        if !self.done.is_empty() {
            return false;
        }
        if !self.armed {
            self.armed = true;
            self.signal.bell.doorbell().going_to_sleep();
        }
        if !self.signal.ready.is_empty() {
            self.disarm();
            return false;
        }
        true
    }

    /// The next completion; sleeps until there is one, at most until the deadline, and not at all when no operation is
    /// under way: `while let Some(completion) = queue.wait(deadline)` takes in all that there is.
    pub fn wait(&mut self, deadline: impl Into<Deadline>) -> Option<Completion<'b>> {
        let deadline = deadline.into().instant();
        loop {
            if let Some(completion) = self.poll() {
                return Some(completion);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || self.in_flight() == 0 {
                return None;
            }
            if self.arm() {
                let mut poll = libc::pollfd { fd: self.as_raw_fd(), events: libc::POLLIN, revents: 0 };
                // Rounded up: it must not wake before the deadline only to go round again.
                let ms = i32::try_from(left.as_millis().saturating_add(1)).unwrap_or(i32::MAX);
                // SAFETY: one pollfd, a local. Interrupted or timed out: the loop looks again.
                unsafe { libc::poll(&mut poll, 1, ms) };
            }
        }
    }

    /// Operations under way.
    pub fn in_flight(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    fn disarm(&mut self) {
        self.armed = false;
        if self.signal.bell.doorbell().awake() {
            self.signal.bell.reset();
        }
    }

    /// A free place for an operation.
    fn slot(&mut self) -> Result<u32> {
        if let Some(slot) = self.free.pop() {
            return Ok(slot);
        }
        if self.slots.len() >= self.operations_max {
            return Err(Error::TooManyOperations { operations_max: self.operations_max });
        }
        self.slots.push(Slot { generation: 0, operation: None });
        Ok(self.slots.len() as u32 - 1)
    }

    fn front(&self, slot: u32) -> Front {
        let signal = self.signal.clone();
        Front::told(move || {
            signal.ready.push(slot);
            signal.bell.ring();
        })
    }

    fn begin(&mut self, slot: u32, operation: Operation<'b>) -> OperationId {
        let place = &mut self.slots[slot as usize];
        place.operation = Some(operation);
        OperationId(u64::from(place.generation) << 32 | u64::from(slot))
    }

    /// Ends an operation and frees its place.
    fn take(&mut self, slot: u32) -> Option<Operation<'b>> {
        let place = &mut self.slots[slot as usize];
        let operation = place.operation.take()?;
        place.generation = place.generation.wrapping_add(1);
        self.free.push(slot);
        Some(operation)
    }

    fn fetch(
        &mut self,
        misses: &[Miss<'_>],
        positions: Vec<(usize, Option<Target<'b>>)>,
        user_data: u64,
        deadline: Deadline,
    ) -> OperationId {
        match self.slot() {
            Ok(slot) => {
                let pending = self.core.fetch(misses, Vec::new(), deadline, self.front(slot));
                let kind = Kind::Get { left: positions.len(), positions };
                self.begin(slot, Operation { user_data, deadline, pending, kind })
            }
            Err(error) => {
                self.refuse(positions, user_data, &error);
                COMPLETED
            }
        }
    }

    /// Collects what an operation has got. The place may be free, or another operation's, by the time that a shard's
    /// word arrives; then there is nothing to collect.
    fn collect(&mut self, slot: u32) {
        let Some(operation) = &mut self.slots[slot as usize].operation else { return };
        let mut answers = Vec::new();
        operation.pending.call.drain(|position, answer| answers.push((position as usize, answer)));
        for (i, answer) in answers {
            self.answered(slot, i, answer);
        }
    }

    fn answered(&mut self, slot: u32, i: usize, answer: Answer) {
        let Some(operation) = &mut self.slots[slot as usize].operation else { return };
        let user_data = operation.user_data;
        match &mut operation.kind {
            Kind::Get { positions, left } => {
                let (position, target) = &mut positions[i];
                let (position, Some(target)) = (*position, target.take()) else { return };
                *left -= 1;
                let last = *left == 0;
                if last {
                    self.take(slot);
                }
                self.deliver(user_data, position, last, target, value_of(Some(answer)));
            }
            Kind::Put { .. } => self.put_answered(slot, user_data, answer),
        }
    }

    fn put_answered(&mut self, slot: u32, user_data: u64, answer: Answer) {
        let result = match answer {
            Answer::Reserved(_) => match (reservation_of(Some(answer)), self.take_for_commit(slot)) {
                (Ok(mut reservation), Some((pieces, deadline))) => {
                    let crc32c = reservation.write(&pieces);
                    let pending = self.core.commit(reservation, crc32c, deadline, self.front(slot));
                    if let Some(operation) = &mut self.slots[slot as usize].operation {
                        operation.pending = pending;
                    }
                    return;
                }
                (Ok(_), None) => return,
                (Err(error), _) => Err(error),
            },
            answer => count_of(Some(answer)).map(|_| Outcome::Put),
        };
        self.take(slot);
        self.done.push_back(Completion { user_data, position: 0, last: true, target: None, result });
    }

    /// The pieces of a put that has got its room.
    fn take_for_commit(&mut self, slot: u32) -> Option<(Vec<&'b [u8]>, Deadline)> {
        let operation = self.slots[slot as usize].operation.as_mut()?;
        match &mut operation.kind {
            Kind::Put { pieces } => Some((std::mem::take(pieces), operation.deadline)),
            Kind::Get { .. } => None,
        }
    }

    #[inline]
    fn deliver(
        &mut self,
        user_data: u64,
        position: usize,
        last: bool,
        mut target: Target<'b>,
        value: Result<Option<Lease>>,
    ) {
        let result = match (value, &mut target) {
            (Err(error), _) => Err(error),
            (Ok(None), _) => Ok(Outcome::Absent),
            (Ok(Some(lease)), Target::Lease) => Ok(Outcome::Lease(lease)),
            (Ok(Some(lease)), Target::Into(into)) => copied(copy_whole(&lease, &mut [into])),
            (Ok(Some(lease)), Target::Scatter(into)) => copied(copy_whole(&lease, into)),
            (Ok(Some(lease)), Target::Range { offset, into }) => copied(copy_range(&lease, *offset, into)),
        };
        self.done.push_back(Completion { user_data, position, last, target: Some(target), result });
    }
}

fn copied(result: Result<u64>) -> Result<Outcome> {
    result.map(|value_bytes| Outcome::Copied { value_bytes })
}

impl AsFd for CompletionQueue<'_> {
    /// Becomes readable after [`CompletionQueue::arm`]. Wait on it; do not read it.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.signal.bell.event().as_fd()
    }
}

impl AsRawFd for CompletionQueue<'_> {
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

impl std::fmt::Debug for CompletionQueue<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CompletionQueue")
            .field("in_flight", &self.in_flight())
            .field("armed", &self.armed)
            .finish_non_exhaustive()
    }
}
