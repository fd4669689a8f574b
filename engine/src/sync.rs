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

/// A full fence directly after a read-modify-write of this thread.
///
/// On x86-64 that instruction (locked) is a full fence itself, and only the compiler must be kept from moving
/// things across; elsewhere, and in the models, it is a real one.
#[inline]
pub(crate) fn fence_after_read_modify_write() {
    #[cfg(all(target_arch = "x86_64", not(loom)))]
    std::sync::atomic::compiler_fence(Ordering::SeqCst);
    #[cfg(not(all(target_arch = "x86_64", not(loom))))]
    fence(Ordering::SeqCst);
}

/// Asks the processor to bring the cache line at `place` near, without waiting for it. A hint: any address is
/// allowed, and nothing but time depends on it.
#[inline]
pub(crate) fn prefetch_line<T>(place: *const T) {
    #[cfg(all(target_arch = "x86_64", not(loom)))]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: SSE is part of x86-64, and a prefetch never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(place.cast()) };
    }
    #[cfg(all(target_arch = "aarch64", not(loom)))]
    // SAFETY: a prefetch never faults, and touches neither registers nor flags.
    unsafe {
        std::arch::asm!("prfm pldl1keep, [{0}]", in(reg) place, options(nostack, preserves_flags, readonly));
    }
    #[cfg(any(loom, not(any(target_arch = "x86_64", target_arch = "aarch64"))))]
    let _ = place;
}
