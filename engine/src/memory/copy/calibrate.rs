//! Which method is fastest for large copies on this machine: measured once per process.
//!
//! The answer is not the same everywhere (`rep movsb` wins on some processors, non-temporal stores on others,
//! the C library on a third), nor the same in a virtual machine as outside. So it is measured, on buffers that
//! the caches cannot hold, the way an arena is read: block after block, each of them cold.

use std::ptr::NonNull;
use std::sync::OnceLock;
use std::time::Instant;

use super::{CopyMethod, copy_with};
use crate::memory::pages::Mapping;

/// Bytes per copy while measuring.
const BLOCK_BYTES: usize = 4 << 20;
/// Bytes of the source and of the destination: together 64 MiB, more than the last-level cache one core of
/// most machines reaches, and still populated in some milliseconds.
const BUFFER_BYTES: usize = 32 << 20;
/// Times each method goes over the buffers; the best one counts, which leaves out interruptions.
const ROUNDS: usize = 3;
/// How much faster than the C library another method has to be to be chosen, in percent: differences below
/// are noise, and the library's copy leaves a destination that is read next in the cache.
const MARGIN_PERCENT: f64 = 5.0;

static CALIBRATION: OnceLock<Calibration> = OnceLock::new();

/// The speeds that were measured, and the method that large copies use since.
#[derive(Clone, Debug)]
pub struct Calibration {
    fastest: CopyMethod,
    measured: Vec<(CopyMethod, f64)>,
}

impl Calibration {
    /// The method that [`copy`](super::copy) uses from [`LARGE_COPY_BYTES`](super::LARGE_COPY_BYTES) on.
    pub fn fastest(&self) -> CopyMethod {
        self.fastest
    }

    /// Each available method with its speed in GB/s (10^9 bytes copied per second), the C library first.
    /// Empty if there was no memory to measure with.
    pub fn measured(&self) -> &[(CopyMethod, f64)] {
        &self.measured
    }
}

/// Measures the available methods and lets large copies use the fastest, once per process: later calls return
/// the first result. Other callers wait for a measurement in progress.
///
/// Blocking, for about 60 ms, with 64 MiB of memory meanwhile; several times as long in a virtual machine
/// whose host has yet to back that memory. Meant for a thread of its own at the start of a cache: until it
/// is done, large copies use the C library.
pub fn calibrate() -> &'static Calibration {
    CALIBRATION.get_or_init(measure)
}

/// The method for large copies now.
pub(super) fn fastest() -> CopyMethod {
    // `get` is an acquire load and not more: plain on x86-64, `ldar` on AArch64.
    CALIBRATION.get().map_or(CopyMethod::Libc, Calibration::fastest)
}

fn measure() -> Calibration {
    let (Some(source), Some(destination)) = (buffer(), buffer()) else {
        return Calibration { fastest: CopyMethod::Libc, measured: Vec::new() };
    };
    let mut measured: Vec<(CopyMethod, f64)> =
        CopyMethod::ALL.into_iter().filter(|method| method.available()).map(|method| (method, 0.0)).collect();
    // In turns, so that a change of clock or load meets all of them.
    for _ in 0..ROUNDS {
        for (method, speed) in &mut measured {
            *speed = speed.max(speed_of(*method, destination.base(), source.base()));
        }
    }
    Calibration { fastest: choose(&measured), measured }
}

/// Memory to measure with, populated; on transparent hugepages where there are some, like an arena.
fn buffer() -> Option<Mapping> {
    let mapping = Mapping::anonymous(BUFFER_BYTES, 2 << 20).ok()?;
    mapping.keep_private().ok()?;
    mapping.want_transparent(true);
    mapping.populate().ok()?;
    Some(mapping)
}

/// GB/s of one pass over the buffers.
fn speed_of(method: CopyMethod, destination: NonNull<u8>, source: NonNull<u8>) -> f64 {
    let started = Instant::now();
    for offset in (0..BUFFER_BYTES).step_by(BLOCK_BYTES) {
        // SAFETY: both are whole mappings of `BUFFER_BYTES`, not the same, and nobody else has their addresses;
        // the method is available.
        unsafe {
            copy_with(method, destination.as_ptr().add(offset), source.as_ptr().add(offset), BLOCK_BYTES);
        }
    }
    BUFFER_BYTES as f64 / started.elapsed().as_nanos().max(1) as f64
}

/// The fastest, but the C library if nothing is faster than it by the margin.
fn choose(measured: &[(CopyMethod, f64)]) -> CopyMethod {
    let speed_to_beat = measured
        .iter()
        .find(|(method, _)| *method == CopyMethod::Libc)
        .map_or(0.0, |(_, speed)| speed * (1.0 + MARGIN_PERCENT / 100.0));
    measured
        .iter()
        .filter(|(_, speed)| *speed > speed_to_beat)
        .max_by(|(_, left), (_, right)| left.total_cmp(right))
        .map_or(CopyMethod::Libc, |(method, _)| *method)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fastest_is_chosen_if_it_is_clearly_faster() {
        use CopyMethod::{Avx2Stream, Libc, RepMovsb};
        assert_eq!(choose(&[(Libc, 10.0), (RepMovsb, 12.0), (Avx2Stream, 14.0)]), Avx2Stream);
        assert_eq!(choose(&[(Libc, 10.0), (RepMovsb, 10.2), (Avx2Stream, 9.0)]), Libc);
        assert_eq!(choose(&[(Libc, 10.0)]), Libc);
        assert_eq!(choose(&[]), Libc);
    }

    #[test]
    fn calibration_measures_what_is_available_once() {
        let first = calibrate();
        assert_eq!(first.measured()[0].0, CopyMethod::Libc);
        let available = CopyMethod::ALL.into_iter().filter(|method| method.available()).count();
        assert_eq!(first.measured().len(), available);
        assert!(first.measured().iter().all(|(_, speed)| *speed > 0.0), "{first:?}");
        assert!(std::ptr::eq(first, calibrate()));
        assert_eq!(fastest(), first.fastest());
    }
}
