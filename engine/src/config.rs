//! Configuration: names, units, defaults and limits, from code or from the environment.
//!
//! Every setting has one name: the field here, `HOTSLICE_<FIELD>` in the environment, `--<field>` on the
//! command line. A value that is not allowed is an error that names the setting, the value and what is
//! allowed. Upstream Mooncake's variables are understood too; for those, and only for those, a value that
//! upstream calls invalid switches the cache off with a warning, as upstream documents.

use crate::memory::{LockPolicy, PagePolicy};
use crate::policy::PolicyKind;
use crate::size::{format_bytes, parse_bytes};
use crate::{Error, Result};
use std::net::{SocketAddr, ToSocketAddrs};
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

/// Settings of a [`Cache`](crate::Cache). Start from [`Config::new`] or [`Config::from_env`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Config {
    /// Bytes of all arenas together. Rounded down to whole blocks per shard; at least one block per shard.
    pub capacity_bytes: u64,
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
    /// Number of shards (threads), 1 to 256. Default 1.
    pub shards: usize,
    /// Cores to pin the shards to, one per shard; empty pins shard `i` to the `i`-th core that the process
    /// may run on, if it may run on at least that many and more than one.
    pub cores: Vec<usize>,
    /// Eviction policy. Default `s3fifo`.
    pub policy: PolicyKind,
    /// Whether fetched values stay. Default `first_miss`.
    pub admission: Admission,
    /// Most values that the cache can hold, over all shards. 0 (default) means one per granule of 4 KiB,
    /// at most 1,048,576 per shard.
    pub entries_max: u64,
    /// Slice servers that hold the values; a key lives on one of them, chosen by rendezvous hashing. Empty:
    /// no origin, a purely local cache.
    pub origin: Vec<SocketAddr>,
    /// Connections of one shard to one peer, 1 to 64; opened as needed. Default 2.
    pub lanes_per_peer: usize,
    /// Requests in flight on one lane, 1 to 1024. Default 16.
    pub lane_depth: usize,
    /// Bytes received by one operation at most, 64 KiB to 1 GiB. Default 1 MiB.
    pub receive_bytes: u64,
    /// Milliseconds for a connection to be made. Default 2000.
    pub connect_timeout_ms: u64,
    /// Milliseconds within which a peer that owes bytes must complete one receive operation (of up to
    /// `receive_bytes`); a slower peer's lane is given up. Default 10000.
    pub receive_timeout_ms: u64,
    /// Milliseconds for a fill that nobody with a deadline waits for (a prefetch). Default 30000.
    pub fill_timeout_ms: u64,
    /// Milliseconds before the second attempt to reach a peer that refused; doubles up to
    /// `backoff_max_ms`. Default 10.
    pub backoff_min_ms: u64,
    /// Longest pause between attempts, in milliseconds. Default 1000.
    pub backoff_max_ms: u64,
    /// Calls that may wait in one shard's request ring, 2 to 65536. Default 1024.
    pub request_ring: usize,
    /// Microseconds that an idle shard polls before it sleeps. Default 0: polling steals time from callers
    /// where cores are few.
    pub spin_us: u64,
}

impl Config {
    /// A configuration of `capacity_bytes` with defaults for everything else, and no origin.
    pub fn new(capacity_bytes: u64) -> Self {
        Self {
            capacity_bytes,
            block_bytes: 16 << 20,
            pages: PagePolicy::Preferred,
            lock: LockPolicy::Preferred,
            register: LockPolicy::Preferred,
            shards: 1,
            cores: Vec::new(),
            transport: TransportKind::Auto,
            policy: PolicyKind::S3Fifo,
            admission: Admission::FirstMiss,
            entries_max: 0,
            origin: Vec::new(),
            lanes_per_peer: 2,
            lane_depth: 16,
            receive_bytes: 1 << 20,
            connect_timeout_ms: 2_000,
            receive_timeout_ms: 10_000,
            fill_timeout_ms: 30_000,
            backoff_min_ms: 10,
            backoff_max_ms: 1_000,
            request_ring: 1024,
            spin_us: 0,
        }
    }

    /// The configuration that the environment asks for; `None` if it asks for no cache.
    ///
    /// See the table in README for the variables. Resolves host names in `HOTSLICE_ORIGIN`, which may block.
    pub fn from_env() -> Result<Option<Self>> {
        Self::from_lookup(&|name| std::env::var_os(name).map(|v| v.to_string_lossy().into_owned()))
    }

    /// [`Config::from_env`] over any source of variables.
    pub fn from_lookup(get: &dyn Fn(&str) -> Option<String>) -> Result<Option<Self>> {
        let Some(mut config) = base(get)? else { return Ok(None) };
        let c = &mut config;
        for (name, apply) in SETTINGS {
            if let Some(value) = get(name) {
                apply(c, name, &value)?;
            }
        }
        config.check()?;
        Ok(Some(config))
    }

    /// Checks every setting against its limits. [`Cache::open`](crate::Cache::open) does it too.
    pub fn check(&self) -> Result<()> {
        range("shards", self.shards as u64, 1, 256)?;
        range("lanes_per_peer", self.lanes_per_peer as u64, 1, 64)?;
        range("lane_depth", self.lane_depth as u64, 1, 1024)?;
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
        if self.shard_bytes() < self.block_bytes {
            return Err(config_error(
                "capacity_bytes",
                format_bytes(self.capacity_bytes),
                format!(
                    "at least one block of {} for each of {} shards",
                    format_bytes(self.block_bytes),
                    self.shards
                ),
            ));
        }
        Ok(())
    }

    /// Bytes of one shard's arena before rounding down to whole blocks.
    pub(crate) fn shard_bytes(&self) -> u64 {
        self.capacity_bytes / self.shards.max(1) as u64
    }

    /// Slots of one shard.
    pub(crate) fn shard_slots(&self, arena_bytes: u64) -> u32 {
        let slots = match self.entries_max {
            0 => (arena_bytes / crate::memory::GRANULE_BYTES as u64).min(SLOTS_DEFAULT_MAX),
            n => n.div_ceil(self.shards as u64),
        };
        slots.clamp(1, u64::from(u32::MAX - 1)) as u32
    }

    pub(crate) fn receive_timeout(&self) -> Duration {
        Duration::from_millis(self.receive_timeout_ms)
    }
}

const PEERS_MAX: usize = 4096;
const SLOTS_DEFAULT_MAX: u64 = 1 << 20;

fn config_error(setting: &'static str, value: impl ToString, allowed: impl Into<String>) -> Error {
    Error::Config { setting, value: value.to_string(), allowed: allowed.into() }
}

fn range(setting: &'static str, value: u64, min: u64, max: u64) -> Result<()> {
    if (min..=max).contains(&value) {
        return Ok(());
    }
    Err(config_error(setting, value, format!("{min} to {max}")))
}

type Apply = fn(&mut Config, &'static str, &str) -> Result<()>;

/// Every variable but the capacity, which decides whether there is a cache at all (`base`).
const SETTINGS: &[(&str, Apply)] = &[
    ("HOTSLICE_BLOCK_BYTES", |c, n, v| set(&mut c.block_bytes, parse_bytes(n, v))),
    ("HOTSLICE_PAGES", |c, n, v| set(&mut c.pages, word(n, v, "required, preferred or off"))),
    ("HOTSLICE_LOCK", |c, n, v| set(&mut c.lock, word(n, v, "required, preferred or off"))),
    ("HOTSLICE_REGISTER", |c, n, v| set(&mut c.register, word(n, v, "required, preferred or off"))),
    ("HOTSLICE_SHARDS", |c, n, v| set(&mut c.shards, word(n, v, "1 to 256"))),
    ("HOTSLICE_CORES", |c, n, v| set(&mut c.cores, list(n, v))),
    ("HOTSLICE_POLICY", |c, n, v| set(&mut c.policy, word(n, v, "s3fifo or lru"))),
    ("HOTSLICE_TRANSPORT", |c, n, v| set(&mut c.transport, word(n, v, "auto, io_uring or epoll"))),
    ("HOTSLICE_ADMISSION", |c, n, v| set(&mut c.admission, word(n, v, "first_miss or off"))),
    ("HOTSLICE_ENTRIES_MAX", |c, n, v| set(&mut c.entries_max, word(n, v, "a whole number"))),
    ("HOTSLICE_ORIGIN", |c, n, v| set(&mut c.origin, parse_peers(n, v))),
    ("HOTSLICE_LANES_PER_PEER", |c, n, v| set(&mut c.lanes_per_peer, word(n, v, "1 to 64"))),
    ("HOTSLICE_LANE_DEPTH", |c, n, v| set(&mut c.lane_depth, word(n, v, "1 to 1024"))),
    ("HOTSLICE_RECEIVE_BYTES", |c, n, v| set(&mut c.receive_bytes, parse_bytes(n, v))),
    ("HOTSLICE_CONNECT_TIMEOUT_MS", |c, n, v| set(&mut c.connect_timeout_ms, word(n, v, MS))),
    ("HOTSLICE_RECEIVE_TIMEOUT_MS", |c, n, v| set(&mut c.receive_timeout_ms, word(n, v, MS))),
    ("HOTSLICE_FILL_TIMEOUT_MS", |c, n, v| set(&mut c.fill_timeout_ms, word(n, v, MS))),
    ("HOTSLICE_BACKOFF_MIN_MS", |c, n, v| set(&mut c.backoff_min_ms, word(n, v, MS))),
    ("HOTSLICE_BACKOFF_MAX_MS", |c, n, v| set(&mut c.backoff_max_ms, word(n, v, MS))),
    ("HOTSLICE_REQUEST_RING", |c, n, v| set(&mut c.request_ring, word(n, v, "2 to 65536"))),
    ("HOTSLICE_SPIN_US", |c, n, v| set(&mut c.spin_us, word(n, v, "0 to 1000000"))),
];
const MS: &str = "1 to 86400000 milliseconds";

fn set<T>(place: &mut T, value: Result<T>) -> Result<()> {
    *place = value?;
    Ok(())
}

fn word<T: std::str::FromStr>(name: &'static str, value: &str, allowed: &str) -> Result<T> {
    value.parse().map_err(|_| config_error(name, value, allowed))
}

fn list<T: std::str::FromStr>(name: &'static str, value: &str) -> Result<Vec<T>> {
    value.split(',').map(|part| word(name, part.trim(), "whole numbers separated by commas")).collect()
}

/// Parses `host:port[,host:port…]`. Resolves names, which may block; each name gives its first address.
pub fn parse_peers(setting: &'static str, text: &str) -> Result<Vec<SocketAddr>> {
    let peer = |part: &str| {
        let addresses = part.to_socket_addrs().map_err(|error| {
            config_error(setting, part, format!("host:port[,host:port…] that resolves ({error})"))
        })?;
        let mut addresses = addresses;
        addresses.next().ok_or_else(|| config_error(setting, part, "a name that has an address"))
    };
    text.split(',').map(|part| peer(part.trim())).collect()
}

/// Capacity and block size: our own variables, else upstream's. `None`: no cache is asked for.
fn base(get: &dyn Fn(&str) -> Option<String>) -> Result<Option<Config>> {
    if let Some(value) = get("HOTSLICE_CAPACITY_BYTES") {
        return Ok(Some(Config::new(parse_bytes("HOTSLICE_CAPACITY_BYTES", &value)?)));
    }
    let upstream = |names: &[&'static str]| names.iter().find_map(|&name| Some((name, get(name)?)));
    let Some((name, value)) = upstream(&["MC_STORE_LOCAL_HOT_CACHE_SIZE", "LOCAL_HOT_CACHE_SIZE"]) else {
        return Ok(None);
    };
    let block = match upstream(&["MC_STORE_LOCAL_HOT_BLOCK_SIZE", "LOCAL_HOT_BLOCK_SIZE"]) {
        None => Ok(16 << 20),
        Some((name, value)) => parse_bytes(name, &value),
    };
    let checked = parse_bytes(name, &value).and_then(|capacity| {
        let mut config = Config::new(capacity);
        config.block_bytes = usable_block(block?);
        config.check()?;
        Ok(config)
    });
    match checked {
        Ok(config) => Ok(Some(config)),
        Err(error) => {
            tracing::warn!(%error, "the hot cache is off: upstream's variable is invalid");
            Ok(None)
        }
    }
}

/// Upstream allows any block size; here a block is a power of two and at least a hugepage.
fn usable_block(bytes: u64) -> u64 {
    let usable = bytes.clamp(2 << 20, 1 << 30).next_power_of_two();
    if usable != bytes {
        tracing::warn!(asked = bytes, used = usable, "block size rounded up to a power of two");
    }
    usable
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    fn from(pairs: &[(&str, &str)]) -> Result<Option<Config>> {
        let map: HashMap<_, _> = pairs.iter().map(|&(k, v)| (k.to_owned(), v.to_owned())).collect();
        Config::from_lookup(&|name| map.get(name).cloned())
    }

    #[test]
    fn nothing_set_means_no_cache() {
        assert!(from(&[]).unwrap().is_none());
    }

    #[test]
    fn every_variable_is_read() {
        let c = from(&[
            ("HOTSLICE_CAPACITY_BYTES", "1GiB"),
            ("HOTSLICE_BLOCK_BYTES", "32MiB"),
            ("HOTSLICE_PAGES", "off"),
            ("HOTSLICE_LOCK", "required"),
            ("HOTSLICE_REGISTER", "off"),
            ("HOTSLICE_SHARDS", "2"),
            ("HOTSLICE_CORES", "0, 1"),
            ("HOTSLICE_POLICY", "lru"),
            ("HOTSLICE_ADMISSION", "off"),
            ("HOTSLICE_ENTRIES_MAX", "1000"),
            ("HOTSLICE_ORIGIN", "127.0.0.1:7110,[::1]:7111"),
            ("HOTSLICE_LANES_PER_PEER", "3"),
            ("HOTSLICE_LANE_DEPTH", "4"),
            ("HOTSLICE_RECEIVE_BYTES", "2MiB"),
            ("HOTSLICE_CONNECT_TIMEOUT_MS", "1"),
            ("HOTSLICE_RECEIVE_TIMEOUT_MS", "2"),
            ("HOTSLICE_FILL_TIMEOUT_MS", "3"),
            ("HOTSLICE_BACKOFF_MIN_MS", "4"),
            ("HOTSLICE_BACKOFF_MAX_MS", "5"),
            ("HOTSLICE_REQUEST_RING", "6"),
            ("HOTSLICE_SPIN_US", "7"),
        ])
        .unwrap()
        .unwrap();
        assert_eq!((c.capacity_bytes, c.block_bytes, c.shards), (1 << 30, 32 << 20, 2));
        assert_eq!((c.cores.as_slice(), c.entries_max, c.origin.len()), (&[0, 1][..], 1000, 2));
        assert_eq!((c.lanes_per_peer, c.lane_depth, c.receive_bytes), (3, 4, 2 << 20));
        assert_eq!((c.connect_timeout_ms, c.receive_timeout_ms, c.fill_timeout_ms), (1, 2, 3));
        assert_eq!((c.backoff_min_ms, c.backoff_max_ms, c.request_ring, c.spin_us), (4, 5, 6, 7));
        assert_eq!((c.pages, c.lock, c.register), (PagePolicy::Off, LockPolicy::Required, LockPolicy::Off));
        assert_eq!((c.policy, c.admission), (PolicyKind::Clock, Admission::Off));
    }

    #[test]
    fn errors_name_setting_value_and_what_is_allowed() {
        for (name, value) in [
            ("HOTSLICE_CAPACITY_BYTES", "0"),
            ("HOTSLICE_CAPACITY_BYTES", "-1"),
            ("HOTSLICE_CAPACITY_BYTES", "garbage"),
            ("HOTSLICE_CAPACITY_BYTES", "1MiB"),
            ("HOTSLICE_SHARDS", "0"),
            ("HOTSLICE_SHARDS", "1x"),
            ("HOTSLICE_PAGES", "maybe"),
            ("HOTSLICE_ORIGIN", "no port"),
            ("HOTSLICE_RECEIVE_BYTES", "1"),
            ("HOTSLICE_CORES", "0,1"),
        ] {
            let mut pairs = vec![("HOTSLICE_CAPACITY_BYTES", "64MiB")];
            pairs.retain(|(n, _)| *n != name);
            pairs.push((name, value));
            match from(&pairs) {
                Err(Error::Config { allowed, .. }) => assert!(!allowed.is_empty()),
                other => panic!("{name}={value}: {other:?}"),
            }
        }
    }

    #[test]
    fn upstreams_variables_work() {
        for name in ["MC_STORE_LOCAL_HOT_CACHE_SIZE", "LOCAL_HOT_CACHE_SIZE"] {
            let c = from(&[(name, "419430400")]).unwrap().unwrap();
            assert_eq!((c.capacity_bytes, c.block_bytes), (419_430_400, 16 << 20));
        }
        let c = from(&[("LOCAL_HOT_CACHE_SIZE", "419430400"), ("LOCAL_HOT_BLOCK_SIZE", "33554432")]);
        assert_eq!(c.unwrap().unwrap().block_bytes, 32 << 20);
    }

    #[test]
    fn upstreams_invalid_values_switch_the_cache_off() {
        for value in ["0", "-1", "", "abc", "8gb ", "1000", "99999999999999999999999"] {
            assert!(from(&[("MC_STORE_LOCAL_HOT_CACHE_SIZE", value)]).unwrap().is_none(), "{value:?}");
        }
    }
}
