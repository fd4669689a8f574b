//! Copies on x86-64: the string instruction, and loads with non-temporal stores.
//!
//! A non-temporal store writes whole lines past the caches: it neither reads the destination first nor pushes
//! other data out. It is ordered by nothing but a fence, so each copy ends with `sfence`: to other threads
//! the bytes are then as if written by plain stores.

use std::arch::asm;
use std::arch::x86_64::{
    __m256i, __m512i, _mm_sfence, _mm256_loadu_si256, _mm256_stream_si256, _mm512_loadu_si512,
    _mm512_stream_si512,
};
use std::ptr;

/// Copies with `rep movsb`.
///
/// # Safety
///
/// As for [`ptr::copy_nonoverlapping`].
pub(super) unsafe fn rep_movsb(dst: *mut u8, src: *const u8, len: usize) {
    // SAFETY: reads `len` bytes at `src` and writes as many at `dst`, which the caller vouches for. The direction
    // flag is clear on entry to an asm block. No stack and no flags are touched.
    unsafe {
        asm!(
            "rep movsb",
            inout("rcx") len => _,
            inout("rdi") dst => _,
            inout("rsi") src => _,
            options(nostack, preserves_flags),
        );
    }
}

/// Copies with 32-byte loads and non-temporal stores.
///
/// # Safety
///
/// As for [`ptr::copy_nonoverlapping`], and the processor has AVX2.
#[target_feature(enable = "avx2")]
pub(super) unsafe fn avx2_stream(dst: *mut u8, src: *const u8, len: usize) {
    const LANE: usize = size_of::<__m256i>();
    let (head, lines) = split(dst, len, LANE, 4 * LANE);
    // SAFETY: `head + lines` is at most `len`, so every access lies in what the caller vouches for; stores start
    // at `dst + head`, a multiple of the lane, and go on in whole lanes.
    unsafe {
        ptr::copy_nonoverlapping(src, dst, head);
        let mut offset = head;
        while offset < head + lines {
            let from = src.add(offset).cast::<__m256i>();
            let to = dst.add(offset).cast::<__m256i>();
            let lanes = [
                _mm256_loadu_si256(from),
                _mm256_loadu_si256(from.add(1)),
                _mm256_loadu_si256(from.add(2)),
                _mm256_loadu_si256(from.add(3)),
            ];
            _mm256_stream_si256(to, lanes[0]);
            _mm256_stream_si256(to.add(1), lanes[1]);
            _mm256_stream_si256(to.add(2), lanes[2]);
            _mm256_stream_si256(to.add(3), lanes[3]);
            offset += 4 * LANE;
        }
        ptr::copy_nonoverlapping(src.add(offset), dst.add(offset), len - offset);
        _mm_sfence();
    }
}

/// Copies with 64-byte loads and non-temporal stores: each store is one cache line.
///
/// # Safety
///
/// As for [`ptr::copy_nonoverlapping`], and the processor has AVX-512F.
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn avx512_stream(dst: *mut u8, src: *const u8, len: usize) {
    const LANE: usize = size_of::<__m512i>();
    let (head, lines) = split(dst, len, LANE, 4 * LANE);
    // SAFETY: as in `avx2_stream`.
    unsafe {
        ptr::copy_nonoverlapping(src, dst, head);
        let mut offset = head;
        while offset < head + lines {
            let from = src.add(offset).cast::<__m512i>();
            let to = dst.add(offset).cast::<__m512i>();
            let lanes = [
                _mm512_loadu_si512(from),
                _mm512_loadu_si512(from.add(1)),
                _mm512_loadu_si512(from.add(2)),
                _mm512_loadu_si512(from.add(3)),
            ];
            _mm512_stream_si512(to, lanes[0]);
            _mm512_stream_si512(to.add(1), lanes[1]);
            _mm512_stream_si512(to.add(2), lanes[2]);
            _mm512_stream_si512(to.add(3), lanes[3]);
            offset += 4 * LANE;
        }
        ptr::copy_nonoverlapping(src.add(offset), dst.add(offset), len - offset);
        _mm_sfence();
    }
}

/// Bytes before the first multiple of `align` in the destination, and bytes after those that are whole steps.
fn split(dst: *const u8, len: usize, align: usize, step: usize) -> (usize, usize) {
    let head = (dst.addr().wrapping_neg() & (align - 1)).min(len);
    (head, (len - head) / step * step)
}
