//! Leased hits: what acquiring and releasing costs one caller, beside what the clock and one read of memory
//! that is in no cache cost at the same time.

use super::args::BenchArgs;
use super::bars::Bar;
use super::fronts;
use super::measure::Latencies;
use super::rows::{self, PATIENCE};
use hotslice::Cache;
use hotslice::memory::{GRANULE_BYTES, granules_for};
use std::fmt::Write as _;
use std::hint::black_box;
use std::time::Instant;

const CACHE_BYTES: u64 = 400_000_000;
const SMALL_KEYS: usize = 10_000;
const SMALL_BYTES: usize = 4096;
const LARGE_BYTES: usize = 10_000_000;

/// Acquire and release of leases on hits, one caller: 10,000 keys of 4 KB, and beside them as many of 10 MB
/// as fit, so that there are as many lookups of either kind, all in one random order. Each operation is timed
/// on its own, readings of the clock included. Its key is written just before, as engines do, which make keys
/// from hashes of tokens: how long somebody else's memory takes to come is no cost of a hit.
pub fn leased_hits(args: &BenchArgs) -> Result<Vec<Bar>, String> {
    let cache = rows::open(args, CACHE_BYTES, None)?;
    let kinds = [
        ("4 KB", Keys::fill(&cache, 0, SMALL_KEYS, SMALL_BYTES)?),
        ("10 MB", {
            let stats = cache.stats();
            let free_granules = (stats.arena_bytes - stats.used_bytes) / GRANULE_BYTES as u64;
            // Per shard, keys fall unevenly: leave some room.
            let room = free_granules / granules_for(LARGE_BYTES as u64);
            let count = if args.shards > 1 { room / 2 } else { room };
            Keys::fill(&cache, 1, count as usize, LARGE_BYTES)?
        }),
    ];
    let mut random = Random(1);
    let mut order: Vec<(usize, usize)> = Vec::new();
    for (kind, (_, keys)) in kinds.iter().enumerate() {
        order.extend((0..SMALL_KEYS).map(|i| (kind, i % keys.count)));
    }
    let mut key = String::new();
    let mut latencies = [Latencies::new(), Latencies::new()];
    for _ in 0..if args.quick { 10 } else { 50 } {
        random.shuffle(&mut order);
        for &(kind, number) in &order {
            kinds[kind].1.write(number, &mut key);
            let started = Instant::now();
            let found = hit(&cache, &key);
            let elapsed = started.elapsed();
            if !found {
                return Err(format!("`{key}` was evicted"));
            }
            latencies[kind].record(elapsed);
        }
    }
    let clock = clock();
    let memory_ns = memory_latency_ns(&mut random);
    let mut bars = Vec::new();
    for ((name, keys), latencies) in kinds.iter().zip(&latencies) {
        let note = format!(
            "{} keys; without clock {:.0} ns; clock alone p50 {} ns, p99 {} ns; a read that misses all caches \
             {memory_ns:.0} ns",
            keys.count,
            mean_ns(&cache, keys, &mut random)?,
            clock.quantile_ns(0.5),
            clock.quantile_ns(0.99)
        );
        let ns = |quantile| latencies.quantile_ns(quantile) as f64;
        bars.push(Bar::at_most(format!("leased hit, {name}, p50"), ns(0.5), 300.0, "ns", note.clone()));
        bars.push(Bar::at_most(format!("leased hit, {name}, p99"), ns(0.99), 2000.0, "ns", note));
    }
    let (small, rounds) = (&kinds[0].1, if args.quick { 5 } else { 20 });
    bars.push(fronts::queued_hits(&cache, small, &mut random, rounds)?);
    bars.push(fronts::batched_hits(&cache, small, &mut random, rounds)?);
    Ok(bars)
}

#[inline]
fn hit(cache: &Cache, key: &str) -> bool {
    let lease = black_box(cache.get(key, PATIENCE));
    matches!(lease, Ok(Some(_)))
}

/// The keys of one kind of value.
pub struct Keys {
    tensor: u32,
    count: usize,
}

impl Keys {
    /// Puts `count` values.
    fn fill(cache: &Cache, tensor: u32, count: usize, value_bytes: usize) -> Result<Self, String> {
        let (keys, value, mut key) = (Self { tensor, count }, vec![7u8; value_bytes], String::new());
        for number in 0..count {
            keys.write(number, &mut key);
            cache.put(&key, &value, PATIENCE).map_err(|e| e.to_string())?;
        }
        Ok(keys)
    }

    /// Number of keys.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Writes one key in place of what `into` held.
    pub fn write(&self, number: usize, into: &mut String) {
        into.clear();
        // Writing to a string cannot fail.
        let _ = write!(into, "qwen3-8b/tp{}/{number:032x}", self.tensor);
    }
}

/// Mean of an acquire and release without a clock in between, over short runs of which the middle one counts:
/// most of them see no other process. The keys of a run are written before it.
fn mean_ns(cache: &Cache, keys: &Keys, random: &mut Random) -> Result<f64, String> {
    const RUN: usize = 100;
    let mut order: Vec<usize> = (0..SMALL_KEYS).map(|i| i % keys.count).collect();
    let mut run = vec![String::new(); RUN];
    let mut runs = Latencies::new();
    for _ in 0..5 {
        random.shuffle(&mut order);
        for numbers in order.chunks_exact(RUN) {
            for (key, &number) in run.iter_mut().zip(numbers) {
                keys.write(number, key);
            }
            let started = Instant::now();
            let found = run.iter().filter(|key| hit(cache, key)).count();
            runs.record(started.elapsed());
            if found < RUN {
                return Err("a value was evicted".to_owned());
            }
        }
    }
    Ok(runs.quantile_ns(0.5) as f64 / RUN as f64)
}

fn clock() -> Latencies {
    let mut latencies = Latencies::new();
    for _ in 0..100_000 {
        let started = Instant::now();
        latencies.record(started.elapsed());
    }
    latencies
}

/// Time of one read that depends on the one before and finds its line in no cache: what a lookup among many
/// keys is made of, and what other programs on the machine make dearer.
fn memory_latency_ns(random: &mut Random) -> f64 {
    const LINES: usize = 1 << 20;
    const RUN: usize = 100;
    #[repr(align(64))]
    #[derive(Clone, Copy)]
    struct Line(usize);
    let mut order: Vec<usize> = (0..LINES).collect();
    random.shuffle(&mut order);
    let mut lines = vec![Line(0); LINES];
    for (i, &line) in order.iter().enumerate() {
        lines[line] = Line(order[(i + 1) % LINES]);
    }
    let mut runs = Latencies::new();
    let mut at = 0;
    for _ in 0..1000 {
        let started = Instant::now();
        for _ in 0..RUN {
            at = lines[at].0;
        }
        at = black_box(at);
        runs.record(started.elapsed());
    }
    runs.quantile_ns(0.5) as f64 / RUN as f64
}

/// A linear congruential generator (the constants are Knuth's): orders only have to be the same every time.
pub struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % limit
    }

    /// Fisher and Yates.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, self.below(i + 1));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shuffling_keeps_everything_and_moves_most() {
        let mut items: Vec<usize> = (0..1000).collect();
        Random(1).shuffle(&mut items);
        assert!(items.iter().enumerate().filter(|&(i, &item)| i == item).count() < 20);
        items.sort_unstable();
        assert!(items.into_iter().eq(0..1000));
    }
}
