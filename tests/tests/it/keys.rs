//! Keys are compared in full within their namespace; lengths have limits.

use hotslice::{Error, Invalidate, KEY_BYTES_MAX, NAMESPACE_BYTES_MAX, Namespace};
use hotslice_tests::content;
use hotslice_tests::gauges::{alone, assert_holds, finish};
use hotslice_tests::origin::{FakeOrigin, Then};
use hotslice_tests::setup::{MIB, client, open, open_local, server, soon};
use std::time::{Duration, Instant};

#[test]
fn keys_have_1_to_4096_bytes() {
    alone(|| {
        let server = server(4 * MIB);
        let cache = open(4 * MIB, server.addr());
        let mut client = client(&server);
        for len in [1, 2, 4095, 4096] {
            let key = vec![0xa5; len];
            client.put(b"", &key, &content::bytes(&key, 1, 5000)).unwrap();
            content::check_lease(&key, 1, 5000, &cache.get(&key, soon()).unwrap().unwrap());
            cache.put(&key, &content::bytes(&key, 2, 50), soon()).unwrap();
            content::check_lease(&key, 2, 50, &cache.peek(&key).unwrap().unwrap());
        }
        for len in [0, 4097, 1 << 20] {
            let key = vec![0xa5; len];
            let refused = |result: Result<(), Error>| match result {
                Err(Error::KeyLength { len: got, max }) => assert_eq!((got, max), (len, KEY_BYTES_MAX)),
                other => panic!("{other:?}"),
            };
            refused(cache.get(&key, soon()).map(drop));
            refused(cache.peek(&key).map(drop));
            refused(cache.get_into(&key, &mut [], soon()).map(drop));
            refused(cache.get_range(&key, 0, &mut [], soon()).map(drop));
            refused(cache.contains(&key).map(drop));
            refused(cache.put(&key, b"", soon()));
            refused(cache.prefetch(&[Namespace::DEFAULT.key(&key)]).map(drop));
            refused(cache.invalidate(Invalidate::Key(Namespace::DEFAULT.key(&key)), soon()).map(drop));
            refused(cache.get_batch(&[Namespace::DEFAULT.key(&key)], soon()).remove(0).map(drop));
        }
        finish(cache);
    });
}

#[test]
fn namespaces_do_not_meet() {
    alone(|| {
        let origin = FakeOrigin::start(|ask, line| {
            // The content tells the namespace.
            let whole = [ask.namespace.as_slice(), b"/", &ask.key].concat();
            line.value(ask, 1, &content::bytes(&whole, 1, 3000));
            Then::GoOn
        });
        let cache = open(4 * MIB, origin.address());
        let names = ["", "a", "b", &"n".repeat(NAMESPACE_BYTES_MAX)];
        for _ in 0..2 {
            for name in names {
                let namespace = cache.namespace(name).unwrap();
                for key in ["k", "bk", "a/k", "\0"] {
                    let lease = cache.get(namespace.key(key), soon()).unwrap().unwrap();
                    content::check_lease(format!("{name}/{key}").as_bytes(), 1, 3000, &lease);
                }
            }
        }
        assert_eq!(origin.requests(), 16);
        assert_eq!(cache.namespace("").unwrap(), Namespace::DEFAULT);
        // Forgetting one namespace leaves the others.
        let (a, b) = (cache.namespace("a").unwrap(), cache.namespace("b").unwrap());
        assert_eq!(cache.invalidate(Invalidate::Namespace(a), soon()).unwrap(), 4);
        assert!(!cache.contains(a.key("k")).unwrap());
        assert!(cache.contains(b.key("k")).unwrap());
        assert_eq!(cache.invalidate(Invalidate::Prefix(b, b"b"), soon()).unwrap(), 1);
        assert!(!cache.contains(b.key("bk")).unwrap() && cache.contains(b.key("k")).unwrap());
        assert!(cache.contains("bk").unwrap());
        assert_holds(&cache, [3000; 11]);
        finish(cache);
    });
}

#[test]
fn names_of_namespaces_have_a_limit() {
    alone(|| {
        let cache = open_local(MIB);
        let long = "n".repeat(NAMESPACE_BYTES_MAX + 1);
        match cache.namespace(&long) {
            Err(Error::Namespace { name, allowed }) => assert!(name == long && allowed.contains("255")),
            other => panic!("{other:?}"),
        }
        finish(cache);
    });
}

#[test]
fn keys_that_differ_in_one_bit_are_different_keys() {
    alone(|| {
        let cache = open_local(16 * MIB);
        let base = [0u8; 64];
        let keys: Vec<Vec<u8>> = (0..512)
            .map(|bit| {
                let mut key = base.to_vec();
                key[bit / 8] ^= 1 << (bit % 8);
                key
            })
            .chain((1..=64).map(|len| base[..len].to_vec()))
            .collect();
        for key in &keys {
            cache.put(key, &content::bytes(key, 1, 100), soon()).unwrap();
        }
        for key in &keys {
            content::check_lease(key, 1, 100, &cache.peek(key).unwrap().unwrap());
        }
        assert_holds(&cache, vec![100; keys.len()]);
        finish(cache);
    });
}

#[test]
fn a_namespace_stands_for_its_name_in_every_cache() {
    alone(|| {
        let origin = FakeOrigin::start(|ask, line| {
            if ask.namespace == b"tenant" {
                line.content(ask, 1, 10)
            } else {
                line.absent(ask)
            }
            Then::GoOn
        });
        let (first, second) = (open_local(MIB), open(MIB, origin.address()));
        let tenant = first.namespace("tenant").unwrap();
        assert_eq!(second.namespace("tenant").unwrap(), tenant);
        let lease =
            second.get(tenant.key("a"), soon()).unwrap().expect("the origin was asked for the tenant's key");
        assert_eq!(lease.len(), 10);
        assert!(second.get("a", soon()).unwrap().is_none());
        drop(lease);
        finish(first);
        finish(second);
    });
}

#[test]
fn a_deadline_at_the_end_of_time_is_one() {
    alone(|| {
        let mut far = Instant::now();
        for power in (0..63).rev() {
            far = far.checked_add(Duration::from_secs(1 << power)).unwrap_or(far);
        }
        let cache = open_local(MIB);
        cache.put("a", b"1", far).unwrap();
        assert_eq!(cache.get("a", far).unwrap().unwrap().len(), 1);
        assert!(cache.get("b", far).unwrap().is_none());
        assert_eq!(cache.invalidate(hotslice::Invalidate::All, far).unwrap(), 1);
        finish(cache);
    });
}
