//! Promise 7: what the cache did adds up; prefetch, contains and back-pressure.

use hotslice::{Deadline, Error, Invalidate, Key, Namespace};
use hotslice_tests::content::{self, name};
use hotslice_tests::gauges::{alone, assert_conserved, assert_holds, finish};
use hotslice_tests::origin::{FakeOrigin, Then};
use hotslice_tests::setup::{MIB, config, open, open_local, open_with, soon};
use hotslice_tests::sync::{Gate, HANG, eventually};
use std::sync::Arc;
use std::time::Instant;

#[test]
fn lookups_are_hits_and_misses_and_every_fill_has_one_end() {
    alone(|| {
        let origin = FakeOrigin::start(|ask, line| {
            match ask.key.as_slice() {
                b"refused" => line.refuse(ask, hotslice::wire::Status::Busy, ""),
                _ => line.answer_by_name(ask),
            }
            Then::GoOn
        });
        let cache = open(2 * MIB, origin.address());
        let per_thread = 150;
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let cache = &cache;
                scope.spawn(move || {
                    for i in 0..per_thread {
                        let name = name(1 + i * 977 % 100_000, (i + thread) % 40);
                        match i % 10 {
                            7 => assert!(cache.get("absent", soon()).unwrap().is_none()),
                            8 => assert!(matches!(cache.get("refused", soon()), Err(Error::Refused { .. }))),
                            9 => drop(cache.peek(&name).unwrap()),
                            _ => drop(cache.get(&name, soon()).unwrap().unwrap()),
                        }
                    }
                });
            }
        });
        let stats = cache.stats();
        assert_eq!(stats.lookups, 4 * per_thread as u64);
        assert_eq!(stats.lookups, stats.hits + stats.misses);
        let answered = stats.fills + stats.joined + stats.late_hits + stats.absent_hits;
        let peeked_in_vain = stats.misses - answered;
        assert!(peeked_in_vain <= 4 * per_thread as u64 / 10, "{stats:#?}");
        assert_conserved(&cache);
        finish(cache);
    });
}

#[test]
fn what_was_prefetched_hits() {
    alone(|| {
        let origin = FakeOrigin::well_behaved();
        let cache = open(8 * MIB, origin.address());
        let names: Vec<String> = (0..40).map(|i| name(50_000 + i, i)).collect();
        let keys: Vec<Key<'_>> = names.iter().map(|name| Namespace::DEFAULT.key(name)).collect();
        assert_eq!(cache.prefetch(&keys).unwrap(), 40);
        eventually(|| format!("{:?}", cache.stats()), || cache.stats().fills_published == 40);
        assert!(cache.contains_batch(&keys).into_iter().all(Result::unwrap));
        assert_eq!(cache.prefetch(&keys).unwrap(), 0);
        for (i, name) in names.iter().enumerate() {
            content::check_lease(name.as_bytes(), 1, 50_000 + i, &cache.peek(name).unwrap().unwrap());
        }
        let stats = cache.stats();
        assert_eq!((stats.lookups, stats.hits, stats.misses), (40, 40, 0));
        assert_holds(&cache, (0..40).map(|i| 50_000 + i));
        finish(cache);
    });
}

#[test]
fn prefetching_the_same_key_twice_and_absent_ones_is_harmless() {
    alone(|| {
        let origin = FakeOrigin::well_behaved();
        let cache = open(4 * MIB, origin.address());
        let name = name(5000, 0);
        let key = Namespace::DEFAULT.key(&name);
        cache.prefetch(&[key, key, Namespace::DEFAULT.key("absent"), key]).unwrap();
        content::check_lease(name.as_bytes(), 1, 5000, &cache.get(&name, soon()).unwrap().unwrap());
        eventually(|| "the absent one".to_owned(), || cache.stats().fills_absent == 1);
        assert_eq!((origin.requests(), origin.seen().lookups), (1, vec![2]));
        finish(cache);
    });
}

#[test]
fn a_prefetch_that_comes_too_late_pins_nothing() {
    alone(|| {
        let cache = open_local(32 * MIB);
        let names: Vec<String> = (0..2000).map(|i| i.to_string()).collect();
        let keys: Vec<Key<'_>> = names.iter().map(|name| Namespace::DEFAULT.key(name)).collect();
        let late = || cache.stats().late_hits;
        let started = Instant::now();
        // Keys that are put between the look of `prefetch` and the shard's own.
        while late() == 0 {
            assert!(started.elapsed() < HANG, "no prefetch came late");
            std::thread::scope(|scope| {
                scope.spawn(|| names.iter().for_each(|name| cache.put(name, b"v", soon()).unwrap()));
                // On busy cores the ring may be full for a moment, which is an answer as good as any.
                scope.spawn(|| while !matches!(cache.prefetch(&keys), Ok(0)) {});
            });
            if late() == 0 {
                cache.invalidate(Invalidate::All, soon()).unwrap();
            }
        }
        cache.invalidate(Invalidate::All, soon()).unwrap();
        let stats = cache.stats();
        assert_eq!((stats.pins, stats.condemned, stats.used_bytes), (0, 0, 0));
        finish(cache);
    });
}

#[test]
fn contains_is_no_lookup_and_never_fetches() {
    alone(|| {
        let origin = FakeOrigin::well_behaved();
        let cache = open(4 * MIB, origin.address());
        let name = name(5000, 0);
        assert!(!cache.contains(&name).unwrap());
        cache.get(&name, soon()).unwrap().unwrap();
        assert!(cache.contains(&name).unwrap());
        let stats = cache.stats();
        assert_eq!((stats.lookups, stats.hits, origin.requests()), (1, 0, 1));
        finish(cache);
    });
}

#[test]
fn leases_show_as_pins_until_they_are_dropped() {
    alone(|| {
        let origin = FakeOrigin::well_behaved();
        let cache = open(4 * MIB, origin.address());
        let name = name(5000, 0);
        let leases: Vec<_> = (0..7).map(|_| cache.get(&name, soon()).unwrap().unwrap()).collect();
        assert_eq!(cache.stats().pins, 7);
        // Released elsewhere than acquired.
        std::thread::spawn(move || drop(leases)).join().unwrap();
        assert_eq!(cache.stats().pins, 0);
        finish(cache);
    });
}

#[test]
fn a_tiny_request_ring_holds_callers_back_and_loses_nobody() {
    alone(|| {
        let origin = FakeOrigin::well_behaved();
        let mut config = config(8 * MIB, &[origin.address()]);
        config.request_ring = 2;
        (config.lanes_per_peer, config.lane_depth) = (1, 1);
        let cache = open_with(config);
        std::thread::scope(|scope| {
            for thread in 0..16 {
                let cache = &cache;
                scope.spawn(move || {
                    for i in 0..30 {
                        let name = name(2000 + i, thread * 100 + i);
                        let lease = cache.get(&name, soon()).unwrap().unwrap();
                        content::check_lease(name.as_bytes(), 1, 2000 + i, &lease);
                    }
                });
            }
        });
        assert_eq!((origin.requests(), cache.stats().lanes_opened), (480, 1));
        finish(cache);
    });
}

#[test]
fn a_prefetch_that_nobody_waits_for_ends_by_its_own_timeout() {
    alone(|| {
        let gate = Arc::new(Gate::default());
        let inner = gate.clone();
        let origin = FakeOrigin::start(move |ask, line| {
            inner.pass();
            line.answer_by_name(ask);
            Then::GoOn
        });
        let mut config = config(4 * MIB, &[origin.address()]);
        config.fill_timeout_ms = 50;
        let cache = open_with(config);
        let name = name(5000, 0);
        cache.prefetch(&[Namespace::DEFAULT.key(&name)]).unwrap();
        eventually(|| format!("{:?}", cache.stats()), || cache.stats().fills_failed == 1);
        // Somebody who comes now starts anew, and has the deadline that is his.
        let short = cache.get(&name, Deadline::after_ms(50));
        assert!(matches!(short, Err(Error::DeadlinePassed { .. })), "{short:?}");
        gate.open();
        content::check_lease(name.as_bytes(), 1, 5000, &cache.get(&name, soon()).unwrap().unwrap());
        finish(cache);
    });
}
