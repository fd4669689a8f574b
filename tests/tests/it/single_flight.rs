//! Promise 5: one transfer per key, however many wait; each waiter has its own deadline.

use hotslice::{Deadline, Error};
use hotslice_tests::content::{self, name};
use hotslice_tests::gauges::{alone, finish};
use hotslice_tests::origin::{FakeOrigin, Then};
use hotslice_tests::setup::{MIB, open, soon};
use hotslice_tests::sync::{Gate, eventually};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// An origin that answers when the gate opens.
fn gated() -> (FakeOrigin, Arc<Gate>) {
    let gate = Arc::new(Gate::default());
    let inner = gate.clone();
    let origin = FakeOrigin::start(move |ask, line| {
        inner.pass();
        line.answer_by_name(ask);
        Then::GoOn
    });
    (origin, gate)
}

#[test]
fn sixty_four_threads_one_request() {
    alone(|| {
        let (origin, gate) = gated();
        let cache = open(16 * MIB, origin.address());
        let name = name(3_000_001, 0);
        std::thread::scope(|scope| {
            for _ in 0..64 {
                scope.spawn(|| {
                    let lease = cache.get(&name, soon()).unwrap().unwrap();
                    content::check_lease(name.as_bytes(), 1, 3_000_001, &lease);
                });
            }
            eventually(|| format!("63 joined: {:?}", cache.stats()), || cache.stats().joined == 63);
            gate.open();
        });
        assert_eq!(origin.requests(), 1);
        let stats = cache.stats();
        assert_eq!((stats.misses, stats.fills, stats.fills_published), (64, 1, 1));
        assert_eq!(stats.received_direct_bytes, 3_000_001);
        finish(cache);
    });
}

#[test]
fn each_waiter_has_its_own_deadline() {
    alone(|| {
        let (origin, gate) = gated();
        let cache = open(16 * MIB, origin.address());
        let name = name(100_000, 0);
        std::thread::scope(|scope| {
            let patient: Vec<_> = (0..4).map(|_| scope.spawn(|| cache.get(&name, soon()))).collect();
            origin.wait_requests(1);
            let hasty: Vec<_> = [20, 50, 100]
                .into_iter()
                .map(|ms| {
                    let (cache, name) = (&cache, &name);
                    scope.spawn(move || {
                        let started = Instant::now();
                        let result = cache.get(name, Deadline::after_ms(ms));
                        (Duration::from_millis(ms), started.elapsed(), result)
                    })
                })
                .collect();
            for thread in hasty {
                let (asked, took, result) = thread.join().unwrap();
                assert!(matches!(result, Err(Error::DeadlinePassed { .. })), "{result:?}");
                assert!(took >= asked && took < asked + Duration::from_secs(5), "{asked:?}: {took:?}");
            }
            // Only now: nobody who gave up was waiting for the gate.
            gate.open();
            for thread in patient {
                let lease = thread.join().unwrap().unwrap().unwrap();
                content::check_lease(name.as_bytes(), 1, 100_000, &lease);
            }
        });
        assert_eq!(origin.requests(), 1);
        finish(cache);
    });
}

#[test]
fn absence_answers_everybody_who_waits() {
    alone(|| {
        let (origin, gate) = gated();
        let cache = open(4 * MIB, origin.address());
        std::thread::scope(|scope| {
            let all: Vec<_> = (0..8).map(|_| scope.spawn(|| cache.get("absent", soon()))).collect();
            eventually(|| "7 joined".to_owned(), || cache.stats().joined == 7);
            gate.open();
            for thread in all {
                assert!(thread.join().unwrap().unwrap().is_none());
            }
        });
        assert_eq!((origin.requests(), cache.stats().fills_absent), (1, 1));
        finish(cache);
    });
}

#[test]
fn a_fill_outlives_those_who_gave_up_on_it_while_it_was_arriving() {
    alone(|| {
        let gate = Arc::new(Gate::default());
        let inner = gate.clone();
        let origin = FakeOrigin::start(move |ask, line| {
            let value = content::bytes(&ask.key, 1, 3 * MIB);
            line.header(&hotslice_tests::origin::value_header(ask, 1, &value));
            let (first, rest) = ask.part(&value).split_at(MIB);
            line.raw(first);
            if ask.offset > 0 {
                inner.pass();
            }
            line.raw(rest);
            Then::GoOn
        });
        let cache = open(16 * MIB, origin.address());
        std::thread::scope(|scope| {
            let hasty = scope.spawn(|| cache.get("k", Deadline::after_ms(200)));
            let late = hasty.join().unwrap();
            assert!(matches!(late, Err(Error::DeadlinePassed { .. })), "{late:?}");
            gate.open();
            let lease = cache.get("k", soon()).unwrap().unwrap();
            content::check_lease(b"k", 1, 3 * MIB, &lease);
        });
        assert_eq!(origin.requests(), 1);
        finish(cache);
    });
}
