//! Large values come in parts, over several lanes; batches are located with one question per peer; small values do not
//! wait behind large ones.

use hotslice::wire::{Op, ResponseHeader, Status};
use hotslice::{Cache, Config, Error, Invalidate, Key, Namespace};
use hotslice_tests::content::{self, name};
use hotslice_tests::gauges::{alone, finish};
use hotslice_tests::origin::{Ask, FakeOrigin, Line, Then, value_header};
use hotslice_tests::setup::{MIB, config, open, open_with, server, soon, store};
use hotslice_tests::sync::{Gate, eventually};
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// Parts of 1 MiB, so that there are many of them.
fn fine(origin: &FakeOrigin, capacity_mib: usize) -> Config {
    let mut config = config(capacity_mib * MIB, &[origin.address()]);
    config.stripe_bytes = MIB as u64;
    config
}

fn check(cache: &Cache, key: &str, version: u64, len: usize) {
    content::check_lease(key.as_bytes(), version, len, &cache.get(key, soon()).unwrap().unwrap());
}

#[test]
fn sizes_around_every_border_arrive_whole() {
    alone(|| {
        let server = server(128 * MIB);
        let sizes =
            [MIB - 1, MIB, MIB + 1, 2 * MIB, 2 * MIB + 1, 5 * MIB - 1, 5 * MIB, 5 * MIB + 1, 21 * MIB + 4097];
        let names: Vec<String> = sizes.iter().map(|&len| name(len, 0)).collect();
        store(&server, &names);
        for (lanes, stripe_mib) in [(1, 1), (2, 1), (3, 2), (4, 4)] {
            let mut config = config(48 * MIB, &[server.addr()]);
            (config.lanes_per_peer, config.stripe_bytes) = (lanes, (stripe_mib * MIB) as u64);
            let cache = open_with(config);
            for (name, &len) in names.iter().zip(&sizes) {
                check(&cache, name, 1, len);
            }
            cache.invalidate(Invalidate::All, soon()).unwrap();
            let keys: Vec<Key<'_>> = names.iter().map(Key::from).collect();
            for ((name, &len), result) in names.iter().zip(&sizes).zip(cache.get_batch(&keys, soon())) {
                content::check_lease(name.as_bytes(), 1, len, &result.unwrap().unwrap());
            }
            assert!(cache.stats().lanes_opened <= lanes as u64);
            finish(cache);
        }
    });
}

/// Remembers who asked for which parts.
#[derive(Default)]
struct Asked(Mutex<Vec<(usize, u64, u64)>>);

impl Asked {
    fn note(&self, ask: &Ask) {
        self.0.lock().unwrap().push((ask.connection, ask.offset, ask.len));
    }

    fn sorted(&self) -> Vec<(usize, u64, u64)> {
        let mut all = self.0.lock().unwrap().clone();
        all.sort_unstable_by_key(|&(_, offset, _)| offset);
        all
    }
}

#[test]
fn every_part_is_asked_for_once_and_over_several_lanes() {
    alone(|| {
        let asked = Arc::new(Asked::default());
        let noted = asked.clone();
        let origin = FakeOrigin::start(move |ask, line| {
            noted.note(ask);
            line.content(ask, 1, 13 * MIB + 5);
            Then::GoOn
        });
        let mut config = fine(&origin, 16);
        config.lanes_per_peer = 4;
        let cache = open_with(config);
        check(&cache, "k", 1, 13 * MIB + 5);
        let parts = asked.sorted();
        let offsets: Vec<u64> = parts.iter().map(|&(_, offset, _)| offset).collect();
        assert_eq!(offsets, (0..=13).map(|i| i * MIB as u64).collect::<Vec<_>>());
        assert!(parts.iter().all(|&(_, _, len)| len <= MIB as u64), "{parts:?}");
        assert!(parts.iter().any(|&(connection, ..)| connection != parts[0].0), "{parts:?}");
        finish(cache);
    });
}

#[test]
fn a_value_that_changes_on_its_way_is_fetched_anew_and_never_mixed() {
    alone(|| {
        let gets = Arc::new(AtomicUsize::new(0));
        let counted = gets.clone();
        let origin = FakeOrigin::start(move |ask, line| {
            // Another version from the fourth answer on.
            let version = if counted.fetch_add(1, Ordering::Relaxed) < 3 { 1 } else { 2 };
            line.content(ask, version, 8 * MIB);
            Then::GoOn
        });
        let cache = open_with(fine(&origin, 24));
        check(&cache, "k", 2, 8 * MIB);
        assert_eq!(cache.stats().fills_discarded, 1);
        finish(cache);
    });
}

#[test]
fn a_value_that_never_stands_still_is_an_error_in_the_end() {
    alone(|| {
        let version = Arc::new(AtomicU64::new(1));
        let next = version.clone();
        let origin = FakeOrigin::start(move |ask, line| {
            line.content(ask, next.fetch_add(1, Ordering::Relaxed), 3 * MIB);
            Then::GoOn
        });
        let cache = open_with(fine(&origin, 24));
        let error = cache.get("k", soon()).expect_err("no two parts agree");
        assert!(
            matches!(&error, Error::Refused { .. }) && error.to_string().contains("version"),
            "{error:?}"
        );
        assert!(origin.seen().gets < 40);
        finish(cache);
    });
}

#[test]
fn a_value_that_is_removed_on_its_way_is_absent() {
    alone(|| {
        let origin = FakeOrigin::start(|ask, line| {
            // There for whoever came first.
            if ask.number == 0 && ask.offset == 0 {
                line.content(ask, 1, 5 * MIB)
            } else {
                line.absent(ask)
            }
            Then::GoOn
        });
        let cache = open_with(fine(&origin, 16));
        assert!(cache.get("k", soon()).unwrap().is_none());
        finish(cache);
    });
}

#[test]
fn a_lane_that_fails_costs_its_own_parts_only() {
    alone(|| {
        let failed = Arc::new(AtomicUsize::new(0));
        let once = failed.clone();
        let asked = Arc::new(Asked::default());
        let noted = asked.clone();
        let origin = FakeOrigin::start(move |ask, line| {
            noted.note(ask);
            if ask.offset == 5 * MIB as u64 && once.fetch_add(1, Ordering::Relaxed) == 0 {
                let value = content::bytes(&ask.key, 1, 16 * MIB);
                line.header(&value_header(ask, 1, &value));
                line.raw(&ask.part(&value)[..MIB / 3]);
                return Then::Reset;
            }
            line.content(ask, 1, 16 * MIB);
            Then::GoOn
        });
        let mut config = fine(&origin, 24);
        config.lanes_per_peer = 3;
        let cache = open_with(config);
        check(&cache, "k", 1, 16 * MIB);
        let mut times: HashMap<u64, usize> = HashMap::new();
        asked.sorted().iter().for_each(|&(_, offset, _)| *times.entry(offset).or_default() += 1);
        assert_eq!(times[&(5 * MIB as u64)], 2);
        // The lane owed at most one more.
        assert!(times.values().sum::<usize>() <= 18, "{times:?}");
        assert_eq!(cache.stats().fills, 1);
        finish(cache);
    });
}

#[test]
fn one_part_that_always_breaks_its_lane_fails_the_value_alone() {
    alone(|| {
        let origin = FakeOrigin::start(|ask, line| {
            if ask.key == b"bad" && ask.offset == 2 * MIB as u64 {
                return Then::Reset;
            }
            line.content(ask, 1, 6 * MIB);
            Then::GoOn
        });
        let cache = open_with(fine(&origin, 24));
        let error = cache.get("bad", soon()).expect_err("one part never comes");
        assert!(matches!(error, Error::PeerUnavailable { .. }), "{error:?}");
        check(&cache, "good", 1, 6 * MIB);
        finish(cache);
    });
}

#[test]
fn lies_about_a_part_are_found_out() {
    type Lie = fn(&mut ResponseHeader);
    let lies: [Lie; 5] = [
        |header| header.range_offset -= 1,
        |header| header.body_len -= 1,
        |header| header.value_version += 1,
        |header| header.value_crc32c ^= 1,
        |header| header.value_len += 1,
    ];
    for lie in lies {
        alone(|| {
            let origin = FakeOrigin::start(move |ask, line| {
                let value = content::bytes(&ask.key, 1, 4 * MIB);
                let mut header = value_header(ask, 1, &value);
                if ask.key == b"bad" && ask.offset > 0 {
                    lie(&mut header);
                }
                line.header(&header);
                line.raw(ask.part(&value));
                Then::GoOn
            });
            let cache = open_with(fine(&origin, 24));
            let error = cache.get("bad", soon()).expect_err("a lie");
            assert!(matches!(error, Error::Protocol { .. }), "{error:?}");
            check(&cache, "good", 1, 4 * MIB);
            finish(cache);
        });
    }
}

#[test]
fn a_wrong_byte_in_a_later_part_fails_the_checksum() {
    alone(|| {
        let origin = FakeOrigin::start(|ask, line| {
            let mut value = content::bytes(&ask.key, 1, 4 * MIB);
            let header = value_header(ask, 1, &value);
            value[3 * MIB + 17] ^= 4;
            line.header(&header);
            line.raw(ask.part(&value));
            Then::GoOn
        });
        let cache = open_with(fine(&origin, 24));
        assert!(matches!(cache.get("k", soon()), Err(Error::Checksum { .. })));
        assert!(!cache.contains("k").unwrap());
        finish(cache);
    });
}

/// An origin that holds back every part but the first of large values until the gate opens.
fn gated(version: &Arc<AtomicU64>) -> (FakeOrigin, Arc<Gate>) {
    let gate = Arc::new(Gate::default());
    let (inner, version) = (gate.clone(), version.clone());
    let origin = FakeOrigin::start(move |ask, line| {
        if ask.offset > 0 {
            inner.pass();
        }
        let len = content::named_len(&ask.key).expect("a name that tells a length");
        line.content(ask, version.load(Ordering::Relaxed), len);
        Then::GoOn
    });
    (origin, gate)
}

#[test]
fn small_values_do_not_wait_behind_large_ones() {
    for lanes in [2, 4] {
        alone(|| {
            let (origin, gate) = gated(&Arc::new(AtomicU64::new(1)));
            let mut config = fine(&origin, 64);
            config.lanes_per_peer = lanes;
            let cache = open_with(config);
            let large = name(40 * MIB, 0);
            std::thread::scope(|scope| {
                let waiting = scope.spawn(|| check(&cache, &large, 1, 40 * MIB));
                // All lanes that may be are stuck with parts.
                let stuck = origin.seen().gets;
                eventually(|| format!("parts to be asked for, {stuck}"), || origin.seen().gets >= lanes);
                for i in 0..20 {
                    check(&cache, &name(64 << 10, i), 1, 64 << 10);
                }
                assert!(!waiting.is_finished());
                gate.open();
            });
            finish(cache);
        });
    }
}

#[test]
fn nothing_stale_is_published_after_an_invalidation_in_the_middle_of_a_value() {
    alone(|| {
        let version = Arc::new(AtomicU64::new(1));
        let (origin, gate) = gated(&version);
        let cache = open_with(fine(&origin, 64));
        let large = name(8 * MIB, 0);
        std::thread::scope(|scope| {
            let early = scope.spawn(|| cache.get(&large, soon()).unwrap().unwrap());
            eventually(|| "the first part".to_owned(), || cache.stats().received_direct_bytes >= MIB as u64);
            version.store(2, Ordering::Relaxed);
            cache.invalidate(Invalidate::Key(Namespace::DEFAULT.key(&large)), soon()).unwrap();
            gate.open();
            // Who waited is served with what is true now.
            content::check_lease(large.as_bytes(), 2, 8 * MIB, &early.join().unwrap());
        });
        check(&cache, &large, 2, 8 * MIB);
        finish(cache);
    });
}

#[test]
fn the_cache_ends_in_the_middle_of_many_parts() {
    alone(|| {
        let (origin, gate) = gated(&Arc::new(AtomicU64::new(1)));
        let cache = open_with(fine(&origin, 64));
        let large = name(40 * MIB, 0);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| cache.get(&large, soon()));
            eventually(|| "a part".to_owned(), || cache.stats().received_direct_bytes >= MIB as u64);
            cache.shutdown();
            assert!(matches!(waiting.join().unwrap(), Err(Error::ShutDown)));
        });
        gate.open();
    });
}

#[test]
fn a_batch_asks_each_peer_once() {
    alone(|| {
        let origins: Vec<FakeOrigin> = (0..3).map(|_| FakeOrigin::well_behaved()).collect();
        let addresses: Vec<_> = origins.iter().map(FakeOrigin::address).collect();
        let cache = open_with(config(64 * MIB, &addresses));
        let names: Vec<String> = (0..600).map(|i| name(100 + 37 * (i % 100), i)).collect();
        let keys: Vec<Key<'_>> = names.iter().map(Key::from).collect();
        for (name, result) in names.iter().zip(cache.get_batch(&keys, soon())) {
            let len = content::named_len(name.as_bytes()).unwrap();
            content::check_lease(name.as_bytes(), 1, len, &result.unwrap().unwrap());
        }
        let lookups: Vec<Vec<usize>> = origins.iter().map(|origin| origin.seen().lookups).collect();
        assert!(lookups.iter().all(|lookups| lookups.len() == 1), "{lookups:?}");
        assert_eq!(lookups.iter().flatten().sum::<usize>(), 600);
        assert_eq!(cache.stats().locates, 3);
        finish(cache);
    });
}

#[test]
fn a_batch_beyond_one_question_takes_as_few_as_there_can_be() {
    alone(|| {
        let origin = FakeOrigin::locating(|_| None, |_, _| panic!("nothing is there"));
        let cache = open(4 * MIB, origin.address());
        let names: Vec<String> = (0..20_000).map(|i| format!("absent/{i}")).collect();
        let keys: Vec<Key<'_>> = names.iter().map(Key::from).collect();
        assert!(cache.get_batch(&keys, soon()).into_iter().all(|result| result.unwrap().is_none()));
        assert_eq!(origin.seen().lookups, [16_384, 20_000 - 16_384]);
        finish(cache);
    });
}

/// Small values of a batch are asked for far ahead of their answers: here none comes before 200 are asked for, though a
/// lane has a depth of 2.
#[test]
fn known_small_values_are_asked_for_beyond_the_depth_of_a_lane() {
    alone(|| {
        let locate = |key: &[u8]| {
            let len = content::named_len(key)?;
            Some((len as u64, 1, crc32c::crc32c(&content::bytes(key, 1, len))))
        };
        let origin = FakeOrigin::locating(locate, |ask, line| {
            line.held.push(ask.clone());
            if line.held.len() >= 200 {
                for ask in std::mem::take(&mut line.held) {
                    line.answer_by_name(&ask);
                }
            }
            Then::GoOn
        });
        let mut config = config(16 * MIB, &[origin.address()]);
        (config.lanes_per_peer, config.lane_depth) = (1, 2);
        let cache = open_with(config);
        let names: Vec<String> = (0..400).map(|i| name(3000, i)).collect();
        let keys: Vec<Key<'_>> = names.iter().map(Key::from).collect();
        for (name, result) in names.iter().zip(cache.get_batch(&keys, soon())) {
            content::check_lease(name.as_bytes(), 1, 3000, &result.unwrap().unwrap());
        }
        finish(cache);
    });
}

/// Lookups answered wrongly; Gets rightly.
fn wrong_lookups(locate: impl Fn(&[u8]) -> Option<(u64, u64, u32)> + Send + Sync + 'static) -> FakeOrigin {
    FakeOrigin::locating(locate, |ask: &Ask, line: &mut Line| {
        line.answer_by_name(ask);
        Then::GoOn
    })
}

#[test]
fn what_a_lookup_says_wrongly_is_no_value() {
    alone(|| {
        let names: Vec<String> = (0..40).map(|i| name(2000 + i, i)).collect();
        let keys: Vec<Key<'_>> = names.iter().map(Key::from).collect();
        let right = |key: &[u8]| {
            content::named_len(key).map(|len| (len as u64, crc32c::crc32c(&content::bytes(key, 1, len))))
        };
        // A version that does not exist, one of no version at all, another length, another checksum.
        let origin = wrong_lookups(move |key| right(key).map(|(len, crc)| (len, 9, crc)));
        let cache = open(8 * MIB, origin.address());
        for (name, result) in names.iter().zip(cache.get_batch(&keys, soon())) {
            let len = content::named_len(name.as_bytes()).unwrap();
            content::check_lease(name.as_bytes(), 1, len, &result.unwrap().unwrap());
        }
        finish(cache);
        let origin = wrong_lookups(move |key| right(key).map(|(len, crc)| (len, 0, crc)));
        let cache = open(8 * MIB, origin.address());
        for (name, result) in names.iter().zip(cache.get_batch(&keys, soon())) {
            let len = content::named_len(name.as_bytes()).unwrap();
            content::check_lease(name.as_bytes(), 1, len, &result.unwrap().unwrap());
        }
        assert_eq!(cache.stats().lanes_failed, 1, "asked one by one over another connection");
        finish(cache);
        for (longer, other) in [(1, 0), (0, 1)] {
            let origin =
                wrong_lookups(move |key| right(key).map(|(len, crc)| (len + longer, 1, crc ^ other)));
            let cache = open(8 * MIB, origin.address());
            for result in cache.get_batch(&keys, soon()) {
                assert!(
                    matches!(result, Err(Error::Protocol { .. } | Error::PeerUnavailable { .. })),
                    "{result:?}"
                );
            }
            finish(cache);
        }
    });
}

#[test]
fn a_refused_lookup_is_asked_key_by_key() {
    alone(|| {
        let origin = FakeOrigin::start(|ask, line| {
            match ask.key.as_slice() {
                b"refused" => line.refuse(ask, Status::Internal, "no"),
                _ => line.answer_by_name(ask),
            }
            Then::GoOn
        });
        let cache = open(8 * MIB, origin.address());
        let names = [name(2000, 0), "refused".to_owned(), "absent".to_owned(), name(3 * MIB, 1)];
        let keys: Vec<Key<'_>> = names.iter().map(Key::from).collect();
        let results = cache.get_batch(&keys, soon());
        assert_eq!((origin.seen().lookups, origin.requests()), (vec![4], 4));
        assert!(matches!(results[0], Ok(Some(_))) && matches!(results[3], Ok(Some(_))), "{results:?}");
        assert!(
            matches!(results[1], Err(Error::Refused { .. })) && matches!(results[2], Ok(None)),
            "{results:?}"
        );
        drop(results);
        finish(cache);
    });
}

#[test]
fn an_answer_to_another_operation_is_a_breach() {
    alone(|| {
        let origin = FakeOrigin::start(|ask, line| {
            line.header(&ResponseHeader::plain(Status::Ok, Some(Op::Ping), ask.request_id));
            Then::GoOn
        });
        let cache = open(8 * MIB, origin.address());
        assert!(matches!(cache.get("k", soon()), Err(Error::Protocol { .. })));
        finish(cache);
    });
}
