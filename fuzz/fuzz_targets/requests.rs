//! Any bytes at all, in pieces of any size, to the server's decoder, and to the judge of proofs behind it. They
//! must end, not panic, not keep more than a small body, and believe no proof.
#![no_main]

use hotslice::auth::{Secret, ServerHandshake};
use hotslice::wire::{Limits, Op, RequestDecoder, RequestEvent, RequestHeader};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Some((&[piece, op], stream)) = data.split_first_chunk() else { return };
    run(piece, stream);
    // A fuzzer cannot guess checksums: the same bytes again as the body of a request whose header holds.
    let Some(op) = Op::from_wire(op) else { return };
    let mut request = Vec::new();
    RequestHeader { op, request_id: 1, body_len: stream.len() as u64 }.encode(&mut request);
    request.extend_from_slice(stream);
    run(piece, &request);
});

fn run(piece: u8, stream: &[u8]) {
    let mut decoder = RequestDecoder::new(Limits::default());
    let secret = Secret::new(b"a secret that no fuzzer guesses".to_vec().into()).expect("long enough");
    let mut handshake = ServerHandshake::new(secret);
    for mut input in stream.chunks(usize::from(piece).max(1)) {
        loop {
            match decoder.next(&mut input) {
                Ok(Some(RequestEvent::Challenge { nonce, .. })) => {
                    handshake.challenge(&nonce).expect("random bytes");
                }
                Ok(Some(RequestEvent::Authenticate { proof, .. })) => {
                    assert!(handshake.authenticate(&proof).is_none());
                }
                Ok(Some(_)) => {}
                Ok(None) => break,
                Err(error) if error.framing_lost => return,
                Err(_) => {}
            }
        }
    }
}
