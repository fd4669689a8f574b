//! Several shards receive one large value together, and what goes wrong with one of them costs its own parts only.

use hotslice::wire::{ResponseHeader, Status};
use hotslice::{Cache, Config, Error, Invalidate, Key, Namespace};
use hotslice_tests::content::{self, name};
use hotslice_tests::gauges::{alone, finish};
use hotslice_tests::origin::{Ask, FakeOrigin, Line, Then, value_header};
use hotslice_tests::setup::{MIB, config, open_with, server, soon, store};
use hotslice_tests::sync::{Gate, eventually};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

/// Two shards with one lane each: the origin's first connection is the owner's, all others are the helper's until
/// somebody fails. Parts of 1 MiB.
fn two(origin: &FakeOrigin, capacity_mib: usize) -> Config {
    let mut config = config(capacity_mib * MIB, &[origin.address()]);
    (config.shards, config.shards_per_value, config.lanes_per_peer) = (2, 2, 1);
    config.stripe_bytes = MIB as u64;
    config
}

fn check(cache: &Cache, key: &str, version: u64, len: usize) {
    content::check_lease(key.as_bytes(), version, len, &cache.get(key, soon()).unwrap().unwrap());
}

/// A two-shard cache of whose origin the script sees only what helpers ask; the owner gets what it wants.
fn with_helper(
    len: usize,
    helper: impl Fn(&Ask, &mut Line) -> Then + Send + Sync + 'static,
) -> (FakeOrigin, Cache) {
    let origin = FakeOrigin::start(move |ask, line| {
        if ask.connection > 0 && ask.offset > 0 {
            return helper(ask, line);
        }
        line.content(ask, 1, len);
        Then::GoOn
    });
    let cache = open_with(two(&origin, 64));
    (origin, cache)
}

#[test]
fn large_values_arrive_whole_over_several_shards() {
    alone(|| {
        let server = server(320 * MIB);
        let sizes = [MIB + 1, 3 * MIB, 7 * MIB + 5, 21 * MIB + 4097, 40 * MIB];
        let names: Vec<String> = (0..20).map(|i| name(sizes[i % sizes.len()], i)).collect();
        store(&server, &names);
        for (shards, lanes) in [(2, 1), (2, 3), (3, 2)] {
            let mut config = config(320 * MIB * shards, &[server.addr()]);
            (config.shards, config.shards_per_value, config.lanes_per_peer) = (shards, shards, lanes);
            config.stripe_bytes = MIB as u64;
            let cache = open_with(config);
            for (i, name) in names.iter().enumerate() {
                check(&cache, name, 1, sizes[i % sizes.len()]);
            }
            assert!(cache.stats().parts_assisted > 0, "{:#?}", cache.stats());
            cache.invalidate(Invalidate::All, soon()).unwrap();
            let keys: Vec<Key<'_>> = names.iter().map(Key::from).collect();
            for (i, result) in cache.get_batch(&keys, soon()).into_iter().enumerate() {
                content::check_lease(
                    names[i].as_bytes(),
                    1,
                    sizes[i % sizes.len()],
                    &result.unwrap().unwrap(),
                );
            }
            finish(cache);
        }
    });
}

#[test]
fn one_shard_per_value_is_respected() {
    alone(|| {
        let origin = FakeOrigin::start(|ask, line| {
            line.content(ask, 1, 20 * MIB);
            Then::GoOn
        });
        let mut config = two(&origin, 64);
        config.shards_per_value = 1;
        let cache = open_with(config);
        check(&cache, "k", 1, 20 * MIB);
        assert_eq!((cache.stats().parts_assisted, origin.seen().connections), (0, 1));
        finish(cache);
    });
}

#[test]
fn every_part_is_asked_for_once_and_some_by_the_helper() {
    alone(|| {
        let (own, helped) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let (count_own, count_helped) = (own.clone(), helped.clone());
        let origin = FakeOrigin::start(move |ask, line| {
            let count = if ask.connection == 0 { &count_own } else { &count_helped };
            count.fetch_add(1, Ordering::Relaxed);
            line.content(ask, 1, 20 * MIB + 5);
            Then::GoOn
        });
        let cache = open_with(two(&origin, 64));
        check(&cache, "k", 1, 20 * MIB + 5);
        let (own, helped) = (own.load(Ordering::Relaxed), helped.load(Ordering::Relaxed));
        assert_eq!(own + helped, 21);
        assert_eq!(cache.stats().parts_assisted, helped as u64);
        assert!(helped > 0);
        finish(cache);
    });
}

#[test]
fn a_helpers_lost_lane_costs_its_own_parts_only() {
    alone(|| {
        let once = AtomicBool::new(true);
        let (_origin, cache) = with_helper(24 * MIB, move |ask, line| {
            let value = content::bytes(&ask.key, 1, 24 * MIB);
            line.header(&value_header(ask, 1, &value));
            if once.swap(false, Ordering::Relaxed) {
                line.raw(&ask.part(&value)[..MIB / 3]);
                return Then::Reset;
            }
            line.raw(ask.part(&value));
            Then::GoOn
        });
        check(&cache, "k", 1, 24 * MIB);
        assert_eq!((cache.stats().fills, cache.stats().lanes_failed), (1, 1));
        finish(cache);
    });
}

#[test]
fn a_helper_without_a_peer_gives_its_parts_back() {
    alone(|| {
        let (_origin, cache) = with_helper(24 * MIB, |_, _| Then::Close);
        check(&cache, "k", 1, 24 * MIB);
        assert_eq!(cache.stats().parts_assisted, 0);
        // The same key: another one's owner may be the other shard.
        cache.invalidate(Invalidate::All, soon()).unwrap();
        check(&cache, "k", 1, 24 * MIB);
        finish(cache);
    });
}

/// Answers with a header that the lie has changed.
fn announce(ask: &Ask, line: &mut Line, lie: fn(&mut ResponseHeader)) {
    let value = content::bytes(&ask.key, 1, 24 * MIB);
    let mut header = value_header(ask, 1, &value);
    lie(&mut header);
    line.header(&header);
    line.raw(ask.part(&value));
}

fn is_breach(error: &Error) -> bool {
    matches!(error, Error::Protocol { .. })
}

#[test]
fn what_a_peer_tells_a_helper_is_not_believed_blindly() {
    type Lie = fn(&Ask, &mut Line);
    type Expected = fn(&Error) -> bool;
    let lies: [(Lie, Expected); 3] = [
        // Another value than the owner was told of: the helper's connection breaks the protocol.
        (|ask, line| announce(ask, line, |header| header.value_version += 1), is_breach),
        (|ask, line| announce(ask, line, |header| header.value_len += 1), is_breach),
        (
            |ask, line| {
                let mut value = content::bytes(&ask.key, 1, 24 * MIB);
                let header = value_header(ask, 1, &value);
                value[ask.offset as usize + 17] ^= 1;
                line.header(&header);
                line.raw(ask.part(&value));
            },
            |error| matches!(error, Error::Checksum { .. }),
        ),
    ];
    for (lie, is_expected) in lies {
        alone(|| {
            let (_origin, cache) = with_helper(24 * MIB, move |ask, line| {
                lie(ask, line);
                Then::GoOn
            });
            match cache.get("k", soon()) {
                // The owner has asked again by itself.
                Ok(lease) => content::check_lease(b"k", 1, 24 * MIB, &lease.unwrap()),
                Err(error) => assert!(is_expected(&error), "{error:?}"),
            }
            finish(cache);
        });
    }
}

#[test]
fn a_value_that_changes_between_two_shards_is_fetched_anew() {
    alone(|| {
        let changed = Arc::new(AtomicBool::new(false));
        let now = changed.clone();
        let origin = FakeOrigin::start(move |ask, line| {
            if ask.connection > 0 && ask.offset > 0 {
                now.store(true, Ordering::Relaxed);
            }
            let version = if now.load(Ordering::Relaxed) { 2 } else { 1 };
            match ask.version {
                0 => line.content(ask, version, 24 * MIB),
                asked if asked == version => line.content(ask, version, 24 * MIB),
                _ => line.refuse(ask, Status::VersionMismatch, "changed"),
            }
            Then::GoOn
        });
        let cache = open_with(two(&origin, 128));
        check(&cache, "k", 2, 24 * MIB);
        assert_eq!(cache.stats().fills_discarded, 1);
        finish(cache);
    });
}

/// A cache whose helpers are stuck with their parts, of a value of this length, until the gate opens.
fn stuck(len: usize) -> (FakeOrigin, Cache, Arc<Gate>, Arc<AtomicUsize>) {
    let (gate, asked) = (Arc::new(Gate::default()), Arc::new(AtomicUsize::new(0)));
    let (inner, count) = (gate.clone(), asked.clone());
    let (origin, cache) = with_helper(len, move |ask, line| {
        let value = content::bytes(&ask.key, 1, len);
        line.header(&value_header(ask, 1, &value));
        line.raw(&ask.part(&value)[..1000]);
        count.fetch_add(1, Ordering::Relaxed);
        inner.pass();
        line.raw(&ask.part(&value)[1000..]);
        Then::GoOn
    });
    (origin, cache, gate, asked)
}

#[test]
fn an_invalidation_waits_for_no_helper_and_the_room_waits_for_them_all() {
    alone(|| {
        let (_origin, cache, gate, asked) = stuck(24 * MIB);
        std::thread::scope(|scope| {
            let early = scope.spawn(|| cache.get("k", Duration::from_millis(300)));
            eventually(|| "a helper at work".to_owned(), || asked.load(Ordering::Relaxed) > 0);
            cache.invalidate(Invalidate::Key(Namespace::DEFAULT.key("k")), soon()).unwrap();
            // The next fill of the key has no helper; it has all others of its own.
            let _ = early.join().unwrap();
            let busy = cache.stats();
            assert!(busy.used_bytes >= 24 * MIB as u64, "the helper still writes: {busy:#?}");
            gate.open();
        });
        check(&cache, "k", 1, 24 * MIB);
        finish(cache);
    });
}

#[test]
fn who_waits_for_a_stuck_helper_is_told_at_the_deadline() {
    alone(|| {
        let (_origin, cache, gate, asked) = stuck(24 * MIB);
        let error = cache.get("k", Duration::from_millis(300)).expect_err("a part does not come");
        assert!(matches!(error, Error::DeadlinePassed { .. }), "{error:?}");
        assert!(asked.load(Ordering::Relaxed) > 0);
        gate.open();
        check(&cache, "k", 1, 24 * MIB);
        finish(cache);
    });
}

#[test]
fn a_peer_that_trickles_to_a_helper_does_not_keep_the_room_for_ever() {
    alone(|| {
        let origin = FakeOrigin::start(move |ask, line| {
            let value = content::bytes(&ask.key, 1, 24 * MIB);
            line.header(&value_header(ask, 1, &value));
            if ask.connection > 0 && ask.offset > 0 {
                line.trickle(ask.part(&value), Duration::from_millis(20));
            } else {
                line.raw(ask.part(&value));
            }
            Then::GoOn
        });
        let mut config = two(&origin, 64);
        config.receive_timeout_ms = 500;
        let cache = open_with(config);
        assert!(cache.get("k", Duration::from_millis(200)).is_err());
        finish(cache);
    });
}

#[test]
fn the_cache_ends_while_a_helper_receives() {
    alone(|| {
        let (_origin, cache, gate, asked) = stuck(24 * MIB);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| cache.get("k", soon()));
            eventually(|| "a helper at work".to_owned(), || asked.load(Ordering::Relaxed) > 0);
            cache.shutdown();
            assert!(matches!(waiting.join().unwrap(), Err(Error::ShutDown)));
        });
        gate.open();
    });
}
