//! Promises 1, 4 and 8: any size, every form of reading, every byte, over real TCP; duplicates, empty values,
//! unaligned sizes and empty buffers included.

use hotslice::{Error, Key, Namespace, Read, ReadRange, ReadScatter};
use hotslice_tests::content::{self, name};
use hotslice_tests::gauges::{alone, assert_holds, finish};
use hotslice_tests::origin::FakeOrigin;
use hotslice_tests::setup::{MIB, open, server, soon, store};

fn key(name: &str) -> Key<'_> {
    Namespace::DEFAULT.key(name)
}

#[test]
fn every_size_arrives_whole_and_stays() {
    alone(|| {
        let sizes = [0, 1, 4095, 4096, 4097, 12_345, MIB - 1, MIB, MIB + 1, 10_000_000, 25_000_000];
        let names: Vec<String> = sizes.iter().map(|&len| name(len, 0)).collect();
        let server = server(64 * MIB);
        store(&server, &names);
        let cache = open(64 * MIB, server.addr());
        for round in 0..2 {
            for (name, len) in names.iter().zip(sizes) {
                let lease = cache.get(name, soon()).unwrap().unwrap();
                content::check_lease(name.as_bytes(), 1, len, &lease);
                assert_eq!(lease.is_empty(), len == 0);
                assert!(cache.contains(name).unwrap(), "round {round}");
            }
        }
        assert_holds(&cache, sizes);
        let stats = cache.stats();
        let fetched: usize = sizes.iter().sum();
        assert_eq!((stats.hits, stats.misses), (sizes.len() as u64, sizes.len() as u64));
        assert_eq!((stats.received_direct_bytes, stats.received_copied_bytes), (fetched as u64, 0));
        assert_eq!(stats.received_discarded_bytes, 0);
        finish(cache);
    });
}

#[test]
fn a_value_of_exactly_the_arena_fits_and_one_byte_more_does_not() {
    alone(|| {
        let origin = FakeOrigin::well_behaved();
        let cache = open(4 * MIB, origin.address());
        let exact = name(4 * MIB, 0);
        content::check_lease(exact.as_bytes(), 1, 4 * MIB, &cache.get(&exact, soon()).unwrap().unwrap());
        match cache.get(&name(4 * MIB + 1, 0), soon()) {
            Err(Error::ValueTooLarge { value_bytes, arena_bytes }) => {
                assert_eq!((value_bytes, arena_bytes), (4 * MIB as u64 + 1, 4 * MIB as u64));
            }
            other => panic!("{other:?}"),
        }
        // Refusing it evicted nothing.
        assert!(cache.contains(&exact).unwrap());
        match cache.put("too large", &vec![0; 4 * MIB + 1], soon()) {
            Err(Error::ValueTooLarge { .. }) => {}
            other => panic!("{other:?}"),
        }
        assert_holds(&cache, [4 * MIB]);
        finish(cache);
    });
}

#[test]
fn put_values_of_every_size_are_found() {
    alone(|| {
        let cache = hotslice_tests::setup::open_local(32 * MIB);
        let sizes = [0, 1, 4095, 4096, 4097, MIB, 3 * MIB + 5, 10_000_000];
        for len in sizes {
            let name = name(len, 7);
            let value = content::bytes(name.as_bytes(), 1, len);
            // In pieces that meet granules nowhere.
            let pieces: Vec<&[u8]> = std::iter::once(&[][..]).chain(value.chunks(100_003)).collect();
            cache.put_gather(&name, &pieces, soon()).unwrap();
        }
        for len in sizes {
            let name = name(len, 7);
            let lease = cache.peek(&name).unwrap().unwrap();
            content::check_lease(name.as_bytes(), 1, len, &lease);
            assert_eq!(lease.version(), 0);
        }
        assert_holds(&cache, sizes);
        finish(cache);
    });
}

#[test]
fn get_into_needs_room_for_the_whole_value_and_touches_nothing_else() {
    alone(|| {
        let origin = FakeOrigin::well_behaved();
        let cache = open(8 * MIB, origin.address());
        let name = name(100_001, 0);
        for _ in 0..2 {
            let mut buffer = vec![0xee; 100_017];
            assert_eq!(cache.get_into(&name, &mut buffer, soon()).unwrap(), Some(100_001));
            content::check(name.as_bytes(), 1, 0, &buffer[..100_001]);
            assert!(buffer[100_001..].iter().all(|&byte| byte == 0xee));
            let mut short = vec![0xee; 100_000];
            match cache.get_into(&name, &mut short, soon()) {
                Err(Error::BufferTooSmall { buffer_bytes: 100_000, value_bytes: 100_001 }) => {}
                other => panic!("{other:?}"),
            }
            assert!(short.iter().all(|&byte| byte == 0xee));
        }
        assert_eq!(cache.get_into("absent", &mut [], soon()).unwrap(), None);
        finish(cache);
    });
}

/// Lengths of `count` uneven layers (some of them empty) that together hold `total` bytes.
fn layers(total: usize, count: usize) -> Vec<usize> {
    let mut lens: Vec<usize> =
        (0..count).map(|i| if i % 7 == 3 { 0 } else { total / (2 * count) * (1 + i % 2) + i }).collect();
    let sum: usize = lens.iter().sum();
    let last = count - 1;
    lens[last] += total - sum;
    lens
}

#[test]
fn scatter_fills_56_to_188_uneven_buffers() {
    alone(|| {
        let origin = FakeOrigin::well_behaved();
        let cache = open(32 * MIB, origin.address());
        for count in [56, 80, 188] {
            let total = 5_000_011 + count;
            let name = name(total, count);
            for _ in 0..2 {
                let mut buffers: Vec<Vec<u8>> =
                    layers(total, count).into_iter().map(|len| vec![0; len]).collect();
                let mut list: Vec<&mut [u8]> = buffers.iter_mut().map(Vec::as_mut_slice).collect();
                assert_eq!(cache.get_scatter(&name, &mut list, soon()).unwrap(), Some(total as u64));
                let mut at = 0;
                for buffer in &buffers {
                    content::check(name.as_bytes(), 1, at, buffer);
                    at += buffer.len();
                }
                assert_eq!(at, total);
                // One byte short: nothing is written.
                buffers.iter_mut().for_each(|buffer| buffer.fill(0xee));
                buffers.last_mut().unwrap().pop();
                let mut list: Vec<&mut [u8]> = buffers.iter_mut().map(Vec::as_mut_slice).collect();
                let error = cache.get_scatter(&name, &mut list, soon());
                assert!(matches!(error, Err(Error::BufferTooSmall { .. })), "{error:?}");
                assert!(buffers.iter().flatten().all(|&byte| byte == 0xee));
            }
        }
        let empty = name(0, 0);
        assert_eq!(cache.get_scatter(&empty, &mut [], soon()).unwrap(), Some(0));
        finish(cache);
    });
}

#[test]
fn ranges_at_every_edge() {
    alone(|| {
        let origin = FakeOrigin::well_behaved();
        let cache = open(8 * MIB, origin.address());
        let len = 2 * MIB as u64 + 4097;
        let name = name(len as usize, 0);
        let edges = [0, 1, 4095, 4096, 4097, MIB as u64 - 1, MIB as u64, MIB as u64 + 1, len - 1, len];
        for from in edges {
            for to in edges.into_iter().filter(|&to| to >= from) {
                let mut buffer = vec![0; (to - from) as usize];
                assert_eq!(cache.get_range(&name, from, &mut buffer, soon()).unwrap(), Some(len));
                content::check(name.as_bytes(), 1, from as usize, &buffer);
            }
        }
        for (offset, bytes) in
            [(0, len + 1), (len, 1), (len + 1, 0), (len - 1, 2), (u64::MAX, 1), (u64::MAX, 0)]
        {
            let mut buffer = vec![0xee; bytes as usize];
            match cache.get_range(&name, offset, &mut buffer, soon()) {
                Err(Error::RangeOutside { offset: o, len: l, value_bytes }) => {
                    assert_eq!((o, l, value_bytes), (offset, bytes, len));
                }
                other => panic!("{offset}+{bytes}: {other:?}"),
            }
            assert!(buffer.iter().all(|&byte| byte == 0xee));
        }
        assert_eq!(cache.get_range("absent", 0, &mut [0], soon()).unwrap(), None);
        assert_eq!(origin.requests_for(&name), 1);
        finish(cache);
    });
}

#[test]
fn a_batch_is_the_sum_of_single_calls() {
    alone(|| {
        let origin = FakeOrigin::well_behaved();
        let cache = open(4 * MIB, origin.address());
        let (hit, miss, empty) = (name(70_000, 1), name(80_001, 2), name(0, 3));
        let (oversized, too_long) = (name(4 * MIB + 1, 4), "k".repeat(4097));
        cache.get(&hit, soon()).unwrap().unwrap();
        let names = [
            hit.as_str(),
            miss.as_str(),
            "absent",
            "",
            too_long.as_str(),
            oversized.as_str(),
            empty.as_str(),
            miss.as_str(),
            hit.as_str(),
            "absent",
            empty.as_str(),
        ];
        let keys: Vec<Key<'_>> = names.iter().map(|&name| key(name)).collect();
        let results = cache.get_batch(&keys, soon());
        assert_eq!(results.len(), names.len());
        for (name, result) in names.iter().zip(&results) {
            match (*name, result) {
                ("absent", Ok(None)) => {}
                ("", Err(Error::KeyLength { len: 0, .. })) => {}
                (name, Err(Error::KeyLength { len: 4097, .. })) if name == too_long => {}
                (name, Err(Error::ValueTooLarge { .. })) if name == oversized => {}
                (name, Ok(Some(lease))) => {
                    let len = content::named_len(name.as_bytes()).unwrap();
                    content::check_lease(name.as_bytes(), 1, len, lease);
                }
                (name, other) => panic!("{name}: {other:?}"),
            }
        }
        // Duplicates are leases on one value.
        let identity = |i: usize| results[i].as_ref().unwrap().as_ref().unwrap().identity();
        assert_eq!(identity(1), identity(7));
        assert_eq!(identity(0), identity(8));
        drop(results);
        for name in [&hit, &miss] {
            assert_eq!(origin.requests_for(name), 1, "{name}");
        }
        assert_eq!(origin.requests_for(&empty), 0, "to know it is to have it");
        assert!(cache.get_batch(&[], soon()).is_empty());
        let stats = cache.stats();
        // Positions with invalid keys are no lookups.
        assert_eq!(stats.lookups, 1 + names.len() as u64 - 2);
        finish(cache);
    });
}

#[test]
fn copying_batches_check_each_position_on_its_own() {
    alone(|| {
        let origin = FakeOrigin::well_behaved();
        let cache = open(16 * MIB, origin.address());
        let (a, b) = (name(200_003, 1), name(4096, 2));
        for _ in 0..2 {
            let (mut one, mut two, mut three) = (vec![0; 200_003], vec![0xee; 4095], vec![0; 4096]);
            let mut none = [0xee; 8];
            let mut again = vec![0; 200_003];
            let mut reads = [
                Read { key: key(&a), into: &mut one },
                Read { key: key(&b), into: &mut two },
                Read { key: key(&b), into: &mut three },
                Read { key: key("absent"), into: &mut none },
                Read { key: key(&a), into: &mut again },
            ];
            let results = cache.get_into_batch(&mut reads, soon());
            assert!(matches!(results[0], Ok(Some(200_003))), "{results:?}");
            assert!(matches!(results[1], Err(Error::BufferTooSmall { .. })), "{results:?}");
            assert!(matches!(results[2], Ok(Some(4096))), "{results:?}");
            assert!(matches!(results[3], Ok(None)), "{results:?}");
            assert!(matches!(results[4], Ok(Some(200_003))), "{results:?}");
            content::check(a.as_bytes(), 1, 0, &one);
            content::check(b.as_bytes(), 1, 0, &three);
            content::check(a.as_bytes(), 1, 0, &again);
            assert!(two.iter().chain(&none).all(|&byte| byte == 0xee));
        }
        assert_eq!(origin.requests_for(&a), 1);
        finish(cache);
    });
}

#[test]
fn scatter_and_range_batches() {
    alone(|| {
        let origin = FakeOrigin::well_behaved();
        let cache = open(16 * MIB, origin.address());
        let (a, b) = (name(1_000_003, 1), name(77, 2));
        for _ in 0..2 {
            let mut buffers: Vec<Vec<u8>> = layers(1_000_003, 56).into_iter().map(|n| vec![0; n]).collect();
            let mut list: Vec<&mut [u8]> = buffers.iter_mut().map(Vec::as_mut_slice).collect();
            let mut small = [0; 77];
            let mut reads = [
                ReadScatter { key: key(&a), into: &mut list },
                ReadScatter { key: key(&b), into: &mut [&mut [], &mut small] },
                ReadScatter { key: key("absent"), into: &mut [] },
                ReadScatter { key: key(&b), into: &mut [&mut [0; 76]] },
            ];
            let results = cache.get_scatter_batch(&mut reads, soon());
            assert!(matches!(results[0], Ok(Some(1_000_003))), "{results:?}");
            assert!(matches!(results[1], Ok(Some(77))), "{results:?}");
            assert!(matches!(results[2], Ok(None)), "{results:?}");
            assert!(matches!(results[3], Err(Error::BufferTooSmall { .. })), "{results:?}");
            content::check(a.as_bytes(), 1, 0, &buffers.concat());
            content::check(b.as_bytes(), 1, 0, &small);

            let (mut middle, mut end, mut outside) = (vec![0; 5000], vec![0; 7], [0xee; 2]);
            let mut reads = [
                ReadRange { key: key(&a), offset: 500_001, into: &mut middle },
                ReadRange { key: key(&a), offset: 1_000_003 - 7, into: &mut end },
                ReadRange { key: key(&b), offset: 76, into: &mut outside },
                ReadRange { key: key(&b), offset: 77, into: &mut [] },
                ReadRange { key: key("absent"), offset: 0, into: &mut [] },
            ];
            let results = cache.get_range_batch(&mut reads, soon());
            assert!(matches!(results[0], Ok(Some(1_000_003))), "{results:?}");
            assert!(matches!(results[1], Ok(Some(1_000_003))), "{results:?}");
            assert!(matches!(results[2], Err(Error::RangeOutside { .. })), "{results:?}");
            assert!(matches!(results[3], Ok(Some(77))), "{results:?}");
            assert!(matches!(results[4], Ok(None)), "{results:?}");
            content::check(a.as_bytes(), 1, 500_001, &middle);
            content::check(a.as_bytes(), 1, 1_000_003 - 7, &end);
            assert_eq!(outside, [0xee; 2]);
        }
        finish(cache);
    });
}

#[test]
fn a_batch_of_6700_keys_of_mixed_sizes() {
    alone(|| {
        let sizes = [1, 100, 4096, 5000, 0, 9000, 64, 12_289];
        let names: Vec<String> = (0..6700).map(|i| name(sizes[i % sizes.len()], i)).collect();
        let server = server(64 * MIB);
        store(&server, &names);
        let cache = open(64 * MIB, server.addr());
        let keys: Vec<Key<'_>> = names.iter().map(|name| key(name)).collect();
        for _ in 0..2 {
            for (name, result) in names.iter().zip(cache.get_batch(&keys, soon())) {
                let len = content::named_len(name.as_bytes()).unwrap();
                content::check_lease(name.as_bytes(), 1, len, &result.unwrap().unwrap());
            }
        }
        assert_holds(&cache, (0..6700).map(|i| sizes[i % sizes.len()]));
        assert_eq!((cache.stats().hits, cache.stats().misses), (6700, 6700));
        finish(cache);
    });
}
