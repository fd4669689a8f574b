//! Bodies of requests.

use super::header::{u16_at, u32_at, u64_at};
use super::{
    Limits, MAX_KEY_BYTES, MAX_LOOKUP_KEYS, MAX_NAMESPACE_BYTES, MAX_VALUE_BYTES, Op, REQUEST_HEADER_BYTES,
    RequestHeader, TOKEN_BYTES, WireError,
};

/// Bytes of a Get's body before its namespace.
pub(super) const GET_FIXED_BYTES: usize = 28;
/// Bytes of a Put's body before its namespace.
pub(super) const PUT_FIXED_BYTES: usize = 16;
/// Bytes before the namespace of a Remove's body and of each key of a Lookup.
pub(super) const KEY_FIXED_BYTES: usize = 4;
/// Bytes of a Lookup's body before its first key.
pub(super) const LOOKUP_FIXED_BYTES: usize = 4;

/// A key within its namespace. Both are the caller's bytes; nothing is assumed of them.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct KeyRef<'a> {
    /// Namespace; empty is the default one.
    pub namespace: &'a [u8],
    /// Key, never empty.
    pub key: &'a [u8],
}

impl<'a> KeyRef<'a> {
    /// A key whose lengths the protocol allows.
    ///
    /// # Errors
    ///
    /// [`WireError::KeyLength`], [`WireError::NamespaceLength`].
    pub fn new(namespace: &'a [u8], key: &'a [u8]) -> Result<Self, WireError> {
        check_key_lengths(namespace.len(), key.len(), &Limits::default())?;
        Ok(KeyRef { namespace, key })
    }

    fn encoded_len(&self) -> usize {
        self.namespace.len() + self.key.len()
    }

    fn encode_lengths(&self, out: &mut Vec<u8>) {
        // `new` keeps both below 2^16.
        out.extend_from_slice(&(self.namespace.len() as u16).to_le_bytes());
        out.extend_from_slice(&(self.key.len() as u16).to_le_bytes());
    }

    fn encode_bytes(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(self.namespace);
        out.extend_from_slice(self.key);
    }
}

pub(super) fn check_key_lengths(
    namespace_len: usize,
    key_len: usize,
    limits: &Limits,
) -> Result<(), WireError> {
    let max = limits.namespace_bytes_max.min(MAX_NAMESPACE_BYTES);
    if namespace_len > max {
        return Err(WireError::NamespaceLength { got: namespace_len, max });
    }
    let max = limits.key_bytes_max.min(MAX_KEY_BYTES);
    if key_len == 0 || key_len > max {
        return Err(WireError::KeyLength { got: key_len, max });
    }
    Ok(())
}

/// Reads the key that begins with its two lengths at `lengths_at` and its bytes at `bytes_at`.
/// Returns it with the position after it.
fn key_at<'a>(
    body: &'a [u8],
    lengths_at: usize,
    bytes_at: usize,
    limits: &Limits,
) -> Result<(KeyRef<'a>, usize), WireError> {
    let mismatch = |contents: usize| WireError::BodyMismatch {
        body_len: body.len() as u64,
        contents_len: contents as u64,
    };
    if body.len() < bytes_at {
        return Err(mismatch(bytes_at));
    }
    let namespace_len = usize::from(u16_at(body, lengths_at));
    let key_len = usize::from(u16_at(body, lengths_at + 2));
    check_key_lengths(namespace_len, key_len, limits)?;
    let key_at = bytes_at + namespace_len;
    let end = key_at + key_len;
    if body.len() < end {
        return Err(mismatch(end));
    }
    Ok((KeyRef { namespace: &body[bytes_at..key_at], key: &body[key_at..end] }, end))
}

fn check_end(body: &[u8], end: usize) -> Result<(), WireError> {
    if body.len() == end {
        return Ok(());
    }
    Err(WireError::BodyMismatch { body_len: body.len() as u64, contents_len: end as u64 })
}

/// Body of a Get.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct GetRequest<'a> {
    /// Which value.
    pub key: KeyRef<'a>,
    /// First byte wanted.
    pub range_offset: u64,
    /// Bytes wanted at most; [`RANGE_TO_END`](super::RANGE_TO_END) means all that follow.
    pub range_len: u64,
    /// Version wanted; [`ANY_VERSION`](super::ANY_VERSION) means whichever is stored.
    pub expected_version: u64,
}

impl<'a> GetRequest<'a> {
    /// Appends the whole request, header included.
    pub fn encode(&self, out: &mut Vec<u8>, request_id: u64) {
        let body_len = (GET_FIXED_BYTES + self.key.encoded_len()) as u64;
        RequestHeader { op: Op::Get, request_id, body_len }.encode(out);
        out.extend_from_slice(&self.range_offset.to_le_bytes());
        out.extend_from_slice(&self.range_len.to_le_bytes());
        out.extend_from_slice(&self.expected_version.to_le_bytes());
        self.key.encode_lengths(out);
        self.key.encode_bytes(out);
    }

    /// Reads a whole body.
    ///
    /// # Errors
    ///
    /// Lengths that break `limits` or do not add up to the body's.
    pub fn decode(body: &'a [u8], limits: &Limits) -> Result<Self, WireError> {
        let (key, end) = key_at(body, 24, GET_FIXED_BYTES, limits)?;
        check_end(body, end)?;
        Ok(GetRequest {
            key,
            range_offset: u64_at(body, 0),
            range_len: u64_at(body, 8),
            expected_version: u64_at(body, 16),
        })
    }
}

/// Body of a Lookup: its keys, checked once when it is decoded.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct LookupRequest<'a> {
    count: usize,
    keys: &'a [u8],
}

impl<'a> LookupRequest<'a> {
    /// Reads a whole body. Every key is checked here; nothing is allocated.
    ///
    /// # Errors
    ///
    /// Lengths that break `limits` or do not add up to the body's.
    pub fn decode(body: &'a [u8], limits: &Limits) -> Result<Self, WireError> {
        if body.len() < LOOKUP_FIXED_BYTES {
            let contents_len = LOOKUP_FIXED_BYTES as u64;
            return Err(WireError::BodyMismatch { body_len: body.len() as u64, contents_len });
        }
        let count = u32_at(body, 0);
        let max = limits.lookup_keys_max.min(MAX_LOOKUP_KEYS);
        if u64::from(count) > max as u64 {
            return Err(WireError::LookupCount { got: count.into(), max });
        }
        let keys = &body[LOOKUP_FIXED_BYTES..];
        let mut at = 0;
        for _ in 0..count {
            (_, at) = key_at(keys, at, at + KEY_FIXED_BYTES, limits)?;
        }
        check_end(keys, at)?;
        Ok(LookupRequest { count: count as usize, keys })
    }

    /// Number of keys.
    pub fn len(&self) -> usize {
        self.count
    }

    /// Whether it asks for nothing.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// The keys in the order asked.
    pub fn iter(&self) -> impl Iterator<Item = KeyRef<'a>> + use<'a> {
        let mut rest = self.keys;
        std::iter::from_fn(move || {
            if rest.is_empty() {
                return None;
            }
            // `decode` has walked the same bytes: the lengths hold.
            let key_at = KEY_FIXED_BYTES + usize::from(u16_at(rest, 0));
            let end = key_at + usize::from(u16_at(rest, 2));
            let entry = KeyRef { namespace: &rest[KEY_FIXED_BYTES..key_at], key: &rest[key_at..end] };
            rest = &rest[end..];
            Some(entry)
        })
    }
}

/// Start of a Put's body: all but the value's bytes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct PutRequest<'a> {
    /// Under which key to store.
    pub key: KeyRef<'a>,
    /// CRC32C of the value's bytes.
    pub value_crc32c: u32,
    /// Length of the value in bytes.
    pub value_len: u64,
}

impl<'a> PutRequest<'a> {
    /// Appends header and start of the body; exactly `value_len` bytes must be sent after it.
    pub fn encode_head(&self, out: &mut Vec<u8>, request_id: u64) {
        let body_len = (PUT_FIXED_BYTES + self.key.encoded_len()) as u64 + self.value_len;
        RequestHeader { op: Op::Put, request_id, body_len }.encode(out);
        self.key.encode_lengths(out);
        out.extend_from_slice(&self.value_crc32c.to_le_bytes());
        out.extend_from_slice(&self.value_len.to_le_bytes());
        self.key.encode_bytes(out);
    }

    /// The length of the start of the body (fixed part, namespace, key), known from its fixed part.
    ///
    /// # Errors
    ///
    /// Lengths that break `limits` or do not add up to `body_len`.
    pub(super) fn head_len(
        fixed: &[u8; PUT_FIXED_BYTES],
        body_len: u64,
        limits: &Limits,
    ) -> Result<usize, WireError> {
        let namespace_len = usize::from(u16_at(fixed, 0));
        let key_len = usize::from(u16_at(fixed, 2));
        check_key_lengths(namespace_len, key_len, limits)?;
        let head_len = PUT_FIXED_BYTES + namespace_len + key_len;
        let value_len = u64_at(fixed, 8);
        let max = limits.value_bytes_max.min(MAX_VALUE_BYTES);
        if value_len > max {
            return Err(WireError::ValueLength { got: value_len, max });
        }
        let contents_len = head_len as u64 + value_len;
        if contents_len != body_len {
            return Err(WireError::BodyMismatch { body_len, contents_len });
        }
        Ok(head_len)
    }

    /// Reads the start of a body, as long as [`PutRequest::head_len`] says.
    pub(super) fn decode_head(head: &'a [u8], limits: &Limits) -> Result<Self, WireError> {
        let (key, end) = key_at(head, 0, PUT_FIXED_BYTES, limits)?;
        check_end(head, end)?;
        Ok(PutRequest { key, value_crc32c: u32_at(head, 4), value_len: u64_at(head, 8) })
    }
}

impl<'a> KeyRef<'a> {
    /// Reads the body of a Remove.
    pub(super) fn decode(body: &'a [u8], limits: &Limits) -> Result<Self, WireError> {
        let (key, end) = key_at(body, 0, KEY_FIXED_BYTES, limits)?;
        check_end(body, end)?;
        Ok(key)
    }
}

/// Appends a Get of `range_len` bytes from `range_offset` on
/// ([`RANGE_TO_END`](super::RANGE_TO_END), [`ANY_VERSION`](super::ANY_VERSION)).
///
/// # Errors
///
/// A key or namespace of a length that the protocol forbids. Nothing is appended then.
pub fn encode_get(
    out: &mut Vec<u8>,
    request_id: u64,
    namespace: &[u8],
    key: &[u8],
    range_offset: u64,
    range_len: u64,
    expected_version: u64,
) -> Result<(), WireError> {
    let key = KeyRef::new(namespace, key)?;
    GetRequest { key, range_offset, range_len, expected_version }.encode(out, request_id);
    Ok(())
}

/// Appends one Lookup with as many of the leading `keys` as fit `limits` and returns how many those
/// are: at least one unless `keys` is empty. The caller asks for the others in further requests.
///
/// # Errors
///
/// A key or namespace (among those looked at) of a length that the protocol forbids. Nothing is
/// appended then.
pub fn encode_lookup<'a>(
    out: &mut Vec<u8>,
    request_id: u64,
    keys: impl IntoIterator<Item = (&'a [u8], &'a [u8])>,
    limits: &Limits,
) -> Result<usize, WireError> {
    let start = out.len();
    out.resize(start + REQUEST_HEADER_BYTES + LOOKUP_FIXED_BYTES, 0);
    let body_start = start + REQUEST_HEADER_BYTES;
    let mut count: usize = 0;
    for (namespace, key) in keys {
        let key = match KeyRef::new(namespace, key) {
            Ok(key) => key,
            Err(error) => {
                out.truncate(start);
                return Err(error);
            }
        };
        let body_len = out.len() - body_start + KEY_FIXED_BYTES + key.encoded_len();
        let full = count >= limits.lookup_keys_max.min(MAX_LOOKUP_KEYS)
            || (count > 0 && body_len > limits.small_body_bytes_max);
        if full {
            break;
        }
        key.encode_lengths(out);
        key.encode_bytes(out);
        count += 1;
    }
    let body_len = (out.len() - body_start) as u64;
    let mut header = [0; REQUEST_HEADER_BYTES];
    RequestHeader { op: Op::Lookup, request_id, body_len }.encode_into(&mut header);
    out[start..body_start].copy_from_slice(&header);
    // At most MAX_LOOKUP_KEYS.
    out[body_start..body_start + LOOKUP_FIXED_BYTES].copy_from_slice(&(count as u32).to_le_bytes());
    Ok(count)
}

/// Appends a Put without its value; exactly `value_len` bytes with that CRC32C must be sent after it.
///
/// # Errors
///
/// A key, namespace or value of a length that the protocol forbids. Nothing is appended then.
pub fn encode_put_head(
    out: &mut Vec<u8>,
    request_id: u64,
    namespace: &[u8],
    key: &[u8],
    value_len: u64,
    value_crc32c: u32,
) -> Result<(), WireError> {
    let key = KeyRef::new(namespace, key)?;
    if value_len > MAX_VALUE_BYTES {
        return Err(WireError::ValueLength { got: value_len, max: MAX_VALUE_BYTES });
    }
    PutRequest { key, value_crc32c, value_len }.encode_head(out, request_id);
    Ok(())
}

/// Appends a Remove.
///
/// # Errors
///
/// A key or namespace of a length that the protocol forbids. Nothing is appended then.
pub fn encode_remove(
    out: &mut Vec<u8>,
    request_id: u64,
    namespace: &[u8],
    key: &[u8],
) -> Result<(), WireError> {
    let key = KeyRef::new(namespace, key)?;
    let body_len = (KEY_FIXED_BYTES + key.encoded_len()) as u64;
    RequestHeader { op: Op::Remove, request_id, body_len }.encode(out);
    key.encode_lengths(out);
    key.encode_bytes(out);
    Ok(())
}

/// Appends a Ping.
pub fn encode_ping(out: &mut Vec<u8>, request_id: u64) {
    RequestHeader { op: Op::Ping, request_id, body_len: 0 }.encode(out);
}

/// Appends a Stats request.
pub fn encode_stats(out: &mut Vec<u8>, request_id: u64) {
    RequestHeader { op: Op::Stats, request_id, body_len: 0 }.encode(out);
}

/// Appends a Challenge with the client's nonce.
pub fn encode_challenge(out: &mut Vec<u8>, request_id: u64, nonce: &[u8; TOKEN_BYTES]) {
    RequestHeader { op: Op::Challenge, request_id, body_len: TOKEN_BYTES as u64 }.encode(out);
    out.extend_from_slice(nonce);
}

/// Appends an Authenticate with the client's proof.
pub fn encode_authenticate(out: &mut Vec<u8>, request_id: u64, proof: &[u8; TOKEN_BYTES]) {
    RequestHeader { op: Op::Authenticate, request_id, body_len: TOKEN_BYTES as u64 }.encode(out);
    out.extend_from_slice(proof);
}
