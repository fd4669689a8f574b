//! A lane: one persistent connection to a peer, with requests pipelined on it.
//!
//! A lane owns every buffer that the kernel may touch on its behalf (requests being sent, the header being
//! received, the entries, the discard buffer, the address), and it is dropped only when none of its operations is in
//! flight. The one exception is the room of a value: it is the fill's, which keeps it until every lane is through with
//! what it was asked for ([`Fill::asked`](super::fills::Fill::asked)), those of other shards included
//! ([`Errand`]). That is the whole of the rule "the kernel owns a buffer until its terminal completion".
//!
//! ```text
//!  Connecting ──► (Greeting) ──► Up ──► Closing (operations cancelled, waiting for the last completion) ──► gone
//!
//!  receiving:  Header ──► Body ──► Header …            a part of a value, into the extents where it stays
//!                 ├─────► Entries ──► Header           what the peer has under the keys of a batch
//!                 └─────► Discard ──► Header           an answer nobody can use
//! ```

use super::body::Body;
use super::errands::Errand;
use super::fills::FillId;
use super::transfer::Part;
use super::transport::{LaneOp, SocketAddress, Token, Transport};
use crate::auth::{ClientHandshake, ServerCheck};
use crate::memory::Arena;
use crate::wire::{RESPONSE_HEADER_BYTES, ResponseHeader};
use crate::{Address, Error};
use std::collections::VecDeque;
use std::os::fd::{FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

/// Bytes thrown away per operation.
const DISCARD_BYTES: usize = 256 << 10;

pub(super) enum LaneState {
    Connecting,
    /// Connected; both sides are proving that they know the secret.
    Greeting,
    Up,
    /// Ending, and why.
    Closing(Error),
}

/// What the lane receives now.
pub(super) enum Receive {
    Header { got: usize },
    Body(Body),
    Entries(Entries),
    Discard { left: u64 },
}

/// Bytes of a value that are asked for when nothing is known of it. Most values are complete with them; of the others
/// the rest is asked for as soon as the answer begins, long before these bytes are here.
pub(super) const HEAD_BYTES: u64 = 1 << 20;

/// Something that a lane was asked for.
pub(super) struct Ask {
    /// Its name on the wire. Never used twice by one shard.
    pub(super) id: u64,
    pub(super) what: What,
}

pub(super) enum What {
    /// The first bytes of a value of which nothing is known.
    Head(FillId),
    /// A part of a value that has room.
    Part(FillId, Part),
    /// The same of a large value: nothing small should have to wait behind it.
    Stripe(FillId, Part),
    /// The same for another shard.
    Errand(Errand),
    /// What the peer has under these keys.
    Locate(Vec<FillId>),
    /// A sign of life.
    Ping,
    /// A nonce to prove something with.
    Challenge(ClientHandshake),
    /// A proof in return for ours.
    Authenticate(ServerCheck),
}

impl What {
    /// Bytes of the answer, at most.
    fn bytes(&self) -> u64 {
        match self {
            What::Head(_) => HEAD_BYTES,
            What::Part(_, part) | What::Stripe(_, part) => part.len,
            What::Errand(errand) => errand.part.len,
            What::Locate(_) | What::Ping | What::Challenge(_) | What::Authenticate(_) => 0,
        }
    }

    fn is_bulk(&self) -> bool {
        matches!(self, What::Stripe(..) | What::Errand(_))
    }
}

/// Entries of a Lookup, arriving.
pub(super) struct Entries {
    pub(super) id: u64,
    pub(super) bytes: Vec<u8>,
    got: usize,
}

impl Entries {
    pub(super) fn new(id: u64, len: usize) -> Self {
        Self { id, bytes: vec![0; len], got: 0 }
    }
}

/// Silence after which a lane is given no more work while there may be another.
const STALLED: Duration = Duration::from_millis(200);

/// What a completed receive operation amounts to.
pub(super) enum Arrived {
    /// Nothing yet; the next operation is on its way.
    More,
    Header(ResponseHeader),
    /// Every byte of a part is there.
    Part(Body),
    Entries(Entries),
    /// An unwanted answer is over.
    Discarded,
}

pub(super) struct Lane {
    pub(super) id: u64,
    pub(super) peer: usize,
    pub(super) state: LaneState,
    pub(super) receive: Receive,
    /// What it owes, oldest first.
    pub(super) outstanding: VecDeque<Ask>,
    /// Bytes that it owes, at most, and those of them that are parts of large values.
    pub(super) owed_bytes: u64,
    pub(super) owed_bulk_bytes: u64,
    /// The one fill that it owes is suspected of breaking lanes; it takes no other.
    pub(super) suspect: bool,
    pub(super) connected: bool,
    /// When the attempt to connect began.
    pub(super) opened: Instant,
    /// It has delivered an answer: its end is not held against the peer.
    pub(super) delivered: bool,
    /// It was opened for nobody, and has not been used.
    pub(super) spare: bool,
    /// When it last was of use.
    pub(super) used: Instant,
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
            outstanding: VecDeque::new(),
            owed_bytes: 0,
            owed_bulk_bytes: 0,
            suspect: false,
            connected: false,
            opened: now,
            delivered: false,
            spare: false,
            used: now,
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

    /// True while bytes can be exchanged.
    pub(super) fn is_open(&self) -> bool {
        matches!(self.state, LaneState::Up | LaneState::Greeting)
    }

    /// True if its peer has owed bytes for longer than a healthy one lets wait.
    pub(super) fn is_stalled(&self, now: Instant) -> bool {
        self.owed_since.is_some_and(|since| now.saturating_duration_since(since) > STALLED)
    }

    /// True while it receives some part of this fill's value.
    pub(super) fn receives(&self, fill: Option<FillId>) -> bool {
        matches!(&self.receive, Receive::Body(body) if fill.is_some() && body.fill() == fill)
    }

    /// True if all it owes is the answer to a ping.
    pub(super) fn owes_a_sign_of_life(&self) -> bool {
        matches!(self.outstanding.front(), Some(Ask { what: What::Ping, .. })) && self.outstanding.len() == 1
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

    /// From now on it can be asked for something.
    pub(super) fn up(&mut self) {
        self.state = LaneState::Up;
        self.connected = true;
        self.owed_since = None;
    }

    /// Queues a request, encoded by `encode`.
    pub(super) fn ask<R>(&mut self, ask: Ask, now: Instant, encode: impl FnOnce(&mut Vec<u8>) -> R) -> R {
        self.owed_bytes += ask.what.bytes();
        self.owed_bulk_bytes += if ask.what.is_bulk() { ask.what.bytes() } else { 0 };
        self.outstanding.push_back(ask);
        self.owed_since.get_or_insert(now);
        (self.used, self.spare) = (now, false);
        encode(&mut self.unsent)
    }

    /// What it owes under this name.
    pub(super) fn asked(&self, id: u64) -> Option<&What> {
        // Peers answer in order, nearly always.
        self.outstanding.iter().find(|ask| ask.id == id).map(|ask| &ask.what)
    }

    /// The first bytes have turned out to be a part of this size.
    pub(super) fn turn_into_part(&mut self, id: u64, part: Part) {
        if let Some(ask) = self.outstanding.iter_mut().find(|ask| ask.id == id)
            && let What::Head(fill) = ask.what
        {
            self.owed_bytes -= ask.what.bytes();
            ask.what = What::Part(fill, part);
            self.owed_bytes += part.len;
        }
    }

    /// What was asked for under this name is over.
    pub(super) fn settle(&mut self, id: u64) -> Option<What> {
        let place = self.outstanding.iter().position(|ask| ask.id == id)?;
        let Ask { what, .. } = self.outstanding.remove(place)?;
        self.owed_bytes -= what.bytes();
        self.owed_bulk_bytes -= if what.is_bulk() { what.bytes() } else { 0 };
        if self.outstanding.is_empty() {
            (self.owed_since, self.suspect) = (None, false);
        }
        Some(what)
    }

    /// Sends what is queued, if no send is under way.
    pub(super) fn send_next(&mut self, transport: &mut dyn Transport) {
        if self.send_in_flight || !self.is_open() {
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

    /// Starts the next receive operation.
    pub(super) fn receive_next(
        &mut self,
        transport: &mut dyn Transport,
        arena: &Arena,
        receive_bytes: usize,
    ) {
        debug_assert!(!self.receive_in_flight);
        let (into, len) = match &mut self.receive {
            Receive::Header { got } => (self.header[*got..].as_mut_ptr(), RESPONSE_HEADER_BYTES - *got),
            Receive::Body(body) => body.next(arena, receive_bytes),
            Receive::Discard { left } => {
                self.discard.resize(DISCARD_BYTES, 0);
                (self.discard.as_mut_ptr(), (*left).min(DISCARD_BYTES as u64) as usize)
            }
            Receive::Entries(entries) => {
                (entries.bytes[entries.got..].as_mut_ptr(), entries.bytes.len() - entries.got)
            }
        };
        self.receive_in_flight = true;
        // SAFETY: header, entries and discard buffer belong to this lane, which outlives its operations. The room
        // belongs to the body's fill, which keeps it while this lane has not settled what it was asked for; that
        // happens only when no receive is in flight. So with another shard's fill: the errand that goes home is what
        // settles it, and the body keeps that shard's arena mapped. No two lanes are asked for one part at a time.
        unsafe { transport.receive(&self.fd, into, len, self.token(LaneOp::Receive)) };
    }

    /// Takes note of received bytes. Errors are breaches of the protocol, in words.
    pub(super) fn received(&mut self, bytes: usize, now: Instant, arena: &Arena) -> Result<Arrived, String> {
        self.owed_since = (!self.outstanding.is_empty()).then_some(now);
        self.used = now;
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
                    Receive::Body(body) => Ok(Arrived::Part(body)),
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
            Receive::Entries(entries) => {
                entries.got += bytes;
                if entries.got < entries.bytes.len() {
                    return Ok(Arrived::More);
                }
                match std::mem::replace(&mut self.receive, Receive::Header { got: 0 }) {
                    Receive::Entries(entries) => Ok(Arrived::Entries(entries)),
                    _ => unreachable!("matched above"),
                }
            }
        }
    }

    /// How far the present step has come, for messages.
    pub(super) fn progress(&self) -> String {
        match &self.receive {
            _ if matches!(self.state, LaneState::Connecting) => "before the connection was made".to_owned(),
            _ if matches!(self.state, LaneState::Greeting) => "during authentication".to_owned(),
            Receive::Header { got: 0 } => "between answers".to_owned(),
            Receive::Header { got } => format!("after {got} of {RESPONSE_HEADER_BYTES} bytes of a header"),
            Receive::Body(body) => {
                format!("after {} of {} bytes of a value", body.part.offset + body.received, body.value_len)
            }
            Receive::Entries(entries) => {
                format!("after {} of {} bytes about the keys of a batch", entries.got, entries.bytes.len())
            }
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
