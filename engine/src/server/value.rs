//! A value's memory and the buffers that the kernel sends from and receives into.
//!
//! The one place of the server with pointers. The rule: an [`Allocation`] is written only while it is a
//! [`Draft`], of which there is one; as a [`Value`] it is only read.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use tokio_uring::buf::{IoBuf, IoBufMut};

use crate::memory::{Arena, Extent, ExtentAllocator, ExtentList, GRANULE_BYTES, granules_for};

/// All memory for values.
#[derive(Debug)]
pub(super) struct Memory {
    arena: Arena,
    extents: RefCell<ExtentAllocator>,
    /// Bytes of values that could not be received in place.
    pub(super) copied_bytes: Cell<u64>,
    /// Bytes of values that the kernel wrote where they stay.
    pub(super) direct_bytes: Cell<u64>,
}

impl Memory {
    pub(super) fn new(arena: Arena) -> Self {
        // Both fit: an arena counts its granules in a u32.
        let blocks = arena.block_count() as u32;
        let extents = RefCell::new(ExtentAllocator::new(blocks, arena.granules_per_block()));
        Memory { arena, extents, copied_bytes: Cell::new(0), direct_bytes: Cell::new(0) }
    }

    pub(super) fn capacity_bytes(&self) -> u64 {
        u64::from(self.extents.borrow().total_granules()) * GRANULE_BYTES as u64
    }

    pub(super) fn free_bytes(&self) -> u64 {
        u64::from(self.extents.borrow().free_granules()) * GRANULE_BYTES as u64
    }

    /// Memory for a value of `len` bytes; `None` when there is no room now.
    pub(super) fn draft(self: &Rc<Self>, len: u64) -> Option<Draft> {
        let granules = u32::try_from(granules_for(len)).ok()?;
        let extents = if granules == 0 {
            ExtentList::default()
        } else {
            self.extents.borrow_mut().allocate(granules)?
        };
        let allocation = Rc::new(Allocation { memory: Rc::clone(self), extents, len });
        Some(Draft { allocation, received: 0, crc32c: 0 })
    }
}

/// Extents that are freed at their last use.
#[derive(Debug)]
pub(super) struct Allocation {
    memory: Rc<Memory>,
    extents: ExtentList,
    /// Bytes of the value; the last extent's rest is unused.
    len: u64,
}

impl Drop for Allocation {
    fn drop(&mut self) {
        if !self.extents.is_empty() {
            self.memory.extents.borrow_mut().free(&self.extents);
        }
    }
}

impl Allocation {
    /// The contiguous memory at `offset`, cut at the extent's end and at `end`. `offset < end ≤ len`.
    fn run_at(&self, offset: u64, end: u64) -> (*mut u8, usize) {
        debug_assert!(offset < end && end <= self.len);
        let mut extent_start = 0;
        for extent in self.extents.iter() {
            let extent_end = extent_start + extent_bytes(extent);
            if offset < extent_end {
                let inside = offset - extent_start;
                let bytes = extent_end.min(end) - offset;
                let base = self.memory.arena.ptr(*extent).as_ptr();
                // `inside` lies within the extent, which lies within one block: the sum stays inside it.
                return (base.wrapping_add(inside as usize), bytes as usize);
            }
            extent_start = extent_end;
        }
        unreachable!("the extents of a value hold its length")
    }
}

fn extent_bytes(extent: &Extent) -> u64 {
    u64::from(extent.len) * GRANULE_BYTES as u64
}

/// A value being received.
#[derive(Debug)]
pub(super) struct Draft {
    allocation: Rc<Allocation>,
    received: u64,
    /// Of the bytes received so far.
    crc32c: u32,
}

impl Draft {
    /// The next place to receive into; `None` when the value is complete.
    pub(super) fn next_place(&mut self, bytes_max: usize) -> Option<ReceivePiece> {
        if self.received == self.allocation.len {
            return None;
        }
        let (start, len) = self.allocation.run_at(self.received, self.allocation.len);
        Some(ReceivePiece { _allocation: Rc::clone(&self.allocation), start, len: len.min(bytes_max) })
    }

    /// Takes over what the kernel wrote: `bytes` at the place that [`Draft::next_place`] returned last.
    pub(super) fn received(&mut self, piece: &ReceivePiece, bytes: usize) {
        assert!(bytes <= piece.len, "more bytes received than asked for");
        // SAFETY: the piece lies inside the allocation, which it keeps alive; the kernel has initialised
        // its first `bytes` bytes and given them back, and nobody writes to it while the slice lives.
        let content = unsafe { std::slice::from_raw_parts(piece.start, bytes) };
        self.crc32c = crc32c::crc32c_append(self.crc32c, content);
        self.received += bytes as u64;
        count(&self.allocation.memory.direct_bytes, bytes);
    }

    /// Copies bytes that arrived elsewhere. The caller passes no more than are missing.
    pub(super) fn copy_in(&mut self, mut bytes: &[u8]) {
        self.crc32c = crc32c::crc32c_append(self.crc32c, bytes);
        count(&self.allocation.memory.copied_bytes, bytes.len());
        while !bytes.is_empty() {
            let (start, run) = self.allocation.run_at(self.received, self.allocation.len);
            let (now, later) = bytes.split_at(run.min(bytes.len()));
            // SAFETY: `run_at` gives at least `now.len()` bytes inside the allocation; a draft's bytes
            // are reachable only through it, and `bytes` belongs to the connection's own buffer.
            unsafe { std::ptr::copy_nonoverlapping(now.as_ptr(), start, now.len()) };
            self.received += now.len() as u64;
            bytes = later;
        }
    }

    /// The finished value under its version.
    ///
    /// # Panics
    ///
    /// When bytes are missing: the decoder reports the end of a Put only after its last byte.
    pub(super) fn finish(self, version: u64) -> Value {
        assert_eq!(self.received, self.allocation.len, "a value is finished with its last byte");
        Value { allocation: self.allocation, crc32c: self.crc32c, version }
    }

    pub(super) fn crc32c(&self) -> u32 {
        self.crc32c
    }
}

fn count(counter: &Cell<u64>, bytes: usize) {
    counter.set(counter.get() + bytes as u64);
}

/// A stored value. Clones share the memory.
#[derive(Clone, Debug)]
pub(super) struct Value {
    allocation: Rc<Allocation>,
    pub(super) crc32c: u32,
    pub(super) version: u64,
}

impl Value {
    pub(super) fn len(&self) -> u64 {
        self.allocation.len
    }

    /// The memory of the range as pieces to send, in order. `offset + len ≤ self.len()`.
    pub(super) fn pieces(&self, offset: u64, len: u64) -> impl Iterator<Item = SendPiece> {
        let allocation = Rc::clone(&self.allocation);
        let end = offset + len;
        let mut at = offset;
        std::iter::from_fn(move || {
            if at == end {
                return None;
            }
            let (start, len) = allocation.run_at(at, end);
            at += len as u64;
            Some(SendPiece::Memory { allocation: Rc::clone(&allocation), start, len })
        })
    }
}

/// Place inside a draft that the kernel writes to. Owns its memory until the kernel gives it back.
pub(super) struct ReceivePiece {
    _allocation: Rc<Allocation>,
    start: *mut u8,
    len: usize,
}

// SAFETY: `start` points to `len` bytes of an arena; the allocation keeps them, and they never move.
unsafe impl IoBuf for ReceivePiece {
    fn stable_ptr(&self) -> *const u8 {
        self.start
    }

    fn bytes_init(&self) -> usize {
        0
    }

    fn bytes_total(&self) -> usize {
        self.len
    }
}

// SAFETY: as above; a connection has one piece of its draft at a time, and nothing else writes there.
unsafe impl IoBufMut for ReceivePiece {
    fn stable_mut_ptr(&mut self) -> *mut u8 {
        self.start
    }

    unsafe fn set_init(&mut self, _pos: usize) {
        // How much the kernel wrote is told to `Draft::received`.
    }
}

/// What the kernel sends from. Owns its memory until the kernel gives it back.
pub(super) enum SendPiece {
    /// A header with its small body.
    Bytes {
        bytes: Vec<u8>,
        /// What of it is sent already.
        sent: usize,
    },
    /// Part of a value.
    Memory { allocation: Rc<Allocation>, start: *const u8, len: usize },
}

impl SendPiece {
    pub(super) fn from_bytes(bytes: Vec<u8>) -> Self {
        SendPiece::Bytes { bytes, sent: 0 }
    }

    /// Bytes still to be sent.
    pub(super) fn remaining(&self) -> usize {
        match self {
            SendPiece::Bytes { bytes, sent } => bytes.len() - sent,
            SendPiece::Memory { len, .. } => *len,
        }
    }

    /// Takes the first `count` bytes off a value's memory, or what there is; all of a header, however long.
    pub(super) fn split_front(&mut self, count: usize) -> SendPiece {
        match self {
            SendPiece::Bytes { bytes, sent } => {
                SendPiece::Bytes { bytes: std::mem::take(bytes), sent: std::mem::take(sent) }
            }
            SendPiece::Memory { allocation, start, len } => {
                let (first, count) = (*start, count.min(*len));
                *start = start.wrapping_add(count);
                *len -= count;
                SendPiece::Memory { allocation: Rc::clone(allocation), start: first, len: count }
            }
        }
    }

    /// Drops the first `count` bytes, at most [`SendPiece::remaining`].
    pub(super) fn advance(&mut self, count: usize) {
        assert!(count <= self.remaining(), "more bytes sent than there were");
        match self {
            SendPiece::Bytes { sent, .. } => *sent += count,
            SendPiece::Memory { start, len, .. } => {
                *start = start.wrapping_add(count);
                *len -= count;
            }
        }
    }
}

// SAFETY: the memory is a vector's heap or an arena's; the piece owns both and neither moves. Nobody
// writes to a value's memory before its last owner has dropped it.
unsafe impl IoBuf for SendPiece {
    fn stable_ptr(&self) -> *const u8 {
        match self {
            SendPiece::Bytes { bytes, sent } => bytes[*sent..].as_ptr(),
            SendPiece::Memory { start, .. } => *start,
        }
    }

    fn bytes_init(&self) -> usize {
        self.remaining()
    }

    fn bytes_total(&self) -> usize {
        self.remaining()
    }
}
