//! Configuration: names, units, defaults and limits, from code, a TOML file or the environment.
//!
//! Every setting has one name: the field here, the key in the file, `HOTSLICE_<FIELD>` in the environment. A value
//! that is not allowed is an error that names the setting, the value and what is allowed. The environment goes before
//! the file, and the file before the defaults; [`Loaded`] says what came from where. Upstream Mooncake's variables are understood too; for those, and only for those, a value that
//! upstream calls invalid switches the cache off with a warning, as upstream documents.

mod builder;
mod load;
mod settings;
#[cfg(test)]
mod tests;

pub use builder::ConfigBuilder;
pub use load::{Loaded, SettingValue, Source};
pub use settings::parse_peers;

use crate::auth::Secret;
use crate::memory::{LockPolicy, NumaPolicy, PagePolicy};
use crate::policy::PolicyKind;
use crate::namespace::{NamespaceMode, NamespaceSettings, Namespaces};
use crate::size::format_bytes;
use crate::{Address, Error, Result};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

/// Whether fetched values stay.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Admission {
    /// A value is kept when it is first fetched.
    #[default]
    FirstMiss,
    /// Nothing is kept: a fetched or put value lives as long as the leases of those who waited for it. The
    /// engine without its cache, for comparisons.
    Off,
}

impl std::fmt::Display for Admission {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::FirstMiss => "first_miss",
            Self::Off => "off",
        })
    }
}

impl std::str::FromStr for Admission {
    type Err = ();

    fn from_str(text: &str) -> std::result::Result<Self, ()> {
        match text {
            "first_miss" => Ok(Self::FirstMiss),
            "off" => Ok(Self::Off),
            _ => Err(()),
        }
    }
}

/// What shards move bytes with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum TransportKind {
    /// io_uring where the kernel and the container allow it, else epoll, with a warning.
    #[default]
    Auto,
    /// io_uring or an error.
    IoUring,
    /// epoll.
    Epoll,
}

impl std::fmt::Display for TransportKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::IoUring => "io_uring",
            Self::Epoll => "epoll",
        })
    }
}

impl std::str::FromStr for TransportKind {
    type Err = ();

    fn from_str(text: &str) -> std::result::Result<Self, ()> {
        match text {
            "auto" => Ok(Self::Auto),
            "io_uring" => Ok(Self::IoUring),
            "epoll" => Ok(Self::Epoll),
            _ => Err(()),
        }
    }
}

/// Settings of a [`Cache`](crate::Cache). Start from [`Config::new`], [`Config::builder`], [`Config::from_env`] or [`Config::load`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Config {
    /// Bytes of all arenas together. Rounded down to whole blocks per shard; at least one block per shard.
    pub capacity_bytes: u64,
    /// Most bytes that [`Cache::resize`](crate::Cache::resize) may grow the arenas to; 0 (default):
    /// `capacity_bytes`. Tables and bookkeeping are sized for it at start (about 0.3 % of it, and the slots); memory
    /// is mapped only for what the capacity is.
    pub capacity_max_bytes: u64,
    /// Bytes of one block: a power of two, a multiple of the hugepage, 2 MiB to 1 GiB (64 KiB to 1 GiB with
    /// `pages = off`). Default 16 MiB.
    pub block_bytes: u64,
    /// Where pages come from. Default `preferred`: explicit hugepages, else transparent ones, else 4 KiB.
    pub pages: PagePolicy,
    /// Whether arenas are locked in memory. Default `preferred`: a refusal is a warning.
    pub lock: LockPolicy,
    /// Whether arenas are registered with the shards' rings. Default `preferred`: a refusal is a warning.
    pub register: LockPolicy,
    /// What shards move bytes with. Default `auto`: io_uring, else epoll.
    pub transport: TransportKind,
    /// Whether an arena's memory is asked for on the NUMA node of its shard's core. Default `local`: it is, where
    /// there is more than one node, and a refusal is a warning.
    pub numa: NumaPolicy,
    /// Number of shards (threads), 1 to 256. Default 1.
    pub shards: usize,
    /// Cores to pin the shards to, one per shard; empty takes them from those that the process may run on, from
    /// each NUMA node in turn, if there are at least that many. A process that may run on one core pins nothing.
    pub cores: Vec<usize>,
    /// Eviction policy. Default `s3fifo`.
    pub policy: PolicyKind,
    /// Whether fetched values stay. Default `first_miss`.
    pub admission: Admission,
    /// Most values that the cache can hold, over all shards; never more than one per granule of 4 KiB. 0 (default)
    /// means that many, at most 1,048,576 per shard.
    pub entries_max: u64,
    /// Slice servers that hold the values; a key lives on one of them, chosen by rendezvous hashing. Empty:
    /// no origin, a purely local cache.
    pub origin: Vec<Address>,
    /// File with the secret that the slice servers demand; read and checked when the cache opens. `None`: no secret.
    pub secret_file: Option<PathBuf>,
    /// Connections of one shard to one peer, 1 to 64; opened as needed. Default 2.
    pub lanes_per_peer: usize,
    /// Requests in flight on one lane, 1 to 1024. Default 16.
    pub lane_depth: usize,
    /// Bytes of a large value that are asked for at a time, 1 MiB to 1 GiB; several such parts are on their way at once,
    /// over several lanes. Default 4 MiB.
    pub stripe_bytes: u64,
    /// Shards of one NUMA node that receive one large value together, 1 to 256: beside the one that holds it, those that
    /// have nothing to do. Helps where one core or one connection is the limit; costs time where the peer or the callers
    /// need the same cores. Default 1.
    pub shards_per_value: usize,
    /// Bytes received by one operation at most, 64 KiB to 1 GiB. Default 1 MiB.
    pub receive_bytes: u64,
    /// Milliseconds for a connection to be made. Default 2000.
    pub connect_timeout_ms: u64,
    /// Milliseconds within which a peer that owes bytes must complete one receive operation (of up to
    /// `receive_bytes`); a slower peer's lane is given up. Default 10000.
    pub receive_timeout_ms: u64,
    /// Milliseconds after which an idle lane is asked for a sign of life, 0 to 86,400,000; one that gives none within
    /// `connect_timeout_ms` is replaced, before anybody needs it. 0: lanes are left alone. Default 15000, below what
    /// firewalls and address translators forget connections after.
    pub keepalive_ms: u64,
    /// Milliseconds for a fill that nobody with a deadline waits for (a prefetch). Default 30000.
    pub fill_timeout_ms: u64,
    /// Milliseconds for which the origin's word that it has no such key is good, 0 to 60,000; 0 asks every time.
    /// A put or an invalidation through this cache ends it at once. Default 100.
    pub absent_ttl_ms: u64,
    /// Milliseconds before the second attempt to reach a peer that refused; doubles up to
    /// `backoff_max_ms`. Default 10.
    pub backoff_min_ms: u64,
    /// Longest pause between attempts, in milliseconds. Default 1000.
    pub backoff_max_ms: u64,
    /// What bounds the age of values in namespaces that have no settings of their own. Default `immutable`: nothing.
    pub namespace_mode: NamespaceMode,
    /// Namespaces with settings of their own, by name. [`Cache::set_namespace`](crate::Cache::set_namespace) changes
    /// them while the cache works.
    pub namespaces: BTreeMap<String, NamespaceSettings>,
    /// Calls that may wait in one shard's request ring, 2 to 65536. Default 1024.
    pub request_ring: usize,
    /// Microseconds that an idle shard polls before it sleeps. Default 0: polling steals time from callers
    /// where cores are few. Taken for 0, with a warning, where the process may run on one core only.
    pub spin_us: u64,
}

impl Config {
    /// A configuration of `capacity_bytes` with defaults for everything else, and no origin.
    pub fn new(capacity_bytes: u64) -> Self {
        Self {
            capacity_bytes,
            capacity_max_bytes: 0,
            block_bytes: 16 << 20,
            pages: PagePolicy::Preferred,
            lock: LockPolicy::Preferred,
            register: LockPolicy::Preferred,
            numa: NumaPolicy::Local,
            shards: 1,
            cores: Vec::new(),
            transport: TransportKind::Auto,
            policy: PolicyKind::S3Fifo,
            admission: Admission::FirstMiss,
            entries_max: 0,
            origin: Vec::new(),
            secret_file: None,
            lanes_per_peer: 2,
            lane_depth: 16,
            stripe_bytes: 4 << 20,
            shards_per_value: 1,
            receive_bytes: 1 << 20,
            connect_timeout_ms: 2_000,
            receive_timeout_ms: 10_000,
            keepalive_ms: 15_000,
            fill_timeout_ms: 30_000,
            absent_ttl_ms: 100,
            backoff_min_ms: 10,
            backoff_max_ms: 1_000,
            namespace_mode: NamespaceMode::Immutable,
            namespaces: BTreeMap::new(),
            request_ring: 1024,
            spin_us: 0,
        }
    }

    /// The same as a builder, which checks the whole at the end.
    pub fn builder(capacity_bytes: u64) -> ConfigBuilder {
        ConfigBuilder::new(capacity_bytes)
    }

    /// Checks every setting against its limits. [`Cache::open`](crate::Cache::open) does it too.
    pub fn check(&self) -> Result<()> {
        range("shards", self.shards as u64, 1, 256)?;
        range("lanes_per_peer", self.lanes_per_peer as u64, 1, 64)?;
        range("lane_depth", self.lane_depth as u64, 1, 1024)?;
        range("stripe_bytes", self.stripe_bytes, 1 << 20, 1 << 30)?;
        range("shards_per_value", self.shards_per_value as u64, 1, 256)?;
        range("receive_bytes", self.receive_bytes, 64 << 10, 1 << 30)?;
        for (setting, value) in [
            ("connect_timeout_ms", self.connect_timeout_ms),
            ("receive_timeout_ms", self.receive_timeout_ms),
            ("fill_timeout_ms", self.fill_timeout_ms),
            ("backoff_min_ms", self.backoff_min_ms),
            ("backoff_max_ms", self.backoff_max_ms),
        ] {
            range(setting, value, 1, 86_400_000)?;
        }
        if self.backoff_max_ms < self.backoff_min_ms {
            return Err(config_error(
                "backoff_max_ms",
                self.backoff_max_ms,
                format!("at least backoff_min_ms, which is {}", self.backoff_min_ms),
            ));
        }
        if let Some(peer) = self.origin.iter().find(|peer| peer.tcp().is_some_and(|tcp| tcp.port() == 0)) {
            return Err(config_error("origin", peer, "a port from 1 to 65535"));
        }
        range("keepalive_ms", self.keepalive_ms, 0, 86_400_000)?;
        range("absent_ttl_ms", self.absent_ttl_ms, 0, 60_000)?;
        self.namespace_mode.check()?;
        for (name, settings) in &self.namespaces {
            settings.check_for(name)?;
            // Names are given out for the life of the process; a name that cannot be had is an error here.
            Namespaces::of_process().get(name)?;
        }
        range("request_ring", self.request_ring as u64, 2, 65_536)?;
        range("spin_us", self.spin_us, 0, 1_000_000)?;
        range("entries_max", self.entries_max, 0, u64::from(u32::MAX - 1) * self.shards as u64)?;
        if self.origin.len() > PEERS_MAX {
            return Err(config_error("origin", self.origin.len(), format!("at most {PEERS_MAX} peers")));
        }
        if !self.cores.is_empty() && self.cores.len() != self.shards {
            return Err(config_error(
                "cores",
                format!("{:?}", self.cores),
                format!("empty, or one core for each of the {} shards", self.shards),
            ));
        }
        if self.capacity_max_bytes != 0 && self.capacity_max_bytes < self.capacity_bytes {
            return Err(config_error(
                "capacity_max_bytes",
                format_bytes(self.capacity_max_bytes),
                format!("0, or at least capacity_bytes, which is {}", format_bytes(self.capacity_bytes)),
            ));
        }
        self.shard_blocks(self.capacity_bytes).map(drop)
    }

    /// Blocks of each shard if the cache has `capacity_bytes`.
    pub(crate) fn shard_blocks(&self, capacity_bytes: u64) -> Result<u64> {
        let most = self.capacity_bytes_max();
        if capacity_bytes > most {
            return Err(config_error(
                "capacity_bytes",
                format_bytes(capacity_bytes),
                format!("at most capacity_max_bytes, which is {} and cannot be changed", format_bytes(most)),
            ));
        }
        match capacity_bytes / self.shards.max(1) as u64 / self.block_bytes.max(1) {
            0 => Err(config_error(
                "capacity_bytes",
                format_bytes(capacity_bytes),
                format!(
                    "at least one block of {} for each of {} shards",
                    format_bytes(self.block_bytes),
                    self.shards
                ),
            )),
            blocks => Ok(blocks),
        }
    }

    /// Most bytes that the arenas may ever have.
    pub(crate) fn capacity_bytes_max(&self) -> u64 {
        self.capacity_max_bytes.max(self.capacity_bytes)
    }

    /// Most bytes of one shard's arena before rounding down to whole blocks.
    pub(crate) fn shard_bytes_max(&self) -> u64 {
        self.capacity_bytes_max() / self.shards.max(1) as u64
    }

    /// The secret that `secret_file` holds.
    pub(crate) fn secret(&self) -> Result<Option<Secret>> {
        self.secret_file.as_deref().map(Secret::read).transpose()
    }

    /// Bytes of one shard's arena before rounding down to whole blocks.
    pub(crate) fn shard_bytes(&self) -> u64 {
        self.capacity_bytes / self.shards.max(1) as u64
    }

    /// Slots of one shard.
    pub(crate) fn shard_slots(&self, arena_bytes: u64) -> u32 {
        let granules = arena_bytes / crate::memory::GRANULE_BYTES as u64;
        let slots = match self.entries_max {
            0 => granules.min(SLOTS_DEFAULT_MAX),
            n => n.div_ceil(self.shards as u64).min(granules),
        };
        slots.clamp(1, u64::from(u32::MAX - 1)) as u32
    }

    pub(crate) fn receive_timeout(&self) -> Duration {
        Duration::from_millis(self.receive_timeout_ms)
    }
}

const PEERS_MAX: usize = 4096;
const SLOTS_DEFAULT_MAX: u64 = 1 << 20;

pub(crate) fn config_error(setting: &'static str, value: impl ToString, allowed: impl Into<String>) -> Error {
    Error::Config { setting, value: value.to_string(), allowed: allowed.into() }
}

pub(crate) fn range(setting: &'static str, value: u64, min: u64, max: u64) -> Result<()> {
    if (min..=max).contains(&value) {
        return Ok(());
    }
    Err(config_error(setting, value, format!("{min} to {max}")))
}
