//! Bodies of responses.

use super::header::{u16_at, u32_at, u64_at};
use super::{LOOKUP_ENTRY_BYTES, MAX_REASON_BYTES, Op, ResponseHeader, Status, TOKEN_BYTES, WireError};

/// What a server says about one key of a Lookup.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct LookupEntry {
    /// `Ok`, `Absent`, or why the server cannot tell.
    pub status: Status,
    /// CRC32C of the value; 0 unless `Ok`.
    pub crc32c: u32,
    /// Length of the value in bytes; 0 unless `Ok`.
    pub value_len: u64,
    /// Version of the value; 0 unless `Ok`.
    pub version: u64,
}

impl LookupEntry {
    /// The entry of a key that the server does not have.
    pub const ABSENT: LookupEntry =
        LookupEntry { status: Status::Absent, crc32c: 0, value_len: 0, version: 0 };

    /// Appends the entry to `out`.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&(self.status as u16).to_le_bytes());
        out.extend_from_slice(&0u16.to_le_bytes());
        out.extend_from_slice(&self.crc32c.to_le_bytes());
        out.extend_from_slice(&self.value_len.to_le_bytes());
        out.extend_from_slice(&self.version.to_le_bytes());
    }

    /// Reads an entry.
    ///
    /// # Errors
    ///
    /// An unknown status, a reserved field that is not 0, a value longer than the protocol allows.
    pub fn decode(bytes: &[u8; LOOKUP_ENTRY_BYTES]) -> Result<Self, WireError> {
        let status = u16_at(bytes, 0);
        let reserved = u16_at(bytes, 2);
        if reserved != 0 {
            return Err(WireError::Reserved { field: "reserved", got: reserved.into() });
        }
        let value_len = u64_at(bytes, 8);
        if value_len > super::MAX_VALUE_BYTES {
            return Err(WireError::ValueLength { got: value_len, max: super::MAX_VALUE_BYTES });
        }
        Ok(LookupEntry {
            status: Status::from_wire(status).ok_or(WireError::Status { got: status })?,
            crc32c: u32_at(bytes, 4),
            value_len,
            version: u64_at(bytes, 16),
        })
    }
}

/// Appends an error response with its reason, cut to [`MAX_REASON_BYTES`] at a character's border.
pub fn encode_error(out: &mut Vec<u8>, header: ResponseHeader, reason: &str) {
    let mut end = reason.len().min(MAX_REASON_BYTES);
    while !reason.is_char_boundary(end) {
        end -= 1;
    }
    ResponseHeader { body_len: end as u64, ..header }.encode(out);
    out.extend_from_slice(&reason.as_bytes()[..end]);
}

/// Appends an `Ok` answer to Challenge or Authenticate.
pub fn encode_token(out: &mut Vec<u8>, op: Op, request_id: u64, token: &[u8; TOKEN_BYTES]) {
    let body_len = TOKEN_BYTES as u64;
    ResponseHeader { body_len, ..ResponseHeader::plain(Status::Ok, Some(op), request_id) }.encode(out);
    out.extend_from_slice(token);
}

/// The reason of an error response as text fit for a log or a terminal: control characters and
/// bytes that are not UTF-8 are replaced, because a peer chose them.
pub fn reason_text(body: &[u8]) -> String {
    let shown = &body[..body.len().min(MAX_REASON_BYTES)];
    let text = String::from_utf8_lossy(shown);
    text.chars().map(|c| if c.is_control() { char::REPLACEMENT_CHARACTER } else { c }).collect()
}

impl ResponseHeader {
    /// An `Ok` answer to Lookup with this many entries.
    pub fn lookup(request_id: u64, entries: usize) -> Self {
        let body_len = (entries * LOOKUP_ENTRY_BYTES) as u64;
        ResponseHeader { body_len, ..ResponseHeader::plain(Status::Ok, Some(Op::Lookup), request_id) }
    }
}
