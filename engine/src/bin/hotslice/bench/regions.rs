//! Memory of the kind that caches use, for the callers' buffers and the floors: the same pages, populated
//! before anything is timed.

use hotslice::memory::{
    Arena, ArenaConfig, Extent, GRANULE_BYTES, LockPolicy, MAX_BLOCK_BYTES, NumaPolicy, PagePolicy,
};

/// Smallest block: the usual hugepage.
const BLOCK_BYTES_MIN: usize = 2 << 20;

/// Buffers of one length, each on pages of its own.
pub struct Regions {
    arena: Arena,
    len: usize,
    stride: usize,
    count: usize,
}

impl Regions {
    /// `count` regions of `len` bytes, at most 1 GiB.
    pub fn new(count: usize, len: usize, pages: PagePolicy) -> Result<Self, String> {
        let stride = len.next_multiple_of(GRANULE_BYTES);
        let block_bytes = block_bytes(count, stride);
        let blocks = count.div_ceil(block_bytes / stride);
        let capacity_bytes =
            blocks.checked_mul(block_bytes).ok_or("the buffers exceed what can be addressed")?;
        let config = ArenaConfig {
            capacity_bytes,
            capacity_max_bytes: 0,
            block_bytes,
            pages,
            lock: LockPolicy::Off,
            numa: NumaPolicy::Off,
            node: None,
        };
        let arena = Arena::map(&config).map_err(|e| format!("no memory for buffers: {e}"))?;
        Ok(Self { arena, len, stride, count })
    }

    /// Number of regions.
    pub fn count(&self) -> usize {
        self.count
    }

    /// First byte of a region, which is `len` bytes long and apart from all others.
    pub fn ptr(&self, index: usize) -> *mut u8 {
        assert!(index < self.count);
        let per_block = self.arena.block_bytes() / self.stride;
        let granules_per_block = self.arena.granules_per_block();
        let start = (index / per_block) as u32 * granules_per_block;
        let base = self.arena.ptr(Extent { start, len: granules_per_block }).as_ptr();
        // SAFETY: `per_block` strides fit into a block, so the offset lies within it.
        unsafe { base.add(index % per_block * self.stride) }
    }

    /// A region's bytes.
    pub fn slice(&mut self, index: usize) -> &mut [u8] {
        // SAFETY: `ptr` is the start of `len` bytes of this arena, mapped while `self` lives, populated, and
        // lent out by `&mut self` alone.
        unsafe { std::slice::from_raw_parts_mut(self.ptr(index), self.len) }
    }

    /// The first `count` regions at once.
    pub fn slices(&mut self, count: usize) -> Vec<&mut [u8]> {
        // SAFETY: as in `slice`; regions do not overlap.
        (0..count).map(|i| unsafe { std::slice::from_raw_parts_mut(self.ptr(i), self.len) }).collect()
    }

    /// Changes some bytes all over a region, the last one included, so that a read which writes nothing, or
    /// leaves a piece out, cannot pass for one that did: what lay there before may have been the same value.
    pub fn spoil(&mut self, index: usize) {
        let region = self.slice(index);
        if let Some((last, others)) = region.split_last_mut() {
            others.iter_mut().step_by(SPOIL_STEP).for_each(|byte| *byte = !*byte);
            *last = !*last;
        }
    }
}

/// Distance of the bytes that [`Regions::spoil`] changes. Odd, so that they are at different places in
/// granules, and far less than what any operation moves at a time.
const SPOIL_STEP: usize = 1021;

/// The block size, a power of two, that wastes the least; of equals the smallest.
fn block_bytes(count: usize, stride: usize) -> usize {
    let least = stride.next_power_of_two().max(BLOCK_BYTES_MIN);
    std::iter::successors(Some(least), |bytes| Some(bytes * 2))
        .take_while(|&bytes| bytes == least || bytes <= MAX_BLOCK_BYTES)
        .min_by_key(|&bytes| count.div_ceil(bytes / stride).saturating_mul(bytes))
        .unwrap_or(least)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_waste_little() {
        assert_eq!(block_bytes(1, 4096), 2 << 20);
        assert_eq!(block_bytes(25, 10_002_432), 128 << 20);
        assert_eq!(block_bytes(1, 1 << 30), 1 << 30);
    }

    #[test]
    fn regions_are_apart_and_spoiling_shows() {
        let mut regions = Regions::new(7, 700_001, PagePolicy::Off).unwrap();
        assert_eq!(regions.count(), 7);
        for (i, region) in regions.slices(7).into_iter().enumerate() {
            region.fill(i as u8);
        }
        for i in 0..7 {
            assert!(regions.slice(i).iter().all(|&byte| byte == i as u8));
        }
        regions.spoil(3);
        let spoilt = regions.slice(3);
        assert_eq!((spoilt[0], spoilt[SPOIL_STEP], spoilt[1], spoilt[700_000]), (!3, !3, 3, !3));
        assert!(regions.slice(2).iter().all(|&byte| byte == 2));
        let mut tiny = Regions::new(1, 1, PagePolicy::Off).unwrap();
        tiny.slice(0)[0] = 5;
        tiny.spoil(0);
        assert_eq!(tiny.slice(0), [!5]);
    }
}
