//! A published value and the lease on it.

use super::shared::Shared;
use crate::key::{Key, OwnedKey};
use crate::memory::{ExtentList, GRANULE_BYTES};
use crate::table::Pin;
use crate::{Error, Result};
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// What the table holds: a value's key, place and identity. Its bytes lie in the arena.
pub(crate) struct Value {
    pub(crate) key: OwnedKey,
    pub(crate) extents: ExtentList,
    pub(crate) len: u64,
    pub(crate) version: u64,
    pub(crate) crc32c: u32,
    /// Its age matters: [`Freshness`](super::freshness::Freshness) knows until when it may be served.
    dated: AtomicBool,
}

// With the state word and the hit counter a slot must not outgrow two cache lines.
const _: () = assert!(size_of::<Option<Value>>() <= 112);

impl Value {
    pub(crate) fn new(key: OwnedKey, extents: ExtentList, len: u64, version: u64, crc32c: u32) -> Self {
        Self { key, extents, len, version, crc32c, dated: AtomicBool::new(false) }
    }

    #[inline]
    pub(crate) fn is_dated(&self) -> bool {
        // Relaxed: as for what it leads to, see `Freshness::until`.
        self.dated.load(Ordering::Relaxed)
    }

    pub(crate) fn set_dated(&self, dated: bool) {
        // Relaxed: see `is_dated`.
        self.dated.store(dated, Ordering::Relaxed);
    }

    #[inline]
    pub(crate) fn is(&self, key: Key<'_>) -> bool {
        self.key.namespace == key.namespace && *self.key.bytes == *key.bytes
    }
}

/// A pinned, read-only view of a value. While it lives the bytes do not move or change, whatever happens to
/// the key: invalidation, overwriting, eviction, shutdown.
///
/// `Send` and `Sync`. Making, reading and dropping one neither blocks nor allocates. Hold it as long as an
/// accelerator reads the bytes, and no longer: what leases pin cannot be evicted.
///
/// In a forked child a lease shows no bytes (the arena is not inherited).
pub struct Lease {
    shared: Arc<Shared>,
    pin: ManuallyDrop<Pin>,
}

impl Lease {
    pub(crate) fn new(shared: Arc<Shared>, pin: Pin) -> Self {
        Self { shared, pin: ManuallyDrop::new(pin) }
    }

    fn value(&self) -> &Value {
        self.shared.table.entry(&self.pin)
    }

    pub(crate) fn key(&self) -> &OwnedKey {
        &self.value().key
    }

    /// Length of the value in bytes.
    pub fn len(&self) -> u64 {
        self.value().len
    }

    /// True for the empty value.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The origin's version of the value, or 0 for one that was put locally.
    pub fn version(&self) -> u64 {
        self.value().version
    }

    /// CRC32C (Castagnoli) of the value, as checked when it was published.
    pub fn crc32c(&self) -> u32 {
        self.value().crc32c
    }

    /// The bytes, in order, as few pieces as the arena had room for; most values are one piece. Pieces start
    /// at multiples of 4 KiB and none but the last has a length that is not one.
    pub fn segments(&self) -> Segments<'_> {
        let value = self.value();
        // The child of a fork has no arena mapped.
        let left = if self.shared.fork.forked() { 0 } else { value.len };
        Segments { shared: &self.shared, extents: value.extents.iter(), left }
    }

    /// The whole value, if it lies in one piece.
    pub fn as_slice(&self) -> Option<&[u8]> {
        let mut segments = self.segments();
        let first = segments.next().unwrap_or(&[]);
        (segments.left == 0).then_some(first)
    }

    /// Copies `into.len()` bytes from `offset` on.
    pub fn copy_range(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        let (len, value_bytes) = (into.len() as u64, self.len());
        if offset.checked_add(len).is_none_or(|end| end > value_bytes) {
            return Err(Error::RangeOutside { offset, len, value_bytes });
        }
        self.copy_to(offset, &mut [into])
    }

    /// Fills the buffers, one after the other, with the bytes from the start on, until either ends.
    pub fn fill(&self, into: &mut [&mut [u8]]) -> Result<()> {
        self.copy_to(0, into)
    }

    fn copy_to(&self, offset: u64, into: &mut [&mut [u8]]) -> Result<()> {
        if self.shared.fork.forked() {
            return Err(Error::Forked);
        }
        let mut source = Source { segments: self.segments(), current: &[] };
        source.skip(offset);
        for buffer in into {
            source.copy_to(buffer);
        }
        Ok(())
    }

    /// Checks the bytes against the checksum they were published with. Reads the whole value.
    pub fn verify(&self) -> Result<()> {
        if self.shared.fork.forked() {
            return Err(Error::Forked);
        }
        let got = self.segments().fold(0, crate::checksum::crc32c_append);
        let want = self.crc32c();
        if got == want { Ok(()) } else { Err(Error::Corrupt { got, want }) }
    }

    /// Number and generation of the slot: equal for leases on the same published value, different for any
    /// other value of the same shard.
    pub fn identity(&self) -> (usize, u32, u32) {
        let (slot, generation) = self.shared.table.identity(&self.pin);
        (self.shared.index, slot, generation)
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        // SAFETY: `pin` is taken here and nowhere else, and not used afterwards.
        let pin = unsafe { ManuallyDrop::take(&mut self.pin) };
        if self.shared.fork.forked() {
            // The pins of a child's copy of the table keep nothing.
            return;
        }
        self.shared.table.release(pin);
        self.shared.callers.unpinned();
    }
}

impl std::fmt::Debug for Lease {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let value = self.value();
        f.debug_struct("Lease")
            .field("key", &value.key.borrow())
            .field("len", &value.len)
            .field("version", &value.version)
            .field("extents", &value.extents.len())
            .finish()
    }
}

/// The pieces of a leased value, in order. See [`Lease::segments`].
pub struct Segments<'a> {
    shared: &'a Shared,
    extents: std::slice::Iter<'a, crate::memory::Extent>,
    left: u64,
}

impl<'a> Iterator for Segments<'a> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<&'a [u8]> {
        if self.left == 0 {
            return None;
        }
        let extent = *self.extents.next()?;
        let bytes = (u64::from(extent.len) * GRANULE_BYTES as u64).min(self.left);
        self.left -= bytes;
        let base = self.shared.arena.ptr(extent);
        // SAFETY: the extent lies in the arena, which `shared` keeps mapped, and belongs to a published value
        // that the lease behind `'a` pins: nobody writes to it until the pin is released.
        Some(unsafe { std::slice::from_raw_parts(base.as_ptr(), bytes as usize) })
    }
}

/// A value's bytes as a stream.
struct Source<'a> {
    segments: Segments<'a>,
    current: &'a [u8],
}

impl Source<'_> {
    fn skip(&mut self, mut bytes: u64) {
        while bytes > self.current.len() as u64 {
            bytes -= self.current.len() as u64;
            match self.segments.next() {
                Some(next) => self.current = next,
                None => return,
            }
        }
        self.current = &self.current[bytes as usize..];
    }

    fn copy_to(&mut self, mut into: &mut [u8]) {
        while !into.is_empty() {
            if self.current.is_empty() {
                match self.segments.next() {
                    Some(next) => self.current = next,
                    None => return,
                }
            }
            let bytes = into.len().min(self.current.len());
            // SAFETY: both slices hold `bytes`; a `&mut` of the caller cannot overlap the pinned extent.
            unsafe { crate::memory::copy::copy(into.as_mut_ptr(), self.current.as_ptr(), bytes) };
            into = &mut into[bytes..];
            self.current = &self.current[bytes..];
        }
    }
}
