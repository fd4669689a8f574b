//! Connections: looked after while they are idle, replaced before they are needed, never made in storms; and none of
//! TCP's traps for small messages.

use hotslice::{Address, Config, Error};
use hotslice_tests::content::{self, name};
use hotslice_tests::gauges::{alone, finish};
use hotslice_tests::origin::{FakeOrigin, Then};
use hotslice_tests::setup::{MIB, config, open, open_with, server, soon, store};
use hotslice_tests::sync::eventually;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Looks after idle lanes every 50 ms and gives up on them after 300 ms.
fn watchful(origin: Address) -> Config {
    let mut config = config(8 * MIB, &[origin]);
    (config.keepalive_ms, config.connect_timeout_ms, config.lanes_per_peer) = (50, 300, 1);
    config
}

#[test]
fn idle_lanes_are_asked_for_a_sign_of_life_and_kept() {
    alone(|| {
        let origin = FakeOrigin::well_behaved();
        let cache = open_with(watchful(origin.address()));
        cache.get(&name(5000, 0), soon()).unwrap().unwrap();
        origin.wait_pings(5);
        cache.get(&name(5000, 1), soon()).unwrap().unwrap();
        assert_eq!((origin.seen().connections, cache.stats().lanes_failed), (1, 0));
        finish(cache);
    });
}

#[test]
fn without_keepalive_idle_lanes_are_left_alone() {
    alone(|| {
        let origin = FakeOrigin::well_behaved();
        let mut config = watchful(origin.address());
        config.keepalive_ms = 0;
        let cache = open_with(config);
        cache.get(&name(5000, 0), soon()).unwrap().unwrap();
        // Not an event but the absence of one: six times the period of the other tests.
        std::thread::sleep(Duration::from_millis(300));
        assert_eq!(origin.seen().pings, 0);
        finish(cache);
    });
}

#[test]
fn an_idle_lane_whose_peer_fell_silent_is_replaced_before_it_is_needed() {
    alone(|| {
        let origin = FakeOrigin::well_behaved();
        let cache = open_with(watchful(origin.address()));
        cache.get(&name(5000, 0), soon()).unwrap().unwrap();
        origin.be_deaf_to_pings(true);
        eventually(|| "a second connection".to_owned(), || origin.seen().connections >= 2);
        origin.be_deaf_to_pings(false);
        cache.get(&name(5000, 1), soon()).unwrap().unwrap();
        finish(cache);
    });
}

#[test]
fn an_idle_lane_that_the_peer_closed_is_replaced_before_it_is_needed() {
    alone(|| {
        let origin = FakeOrigin::start(|ask, line| {
            line.answer_by_name(ask);
            if ask.connection == 0 { Then::Close } else { Then::GoOn }
        });
        let cache = open_with(watchful(origin.address()));
        cache.get(&name(5000, 0), soon()).unwrap().unwrap();
        eventually(|| "a second connection".to_owned(), || cache.stats().lanes_opened == 2);
        let before = cache.stats();
        cache.get(&name(5000, 1), soon()).unwrap().unwrap();
        assert_eq!(cache.stats().lanes_opened, before.lanes_opened, "it was there already");
        finish(cache);
    });
}

#[test]
fn a_peer_that_comes_back_is_found_before_anybody_asks() {
    alone(|| {
        let first = FakeOrigin::well_behaved();
        let address = first.address();
        let cache = open_with(watchful(address.clone()));
        cache.get(&name(5000, 0), soon()).unwrap().unwrap();
        drop(first);
        eventually(|| "the loss".to_owned(), || cache.stats().lanes == 0);
        let _second = FakeOrigin::well_behaved_at(address);
        eventually(|| "a new connection".to_owned(), || cache.stats().lanes == 1);
        content::check_lease(
            name(5000, 1).as_bytes(),
            1,
            5000,
            &cache.get(&name(5000, 1), soon()).unwrap().unwrap(),
        );
        finish(cache);
    });
}

/// Accepts connections and does with them what it is told, counting them.
fn listener(accepted: &Arc<AtomicUsize>) -> (SocketAddr, std::thread::JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let accepted = accepted.clone();
    let thread = std::thread::spawn(move || {
        while let Ok((stream, _)) = listener.accept() {
            drop(stream);
            // The last one is the test's own.
            if accepted.fetch_add(1, Ordering::Relaxed) >= 1 << 20 {
                return;
            }
        }
    });
    (address, thread)
}

#[test]
fn a_peer_that_hangs_up_on_everybody_is_not_stormed() {
    alone(|| {
        let accepted = Arc::new(AtomicUsize::new(0));
        let (address, thread) = listener(&accepted);
        let mut config = config(8 * MIB, &[address.into()]);
        (config.backoff_min_ms, config.backoff_max_ms) = (10, 100);
        let cache = open_with(config);
        let (started, mut calls) = (Instant::now(), 0u32);
        while started.elapsed() < Duration::from_millis(1000) {
            let result = cache.get(&name(5000, calls as usize), soon());
            assert!(matches!(result, Err(Error::PeerUnavailable { .. })), "{result:?}");
            calls += 1;
        }
        let attempts = accepted.load(Ordering::Relaxed);
        let elapsed_ms = started.elapsed().as_millis() as usize;
        // Pauses double from 10 ms to 100 ms, shortened by a quarter at most; each may end with the lanes that one
        // key can break.
        let most = 3 * (5 + elapsed_ms / 75);
        assert!(attempts <= most, "{attempts} connections in {elapsed_ms} ms, at most {most} are allowed");
        assert!(calls as usize > attempts, "{calls} calls, {attempts} connections: most calls make none");
        finish(cache);
        accepted.store(1 << 20, Ordering::Relaxed);
        drop(std::net::TcpStream::connect(address));
        thread.join().unwrap();
    });
}

#[test]
fn many_misses_at_once_open_no_more_lanes_than_allowed() {
    alone(|| {
        let server = server(32 * MIB);
        let names: Vec<String> = (0..256).map(|i| name(20_000, i)).collect();
        store(&server, &names);
        let mut config = config(16 * MIB, &[server.addr()]);
        config.lanes_per_peer = 3;
        let cache = open_with(config);
        std::thread::scope(|scope| {
            for names in names.chunks(16) {
                let cache = &cache;
                scope.spawn(move || {
                    for name in names {
                        cache.get(name, soon()).unwrap().unwrap();
                    }
                });
            }
        });
        let stats = cache.stats();
        assert!(stats.lanes_opened <= 3 && stats.lanes <= 3, "{stats:?}");
        finish(cache);
    });
}

/// Nagle's algorithm on one side and delayed acknowledgements on the other make each small message wait for 40 ms. The
/// median of many round trips, one after the other, tells: no machine is so slow, and no such wait so short.
#[test]
fn small_reads_do_not_wait_for_acknowledgements() {
    alone(|| {
        let server = server(16 * MIB);
        let names: Vec<String> = (0..60).map(|i| name(3000 + 977 * (i % 5), i)).collect();
        store(&server, &names);
        let cache = open(8 * MIB, server.addr());
        let mut times: Vec<Duration> = names
            .iter()
            .map(|name| {
                let started = Instant::now();
                cache.get(name, soon()).unwrap().unwrap();
                started.elapsed()
            })
            .collect();
        times.sort_unstable();
        assert!(times[30] < Duration::from_millis(38), "{times:?}");
        // And with a request on its way while others are: two keys at a time.
        let more: Vec<String> = (0..60).map(|i| name(2000 + i, 100 + i)).collect();
        store(&server, &more);
        let mut times: Vec<Duration> = more
            .chunks(2)
            .map(|pair| {
                let started = Instant::now();
                std::thread::scope(|scope| {
                    for name in pair {
                        let cache = &cache;
                        scope.spawn(move || drop(cache.get(name, soon()).unwrap().unwrap()));
                    }
                });
                started.elapsed()
            })
            .collect();
        times.sort_unstable();
        assert!(times[15] < Duration::from_millis(38), "{times:?}");
        finish(cache);
    });
}
