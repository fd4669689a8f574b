use super::*;
use proptest::collection::vec;
use proptest::prelude::*;

/// An event with what it borrows, so that runs can be compared. Pieces of one value are joined.
#[derive(Clone, Debug, PartialEq)]
enum Seen {
    Get { id: u64, ns: Vec<u8>, key: Vec<u8>, offset: u64, len: u64, version: u64 },
    Lookup { id: u64, keys: Vec<(Vec<u8>, Vec<u8>)> },
    Put { id: u64, ns: Vec<u8>, key: Vec<u8>, crc: u32, len: u64, value: Vec<u8>, ended: bool },
    Remove { id: u64, ns: Vec<u8>, key: Vec<u8> },
    Ping { id: u64 },
    Stats { id: u64 },
    Challenge { id: u64, nonce: [u8; 32] },
    Authenticate { id: u64, proof: [u8; 32] },
    Error(RequestError),
}

fn note(seen: &mut Vec<Seen>, event: RequestEvent<'_>) {
    seen.push(match event {
        RequestEvent::Get { request_id: id, get } => Seen::Get {
            id,
            ns: get.key.namespace.to_vec(),
            key: get.key.key.to_vec(),
            offset: get.range_offset,
            len: get.range_len,
            version: get.expected_version,
        },
        RequestEvent::Lookup { request_id: id, lookup } => {
            assert_eq!(lookup.iter().count(), lookup.len());
            let keys = lookup.iter().map(|k| (k.namespace.to_vec(), k.key.to_vec())).collect();
            Seen::Lookup { id, keys }
        }
        RequestEvent::PutStart { request_id: id, put } => Seen::Put {
            id,
            ns: put.key.namespace.to_vec(),
            key: put.key.key.to_vec(),
            crc: put.value_crc32c,
            len: put.value_len,
            value: vec![],
            ended: false,
        },
        RequestEvent::PutBytes(bytes) => {
            assert!(!bytes.is_empty());
            match seen.last_mut() {
                Some(Seen::Put { value, ended: false, .. }) => value.extend_from_slice(bytes),
                other => panic!("bytes of a value after {other:?}"),
            }
            return;
        }
        RequestEvent::PutEnd { request_id } => {
            match seen.last_mut() {
                Some(Seen::Put { id, ended, value, len, .. }) => {
                    assert_eq!((*id, *ended, *len), (request_id, false, value.len() as u64));
                    *ended = true;
                }
                other => panic!("end of a value after {other:?}"),
            }
            return;
        }
        RequestEvent::Remove { request_id: id, key } => {
            Seen::Remove { id, ns: key.namespace.to_vec(), key: key.key.to_vec() }
        }
        RequestEvent::Ping { request_id: id } => Seen::Ping { id },
        RequestEvent::Stats { request_id: id } => Seen::Stats { id },
        RequestEvent::Challenge { request_id: id, nonce } => Seen::Challenge { id, nonce },
        RequestEvent::Authenticate { request_id: id, proof } => Seen::Authenticate { id, proof },
    });
}

/// Feeds the pieces; stops at lost framing. Also returns whether the stream ended between requests.
fn run<'a>(pieces: impl IntoIterator<Item = &'a [u8]>, limits: Limits) -> (Vec<Seen>, bool) {
    let mut decoder = RequestDecoder::new(limits);
    let mut seen = Vec::new();
    for piece in pieces {
        let mut input = piece;
        loop {
            match decoder.next(&mut input) {
                Ok(Some(event)) => note(&mut seen, event),
                Ok(None) => break,
                Err(error) => {
                    seen.push(Seen::Error(error));
                    if error.framing_lost {
                        return (seen, false);
                    }
                }
            }
            assert!(decoder.buffer_capacity() <= 2 * limits.small_body_bytes_max.max(1 << 16));
        }
        assert!(input.is_empty());
    }
    (seen, decoder.at_boundary())
}

/// The stream cut at the given positions.
fn cut<'a>(stream: &'a [u8], cuts: &[prop::sample::Index]) -> Vec<&'a [u8]> {
    let mut at: Vec<usize> = cuts.iter().map(|cut| cut.index(stream.len() + 1)).collect();
    at.extend([0, stream.len()]);
    at.sort_unstable();
    at.windows(2).map(|pair| &stream[pair[0]..pair[1]]).collect()
}

impl Seen {
    fn encode(&self, out: &mut Vec<u8>) {
        match self {
            Seen::Get { id, ns, key, offset, len, version } => {
                encode_get(out, *id, ns, key, *offset, *len, *version).unwrap();
            }
            Seen::Lookup { id, keys } => {
                let pairs = keys.iter().map(|(ns, key)| (&ns[..], &key[..]));
                assert_eq!(encode_lookup(out, *id, pairs, &Limits::default()).unwrap(), keys.len());
            }
            Seen::Put { id, ns, key, crc, len, value, .. } => {
                encode_put_head(out, *id, ns, key, *len, *crc).unwrap();
                out.extend_from_slice(value);
            }
            Seen::Remove { id, ns, key } => encode_remove(out, *id, ns, key).unwrap(),
            Seen::Ping { id } => encode_ping(out, *id),
            Seen::Stats { id } => encode_stats(out, *id),
            Seen::Challenge { id, nonce } => encode_challenge(out, *id, nonce),
            Seen::Authenticate { id, proof } => encode_authenticate(out, *id, proof),
            Seen::Error(_) => unreachable!("errors are not sent"),
        }
    }
}

fn namespace() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![vec(any::<u8>(), 0..8), Just(vec![7; MAX_NAMESPACE_BYTES])]
}

fn key() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![8 => vec(any::<u8>(), 1..20), 1 => Just(vec![9; MAX_KEY_BYTES])]
}

fn request() -> impl Strategy<Value = Seen> {
    let get = (any::<u64>(), namespace(), key(), any::<u64>(), any::<u64>(), any::<u64>())
        .prop_map(|(id, ns, key, offset, len, version)| Seen::Get { id, ns, key, offset, len, version });
    let lookup =
        (any::<u64>(), vec((namespace(), key()), 0..20)).prop_map(|(id, keys)| Seen::Lookup { id, keys });
    let put = (any::<u64>(), namespace(), key(), any::<u32>(), vec(any::<u8>(), 0..300)).prop_map(
        |(id, ns, key, crc, value)| {
            let len = value.len() as u64;
            Seen::Put { id, ns, key, crc, len, value, ended: true }
        },
    );
    let remove = (any::<u64>(), namespace(), key()).prop_map(|(id, ns, key)| Seen::Remove { id, ns, key });
    prop_oneof![
        get,
        lookup,
        put,
        remove,
        any::<u64>().prop_map(|id| Seen::Ping { id }),
        any::<u64>().prop_map(|id| Seen::Stats { id }),
        any::<(u64, [u8; 32])>().prop_map(|(id, nonce)| Seen::Challenge { id, nonce }),
        any::<(u64, [u8; 32])>().prop_map(|(id, proof)| Seen::Authenticate { id, proof }),
    ]
}

fn stream_of(requests: &[Seen]) -> Vec<u8> {
    let mut stream = Vec::new();
    requests.iter().for_each(|request| request.encode(&mut stream));
    stream
}

fn status() -> impl Strategy<Value = Status> {
    (0u16..=12).prop_map(|n| Status::from_wire(n * 10).unwrap())
}

fn response() -> impl Strategy<Value = ResponseHeader> {
    let op = prop::option::of((1u8..=8).prop_map(|n| Op::from_wire(n).unwrap()));
    let lens = (0..=MAX_VALUE_BYTES, any::<u64>(), any::<u64>(), any::<prop::sample::Index>());
    (status(), op, any::<u64>(), lens, any::<u32>()).prop_map(|(status, op, request_id, lens, crc)| {
        let (value_len, value_version, offset, pick) = lens;
        let op = if status == Status::Ok { Some(op.unwrap_or(Op::Get)) } else { op };
        let mut range_offset = offset;
        let body_len = match (status, op) {
            (Status::Ok, Some(Op::Get)) => {
                range_offset = offset % (value_len + 1);
                (value_len - range_offset).min(pick.index(1 << 30) as u64)
            }
            (Status::Ok, Some(Op::Lookup)) => (pick.index(MAX_LOOKUP_KEYS + 1) * LOOKUP_ENTRY_BYTES) as u64,
            (Status::Ok, Some(Op::Stats)) => pick.index(MAX_STATS_BYTES + 1) as u64,
            (Status::Ok, Some(Op::Challenge | Op::Authenticate)) => TOKEN_BYTES as u64,
            (Status::Ok, _) => 0,
            _ => pick.index(MAX_REASON_BYTES + 1) as u64,
        };
        ResponseHeader {
            status,
            op,
            request_id,
            body_len,
            value_len,
            value_version,
            range_offset,
            value_crc32c: crc,
        }
    })
}

proptest! {
    #[test]
    fn requests_come_out_as_they_went_in_however_they_are_cut(
        requests in vec(request(), 0..6),
        cuts in vec(any::<prop::sample::Index>(), 0..12),
    ) {
        let stream = stream_of(&requests);
        prop_assert_eq!(run(cut(&stream, &cuts), Limits::default()), (requests.clone(), true));
    }

    #[test]
    fn one_byte_at_a_time_is_a_split_too(requests in vec(request(), 1..3)) {
        let stream = stream_of(&requests);
        prop_assert_eq!(run(stream.chunks(1), Limits::default()), (requests, true));
    }

    #[test]
    fn a_mutated_byte_gives_the_same_outcome_in_every_split(
        requests in vec(request(), 1..4),
        at in any::<prop::sample::Index>(),
        flip in 1u8..,
        cuts in vec(any::<prop::sample::Index>(), 0..6),
    ) {
        let mut stream = stream_of(&requests);
        let at = at.index(stream.len());
        stream[at] ^= flip;
        let whole = run([&stream[..]], Limits::default());
        // Never taken for the original: the byte is either in a checked header or part of the content.
        prop_assert_ne!(&whole.0, &requests);
        prop_assert_eq!(run(cut(&stream, &cuts), Limits::default()), whole);
    }

    #[test]
    fn a_truncated_stream_is_not_at_a_boundary(
        requests in vec(request(), 1..3), at in any::<prop::sample::Index>(),
    ) {
        let stream = stream_of(&requests);
        let mut ends = vec![0];
        for count in 1..=requests.len() {
            ends.push(stream_of(&requests[..count]).len());
        }
        let at = at.index(stream.len());
        let (seen, at_boundary) = run([&stream[..at]], Limits::default());
        prop_assert_eq!(at_boundary, ends.contains(&at));
        prop_assert!(seen.len() <= requests.len());
    }

    #[test]
    fn arbitrary_bytes_never_panic(bytes in vec(any::<u8>(), 0..600), op in 0u8..10, body_len in any::<u64>()) {
        run([&bytes[..]], Limits::default());
        // Behind a header whose checksum holds, so that the body's parser is reached.
        let op = Op::from_wire(op).unwrap_or(Op::Get);
        for body_len in [bytes.len() as u64, body_len] {
            let mut stream = Vec::new();
            RequestHeader { op, request_id: 1, body_len }.encode(&mut stream);
            stream.extend_from_slice(&bytes);
            run([&stream[..]], Limits::default());
        }
        if let Some(bytes) = bytes.first_chunk() {
            let _ = ResponseHeader::decode(bytes);
        }
        if let Some(bytes) = bytes.first_chunk() {
            let _ = LookupEntry::decode(bytes);
        }
        let text = reason_text(&bytes);
        prop_assert!(!text.contains(char::is_control));
    }

    #[test]
    fn response_headers_come_out_as_they_went_in(header in response()) {
        let mut bytes = [0xaa; RESPONSE_HEADER_BYTES];
        header.encode_into(&mut bytes);
        prop_assert_eq!(ResponseHeader::decode(&bytes), Ok(header));
    }

    #[test]
    fn a_mutated_response_header_is_refused(header in response(), at in 0..RESPONSE_HEADER_BYTES, flip in 1u8..) {
        let mut bytes = [0; RESPONSE_HEADER_BYTES];
        header.encode_into(&mut bytes);
        bytes[at] ^= flip;
        prop_assert!(ResponseHeader::decode(&bytes).is_err());
    }

    #[test]
    fn response_headers_with_a_true_checksum_and_other_fields_keep_their_promises(
        header in response(), at in 0..60usize, value in any::<u64>(),
    ) {
        let mut bytes = [0; RESPONSE_HEADER_BYTES];
        header.encode_into(&mut bytes);
        let end = (at + 8).min(60);
        bytes[at..end].copy_from_slice(&value.to_le_bytes()[..end - at]);
        let checksum = crc32c::crc32c(&bytes[..60]);
        bytes[60..].copy_from_slice(&checksum.to_le_bytes());
        if let Ok(header) = ResponseHeader::decode(&bytes) {
            prop_assert!(header.value_len <= MAX_VALUE_BYTES);
            match (header.status, header.op) {
                (Status::Ok, Some(Op::Get)) => {
                    prop_assert!(header.range_offset.checked_add(header.body_len).unwrap() <= header.value_len);
                }
                (Status::Ok, op) => prop_assert!(op.is_some() && header.body_len <= 24 * 16_384),
                _ => prop_assert!(header.body_len <= 512),
            }
        }
    }

    #[test]
    fn lookup_entries_come_out_as_they_went_in(
        status in status(), crc32c in any::<u32>(), value_len in 0..=MAX_VALUE_BYTES, version in any::<u64>(),
    ) {
        let entry = LookupEntry { status, crc32c, value_len, version };
        let mut bytes = Vec::new();
        entry.encode(&mut bytes);
        prop_assert_eq!(LookupEntry::decode(bytes.first_chunk().unwrap()), Ok(entry));
        prop_assert_eq!(bytes.len(), LOOKUP_ENTRY_BYTES);
    }
}

/// A header with a true checksum over whatever `change` did.
fn request_header(op: Op, body_len: u64, change: impl Fn(&mut [u8; REQUEST_HEADER_BYTES])) -> Vec<u8> {
    let mut bytes = [0; REQUEST_HEADER_BYTES];
    RequestHeader { op, request_id: 77, body_len }.encode_into(&mut bytes);
    change(&mut bytes);
    let checksum = crc32c::crc32c(&bytes[..36]);
    bytes[36..].copy_from_slice(&checksum.to_le_bytes());
    bytes.to_vec()
}

fn only_error(stream: &[u8]) -> RequestError {
    match &run([stream], Limits::default()).0[..] {
        [Seen::Error(error)] => *error,
        other => panic!("one error expected, not {other:?}"),
    }
}

#[test]
fn each_field_of_a_request_header_is_judged() {
    let huge = 1u64 << 63;
    for op in [Op::Get, Op::Lookup, Op::Remove, Op::Ping, Op::Stats, Op::Challenge, Op::Authenticate] {
        let error = only_error(&request_header(op, huge, |_| {}));
        assert!(matches!(error.error, WireError::BodyLength { got, .. } if got == huge), "{error:?}");
        assert!(error.framing_lost);
        assert_eq!((error.request_id, error.op), (77, Some(op)));
    }
    let error = only_error(&request_header(Op::Put, huge, |_| {}));
    assert!(matches!(error.error, WireError::ValueLength { .. }), "{error:?}");
    assert_eq!(error.error.status(), Status::TooLarge);

    let error = only_error(&request_header(Op::Ping, 0, |b| b[0] = b'h'));
    assert!(matches!(error.error, WireError::Magic { .. }), "{error:?}");
    let error = only_error(&request_header(Op::Ping, 0, |b| b[4] = 2));
    assert_eq!(
        (error.error, error.error.status()),
        (WireError::Version { got: 2 }, Status::UnsupportedVersion)
    );
    for (at, field) in [(6, "flags"), (24, "reserved"), (31, "reserved"), (35, "reserved")] {
        let error = only_error(&request_header(Op::Ping, 0, |b| b[at] = 1));
        assert!(matches!(error.error, WireError::Reserved { field: got, .. } if got == field), "{error:?}");
        assert_eq!(error.request_id, 77);
    }
    for op in [0, 9, 255] {
        let error = only_error(&request_header(Op::Ping, 0, |b| b[5] = op));
        assert_eq!(error.error, WireError::Op { got: op });
    }
    let mut stream = request_header(Op::Ping, 0, |_| {});
    stream[39] ^= 1;
    let error = only_error(&stream);
    assert!(matches!(error.error, WireError::HeaderChecksum { .. }), "{error:?}");
    assert_eq!((error.request_id, error.op), (0, None));
}

#[test]
fn nonces_and_proofs_have_one_length() {
    for op in [Op::Challenge, Op::Authenticate] {
        for len in [0, 31, 33, 64] {
            let error = only_error(&request_header(op, len, |_| {}));
            assert!(matches!(error.error, WireError::BodyLength { min: 32, max: 32, .. }), "{error:?}");
            assert!(error.framing_lost);
            let header = ResponseHeader { body_len: len, ..ResponseHeader::plain(Status::Ok, Some(op), 1) };
            let mut bytes = [0; RESPONSE_HEADER_BYTES];
            header.encode_into(&mut bytes);
            let error = ResponseHeader::decode(&bytes).unwrap_err();
            assert!(matches!(error, WireError::BodyLength { min: 32, max: 32, .. }), "{error:?}");
        }
        let mut bytes = Vec::new();
        encode_token(&mut bytes, op, 3, &[9; 32]);
        let header = ResponseHeader::decode(bytes.first_chunk().unwrap()).unwrap();
        assert_eq!((header.op, header.request_id, header.body_len), (Some(op), 3, 32));
        assert_eq!(bytes[RESPONSE_HEADER_BYTES..], [9; 32]);
    }
}

#[test]
fn limits_may_change_between_requests() {
    let mut stream = Vec::new();
    for id in 0..2 {
        encode_get(&mut stream, id, b"", b"0123456789", 0, RANGE_TO_END, ANY_VERSION).unwrap();
    }
    let mut decoder = RequestDecoder::new(Limits { small_body_bytes_max: 32, ..Limits::default() });
    let mut first = &stream[..];
    let error = decoder.next(&mut first).unwrap_err();
    assert!(matches!(error.error, WireError::BodyLength { got: 38, max: 32, .. }), "{error:?}");
    let mut decoder = RequestDecoder::new(Limits::default());
    let mut input = &stream[..];
    assert!(decoder.next(&mut input).unwrap().is_some());
    decoder.set_limits(Limits { small_body_bytes_max: 32, ..Limits::default() });
    assert!(decoder.next(&mut input).is_err());
}

#[test]
fn a_bad_body_costs_its_own_request_only() {
    let mut stream = request_header(Op::Remove, 7, |_| {});
    stream.extend_from_slice(&[0, 0, 0, 0, 1, 2, 3]);
    // A Put with an empty key, and one whose lengths do not add up: their values are skipped.
    let mut put = |key_len: u8, value_len: u64| {
        stream.extend_from_slice(&request_header(Op::Put, 16 + 100, |_| {}));
        stream.extend_from_slice(&[0, 0, key_len, 0, 0, 0, 0, 0]);
        stream.extend_from_slice(&value_len.to_le_bytes());
        stream.extend_from_slice(&[b'x'; 100]);
    };
    put(0, 100);
    put(10, 91);
    let mut lookup = request_header(Op::Lookup, 4, |_| {});
    lookup.extend_from_slice(&(MAX_LOOKUP_KEYS as u32 + 1).to_le_bytes());
    stream.extend_from_slice(&lookup);
    encode_ping(&mut stream, 5);
    for pieces in [vec![&stream[..]], stream.chunks(1).collect(), stream.chunks(7).collect()] {
        let (seen, at_boundary) = run(pieces, Limits::default());
        let errors: Vec<_> = seen[..4]
            .iter()
            .map(|seen| match seen {
                Seen::Error(RequestError { error, request_id: 77, framing_lost: false, .. }) => *error,
                other => panic!("{other:?}"),
            })
            .collect();
        assert!(matches!(errors[0], WireError::KeyLength { got: 0, max: 4096 }));
        assert!(matches!(errors[1], WireError::KeyLength { got: 0, max: 4096 }));
        assert!(matches!(errors[2], WireError::BodyMismatch { body_len: 116, contents_len: 117 }));
        assert!(matches!(errors[3], WireError::LookupCount { got: 16_385, max: 16_384 }));
        assert_eq!(seen[4..], [Seen::Ping { id: 5 }]);
        assert!(at_boundary);
    }
}

#[test]
fn value_bytes_may_go_past_the_decoder() {
    let mut stream = Vec::new();
    encode_put_head(&mut stream, 3, b"", b"key", 1000, 0).unwrap();
    stream.extend_from_slice(&[1; 10]);
    let mut decoder = RequestDecoder::new(Limits::default());
    let mut input = &stream[..];
    assert!(matches!(decoder.next(&mut input), Ok(Some(RequestEvent::PutStart { .. }))));
    assert_eq!(decoder.value_bytes_wanted(), 1000);
    assert_eq!(decoder.next(&mut input), Ok(Some(RequestEvent::PutBytes(&[1; 10]))));
    assert_eq!(decoder.next(&mut input), Ok(None));
    decoder.value_received(900);
    assert_eq!(decoder.value_bytes_wanted(), 90);
    assert!(!decoder.at_boundary());
    decoder.value_received(90);
    assert_eq!(decoder.next(&mut input), Ok(Some(RequestEvent::PutEnd { request_id: 3 })));
    assert!(decoder.at_boundary());
}

#[test]
fn encoders_refuse_what_the_decoder_would() {
    let mut out = vec![1];
    let long_key = [0; MAX_KEY_BYTES + 1];
    let long_namespace = [0; MAX_NAMESPACE_BYTES + 1];
    for (namespace, key) in [(&b""[..], &b""[..]), (b"", &long_key), (&long_namespace, b"k")] {
        assert!(encode_get(&mut out, 1, namespace, key, 0, 1, 0).is_err());
        assert!(encode_put_head(&mut out, 1, namespace, key, 0, 0).is_err());
        assert!(encode_remove(&mut out, 1, namespace, key).is_err());
        let keys = [(&b"n"[..], &b"good"[..]), (namespace, key)];
        assert!(encode_lookup(&mut out, 1, keys, &Limits::default()).is_err());
    }
    assert!(encode_put_head(&mut out, 1, b"", b"k", MAX_VALUE_BYTES + 1, 0).is_err());
    assert_eq!(out, [1]);
}

#[test]
fn a_lookup_takes_what_fits_and_says_how_much() {
    let key = [5u8; MAX_KEY_BYTES];
    let many = || std::iter::repeat_n((&b"ns"[..], &key[..]), 300);
    let mut out = Vec::new();
    let taken = encode_lookup(&mut out, 1, many(), &Limits::default()).unwrap();
    assert_eq!(taken, (MAX_SMALL_BODY_BYTES - 4) / (4 + 2 + MAX_KEY_BYTES));
    let small = std::iter::repeat_n((&b""[..], &b"k"[..]), MAX_LOOKUP_KEYS + 5);
    assert_eq!(encode_lookup(&mut out, 2, small, &Limits::default()).unwrap(), MAX_LOOKUP_KEYS);
    let (seen, at_boundary) = run(out.chunks(1000), Limits::default());
    let counts: Vec<_> = seen
        .iter()
        .map(|seen| match seen {
            Seen::Lookup { keys, .. } => keys.len(),
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!((counts, at_boundary), (vec![taken, MAX_LOOKUP_KEYS], true));
}

#[test]
fn numbers_on_the_wire_are_fixed() {
    let mut out = Vec::new();
    encode_get(&mut out, 0x0102_0304_0506_0708, b"n", b"key", 9, RANGE_TO_END, ANY_VERSION).unwrap();
    assert_eq!(out[..8], *b"HSQ1\x01\x01\x00\x00");
    assert_eq!(out[8..24], [8, 7, 6, 5, 4, 3, 2, 1, 32, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(out[24..36], [0; 12]);
    assert_eq!(out[36..40], crc32c::crc32c(&out[..36]).to_le_bytes());
    assert_eq!(out[64..], *b"\x01\x00\x03\x00nkey");
    let mut out = Vec::new();
    let header = ResponseHeader::plain(Status::Busy, None, 1);
    encode_error(&mut out, header, &"ü".repeat(400));
    assert_eq!(out[..8], *b"HSR1\x01\x00\x64\x00");
    assert_eq!(out.len(), RESPONSE_HEADER_BYTES + MAX_REASON_BYTES);
    let decoded = ResponseHeader::decode(out.first_chunk().unwrap()).unwrap();
    assert_eq!(decoded.body_len, 512);
    assert_eq!(reason_text(&out[64..]), "ü".repeat(256));
}
