//! `hotslice serve` as a process: readiness, signals, descriptors.

#![allow(clippy::unwrap_used, reason = "a test's helpers may panic as its functions may")]

use std::io::{BufRead, BufReader, Read};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use hotslice::Address;
use hotslice::origin::SliceClient;
use hotslice::server::ServerStats;

const TIMEOUT: Duration = Duration::from_secs(30);

/// A server process; killed when a test fails.
struct Process {
    child: Child,
    addr: Address,
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn serve(arguments: &str, limits: &str) -> Process {
    serve_at("127.0.0.1:0", arguments, limits)
}

fn serve_at(listen: &str, arguments: &str, limits: &str) -> Process {
    let command = env!("CARGO_BIN_EXE_hotslice");
    let script = format!("{limits} exec '{command}' serve --listen {listen} --json --pages off {arguments}");
    let mut child =
        Command::new("/bin/sh").args(["-c", &script]).stdout(Stdio::piped()).spawn().expect("a shell");
    let mut line = String::new();
    let mut out = BufReader::new(child.stdout.take().unwrap());
    out.read_line(&mut line).unwrap();
    let ready: serde_json::Value = serde_json::from_str(&line).unwrap();
    assert_eq!(ready["pid"].as_u64(), Some(child.id().into()));
    let addr = ready["listening"].as_str().unwrap().parse().unwrap();
    Process { child, addr }
}

impl Process {
    fn client(&self) -> SliceClient {
        SliceClient::connect(&self.addr, TIMEOUT).unwrap()
    }

    fn descriptors(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.child.id())).unwrap().count()
    }

    fn signal(&mut self, signal: i32) -> Option<i32> {
        // SAFETY: kill touches no memory; the child is not waited for yet, so its id is its own.
        assert_eq!(unsafe { libc::kill(self.child.id() as i32, signal) }, 0);
        self.child.wait().unwrap().code()
    }
}

fn stats(client: &mut SliceClient) -> ServerStats {
    serde_json::from_str(&client.stats().unwrap()).unwrap()
}

fn until(client: &mut SliceClient, is_so: impl Fn(&ServerStats) -> bool) -> ServerStats {
    let start = Instant::now();
    loop {
        let now = stats(client);
        if is_so(&now) {
            return now;
        }
        assert!(start.elapsed() < TIMEOUT, "{now:?}");
        std::thread::yield_now();
    }
}

#[test]
fn both_signals_end_it_in_order_also_with_work_under_way() {
    for signal in [libc::SIGINT, libc::SIGTERM] {
        let mut server = serve("--writable --capacity 64MiB", "");
        let mut client = server.client();
        client.put(b"", b"k", &vec![5; 20 << 20]).unwrap();
        assert_eq!(client.get(b"", b"k").unwrap().unwrap().bytes, vec![5; 20 << 20]);
        let mut reader = server.client();
        let idle = TcpStream::connect(&server.addr).unwrap();
        assert_eq!(server.signal(signal), Some(0));
        assert!(client.ping().is_err());
        assert!(reader.ping().is_err());
        drop(idle);
    }
}

#[test]
fn a_unix_socket_has_the_mode_asked_for_and_goes_with_the_server() {
    let path = std::env::temp_dir().join(format!("hotslice-serve-{}.sock", std::process::id()));
    let listen = format!("unix:{}", path.display());
    let mode = || std::fs::symlink_metadata(&path).unwrap().permissions().mode() & 0o7777;
    // No umask widens it, and none narrows what was asked for.
    let mut server = serve_at(&listen, "--listen 127.0.0.1:0 --capacity 64MiB", "umask 000;");
    assert_eq!(mode(), 0o600);
    assert_eq!(server.addr.to_string(), listen);
    server.client().ping().unwrap();
    assert_eq!(server.signal(libc::SIGTERM), Some(0));
    assert!(!path.exists());

    let mut killed = serve_at(&listen, "--socket-mode 0660 --capacity 64MiB", "umask 077;");
    assert_eq!(mode(), 0o660);
    assert_eq!(killed.signal(libc::SIGKILL), None);
    assert!(path.exists(), "nobody could remove it");
    let mut next = serve_at(&listen, "--capacity 64MiB", "");
    next.client().ping().unwrap();
    assert_eq!(next.signal(libc::SIGINT), Some(0));
    assert!(!path.exists());
}

/// What a server writes to standard error until it has ended.
fn warnings(arguments: &[&str]) -> String {
    let mut child = Command::new(env!("CARGO_BIN_EXE_hotslice"))
        .args(["serve", "--json", "--pages", "off", "--capacity", "64MiB"])
        .args(arguments)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let mut process = Process { addr: ([127, 0, 0, 1], 0).into(), child };
    assert_eq!(process.signal(libc::SIGTERM), Some(0), "{line}");
    let mut text = String::new();
    process.child.stderr.take().unwrap().read_to_string(&mut text).unwrap();
    text
}

#[test]
fn listening_to_the_network_without_a_secret_is_one_warning() {
    let secret = std::env::temp_dir().join(format!("hotslice-serve-secret-{}", std::process::id()));
    std::fs::write(&secret, "a secret of the right length").unwrap();
    std::fs::set_permissions(&secret, std::fs::Permissions::from_mode(0o600)).unwrap();
    let open = warnings(&["--listen", "0.0.0.0:0", "--listen", "127.0.0.1:0", "--listen", "0.0.0.0:0"]);
    assert_eq!(open.matches("without a secret").count(), 1, "{open}");
    let file = secret.to_str().unwrap();
    let closed = warnings(&["--listen", "0.0.0.0:0", "--secret-file", file]);
    assert!(!closed.contains("without a secret") && !closed.contains("right length"), "{closed}");
    assert!(!warnings(&["--listen", "127.0.0.1:0"]).contains("without a secret"));
    std::fs::remove_file(&secret).unwrap();
}

#[test]
fn it_is_read_only_unless_told_otherwise() {
    let server = serve("--capacity 64MiB", "");
    let error = server.client().put(b"", b"k", b"v").unwrap_err();
    assert!(error.to_string().contains("--writable"), "{error}");
}

#[test]
fn descriptors_are_given_back() {
    let server = serve("--capacity 64MiB", "");
    let mut client = server.client();
    client.ping().unwrap();
    let before = server.descriptors();
    let streams: Vec<_> = (0..200).map(|_| TcpStream::connect(&server.addr).unwrap()).collect();
    until(&mut client, |stats| stats.connections == 201);
    assert_eq!(server.descriptors(), before + 200);
    drop(streams);
    until(&mut client, |stats| stats.connections == 1);
    assert_eq!(server.descriptors(), before);
}

#[test]
fn running_out_of_descriptors_neither_ends_nor_spins_it() {
    let mut server = serve("--capacity 64MiB", "ulimit -n 32;");
    let mut client = server.client();
    client.ping().unwrap();
    let start = Instant::now();
    let streams: Vec<_> = (0..60).map(|_| TcpStream::connect(&server.addr).unwrap()).collect();
    let short = until(&mut client, |stats| stats.accept_errors >= 4);
    // Pauses of 10, 20 and 40 ms lie between four failures.
    assert!(start.elapsed() >= Duration::from_millis(70));
    assert!(short.connections < 32, "{short:?}");
    drop(streams);
    // The next attempts take what waits in the backlog, see that it has ended, and go on.
    server.client().ping().unwrap();
    until(&mut client, |stats| stats.connections == 1);
    assert_eq!(server.signal(libc::SIGTERM), Some(0));
}

#[test]
fn wrong_settings_end_it_with_an_error_that_names_them() {
    let cases: [(&[&str], &str); 12] = [
        (&["--listen", "127.0.0.1:0", "--capacity", "many"], "capacity"),
        (&["--listen", "127.0.0.1:0", "--capacity", "64MiB", "--max-connections", "0"], "max_connections"),
        (&["--listen", "127.0.0.1:0", "--capacity", "64MiB", "--idle-timeout-ms", "0"], "idle_timeout"),
        (
            &["--listen", "127.0.0.1:0", "--capacity", "64MiB", "--pages", "some"],
            "required, preferred and off",
        ),
        (&["--listen", "nowhere"], "nowhere"),
        (&["--listen", "unix:relative"], "begins with `/`"),
        (&["--listen", "127.0.0.1:0", "--socket-mode", "8"], "octal"),
        (&["--listen", "127.0.0.1:0", "--max-connections-per-client", "0"], "max_connections_per_client"),
        (&["--listen", "127.0.0.1:0", "--max-outstanding-bytes", "1"], "max_outstanding_bytes"),
        (&["--listen", "127.0.0.1:0", "--max-frame-bytes", "4kB"], "8192 to 1048576"),
        (&["--listen", "127.0.0.1:0", "--max-value-bytes", "2TiB"], "max_value_bytes"),
        (&["--listen", "127.0.0.1:0", "--secret-file", "/nowhere/at/all"], "/nowhere/at/all"),
    ];
    for (arguments, named) in cases {
        // A server that wrongly starts must end all the same.
        let mut child = Command::new("timeout")
            .args(["20", env!("CARGO_BIN_EXE_hotslice"), "serve"])
            .args(arguments)
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut text = String::new();
        child.stderr.take().unwrap().read_to_string(&mut text).unwrap();
        assert!(!child.wait().unwrap().success());
        assert!(text.contains(named), "{arguments:?}: {text}");
    }
}
