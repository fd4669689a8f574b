//! The one place that says where atomics come from: `std`, or loom's under `--cfg loom`.
//!
//! Everything that is model-checked (`table`, `call`) takes its atomics, cells and rings from here, so
//! the models run the code that ships.

#[cfg(not(loom))]
mod imp {
    pub(crate) use crossbeam_queue::ArrayQueue;
    pub(crate) use std::sync::Arc;
    pub(crate) use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering, fence};

    /// `std`'s cell behind loom's closure interface.
    #[derive(Debug)]
    pub(crate) struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

    impl<T> UnsafeCell<T> {
        pub(crate) fn new(value: T) -> Self {
            Self(std::cell::UnsafeCell::new(value))
        }
        #[inline]
        pub(crate) fn with<R>(&self, f: impl FnOnce(*const T) -> R) -> R {
            f(self.0.get())
        }
        #[inline]
        pub(crate) fn with_mut<R>(&self, f: impl FnOnce(*mut T) -> R) -> R {
            f(self.0.get())
        }
    }
}

#[cfg(loom)]
mod imp {
    pub(crate) use loom::cell::UnsafeCell;
    pub(crate) use loom::sync::Arc;
    pub(crate) use loom::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering, fence};

    /// A bounded queue with crossbeam's interface that loom can see through. crossbeam's own queue is
    /// checked by its authors; what the models need of it is only its happens-before edge.
    pub(crate) struct ArrayQueue<T> {
        items: loom::sync::Mutex<std::collections::VecDeque<T>>,
        capacity: usize,
    }

    impl<T> ArrayQueue<T> {
        pub(crate) fn new(capacity: usize) -> Self {
            Self { items: loom::sync::Mutex::new(std::collections::VecDeque::new()), capacity }
        }
        pub(crate) fn push(&self, item: T) -> Result<(), T> {
            let mut items = self.items.lock().unwrap();
            if items.len() == self.capacity {
                return Err(item);
            }
            items.push_back(item);
            Ok(())
        }
        pub(crate) fn pop(&self) -> Option<T> {
            self.items.lock().unwrap().pop_front()
        }
        pub(crate) fn is_empty(&self) -> bool {
            self.items.lock().unwrap().is_empty()
        }
    }
}

pub(crate) use imp::*;
