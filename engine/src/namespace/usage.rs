//! What the values of each namespace take on one shard: counted by the shard, read by anybody, without a lock.

use super::NAMESPACES_MAX;
use crate::key::Namespace;
use crate::stats::Counter;
use std::sync::OnceLock;

const CHUNK: usize = 256;

/// What one namespace has on one shard.
#[derive(Default)]
pub(crate) struct Usage {
    /// Values that lookups can find.
    pub(crate) entries: Counter,
    /// Granules in use: by values found or not, by fills and by puts that are being written.
    pub(crate) granules: Counter,
}

/// By namespace; made as namespaces come up, and never moved.
pub(crate) struct Usages(Box<[OnceLock<Box<[Usage]>>]>);

impl Usages {
    pub(crate) fn new() -> Self {
        Self((0..NAMESPACES_MAX / CHUNK).map(|_| OnceLock::new()).collect())
    }

    /// Shard: the place to count in.
    pub(crate) fn of(&self, namespace: Namespace) -> &Usage {
        let number = namespace.0 as usize;
        let chunk = self.0[number / CHUNK].get_or_init(|| (0..CHUNK).map(|_| Usage::default()).collect());
        &chunk[number % CHUNK]
    }

    /// Anybody: what was counted, if the namespace ever had anything here.
    pub(crate) fn get(&self, namespace: Namespace) -> Option<&Usage> {
        let number = namespace.0 as usize;
        Some(&self.0[number / CHUNK].get()?[number % CHUNK])
    }
}
