//! The two fixed-size headers.

use super::{
    LOOKUP_ENTRY_BYTES, MAX_LOOKUP_KEYS, MAX_REASON_BYTES, MAX_STATS_BYTES, MAX_VALUE_BYTES, Op,
    PROTOCOL_VERSION, REQUEST_HEADER_BYTES, REQUEST_MAGIC, RESPONSE_HEADER_BYTES, RESPONSE_MAGIC, Status,
    TOKEN_BYTES, WireError,
};

/// `N` bytes of `bytes` from `at` on. Panics when they are not there: callers pass constant
/// positions inside buffers whose length they have checked.
pub(super) fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut field = [0; N];
    field.copy_from_slice(&bytes[at..at + N]);
    field
}

pub(super) fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(array(bytes, at))
}

pub(super) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(array(bytes, at))
}

pub(super) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(array(bytes, at))
}

/// Magic, version and checksum: what makes the other fields believable.
fn check_frame(bytes: &[u8], magic: u32) -> Result<(), WireError> {
    let got = u32_at(bytes, 0);
    if got != magic {
        return Err(WireError::Magic { got, want: magic });
    }
    // Before the checksum: another version may well keep its checksum elsewhere.
    if bytes[4] != PROTOCOL_VERSION {
        return Err(WireError::Version { got: bytes[4] });
    }
    let covered = bytes.len() - 4;
    let (got, want) = (u32_at(bytes, covered), crc32c::crc32c(&bytes[..covered]));
    if got != want {
        return Err(WireError::HeaderChecksum { got, want });
    }
    Ok(())
}

fn check_zero(field: &'static str, got: u64) -> Result<(), WireError> {
    if got == 0 { Ok(()) } else { Err(WireError::Reserved { field, got }) }
}

/// Start of every request.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct RequestHeader {
    /// What is asked for.
    pub op: Op,
    /// The client's name for the request, echoed in the answer.
    pub request_id: u64,
    /// Bytes that follow the header.
    pub body_len: u64,
}

impl RequestHeader {
    /// Writes the header with its checksum.
    pub fn encode_into(&self, out: &mut [u8; REQUEST_HEADER_BYTES]) {
        *out = [0; REQUEST_HEADER_BYTES];
        out[0..4].copy_from_slice(&REQUEST_MAGIC.to_le_bytes());
        out[4] = PROTOCOL_VERSION;
        out[5] = self.op as u8;
        out[8..16].copy_from_slice(&self.request_id.to_le_bytes());
        out[16..24].copy_from_slice(&self.body_len.to_le_bytes());
        let checksum = crc32c::crc32c(&out[..36]);
        out[36..40].copy_from_slice(&checksum.to_le_bytes());
    }

    /// Appends the header to `out`.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let mut bytes = [0; REQUEST_HEADER_BYTES];
        self.encode_into(&mut bytes);
        out.extend_from_slice(&bytes);
    }

    /// Reads a header.
    ///
    /// `body_len` is *not* judged here, because that needs the reader's [`Limits`](super::Limits);
    /// [`RequestDecoder`](super::RequestDecoder) does it.
    ///
    /// # Errors
    ///
    /// Wrong magic, version, checksum, flags, reserved fields or operation.
    pub fn decode(bytes: &[u8; REQUEST_HEADER_BYTES]) -> Result<Self, WireError> {
        check_frame(bytes, REQUEST_MAGIC)?;
        check_zero("flags", u16_at(bytes, 6).into())?;
        check_zero("reserved", u64_at(bytes, 24))?;
        check_zero("reserved", u32_at(bytes, 32).into())?;
        let op = Op::from_wire(bytes[5]).ok_or(WireError::Op { got: bytes[5] })?;
        Ok(RequestHeader { op, request_id: u64_at(bytes, 8), body_len: u64_at(bytes, 16) })
    }
}

/// Start of every answer.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct ResponseHeader {
    /// How the request ended.
    pub status: Status,
    /// The request's operation. `None`, only with an error status, when the server could not read it.
    pub op: Option<Op>,
    /// The request's id; 0 when the server could not read it.
    pub request_id: u64,
    /// Bytes that follow the header.
    pub body_len: u64,
    /// Length of the whole value in bytes (not of the range). 0 where the answer is about no value.
    pub value_len: u64,
    /// Version of the value; 0 where the answer is about no value.
    pub value_version: u64,
    /// Where in the value the body begins, in bytes.
    pub range_offset: u64,
    /// CRC32C of the whole value (not of the range).
    pub value_crc32c: u32,
}

impl ResponseHeader {
    /// An answer without a body that is about no value.
    pub fn plain(status: Status, op: Option<Op>, request_id: u64) -> Self {
        ResponseHeader {
            status,
            op,
            request_id,
            body_len: 0,
            value_len: 0,
            value_version: 0,
            range_offset: 0,
            value_crc32c: 0,
        }
    }

    /// Writes the header with its checksum.
    pub fn encode_into(&self, out: &mut [u8; RESPONSE_HEADER_BYTES]) {
        *out = [0; RESPONSE_HEADER_BYTES];
        out[0..4].copy_from_slice(&RESPONSE_MAGIC.to_le_bytes());
        out[4] = PROTOCOL_VERSION;
        out[5] = self.op.map_or(0, |op| op as u8);
        out[6..8].copy_from_slice(&(self.status as u16).to_le_bytes());
        out[8..16].copy_from_slice(&self.request_id.to_le_bytes());
        out[16..24].copy_from_slice(&self.body_len.to_le_bytes());
        out[24..32].copy_from_slice(&self.value_len.to_le_bytes());
        out[32..40].copy_from_slice(&self.value_version.to_le_bytes());
        out[40..48].copy_from_slice(&self.range_offset.to_le_bytes());
        out[48..52].copy_from_slice(&self.value_crc32c.to_le_bytes());
        let checksum = crc32c::crc32c(&out[..60]);
        out[60..64].copy_from_slice(&checksum.to_le_bytes());
    }

    /// Appends the header to `out`.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let mut bytes = [0; RESPONSE_HEADER_BYTES];
        self.encode_into(&mut bytes);
        out.extend_from_slice(&bytes);
    }

    /// Reads a header and checks that its fields agree, so that a reader may trust them:
    ///
    /// * `Ok` to Get: `range_offset + body_len ≤ value_len ≤` [`MAX_VALUE_BYTES`];
    /// * `Ok` to Lookup: a whole number of entries, at most [`MAX_LOOKUP_KEYS`];
    /// * `Ok` to Stats: at most [`MAX_STATS_BYTES`]; to Challenge and Authenticate: [`TOKEN_BYTES`]; to the
    ///   others: no body;
    /// * every other status: at most [`MAX_REASON_BYTES`].
    ///
    /// Whether the answer fits the request (id, range, version) is for the caller to check.
    ///
    /// # Errors
    ///
    /// Wrong magic, version, checksum, flags, reserved fields, operation or status, or lengths that
    /// break the rules above.
    pub fn decode(bytes: &[u8; RESPONSE_HEADER_BYTES]) -> Result<Self, WireError> {
        check_frame(bytes, RESPONSE_MAGIC)?;
        check_zero("flags", u32_at(bytes, 52).into())?;
        check_zero("reserved", u32_at(bytes, 56).into())?;
        let op = match bytes[5] {
            0 => None,
            number => Some(Op::from_wire(number).ok_or(WireError::Op { got: number })?),
        };
        let status = u16_at(bytes, 6);
        let header = ResponseHeader {
            status: Status::from_wire(status).ok_or(WireError::Status { got: status })?,
            op,
            request_id: u64_at(bytes, 8),
            body_len: u64_at(bytes, 16),
            value_len: u64_at(bytes, 24),
            value_version: u64_at(bytes, 32),
            range_offset: u64_at(bytes, 40),
            value_crc32c: u32_at(bytes, 48),
        };
        header.check_lengths()?;
        Ok(header)
    }

    fn check_lengths(&self) -> Result<(), WireError> {
        if self.value_len > MAX_VALUE_BYTES {
            return Err(WireError::ValueLength { got: self.value_len, max: MAX_VALUE_BYTES });
        }
        let got = self.body_len;
        let (min, max) = match (self.status, self.op) {
            (Status::Ok, None) => return Err(WireError::MissingOp),
            (Status::Ok, Some(Op::Get)) => {
                let end = self.range_offset.checked_add(got);
                if end.is_none_or(|end| end > self.value_len) {
                    let (offset, value_len) = (self.range_offset, self.value_len);
                    return Err(WireError::Range { offset, len: got, value_len });
                }
                return Ok(());
            }
            (Status::Ok, Some(Op::Lookup)) => {
                if !got.is_multiple_of(LOOKUP_ENTRY_BYTES as u64) {
                    let contents_len = got - got % LOOKUP_ENTRY_BYTES as u64;
                    return Err(WireError::BodyMismatch { body_len: got, contents_len });
                }
                (0, MAX_LOOKUP_KEYS * LOOKUP_ENTRY_BYTES)
            }
            (Status::Ok, Some(Op::Stats)) => (0, MAX_STATS_BYTES),
            (Status::Ok, Some(Op::Challenge | Op::Authenticate)) => (TOKEN_BYTES, TOKEN_BYTES),
            (Status::Ok, Some(Op::Put | Op::Remove | Op::Ping)) => (0, 0),
            (_, _) => (0, MAX_REASON_BYTES),
        };
        let (min, max) = (min as u64, max as u64);
        if !(min..=max).contains(&got) {
            return Err(WireError::BodyLength { op: self.op, got, min, max });
        }
        Ok(())
    }
}
