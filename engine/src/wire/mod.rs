//! The slice protocol, version 1: a sans-I/O codec. Bytes in, typed values and events out.
//!
//! It knows nothing of sockets, memory or what a key means; it is used by the shard (responses), by
//! the slice server (requests) and by the blocking client. Decoding never panics, never allocates by a
//! length that a peer announced, and says in a [`WireError`] what was wrong and what is allowed.
//!
//! # Frames
//!
//! All numbers are little endian. A client sends *request header, body*; a server answers every
//! request with *response header, body*, in any order: the `request_id`, chosen by the client, says
//! which request an answer belongs to. Reserved fields and flags are 0 and checked, so that a later
//! version can use them. Both headers end with a CRC32C over all their bytes before it.
//!
//! | request header, 40 bytes | | response header, 64 bytes | |
//! |---|---|---|---|
//! | `magic` u32 | "HSQ1" | `magic` u32 | "HSR1" |
//! | `version` u8 | 1 | `version` u8 | 1 |
//! | `op` u8 | [`Op`] | `op` u8 | echo; 0 when the request's was unreadable |
//! | `flags` u16 | 0 | `status` u16 | [`Status`] |
//! | `request_id` u64 | | `request_id` u64 | echo; 0 when the request's was unreadable |
//! | `body_len` u64 | bytes that follow | `body_len` u64 | bytes that follow |
//! | reserved u64 | 0 | `value_len` u64 | of the whole value |
//! | reserved u32 | 0 | `value_version` u64 | never 0 for a stored value |
//! | `header_crc32c` u32 | over 36 bytes | `range_offset` u64 | of the body within the value |
//! | | | `value_crc32c` u32 | of the whole value |
//! | | | flags u32, reserved u32 | 0 |
//! | | | `header_crc32c` u32 | over 60 bytes |
//!
//! # Bodies
//!
//! | op | request body | body of an `Ok` response |
//! |---|---|---|
//! | Get | `range_offset` u64, `range_len` u64 (at most; fewer where the value ends before; [`RANGE_TO_END`]: all that follows), `expected_version` u64 ([`ANY_VERSION`]: any), `namespace_len` u16, `key_len` u16, namespace, key | the range's bytes |
//! | Lookup | `count` u32, then per key `namespace_len` u16, `key_len` u16, namespace, key | per key a [`LookupEntry`] of 24 bytes, in the order asked |
//! | Put | `namespace_len` u16, `key_len` u16, `value_crc32c` u32, `value_len` u64, namespace, key, value | none; the header tells the new version |
//! | Remove | `namespace_len` u16, `key_len` u16, namespace, key | none |
//! | Ping | none | none |
//! | Stats | none | JSON text |
//! | Challenge | client's nonce, 32 bytes | server's nonce, 32 bytes |
//! | Authenticate | client's proof, 32 bytes | server's proof, 32 bytes |
//!
//! What the last two mean is in [`auth`](crate::auth). A server that demands a secret answers everything but Ping
//! with [`Status::Unauthenticated`] before it; the value of a Put is not read then, which costs the connection,
//! as a wrong proof does.
//!
//! Every other status may carry a reason as UTF-8 text of at most [`MAX_REASON_BYTES`]. A key has 1 to
//! [`MAX_KEY_BYTES`] bytes, a namespace 0 (the default one) to [`MAX_NAMESPACE_BYTES`].

mod decoder;
mod error;
mod header;
mod request;
mod response;

#[cfg(test)]
mod tests;

pub use decoder::{RequestDecoder, RequestError, RequestEvent};
pub use error::WireError;
pub use header::{RequestHeader, ResponseHeader};
pub use request::{
    GetRequest, KeyRef, LookupRequest, PutRequest, encode_authenticate, encode_challenge, encode_get,
    encode_lookup, encode_ping, encode_put_head, encode_remove, encode_stats,
};
pub use response::{LookupEntry, encode_error, encode_token, reason_text};

/// Length of every request header in bytes.
pub const REQUEST_HEADER_BYTES: usize = 40;
/// Length of every response header in bytes.
pub const RESPONSE_HEADER_BYTES: usize = 64;
/// Length of one key's answer in the body of a Lookup response, in bytes.
pub const LOOKUP_ENTRY_BYTES: usize = 24;
/// Length of a nonce and of a proof in bytes: the bodies of Challenge and Authenticate and of their answers.
pub const TOKEN_BYTES: usize = 32;
/// "HSQ1" as the little-endian number that begins a request.
pub const REQUEST_MAGIC: u32 = u32::from_le_bytes(*b"HSQ1");
/// "HSR1" as the little-endian number that begins a response.
pub const RESPONSE_MAGIC: u32 = u32::from_le_bytes(*b"HSR1");
/// The protocol version that this codec speaks.
pub const PROTOCOL_VERSION: u8 = 1;

/// Longest key in bytes. The shortest has one byte.
pub const MAX_KEY_BYTES: usize = 4096;
/// Longest namespace in bytes. The empty namespace is the default one.
pub const MAX_NAMESPACE_BYTES: usize = 255;
/// Longest value that a header may announce: 1 TiB. Far above any slice; it keeps sums of lengths
/// and offsets from overflowing.
pub const MAX_VALUE_BYTES: u64 = 1 << 40;
/// Most keys of one Lookup. More are asked for in several requests.
pub const MAX_LOOKUP_KEYS: usize = 16_384;
/// Longest body of a request other than Put, in bytes: 1 MiB.
pub const MAX_SMALL_BODY_BYTES: usize = 1 << 20;
/// Longest reason of an error response in bytes.
pub const MAX_REASON_BYTES: usize = 512;
/// Longest body of a Stats response in bytes.
pub const MAX_STATS_BYTES: usize = 64 << 10;

/// `range_len` of a Get that wants everything from `range_offset` on.
pub const RANGE_TO_END: u64 = u64::MAX;
/// `expected_version` of a Get that takes whatever version is stored.
pub const ANY_VERSION: u64 = 0;

/// What a request asks for.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[repr(u8)]
pub enum Op {
    /// A value or a range of it.
    Get = 1,
    /// Length, version and checksum of many keys.
    Lookup = 2,
    /// Store a value, replacing the one under the key.
    Put = 3,
    /// Forget a key.
    Remove = 4,
    /// Nothing: tells that the peer is alive and speaks this version.
    Ping = 5,
    /// The server's counters as JSON text.
    Stats = 6,
    /// Asks for a nonce to prove the knowledge of a secret with, and gives one.
    Challenge = 7,
    /// Proves it, and asks the server for its proof.
    Authenticate = 8,
}

impl Op {
    /// The operation with this number on the wire.
    pub fn from_wire(number: u8) -> Option<Self> {
        Some(match number {
            1 => Op::Get,
            2 => Op::Lookup,
            3 => Op::Put,
            4 => Op::Remove,
            5 => Op::Ping,
            6 => Op::Stats,
            7 => Op::Challenge,
            8 => Op::Authenticate,
            _ => return None,
        })
    }
}

/// How a request ended. The numbers are spaced so that later ones find a place among their kind.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[repr(u16)]
pub enum Status {
    /// Done.
    Ok = 0,
    /// The server does not have the key.
    Absent = 10,
    /// The value has another version than the one expected; the header tells which.
    VersionMismatch = 20,
    /// The range begins behind the value's end; the header tells the value's length.
    RangeOutside = 30,
    /// The server takes no Put and no Remove.
    ReadOnly = 40,
    /// There is no room now; removing something makes room.
    Full = 50,
    /// The value can never fit.
    TooLarge = 60,
    /// The request is malformed; the reason tells how.
    BadRequest = 70,
    /// The request has another protocol version.
    UnsupportedVersion = 80,
    /// The bytes of a Put do not have the checksum that it announced. Nothing was stored.
    ChecksumMismatch = 90,
    /// A limit of the server is reached (connections); try later.
    Busy = 100,
    /// The server failed; the reason tells how.
    Internal = 110,
    /// The server demands a proof that the client knows its secret, or did not believe it.
    Unauthenticated = 120,
}

impl Status {
    /// The status with this number on the wire.
    pub fn from_wire(number: u16) -> Option<Self> {
        Some(match number {
            0 => Status::Ok,
            10 => Status::Absent,
            20 => Status::VersionMismatch,
            30 => Status::RangeOutside,
            40 => Status::ReadOnly,
            50 => Status::Full,
            60 => Status::TooLarge,
            70 => Status::BadRequest,
            80 => Status::UnsupportedVersion,
            90 => Status::ChecksumMismatch,
            100 => Status::Busy,
            110 => Status::Internal,
            120 => Status::Unauthenticated,
            _ => return None,
        })
    }

    /// What it means, as a phrase for messages.
    pub fn as_str(self) -> &'static str {
        match self {
            Status::Ok => "ok",
            Status::Absent => "no such key",
            Status::VersionMismatch => "the value has another version",
            Status::RangeOutside => "the range is outside the value",
            Status::ReadOnly => "the server is read-only",
            Status::Full => "the server is full",
            Status::TooLarge => "the value is too large",
            Status::BadRequest => "malformed request",
            Status::UnsupportedVersion => "unsupported protocol version",
            Status::ChecksumMismatch => "checksum mismatch",
            Status::Busy => "the server is busy",
            Status::Internal => "internal error of the server",
            Status::Unauthenticated => "not authenticated: the server demands a secret",
        }
    }
}

impl std::fmt::Display for Status {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

/// What a decoder of requests accepts. The default is the protocol's maximum of each.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Limits {
    /// Longest key in bytes, at most [`MAX_KEY_BYTES`].
    pub key_bytes_max: usize,
    /// Longest namespace in bytes, at most [`MAX_NAMESPACE_BYTES`].
    pub namespace_bytes_max: usize,
    /// Most keys of one Lookup, at most [`MAX_LOOKUP_KEYS`].
    pub lookup_keys_max: usize,
    /// Longest body of a request other than Put in bytes: what a decoder may have to buffer.
    pub small_body_bytes_max: usize,
    /// Longest value of a Put in bytes, at most [`MAX_VALUE_BYTES`].
    pub value_bytes_max: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            key_bytes_max: MAX_KEY_BYTES,
            namespace_bytes_max: MAX_NAMESPACE_BYTES,
            lookup_keys_max: MAX_LOOKUP_KEYS,
            small_body_bytes_max: MAX_SMALL_BODY_BYTES,
            value_bytes_max: MAX_VALUE_BYTES,
        }
    }
}
