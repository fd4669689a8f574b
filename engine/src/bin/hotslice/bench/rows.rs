//! The rows of the main table: reading values through the engine, cache off and on, every byte checked.

use super::content::Content;
use super::floors::Regions;
use super::measure::{Cost, Latencies, Percentiles, process_cpu};
use hotslice::{Cache, Deadline, Invalidate, Key, Lease, Read, Stats};
use serde::Serialize;
use std::time::{Duration, Instant};

/// How values are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    Lease,
    Copy,
}

/// One row.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// Keys per call.
    pub batch: usize,
    pub value_bytes: usize,
    pub cache_bytes: u64,
    pub cache_on: bool,
    pub mode: Mode,
    /// Mean per key of the first round, in milliseconds.
    pub first_round_ms: f64,
    /// Mean per key of the later rounds, in milliseconds.
    pub later_rounds_ms: f64,
    /// Per key, all rounds.
    pub ms: Percentiles,
    pub gb_per_s: f64,
    pub cpu_s_per_gb: f64,
    pub hit_ratio: f64,
    pub received_direct_bytes: u64,
    pub received_copied_bytes: u64,
}

/// What a row reads.
pub struct Plan<'a> {
    pub keys: &'a [String],
    pub value_bytes: usize,
    pub cache_bytes: u64,
    pub cache_on: bool,
    pub batch: usize,
    pub rounds: usize,
}

const PATIENCE: Duration = Duration::from_secs(60);

/// Runs one row. `buffers` are the caller's, one per key of a batch.
pub fn run(
    cache: &Cache,
    plan: &Plan<'_>,
    mode: Mode,
    buffers: &mut Regions,
    tick: &dyn Fn(u64),
) -> Result<Row, String> {
    cache.invalidate(Invalidate::All, PATIENCE).map_err(|e| e.to_string())?;
    let before = cache.stats();
    let mut latencies = Latencies::new();
    let mut all = Cost::default();
    let mut rounds = Vec::new();
    for _ in 0..plan.rounds {
        let mut wall = Duration::ZERO;
        for keys in plan.keys.chunks(plan.batch) {
            let cost = match mode {
                Mode::Lease => read_leases(cache, keys)?,
                Mode::Copy => read_copies(cache, keys, plan.value_bytes, buffers)?,
            };
            for _ in keys {
                latencies.record(cost.wall / keys.len() as u32);
            }
            wall += cost.wall;
            all.bytes += cost.bytes;
            all.wall += cost.wall;
            all.cpu += cost.cpu;
            tick(keys.len() as u64);
        }
        rounds.push(wall.as_secs_f64() * 1e3 / plan.keys.len() as f64);
    }
    let later = rounds.get(1..).unwrap_or_default();
    Ok(Row {
        batch: plan.batch,
        value_bytes: plan.value_bytes,
        cache_bytes: plan.cache_bytes,
        cache_on: plan.cache_on,
        mode,
        first_round_ms: rounds.first().copied().unwrap_or(f64::NAN),
        later_rounds_ms: later.iter().sum::<f64>() / later.len() as f64,
        ms: latencies.percentiles_ms(),
        gb_per_s: all.gb_per_s(),
        cpu_s_per_gb: all.cpu_s_per_gb(),
        ..traffic(&before, &cache.stats())
    })
}

/// The part of a row that the engine's own counters know.
fn traffic(before: &Stats, after: &Stats) -> Row {
    let lookups = (after.lookups - before.lookups).max(1);
    Row {
        hit_ratio: (after.hits - before.hits) as f64 / lookups as f64,
        received_direct_bytes: after.received_direct_bytes - before.received_direct_bytes,
        received_copied_bytes: after.received_copied_bytes - before.received_copied_bytes,
        batch: 0,
        value_bytes: 0,
        cache_bytes: 0,
        cache_on: false,
        mode: Mode::Lease,
        first_round_ms: 0.0,
        later_rounds_ms: 0.0,
        ms: Percentiles::default(),
        gb_per_s: 0.0,
        cpu_s_per_gb: 0.0,
    }
}

fn deadline() -> Deadline {
    PATIENCE.into()
}

/// Reads keys as leases in one call, timed; checks them, untimed.
pub fn read_leases(cache: &Cache, keys: &[String]) -> Result<Cost, String> {
    let wanted: Vec<Key<'_>> = keys.iter().map(Key::from).collect();
    let (cpu, started) = (process_cpu(), Instant::now());
    let leases = match wanted.as_slice() {
        [key] => vec![cache.get(*key, deadline())],
        keys => cache.get_batch(keys, deadline()),
    };
    let mut cost = Cost { bytes: 0, wall: started.elapsed(), cpu: process_cpu() - cpu };
    for (key, lease) in keys.iter().zip(leases) {
        let lease =
            lease.map_err(|e| format!("`{key}`: {e}"))?.ok_or_else(|| format!("`{key}` is absent"))?;
        check_lease(key, &lease)?;
        cost.bytes += lease.len();
    }
    Ok(cost)
}

/// Checks every byte under a lease.
pub fn check_lease(key: &str, lease: &Lease) -> Result<(), String> {
    let mut offset = 0;
    for segment in lease.segments() {
        Content::of(key).check(offset, segment).map_err(|d| format!("wrong byte in `{key}`: {d:?}"))?;
        offset += segment.len() as u64;
    }
    if offset == lease.len() {
        Ok(())
    } else {
        Err(format!("`{key}` shows {offset} of {} bytes", lease.len()))
    }
}

/// Reads keys into the caller's buffers in one call, timed; checks them, untimed.
pub fn read_copies(
    cache: &Cache,
    keys: &[String],
    value_bytes: usize,
    buffers: &mut Regions,
) -> Result<Cost, String> {
    let mut slices = buffers.slices(keys.len());
    let (cpu, started) = (process_cpu(), Instant::now());
    let results = match slices.as_mut_slice() {
        [only] => vec![cache.get_into(&keys[0], only, deadline())],
        many => {
            let mut reads: Vec<Read<'_>> =
                keys.iter().zip(many).map(|(key, into)| Read { key: Key::from(key), into }).collect();
            cache.get_into_batch(&mut reads, deadline())
        }
    };
    let mut cost = Cost { bytes: 0, wall: started.elapsed(), cpu: process_cpu() - cpu };
    for ((key, result), slice) in keys.iter().zip(results).zip(slices) {
        let len = result.map_err(|e| format!("`{key}`: {e}"))?.ok_or_else(|| format!("`{key}` is absent"))?;
        if len != value_bytes as u64 {
            return Err(format!("`{key}` has {len} bytes instead of {value_bytes}"));
        }
        Content::of(key)
            .check(0, &slice[..value_bytes])
            .map_err(|d| format!("wrong byte in the copy of `{key}`: {d:?}"))?;
        cost.bytes += len;
    }
    Ok(cost)
}
