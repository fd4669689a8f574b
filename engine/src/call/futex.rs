//! Sleeping on a word until it changes or a deadline passes.

use crate::sync::AtomicU32;
use std::time::Instant;

/// A place to sleep. The word itself belongs to the user; all waits and wakes of one `Futex` must be
/// about the same word.
#[cfg(not(loom))]
pub(super) struct Futex;

#[cfg(not(loom))]
impl Futex {
    pub(super) fn new() -> Self {
        Self
    }

    /// Sleeps while `word` is `expected`, at most until `deadline`. False only if the deadline passed;
    /// may return true for no reason.
    pub(super) fn wait(&self, word: &AtomicU32, expected: u32, deadline: Instant) -> bool {
        let Some(left) = deadline.checked_duration_since(Instant::now()).filter(|left| !left.is_zero())
        else {
            return false;
        };
        let timeout = libc::timespec {
            // A time that does not fit is longer than the kernel can tell from "for ever".
            tv_sec: libc::time_t::try_from(left.as_secs()).unwrap_or(libc::time_t::MAX),
            tv_nsec: left.subsec_nanos() as _,
        };
        // SAFETY: `word` outlives the call, and FUTEX_WAIT reads the word and the timeout only. A private
        // futex, since callers and shards are threads of one process.
        unsafe {
            libc::syscall(
                libc::SYS_futex,
                word as *const AtomicU32,
                libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG,
                expected,
                &timeout as *const libc::timespec,
            );
        }
        // Woken, timed out, interrupted or the word had changed: the caller looks at the word again, and the
        // clock decides about the deadline on the next round.
        true
    }

    /// Wakes everybody who sleeps on `word`.
    pub(super) fn wake(&self, word: &AtomicU32) {
        // SAFETY: FUTEX_WAKE uses the address of the word as a name only.
        unsafe {
            libc::syscall(
                libc::SYS_futex,
                word as *const AtomicU32,
                libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG,
                i32::MAX,
            );
        }
    }
}

/// The kernel's promise, for loom: the check of the word and going to sleep are one step to a wake.
#[cfg(loom)]
pub(super) struct Futex {
    lock: loom::sync::Mutex<()>,
    woken: loom::sync::Condvar,
}

#[cfg(loom)]
impl Futex {
    pub(super) fn new() -> Self {
        Self { lock: loom::sync::Mutex::new(()), woken: loom::sync::Condvar::new() }
    }

    pub(super) fn wait(&self, word: &AtomicU32, expected: u32, _deadline: Instant) -> bool {
        let guard = self.lock.lock().unwrap();
        if word.load(crate::sync::Ordering::Relaxed) == expected {
            drop(self.woken.wait(guard).unwrap());
        }
        true
    }

    pub(super) fn wake(&self, _word: &AtomicU32) {
        let _guard = self.lock.lock().unwrap();
        self.woken.notify_all();
    }
}
