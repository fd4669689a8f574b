//! Pinned memory: the page ladder, blocks, extents and fast copies.
//!
//! An [`Arena`] owns a shard's blocks: pinned mappings of equal size, each from the best rung of the page
//! ladder that the machine gives (explicit hugepages, transparent hugepages, base pages). An
//! [`ExtentAllocator`] deals out runs of 4 KiB granules of those blocks as [`Extent`]s; it is pure
//! arithmetic and touches none of the memory. [`copy`] moves bytes with the instructions that are fastest
//! on this machine.
//!
//! The module must not know what the bytes mean: no keys, values, shards or sockets. It tells what it
//! obtained as a value ([`ArenaReport`]) and never falls back silently.
//!
//! | file | what |
//! |---|---|
//! | `config.rs` | policies and sizes, and what is allowed for them |
//! | `arena.rs` | the blocks of one shard, added and taken out, and the report on them |
//! | `mapper.rs` | blocks mapped down the ladder, and warnings |
//! | `pages.rs` | one block's mapping: a rung of the ladder, populated |
//! | `numa.rs` | nodes: asked for, and read back |
//! | `memlock.rs` | `mlock` and RLIMIT_MEMLOCK |
//! | `procfs.rs` | what the kernel says: hugepage pool, THP, smaps, free memory |
//! | `extents.rs` | [`Extent`] and the small list of them |
//! | `allocator.rs`, `allocator_blocks.rs`, `bins.rs` | best fit over granules; blocks that come and go |
//! | `copy.rs`, `copy/` | the copying primitive, per instruction set, and its calibration |

mod allocator;
mod arena;
mod bins;
mod config;
pub mod copy;
mod error;
mod extents;
mod mapper;
mod memlock;
mod numa;
mod pages;
mod procfs;

pub use allocator::{BlockState, ExtentAllocator};
pub use arena::{Arena, ArenaReport, Block};
pub use config::{ArenaConfig, LockPolicy, MAX_BLOCK_BYTES, MIN_BLOCK_BYTES, NumaPolicy, PageKind, PagePolicy};
pub use error::MemoryError;
pub use extents::{Extent, ExtentList};
pub use mapper::Mapper;
pub use memlock::{MemlockLimit, memlock_limit};
pub use procfs::{HugepagePool, ThpMode, hugepage_pool, thp_mode};

/// Unit of allocation in bytes: every extent starts at a multiple of it and is a multiple of it long.
///
/// It does not depend on the kernel's page size, so that layouts are the same on kernels with 4, 16 and
/// 64 KiB pages.
pub const GRANULE_BYTES: usize = 4096;

/// Granules that `bytes` bytes take: rounded up, 0 for 0.
pub fn granules_for(bytes: u64) -> u64 {
    bytes.div_ceil(GRANULE_BYTES as u64)
}
