//! Several shards, both policies, admission off: the same answers.

use hotslice::{Admission, Invalidate, Key, Namespace};
use hotslice_tests::content::{self, name};
use hotslice_tests::gauges::{alone, assert_holds, finish};
use hotslice_tests::origin::FakeOrigin;
use hotslice_tests::setup::{MIB, config, open_with, server, soon, store};

#[test]
fn two_shards_share_the_keys_and_serve_all_of_them() {
    alone(|| {
        let names: Vec<String> = (0..200).map(|i| name(i * 199, i)).collect();
        let server = server(16 * MIB);
        store(&server, &names);
        let mut config = config(16 * MIB, &[server.addr()]);
        config.shards = 2;
        let cache = open_with(config);
        assert_eq!(cache.reports().len(), 2);
        let keys: Vec<Key<'_>> = names.iter().map(|name| Namespace::DEFAULT.key(name)).collect();
        let mut per_shard = [0; 2];
        for _ in 0..2 {
            for (i, result) in cache.get_batch(&keys, soon()).into_iter().enumerate() {
                let lease = result.unwrap().unwrap();
                content::check_lease(names[i].as_bytes(), 1, i * 199, &lease);
                per_shard[lease.identity().0] += 1;
            }
        }
        assert!(per_shard.iter().all(|&count| count > 100), "{per_shard:?}");
        assert_holds(&cache, (0..200).map(|i| i * 199));
        // Scopes reach every shard.
        let prefix = Invalidate::Prefix(Namespace::DEFAULT, b"199/");
        assert_eq!(cache.invalidate(prefix, soon()).unwrap(), 1);
        assert_eq!(cache.invalidate(Invalidate::All, soon()).unwrap(), 199);
        assert_eq!(cache.stats().arena_bytes, 16 * MIB as u64);
        finish(cache);
    });
}

#[test]
fn both_policies_keep_what_fits() {
    for policy in ["s3fifo", "lru"] {
        alone(|| {
            let origin = FakeOrigin::well_behaved();
            let mut config = config(8 * MIB, &[origin.address()]);
            config.policy = policy.parse().unwrap();
            let cache = open_with(config);
            let names: Vec<String> = (0..32).map(|i| name(MIB / 4, i)).collect();
            for _ in 0..3 {
                for name in &names {
                    content::check_lease(
                        name.as_bytes(),
                        1,
                        MIB / 4,
                        &cache.get(name, soon()).unwrap().unwrap(),
                    );
                }
            }
            // First-time values as large as the whole cache stay when there is room.
            assert_eq!((cache.stats().evictions, origin.requests()), (0, 32), "{policy}");
            assert_holds(&cache, [MIB / 4; 32]);
            finish(cache);
        });
    }
}

#[test]
fn admission_off_keeps_nothing_and_serves_everything() {
    alone(|| {
        let origin = FakeOrigin::well_behaved();
        let mut config = config(8 * MIB, &[origin.address()]);
        config.admission = Admission::Off;
        let cache = open_with(config);
        let name = name(300_000, 0);
        for round in 1..=3 {
            let lease = cache.get(&name, soon()).unwrap().unwrap();
            content::check_lease(name.as_bytes(), 1, 300_000, &lease);
            assert!(!cache.contains(&name).unwrap());
            assert_eq!(origin.requests(), round);
        }
        cache.put("k", b"v", soon()).unwrap();
        assert!(!cache.contains("k").unwrap());
        // Duplicates of one batch still share one transfer.
        let keys = [Namespace::DEFAULT.key(&name); 5];
        for result in cache.get_batch(&keys, soon()) {
            content::check_lease(name.as_bytes(), 1, 300_000, &result.unwrap().unwrap());
        }
        assert_eq!(origin.requests(), 4);
        assert_holds(&cache, []);
        finish(cache);
    });
}

#[test]
fn the_parts_of_a_report_agree() {
    alone(|| {
        let mut config = config(8 * MIB, &[]);
        config.shards = 2;
        let cache = open_with(config);
        for report in cache.reports() {
            assert_eq!(report.arena.arena_bytes, 4 * MIB);
            let kinds = report.arena.hugetlb_bytes + report.arena.transparent_bytes + report.arena.base_bytes;
            assert_eq!((kinds, report.arena.block_bytes), (4 * MIB, MIB));
            assert!(report.slots > 0 && report.table_bytes > 0);
        }
        finish(cache);
    });
}
