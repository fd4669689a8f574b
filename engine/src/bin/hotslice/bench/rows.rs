//! The rows of the main table: reading values through the engine, cache off and on, every byte checked.

use super::args::{BenchArgs, Geometry};
use super::content::Content;
use super::measure::{Cost, CpuMeter, Latencies, Percentiles};
use super::regions::Regions;
use hotslice::{Admission, Cache, Config, Deadline, Invalidate, Key, Lease, Read, ShardReport, Stats};
use serde::Serialize;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// How values are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// As a lease, nothing copied.
    Lease,
    /// Copied into the caller's buffer.
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
    /// Per key, all rounds; a key of a batch counts as its share of the call.
    pub ms: Percentiles,
    /// All rounds.
    pub gb_per_s: f64,
    /// All rounds, and all threads of this process; the bench's own work excluded.
    pub cpu_s_per_gb: f64,
    #[serde(flatten)]
    pub traffic: Traffic,
}

/// The part of a row that the engine's own counters know.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Traffic {
    pub hit_ratio: f64,
    pub received_direct_bytes: u64,
    pub received_copied_bytes: u64,
}

impl Traffic {
    pub fn between(before: &Stats, after: &Stats) -> Self {
        let lookups = (after.lookups - before.lookups).max(1);
        Self {
            hit_ratio: (after.hits - before.hits) as f64 / lookups as f64,
            received_direct_bytes: after.received_direct_bytes - before.received_direct_bytes,
            received_copied_bytes: after.received_copied_bytes - before.received_copied_bytes,
        }
    }

    /// Percent of the bytes received that needed no copy; `None` if nothing was received.
    pub fn direct_percent(&self) -> Option<f64> {
        let all = self.received_direct_bytes + self.received_copied_bytes;
        (all > 0).then(|| 100.0 * self.received_direct_bytes as f64 / all as f64)
    }
}

/// What a row reads.
pub struct Plan<'a> {
    pub keys: &'a [String],
    pub geometry: Geometry,
    pub cache_on: bool,
    pub batch: usize,
    pub rounds: usize,
    pub mode: Mode,
}

/// How long a single call may take before the bench gives up.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// A cache with the bench's own settings, and an origin if there is one.
pub fn open(args: &BenchArgs, capacity_bytes: u64, origin: Option<SocketAddr>) -> Result<Cache, String> {
    open_with(args.config(capacity_bytes), origin)
}

/// As [`open`], but nothing stays in it: every read goes to the origin.
pub fn open_off(args: &BenchArgs, capacity_bytes: u64, origin: SocketAddr) -> Result<Cache, String> {
    let mut config = args.config(capacity_bytes);
    config.admission = Admission::Off;
    open_with(config, Some(origin))
}

fn open_with(mut config: Config, origin: Option<SocketAddr>) -> Result<Cache, String> {
    config.origin = origin.into_iter().map(Into::into).collect();
    Cache::open(config).map_err(|e| e.to_string())
}

/// Runs the rows of one value size: single gets and batches, cache off and on, leased and copied. Returns
/// what the shards obtained, too. `done` hears of values read.
pub fn run_all(
    args: &BenchArgs,
    geometry: Geometry,
    keys: &[String],
    server: SocketAddr,
    done: &dyn Fn(&str, u64),
) -> Result<(Vec<Row>, Vec<ShardReport>), String> {
    let batch = (args.batch as usize).min(keys.len());
    let mut buffers = Regions::new(batch, geometry.value_bytes, args.pages)?;
    let mut rows = Vec::new();
    let mut reports = Vec::new();
    for cache_on in [false, true] {
        let cache = match cache_on {
            true => open(args, geometry.cache_bytes, Some(server))?,
            false => open_off(args, geometry.cache_bytes, server)?,
        };
        reports = cache.reports().to_vec();
        for batch in [1, batch] {
            for mode in [Mode::Lease, Mode::Copy] {
                let rounds = args.rounds as usize;
                let plan = Plan { keys, geometry, cache_on, batch, rounds, mode };
                rows.push(run(&cache, &plan, &mut buffers, done)?);
            }
        }
    }
    Ok((rows, reports))
}

/// Runs one row. `buffers` are the caller's, at least one per key of a batch.
fn run(
    cache: &Cache,
    plan: &Plan<'_>,
    buffers: &mut Regions,
    done: &dyn Fn(&str, u64),
) -> Result<Row, String> {
    cache.invalidate(Invalidate::All, PATIENCE).map_err(|e| e.to_string())?;
    let before = cache.stats();
    let mut latencies = Latencies::new();
    let mut cost = Cost::default();
    let mut rounds_ms = Vec::new();
    let mut meter = CpuMeter::start();
    for _ in 0..plan.rounds {
        let mut round = Duration::ZERO;
        for keys in plan.keys.chunks(plan.batch) {
            let read = match plan.mode {
                Mode::Lease => read_leases(cache, keys, &mut meter)?,
                Mode::Copy => read_copies(cache, keys, plan.geometry.value_bytes, buffers, &mut meter)?,
            };
            meter.excluding(|| {
                keys.iter().for_each(|_| latencies.record(read.wall / keys.len() as u32));
                done(
                    if plan.cache_on { "reading, cache on" } else { "reading, cache off" },
                    keys.len() as u64,
                );
            });
            round += read.wall;
            cost.bytes += read.bytes;
        }
        cost.wall += round;
        rounds_ms.push(round.as_secs_f64() * 1e3 / plan.keys.len() as f64);
    }
    cost.cpu = meter.spent();
    let (first, later) = rounds_ms.split_first().ok_or("no rounds")?;
    Ok(Row {
        batch: plan.batch,
        value_bytes: plan.geometry.value_bytes,
        cache_bytes: plan.geometry.cache_bytes,
        cache_on: plan.cache_on,
        mode: plan.mode,
        first_round_ms: *first,
        later_rounds_ms: later.iter().sum::<f64>() / later.len() as f64,
        ms: latencies.percentiles_ms(),
        gb_per_s: cost.gb_per_s(),
        cpu_s_per_gb: cost.cpu_s_per_gb(),
        traffic: Traffic::between(&before, &cache.stats()),
    })
}

/// One timed call.
pub struct Taken {
    pub bytes: u64,
    pub wall: Duration,
}

/// Reads keys as leases in one call, timed; checks them, neither timed nor metered.
pub fn read_leases(cache: &Cache, keys: &[String], meter: &mut CpuMeter) -> Result<Taken, String> {
    let wanted: Vec<Key<'_>> = keys.iter().map(Key::from).collect();
    let started = Instant::now();
    let leases = match wanted.as_slice() {
        [key] => vec![cache.get(*key, Deadline::from(PATIENCE))],
        keys => cache.get_batch(keys, PATIENCE),
    };
    let wall = started.elapsed();
    let mut bytes = 0;
    // Held until all are checked, as a caller would; released within the meter.
    let mut held = Vec::with_capacity(leases.len());
    for (key, lease) in keys.iter().zip(leases) {
        let lease = present(key, lease)?;
        meter.excluding(|| check_lease(key, &lease))?;
        bytes += lease.len();
        held.push(lease);
    }
    Ok(Taken { bytes, wall })
}

fn present<T>(key: &str, found: hotslice::Result<Option<T>>) -> Result<T, String> {
    found.map_err(|e| format!("`{key}`: {e}"))?.ok_or_else(|| format!("`{key}` is absent"))
}

/// Checks every byte under a lease.
fn check_lease(key: &str, lease: &Lease) -> Result<(), String> {
    let mut offset = 0;
    for segment in lease.segments() {
        Content::of(key).check(offset, segment).map_err(|difference| format!("`{key}`: {difference}"))?;
        offset += segment.len() as u64;
    }
    match offset == lease.len() {
        true => Ok(()),
        false => Err(format!("`{key}` shows {offset} of {} bytes", lease.len())),
    }
}

/// Reads keys into the caller's buffers in one call, timed; checks them, neither timed nor metered.
fn read_copies(
    cache: &Cache,
    keys: &[String],
    value_bytes: usize,
    buffers: &mut Regions,
    meter: &mut CpuMeter,
) -> Result<Taken, String> {
    meter.excluding(|| (0..keys.len()).for_each(|index| buffers.spoil(index)));
    let mut slices = buffers.slices(keys.len());
    let started = Instant::now();
    let results = match slices.as_mut_slice() {
        [only] => vec![cache.get_into(&keys[0], only, PATIENCE)],
        many => {
            let mut reads: Vec<Read<'_>> =
                keys.iter().zip(many).map(|(key, into)| Read { key: Key::from(key), into }).collect();
            cache.get_into_batch(&mut reads, PATIENCE)
        }
    };
    let wall = started.elapsed();
    let mut bytes = 0;
    for ((key, result), slice) in keys.iter().zip(results).zip(slices) {
        let len = present(key, result)?;
        meter.excluding(|| check_copy(key, len, value_bytes, slice))?;
        bytes += len;
    }
    Ok(Taken { bytes, wall })
}

/// Checks a value that was copied out: its length as reported and every byte.
pub fn check_copy(key: &str, len: u64, value_bytes: usize, copy: &[u8]) -> Result<(), String> {
    if len != value_bytes as u64 {
        return Err(format!("`{key}` has {len} bytes instead of {value_bytes}"));
    }
    Content::of(key)
        .check(0, &copy[..value_bytes])
        .map_err(|difference| format!("copy of `{key}`: {difference}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_byte_or_length_in_a_copy_is_said() {
        let mut copy = Content::of("k").bytes(5000);
        assert_eq!(check_copy("k", 5000, 5000, &copy), Ok(()));
        assert!(check_copy("k", 4999, 5000, &copy).is_err_and(|e| e.contains("4999")));
        copy[4998] ^= 1;
        let said = check_copy("k", 5000, 5000, &copy);
        assert!(said.is_err_and(|e| e.contains("`k`") && e.contains("4998")));
    }

    #[test]
    fn a_wrong_byte_under_a_lease_is_said() {
        let mut config = Config::new(1 << 20);
        (config.block_bytes, config.pages) = (64 << 10, hotslice::memory::PagePolicy::Off);
        let cache = open_with(config, None).unwrap();
        // Spans blocks, so that later segments are checked at their own offsets.
        let mut value = Content::of("k").bytes(200_001);
        cache.put("k", &value, PATIENCE).unwrap();
        let keys = ["k".to_owned()];
        assert!(read_leases(&cache, &keys, &mut CpuMeter::start()).is_ok());
        value[150_000] ^= 0x80;
        cache.put("k", &value, PATIENCE).unwrap();
        let said = read_leases(&cache, &keys, &mut CpuMeter::start()).map(|_| ());
        assert!(said.is_err_and(|e| e.contains("offset 150000")));
    }
}
