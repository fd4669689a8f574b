//! Namespaces of a cache: names, settings, and what each has.

use super::core::Front;
use super::{Cache, count_of};
use crate::Result;
use crate::deadline::Deadline;
use crate::key::Namespace;
use crate::memory::GRANULE_BYTES;
use crate::namespace::mode::of_namespace;
use crate::namespace::{NamespaceSettings, Namespaces};
use crate::stats::NamespaceStats;
use std::time::Duration;

impl Cache {
    /// The namespace of this name, for use in keys. The empty name is [`Namespace::DEFAULT`].
    pub fn namespace(&self, name: &str) -> Result<Namespace> {
        Namespaces::of_process().get(name)
    }

    /// Changes the mode and the quota of a namespace of this cache, for the values that it has too. When it returns, every
    /// call that starts afterwards follows them; a quota that is lowered is met by eviction as far as leases allow, and
    /// otherwise before the namespace takes any more memory.
    ///
    /// Waits for every shard to take it in, which none of them delays.
    ///
    /// ```
    /// # use hotslice::{Cache, Config, NamespaceMode, NamespaceSettings};
    /// # let cache = Cache::open(Config::new(64 << 20))?;
    /// let tenant = cache.namespace("tenant-a")?;
    /// let mode = NamespaceMode::Ttl { ttl_ms: 5000 };
    /// cache.set_namespace(tenant, NamespaceSettings { mode, quota_bytes: 16 << 20 })?;
    /// assert_eq!(cache.namespace_stats(tenant).entries, 0);
    /// # Ok::<(), hotslice::Error>(())
    /// ```
    pub fn set_namespace(&self, namespace: Namespace, settings: NamespaceSettings) -> Result<()> {
        settings.check().map_err(|error| of_namespace(error, &Namespaces::of_process().name(namespace)))?;
        let deadline: Deadline = Duration::MAX.into();
        let pending = self.core.set_namespace(namespace, settings, deadline, Front::blocking())?;
        let mut result = Ok(());
        pending.finish(|_, answer| {
            if let Err(error) = count_of(answer) {
                result = Err(error);
            }
        });
        result
    }

    /// What a namespace has at this moment, over all shards. Never waits.
    pub fn namespace_stats(&self, namespace: Namespace) -> NamespaceStats {
        let mut stats = NamespaceStats::default();
        for usage in self.core.shards.iter().filter_map(|shared| shared.freshness.usages.get(namespace)) {
            stats.entries += usage.entries.get();
            stats.used_bytes += usage.granules.get() * GRANULE_BYTES as u64;
        }
        stats
    }
}
