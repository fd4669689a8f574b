//! The client against servers that lie, die or dawdle.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread::JoinHandle;
use std::time::Duration;

use super::{ClientError, SliceClient};
use crate::Error;
use crate::auth::Secret;
use crate::wire::{self, LookupEntry, Op, ResponseHeader, Status};

const TIMEOUT: Duration = Duration::from_secs(30);

/// A server for one connection: waits for the first bytes of a request, then does `script`.
fn scripted(script: impl FnOnce(&mut TcpStream) + Send + 'static) -> (SocketAddr, JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap();
    let thread = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut request = [0; 4096];
        assert!(stream.read(&mut request).unwrap() > 0);
        script(&mut stream);
    });
    (addr, thread)
}

/// What a get of "k" gives when the server answers with these bytes and ends.
fn get_answered(answer: Vec<u8>) -> Result<Option<super::Value>, ClientError> {
    let (addr, server) = scripted(move |stream| stream.write_all(&answer).unwrap());
    let mut client = SliceClient::connect(addr, TIMEOUT).unwrap();
    let result = client.get(b"", b"k");
    if matches!(&result, Err(ClientError::Protocol { .. } | ClientError::Io { .. })) {
        assert!(matches!(client.ping(), Err(ClientError::Ended { .. })), "unusable after {result:?}");
    }
    server.join().unwrap();
    result
}

fn ok_header(body: &[u8]) -> ResponseHeader {
    ResponseHeader {
        body_len: body.len() as u64,
        value_len: body.len() as u64,
        value_version: 1,
        value_crc32c: crc32c::crc32c(body),
        ..ResponseHeader::plain(Status::Ok, Some(Op::Get), 1)
    }
}

fn frame(header: ResponseHeader, body: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    header.encode(&mut bytes);
    bytes.extend_from_slice(body);
    bytes
}

#[test]
fn an_honest_answer_is_taken_and_lies_are_not() {
    let header = ok_header(b"value");
    assert_eq!(get_answered(frame(header, b"value")).unwrap().unwrap().bytes, b"value");

    let result = get_answered(frame(header, b"Value"));
    assert!(matches!(result, Err(ClientError::Checksum { .. })), "{result:?}");

    let lies = [
        ResponseHeader { request_id: 2, ..header },
        ResponseHeader { op: Some(Op::Put), body_len: 0, ..header },
        ResponseHeader { value_len: 6, ..header },
        ResponseHeader { value_len: 6, range_offset: 1, ..header },
        ResponseHeader { body_len: 6, ..header },
    ];
    for lie in lies {
        let result = get_answered(frame(lie, b"value"));
        assert!(matches!(result, Err(ClientError::Protocol { .. })), "{lie:?}: {result:?}");
    }
    let result = get_answered(vec![b'x'; 200]);
    assert!(matches!(result, Err(ClientError::Protocol { .. })), "{result:?}");
}

#[test]
fn a_server_that_ends_early_is_an_error() {
    let whole = frame(ok_header(b"value"), b"value");
    for len in [0, 1, 63, 64, 66] {
        let result = get_answered(whole[..len].to_vec());
        assert!(matches!(result, Err(ClientError::Io { .. })), "{len}: {result:?}");
    }
    // A length of a terabyte costs neither memory nor a panic.
    let huge = ResponseHeader { body_len: 1 << 40, value_len: 1 << 40, ..ok_header(b"") };
    let result = get_answered(frame(huge, b"little"));
    assert!(matches!(result, Err(ClientError::Io { .. } | ClientError::OutOfMemory { .. })), "{result:?}");
}

#[test]
fn refusals_carry_the_reason_without_control_characters() {
    let mut answer = Vec::new();
    let header = ResponseHeader::plain(Status::Busy, None, 0);
    wire::encode_error(&mut answer, header, "too many\u{1b}[2J");
    let Err(error) = get_answered(answer) else { panic!("a refusal expected") };
    assert_eq!(error.status(), Some(Status::Busy));
    let text = error.to_string();
    assert!(text.contains("too many") && !text.contains('\u{1b}'), "{text}");
    assert!(matches!(Error::from(error), Error::Refused { .. }));
}

#[test]
fn a_lookup_with_too_few_entries_is_an_error() {
    let mut answer = Vec::new();
    ResponseHeader::lookup(1, 1).encode(&mut answer);
    LookupEntry::ABSENT.encode(&mut answer);
    let (addr, server) = scripted(move |stream| stream.write_all(&answer).unwrap());
    let mut client = SliceClient::connect(addr, TIMEOUT).unwrap();
    let result = client.lookup(&[(b"", b"a"), (b"", b"b")]);
    assert!(matches!(result, Err(ClientError::Protocol { .. })), "{result:?}");
    server.join().unwrap();
}

#[test]
fn silence_and_dawdling_end_at_the_deadline() {
    // Silent until the client has given up.
    let (addr, server) = scripted(|stream| {
        let _ = stream.read(&mut [0]);
    });
    let mut client = SliceClient::connect(addr, Duration::from_millis(50)).unwrap();
    let result = client.get(b"", b"k");
    assert!(matches!(result, Err(ClientError::TimedOut { .. })), "{result:?}");
    drop(client);
    server.join().unwrap();

    // One byte every few milliseconds, each well within the timeout of one wait.
    let (addr, server) = scripted(|stream| {
        for byte in frame(ok_header(&[7; 100_000]), &[7; 100_000]) {
            if stream.write_all(&[byte]).is_err() {
                return;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    });
    let mut client = SliceClient::connect(addr, Duration::from_millis(60)).unwrap();
    let result = client.get(b"", b"k");
    assert!(matches!(result, Err(ClientError::TimedOut { .. })), "{result:?}");
    drop(client);
    server.join().unwrap();
}

#[test]
fn a_server_that_proves_nothing_is_not_believed() {
    let token = |op, id| {
        let mut answer = Vec::new();
        wire::encode_token(&mut answer, op, id, &[7; 32]);
        answer
    };
    let (addr, server) = scripted(move |stream| {
        stream.write_all(&token(Op::Challenge, 1)).unwrap();
        let mut request = [0; wire::REQUEST_HEADER_BYTES + wire::TOKEN_BYTES];
        stream.read_exact(&mut request).unwrap();
        stream.write_all(&token(Op::Authenticate, 2)).unwrap();
    });
    let secret = Secret::new(b"a secret of the right length".to_vec().into()).unwrap();
    let mut client = SliceClient::connect(addr, TIMEOUT).unwrap();
    let error = client.authenticate(&secret).unwrap_err();
    assert!(matches!(error, ClientError::ServerProof { .. }), "{error}");
    assert!(matches!(client.ping(), Err(ClientError::Ended { .. })));
    server.join().unwrap();
}

#[test]
fn nobody_there_and_impossible_keys_are_told_apart() {
    let addr = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let error = SliceClient::connect(addr, TIMEOUT).unwrap_err();
    assert!(matches!(error, ClientError::Connect { .. }), "{error}");
    assert!(matches!(Error::from(error), Error::PeerUnavailable { .. }));

    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut client = SliceClient::connect(listener.local_addr().unwrap(), TIMEOUT).unwrap();
    let error = client.get(b"", b"").unwrap_err();
    assert!(matches!(Error::from(error), Error::KeyLength { len: 0, max: 4096 }));
    let error = client.put(&[0; 256], b"k", b"").unwrap_err();
    assert!(matches!(error, ClientError::Request(wire::WireError::NamespaceLength { got: 256, .. })));
}
