//! Promises 4, 6 and 7 where memory is short: the working set may be larger than the cache, leases may pin all
//! of it, and nothing hangs.

use hotslice::memory::GRANULE_BYTES;
use hotslice::{Deadline, Error, Key, Lease, Namespace, Read};
use hotslice_tests::content::{self, name};
use hotslice_tests::gauges::{alone, assert_quiet, finish};
use hotslice_tests::origin::{FakeOrigin, Then};
use hotslice_tests::setup::{MIB, config, open, open_local, open_with, soon};
use hotslice_tests::sync::eventually;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

fn keys(names: &[String]) -> Vec<Key<'_>> {
    names.iter().map(|name| Namespace::DEFAULT.key(name)).collect()
}

fn check(name: &str, lease: &Lease) {
    content::check_lease(name.as_bytes(), 1, content::named_len(name.as_bytes()).unwrap(), lease);
}

#[test]
fn a_working_set_larger_than_the_cache_keeps_working() {
    for policy in ["s3fifo", "lru"] {
        alone(|| {
            let origin = FakeOrigin::well_behaved();
            let mut config = config(4 * MIB, &[origin.address()]);
            config.policy = policy.parse().unwrap();
            let cache = open_with(config);
            let sizes = [0, 1, 4097, 60_000, 300_001, MIB + 1];
            for round in 0..3 {
                for i in 0..100 {
                    let name = name(sizes[i % sizes.len()], i);
                    check(&name, &cache.get(&name, soon()).unwrap().unwrap());
                    assert!(cache.stats().used_bytes <= 4 * MIB as u64, "round {round}");
                }
            }
            assert!(cache.stats().evictions > 100, "{policy}");
            assert_eq!(cache.stats().starvations, 0, "{policy}: nothing was pinned");
            finish(cache);
        });
    }
}

#[test]
fn more_values_than_slots_evict_too() {
    alone(|| {
        let mut config = config(4 * MIB, &[]);
        config.entries_max = 10;
        let cache = open_with(config);
        for i in 0..100 {
            let name = name(i % 3, i);
            cache.put(&name, &content::bytes(name.as_bytes(), 1, i % 3), soon()).unwrap();
            check(&name, &cache.peek(&name).unwrap().unwrap());
        }
        assert!(cache.stats().entries <= 10);
        finish(cache);
    });
}

#[test]
fn values_that_can_never_fit_cost_nobody_else() {
    alone(|| {
        let origin = FakeOrigin::well_behaved();
        let cache = open(4 * MIB, origin.address());
        // Several of them, too long to be received for nothing, on the same lanes as the others.
        let names: Vec<String> =
            (0..24).map(|i| name(if i % 3 == 0 { 12 * MIB + i } else { 10_000 + i }, i)).collect();
        let results = cache.get_batch(&keys(&names), soon());
        for (i, (name, result)) in names.iter().zip(&results).enumerate() {
            match result {
                Err(Error::ValueTooLarge { value_bytes, arena_bytes }) if i % 3 == 0 => {
                    assert_eq!((*value_bytes, *arena_bytes), (12 * MIB as u64 + i as u64, 4 * MIB as u64));
                }
                Ok(Some(lease)) if i % 3 != 0 => check(name, lease),
                other => panic!("{name}: {other:?}"),
            }
        }
        drop(results);
        finish(cache);
    });
}

#[test]
fn answers_nobody_waits_for_any_longer_cost_nobody_else() {
    alone(|| {
        let gate = std::sync::Arc::new(hotslice_tests::sync::Gate::default());
        let inner = gate.clone();
        let origin = FakeOrigin::start(move |ask, line| {
            inner.pass();
            line.answer_by_name(ask);
            hotslice_tests::origin::Then::GoOn
        });
        let mut config = config(64 * MIB, &[origin.address()]);
        config.lanes_per_peer = 1;
        let cache = open_with(config);
        let large: Vec<String> = (0..4).map(|i| name(9 * MIB, i)).collect();
        std::thread::scope(|scope| {
            let first = scope.spawn(|| cache.get(&name(1, 0), soon()).unwrap().unwrap());
            origin.wait_requests(1);
            let results = cache.get_batch(&keys(&large), Deadline::after_ms(100));
            for result in &results {
                assert!(matches!(result, Err(Error::DeadlinePassed { .. })), "{result:?}");
            }
            // Queued behind four answers that are not worth receiving.
            let patient = scope.spawn(|| cache.get(&name(5000, 1), soon()).unwrap().unwrap());
            eventually(|| "the last miss".to_owned(), || cache.stats().fills == 6);
            gate.open();
            check(&name(1, 0), &first.join().unwrap());
            check(&name(5000, 1), &patient.join().unwrap());
        });
        finish(cache);
    });
}

/// A cache of `n` values of 1 MiB, all of them leased.
fn pin_all(cache: &hotslice::Cache, n: usize) -> Vec<Lease> {
    (0..n)
        .map(|i| {
            let name = name(MIB, i);
            cache.put(&name, &content::bytes(name.as_bytes(), 1, MIB), soon()).unwrap();
            cache.peek(&name).unwrap().unwrap()
        })
        .collect()
}

fn assert_pinned<T: std::fmt::Debug>(result: Result<T, Error>, bytes: usize, arena: usize) {
    match result {
        Err(Error::Pinned { value_bytes, pinned_bytes, arena_bytes }) => {
            assert_eq!(value_bytes, bytes as u64);
            assert_eq!((pinned_bytes, arena_bytes), (arena as u64, arena as u64));
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn all_bytes_pinned_is_an_error_at_the_deadline() {
    alone(|| {
        let origin = FakeOrigin::well_behaved();
        let cache = open(4 * MIB, origin.address());
        let leases = pin_all(&cache, 4);
        let other = name(5000, 9);
        assert_pinned(cache.get(&other, Deadline::after_ms(150)), 5000, 4 * MIB);
        assert_pinned(cache.put("put", &[7; 4097], Deadline::after_ms(150)), 4097, 4 * MIB);
        // What needs no room is served meanwhile.
        check(&name(MIB, 0), &cache.get(&name(MIB, 0), soon()).unwrap().unwrap());
        assert!(cache.get("absent", soon()).unwrap().is_none());
        let empty = name(0, 0);
        check(&empty, &cache.get(&empty, soon()).unwrap().unwrap());
        assert!(cache.stats().starvations >= 1);
        for (i, lease) in leases.iter().enumerate() {
            check(&name(MIB, i), lease);
        }
        drop(leases);
        check(&other, &cache.get(&other, soon()).unwrap().unwrap());
        finish(cache);
    });
}

#[test]
fn a_lease_dropped_in_time_makes_room_for_who_waits() {
    alone(|| {
        let origin = FakeOrigin::well_behaved();
        let cache = open(4 * MIB, origin.address());
        for put in [false, true] {
            let mut leases = pin_all(&cache, 4);
            let before = cache.stats().starvations;
            let other = name(MIB, 90 + usize::from(put));
            std::thread::scope(|scope| {
                let waiter = scope.spawn(|| {
                    if put {
                        cache.put(&other, &content::bytes(other.as_bytes(), 1, MIB), soon()).unwrap();
                    }
                    cache.get(&other, soon()).unwrap().unwrap()
                });
                eventually(|| "starvation".to_owned(), || cache.stats().starvations > before);
                drop(leases.pop());
                check(&other, &waiter.join().unwrap());
            });
        }
        finish(cache);
    });
}

#[test]
fn the_last_of_many_leases_on_a_forgotten_value_makes_room() {
    alone(|| {
        let cache = open_local(4 * MIB);
        let mut leases = pin_all(&cache, 4);
        leases.push(cache.peek(&name(MIB, 0)).unwrap().unwrap());
        // Condemned: it comes back over another way than one that is evicted.
        cache.invalidate(hotslice::Invalidate::Key(Namespace::DEFAULT.key(&name(MIB, 0))), soon()).unwrap();
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| cache.put("new", &content::bytes(b"new", 1, MIB), soon()));
            eventually(|| "starvation".to_owned(), || cache.stats().starvations == 1);
            drop(leases.swap_remove(0));
            assert!(!cache.contains("new").unwrap());
            drop(leases.pop().filter(|lease| lease.len() == MIB as u64));
            // One of the two leases on the forgotten value was first, the other is now the last.
            leases.clear();
            waiter.join().unwrap().unwrap();
        });
        content::check_lease(b"new", 1, MIB, &cache.peek("new").unwrap().unwrap());
        finish(cache);
    });
}

#[test]
fn a_copying_batch_of_four_times_the_cache_streams_through() {
    alone(|| {
        let origin = FakeOrigin::well_behaved();
        let cache = open(4 * MIB, origin.address());
        let names: Vec<String> = (0..32).map(|i| name(MIB / 2 + i * 13, i)).collect();
        for _ in 0..2 {
            let mut buffers: Vec<Vec<u8>> =
                names.iter().enumerate().map(|(i, _)| vec![0; MIB / 2 + i * 13]).collect();
            let mut reads: Vec<Read<'_>> =
                keys(&names).into_iter().zip(&mut buffers).map(|(key, into)| Read { key, into }).collect();
            let results = cache.get_into_batch(&mut reads, soon());
            for (i, result) in results.into_iter().enumerate() {
                assert_eq!(result.unwrap(), Some((MIB / 2 + i * 13) as u64));
            }
            for (name, buffer) in names.iter().zip(&buffers) {
                content::check(name.as_bytes(), 1, 0, buffer);
            }
        }
        finish(cache);
    });
}

#[test]
fn a_leasing_batch_larger_than_the_cache_is_told_so_at_once() {
    alone(|| {
        let origin = FakeOrigin::well_behaved();
        let cache = open(4 * MIB, origin.address());
        let there = name(MIB, 100);
        cache.get(&there, soon()).unwrap().unwrap();
        let mut names: Vec<String> = (0..12).map(|i| name(MIB, i)).collect();
        names.insert(5, there);
        let results = cache.get_batch(&keys(&names), soon());
        for (i, (name, result)) in names.iter().zip(&results).enumerate() {
            match result {
                Ok(Some(lease)) if i == 5 => check(name, lease),
                Err(Error::BatchTooLarge { values: 13, batch_bytes, arena_bytes }) if i != 5 => {
                    assert_eq!((*batch_bytes, *arena_bytes), (13 * MIB as u64, 4 * MIB as u64));
                }
                other => panic!("{name}: {other:?}"),
            }
        }
        assert_eq!(origin.requests(), 1, "nothing of it was fetched");
        drop(results);
        // Nothing is left in the way.
        let again = name(4 * MIB, 77);
        check(&again, &cache.get(&again, soon()).unwrap().unwrap());
        finish(cache);
    });
}

#[test]
fn a_batch_too_large_is_found_out_also_where_the_origin_cannot_say_what_it_has() {
    alone(|| {
        let origin = FakeOrigin::start(|ask, line| {
            line.answer_by_name(ask);
            Then::GoOn
        });
        let cache = open(4 * MIB, origin.address());
        let names: Vec<String> = (0..12).map(|i| name(MIB, i)).collect();
        let mut refused = 0;
        for (name, result) in names.iter().zip(cache.get_batch(&keys(&names), soon())) {
            match result {
                // It was there when the others turned out to be too many.
                Ok(Some(lease)) => check(name, &lease),
                Err(Error::BatchTooLarge { .. }) => refused += 1,
                other => panic!("{name}: {other:?}"),
            }
        }
        assert!(refused >= 8, "{refused}");
        let fits: Vec<String> = (0..4).map(|i| name(MIB, 20 + i)).collect();
        for (name, result) in fits.iter().zip(cache.get_batch(&keys(&fits), soon())) {
            check(name, &result.unwrap().unwrap());
        }
        assert_quiet(&cache);
        finish(cache);
    });
}

#[test]
fn duplicates_in_a_leasing_batch_take_memory_once() {
    alone(|| {
        let origin = FakeOrigin::well_behaved();
        let cache = open(4 * MIB, origin.address());
        let names: Vec<String> = (0..12).map(|i| name(MIB, i % 4)).collect();
        for (name, result) in names.iter().zip(cache.get_batch(&keys(&names), soon())) {
            check(name, &result.unwrap().unwrap());
        }
        assert_eq!(origin.requests(), 4);
        finish(cache);
    });
}

/// Threads that each hold most of the cache at a time, hits and misses mixed: none may stop another for good.
fn big_batches_all_end(shards: usize, origin: &FakeOrigin) {
    let mut config = config(16 * MIB, &[origin.address()]);
    config.shards = shards;
    let cache = open_with(config);
    let finished = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (cache, finished) = (&cache, &finished);
            scope.spawn(move || {
                for round in 0..12 {
                    // Of 20 values of which 16 fit; 6 to 10 for each.
                    let count = 6 + (round + thread) % 3;
                    let names: Vec<String> = (0..count)
                        .map(|i| name(MIB - 4096 * (i % 3), (7 * thread + 3 * round + i) % 20))
                        .collect();
                    let results = cache.get_batch(&keys(&names), Duration::from_secs(60));
                    for (name, result) in names.iter().zip(results) {
                        match result {
                            Ok(Some(lease)) => check(name, &lease),
                            // Where keys fall unevenly on shards.
                            Err(Error::BatchTooLarge { .. }) if shards > 1 => {}
                            other => panic!("{name}: {other:?}"),
                        }
                    }
                    finished.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
    });
    assert_eq!(finished.into_inner(), 48);
    assert_quiet(&cache);
    finish(cache);
}

#[test]
fn leasing_batches_that_do_not_fit_together_all_end() {
    alone(|| big_batches_all_end(1, &FakeOrigin::well_behaved()));
}

#[test]
fn leasing_batches_that_do_not_fit_together_all_end_on_several_shards() {
    alone(|| big_batches_all_end(2, &FakeOrigin::well_behaved()));
}

#[test]
fn a_leasing_batch_waits_for_what_others_hold_and_holds_nothing_meanwhile() {
    alone(|| {
        let origin = FakeOrigin::well_behaved();
        let cache = open(4 * MIB, origin.address());
        let held = cache.get(&name(2 * MIB, 0), soon()).unwrap().unwrap();
        let there = name(MIB, 1);
        cache.get(&there, soon()).unwrap().unwrap();
        // 3 MiB, of which one is there: it is not pinned while the batch waits for the lease to go.
        let names = [there.clone(), name(MIB, 2), name(MIB, 3)];
        std::thread::scope(|scope| {
            let batch = scope.spawn(|| cache.get_batch(&keys(&names), soon()));
            let starving = || cache.stats().starvations > 0;
            eventually(|| "the batch to wait for memory".to_owned(), starving);
            eventually(|| "only the lease of this test".to_owned(), || cache.stats().pins == 1);
            assert!(!batch.is_finished());
            drop(held);
            for (name, result) in names.iter().zip(batch.join().unwrap()) {
                check(name, &result.unwrap().unwrap());
            }
        });
        finish(cache);
    });
}

#[test]
fn a_leasing_batch_that_waits_in_vain_says_what_pins_the_memory() {
    alone(|| {
        let origin = FakeOrigin::well_behaved();
        let cache = open(4 * MIB, origin.address());
        let held = cache.get(&name(2 * MIB, 0), soon()).unwrap().unwrap();
        let names: Vec<String> = (1..4).map(|i| name(MIB, i)).collect();
        for result in cache.get_batch(&keys(&names), Deadline::after_ms(2500)) {
            match result {
                Err(Error::Pinned { value_bytes, pinned_bytes, .. }) => {
                    assert_eq!((value_bytes, pinned_bytes), (3 * MIB as u64, 2 * MIB as u64));
                }
                other => panic!("{other:?}"),
            }
        }
        check(&name(2 * MIB, 0), &held);
        drop(held);
        for (name, result) in names.iter().zip(cache.get_batch(&keys(&names), soon())) {
            check(name, &result.unwrap().unwrap());
        }
        assert_quiet(&cache);
        finish(cache);
    });
}

#[test]
fn fragments_are_used_up_to_the_last_granule() {
    alone(|| {
        let cache = open_local(4 * MIB);
        let granules = 4 * MIB / GRANULE_BYTES;
        for i in 0..granules {
            cache.put(&name(GRANULE_BYTES, i), &vec![0; GRANULE_BYTES], soon()).unwrap();
        }
        // Every second granule free: no two of them touch.
        for i in (0..granules).step_by(2) {
            let name = name(GRANULE_BYTES, i);
            cache.invalidate(hotslice::Invalidate::Key(Namespace::DEFAULT.key(&name)), soon()).unwrap();
        }
        assert_eq!(cache.stats().used_bytes, 2 * MIB as u64);
        let scattered = name(2 * MIB, 0);
        cache.put(&scattered, &content::bytes(scattered.as_bytes(), 1, 2 * MIB), soon()).unwrap();
        let lease = cache.peek(&scattered).unwrap().unwrap();
        check(&scattered, &lease);
        assert_eq!(lease.segments().count(), granules / 2);
        assert!(lease.as_slice().is_none());
        let mut tail = [0; 5000];
        lease.copy_range(MIB as u64 + 17, &mut tail).unwrap();
        content::check(scattered.as_bytes(), 1, MIB + 17, &tail);
        drop(lease);
        assert_eq!((cache.stats().evictions, cache.stats().used_bytes), (0, 4 * MIB as u64));
        finish(cache);
    });
}

#[test]
fn a_pin_that_goes_while_the_shard_lies_down_is_not_missed() {
    alone(|| {
        let cache = open_local(4 * MIB);
        for round in 0..400 {
            let mut leases = pin_all(&cache, 4);
            let before = cache.stats().starvations;
            std::thread::scope(|scope| {
                let waiter = scope.spawn(|| cache.put("new", &[1; 100], soon()));
                // The moment between the shard's last look and its sleep is short: no pause before the release.
                while cache.stats().starvations == before {
                    std::hint::spin_loop();
                }
                for _ in 0..round % 80 * 10 {
                    std::hint::spin_loop();
                }
                drop(leases.pop());
                waiter.join().unwrap().unwrap();
            });
            drop(leases);
            cache.invalidate(hotslice::Invalidate::All, soon()).unwrap();
        }
        finish(cache);
    });
}
