//! What a shard and its callers share: table, arena, request ring, doorbell, counters.

use super::errands::{Homecoming, errands_max};
use super::freshness::Freshness;
use super::request::Request;
use super::value::Value;
use crate::bell::Bell;
use crate::call::Space;
use crate::config::Config;
use crate::deadline::Deadline;
use crate::fork::ForkGuard;
use crate::memory::Arena;
use crate::stats::{CallerCounters, ShardCounters};
use crate::table::{Pin, Table};
use crate::{Error, Result};
use crossbeam_queue::ArrayQueue;
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::time::{Duration, Instant};

/// See the module's documentation. Lives until the last lease is gone, and the arena with it.
pub(crate) struct Shared {
    pub(crate) index: usize,
    pub(crate) table: Arc<Table<Value>>,
    /// Not unmapped in a forked child, which does not have it mapped, but may have something else there.
    pub(crate) arena: ManuallyDrop<Arena>,
    pub(crate) bell: Arc<Bell>,
    pub(crate) counters: ShardCounters,
    pub(crate) callers: CallerCounters,
    pub(crate) freshness: Arc<Freshness>,
    /// Slots of reservations that ended without a commit.
    pub(crate) dropped_reservations: ArrayQueue<u32>,
    /// Errands that came home.
    pub(crate) homecomings: ArrayQueue<Homecoming>,
    pub(crate) fork: ForkGuard,
    requests: ArrayQueue<Request>,
    space: Space,
    closed: AtomicBool,
}

impl Shared {
    pub(crate) fn new(
        index: usize,
        table: Arc<Table<Value>>,
        slots: u32,
        arena: Arena,
        bell: Arc<Bell>,
        config: &Config,
        fork: ForkGuard,
    ) -> Self {
        Self {
            index,
            table,
            arena: ManuallyDrop::new(arena),
            bell,
            counters: ShardCounters::default(),
            callers: CallerCounters::new(),
            freshness: Arc::new(Freshness::new(slots)),
            dropped_reservations: ArrayQueue::new(slots as usize),
            homecomings: ArrayQueue::new(errands_max(config).max(1)),
            fork,
            requests: ArrayQueue::new(config.request_ring),
            space: Space::new(),
            closed: AtomicBool::new(false),
        }
    }

    /// Caller: hands a request to the shard. Waits while the ring is full, at most until the deadline; what
    /// cannot be handed over is answered with the error.
    pub(crate) fn submit(&self, request: Request, deadline: Deadline) {
        if self.is_closed() {
            return request.fail(&Error::ShutDown);
        }
        let mut request = Some(request);
        let mut push = || match request.take() {
            None => true,
            Some(taken) => match self.requests.push(taken) {
                Ok(()) => true,
                Err(back) => {
                    request = Some(back);
                    false
                }
            },
        };
        if !push() {
            let started = Instant::now();
            if !self.space.wait(deadline.instant(), &mut push)
                && let Some(request) = request
            {
                return request.fail(&Error::Overloaded {
                    shard: self.index,
                    capacity: self.requests.capacity(),
                    waited: started.elapsed(),
                });
            }
        }
        self.announce();
    }

    /// Caller: hands a request to the shard if there is a place for it now; else it comes back with the reason.
    #[allow(clippy::result_large_err, reason = "the request must come back whole, and an allocation may not")]
    pub(crate) fn offer(&self, request: Request) -> Result<(), (Request, Error)> {
        if self.is_closed() {
            return Err((request, Error::ShutDown));
        }
        let (shard, capacity) = (self.index, self.requests.capacity());
        let full = |back| (back, Error::Overloaded { shard, capacity, waited: Duration::ZERO });
        self.requests.push(request).map_err(full)?;
        self.announce();
        Ok(())
    }

    fn announce(&self) {
        self.bell.ring();
        // `ring` has a full fence after the push, and so has `close` after its store: if the shard closed
        // without seeing this request, this load sees that it closed.
        if self.is_closed() {
            self.drop_requests();
        }
    }

    /// Shard: the next request.
    pub(crate) fn next_request(&self) -> Option<Request> {
        let request = self.requests.pop()?;
        self.space.freed();
        Some(request)
    }

    /// Shard: something waits to be looked at.
    pub(crate) fn has_news(&self) -> bool {
        !self.requests.is_empty()
            || !self.dropped_reservations.is_empty()
            || !self.homecomings.is_empty()
            || self.bell.doorbell().is_nudged()
    }

    /// From now on requests are refused; those in the ring are dropped, which answers their callers.
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        self.drop_requests();
    }

    /// True once the shard takes no more requests.
    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Relaxed)
    }

    fn drop_requests(&self) {
        while self.next_request().is_some() {}
    }

    /// Shard: a lease on a pin that it took for somebody.
    pub(crate) fn grant(self: &Arc<Self>, pin: Pin) -> super::Lease {
        self.callers.granted();
        super::Lease::new(self.clone(), pin)
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if !self.fork.forked() {
            // SAFETY: dropped here and nowhere else, and not used afterwards.
            unsafe { ManuallyDrop::drop(&mut self.arena) };
        }
    }
}
