//! Promise 6: an origin that is absent, refuses, dies or stalls costs an error on the key concerned, in time;
//! never the shard, never other keys.

use hotslice::wire::Status;
use hotslice::{Address, Cache, Config, Deadline, Error};
use hotslice_tests::content::{self, name};
use hotslice_tests::gauges::{alone, finish};
use hotslice_tests::origin::{Ask, DeafPeer, FakeOrigin, Line, Then, closed_port, value_header};
use hotslice_tests::setup::{MIB, config, open, open_with, soon};
use std::time::{Duration, Instant};

/// A configuration that gives up on a silent peer after 300 ms.
fn hasty(origin: Address) -> Config {
    let mut config = config(8 * MIB, &[origin]);
    config.receive_timeout_ms = 300;
    config.connect_timeout_ms = 300;
    config
}

/// An origin that fails on `bad` as told, on every attempt, and serves other keys.
fn bad_key(fail: impl Fn(&Ask, &mut Line) -> Then + Send + Sync + 'static) -> FakeOrigin {
    FakeOrigin::start(move |ask, line| {
        if ask.key == b"bad" {
            return fail(ask, line);
        }
        line.answer_by_name(ask);
        Then::GoOn
    })
}

/// The key `bad` fails in time with an error that `is` recognises and that says `words`; other keys do not
/// suffer, before, beside or after.
#[track_caller]
fn only_that_key(origin: &FakeOrigin, cache: Cache, is: impl Fn(&Error) -> bool, words: &str) {
    let get = |i: usize| {
        let name = name(100_000 + i, i);
        let lease = cache.get(&name, soon()).unwrap().unwrap();
        content::check_lease(name.as_bytes(), 1, 100_000 + i, &lease);
    };
    get(0);
    let started = Instant::now();
    let error = cache.get("bad", soon()).expect_err("a failed fill is an error");
    assert!(started.elapsed() < Duration::from_secs(10), "took {:?}", started.elapsed());
    assert!(is(&error), "{error:?}");
    assert!(error.to_string().contains(words), "{error}");
    assert!(!cache.contains("bad").unwrap());
    get(1);
    assert!(origin.requests_for("bad") <= 2, "at most one retry");
    finish(cache);
}

fn unavailable(error: &Error) -> bool {
    matches!(error, Error::PeerUnavailable { .. })
}

fn protocol(error: &Error) -> bool {
    matches!(error, Error::Protocol { .. })
}

#[test]
fn nobody_listens() {
    alone(|| {
        let address = closed_port();
        let cache = open(4 * MIB, &address);
        for _ in 0..3 {
            match cache.get("k", soon()) {
                Err(Error::PeerUnavailable { peer, reason }) => {
                    assert_eq!(peer, address);
                    assert!(reason.contains("refused"), "{reason}");
                }
                other => panic!("{other:?}"),
            }
        }
        // The cache itself is well.
        cache.put("k", b"v", soon()).unwrap();
        assert_eq!(cache.get("k", soon()).unwrap().unwrap().as_slice(), Some(&b"v"[..]));
        finish(cache);
    });
}

#[test]
fn a_peer_that_refuses_is_left_alone_for_a_while_and_then_tried_again() {
    alone(|| {
        let address = closed_port();
        let mut config = config(4 * MIB, std::slice::from_ref(&address));
        (config.backoff_min_ms, config.backoff_max_ms) = (1, 50);
        let cache = open_with(config);
        let refused = cache.get("k", soon());
        assert!(matches!(refused, Err(Error::PeerUnavailable { .. })), "{refused:?}");
        let origin = FakeOrigin::start_at(address, |ask, line| {
            line.content(ask, 1, 77);
            Then::GoOn
        });
        let started = Instant::now();
        let lease = loop {
            match cache.get("k", soon()) {
                Ok(lease) => break lease.unwrap(),
                Err(Error::PeerUnavailable { .. }) => assert!(started.elapsed() < Duration::from_secs(10)),
                Err(other) => panic!("{other:?}"),
            }
        };
        content::check_lease(b"k", 1, 77, &lease);
        drop(lease);
        drop(origin);
        finish(cache);
    });
}

#[test]
fn no_origin_at_all_means_absent() {
    alone(|| {
        let cache = hotslice_tests::setup::open_local(MIB);
        assert!(cache.get("k", soon()).unwrap().is_none());
        finish(cache);
    });
}

#[test]
fn accepts_and_closes() {
    alone(|| {
        let origin = bad_key(|_, _| Then::Close);
        let cache = open_with(hasty(origin.address()));
        only_that_key(&origin, cache, unavailable, "closed the connection");
    });
}

#[test]
fn resets_instead_of_answering() {
    alone(|| {
        let origin = bad_key(|_, _| Then::Reset);
        let cache = open_with(hasty(origin.address()));
        only_that_key(&origin, cache, unavailable, "reset");
    });
}

#[test]
fn dies_in_the_middle_of_a_header() {
    for bytes in [1, 32, 63] {
        alone(|| {
            let origin = bad_key(move |ask, line| {
                let mut header = Vec::new();
                value_header(ask, 1, b"value").encode(&mut header);
                line.raw(&header[..bytes]);
                Then::Close
            });
            let cache = open_with(hasty(origin.address()));
            only_that_key(&origin, cache, unavailable, &format!("after {bytes} of 64 bytes of a header"));
        });
    }
}

/// Announces `len` bytes, sends `sent` of them.
fn stops_after(len: usize, sent: usize, then: Then) -> FakeOrigin {
    bad_key(move |ask, line| {
        let value = content::bytes(&ask.key, 1, len);
        // In the part in which byte `sent` lies.
        let part = ask.part(&value);
        line.header(&value_header(ask, 1, &value));
        match sent.checked_sub(ask.offset as usize) {
            Some(sent) if sent < part.len() => line.raw(&part[..sent]),
            _ => {
                line.raw(part);
                return Then::GoOn;
            }
        }
        then
    })
}

#[test]
fn dies_in_the_middle_of_a_slice() {
    for (len, sent) in [(3 * MIB, 0), (3 * MIB, 1), (3 * MIB, MIB + 5), (3 * MIB, 3 * MIB - 1), (1, 0)] {
        alone(|| {
            let origin = stops_after(len, sent, Then::Close);
            let cache = open_with(hasty(origin.address()));
            only_that_key(&origin, cache, unavailable, &format!("of {len} bytes of a value"));
        });
    }
}

#[test]
fn resets_in_the_middle_of_a_slice() {
    alone(|| {
        let origin = stops_after(3 * MIB, 2 * MIB, Then::Reset);
        let cache = open_with(hasty(origin.address()));
        // Not "reset": the kernel tells of the bytes before, and then only that it is over.
        only_that_key(&origin, cache, unavailable, "of 3145728 bytes of a value");
    });
}

/// Sends what `stops_after` does, and then nothing, with the connection open.
fn stalls_after(len: usize, sent: Option<usize>) -> FakeOrigin {
    bad_key(move |ask, line| {
        if let Some(sent) = sent {
            let value = content::bytes(&ask.key, 1, len);
            let part = ask.part(&value);
            line.header(&value_header(ask, 1, &value));
            match sent.checked_sub(ask.offset as usize) {
                Some(sent) if sent < part.len() => line.raw(&part[..sent]),
                _ => {
                    line.raw(part);
                    return Then::GoOn;
                }
            }
        }
        line.until_closed();
        Then::Close
    })
}

#[test]
fn stalls_before_the_header() {
    alone(|| {
        let origin = stalls_after(1, None);
        let cache = open_with(hasty(origin.address()));
        only_that_key(&origin, cache, unavailable, "no progress within 300 ms");
    });
}

#[test]
fn stalls_at_the_last_byte() {
    alone(|| {
        let origin = stalls_after(2 * MIB, Some(2 * MIB - 1));
        let cache = open_with(hasty(origin.address()));
        only_that_key(&origin, cache, unavailable, "no progress within 300 ms");
    });
}

#[test]
fn a_deadline_shorter_than_the_stall_is_kept() {
    alone(|| {
        let origin = stalls_after(2 * MIB, Some(MIB));
        let mut config = hasty(origin.address());
        config.receive_timeout_ms = 2000;
        let cache = open_with(config);
        let started = Instant::now();
        let result = cache.get("bad", Deadline::after_ms(100));
        assert!(matches!(result, Err(Error::DeadlinePassed { .. })), "{result:?}");
        assert!(started.elapsed() < Duration::from_millis(1900), "{:?}", started.elapsed());
        // The lane that is stuck does not stop the other.
        let name = name(5000, 0);
        content::check_lease(name.as_bytes(), 1, 5000, &cache.get(&name, soon()).unwrap().unwrap());
        finish(cache);
    });
}

#[test]
fn sends_one_byte_at_a_time() {
    alone(|| {
        let origin = bad_key(|ask, line| {
            let value = content::bytes(&ask.key, 1, 5000);
            line.header(&value_header(ask, 1, &value));
            line.trickle(&value, Duration::from_millis(100));
            Then::Close
        });
        let cache = open_with(hasty(origin.address()));
        only_that_key(&origin, cache, unavailable, "no progress within 300 ms");
    });
}

#[test]
fn a_header_one_byte_at_a_time_is_a_header() {
    alone(|| {
        let origin = FakeOrigin::start(|ask, line| {
            let value = content::bytes(&ask.key, 1, 40);
            let mut bytes = Vec::new();
            value_header(ask, 1, &value).encode(&mut bytes);
            bytes.extend_from_slice(&value);
            line.trickle(&bytes, Duration::from_millis(1));
            Then::GoOn
        });
        let cache = open(4 * MIB, origin.address());
        content::check_lease(b"k", 1, 40, &cache.get("k", soon()).unwrap().unwrap());
        finish(cache);
    });
}

#[test]
fn statuses_are_errors_on_that_key_and_keep_the_connection() {
    for status in [Status::BadRequest, Status::Busy, Status::Internal, Status::Full, Status::VersionMismatch]
    {
        alone(|| {
            let origin = bad_key(move |ask, line| {
                line.refuse(ask, status, &"because ".repeat(64));
                Then::GoOn
            });
            let cache = open_with(hasty(origin.address()));
            only_that_key(&origin, cache, |error| matches!(error, Error::Refused { .. }), status.as_str());
            assert_eq!(origin.seen().connections, 1, "{status}");
        });
    }
}

#[test]
fn the_first_connection_fails_and_the_second_serves() {
    for then in [Then::Close, Then::Reset] {
        alone(|| {
            let origin = FakeOrigin::start(move |ask, line| {
                if ask.connection == 0 {
                    let value = content::bytes(&ask.key, 1, 2 * MIB);
                    line.header(&value_header(ask, 1, &value));
                    line.raw(&ask.part(&value)[..MIB / 2]);
                    return then;
                }
                line.content(ask, 1, 2 * MIB);
                Then::GoOn
            });
            let mut config = config(8 * MIB, &[origin.address()]);
            config.lanes_per_peer = 1;
            let cache = open_with(config);
            content::check_lease(b"k", 1, 2 * MIB, &cache.get("k", soon()).unwrap().unwrap());
            assert_eq!((origin.requests(), origin.seen().connections), (2, 2));
            finish(cache);
        });
    }
}

#[test]
fn a_connection_closed_between_answers_is_made_again() {
    alone(|| {
        let origin = FakeOrigin::start(|ask, line| {
            line.answer_by_name(ask);
            Then::Close
        });
        let cache = open(8 * MIB, origin.address());
        for i in 0..20 {
            let name = name(10_000 + i, i);
            content::check_lease(name.as_bytes(), 1, 10_000 + i, &cache.get(&name, soon()).unwrap().unwrap());
        }
        finish(cache);
    });
}

#[test]
fn answers_may_come_out_of_order() {
    alone(|| {
        let origin = FakeOrigin::start(|ask, line| {
            line.held.push(ask.clone());
            if line.held.len() == 8 {
                for ask in std::mem::take(&mut line.held).iter().rev() {
                    line.answer_by_name(ask);
                }
            }
            Then::GoOn
        });
        let mut config = config(16 * MIB, &[origin.address()]);
        config.lanes_per_peer = 1;
        let cache = open_with(config);
        let names: Vec<String> = (0..32).map(|i| name(50_000 + i, i)).collect();
        let keys: Vec<_> = names.iter().map(|name| hotslice::Namespace::DEFAULT.key(name)).collect();
        for (i, result) in cache.get_batch(&keys, soon()).into_iter().enumerate() {
            content::check_lease(names[i].as_bytes(), 1, 50_000 + i, &result.unwrap().unwrap());
        }
        finish(cache);
    });
}

#[test]
fn a_deadline_in_the_past_serves_hits_and_fails_misses_at_once() {
    alone(|| {
        let origin = FakeOrigin::well_behaved();
        let cache = open(4 * MIB, origin.address());
        let (hit, miss) = (name(5000, 0), name(5000, 1));
        cache.get(&hit, soon()).unwrap().unwrap();
        let past = Instant::now() - Duration::from_secs(1);
        content::check_lease(hit.as_bytes(), 1, 5000, &cache.get(&hit, past).unwrap().unwrap());
        for deadline in [Deadline::from(past), Duration::ZERO.into()] {
            let result = cache.get(&miss, deadline);
            assert!(matches!(result, Err(Error::DeadlinePassed { .. })), "{result:?}");
        }
        let keys =
            [hit.as_str(), miss.as_str(), hit.as_str()].map(|name| hotslice::Namespace::DEFAULT.key(name));
        let results = cache.get_batch(&keys, past);
        assert!(matches!(results[0], Ok(Some(_))) && matches!(results[2], Ok(Some(_))), "{results:?}");
        assert!(matches!(results[1], Err(Error::DeadlinePassed { .. })), "{results:?}");
        drop(results);
        assert_eq!(origin.requests_for(&miss), 0, "nothing was started");
        // Every position is a lookup, whatever became of it.
        assert_eq!(cache.stats().lookups, 1 + 1 + 2 + 3);
        finish(cache);
    });
}

#[test]
fn one_dead_peer_of_two_costs_only_its_own_keys() {
    alone(|| {
        let alive = FakeOrigin::well_behaved();
        let dead = closed_port();
        let cache = open_with(config(8 * MIB, &[alive.address(), dead.clone()]));
        let (mut served, mut failed) = (0, 0);
        for i in 0..64 {
            let name = name(1000 + i, i);
            match cache.get(&name, soon()) {
                Ok(Some(lease)) => {
                    content::check_lease(name.as_bytes(), 1, 1000 + i, &lease);
                    served += 1;
                }
                Err(Error::PeerUnavailable { peer, .. }) => {
                    assert_eq!(peer, dead);
                    failed += 1;
                }
                other => panic!("{other:?}"),
            }
        }
        assert!(served > 8 && failed > 8, "{served} served, {failed} failed");
        assert_eq!(alive.requests(), served);
        finish(cache);
    });
}

#[test]
fn a_peer_is_not_to_blame_for_the_time_that_memory_takes() {
    // The cache has no room for longer than the peer may stall.
    alone(|| {
        let origin = FakeOrigin::well_behaved();
        let mut config = hasty(origin.address());
        config.capacity_bytes = 4 << 20;
        config.receive_timeout_ms = 300;
        let cache = open_with(config);
        let lease = cache.get(&name(4 * MIB, 0), soon()).unwrap().unwrap();
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| cache.get(&name(3 * MIB, 1), soon()).unwrap().unwrap());
            let probe = scope.spawn(|| cache.get(&name(1, 2), Deadline::after_ms(1000)));
            let short = probe.join().unwrap();
            assert!(matches!(short, Err(Error::Pinned { .. })), "{short:?}");
            drop(lease);
            content::check_lease(name(3 * MIB, 1).as_bytes(), 1, 3 * MIB, &waiter.join().unwrap());
        });
        assert_eq!(cache.stats().lanes_failed, 0);
        finish(cache);
    });
}

#[test]
fn protocol_errors_are_told_from_dead_peers() {
    alone(|| {
        let origin = bad_key(|_, line| {
            line.raw(&[0; 64]);
            Then::GoOn
        });
        let cache = open_with(hasty(origin.address()));
        only_that_key(&origin, cache, protocol, "broke the protocol");
    });
}

#[test]
fn a_thousand_reads_from_a_dead_peer_wait_for_it_once() {
    alone(|| {
        let deaf = DeafPeer::start();
        let cache = open_with(hasty(deaf.address()));
        for i in 0..1000 {
            let error = cache.get(&name(100, i), soon()).expect_err("nobody is there");
            assert!(unavailable(&error), "{error:?}");
        }
        // Ten, not one, so that a machine that is slow at everything else passes too.
        let stats = cache.stats();
        assert!(stats.lanes_failed <= 10, "{} attempts to connect", stats.lanes_failed);
        assert_eq!((stats.fills, stats.fills_failed), (1000, 1000));
        finish(cache);
    });
}

#[test]
fn values_that_trickle_for_nobody_do_not_keep_lanes_from_others() {
    alone(|| {
        let origin = FakeOrigin::start(|ask, line| {
            if ask.key.starts_with(b"slow") {
                let value = [7; 100_000];
                line.header(&value_header(ask, 1, &value));
                line.trickle(&value, Duration::from_millis(50));
                return Then::Close;
            }
            line.answer_by_name(ask);
            Then::GoOn
        });
        let mut config = config(8 * MIB, &[origin.address()]);
        config.receive_timeout_ms = 20_000;
        let cache = open_with(config);
        for i in 0..6 {
            let slow = format!("slow{i}");
            assert!(matches!(cache.get(&slow, Deadline::after_ms(100)), Err(Error::DeadlinePassed { .. })));
            let name = name(10_000, i);
            let started = Instant::now();
            let lease = cache.get(&name, soon()).unwrap().unwrap();
            content::check_lease(name.as_bytes(), 1, 10_000, &lease);
            assert!(started.elapsed() < Duration::from_secs(10), "held up for {:?}", started.elapsed());
        }
        finish(cache);
    });
}

#[test]
fn a_busy_peer_is_unavailable_and_not_called_a_liar() {
    alone(|| {
        let origin = FakeOrigin::start(|_, line| {
            line.header(&hotslice::wire::ResponseHeader::plain(Status::Busy, None, 0));
            Then::Close
        });
        let cache = open(8 * MIB, origin.address());
        let error = cache.get("a", soon()).expect_err("busy");
        assert!(unavailable(&error) && error.to_string().contains("busy"), "{error}");
        finish(cache);
    });
}
