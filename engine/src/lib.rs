//! hotslice: a node-local hot cache for the KV-cache slices of LLM inference.
//!
//! It keeps hot values in pinned hugepage blocks inside the inference process, fetches missing ones
//! over TCP with io_uring straight into those blocks, and hands them out as leases: pinned, read-only
//! views that an accelerator can DMA from.
//!
//! # Map of the modules
//!
//! Dependencies point downwards only; each module can be tested without the ones above it.
//!
//! | module | what it is | what it must not know |
//! |---|---|---|
//! | [`cache`] | the public engine: get, batch, put, invalidate, prefetch | system calls |
//! | [`shard`] | one core's thread: ring, lanes, fills, single flight | callers' threads |
//! | [`origin`] | where values come from: the slice server's addresses and its blocking client | the table |
//! | [`server`] | the slice server on tokio-uring | the cache |
//! | [`wire`] | protocol codecs, bytes in, events out | sockets |
//! | [`auth`] | proofs of a shared secret | sockets, frames |
//! | [`call`] | the waiter: completions of one call, deadline, wake-up | what is waited for |
//! | [`table`] | slots, lookup, pins: the loom-checked core | sockets, memory, keys' meaning |
//! | [`policy`] | eviction order: S3-FIFO and CLOCK | everything but slot numbers and sizes |
//! | [`memory`] | page ladder, blocks, extents, fast copies | keys |
//! | [`machine`] | cores, NUMA nodes and limits that this process was given | what they are used for |

// Built for loom too: what is model-checked. See `scripts/loom`.
pub(crate) mod call;
pub(crate) mod sync;
pub(crate) mod table;

macro_rules! not_in_models {
    ($($item:item)*) => { $(#[cfg(not(loom))] $item)* };
}

not_in_models! {
    mod address;
    pub mod auth;
    mod bell;
    pub mod cache;
    pub mod checksum;
    pub mod config;
    mod deadline;
    pub mod error;
    mod fork;
    pub mod key;
    pub mod machine;
    pub mod memory;
    mod namespace;
    pub mod origin;
    pub mod policy;
    mod random;
    #[cfg(doctest)]
    pub mod readme;
    pub mod server;
    pub mod shard;
    pub mod size;
    pub mod stats;
    pub mod wire;

    pub use address::{Address, AddressError, SOCKET_PATH_BYTES_MAX, SocketPath};
    pub use cache::{BatchFuture, Cache, GetFuture, Invalidate, PutFuture, Read, ReadRange, ReadScatter};
    pub use cache::{Resized, ShardResized};
    pub use cache::{Completion, CompletionQueue, OperationId, Outcome, Target};
    pub use config::{Admission, Config, ConfigBuilder, TransportKind};
    pub use deadline::Deadline;
    pub use error::{Error, Result};
    pub use key::{KEY_BYTES_MAX, Key, NAMESPACE_BYTES_MAX, Namespace};
    pub use namespace::{NamespaceMode, NamespaceSettings};
    pub use shard::{Lease, Segments, ShardReport, TransportReport};
    pub use stats::{NamespaceStats, Stats};
}
