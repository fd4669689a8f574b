//! A configuration built step by step and checked as a whole.

use super::{Admission, Config, TransportKind};
use crate::memory::{LockPolicy, NumaPolicy, PagePolicy};
use crate::namespace::{NamespaceMode, NamespaceSettings};
use crate::policy::PolicyKind;
use crate::{Address, Result};
use std::path::PathBuf;

/// Builds a [`Config`]: one method per setting, named as the field that documents it.
///
/// ```
/// use hotslice::{Cache, Config, NamespaceMode, NamespaceSettings};
///
/// let config = Config::builder(64 << 20)
///     .shards(2)
///     .origin(vec!["127.0.0.1:7110".parse()?])
///     .namespace("scratch", NamespaceSettings { mode: NamespaceMode::Ttl { ttl_ms: 5000 }, quota_bytes: 8 << 20 })
///     .build()?;
/// let cache = Cache::open(config)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
#[must_use = "a builder builds nothing before `build`"]
pub struct ConfigBuilder(Config);

macro_rules! setters {
    ($($field:ident: $type:ty),* $(,)?) => {
        impl ConfigBuilder {
            $(
                #[doc = concat!("Sets [`Config::", stringify!($field), "`].")]
                pub fn $field(mut self, $field: $type) -> Self {
                    self.0.$field = $field;
                    self
                }
            )*
        }

        // Fails to compile when a field is left out.
        const _: fn(Config) = |config| {
            let Config { capacity_bytes: _, namespaces: _, secret_file: _, $($field: _),* } = config;
        };
    };
}

setters! {
    capacity_max_bytes: u64,
    block_bytes: u64,
    pages: PagePolicy,
    lock: LockPolicy,
    register: LockPolicy,
    transport: TransportKind,
    numa: NumaPolicy,
    shards: usize,
    cores: Vec<usize>,
    policy: PolicyKind,
    admission: Admission,
    entries_max: u64,
    origin: Vec<Address>,
    lanes_per_peer: usize,
    lane_depth: usize,
    stripe_bytes: u64,
    shards_per_value: usize,
    receive_bytes: u64,
    connect_timeout_ms: u64,
    receive_timeout_ms: u64,
    keepalive_ms: u64,
    fill_timeout_ms: u64,
    absent_ttl_ms: u64,
    backoff_min_ms: u64,
    backoff_max_ms: u64,
    namespace_mode: NamespaceMode,
    request_ring: usize,
    spin_us: u64,
}

impl ConfigBuilder {
    pub(super) fn new(capacity_bytes: u64) -> Self {
        Self(Config::new(capacity_bytes))
    }

    /// Sets [`Config::secret_file`].
    pub fn secret_file(mut self, path: impl Into<PathBuf>) -> Self {
        self.0.secret_file = Some(path.into());
        self
    }

    /// Gives a namespace settings of its own in [`Config::namespaces`].
    pub fn namespace(mut self, name: impl Into<String>, settings: NamespaceSettings) -> Self {
        self.0.namespaces.insert(name.into(), settings);
        self
    }

    /// The configuration, checked as a whole.
    pub fn build(self) -> Result<Config> {
        self.0.check()?;
        Ok(self.0)
    }
}
