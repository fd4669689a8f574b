//! Waiting for events, with a limit that turns a hang into a failure.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How long any test waits for anything before it calls it a hang.
pub const HANG: Duration = Duration::from_secs(20);

/// A value that threads change and wait for.
#[derive(Debug, Default)]
pub struct Watched<T> {
    value: Mutex<T>,
    changed: Condvar,
}

impl<T> Watched<T> {
    /// Starts with `value`.
    pub fn new(value: T) -> Self {
        Self { value: Mutex::new(value), changed: Condvar::new() }
    }

    /// Changes the value and wakes who waits.
    pub fn change<R>(&self, change: impl FnOnce(&mut T) -> R) -> R {
        let result = change(&mut self.value.lock().unwrap_or_else(PoisonError::into_inner));
        self.changed.notify_all();
        result
    }

    /// Looks at the value.
    pub fn read<R>(&self, read: impl FnOnce(&T) -> R) -> R {
        read(&self.value.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Waits until `is` holds, at most `limit`. True if it does.
    pub fn wait_for(&self, limit: Duration, is: impl Fn(&T) -> bool) -> bool {
        let guard = self.value.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.changed.wait_timeout_while(guard, limit, |value| !is(value));
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }

    /// Waits until `is` holds; panics when that takes longer than [`HANG`].
    #[track_caller]
    pub fn wait(&self, what: &str, is: impl Fn(&T) -> bool) {
        assert!(self.wait_for(HANG, is), "waited {HANG:?} in vain for {what}");
    }
}

/// A gate that is shut until it is opened.
#[derive(Debug, Default)]
pub struct Gate(Watched<bool>);

impl Gate {
    /// Lets everybody pass from now on.
    pub fn open(&self) {
        self.0.change(|open| *open = true);
    }

    /// Waits until the gate is open; gives up after [`HANG`], so that a failed test ends.
    pub fn pass(&self) {
        self.0.wait_for(HANG, |open| *open);
    }
}

/// Waits for what is visible only by looking (a gauge): looks until `is` holds, panics after [`HANG`].
#[track_caller]
pub fn eventually(what: impl Fn() -> String, is: impl Fn() -> bool) {
    let started = Instant::now();
    while !is() {
        assert!(started.elapsed() < HANG, "in vain for {HANG:?}: {}", what());
        std::thread::sleep(Duration::from_millis(1));
    }
}
