//! The server's side of the stream: bytes in any split, events out.

use super::header::array;
use super::request::{GET_FIXED_BYTES, KEY_FIXED_BYTES, LOOKUP_FIXED_BYTES, PUT_FIXED_BYTES};
use super::{
    GetRequest, KeyRef, Limits, LookupRequest, MAX_VALUE_BYTES, Op, PutRequest, REQUEST_HEADER_BYTES,
    RequestHeader, TOKEN_BYTES, WireError,
};

/// What [`RequestDecoder::next`] found. Borrows from the decoder or from its input.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum RequestEvent<'a> {
    /// A whole Get.
    Get {
        /// The client's name for the request.
        request_id: u64,
        /// What is wanted.
        get: GetRequest<'a>,
    },
    /// A whole Lookup.
    Lookup {
        /// The client's name for the request.
        request_id: u64,
        /// The keys asked for.
        lookup: LookupRequest<'a>,
    },
    /// A Put begins. Its `value_len` bytes follow as [`RequestEvent::PutBytes`] or past the decoder
    /// ([`RequestDecoder::value_received`]), then [`RequestEvent::PutEnd`].
    PutStart {
        /// The client's name for the request.
        request_id: u64,
        /// Key, length and checksum.
        put: PutRequest<'a>,
    },
    /// The next bytes of the value of the Put begun last, never empty.
    PutBytes(&'a [u8]),
    /// The value is complete.
    PutEnd {
        /// The client's name for the request.
        request_id: u64,
    },
    /// A whole Remove.
    Remove {
        /// The client's name for the request.
        request_id: u64,
        /// Which key.
        key: KeyRef<'a>,
    },
    /// A Ping.
    Ping {
        /// The client's name for the request.
        request_id: u64,
    },
    /// A Stats request.
    Stats {
        /// The client's name for the request.
        request_id: u64,
    },
    /// A whole Challenge.
    Challenge {
        /// The client's name for the request.
        request_id: u64,
        /// The client's nonce.
        nonce: [u8; TOKEN_BYTES],
    },
    /// A whole Authenticate.
    Authenticate {
        /// The client's name for the request.
        request_id: u64,
        /// The client's proof.
        proof: [u8; TOKEN_BYTES],
    },
}

/// A request that cannot be served.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[error("{error}")]
pub struct RequestError {
    /// What was wrong.
    pub error: WireError,
    /// The request's id; 0 when it could not be read.
    pub request_id: u64,
    /// The request's operation; `None` when it could not be read.
    pub op: Option<Op>,
    /// Whether the end of the request is unknown. The connection is of no further use then; the
    /// decoder repeats the error. Otherwise it goes on with the next request.
    pub framing_lost: bool,
}

#[derive(Clone, Copy, Debug)]
enum State {
    Header,
    SmallBody(RequestHeader),
    PutFixed(RequestHeader),
    PutHead { header: RequestHeader, head_len: usize },
    PutValue { request_id: u64, remaining: u64 },
    Skip { remaining: u64 },
    Broken(RequestError),
}

/// Streaming decoder of one connection's requests.
///
/// Feed it what arrives, in any split; it takes from the front of the input and never looks back.
/// It copies only what straddles two inputs, never bytes of a value, and holds at most twice
/// `small_body_bytes_max` (headers and Put heads are smaller); memory is taken as bytes arrive, not as
/// lengths are announced. Not for sharing between threads; nothing blocks.
#[derive(Debug)]
pub struct RequestDecoder {
    limits: Limits,
    state: State,
    /// Bytes of the piece (header, body, head) that straddles inputs.
    buffer: Vec<u8>,
    /// The buffer's piece was handed out by the last call.
    buffer_spent: bool,
}

/// What is kept of the buffer between requests.
const KEPT_BUFFER_BYTES: usize = 64 << 10;

/// Takes a piece of `need` bytes: from the input alone when it is there in full, else through the
/// buffer. `None`: the input is used up and more is needed.
fn take<'a, 'i: 'a>(
    buffer: &'a mut Vec<u8>,
    buffer_spent: &mut bool,
    input: &mut &'i [u8],
    need: usize,
) -> Option<&'a [u8]> {
    if *buffer_spent {
        buffer.clear();
        buffer.shrink_to(KEPT_BUFFER_BYTES);
        *buffer_spent = false;
    }
    if buffer.is_empty()
        && let Some((piece, rest)) = input.split_at_checked(need)
    {
        *input = rest;
        return Some(piece);
    }
    let (piece, rest) = input.split_at(input.len().min(need - buffer.len()));
    buffer.extend_from_slice(piece);
    *input = rest;
    if buffer.len() < need {
        return None;
    }
    *buffer_spent = true;
    Some(buffer)
}

impl RequestDecoder {
    /// A decoder at the start of a stream.
    pub fn new(limits: Limits) -> Self {
        RequestDecoder { limits, state: State::Header, buffer: Vec::new(), buffer_spent: false }
    }

    /// Other limits, from the next request on.
    pub fn set_limits(&mut self, limits: Limits) {
        self.limits = limits;
    }

    /// Bytes of the current Put's value that are still to come. While this is not 0 and the input is
    /// used up, the caller may receive up to that many bytes straight into their place and report them
    /// with [`value_received`](Self::value_received).
    pub fn value_bytes_wanted(&self) -> u64 {
        match self.state {
            State::PutValue { remaining, .. } => remaining,
            _ => 0,
        }
    }

    /// Tells that the next `bytes` of the current value went past the decoder.
    ///
    /// # Panics
    ///
    /// When `bytes` exceeds [`value_bytes_wanted`](Self::value_bytes_wanted): the caller would have
    /// swallowed the beginning of the next request.
    pub fn value_received(&mut self, bytes: u64) {
        assert!(bytes <= self.value_bytes_wanted(), "more value bytes received than wanted");
        if let State::PutValue { remaining, .. } = &mut self.state {
            *remaining -= bytes;
        }
    }

    #[cfg(test)]
    pub(super) fn buffer_capacity(&self) -> usize {
        self.buffer.capacity()
    }

    /// Whether the stream may end here: between two requests.
    pub fn at_boundary(&self) -> bool {
        matches!(self.state, State::Header) && (self.buffer.is_empty() || self.buffer_spent)
    }

    /// The next event of the stream; `None` when the input is used up. Call it again until then.
    ///
    /// # Errors
    ///
    /// [`RequestError`]: answer it, and close the connection when its framing is lost.
    pub fn next<'a, 'i: 'a>(
        &'a mut self,
        input: &mut &'i [u8],
    ) -> Result<Option<RequestEvent<'a>>, RequestError> {
        // Every piece before the last is taken in a borrow that ends before the next one begins.
        loop {
            match self.state {
                State::Header => {
                    let Some(piece) =
                        take(&mut self.buffer, &mut self.buffer_spent, input, REQUEST_HEADER_BYTES)
                    else {
                        return Ok(None);
                    };
                    self.state = after_header(&array(piece, 0), &self.limits);
                }
                State::PutFixed(header) => {
                    let Some(piece) = take(&mut self.buffer, &mut self.buffer_spent, input, PUT_FIXED_BYTES)
                    else {
                        return Ok(None);
                    };
                    let fixed = array(piece, 0);
                    // The head is parsed as one piece: keep its beginning in the buffer.
                    self.buffer.clear();
                    self.buffer.extend_from_slice(&fixed);
                    self.buffer_spent = false;
                    match PutRequest::head_len(&fixed, header.body_len, &self.limits) {
                        Ok(head_len) => self.state = State::PutHead { header, head_len },
                        Err(error) => {
                            self.buffer.clear();
                            let remaining = header.body_len - PUT_FIXED_BYTES as u64;
                            self.state = State::Skip { remaining };
                            return Err(refused(error, &header));
                        }
                    }
                }
                State::Skip { remaining } => {
                    let skipped = (input.len() as u64).min(remaining);
                    // At most the input's length.
                    *input = &input[skipped as usize..];
                    self.state = match remaining - skipped {
                        0 => State::Header,
                        remaining => State::Skip { remaining },
                    };
                    if input.is_empty() {
                        return Ok(None);
                    }
                }
                State::Broken(error) => return Err(error),
                State::SmallBody(_) | State::PutHead { .. } | State::PutValue { .. } => break,
            }
        }
        self.piece(input)
    }

    /// The states whose piece becomes an event.
    fn piece<'a, 'i: 'a>(
        &'a mut self,
        input: &mut &'i [u8],
    ) -> Result<Option<RequestEvent<'a>>, RequestError> {
        match self.state {
            State::SmallBody(header) => {
                // Not above `small_body_bytes_max`, a usize.
                let need = header.body_len as usize;
                let Some(body) = take(&mut self.buffer, &mut self.buffer_spent, input, need) else {
                    return Ok(None);
                };
                self.state = State::Header;
                small_event(&header, body, &self.limits).map(Some).map_err(|error| refused(error, &header))
            }
            State::PutHead { header, head_len } => {
                let Some(head) = take(&mut self.buffer, &mut self.buffer_spent, input, head_len) else {
                    return Ok(None);
                };
                let request_id = header.request_id;
                match PutRequest::decode_head(head, &self.limits) {
                    Ok(put) => {
                        self.state = State::PutValue { request_id, remaining: put.value_len };
                        Ok(Some(RequestEvent::PutStart { request_id, put }))
                    }
                    Err(error) => {
                        self.state = State::Skip { remaining: header.body_len - head_len as u64 };
                        Err(refused(error, &header))
                    }
                }
            }
            State::PutValue { request_id, remaining: 0 } => {
                self.state = State::Header;
                Ok(Some(RequestEvent::PutEnd { request_id }))
            }
            State::PutValue { request_id, remaining } => {
                // At most the input's length.
                let (bytes, rest) = input.split_at((input.len() as u64).min(remaining) as usize);
                if bytes.is_empty() {
                    return Ok(None);
                }
                *input = rest;
                let remaining = remaining - bytes.len() as u64;
                self.state = State::PutValue { request_id, remaining };
                Ok(Some(RequestEvent::PutBytes(bytes)))
            }
            State::Broken(error) => Err(error),
            State::Header | State::PutFixed(_) | State::Skip { .. } => Ok(None),
        }
    }
}

fn refused(error: WireError, header: &RequestHeader) -> RequestError {
    RequestError { error, request_id: header.request_id, op: Some(header.op), framing_lost: false }
}

/// Judges a header: what comes next.
fn after_header(bytes: &[u8; REQUEST_HEADER_BYTES], limits: &Limits) -> State {
    let header = match RequestHeader::decode(bytes) {
        Ok(header) => header,
        Err(error) => {
            // Fields are believable once the checksum held, which is judged before these two.
            let believable = matches!(error, WireError::Op { .. } | WireError::Reserved { .. });
            let request_id = if believable { super::header::u64_at(bytes, 8) } else { 0 };
            return State::Broken(RequestError { error, request_id, op: None, framing_lost: true });
        }
    };
    let small_max = limits.small_body_bytes_max as u64;
    let key_max = (limits.key_bytes_max + limits.namespace_bytes_max) as u64;
    let value_max = limits.value_bytes_max.min(MAX_VALUE_BYTES);
    let fixed = |bytes: usize| bytes as u64;
    let (min, max) = match header.op {
        Op::Get => (fixed(GET_FIXED_BYTES), small_max.min(fixed(GET_FIXED_BYTES) + key_max)),
        Op::Lookup => (fixed(LOOKUP_FIXED_BYTES), small_max),
        Op::Put => (fixed(PUT_FIXED_BYTES), fixed(PUT_FIXED_BYTES) + key_max + value_max),
        Op::Remove => (fixed(KEY_FIXED_BYTES), small_max.min(fixed(KEY_FIXED_BYTES) + key_max)),
        Op::Ping | Op::Stats => (0, 0),
        Op::Challenge | Op::Authenticate => (fixed(TOKEN_BYTES), fixed(TOKEN_BYTES)),
    };
    if (min..=max).contains(&header.body_len) {
        return match header.op {
            Op::Put => State::PutFixed(header),
            _ => State::SmallBody(header),
        };
    }
    let got = header.body_len;
    let error = if header.op == Op::Put && got > max {
        WireError::ValueLength { got, max: value_max }
    } else {
        WireError::BodyLength { op: Some(header.op), got, min, max }
    };
    State::Broken(RequestError {
        error,
        request_id: header.request_id,
        op: Some(header.op),
        framing_lost: true,
    })
}

fn small_event<'a>(
    header: &RequestHeader,
    body: &'a [u8],
    limits: &Limits,
) -> Result<RequestEvent<'a>, WireError> {
    let request_id = header.request_id;
    Ok(match header.op {
        Op::Get => RequestEvent::Get { request_id, get: GetRequest::decode(body, limits)? },
        Op::Lookup => RequestEvent::Lookup { request_id, lookup: LookupRequest::decode(body, limits)? },
        Op::Remove => RequestEvent::Remove { request_id, key: KeyRef::decode(body, limits)? },
        Op::Ping => RequestEvent::Ping { request_id },
        Op::Stats => RequestEvent::Stats { request_id },
        // The header's length was judged to be that of a token.
        Op::Challenge => RequestEvent::Challenge { request_id, nonce: array(body, 0) },
        Op::Authenticate => RequestEvent::Authenticate { request_id, proof: array(body, 0) },
        Op::Put => unreachable!("a Put is never a small body"),
    })
}
