//! The capacity changes while the cache works: grown it holds more, shrunk it gives memory back as soon as no
//! lease needs it, and no byte under a lease changes.

use hotslice::Address;
use hotslice::{Cache, Deadline, Error, Invalidate, Lease, Namespace, Resized};
use hotslice_tests::child::in_child;
use hotslice_tests::content::{self, name};
use hotslice_tests::gauges::{Resources, alone, assert_quiet, finish};
use hotslice_tests::origin::FakeOrigin;
use hotslice_tests::setup::{MIB, config, open_with, server, soon, store};
use hotslice_tests::sync::eventually;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

fn cache(mib: usize, max_mib: usize, origin: &[Address]) -> Cache {
    let mut config = config(mib * MIB, origin);
    config.capacity_max_bytes = (max_mib * MIB) as u64;
    open_with(config)
}

fn check(name: &str, lease: &Lease) {
    content::check_lease(name.as_bytes(), 1, content::named_len(name.as_bytes()).unwrap(), lease);
}

fn put(cache: &Cache, name: &str) {
    let len = content::named_len(name.as_bytes()).unwrap();
    cache.put(name, &content::bytes(name.as_bytes(), 1, len), soon()).unwrap();
}

/// Resizes and insists that it is done.
#[track_caller]
fn resize(cache: &Cache, mib: usize) -> Resized {
    let resized = cache.resize((mib * MIB) as u64, soon()).unwrap();
    assert!(resized.is_complete(), "{resized:?}");
    assert_eq!(resized.target_bytes, (mib * MIB) as u64);
    assert_eq!((cache.stats().arena_bytes, cache.stats().retiring_bytes), ((mib * MIB) as u64, 0));
    resized
}

/// Lets the process map `spare_bytes` more than it has mapped. Returns the former limit.
fn limit_address_space(spare_bytes: u64) -> libc::rlimit {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let size = status.lines().find_map(|line| line.strip_prefix("VmSize:")).unwrap();
    let size: u64 = size.trim().trim_end_matches(" kB").parse().unwrap();
    let mut former = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: writes a local.
    assert_eq!(unsafe { libc::getrlimit(libc::RLIMIT_AS, &mut former) }, 0);
    let limit = libc::rlimit { rlim_cur: (size << 10) + spare_bytes, ..former };
    // SAFETY: reads a local.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_AS, &limit) }, 0);
    former
}

/// Bytes of the mappings of so many blocks of 1 MiB.
fn mapped(blocks: usize) -> u64 {
    (blocks * MIB) as u64
}

#[test]
fn a_grown_cache_holds_more() {
    alone(|| {
        let server = server(32 * MIB);
        let names: Vec<String> = (0..12).map(|i| name(MIB, i)).collect();
        store(&server, &names);
        let before = Resources::now().arena_bytes;
        let cache = cache(4, 12, &[server.addr()]);
        assert_eq!(Resources::now().arena_bytes - before, mapped(4), "only the capacity is mapped");
        let read = |names: &[String]| {
            names.iter().for_each(|name| check(name, &cache.get(name, soon()).unwrap().unwrap()))
        };
        read(&names);
        assert_eq!(cache.stats().entries, 4);
        let resized = resize(&cache, 12);
        assert_eq!(resized.shards[0].arena.block_count, 12);
        assert_eq!(Resources::now().arena_bytes - before, mapped(12));
        read(&names);
        let (fills, evictions) = (cache.stats().fills, cache.stats().evictions);
        read(&names);
        assert_eq!(
            (cache.stats().entries, cache.stats().fills, cache.stats().evictions),
            (12, fills, evictions)
        );
        // A value that did not fit before.
        put(&cache, &name(11 * MIB, 99));
        finish(cache);
    });
}

#[test]
fn what_cannot_be_asked_for_is_named_and_changes_nothing() {
    alone(|| {
        let mut config = config(4 * MIB, &[]);
        config.capacity_max_bytes = 8 * MIB as u64;
        config.shards = 2;
        let cache = open_with(config);
        put(&cache, &name(1000, 1));
        let refused = |bytes: u64, words: &[&str]| match cache.resize(bytes, soon()) {
            Err(error @ Error::Config { setting: "capacity_bytes", .. }) => {
                let text = error.to_string();
                assert!(words.iter().all(|word| text.contains(word)), "{text}");
            }
            other => panic!("{other:?}"),
        };
        refused(8 * MIB as u64 + 1, &["capacity_max_bytes", "8MiB"]);
        refused(u64::MAX, &["capacity_max_bytes"]);
        refused(2 * MIB as u64 - 1, &["one block of 1MiB", "2 shards"]);
        refused(0, &["one block"]);
        let past = cache.resize(6 * MIB as u64, Deadline::after_ms(0));
        assert!(matches!(past, Err(Error::DeadlinePassed { .. })), "{past:?}");
        assert_eq!(cache.stats().arena_bytes, 4 * MIB as u64);
        assert!(cache.contains(&name(1000, 1)).unwrap());
        // Rounded down to whole blocks per shard.
        let resized = cache.resize(7 * MIB as u64, soon()).unwrap();
        assert_eq!((resized.target_bytes, resized.shards.len()), (6 * MIB as u64, 2));
        assert!(resized.is_complete(), "{resized:?}");
        finish(cache);
    });
}

#[test]
fn a_capacity_max_below_the_capacity_is_refused() {
    let mut config = config(4 * MIB, &[]);
    config.capacity_max_bytes = 3 * MIB as u64;
    let error = Cache::open(config).expect_err("refused").to_string();
    assert!(error.contains("`capacity_max_bytes` is 3MiB") && error.contains("4MiB"), "{error}");
}

#[test]
fn a_leased_block_goes_when_its_lease_does() {
    alone(|| {
        let before = Resources::now().arena_bytes;
        let cache = cache(4, 0, &[]);
        let names: Vec<String> = (0..4).map(|i| name(MIB, i)).collect();
        names.iter().for_each(|name| put(&cache, name));
        let leases: Vec<Lease> = names.iter().map(|name| cache.peek(name).unwrap().unwrap()).collect();
        let resized = cache.resize(MIB as u64, Deadline::after_ms(50)).unwrap();
        assert!(!resized.is_complete());
        assert_eq!((resized.target_bytes, resized.arena_bytes), (MIB as u64, 4 * MIB as u64));
        assert_eq!(
            (resized.retiring_bytes, resized.shards[0].retiring_bytes),
            (3 * MIB as u64, 3 * MIB as u64)
        );
        names.iter().zip(&leases).for_each(|(name, lease)| check(name, lease));
        // The values of the retiring blocks are not found any more; room for others is what is left.
        assert_eq!(names.iter().filter(|name| cache.contains(name.as_str()).unwrap()).count(), 1);
        let large = cache.put("large", &vec![0; MIB + 1], soon());
        assert!(
            matches!(large, Err(Error::ValueTooLarge { arena_bytes, .. }) if arena_bytes == MIB as u64),
            "{large:?}"
        );
        // Each goes with its lease, and nobody has to ask the cache for anything.
        for (left, lease) in (0..4).rev().zip(leases) {
            drop(lease);
            // One of the four lies in the block that stays.
            let most = mapped(left + 1);
            eventually(
                || format!("{left} leases: {} bytes mapped", Resources::now().arena_bytes - before),
                || Resources::now().arena_bytes - before <= most,
            );
        }
        eventually(|| "one block".to_owned(), || cache.stats().arena_bytes == MIB as u64);
        assert_eq!((cache.stats().retiring_bytes, Resources::now().arena_bytes - before), (0, mapped(1)));
        put(&cache, &names[0]);
        check(&names[0], &cache.peek(&names[0]).unwrap().unwrap());
        finish(cache);
    });
}

#[test]
fn blocks_that_can_go_are_preferred() {
    alone(|| {
        let cache = cache(4, 0, &[]);
        let names: Vec<String> = (0..4).map(|i| name(MIB, i)).collect();
        names.iter().for_each(|name| put(&cache, name));
        let lease = cache.peek(&names[1]).unwrap().unwrap();
        // Three other blocks can be evicted: the leased one stays, and its value is found.
        let evictions = cache.stats().evictions;
        resize(&cache, 1);
        assert_eq!(cache.stats().evictions - evictions, 3);
        check(&names[1], &lease);
        check(&names[1], &cache.peek(&names[1]).unwrap().unwrap());
        assert_eq!(cache.stats().entries, 1);
        drop(lease);
        // Wholly free blocks cost nothing.
        resize(&cache, 4);
        resize(&cache, 1);
        assert!(cache.contains(&names[1]).unwrap());
        finish(cache);
    });
}

#[test]
fn growing_again_keeps_what_was_on_its_way_out() {
    alone(|| {
        let cache = cache(4, 0, &[]);
        let names: Vec<String> = (0..4).map(|i| name(MIB, i)).collect();
        names.iter().for_each(|name| put(&cache, name));
        let leases: Vec<Lease> = names.iter().map(|name| cache.peek(name).unwrap().unwrap()).collect();
        let resized = cache.resize(MIB as u64, Deadline::after_ms(20)).unwrap();
        assert_eq!(resized.retiring_bytes, 3 * MIB as u64);
        resize(&cache, 4);
        names.iter().zip(&leases).for_each(|(name, lease)| check(name, lease));
        drop(leases);
        names.iter().for_each(|name| put(&cache, name));
        assert_eq!(cache.stats().entries, 4);
        finish(cache);
    });
}

#[test]
fn who_waits_for_room_is_told_when_it_cannot_come_any_more() {
    alone(|| {
        let origin = FakeOrigin::well_behaved();
        let cache = cache(4, 0, &[origin.address()]);
        let blocker = name(3 * MIB, 0);
        put(&cache, &blocker);
        let lease = cache.peek(&blocker).unwrap().unwrap();
        let (large, small) = (name(2 * MIB, 1), name(1000, 2));
        std::thread::scope(|scope| {
            let fetched = scope.spawn(|| cache.get(&large, soon()));
            eventually(|| "the fetch to wait for room".to_owned(), || cache.stats().starvations == 1);
            let written = scope.spawn(|| cache.put("large", &vec![0; 2 * MIB], soon()));
            let _ = cache.resize(MIB as u64, Deadline::after_ms(20)).unwrap();
            for result in [fetched.join().unwrap().map(drop), written.join().unwrap()] {
                assert!(
                    matches!(result, Err(Error::ValueTooLarge { arena_bytes, .. }) if arena_bytes == MIB as u64),
                    "{result:?}"
                );
            }
        });
        check(&blocker, &lease);
        drop(lease);
        check(&small, &cache.get(&small, soon()).unwrap().unwrap());
        finish(cache);
    });
}

#[test]
fn growing_feeds_who_waits_for_room() {
    alone(|| {
        let cache = cache(1, 2, &[]);
        let (first, second) = (name(MIB, 0), name(MIB, 1));
        put(&cache, &first);
        let lease = cache.peek(&first).unwrap().unwrap();
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| put(&cache, &second));
            eventually(|| "starvation".to_owned(), || cache.stats().starvations == 1);
            resize(&cache, 2);
            waiter.join().unwrap();
        });
        check(&second, &cache.peek(&second).unwrap().unwrap());
        check(&first, &lease);
        drop(lease);
        finish(cache);
    });
}

#[test]
fn memory_that_cannot_be_had_is_an_error_and_all_is_as_before() {
    in_child("resize::memory_that_cannot_be_had_is_an_error_and_all_is_as_before", || {
        let mut config = config(32 * MIB, &[]);
        config.capacity_max_bytes = 1 << 30;
        config.block_bytes = 16 * MIB as u64;
        config.shards = 2;
        let cache = open_with(config);
        let name = name(3 * MIB, 0);
        put(&cache, &name);
        let mapped_before = Resources::now().arena_bytes;
        // Room for some of the blocks that are asked for, and not for all.
        let unlimited = limit_address_space(100 * MIB as u64);
        let result = cache.resize(512 * MIB as u64, soon());
        // SAFETY: reads a local. Before anything else: a panic needs memory.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_AS, &unlimited) }, 0);
        let error = result.expect_err("there was a limit").to_string();
        assert!(error.contains("mmap") && error.contains("RLIMIT_AS"), "{error}");
        assert_eq!((cache.stats().arena_bytes, cache.stats().retiring_bytes), (32 * MIB as u64, 0));
        assert_eq!(Resources::now().arena_bytes, mapped_before);
        check(&name, &cache.peek(&name).unwrap().unwrap());
        let resized = cache.resize(512 * MIB as u64, soon()).unwrap();
        assert!(resized.is_complete(), "{resized:?}");
        finish(cache);
    });
}

#[test]
fn what_is_registered_with_the_ring_follows() {
    alone(|| {
        let pinned = || {
            let status = std::fs::read_to_string("/proc/self/status").unwrap();
            let kib = status.lines().find_map(|line| line.strip_prefix("VmPin:")).unwrap();
            kib.trim().trim_end_matches(" kB").parse::<usize>().unwrap() << 10
        };
        let before = pinned();
        let cache = cache(4, 8, &[]);
        if cache.reports()[0].transport.registered_blocks == 0 {
            eprintln!("skipped: nothing can be registered here");
            return finish(cache);
        }
        // Memory that the ring still held would not be given back by unmapping it.
        for mib in [4, 1, 8, 2, 3] {
            resize(&cache, mib);
            assert_eq!(pinned() - before, mib * MIB);
        }
        finish(cache);
    });
}

#[test]
fn after_the_end_there_is_nothing_to_resize() {
    alone(|| {
        let cache = cache(4, 8, &[]);
        let names: Vec<String> = (0..4).map(|i| name(MIB, i)).collect();
        names.iter().for_each(|name| put(&cache, name));
        let lease = cache.peek(&names[0]).unwrap().unwrap();
        let leases: Vec<Lease> = names.iter().map(|name| cache.peek(name).unwrap().unwrap()).collect();
        std::thread::scope(|scope| {
            // One that waits for pins when the cache ends.
            let waiting = scope.spawn(|| cache.resize(MIB as u64, soon()));
            eventually(|| "blocks on their way out".to_owned(), || cache.stats().retiring_bytes > 0);
            cache.shutdown();
            let ended = waiting.join().unwrap();
            assert!(matches!(ended, Err(Error::ShutDown)), "{ended:?}");
        });
        let late = cache.resize(8 * MIB as u64, soon());
        assert!(matches!(late, Err(Error::ShutDown)), "{late:?}");
        drop(leases);
        drop(cache);
        check(&names[0], &lease);
    });
}

/// Tells threads to end when it is dropped, also by a panic: a test that fails must not hang.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Readers, a writer and an invalidator go on while the capacity jumps about; every byte is checked.
#[test]
fn shrinking_under_load_costs_no_byte() {
    alone(|| {
        let server = server(64 * MIB);
        let sizes = [1000, 40_000, 300_001, MIB / 2 + 1, MIB + 7];
        let names: Vec<String> = (0..30).map(|i| name(sizes[i % sizes.len()], i)).collect();
        store(&server, &names);
        let mut config = config(16 * MIB, &[server.addr()]);
        config.shards = 2;
        let cache = open_with(config);
        let stop = AtomicBool::new(false);
        let reads = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for reader in 0..2 {
                let (cache, names, stop, reads) = (&cache, &names, &stop, &reads);
                scope.spawn(move || {
                    let _stop = Stop(stop);
                    let mut held: Vec<(usize, Lease)> = Vec::new();
                    let mut i = reader * 7;
                    while !stop.load(Ordering::Relaxed) {
                        i = (i + 1) % names.len();
                        match cache.get(&names[i], Deadline::after_ms(200)) {
                            Ok(Some(lease)) => {
                                check(&names[i], &lease);
                                held.push((i, lease));
                            }
                            // For a moment leases may pin all that is left.
                            Err(Error::Pinned { .. } | Error::DeadlinePassed { .. }) => held.clear(),
                            other => panic!("{}: {other:?}", names[i]),
                        }
                        if held.len() > 2 {
                            let (i, lease) = held.remove(0);
                            check(&names[i], &lease);
                        }
                        reads.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
            let (cache, names, stop) = (&cache, &names, &stop);
            scope.spawn(move || {
                let _stop = Stop(stop);
                for i in (0..names.len()).cycle() {
                    if stop.load(Ordering::Relaxed) {
                        return;
                    }
                    let key = names[i].as_bytes();
                    let bytes = content::bytes(key, 1, content::named_len(key).unwrap());
                    match cache.put(&names[i], &bytes, Deadline::after_ms(200)) {
                        Ok(()) | Err(Error::Pinned { .. } | Error::DeadlinePassed { .. }) => {}
                        other => panic!("{other:?}"),
                    }
                    let key = Namespace::DEFAULT.key(&names[(i * 7) % names.len()]);
                    cache.invalidate(Invalidate::Key(key), soon()).unwrap();
                }
            });
            let _stop = Stop(stop);
            for mib in [8, 16, 6, 12, 16, 8, 16, 8, 14, 6, 16] {
                let seen = reads.load(Ordering::Relaxed);
                let resized = cache.resize((mib * MIB) as u64, soon()).unwrap();
                assert!(resized.is_complete(), "leases come and go, so every block comes free: {resized:?}");
                eventually(
                    || "more reads".to_owned(),
                    || reads.load(Ordering::Relaxed) > seen + 20 || stop.load(Ordering::Relaxed),
                );
            }
        });
        assert_quiet(&cache);
        finish(cache);
    });
}

proptest::proptest! {
    #![proptest_config(proptest::prelude::ProptestConfig::with_cases(12))]

    /// Random resizes, puts, leases and releases against a model: what is leased keeps its bytes, what is found is
    /// right, sizes are what the leases allow, and at the end every block is back.
    #[test]
    fn random_resizes_keep_what_they_must(
        steps in proptest::collection::vec((0u8..6, 0usize..12, 1usize..9), 1..60)
    ) {
        alone(|| {
            let cache = cache(4, 8, &[]);
            let mut target = 4;
            let mut leases: Vec<(String, Lease)> = Vec::new();
            let sizes = [1, 5000, MIB / 2, MIB, MIB + 5, 3 * MIB];
            for (kind, which, blocks) in steps {
                let name = name(sizes[which % sizes.len()], which);
                match kind {
                    0 | 1 => {
                        let len = content::named_len(name.as_bytes()).unwrap();
                        let value = content::bytes(name.as_bytes(), 1, len);
                        match cache.put(&name, &value, Deadline::after_ms(10)) {
                            Ok(()) => {}
                            Err(Error::ValueTooLarge { .. }) => assert!(len > target * MIB),
                            Err(Error::Pinned { .. } | Error::DeadlinePassed { .. }) => assert!(!leases.is_empty()),
                            Err(other) => panic!("{other}"),
                        }
                    }
                    2 => if let Some(lease) = cache.peek(&name).unwrap() {
                        check(&name, &lease);
                        leases.push((name, lease));
                    },
                    3 => if !leases.is_empty() {
                        let (name, lease) = leases.swap_remove(which % leases.len());
                        check(&name, &lease);
                    },
                    _ => {
                        let deadline = if leases.is_empty() { soon() } else { Deadline::after_ms(10) };
                        let resized = cache.resize((blocks * MIB) as u64, deadline).unwrap();
                        target = blocks;
                        assert_eq!(resized.target_bytes, (target * MIB) as u64);
                        assert!(resized.is_complete() || !leases.is_empty(), "{resized:?}");
                    }
                }
                leases.iter().for_each(|(name, lease)| check(name, lease));
            }
            leases.clear();
            let want = (target * MIB) as u64;
            eventually(
                || format!("{want} bytes: {:?}", cache.stats()),
                || cache.stats().arena_bytes == want && cache.stats().retiring_bytes == 0,
            );
            finish(cache);
        });
    }
}
