//! Promise 4: at least 95 % of the arena holds payload on the sizes users have. Counts, not times.

use hotslice::Config;
use hotslice::memory::{LockPolicy, PagePolicy};
use hotslice_tests::content;
use hotslice_tests::gauges::{alone, finish};
use hotslice_tests::setup::{open_with, soon};

/// Puts `count` values of `len` bytes into a cache with the default block size: all must stay.
fn holds(capacity_bytes: u64, count: usize, len: usize) {
    alone(|| {
        let mut config = Config::new(capacity_bytes);
        config.lock = LockPolicy::Off;
        config.register = LockPolicy::Off;
        config.pages = PagePolicy::Preferred;
        let cache = open_with(config);
        let mut value = content::bytes(b"utilisation", 1, len);
        for i in 0..count {
            value[..8].copy_from_slice(&(i as u64).to_le_bytes());
            cache.put(&i.to_string(), &value, soon()).unwrap();
        }
        for i in 0..count {
            let lease = cache.peek(&i.to_string()).unwrap().expect("still there");
            let mut head = [0; 8];
            lease.copy_range(0, &mut head).unwrap();
            assert_eq!((u64::from_le_bytes(head), lease.len()), (i as u64, len as u64));
            // The rest of a sample: all of it would be gigabytes.
            if i % (count / 4) == 0 {
                let mut rest = vec![0; len - 8];
                lease.copy_range(8, &mut rest).unwrap();
                content::check(b"utilisation", 1, 8, &rest);
            }
        }
        let stats = cache.stats();
        assert_eq!((stats.entries, stats.evictions), (count as u64, 0));
        finish(cache);
    });
}

#[test]
fn a_400_mb_cache_holds_38_values_of_10_mb() {
    holds(400_000_000, 38, 10_000_000);
}

#[test]
fn a_400_mb_cache_holds_30_values_of_12_5_mb() {
    holds(400_000_000, 30, 12_500_000);
}

#[test]
fn an_800_mb_cache_holds_31_values_of_25_mb() {
    holds(800_000_000, 31, 25_000_000);
}

#[test]
fn a_64_mib_cache_holds_15000_values_of_4000_bytes() {
    holds(64 << 20, 15_000, 4000);
}
