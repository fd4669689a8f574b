//! Where shards run and where their memory lies; and that one core is enough for everything.

use hotslice::memory::NumaPolicy;
use hotslice::{CompletionQueue, Error, Invalidate, Key, Namespace, Outcome, Target};
use hotslice_tests::child::in_child;
use hotslice_tests::content::{self, name};
use hotslice_tests::gauges::{alone, finish};
use hotslice_tests::setup::{MIB, config, open_with, server, soon};
use hotslice_tests::sync::HANG;
use std::io::{BufRead, BufReader, Read};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The cores that this thread may run on.
fn allowed_cores() -> Vec<usize> {
    // SAFETY: all-zero bytes are a valid, empty set.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: writes a local of the size that it is told.
    assert_eq!(unsafe { libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &mut set) }, 0);
    // SAFETY: reads a local; the index is below CPU_SETSIZE.
    (0..libc::CPU_SETSIZE as usize).filter(|&core| unsafe { libc::CPU_ISSET(core, &set) }).collect()
}

/// Keeps this thread, and the threads and processes that it starts, on one core.
fn restrict_to(core: usize) {
    // SAFETY: all-zero bytes are a valid, empty set.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: writes a local; `core` came from a set of this size.
    unsafe { libc::CPU_SET(core, &mut set) };
    // SAFETY: reads a local of the size that it is told.
    assert_eq!(unsafe { libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &set) }, 0);
}

#[test]
fn reports_name_cores_nodes_and_where_the_memory_is() {
    alone(|| {
        for numa in [NumaPolicy::Local, NumaPolicy::Off] {
            let mut config = config(8 * MIB, &[]);
            config.numa = numa;
            config.capacity_max_bytes = 16 * MIB as u64;
            let cache = open_with(config);
            let report = &cache.reports()[0];
            let cores = allowed_cores();
            assert_eq!(report.core.is_some(), cores.len() > 1, "{report:?}");
            assert!(report.core.is_none_or(|core| cores.contains(&core)));
            assert_eq!(report.node, report.arena.node);
            let nodes = std::fs::read_to_string("/sys/devices/system/node/online").unwrap_or_default();
            if nodes.trim() == "0" {
                assert_eq!(report.node, Some(0));
            }
            let found = |arena: &hotslice::memory::ArenaReport| arena.bytes_by_node.values().sum::<usize>();
            // The kernel may not say, but what it says is complete.
            let says = found(&report.arena) > 0;
            assert_eq!(found(&report.arena), if says { 8 * MIB } else { 0 });
            let resized = cache.resize(12 * MIB as u64, soon()).unwrap();
            assert_eq!(found(&resized.shards[0].arena), if says { 12 * MIB } else { 0 });
            finish(cache);
        }
    });
}

#[test]
fn a_core_that_is_not_allowed_is_refused_by_name() {
    let mut config = config(8 * MIB, &[]);
    config.cores = vec![1023];
    match hotslice::Cache::open(config) {
        Err(Error::Config { setting: "cores", value, .. }) => assert_eq!(value, "1023"),
        other => panic!("{other:?}"),
    }
}

const SERVES: &str = "HOTSLICE_TEST_SERVES";

/// The slice server of the test below, in a process of its own: says where it listens and ends with its input.
#[test]
#[ignore = "not a test: the server process of another one"]
fn serves_until_its_input_ends() {
    if std::env::var_os(SERVES).is_none() {
        return;
    }
    let server = server(32 * MIB);
    println!("\nlistening on {}", server.addr());
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
    server.stop().unwrap();
}

fn start_server() -> (Child, SocketAddr) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["placement::serves_until_its_input_ends", "--exact", "--nocapture", "--include-ignored"])
        .env(SERVES, "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let address = lines.find_map(|line| line.unwrap().strip_prefix("listening on ").map(str::to_owned));
    // What is left of its output is of no use, but must not fill the pipe.
    std::thread::spawn(move || lines.for_each(drop));
    (child, address.expect("the server says where it listens").parse().unwrap())
}

#[test]
fn one_core_is_enough_for_everything() {
    in_child("placement::one_core_is_enough_for_everything", || {
        restrict_to(allowed_cores()[0]);
        let started = Instant::now();
        let (mut child, address) = start_server();
        let names: Vec<String> = (0..40).map(|i| name([0, 1, 4097, 70_000, 300_001][i % 5], i)).collect();
        let mut client = client_at(address);
        for name in &names {
            let len = content::named_len(name.as_bytes()).unwrap();
            client.put(b"", name.as_bytes(), &content::bytes(name.as_bytes(), 1, len)).unwrap();
        }
        let mut config = config(8 * MIB, &[address.into()]);
        config.shards = 2;
        // Polling would keep the server and the callers from the only core; it is not done.
        config.spin_us = 1_000_000;
        let cache = open_with(config);
        let reports = cache.reports();
        assert!(reports.iter().all(|report| report.core.is_none()), "{reports:?}");
        assert!(reports[0].warnings.iter().any(|warning| warning.contains("`spin_us`")), "{reports:?}");
        let check = |name: &str, lease: &hotslice::Lease| {
            content::check_lease(name.as_bytes(), 1, content::named_len(name.as_bytes()).unwrap(), lease);
        };
        // Misses one by one, then hits and misses as a batch.
        for name in &names[..10] {
            check(name, &cache.get(name, soon()).unwrap().unwrap());
        }
        let keys: Vec<Key<'_>> = names.iter().map(|name| Namespace::DEFAULT.key(name)).collect();
        for (name, result) in names.iter().zip(cache.get_batch(&keys, soon())) {
            check(name, &result.unwrap().unwrap());
        }
        for i in 0..20 {
            let name = name(50_000, 100 + i);
            cache.put(&name, &content::bytes(name.as_bytes(), 1, 50_000), soon()).unwrap();
            check(&name, &cache.peek(&name).unwrap().unwrap());
        }
        assert!(cache.get("absent", soon()).unwrap().is_none());
        cache.invalidate(Invalidate::All, soon()).unwrap();
        let mut queue = CompletionQueue::new(&cache, names.len()).unwrap();
        for (i, name) in names.iter().enumerate() {
            queue.get(name, Target::Lease, i as u64, soon());
        }
        for _ in 0..names.len() {
            let completion = queue.wait(HANG).expect("a completion");
            match completion.result {
                Ok(Outcome::Lease(lease)) => check(&names[completion.user_data as usize], &lease),
                other => panic!("{other:?}"),
            }
        }
        drop(queue);
        let resized = cache.resize(2 * MIB as u64, soon()).unwrap();
        assert!(resized.is_complete(), "{resized:?}");
        finish(cache);
        drop(child.stdin.take());
        assert!(child.wait().unwrap().success());
        // About half a second where nobody else wants the core; had the shards polled, each miss would have cost
        // a scheduler's time slice or more.
        assert!(started.elapsed() < Duration::from_secs(15), "{:?}", started.elapsed());
    });
}

fn client_at(address: SocketAddr) -> hotslice::origin::SliceClient {
    hotslice::origin::SliceClient::connect(address, HANG).unwrap()
}
