//! What a shard and its callers share: table, arena, request ring, doorbell, counters.

use super::request::Request;
use super::value::Value;
use crate::call::{Doorbell, Space};
use crate::deadline::Deadline;
use crate::fork::ForkGuard;
use crate::memory::Arena;
use crate::stats::{CallerCounters, ShardCounters};
use crate::table::{Pin, Table};
use crate::{Error, Result};
use crossbeam_queue::ArrayQueue;
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::time::{Duration, Instant};

/// Wakes the shard's thread from wherever it sleeps in its ring.
pub(crate) struct Bell {
    doorbell: Doorbell,
    event: OwnedFd,
}

impl Bell {
    pub(crate) fn new() -> Result<Self> {
        // SAFETY: a plain system call without pointers.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC) };
        if fd < 0 {
            return Err(crate::error::system("eventfd"));
        }
        // SAFETY: the descriptor was just made and belongs to nobody else.
        Ok(Self { doorbell: Doorbell::new(), event: unsafe { OwnedFd::from_raw_fd(fd) } })
    }

    /// Any thread, after it put something where the shard looks. A system call only if the shard sleeps.
    pub(crate) fn ring(&self) {
        if self.doorbell.ring() {
            let one = 1u64;
            // SAFETY: writes eight bytes from a local. It cannot block: the counter is read on every wake-up
            // and would have to reach 2^64 - 1.
            unsafe { libc::write(self.event.as_raw_fd(), (&raw const one).cast(), 8) };
        }
    }

    pub(crate) fn doorbell(&self) -> &Doorbell {
        &self.doorbell
    }

    pub(crate) fn event(&self) -> &OwnedFd {
        &self.event
    }
}

/// See the module's documentation. Lives until the last lease is gone, and the arena with it.
pub(crate) struct Shared {
    pub(crate) index: usize,
    pub(crate) table: Arc<Table<Value>>,
    /// Not unmapped in a forked child, which does not have it mapped, but may have something else there.
    pub(crate) arena: ManuallyDrop<Arena>,
    pub(crate) bell: Arc<Bell>,
    pub(crate) counters: ShardCounters,
    pub(crate) callers: CallerCounters,
    /// Slots of reservations that ended without a commit.
    pub(crate) dropped_reservations: ArrayQueue<u32>,
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
        request_ring: usize,
        fork: ForkGuard,
    ) -> Self {
        Self {
            index,
            table,
            arena: ManuallyDrop::new(arena),
            bell,
            counters: ShardCounters::default(),
            callers: CallerCounters::new(),
            dropped_reservations: ArrayQueue::new(slots as usize),
            fork,
            requests: ArrayQueue::new(request_ring),
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

    /// Caller: hands a request to the shard if there is a place for it now.
    pub(crate) fn offer(&self, request: Request) -> Result<()> {
        let full = || Error::Overloaded {
            shard: self.index,
            capacity: self.requests.capacity(),
            waited: Duration::ZERO,
        };
        if self.is_closed() {
            return Err(Error::ShutDown);
        }
        self.requests.push(request).map_err(|_| full())?;
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
        !self.requests.is_empty() || !self.dropped_reservations.is_empty()
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

    /// Wraps a pin that somebody just got; counts it.
    pub(crate) fn lease(self: &Arc<Self>, pin: Pin) -> super::Lease {
        self.callers.pinned();
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
