//! Namespaces: what bounds the age of values that others change at the origin.

use hotslice::{
    Cache, Deadline, Error, Invalidate, Key, Lease, Namespace, NamespaceMode, NamespaceSettings, Read,
};
use hotslice_tests::content;
use hotslice_tests::gauges::{alone, finish};
use hotslice_tests::origin::{FakeOrigin, Then};
use hotslice_tests::setup::{MIB, client, config, open, open_local, open_with, server, server_at, soon};
use hotslice_tests::sync::{Gate, eventually};
use std::collections::HashMap;
use std::sync::{Arc, Mutex};

/// Longer than a part, so that it takes more than one answer.
const LEN: usize = 300_001;
/// Longer than any test takes.
const LONG_MS: u64 = 600_000;

const ASK: NamespaceMode = NamespaceMode::Validate { validate_ms: 0 };

fn set(cache: &Cache, namespace: Namespace, mode: NamespaceMode) {
    cache.set_namespace(namespace, NamespaceSettings { mode, quota_bytes: 0 }).unwrap();
}

/// A namespace of this cache with a mode.
fn namespace(cache: &Cache, name: &str, mode: NamespaceMode) -> Namespace {
    let namespace = cache.namespace(name).unwrap();
    set(cache, namespace, mode);
    namespace
}

#[track_caller]
fn get(cache: &Cache, key: Key<'_>) -> Lease {
    cache.get(key, soon()).unwrap().unwrap()
}

/// What the origin has: the version of each key, of [`LEN`] bytes.
#[derive(Clone, Default)]
struct World(Arc<Mutex<HashMap<Vec<u8>, u64>>>);

impl World {
    fn set(&self, key: &str, version: u64) {
        self.0.lock().unwrap().insert(key.into(), version);
    }

    fn remove(&self, key: &str) {
        self.0.lock().unwrap().remove(key.as_bytes());
    }

    fn version(&self, key: &[u8]) -> Option<u64> {
        self.0.lock().unwrap().get(key).copied()
    }

    fn about(&self, key: &[u8]) -> Option<(u64, u64, u32)> {
        let version = self.version(key)?;
        Some((LEN as u64, version, crc32c::crc32c(&content::bytes(key, version, LEN))))
    }

    fn answer(&self, ask: &hotslice_tests::origin::Ask, line: &mut hotslice_tests::origin::Line) -> Then {
        match self.version(&ask.key) {
            Some(version) => line.content(ask, version, LEN),
            None => line.absent(ask),
        }
        Then::GoOn
    }

    fn origin(&self) -> FakeOrigin {
        let (here, there) = (self.clone(), self.clone());
        FakeOrigin::locating(move |key| here.about(key), move |ask, line| there.answer(ask, line))
    }

    /// An origin that refuses to look up.
    fn origin_without_lookups(&self) -> FakeOrigin {
        let world = self.clone();
        FakeOrigin::start(move |ask, line| world.answer(ask, line))
    }

    /// An origin that can be held: see [`Hold`].
    fn hesitating(&self) -> (FakeOrigin, Hold) {
        let (here, there, hold) = (self.clone(), self.clone(), Hold::default());
        let held = hold.clone();
        let locate = move |key: &[u8]| {
            let about = here.about(key);
            let gates = held.0.lock().unwrap().take();
            if let Some((asked, go)) = gates {
                asked.open();
                go.pass();
            }
            about
        };
        (FakeOrigin::locating(locate, move |ask, line| there.answer(ask, line)), hold)
    }
}

/// Holds back the answer to the next question of which version there is, after the origin has made up its mind.
#[derive(Clone, Default)]
struct Hold(Arc<Mutex<Option<Gates>>>);

type Gates = (Arc<Gate>, Arc<Gate>);

impl Hold {
    /// The first gate opens when the question has arrived; the answer passes the second.
    fn next(&self) -> Gates {
        let gates = Gates::default();
        *self.0.lock().unwrap() = Some(gates.clone());
        gates
    }
}

/// A foreign writer: what it wrote is seen when the namespace's time is over, and not before.
fn overwritten(short: NamespaceMode, long: NamespaceMode) {
    let server = server(8 * MIB);
    let mut writer = client(&server);
    let cache = open(8 * MIB, server.addr());
    for name in ["short", "long"] {
        writer.put(name.as_bytes(), b"key", b"first").unwrap();
    }
    let (short, long) = (namespace(&cache, "short", short), namespace(&cache, "long", long));
    for namespace in [short, long] {
        assert_eq!(get(&cache, namespace.key("key")).as_slice(), Some(&b"first"[..]));
    }
    let kept = get(&cache, long.key("key"));
    for name in ["short", "long"] {
        writer.put(name.as_bytes(), b"key", b"second").unwrap();
    }
    let seen = || get(&cache, short.key("key")).as_slice() == Some(&b"second"[..]);
    eventually(|| "the second value".to_owned(), seen);
    assert_eq!(get(&cache, long.key("key")).as_slice(), Some(&b"first"[..]));
    // A shorter time counts for what is there too.
    set(&cache, long, ASK);
    assert_eq!(get(&cache, long.key("key")).as_slice(), Some(&b"second"[..]));
    assert_eq!(kept.as_slice(), Some(&b"first"[..]), "a lease keeps its bytes");
    drop(kept);
    finish(cache);
}

#[test]
fn a_foreign_overwrite_is_seen_after_ttl() {
    alone(|| overwritten(NamespaceMode::Ttl { ttl_ms: 30 }, NamespaceMode::Ttl { ttl_ms: LONG_MS }));
}

#[test]
fn a_foreign_overwrite_is_seen_after_validate_ms() {
    let validate = |validate_ms| NamespaceMode::Validate { validate_ms };
    alone(|| overwritten(validate(30), validate(LONG_MS)));
}

#[test]
fn with_zero_every_lookup_sees_what_the_origin_has() {
    alone(|| {
        let server = server(8 * MIB);
        let mut writer = client(&server);
        let cache = open(8 * MIB, server.addr());
        let asking = namespace(&cache, "asking", ASK);
        let key = asking.key("key");
        assert!(cache.get(key, soon()).unwrap().is_none());
        for round in 0..30_u64 {
            let version = writer.put(b"asking", b"key", &content::bytes(b"key", round, LEN)).unwrap().version;
            for _ in 0..2 {
                let lease = get(&cache, key);
                assert_eq!(lease.version(), version);
                content::check_lease(b"key", round, LEN, &lease);
            }
            assert!(
                !cache.contains(key).unwrap() && cache.peek(key).unwrap().is_none(),
                "nothing is served unasked"
            );
        }
        let stats = cache.stats();
        assert_eq!((stats.fills_published, stats.fills_confirmed, stats.hits), (30, 30, 0));
        assert!(writer.remove(b"asking", b"key").unwrap());
        assert!(cache.get(key, soon()).unwrap().is_none(), "removed at the origin");
        assert_eq!(cache.namespace_stats(asking).entries, 0);
        finish(cache);
    });
}

#[test]
fn an_unchanged_version_is_served_without_a_second_transfer() {
    alone(|| {
        for lookups in [true, false] {
            let world = World::default();
            world.set("key", 7);
            let origin = if lookups { world.origin() } else { world.origin_without_lookups() };
            let cache = open(8 * MIB, origin.address());
            let key = namespace(&cache, "unchanged", ASK).key("key");
            let first = get(&cache, key);
            let transferred = (origin.seen().gets, cache.stats().received_direct_bytes);
            for round in 1..=5 {
                let lease = get(&cache, key);
                assert_eq!(lease.identity(), first.identity());
                assert_eq!(cache.stats().fills_confirmed, round);
                assert_eq!(origin.seen().lookups.len() as u64, round);
            }
            assert_eq!(cache.stats().received_direct_bytes, transferred.1);
            if lookups {
                assert_eq!(origin.seen().gets, transferred.0);
            }
            // Confirmed: until the time is over nobody is asked.
            set(&cache, key.namespace(), NamespaceMode::Validate { validate_ms: LONG_MS });
            let asked = origin.seen().lookups.len();
            assert_eq!(cache.peek(key).unwrap().unwrap().identity(), first.identity());
            assert_eq!(get(&cache, key).identity(), first.identity());
            assert_eq!(origin.seen().lookups.len(), asked);
            drop(first);
            finish(cache);
        }
    });
}

#[test]
fn without_its_origin_a_value_to_validate_is_an_error_and_an_immutable_one_a_hit() {
    alone(|| {
        let origin = FakeOrigin::well_behaved();
        let address = origin.address();
        let mut config = config(8 * MIB, std::slice::from_ref(&address));
        (config.backoff_min_ms, config.backoff_max_ms) = (1, 1);
        let cache = open_with(config);
        let asking = namespace(&cache, "asking", ASK);
        let name = content::name(LEN, 0);
        let keys = [asking.key(&name), Namespace::DEFAULT.key(&name)];
        let old = get(&cache, keys[0]);
        get(&cache, keys[1]);
        drop(origin);
        for _ in 0..3 {
            assert!(matches!(cache.get(keys[0], soon()), Err(Error::PeerUnavailable { .. })));
            assert!(cache.peek(keys[0]).unwrap().is_none());
            let results = cache.get_batch(&keys, soon());
            assert!(matches!(results[0], Err(Error::PeerUnavailable { .. })), "{:?}", results[0]);
            content::check_lease(name.as_bytes(), 1, LEN, results[1].as_ref().unwrap().as_ref().unwrap());
        }
        let origin = FakeOrigin::well_behaved_at(address);
        eventually(|| "the origin's return".to_owned(), || cache.get(keys[0], soon()).is_ok());
        assert_eq!(get(&cache, keys[0]).identity(), old.identity(), "it was the present value all the time");
        assert_eq!(origin.requests(), 0);
        drop(old);
        finish(cache);
    });
}

#[test]
fn what_vanished_from_a_server_is_absent_and_a_put_value_stays() {
    alone(|| {
        let world = World::default();
        world.set("key", 3);
        let origin = world.origin();
        let cache = open(8 * MIB, origin.address());
        let asking = namespace(&cache, "vanish", ASK);
        let old = get(&cache, asking.key("key"));
        world.remove("key");
        assert!(cache.get(asking.key("key"), soon()).unwrap().is_none());
        assert_eq!(cache.namespace_stats(asking).entries, 0);
        content::check_lease(b"key", 3, LEN, &old);
        drop(old);
        // Put where the origin has nothing: it stays until the origin has something.
        cache.put(asking.key("key"), b"mine", soon()).unwrap();
        for _ in 0..2 {
            assert_eq!(get(&cache, asking.key("key")).as_slice(), Some(&b"mine"[..]));
        }
        world.set("key", 4);
        content::check_lease(b"key", 4, LEN, &get(&cache, asking.key("key")));
        // Put over what the origin has: confirmed when it was put, and no longer.
        set(&cache, asking, NamespaceMode::Validate { validate_ms: LONG_MS });
        cache.put(asking.key("key"), b"mine", soon()).unwrap();
        assert_eq!(get(&cache, asking.key("key")).as_slice(), Some(&b"mine"[..]));
        set(&cache, asking, ASK);
        content::check_lease(b"key", 4, LEN, &get(&cache, asking.key("key")));
        finish(cache);
    });
}

#[test]
fn without_an_origin_a_value_is_its_own_authority() {
    alone(|| {
        let cache = open_local(8 * MIB);
        let asking = namespace(&cache, "local", ASK);
        cache.put(asking.key("key"), b"mine", soon()).unwrap();
        assert_eq!(get(&cache, asking.key("key")).as_slice(), Some(&b"mine"[..]));
        assert!(
            cache.get_batch(&[asking.key("key"), asking.key("other")], soon())[0].as_ref().unwrap().is_some()
        );
        // A time to live is one here too.
        set(&cache, asking, NamespaceMode::Ttl { ttl_ms: 1 });
        eventually(
            || "the end of its time".to_owned(),
            || cache.get(asking.key("key"), soon()).unwrap().is_none(),
        );
        finish(cache);
    });
}

#[test]
fn a_batch_is_validated_with_one_question_per_peer() {
    alone(|| {
        let world = World::default();
        let names: Vec<String> = (0..24).map(|n| format!("key {n}")).collect();
        names.iter().for_each(|name| world.set(name, 1));
        let origins = [world.origin(), world.origin()];
        let cache = open_with(config(16 * MIB, &[origins[0].address(), origins[1].address()]));
        let asking = namespace(&cache, "batch", ASK);
        let mut keys: Vec<Key<'_>> = names.iter().map(|name| asking.key(name)).collect();
        // Duplicates, of the first and the last.
        keys.extend([keys[0], keys[23], keys[0]]);
        let asked = || origins.each_ref().map(|origin| (origin.seen().lookups.len(), origin.seen().gets));
        let check = |results: Vec<hotslice::Result<Option<Lease>>>, changed: Option<(usize, u64)>| {
            assert_eq!(results.len(), keys.len());
            for (key, lease) in keys.iter().zip(&results) {
                let version =
                    changed.filter(|&(n, _)| names[n].as_bytes() == key.bytes()).map_or(1, |(_, v)| v);
                content::check_lease(key.bytes(), version, LEN, lease.as_ref().unwrap().as_ref().unwrap());
            }
        };
        check(cache.get_batch(&keys, soon()), None);
        let before = asked();
        assert!(before.iter().all(|&(lookups, _)| lookups == 1), "both have keys: {before:?}");
        check(cache.get_batch(&keys, soon()), None);
        assert_eq!(asked(), before.map(|(lookups, gets)| (lookups + 1, gets)));
        let mut buffers = vec![vec![0; LEN]; keys.len()];
        let mut reads: Vec<Read<'_>> =
            keys.iter().zip(&mut buffers).map(|(&key, into)| Read { key, into }).collect();
        assert!(cache.get_into_batch(&mut reads, soon()).iter().all(|read| matches!(read, Ok(Some(_)))));
        keys.iter().zip(&buffers).for_each(|(key, bytes)| content::check(key.bytes(), 1, 0, bytes));
        assert_eq!(asked(), before.map(|(lookups, gets)| (lookups + 2, gets)));
        assert_eq!(cache.stats().fills_confirmed, 48);
        // One of them has changed.
        world.set(&names[23], 2);
        check(cache.get_batch(&keys, soon()), Some((23, 2)));
        assert_eq!(asked().map(|(lookups, _)| lookups), before.map(|(lookups, _)| lookups + 3));
        assert_eq!(cache.stats().fills_confirmed, 48 + 23);
        finish(cache);
    });
}

#[test]
fn a_lookup_does_not_join_a_question_that_is_older() {
    alone(|| {
        let world = World::default();
        world.set("key", 1);
        let (origin, hold) = world.hesitating();
        let cache = open(8 * MIB, origin.address());
        let key = namespace(&cache, "late", ASK).key("key");
        get(&cache, key);
        for batch in [false, true] {
            let version = world.version(b"key").unwrap();
            let (asked, go) = hold.next();
            std::thread::scope(|threads| {
                let early = threads.spawn(|| get(&cache, key));
                asked.pass();
                // From here on whoever asks must see it.
                world.set("key", version + 1);
                let misses = cache.stats().misses;
                let late = threads.spawn(|| match batch {
                    true => cache.get_batch(&[key], soon()).remove(0).unwrap().unwrap(),
                    false => get(&cache, key),
                });
                eventually(|| "the second lookup".to_owned(), || cache.stats().misses == misses + 1);
                // The shard has taken it in when it has taken in what came after it.
                cache.invalidate(Invalidate::Prefix(Namespace::DEFAULT, b"nothing"), soon()).unwrap();
                go.open();
                content::check_lease(b"key", version, LEN, &early.join().unwrap());
                content::check_lease(b"key", version + 1, LEN, &late.join().unwrap());
            });
        }
        finish(cache);
    });
}

#[test]
fn who_is_late_for_a_question_has_a_deadline_too() {
    alone(|| {
        let world = World::default();
        world.set("key", 1);
        let (origin, hold) = world.hesitating();
        let cache = open(8 * MIB, origin.address());
        let key = namespace(&cache, "late deadline", ASK).key("key");
        get(&cache, key);
        let (asked, go) = hold.next();
        std::thread::scope(|threads| {
            let early = threads.spawn(|| get(&cache, key));
            asked.pass();
            let late = cache.get(key, Deadline::after_ms(20));
            assert!(matches!(late, Err(Error::DeadlinePassed { .. })), "{late:?}");
            go.open();
            content::check_lease(b"key", 1, LEN, &early.join().unwrap());
        });
        finish(cache);
    });
}

#[test]
fn invalidation_and_put_beat_a_validation_in_flight() {
    alone(|| {
        let world = World::default();
        let (origin, hold) = world.hesitating();
        let cache = open(8 * MIB, origin.address());
        let asking = namespace(&cache, "fence", ASK);
        let key = asking.key("key");
        let scopes = [
            Some(Invalidate::Key(key)),
            Some(Invalidate::Prefix(asking, b"ke")),
            Some(Invalidate::Namespace(asking)),
            Some(Invalidate::All),
            None,
        ];
        for (scope, round) in scopes.into_iter().zip(1..) {
            set(&cache, asking, ASK);
            world.set("key", 2 * round);
            let old = get(&cache, key);
            let (asked, go) = hold.next();
            std::thread::scope(|threads| {
                let early = threads.spawn(|| get(&cache, key));
                asked.pass();
                world.set("key", 2 * round + 1);
                // Still on its way when it is over; then the value is confirmed for long.
                set(&cache, asking, NamespaceMode::Validate { validate_ms: LONG_MS });
                let Some(scope) = scope else {
                    cache.put(key, b"mine", soon()).unwrap();
                    for lease in [get(&cache, key), early.join().unwrap()] {
                        assert_eq!(lease.as_slice(), Some(&b"mine"[..]));
                    }
                    go.open();
                    eventually(|| "the old fill's end".to_owned(), || cache.stats().fills_in_flight == 0);
                    assert_eq!(cache.peek(key).unwrap().unwrap().as_slice(), Some(&b"mine"[..]));
                    return;
                };
                assert_eq!(cache.invalidate(scope, soon()).unwrap(), 1, "{scope:?}");
                let lookups = cache.stats().lookups;
                let late = threads.spawn(|| get(&cache, key));
                eventually(|| format!("{scope:?}: a lookup"), || cache.stats().lookups == lookups + 1);
                // Over another lane the new answer may come before the old one, which must not replace it.
                go.open();
                for lease in [late.join().unwrap(), early.join().unwrap()] {
                    content::check_lease(b"key", 2 * round + 1, LEN, &lease);
                }
                eventually(|| "the old fill's end".to_owned(), || cache.stats().fills_in_flight == 0);
                assert_eq!(cache.peek(key).unwrap().unwrap().version(), 2 * round + 1, "{scope:?}");
            });
            content::check_lease(b"key", 2 * round, LEN, &old);
        }
        finish(cache);
    });
}

#[test]
fn modes_change_while_the_cache_works() {
    alone(|| {
        let world = World::default();
        world.set("key", 1);
        let origin = world.origin();
        let mut config = config(8 * MIB, &[origin.address()]);
        config.namespace_mode = ASK;
        let own = NamespaceSettings { mode: NamespaceMode::Immutable, quota_bytes: 0 };
        config.namespaces.insert("configured".to_owned(), own);
        let cache = open_with(config);
        let (configured, other) =
            (cache.namespace("configured").unwrap(), cache.namespace("not configured").unwrap());
        let version = |namespace: Namespace| get(&cache, namespace.key("key")).version();
        assert_eq!((version(configured), version(other)), (1, 1));
        world.set("key", 2);
        assert_eq!((version(configured), version(other)), (1, 2));
        set(&cache, configured, ASK);
        set(&cache, other, NamespaceMode::Immutable);
        world.set("key", 3);
        assert_eq!((version(configured), version(other)), (3, 2));
        set(&cache, configured, NamespaceMode::Ttl { ttl_ms: LONG_MS });
        world.set("key", 4);
        assert_eq!((version(configured), version(other)), (3, 2));
        let never = NamespaceSettings { mode: NamespaceMode::Ttl { ttl_ms: 0 }, quota_bytes: 0 };
        let error = cache.set_namespace(configured, never).unwrap_err().to_string();
        assert!(error.contains("ttl_ms") && error.contains("configured"), "{error}");
        assert_eq!(version(configured), 3, "what is refused changes nothing");
        finish(cache);
    });
}

#[test]
fn leases_outlive_what_replaces_their_values() {
    alone(|| {
        let server = server_at(([127, 0, 0, 1], 0), 8 * MIB);
        let mut writer = client(&server);
        let cache = open(8 * MIB, server.addr());
        let asking = namespace(&cache, "outlive", ASK);
        let mut leases = Vec::new();
        for version in 1..=5 {
            writer.put(b"outlive", b"key", &content::bytes(b"key", version, LEN)).unwrap();
            leases.push(get(&cache, asking.key("key")));
        }
        for (lease, version) in leases.iter().zip(1..) {
            content::check_lease(b"key", version, LEN, lease);
        }
        assert_eq!((cache.stats().entries, cache.stats().condemned), (1, 4));
        drop(leases);
        finish(cache);
    });
}
