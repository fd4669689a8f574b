//! A fixed array, on transparent hugepages where it is large enough for one.
//!
//! Lookups touch slots and buckets at random. On 4 KiB pages each such read also misses the TLB, and the walk of
//! the page table, which in a virtual machine goes through two tables, costs cache lines of its own.

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::ops::Deref;
use std::ptr::NonNull;

/// Size of a transparent hugepage on x86-64, and on aarch64 with base pages of 4 KiB. Where it is larger, the
/// array is merely aligned to less than it could be.
const HUGEPAGE_BYTES: usize = 2 << 20;

/// As many elements as it was made with, at an address that does not change.
pub(super) struct Lines<T> {
    first: NonNull<T>,
    len: usize,
    layout: Layout,
}

// SAFETY: it owns its elements and gives out shared references only, as a boxed slice does.
unsafe impl<T: Send> Send for Lines<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for Lines<T> {}

impl<T> Lines<T> {
    /// `len` elements (at least one, of a type that has a size), each made by `make`, which must not panic.
    pub(super) fn new(len: usize, mut make: impl FnMut() -> T) -> Self {
        let layout = Self::layout(len);
        // SAFETY: the layout's size is not zero.
        let Some(first) = NonNull::new(unsafe { alloc(layout) }.cast::<T>()) else {
            handle_alloc_error(layout)
        };
        collapse_into_hugepages(first.cast(), layout);
        for i in 0..len {
            // SAFETY: inside the allocation, which is aligned for `T` and has room for `len` of them.
            unsafe { first.add(i).write(make()) };
        }
        Self { first, len, layout }
    }

    /// Bytes that `len` elements take.
    pub(super) fn bytes_for(len: usize) -> usize {
        Self::layout(len).size()
    }

    fn layout(len: usize) -> Layout {
        const { assert!(size_of::<T>() > 0) };
        assert!(len > 0, "an array of no elements");
        let Ok(exact) = Layout::array::<T>(len) else {
            panic!("{len} elements do not fit into the address space")
        };
        if exact.size() < HUGEPAGE_BYTES {
            return exact;
        }
        // Whole hugepages: what lies in the last one would otherwise be on small pages.
        match exact.align_to(HUGEPAGE_BYTES) {
            Ok(layout) => layout.pad_to_align(),
            Err(_) => exact,
        }
    }
}

impl<T> Deref for Lines<T> {
    type Target = [T];

    #[inline]
    fn deref(&self) -> &[T] {
        // SAFETY: `len` elements were written at `first` and live as long as `self`.
        unsafe { std::slice::from_raw_parts(self.first.as_ptr(), self.len) }
    }
}

impl<T> Drop for Lines<T> {
    fn drop(&mut self) {
        // SAFETY: the elements are owned and not used afterwards; the memory came from `alloc` with this layout.
        unsafe {
            std::ptr::slice_from_raw_parts_mut(self.first.as_ptr(), self.len).drop_in_place();
            dealloc(self.first.as_ptr().cast(), self.layout);
        }
    }
}

/// Asks for transparent hugepages, now: an allocator may give out memory that already stands on small pages. A
/// kernel that refuses (collapsing is new in Linux 6.1) changes nothing but speed.
fn collapse_into_hugepages(first: NonNull<u8>, layout: Layout) {
    #[cfg(not(loom))]
    if layout.align() >= HUGEPAGE_BYTES {
        for advice in [libc::MADV_HUGEPAGE, libc::MADV_COLLAPSE] {
            // SAFETY: whole pages of an allocation that is ours; neither advice changes what they hold.
            unsafe { libc::madvise(first.as_ptr().cast(), layout.size(), advice) };
        }
    }
    #[cfg(loom)]
    let _ = (first, layout);
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::cell::Cell;

    #[test]
    fn small_and_large_arrays_hold_and_drop_every_element() {
        struct Counted<'a>(&'a Cell<usize>, usize);
        impl Drop for Counted<'_> {
            fn drop(&mut self) {
                self.0.set(self.0.get() + 1);
            }
        }
        for len in [1, 7, 131_072, 131_073, 300_000] {
            let (dropped, mut made) = (Cell::new(0), 0);
            let lines = Lines::new(len, || {
                made += 1;
                Counted(&dropped, made)
            });
            assert_eq!(lines.len(), len);
            assert!(lines.iter().enumerate().all(|(i, element)| element.1 == i + 1));
            let bytes = Lines::<Counted<'_>>::bytes_for(len);
            assert!(bytes >= len * size_of::<Counted<'_>>());
            if bytes >= HUGEPAGE_BYTES {
                assert_eq!((bytes % HUGEPAGE_BYTES, lines.as_ptr().addr() % HUGEPAGE_BYTES), (0, 0));
            }
            drop(lines);
            assert_eq!(dropped.get(), len);
        }
    }

    #[test]
    #[should_panic(expected = "do not fit")]
    fn an_impossible_length_is_refused() {
        Lines::<u64>::bytes_for(usize::MAX);
    }
}
