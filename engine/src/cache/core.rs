//! What every front of the cache stands on: finding a key's shard, hits, and handing misses over.

use super::requests::Invalidate;
use super::wait::Pending;
use crate::call::{Call, Wake};
use crate::config::Config;
use crate::deadline::Deadline;
use crate::fork::ForkGuard;
use crate::key::{Key, KeyHasher, Namespace};
use crate::namespace::NamespaceSettings;
use crate::shard::request::{Answer, Fetch, Member, Request, Reservation, Scope, Waiter};
use crate::shard::turn::Turn;
use crate::shard::{Lease, Shared};
use crate::table::Pin;
use crate::{Error, Result};
use std::sync::Arc;
use std::time::Duration;

/// Lookups that a batch starts before it needs their results: enough to hide the latency of memory.
const LOOKAHEAD: usize = 8;

/// What the fronts share. Outlives the [`Cache`](super::Cache) for as long as one of them is used; calls then
/// fail with [`Error::ShutDown`].
pub(crate) struct Core {
    pub(super) shards: Vec<Arc<Shared>>,
    pub(super) config: Arc<Config>,
    pub(super) fork: ForkGuard,
    hasher: KeyHasher,
}

/// A miss that is to be fetched.
pub(crate) struct Miss<'a> {
    /// In the caller's batch.
    pub(crate) position: usize,
    pub(crate) hash: u64,
    pub(crate) key: Key<'a>,
    /// The value is to be held together with those of the other misses that are.
    pub(crate) hold: bool,
}

impl<'a> Miss<'a> {
    /// A value that is let go before another is waited for.
    pub(crate) fn new(position: usize, hash: u64, key: Key<'a>) -> Self {
        Self { position, hash, key, hold: false }
    }
}

/// Leases on many keys, as far as they are there, and the call for the others.
pub(crate) struct LeaseBatch {
    pub(crate) results: Vec<Option<Result<Option<Lease>>>>,
    /// Position in the batch of every position of the call.
    pub(crate) positions: Vec<usize>,
    pub(crate) pending: Option<Pending>,
}

/// What one shard is asked for by one call.
#[derive(Default)]
struct Share {
    fetches: Vec<Fetch>,
    members: Vec<Member>,
}

/// Who waits for a call, and how it gets into a shard's ring.
pub(crate) struct Front {
    pub(crate) wake: Wake,
    pub(crate) entry: Entry,
}

impl Front {
    /// A thread that sleeps until its call is done.
    pub(super) fn blocking() -> Self {
        Self { wake: Wake::Sleeper, entry: Entry::Wait }
    }

    /// Somebody who is told (see [`Wake::Told`]) and never waits.
    pub(super) fn told(tell: impl Fn() + Send + Sync + 'static) -> Self {
        Self { wake: Wake::Told(Box::new(tell)), entry: Entry::Try }
    }
}

/// How a call gets into a shard's ring that is full.
#[derive(Clone, Copy)]
pub(crate) enum Entry {
    /// Waits for a place until the deadline.
    Wait,
    /// Fails with [`Error::Overloaded`].
    Try,
}

impl Core {
    pub(super) fn new(shards: Vec<Arc<Shared>>, config: Arc<Config>, fork: ForkGuard) -> Self {
        Self { shards, config, fork, hasher: KeyHasher::new() }
    }

    pub(crate) fn check_fork(&self) -> Result<()> {
        if self.fork.forked() { Err(Error::Forked) } else { Ok(()) }
    }

    /// The key's hash and shard.
    #[inline]
    pub(crate) fn shard_of(&self, key: Key<'_>) -> Result<(u64, &Arc<Shared>)> {
        self.check_fork()?;
        let hash = self.hasher.hash(key);
        let shared = &self.shards[self.shard_index(hash)];
        if shared.is_closed() { Err(Error::ShutDown) } else { Ok((hash, shared)) }
    }

    #[inline]
    fn shard_index(&self, hash: u64) -> usize {
        // The high half as a fraction of 2^32, times the number of shards.
        (((hash >> 32) * self.shards.len() as u64) >> 32) as usize
    }

    /// Looks all keys up: hits to `hit`, misses and errors (of a key, or of the cache) as they are.
    pub(crate) fn look_up<'k>(
        &self,
        len: usize,
        key: impl Fn(usize) -> Key<'k>,
        mut hit: impl FnMut(usize, Lease),
        mut failed: impl FnMut(usize, Error),
    ) -> Vec<Miss<'k>> {
        let mut misses = Vec::new();
        // Lookups under way, a ring: the table's lines are asked for some keys before they are read.
        let mut started: [Option<(Key<'k>, u64, &Arc<Shared>)>; LOOKAHEAD] = [None; LOOKAHEAD];
        for turn in 0..len + LOOKAHEAD {
            let place = turn % LOOKAHEAD;
            if let Some((key, hash, shared)) = started[place].take() {
                let position = turn - LOOKAHEAD;
                match self::hit(shared, hash, key) {
                    Some(lease) => hit(position, lease),
                    None => misses.push(Miss::new(position, hash, key)),
                }
            }
            if turn < len {
                let found = key(turn).check().and_then(|key| Ok((key, self.shard_of(key)?)));
                match found {
                    Ok((key, (hash, shared))) => {
                        shared.table.prefetch_lookup(hash);
                        started[place] = Some((key, hash, shared));
                    }
                    Err(error) => failed(turn, error),
                }
            }
        }
        misses
    }

    /// Leases on many keys at once: memory for all of them is taken together.
    pub(crate) fn lease_batch(&self, keys: &[Key<'_>], deadline: Deadline, front: Front) -> LeaseBatch {
        let mut results: Vec<Option<Result<Option<Lease>>>> = (0..keys.len()).map(|_| None).collect();
        let mut hits = Vec::with_capacity(keys.len());
        let failed = |position: usize, error| results[position] = Some(Err(error));
        let hit = |position, lease| hits.push((position, lease));
        let mut misses = self.look_up(keys.len(), |i| keys[i], hit, failed);
        if misses.is_empty() {
            hits.into_iter().for_each(|(position, lease)| results[position] = Some(Ok(Some(lease))));
            return LeaseBatch { results, positions: Vec::new(), pending: None };
        }
        misses.iter_mut().for_each(|miss| miss.hold = true);
        let mut positions: Vec<usize> = misses.iter().map(|miss| miss.position).collect();
        positions.extend(hits.iter().map(|(position, _)| *position));
        let held = hits.into_iter().map(|(_, lease)| lease).collect();
        let pending = Some(self.fetch(&misses, held, deadline, front));
        LeaseBatch { results, positions, pending }
    }

    /// Hands misses to their shards. The call's positions are those of `misses`, followed by those of `held`: leases that
    /// are to be held together with the misses that are.
    pub(crate) fn fetch(
        &self,
        misses: &[Miss<'_>],
        held: Vec<Lease>,
        deadline: Deadline,
        front: Front,
    ) -> Pending {
        let Front { wake, entry } = front;
        let len = misses.len() + held.len();
        let call = Arc::new(Call::new(len, wake));
        let waiter = |i: usize| Waiter::new(call.clone(), i as u32, |error| Answer::Value(Err(error)));
        let mut parts: Vec<Share> = self.shards.iter().map(|_| Share::default()).collect();
        for (i, &Miss { hash, key, hold, .. }) in misses.iter().enumerate() {
            let index = self.shard_index(hash);
            let (key, waiter) = (key.to_owned(), waiter(i));
            if hold {
                parts[index].members.push(Member { hash, key, waiter, lease: None, len: None });
            } else {
                parts[index].fetches.push(Fetch { hash, key, waiter: Some(waiter) });
            }
        }
        for (i, lease) in held.into_iter().enumerate() {
            let (key, waiter) = (lease.key().clone(), waiter(misses.len() + i));
            let hash = self.hasher.hash(key.borrow());
            parts[self.shard_index(hash)].members.push(Member {
                hash,
                key,
                waiter,
                lease: Some(lease),
                len: None,
            });
        }
        self.hand_over(parts, deadline, entry);
        Pending { call, len, deadline }
    }

    fn hand_over(&self, parts: Vec<Share>, deadline: Deadline, entry: Entry) {
        let holding = parts.iter().zip(&self.shards).filter(|(part, _)| !part.members.is_empty());
        let holding: Vec<_> = holding.map(|(_, shared)| shared.clone()).collect();
        let mut turns = if holding.len() > 1 { Turn::each(holding) } else { Vec::new() }.into_iter();
        let passed = deadline.has_passed();
        for (shared, Share { fetches, members }) in self.shards.iter().zip(parts) {
            let missed = fetches.len() + members.iter().filter(|member| member.lease.is_none()).count();
            shared.callers.missed(missed as u64);
            let deadline_at = deadline.instant();
            let fetches =
                (!fetches.is_empty()).then_some(Request::Fetch { keys: fetches, deadline: deadline_at });
            let group = (!members.is_empty()).then(|| {
                let turn = turns.next();
                Request::Group { members, turn, deadline: deadline_at }
            });
            for request in fetches.into_iter().chain(group) {
                match passed {
                    true => request.fail(&Error::DeadlinePassed { stage: "looking the key up" }),
                    false => self.submit(shared, request, deadline, entry),
                }
            }
        }
    }

    /// Asks for room for a value that the caller will write.
    pub(crate) fn reserve(
        &self,
        key: Key<'_>,
        len: u64,
        deadline: Deadline,
        front: Front,
    ) -> Result<Pending> {
        let (hash, shared) = self.shard_of(key.check()?)?;
        let key = key.to_owned();
        let deadline_at = deadline.instant();
        Ok(self.one(
            shared,
            deadline,
            front,
            |error| Answer::Reserved(Err(error)),
            |waiter| Request::Reserve { hash, key, len, deadline: deadline_at, waiter },
        ))
    }

    /// Publishes what was written into a reservation.
    pub(crate) fn commit(
        &self,
        reservation: Reservation,
        crc32c: u32,
        deadline: Deadline,
        front: Front,
    ) -> Pending {
        let shared = reservation.shared().clone();
        self.one(
            &shared,
            deadline,
            front,
            |error| Answer::Done(Err(error)),
            |waiter| Request::Commit { reservation, crc32c, waiter },
        )
    }

    /// One question to one shard.
    fn one(
        &self,
        shared: &Shared,
        deadline: Deadline,
        front: Front,
        failed: fn(Error) -> Answer,
        request: impl FnOnce(Waiter) -> Request,
    ) -> Pending {
        let call = Arc::new(Call::new(1, front.wake));
        let request = request(Waiter::new(call.clone(), 0, failed));
        self.submit(shared, request, deadline, front.entry);
        Pending { call, len: 1, deadline }
    }

    /// Asks shards to forget. Its positions are the shards.
    pub(crate) fn invalidate(
        &self,
        what: Invalidate<'_>,
        deadline: Deadline,
        front: Front,
    ) -> Result<Pending> {
        self.check_fork()?;
        let (shards, hash) = match what {
            Invalidate::Key(key) => {
                let (hash, shared) = self.shard_of(key.check()?)?;
                (std::slice::from_ref(shared), hash)
            }
            _ => (&self.shards[..], 0),
        };
        let call = Arc::new(Call::new(shards.len(), front.wake));
        for (position, shared) in shards.iter().enumerate() {
            let scope = match what {
                Invalidate::Key(key) => Scope::Key(hash, key.to_owned()),
                Invalidate::Prefix(namespace, bytes) => Scope::Prefix(Key { namespace, bytes }.to_owned()),
                Invalidate::Namespace(namespace) => Scope::Namespace(namespace),
                Invalidate::All => Scope::All,
            };
            let waiter = Waiter::new(call.clone(), position as u32, |error| Answer::Done(Err(error)));
            self.submit(shared, Request::Invalidate { scope, waiter }, deadline, front.entry);
        }
        Ok(Pending { call, len: shards.len(), deadline })
    }

    /// Changes the settings of a namespace on all shards. Its positions are the shards.
    pub(super) fn set_namespace(
        &self,
        namespace: Namespace,
        settings: NamespaceSettings,
        deadline: Deadline,
        front: Front,
    ) -> Result<Pending> {
        self.check_fork()?;
        let (len, call) = (self.shards.len(), Arc::new(Call::new(self.shards.len(), front.wake)));
        for (position, shared) in self.shards.iter().enumerate() {
            let waiter = Waiter::new(call.clone(), position as u32, |error| Answer::Done(Err(error)));
            self.submit(shared, Request::SetNamespace { namespace, settings, waiter }, deadline, front.entry);
        }
        Ok(Pending { call, len, deadline })
    }

    /// Hands keys over that are not there, for nobody. Returns how many.
    pub(crate) fn prefetch(&self, keys: &[Key<'_>]) -> Result<usize> {
        let mut per_shard: Vec<Vec<Fetch>> = self.shards.iter().map(|_| Vec::new()).collect();
        let mut count = 0;
        for &key in keys {
            if !self.contains(key)? {
                let (hash, shared) = self.shard_of(key)?;
                per_shard[shared.index].push(Fetch { hash, key: key.to_owned(), waiter: None });
                count += 1;
            }
        }
        let fill_by: Deadline = Duration::from_millis(self.config.fill_timeout_ms).into();
        for (shared, keys) in self.shards.iter().zip(per_shard) {
            if !keys.is_empty() {
                let request = Request::Fetch { keys, deadline: fill_by.instant() };
                shared.offer(request).map_err(|(_, error)| error)?;
            }
        }
        Ok(count)
    }

    /// True if the value is there at this moment. Not a lookup for the counters.
    pub(crate) fn contains(&self, key: Key<'_>) -> Result<bool> {
        let (hash, shared) = self.shard_of(key.check()?)?;
        let Some(pin) = shared.table.find(hash, |value| value.is(key)) else { return Ok(false) };
        let fresh = !shared.table.entry(&pin).is_dated() || shared.freshness.is_fresh(shared.table.identity(&pin).0);
        shared.table.release(pin);
        Ok(fresh)
    }

    fn submit(&self, shared: &Shared, request: Request, deadline: Deadline, entry: Entry) {
        match entry {
            Entry::Wait => shared.submit(request, deadline),
            Entry::Try => {
                if let Err((request, error)) = shared.offer(request) {
                    request.fail(&error);
                }
            }
        }
    }
}

/// The value, pinned, if it is in the cache.
#[inline]
pub(crate) fn hit(shared: &Arc<Shared>, hash: u64, key: Key<'_>) -> Option<Lease> {
    let pin = shared.table.acquire(hash, |value| value.is(key))?;
    let value = shared.table.entry(&pin);
    // In the lines that the key was compared in; false in the default mode.
    if value.is_dated() {
        return dated_hit(shared, pin);
    }
    shared.callers.hit(value.len);
    Some(Lease::new(shared.clone(), pin))
}

/// [`hit`], where the value's age matters.
#[cold]
fn dated_hit(shared: &Arc<Shared>, pin: Pin) -> Option<Lease> {
    if !shared.freshness.is_fresh(shared.table.identity(&pin).0) {
        shared.table.release(pin);
        return None;
    }
    shared.callers.hit(shared.table.entry(&pin).len);
    Some(Lease::new(shared.clone(), pin))
}

/// Copies a whole value. Returns its length.
pub(crate) fn copy_whole(lease: &Lease, into: &mut [&mut [u8]]) -> Result<u64> {
    let value_bytes = lease.len();
    let buffer_bytes: u64 = into.iter().map(|buffer| buffer.len() as u64).sum();
    if buffer_bytes < value_bytes {
        return Err(Error::BufferTooSmall { buffer_bytes, value_bytes });
    }
    lease.fill(into)?;
    Ok(value_bytes)
}

/// Copies a range of a value. Returns the value's length.
pub(crate) fn copy_range(lease: &Lease, offset: u64, into: &mut [u8]) -> Result<u64> {
    lease.copy_range(offset, into)?;
    Ok(lease.len())
}
