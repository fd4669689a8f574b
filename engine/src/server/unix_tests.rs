//! The server on Unix sockets, alone and beside TCP.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use super::tests::{Directory, TIMEOUT, config, content, refused, start_with, until};
use super::*;
use crate::origin::{ClientError, SliceClient};
use crate::wire::{self, Status};

#[test]
fn one_server_listens_on_several_addresses() {
    let directory = Directory::new("several");
    let unix = directory.address();
    let listen = vec![unix.clone(), ([127, 0, 0, 1], 0).into(), ([127, 0, 0, 1], 0).into()];
    let (server, mut client) = start_with(ServerConfig { listen, ..config(32 << 20) });
    assert_eq!((client.peer(), server.addr()), (&unix, unix.clone()));
    assert_eq!(server.addrs().iter().filter(|address| address.tcp().is_some()).count(), 2);
    let value = content(1, 10_000_000);
    client.put(b"", b"k", &value).unwrap();
    for address in server.addrs() {
        let mut client = SliceClient::connect(address, TIMEOUT).unwrap();
        assert!(client.get(b"", b"k").unwrap().unwrap().bytes == value, "{address}");
    }
    let idle = UnixStream::connect(directory.path().join("s")).unwrap();
    server.stop().unwrap();
    assert!(client.ping().is_err());
    drop(idle);
    assert!(!directory.path().join("s").exists(), "the file is removed");
    let error = SliceClient::connect(&unix, TIMEOUT).unwrap_err();
    assert!(matches!(error, ClientError::Connect { .. }) && error.to_string().contains("unix:/"), "{error}");
}

#[test]
fn a_unix_peer_is_refused_and_cut_off_like_any_other() {
    let directory = Directory::new("limits");
    let (_server, mut client) = start_with(ServerConfig {
        listen: vec![directory.address()],
        max_connections: 2,
        stall_timeout: Duration::from_millis(100),
        ..config(1 << 20)
    });
    let mut half = UnixStream::connect(directory.path().join("s")).unwrap();
    until(&mut client, "accepting the second", |stats| stats.connections == 2);
    let mut third = SliceClient::connect(directory.address(), TIMEOUT).unwrap();
    assert_eq!(refused(third.ping()), Status::Busy);
    drop(third);
    let mut ping = Vec::new();
    wire::encode_ping(&mut ping, 1);
    half.write_all(&ping[..10]).unwrap();
    until(&mut client, "cutting off the stalled one", |stats| {
        stats.connections_timed_out == 1 && stats.connections == 1
    });
}

#[test]
fn a_server_that_cannot_have_all_its_addresses_leaves_none_behind() {
    let directory = Directory::new("none");
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let listen = vec![directory.address(), taken.local_addr().unwrap().into()];
    let error = ServerHandle::spawn(ServerConfig { listen, ..config(1 << 20) }).unwrap_err();
    assert!(error.to_string().contains(&taken.local_addr().unwrap().to_string()), "{error}");
    assert!(!directory.path().join("s").exists());
}
