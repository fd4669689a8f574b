//! Shutdown is orderly whatever is under way: everybody is answered, the kernel gives every buffer back, leases
//! stay good, and nothing is left behind.

use hotslice::{Error, Invalidate, Key, Namespace};
use hotslice_tests::content::{self, name};
use hotslice_tests::gauges::{Resources, alone, finish};
use hotslice_tests::origin::{FakeOrigin, Then, closed_port, value_header};
use hotslice_tests::setup::{MIB, config, open, open_local, open_with, soon};
use hotslice_tests::sync::eventually;
use std::time::{Duration, Instant};

/// An origin that sends some bytes of each value and then nothing; values named by `content::name` are served.
fn stuck() -> FakeOrigin {
    FakeOrigin::start(|ask, line| {
        if content::named_len(&ask.key).is_some() {
            line.answer_by_name(ask);
            return Then::GoOn;
        }
        if ask.key.starts_with(b"receiving") {
            let value = content::bytes(&ask.key, 1, MIB);
            line.header(&value_header(ask, 1, &value));
            line.raw(&value[..MIB / 2]);
        }
        line.until_closed();
        Then::Close
    })
}

#[test]
fn fills_in_flight_and_leases_outstanding() {
    alone(|| {
        let origin = stuck();
        let before = Resources::now();
        let cache = open(8 * MIB, origin.address());
        let held = name(700_001, 0);
        let lease = cache.get(&held, soon()).unwrap().unwrap();
        std::thread::scope(|scope| {
            let waiting: Vec<_> = (0..16)
                .map(|i| {
                    let cache = &cache;
                    scope.spawn(move || {
                        let key = format!("{}{i}", if i % 2 == 0 { "receiving" } else { "asked" });
                        cache.get(&key, soon())
                    })
                })
                .collect();
            eventually(|| "16 fills".to_owned(), || cache.stats().fills == 17);
            let started = Instant::now();
            cache.shutdown();
            assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
            for thread in waiting {
                let result = thread.join().unwrap();
                assert!(matches!(result, Err(Error::ShutDown)), "{result:?}");
            }
        });
        content::check_lease(held.as_bytes(), 1, 700_001, &lease);
        drop(cache);
        content::check_lease(held.as_bytes(), 1, 700_001, &lease);
        assert_eq!(Resources::now().arena_bytes - before.arena_bytes, 8 * MIB as u64);
        drop(lease);
        assert_eq!(Resources::now().arena_bytes, before.arena_bytes);
    });
}

#[test]
fn those_who_wait_for_memory_or_a_connection_are_answered() {
    alone(|| {
        let origin = FakeOrigin::well_behaved();
        let cache = open(4 * MIB, origin.address());
        let lease = cache.get(&name(4 * MIB, 0), soon()).unwrap().unwrap();
        std::thread::scope(|scope| {
            let fill = scope.spawn(|| cache.get(&name(MIB, 1), soon()).map(drop));
            let put = scope.spawn(|| cache.put("k", &[1; 5000], soon()));
            eventually(|| "a starving fill".to_owned(), || cache.stats().starvations > 0);
            cache.shutdown();
            assert!(matches!(fill.join().unwrap(), Err(Error::ShutDown)));
            assert!(matches!(put.join().unwrap(), Err(Error::ShutDown)));
        });
        drop(lease);
    });
}

#[test]
fn every_call_after_it_says_so() {
    alone(|| {
        let cache = open_local(4 * MIB);
        cache.put("k", b"v", soon()).unwrap();
        for _ in 0..2 {
            cache.shutdown();
            let key: Key<'_> = "k".into();
            assert!(matches!(cache.get("k", soon()), Err(Error::ShutDown)));
            assert!(matches!(cache.peek("k"), Err(Error::ShutDown)));
            assert!(matches!(cache.get_into("k", &mut [0; 1], soon()), Err(Error::ShutDown)));
            assert!(matches!(cache.contains("k"), Err(Error::ShutDown)));
            assert!(matches!(cache.put("k", b"w", soon()), Err(Error::ShutDown)));
            assert!(matches!(cache.prefetch(&[key]), Err(Error::ShutDown)));
            assert!(matches!(
                cache.get_batch(&[key, key], soon())[..],
                [Err(Error::ShutDown), Err(Error::ShutDown)]
            ));
            for scope in [Invalidate::Key(key), Invalidate::Namespace(Namespace::DEFAULT), Invalidate::All] {
                assert!(matches!(cache.invalidate(scope, soon()), Err(Error::ShutDown)));
            }
            // Still to be read, for whoever writes the last line of a log.
            assert_eq!(cache.stats().puts, 1);
        }
    });
}

#[test]
fn under_load_from_many_threads() {
    alone(|| {
        let origin = FakeOrigin::well_behaved();
        for round in 0..8 {
            let mut config = config(4 * MIB, &[origin.address()]);
            config.request_ring = 4;
            config.shards = 1 + round % 2;
            let cache = open_with(config);
            std::thread::scope(|scope| {
                for thread in 0..6 {
                    let cache = &cache;
                    scope.spawn(move || {
                        for i in 0.. {
                            let name = name(30_000 + i % 50 * 1000, thread * 1000 + i % 17);
                            let result = match i % 4 {
                                0 => cache.put(&name, &[0; 9000], soon()),
                                1 => cache.invalidate(Invalidate::All, soon()).map(drop),
                                _ => cache.get(&name, soon()).map(drop),
                            };
                            match result {
                                Ok(()) => {}
                                Err(Error::ShutDown) => return,
                                Err(other) => panic!("{other:?}"),
                            }
                        }
                    });
                }
                eventually(|| "some work".to_owned(), || cache.stats().fills_published > 20);
                cache.shutdown();
            });
        }
    });
}

#[test]
fn while_connecting_to_a_peer_that_is_not_there() {
    alone(|| {
        let mut config = config(4 * MIB, &[closed_port()]);
        (config.backoff_min_ms, config.backoff_max_ms) = (60_000, 60_000);
        let cache = open_with(config);
        assert!(cache.get("k", soon()).is_err());
        cache.prefetch(&["a".into(), "b".into()]).unwrap();
        finish(cache);
    });
}

#[test]
fn opening_and_closing_a_hundred_times_leaks_nothing() {
    alone(|| {
        for _ in 0..100 {
            let cache = open_local(MIB);
            cache.put("k", b"v", soon()).unwrap();
        }
    });
}
