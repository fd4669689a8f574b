//! Caches before servers that demand a secret: both sides prove that they know it, and who does not is neither served
//! nor believed.

use hotslice::auth::Secret;
use hotslice::memory::PagePolicy;
use hotslice::server::{ServerConfig, ServerHandle};
use hotslice::wire::{
    Op, RESPONSE_HEADER_BYTES, RequestDecoder, RequestEvent, ResponseHeader, Status, TOKEN_BYTES,
};
use hotslice::{Address, Cache, Error, Key};
use hotslice_tests::content::{self, name};
use hotslice_tests::gauges::{alone, finish};
use hotslice_tests::setup::{MIB, config, open, open_with, server, soon};
use hotslice_tests::sync::HANG;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::PathBuf;
use std::thread::JoinHandle;

const RIGHT: &str = "the right secret of these tests";

/// A file with a secret, removed in the end.
struct SecretFile(PathBuf);

impl SecretFile {
    fn new(name: &str, secret: &str) -> Self {
        let path = std::env::temp_dir().join(format!("hotslice-it-{name}-{}", std::process::id()));
        let mut file = std::fs::OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&path)
            .expect("a temporary file");
        file.set_permissions(std::fs::Permissions::from_mode(0o600)).expect("its owner");
        file.write_all(secret.as_bytes()).expect("written");
        Self(path)
    }
}

impl Drop for SecretFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn demanding_server(listen: Address) -> ServerHandle {
    let config = ServerConfig {
        listen: vec![listen],
        capacity_bytes: 64 * MIB,
        block_bytes: MIB,
        pages: PagePolicy::Off,
        writable: true,
        secret: Some(Secret::new(RIGHT.as_bytes().to_vec().into()).expect("long enough")),
        ..ServerConfig::default()
    };
    ServerHandle::spawn(config).expect("a server")
}

fn put(server: &ServerHandle, names: &[String]) {
    let mut client = hotslice::origin::SliceClient::connect(server.addr(), HANG).expect("connect");
    client
        .authenticate(&Secret::new(RIGHT.as_bytes().to_vec().into()).expect("long enough"))
        .expect("authenticated");
    for name in names {
        let len = content::named_len(name.as_bytes()).expect("a name that tells a length");
        client.put(b"", name.as_bytes(), &content::bytes(name.as_bytes(), 1, len)).expect("put");
    }
}

fn knowing(secret: &SecretFile, origin: Address) -> Cache {
    let mut config = config(32 * MIB, &[origin]);
    config.secret_file = Some(secret.0.clone());
    (config.backoff_min_ms, config.backoff_max_ms, config.connect_timeout_ms) = (1, 5, 300);
    open_with(config)
}

#[test]
fn who_knows_the_secret_is_served_over_every_lane_and_after_a_restart() {
    alone(|| {
        let secret = SecretFile::new("right", RIGHT);
        let server = demanding_server(([127, 0, 0, 1], 0).into());
        let address = server.addr();
        let names: Vec<String> = [0, 1, 5000, 1_000_001, 9 * MIB].iter().map(|&len| name(len, 0)).collect();
        put(&server, &names);
        let cache = knowing(&secret, address.clone());
        let keys: Vec<Key<'_>> = names.iter().map(Key::from).collect();
        for (name, result) in names.iter().zip(cache.get_batch(&keys, soon())) {
            let len = content::named_len(name.as_bytes()).unwrap();
            content::check_lease(name.as_bytes(), 1, len, &result.unwrap().unwrap());
        }
        assert!(cache.get("absent", soon()).unwrap().is_none());
        drop(server);
        let server = demanding_server(address);
        let late = name(5000, 7);
        put(&server, std::slice::from_ref(&late));
        let lease = loop {
            match cache.get(&late, soon()) {
                Ok(lease) => break lease.expect("stored"),
                Err(error) => assert!(matches!(error, Error::PeerUnavailable { .. }), "{error}"),
            }
        };
        content::check_lease(late.as_bytes(), 1, 5000, &lease);
        drop(lease);
        finish(cache);
    });
}

/// A get fails with what is recognised, and nothing is cached.
#[track_caller]
fn refused(cache: Cache, words: &str) {
    for _ in 0..3 {
        let error = cache.get("k", soon()).expect_err("refused");
        assert!(matches!(error, Error::Refused { .. } | Error::PeerUnavailable { .. }), "{error:?}");
        assert!(error.to_string().contains(words), "{error}");
    }
    assert!(!cache.contains("k").unwrap());
    finish(cache);
}

#[test]
fn a_wrong_secret_is_refused() {
    alone(|| {
        let wrong = SecretFile::new("wrong", "another secret, long enough too");
        let server = demanding_server(([127, 0, 0, 1], 0).into());
        refused(knowing(&wrong, server.addr()), "not authenticated");
    });
}

#[test]
fn a_cache_without_the_secret_is_refused_and_says_so() {
    alone(|| {
        let server = demanding_server(([127, 0, 0, 1], 0).into());
        refused(open(4 * MIB, server.addr()), "secret");
    });
}

#[test]
fn a_server_that_knows_no_secret_is_not_believed() {
    alone(|| {
        let secret = SecretFile::new("lonely", RIGHT);
        let server = server(4 * MIB);
        refused(knowing(&secret, server.addr()), "authentication was asked for");
    });
}

/// Answers a Challenge with zeros, and an Authenticate with `proof`, if there is one; then sends what a lane of a cache
/// might take for an answer. One connection after the other.
struct Impostor {
    address: SocketAddr,
    thread: Option<JoinHandle<()>>,
}

impl Impostor {
    fn start(proof: Option<[u8; TOKEN_BYTES]>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let serve = move || {
            while let Ok((stream, _)) = listener.accept() {
                // Each ends with its client; the one that says nothing ends the impostor.
                if pretend(stream, proof).is_ok_and(|requests| requests == 0) {
                    return;
                }
            }
        };
        Self { address, thread: Some(std::thread::spawn(serve)) }
    }
}

impl Drop for Impostor {
    fn drop(&mut self) {
        drop(TcpStream::connect(self.address));
        if let Some(thread) = self.thread.take() {
            assert!(thread.join().is_ok() || std::thread::panicking());
        }
    }
}

/// Returns how much was received.
fn pretend(mut stream: TcpStream, proof: Option<[u8; TOKEN_BYTES]>) -> std::io::Result<usize> {
    let mut decoder = RequestDecoder::new(hotslice::wire::Limits::default());
    let (mut buffer, mut received) = ([0; 4096], 0);
    loop {
        let len = stream.read(&mut buffer)?;
        received += len;
        if len == 0 {
            return Ok(received);
        }
        let mut input = &buffer[..len];
        while let Some(event) = decoder.next(&mut input).expect("the cache sends well-formed requests") {
            let (op, request_id, token) = match event {
                RequestEvent::Challenge { request_id, .. } => (Op::Challenge, request_id, [0; TOKEN_BYTES]),
                RequestEvent::Authenticate { request_id, .. } => match proof {
                    Some(proof) => (Op::Authenticate, request_id, proof),
                    None => continue,
                },
                other => panic!("an impostor was asked for {other:?}"),
            };
            let plain = ResponseHeader::plain(Status::Ok, Some(op), request_id);
            let mut header = [0; RESPONSE_HEADER_BYTES];
            ResponseHeader { body_len: TOKEN_BYTES as u64, ..plain }.encode_into(&mut header);
            stream.write_all(&header)?;
            stream.write_all(&token)?;
        }
    }
}

#[test]
fn an_impostor_is_asked_for_nothing() {
    alone(|| {
        let secret = SecretFile::new("impostor", RIGHT);
        let impostor = Impostor::start(Some([7; TOKEN_BYTES]));
        refused(knowing(&secret, impostor.address.into()), "does not know the secret");
    });
}

#[test]
fn a_server_that_never_proves_anything_is_given_up_in_time() {
    alone(|| {
        let secret = SecretFile::new("silent", RIGHT);
        let impostor = Impostor::start(None);
        refused(
            knowing(&secret, impostor.address.into()),
            "no progress within 300 ms, during authentication",
        );
    });
}
