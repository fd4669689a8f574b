//! A shard's blocks, and the report of what the machine gave.
//!
//! Sees to it that an arena is complete when it starts or is not there, and lets its owner add and take out
//! whole blocks later, up to a number that is fixed at start. Keeps no record of what is in use: that is the
//! [`ExtentAllocator`](super::ExtentAllocator)'s, so an arena can be shared by reference with readers.

use std::collections::BTreeMap;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use serde::Serialize;

use super::mapper::{Mapped, Mapper, micros, sum_by_node};
use super::{
    ArenaConfig, Extent, GRANULE_BYTES, LockPolicy, MemoryError, PageKind, hugepage_pool, pages, procfs,
};

/// One pinned block of an arena, as it was obtained.
#[derive(Clone, Copy, Debug)]
pub struct Block {
    pub(super) base: NonNull<u8>,
    pub(super) bytes: usize,
    pub(super) kind: PageKind,
    pub(super) huge_bytes: usize,
    pub(super) locked: bool,
}

impl Block {
    /// First byte; aligned to the hugepage, or to the base page where pages are off. Readable and writable
    /// for as long as the block is part of the arena.
    pub fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Length in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// What it is made of.
    pub fn kind(&self) -> PageKind {
        self.kind
    }

    /// Bytes that lie on hugepages of either kind.
    pub fn huge_bytes(&self) -> usize {
        self.huge_bytes
    }

    /// Whether it stays in memory: locked, or made of explicit hugepages, which the kernel never swaps.
    pub fn is_locked(&self) -> bool {
        self.locked
    }
}

/// What an arena was really given. `hugetlb_bytes + transparent_bytes + base_bytes` is `arena_bytes`.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize)]
pub struct ArenaReport {
    /// Number of blocks.
    pub block_count: usize,
    /// Most blocks that it can have.
    pub block_count_max: usize,
    /// Bytes per block.
    pub block_bytes: usize,
    /// Bytes of all blocks.
    pub arena_bytes: usize,
    /// Bytes of the configured capacity that make no whole block and are not used.
    pub remainder_bytes: usize,
    /// Bytes on explicit hugepages.
    pub hugetlb_bytes: usize,
    /// Bytes of an explicit hugepage, 0 if the kernel has none.
    pub hugetlb_page_bytes: usize,
    /// Bytes on transparent hugepages, as seen in smaps.
    pub transparent_bytes: usize,
    /// Bytes of a transparent hugepage, 0 if the kernel has none.
    pub transparent_page_bytes: usize,
    /// Bytes on base pages.
    pub base_bytes: usize,
    /// Bytes of a base page.
    pub base_page_bytes: usize,
    /// Bytes that stay in memory: locked, or on explicit hugepages.
    pub locked_bytes: usize,
    /// Why some bytes are not locked; `None` if all are.
    pub not_locked: Option<String>,
    /// NUMA node of the core that works with it, if it is known.
    pub node: Option<u32>,
    /// Bytes on each NUMA node, as the kernel tells (by one page in every 64 KiB); empty if it does not.
    pub bytes_by_node: BTreeMap<u32, usize>,
    /// Microseconds spent on populating and locking at start, out of `ready_us`.
    pub populate_us: u64,
    /// Microseconds from the start of mapping until the arena was ready.
    pub ready_us: u64,
    /// What is worse than it could be, each with the way to mend it.
    pub warnings: Vec<String>,
}

/// A shard's blocks: mapped, populated, locked as the policy says; unmapped when they are taken out, or on drop.
///
/// `Send` and `Sync`: it gives out addresses only. Whoever reads or writes behind an address keeps the arena
/// alive and the block in it meanwhile and orders the accesses. That includes the kernel and devices: a block
/// goes after the last of their completions.
pub struct Arena {
    /// Address of each block, null where there is none. As long as there can be blocks, so that it never moves.
    bases: Box<[AtomicPtr<u8>]>,
    block_bytes: usize,
    /// Granules per block, as a power of two.
    granules_shift: u32,
    /// What owns the blocks. For the one who adds and takes out, and for reports; addresses need no lock.
    keeper: Mutex<Keeper>,
}

struct Keeper {
    config: ArenaConfig,
    /// By number.
    blocks: BTreeMap<usize, Mapped>,
    /// What does not follow from the blocks.
    report: ArenaReport,
}

impl Arena {
    /// Maps, populates and locks an arena on the calling thread, which should be the pinned thread of the
    /// shard: where nothing else is asked for, the first touch decides the NUMA node.
    ///
    /// Blocking, for about as long as zeroing the memory takes.
    ///
    /// # Errors
    ///
    /// Sizes out of range, pages or locks that are required and cannot be had, not enough memory. All that was
    /// mapped is given back.
    pub fn map(config: &ArenaConfig) -> Result<Arena, MemoryError> {
        let started = Instant::now();
        let hugetlb_page_bytes = hugepage_pool().page_bytes;
        let block_count = config.block_count(hugetlb_page_bytes)?;
        let block_count_max = config.block_count_max(block_count)?;
        let arena = Arena {
            bases: (0..block_count_max).map(|_| AtomicPtr::new(ptr::null_mut())).collect(),
            block_bytes: config.block_bytes,
            granules_shift: (config.block_bytes / GRANULE_BYTES).trailing_zeros(),
            keeper: Mutex::new(Keeper {
                config: config.clone(),
                blocks: BTreeMap::new(),
                report: ArenaReport {
                    block_count_max,
                    block_bytes: config.block_bytes,
                    remainder_bytes: config.capacity_bytes - block_count * config.block_bytes,
                    hugetlb_page_bytes,
                    transparent_page_bytes: procfs::thp_page_bytes(),
                    base_page_bytes: pages::base_page_bytes(),
                    node: config.node,
                    not_locked: (config.lock == LockPolicy::Off).then(|| "setting `lock` is off".to_owned()),
                    ..ArenaReport::default()
                },
            }),
        };
        let mut mapper = arena.mapper(block_count);
        for index in 0..block_count {
            if let Err(mut error) = arena.add(index, &mut mapper) {
                drop(arena);
                // The pages are back: the pool in the message is the one that the next attempt finds.
                if let MemoryError::Hugepages { pool, .. } = &mut error {
                    *pool = hugepage_pool();
                }
                return Err(error);
            }
        }
        let populate_us = micros(mapper.populating);
        arena.settle(mapper);
        let mut keeper = arena.keeper();
        keeper.report.populate_us = populate_us;
        keeper.report.ready_us = micros(started.elapsed());
        drop(keeper);
        Ok(arena)
    }

    /// What maps `blocks` more blocks, to be used at once and given back with [`Arena::settle`]: it remembers
    /// which rungs of the ladder were refused.
    pub fn mapper(&self, blocks: usize) -> Mapper {
        let keeper = self.keeper();
        let others = keeper.blocks.values().filter(|mapped| !mapped.is_hugetlb()).count();
        Mapper::new(&keeper.config, &keeper.report, blocks, others * self.block_bytes)
    }

    /// Maps, populates and locks one block on the calling thread and makes it number `index`. Blocking, for
    /// about as long as zeroing it takes.
    ///
    /// # Panics
    ///
    /// If there is such a block already, or there can be none.
    pub fn add(&self, index: usize, mapper: &mut Mapper) -> Result<Block, MemoryError> {
        let mapped = mapper.map()?;
        let block = mapped.block();
        let before = self.keeper().blocks.insert(index, mapped);
        assert!(before.is_none(), "block {index} is there already");
        // Release: the mapping is there for whoever reads the address. See `ptr` for who may.
        self.bases[index].store(block.base.as_ptr(), Ordering::Release);
        Ok(block)
    }

    /// Takes a mapper's warnings in, and looks where the memory really is. Slow in a large process: once for
    /// many blocks. Returns what was not said before.
    pub fn settle(&self, mapper: Mapper) -> Vec<String> {
        let mut keeper = self.keeper();
        let keeper = &mut *keeper;
        let (mut warnings, not_locked) = mapper.look_into(keeper.blocks.values_mut());
        warnings.retain(|warning| !keeper.report.warnings.contains(warning));
        keeper.report.warnings.extend(warnings.iter().cloned());
        keeper.report.not_locked = keeper.report.not_locked.take().or(not_locked);
        warnings
    }

    /// Unmaps a block, if there is one of that number.
    ///
    /// # Safety
    ///
    /// Nobody uses an address in the block any more, the kernel and devices included, and nobody will ask for
    /// one: none of its granules is in use, and none will be allocated before it is added again.
    pub unsafe fn remove(&self, index: usize) {
        // Relaxed: by the contract nobody looks.
        self.bases[index].store(ptr::null_mut(), Ordering::Relaxed);
        let mapped = self.keeper().blocks.remove(&index);
        // Unmapped without the lock: it may take milliseconds.
        drop(mapped);
    }

    fn keeper(&self) -> MutexGuard<'_, Keeper> {
        self.keeper.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Number of blocks at this moment.
    pub fn block_count(&self) -> usize {
        self.keeper().blocks.len()
    }

    /// Most blocks that there can be.
    pub fn block_count_max(&self) -> usize {
        self.bases.len()
    }

    /// Bytes per block.
    pub fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    /// Bytes of all blocks at this moment.
    pub fn bytes(&self) -> usize {
        self.block_count() * self.block_bytes
    }

    /// Granules per block, a power of two.
    pub fn granules_per_block(&self) -> u32 {
        1 << self.granules_shift
    }

    /// The block with number `index`, if there is one.
    pub fn block(&self, index: usize) -> Option<Block> {
        self.keeper().blocks.get(&index).map(Mapped::block)
    }

    /// All blocks there are, in the order of their numbers.
    pub fn blocks(&self) -> Vec<Block> {
        self.keeper().blocks.values().map(Mapped::block).collect()
    }

    /// Number of the block an extent lies in.
    pub fn block_of(&self, extent: Extent) -> usize {
        (extent.start >> self.granules_shift) as usize
    }

    /// Address of an extent's first byte; [`Extent::bytes`] bytes from there are mapped.
    ///
    /// # Panics
    ///
    /// If the extent is empty, crosses a block's border or lies in no block: extents come from the allocator of
    /// this arena, so anything else is a defect of the program.
    #[inline]
    pub fn ptr(&self, extent: Extent) -> NonNull<u8> {
        let granules_per_block = self.granules_per_block();
        let offset_granules = extent.start & (granules_per_block - 1);
        assert!(
            extent.len > 0 && extent.len <= granules_per_block - offset_granules,
            "{extent:?} does not lie inside one block of {granules_per_block} granules",
        );
        // Relaxed, a plain load everywhere: whoever has an extent in use got it over a release and an acquire
        // (the slot's publication, the answer with a reservation) that began after the allocator, and so after
        // `add`, had named the block. So this sees that address or a later one; and there is no later one, for
        // a block goes only when none of its granules is in use.
        let base = self.bases[self.block_of(extent)].load(Ordering::Relaxed);
        let Some(base) = NonNull::new(base) else { no_block(extent) };
        // SAFETY: the block is `granules_per_block` granules long and the offset is less.
        unsafe { base.add(offset_granules as usize * GRANULE_BYTES) }
    }

    /// What was obtained, of the blocks there are now.
    pub fn report(&self) -> ArenaReport {
        let keeper = self.keeper();
        let mut report = keeper.report.clone();
        for mapped in keeper.blocks.values() {
            let block = mapped.block();
            report.block_count += 1;
            report.arena_bytes += block.bytes;
            match block.kind {
                PageKind::HugeTlb => report.hugetlb_bytes += block.bytes,
                _ => report.transparent_bytes += block.huge_bytes,
            }
            report.locked_bytes += if block.locked { block.bytes } else { 0 };
        }
        report.bytes_by_node = sum_by_node(keeper.blocks.values().map(|mapped| &mapped.by_node));
        report.base_bytes = report.arena_bytes - report.hugetlb_bytes - report.transparent_bytes;
        if report.locked_bytes == report.arena_bytes {
            report.not_locked = None;
        }
        report
    }
}

#[cold]
fn no_block(extent: Extent) -> ! {
    panic!("{extent:?} lies in no block of the arena")
}

#[cfg(test)]
#[path = "arena_tests.rs"]
mod tests;

impl std::fmt::Debug for Arena {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Arena").field("report", &self.report()).finish_non_exhaustive()
    }
}
