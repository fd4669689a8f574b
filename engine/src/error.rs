//! The one error type of the public surface.
//!
//! An error is about one key, one setting or the whole cache, and says which; it carries what a
//! person needs to act (peer, errno, limit, setting to change). It is `Clone` because one failed
//! fill answers every waiter that joined it.

use crate::Address;
use std::sync::Arc;
use std::time::Duration;

/// `Result` with [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why an operation did not deliver.
///
/// *Absent is not an error*: a key that the origin says it does not have is `Ok(None)`. Everything
/// here means *unknown*: the value may exist, but this call cannot say so.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A setting is out of range or contradicts another.
    #[error("setting `{setting}` is {value}: {allowed}")]
    Config {
        /// Name of the setting as in the configuration table.
        setting: &'static str,
        /// The value that was given.
        value: String,
        /// What is allowed, as the end of the sentence.
        allowed: String,
    },
    /// The key or namespace is empty or too long.
    #[error("key of {len} bytes: a key has 1 to {max} bytes")]
    KeyLength {
        /// Length that was given, in bytes.
        len: usize,
        /// Longest key allowed, in bytes.
        max: usize,
    },
    /// The namespace name is too long or the namespace table is full.
    #[error("namespace `{name}`: {allowed}")]
    Namespace {
        /// The name that was given.
        name: String,
        /// What is allowed.
        allowed: String,
    },
    /// The value can never fit.
    #[error("value of {value_bytes} bytes cannot fit: a shard's arena holds {arena_bytes} bytes")]
    ValueTooLarge {
        /// Size of the value in bytes.
        value_bytes: u64,
        /// Size of the arena of the key's shard in bytes.
        arena_bytes: u64,
    },
    /// The value, or the values of a batch together, can never fit into what their namespace may take.
    #[error(
        "{value_bytes} bytes cannot fit into namespace `{namespace}`: of its quota_bytes, which are {quota_bytes}, a \
         shard has {share_bytes}"
    )]
    Quota {
        /// Name of the namespace.
        namespace: Arc<str>,
        /// Bytes that were needed.
        value_bytes: u64,
        /// The namespace's quota in bytes.
        quota_bytes: u64,
        /// The shard's share of it in whole granules.
        share_bytes: u64,
    },
    /// The values of a batch can never be held together.
    #[error(
        "leases on all {values} values of a batch cannot be held at once: they take {batch_bytes} bytes of a shard's \
         arena, which has {arena_bytes}; ask for fewer, or use a copying form"
    )]
    BatchTooLarge {
        /// Keys of the batch on the shard.
        values: usize,
        /// Bytes of memory that their values take, each once.
        batch_bytes: u64,
        /// Size of the shard's arena in bytes.
        arena_bytes: u64,
    },
    /// The caller's buffers are smaller than the value (or range). Nothing was written.
    #[error("buffers hold {buffer_bytes} bytes, the value has {value_bytes}")]
    BufferTooSmall {
        /// Sum of the caller's buffers in bytes.
        buffer_bytes: u64,
        /// Bytes that were to be written.
        value_bytes: u64,
    },
    /// The range does not lie inside the value. Nothing was written.
    #[error("range {offset}+{len} is outside the value of {value_bytes} bytes")]
    RangeOutside {
        /// First byte asked for.
        offset: u64,
        /// Bytes asked for.
        len: u64,
        /// Length of the value in bytes.
        value_bytes: u64,
    },
    /// No memory could be had before the deadline because leases pin it: of the arena, or of what a namespace with a
    /// quota may take.
    #[error(
        "no room for {value_bytes} bytes before the deadline: {pinned_bytes} of {arena_bytes} bytes are \
         pinned by leases or fills in flight"
    )]
    Pinned {
        /// Bytes that were needed.
        value_bytes: u64,
        /// Bytes that could not be evicted.
        pinned_bytes: u64,
        /// Size of the arena in bytes.
        arena_bytes: u64,
    },
    /// The deadline passed before the value was there.
    #[error("deadline passed while {stage}")]
    DeadlinePassed {
        /// What was being waited for.
        stage: &'static str,
    },
    /// The peer cannot be reached, or went away and could not be reached again.
    #[error("peer {peer} is unreachable: {reason}")]
    PeerUnavailable {
        /// Address of the peer.
        peer: Address,
        /// What the kernel or the connection said.
        reason: Arc<str>,
    },
    /// The peer broke the protocol; its connection was closed.
    #[error("peer {peer} broke the protocol: {reason}")]
    Protocol {
        /// Address of the peer.
        peer: Address,
        /// What was wrong and what is allowed.
        reason: Arc<str>,
    },
    /// The peer refused the request.
    #[error("peer {peer} refused: {reason}")]
    Refused {
        /// Address of the peer.
        peer: Address,
        /// The peer's status in words.
        reason: Arc<str>,
    },
    /// The bytes that arrived do not have the checksum that the origin keeps for them.
    #[error("checksum mismatch from {peer}: CRC32C {got:#010x}, the origin says {want:#010x}")]
    Checksum {
        /// Address of the peer.
        peer: Address,
        /// Checksum of the received bytes.
        got: u32,
        /// Checksum the origin announced.
        want: u32,
    },
    /// The bytes of a cached value no longer have the checksum they were published with.
    #[error("cached bytes changed: CRC32C {got:#010x}, published with {want:#010x}")]
    Corrupt {
        /// Checksum of the bytes now.
        got: u32,
        /// Checksum at publication.
        want: u32,
    },
    /// Too many calls wait for the shard already.
    #[error("shard {shard} is overloaded: its request ring of {capacity} calls stayed full for {waited:?}")]
    Overloaded {
        /// Index of the shard.
        shard: usize,
        /// Capacity of its request ring in calls.
        capacity: usize,
        /// How long the call waited for a place.
        waited: Duration,
    },
    /// As many operations of a completion queue are under way as it was made for.
    #[error("{operations_max} operations are under way, which is all that this queue was made for")]
    TooManyOperations {
        /// What the queue was made for.
        operations_max: usize,
    },
    /// The caller cancelled the operation.
    #[error("the operation was cancelled")]
    Cancelled,
    /// The cache was shut down.
    #[error("the cache was shut down")]
    ShutDown,
    /// The process was forked after the cache was opened; a cache belongs to the process that opened it.
    #[error("this process was forked from the one that opened the cache; open a cache of its own here")]
    Forked,
    /// Memory for the cache could not be set up.
    #[error("memory: {0}")]
    Memory(Arc<crate::memory::MemoryError>),
    /// A shard could not start.
    #[error("shard {shard}: {reason}")]
    ShardStart {
        /// Index of the shard.
        shard: usize,
        /// What failed, and the setting to change.
        reason: Arc<str>,
    },
    /// A name could not be resolved, or another system call failed.
    #[error("{what}: {reason}")]
    System {
        /// What was attempted.
        what: String,
        /// What the system said.
        reason: Arc<str>,
    },
}

impl From<crate::memory::MemoryError> for Error {
    fn from(error: crate::memory::MemoryError) -> Self {
        Error::Memory(Arc::new(error))
    }
}

/// The error of a system call that just failed on this thread.
pub(crate) fn system(what: &str) -> Error {
    let error = std::io::Error::last_os_error();
    let hint = match error.raw_os_error() {
        Some(libc::EMFILE) => ": raise RLIMIT_NOFILE (ulimit -n, LimitNOFILE=)",
        Some(libc::ENFILE) => ": raise fs.file-max",
        _ => "",
    };
    Error::System { what: what.to_owned(), reason: format!("{error}{hint}").into() }
}
