//! Promises 1 and 10: a lying peer never makes wrong bytes a value, and never makes the cache panic.

use hotslice::wire::{MAX_REASON_BYTES, Op, ResponseHeader, Status};
use hotslice::{Cache, Error, Key};
use hotslice_tests::content::{self, name};
use hotslice_tests::gauges::{alone, finish};
use hotslice_tests::origin::{Ask, FakeOrigin, Line, Then, value_header};
use hotslice_tests::setup::{MIB, config, open, open_with, soon};

/// An origin that lies about `bad` and serves other keys, and a cache in front of it.
fn lying(lie: impl Fn(&Ask, &mut Line) -> Then + Send + Sync + 'static) -> (FakeOrigin, Cache) {
    let origin = FakeOrigin::start(move |ask, line| {
        if ask.key == b"bad" {
            return lie(ask, line);
        }
        line.answer_by_name(ask);
        Then::GoOn
    });
    let mut config = config(8 * MIB, &[origin.address()]);
    config.receive_timeout_ms = 500;
    let cache = open_with(config);
    (origin, cache)
}

/// `bad` fails with what `is` recognises, is not in the cache, and others are served before and after.
#[track_caller]
fn is_found_out(
    lie: impl Fn(&Ask, &mut Line) -> Then + Send + Sync + 'static,
    is: fn(&Error) -> bool,
    words: &str,
) {
    let (_origin, cache) = lying(lie);
    let get = |i: usize| {
        let name = name(50_000 + i, i);
        let lease = cache.get(&name, soon()).unwrap().unwrap();
        content::check_lease(name.as_bytes(), 1, 50_000 + i, &lease);
    };
    get(0);
    let error = cache.get("bad", soon()).expect_err("a lie is an error");
    assert!(is(&error), "{error:?}");
    assert!(error.to_string().contains(words), "{error}");
    assert!(!cache.contains("bad").unwrap());
    get(1);
    finish(cache);
}

fn protocol(error: &Error) -> bool {
    matches!(error, Error::Protocol { .. })
}

/// A right header for 5,000 bytes, to be spoilt.
fn header(ask: &Ask) -> ResponseHeader {
    value_header(ask, 1, &content::bytes(&ask.key, 1, 5000))
}

/// Sends a header that `spoil` changed, with a right checksum of its own, then 5,000 bytes or as many as it announces.
fn spoilt(spoil: impl Fn(&mut ResponseHeader) + Send + Sync + 'static) -> impl Fn(&Ask, &mut Line) -> Then {
    move |ask, line| {
        let mut header = header(ask);
        spoil(&mut header);
        line.header(&header);
        let announced = usize::try_from(header.body_len).ok().filter(|len| *len <= MIB).unwrap_or(0);
        line.raw(&content::bytes(&ask.key, 1, announced.max(5000)));
        Then::GoOn
    }
}

/// Sends a right header of which one byte is changed, and the checksum too if asked for.
fn spoilt_byte(at: usize, mask: u8, right_checksum: bool) -> impl Fn(&Ask, &mut Line) -> Then {
    move |ask, line| {
        let mut bytes = Vec::new();
        header(ask).encode(&mut bytes);
        bytes[at] ^= mask;
        if right_checksum {
            let checksum = crc32c::crc32c(&bytes[..60]);
            bytes[60..].copy_from_slice(&checksum.to_le_bytes());
        }
        line.raw(&bytes);
        line.raw(&content::bytes(&ask.key, 1, 5000));
        Then::GoOn
    }
}

#[test]
fn a_wrong_checksum_of_the_value() {
    alone(|| {
        is_found_out(
            spoilt(|header| header.value_crc32c ^= 1),
            |error| matches!(error, Error::Checksum { got, want, .. } if got ^ want == 1),
            "checksum mismatch",
        );
    });
}

#[test]
fn one_wrong_bit_in_the_value() {
    alone(|| {
        for at in [0, 4095, 4096, 4999] {
            is_found_out(
                move |ask, line| {
                    line.header(&header(ask));
                    let mut value = content::bytes(&ask.key, 1, 5000);
                    value[at] ^= 0x10;
                    line.raw(&value);
                    Then::GoOn
                },
                |error| matches!(error, Error::Checksum { .. }),
                "checksum mismatch",
            );
        }
    });
}

#[test]
fn a_checksum_error_keeps_the_connection_and_is_counted() {
    alone(|| {
        let (origin, cache) = lying(spoilt(|header| header.value_crc32c ^= 1));
        for _ in 0..3 {
            assert!(matches!(cache.get("bad", soon()), Err(Error::Checksum { .. })));
        }
        assert_eq!((cache.stats().checksum_failures, origin.seen().connections), (3, 1));
        finish(cache);
    });
}

#[test]
fn wrong_magic_version_flags_operation_or_header_checksum() {
    alone(|| {
        for (at, mask) in [(0, 0x20), (3, 1), (4, 2), (4, 0xff), (5, 0x40), (7, 0x80), (52, 1), (59, 1)] {
            is_found_out(spoilt_byte(at, mask, true), protocol, "broke the protocol");
        }
        for at in [8, 16, 24, 48, 60, 63] {
            is_found_out(spoilt_byte(at, 1, false), protocol, "broke the protocol");
        }
    });
}

#[test]
fn another_protocol_version_is_named() {
    alone(|| is_found_out(spoilt_byte(4, 3, true), protocol, "version"));
}

#[test]
fn a_length_of_2_to_the_63() {
    alone(|| {
        const HUGE: u64 = 1 << 63;
        is_found_out(spoilt(|header| header.body_len = HUGE), protocol, "broke the protocol");
        is_found_out(spoilt(|header| header.value_len = HUGE), protocol, "broke the protocol");
        is_found_out(
            spoilt(|header| (header.value_len, header.body_len) = (HUGE, HUGE)),
            protocol,
            "broke the protocol",
        );
        is_found_out(
            spoilt(|header| (header.range_offset, header.body_len) = (u64::MAX, 2)),
            protocol,
            "broke the protocol",
        );
    });
}

#[test]
fn a_value_larger_than_the_arena_is_no_lie_but_too_large() {
    alone(|| {
        for len in [8 * MIB as u64 + 1, 1 << 40] {
            is_found_out(
                spoilt(move |header| (header.value_len, header.body_len) = (len, MIB as u64)),
                |error| matches!(error, Error::ValueTooLarge { .. }),
                "cannot fit",
            );
        }
    });
}

#[test]
fn a_part_of_the_value_for_the_whole() {
    alone(|| {
        is_found_out(spoilt(|header| header.body_len = 4999), protocol, "whole value");
        is_found_out(
            spoilt(|header| (header.range_offset, header.body_len) = (1, 4999)),
            protocol,
            "whole value",
        );
    });
}

#[test]
fn another_operations_answer() {
    alone(|| {
        for op in [Op::Lookup, Op::Put, Op::Ping, Op::Stats] {
            is_found_out(
                move |ask, line| {
                    line.header(&ResponseHeader::plain(Status::Ok, Some(op), ask.request_id));
                    Then::GoOn
                },
                protocol,
                "broke the protocol",
            );
        }
    });
}

#[test]
fn an_answer_to_a_request_that_was_never_made() {
    alone(|| {
        for id in [0, 1 << 40, u64::MAX] {
            is_found_out(spoilt(move |header| header.request_id = id), protocol, "not outstanding");
        }
    });
}

#[test]
fn a_reason_longer_than_allowed() {
    alone(|| {
        is_found_out(
            |ask, line| {
                let plain = ResponseHeader::plain(Status::Internal, Some(Op::Get), ask.request_id);
                line.header(&ResponseHeader { body_len: MAX_REASON_BYTES as u64 + 1, ..plain });
                line.raw(&[b'x'; MAX_REASON_BYTES + 1]);
                Then::GoOn
            },
            protocol,
            "broke the protocol",
        );
    });
}

#[test]
fn a_refusal_without_a_request() {
    alone(|| {
        is_found_out(
            |_, line| {
                line.header(&ResponseHeader::plain(Status::UnsupportedVersion, None, 0));
                Then::Close
            },
            protocol,
            "unsupported protocol version",
        );
    });
}

/// The right answer, and then something more: the value stands, the connection does not.
fn more_after_the_answer(more: impl Fn(&Ask, &mut Line) + Send + Sync + 'static) {
    let (origin, cache) = lying(move |ask, line| {
        line.content(ask, 1, 5000);
        more(ask, line);
        Then::GoOn
    });
    content::check_lease(b"bad", 1, 5000, &cache.get("bad", soon()).unwrap().unwrap());
    for i in 0..4 {
        let name = name(50_000 + i, i);
        content::check_lease(name.as_bytes(), 1, 50_000 + i, &cache.get(&name, soon()).unwrap().unwrap());
    }
    content::check_lease(b"bad", 1, 5000, &cache.peek("bad").unwrap().unwrap());
    assert_eq!(origin.requests_for("bad"), 1);
    finish(cache);
}

#[test]
fn too_many_bytes() {
    alone(|| {
        more_after_the_answer(|_, line| line.raw(&[0x5a; 1]));
        more_after_the_answer(|_, line| line.raw(&[0x5a; 64]));
        more_after_the_answer(|_, line| line.raw(&vec![0x5a; 100_000]));
    });
}

#[test]
fn the_same_answer_twice() {
    alone(|| more_after_the_answer(|ask, line| line.content(ask, 2, 5000)));
}

#[test]
fn garbage_before_any_answer() {
    alone(|| {
        let mut state = 1u64;
        for _ in 0..20 {
            // A small generator (Knuth's MMIX): the bytes only have to be many and repeatable.
            let bytes: Vec<u8> = (0..300)
                .map(|_| {
                    state =
                        state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                    (state >> 33) as u8
                })
                .collect();
            is_found_out(
                move |_, line| {
                    line.raw(&bytes);
                    Then::GoOn
                },
                protocol,
                "broke the protocol",
            );
        }
    });
}

#[test]
fn every_key_of_a_batch_gets_its_own_verdict() {
    alone(|| {
        let origin = FakeOrigin::start(|ask, line| match ask.key.as_slice() {
            b"checksum" => spoilt(|header| header.value_crc32c ^= 1)(ask, line),
            b"refused" => {
                line.refuse(ask, Status::Internal, "disk on fire");
                Then::GoOn
            }
            b"large" => {
                spoilt(|header| (header.value_len, header.body_len) = (1 << 40, MIB as u64))(ask, line)
            }
            _ => {
                line.answer_by_name(ask);
                Then::GoOn
            }
        });
        let cache = open_with(config(8 * MIB, &[origin.address()]));
        let good: Vec<String> = (0..12).map(|i| name(30_000 + i, i)).collect();
        let mut names: Vec<&str> = good.iter().map(String::as_str).collect();
        for (at, bad) in [(2, "checksum"), (5, "refused"), (7, "absent"), (9, "large")] {
            names.insert(at, bad);
        }
        let keys: Vec<_> = names.iter().map(|name| hotslice::Namespace::DEFAULT.key(*name)).collect();
        for (name, result) in names.iter().zip(cache.get_batch(&keys, soon())) {
            match (*name, result) {
                ("checksum", Err(Error::Checksum { .. })) => {}
                ("refused", Err(Error::Refused { .. })) => {}
                ("large", Err(Error::ValueTooLarge { .. })) => {}
                ("absent", Ok(None)) => {}
                (name, Ok(Some(lease))) => {
                    let len = content::named_len(name.as_bytes()).unwrap();
                    content::check_lease(name.as_bytes(), 1, len, &lease);
                }
                (name, other) => panic!("{name}: {other:?}"),
            }
        }
        finish(cache);
    });
}

#[test]
fn a_lie_about_one_key_of_a_batch_costs_that_key_alone() {
    alone(|| {
        type Lie = fn(&Ask, &mut Line) -> Then;
        let lies: [(&str, Lie); 4] = [
            ("another id", |ask, line| {
                let mut header = value_header(ask, 1, b"x");
                header.request_id ^= 1 << 40;
                line.header(&header);
                Then::GoOn
            }),
            ("no protocol", |_, line| {
                line.raw(&[0x5a; 64]);
                Then::GoOn
            }),
            ("a part", |ask, line| {
                let mut header = value_header(ask, 1, &[7; 5000]);
                header.value_len = 6000;
                line.header(&header);
                Then::GoOn
            }),
            ("an end in the middle", |ask, line| {
                line.header(&value_header(ask, 1, &[7; 5000]));
                line.raw(&[7; 100]);
                Then::Close
            }),
        ];
        for (lie, tell) in lies {
            let origin = FakeOrigin::start(move |ask, line| {
                if ask.key == b"bad" {
                    return tell(ask, line);
                }
                line.answer_by_name(ask);
                Then::GoOn
            });
            let cache = open(8 * MIB, origin.address());
            let names: Vec<String> = (0..24).map(|i| name(1000 + i, i)).collect();
            let mut keys: Vec<Key<'_>> = names.iter().map(Key::from).collect();
            keys.insert(7, "bad".into());
            for (i, result) in cache.get_batch(&keys, soon()).into_iter().enumerate() {
                match result {
                    Ok(Some(lease)) if i != 7 => {
                        let key = keys[i].bytes();
                        content::check_lease(key, 1, content::named_len(key).unwrap(), &lease);
                    }
                    Err(_) if i == 7 => {}
                    other => panic!("{lie}: position {i}: {other:?}"),
                }
            }
            finish(cache);
        }
    });
}
