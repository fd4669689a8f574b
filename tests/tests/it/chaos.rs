//! Everything at once: many threads, short deadlines, little memory, and an origin that fails in every way it
//! can. Whatever succeeds is right, whatever fails says why, the shards survive, and nothing is left over.

use hotslice::{Admission, Cache, Config, Deadline, Error, Invalidate, Key, Lease, Namespace, Read};
use hotslice_tests::content::{self, name};
use hotslice_tests::gauges::{alone, finish};
use hotslice_tests::origin::{Ask, FakeOrigin, Line, Then, value_header};
use hotslice_tests::setup::{MIB, config, open_with};
use std::time::{Duration, Instant};

/// A small generator (SplitMix64): what it draws is repeatable; what the threads make of it is not.
pub(crate) struct Dice(pub(crate) u64);

impl Dice {
    pub(crate) fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (x ^ (x >> 31)) % sides
    }
}

pub(crate) const KEYS: u64 = 60;

/// Small ones, some larger than a block, one in twenty larger than the arena.
pub(crate) fn key_name(n: u64) -> String {
    let len = match n % 20 {
        0 => 0,
        1 => 4 * MIB + 1,
        2 => 9 * MIB,
        3..6 => MIB + 4097 * n as usize,
        _ => 1 + 3001 * n as usize,
    };
    name(len, n as usize)
}

/// Answers, mostly rightly.
pub(crate) fn misbehave(ask: &Ask, line: &mut Line) -> Then {
    let Some(len) = content::named_len(&ask.key) else {
        line.absent(ask);
        return Then::GoOn;
    };
    let value = content::bytes(&ask.key, 1, len);
    let (header, part) = (value_header(ask, 1, &value), ask.part(&value));
    match Dice(ask.number as u64).roll(40) {
        0 => return Then::Close,
        1 => return Then::Reset,
        2 => {
            line.header(&header);
            line.raw(&part[..part.len() / 2]);
            return Then::Close;
        }
        3 => {
            line.header(&header);
            line.raw(&part[..part.len() / 3]);
            return Then::Reset;
        }
        4 => line.header(&hotslice::wire::ResponseHeader { value_crc32c: header.value_crc32c ^ 1, ..header }),
        5 => {
            line.raw(&[0x55; 100]);
            return Then::GoOn;
        }
        6 => {
            line.refuse(ask, hotslice::wire::Status::Busy, "busy");
            return Then::GoOn;
        }
        7 => {
            line.header(&header);
            line.raw(part);
            line.raw(b"!");
            return Then::GoOn;
        }
        8 => {
            line.header(&header);
            line.pause(Duration::from_millis(30));
        }
        9 => {
            line.until_closed();
            return Then::Close;
        }
        _ => line.header(&header),
    }
    line.raw(part);
    Then::GoOn
}

/// The content that a lease must have: of the origin, or of a put.
pub(crate) fn check(name: &str, lease: &Lease) {
    let len = content::named_len(name.as_bytes()).unwrap();
    match lease.version() {
        0 => content::check_lease(name.as_bytes(), 2, len.min(50_000), lease),
        _ => content::check_lease(name.as_bytes(), 1, len, lease),
    }
}

pub(crate) fn allowed(error: &Error) {
    assert!(
        !matches!(
            error,
            Error::ShutDown | Error::Config { .. } | Error::KeyLength { .. } | Error::Corrupt { .. }
        ),
        "{error:?}"
    );
}

fn one_step(cache: &Cache, dice: &mut Dice, held: &mut Vec<(String, Lease)>) {
    let deadline = Deadline::after_ms([0, 1, 5, 50, 400][dice.roll(5) as usize]);
    let name = key_name(dice.roll(KEYS));
    match dice.roll(20) {
        0 => {
            let len = content::named_len(name.as_bytes()).unwrap().min(50_000);
            let value = content::bytes(name.as_bytes(), 2, len);
            let _ = cache.put(&name, &value, deadline).inspect_err(allowed);
        }
        1 => {
            let scope = match dice.roll(4) {
                0 => Invalidate::All,
                1 => Invalidate::Prefix(Namespace::DEFAULT, b"1"),
                _ => Invalidate::Key(Namespace::DEFAULT.key(&name)),
            };
            let _ = cache.invalidate(scope, deadline).inspect_err(allowed);
        }
        2 => {
            let _ = cache.prefetch(&[Namespace::DEFAULT.key(&name)]).inspect_err(allowed);
        }
        3..6 => {
            let names: Vec<String> = (0..dice.roll(12)).map(|_| key_name(dice.roll(KEYS))).collect();
            let keys: Vec<Key<'_>> = names.iter().map(|name| Namespace::DEFAULT.key(name)).collect();
            for (name, result) in names.iter().zip(cache.get_batch(&keys, deadline)) {
                match result {
                    Ok(lease) => check(name, &lease.expect("the origin has it")),
                    Err(error) => allowed(&error),
                }
            }
        }
        6 => {
            let mut buffers = [(); 6].map(|()| (key_name(dice.roll(KEYS)), vec![0; 200_000]));
            let mut reads: Vec<Read<'_>> = buffers
                .iter_mut()
                .map(|(name, into)| Read { key: Namespace::DEFAULT.key(&*name), into })
                .collect();
            let results = cache.get_into_batch(&mut reads, deadline);
            for ((name, buffer), result) in buffers.iter().zip(results) {
                match result {
                    Ok(len) => {
                        let got = &buffer[..len.expect("the origin has it") as usize];
                        let versions = [1, 2];
                        let whole = |&v: &u64| content::difference(name.as_bytes(), v, 0, got).is_none();
                        assert!(versions.iter().any(whole), "{name}");
                    }
                    Err(error) => allowed(&error),
                }
            }
        }
        7 => held.clear(),
        8 => match cache.get("absent", deadline) {
            Ok(found) => assert!(found.is_none()),
            Err(error) => allowed(&error),
        },
        _ => match cache.get(&name, deadline) {
            Ok(lease) => {
                let lease = lease.expect("the origin has it");
                check(&name, &lease);
                if held.len() < 3 && lease.len() < MIB as u64 {
                    held.push((name, lease));
                }
            }
            Err(error) => allowed(&error),
        },
    }
}

fn storm(seed: u64, shards: usize, adapt: impl FnOnce(&mut Config)) {
    let origin = FakeOrigin::start(misbehave);
    let mut config = config(4 * MIB * shards, &[origin.address()]);
    config.shards = shards;
    adapt(&mut config);
    (config.receive_timeout_ms, config.connect_timeout_ms, config.fill_timeout_ms) = (100, 200, 300);
    (config.backoff_min_ms, config.backoff_max_ms) = (1, 8);
    config.lane_depth = 4;
    let cache = open_with(config);
    let until = Instant::now() + Duration::from_millis(1200);
    std::thread::scope(|scope| {
        for thread in 0..6 {
            let cache = &cache;
            scope.spawn(move || {
                let mut dice = Dice(seed * 100 + thread);
                let mut held = Vec::new();
                while Instant::now() < until {
                    one_step(cache, &mut dice, &mut held);
                }
                for (name, lease) in &held {
                    check(name, lease);
                }
            });
        }
    });
    assert!(cache.stats().fills_published > 0);
    finish(cache);
}

#[test]
fn one_shard() {
    alone(|| storm(1, 1, |_| ()));
}

#[test]
fn two_shards() {
    alone(|| storm(2, 2, |_| ()));
}

#[test]
fn admission_off() {
    alone(|| storm(3, 1, |config| config.admission = Admission::Off));
}

#[test]
fn shards_that_help_each_other() {
    let helping = |config: &mut Config| {
        config.capacity_bytes = 24 * MIB as u64;
        (config.shards_per_value, config.stripe_bytes) = (2, MIB as u64);
    };
    alone(|| storm(4, 2, helping));
}
