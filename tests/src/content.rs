//! Content derived from key, version and offset: a byte at the wrong place, of the wrong key or of the
//! wrong version does not match.

/// The name of the `n`-th test value of `len` bytes. [`named_len`] reads the length back.
pub fn name(len: usize, n: usize) -> String {
    format!("{len}/{n}")
}

/// The length that a name made by [`name`] carries.
pub fn named_len(key: &[u8]) -> Option<usize> {
    std::str::from_utf8(key).ok()?.split_once('/')?.0.parse().ok()
}

fn seed(key: &[u8], version: u64) -> u64 {
    // FNV-1a, 64 bits (Fowler, Noll, Vo): only has to tell test keys apart.
    let hash = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
    let hash = key.iter().chain(&version.to_le_bytes()).fold(0xcbf2_9ce4_8422_2325, hash);
    word(hash, 0)
}

/// Word `index` of the stream of `seed` (SplitMix64).
fn word(seed: u64, index: u64) -> u64 {
    let mut x = seed.wrapping_add(index.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// The first `len` bytes of the value of `key` in `version`.
pub fn bytes(key: &[u8], version: u64, len: usize) -> Vec<u8> {
    let seed = seed(key, version);
    let mut bytes = Vec::with_capacity(len + 7);
    for index in 0..len.div_ceil(8) as u64 {
        bytes.extend_from_slice(&word(seed, index).to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

/// The first difference between `got` and the bytes from `offset` on of the value of `key` in `version`:
/// its offset in the value.
pub fn difference(key: &[u8], version: u64, offset: usize, got: &[u8]) -> Option<usize> {
    let seed = seed(key, version);
    let mut at = offset;
    let mut rest = got;
    while !rest.is_empty() {
        let want = word(seed, (at / 8) as u64).to_le_bytes();
        let want = &want[at % 8..];
        let len = want.len().min(rest.len());
        if rest[..len] != want[..len] {
            return (0..len).find(|&i| rest[i] != want[i]).map(|i| at + i);
        }
        at += len;
        rest = &rest[len..];
    }
    None
}

/// Asserts that `got` are the bytes from `offset` on of the value of `key` in `version`.
#[track_caller]
pub fn check(key: &[u8], version: u64, offset: usize, got: &[u8]) {
    if let Some(at) = difference(key, version, offset, got) {
        panic!("key {} version {version}: byte {at} differs", key.escape_ascii());
    }
}

/// Asserts that a lease holds the whole value of `key` in `version`, `len` bytes, and that its checksum holds.
#[track_caller]
pub fn check_lease(key: &[u8], version: u64, len: usize, lease: &hotslice::Lease) {
    assert_eq!(lease.len(), len as u64, "length of {}", key.escape_ascii());
    let mut at = 0;
    for segment in lease.segments() {
        check(key, version, at, segment);
        at += segment.len();
    }
    assert_eq!(at, len, "segments of {}", key.escape_ascii());
    if let Err(error) = lease.verify() {
        panic!("{}: {error}", key.escape_ascii());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_are_found_where_they_are() {
        let mut value = bytes(b"k", 1, 1001);
        assert_eq!(difference(b"k", 1, 0, &value), None);
        assert_eq!(difference(b"k", 1, 13, &value[13..77]), None);
        assert!(difference(b"k", 2, 0, &value).is_some());
        assert!(difference(b"l", 1, 0, &value).is_some());
        assert!(difference(b"k", 1, 8, &value).is_some());
        value[1000] ^= 1;
        assert_eq!(difference(b"k", 1, 0, &value), Some(1000));
        assert_eq!(named_len(name(4096, 3).as_bytes()), Some(4096));
    }
}
