//! Contents that derive from key and offset, and the check of every byte against them.

/// A value's contents: 32-bit little-endian words, each a mix of the key's seed and the word's number, so
/// that no two words nearby, and no two keys at the same offset, agree other than by chance.
#[derive(Clone, Copy)]
pub struct Content {
    seed: u32,
}

/// A byte that is not what it should be.
#[derive(Debug, PartialEq, Eq)]
pub struct Difference {
    pub offset: u64,
    pub expected: u8,
    pub got: u8,
}

impl std::fmt::Display for Difference {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { offset, expected, got } = self;
        write!(f, "wrong byte at offset {offset}: expected {expected:#04x}, got {got:#04x}")
    }
}

impl Content {
    pub fn of(key: &str) -> Self {
        Self { seed: crc32c::crc32c(key.as_bytes()) }
    }

    #[inline(always)]
    fn word(self, number: u32) -> u32 {
        // Two rounds of multiply and shift, as in the finaliser of MurmurHash3 (Appleby).
        let mut word = number.wrapping_mul(0x9e37_79b1) ^ self.seed;
        word = (word ^ (word >> 15)).wrapping_mul(0x85eb_ca6b);
        word ^ (word >> 13)
    }

    fn byte(self, offset: u64) -> u8 {
        self.word((offset / 4) as u32).to_le_bytes()[(offset % 4) as usize]
    }

    /// The first `len` bytes.
    pub fn bytes(self, len: usize) -> Vec<u8> {
        let mut bytes: Vec<u8> =
            (0..len.div_ceil(4) as u32).flat_map(|number| self.word(number).to_le_bytes()).collect();
        bytes.truncate(len);
        bytes
    }

    /// Checks a piece that stands at `offset`, a multiple of four.
    pub fn check(self, offset: u64, piece: &[u8]) -> Result<(), Difference> {
        debug_assert!(offset.is_multiple_of(4));
        if self.equals((offset / 4) as u32, piece) {
            return Ok(());
        }
        for (i, &got) in piece.iter().enumerate() {
            let expected = self.byte(offset + i as u64);
            if got != expected {
                return Err(Difference { offset: offset + i as u64, expected, got });
            }
        }
        Ok(())
    }

    fn equals(self, first: u32, piece: &[u8]) -> bool {
        #[cfg(target_arch = "x86_64")]
        if std::arch::is_x86_feature_detected!("avx2") {
            // SAFETY: the processor has AVX2.
            return unsafe { self.equals_avx2(first, piece) };
        }
        self.equals_anywhere(first, piece)
    }

    /// The same code, compiled for wider vectors.
    ///
    /// # Safety
    /// The processor has AVX2.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2")]
    unsafe fn equals_avx2(self, first: u32, piece: &[u8]) -> bool {
        self.equals_anywhere(first, piece)
    }

    #[inline(always)]
    fn equals_anywhere(self, first: u32, piece: &[u8]) -> bool {
        let (words, tail) = piece.as_chunks::<4>();
        let mut number = first;
        // Blocks without a branch inside, so that they become vector code.
        for block in words.chunks(1024) {
            let mut different = 0;
            for (i, word) in block.iter().enumerate() {
                different |= u32::from_le_bytes(*word) ^ self.word(number.wrapping_add(i as u32));
            }
            if different != 0 {
                return false;
            }
            number = number.wrapping_add(block.len() as u32);
        }
        self.word(number).to_le_bytes().starts_with(tail)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_changed_byte_is_found() {
        let content = Content::of("a key");
        for len in [0, 1, 3, 4, 5, 4095, 4096, 4097, 9001] {
            let bytes = content.bytes(len);
            assert_eq!(content.check(0, &bytes), Ok(()));
            for at in (0..len).step_by(97).chain(len.checked_sub(1)) {
                let mut wrong = bytes.clone();
                wrong[at] ^= 0x10;
                let difference = Difference { offset: at as u64, expected: bytes[at], got: wrong[at] };
                assert_eq!(content.check(0, &wrong), Err(difference));
            }
        }
    }

    #[test]
    fn keys_and_offsets_matter() {
        let bytes = Content::of("a").bytes(8192);
        assert!(Content::of("b").check(0, &bytes).is_err());
        assert!(Content::of("a").check(4096, &bytes[..4096]).is_err());
        assert_eq!(Content::of("a").check(4096, &bytes[4096..]), Ok(()));
    }
}
