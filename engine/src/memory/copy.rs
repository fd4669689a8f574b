//! Copies. Small ones are libc's; large ones, whose bytes will not stay in a cache anyway, take the fastest
//! method that this machine has, measured once per process.

use std::sync::OnceLock;
use std::time::Instant;

/// From this length on [`copy()`] uses the measured method.
///
/// Below it the destination stays in a cache and stores that bypass it would only cost the next reader:
/// half of a typical 1 MiB second-level cache. `copy::tests::print_methods` prints the table behind it.
pub const LARGE_COPY_BYTES: usize = 512 << 10;

/// A way to copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyMethod {
    /// `memcpy` of the C library.
    Libc,
    /// x86-64: one `rep movsb`.
    RepMovsb,
    /// x86-64: 32-byte loads and non-temporal stores.
    NonTemporalAvx2,
    /// x86-64: 64-byte loads and non-temporal stores.
    NonTemporalAvx512,
}

impl CopyMethod {
    /// Name for reports.
    pub fn name(self) -> &'static str {
        match self {
            CopyMethod::Libc => "libc memcpy",
            CopyMethod::RepMovsb => "rep movsb",
            CopyMethod::NonTemporalAvx2 => "AVX2 non-temporal",
            CopyMethod::NonTemporalAvx512 => "AVX-512 non-temporal",
        }
    }

    /// The methods that this processor has.
    pub fn available() -> Vec<CopyMethod> {
        let mut methods = vec![CopyMethod::Libc];
        #[cfg(target_arch = "x86_64")]
        {
            methods.push(CopyMethod::RepMovsb);
            if std::arch::is_x86_feature_detected!("avx2") {
                methods.push(CopyMethod::NonTemporalAvx2);
            }
            if std::arch::is_x86_feature_detected!("avx512f") {
                methods.push(CopyMethod::NonTemporalAvx512);
            }
        }
        methods
    }
}

/// Copies `len` bytes, by the fastest method for that length.
///
/// # Safety
///
/// `src` is readable and `dst` writable for `len` bytes, and they do not overlap.
#[inline]
pub unsafe fn copy(dst: *mut u8, src: *const u8, len: usize) {
    if len < LARGE_COPY_BYTES {
        // SAFETY: the caller's promise.
        unsafe { std::ptr::copy_nonoverlapping(src, dst, len) }
    } else {
        // SAFETY: the caller's promise.
        unsafe { copy_with(fastest_copy(), dst, src, len) }
    }
}

/// Copies `len` bytes by a given method, whatever the length.
///
/// # Safety
///
/// As [`copy()`]; and the processor has the method ([`CopyMethod::available`]).
pub unsafe fn copy_with(method: CopyMethod, dst: *mut u8, src: *const u8, len: usize) {
    match method {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the caller's promise.
        CopyMethod::RepMovsb => unsafe { x86::rep_movsb(dst, src, len) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the caller's promise.
        CopyMethod::NonTemporalAvx2 => unsafe { x86::non_temporal_avx2(dst, src, len) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the caller's promise.
        CopyMethod::NonTemporalAvx512 => unsafe { x86::non_temporal_avx512(dst, src, len) },
        // SAFETY: the caller's promise.
        _ => unsafe { std::ptr::copy_nonoverlapping(src, dst, len) },
    }
}

/// The method that large copies use. The first call measures (some tens of milliseconds, 64 MiB of
/// temporary memory); [`Cache::open`](crate::Cache::open) makes it.
pub fn fastest_copy() -> CopyMethod {
    static FASTEST: OnceLock<CopyMethod> = OnceLock::new();
    *FASTEST.get_or_init(measure)
}

/// Rotates over more memory than a last-level cache holds, as copies out of a large arena do, and takes the
/// best of several rounds for each method, so that a disturbed round decides nothing.
fn measure() -> CopyMethod {
    const COPY_BYTES: usize = 4 << 20;
    const COPIES: usize = 8;
    const ROUNDS: usize = 3;
    let methods = CopyMethod::available();
    if methods.len() == 1 {
        return CopyMethod::Libc;
    }
    let source = vec![1u8; COPY_BYTES * COPIES];
    let mut destination = vec![2u8; COPY_BYTES * COPIES];
    let mut best = vec![u128::MAX; methods.len()];
    for _ in 0..ROUNDS {
        for (&method, best) in methods.iter().zip(&mut best) {
            let started = Instant::now();
            for (from, to) in source.chunks(COPY_BYTES).zip(destination.chunks_mut(COPY_BYTES)) {
                // SAFETY: two different vectors, chunks of one length, a method that is available.
                unsafe { copy_with(method, to.as_mut_ptr(), from.as_ptr(), from.len()) };
            }
            *best = (*best).min(started.elapsed().as_nanos());
        }
    }
    let fastest = methods.iter().zip(&best).min_by_key(|(_, best)| **best);
    fastest.map_or(CopyMethod::Libc, |(&method, _)| method)
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::asm;
    use std::arch::x86_64::{
        __m256i, __m512i, _mm_sfence, _mm256_loadu_si256, _mm256_stream_si256, _mm512_loadu_si512,
        _mm512_stream_si512,
    };

    /// # Safety
    /// As `super::copy`.
    pub(super) unsafe fn rep_movsb(dst: *mut u8, src: *const u8, len: usize) {
        // SAFETY: copies `len` bytes upwards (the ABI keeps the direction flag clear), touches only the three
        // registers it names, and memory that the caller vouches for.
        unsafe {
            asm!("rep movsb", inout("rcx") len => _, inout("rdi") dst => _, inout("rsi") src => _,
                 options(nostack, preserves_flags));
        }
    }

    /// Copies up to the next multiple of `align` of the destination; what is left.
    ///
    /// # Safety
    /// As `super::copy`.
    unsafe fn align_head(
        dst: *mut u8,
        src: *const u8,
        len: usize,
        align: usize,
    ) -> (*mut u8, *const u8, usize) {
        let head = (dst as usize).wrapping_neg() % align;
        let head = head.min(len);
        // SAFETY: `head` is at most `len`.
        unsafe {
            std::ptr::copy_nonoverlapping(src, dst, head);
            (dst.add(head), src.add(head), len - head)
        }
    }

    /// # Safety
    /// As `super::copy`; the processor has AVX2.
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn non_temporal_avx2(dst: *mut u8, src: *const u8, len: usize) {
        // SAFETY: the caller's promise; every step below stays within `left` bytes, and the streaming stores
        // go to multiples of 32.
        unsafe {
            let (mut to, mut from, mut left) = align_head(dst, src, len, 32);
            while left >= 128 {
                let (source, target) = (from.cast::<__m256i>(), to.cast::<__m256i>());
                let a = _mm256_loadu_si256(source);
                let b = _mm256_loadu_si256(source.add(1));
                let c = _mm256_loadu_si256(source.add(2));
                let d = _mm256_loadu_si256(source.add(3));
                _mm256_stream_si256(target, a);
                _mm256_stream_si256(target.add(1), b);
                _mm256_stream_si256(target.add(2), c);
                _mm256_stream_si256(target.add(3), d);
                (to, from, left) = (to.add(128), from.add(128), left - 128);
            }
            std::ptr::copy_nonoverlapping(from, to, left);
            // Streaming stores are weakly ordered: order them before whatever publishes the copy.
            _mm_sfence();
        }
    }

    /// # Safety
    /// As `super::copy`; the processor has AVX-512F.
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn non_temporal_avx512(dst: *mut u8, src: *const u8, len: usize) {
        // SAFETY: as `non_temporal_avx2`, with multiples of 64.
        unsafe {
            let (mut to, mut from, mut left) = align_head(dst, src, len, 64);
            while left >= 256 {
                let (source, target) = (from.cast::<__m512i>(), to.cast::<__m512i>());
                let a = _mm512_loadu_si512(source);
                let b = _mm512_loadu_si512(source.add(1));
                let c = _mm512_loadu_si512(source.add(2));
                let d = _mm512_loadu_si512(source.add(3));
                _mm512_stream_si512(target, a);
                _mm512_stream_si512(target.add(1), b);
                _mm512_stream_si512(target.add(2), c);
                _mm512_stream_si512(target.add(3), d);
                (to, from, left) = (to.add(256), from.add(256), left - 256);
            }
            std::ptr::copy_nonoverlapping(from, to, left);
            _mm_sfence();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_method_copies_every_byte_and_no_other() {
        let source: Vec<u8> = (0..5000u32).map(|i| (i * 31 % 251) as u8).collect();
        for method in CopyMethod::available() {
            for len in [0, 1, 31, 32, 63, 64, 127, 128, 129, 255, 256, 257, 1000, 4095, 4096, 4097] {
                for (from, to) in [(0, 0), (1, 0), (0, 1), (17, 33), (63, 31)] {
                    let mut target = vec![0xEE; 4300];
                    // SAFETY: both vectors are longer than offset plus length.
                    unsafe { copy_with(method, target.as_mut_ptr().add(to), source.as_ptr().add(from), len) };
                    assert_eq!(&target[to..to + len], &source[from..from + len], "{method:?} {len}");
                    assert!(target[..to].iter().chain(&target[to + len..]).all(|&b| b == 0xEE), "{method:?}");
                }
            }
        }
    }

    #[test]
    fn the_fastest_is_one_that_exists() {
        assert!(CopyMethod::available().contains(&fastest_copy()));
        let source = vec![5u8; 3 * LARGE_COPY_BYTES + 13];
        let mut target = vec![0u8; source.len()];
        // SAFETY: two vectors of one length.
        unsafe { copy(target.as_mut_ptr(), source.as_ptr(), source.len()) };
        assert!(target == source);
    }

    /// `cargo test --release -p hotslice --lib print_methods -- --ignored --nocapture`
    #[test]
    #[ignore = "prints measurements"]
    fn print_methods() {
        let source = vec![1u8; 256 << 20];
        let mut target = vec![2u8; 256 << 20];
        for len in [64 << 10, 256 << 10, 512 << 10, 1 << 20, 4 << 20, 10_000_000] {
            for method in CopyMethod::available() {
                let mut best = f64::MAX;
                for _ in 0..5 {
                    let started = Instant::now();
                    for (from, to) in source.chunks_exact(len).zip(target.chunks_exact_mut(len)) {
                        // SAFETY: chunks of one length of two vectors.
                        unsafe { copy_with(method, to.as_mut_ptr(), from.as_ptr(), len) };
                    }
                    best = best.min(started.elapsed().as_secs_f64());
                }
                let bytes = (source.len() / len * len) as f64;
                println!("{len:>9} bytes  {:<22} {:6.1} GB/s", method.name(), bytes / best / 1e9);
            }
        }
    }
}
