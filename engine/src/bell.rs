//! Waking somebody who sleeps on a descriptor: a shard in its ring, a completion queue's owner in whatever event
//! loop it has.

use crate::Result;
use crate::call::Doorbell;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// A doorbell and the eventfd behind it.
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

    /// Any thread, after it put something where the sleeper looks. A system call only if that one sleeps.
    pub(crate) fn ring(&self) {
        if self.doorbell.ring() {
            self.wake();
        }
    }

    fn wake(&self) {
        let one = 1u64;
        // SAFETY: writes eight bytes from a local. It cannot block: the counter is read on every wake-up and would
        // have to reach 2^64 - 1.
        unsafe { libc::write(self.event.as_raw_fd(), (&raw const one).cast(), 8) };
    }

    /// [`Bell::ring`], remembered until it is taken; see [`Doorbell::nudge`].
    pub(crate) fn nudge(&self) {
        if self.doorbell.nudge() {
            self.wake();
        }
    }

    /// The sleeper, after it was rung: takes the wake-up out of the descriptor. Waits for it if it is still on its way.
    pub(crate) fn reset(&self) {
        let mut count = 0u64;
        // SAFETY: reads eight bytes into a local.
        unsafe { libc::read(self.event.as_raw_fd(), (&raw mut count).cast(), 8) };
    }

    pub(crate) fn doorbell(&self) -> &Doorbell {
        &self.doorbell
    }

    pub(crate) fn event(&self) -> &OwnedFd {
        &self.event
    }
}
