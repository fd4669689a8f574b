//! CRC32C (Castagnoli) at the speed of the receive path.
//!
//! Every received byte is summed once, on the core that received it, so the sum has to cost little beside
//! the kernel's own copy. Long runs are folded with carry-less multiplication of wide vectors where the
//! processor has it (VPCLMULQDQ), which is two to four times as fast as the CRC32 instruction; everything
//! else is the crate `crc32c`.
//!
//! The method is that of Gopal, Ozturk, Guilford et al., "Fast CRC Computation for Generic Polynomials Using
//! PCLMULQDQ Instruction" (Intel, 2009). Constants are computed here, from the polynomial alone.

/// Continues a CRC32C: `append(append(0, a), b)` is that of `a` followed by `b`.
#[inline]
pub fn crc32c_append(crc: u32, bytes: &[u8]) -> u32 {
    #[cfg(target_arch = "x86_64")]
    if bytes.len() >= x86::FOLD_BYTES_MIN {
        return x86::append(crc, bytes);
    }
    crc32c::crc32c_append(crc, bytes)
}

/// CRC32C of `bytes`.
pub fn crc32c(bytes: &[u8]) -> u32 {
    crc32c_append(0, bytes)
}

/// `x^exponent` modulo the polynomial, with the coefficient of `x^31` in bit 0.
#[cfg(target_arch = "x86_64")]
const fn power_of_x(exponent: u32) -> u32 {
    const POLYNOMIAL: u32 = 0x82f6_3b78;
    let mut power: u32 = 1 << 31;
    let mut n = 0;
    while n < exponent {
        power = (power >> 1) ^ (POLYNOMIAL & (power & 1).wrapping_neg());
        n += 1;
    }
    power
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::power_of_x;
    use std::arch::x86_64::{
        __m256i, __m512i, _mm256_clmulepi64_epi128, _mm256_loadu_si256, _mm256_set_epi64x, _mm256_storeu_si256,
        _mm256_xor_si256, _mm512_clmulepi64_epi128, _mm512_loadu_si512, _mm512_set_epi64, _mm512_storeu_si512,
        _mm512_xor_si512,
    };

    /// Below this length folding gains nothing.
    pub(super) const FOLD_BYTES_MIN: usize = 1024;

    /// Independent accumulators, enough to hide the latency of the multiplication.
    const LANES: usize = 4;

    /// The two factors that move 128 bits forward by `bytes`, for their earlier and their later half.
    ///
    /// A carry-less product of two reflected 64-bit values is, as a reflected 128-bit value, their product
    /// times `x`; hence the exponents are one less than the distance.
    const fn factors(bytes: usize) -> (i64, i64) {
        let bits = bytes as u32 * 8;
        (((power_of_x(bits + 63) as u64) << 32) as i64, ((power_of_x(bits - 1) as u64) << 32) as i64)
    }

    pub(super) fn append(crc: u32, bytes: &[u8]) -> u32 {
        if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("vpclmulqdq") {
            // SAFETY: the processor has both.
            unsafe { fold_512(crc, bytes) }
        } else if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("vpclmulqdq") {
            // SAFETY: the processor has both.
            unsafe { fold_256(crc, bytes) }
        } else {
            crc32c::crc32c_append(crc, bytes)
        }
    }

    /// Ends a fold: what is left of the folded part has the same remainder as all of it had, and `crc` went
    /// into its first four bytes. The crate's functions invert the sum before and after, hence the `!`.
    fn finish(folded: &[u8], tail: &[u8]) -> u32 {
        let crc = crc32c::crc32c_append(!0, folded);
        crc32c::crc32c_append(crc, tail)
    }

    /// # Safety
    /// The processor has AVX2 and VPCLMULQDQ.
    #[target_feature(enable = "avx2,vpclmulqdq")]
    unsafe fn fold_256(crc: u32, bytes: &[u8]) -> u32 {
        const STEP: usize = LANES * 32;
        const FACTORS: (i64, i64) = factors(STEP);
        let (steps, tail) = bytes.as_chunks::<STEP>();
        let factors = _mm256_set_epi64x(FACTORS.1, FACTORS.0, FACTORS.1, FACTORS.0);
        // SAFETY: each pointer is to 32 bytes of a step of 128.
        let load = |step: &[u8; STEP], lane: usize| unsafe {
            _mm256_loadu_si256(step.as_ptr().add(lane * 32).cast::<__m256i>())
        };
        let mut lanes: [__m256i; LANES] = std::array::from_fn(|lane| load(&steps[0], lane));
        lanes[0] = _mm256_xor_si256(lanes[0], _mm256_set_epi64x(0, 0, 0, i64::from(!crc)));
        for step in &steps[1..] {
            for (lane, sum) in lanes.iter_mut().enumerate() {
                let earlier = _mm256_clmulepi64_epi128::<0x00>(*sum, factors);
                let later = _mm256_clmulepi64_epi128::<0x11>(*sum, factors);
                *sum = _mm256_xor_si256(_mm256_xor_si256(earlier, later), load(step, lane));
            }
        }
        let mut folded = [0u8; STEP];
        for (lane, sum) in lanes.iter().enumerate() {
            // SAFETY: 32 bytes of an array of 128.
            unsafe { _mm256_storeu_si256(folded.as_mut_ptr().add(lane * 32).cast::<__m256i>(), *sum) };
        }
        finish(&folded, tail)
    }

    /// # Safety
    /// The processor has AVX-512F and VPCLMULQDQ.
    #[target_feature(enable = "avx512f,vpclmulqdq")]
    unsafe fn fold_512(crc: u32, bytes: &[u8]) -> u32 {
        const STEP: usize = LANES * 64;
        const FACTORS: (i64, i64) = factors(STEP);
        let (f, g) = FACTORS;
        let (steps, tail) = bytes.as_chunks::<STEP>();
        let factors = _mm512_set_epi64(g, f, g, f, g, f, g, f);
        // SAFETY: each pointer is to 64 bytes of a step of 256.
        let load = |step: &[u8; STEP], lane: usize| unsafe {
            _mm512_loadu_si512(step.as_ptr().add(lane * 64).cast::<__m512i>())
        };
        let mut lanes: [__m512i; LANES] = std::array::from_fn(|lane| load(&steps[0], lane));
        lanes[0] = _mm512_xor_si512(lanes[0], _mm512_set_epi64(0, 0, 0, 0, 0, 0, 0, i64::from(!crc)));
        for step in &steps[1..] {
            for (lane, sum) in lanes.iter_mut().enumerate() {
                let earlier = _mm512_clmulepi64_epi128::<0x00>(*sum, factors);
                let later = _mm512_clmulepi64_epi128::<0x11>(*sum, factors);
                *sum = _mm512_xor_si512(_mm512_xor_si512(earlier, later), load(step, lane));
            }
        }
        let mut folded = [0u8; STEP];
        for (lane, sum) in lanes.iter().enumerate() {
            // SAFETY: 64 bytes of an array of 256.
            unsafe { _mm512_storeu_si512(folded.as_mut_ptr().add(lane * 64).cast::<__m512i>(), *sum) };
        }
        finish(&folded, tail)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn known_values() {
        // RFC 3720, appendix B.4.
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
    }

    proptest! {
        /// Against the CRC32 instruction, over lengths on both sides of every step, split anywhere.
        #[test]
        fn agrees_with_the_crate(seed in any::<u32>(), len in 0usize..6000, split in any::<usize>(), offset in 0usize..64) {
            let bytes: Vec<u8> = (0..(len + offset) as u32)
                .map(|i| (i.wrapping_mul(seed | 1) >> 13) as u8)
                .collect();
            let bytes = &bytes[offset..];
            let want = crc32c::crc32c_append(seed, bytes);
            prop_assert_eq!(crc32c_append(seed, bytes), want);
            let (a, b) = bytes.split_at(split % (len + 1));
            prop_assert_eq!(crc32c_append(crc32c_append(seed, a), b), want);
        }
    }

    /// `cargo test --release -p hotslice --lib print_checksum_speed -- --ignored --nocapture`
    #[test]
    #[ignore = "prints measurements"]
    fn print_checksum_speed() {
        for len in [4096, 64 << 10, 256 << 10, 1 << 20, 10_000_000] {
            let bytes = vec![3u8; len];
            for (name, sum) in [
                ("crate crc32c", crc32c::crc32c_append as fn(u32, &[u8]) -> u32),
                ("this module", crc32c_append),
            ] {
                let mut best = f64::MAX;
                for _ in 0..20 {
                    let started = std::time::Instant::now();
                    let times = (64 << 20) / len;
                    for _ in 0..times {
                        std::hint::black_box(sum(0, std::hint::black_box(&bytes)));
                    }
                    best = best.min(started.elapsed().as_secs_f64() / times as f64);
                }
                println!("{len:>9} bytes  {name:<13} {:6.1} GB/s", len as f64 / best / 1e9);
            }
        }
    }
}
