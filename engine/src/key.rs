//! Keys and namespaces.

use crate::{Error, Result};
use std::hash::{BuildHasher, Hasher};

/// Longest key in bytes. A key has at least one byte.
pub const KEY_BYTES_MAX: usize = crate::wire::MAX_KEY_BYTES;

/// Longest name of a namespace in bytes. The empty name is the default namespace.
pub const NAMESPACE_BYTES_MAX: usize = crate::wire::MAX_NAMESPACE_BYTES;

/// A namespace: a tenant, a model, a layout. Keys of different namespaces never meet.
///
/// Got from [`Cache::namespace`](crate::Cache::namespace); stands for its name in every cache of the process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Namespace(pub(crate) u32);

impl Namespace {
    /// The default namespace, whose name is empty.
    pub const DEFAULT: Namespace = Namespace(0);

    /// `bytes` as a key of this namespace.
    pub fn key<'a>(self, bytes: &'a (impl AsRef<[u8]> + ?Sized)) -> Key<'a> {
        Key { namespace: self, bytes: bytes.as_ref() }
    }
}

/// A key: the caller's bytes (1 to [`KEY_BYTES_MAX`]) within a namespace. Compared in full, never by hash
/// alone. Byte strings and `str` convert into keys of the default namespace.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Key<'a> {
    pub(crate) namespace: Namespace,
    pub(crate) bytes: &'a [u8],
}

impl<'a> Key<'a> {
    /// The key's bytes.
    pub fn bytes(self) -> &'a [u8] {
        self.bytes
    }

    /// The key's namespace.
    pub fn namespace(self) -> Namespace {
        self.namespace
    }

    pub(crate) fn check(self) -> Result<Self> {
        if self.bytes.is_empty() || self.bytes.len() > KEY_BYTES_MAX {
            return Err(Error::KeyLength { len: self.bytes.len(), max: KEY_BYTES_MAX });
        }
        Ok(self)
    }

    pub(crate) fn to_owned(self) -> OwnedKey {
        OwnedKey { namespace: self.namespace, bytes: self.bytes.into() }
    }
}

impl std::fmt::Debug for Key<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:\"{}\"", self.namespace.0, self.bytes.escape_ascii())
    }
}

impl<'a> From<&'a [u8]> for Key<'a> {
    fn from(bytes: &'a [u8]) -> Self {
        Namespace::DEFAULT.key(bytes)
    }
}

impl<'a, const N: usize> From<&'a [u8; N]> for Key<'a> {
    fn from(bytes: &'a [u8; N]) -> Self {
        Namespace::DEFAULT.key(bytes)
    }
}

impl<'a> From<&'a str> for Key<'a> {
    fn from(text: &'a str) -> Self {
        Namespace::DEFAULT.key(text)
    }
}

impl<'a> From<&'a String> for Key<'a> {
    fn from(text: &'a String) -> Self {
        Namespace::DEFAULT.key(text)
    }
}

impl<'a> From<&'a Vec<u8>> for Key<'a> {
    fn from(bytes: &'a Vec<u8>) -> Self {
        Namespace::DEFAULT.key(bytes)
    }
}

/// A key that a shard keeps.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct OwnedKey {
    pub(crate) namespace: Namespace,
    pub(crate) bytes: KeyBytes,
}

/// Bytes of a key that stand in place if they are few, so that comparing one costs no further cache miss.
#[derive(Clone)]
pub(crate) enum KeyBytes {
    Inline { len: u8, bytes: [u8; KeyBytes::INLINE_MAX] },
    Heap(Box<[u8]>),
}

impl KeyBytes {
    /// What still lets a slot of the table, with everything else in it, take two cache lines.
    const INLINE_MAX: usize = 46;
}

impl From<&[u8]> for KeyBytes {
    fn from(key: &[u8]) -> Self {
        if key.len() > Self::INLINE_MAX {
            return Self::Heap(key.into());
        }
        let mut bytes = [0; Self::INLINE_MAX];
        bytes[..key.len()].copy_from_slice(key);
        // At most 46.
        Self::Inline { len: key.len() as u8, bytes }
    }
}

impl std::ops::Deref for KeyBytes {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        match self {
            Self::Inline { len, bytes } => &bytes[..usize::from(*len)],
            Self::Heap(bytes) => bytes,
        }
    }
}

impl PartialEq for KeyBytes {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

impl Eq for KeyBytes {}

impl OwnedKey {
    pub(crate) fn borrow(&self) -> Key<'_> {
        Key { namespace: self.namespace, bytes: &self.bytes }
    }
}

/// Hashes keys with a seed of this cache, so that nobody outside can aim keys at one bucket.
#[derive(Clone)]
pub(crate) struct KeyHasher(foldhash::fast::FixedState);

impl KeyHasher {
    pub(crate) fn new() -> Self {
        // The standard library's hasher is seeded from the operating system's randomness.
        Self(foldhash::fast::FixedState::with_seed(
            std::collections::hash_map::RandomState::new().build_hasher().finish(),
        ))
    }

    #[inline]
    pub(crate) fn hash(&self, key: Key<'_>) -> u64 {
        let mut hasher = self.0.build_hasher();
        hasher.write(key.bytes);
        hasher.write_u32(key.namespace.0);
        hasher.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_and_long_keys_are_kept_as_they_are() {
        for len in [1, 45, 46, 47, KEY_BYTES_MAX] {
            let bytes: Vec<u8> = (0..len).map(|i| i as u8).collect();
            let owned = Namespace(7).key(&bytes).to_owned();
            assert_eq!((owned.borrow().bytes(), owned.namespace), (bytes.as_slice(), Namespace(7)));
            assert!(owned.clone() == owned);
            let longer = [bytes.as_slice(), &[0]].concat();
            assert!(Namespace(7).key(&longer).to_owned() != owned, "a zero at the end counts");
        }
    }
}
