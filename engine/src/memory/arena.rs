//! A shard's blocks, and the report of what the machine gave.
//!
//! Maps block after block, each on the best rung of the ladder that policy and machine allow, and sees to it
//! that an arena is complete or is not there. Keeps no record of what is in use: that is the
//! [`ExtentAllocator`](super::ExtentAllocator)'s, so an arena can be shared by reference with readers.

use std::ptr::NonNull;
use std::time::{Duration, Instant};

use serde::Serialize;

use super::error::{errno_text, lock_advice};
use super::pages::{self, Mapping};
use super::procfs::{self, HugepagePool, ThpMode};
use super::{
    ArenaConfig, Extent, GRANULE_BYTES, LockPolicy, MemoryError, PageKind, PagePolicy, hugepage_pool,
    memlock, memlock_limit, thp_mode,
};

/// Bytes of ordinary memory mapped between two looks at how much there is.
const MEMORY_CHECK_BYTES: usize = 64 << 20;

/// One pinned mapping of an arena.
pub struct Block {
    mapping: Mapping,
    kind: PageKind,
    huge_bytes: usize,
    locked: bool,
}

impl Block {
    /// First byte; aligned to the hugepage, or to the base page where pages are off. Readable and writable
    /// for as long as the arena lives.
    pub fn base(&self) -> NonNull<u8> {
        self.mapping.base()
    }

    /// Length in bytes.
    pub fn bytes(&self) -> usize {
        self.mapping.bytes()
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
    /// Microseconds spent on populating and locking, out of `ready_us`.
    pub populate_us: u64,
    /// Microseconds from the start of mapping until the arena was ready.
    pub ready_us: u64,
    /// What is worse than it could be, each with the way to mend it.
    pub warnings: Vec<String>,
}

/// A shard's blocks: mapped, populated, locked as the policy says; unmapped on drop.
///
/// `Send` and `Sync`: after [`Arena::map`] it never changes, and it gives out addresses only. Whoever reads or
/// writes behind an address keeps the arena alive meanwhile and orders the accesses. That includes the kernel
/// and devices: the arena is dropped after the last of their completions.
pub struct Arena {
    blocks: Vec<Block>,
    block_bytes: usize,
    granules_per_block: u32,
    report: ArenaReport,
}

impl Arena {
    /// Maps, populates and locks an arena on the calling thread, which should be the pinned thread of the
    /// shard: the first touch decides the NUMA node.
    ///
    /// Blocking, for about as long as zeroing the memory takes.
    ///
    /// # Errors
    ///
    /// Sizes out of range, pages or locks that are required and cannot be had, not enough memory. All that was
    /// mapped is given back.
    pub fn map(config: &ArenaConfig) -> Result<Arena, MemoryError> {
        let started = Instant::now();
        let mut builder = Builder::new(config)?;
        for index in 0..builder.report.block_count {
            builder.add_block(index)?;
        }
        builder.look_into_smaps();
        builder.report.populate_us = micros(builder.populating);
        builder.report.ready_us = micros(started.elapsed());
        Ok(Arena {
            blocks: builder.blocks,
            block_bytes: config.block_bytes,
            granules_per_block: granules_per_block(config.block_bytes),
            report: builder.report,
        })
    }

    /// Number of blocks, at least 1.
    pub fn block_count(&self) -> usize {
        self.blocks.len()
    }

    /// Bytes per block.
    pub fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    /// Bytes of all blocks.
    pub fn bytes(&self) -> usize {
        self.blocks.len() * self.block_bytes
    }

    /// Granules per block, a power of two.
    pub fn granules_per_block(&self) -> u32 {
        self.granules_per_block
    }

    /// The block with number `index`.
    ///
    /// # Panics
    ///
    /// If there is no such block.
    pub fn block(&self, index: usize) -> &Block {
        &self.blocks[index]
    }

    /// All blocks, in the order of their numbers; for registering them with a ring or a device.
    pub fn blocks(&self) -> &[Block] {
        &self.blocks
    }

    /// Number of the block an extent lies in.
    pub fn block_of(&self, extent: Extent) -> usize {
        (extent.start / self.granules_per_block) as usize
    }

    /// Address of an extent's first byte; [`Extent::bytes`] bytes from there are mapped.
    ///
    /// # Panics
    ///
    /// If the extent is empty, crosses a block's border or lies outside the arena: extents come from the
    /// allocator of this arena, so anything else is a defect of the program.
    pub fn ptr(&self, extent: Extent) -> NonNull<u8> {
        let offset_granules = extent.start % self.granules_per_block;
        assert!(
            extent.len > 0 && extent.len <= self.granules_per_block - offset_granules,
            "{extent:?} does not lie inside one block of {} granules",
            self.granules_per_block
        );
        let base = self.blocks[self.block_of(extent)].base();
        // SAFETY: the block is `granules_per_block` granules long and the offset is less.
        unsafe { base.add(offset_granules as usize * GRANULE_BYTES) }
    }

    /// What was obtained.
    pub fn report(&self) -> &ArenaReport {
        &self.report
    }
}

/// An arena under construction; dropping it gives back what it has mapped.
struct Builder<'a> {
    config: &'a ArenaConfig,
    blocks: Vec<Block>,
    report: ArenaReport,
    /// Explicit hugepages are still worth asking for: none was refused yet.
    try_hugetlb: bool,
    /// Locking is still worth trying: none was refused yet.
    try_lock: bool,
    /// Ordinary memory mapped since the last look at how much there is.
    unchecked_bytes: usize,
    populating: Duration,
}

impl<'a> Builder<'a> {
    fn new(config: &'a ArenaConfig) -> Result<Self, MemoryError> {
        let hugetlb_page_bytes = hugepage_pool().page_bytes;
        let block_count = config.block_count(hugetlb_page_bytes)?;
        let arena_bytes = block_count * config.block_bytes;
        let report = ArenaReport {
            block_count,
            block_bytes: config.block_bytes,
            arena_bytes,
            remainder_bytes: config.capacity_bytes - arena_bytes,
            hugetlb_page_bytes,
            transparent_page_bytes: procfs::thp_page_bytes(),
            base_page_bytes: pages::base_page_bytes(),
            ..ArenaReport::default()
        };
        Ok(Builder {
            config,
            blocks: Vec::with_capacity(block_count),
            report,
            try_hugetlb: config.pages != PagePolicy::Off,
            try_lock: config.lock != LockPolicy::Off,
            unchecked_bytes: MEMORY_CHECK_BYTES,
            populating: Duration::ZERO,
        })
    }

    /// Maps, locks and populates the block `index`, and counts it in the report.
    fn add_block(&mut self, index: usize) -> Result<(), MemoryError> {
        let (mapping, locked) = match self.hugetlb_block() {
            Some(Ok(mapping)) => (mapping, true),
            Some(Err(errno)) if self.config.pages == PagePolicy::Required => {
                return Err(self.hugepages_missing(index, errno));
            }
            Some(Err(errno)) => {
                self.try_hugetlb = false;
                let warning = self.hugepages_warning(index, errno);
                self.report.warnings.push(warning);
                self.ordinary_block(index)?
            }
            None => self.ordinary_block(index)?,
        };
        let kind = mapping.kind();
        let bytes = mapping.bytes();
        let huge_bytes = if kind == PageKind::HugeTlb { bytes } else { 0 };
        self.report.hugetlb_bytes += huge_bytes;
        self.report.locked_bytes += if locked { bytes } else { 0 };
        self.blocks.push(Block { mapping, kind, huge_bytes, locked });
        Ok(())
    }

    /// The first rung; `None` if it is not to be tried.
    fn hugetlb_block(&mut self) -> Option<Result<Mapping, i32>> {
        if !self.try_hugetlb {
            return None;
        }
        let page_bytes = self.report.hugetlb_page_bytes;
        let mapping = Mapping::hugetlb(self.config.block_bytes, page_bytes);
        // The pool's pages are reserved by now, but a control group may still refuse them. MADV_DONTFORK is
        // part of the rung: a kernel that will not do it for hugetlb may do it for ordinary memory.
        Some(mapping.and_then(|mapping| {
            if let Err(MemoryError::Advise { errno, .. }) = mapping.keep_private() {
                return Err(errno);
            }
            self.timed_populate(&mapping)?;
            Ok(mapping)
        }))
    }

    /// The other rungs: transparent hugepages if the policy wants them and the kernel has them, base pages
    /// where it gives none. Which of the two it was is read from smaps when all blocks are there. Says besides
    /// whether the block is locked.
    fn ordinary_block(&mut self, index: usize) -> Result<(Mapping, bool), MemoryError> {
        let bytes = self.config.block_bytes;
        self.check_memory(index)?;
        let transparent = self.config.pages != PagePolicy::Off;
        let align_bytes = if transparent { self.report.transparent_page_bytes.min(bytes) } else { 0 };
        let mapping = Mapping::anonymous(bytes, align_bytes)?;
        mapping.keep_private()?;
        mapping.want_transparent(transparent);
        // The lock comes first: a limit that is too small shows before anything is zeroed, and pages that are
        // born locked need no second walk over them (about 150 ms per GiB of base pages).
        let locked = self.lock(&mapping)?;
        self.timed_populate(&mapping).map_err(|errno| MemoryError::Populate { bytes, errno })?;
        Ok((mapping, locked))
    }

    /// Refuses an arena that cannot fit before the kernel starts to kill processes for it.
    fn check_memory(&mut self, index: usize) -> Result<(), MemoryError> {
        if self.unchecked_bytes < MEMORY_CHECK_BYTES {
            self.unchecked_bytes += self.config.block_bytes;
            return Ok(());
        }
        self.unchecked_bytes = self.config.block_bytes;
        let needed_bytes = (self.report.block_count - index) as u64 * self.config.block_bytes as u64;
        match procfs::memory_limit() {
            Some((available_bytes, limit)) if available_bytes < needed_bytes => {
                Err(MemoryError::NotEnoughMemory { needed_bytes, available_bytes, limit })
            }
            _ => Ok(()),
        }
    }

    fn timed_populate(&mut self, mapping: &Mapping) -> Result<(), i32> {
        let started = Instant::now();
        let result = mapping.populate();
        self.populating += started.elapsed();
        result
    }

    /// Locks an ordinary block; says whether it is locked.
    fn lock(&mut self, mapping: &Mapping) -> Result<bool, MemoryError> {
        if !self.try_lock {
            if self.config.lock == LockPolicy::Off {
                self.report.not_locked = Some("setting `lock` is off".into());
            }
            return Ok(false);
        }
        let started = Instant::now();
        let result = memlock::lock(mapping.base(), mapping.bytes());
        self.populating += started.elapsed();
        let Err(errno) = result else { return Ok(true) };
        // All that is not on explicit hugepages has to be locked, with this block as the first of the rest.
        let needed_bytes = (self.report.arena_bytes - self.report.hugetlb_bytes) as u64;
        let limit = memlock_limit();
        if self.config.lock == LockPolicy::Required {
            return Err(MemoryError::Lock { needed_bytes, limit, errno });
        }
        self.try_lock = false;
        let reason = lock_advice(needed_bytes, &limit, errno);
        self.report.warnings.push(format!("the arena is not locked into memory: {reason}"));
        self.report.not_locked = Some(reason);
        Ok(false)
    }

    /// Sorts the ordinary blocks into transparent hugepages and base pages.
    fn look_into_smaps(&mut self) {
        if self.config.pages != PagePolicy::Off {
            let ranges: Vec<(usize, usize)> = self
                .blocks
                .iter()
                .filter(|block| block.kind != PageKind::HugeTlb)
                .map(address_range)
                .collect();
            let mut found = procfs::huge_bytes_in(&ranges).into_iter();
            for block in self.blocks.iter_mut().filter(|block| block.kind != PageKind::HugeTlb) {
                block.huge_bytes = found.next().unwrap_or(0).min(block.bytes());
                if block.huge_bytes > 0 {
                    block.kind = PageKind::Transparent;
                }
                self.report.transparent_bytes += block.huge_bytes;
            }
        }
        self.report.base_bytes =
            self.report.arena_bytes - self.report.hugetlb_bytes - self.report.transparent_bytes;
        if self.config.pages != PagePolicy::Off && self.report.base_bytes > 0 {
            let reason = match thp_mode() {
                ThpMode::Never => {
                    "transparent hugepages are off: `echo madvise > /sys/kernel/mm/transparent_hugepage/enabled`"
                }
                ThpMode::Unavailable => "the kernel has no transparent hugepages",
                _ => "the kernel found no more free hugepages: memory is fragmented or nearly full",
            };
            let base_bytes = self.report.base_bytes;
            self.report.warnings.push(format!("{base_bytes} bytes are on base pages: {reason}"));
        }
    }

    fn needed_pages(&self) -> u64 {
        (self.report.arena_bytes / self.report.hugetlb_page_bytes.max(1)) as u64
    }

    fn hugepages_missing(&mut self, block: usize, errno: i32) -> MemoryError {
        // Give the pages back first, so that the pool in the message is the one the next attempt finds.
        self.blocks.clear();
        MemoryError::Hugepages {
            block,
            block_count: self.report.block_count,
            needed_pages: self.needed_pages(),
            pool: hugepage_pool(),
            errno,
        }
    }

    fn hugepages_warning(&self, block: usize, errno: i32) -> String {
        let HugepagePool { page_bytes, total, free, reserved } = hugepage_pool();
        let block_count = self.report.block_count;
        if page_bytes == 0 {
            return "the kernel has no explicit hugepages".into();
        }
        if page_bytes > self.config.block_bytes {
            return format!(
                "explicit hugepages of {page_bytes} bytes are larger than block_bytes ({}) and are not used",
                self.config.block_bytes
            );
        }
        let missing_pages = (block_count - block) * (self.config.block_bytes / page_bytes);
        let usable_pages = free.saturating_sub(reserved);
        format!(
            "{} of {block_count} blocks got no explicit hugepages ({}); {} KiB pages in the pool: {total} in all, \
             {usable_pages} usable: `sysctl -w vm.nr_hugepages={}` before the start mends it",
            block_count - block,
            errno_text(errno),
            page_bytes / 1024,
            total + (missing_pages as u64).saturating_sub(usable_pages),
        )
    }
}

fn address_range(block: &Block) -> (usize, usize) {
    (block.base().addr().get(), block.bytes())
}

fn granules_per_block(block_bytes: usize) -> u32 {
    // At most 2^18: blocks are at most 1 GiB.
    (block_bytes / GRANULE_BYTES) as u32
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
#[path = "arena_tests.rs"]
mod tests;

impl std::fmt::Debug for Arena {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Arena").field("report", self.report()).finish_non_exhaustive()
    }
}
