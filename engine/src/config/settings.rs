//! The settings one by one: how each is read from text and shown as text. One line per setting; what files and the
//! environment may contain, what `hotslice config` prints and what errors list all come from here.

use super::{Config, config_error};
use crate::size::{format_bytes, parse_bytes};
use crate::{Address, Result};
use std::path::{Path, PathBuf};

/// One setting.
pub(super) struct Setting {
    /// Name of the field, and of the key in a file.
    pub(super) name: &'static str,
    /// Name in the environment.
    pub(super) variable: &'static str,
    /// Reads a text. The name is that by which the text's author knows the setting.
    pub(super) apply: fn(&mut Config, &'static str, &str) -> Result<()>,
    /// The value as a text that `apply` reads.
    pub(super) show: fn(&Config) -> String,
}

macro_rules! settings {
    ($($name:literal, $variable:literal, $apply:expr, $show:expr;)*) => {
        /// Every setting, in the order of the table in README.
        pub(super) const SETTINGS: &[Setting] =
            &[$(Setting { name: $name, variable: $variable, apply: $apply, show: $show }),*];
    };
}

const MS: &str = "1 to 86400000 milliseconds";
const MODES: &str = "immutable, ttl:MILLISECONDS or validate:MILLISECONDS";
const RUNGS: &str = "required, preferred or off";

settings! {
    "capacity_bytes", "HOTSLICE_CAPACITY_BYTES",
        |c, n, v| set(&mut c.capacity_bytes, parse_bytes(n, v)), |c| format_bytes(c.capacity_bytes);
    "capacity_max_bytes", "HOTSLICE_CAPACITY_MAX_BYTES",
        |c, n, v| set(&mut c.capacity_max_bytes, parse_bytes(n, v)), |c| format_bytes(c.capacity_max_bytes);
    "block_bytes", "HOTSLICE_BLOCK_BYTES",
        |c, n, v| set(&mut c.block_bytes, parse_bytes(n, v)), |c| format_bytes(c.block_bytes);
    "pages", "HOTSLICE_PAGES",
        |c, n, v| set(&mut c.pages, word(n, v, RUNGS)), |c| c.pages.to_string();
    "lock", "HOTSLICE_LOCK",
        |c, n, v| set(&mut c.lock, word(n, v, RUNGS)), |c| c.lock.to_string();
    "register", "HOTSLICE_REGISTER",
        |c, n, v| set(&mut c.register, word(n, v, RUNGS)), |c| c.register.to_string();
    "numa", "HOTSLICE_NUMA",
        |c, n, v| set(&mut c.numa, word(n, v, "local or off")), |c| c.numa.to_string();
    "shards", "HOTSLICE_SHARDS",
        |c, n, v| set(&mut c.shards, word(n, v, "1 to 256")), |c| c.shards.to_string();
    "cores", "HOTSLICE_CORES",
        |c, n, v| set(&mut c.cores, list(n, v)), |c| joined(&c.cores);
    "policy", "HOTSLICE_POLICY",
        |c, n, v| set(&mut c.policy, word(n, v, "s3fifo or lru")), |c| c.policy.to_string();
    "transport", "HOTSLICE_TRANSPORT",
        |c, n, v| set(&mut c.transport, word(n, v, "auto, io_uring or epoll")), |c| c.transport.to_string();
    "admission", "HOTSLICE_ADMISSION",
        |c, n, v| set(&mut c.admission, word(n, v, "first_miss or off")), |c| c.admission.to_string();
    "entries_max", "HOTSLICE_ENTRIES_MAX",
        |c, n, v| set(&mut c.entries_max, word(n, v, "a whole number")), |c| c.entries_max.to_string();
    "origin", "HOTSLICE_ORIGIN",
        |c, n, v| set(&mut c.origin, parse_peers(n, v)), |c| joined(&c.origin);
    "secret_file", "HOTSLICE_SECRET_FILE",
        |c, _, v| set(&mut c.secret_file, Ok(path(v))), |c| shown(c.secret_file.as_deref());
    "lanes_per_peer", "HOTSLICE_LANES_PER_PEER",
        |c, n, v| set(&mut c.lanes_per_peer, word(n, v, "1 to 64")), |c| c.lanes_per_peer.to_string();
    "lane_depth", "HOTSLICE_LANE_DEPTH",
        |c, n, v| set(&mut c.lane_depth, word(n, v, "1 to 1024")), |c| c.lane_depth.to_string();
    "stripe_bytes", "HOTSLICE_STRIPE_BYTES",
        |c, n, v| set(&mut c.stripe_bytes, parse_bytes(n, v)), |c| format_bytes(c.stripe_bytes);
    "shards_per_value", "HOTSLICE_SHARDS_PER_VALUE",
        |c, n, v| set(&mut c.shards_per_value, word(n, v, "1 to 256")), |c| c.shards_per_value.to_string();
    "receive_bytes", "HOTSLICE_RECEIVE_BYTES",
        |c, n, v| set(&mut c.receive_bytes, parse_bytes(n, v)), |c| format_bytes(c.receive_bytes);
    "connect_timeout_ms", "HOTSLICE_CONNECT_TIMEOUT_MS",
        |c, n, v| set(&mut c.connect_timeout_ms, word(n, v, MS)), |c| c.connect_timeout_ms.to_string();
    "receive_timeout_ms", "HOTSLICE_RECEIVE_TIMEOUT_MS",
        |c, n, v| set(&mut c.receive_timeout_ms, word(n, v, MS)), |c| c.receive_timeout_ms.to_string();
    "keepalive_ms", "HOTSLICE_KEEPALIVE_MS",
        |c, n, v| set(&mut c.keepalive_ms, word(n, v, "0 to 86400000 milliseconds")), |c| c.keepalive_ms.to_string();
    "fill_timeout_ms", "HOTSLICE_FILL_TIMEOUT_MS",
        |c, n, v| set(&mut c.fill_timeout_ms, word(n, v, MS)), |c| c.fill_timeout_ms.to_string();
    "absent_ttl_ms", "HOTSLICE_ABSENT_TTL_MS",
        |c, n, v| set(&mut c.absent_ttl_ms, word(n, v, "0 to 60000 milliseconds")), |c| c.absent_ttl_ms.to_string();
    "backoff_min_ms", "HOTSLICE_BACKOFF_MIN_MS",
        |c, n, v| set(&mut c.backoff_min_ms, word(n, v, MS)), |c| c.backoff_min_ms.to_string();
    "backoff_max_ms", "HOTSLICE_BACKOFF_MAX_MS",
        |c, n, v| set(&mut c.backoff_max_ms, word(n, v, MS)), |c| c.backoff_max_ms.to_string();
    "namespace_mode", "HOTSLICE_NAMESPACE_MODE",
        |c, n, v| set(&mut c.namespace_mode, word(n, v, MODES)), |c| c.namespace_mode.to_string();
    "request_ring", "HOTSLICE_REQUEST_RING",
        |c, n, v| set(&mut c.request_ring, word(n, v, "2 to 65536")), |c| c.request_ring.to_string();
    "spin_us", "HOTSLICE_SPIN_US",
        |c, n, v| set(&mut c.spin_us, word(n, v, "0 to 1000000")), |c| c.spin_us.to_string();
}

fn set<T>(place: &mut T, value: Result<T>) -> Result<()> {
    *place = value?;
    Ok(())
}

fn word<T: std::str::FromStr>(name: &'static str, value: &str, allowed: &str) -> Result<T> {
    value.parse().map_err(|_| config_error(name, value, allowed))
}

fn list<T: std::str::FromStr>(name: &'static str, value: &str) -> Result<Vec<T>> {
    let parts = value.split(',').map(str::trim).filter(|part| !part.is_empty());
    parts.map(|part| word(name, part, "whole numbers separated by commas")).collect()
}

/// No text, no file.
fn path(text: &str) -> Option<PathBuf> {
    (!text.is_empty()).then(|| text.into())
}

fn shown(path: Option<&Path>) -> String {
    path.map_or_else(String::new, |path| path.display().to_string())
}

fn joined<T: ToString>(items: &[T]) -> String {
    items.iter().map(T::to_string).collect::<Vec<_>>().join(",")
}

/// Parses addresses of slice servers, `host:port` or `unix:/absolute/path`, separated by commas. Resolves names,
/// which may block; each name gives its first address.
pub fn parse_peers(setting: &'static str, text: &str) -> Result<Vec<Address>> {
    let peer = |part: &str| Address::resolve(part).map_err(|error| config_error(setting, part, error.allowed));
    text.split(',').map(|part| peer(part.trim())).collect()
}
