//! Hits through the other fronts: the completion queue, and batches.

use super::bars::Bar;
use super::hits::{Keys, Random};
use super::measure::Latencies;
use super::rows::PATIENCE;
use hotslice::{Cache, CompletionQueue, Key, Outcome, Target};
use std::hint::black_box;
use std::time::Instant;

/// Keys per batch.
const BATCH: usize = 2000;

/// Submitting a hit and polling its completion, lease released; each timed on its own, keys in random order, written just
/// before.
pub fn queued_hits(cache: &Cache, keys: &Keys, random: &mut Random, rounds: usize) -> Result<Bar, String> {
    let mut queue = CompletionQueue::new(cache, 16).map_err(|e| e.to_string())?;
    let mut latencies = Latencies::new();
    let mut order: Vec<usize> = (0..keys.count()).collect();
    let mut key = String::new();
    for _ in 0..rounds {
        random.shuffle(&mut order);
        for &number in &order {
            keys.write(number, &mut key);
            let started = Instant::now();
            queue.get(&key, Target::Lease, 1, PATIENCE);
            let completion = black_box(queue.poll());
            let is_hit =
                completion.is_some_and(|completion| matches!(completion.result, Ok(Outcome::Lease(_))));
            latencies.record(started.elapsed());
            if !is_hit {
                return Err(format!("`{key}` was evicted"));
            }
        }
    }
    let note = format!("{} keys of 4 KB; p99 {} ns", keys.count(), latencies.quantile_ns(0.99));
    let p50 = latencies.quantile_ns(0.5) as f64;
    Ok(Bar::at_most("hit through the completion queue (submit, poll, release), p50", p50, 500.0, "ns", note))
}

/// Batches of leases, acquired and released; time of a whole batch over its keys.
pub fn batched_hits(cache: &Cache, keys: &Keys, random: &mut Random, rounds: usize) -> Result<Bar, String> {
    let mut latencies = Latencies::new();
    let mut order: Vec<usize> = (0..keys.count()).collect();
    let mut names = vec![String::new(); BATCH];
    for _ in 0..rounds {
        random.shuffle(&mut order);
        for numbers in order.chunks_exact(BATCH) {
            for (name, &number) in names.iter_mut().zip(numbers) {
                keys.write(number, name);
            }
            let batch: Vec<Key<'_>> = names.iter().map(Key::from).collect();
            let started = Instant::now();
            let leases = black_box(cache.get_batch(&batch, PATIENCE));
            let found = leases.iter().filter(|lease| matches!(lease, Ok(Some(_)))).count();
            drop(leases);
            latencies.record(started.elapsed());
            if found < BATCH {
                return Err("a value was evicted".to_owned());
            }
        }
    }
    let per_key = |quantile| latencies.quantile_ns(quantile) as f64 / BATCH as f64;
    let note = format!("{} keys of 4 KB; p99 {:.0} ns per key", keys.count(), per_key(0.99));
    let what = format!("batch of {BATCH} hits (leases acquired and released), p50 per key");
    Ok(Bar::at_most(what, per_key(0.5), 250.0, "ns", note))
}
