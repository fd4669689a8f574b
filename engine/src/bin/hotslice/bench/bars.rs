//! What the engine is held to, each figure beside its bar, ratios within this run and in alternation.

use super::args::BenchArgs;
use super::floors::{Copies, ReceiveLoop};
use super::measure::{Cost, CpuMeter, Latencies, Spread};
use super::regions::Regions;
use super::rows::{self, PATIENCE, Traffic};
use hotslice::size::format_bytes;
use serde::Serialize;
use std::net::SocketAddr;
use std::time::Instant;

/// On which side of the bar a figure has to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Bound {
    AtLeast,
    AtMost,
}

/// One figure and its bar.
#[derive(Clone, Debug, Serialize)]
pub struct Bar {
    pub what: String,
    pub value: f64,
    pub unit: &'static str,
    pub bound: Bound,
    pub bar: f64,
    pub met: bool,
    /// What the figure is made of.
    pub note: String,
}

impl Bar {
    /// A figure that should not be larger.
    pub fn at_most(what: impl Into<String>, value: f64, bar: f64, unit: &'static str, note: String) -> Self {
        Self { what: what.into(), value, unit, bound: Bound::AtMost, bar, met: value <= bar, note }
    }

    /// A figure that should not be smaller.
    pub fn at_least(what: impl Into<String>, value: f64, bar: f64, unit: &'static str, note: String) -> Self {
        Self { what: what.into(), value, unit, bound: Bound::AtLeast, bar, met: value >= bar, note }
    }
}

/// Size of the values that are compared with floors.
pub const COMPARED_BYTES: usize = 10_000_000;
const CACHE_BYTES: u64 = 400_000_000;

/// Copying hits of 10 MB against every copy that this machine has, key by key in alternation.
pub fn copying_hit(args: &BenchArgs, keys: &[String], server: SocketAddr) -> Result<Bar, String> {
    let cache = rows::open(args, CACHE_BYTES, Some(server))?;
    let mut buffers = Regions::new(keys.len(), COMPARED_BYTES, args.pages)?;
    let mut copies = Copies::new(COMPARED_BYTES, keys.len(), args.pages)?;
    rows::read_leases(&cache, keys, &mut CpuMeter::start())?;
    let mut latencies = Latencies::new();
    let mut rounds = Vec::new();
    for _ in 0..if args.quick { 3 } else { 9 } {
        let mut ours = Latencies::new();
        let mut floors = Vec::new();
        (0..keys.len()).for_each(|i| buffers.spoil(i));
        for (i, key) in keys.iter().enumerate() {
            floors.push(copies.step(i));
            let into = buffers.slice(i);
            let started = Instant::now();
            let len = cache.get_into(key, into, PATIENCE).map_err(|e| e.to_string())?;
            let elapsed = started.elapsed();
            latencies.record(elapsed);
            ours.record(elapsed);
            if len != Some(COMPARED_BYTES as u64) {
                return Err(format!("`{key}` has {len:?} bytes instead of {COMPARED_BYTES}"));
            }
        }
        // After the round: reading the copies would leave them in a cache.
        for (i, key) in keys.iter().enumerate() {
            rows::check_copy(key, COMPARED_BYTES as u64, COMPARED_BYTES, buffers.slice(i))?;
        }
        rounds.push((ours, floors));
    }
    let fastest = copies.fastest();
    let floor = &copies.report()[fastest];
    let ratio = |(ours, floors): &(Latencies, Vec<Vec<std::time::Duration>>)| {
        let mut theirs = Latencies::new();
        floors.iter().for_each(|times| theirs.record(times[fastest]));
        theirs.quantile_ns(0.5) as f64 / ours.quantile_ns(0.5) as f64
    };
    let spread = Spread::of(rounds.iter().map(ratio).collect());
    let ours_ms = latencies.quantile_ns(0.5) as f64 / 1e6;
    let note = format!(
        "p50 {ours_ms:.3} ms against {:.3} ms ({}); rounds {:.2} to {:.2}, median {:.2}",
        floor.ms.p50, floor.method, spread.least, spread.most, spread.median
    );
    let what = "copying hit, 10 MB, speed against the fastest memcpy over rotating blocks";
    Ok(Bar::at_least(what, floor.ms.p50 / ours_ms, 0.9, "×", note))
}

/// Cold reads of 10 MB against the blocking receive loop, key by key in alternation.
pub fn cold_read(args: &BenchArgs, keys: &[String], server: SocketAddr) -> Result<Vec<Bar>, String> {
    let cache = rows::open_off(args, CACHE_BYTES, server)?;
    let mut floor = ReceiveLoop::connect(server, keys.len(), COMPARED_BYTES, args.pages)?;
    // Warms connections and memory up.
    for key in keys {
        floor.read(key)?;
        rows::read_leases(&cache, std::slice::from_ref(key), &mut CpuMeter::start())?;
    }
    floor.reset();
    let before = cache.stats();
    let (mut ours, mut cost) = (Latencies::new(), Cost::default());
    let mut ratios = Vec::new();
    let mut meter = CpuMeter::start();
    for _ in 0..if args.quick { 3 } else { 12 } {
        let (mut round, mut floor_round) = (Latencies::new(), Latencies::new());
        for key in keys {
            floor_round.record(meter.excluding(|| floor.read(key))?);
            let read = rows::read_leases(&cache, std::slice::from_ref(key), &mut meter)?;
            ours.record(read.wall);
            round.record(read.wall);
            cost.bytes += read.bytes;
            cost.wall += read.wall;
        }
        ratios.push(floor_round.quantile_ns(0.5) as f64 / round.quantile_ns(0.5) as f64);
    }
    cost.cpu = meter.spent();
    let traffic = Traffic::between(&before, &cache.stats());
    let floor = floor.report();
    Ok(cold_bars(&ours, cost, ratios, traffic, &floor))
}

fn cold_bars(
    ours: &Latencies,
    cost: Cost,
    ratios: Vec<f64>,
    traffic: Traffic,
    floor: &super::floors::ReceiveFloor,
) -> Vec<Bar> {
    let ours_ms = ours.percentiles_ms().p50;
    let spread = Spread::of(ratios);
    let speed_note = format!(
        "p50 {ours_ms:.2} ms against {:.2} ms; rounds {:.2} to {:.2}, median {:.2}; {}",
        floor.ms.p50, spread.least, spread.most, spread.median, floor.congestion_control
    );
    let cpu_note =
        format!("{:.3} s/GB (all threads) against {:.3} s/GB", cost.cpu_s_per_gb(), floor.cpu_s_per_gb);
    let bytes_note = format!(
        "{:.3} GB directly, {} bytes copied",
        traffic.received_direct_bytes as f64 / 1e9,
        traffic.received_copied_bytes
    );
    let what = "cold read, 10 MB, speed against the blocking recv loop";
    let direct = traffic.direct_percent().unwrap_or(0.0);
    vec![
        Bar::at_least(what, floor.ms.p50 / ours_ms, 0.9, "×", speed_note),
        Bar::at_most(
            "cold read, 10 MB, receiver's CPU per GB against the recv loop",
            cost.cpu_s_per_gb() / floor.cpu_s_per_gb,
            1.25,
            "×",
            cpu_note,
        ),
        Bar::at_least(
            "cold read, 10 MB, bytes received directly into extents",
            direct,
            100.0,
            "%",
            bytes_note,
        ),
    ]
}

/// How many values are there when for the first time one had to go.
pub fn utilisation(args: &BenchArgs) -> Result<Vec<Bar>, String> {
    let mut bars = Vec::new();
    for (capacity, value_bytes, least) in [
        (400_000_000u64, 10_000_000usize, 38usize),
        (400_000_000, 12_500_000, 30),
        (800_000_000, 25_000_000, 31),
        (64 << 20, 4000, 15_000),
    ] {
        let cache = rows::open(args, capacity, None)?;
        let value = vec![1u8; value_bytes];
        let keys: Vec<String> = (0..capacity as usize / value_bytes + 1).map(|i| format!("u{i}")).collect();
        for key in &keys {
            if cache.stats().evictions > 0 {
                break;
            }
            cache.put(key, &value, PATIENCE).map_err(|e| e.to_string())?;
        }
        let kept = keys.iter().filter(|key| matches!(cache.contains(key.as_str()), Ok(true))).count();
        let arena_bytes = cache.stats().arena_bytes;
        let note = format!(
            "{:.1} % of the arena's {} hold values",
            100.0 * (kept * value_bytes) as f64 / arena_bytes as f64,
            format_bytes(arena_bytes)
        );
        let what = format!("values of {value_bytes} bytes that a cache of {} holds", format_bytes(capacity));
        bars.push(Bar::at_least(what, kept as f64, least as f64, "", note));
    }
    Ok(bars)
}

/// Time until 1 GiB for each shard is ready, several times: the first may find memory that the host has not
/// backed yet.
pub fn start(args: &BenchArgs) -> Result<Bar, String> {
    let mut times = Vec::new();
    let mut pages = String::new();
    for _ in 0..if args.quick { 2 } else { 5 } {
        let cache = rows::open(args, (args.shards as u64) << 30, None)?;
        times.push(cache.reports().iter().map(|report| report.start_ms / 1e3).fold(0.0, f64::max));
        let arena = &cache.reports()[0].arena;
        pages = format!(
            "{} % hugetlb, {} % transparent hugepages, {} % base pages, {} % locked",
            arena.hugetlb_bytes * 100 / arena.arena_bytes,
            arena.transparent_bytes * 100 / arena.arena_bytes,
            arena.base_bytes * 100 / arena.arena_bytes,
            arena.locked_bytes * 100 / arena.arena_bytes
        );
    }
    let first = times[0];
    let spread = Spread::of(times);
    let note = format!("first {first:.2} s, others to {:.2} s; {pages}", spread.least);
    Ok(Bar::at_most("start of 1 GiB per core", spread.median, 1.0, "s", note))
}
