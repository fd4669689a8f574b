//! Memory: where pages come from, blocks of an arena, extents in it, and copies out of it.
//!
//! * [`Arena`]: blocks from a ladder of page kinds, populated, locked, never inherited by a fork.
//! * [`ExtentAllocator`]: which granules of an arena are free. Pure arithmetic, no pointers.
//! * [`copy()`]: the fastest copy of large runs that this machine has.
//!
//! It knows nothing of keys, shards or sockets.

mod arena;
mod copy;
mod error;
mod extent;
mod extents;
mod limits;
mod pages;

pub use arena::{Arena, ArenaConfig, ArenaReport, Block};
pub use copy::{CopyMethod, LARGE_COPY_BYTES, copy, copy_with, fastest_copy};
pub use error::MemoryError;
pub use extent::{Extent, ExtentList};
pub use extents::ExtentAllocator;
pub use limits::{HugepagePool, MemlockLimit, hugepage_pool, memlock_limit, thp_mode};
pub use pages::{LockPolicy, PageKind, PagePolicy};

/// Bytes of one granule, the unit in which arenas are shared out.
pub const GRANULE_BYTES: usize = 4096;

/// Granules that hold `bytes`.
pub fn granules_for(bytes: u64) -> u64 {
    bytes.div_ceil(GRANULE_BYTES as u64)
}
