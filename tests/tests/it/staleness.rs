//! Promise 3: no stale success after an invalidation returns, also when a fill was in flight.

use hotslice::{Cache, Invalidate, Namespace};
use hotslice_tests::content;
use hotslice_tests::gauges::{alone, finish};
use hotslice_tests::origin::{FakeOrigin, Then, value_header};
use hotslice_tests::setup::{MIB, config, open, open_with, soon};
use hotslice_tests::sync::{Gate, eventually};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

const LEN: usize = 300_001;

/// An origin whose content changes when the first request has arrived: that one is answered with version 1,
/// held back before or in the middle of the value until the gate opens; all others with version 2, at once.
fn holding(before_header: bool) -> (FakeOrigin, Arc<Gate>) {
    let gate = Arc::new(Gate::default());
    let inner = gate.clone();
    let origin = FakeOrigin::start(move |ask, line| {
        let version = if ask.number == 0 { 1 } else { 2 };
        let value = content::bytes(&ask.key, version, LEN);
        if ask.number == 0 && before_header {
            inner.pass();
        }
        line.header(&value_header(ask, version, &value));
        line.raw(&value[..LEN / 2]);
        if ask.number == 0 && !before_header {
            inner.pass();
        }
        line.raw(&value[LEN / 2..]);
        Then::GoOn
    });
    (origin, gate)
}

fn scopes() -> [(&'static str, Invalidate<'static>); 4] {
    let ns = Namespace::DEFAULT;
    [
        ("key", Invalidate::Key(ns.key("key"))),
        ("prefix", Invalidate::Prefix(ns, b"ke")),
        ("namespace", Invalidate::Namespace(ns)),
        ("all", Invalidate::All),
    ]
}

/// Invalidates while the first answer is under way; everybody who asks after that sees the new content, and so
/// does who waited already.
fn invalidated_in_flight(before_header: bool) {
    for (what, scope) in scopes() {
        let (origin, gate) = holding(before_header);
        let cache = open(8 * MIB, origin.address());
        std::thread::scope(|threads| {
            let early = threads.spawn(|| cache.get("key", soon()).unwrap().unwrap());
            origin.wait_requests(1);
            cache.invalidate(scope, soon()).unwrap();
            let late = threads.spawn(|| cache.get("key", soon()).unwrap().unwrap());
            // Over another lane the new answer may come before the old one, which must not replace it.
            eventually(|| format!("{what}: joined"), || cache.stats().misses == 2);
            gate.open();
            content::check_lease(b"key", 2, LEN, &late.join().unwrap());
            content::check_lease(b"key", 2, LEN, &early.join().unwrap());
        });
        eventually(|| what.to_owned(), || cache.stats().fills_in_flight == 0);
        content::check_lease(b"key", 2, LEN, &cache.peek("key").unwrap().unwrap());
        assert_eq!(cache.stats().fills_discarded, 1, "{what}");
        finish(cache);
    }
}

#[test]
fn invalidation_beats_a_fill_whose_answer_is_awaited() {
    alone(|| invalidated_in_flight(true));
}

#[test]
fn invalidation_beats_a_fill_that_is_receiving() {
    alone(|| invalidated_in_flight(false));
}

fn put_beats_fill(before_header: bool) {
    let (origin, gate) = holding(before_header);
    let cache = open(8 * MIB, origin.address());
    std::thread::scope(|threads| {
        let early = threads.spawn(|| cache.get("key", soon()).unwrap().unwrap());
        origin.wait_requests(1);
        cache.put("key", &content::bytes(b"key", 9, 5000), soon()).unwrap();
        // Who waited for the fill is served with what was put, at once.
        content::check_lease(b"key", 9, 5000, &early.join().unwrap());
        content::check_lease(b"key", 9, 5000, &cache.get("key", soon()).unwrap().unwrap());
        gate.open();
    });
    eventually(|| "the old fill to end".to_owned(), || cache.stats().fills_in_flight == 0);
    content::check_lease(b"key", 9, 5000, &cache.peek("key").unwrap().unwrap());
    assert_eq!((origin.requests(), cache.stats().fills_discarded), (1, 1));
    finish(cache);
}

#[test]
fn put_beats_a_fill_whose_answer_is_awaited() {
    alone(|| put_beats_fill(true));
}

#[test]
fn put_beats_a_fill_that_is_receiving() {
    alone(|| put_beats_fill(false));
}

#[test]
fn invalidating_a_prefix_in_flight_leaves_other_fills_alone() {
    alone(|| {
        let (origin, gate) = holding(true);
        let cache = open(8 * MIB, origin.address());
        std::thread::scope(|threads| {
            let early = threads.spawn(|| cache.get("key", soon()).unwrap().unwrap());
            origin.wait_requests(1);
            assert_eq!(cache.invalidate(Invalidate::Prefix(Namespace::DEFAULT, b"kex"), soon()).unwrap(), 0);
            gate.open();
            content::check_lease(b"key", 1, LEN, &early.join().unwrap());
        });
        assert_eq!(cache.stats().fills_discarded, 0);
        finish(cache);
    });
}

/// The version that a lease holds; its bytes must be of that version through and through.
fn version_of(key: &[u8], lease: &hotslice::Lease) -> u64 {
    content::check_lease(key, lease.version(), lease.len() as usize, lease);
    lease.version()
}

#[test]
fn reads_after_an_invalidation_never_go_back() {
    const KEYS: usize = 4;
    const ROUNDS: u64 = 60;
    alone(|| {
        let versions: Arc<[AtomicU64; KEYS]> = Arc::new(std::array::from_fn(|_| AtomicU64::new(1)));
        let current = versions.clone();
        let origin = FakeOrigin::start(move |ask, line| {
            let version = current[usize::from(ask.key[0] - b'0')].load(Ordering::SeqCst);
            line.content(ask, version, 20_000 + usize::from(ask.key[0]));
            Then::GoOn
        });
        let cache = open(2 * MIB, origin.address());
        // What every read must at least see: raised when an invalidation has returned.
        let floors: [AtomicU64; KEYS] = std::array::from_fn(|_| AtomicU64::new(1));
        let written = AtomicBool::new(false);
        let write = |cache: &Cache| {
            for round in 2..=ROUNDS {
                for n in 0..KEYS {
                    versions[n].store(round, Ordering::SeqCst);
                    let key = n.to_string();
                    let scope = match round % 4 {
                        0 => Invalidate::All,
                        1 => Invalidate::Prefix(Namespace::DEFAULT, key.as_bytes()),
                        _ => Invalidate::Key(Namespace::DEFAULT.key(&key)),
                    };
                    cache.invalidate(scope, soon()).unwrap();
                    floors[n].store(round, Ordering::SeqCst);
                }
            }
        };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                write(&cache);
                written.store(true, Ordering::SeqCst);
            });
            for _ in 0..4 {
                scope.spawn(|| {
                    let mut n = 0;
                    while !written.load(Ordering::SeqCst) {
                        n = (n + 1) % KEYS;
                        let floor = floors[n].load(Ordering::SeqCst);
                        let key = n.to_string();
                        let lease = cache.get(&key, soon()).unwrap().unwrap();
                        let got = version_of(key.as_bytes(), &lease);
                        assert!(got >= floor, "key {key}: version {got} after {floor} was invalidated");
                    }
                });
            }
        });
        for n in 0..KEYS {
            let key = n.to_string();
            let lease = cache.get(&key, soon()).unwrap().unwrap();
            assert_eq!(version_of(key.as_bytes(), &lease), ROUNDS);
        }
        finish(cache);
    });
}

#[test]
fn absence_is_believed_for_a_moment_and_ends_with_a_put_or_an_invalidation() {
    alone(|| {
        let here = Arc::new(AtomicBool::new(false));
        let shown = here.clone();
        let origin = FakeOrigin::start(move |ask, line| {
            if shown.load(Ordering::SeqCst) {
                line.content(ask, 1, 100)
            } else {
                line.absent(ask)
            }
            Then::GoOn
        });
        let mut config = config(8 * MIB, &[origin.address()]);
        config.absent_ttl_ms = 60_000;
        let cache = open_with(config);
        for _ in 0..5 {
            for key in ["a", "b", "c"] {
                assert!(cache.get(key, soon()).unwrap().is_none());
            }
        }
        let stats = cache.stats();
        assert_eq!((origin.requests(), stats.fills_absent, stats.absent_hits), (3, 3, 12));
        here.store(true, Ordering::SeqCst);
        assert!(cache.get("a", soon()).unwrap().is_none(), "the origin's word is good for a minute here");
        cache.invalidate(Invalidate::Key("a".into()), soon()).unwrap();
        content::check_lease(b"a", 1, 100, &cache.get("a", soon()).unwrap().unwrap());
        cache.put("b", b"mine", soon()).unwrap();
        assert_eq!(cache.get("b", soon()).unwrap().unwrap().as_slice(), Some(&b"mine"[..]));
        cache.invalidate(Invalidate::All, soon()).unwrap();
        content::check_lease(b"c", 1, 100, &cache.get("c", soon()).unwrap().unwrap());
        content::check_lease(b"b", 1, 100, &cache.get("b", soon()).unwrap().unwrap());
        finish(cache);
    });
}
