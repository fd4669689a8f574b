//! The completion queue: everything that is submitted completes once, hits at submission, buffers come back, and the
//! owner can sleep on a descriptor.

use hotslice::{Completion, CompletionQueue, Deadline, Error, Key, Lease, Outcome, Target};
use hotslice_tests::content::{self, name};
use hotslice_tests::gauges::{alone, assert_quiet, finish};
use hotslice_tests::origin::{FakeOrigin, Then};
use hotslice_tests::setup::{MIB, config, open, open_local, open_with, server, soon, store};
use hotslice_tests::sync::{Gate, HANG, eventually};
use std::collections::BTreeMap;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

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

#[track_caller]
fn next<'b>(queue: &mut CompletionQueue<'b>) -> Completion<'b> {
    queue.wait(HANG).expect("a completion")
}

#[track_caller]
fn lease(completion: Completion<'_>) -> Lease {
    match completion.result {
        Ok(Outcome::Lease(lease)) => lease,
        other => panic!("no lease: {other:?}"),
    }
}

fn readable(queue: &CompletionQueue<'_>, ms: i32) -> bool {
    let mut poll = libc::pollfd { fd: queue.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: one pollfd, a local.
    unsafe { libc::poll(&mut poll, 1, ms) == 1 }
}

#[test]
fn every_kind_of_get_and_put_of_odd_sizes() {
    alone(|| {
        let server = server(64 * MIB);
        let sizes = [0, 1, 4095, 4096, 4097, 100_000, MIB, 3 * MIB + 5];
        let names: Vec<String> = sizes.iter().map(|&len| name(len, 1)).collect();
        store(&server, &names);
        let cache = open(16 * MIB, server.addr());
        for round in 0..2 {
            let mut whole: Vec<Vec<u8>> = sizes.iter().map(|&len| vec![0xee; len + 3]).collect();
            let mut halves: Vec<Vec<u8>> = sizes.iter().map(|&len| vec![0xee; len]).collect();
            let mut ranges: Vec<Vec<u8>> = sizes.iter().map(|&len| vec![0xee; len / 2]).collect();
            let mut queue = CompletionQueue::new(&cache, 1000).unwrap();
            let buffers = whole.iter_mut().zip(&mut halves).zip(&mut ranges);
            for (i, ((whole, halves), range)) in buffers.enumerate() {
                let (name, user_data) = (&names[i], i as u64 * 10);
                queue.get(name, Target::Lease, user_data, soon());
                queue.get(name, Target::Into(whole), user_data + 1, soon());
                let (a, b) = halves.split_at_mut(sizes[i] / 3);
                queue.get(name, Target::Scatter(vec![a, &mut [], b]), user_data + 2, soon());
                let offset = (sizes[i] - sizes[i] / 2) as u64;
                queue.get(name, Target::Range { offset, into: range }, user_data + 3, soon());
            }
            let mut seen = BTreeMap::new();
            for _ in 0..sizes.len() * 4 {
                let completion = next(&mut queue);
                assert!(completion.last && completion.position == 0 && completion.target.is_some());
                assert!(seen.insert(completion.user_data, ()).is_none(), "completed twice");
                let len = sizes[completion.user_data as usize / 10];
                match completion.result.unwrap() {
                    Outcome::Lease(lease) => {
                        let name = names[completion.user_data as usize / 10].as_bytes();
                        content::check_lease(name, 1, len, &lease);
                    }
                    Outcome::Copied { value_bytes } => assert_eq!(value_bytes, len as u64),
                    other => panic!("{other:?}"),
                }
            }
            assert!(queue.poll().is_none());
            assert_eq!(queue.in_flight(), 0);
            drop(queue);
            for (i, name) in names.iter().enumerate() {
                let (key, len) = (name.as_bytes(), sizes[i]);
                content::check(key, 1, 0, &whole[i][..len]);
                assert_eq!(whole[i][len..], [0xee; 3], "round {round}: nothing beyond the value");
                content::check(key, 1, 0, &halves[i]);
                content::check(key, 1, len - len / 2, &ranges[i]);
            }
        }
        assert_eq!(cache.stats().fills, sizes.len() as u64);
        assert_quiet(&cache);
        finish(cache);
    });
}

#[test]
fn hits_overtake_fills_and_complete_at_submission() {
    alone(|| {
        let (origin, gate) = gated();
        let cache = open(16 * MIB, origin.address());
        cache.put("here", b"now", soon()).unwrap();
        let mut queue = CompletionQueue::new(&cache, 16).unwrap();
        let slow = name(5000, 1);
        queue.get(&slow, Target::Lease, 1, soon());
        origin.wait_requests(1);
        queue.get("here", Target::Lease, 2, soon());
        let first = queue.poll().expect("the hit is complete");
        assert_eq!(first.user_data, 2);
        assert_eq!(lease(first).as_slice(), Some(&b"now"[..]));
        assert!(queue.poll().is_none());
        assert_eq!(queue.in_flight(), 1);
        gate.open();
        let second = next(&mut queue);
        assert_eq!(second.user_data, 1);
        content::check_lease(slow.as_bytes(), 1, 5000, &lease(second));
        drop(queue);
        finish(cache);
    });
}

#[test]
fn a_batch_completes_position_by_position_and_says_which_is_last() {
    alone(|| {
        let server = server(64 * MIB);
        let names: Vec<String> = (0..200).map(|i| name(1000 + i, i)).collect();
        store(&server, &names[..150]);
        let cache = open(16 * MIB, server.addr());
        for name in &names[..50] {
            cache.get(name, soon()).unwrap().unwrap();
        }
        let too_long = vec![7; 5000];
        let mut keys: Vec<Key<'_>> = names.iter().map(Key::from).collect();
        keys.push(Key::from(&too_long));
        keys.push(Key::from(&names[3]));
        keys.push(Key::from(&names[120]));
        let mut queue = CompletionQueue::new(&cache, 1).unwrap();
        queue.get_batch(keys.iter().map(|&key| (key, Target::Lease)), 9, soon());
        let mut seen = vec![false; keys.len()];
        for i in 0..keys.len() {
            let completion = next(&mut queue);
            assert_eq!((completion.user_data, completion.last), (9, i + 1 == keys.len()));
            assert!(!std::mem::replace(&mut seen[completion.position], true), "twice");
            match completion.position {
                200 => assert!(matches!(completion.result, Err(Error::KeyLength { .. }))),
                150..200 => assert!(matches!(completion.result, Ok(Outcome::Absent)), "{completion:?}"),
                position => {
                    let key = keys[position].bytes();
                    let len = content::named_len(key).unwrap();
                    content::check_lease(key, 1, len, &lease(completion));
                }
            }
        }
        assert!(queue.poll().is_none());
        // An empty batch completes nothing, and a full queue says so on every position.
        queue.get_batch([], 1, soon());
        assert!(queue.poll().is_none());
        drop(queue);
        finish(cache);
    });
}

#[test]
fn one_more_operation_than_the_queue_was_made_for() {
    alone(|| {
        let (origin, gate) = gated();
        let cache = open(16 * MIB, origin.address());
        let names: Vec<String> = (0..3).map(|i| name(100, i)).collect();
        let mut queue = CompletionQueue::new(&cache, 1).unwrap();
        queue.get(&names[0], Target::Lease, 0, soon());
        queue.get_batch(names.iter().map(|name| (Key::from(name), Target::Lease)), 1, soon());
        queue.put("x", vec![b"y"], 2, soon());
        for position in 0..3 {
            let refused = queue.poll().unwrap();
            assert_eq!((refused.user_data, refused.position, refused.last), (1, position, position == 2));
            assert!(matches!(refused.result, Err(Error::TooManyOperations { operations_max: 1 })));
        }
        assert!(matches!(queue.poll().unwrap().result, Err(Error::TooManyOperations { .. })));
        gate.open();
        drop(lease(next(&mut queue)));
        queue.put("x", vec![b"y", b"", b"z"], 3, soon());
        assert!(matches!(next(&mut queue).result, Ok(Outcome::Put)));
        assert_eq!(cache.get("x", soon()).unwrap().unwrap().as_slice(), Some(&b"yz"[..]));
        drop(queue);
        finish(cache);
    });
}

#[test]
fn an_armed_queue_makes_its_descriptor_readable_and_polling_resets_it() {
    alone(|| {
        let (origin, gate) = gated();
        let cache = open(16 * MIB, origin.address());
        let mut queue = CompletionQueue::new(&cache, 16).unwrap();
        for round in 0..3 {
            queue.get(&name(100, round), Target::Lease, 0, soon());
            origin.wait_requests(1);
            let armed = queue.arm();
            if round == 0 {
                assert!(armed && !readable(&queue, 0), "the origin holds the answer back");
                assert!(queue.wait(Duration::from_millis(5)).is_none() && queue.arm());
                gate.open();
            }
            // With the gate open the answer may have come before there was anything to arm for.
            assert!(!armed || readable(&queue, HANG.as_millis() as i32));
            assert!(queue.poll().is_some());
            assert!(!readable(&queue, 0), "polling has reset it");
        }
        cache.put("here", b"now", soon()).unwrap();
        queue.get("here", Target::Lease, 0, soon());
        assert!(!queue.arm(), "there is something to poll");
        assert!(queue.poll().is_some() && queue.poll().is_none());
        let before = Instant::now();
        assert!(queue.wait(soon()).is_none() && before.elapsed() < HANG, "nothing is under way");
        drop(queue);
        finish(cache);
    });
}

#[test]
fn deadlines_cancellation_and_dropping_leave_nothing_behind() {
    alone(|| {
        let (origin, gate) = gated();
        let cache = open(16 * MIB, origin.address());
        let mut buffer = vec![0xee; 10_000];
        let mut queue = CompletionQueue::new(&cache, 16).unwrap();
        queue.get(&name(10, 1), Target::Lease, 1, Deadline::after_ms(30));
        let late = next(&mut queue);
        assert!(matches!(late.result, Err(Error::DeadlinePassed { .. })), "{late:?}");
        queue.get(&name(10, 1), Target::Lease, 2, Duration::ZERO);
        assert!(matches!(queue.poll().unwrap().result, Err(Error::DeadlinePassed { .. })));

        let id = queue.get(&name(10_000, 2), Target::Into(&mut buffer), 3, soon());
        assert_eq!(queue.cancel(id), 1);
        let cancelled = queue.poll().unwrap();
        assert!(matches!(cancelled.result, Err(Error::Cancelled)) && cancelled.last);
        assert!(matches!(cancelled.target, Some(Target::Into(ref into)) if into.len() == 10_000));
        assert_eq!(queue.cancel(id), 0, "an operation that is over");

        let names: Vec<String> = (10..15).map(|i| name(10, i)).collect();
        let id = queue.get_batch(names.iter().map(|name| (Key::from(name), Target::Lease)), 4, soon());
        assert_eq!(queue.cancel(id), 5);
        for position in 0..5 {
            let completion = queue.poll().unwrap();
            assert_eq!((completion.position, completion.last), (position, position == 4));
        }
        queue.get(&name(10, 20), Target::Lease, 5, soon());
        drop(queue);
        gate.open();
        assert_eq!(buffer, vec![0xee; 10_000], "nothing wrote into a buffer that was given back");
        eventually(|| format!("quiet: {:?}", cache.stats()), || cache.stats().fills_in_flight == 0);
        assert_quiet(&cache);
        finish(cache);
    });
}

#[test]
fn a_queue_outlives_its_cache_and_says_that_it_is_shut_down() {
    alone(|| {
        let (origin, gate) = gated();
        let cache = open(16 * MIB, origin.address());
        cache.put("here", b"now", soon()).unwrap();
        let mut queue = CompletionQueue::new(&cache, 16).unwrap();
        queue.get(&name(100, 1), Target::Lease, 1, soon());
        queue.put("other", vec![&[1; 100]], 2, soon());
        origin.wait_requests(1);
        drop(cache);
        let mut left = 2;
        while left > 0 {
            let completion = next(&mut queue);
            let put = completion.user_data == 2 && matches!(completion.result, Ok(Outcome::Put));
            assert!(put || matches!(completion.result, Err(Error::ShutDown)), "{completion:?}");
            left -= 1;
        }
        queue.get("here", Target::Lease, 3, soon());
        assert!(matches!(queue.poll().unwrap().result, Err(Error::ShutDown)));
        gate.open();
    });
}

#[test]
fn a_full_request_ring_refuses_at_once_and_loses_nothing() {
    alone(|| {
        let server = server(64 * MIB);
        let names: Vec<String> = (0..2000).map(|i| name(100, i)).collect();
        store(&server, &names);
        let mut config = config(16 * MIB, &[server.addr()]);
        config.request_ring = 2;
        let cache = open_with(config);
        let mut queue = CompletionQueue::new(&cache, 4000).unwrap();
        let (mut got, mut refused) = (0, 0);
        for (i, name) in names.iter().enumerate() {
            queue.get(name, Target::Lease, i as u64, soon());
        }
        for _ in 0..names.len() {
            let completion = next(&mut queue);
            match completion.result {
                Ok(Outcome::Lease(lease)) => {
                    let name = names[completion.user_data as usize].as_bytes();
                    content::check_lease(name, 1, 100, &lease);
                    got += 1;
                }
                Err(Error::Overloaded { capacity: 2, .. }) => refused += 1,
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(got + refused, names.len());
        assert!(got > 0, "some were served");
        drop(queue);
        assert_quiet(&cache);
        finish(cache);
    });
}

#[test]
fn prefetching_completes_at_submission() {
    alone(|| {
        let origin = FakeOrigin::well_behaved();
        let cache = open(16 * MIB, origin.address());
        let names: Vec<String> = (0..5).map(|i| name(100, i)).collect();
        let keys: Vec<Key<'_>> = names.iter().map(Key::from).collect();
        let mut queue = CompletionQueue::new(&cache, 1).unwrap();
        queue.prefetch(&keys, 8);
        assert!(matches!(queue.poll().unwrap().result, Ok(Outcome::Prefetching(5))));
        eventually(|| "prefetched".to_owned(), || cache.stats().entries == 5);
        drop(queue);
        finish(cache);
        let local = open_local(16 * MIB);
        let mut queue = CompletionQueue::new(&local, 1).unwrap();
        queue.get("none", Target::Lease, 1, soon());
        assert!(matches!(next(&mut queue).result, Ok(Outcome::Absent)), "a local cache has no origin to ask");
        drop(queue);
        finish(local);
    });
}
