//! Changing the capacity while the cache works.

use super::core::Core;
use super::wait::Pending;
use super::{Cache, count_of};
use crate::call::{Call, Wake};
use crate::deadline::Deadline;
use crate::memory::ArenaReport;
use crate::shard::request::{Answer, Request, Waiter};
use crate::{Error, Result};
use serde::Serialize;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How long a failed growth may take at least to be undone on the shards that did grow.
const UNDO: Duration = Duration::from_secs(1);

/// What [`Cache::resize`] reached by its deadline, over all shards and for each.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct Resized {
    /// Bytes that the arenas are to have: the capacity asked for in whole blocks per shard.
    pub target_bytes: u64,
    /// Bytes that they have at this moment, `retiring_bytes` included.
    pub arena_bytes: u64,
    /// Bytes of blocks that are on their way out and in use: by leases, by puts that are being written, by values
    /// that are arriving. Each goes by itself with the last of these.
    pub retiring_bytes: u64,
    /// Each shard's part.
    pub shards: Vec<ShardResized>,
}

/// One shard's part of a [`Resized`].
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct ShardResized {
    /// Bytes that the arena is to have.
    pub target_bytes: u64,
    /// Bytes that it has at this moment, `retiring_bytes` included.
    pub arena_bytes: u64,
    /// Bytes of blocks that are on their way out and in use.
    pub retiring_bytes: u64,
    /// What the arena is made of now, with the warnings so far.
    pub arena: ArenaReport,
}

impl Resized {
    /// True if every shard has what it is to have, and nothing is on its way out.
    pub fn is_complete(&self) -> bool {
        self.arena_bytes == self.target_bytes && self.retiring_bytes == 0
    }
}

/// One resize at a time, and the capacity that the last one asked for.
pub(super) struct Gate {
    state: Mutex<State>,
    free: Condvar,
}

struct State {
    busy: bool,
    capacity_bytes: u64,
}

impl Gate {
    pub(super) fn new(capacity_bytes: u64) -> Self {
        Self { state: Mutex::new(State { busy: false, capacity_bytes }), free: Condvar::new() }
    }

    /// Waits until no other resize is under way. `None` if the deadline passes first.
    fn enter(&self, deadline: Deadline) -> Option<Turn<'_>> {
        let left = deadline.instant().saturating_duration_since(Instant::now());
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.free.wait_timeout_while(state, left, |state| state.busy);
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if std::mem::replace(&mut state.busy, true) {
            return None;
        }
        Some(Turn { gate: self, former_bytes: state.capacity_bytes })
    }
}

/// The right to resize, until it is dropped.
struct Turn<'a> {
    gate: &'a Gate,
    former_bytes: u64,
}

impl Turn<'_> {
    fn succeeded(&self, capacity_bytes: u64) {
        self.gate.state.lock().unwrap_or_else(PoisonError::into_inner).capacity_bytes = capacity_bytes;
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.gate.state.lock().unwrap_or_else(PoisonError::into_inner).busy = false;
        self.gate.free.notify_one();
    }
}

impl Cache {
    /// Changes the capacity to `capacity_bytes`, rounded down to whole blocks per shard, while the cache works.
    /// Waits until that is reached, at most until the deadline; then the shards go on by themselves, and the
    /// result says how far they are.
    ///
    /// *Growing* maps, populates, locks and registers blocks as [`Cache::open`] does, up to `capacity_max_bytes`.
    /// If a shard cannot have a block, the error says why, and all shards go back to what they had; where a block
    /// that was new is in use by then, it goes with its last use.
    ///
    /// *Shrinking* takes out the blocks in which the least is pinned and, of these, the least in use. The values
    /// in them are evicted, so shrinking may cost more than the coldest values. Leases keep their bytes: a block
    /// with pinned bytes goes when the last pin does, after the deadline if need be; lookups do not find its
    /// values any longer, and a put or fetched value that was under way into it is gone as soon as those who wait
    /// for it let go of it. A value that is larger than what is left fails with [`Error::ValueTooLarge`].
    ///
    /// One resize at a time: a second waits for the first, at most until its own deadline.
    pub fn resize(&self, capacity_bytes: u64, deadline: impl Into<Deadline>) -> Result<Resized> {
        self.core.check_fork()?;
        let deadline = deadline.into();
        let blocks = self.core.config.shard_blocks(capacity_bytes)?;
        let waiting = Error::DeadlinePassed { stage: "waiting to resize" };
        if deadline.has_passed() {
            return Err(waiting);
        }
        let turn = self.resizing.enter(deadline).ok_or(waiting)?;
        let asked = self.core.resize(blocks, deadline);
        if let Err(error) = asked {
            if !matches!(error, Error::ShutDown) {
                // Shards that did grow go back. They did have the former capacity, so this cannot fail alike.
                let by = deadline.max(UNDO.into());
                let former = self.core.config.shard_blocks(turn.former_bytes)?;
                let _ = self.core.resize(former, by);
            }
            return Err(error);
        }
        turn.succeeded(capacity_bytes);
        Ok(self.core.resized(blocks))
    }
}

impl Core {
    /// Asks all shards for so many blocks, and waits. Those that are not ready at the deadline go on.
    fn resize(&self, blocks: u64, deadline: Deadline) -> Result<()> {
        let call = Arc::new(Call::new(self.shards.len(), Wake::Sleeper));
        for (position, shared) in self.shards.iter().enumerate() {
            let waiter = Waiter::new(call.clone(), position as u32, |error| Answer::Done(Err(error)));
            // Fits: an arena counts granules, which are smaller, in 32 bits.
            shared.submit(Request::Resize { blocks: blocks as u32, waiter }, deadline);
        }
        let mut failed = Ok(());
        Pending { call, len: self.shards.len(), deadline }.finish(|_, answer| {
            if answer.is_some()
                && let Err(error) = count_of(answer)
            {
                failed = Err(error);
            }
        });
        failed
    }

    fn resized(&self, blocks: u64) -> Resized {
        let target_bytes = blocks * self.config.block_bytes;
        let part = |shared: &Arc<crate::shard::Shared>| ShardResized {
            target_bytes,
            arena_bytes: shared.counters.arena_bytes.get(),
            retiring_bytes: shared.counters.retiring_bytes.get(),
            arena: shared.arena.report(),
        };
        let shards: Vec<ShardResized> = self.shards.iter().map(part).collect();
        Resized {
            target_bytes: target_bytes * shards.len() as u64,
            arena_bytes: shards.iter().map(|shard| shard.arena_bytes).sum(),
            retiring_bytes: shards.iter().map(|shard| shard.retiring_bytes).sum(),
            shards,
        }
    }
}
