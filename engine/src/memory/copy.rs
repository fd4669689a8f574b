//! The copying primitive: bytes from one place in memory to another, as fast as this machine does it.
//!
//! Copies of less than [`LARGE_COPY_BYTES`] are the C library's `memcpy`. For larger ones the library is
//! not always the fastest: non-temporal stores and `rep movsb` do not read the destination's lines before
//! overwriting them. [`calibrate()`] measures which of them it is here.
//!
//! Every method ends with the bytes visible as after plain stores: a release store that follows publishes
//! them. None may be used on memory of a device.

mod calibrate;

#[cfg(target_arch = "aarch64")]
mod aarch64;
#[cfg(target_arch = "x86_64")]
mod x86_64;

use std::fmt;
use std::ptr;

use serde::Serialize;

pub use calibrate::{Calibration, calibrate};

/// Bytes from which a copy is large and uses the method that [`calibrate()`] found.
///
/// Measured on an AMD EPYC (Zen 3, one core of a virtual machine, 512 KiB L2, 32 MiB L3), GB/s on transparent
/// hugepages, "cold" rotating over 256 MiB of source and of destination, "warm" in one place:
///
/// | bytes | cold: libc | `rep movsb` | AVX2 stream | warm: libc | `rep movsb` | AVX2 stream |
/// |---|---|---|---|---|---|---|
/// | 4 KiB | 9.3 | 9.8 | 11.1 | 59 | 79 | 16 |
/// | 16 KiB | 9.9 | 10.4 | 14.6 | 50 | 48 | 32 |
/// | 64 KiB | 10.1 | 10.4 | 14.3 | 44 | 44 | 39 |
/// | 256 KiB | 9.5 | 9.8 | 14.9 | 36 | 49 | 47 |
/// | 1 MiB | 9.2 | 9.9 | 14.7 | 34 | 35 | 36 |
/// | 16 MiB | 9.4 | 9.2 | 14.7 | 11 | 12 | 25 |
///
/// From 256 KiB on, streaming costs nothing even where everything is in the cache; below, it gains half where
/// nothing is and can lose more than that where all is. Prefetching by software and interleaving pages were
/// tried and gained nothing. The table is printed by
/// `cargo test --release -p hotslice --lib print_copy_table -- --ignored --nocapture`.
pub const LARGE_COPY_BYTES: usize = 256 << 10;

/// A way to copy.
#[derive(Copy, Clone, Eq, PartialEq, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum CopyMethod {
    /// `memcpy` of the C library.
    Libc,
    /// `rep movsb` (x86-64 where the processor says that it is fast: ERMSB).
    RepMovsb,
    /// 32-byte loads and non-temporal stores (x86-64 with AVX2).
    Avx2Stream,
    /// 64-byte loads and non-temporal stores (x86-64 with AVX-512F).
    Avx512Stream,
    /// Register pairs with the non-temporal hint, `ldnp` and `stnp` (AArch64).
    PairStream,
}

impl CopyMethod {
    /// All methods, whether available here or not.
    pub const ALL: [CopyMethod; 5] =
        [Self::Libc, Self::RepMovsb, Self::Avx2Stream, Self::Avx512Stream, Self::PairStream];

    /// Name for people and for machine-readable output.
    pub fn name(self) -> &'static str {
        match self {
            Self::Libc => "libc",
            Self::RepMovsb => "rep-movsb",
            Self::Avx2Stream => "avx2-stream",
            Self::Avx512Stream => "avx512-stream",
            Self::PairStream => "pair-stream",
        }
    }

    /// Whether this processor has what the method needs.
    pub fn available(self) -> bool {
        match self {
            Self::Libc => true,
            #[cfg(target_arch = "x86_64")]
            Self::RepMovsb => is_x86_feature_detected!("ermsb"),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2Stream => is_x86_feature_detected!("avx2"),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Stream => is_x86_feature_detected!("avx512f"),
            #[cfg(target_arch = "aarch64")]
            Self::PairStream => true,
            #[allow(unreachable_patterns, reason = "which methods are left depends on the architecture")]
            _ => false,
        }
    }
}

impl fmt::Display for CopyMethod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Copies `len` bytes from `src` to `dst`: the C library below [`LARGE_COPY_BYTES`], and what
/// [`calibrate()`] found to be the fastest from there on (the C library until it was called).
///
/// Any thread; never blocks, allocates or enters the kernel (but for page faults of the caller's memory).
///
/// # Safety
///
/// As for [`ptr::copy_nonoverlapping`]: `len` bytes at `src` are readable, as many at `dst` writable, the two
/// do not overlap, and nobody writes the one or touches the other meanwhile.
#[inline]
pub unsafe fn copy(dst: *mut u8, src: *const u8, len: usize) {
    if len < LARGE_COPY_BYTES {
        // SAFETY: the caller's promise.
        unsafe { ptr::copy_nonoverlapping(src, dst, len) };
    } else {
        // SAFETY: the caller's promise; calibration chooses among the available methods.
        unsafe { copy_unchecked(calibrate::fastest(), dst, src, len) };
    }
}

/// Copies `len` bytes from `src` to `dst` with one method, whatever the length; for measuring.
///
/// # Panics
///
/// If the method is not [available](CopyMethod::available) here.
///
/// # Safety
///
/// As for [`copy`].
pub unsafe fn copy_with(method: CopyMethod, dst: *mut u8, src: *const u8, len: usize) {
    assert!(method.available(), "this processor cannot copy with {method}");
    // SAFETY: the caller's promise, and the method is available.
    unsafe { copy_unchecked(method, dst, src, len) };
}

/// # Safety
///
/// As for [`copy`], and the method is available.
unsafe fn copy_unchecked(method: CopyMethod, dst: *mut u8, src: *const u8, len: usize) {
    // SAFETY: the caller's promise; the features each method needs are there because it is available.
    unsafe {
        match method {
            #[cfg(target_arch = "x86_64")]
            CopyMethod::RepMovsb => x86_64::rep_movsb(dst, src, len),
            #[cfg(target_arch = "x86_64")]
            CopyMethod::Avx2Stream => x86_64::avx2_stream(dst, src, len),
            #[cfg(target_arch = "x86_64")]
            CopyMethod::Avx512Stream => x86_64::avx512_stream(dst, src, len),
            #[cfg(target_arch = "aarch64")]
            CopyMethod::PairStream => aarch64::pair_stream(dst, src, len),
            _ => ptr::copy_nonoverlapping(src, dst, len),
        }
    }
}

#[cfg(test)]
#[path = "copy_tests.rs"]
mod tests;
