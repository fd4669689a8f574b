//! Caches and servers as most tests want them: small, on ordinary pages, so that they run anywhere.

use crate::content;
use crate::sync::HANG;
use hotslice::memory::{LockPolicy, PagePolicy};
use hotslice::origin::SliceClient;
use hotslice::server::{ServerConfig, ServerHandle};
use hotslice::{Address, Cache, Config, Deadline, TransportKind};

/// One MiB.
pub const MIB: usize = 1 << 20;

/// What caches of tests move bytes with: `HOTSLICE_TEST_TRANSPORT`, or what is best.
fn transport() -> TransportKind {
    match std::env::var("HOTSLICE_TEST_TRANSPORT") {
        Ok(name) => name.parse().expect("HOTSLICE_TEST_TRANSPORT is auto, io_uring or epoll"),
        Err(_) => TransportKind::Auto,
    }
}

/// A configuration with blocks of 1 MiB on ordinary, unlocked pages.
pub fn config(capacity_bytes: usize, origin: &[Address]) -> Config {
    let mut config = Config::new(capacity_bytes as u64);
    config.block_bytes = MIB as u64;
    config.pages = PagePolicy::Off;
    config.lock = LockPolicy::Off;
    config.register = LockPolicy::Preferred;
    config.transport = transport();
    config.origin = origin.to_vec();
    config
}

/// Opens a cache of [`config`].
#[track_caller]
pub fn open(capacity_bytes: usize, origin: impl Into<Address>) -> Cache {
    open_with(config(capacity_bytes, &[origin.into()]))
}

/// Opens a cache without an origin.
#[track_caller]
pub fn open_local(capacity_bytes: usize) -> Cache {
    open_with(config(capacity_bytes, &[]))
}

/// Opens a cache.
#[track_caller]
pub fn open_with(config: Config) -> Cache {
    match Cache::open(config) {
        Ok(cache) => cache,
        Err(error) => panic!("cannot open the cache: {error}"),
    }
}

/// A deadline that only a hang misses.
pub fn soon() -> Deadline {
    HANG.into()
}

/// A writable slice server at an address.
#[track_caller]
pub fn server_at(listen: impl Into<Address>, capacity_bytes: usize) -> ServerHandle {
    let config = ServerConfig {
        listen: vec![listen.into()],
        capacity_bytes,
        block_bytes: MIB,
        pages: PagePolicy::Off,
        writable: true,
        ..ServerConfig::default()
    };
    match ServerHandle::spawn(config) {
        Ok(server) => server,
        Err(error) => panic!("cannot start the slice server: {error}"),
    }
}

/// A writable slice server on a free loopback port.
#[track_caller]
pub fn server(capacity_bytes: usize) -> ServerHandle {
    server_at(([127, 0, 0, 1], 0), capacity_bytes)
}

/// Stores the content of each key, whose name tells its length, in version 1.
#[track_caller]
pub fn store(server: &ServerHandle, keys: impl IntoIterator<Item = impl AsRef<str>>) {
    let mut client = client(server);
    for key in keys {
        let key = key.as_ref().as_bytes();
        let len = content::named_len(key).expect("a name that tells a length");
        client.put(b"", key, &content::bytes(key, 1, len)).expect("put");
    }
}

/// A client of a server.
#[track_caller]
pub fn client(server: &ServerHandle) -> SliceClient {
    SliceClient::connect(server.addr(), HANG).expect("connect")
}
