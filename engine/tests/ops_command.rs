//! `hotslice put`, `get`, `exists` and `rm` as a user meets them: values, exit codes, messages.

use hotslice::Address;
use hotslice::auth::Secret;
use hotslice::memory::PagePolicy;
use hotslice::server::{ServerConfig, ServerHandle};
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Output, Stdio};

fn server(writable: bool) -> ServerHandle {
    start(ServerConfig { writable, ..Default::default() })
}

fn start(config: ServerConfig) -> ServerHandle {
    let config = ServerConfig { capacity_bytes: 32 << 20, pages: PagePolicy::Off, ..config };
    ServerHandle::spawn(config).expect("a server on a free port")
}

/// Runs `hotslice`, with `input` on standard input.
fn run(origin: &str, arguments: &[&str], input: &[u8]) -> (Option<i32>, Output) {
    let mut child = Command::new(env!("CARGO_BIN_EXE_hotslice"))
        .args(arguments)
        .args(["--origin", origin, "--timeout-ms", "20000"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the command starts");
    let mut stdin = child.stdin.take().expect("piped");
    std::thread::scope(|scope| {
        // A command that fails early does not read it all.
        scope.spawn(move || drop(stdin.write_all(input)));
        let output = child.wait_with_output().expect("it ends");
        (output.status.code(), output)
    })
}

fn says(output: &Output, word: &str) -> bool {
    String::from_utf8_lossy(&output.stderr).contains(word)
}

#[test]
fn values_of_odd_sizes_go_there_and_back() {
    let server = server(true);
    let origin = server.addr().to_string();
    for len in [0usize, 1, 4095, 4097, 1_000_001, (16 << 20) + 1] {
        let value: Vec<u8> = (0..len).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
        let key = format!("k{len}");
        assert_eq!(run(&origin, &["put", &key, "-"], &value).0, Some(0));
        let (code, got) = run(&origin, &["get", &key], b"");
        assert_eq!(code, Some(0));
        assert!(got.stdout == value, "{len} bytes came back as {} or as others", got.stdout.len());
        let namespace = ["get", &key, "--namespace", "other"];
        assert_eq!(run(&origin, &namespace, b"").0, Some(1), "another namespace");
        assert_eq!(run(&origin, &["rm", &key], b"").0, Some(0));
    }
}

#[test]
fn commands_talk_over_unix_sockets_too() {
    let path = std::env::temp_dir().join(format!("hotslice-ops-{}.sock", std::process::id()));
    let listen = vec![Address::unix(path).expect("a short path")];
    let server = start(ServerConfig { listen, writable: true, ..Default::default() });
    let origin = server.addr().to_string();
    assert_eq!(run(&origin, &["put", "a", "-"], b"12345").0, Some(0));
    assert_eq!(run(&origin, &["get", "a"], b"").1.stdout, b"12345");
    drop(server);
    let (code, gone) = run(&origin, &["get", "a"], b"");
    assert!(code == Some(3) && says(&gone, &origin), "{gone:?}");
}

#[test]
fn a_secret_comes_from_a_file() {
    let write = |name: &str, content: &str, mode: u32| {
        let path = std::env::temp_dir().join(format!("hotslice-ops-{name}-{}", std::process::id()));
        std::fs::write(&path, content).expect("a temporary file");
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).expect("its owner");
        path.into_os_string().into_string().expect("UTF-8")
    };
    let right = write("right", "the right secret, with a newline\n", 0o600);
    let wrong = write("wrong", "another secret of some length", 0o600);
    let open = write("open", "the right secret, with a newline\n", 0o644);
    let secret = Some(Secret::read(right.as_ref()).expect("a good file"));
    let server = start(ServerConfig { secret, writable: true, ..Default::default() });
    let origin = server.addr().to_string();
    assert_eq!(run(&origin, &["put", "a", "-", "--secret-file", &right], b"12345").0, Some(0));
    assert_eq!(run(&origin, &["get", "a", "--secret-file", &right], b"").1.stdout, b"12345");
    let (code, none) = run(&origin, &["get", "a"], b"");
    assert!(code == Some(2) && says(&none, "secret_file"), "{none:?}");
    let (code, other) = run(&origin, &["get", "a", "--secret-file", &wrong], b"");
    assert!(code == Some(2) && says(&other, "not authenticated"), "{other:?}");
    let (code, wide) = run(&origin, &["get", "a", "--secret-file", &open], b"");
    assert!(code == Some(2) && says(&wide, "0644") && says(&wide, &open), "{wide:?}");
    for file in [right, wrong, open] {
        std::fs::remove_file(file).expect("it is there");
    }
}

#[test]
fn exit_codes_and_messages() {
    let server = server(true);
    let origin = server.addr().to_string();
    assert_eq!(run(&origin, &["put", "a", "-"], b"12345").0, Some(0));
    let (code, listed) = run(&origin, &["exists", "--json", "a", "b"], b"");
    assert_eq!(code, Some(1), "one is absent");
    let lines: Vec<serde_json::Value> = String::from_utf8_lossy(&listed.stdout)
        .lines()
        .map(|line| serde_json::from_str(line).expect("a line of JSON"))
        .collect();
    assert_eq!((&lines[0]["exists"], &lines[0]["bytes"]), (&true.into(), &5.into()));
    assert_eq!((&lines[1]["key"], &lines[1]["exists"]), (&"b".into(), &false.into()));

    let (code, absent) = run(&origin, &["get", "b"], b"");
    assert!(code == Some(1) && says(&absent, "`b` is absent"), "{absent:?}");
    assert_eq!(run(&origin, &["rm", "b"], b"").0, Some(1));
    let (code, large) = run(&origin, &["put", "large", "-"], &vec![0; 40 << 20]);
    assert!(code == Some(2) && says(&large, "too large"), "{:?}", large.status);
    let (code, missing) = run(&origin, &["put", "a", "/nowhere/at/all"], b"");
    assert!(code == Some(2) && says(&missing, "/nowhere/at/all"), "{missing:?}");
    let (code, empty) = run(&origin, &["put", "", "-"], b"x");
    assert!(code == Some(2) && says(&empty, "key"), "{empty:?}");
    assert_eq!(run("127.0.0.1:1", &["get", "a"], b"").0, Some(3), "nobody listens there");
    assert!(run("no port", &["get", "a"], b"").0.is_some_and(|code| code >= 2));
}

#[test]
fn a_server_is_read_only_unless_told_otherwise() {
    let server = server(false);
    let origin = server.addr().to_string();
    let (code, refused) = run(&origin, &["put", "a", "-"], b"1");
    assert!(code == Some(2) && says(&refused, "read-only"), "{refused:?}");
    assert_eq!(run(&origin, &["get", "a"], b"").0, Some(1));
}
