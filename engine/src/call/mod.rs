//! The waiter: how results travel from shards to the call that waits for them.
//!
//! A [`Call`] has one cell per position of a (possibly batched) operation. Shards complete cells in any
//! order; the caller takes them in the order of completion, or gives up on them when its deadline passes.
//! Exactly one side gets each result: a result that comes after its cell was abandoned goes back to the
//! shard, which drops it (and with it the pin it carries). So a deadline never leaks, and nobody writes
//! into memory that a caller who gave up has reused.
//!
//! The mechanism is a stack of completed positions whose head is also the word to sleep on. The blocking
//! front ([`Call::wait`]) sleeps on it with a futex; another front needs only to be told when the stack
//! stops being empty, which is one place ([`Call::complete`]).
//!
//! It does not know what the results are.

mod doorbell;
mod futex;
#[cfg(loom)]
mod loom_tests;
mod space;
#[cfg(all(test, not(loom)))]
mod tests;

pub(crate) use doorbell::Doorbell;
pub(crate) use space::Space;

use crate::sync::{AtomicU8, AtomicU32, Ordering, UnsafeCell};
use futex::Futex;
use std::time::Instant;

const PENDING: u8 = 0;
const DONE: u8 = 1;
const TAKEN: u8 = 2;
const ABANDONED: u8 = 3;

/// No position: the stack is empty.
const EMPTY: u32 = u32::MAX;

struct Cell<T> {
    state: AtomicU8,
    /// The position completed before this one and not yet seen by the caller.
    below: AtomicU32,
    result: UnsafeCell<Option<T>>,
}

/// One caller's operation on `len` positions. Shared by the caller and the shards (`Arc`).
pub(crate) struct Call<T> {
    cells: Box<[Cell<T>]>,
    /// The position completed last, or `EMPTY`.
    head: AtomicU32,
    futex: Futex,
    wake: Wake,
}

/// How a caller learns that positions of its call were completed.
pub(crate) enum Wake {
    /// It sleeps in [`Call::wait`].
    Sleeper,
    /// It is told: called once for every time that [`Call::drain`] would find something again, on the completing
    /// thread, which it must not block.
    Told(Box<dyn Fn() + Send + Sync>),
}

// SAFETY: `result` is written by the one completer of a position before it moves the cell from `PENDING`
// to `DONE` (release), and read by the one caller after it saw `DONE` (acquire). Values move between
// threads, none is shared by reference.
unsafe impl<T: Send> Sync for Call<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Send for Call<T> {}

impl<T> Call<T> {
    /// A call of `len` positions, all pending.
    pub(crate) fn new(len: usize, wake: Wake) -> Self {
        assert!(len < EMPTY as usize, "a call has fewer than 2^32 - 1 positions");
        Self {
            cells: (0..len)
                .map(|_| Cell {
                    state: AtomicU8::new(PENDING),
                    below: AtomicU32::new(EMPTY),
                    result: UnsafeCell::new(None),
                })
                .collect(),
            head: AtomicU32::new(EMPTY),
            futex: Futex::new(),
            wake,
        }
    }

    /// Shards: delivers the result of a position. Gives it back if the caller gave up on the position.
    ///
    /// Each position is completed by at most one party, at most once: the shard that took the request.
    pub(crate) fn complete(&self, position: u32, result: T) -> Result<(), T> {
        let cell = &self.cells[position as usize];
        cell.result.with_mut(|place| {
            // SAFETY: the cell is `PENDING` or `ABANDONED`: in both the caller does not touch `result`, and
            // there is one completer.
            unsafe { *place = Some(result) }
        });
        // Release: the result is visible to the caller that acquires `DONE`. On failure the caller had
        // abandoned the cell, and nothing of the caller's needs to be seen: Relaxed.
        if cell.state.compare_exchange(PENDING, DONE, Ordering::Release, Ordering::Relaxed).is_err() {
            let back = cell.result.with_mut(|place| {
                // SAFETY: the cell is `ABANDONED` for good; only this completer touches it.
                unsafe { (*place).take() }
            });
            return back.map_or(Ok(()), Err);
        }
        let mut head = self.head.load(Ordering::Relaxed);
        loop {
            cell.below.store(head, Ordering::Relaxed);
            // Release: publishes `below`, and with the caller's acquiring swap every push beneath it (the
            // pushes are read-modify-writes on one word, hence one release sequence).
            match self.head.compare_exchange_weak(head, position, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => break,
                Err(now) => head = now,
            }
        }
        if head == EMPTY {
            // The caller sleeps only while the head is `EMPTY`, and this was the push that changed it.
            match &self.wake {
                Wake::Sleeper => self.futex.wake(&self.head),
                Wake::Told(tell) => tell(),
            }
        }
        Ok(())
    }

    /// Caller: waits until at least one position completed since the last call, and calls `each` with every
    /// such position and its result. False if the deadline passed first.
    pub(crate) fn wait(&self, deadline: Instant, mut each: impl FnMut(u32, T)) -> bool {
        while !self.drain(&mut each) {
            if !self.futex.wait(&self.head, EMPTY, deadline) {
                return false;
            }
        }
        true
    }

    /// Caller: calls `each` with every position that completed since the last call, and its result. False if there
    /// was none.
    pub(crate) fn drain(&self, mut each: impl FnMut(u32, T)) -> bool {
        // Acquire: pairs with the pushes.
        let mut position = self.head.swap(EMPTY, Ordering::Acquire);
        let some = position != EMPTY;
        while position != EMPTY {
            let cell = &self.cells[position as usize];
            let below = cell.below.load(Ordering::Relaxed);
            if let Some(result) = self.take(position) {
                each(position, result);
            }
            position = below;
        }
        some
    }

    /// Caller: gives up on a position. The result, if it came all the same.
    pub(crate) fn abandon(&self, position: u32) -> Option<T> {
        let cell = &self.cells[position as usize];
        // Failure means `DONE` (or taken before): take it instead. Relaxed: `take` acquires.
        match cell.state.compare_exchange(PENDING, ABANDONED, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => None,
            Err(_) => self.take(position),
        }
    }

    /// Shards: true if the caller has given up on the position, so that nobody needs to work for it.
    pub(crate) fn is_abandoned(&self, position: u32) -> bool {
        // Relaxed: a hint.
        self.cells[position as usize].state.load(Ordering::Relaxed) == ABANDONED
    }

    fn take(&self, position: u32) -> Option<T> {
        let cell = &self.cells[position as usize];
        // Acquire: pairs with the completer's release.
        if cell.state.load(Ordering::Acquire) != DONE {
            return None;
        }
        cell.state.store(TAKEN, Ordering::Relaxed);
        cell.result.with_mut(|place| {
            // SAFETY: the cell was `DONE`: the completer is through with it, and there is one caller.
            unsafe { (*place).take() }
        })
    }
}
