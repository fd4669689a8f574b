//! The public engine.

use crate::call::Call;
use crate::config::Config;
use crate::deadline::Deadline;
use crate::fork::ForkGuard;
use crate::key::{Key, KeyHasher, Namespace};
use crate::namespace::Namespaces;
use crate::shard::request::{Answer, Fetch, Request, Scope, Waiter};
use crate::shard::{self, Lease, Shard, ShardReport, Shared};
use crate::stats::{self, Stats};
use crate::{Error, Result};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// How long a call waits past its deadline for the shard's own word on why it failed, which says more than
/// "deadline passed". Matters only when a shard is so busy that it is late.
const LAST_WORD: Duration = Duration::from_millis(20);

/// A node-local hot cache. See the crate's documentation for what it is.
///
/// `Send` and `Sync`; share it by reference or in an `Arc`. All methods may be called from any thread.
///
/// *A hit* is served on the caller's thread without lock, system call or allocation (the copying forms
/// copy there). *A miss* blocks the caller until the value is there, at most until its deadline. No method
/// but [`Cache::open`] and [`Cache::shutdown`] blocks otherwise.
///
/// Results: `Ok(Some(…))` is the value, complete and checked; `Ok(None)` means that the origin has no such
/// key; an error means that this call cannot say. In batches each position has its own result, duplicates
/// and empty values included.
///
/// Dropping it is [`Cache::shutdown`].
pub struct Cache {
    shards: Vec<Arc<Shared>>,
    reports: Vec<ShardReport>,
    running: Mutex<Vec<Shard>>,
    namespaces: Arc<Namespaces>,
    hasher: KeyHasher,
    config: Arc<Config>,
    fork: ForkGuard,
}

/// What [`Cache::invalidate`] forgets.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Invalidate<'a> {
    /// One key.
    Key(Key<'a>),
    /// Every key of a namespace that starts with these bytes.
    Prefix(Namespace, &'a [u8]),
    /// Every key of a namespace.
    Namespace(Namespace),
    /// Everything.
    All,
}

/// One position of [`Cache::get_into_batch`].
#[derive(Debug)]
pub struct Read<'a> {
    /// What to read.
    pub key: Key<'a>,
    /// Where to copy it; at least as long as the value.
    pub into: &'a mut [u8],
}

/// One position of [`Cache::get_scatter_batch`].
#[derive(Debug)]
pub struct ReadScatter<'a, 'b> {
    /// What to read.
    pub key: Key<'a>,
    /// Where to copy it: filled one after the other; together at least as long as the value.
    pub into: &'a mut [&'b mut [u8]],
}

/// One position of [`Cache::get_range_batch`].
#[derive(Debug)]
pub struct ReadRange<'a> {
    /// What to read.
    pub key: Key<'a>,
    /// First byte of the value to copy.
    pub offset: u64,
    /// Where to copy it; its length says how many bytes.
    pub into: &'a mut [u8],
}

/// A miss that is to be fetched.
struct Miss<'a> {
    position: usize,
    hash: u64,
    key: Key<'a>,
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
        let (config, namespaces) = (Arc::new(config), Arc::new(Namespaces::new()));
        let running = shard::start(&config, &namespaces)?;
        // Once per process: which way to copy is fastest here. Until it is known, large copies are libc's.
        crate::memory::copy::calibrate();
        Ok(Self {
            shards: running.iter().map(|shard| shard.shared.clone()).collect(),
            reports: running.iter().map(|shard| shard.report.clone()).collect(),
            running: Mutex::new(running),
            namespaces,
            hasher: KeyHasher::new(),
            config,
            fork,
        })
    }

    /// The namespace of this name, for use in keys. The empty name is [`Namespace::DEFAULT`].
    pub fn namespace(&self, name: &str) -> Result<Namespace> {
        self.namespaces.get(name)
    }

    /// The configuration that the cache was opened with.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// What each shard obtained at start: pages, locking, ring, table.
    pub fn reports(&self) -> &[ShardReport] {
        &self.reports
    }

    /// A lease on the value, fetched if it is not there.
    #[inline]
    pub fn get<'k>(&self, key: impl Into<Key<'k>>, deadline: impl Into<Deadline>) -> Result<Option<Lease>> {
        let key = key.into().check()?;
        let (hash, shared) = self.shard_of(key)?;
        match hit(shared, hash, key) {
            Some(lease) => Ok(Some(lease)),
            None => self.fetch_one(Miss { position: 0, hash, key }, deadline.into()),
        }
    }

    /// A lease on the value if it is there; never waits and never fetches. Counts as a lookup.
    #[inline]
    pub fn peek<'k>(&self, key: impl Into<Key<'k>>) -> Result<Option<Lease>> {
        let key = key.into().check()?;
        let (hash, shared) = self.shard_of(key)?;
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

    /// [`Cache::get`] for many keys: one result per position. All of them are held at once, so all of them
    /// must fit into the cache together; where they do not, the positions without room fail with
    /// [`Error::Pinned`] at the deadline. The copying forms have no such limit.
    pub fn get_batch(&self, keys: &[Key<'_>], deadline: impl Into<Deadline>) -> Vec<Result<Option<Lease>>> {
        self.batch(keys.len(), |i| keys[i], deadline.into(), |_, lease| Ok(lease))
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
        let key = key.into().check()?;
        let (hash, shared) = self.shard_of(key)?;
        Ok(match shared.table.find(hash, |value| value.is(key)) {
            None => false,
            Some(pin) => {
                shared.table.release(pin);
                true
            }
        })
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
        let (key, deadline) = (key.into().check()?, deadline.into());
        let (hash, shared) = self.shard_of(key)?;
        let len = pieces.iter().map(|piece| piece.len() as u64).sum();
        let failed = |error| Answer::Reserved(Err(error));
        let reserved = ask(deadline, failed, |waiter| {
            let key = key.to_owned();
            shared.submit(Request::Reserve { hash, key, len, deadline: deadline.instant(), waiter }, deadline);
        });
        let Answer::Reserved(reservation) = reserved? else { return Err(Error::ShutDown) };
        let mut reservation = reservation?;
        let crc32c = reservation.write(pieces);
        let committed = ask(deadline, |error| Answer::Done(Err(error)), |waiter| {
            shared.submit(Request::Commit { reservation, crc32c, waiter }, deadline);
        });
        match committed? {
            Answer::Done(done) => done.map(drop),
            _ => Err(Error::ShutDown),
        }
    }

    /// Forgets values. When it returns without an error, no call that starts afterwards is served with what
    /// was cached or being fetched before; leases keep their bytes. Returns how many values were forgotten.
    ///
    /// An error (deadline) means that some shards may not have done it yet; they will.
    pub fn invalidate(&self, what: Invalidate<'_>, deadline: impl Into<Deadline>) -> Result<u64> {
        let deadline = deadline.into();
        self.check_fork()?;
        let one = match what {
            Invalidate::Key(key) => {
                let key = key.check()?;
                let (hash, shared) = self.shard_of(key)?;
                Some((shared, hash, key))
            }
            _ => None,
        };
        let shards: Vec<&Arc<Shared>> = match one {
            Some((shared, ..)) => vec![shared],
            None => self.shards.iter().collect(),
        };
        let scope = || match what {
            Invalidate::Key(key) => Scope::Key(one.map_or(0, |(_, hash, _)| hash), key.to_owned()),
            Invalidate::Prefix(namespace, bytes) => {
                Scope::Prefix(Key { namespace, bytes }.to_owned())
            }
            Invalidate::Namespace(namespace) => Scope::Namespace(namespace),
            Invalidate::All => Scope::All,
        };
        let call = Arc::new(Call::new(shards.len()));
        for (position, shared) in shards.iter().enumerate() {
            let waiter = Waiter::new(call.clone(), position as u32, |error| Answer::Done(Err(error)));
            shared.submit(Request::Invalidate { scope: scope(), waiter }, deadline);
        }
        let mut total = Ok(0);
        collect(&call, shards.len(), deadline, |_, answer| {
            total = match (std::mem::replace(&mut total, Ok(0)), answer) {
                (Ok(sum), Some(Answer::Done(Ok(count)))) => Ok(sum + count),
                (Ok(_), Some(Answer::Done(Err(error)))) | (Err(error), _) => Err(error),
                (Ok(_), _) => Err(Error::DeadlinePassed { stage: "waiting for the shards to invalidate" }),
            };
        });
        total
    }

    /// Starts to fetch what is not there, without waiting for it. Returns how many keys were handed over; the
    /// others are there already.
    ///
    /// An error ([`Error::Overloaded`], [`Error::ShutDown`]) means that the keys of one shard were not taken.
    pub fn prefetch(&self, keys: &[Key<'_>]) -> Result<usize> {
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
                shared.offer(Request::Fetch { keys, deadline: fill_by.instant() })?;
            }
        }
        Ok(count)
    }

    /// What the cache did and holds. Never waits.
    pub fn stats(&self) -> Stats {
        let mut all = Stats::default();
        for shared in &self.shards {
            stats::collect(&mut all, &shared.counters, &shared.callers);
        }
        all
    }

    /// Ends the cache: calls under way fail with [`Error::ShutDown`], operations are cancelled, and when every
    /// one of them has been given back by the kernel the shards' threads end. Leases stay good; the memory is
    /// unmapped with the last of them. Blocks for as long as that takes (milliseconds). Idempotent.
    pub fn shutdown(&self) {
        if self.fork.forked() {
            return;
        }
        let running = std::mem::take(&mut *self.running.lock().unwrap_or_else(PoisonError::into_inner));
        shard::end(running);
    }

    fn check_fork(&self) -> Result<()> {
        if self.fork.forked() { Err(Error::Forked) } else { Ok(()) }
    }

    #[inline]
    fn shard_of(&self, key: Key<'_>) -> Result<(u64, &Arc<Shared>)> {
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

    fn fetch_one(&self, miss: Miss<'_>, deadline: Deadline) -> Result<Option<Lease>> {
        let mut result = None;
        self.fetch(&[miss], deadline).finish(|_, answer| result = Some(answer));
        result.unwrap_or(Err(Error::ShutDown))
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
        let (mut hits, mut misses) = (Vec::new(), Vec::new());
        for (position, result) in results.iter_mut().enumerate() {
            let looked_up = key(position).check().and_then(|key| {
                let (hash, shared) = self.shard_of(key)?;
                Ok((hash, key, hit(shared, hash, key)))
            });
            match looked_up {
                Ok((_, _, Some(lease))) => hits.push((position, lease)),
                Ok((hash, key, None)) => misses.push(Miss { position, hash, key }),
                Err(error) => *result = Some(Err(error)),
            }
        }
        let pending = (!misses.is_empty()).then(|| self.fetch(&misses, deadline));
        for (position, lease) in hits {
            results[position] = Some(each(position, lease).map(Some));
        }
        if let Some(pending) = pending {
            pending.finish(|i, answer| {
                let position = misses[i].position;
                results[position] = Some(match answer {
                    Ok(Some(lease)) => each(position, lease).map(Some),
                    Ok(None) => Ok(None),
                    Err(error) => Err(error),
                });
            });
        }
        results.into_iter().map(|result| result.unwrap_or(Err(Error::ShutDown))).collect()
    }

    /// Hands misses to their shards.
    fn fetch(&self, misses: &[Miss<'_>], deadline: Deadline) -> Pending {
        let call = Arc::new(Call::new(misses.len()));
        let failed = |error| Answer::Value(Err(error));
        let waiter = |i: usize| Waiter::new(call.clone(), i as u32, failed);
        if deadline.has_passed() {
            let error = Error::DeadlinePassed { stage: "looking the key up" };
            for (i, miss) in misses.iter().enumerate() {
                self.shards[self.shard_index(miss.hash)].callers.missed(1);
                waiter(i).fail(error.clone());
            }
        } else {
            let mut per_shard: Vec<Vec<Fetch>> = self.shards.iter().map(|_| Vec::new()).collect();
            for (i, miss) in misses.iter().enumerate() {
                let fetch =
                    Fetch { hash: miss.hash, key: miss.key.to_owned(), waiter: Some(waiter(i)) };
                per_shard[self.shard_index(miss.hash)].push(fetch);
            }
            for (shared, keys) in self.shards.iter().zip(per_shard) {
                if !keys.is_empty() {
                    shared.callers.missed(keys.len() as u64);
                    shared.submit(Request::Fetch { keys, deadline: deadline.instant() }, deadline);
                }
            }
        }
        Pending { call, len: misses.len(), deadline }
    }
}

impl Drop for Cache {
    fn drop(&mut self) {
        if self.fork.forked() {
            // The threads are the parent's.
            std::mem::forget(std::mem::take(&mut *self.running.lock().unwrap_or_else(PoisonError::into_inner)));
        } else {
            self.shutdown();
        }
    }
}

impl std::fmt::Debug for Cache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cache").field("config", &self.config).finish_non_exhaustive()
    }
}

#[inline]
fn hit(shared: &Arc<Shared>, hash: u64, key: Key<'_>) -> Option<Lease> {
    let pin = shared.table.acquire(hash, |value| value.is(key))?;
    shared.callers.hit(shared.table.entry(&pin).len);
    Some(Lease::new(shared.clone(), pin))
}

fn copy_whole(lease: &Lease, into: &mut [&mut [u8]]) -> Result<u64> {
    let value_bytes = lease.len();
    let buffer_bytes: u64 = into.iter().map(|buffer| buffer.len() as u64).sum();
    if buffer_bytes < value_bytes {
        return Err(Error::BufferTooSmall { buffer_bytes, value_bytes });
    }
    lease.fill(into)?;
    Ok(value_bytes)
}

fn copy_range(lease: &Lease, offset: u64, into: &mut [u8]) -> Result<u64> {
    lease.copy_range(offset, into)?;
    Ok(lease.len())
}

/// Misses under way.
struct Pending {
    call: Arc<Call<Answer>>,
    len: usize,
    deadline: Deadline,
}

impl Pending {
    /// Waits for every miss and hands each over as it arrives.
    fn finish(self, mut each: impl FnMut(usize, Result<Option<Lease>>)) {
        collect(&self.call, self.len, self.deadline, |i, answer| {
            each(
                i,
                match answer {
                    Some(Answer::Value(value)) => value,
                    Some(_) => Err(Error::ShutDown),
                    None => Err(Error::DeadlinePassed { stage: "waiting for the shard" }),
                },
            );
        });
    }
}

/// Waits for all positions of a call; `None` for those that did not answer in time.
fn collect(
    call: &Call<Answer>,
    len: usize,
    deadline: Deadline,
    mut each: impl FnMut(usize, Option<Answer>),
) {
    let last_word = deadline.instant() + LAST_WORD;
    let mut waiting = vec![true; len];
    let mut left = len;
    while left > 0 {
        let in_time = call.wait(last_word, |position, answer| {
            waiting[position as usize] = false;
            left -= 1;
            each(position as usize, Some(answer));
        });
        if !in_time {
            for position in (0..len).filter(|&position| waiting[position]) {
                each(position, call.abandon(position as u32));
            }
            return;
        }
    }
}

/// One question to one shard.
fn ask(
    deadline: Deadline,
    failed: fn(Error) -> Answer,
    submit: impl FnOnce(Waiter),
) -> Result<Answer> {
    let call = Arc::new(Call::new(1));
    submit(Waiter::new(call.clone(), 0, failed));
    let mut result = None;
    collect(&call, 1, deadline, |_, answer| result = answer);
    result.ok_or(Error::DeadlinePassed { stage: "waiting for the shard" })
}
