//! The real slice server goes away and comes back: the next reads are served, hits never noticed.

use hotslice::Error;
use hotslice_tests::content::{self, name};
use hotslice_tests::gauges::{alone, finish};
use hotslice_tests::origin::{FakeOrigin, Then};
use hotslice_tests::setup::{MIB, client, config, open_with, server, server_at, soon, store};
use std::time::{Duration, Instant};

#[test]
fn the_origin_is_stopped_and_started_again_on_its_port() {
    alone(|| {
        let (old, new, absent) = (name(500_000, 0), name(600_000, 1), name(1000, 2));
        let first = server(8 * MIB);
        let address = first.addr();
        store(&first, [&old]);
        let mut config = config(8 * MIB, std::slice::from_ref(&address));
        (config.backoff_min_ms, config.backoff_max_ms) = (1, 20);
        let cache = open_with(config);
        content::check_lease(old.as_bytes(), 1, 500_000, &cache.get(&old, soon()).unwrap().unwrap());
        first.stop().unwrap();

        // Gone: hits are served, misses are errors, not absence.
        content::check_lease(old.as_bytes(), 1, 500_000, &cache.get(&old, soon()).unwrap().unwrap());
        let gone = cache.get(&new, soon());
        assert!(matches!(gone, Err(Error::PeerUnavailable { .. })), "{gone:?}");

        let second = server_at(&address, 8 * MIB);
        store(&second, [&new]);
        let started = Instant::now();
        let lease = loop {
            match cache.get(&new, soon()) {
                Ok(lease) => break lease.unwrap(),
                Err(Error::PeerUnavailable { .. }) => assert!(started.elapsed() < Duration::from_secs(10)),
                Err(other) => panic!("{other:?}"),
            }
        };
        content::check_lease(new.as_bytes(), 1, 600_000, &lease);
        drop(lease);
        assert!(cache.get(&absent, soon()).unwrap().is_none());
        drop(second);
        finish(cache);
    });
}

#[test]
fn a_restart_between_two_reads_costs_nothing_but_a_connection() {
    alone(|| {
        let first = server(4 * MIB);
        let address = first.addr();
        let names: Vec<String> = (0..3).map(|i| name(100_000, i)).collect();
        store(&first, &names);
        let cache = open_with(config(4 * MIB, std::slice::from_ref(&address)));
        cache.get(&names[0], soon()).unwrap().unwrap();
        first.stop().unwrap();
        let second = server_at(&address, 4 * MIB);
        store(&second, &names);
        // No error in between: whatever is left of the old connection is replaced.
        for name in &names {
            content::check_lease(name.as_bytes(), 1, 100_000, &cache.get(name, soon()).unwrap().unwrap());
        }
        drop(second);
        finish(cache);
    });
}

#[test]
fn other_content_after_a_restart_is_another_version() {
    alone(|| {
        let first = FakeOrigin::start(|ask, line| {
            line.content(ask, 1, 5000);
            Then::GoOn
        });
        let address = first.address();
        let cache = open_with(config(4 * MIB, std::slice::from_ref(&address)));
        content::check_lease(b"k", 1, 5000, &cache.get("k", soon()).unwrap().unwrap());
        drop(first);
        let second = FakeOrigin::start_at(&address, |ask, line| {
            line.content(ask, 2, 6000);
            Then::GoOn
        });
        content::check_lease(b"k", 1, 5000, &cache.get("k", soon()).unwrap().unwrap());
        cache.invalidate(hotslice::Invalidate::All, soon()).unwrap();
        let lease = cache.get("k", soon()).unwrap().unwrap();
        content::check_lease(b"k", 2, 6000, &lease);
        assert_eq!(lease.version(), 2);
        drop((lease, second));
        finish(cache);
    });
}

#[test]
fn what_the_server_removes_stays_cached_until_it_is_invalidated() {
    alone(|| {
        let server = server(4 * MIB);
        let name = name(5000, 0);
        store(&server, [&name]);
        let cache = open_with(config(4 * MIB, &[server.addr()]));
        let lease = cache.get(&name, soon()).unwrap().unwrap();
        assert_ne!(lease.version(), 0);
        drop(lease);
        assert!(client(&server).remove(b"", name.as_bytes()).unwrap());
        assert!(cache.get(&name, soon()).unwrap().is_some());
        cache.invalidate(hotslice::Invalidate::Key(name.as_str().into()), soon()).unwrap();
        assert!(cache.get(&name, soon()).unwrap().is_none());
        finish(cache);
        drop(server);
    });
}
