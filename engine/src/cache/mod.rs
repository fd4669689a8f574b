//! The public engine.

mod core;
mod future;
mod namespaces;
mod queue;
mod requests;
mod resize;
mod wait;

pub use future::{BatchFuture, GetFuture, PutFuture};
pub use queue::{Completion, CompletionQueue, OperationId, Outcome, Target};
pub use requests::{Invalidate, Read, ReadRange, ReadScatter};
pub use resize::{Resized, ShardResized};

use self::core::{Core, Front, LeaseBatch, Miss, copy_range, copy_whole, hit};
use crate::config::Config;
use crate::deadline::Deadline;
use crate::fork::ForkGuard;
use crate::key::Key;
use crate::shard::{self, Lease, Shard, ShardReport};
use crate::stats::{self, Stats};
use crate::{Error, Result};
use std::sync::{Arc, Mutex, PoisonError};
use wait::{count_of, reservation_of, value_of};

/// A node-local hot cache. See the crate's documentation for what it is.
///
/// `Send` and `Sync`; share it by reference or in an `Arc`. All methods may be called from any thread.
///
/// *A hit* is served on the caller's thread without lock, system call or allocation (the copying forms
/// copy there). *A miss* blocks the caller until the value is there, at most until its deadline. No method
/// but [`Cache::open`], [`Cache::resize`], [`Cache::set_namespace`] and [`Cache::shutdown`] blocks otherwise.
///
/// Results: `Ok(Some(…))` is the value, complete and checked; `Ok(None)` means that the origin has no such
/// key; an error means that this call cannot say. In batches each position has its own result, duplicates
/// and empty values included.
///
/// Dropping it is [`Cache::shutdown`].
pub struct Cache {
    core: Arc<Core>,
    reports: Vec<ShardReport>,
    running: Mutex<Vec<Shard>>,
    resizing: resize::Gate,
}

impl Cache {
    /// Opens a cache: maps, populates, locks and registers its memory and starts its shards. Blocks until all
    /// that is done (well under a second per GiB and core).
    ///
    /// Errors name the setting to change. What the policies let pass is logged as a warning and stands in
    /// [`Cache::reports`].
    pub fn open(config: Config) -> Result<Self> {
        config.check()?;
        let fork = ForkGuard::new();
        let config = Arc::new(config);
        let running = shard::start(&config)?;
        // Once per process: which way to copy is fastest here. Until it is known, large copies are libc's.
        crate::memory::copy::calibrate();
        let shards = running.iter().map(|shard| shard.shared.clone()).collect();
        let resizing = resize::Gate::new(config.capacity_bytes);
        Ok(Self {
            core: Arc::new(Core::new(shards, config, fork)),
            reports: running.iter().map(|shard| shard.report.clone()).collect(),
            running: Mutex::new(running),
            resizing,
        })
    }

    /// The configuration that the cache was opened with.
    pub fn config(&self) -> &Config {
        &self.core.config
    }

    /// What each shard obtained at start: pages, locking, ring, table. [`Resized`] has what it has now.
    pub fn reports(&self) -> &[ShardReport] {
        &self.reports
    }

    /// A lease on the value, fetched if it is not there.
    #[inline]
    pub fn get<'k>(&self, key: impl Into<Key<'k>>, deadline: impl Into<Deadline>) -> Result<Option<Lease>> {
        let key = key.into().check()?;
        let (hash, shared) = self.core.shard_of(key)?;
        match hit(shared, hash, key) {
            Some(lease) => Ok(Some(lease)),
            None => self.fetch_one(Miss::new(0, hash, key), deadline.into()),
        }
    }

    fn fetch_one(&self, miss: Miss<'_>, deadline: Deadline) -> Result<Option<Lease>> {
        value_of(self.core.fetch(&[miss], Vec::new(), deadline, Front::blocking()).answer())
    }

    /// Looks all keys up, starts to fetch what is missing, hands hits to `each` meanwhile and misses as they
    /// arrive.
    fn batch<'k, T>(
        &self,
        len: usize,
        key: impl Fn(usize) -> Key<'k>,
        deadline: Deadline,
        mut each: impl FnMut(usize, Lease) -> Result<T>,
    ) -> Vec<Result<Option<T>>> {
        let mut results: Vec<Option<Result<Option<T>>>> = (0..len).map(|_| None).collect();
        let mut hits = Vec::with_capacity(len);
        let failed = |position: usize, error| results[position] = Some(Err(error));
        let misses = self.core.look_up(len, key, |position, lease| hits.push((position, lease)), failed);
        let fetch = || self.core.fetch(&misses, Vec::new(), deadline, Front::blocking());
        let pending = (!misses.is_empty()).then(fetch);
        for (position, lease) in hits {
            results[position] = Some(each(position, lease).map(Some));
        }
        if let Some(pending) = pending {
            pending.finish(|i, answer| {
                let position = misses[i].position;
                results[position] = Some(match value_of(answer) {
                    Ok(Some(lease)) => each(position, lease).map(Some),
                    Ok(None) => Ok(None),
                    Err(error) => Err(error),
                });
            });
        }
        results.into_iter().map(|result| result.unwrap_or(Err(Error::ShutDown))).collect()
    }

    /// A lease on the value if it is there; never waits and never fetches. Counts as a lookup.
    #[inline]
    pub fn peek<'k>(&self, key: impl Into<Key<'k>>) -> Result<Option<Lease>> {
        let key = key.into().check()?;
        let (hash, shared) = self.core.shard_of(key)?;
        let found = hit(shared, hash, key);
        if found.is_none() {
            shared.callers.missed(1);
        }
        Ok(found)
    }

    /// Copies the value into `into`, which may be longer. Returns the value's length.
    pub fn get_into<'k>(
        &self,
        key: impl Into<Key<'k>>,
        into: &mut [u8],
        deadline: impl Into<Deadline>,
    ) -> Result<Option<u64>> {
        self.get(key, deadline)?.map(|lease| copy_whole(&lease, &mut [into])).transpose()
    }

    /// Copies the value into a list of buffers, filled one after the other; together they may be longer.
    /// Returns the value's length.
    pub fn get_scatter<'k>(
        &self,
        key: impl Into<Key<'k>>,
        into: &mut [&mut [u8]],
        deadline: impl Into<Deadline>,
    ) -> Result<Option<u64>> {
        self.get(key, deadline)?.map(|lease| copy_whole(&lease, into)).transpose()
    }

    /// Copies `into.len()` bytes of the value from `offset` on. Returns the value's length. A miss fetches the
    /// whole value.
    pub fn get_range<'k>(
        &self,
        key: impl Into<Key<'k>>,
        offset: u64,
        into: &mut [u8],
        deadline: impl Into<Deadline>,
    ) -> Result<Option<u64>> {
        self.get(key, deadline)?.map(|lease| copy_range(&lease, offset, into)).transpose()
    }

    /// [`Cache::get`] for many keys: one result per position. All values are held at once, so they must fit into the
    /// cache together: where they never can, the misses fail with [`Error::BatchTooLarge`]. Memory for them is taken all
    /// at once or not at all, so that of several such calls one after the other is served; what other leases pin can
    /// make them wait, and fail with [`Error::Pinned`] at the deadline. The copying forms have no such limits.
    pub fn get_batch(&self, keys: &[Key<'_>], deadline: impl Into<Deadline>) -> Vec<Result<Option<Lease>>> {
        let batch = self.core.lease_batch(keys, deadline.into(), Front::blocking());
        let LeaseBatch { mut results, positions, pending } = batch;
        if let Some(pending) = pending {
            pending.finish(|i, answer| results[positions[i]] = Some(value_of(answer)));
        }
        results.into_iter().map(|result| result.unwrap_or(Err(Error::ShutDown))).collect()
    }

    /// [`Cache::get_into`] for many keys: one result per position. Values are copied as they arrive and do not
    /// have to fit into the cache together.
    pub fn get_into_batch(
        &self,
        reads: &mut [Read<'_>],
        deadline: impl Into<Deadline>,
    ) -> Vec<Result<Option<u64>>> {
        let keys: Vec<Key<'_>> = reads.iter().map(|read| read.key).collect();
        let copy = |i: usize, lease: Lease| copy_whole(&lease, &mut [&mut *reads[i].into]);
        self.batch(keys.len(), |i| keys[i], deadline.into(), copy)
    }

    /// [`Cache::get_scatter`] for many keys: one result per position. As [`Cache::get_into_batch`].
    pub fn get_scatter_batch(
        &self,
        reads: &mut [ReadScatter<'_, '_>],
        deadline: impl Into<Deadline>,
    ) -> Vec<Result<Option<u64>>> {
        let keys: Vec<Key<'_>> = reads.iter().map(|read| read.key).collect();
        let copy = |i: usize, lease: Lease| copy_whole(&lease, reads[i].into);
        self.batch(keys.len(), |i| keys[i], deadline.into(), copy)
    }

    /// [`Cache::get_range`] for many keys: one result per position. As [`Cache::get_into_batch`].
    pub fn get_range_batch(
        &self,
        reads: &mut [ReadRange<'_>],
        deadline: impl Into<Deadline>,
    ) -> Vec<Result<Option<u64>>> {
        let keys: Vec<Key<'_>> = reads.iter().map(|read| read.key).collect();
        let copy = |i: usize, lease: Lease| copy_range(&lease, reads[i].offset, reads[i].into);
        self.batch(keys.len(), |i| keys[i], deadline.into(), copy)
    }

    /// True if the value is in the cache at this moment. Never waits; not counted as a lookup; says nothing
    /// about the origin.
    pub fn contains<'k>(&self, key: impl Into<Key<'k>>) -> Result<bool> {
        self.core.contains(key.into())
    }

    /// [`Cache::contains`] for many keys.
    pub fn contains_batch(&self, keys: &[Key<'_>]) -> Vec<Result<bool>> {
        keys.iter().map(|&key| self.contains(key)).collect()
    }

    /// Puts a value into the cache (not into the origin), in place of what the key held. The caller's thread
    /// copies. When it returns, lookups find the new value; leases on the old one keep the old bytes.
    pub fn put<'k>(
        &self,
        key: impl Into<Key<'k>>,
        value: &[u8],
        deadline: impl Into<Deadline>,
    ) -> Result<()> {
        self.put_gather(key, &[value], deadline)
    }

    /// [`Cache::put`] of a value that lies in several pieces.
    pub fn put_gather<'k>(
        &self,
        key: impl Into<Key<'k>>,
        pieces: &[&[u8]],
        deadline: impl Into<Deadline>,
    ) -> Result<()> {
        let deadline = deadline.into();
        let len = pieces.iter().map(|piece| piece.len() as u64).sum();
        let pending = self.core.reserve(key.into(), len, deadline, Front::blocking())?;
        let mut reservation = reservation_of(pending.answer())?;
        let crc32c = reservation.write(pieces);
        let pending = self.core.commit(reservation, crc32c, deadline, Front::blocking());
        count_of(pending.answer()).map(drop)
    }

    /// Forgets values. When it returns without an error, no call that starts afterwards is served with what
    /// was cached or being fetched before; leases keep their bytes. Returns how many values were forgotten.
    ///
    /// An error (deadline) means that some shards may not have done it yet; they will.
    pub fn invalidate(&self, what: Invalidate<'_>, deadline: impl Into<Deadline>) -> Result<u64> {
        let pending = self.core.invalidate(what, deadline.into(), Front::blocking())?;
        let mut total = Ok(0);
        pending.finish(|_, answer| {
            let count = count_of(answer);
            total = std::mem::replace(&mut total, Ok(0)).and_then(|sum| Ok(sum + count?));
        });
        total
    }

    /// Starts to fetch what is not there, without waiting for it. Returns how many keys were handed over; the
    /// others are there already.
    ///
    /// An error ([`Error::Overloaded`], [`Error::ShutDown`]) means that the keys of one shard were not taken.
    pub fn prefetch(&self, keys: &[Key<'_>]) -> Result<usize> {
        self.core.prefetch(keys)
    }

    /// What the cache did and holds. Never waits.
    pub fn stats(&self) -> Stats {
        let mut all = Stats::default();
        for shared in &self.core.shards {
            stats::collect(&mut all, &shared.counters, &shared.callers);
        }
        all
    }

    /// Ends the cache: calls under way fail with [`Error::ShutDown`], operations are cancelled, and when every
    /// one of them has been given back by the kernel the shards' threads end. Leases stay good; the memory is
    /// unmapped with the last of them. Blocks for as long as that takes (milliseconds). Idempotent.
    pub fn shutdown(&self) {
        if self.core.fork.forked() {
            return;
        }
        let running = std::mem::take(&mut *self.running.lock().unwrap_or_else(PoisonError::into_inner));
        shard::end(running);
    }
}

impl Drop for Cache {
    fn drop(&mut self) {
        if self.core.fork.forked() {
            // The threads are the parent's.
            std::mem::forget(std::mem::take(
                &mut *self.running.lock().unwrap_or_else(PoisonError::into_inner),
            ));
        } else {
            self.shutdown();
        }
    }
}

impl std::fmt::Debug for Cache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cache").field("config", &self.core.config).finish_non_exhaustive()
    }
}
