//! A blocking client of the slice server: one connection, one request at a time.
//!
//! For the command, for tests, and for floors that benches compare with; the cache itself fetches through
//! its shards. It checks every whole value's CRC32C and holds no value bytes of its own: they are received
//! straight into the caller's buffer with large reads.

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use super::ClientError;
use super::stream::Stream;
use crate::Address;
use crate::auth::{ClientHandshake, Secret};
use crate::wire::{
    self, ANY_VERSION, LOOKUP_ENTRY_BYTES, Limits, LookupEntry, Op, RANGE_TO_END, RESPONSE_HEADER_BYTES,
    ResponseHeader, Status, WireError,
};

/// Slowest transfer that is waited for, in bytes per second: an operation on `n` bytes may take the
/// timeout plus `n` divided by this.
const RATE_MIN_BYTES_PER_SECOND: u64 = 1 << 20;

/// What the server keeps about a value.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct ValueInfo {
    /// Length of the whole value in bytes.
    pub value_len: u64,
    /// Its version.
    pub version: u64,
    /// CRC32C of the whole value.
    pub crc32c: u32,
}

/// A value, or a range of it, with what the server keeps about it.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Value {
    /// About the whole value.
    pub info: ValueInfo,
    /// The bytes asked for.
    pub bytes: Vec<u8>,
}

/// One connection to a slice server. Every call blocks; share it between threads behind a lock, or give
/// each thread its own.
#[derive(Debug)]
pub struct SliceClient {
    stream: Stream,
    peer: Address,
    timeout: Duration,
    request: Vec<u8>,
    last_request_id: u64,
    verify: bool,
    ended: bool,
}

type Result<T, E = ClientError> = std::result::Result<T, E>;

impl SliceClient {
    /// Connects. `timeout` (at least a millisecond) bounds the connection's making, and then each
    /// operation, to which large transfers add a second per MiB.
    ///
    /// # Errors
    ///
    /// [`ClientError::Connect`].
    pub fn connect(peer: impl Into<Address>, timeout: Duration) -> Result<SliceClient> {
        let (peer, timeout) = (peer.into(), timeout.max(Duration::from_millis(1)));
        let stream = match Stream::connect(&peer, timeout) {
            Ok(stream) => stream,
            Err(source) => return Err(ClientError::Connect { peer, source }),
        };
        let request = Vec::new();
        Ok(SliceClient { stream, peer, timeout, request, last_request_id: 0, verify: true, ended: false })
    }

    /// Proves to the server that both know the secret, and has the server prove it too. To be called before
    /// anything else is asked of a server that demands it.
    ///
    /// # Errors
    ///
    /// `Refused` with [`Status::Unauthenticated`] when the server does not believe it or has no secret, and
    /// [`ClientError::ServerProof`] when the server is not to be believed; the client cannot be used any more
    /// then. Also `Io`, `TimedOut`, `Protocol`, `Ended` and `Random`.
    pub fn authenticate(&mut self, secret: &Secret) -> Result<()> {
        let done = self.try_authenticate(secret);
        self.ended |= done.is_err();
        done
    }

    fn try_authenticate(&mut self, secret: &Secret) -> Result<()> {
        let handshake = ClientHandshake::begin(secret).map_err(ClientError::Random)?;
        let server_nonce = self.exchange_token(Op::Challenge, |out, id| {
            wire::encode_challenge(out, id, handshake.nonce());
        })?;
        let (proof, check) = handshake.prove(&server_nonce);
        let server_proof = self.exchange_token(Op::Authenticate, |out, id| {
            wire::encode_authenticate(out, id, &proof);
        })?;
        if check.holds(&server_proof) {
            return Ok(());
        }
        Err(ClientError::ServerProof { peer: self.peer.clone() })
    }

    fn exchange_token(
        &mut self,
        op: Op,
        encode: impl FnOnce(&mut Vec<u8>, u64),
    ) -> Result<[u8; wire::TOKEN_BYTES]> {
        let answer = self.exchange(op, |out, id| {
            encode(out, id);
            Ok(())
        })?;
        if answer.is_none() {
            return Err(self.broke(format!("{op:?} was answered with \"absent\"")));
        }
        // The header was judged to announce as many bytes.
        let mut token = [0; wire::TOKEN_BYTES];
        self.receive(&mut token)?;
        Ok(token)
    }

    /// Address of the server.
    pub fn peer(&self) -> &Address {
        &self.peer
    }

    /// Whether values' checksums are checked (they are by default). A floor that measures receiving alone
    /// switches it off.
    pub fn set_verify(&mut self, verify: bool) {
        self.verify = verify;
    }

    /// Fetches a value; `None`: the server does not have it.
    ///
    /// # Errors
    ///
    /// Any of [`ClientError`] but `BufferTooSmall`.
    pub fn get(&mut self, namespace: &[u8], key: &[u8]) -> Result<Option<Value>> {
        let value = self.get_range(namespace, key, 0, RANGE_TO_END, ANY_VERSION)?;
        if let Some(value) = &value {
            self.check(&value.bytes, &value.info)?;
        }
        Ok(value)
    }

    /// Fetches `range_len` bytes ([`RANGE_TO_END`]: all), fewer where the value ends before, from `range_offset` on, of
    /// `expected_version`
    /// ([`ANY_VERSION`]: whichever is stored). No checksum covers a range, so none is checked.
    ///
    /// # Errors
    ///
    /// Any of [`ClientError`] but `BufferTooSmall` and `Checksum`; `Refused` with
    /// [`Status::RangeOutside`] or [`Status::VersionMismatch`].
    pub fn get_range(
        &mut self,
        namespace: &[u8],
        key: &[u8],
        range_offset: u64,
        range_len: u64,
        expected_version: u64,
    ) -> Result<Option<Value>> {
        let answer = self.exchange(Op::Get, |out, id| {
            wire::encode_get(out, id, namespace, key, range_offset, range_len, expected_version)
        })?;
        let Some(header) = answer else {
            return Ok(None);
        };
        self.check_range(&header, range_offset, range_len)?;
        let bytes = self.receive_vec(header.body_len)?;
        Ok(Some(Value { info: info(&header), bytes }))
    }

    /// Fetches a value into the beginning of `buffer`; `None`: the server does not have it. After an
    /// error the buffer's contents are undefined, except after `BufferTooSmall`.
    ///
    /// # Errors
    ///
    /// Any of [`ClientError`].
    pub fn get_into(&mut self, namespace: &[u8], key: &[u8], buffer: &mut [u8]) -> Result<Option<ValueInfo>> {
        let answer = self.exchange(Op::Get, |out, id| {
            wire::encode_get(out, id, namespace, key, 0, RANGE_TO_END, ANY_VERSION)
        })?;
        let Some(header) = answer else {
            return Ok(None);
        };
        self.check_range(&header, 0, RANGE_TO_END)?;
        let place = usize::try_from(header.body_len).ok().and_then(|len| buffer.get_mut(..len));
        let Some(place) = place else {
            self.discard(header.body_len)?;
            let buffer_bytes = buffer.len() as u64;
            return Err(ClientError::BufferTooSmall { buffer_bytes, value_bytes: header.body_len });
        };
        self.receive(place)?;
        self.check(place, &info(&header))?;
        Ok(Some(info(&header)))
    }

    /// Asks for length, version and checksum of many keys, in several requests if they are too many for
    /// one. The answers are in the keys' order.
    ///
    /// # Errors
    ///
    /// Any of `Request`, `Io`, `TimedOut`, `Protocol`, `Ended`, `Refused`.
    pub fn lookup(&mut self, keys: &[(&[u8], &[u8])]) -> Result<Vec<LookupEntry>> {
        let mut entries = Vec::with_capacity(keys.len());
        while entries.len() < keys.len() {
            let rest = &keys[entries.len()..];
            let mut taken = 0;
            let answer = self.exchange(Op::Lookup, |out, id| {
                taken = wire::encode_lookup(out, id, rest.iter().copied(), &Limits::default())?;
                Ok(())
            })?;
            let wanted = (taken * LOOKUP_ENTRY_BYTES) as u64;
            let Some(header) = answer.filter(|header| header.body_len == wanted) else {
                return Err(self.broke(format!("the answer to a lookup of {taken} keys has other entries")));
            };
            let body = self.receive_vec(header.body_len)?;
            let (chunks, _) = body.as_chunks::<LOOKUP_ENTRY_BYTES>();
            for chunk in chunks {
                entries.push(LookupEntry::decode(chunk).map_err(|error| self.broke(error.to_string()))?);
            }
        }
        Ok(entries)
    }

    /// Stores a value and returns what the server keeps about it.
    ///
    /// # Errors
    ///
    /// Any of `Request`, `Io`, `TimedOut`, `Protocol`, `Ended`, `Refused`.
    pub fn put(&mut self, namespace: &[u8], key: &[u8], value: &[u8]) -> Result<ValueInfo> {
        let crc32c = crc32c::crc32c(value);
        let value_len = value.len() as u64;
        let id = self.begin(|out, id| wire::encode_put_head(out, id, namespace, key, value_len, crc32c))?;
        match self.send_and_hear(Op::Put, id, value)? {
            Some(header) if header.value_len == value_len && header.value_crc32c == crc32c => {
                Ok(info(&header))
            }
            _ => Err(self.broke("the answer to a put tells of another value".into())),
        }
    }

    /// Removes a key; false: the server did not have it.
    ///
    /// # Errors
    ///
    /// Any of `Request`, `Io`, `TimedOut`, `Protocol`, `Ended`, `Refused`.
    pub fn remove(&mut self, namespace: &[u8], key: &[u8]) -> Result<bool> {
        let answer = self.exchange(Op::Remove, |out, id| wire::encode_remove(out, id, namespace, key))?;
        Ok(answer.is_some())
    }

    /// Asks whether the server is alive, and returns how long the answer took.
    ///
    /// # Errors
    ///
    /// Any of `Io`, `TimedOut`, `Protocol`, `Ended`, `Refused`.
    pub fn ping(&mut self) -> Result<Duration> {
        let start = Instant::now();
        match self.exchange(Op::Ping, |out, id| {
            wire::encode_ping(out, id);
            Ok(())
        })? {
            Some(_) => Ok(start.elapsed()),
            None => Err(self.broke("a ping was answered with \"absent\"".into())),
        }
    }

    /// The server's counters as JSON text ([`ServerStats`](crate::server::ServerStats)).
    ///
    /// # Errors
    ///
    /// Any of `Io`, `TimedOut`, `Protocol`, `Ended`, `Refused`.
    pub fn stats(&mut self) -> Result<String> {
        let answer = self.exchange(Op::Stats, |out, id| {
            wire::encode_stats(out, id);
            Ok(())
        })?;
        let Some(header) = answer else {
            return Err(self.broke("stats were answered with \"absent\"".into()));
        };
        let body = self.receive_vec(header.body_len)?;
        String::from_utf8(body).map_err(|error| self.broke(error.to_string()))
    }

    /// Sends one request and receives its answer's header. `None`: absent.
    fn exchange(
        &mut self,
        op: Op,
        encode: impl FnOnce(&mut Vec<u8>, u64) -> Result<(), WireError>,
    ) -> Result<Option<ResponseHeader>> {
        let id = self.begin(encode)?;
        self.send_and_hear(op, id, &[])
    }

    fn begin(&mut self, encode: impl FnOnce(&mut Vec<u8>, u64) -> Result<(), WireError>) -> Result<u64> {
        if self.ended {
            return Err(ClientError::Ended { peer: self.peer.clone() });
        }
        self.request.clear();
        encode(&mut self.request, self.last_request_id + 1).map_err(ClientError::Request)?;
        self.last_request_id += 1;
        Ok(self.last_request_id)
    }

    /// Sends the encoded request and what follows it, and receives the answer's header.
    fn send_and_hear(&mut self, op: Op, id: u64, value: &[u8]) -> Result<Option<ResponseHeader>> {
        let request = std::mem::take(&mut self.request);
        let sent = self.send([IoSlice::new(&request), IoSlice::new(value)]);
        self.request = request;
        match sent {
            Ok(()) => self.answer(op, id),
            // A server that refuses may close before it has read all; its reason may still be there.
            Err(error) => match self.answer(op, id) {
                Err(refused @ ClientError::Refused { .. }) => {
                    self.ended = true;
                    Err(refused)
                }
                _ => Err(error),
            },
        }
    }

    fn send(&mut self, mut slices: [IoSlice<'_>; 2]) -> Result<()> {
        let deadline = Deadline::of(self.timeout, slices.iter().map(|slice| slice.len() as u64).sum());
        let mut rest = &mut slices[..];
        while rest.iter().any(|slice| !slice.is_empty()) {
            if deadline.passed() {
                return Err(self.timed_out("sending", &deadline));
            }
            match self.stream.write_vectored(rest) {
                Ok(0) => {
                    let error = std::io::ErrorKind::WriteZero.into();
                    return Err(self.failed("sending", error, &deadline));
                }
                Ok(sent) => IoSlice::advance_slices(&mut rest, sent),
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => return Err(self.failed("sending", error, &deadline)),
            }
        }
        Ok(())
    }

    /// Receives the header of the answer to request `id`, and the reason when it is a refusal.
    fn answer(&mut self, op: Op, id: u64) -> Result<Option<ResponseHeader>> {
        let mut bytes = [0; RESPONSE_HEADER_BYTES];
        self.receive(&mut bytes)?;
        let header = ResponseHeader::decode(&bytes).map_err(|error| self.broke(error.to_string()))?;
        // A refusal of the connection or of bytes that were no request answers to no id.
        let unasked = header.request_id == 0 && header.op.is_none();
        if !unasked && (header.request_id != id || header.op != Some(op)) {
            let got = (header.op, header.request_id);
            return Err(self.broke(format!("{got:?} was answered, {:?} was asked", (op, id))));
        }
        match header.status {
            Status::Ok => Ok(Some(header)),
            Status::Absent => {
                self.discard(header.body_len)?;
                Ok(None)
            }
            status => {
                let reason = wire::reason_text(&self.receive_vec(header.body_len)?);
                self.ended |= unasked;
                Err(ClientError::Refused { peer: self.peer.clone(), status, reason })
            }
        }
    }

    fn check_range(&mut self, header: &ResponseHeader, offset: u64, wanted: u64) -> Result<()> {
        let available = header.value_len.saturating_sub(offset);
        let want = available.min(wanted);
        if header.range_offset == offset && header.body_len == want {
            return Ok(());
        }
        let got = (header.range_offset, header.body_len);
        Err(self.broke(format!("range {got:?} was answered, {:?} was asked", (offset, want))))
    }

    fn check(&mut self, bytes: &[u8], info: &ValueInfo) -> Result<()> {
        if !self.verify {
            return Ok(());
        }
        let (got, want) = (crc32c::crc32c(bytes), info.crc32c);
        if got == want { Ok(()) } else { Err(ClientError::Checksum { peer: self.peer.clone(), got, want }) }
    }

    fn receive_vec(&mut self, len: u64) -> Result<Vec<u8>> {
        let too_large = ClientError::OutOfMemory { value_bytes: len };
        let mut bytes: Vec<u8> = Vec::new();
        // Memory is touched only as bytes arrive: a lying length costs address space.
        let reserved = usize::try_from(len).is_ok_and(|len| bytes.try_reserve_exact(len).is_ok());
        if !reserved {
            self.ended = true;
            return Err(too_large);
        }
        let len = len as usize;
        self.receive_to(&mut bytes.spare_capacity_mut()[..len])?;
        // SAFETY: the capacity is at least `len`, and `receive_to` has initialised that many bytes.
        unsafe { bytes.set_len(len) };
        Ok(bytes)
    }

    fn receive(&mut self, place: &mut [u8]) -> Result<()> {
        // SAFETY: the same memory with the same borrow; `receive_to` only ever writes initialised bytes.
        let place = unsafe { &mut *(std::ptr::from_mut(place) as *mut [MaybeUninit<u8>]) };
        self.receive_to(place)
    }

    fn discard(&mut self, mut len: u64) -> Result<()> {
        let mut scratch = vec![0; len.min(64 << 10) as usize];
        while len > 0 {
            let now = len.min(scratch.len() as u64);
            self.receive(&mut scratch[..now as usize])?;
            len -= now;
        }
        Ok(())
    }

    /// Fills `place`. Large reads, one system call where the bytes come in time: this is the floor that
    /// benches compare with.
    fn receive_to(&mut self, place: &mut [MaybeUninit<u8>]) -> Result<()> {
        let deadline = Deadline::of(self.timeout, place.len() as u64);
        let mut done = 0;
        while done < place.len() {
            if done > 0 && deadline.passed() {
                return Err(self.timed_out("receiving", &deadline));
            }
            let rest = &mut place[done..];
            let fd = self.stream.as_raw_fd();
            // SAFETY: pointer and length are those of an exclusively borrowed slice; the kernel only
            // writes to it.
            let got = unsafe { libc::recv(fd, rest.as_mut_ptr().cast(), rest.len(), libc::MSG_WAITALL) };
            match usize::try_from(got) {
                Ok(0) => {
                    let error = std::io::ErrorKind::UnexpectedEof.into();
                    return Err(self.failed("receiving", error, &deadline));
                }
                Ok(got) => done += got,
                Err(_) => {
                    let error = std::io::Error::last_os_error();
                    if error.kind() != std::io::ErrorKind::Interrupted {
                        return Err(self.failed("receiving", error, &deadline));
                    }
                }
            }
        }
        Ok(())
    }

    fn failed(&mut self, doing: &'static str, source: std::io::Error, deadline: &Deadline) -> ClientError {
        use std::io::ErrorKind::{TimedOut, WouldBlock};
        self.ended = true;
        match source.kind() {
            TimedOut | WouldBlock => self.timed_out(doing, deadline),
            _ => ClientError::Io { peer: self.peer.clone(), doing, source },
        }
    }

    fn timed_out(&mut self, doing: &'static str, deadline: &Deadline) -> ClientError {
        self.ended = true;
        ClientError::TimedOut { peer: self.peer.clone(), doing, waited: deadline.start.elapsed() }
    }

    fn broke(&mut self, reason: String) -> ClientError {
        self.ended = true;
        ClientError::Protocol { peer: self.peer.clone(), reason }
    }
}

fn info(header: &ResponseHeader) -> ValueInfo {
    ValueInfo { value_len: header.value_len, version: header.value_version, crc32c: header.value_crc32c }
}

/// When a transfer is given up. Looked at between system calls, each of which the socket's own timeout
/// bounds; so a transfer ends at most one timeout later.
struct Deadline {
    start: Instant,
    limit: Duration,
}

impl Deadline {
    fn of(timeout: Duration, bytes: u64) -> Self {
        let transfer = Duration::from_secs(bytes / RATE_MIN_BYTES_PER_SECOND);
        Deadline { start: Instant::now(), limit: timeout.saturating_add(transfer) }
    }

    fn passed(&self) -> bool {
        self.start.elapsed() > self.limit
    }
}
