//! Eviction order.
//!
//! A policy knows slots by number, with a size in granules and a hash of the key; it must not know memory,
//! keys' meaning or time. It is told of insertions and removals, and asked for a victim when memory is
//! needed, and only then: while there is room nothing is evicted, whatever the policy thinks of it, so a
//! batch of first-time values as large as the whole cache stays. Hits never call into it: a hit raises a
//! counter in the slot, which the policy reads and clears through [`Slots`] when it looks for a victim.
//!
//! One shard's thread owns a policy: no locks and no atomics in here, and nothing blocks. All memory is
//! taken at start: 16 bytes per slot for the queues, and what the policy's own documentation says.

mod clock;
mod ghosts;
mod list;
mod s3fifo;

pub use clock::Clock;
pub use s3fifo::{S3Fifo, S3FifoShape};

use serde::{Deserialize, Serialize};

/// Most hits that count between two looks at a slot; the counter in the slot saturates there.
pub const HITS_MAX: u8 = 3;

/// What a policy may ask of the table.
pub trait Slots {
    /// Hits since last asked, saturating at [`HITS_MAX`]; clears the count.
    fn take_hits(&mut self, slot: u32) -> u8;

    /// Takes the slot away from readers. False if it is pinned: then nothing has changed.
    fn try_evict(&mut self, slot: u32) -> bool;
}

/// An order of eviction.
///
/// Slots are numbered from zero to less than the number given to [`build`].
pub trait Policy: Send {
    /// Its name in the configuration.
    fn name(&self) -> &'static str;

    /// A value was published in `slot`, which the policy does not have. Constant time.
    ///
    /// # Panics
    ///
    /// If it has the slot already, or the number is out of range.
    fn inserted(&mut self, slot: u32, granules: u32, key_hash: u64);

    /// The slot left for another reason than [`Policy::evict`]. Slots that it does not have are ignored.
    /// Constant time.
    ///
    /// # Panics
    ///
    /// If the number is out of range.
    fn removed(&mut self, slot: u32);

    /// Evicts one slot and returns it.
    ///
    /// `None` says that it has none, or that each was found pinned during this call. Hits that other threads
    /// count meanwhile cannot make it fail. Looks at each slot a bounded number of times (which
    /// the policies name), so the time is at worst linear in the number of slots. Pinned slots
    /// that it meets move to the new end of their queue.
    fn evict(&mut self, slots: &mut dyn Slots) -> Option<u32>;

    /// The memory that values have together is from now on `capacity_granules`.
    fn resized(&mut self, capacity_granules: u64) {
        let _ = capacity_granules;
    }

    /// Number of slots it has.
    fn len(&self) -> usize;

    /// True if it has none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Granules of all slots it has.
    fn granules(&self) -> u64;

    /// Checks its invariants, in linear time; for tests and fuzzing.
    ///
    /// # Panics
    ///
    /// If one does not hold.
    fn validate(&self);
}

/// Which policy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum PolicyKind {
    /// [`S3Fifo`]: new values must prove themselves, so that a scan does not empty the cache.
    #[default]
    #[serde(rename = "s3fifo")]
    S3Fifo,
    /// [`Clock`]: close to least recently used.
    #[serde(rename = "lru")]
    Clock,
}

impl std::str::FromStr for PolicyKind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "s3fifo" => Ok(Self::S3Fifo),
            "lru" => Ok(Self::Clock),
            _ => Err(format!("`{text}` is neither s3fifo nor lru")),
        }
    }
}

impl std::fmt::Display for PolicyKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::S3Fifo => "s3fifo",
            Self::Clock => "lru",
        })
    }
}

/// A policy for up to `slots` slots over `capacity_granules` of memory.
pub fn build(kind: PolicyKind, slots: u32, capacity_granules: u64) -> Box<dyn Policy> {
    match kind {
        PolicyKind::S3Fifo => Box::new(S3Fifo::new(slots, capacity_granules, S3FifoShape::default())),
        PolicyKind::Clock => Box::new(Clock::new(slots)),
    }
}

#[cfg(test)]
mod tests;
