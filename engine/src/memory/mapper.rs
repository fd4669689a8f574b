//! Maps blocks, each on the best rung of the ladder that policy and machine allow.
//!
//! Knows nothing of numbers and addresses of other blocks: an arena says how many it will ask for, so that what
//! cannot fit is refused before it is touched. Never falls back silently: it collects warnings.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::machine::Machine;

use super::arena::Block;
use super::error::{errno_text, lock_advice};
use super::pages::Mapping;
use super::procfs::{self, HugepagePool, ThpMode};
use super::{
    ArenaConfig, ArenaReport, LockPolicy, MemoryError, NumaPolicy, PageKind, PagePolicy, hugepage_pool,
    memlock, memlock_limit, numa, thp_mode,
};

/// Bytes of ordinary memory mapped between two looks at how much there is.
const MEMORY_CHECK_BYTES: usize = 64 << 20;

/// A block and what it is made of. Unmapped on drop.
pub(super) struct Mapped {
    mapping: Mapping,
    kind: PageKind,
    huge_bytes: usize,
    locked: bool,
    /// Bytes on each NUMA node, as the kernel told.
    pub(super) by_node: BTreeMap<u32, usize>,
    /// smaps was not asked yet what it is made of.
    fresh: bool,
}

impl Mapped {
    pub(super) fn block(&self) -> Block {
        Block {
            base: self.mapping.base(),
            bytes: self.mapping.bytes(),
            kind: self.kind,
            huge_bytes: self.huge_bytes,
            locked: self.locked,
        }
    }

    pub(super) fn is_hugetlb(&self) -> bool {
        self.kind == PageKind::HugeTlb
    }

    fn address_range(&self) -> (usize, usize) {
        (self.mapping.base().addr().get(), self.mapping.bytes())
    }
}

/// Maps a number of blocks, one by one.
pub struct Mapper {
    config: ArenaConfig,
    hugetlb_page_bytes: usize,
    transparent_page_bytes: usize,
    /// Blocks to be mapped in all, and those mapped.
    block_count: usize,
    done: usize,
    hugetlb_blocks: usize,
    /// Bytes that are there already and may have to be locked.
    other_bytes: usize,
    /// Explicit hugepages are still worth asking for: none was refused yet.
    try_hugetlb: bool,
    /// Hugepages that a control group leaves; no more are asked for.
    hugetlb_left_bytes: Option<u64>,
    /// Locking is still worth trying: none was refused yet.
    try_lock: bool,
    /// Node to ask for; `None` where there is nothing to ask.
    try_node: Option<u32>,
    /// Ordinary memory mapped since the last look at how much there is.
    unchecked_bytes: usize,
    not_locked: Option<String>,
    warnings: Vec<String>,
    pub(super) populating: Duration,
}

impl Mapper {
    /// For `block_count` blocks of an arena that has `other_bytes` of ordinary memory already.
    pub(super) fn new(
        config: &ArenaConfig,
        arena: &ArenaReport,
        block_count: usize,
        other_bytes: usize,
    ) -> Self {
        Mapper {
            config: config.clone(),
            hugetlb_page_bytes: arena.hugetlb_page_bytes,
            transparent_page_bytes: arena.transparent_page_bytes,
            block_count,
            done: 0,
            hugetlb_blocks: 0,
            other_bytes,
            try_hugetlb: config.pages != PagePolicy::Off,
            hugetlb_left_bytes: None,
            try_lock: config.lock != LockPolicy::Off,
            // With one node there is nothing to choose.
            try_node: config.node.filter(|_| config.numa == NumaPolicy::Local && machine_nodes() > 1),
            unchecked_bytes: MEMORY_CHECK_BYTES,
            not_locked: None,
            warnings: Vec::new(),
            populating: Duration::ZERO,
        }
    }

    /// Maps, locks and populates one block.
    pub(super) fn map(&mut self) -> Result<Mapped, MemoryError> {
        if self.done == 0 && self.try_hugetlb {
            self.check_hugetlb_limit()?;
        }
        let (mapping, locked) = match self.hugetlb_block() {
            Some(Ok(mapping)) => (mapping, true),
            Some(Err(errno)) if self.config.pages == PagePolicy::Required => {
                return Err(self.hugepages_missing(errno));
            }
            Some(Err(errno)) => {
                self.try_hugetlb = false;
                let warning = self.hugepages_warning(errno);
                self.warnings.push(warning);
                self.ordinary_block()?
            }
            None => self.ordinary_block()?,
        };
        let kind = mapping.kind();
        let hugetlb = kind == PageKind::HugeTlb;
        self.done += 1;
        self.hugetlb_blocks += usize::from(hugetlb);
        let huge_bytes = if hugetlb { mapping.bytes() } else { 0 };
        Ok(Mapped { mapping, kind, huge_bytes, locked, by_node: BTreeMap::new(), fresh: true })
    }

    /// A control group's limit on hugepages shows only when pages are touched, and then costs all that was touched
    /// before; so it is looked at first.
    fn check_hugetlb_limit(&mut self) -> Result<(), MemoryError> {
        let needed_bytes = (self.block_count * self.config.block_bytes) as u64;
        let limit = Machine::here().group_hugetlb(self.hugetlb_page_bytes);
        let Some(limit) = limit.filter(|limit| limit.available_bytes < needed_bytes) else { return Ok(()) };
        let (available_bytes, limit) = (limit.available_bytes, format!("what is left below {}", limit.file));
        if self.config.pages == PagePolicy::Required {
            return Err(MemoryError::NotEnoughMemory { needed_bytes, available_bytes, limit });
        }
        self.warnings.push(format!(
            "{needed_bytes} bytes of explicit hugepages are wanted, {limit} is {available_bytes} bytes: the rest \
             comes from other pages; raise the limit"
        ));
        self.hugetlb_left_bytes = Some(available_bytes);
        Ok(())
    }

    /// The first rung; `None` if it is not to be tried.
    fn hugetlb_block(&mut self) -> Option<Result<Mapping, i32>> {
        let block_bytes = self.config.block_bytes as u64;
        if !self.try_hugetlb || self.hugetlb_left_bytes.is_some_and(|left| left < block_bytes) {
            return None;
        }
        self.hugetlb_left_bytes = self.hugetlb_left_bytes.map(|left| left - block_bytes);
        let mapping = Mapping::hugetlb(self.config.block_bytes, self.hugetlb_page_bytes);
        // The pool's pages are reserved by now, but a control group may still refuse them. MADV_DONTFORK is
        // part of the rung: a kernel that will not do it for hugetlb may do it for ordinary memory.
        Some(mapping.and_then(|mapping| {
            if let Err(MemoryError::Advise { errno, .. }) = mapping.keep_private() {
                return Err(errno);
            }
            self.ask_for_node(&mapping);
            self.timed_populate(&mapping)?;
            Ok(mapping)
        }))
    }

    /// The other rungs: transparent hugepages if the policy wants them and the kernel has them, base pages
    /// where it gives none. Which of the two it was is read from smaps when all blocks are there. Says besides
    /// whether the block is locked.
    fn ordinary_block(&mut self) -> Result<(Mapping, bool), MemoryError> {
        let bytes = self.config.block_bytes;
        self.check_memory()?;
        let transparent = self.config.pages != PagePolicy::Off;
        let align_bytes = if transparent { self.transparent_page_bytes.min(bytes) } else { 0 };
        let mapping = Mapping::anonymous(bytes, align_bytes)?;
        mapping.keep_private()?;
        mapping.want_transparent(transparent);
        // Before the lock, which touches.
        self.ask_for_node(&mapping);
        // The lock comes first: a limit that is too small shows before anything is zeroed, and pages that are
        // born locked need no second walk over them (about 150 ms per GiB of base pages).
        let locked = self.lock(&mapping)?;
        self.timed_populate(&mapping).map_err(|errno| MemoryError::Populate { bytes, errno })?;
        Ok((mapping, locked))
    }

    /// Refuses blocks that cannot fit before the kernel starts to kill processes for them.
    fn check_memory(&mut self) -> Result<(), MemoryError> {
        if self.unchecked_bytes < MEMORY_CHECK_BYTES {
            self.unchecked_bytes += self.config.block_bytes;
            return Ok(());
        }
        self.unchecked_bytes = self.config.block_bytes;
        let needed_bytes = (self.block_count - self.done) as u64 * self.config.block_bytes as u64;
        match procfs::memory_limit() {
            Some((available_bytes, limit)) if available_bytes < needed_bytes => {
                Err(MemoryError::NotEnoughMemory { needed_bytes, available_bytes, limit })
            }
            _ => Ok(()),
        }
    }

    /// Asks for the node before anything is touched. A refusal is a warning, once: the first touch, by a thread on
    /// that node, usually does the same.
    fn ask_for_node(&mut self, mapping: &Mapping) {
        let Some(node) = self.try_node else { return };
        if let Err(errno) = numa::prefer(mapping.base(), mapping.bytes(), node) {
            self.try_node = None;
            self.warnings.push(format!(
                "memory cannot be asked for on NUMA node {node} (mbind: {}): the first touch decides; in a \
                 container allow mbind in the seccomp profile, or set `numa` to off",
                errno_text(errno)
            ));
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
            return Ok(false);
        }
        let started = Instant::now();
        let result = memlock::lock(mapping.base(), mapping.bytes());
        self.populating += started.elapsed();
        let Err(errno) = result else { return Ok(true) };
        // All that is not on explicit hugepages has to be locked, with this block as the first of the rest.
        let ordinary_blocks = self.block_count - self.hugetlb_blocks;
        let needed_bytes = (self.other_bytes + ordinary_blocks * self.config.block_bytes) as u64;
        let limit = memlock_limit();
        if self.config.lock == LockPolicy::Required {
            return Err(MemoryError::Lock { needed_bytes, limit, errno });
        }
        self.try_lock = false;
        let reason = lock_advice(needed_bytes, &limit, errno);
        self.warnings.push(format!("the arena is not locked into memory: {reason}"));
        self.not_locked = Some(reason);
        Ok(false)
    }

    /// Asks the kernel where the memory of the new ones among `blocks` really is. Returns the warnings, and why
    /// something is not locked.
    pub(super) fn look_into<'a>(
        mut self,
        blocks: impl Iterator<Item = &'a mut Mapped>,
    ) -> (Vec<String>, Option<String>) {
        let mut fresh: Vec<&mut Mapped> = blocks.filter(|mapped| mapped.fresh).collect();
        self.look_into_smaps(&mut fresh);
        self.look_for_nodes(&mut fresh);
        fresh.into_iter().for_each(|mapped| mapped.fresh = false);
        (self.warnings, self.not_locked)
    }

    /// Sorts the ordinary blocks into transparent hugepages and base pages.
    fn look_into_smaps(&mut self, fresh: &mut [&mut Mapped]) {
        if self.config.pages == PagePolicy::Off {
            return;
        }
        let ordinary = || fresh.iter().filter(|mapped| !mapped.is_hugetlb());
        let ranges: Vec<(usize, usize)> = ordinary().map(|mapped| mapped.address_range()).collect();
        if ranges.is_empty() {
            return;
        }
        let mut found = procfs::huge_bytes_in(&ranges).into_iter();
        let mut base_bytes = 0;
        for mapped in fresh.iter_mut().filter(|mapped| !mapped.is_hugetlb()) {
            mapped.huge_bytes = found.next().unwrap_or(0).min(mapped.mapping.bytes());
            if mapped.huge_bytes > 0 {
                mapped.kind = PageKind::Transparent;
            }
            base_bytes += mapped.mapping.bytes() - mapped.huge_bytes;
        }
        if base_bytes > 0 {
            let reason = match thp_mode() {
                ThpMode::Never => {
                    "transparent hugepages are off: `echo madvise > /sys/kernel/mm/transparent_hugepage/enabled`"
                }
                ThpMode::Unavailable => "the kernel has no transparent hugepages",
                _ => "the kernel found no more free hugepages: memory is fragmented or nearly full",
            };
            self.warnings.push(format!("{base_bytes} bytes are on base pages: {reason}"));
        }
    }

    /// Asks the kernel on which nodes the memory lies.
    fn look_for_nodes(&mut self, fresh: &mut [&mut Mapped]) {
        let ranges: Vec<(usize, usize)> = fresh.iter().map(|mapped| mapped.address_range()).collect();
        let explicit = fresh.iter().all(|mapped| mapped.is_hugetlb());
        let page_bytes = if explicit { self.hugetlb_page_bytes } else { 0 };
        for (mapped, by_node) in fresh.iter_mut().zip(numa::bytes_by_node(&ranges, page_bytes)) {
            mapped.by_node = by_node;
        }
        let by_node = sum_by_node(fresh.iter().map(|mapped| &mapped.by_node));
        self.warnings.extend(self.config.node.and_then(|node| elsewhere(node, &by_node)));
    }

    fn hugepages_missing(&self, errno: i32) -> MemoryError {
        let bytes = self.block_count * self.config.block_bytes;
        MemoryError::Hugepages {
            block: self.done,
            block_count: self.block_count,
            needed_pages: (bytes / self.hugetlb_page_bytes.max(1)) as u64,
            pool: hugepage_pool(),
            errno,
        }
    }

    fn hugepages_warning(&self, errno: i32) -> String {
        let HugepagePool { page_bytes, total, free, reserved } = hugepage_pool();
        let (block, block_count) = (self.done, self.block_count);
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

impl std::fmt::Debug for Mapper {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Mapper { block_count, done, .. } = self;
        f.debug_struct("Mapper").field("block_count", block_count).field("done", done).finish_non_exhaustive()
    }
}

/// Bytes on each node, over several blocks.
pub(super) fn sum_by_node<'a>(
    blocks: impl Iterator<Item = &'a BTreeMap<u32, usize>>,
) -> BTreeMap<u32, usize> {
    let mut sum = BTreeMap::new();
    for (&node, &bytes) in blocks.flatten() {
        *sum.entry(node).or_insert(0) += bytes;
    }
    sum
}

/// The warning that memory lies on other nodes than its shard's core does.
fn elsewhere(node: u32, by_node: &BTreeMap<u32, usize>) -> Option<String> {
    let others: Vec<String> = by_node
        .iter()
        .filter(|&(&other, &bytes)| other != node && bytes > 0)
        .map(|(other, bytes)| format!("{bytes} bytes on node {other}"))
        .collect();
    (!others.is_empty()).then(|| {
        format!(
            "the shard's core is on NUMA node {node}, but of its memory are {}: node {node} had no more free memory \
             or hugepages (/sys/devices/system/node/node{node}/hugepages), or `numactl` or a cpuset says otherwise",
            others.join(", ")
        )
    })
}

/// Number of NUMA nodes; 1 if the kernel does not say. Blocking: reads a few files in `/sys`.
pub(super) fn machine_nodes() -> usize {
    Machine::here().topology().nodes().len().max(1)
}

pub(super) fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_on_another_node_is_a_warning_that_says_how_much() {
        let blocks = [BTreeMap::from([(0, 5), (1, 7)]), BTreeMap::from([(1, 3)]), BTreeMap::new()];
        let by_node = sum_by_node(blocks.iter());
        assert_eq!(by_node, BTreeMap::from([(0, 5), (1, 10)]));
        let warning = elsewhere(0, &by_node).unwrap();
        assert!(warning.contains("on NUMA node 0") && warning.contains("10 bytes on node 1"), "{warning}");
        assert!(!warning.contains("5 bytes"), "{warning}");
        assert_eq!(elsewhere(0, &BTreeMap::from([(0, 5)])), None);
        assert_eq!(elsewhere(3, &BTreeMap::new()), None, "the kernel did not say");
    }
}
