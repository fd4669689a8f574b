//! What the engine is held to, each figure beside its bar, as ratios within this run.

use super::content::Content;
use super::floors::{CopyFloor, ReceiveLoop, Regions};
use super::measure::{Cost, Latencies, median};
use super::{BenchArgs, rows};
use hotslice::{Admission, Cache, Config, Invalidate};
use serde::Serialize;
use std::hint::black_box;
use std::time::{Duration, Instant};

/// One figure and its bar.
#[derive(Clone, Debug, Serialize)]
pub struct Bar {
    pub what: String,
    pub figure: String,
    pub bar: String,
    pub met: bool,
}

impl Bar {
    fn at_most(what: impl Into<String>, value: f64, bar: f64, unit: &str) -> Self {
        Self {
            what: what.into(),
            figure: format!("{value:.2}{unit}"),
            bar: format!("≤ {bar}{unit}"),
            met: value <= bar,
        }
    }

    fn at_least(what: impl Into<String>, value: f64, bar: f64, unit: &str) -> Self {
        Self {
            what: what.into(),
            figure: format!("{value:.2}{unit}"),
            bar: format!("≥ {bar}{unit}"),
            met: value >= bar,
        }
    }
}

const PATIENCE: Duration = Duration::from_secs(60);
const SMALL_KEYS: usize = 10_000;
const SMALL_BYTES: usize = 4096;
const LARGE_BYTES: usize = 10_000_000;

/// Acquire and release of leases on hits, one caller: 10,000 keys of 4 KB, and beside them as many of 10 MB
/// as fit, each kind looked up in random order.
pub fn leased_hits(args: &BenchArgs) -> Result<Vec<Bar>, String> {
    let cache = open(args, Config::new(400_000_000), &[])?;
    let small: Vec<String> = (0..SMALL_KEYS).map(|i| format!("qwen3-8b/tp0/{i:032x}")).collect();
    let value = vec![7u8; LARGE_BYTES];
    for key in &small {
        cache.put(key, &value[..SMALL_BYTES], PATIENCE).map_err(|e| e.to_string())?;
    }
    let large: Vec<String> = (0..30).map(|i| format!("qwen3-8b/tp1/{i:032x}")).collect();
    for key in &large {
        cache.put(key, &value, PATIENCE).map_err(|e| e.to_string())?;
    }
    let rounds = if args.quick { 10 } else { 50 };
    let clock = clock_ns();
    let mut bars = Vec::new();
    for (keys, name) in [(&small, "4 KB"), (&large, "10 MB")] {
        let order = shuffled(keys.len());
        let mut latencies = Latencies::new();
        let repeats = rounds * SMALL_KEYS / keys.len();
        for _ in 0..repeats {
            for &i in &order {
                let started = Instant::now();
                let lease = black_box(cache.get(&keys[i], PATIENCE));
                let found = matches!(lease, Ok(Some(_)));
                drop(lease);
                let elapsed = started.elapsed();
                if !found {
                    return Err(format!("`{}` was evicted", keys[i]));
                }
                latencies.record(elapsed);
            }
        }
        let (p50, p99) = (latencies.quantile_ns(0.5) as f64, latencies.quantile_ns(0.99) as f64);
        let note = format!("leased hit, {name} values (clock itself: {clock} ns)");
        bars.push(Bar::at_most(format!("{note}, p50"), p50, 300.0, " ns"));
        bars.push(Bar::at_most(format!("{note}, p99"), p99, 2000.0, " ns"));
    }
    Ok(bars)
}

fn clock_ns() -> u64 {
    let mut latencies = Latencies::new();
    for _ in 0..100_000 {
        let started = Instant::now();
        latencies.record(started.elapsed());
    }
    latencies.quantile_ns(0.5)
}

/// A fixed permutation (Fisher and Yates, with a linear congruential generator).
fn shuffled(len: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..len).collect();
    let mut random = 1u64;
    for i in (1..len).rev() {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        order.swap(i, (random >> 33) as usize % (i + 1));
    }
    order
}

/// Copying hits of 10 MB against the fastest copy that this machine has, in alternation.
pub fn copying_hit(args: &BenchArgs, keys: &[String], server: std::net::SocketAddr) -> Result<Bar, String> {
    let cache = open(args, Config::new(400_000_000), &[server])?;
    let mut buffers = Regions::new(keys.len(), LARGE_BYTES, args.pages)?;
    for key in keys {
        rows::read_leases(&cache, std::slice::from_ref(key))?;
    }
    let mut ratios = Vec::new();
    for _ in 0..if args.quick { 3 } else { 9 } {
        let floor = super::floors::copies(LARGE_BYTES, keys.len(), 1, args.pages)?;
        let fastest = floor.iter().map(|f: &CopyFloor| f.gb_per_s).fold(0.0, f64::max);
        let mut latencies = Latencies::new();
        for (i, key) in keys.iter().enumerate() {
            let into = buffers.slice(i);
            let started = Instant::now();
            cache.get_into(key, into, PATIENCE).map_err(|e| e.to_string())?;
            latencies.record(started.elapsed());
            Content::of(key)
                .check(0, into)
                .map_err(|d| format!("wrong byte in the copy of `{key}`: {d:?}"))?;
        }
        ratios.push(LARGE_BYTES as f64 / latencies.quantile_ns(0.5) as f64 / fastest);
    }
    let what = "copying hit, 10 MB, GB/s against the fastest memcpy over rotating blocks";
    Ok(Bar::at_least(what, median(ratios), 0.9, " ×"))
}

/// Cold reads of 10 MB against the blocking receive loop, key by key in alternation.
pub fn cold_read(
    args: &BenchArgs,
    keys: &[String],
    server: std::net::SocketAddr,
) -> Result<Vec<Bar>, String> {
    let mut config = Config::new(400_000_000);
    config.admission = Admission::Off;
    let cache = open(args, config, &[server])?;
    let mut floor = ReceiveLoop::connect(server, keys.len(), LARGE_BYTES, args.pages)?;
    let mut ours = Latencies::new();
    let mut cost = Cost::default();
    let before = cache.stats();
    let rounds = if args.quick { 2 } else { 12 };
    for round in 0..=rounds {
        if round == 1 {
            // The first round warmed connections and memory up.
            (floor.cost, floor.latencies) = (Cost::default(), Latencies::new());
            (cost, ours) = (Cost::default(), Latencies::new());
        }
        for key in keys {
            floor.read(key)?;
            let read = rows::read_leases(&cache, std::slice::from_ref(key))?;
            ours.record(read.wall);
            cost.bytes += read.bytes;
            cost.wall += read.wall;
            cost.cpu += read.cpu;
        }
    }
    let stats = cache.stats();
    let direct = (stats.received_direct_bytes - before.received_direct_bytes) as f64;
    let copied = (stats.received_copied_bytes - before.received_copied_bytes) as f64;
    let speed = floor.latencies.quantile_ns(0.5) as f64 / ours.quantile_ns(0.5) as f64;
    let cpu = cost.cpu_s_per_gb() / floor.cost.cpu_s_per_gb();
    let numbers = format!(
        "p50 {:.2} ms against {:.2} ms",
        ours.quantile_ns(0.5) as f64 / 1e6,
        floor.latencies.quantile_ns(0.5) as f64 / 1e6
    );
    let cpus = format!("{:.3} against {:.3} s/GB", cost.cpu_s_per_gb(), floor.cost.cpu_s_per_gb());
    Ok(vec![
        Bar::at_least(
            format!("cold read, 10 MB, against the blocking recv loop ({numbers})"),
            speed,
            0.9,
            " ×",
        ),
        Bar::at_most(format!("receiver CPU per GB against the recv loop ({cpus})"), cpu, 1.25, " ×"),
        Bar::at_least(
            "bytes received directly into extents",
            100.0 * direct / (direct + copied),
            100.0,
            " %",
        ),
    ])
}

/// How many values stay when more are put than fit.
pub fn utilisation(args: &BenchArgs) -> Result<Vec<Bar>, String> {
    let mut bars = Vec::new();
    for (capacity, value_bytes, least) in [
        (400_000_000u64, 10_000_000usize, 38usize),
        (400_000_000, 12_500_000, 30),
        (800_000_000, 25_000_000, 31),
        (64 << 20, 4000, 15_000),
    ] {
        let cache = open(args, Config::new(capacity), &[])?;
        let value = vec![1u8; value_bytes];
        let keys: Vec<String> = (0..capacity as usize / value_bytes + 1).map(|i| format!("u{i}")).collect();
        for key in &keys {
            if cache.stats().evictions > 0 {
                break;
            }
            cache.put(key, &value, PATIENCE).map_err(|e| e.to_string())?;
        }
        let kept = keys.iter().filter(|key| matches!(cache.contains(key.as_str()), Ok(true))).count();
        let what =
            format!("values of {value_bytes} bytes in a cache of {}", hotslice::size::format_bytes(capacity));
        bars.push(Bar::at_least(what, kept as f64, least as f64, ""));
    }
    Ok(bars)
}

/// Time until a cache of 1 GiB is ready, several times: the first may find memory that the host has not
/// backed yet.
pub fn start(args: &BenchArgs) -> Result<Bar, String> {
    let mut times = Vec::new();
    let mut pages = String::new();
    for _ in 0..if args.quick { 2 } else { 5 } {
        let cache = open(args, Config::new(1 << 30), &[])?;
        let report = &cache.reports()[0];
        times.push(report.start_ms / 1e3);
        let arena = &report.arena;
        pages = format!(
            "{} % hugetlb, {} % transparent",
            arena.hugetlb_bytes * 100 / arena.arena_bytes,
            arena.transparent_bytes * 100 / arena.arena_bytes
        );
    }
    let first = times[0];
    Ok(Bar::at_most(
        format!("start of 1 GiB on one core, median (first {first:.2} s; {pages})"),
        median(times),
        1.0,
        " s",
    ))
}

/// A cache with the bench's own settings.
pub fn open(args: &BenchArgs, mut config: Config, origin: &[std::net::SocketAddr]) -> Result<Cache, String> {
    args.apply(&mut config);
    config.origin = origin.to_vec();
    let cache = Cache::open(config).map_err(|e| e.to_string())?;
    // Nothing is there yet; this only proves that the shards answer.
    cache.invalidate(Invalidate::All, PATIENCE).map_err(|e| e.to_string())?;
    Ok(cache)
}
