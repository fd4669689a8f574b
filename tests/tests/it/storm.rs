//! The whole surface at once: completion queues that come and go, futures that are dropped, batches of leases, puts,
//! namespaces whose mode and quota change, an arena that grows and shrinks, shards that help each other, and an origin
//! that fails in every way it can. Whatever succeeds is right, and nothing is left over.

use crate::chaos::{Dice, KEYS, allowed, check, key_name, misbehave};
use hotslice::{
    Cache, Completion, CompletionQueue, Deadline, Error, Invalidate, Key, Lease, Namespace, NamespaceMode,
    NamespaceSettings, Outcome, Target,
};
use hotslice_tests::content;
use hotslice_tests::gauges::{alone, finish};
use hotslice_tests::origin::FakeOrigin;
use hotslice_tests::setup::{MIB, config, open_with, soon};
use std::future::Future;
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

/// Buffers are this long; a value that is longer than what it is to be copied into is an error.
const BUFFER_BYTES: usize = 200_000;

fn deadline(dice: &mut Dice) -> Deadline {
    Deadline::after_ms([0, 1, 5, 50, 400][dice.roll(5) as usize])
}

/// Among them one that waits for its quota's sake and one whose values are asked about at every lookup.
fn namespaces(cache: &Cache) -> Vec<Namespace> {
    let named = ["storm/ttl", "storm/validate", "storm/quota"].map(|name| cache.namespace(name).unwrap());
    std::iter::once(Namespace::DEFAULT).chain(named).collect()
}

/// Both versions that there are: of the origin, and of a put.
fn is_right(name: &str, offset: usize, got: &[u8]) -> bool {
    [1, 2].iter().any(|&version| content::difference(name.as_bytes(), version, offset, got).is_none())
}

/// What a queue's operation was about.
type Note = (Vec<String>, u64);

fn settle<'b>(completion: Completion<'b>, notes: &[Note], pool: &mut Vec<&'b mut [u8]>) {
    let (names, offset) = &notes[completion.user_data as usize];
    let name = names.get(completion.position);
    match (completion.result, &completion.target) {
        (Ok(Outcome::Lease(lease)), _) => check(name.unwrap(), &lease),
        (Ok(Outcome::Copied { value_bytes }), Some(Target::Into(into))) => {
            assert!(is_right(name.unwrap(), 0, &into[..value_bytes as usize]));
        }
        (Ok(Outcome::Copied { value_bytes }), Some(Target::Scatter(pieces))) => {
            let whole = pieces.concat();
            assert!(is_right(name.unwrap(), 0, &whole[..value_bytes as usize]));
        }
        (Ok(Outcome::Copied { .. }), Some(Target::Range { offset: from, into })) => {
            assert_eq!(from, offset);
            assert!(is_right(name.unwrap(), *from as usize, into));
        }
        (Ok(Outcome::Put | Outcome::Prefetching(_)), _) => {}
        (Ok(other), target) => panic!("{other:?}, {target:?}: {name:?}"),
        (Err(error), _) => allowed(&error),
    }
    match completion.target {
        Some(Target::Into(into) | Target::Range { into, .. }) => pool.push(into),
        Some(Target::Scatter(pieces)) => pool.extend(pieces),
        _ => {}
    }
}

fn target<'b>(dice: &mut Dice, pool: &mut Vec<&'b mut [u8]>, offset: u64) -> Target<'b> {
    let kind = dice.roll(4);
    let Some(into) = pool.pop() else { return Target::Lease };
    match (kind, pool.pop()) {
        (0, Some(second)) => Target::Scatter(vec![into, second]),
        (1, Some(second)) => {
            pool.push(second);
            Target::Range { offset, into }
        }
        (2, Some(second)) => {
            pool.extend([into, second]);
            Target::Lease
        }
        (_, second) => {
            pool.extend(second);
            Target::Into(into)
        }
    }
}

/// One queue's life.
fn use_queue(cache: &Cache, dice: &mut Dice, namespaces: &[Namespace]) {
    let mut storage = vec![vec![0u8; BUFFER_BYTES]; 6];
    let puts: Vec<(String, Vec<u8>)> = (0..4)
        .map(|_| {
            let name = key_name(dice.roll(KEYS));
            let len = content::named_len(name.as_bytes()).unwrap().min(50_000);
            let bytes = content::bytes(name.as_bytes(), 2, len);
            (name, bytes)
        })
        .collect();
    let mut pool: Vec<&mut [u8]> = storage.iter_mut().map(Vec::as_mut_slice).collect();
    let mut queue = CompletionQueue::new(cache, 1 + dice.roll(8) as usize).unwrap();
    let mut notes: Vec<Note> = Vec::new();
    for _ in 0..dice.roll(60) {
        let namespace = namespaces[dice.roll(namespaces.len() as u64) as usize];
        let (user_data, at) = (notes.len() as u64, deadline(dice));
        let names: Vec<String> = (0..1 + dice.roll(5)).map(|_| key_name(dice.roll(KEYS))).collect();
        let offset = dice.roll(1000);
        let id = match dice.roll(8) {
            0..4 => {
                let target = target(dice, &mut pool, offset);
                Some(queue.get(namespace.key(&names[0]), target, user_data, at))
            }
            4 => {
                let reads: Vec<(Key<'_>, Target<'_>)> =
                    names.iter().map(|name| (namespace.key(name), target(dice, &mut pool, offset))).collect();
                Some(queue.get_batch(reads, user_data, at))
            }
            5 => {
                let (name, bytes) = &puts[dice.roll(4) as usize];
                let (one, two) = bytes.split_at(bytes.len() / 3);
                Some(queue.put(namespace.key(name), vec![one, two], user_data, at))
            }
            6 => {
                queue.prefetch(&[namespace.key(&names[0])], user_data);
                None
            }
            _ => queue.wait(deadline(dice)).and_then(|completion| {
                settle(completion, &notes, &mut pool);
                None
            }),
        };
        notes.push((names, offset));
        if dice.roll(6) == 0
            && let Some(id) = id
        {
            queue.cancel(id);
        }
        for _ in 0..dice.roll(3) {
            if let Some(completion) = queue.poll() {
                settle(completion, &notes, &mut pool);
            }
        }
    }
    if dice.roll(2) == 0 {
        while let Some(completion) = queue.wait(soon()) {
            settle(completion, &notes, &mut pool);
        }
        assert_eq!(queue.in_flight(), 0);
        drop(queue);
        assert_eq!(pool.len(), 6, "every buffer came back");
    }
}

/// Futures that are polled once or twice and dropped.
fn use_futures(cache: &Cache, dice: &mut Dice, namespaces: &[Namespace]) {
    let namespace = namespaces[dice.roll(namespaces.len() as u64) as usize];
    let names: Vec<String> = (0..1 + dice.roll(5)).map(|_| key_name(dice.roll(KEYS))).collect();
    let keys: Vec<Key<'_>> = names.iter().map(|name| namespace.key(name)).collect();
    let mut context = Context::from_waker(Waker::noop());
    let mut one = pin!(cache.get_async(keys[0], deadline(dice)));
    let mut all = pin!(cache.get_batch_async(&keys, deadline(dice)));
    for _ in 0..dice.roll(3) {
        if let Poll::Ready(found) = one.as_mut().poll(&mut context) {
            match found {
                Ok(lease) => check(&names[0], &lease.expect("the origin has it")),
                Err(error) => allowed(&error),
            }
            break;
        }
    }
    if let Poll::Ready(found) = all.as_mut().poll(&mut context) {
        for (name, found) in names.iter().zip(found) {
            match found {
                Ok(lease) => check(name, &lease.expect("the origin has it")),
                Err(error) => allowed(&error),
            }
        }
    }
}

/// Batches that must be held together, and everything forgotten now and then.
fn use_batches(cache: &Cache, dice: &mut Dice, namespaces: &[Namespace], held: &mut Vec<(String, Lease)>) {
    let namespace = namespaces[dice.roll(namespaces.len() as u64) as usize];
    let names: Vec<String> = (0..dice.roll(12)).map(|_| key_name(dice.roll(KEYS))).collect();
    let keys: Vec<Key<'_>> = names.iter().map(|name| namespace.key(name)).collect();
    for (name, found) in names.iter().zip(cache.get_batch(&keys, deadline(dice))) {
        match found {
            Ok(lease) => {
                let lease = lease.expect("the origin has it");
                check(name, &lease);
                held.push((name.clone(), lease));
            }
            Err(error) => allowed(&error),
        }
    }
    let scope = match dice.roll(12) {
        0 => Invalidate::All,
        1 => Invalidate::Namespace(namespace),
        2 => Invalidate::Prefix(namespace, b"1"),
        3 => Invalidate::Prefix(namespace, b""),
        _ => return held.truncate(dice.roll(4) as usize),
    };
    let _ = cache.invalidate(scope, deadline(dice)).inspect_err(allowed);
}

/// The arena and the namespaces' settings change.
fn reign(cache: &Cache, dice: &mut Dice, namespaces: &[Namespace]) {
    let mode = match dice.roll(4) {
        0 => NamespaceMode::Immutable,
        1 => NamespaceMode::Ttl { ttl_ms: 1 + dice.roll(20) },
        n => NamespaceMode::Validate { validate_ms: (n - 2) * dice.roll(20) },
    };
    let quota_bytes = [0, 100_000, 4 * MIB as u64][dice.roll(3) as usize];
    let namespace = namespaces[1 + dice.roll(namespaces.len() as u64 - 1) as usize];
    let settings = NamespaceSettings { mode, quota_bytes };
    cache.set_namespace(namespace, settings).unwrap();
    let capacity_mib = 2 * (1 + dice.roll(16) as usize);
    match cache.resize((capacity_mib * MIB) as u64, Deadline::after_ms(20)) {
        Ok(_) | Err(Error::DeadlinePassed { .. }) => {}
        Err(error) => panic!("{error:?}"),
    }
    std::thread::sleep(Duration::from_millis(dice.roll(20)));
}

fn storm(seed: u64, run_ms: u64) {
    let locate = |key: &[u8]| {
        let len = content::named_len(key)?;
        Some((len as u64, 1, crc32c::crc32c(&content::bytes(key, 1, len))))
    };
    let origin = FakeOrigin::locating(locate, misbehave);
    let mut config = config(24 * MIB, &[origin.address()]);
    config.capacity_max_bytes = 32 * MIB as u64;
    (config.shards, config.shards_per_value, config.stripe_bytes) = (2, 2, MIB as u64);
    (config.receive_timeout_ms, config.connect_timeout_ms, config.fill_timeout_ms) = (100, 200, 300);
    (config.backoff_min_ms, config.backoff_max_ms, config.lane_depth) = (1, 8, 4);
    let cache = open_with(config);
    let namespaces = namespaces(&cache);
    let until = Instant::now() + Duration::from_millis(run_ms);
    std::thread::scope(|scope| {
        for thread in 0..6 {
            let (cache, namespaces) = (&cache, namespaces.as_slice());
            scope.spawn(move || {
                let (mut dice, mut held) = (Dice(seed * 100 + thread), Vec::new());
                while Instant::now() < until {
                    match thread {
                        0..3 => use_queue(cache, &mut dice, namespaces),
                        3 => use_futures(cache, &mut dice, namespaces),
                        4 => use_batches(cache, &mut dice, namespaces, &mut held),
                        _ => reign(cache, &mut dice, namespaces),
                    }
                }
                held.iter().for_each(|(name, lease)| check(name, lease));
            });
        }
    });
    assert!(cache.stats().fills_published > 0);
    finish(cache);
}

#[test]
fn everything_at_once() {
    alone(|| storm(1, 1500));
}
