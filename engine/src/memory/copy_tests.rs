//! Every method against every awkward length and alignment, and the table that the threshold comes from.

use super::*;
use std::time::Instant;

use crate::memory::{Arena, ArenaConfig, LockPolicy, PagePolicy};

fn available() -> impl Iterator<Item = CopyMethod> {
    CopyMethod::ALL.into_iter().filter(|method| method.available())
}

/// Bytes whose value depends on their whole position.
fn pattern(len: usize) -> Vec<u8> {
    (0..len as u64).map(|at| (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect()
}

/// Copies and checks that the copy is whole and that nothing around it was touched.
fn check(method: CopyMethod, source: &[u8], target: &mut [u8], from: usize, to: usize, len: usize) {
    target.fill(0xA5);
    assert!(from + len <= source.len() && to + len <= target.len());
    // SAFETY: both ranges lie inside their slices, which do not overlap.
    unsafe { copy_with(method, target.as_mut_ptr().add(to), source.as_ptr().add(from), len) };
    let context = format!("{method}: {len} bytes from +{from} to +{to}");
    assert!(target[to..to + len] == source[from..from + len], "{context}: bytes differ");
    assert!(target[..to].iter().all(|&byte| byte == 0xA5), "{context}: wrote before the target");
    assert!(target[to + len..].iter().all(|&byte| byte == 0xA5), "{context}: wrote behind the target");
}

#[test]
fn every_method_copies_every_length_and_alignment() {
    let source = pattern(2048);
    let mut target = vec![0; 2048];
    for method in available() {
        for len in (0..300).chain([511, 512, 513, 767, 1023, 1024, 1025]) {
            for (from, to) in [(0, 0), (1, 0), (0, 1), (3, 5), (63, 64), (17, 33), (64, 127)] {
                check(method, &source, &mut target, from, to, len);
            }
        }
        for to in 0..130 {
            check(method, &source, &mut target, 7, to, 700);
        }
    }
}

#[test]
fn large_copies_are_whole() {
    let source = pattern((3 << 20) + 200);
    let mut target = vec![0; source.len()];
    for method in available() {
        for (from, to, cut) in [(0, 0, 0), (1, 2, 77), (13, 64, 64), (100, 31, 128)] {
            check(method, &source, &mut target, from, to, source.len() - 100 - cut);
        }
    }
}

#[test]
fn the_default_copy_is_whole_on_both_sides_of_the_threshold() {
    let source = pattern(LARGE_COPY_BYTES + 2);
    for len in [0, 1, LARGE_COPY_BYTES - 1, LARGE_COPY_BYTES, LARGE_COPY_BYTES + 1] {
        let mut target = vec![0; source.len()];
        // SAFETY: two vectors, both at least `len` + 1 long.
        unsafe { copy(target.as_mut_ptr().add(1), source.as_ptr(), len) };
        assert!(target[1..=len] == source[..len] && target[len + 1..].iter().all(|&byte| byte == 0));
    }
}

#[test]
fn names_differ_and_fit_the_serialised_form() {
    for method in CopyMethod::ALL {
        assert_eq!(serde_json::to_string(&method).unwrap(), format!("\"{method}\""));
    }
}

#[test]
fn a_method_that_is_not_available_is_refused() {
    for method in CopyMethod::ALL.into_iter().filter(|method| !method.available()) {
        let source = [1u8; 4];
        let mut target = [0u8; 4];
        // SAFETY: two arrays of 4 bytes.
        let copied = std::panic::catch_unwind(move || unsafe {
            copy_with(method, target.as_mut_ptr(), source.as_ptr(), 4);
        });
        assert!(copied.is_err(), "{method} was not refused");
    }
}

/// One cell of the table: GB/s of copies of `len` bytes that rotate over `span` bytes of either arena.
fn speed(method: CopyMethod, target: &Arena, source: &Arena, len: usize, span: usize, shift: usize) -> f64 {
    let places = (span / (len + shift)).max(1);
    let copies = (((256 << 20) / len).max(places)).min(400_000);
    let mut best = f64::MAX;
    for _ in 0..3 {
        let started = Instant::now();
        for at in 0..copies {
            let offset = at % places * (len + shift);
            // SAFETY: `places` keeps offset and length inside the only block of either arena; `shift` < 64 is
            // added to the source only and is part of the stride.
            unsafe {
                let to = target.block(0).unwrap().base().as_ptr().add(offset);
                copy_with(method, to, source.block(0).unwrap().base().as_ptr().add(offset + shift), len);
            }
        }
        best = best.min(started.elapsed().as_secs_f64() / copies as f64);
    }
    len as f64 / best / 1e9
}

/// Prints the table that [`LARGE_COPY_BYTES`] comes from:
///
/// `cargo test --release -p hotslice --lib print_copy_table -- --ignored --nocapture`
#[test]
#[ignore = "a measurement: takes ten seconds and needs 512 MiB"]
fn print_copy_table() {
    let span = 256 << 20;
    let config = ArenaConfig {
        capacity_bytes: span,
        capacity_max_bytes: 0,
        block_bytes: span,
        pages: PagePolicy::Preferred,
        lock: LockPolicy::Off,
        numa: crate::memory::NumaPolicy::Off,
        node: None,
    };
    let (source, target) = (Arena::map(&config).unwrap(), Arena::map(&config).unwrap());
    println!("pages: {}, {}", source.block(0).unwrap().kind(), target.block(0).unwrap().kind());
    let started = Instant::now();
    println!("calibration: {:?} in {:?}", calibrate(), started.elapsed());
    let methods: Vec<_> = available().collect();
    for (what, spread, shift) in
        [("cold: over 256 MiB", span, 0), ("warm: one place", 0, 0), ("cold, source at +1", span, 1)]
    {
        print!("GB/s, {what:<20}");
        methods.iter().for_each(|method| print!(" {method:>14}"));
        println!();
        for len in (12..=24).map(|power| 1usize << power) {
            print!("{:>19} KiB  ", len >> 10);
            for &method in &methods {
                print!(" {:>14.2}", speed(method, &target, &source, len, spread, shift));
            }
            println!();
        }
    }
}
