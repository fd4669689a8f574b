//! `hotslice bench` as a process: its report, its server, what it leaves behind.

#![allow(clippy::unwrap_used, reason = "a test's helpers may panic as its functions may")]

use hotslice::memory::{LockPolicy, PagePolicy};
use hotslice::origin::SliceClient;
use hotslice::server::{ServerConfig, ServerHandle, ServerStats};
use std::io::Read;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

const SMALL: [&str; 8] =
    ["bench", "--pages", "off", "--sizes", "100kB=64MB,0.3MB=64MB", "--count", "7", "--batch=3"];

fn bench(more: &[&str]) -> Output {
    let command = env!("CARGO_BIN_EXE_hotslice");
    Command::new(command).args(SMALL).args(["--rounds", "2"]).args(more).output().unwrap()
}

fn report(output: &Output) -> serde_json::Value {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn every_row_is_there_and_its_counts_are_right() {
    let report = report(&bench(&["--only", "rows,floors", "--json"]));
    let rows = report["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 16);
    for row in rows {
        let value_bytes = row["value_bytes"].as_u64().unwrap();
        let on = row["cache_on"].as_bool().unwrap();
        assert_eq!(row["hit_ratio"], if on { 0.5 } else { 0.0 }, "{row}");
        assert_eq!(row["received_direct_bytes"], value_bytes * 7 * if on { 1 } else { 2 }, "{row}");
        assert_eq!(row["received_copied_bytes"], 0, "{row}");
        assert_eq!(row["ms"]["count"], 14, "{row}");
    }
    for (batch, mode) in [(1, "lease"), (1, "copy"), (3, "lease"), (3, "copy")] {
        let alike = |row: &&serde_json::Value| row["batch"] == batch && row["mode"] == mode;
        assert_eq!(rows.iter().filter(alike).count(), 4, "{batch} {mode}");
    }
    let engines = |value_bytes: u64| {
        let floors = report["copy_floors"].as_array().unwrap();
        let used = |f: &&serde_json::Value| f["value_bytes"] == value_bytes && f["used_by_engine"] == true;
        floors.iter().filter(used).count()
    };
    assert_eq!((engines(100_000), engines(300_000)), (1, 1));
    assert_eq!(report["receive_floors"].as_array().unwrap().len(), 2);
    assert_eq!(report["bars"].as_array().unwrap().len(), 0);
}

#[test]
fn a_given_server_is_used_and_left_as_it_was() {
    let server = ServerHandle::spawn(ServerConfig {
        capacity_bytes: 64 << 20,
        pages: PagePolicy::Off,
        lock: LockPolicy::Off,
        writable: true,
        ..ServerConfig::default()
    })
    .unwrap();
    let mut client = SliceClient::connect(server.addr(), Duration::from_secs(30)).unwrap();
    client.put(b"", b"mine", b"bytes").unwrap();
    let origin = server.addr().to_string();
    let output = bench(&["--only", "rows", "--json", "--origin", &origin]);
    assert_eq!(report(&output)["server_memory"], serde_json::Value::Null);
    let stats: ServerStats = serde_json::from_str(&client.stats().unwrap()).unwrap();
    assert_eq!(stats.values, 1);
}

#[test]
fn an_absent_server_is_an_error() {
    let output = bench(&["--only", "rows", "--origin", "127.0.0.1:1"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("127.0.0.1:1"));
    let unfit = Command::new(env!("CARGO_BIN_EXE_hotslice")).args(["bench", "--sizes", "2MB=1MB"]).output();
    assert_eq!(unfit.unwrap().status.code(), Some(2));
}

#[test]
fn the_server_ends_with_a_bench_that_is_killed() {
    let mut bench = Command::new(env!("CARGO_BIN_EXE_hotslice"))
        .args(SMALL)
        .args(["--only", "rows", "--rounds", "100000"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let server = serving_child(bench.id());
    bench.kill().unwrap();
    bench.wait().unwrap();
    let mut poll = libc::pollfd { fd: server.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: passes one local structure.
    let ended = unsafe { libc::poll(&mut poll, 1, 30_000) };
    assert_eq!(ended, 1, "the server outlived the bench");
    let mut printed = String::new();
    bench.stdout.take().unwrap().read_to_string(&mut printed).unwrap();
    assert_eq!(printed, "");
}

/// The only child of the process, as a descriptor that is readable when it has ended. Waits until it serves:
/// one that is still starting may end for other reasons.
fn serving_child(parent: u32) -> OwnedFd {
    let until = Instant::now() + Duration::from_secs(30);
    while Instant::now() < until {
        let path = format!("/proc/{parent}/task/{parent}/children");
        let child = std::fs::read_to_string(path).unwrap().trim().parse::<libc::pid_t>();
        if let Some(child) = child.ok().filter(|&child| sockets(child) >= 2) {
            // SAFETY: takes no pointers.
            let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, child, 0) };
            assert!(fd >= 0, "pidfd_open: {}", std::io::Error::last_os_error());
            // SAFETY: a new descriptor that nothing else owns.
            return unsafe { OwnedFd::from_raw_fd(fd as i32) };
        }
        std::thread::yield_now();
    }
    panic!("the bench started no server");
}

/// Sockets of a process: a server with a client has its listener and a connection.
fn sockets(process: libc::pid_t) -> usize {
    let Ok(descriptors) = std::fs::read_dir(format!("/proc/{process}/fd")) else { return 0 };
    let is_socket = |path: std::path::PathBuf| {
        std::fs::read_link(path).is_ok_and(|to| to.to_string_lossy().starts_with("socket:"))
    };
    descriptors.flatten().filter(|descriptor| is_socket(descriptor.path())).count()
}
