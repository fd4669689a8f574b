//! A part of a value on its way from the kernel into its extents.

use super::fills::FillId;
use super::shared::Shared;
use super::transfer::{Part, time_left};
use crate::memory::{Arena, ExtentList, GRANULE_BYTES};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Who wants a part.
pub(super) enum For {
    Fill(FillId),
    /// Another shard, in whose arena the extents are, until this moment at least.
    Errand { owner: Arc<Shared>, deadline: Instant },
}

/// A part of a value arriving in its extents.
pub(super) struct Body {
    /// Of the request.
    pub(super) id: u64,
    pub(super) wanted: For,
    pub(super) part: Part,
    /// Length of the whole value, for messages.
    pub(super) value_len: u64,
    extents: ExtentList,
    pub(super) received: u64,
    started: Instant,
    pub(super) crc: u32,
    /// The extent being filled and the bytes of it that lie before what comes next.
    extent: usize,
    filled: usize,
}

impl Body {
    /// `extents` are those of the whole value.
    pub(super) fn new(id: u64, wanted: For, part: Part, value_len: u64, extents: ExtentList) -> Self {
        let (mut extent, mut skip) = (0, part.offset);
        while extents.get(extent).is_some_and(|extent| skip >= extent.bytes() as u64) {
            skip -= extents[extent].bytes() as u64;
            extent += 1;
        }
        let filled = skip as usize;
        Self {
            id,
            wanted,
            part,
            value_len,
            extents,
            received: 0,
            started: Instant::now(),
            crc: 0,
            extent,
            filled,
        }
    }

    /// The fill, if it is one of this shard's.
    pub(super) fn fill(&self) -> Option<FillId> {
        match self.wanted {
            For::Fill(id) => Some(id),
            For::Errand { .. } => None,
        }
    }

    /// True for another shard's part that has come to its deadline and would need longer than `patience` for the rest.
    pub(super) fn is_too_late(&self, now: Instant, patience: Duration) -> bool {
        match &self.wanted {
            For::Errand { deadline, .. } if *deadline <= now => {
                self.time_left(now).is_none_or(|left| left > patience)
            }
            _ => false,
        }
    }

    /// How long the rest will take at the speed so far; `None` if nothing has come yet.
    pub(super) fn time_left(&self, now: Instant) -> Option<Duration> {
        time_left(self.started, self.received, self.part.len, now)
    }

    /// Where the next bytes go, and how many at most. `own` is the arena of this shard.
    pub(super) fn next(&self, own: &Arena, most: usize) -> (*mut u8, usize) {
        let arena = match &self.wanted {
            For::Fill(_) => own,
            For::Errand { owner, .. } => &owner.arena,
        };
        let extent = self.extents[self.extent];
        let room = extent.len as usize * GRANULE_BYTES - self.filled;
        let left = self.part.len - self.received;
        let len = (room as u64).min(left).min(most as u64) as usize;
        // SAFETY: `filled` is less than the extent's length, so the pointer stays inside it.
        (unsafe { arena.ptr(extent).as_ptr().add(self.filled) }, len)
    }

    /// Takes note of received bytes. True when the part is complete.
    pub(super) fn advance(&mut self, own: &Arena, bytes: usize) -> bool {
        let (start, _) = self.next(own, bytes);
        // SAFETY: the kernel has just written these bytes of this body's own room, and has let go of them.
        let fresh = unsafe { std::slice::from_raw_parts(start, bytes) };
        // While they are still in the processor's cache.
        self.crc = crate::checksum::crc32c_append(self.crc, fresh);
        self.received += bytes as u64;
        self.filled += bytes;
        if self.filled == self.extents[self.extent].len as usize * GRANULE_BYTES {
            self.extent += 1;
            self.filled = 0;
        }
        self.received == self.part.len
    }
}
