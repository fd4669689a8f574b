//! Namespaces: how much memory each may take.

use hotslice::{Cache, Deadline, Error, Invalidate, Key, Lease, Namespace, NamespaceMode, NamespaceSettings};
use hotslice_tests::content;
use hotslice_tests::gauges::{alone, finish};
use hotslice_tests::origin::FakeOrigin;
use hotslice_tests::setup::{MIB, config, open, open_local, open_with, soon};
use hotslice_tests::sync::eventually;

const LEN: usize = 300_001;
const GRANULE: usize = 4096;

fn set(cache: &Cache, namespace: Namespace, quota_bytes: usize) {
    let settings = NamespaceSettings { mode: NamespaceMode::Immutable, quota_bytes: quota_bytes as u64 };
    cache.set_namespace(namespace, settings).unwrap();
}

#[track_caller]
fn get(cache: &Cache, key: Key<'_>) -> Lease {
    cache.get(key, soon()).unwrap().unwrap()
}

#[test]
fn a_put_of_a_new_version_leaves_old_leases_alone() {
    alone(|| {
        let cache = open_local(8 * MIB);
        let mut leases = Vec::new();
        for version in 1..=9 {
            cache.put("key", &content::bytes(b"key", version, LEN), soon()).unwrap();
            leases.push(get(&cache, "key".into()));
        }
        for (lease, version) in leases.iter().zip(1..) {
            content::check_lease(b"key", version, LEN, lease);
        }
        let stats = cache.namespace_stats(Namespace::DEFAULT);
        assert_eq!((stats.entries, stats.used_bytes), (1, 9 * (LEN.next_multiple_of(GRANULE) as u64)));
        drop(leases);
        finish(cache);
    });
}

fn fill(cache: &Cache, namespace: Namespace, count: usize) {
    for n in 0..count {
        cache
            .put(namespace.key(&format!("{n}")), &content::bytes(&[n as u8], 1, 2 * GRANULE), soon())
            .unwrap();
    }
}

fn found(cache: &Cache, namespace: Namespace, count: usize) -> Vec<usize> {
    (0..count).filter(|n| cache.contains(namespace.key(&format!("{n}"))).unwrap()).collect()
}

#[test]
fn a_quota_is_met_by_the_oldest_of_its_own_namespace() {
    alone(|| {
        let cache = open_local(8 * MIB);
        let (small, other) = (cache.namespace("small").unwrap(), cache.namespace("other").unwrap());
        set(&cache, small, 10 * GRANULE + 1);
        fill(&cache, other, 20);
        fill(&cache, small, 20);
        assert_eq!(found(&cache, other, 20).len(), 20);
        assert_eq!(found(&cache, small, 20), [15, 16, 17, 18, 19]);
        let stats = cache.namespace_stats(small);
        assert_eq!((stats.entries, stats.used_bytes), (5, 10 * GRANULE as u64));
        assert_eq!(cache.namespace_stats(other).used_bytes, 40 * GRANULE as u64);
        // Lowered, lifted.
        set(&cache, small, 4 * GRANULE);
        assert_eq!(found(&cache, small, 20), [18, 19]);
        set(&cache, small, 0);
        fill(&cache, small, 20);
        assert_eq!((found(&cache, small, 20).len(), found(&cache, other, 20).len()), (20, 20));
        cache.invalidate(Invalidate::Namespace(small), soon()).unwrap();
        assert_eq!(cache.namespace_stats(small).used_bytes, 0);
        assert_eq!(found(&cache, other, 20).len(), 20);
        finish(cache);
    });
}

#[test]
fn pins_count_and_only_their_own_namespace_waits_for_them() {
    alone(|| {
        let origin = FakeOrigin::well_behaved();
        let cache = open(8 * MIB, origin.address());
        let small = cache.namespace("pinned").unwrap();
        set(&cache, small, 4 * GRANULE);
        fill(&cache, small, 2);
        let mut leases: Vec<Lease> = (0..2).map(|n| get(&cache, small.key(&format!("{n}")))).collect();
        let put = cache.put(small.key("more"), &[1; GRANULE], Deadline::after_ms(20));
        assert!(matches!(put, Err(Error::Pinned { .. })), "{put:?}");
        // Forgotten but pinned: it counts all the same.
        cache.invalidate(Invalidate::Key(small.key("0")), soon()).unwrap();
        let names: Vec<String> = (0..3).map(|n| content::name(GRANULE, n)).collect();
        let fetched = cache.get(small.key(&names[0]), Deadline::after_ms(20));
        assert!(matches!(fetched, Err(Error::Pinned { .. })), "{fetched:?}");
        std::thread::scope(|threads| {
            let put = threads.spawn(|| cache.put(small.key("more"), &[1; GRANULE], soon()));
            let one = threads.spawn(|| get(&cache, small.key(&names[0])));
            let two =
                threads.spawn(|| cache.get_batch(&[small.key(&names[1]), small.key(&names[2])], soon()));
            eventually(
                || "the waiting".to_owned(),
                || cache.stats().misses == 4 && cache.stats().fills_in_flight == 3,
            );
            // Others go on meanwhile, by themselves and together.
            fill(&cache, Namespace::DEFAULT, 20);
            let others: Vec<String> = (0..8).map(|n| content::name(LEN, n)).collect();
            content::check_lease(others[0].as_bytes(), 1, LEN, &get(&cache, (&others[0]).into()));
            let keys: Vec<Key<'_>> = others.iter().map(Key::from).collect();
            assert!(cache.get_batch(&keys, soon()).iter().all(|result| matches!(result, Ok(Some(_)))));
            leases.clear();
            put.join().unwrap().unwrap();
            content::check_lease(names[0].as_bytes(), 1, GRANULE, &one.join().unwrap());
            for (result, name) in two.join().unwrap().iter().zip(&names[1..]) {
                content::check_lease(name.as_bytes(), 1, GRANULE, result.as_ref().unwrap().as_ref().unwrap());
            }
        });
        assert!(cache.namespace_stats(small).used_bytes <= 4 * GRANULE as u64);
        finish(cache);
    });
}

#[test]
fn what_can_never_fit_into_a_quota_says_so() {
    alone(|| {
        let origin = FakeOrigin::well_behaved();
        let mut config = config(8 * MIB, &[origin.address()]);
        config.shards = 2;
        config.namespaces.insert(
            "tiny".to_owned(),
            NamespaceSettings { mode: NamespaceMode::Immutable, quota_bytes: 8 * GRANULE as u64 },
        );
        let cache = open_with(config);
        let tiny = cache.namespace("tiny").unwrap();
        let (fits, large) = (content::name(4 * GRANULE, 0), content::name(4 * GRANULE + 1, 0));
        let check = |error: Error| {
            let text = error.to_string();
            assert!(matches!(error, Error::Quota { .. }), "{text}");
            assert!(text.contains("quota_bytes") && text.contains("`tiny`"), "{text}");
        };
        check(cache.put(tiny.key("put"), &[0; 4 * GRANULE + 1], soon()).unwrap_err());
        check(cache.get(tiny.key(&large), soon()).unwrap_err());
        check(cache.get_batch(&[tiny.key(&large)], soon()).remove(0).unwrap_err());
        content::check_lease(fits.as_bytes(), 1, 4 * GRANULE, &get(&cache, tiny.key(&fits)));
        // More leases than there is room for together, on one of the shards at least.
        let names: Vec<String> = (0..3).map(|n| content::name(4 * GRANULE, n)).collect();
        let keys: Vec<Key<'_>> = names.iter().map(|name| tiny.key(name)).collect();
        let results = cache.get_batch(&keys, soon());
        assert!(results.iter().any(Result::is_err));
        results.into_iter().filter_map(Result::err).for_each(check);
        // As copies they need not be there together.
        for name in &names {
            let mut bytes = vec![0; 4 * GRANULE];
            assert_eq!(cache.get_into(tiny.key(name), &mut bytes, soon()).unwrap(), Some(4 * GRANULE as u64));
            content::check(name.as_bytes(), 1, 0, &bytes);
        }
        finish(cache);
    });
}

#[test]
fn who_waits_for_memory_and_then_for_a_quota_is_not_forgotten() {
    alone(|| {
        let origin = FakeOrigin::well_behaved();
        let cache = open(2 * MIB, origin.address());
        let small = cache.namespace("both").unwrap();
        set(&cache, small, 4 * GRANULE);
        fill(&cache, small, 2);
        let pinned: Vec<Lease> = (0..2).map(|n| get(&cache, small.key(&format!("{n}")))).collect();
        cache.put("large", &[1; MIB], soon()).unwrap();
        let large = get(&cache, "large".into());
        let name = content::name(GRANULE, 0);
        std::thread::scope(|threads| {
            let put = threads.spawn(|| cache.put("too", &[2; MIB], soon()));
            eventually(|| "a put that waits".to_owned(), || cache.stats().starvations == 1);
            let fetched = threads.spawn(|| get(&cache, small.key(&name)));
            eventually(|| "a question".to_owned(), || origin.seen().lookups.len() == 1);
            // Answered after the first, most likely: what was asked for before then stands in line.
            assert!(cache.get("no length", soon()).unwrap().is_none());
            drop(large);
            put.join().unwrap().unwrap();
            assert_eq!(cache.stats().fills_in_flight, 1, "the quota is full");
            drop(pinned);
            content::check_lease(name.as_bytes(), 1, GRANULE, &fetched.join().unwrap());
        });
        finish(cache);
    });
}
