//! Growing and shrinking the arena while the shard works: one block per turn of the loop, so that nobody waits
//! for longer than one block takes to be zeroed or unmapped.
//!
//! What is to go is chosen by the [`Store`](super::store::Store); what the kernel has to do is done here, on the
//! shard's thread, the only one that maps and unmaps. A block is unmapped when the allocator says that none of
//! its granules is in use: leases, reservations and the room of values being received are all in use there.

use super::fills::{Fill, Stage};
use super::reactor::Reactor;
use super::request::{Answer, Waiter};
use crate::Error;
use crate::config::Config;
use crate::memory::{LockPolicy, Mapper};

/// A resize under way, if there is one.
#[derive(Default)]
pub(super) struct Resizing {
    /// False almost always.
    active: bool,
    /// Blocks that the arena is to have.
    target: u32,
    /// Blocks that it had when it was asked to change: what it goes back to if it cannot grow.
    before: u32,
    mapper: Option<Mapper>,
    /// Why it could not grow.
    failure: Option<Error>,
    waiter: Option<Waiter>,
}

impl Reactor {
    /// Starts to change the arena to `blocks` blocks, in place of what was asked for before.
    pub(super) fn resize(&mut self, blocks: u32, waiter: Waiter) {
        if let Some(mapper) = self.resizing.mapper.take() {
            self.settle(mapper);
        }
        let target = blocks.clamp(1, self.store.blocks_max());
        let former = std::mem::replace(
            &mut self.resizing,
            Resizing {
                active: true,
                target,
                before: self.store.blocks(),
                mapper: None,
                failure: None,
                waiter: Some(waiter),
            },
        );
        // Nobody waits for it: its deadline has passed.
        if let Some(waiter) = former.waiter {
            waiter.answer(Answer::Done(Ok(0)));
        }
    }

    /// One step, if there is one to be taken now. Every turn of the loop comes by; a turn follows at once as long
    /// as there is more to do than to wait for pins.
    pub(super) fn go_on_resizing(&mut self) {
        if !self.resizing.active || self.is_stopping() {
            return;
        }
        let (have, want) = (self.store.blocks(), self.resizing.target);
        if have < want && self.store.keep_block(&self.shared.counters) {
            self.come_back();
        } else if let Some(block) = self.store.take_retired(&self.shared.counters) {
            self.unmap(block);
            self.come_back();
        } else if have > want {
            self.store.shrink_to(want, &self.shared.counters);
            self.forsake_too_large();
            self.come_back();
        } else if have < want {
            if let Err(error) = self.map_one(want - have) {
                tracing::warn!(shard = self.shared.index, %error, "the arena cannot grow");
                self.resizing.failure = Some(error);
                self.resizing.target = self.resizing.before;
            }
            self.come_back();
        } else {
            self.reached();
        }
    }

    /// Sees to it that the loop does not sleep before the next step.
    fn come_back(&self) {
        self.shared.bell.nudge();
    }

    /// Nothing is left to do but to wait for pins, if for anything.
    fn reached(&mut self) {
        if let Some(mapper) = self.resizing.mapper.take() {
            self.settle(mapper);
        }
        if let Some(error) = self.resizing.failure.take()
            && let Some(waiter) = self.resizing.waiter.take()
        {
            waiter.fail(error);
        }
        if self.store.retiring_blocks() == 0 {
            let done = std::mem::take(&mut self.resizing);
            if let Some(waiter) = done.waiter {
                waiter.answer(Answer::Done(Ok(1)));
            }
        }
    }

    fn settle(&self, mapper: Mapper) {
        for warning in self.shared.arena.settle(mapper) {
            tracing::warn!(shard = self.shared.index, "{warning}");
        }
    }

    /// Maps one of `missing` blocks and takes it into use.
    fn map_one(&mut self, missing: u32) -> Result<(), Error> {
        let Some(block) = self.store.block_to_add() else {
            unreachable!("a target is at most the number of blocks there can be, and none is on its way out")
        };
        let arena = &self.shared.arena;
        let mapper = self.resizing.mapper.get_or_insert_with(|| arena.mapper(missing as usize));
        let mapped = arena.add(block as usize, mapper)?;
        if self.config.register != LockPolicy::Off
            && let Err(reason) = self.transport.block_added(block as usize, &mapped)
        {
            if self.config.register == LockPolicy::Required {
                // SAFETY: the allocator does not have the block: nobody was given an address in it.
                unsafe { arena.remove(block as usize) };
                return Err(not_registered(&self.config, reason));
            }
            tracing::warn!(
                shard = self.shared.index,
                block,
                "a block is not registered with the ring: {reason}"
            );
        }
        self.store.add_block(block, &self.shared.counters);
        Ok(())
    }

    fn unmap(&mut self, block: u32) {
        if let Err(reason) = self.transport.block_removed(block as usize) {
            tracing::warn!(
                shard = self.shared.index,
                block,
                "a block stays registered with the ring, and its memory with the kernel: {reason}"
            );
        }
        // SAFETY: the allocator retired the block: no value, lease, reservation or room of a receive in flight has
        // a granule of it, for each holds its extents as long as it may use an address; and it gives out none of
        // it before the block is added again, by this thread.
        unsafe { self.shared.arena.remove(block as usize) };
    }

    /// Answers those who wait for room for a value that is larger than the arena has become. Puts and groups find out by
    /// themselves; a fill would wait until its deadline.
    fn forsake_too_large(&mut self) {
        let arena_bytes = self.store.arena_bytes();
        let len =
            |fill: &Fill| fill.about.filter(|_| fill.stage == Stage::NoRoom).map_or(0, |about| about.len);
        let found = self.fills.iter().map(|(id, fill)| (id, len(fill))).filter(|&(_, len)| len > arena_bytes);
        let found: Vec<_> = found.collect();
        for (id, value_bytes) in found {
            self.fail_fill(id, &Error::ValueTooLarge { value_bytes, arena_bytes });
        }
    }
}

fn not_registered(config: &Config, reason: String) -> Error {
    let setting = format!("setting `register` is {}", config.register);
    Error::System { what: format!("{setting}, but a new block cannot be registered"), reason: reason.into() }
}
