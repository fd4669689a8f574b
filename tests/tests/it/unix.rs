//! Caches whose origin listens on a Unix socket.

use hotslice::{Address, Error};
use hotslice_tests::content::{self, name};
use hotslice_tests::gauges::alone;
use hotslice_tests::setup::{MIB, config, open_with, server_at, soon, store};

/// A socket's path that no other test has.
fn address(name: &str) -> Address {
    let path = std::env::temp_dir().join(format!("hotslice-it-{name}-{}.sock", std::process::id()));
    Address::unix(path).expect("a short path")
}

#[test]
fn values_come_over_a_unix_socket_and_the_socket_may_come_back() {
    alone(|| {
        let address = address("values");
        let server = server_at(&address, 64 * MIB);
        let names: Vec<_> = [0, 1, 4096, 1_000_001, 12 * MIB].iter().map(|&len| name(len, 0)).collect();
        store(&server, &names);
        let mut config = config(64 * MIB, std::slice::from_ref(&address));
        (config.backoff_min_ms, config.backoff_max_ms, config.absent_ttl_ms) = (1, 5, 0);
        let cache = open_with(config);
        for name in &names {
            let lease = cache.get(name, soon()).expect("get").expect("stored");
            let len = content::named_len(name.as_bytes()).expect("it tells its length");
            content::check_lease(name.as_bytes(), 1, len, &lease);
        }
        assert!(cache.get("absent", soon()).expect("get").is_none());

        drop(server);
        let error = cache.get(&name(77, 1), soon()).expect_err("nobody listens");
        assert!(matches!(&error, Error::PeerUnavailable { peer, .. } if *peer == address), "{error}");
        let server = server_at(&address, MIB);
        store(&server, [name(77, 1)]);
        // The back-off after the failure may still last.
        let lease = loop {
            match cache.get(&name(77, 1), soon()) {
                Ok(lease) => break lease.expect("stored"),
                Err(Error::PeerUnavailable { .. }) => std::thread::yield_now(),
                Err(error) => panic!("{error}"),
            }
        };
        content::check_lease(name(77, 1).as_bytes(), 1, 77, &lease);
    });
}
