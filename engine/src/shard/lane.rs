//! A lane: one persistent connection to a peer, with requests pipelined on it.
//!
//! A lane owns every buffer that the kernel may touch on its behalf (requests being sent, the header being
//! received, the room of the value being received, the discard buffer, the address). It is dropped only
//! when none of its operations is in flight; that is the whole of the rule "the kernel owns a buffer until
//! its terminal completion".
//!
//! ```text
//!  Connecting ──► Up ──► Closing (operations cancelled, waiting for the last completion) ──► gone
//!
//!  receiving:  Header ──► Body ──► Header …            bytes go into the extents where they stay
//!                 │  └──► NoRoom ──► Body              paused: TCP holds the peer back
//!                 └─────► Discard ──► Header           an answer nobody can use
//! ```

use super::fills::FillId;
use super::transport::{LaneOp, SocketAddress, Token, Transport};
use super::store::Room;
use crate::{Address, Error};
use crate::memory::{Arena, GRANULE_BYTES};
use crate::wire::{RESPONSE_HEADER_BYTES, ResponseHeader};
use std::os::fd::{FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

/// Bytes thrown away per operation.
const DISCARD_BYTES: usize = 256 << 10;

pub(super) enum LaneState {
    Connecting,
    Up,
    /// Ending, and why.
    Closing(Error),
}

/// What the lane receives now.
pub(super) enum Receive {
    Header { got: usize },
    Body(Body),
    NoRoom { header: ResponseHeader },
    Discard { left: u64 },
}

/// Silence after which a lane is given no more work while there may be another.
const STALLED: Duration = Duration::from_millis(200);

/// A value arriving in its extents.
pub(super) struct Body {
    pub(super) header: ResponseHeader,
    pub(super) room: Room,
    pub(super) received: u64,
    started: Instant,
    pub(super) crc: u32,
    /// The extent being filled and the bytes already in it.
    extent: usize,
    filled: usize,
}

impl Body {
    pub(super) fn new(header: ResponseHeader, room: Room) -> Self {
        Self { header, room, received: 0, started: Instant::now(), crc: 0, extent: 0, filled: 0 }
    }

    /// How long the rest will take at the speed so far; `None` if nothing has come yet.
    pub(super) fn time_left(&self, now: Instant) -> Option<Duration> {
        let per_byte = now.saturating_duration_since(self.started).as_secs_f64() / self.received as f64;
        Duration::try_from_secs_f64(per_byte * (self.header.body_len - self.received) as f64).ok()
    }

    /// Where the next bytes go, and how many at most.
    fn next(&self, arena: &Arena, most: usize) -> (*mut u8, usize) {
        let extent = self.room.extents[self.extent];
        let room = extent.len as usize * GRANULE_BYTES - self.filled;
        let left = self.header.body_len - self.received;
        let len = (room as u64).min(left).min(most as u64) as usize;
        // SAFETY: `filled` is less than the extent's length, so the pointer stays inside it.
        (unsafe { arena.ptr(extent).as_ptr().add(self.filled) }, len)
    }

    /// Takes note of received bytes. True when the value is complete.
    fn advance(&mut self, arena: &Arena, bytes: usize) -> bool {
        let (start, _) = self.next(arena, bytes);
        // SAFETY: the kernel has just written these bytes of this body's own room, and has let go of them.
        let fresh = unsafe { std::slice::from_raw_parts(start, bytes) };
        // While they are still in the processor's cache.
        self.crc = crate::checksum::crc32c_append(self.crc, fresh);
        self.received += bytes as u64;
        self.filled += bytes;
        if self.filled == self.room.extents[self.extent].len as usize * GRANULE_BYTES {
            self.extent += 1;
            self.filled = 0;
        }
        self.received == self.header.body_len
    }
}

/// What a completed receive operation amounts to.
pub(super) enum Arrived {
    /// Nothing yet; the next operation is on its way.
    More,
    Header(ResponseHeader),
    /// Every byte of a value is there.
    Value(Body),
    /// An unwanted answer is over.
    Discarded,
}

pub(super) struct Lane {
    pub(super) id: u64,
    pub(super) peer: usize,
    pub(super) state: LaneState,
    pub(super) receive: Receive,
    /// Fills whose answers this lane owes, oldest first.
    pub(super) outstanding: Vec<FillId>,
    /// The one fill that it owes is suspected of breaking lanes; it takes no other.
    pub(super) suspect: bool,
    pub(super) connected: bool,
    /// When the attempt to connect began.
    pub(super) opened: Instant,
    /// It has delivered an answer: its end is not held against the peer.
    pub(super) delivered: bool,
    /// It is given up for our own convenience: its end is held against nobody.
    pub(super) forgone: bool,
    /// Since when the peer has owed the bytes of the present step; `None` if it owes nothing.
    pub(super) owed_since: Option<Instant>,
    fd: OwnedFd,
    address: Box<SocketAddress>,
    unsent: Vec<u8>,
    sending: Vec<u8>,
    sent: usize,
    header: Box<[u8; RESPONSE_HEADER_BYTES]>,
    discard: Vec<u8>,
    connect_in_flight: bool,
    send_in_flight: bool,
    receive_in_flight: bool,
}

impl Lane {
    /// Opens a socket and starts to connect.
    pub(super) fn connect(
        id: u64,
        peer: usize,
        address: &Address,
        now: Instant,
        transport: &mut dyn Transport,
    ) -> std::io::Result<Self> {
        let address = Box::new(SocketAddress::from(address));
        // SAFETY: a plain system call. The socket blocks: io_uring polls for a blocking socket by itself, and would
        // hand EAGAIN back for one that does not.
        let fd = unsafe { libc::socket(address.family(), libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0) };
        if fd < 0 {
            return Err(std::io::Error::last_os_error());
        }
        // SAFETY: the descriptor was just made and belongs to nobody else.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        if address.is_tcp() {
            set_nodelay(&fd)?;
        }
        let lane = Self {
            id,
            peer,
            state: LaneState::Connecting,
            receive: Receive::Header { got: 0 },
            outstanding: Vec::new(),
            suspect: false,
            connected: false,
            opened: now,
            delivered: false,
            forgone: false,
            owed_since: Some(now),
            fd,
            address,
            unsent: Vec::new(),
            sending: Vec::new(),
            sent: 0,
            header: Box::new([0; RESPONSE_HEADER_BYTES]),
            discard: Vec::new(),
            connect_in_flight: true,
            send_in_flight: false,
            receive_in_flight: false,
        };
        // SAFETY: the boxed address lives in the lane, which outlives its operations.
        unsafe { transport.connect(&lane.fd, &lane.address, lane.token(LaneOp::Connect)) };
        Ok(lane)
    }

    fn token(&self, op: LaneOp) -> Token {
        Token::Lane { op, lane: self.id }
    }

    pub(super) fn is_up(&self) -> bool {
        matches!(self.state, LaneState::Up)
    }

    /// True if its peer has owed bytes for longer than a healthy one lets wait.
    pub(super) fn is_stalled(&self, now: Instant) -> bool {
        self.owed_since.is_some_and(|since| now.saturating_duration_since(since) > STALLED)
    }

    /// True when the kernel holds nothing of this lane's.
    pub(super) fn is_quiet(&self) -> bool {
        !(self.connect_in_flight || self.send_in_flight || self.receive_in_flight)
    }

    /// An operation completed.
    pub(super) fn completed(&mut self, op: LaneOp) {
        match op {
            LaneOp::Connect => self.connect_in_flight = false,
            LaneOp::Send => self.send_in_flight = false,
            LaneOp::Receive => self.receive_in_flight = false,
        }
    }

    /// The connection stands: listen for answers.
    pub(super) fn up(&mut self, transport: &mut dyn Transport, arena: &Arena, receive_bytes: usize) {
        self.state = LaneState::Up;
        self.connected = true;
        self.owed_since = None;
        self.receive_next(transport, arena, receive_bytes);
    }

    /// Queues a request, encoded by `encode`, for the answer to `fill`.
    pub(super) fn ask<R>(
        &mut self,
        fill: FillId,
        now: Instant,
        encode: impl FnOnce(&mut Vec<u8>) -> R,
    ) -> R {
        self.outstanding.push(fill);
        self.owed_since.get_or_insert(now);
        encode(&mut self.unsent)
    }

    /// Sends what is queued, if no send is under way.
    pub(super) fn send_next(&mut self, transport: &mut dyn Transport) {
        if self.send_in_flight || !self.is_up() {
            return;
        }
        if self.sent == self.sending.len() {
            self.sending.clear();
            self.sent = 0;
            std::mem::swap(&mut self.sending, &mut self.unsent);
        }
        if self.sending.is_empty() {
            return;
        }
        self.send_in_flight = true;
        // SAFETY: `sending` is not touched while a send is in flight, and the lane outlives it.
        unsafe { transport.send(&self.fd, &self.sending[self.sent..], self.token(LaneOp::Send)) };
    }

    /// Takes note of bytes sent.
    pub(super) fn sent(&mut self, bytes: usize, transport: &mut dyn Transport) {
        self.sent += bytes;
        self.send_next(transport);
    }

    /// Starts the next receive operation, unless paused.
    pub(super) fn receive_next(&mut self, transport: &mut dyn Transport, arena: &Arena, receive_bytes: usize) {
        debug_assert!(!self.receive_in_flight);
        let (into, len) = match &mut self.receive {
            Receive::Header { got } => (self.header[*got..].as_mut_ptr(), RESPONSE_HEADER_BYTES - *got),
            Receive::Body(body) => body.next(arena, receive_bytes),
            Receive::Discard { left } => {
                self.discard.resize(DISCARD_BYTES, 0);
                (self.discard.as_mut_ptr(), (*left).min(DISCARD_BYTES as u64) as usize)
            }
            Receive::NoRoom { .. } => return,
        };
        self.receive_in_flight = true;
        // SAFETY: the three targets belong to this lane (the body's room is its own until it is published or
        // cancelled, which happens only when no receive is in flight), and the lane outlives its operations.
        unsafe { transport.receive(&self.fd, into, len, self.token(LaneOp::Receive)) };
    }

    /// Takes note of received bytes. Errors are breaches of the protocol, in words.
    pub(super) fn received(&mut self, bytes: usize, now: Instant, arena: &Arena) -> Result<Arrived, String> {
        self.owed_since = (!self.outstanding.is_empty()).then_some(now);
        match &mut self.receive {
            Receive::Header { got } => {
                *got += bytes;
                if *got < RESPONSE_HEADER_BYTES {
                    return Ok(Arrived::More);
                }
                *got = 0;
                let header = ResponseHeader::decode(&self.header).map_err(|error| error.to_string())?;
                Ok(Arrived::Header(header))
            }
            Receive::Body(body) => {
                if !body.advance(arena, bytes) {
                    return Ok(Arrived::More);
                }
                match std::mem::replace(&mut self.receive, Receive::Header { got: 0 }) {
                    Receive::Body(body) => Ok(Arrived::Value(body)),
                    _ => unreachable!("matched above"),
                }
            }
            Receive::Discard { left } => {
                *left -= bytes as u64;
                if *left > 0 {
                    return Ok(Arrived::More);
                }
                self.receive = Receive::Header { got: 0 };
                // Rarely needed; not worth keeping.
                self.discard = Vec::new();
                Ok(Arrived::Discarded)
            }
            Receive::NoRoom { .. } => Err("bytes arrived on a paused lane".to_owned()),
        }
    }

    /// How far the present step has come, for messages.
    pub(super) fn progress(&self) -> String {
        match &self.receive {
            _ if matches!(self.state, LaneState::Connecting) => "before the connection was made".to_owned(),
            Receive::Header { got: 0 } => "between answers".to_owned(),
            Receive::Header { got } => format!("after {got} of {RESPONSE_HEADER_BYTES} bytes of a header"),
            Receive::Body(body) => {
                format!("after {} of {} bytes of a value", body.received, body.header.body_len)
            }
            Receive::NoRoom { header } => format!("before {} bytes of a value", header.body_len),
            Receive::Discard { left } => format!("with {left} bytes left of an unwanted answer"),
        }
    }

    /// Begins the end: no new operations, those in flight are cancelled.
    pub(super) fn close(&mut self, why: Error, transport: &mut dyn Transport) {
        if matches!(self.state, LaneState::Closing(_)) {
            return;
        }
        self.state = LaneState::Closing(why);
        self.owed_since = None;
        for (in_flight, op) in [
            (self.connect_in_flight, LaneOp::Connect),
            (self.send_in_flight, LaneOp::Send),
            (self.receive_in_flight, LaneOp::Receive),
        ] {
            if in_flight {
                transport.cancel(self.token(op));
            }
        }
    }
}

fn set_nodelay(fd: &OwnedFd) -> std::io::Result<()> {
    use std::os::fd::AsRawFd;
    let one: libc::c_int = 1;
    // SAFETY: passes the address and size of a local.
    let result = unsafe {
        libc::setsockopt(
            fd.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_NODELAY,
            (&raw const one).cast(),
            size_of::<libc::c_int>() as libc::socklen_t,
        )
    };
    if result == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}
