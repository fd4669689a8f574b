//! An arena: the blocks of one shard.

use super::limits::{hugepage_pool, memlock_limit, raise_memlock};
use super::pages::{LockPolicy, Mapping, PageKind, PagePolicy, hugepage_bytes, smaps};
use super::{Extent, GRANULE_BYTES, MemoryError};
use serde::Serialize;
use std::io;
use std::ptr::NonNull;
use std::time::Instant;

const BLOCK_BYTES_MIN: usize = 64 << 10;
const BLOCK_BYTES_MAX: usize = 1 << 30;

/// What to map.
#[derive(Clone, Copy, Debug)]
pub struct ArenaConfig {
    /// Bytes wanted; rounded down to whole blocks.
    pub capacity_bytes: usize,
    /// Bytes of one block: a power of two; a multiple of the hugepage unless `pages` is off; 64 KiB to 1 GiB.
    pub block_bytes: usize,
    /// Where pages may come from.
    pub pages: PagePolicy,
    /// Whether they are locked.
    pub lock: LockPolicy,
}

/// One block.
#[derive(Debug)]
pub struct Block {
    mapping: Mapping,
    locked: bool,
}

impl Block {
    /// First byte. Aligned to the pages that the block was asked to have.
    pub fn base(&self) -> NonNull<u8> {
        self.mapping.base()
    }

    /// The kind of page that the block really has.
    pub fn page_kind(&self) -> PageKind {
        self.mapping.kind()
    }

    /// True if it cannot be swapped out.
    pub fn is_locked(&self) -> bool {
        self.locked
    }
}

/// What was obtained.
#[derive(Clone, Debug, Default, Serialize)]
#[non_exhaustive]
pub struct ArenaReport {
    /// Bytes mapped and populated.
    pub bytes: usize,
    /// Bytes of one block.
    pub block_bytes: usize,
    /// Bytes on explicit hugepages.
    pub hugetlb_bytes: usize,
    /// Bytes on transparent hugepages, as smaps said after populating.
    pub transparent_bytes: usize,
    /// Bytes on base pages.
    pub base_bytes: usize,
    /// Bytes of one explicit hugepage; 0 where the kernel has none.
    pub hugepage_bytes: usize,
    /// Bytes that cannot be swapped out.
    pub locked_bytes: usize,
    /// Bytes of the capacity that make no whole block and are not used.
    pub remainder_bytes: usize,
    /// Time for mapping, populating and locking, in milliseconds.
    pub populate_ms: f64,
    /// What is less than was preferred, and what mends it.
    pub warnings: Vec<String>,
}

/// The blocks of one shard: mapped, populated, and, where possible, locked. `Send` and `Sync`: it hands out
/// addresses, and who may touch which bytes is the business of its user. Unmapped on drop.
#[derive(Debug)]
pub struct Arena {
    blocks: Vec<Block>,
    block_bytes: usize,
    report: ArenaReport,
}

impl Arena {
    /// Maps an arena. Populates on the calling thread, so that its pages come from that thread's NUMA node.
    /// Blocks for as long as the kernel takes to clear the pages.
    pub fn map(config: &ArenaConfig) -> Result<Self, MemoryError> {
        let started = Instant::now();
        check(config)?;
        let count = config.capacity_bytes / config.block_bytes;
        let mut arena = Self {
            blocks: Vec::with_capacity(count),
            block_bytes: config.block_bytes,
            report: ArenaReport {
                bytes: count * config.block_bytes,
                block_bytes: config.block_bytes,
                hugepage_bytes: hugepage_bytes(),
                remainder_bytes: config.capacity_bytes % config.block_bytes,
                ..ArenaReport::default()
            },
        };
        for _ in 0..count {
            let mapping = map_block(config, count - arena.blocks.len())?;
            arena.blocks.push(Block { mapping, locked: false });
        }
        if config.pages == PagePolicy::Preferred {
            let smaps = smaps();
            for block in &mut arena.blocks {
                block.mapping.confirm(&smaps);
            }
        }
        arena.count_pages(config);
        arena.lock(config)?;
        arena.report.populate_ms = started.elapsed().as_secs_f64() * 1e3;
        Ok(arena)
    }

    fn count_pages(&mut self, config: &ArenaConfig) {
        let report = &mut self.report;
        for block in &self.blocks {
            match block.page_kind() {
                PageKind::HugeTlb => report.hugetlb_bytes += self.block_bytes,
                PageKind::Transparent => report.transparent_bytes += self.block_bytes,
                PageKind::Base => report.base_bytes += self.block_bytes,
            }
        }
        if config.pages == PagePolicy::Preferred && report.hugetlb_bytes < report.bytes {
            let pages = (report.bytes - report.hugetlb_bytes).div_ceil(report.hugepage_bytes.max(1));
            let mend = match report.hugepage_bytes {
                0 => "this kernel has no explicit hugepages".to_owned(),
                bytes => format!("{pages} more hugepages of {bytes} bytes in vm.nr_hugepages would do"),
            };
            report.warnings.push(format!(
                "{} of {} bytes are not on explicit hugepages ({} on transparent ones): {mend}",
                report.bytes - report.hugetlb_bytes,
                report.bytes,
                report.transparent_bytes
            ));
        }
    }

    fn lock(&mut self, config: &ArenaConfig) -> Result<(), MemoryError> {
        let lockable = |block: &Block| block.page_kind() == PageKind::HugeTlb || config.lock != LockPolicy::Off;
        if config.lock != LockPolicy::Off {
            raise_memlock();
        }
        for block in self.blocks.iter_mut().filter(|block| lockable(block)) {
            if let Err(error) = block.mapping.lock() {
                let reason = explain_lock(&error, self.report.bytes);
                if config.lock == LockPolicy::Required {
                    return Err(MemoryError::Lock { reason });
                }
                self.report.warnings.push(reason);
                break;
            }
            block.locked = true;
            self.report.locked_bytes += self.block_bytes;
        }
        Ok(())
    }

    /// Number of blocks.
    pub fn block_count(&self) -> usize {
        self.blocks.len()
    }

    /// Bytes of one block.
    pub fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    /// Bytes of all blocks.
    pub fn bytes(&self) -> usize {
        self.blocks.len() * self.block_bytes
    }

    /// Granules of one block.
    pub fn granules_per_block(&self) -> u32 {
        // At most 1 GiB / 4 KiB.
        (self.block_bytes / GRANULE_BYTES) as u32
    }

    /// A block.
    ///
    /// # Panics
    ///
    /// If there is no such block.
    pub fn block(&self, index: usize) -> &Block {
        &self.blocks[index]
    }

    /// First byte of an extent.
    ///
    /// # Panics
    ///
    /// If the extent does not lie in one block of this arena: an extent of another allocator.
    #[inline]
    pub fn ptr(&self, extent: Extent) -> NonNull<u8> {
        let per_block = self.granules_per_block();
        let (block, within) = (extent.start / per_block, extent.start % per_block);
        assert!(within + extent.len <= per_block, "{extent:?} crosses a block's border");
        let base = self.blocks[block as usize].base();
        // SAFETY: inside the block, as just checked.
        unsafe { base.add(within as usize * GRANULE_BYTES) }
    }

    /// What was obtained.
    pub fn report(&self) -> &ArenaReport {
        &self.report
    }
}

fn check(config: &ArenaConfig) -> Result<(), MemoryError> {
    let block = config.block_bytes;
    let huge = if config.pages == PagePolicy::Off { 0 } else { hugepage_bytes() };
    let min = BLOCK_BYTES_MIN.max(huge);
    if !block.is_power_of_two() || block < min || block > BLOCK_BYTES_MAX {
        let allowed = format!("a power of two from {min} to {BLOCK_BYTES_MAX}");
        return Err(MemoryError::Size { setting: "block_bytes", bytes: block, allowed });
    }
    if config.capacity_bytes < block {
        let allowed = format!("at least one block of {block} bytes");
        return Err(MemoryError::Size { setting: "capacity_bytes", bytes: config.capacity_bytes, allowed });
    }
    if config.capacity_bytes / GRANULE_BYTES >= u32::MAX as usize {
        let allowed = "less than 16 TiB per shard".to_owned();
        return Err(MemoryError::Size { setting: "capacity_bytes", bytes: config.capacity_bytes, allowed });
    }
    Ok(())
}

/// One block, from the best rung that has one; `left` blocks are still to come.
fn map_block(config: &ArenaConfig, left: usize) -> Result<Mapping, MemoryError> {
    let failed = |source| MemoryError::System { what: "map", bytes: config.block_bytes, source };
    if config.pages != PagePolicy::Off {
        match Mapping::hugetlb(config.block_bytes) {
            Some(Ok(mapping)) => return Ok(mapping),
            Some(Err(source)) if config.pages == PagePolicy::Required => {
                return Err(MemoryError::System { what: "populate hugepages for", bytes: config.block_bytes, source });
            }
            None if config.pages == PagePolicy::Required => {
                let pool = hugepage_pool();
                return Err(MemoryError::Hugepages {
                    needed_pages: (left * config.block_bytes).div_ceil(pool.page_bytes.max(1)),
                    free_pages: pool.available(),
                    page_bytes: pool.page_bytes,
                });
            }
            // The next rung.
            Some(Err(_)) | None => {}
        }
    }
    Mapping::anonymous(config.block_bytes, config.pages == PagePolicy::Preferred).map_err(failed)
}

fn explain_lock(error: &io::Error, bytes: usize) -> String {
    let limit = match memlock_limit().soft_bytes {
        None => "unlimited".to_owned(),
        Some(bytes) => format!("{bytes} bytes"),
    };
    format!(
        "the arena cannot be locked ({error}): it needs RLIMIT_MEMLOCK of at least {bytes} bytes, which is {limit}; \
         raise it (ulimit -l unlimited, systemd LimitMEMLOCK=infinity, docker --ulimit memlock=-1:-1) or set \
         lock = off"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(capacity_bytes: usize, block_bytes: usize, pages: PagePolicy) -> ArenaConfig {
        ArenaConfig { capacity_bytes, block_bytes, pages, lock: LockPolicy::Preferred }
    }

    #[test]
    fn every_rung_gives_writable_blocks_and_says_what_it_is() {
        for pages in [PagePolicy::Preferred, PagePolicy::Off] {
            let arena = Arena::map(&config(33 << 20, 16 << 20, pages)).unwrap();
            let report = arena.report();
            assert_eq!((arena.block_count(), report.bytes, report.remainder_bytes), (2, 32 << 20, 1 << 20));
            assert_eq!(report.hugetlb_bytes + report.transparent_bytes + report.base_bytes, report.bytes);
            assert!(pages != PagePolicy::Off || report.base_bytes == report.bytes);
            let last = arena.ptr(Extent { start: 2 * 4096 - 1, len: 1 });
            // SAFETY: the last granule of the arena, which only this test uses.
            unsafe { std::ptr::write_bytes(last.as_ptr(), 7, GRANULE_BYTES) };
        }
    }

    #[test]
    fn sizes_that_cannot_be_are_refused_by_name() {
        for (capacity, block, setting) in [
            (64 << 20, 3 << 20, "block_bytes"),
            (64 << 20, 0, "block_bytes"),
            (64 << 20, 4096, "block_bytes"),
            (4 << 30, 2 << 30, "block_bytes"),
            ((16 << 20) - 1, 16 << 20, "capacity_bytes"),
            (usize::MAX, 16 << 20, "capacity_bytes"),
        ] {
            match Arena::map(&config(capacity, block, PagePolicy::Off)) {
                Err(MemoryError::Size { setting: named, .. }) => assert_eq!(named, setting),
                other => panic!("{capacity} {block}: {other:?}"),
            }
        }
    }

    #[test]
    fn a_pool_that_is_too_small_is_named() {
        // 8 TiB: no pool has as much.
        match Arena::map(&config(8 << 40, 1 << 30, PagePolicy::Required)) {
            Err(MemoryError::Hugepages { needed_pages, .. }) => assert!(needed_pages > 0),
            Err(MemoryError::System { .. }) => {}
            other => panic!("{other:?}"),
        }
    }

    #[test]
    #[should_panic(expected = "crosses a block's border")]
    fn extents_stay_inside_a_block() {
        let arena = Arena::map(&config(2 << 20, 1 << 20, PagePolicy::Off)).unwrap();
        arena.ptr(Extent { start: 255, len: 2 });
    }
}
