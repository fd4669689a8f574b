//! Large values in parts over several lanes: against one lane, and what they do to small values beside them.

use super::args::BenchArgs;
use super::bars::Bar;
use super::measure::{CpuMeter, Latencies};
use super::rows::{self, PATIENCE};
use hotslice::Cache;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

/// Size of the values that are read over several lanes and over one.
pub const STRIPED_BYTES: usize = 100_000_000;
/// How many of them there are.
pub const STRIPED_COUNT: usize = 2;
/// Size of the small values.
pub const SMALL_BYTES: usize = 64 << 10;
/// How many of them there are.
pub const SMALL_COUNT: usize = 64;

/// Size of the value beside which small ones are read.
pub fn large_bytes(args: &BenchArgs) -> usize {
    if args.quick { STRIPED_BYTES } else { 600_000_000 }
}

/// Speed of reading 100 MB over all lanes, key by key in alternation with one lane.
pub fn against_one_lane(args: &BenchArgs, keys: &[String], server: SocketAddr) -> Result<Bar, String> {
    let open = |lanes| rows::open_off(&BenchArgs { lanes, ..args.clone() }, 2 * STRIPED_BYTES as u64, server);
    let (striped, single) = (open(args.lanes)?, open(1)?);
    let (mut ours, mut floor) = (Latencies::new(), Latencies::new());
    for round in 0..if args.quick { 4 } else { 12 } {
        for key in keys {
            for (cache, latencies) in [(&single, &mut floor), (&striped, &mut ours)] {
                let read = rows::read_leases(cache, std::slice::from_ref(key), &mut CpuMeter::start())?;
                // The first round warms connections and memory up.
                if round > 0 {
                    latencies.record(read.wall);
                }
            }
        }
    }
    let ms = |latencies: &Latencies| latencies.quantile_ns(0.5) as f64 / 1e6;
    let config = striped.config();
    let note = format!(
        "p50 {:.1} ms against {:.1} ms; {} lanes, stripes of {} bytes",
        ms(&ours),
        ms(&floor),
        config.lanes_per_peer,
        config.stripe_bytes
    );
    // Where one lane is as fast as the machine, as over loopback, the two differ by noise.
    let what = "cold read, 100 MB, speed over several lanes against one";
    Ok(Bar::at_least(what, ms(&floor) / ms(&ours), 0.95, "×", note))
}

/// The 99th percentile of reading 64 KiB while another thread reads one large value after the other, against the same
/// without it.
pub fn fairness(args: &BenchArgs, small: &[String], large: &str, server: SocketAddr) -> Result<Bar, String> {
    let cache = rows::open_off(args, large_bytes(args) as u64 + (64 << 20), server)?;
    read_small(&cache, small, 2)?;
    rows::read_leases(&cache, &[large.to_owned()], &mut CpuMeter::start())?;
    let rounds = if args.quick { 8 } else { 30 };
    let idle = read_small(&cache, small, rounds)?;
    let (stop, reads) = (AtomicBool::new(false), AtomicU64::new(0));
    let beside = std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                match cache.get(large, PATIENCE) {
                    Ok(Some(lease)) => drop(lease),
                    other => return Err(format!("`{large}`: {other:?}")),
                }
                reads.fetch_add(1, Ordering::Relaxed);
            }
            Ok(())
        });
        // From the middle of the first one on.
        let bytes = || cache.stats().received_direct_bytes;
        let before = bytes();
        while bytes() < before + large_bytes(args) as u64 / 10 && !reader.is_finished() {
            std::thread::yield_now();
        }
        let beside = read_small(&cache, small, rounds);
        stop.store(true, Ordering::Relaxed);
        reader.join().map_err(|_| "the reader panicked".to_owned())??;
        beside
    })?;
    let us = |latencies: &Latencies, q| latencies.quantile_ns(q) as f64 / 1e3;
    let note = format!(
        "p50 / p99 {:.0} / {:.0} µs against {:.0} / {:.0} µs; {} reads of {} MB meanwhile",
        us(&beside, 0.5),
        us(&beside, 0.99),
        us(&idle, 0.5),
        us(&idle, 0.99),
        reads.into_inner(),
        large_bytes(args) / 1_000_000
    );
    let what = "cold read, 64 KiB beside large values, p99 against the same alone";
    Ok(Bar::at_most(what, us(&beside, 0.99) / us(&idle, 0.99), 5.0, "×", note))
}

fn read_small(cache: &Cache, keys: &[String], rounds: usize) -> Result<Latencies, String> {
    let mut latencies = Latencies::new();
    for _ in 0..rounds {
        for key in keys {
            let started = Instant::now();
            let lease = cache.get(key, PATIENCE).map_err(|e| format!("`{key}`: {e}"))?;
            latencies.record(started.elapsed());
            lease.ok_or_else(|| format!("`{key}` is absent"))?;
        }
    }
    Ok(latencies)
}
