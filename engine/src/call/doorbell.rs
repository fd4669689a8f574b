//! Sleep and wake of one consumer with many producers, without a system call while the consumer is awake.

use crate::sync::{AtomicBool, Ordering, fence};

/// Tells producers whether the consumer sleeps.
///
/// The consumer says that it is going to sleep and then looks at its queues once more; a producer puts its
/// item in a queue and then looks whether the consumer sleeps. A full fence between the two steps on both
/// sides makes sure that at least one sees the other (the pattern is known as Dekker's, or as a
/// store-buffering litmus test).
pub(crate) struct Doorbell {
    asleep: AtomicBool,
    /// Somebody nudged, and the consumer has not taken it.
    nudged: AtomicBool,
}

impl Doorbell {
    pub(crate) fn new() -> Self {
        Self { asleep: AtomicBool::new(false), nudged: AtomicBool::new(false) }
    }

    /// Producer, after its push: true if it must wake the consumer. One of many producers gets true.
    pub(crate) fn ring(&self) -> bool {
        fence(Ordering::SeqCst);
        // The load keeps awake consumers' cache line shared; the swap picks the one who wakes. Relaxed: the
        // fence orders, and the wake-up itself goes through the kernel.
        self.asleep.load(Ordering::Relaxed) && self.asleep.swap(false, Ordering::Relaxed)
    }

    /// [`Doorbell::ring`] for producers that push nothing where the consumer looks before it sleeps: the nudge itself
    /// stays until it is taken.
    pub(crate) fn nudge(&self) -> bool {
        // Release: whoever takes the nudge sees what happened before it. The fence in `ring` orders the store before
        // the look at `asleep`.
        self.nudged.store(true, Ordering::Release);
        self.ring()
    }

    /// Consumer: true if somebody nudged since the last call.
    pub(crate) fn take_nudge(&self) -> bool {
        // Relaxed load first: almost always false, and no write then. Acquire: pairs with `nudge`.
        self.nudged.load(Ordering::Relaxed) && self.nudged.swap(false, Ordering::Acquire)
    }

    /// Consumer, after [`Doorbell::going_to_sleep`]: true if a nudge waits to be taken.
    pub(crate) fn is_nudged(&self) -> bool {
        // Relaxed: the fences in `going_to_sleep` and `ring` make sure that either this load sees the nudge or the
        // nudge sees the sleeper.
        self.nudged.load(Ordering::Relaxed)
    }

    /// Consumer: from here on producers will wake it. It must now look at its queues once more, and either
    /// sleep or call [`Doorbell::awake`].
    pub(crate) fn going_to_sleep(&self) {
        self.asleep.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// Consumer: is awake (again). True if a producer was chosen to wake it, whose wake-up has come or will.
    pub(crate) fn awake(&self) -> bool {
        // Relaxed, as in `ring`: the swap decides, and the wake-up itself orders.
        !self.asleep.swap(false, Ordering::Relaxed)
    }
}
