//! Why bytes are not a frame of the slice protocol.

use super::{Op, PROTOCOL_VERSION, Status};

/// What was wrong with bytes, and what is allowed.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum WireError {
    /// The first four bytes are not those of the slice protocol: the peer speaks something else.
    #[error("not the slice protocol: the frame begins with {got:#010x}, {want:#010x} is expected")]
    Magic {
        /// What was there, as a little-endian number.
        got: u32,
        /// What is expected.
        want: u32,
    },
    /// The peer speaks another version.
    #[error("protocol version {got}: version {PROTOCOL_VERSION} is spoken here")]
    Version {
        /// The peer's version.
        got: u8,
    },
    /// The header was damaged.
    #[error("header checksum {got:#010x} does not hold: {want:#010x} is expected")]
    HeaderChecksum {
        /// Checksum that the header carries.
        got: u32,
        /// Checksum of the header's bytes.
        want: u32,
    },
    /// A flag or reserved field is not 0.
    #[error("field `{field}` is {got:#x}: it must be 0 in version {PROTOCOL_VERSION}")]
    Reserved {
        /// Name of the field.
        field: &'static str,
        /// Its value.
        got: u64,
    },
    /// There is no such operation.
    #[error("operation {got}: 1 to 8 are known")]
    Op {
        /// Number of the operation.
        got: u8,
    },
    /// There is no such status.
    #[error("status {got} is not known")]
    Status {
        /// Number of the status.
        got: u16,
    },
    /// An answer without an operation is only allowed for an error.
    #[error("an answer with status ok must name its operation")]
    MissingOp,
    /// The announced length of the body cannot be.
    #[error("body of {got} bytes for {}: {min} to {max} are allowed", op_name(*op))]
    BodyLength {
        /// The operation; `None` in answers that name none.
        op: Option<Op>,
        /// Announced length in bytes.
        got: u64,
        /// Least length allowed.
        min: u64,
        /// Greatest length allowed.
        max: u64,
    },
    /// The lengths inside the body do not add up to the length of the body.
    #[error("body of {body_len} bytes does not match its contents of {contents_len} bytes")]
    BodyMismatch {
        /// Length of the body in bytes.
        body_len: u64,
        /// Sum of the lengths inside it (as far as they could be read), in bytes.
        contents_len: u64,
    },
    /// The namespace is too long.
    #[error("namespace of {got} bytes: 0 to {max} are allowed")]
    NamespaceLength {
        /// Length in bytes.
        got: usize,
        /// Greatest length allowed.
        max: usize,
    },
    /// The key is empty or too long.
    #[error("key of {got} bytes: 1 to {max} are allowed")]
    KeyLength {
        /// Length in bytes.
        got: usize,
        /// Greatest length allowed.
        max: usize,
    },
    /// Too many keys in one Lookup.
    #[error("lookup of {got} keys: 0 to {max} are allowed in one request")]
    LookupCount {
        /// Number of keys.
        got: u64,
        /// Greatest number allowed.
        max: usize,
    },
    /// The value is too long.
    #[error("value of {got} bytes: 0 to {max} are allowed")]
    ValueLength {
        /// Length in bytes.
        got: u64,
        /// Greatest length allowed.
        max: u64,
    },
    /// The range of an answer does not lie inside its value.
    #[error("range {offset}+{len} is outside the value of {value_len} bytes")]
    Range {
        /// First byte of the range.
        offset: u64,
        /// Length of the range in bytes.
        len: u64,
        /// Length of the value in bytes.
        value_len: u64,
    },
}

impl WireError {
    /// The status with which a server answers a request that has this error.
    pub fn status(&self) -> Status {
        match self {
            WireError::Version { .. } => Status::UnsupportedVersion,
            WireError::ValueLength { .. } => Status::TooLarge,
            _ => Status::BadRequest,
        }
    }
}

fn op_name(op: Option<Op>) -> String {
    op.map_or_else(|| "an answer without an operation".to_owned(), |op| format!("a {op:?} request or answer"))
}
