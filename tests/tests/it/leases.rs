//! Promise 2: a lease never changes under its holder.

use hotslice::{Invalidate, Lease, Namespace};
use hotslice_tests::content::{self, name};
use hotslice_tests::gauges::{alone, assert_holds, finish};
use hotslice_tests::origin::FakeOrigin;
use hotslice_tests::setup::{MIB, open, open_local, soon};

const LEN: usize = 700_001;

fn check(name: &str, lease: &Lease) {
    content::check_lease(name.as_bytes(), 1, LEN, lease);
}

#[test]
fn a_lease_survives_every_invalidation() {
    alone(|| {
        let origin = FakeOrigin::well_behaved();
        let cache = open(16 * MIB, origin.address());
        let ns = Namespace::DEFAULT;
        let names: Vec<String> = (0..4).map(|i| name(LEN, i)).collect();
        let scopes = [
            Invalidate::Key(ns.key(&names[0])),
            Invalidate::Prefix(ns, b"7000"),
            Invalidate::Namespace(ns),
            Invalidate::All,
        ];
        for (name, scope) in names.iter().zip(scopes) {
            let lease = cache.get(name, soon()).unwrap().unwrap();
            assert_eq!(cache.invalidate(scope, soon()).unwrap(), 1);
            assert!(!cache.contains(name).unwrap());
            assert_eq!(cache.stats().condemned, 1);
            // Others come and go where they may.
            for i in 10..40 {
                cache.get(&self::name(LEN, i), soon()).unwrap().unwrap();
            }
            check(name, &lease);
            drop(lease);
            cache.invalidate(Invalidate::All, soon()).unwrap();
        }
        finish(cache);
    });
}

#[test]
fn a_lease_survives_overwriting_and_new_readers_see_the_new_value() {
    alone(|| {
        let cache = open_local(8 * MIB);
        let put = |version| cache.put("k", &content::bytes(b"k", version, LEN), soon()).unwrap();
        put(1);
        let old = cache.peek("k").unwrap().unwrap();
        put(2);
        let new = cache.peek("k").unwrap().unwrap();
        assert_ne!(old.identity(), new.identity());
        put(3);
        content::check_lease(b"k", 1, LEN, &old);
        content::check_lease(b"k", 2, LEN, &new);
        content::check_lease(b"k", 3, LEN, &cache.peek("k").unwrap().unwrap());
        assert_eq!(cache.stats().condemned, 2);
        drop((old, new));
        assert_holds(&cache, [LEN]);
        finish(cache);
    });
}

#[test]
fn a_lease_survives_eviction_pressure() {
    alone(|| {
        let origin = FakeOrigin::well_behaved();
        let cache = open(4 * MIB, origin.address());
        let held: Vec<(String, Lease)> = (0..2)
            .map(|i| {
                let name = name(LEN, i);
                let lease = cache.get(&name, soon()).unwrap().unwrap();
                (name, lease)
            })
            .collect();
        for i in 2..60 {
            let name = name(LEN, i);
            check(&name, &cache.get(&name, soon()).unwrap().unwrap());
        }
        assert!(cache.stats().evictions >= 54);
        for (name, lease) in &held {
            check(name, lease);
            assert!(cache.contains(name).unwrap(), "what is leased is not evicted");
        }
        drop(held);
        finish(cache);
    });
}

#[test]
fn a_lease_survives_shutdown_and_the_cache() {
    alone(|| {
        let origin = FakeOrigin::well_behaved();
        let cache = open(4 * MIB, origin.address());
        let name = name(LEN, 0);
        let lease = cache.get(&name, soon()).unwrap().unwrap();
        let second = cache.get(&name, soon()).unwrap().unwrap();
        cache.shutdown();
        check(&name, &lease);
        drop(second);
        drop(cache);
        check(&name, &lease);
        // On another thread, to the end: the memory goes with it, see `alone`.
        std::thread::spawn(move || check(&name, &lease)).join().unwrap();
    });
}

#[test]
fn concurrent_readers_never_see_bytes_of_another_value() {
    alone(|| {
        let origin = FakeOrigin::well_behaved();
        let cache = open(3 * MIB, origin.address());
        std::thread::scope(|scope| {
            for thread in 0..6 {
                let cache = &cache;
                scope.spawn(move || {
                    for i in 0..60 {
                        let name = name(100_000 + i % 11 * 4099, (i * 7 + thread) % 31);
                        let lease = cache.get(&name, soon()).unwrap().unwrap();
                        let len = content::named_len(name.as_bytes()).unwrap();
                        if i % 5 == 0 {
                            cache.invalidate(Invalidate::Key(Namespace::DEFAULT.key(&name)), soon()).unwrap();
                        }
                        content::check_lease(name.as_bytes(), 1, len, &lease);
                    }
                });
            }
        });
        finish(cache);
    });
}
