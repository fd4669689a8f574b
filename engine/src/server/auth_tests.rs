//! A server that demands a secret.

use std::io::{Read, Write};
use std::time::{Duration, Instant};

use super::tests::{
    Directory, TIMEOUT, assert_ended, config, content, raw, read_answer, refused, start_with, stats, until,
};
use super::*;
use crate::auth::{ClientHandshake, Secret};
use crate::origin::SliceClient;
use crate::wire::{self, ANY_VERSION, Op, RANGE_TO_END, Status};

fn secret(text: &str) -> Secret {
    Secret::new(text.as_bytes().to_vec().into()).unwrap()
}

fn right() -> Secret {
    secret("the right secret of this server")
}

fn locked() -> ServerConfig {
    ServerConfig { secret: Some(right()), ..config(16 << 20) }
}

fn get(id: u64) -> Vec<u8> {
    let mut request = Vec::new();
    wire::encode_get(&mut request, id, b"", b"k", 0, RANGE_TO_END, ANY_VERSION).unwrap();
    request
}

/// A client that has authenticated itself.
fn client(server: &ServerHandle) -> SliceClient {
    let mut client = SliceClient::connect(server.addr(), TIMEOUT).unwrap();
    client.authenticate(&right()).unwrap();
    client
}

/// Asks for a challenge; returns the handshake and the server's nonce.
fn challenge(stream: &mut (impl Read + Write)) -> (ClientHandshake, [u8; 32]) {
    let handshake = ClientHandshake::begin(&right()).unwrap();
    let mut request = Vec::new();
    wire::encode_challenge(&mut request, 1, handshake.nonce());
    stream.write_all(&request).unwrap();
    let (header, body) = read_answer(stream);
    assert_eq!((header.status, header.op, header.request_id), (Status::Ok, Some(Op::Challenge), 1));
    (handshake, body.try_into().unwrap())
}

fn authenticate(stream: &mut (impl Read + Write), proof: &[u8; 32]) -> Status {
    let mut request = Vec::new();
    wire::encode_authenticate(&mut request, 2, proof);
    stream.write_all(&request).unwrap();
    let (header, _) = read_answer(stream);
    assert_eq!((header.op, header.request_id), (Some(Op::Authenticate), 2));
    header.status
}

#[test]
fn who_knows_the_secret_is_served() {
    let directory = Directory::new("secret");
    let listen = vec![([127, 0, 0, 1], 0).into(), directory.address()];
    let server = ServerHandle::spawn(ServerConfig { listen, ..locked() }).unwrap();
    let value = content(1, 5_000_000);
    for address in server.addrs() {
        let mut client = SliceClient::connect(address, TIMEOUT).unwrap();
        client.authenticate(&right()).unwrap();
        client.put(b"", b"k", &value).unwrap();
        assert!(client.get(b"", b"k").unwrap().unwrap().bytes == value);
        // Larger than anything that is read before.
        let keys: Vec<_> = (0..5000u32).map(u32::to_le_bytes).collect();
        let keys: Vec<(&[u8], &[u8])> = keys.iter().map(|key| (&b"ns"[..], &key[..])).collect();
        assert_eq!(client.lookup(&keys).unwrap().len(), 5000);
        // Again does no harm.
        client.authenticate(&right()).unwrap();
        client.ping().unwrap();
    }
    let mut client = client(&server);
    assert_eq!(stats(&mut client).authentications_failed, 0);
}

#[test]
fn before_the_proof_only_a_ping_is_answered() {
    let (server, mut stranger) = start_with(locked());
    stranger.ping().unwrap();
    assert_eq!(refused(stranger.get(b"", b"k")), Status::Unauthenticated);
    assert_eq!(refused(stranger.remove(b"", b"k")), Status::Unauthenticated);
    assert_eq!(refused(stranger.stats()), Status::Unauthenticated);
    assert_eq!(refused(stranger.lookup(&[(b"", b"k")])), Status::Unauthenticated);
    stranger.ping().unwrap();
    // The reason says what to do.
    let error = stranger.get(b"", b"k").unwrap_err().to_string();
    assert!(error.contains("secret_file"), "{error}");
    // It may still prove it.
    stranger.authenticate(&right()).unwrap();
    assert_eq!(stranger.get(b"", b"k").unwrap(), None);
    drop(server);
}

#[test]
fn bodies_of_strangers_are_not_taken() {
    let (server, mut stranger) = start_with(locked());
    let mut client = client(&server);
    let error = stranger.put(b"", b"k", &content(1, 1 << 20)).unwrap_err();
    assert_eq!(error.status(), Some(Status::Unauthenticated), "{error}");
    assert!(stranger.ping().is_err(), "it cost the connection");
    let mut stranger = raw(&server);
    let mut put = Vec::new();
    wire::encode_put_head(&mut put, 7, b"", b"k", 8 << 20, 0).unwrap();
    stranger.write_all(&put).unwrap();
    let (header, _) = read_answer(&mut stranger);
    assert_eq!((header.status, header.op), (Status::Unauthenticated, Some(Op::Put)));
    assert_ended(&mut stranger);
    assert_eq!(stats(&mut client).used_bytes, 0);
    // A Lookup of a megabyte is refused by its header.
    let mut stranger = raw(&server);
    let mut lookup = Vec::new();
    wire::RequestHeader { op: Op::Lookup, request_id: 8, body_len: 1 << 20 }.encode(&mut lookup);
    stranger.write_all(&lookup).unwrap();
    let (header, _) = read_answer(&mut stranger);
    assert_eq!((header.status, header.request_id), (Status::Unauthenticated, 8));
    assert_ended(&mut stranger);
}

#[test]
fn a_wrong_proof_is_answered_and_costs_the_connection() {
    let (server, mut wrong) = start_with(locked());
    assert_eq!(refused(wrong.authenticate(&secret("another secret, also long"))), Status::Unauthenticated);
    assert!(wrong.ping().is_err());
    // Without a challenge.
    let mut stream = raw(&server);
    assert_eq!(authenticate(&mut stream, &[0; 32]), Status::Unauthenticated);
    assert_ended(&mut stream);
    // One bit off; there is no second attempt, not even with the right proof behind it.
    let mut stream = raw(&server);
    let (handshake, nonce) = challenge(&mut stream);
    let (mut proof, _) = handshake.prove(&nonce);
    proof[31] ^= 1;
    let mut requests = Vec::new();
    wire::encode_authenticate(&mut requests, 2, &proof);
    proof[31] ^= 1;
    wire::encode_authenticate(&mut requests, 3, &proof);
    requests.extend_from_slice(&get(4));
    stream.write_all(&requests).unwrap();
    let (header, _) = read_answer(&mut stream);
    assert_eq!((header.status, header.request_id), (Status::Unauthenticated, 2));
    assert_ended(&mut stream);
    assert_eq!(stats(&mut client(&server)).authentications_failed, 3);
}

#[test]
fn a_recorded_proof_is_good_for_nothing() {
    let server = ServerHandle::spawn(locked()).unwrap();
    let mut stream = raw(&server);
    let (handshake, nonce) = challenge(&mut stream);
    let (client_nonce, (proof, _)) = (*handshake.nonce(), handshake.prove(&nonce));
    assert_eq!(authenticate(&mut stream, &proof), Status::Ok);
    // On the same connection, and with the same nonce on another one.
    assert_eq!(authenticate(&mut stream, &proof), Status::Unauthenticated);
    assert_ended(&mut stream);
    let mut stream = raw(&server);
    let mut request = Vec::new();
    wire::encode_challenge(&mut request, 1, &client_nonce);
    stream.write_all(&request).unwrap();
    assert_ne!(read_answer(&mut stream).1, nonce);
    assert_eq!(authenticate(&mut stream, &proof), Status::Unauthenticated);
    // A second challenge makes the first one void.
    let mut stream = raw(&server);
    let (first, nonce) = challenge(&mut stream);
    challenge(&mut stream);
    assert_eq!(authenticate(&mut stream, &first.prove(&nonce).0), Status::Unauthenticated);
}

#[test]
fn requests_may_follow_the_proof_at_once() {
    let server = ServerHandle::spawn(locked()).unwrap();
    client(&server).put(b"", b"k", b"value").unwrap();
    let mut stream = raw(&server);
    let (handshake, nonce) = challenge(&mut stream);
    let (proof, check) = handshake.prove(&nonce);
    let mut requests = Vec::new();
    wire::encode_authenticate(&mut requests, 2, &proof);
    requests.extend_from_slice(&get(3));
    stream.write_all(&requests).unwrap();
    let (header, body) = read_answer(&mut stream);
    assert_eq!(header.op, Some(Op::Authenticate));
    assert!(check.holds(&body.try_into().unwrap()));
    let (header, body) = read_answer(&mut stream);
    assert_eq!((header.request_id, &body[..]), (3, &b"value"[..]));
}

#[test]
fn strangers_have_as_long_as_a_stall() {
    let stall_timeout = Duration::from_millis(200);
    let server = ServerHandle::spawn(ServerConfig { stall_timeout, ..locked() }).unwrap();
    let mut kept = client(&server);
    let start = Instant::now();
    let mut silent = raw(&server);
    let mut half = raw(&server);
    let mut request = Vec::new();
    wire::encode_challenge(&mut request, 1, &[0; 32]);
    half.write_all(&request[..50]).unwrap();
    let mut busy = SliceClient::connect(server.addr(), TIMEOUT).unwrap();
    // Always in time for the stall timeout, never with a proof.
    while busy.ping().is_ok() {
        assert!(start.elapsed() < TIMEOUT);
    }
    assert!(start.elapsed() >= stall_timeout);
    assert_ended(&mut silent);
    assert_ended(&mut half);
    until(&mut kept, "cutting three off", |stats| stats.connections_timed_out == 3);
}

#[test]
fn a_server_without_a_secret_does_not_pretend() {
    let (_server, mut client) = start_with(config(1 << 20));
    let error = client.authenticate(&right()).unwrap_err();
    assert_eq!(error.status(), Some(Status::Unauthenticated));
    assert!(error.to_string().contains("no secret"), "{error}");
    assert!(client.ping().is_err(), "nothing is asked of it any more");
}
