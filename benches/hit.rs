//! Cost of a hit by number of keys: acquire and release of a lease, keys in random order, each written just
//! before its lookup (which is not timed).
//!
//! `cargo bench -p hotslice-benches --bench hit`. Prints HDR percentiles in nanoseconds beside the clock's own
//! cost, which is contained in them.

use hdrhistogram::Histogram;
use hotslice::{Cache, Config};
use std::fmt::Write as _;
use std::hint::black_box;
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(30);
const LOOKUPS: usize = 500_000;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("clock: p50 {} ns", record(|| Instant::now().elapsed())?.value_at_quantile(0.5));
    println!("{:>9} {:>7} {:>7} {:>7} {:>7} {:>9}   (ns)", "keys", "p50", "p90", "p99", "p99.9", "max");
    for count in [1, 100, 10_000, 100_000] {
        let cache = Cache::open(Config::new(512 << 20))?;
        let mut key = String::new();
        for number in 0..count {
            write_key(&mut key, number);
            cache.put(&key, &[7; 4096], PATIENCE)?;
        }
        let mut random = 1u64;
        let histogram = record(|| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            write_key(&mut key, (random >> 33) as usize % count);
            let started = Instant::now();
            drop(black_box(cache.get(&key, PATIENCE)));
            started.elapsed()
        })?;
        let at = |quantile| histogram.value_at_quantile(quantile);
        let (p50, p90, p99, p99_9) = (at(0.5), at(0.9), at(0.99), at(0.999));
        println!("{count:>9} {p50:>7} {p90:>7} {p99:>7} {p99_9:>7} {:>9}", histogram.max());
        let stats = cache.stats();
        assert_eq!((stats.misses, stats.hits), (0, LOOKUPS as u64), "every lookup is a hit");
    }
    Ok(())
}

fn write_key(key: &mut String, number: usize) {
    key.clear();
    let _ = write!(key, "qwen3-8b/tp0/{number:032x}");
}

fn record(mut operation: impl FnMut() -> Duration) -> Result<Histogram<u64>, hdrhistogram::CreationError> {
    let mut histogram = Histogram::new_with_bounds(1, 1_000_000_000, 3)?;
    for _ in 0..LOOKUPS {
        histogram.saturating_record(operation().as_nanos() as u64);
    }
    Ok(histogram)
}
