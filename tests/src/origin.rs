//! A slice server under the control of a test: it answers as the test's script says, however wrong.
//!
//! One thread per connection. The script is called for every Get that arrives, in the order of arrival on
//! that connection, and writes what it likes to the connection. A Lookup is refused, whereupon the client asks for each
//! key by itself, unless the origin was started with [`FakeOrigin::locating`].

use crate::content;
use crate::sync::Watched;
use hotslice::Address;
use hotslice::wire::{
    Limits, LookupEntry, Op, RESPONSE_HEADER_BYTES, RequestDecoder, RequestEvent, ResponseHeader, Status,
    encode_error,
};
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

/// A Get that arrived.
#[derive(Clone, Debug)]
pub struct Ask {
    /// Number of the connection, counted from 0 over the origin's life.
    pub connection: usize,
    /// Number of the request, counted from 0 over all connections.
    pub number: usize,
    /// The client's name for it.
    pub request_id: u64,
    /// Namespace asked for.
    pub namespace: Vec<u8>,
    /// Key asked for.
    pub key: Vec<u8>,
    /// First byte asked for.
    pub offset: u64,
    /// Bytes asked for at most.
    pub len: u64,
    /// Version asked for; 0 for any.
    pub version: u64,
}

impl Ask {
    /// The bytes asked for of a value.
    pub fn part<'v>(&self, value: &'v [u8]) -> &'v [u8] {
        let offset = value.len().min(self.offset as usize);
        let len = (value.len() - offset).min(usize::try_from(self.len).unwrap_or(usize::MAX));
        &value[offset..offset + len]
    }
}

/// What becomes of the connection after an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Then {
    /// The next request is read.
    GoOn,
    /// It is closed in order (FIN).
    Close,
    /// It is torn (RST).
    Reset,
}

type Script = dyn Fn(&Ask, &mut Line) -> Then + Send + Sync;

/// Length, version and CRC32C of a value, if there is one.
type Locate = dyn Fn(&[u8]) -> Option<(u64, u64, u32)> + Send + Sync;

/// What happened so far.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    /// Connections accepted.
    pub connections: usize,
    /// Connections that have ended.
    pub ended: usize,
    /// Keys of which the first bytes were asked for, in order of arrival.
    pub keys: Vec<Vec<u8>>,
    /// Gets of any part.
    pub gets: usize,
    /// Number of keys of every Lookup.
    pub lookups: Vec<usize>,
    /// Pings answered.
    pub pings: usize,
}

#[derive(Default)]
struct State {
    seen: Watched<Seen>,
    /// Pings are left without an answer.
    deaf: Watched<bool>,
    /// Set once: everybody is to end.
    stopped: Watched<bool>,
    streams: Watched<Vec<TcpStream>>,
}

/// The origin. Dropping it ends its connections and threads.
pub struct FakeOrigin {
    address: Address,
    state: Arc<State>,
    accepting: Option<JoinHandle<()>>,
}

/// One connection, as the script sees it. Errors of writing are remembered and otherwise ignored: the
/// client may be gone, and that is the client's right.
pub struct Line {
    stream: TcpStream,
    state: Arc<State>,
    /// Requests that the script kept for later.
    pub held: Vec<Ask>,
    broken: bool,
}

impl FakeOrigin {
    /// An origin on a free loopback port.
    pub fn start(script: impl Fn(&Ask, &mut Line) -> Then + Send + Sync + 'static) -> Self {
        Self::start_at(([127, 0, 0, 1], 0), script)
    }

    /// An origin at an address.
    pub fn start_at(
        address: impl Into<Address>,
        script: impl Fn(&Ask, &mut Line) -> Then + Send + Sync + 'static,
    ) -> Self {
        Self::start_with(address.into(), Arc::new(script), None)
    }

    /// An origin that answers Lookups too.
    pub fn locating(
        locate: impl Fn(&[u8]) -> Option<(u64, u64, u32)> + Send + Sync + 'static,
        script: impl Fn(&Ask, &mut Line) -> Then + Send + Sync + 'static,
    ) -> Self {
        let any = Address::from(([127, 0, 0, 1], 0));
        Self::start_with(any, Arc::new(script), Some(Arc::new(locate)))
    }

    fn start_with(address: Address, script: Arc<Script>, locate: Option<Arc<Locate>>) -> Self {
        let listener = TcpListener::bind(address).expect("bind");
        let address = listener.local_addr().expect("local_addr").into();
        let state = Arc::new(State::default());
        let accepting = {
            let state = state.clone();
            std::thread::spawn(move || accept(&listener, &state, &script, locate.as_ref()))
        };
        Self { address, state, accepting: Some(accepting) }
    }

    /// An origin that has every value whose name tells its length ([`content::name`]), in version 1.
    pub fn well_behaved() -> Self {
        Self::well_behaved_at(([127, 0, 0, 1], 0))
    }

    /// [`FakeOrigin::well_behaved`] at an address.
    pub fn well_behaved_at(address: impl Into<Address>) -> Self {
        let locate = |key: &[u8]| {
            let len = content::named_len(key)?;
            Some((len as u64, 1, crc32c::crc32c(&content::bytes(key, 1, len))))
        };
        let script = |ask: &Ask, line: &mut Line| {
            line.answer_by_name(ask);
            Then::GoOn
        };
        Self::start_with(address.into(), Arc::new(script), Some(Arc::new(locate)))
    }

    /// Answers pings no longer, or again.
    pub fn be_deaf_to_pings(&self, deaf: bool) {
        self.state.deaf.change(|now| *now = deaf);
    }

    /// Waits until `count` pings were answered.
    #[track_caller]
    pub fn wait_pings(&self, count: usize) {
        self.state.seen.wait("pings at the origin", |seen| seen.pings >= count);
    }

    /// Where it listens.
    pub fn address(&self) -> Address {
        self.address.clone()
    }

    /// What happened so far.
    pub fn seen(&self) -> Seen {
        self.state.seen.read(Seen::clone)
    }

    /// Number of requests so far.
    pub fn requests(&self) -> usize {
        self.state.seen.read(|seen| seen.keys.len())
    }

    /// Requests for this key so far.
    pub fn requests_for(&self, key: impl AsRef<[u8]>) -> usize {
        self.state.seen.read(|seen| seen.keys.iter().filter(|asked| **asked == key.as_ref()).count())
    }

    /// Waits until `count` requests have arrived.
    #[track_caller]
    pub fn wait_requests(&self, count: usize) {
        self.state.seen.wait("requests at the origin", |seen| seen.keys.len() >= count);
    }

    /// Waits until `count` connections have ended.
    #[track_caller]
    pub fn wait_ended(&self, count: usize) {
        self.state.seen.wait("ends of connections", |seen| seen.ended >= count);
    }
}

impl Drop for FakeOrigin {
    fn drop(&mut self) {
        self.state.stopped.change(|stopped| *stopped = true);
        // Wakes the accepting thread, which looks at `stopped`.
        drop(TcpStream::connect(&self.address));
        self.state.streams.read(|streams| {
            for stream in streams {
                let _ = stream.shutdown(Shutdown::Both);
            }
        });
        if let Some(accepting) = self.accepting.take()
            && accepting.join().is_err()
            && !std::thread::panicking()
        {
            panic!("a thread of the origin panicked");
        }
    }
}

fn accept(listener: &TcpListener, state: &Arc<State>, script: &Arc<Script>, locate: Option<&Arc<Locate>>) {
    let mut serving = Vec::new();
    for connection in 0.. {
        let Ok((stream, _)) = listener.accept() else { break };
        if state.stopped.read(|stopped| *stopped) {
            break;
        }
        let _ = stream.set_nodelay(true);
        state.seen.change(|seen| seen.connections += 1);
        state.streams.change(|streams| streams.extend(stream.try_clone()));
        let (state, script, locate) = (state.clone(), script.clone(), locate.cloned());
        serving.push(std::thread::spawn(move || {
            let line = Line { stream, state: state.clone(), held: Vec::new(), broken: false };
            serve(connection, line, &*script, locate.as_deref());
            state.seen.change(|seen| seen.ended += 1);
        }));
    }
    state.streams.change(|streams| {
        for stream in streams.drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    });
    let panicked = serving.into_iter().map(JoinHandle::join).filter(Result::is_err).count();
    assert_eq!(panicked, 0, "connections' threads panicked");
}

fn serve(connection: usize, mut line: Line, script: &Script, locate: Option<&Locate>) {
    let mut decoder = RequestDecoder::new(Limits::default());
    let mut buffer = vec![0; 64 << 10];
    loop {
        let Ok(len) = line.stream.read(&mut buffer) else { return };
        if len == 0 {
            return line.end(Then::Close);
        }
        let mut input = &buffer[..len];
        while let Some(event) = decoder.next(&mut input).expect("the cache sends well-formed requests") {
            let (request_id, get) = match event {
                RequestEvent::Get { request_id, get } => (request_id, get),
                RequestEvent::Lookup { request_id, lookup } => {
                    let keys: Vec<Vec<u8>> = lookup.iter().map(|key| key.key.to_vec()).collect();
                    line.state.seen.change(|seen| seen.lookups.push(keys.len()));
                    line.locate(request_id, &keys, locate);
                    continue;
                }
                RequestEvent::Ping { .. } if line.state.deaf.read(|deaf| *deaf) => continue,
                RequestEvent::Ping { request_id } => {
                    line.state.seen.change(|seen| seen.pings += 1);
                    line.header(&ResponseHeader::plain(Status::Ok, Some(Op::Ping), request_id));
                    continue;
                }
                other => panic!("the cache sent {other:?}"),
            };
            let (namespace, key) = (get.key.namespace.to_vec(), get.key.key.to_vec());
            let number = line.state.seen.change(|seen| {
                if get.range_offset == 0 {
                    seen.keys.push(key.clone());
                }
                seen.gets += 1;
                seen.keys.len() - 1
            });
            let (offset, len, version) = (get.range_offset, get.range_len, get.expected_version);
            let ask = Ask { connection, number, request_id, namespace, key, offset, len, version };
            match script(&ask, &mut line) {
                Then::GoOn => {}
                then => return line.end(then),
            }
        }
    }
}

/// The header of a right answer, to which the part asked for belongs.
pub fn value_header(ask: &Ask, version: u64, value: &[u8]) -> ResponseHeader {
    ResponseHeader {
        body_len: ask.part(value).len() as u64,
        range_offset: ask.offset,
        value_len: value.len() as u64,
        value_version: version,
        value_crc32c: crc32c::crc32c(value),
        ..ResponseHeader::plain(Status::Ok, Some(Op::Get), ask.request_id)
    }
}

impl Line {
    /// Writes bytes as they are.
    pub fn raw(&mut self, bytes: &[u8]) {
        self.broken |= self.stream.write_all(bytes).is_err();
    }

    /// Writes a header with its right checksum, whatever it says.
    pub fn header(&mut self, header: &ResponseHeader) {
        let mut bytes = [0; RESPONSE_HEADER_BYTES];
        header.encode_into(&mut bytes);
        self.raw(&bytes);
    }

    /// Answers rightly with the part of a value that was asked for, or that the value has another version.
    pub fn value(&mut self, ask: &Ask, version: u64, value: &[u8]) {
        if ask.version != 0 && ask.version != version {
            return self.refuse(ask, Status::VersionMismatch, "");
        }
        self.header(&value_header(ask, version, value));
        self.raw(ask.part(value));
    }

    fn locate(&mut self, request_id: u64, keys: &[Vec<u8>], locate: Option<&Locate>) {
        let mut bytes = Vec::new();
        let Some(locate) = locate else {
            let refusal = ResponseHeader::plain(Status::BadRequest, Some(Op::Lookup), request_id);
            encode_error(&mut bytes, refusal, "no lookups here");
            return self.raw(&bytes);
        };
        ResponseHeader::lookup(request_id, keys.len()).encode(&mut bytes);
        for key in keys {
            let entry = locate(key).map_or(LookupEntry::ABSENT, |(value_len, version, crc32c)| LookupEntry {
                status: Status::Ok,
                crc32c,
                value_len,
                version,
            });
            entry.encode(&mut bytes);
        }
        self.raw(&bytes);
    }

    /// Answers rightly with the content of `key` in `version`.
    pub fn content(&mut self, ask: &Ask, version: u64, len: usize) {
        self.value(ask, version, &content::bytes(&ask.key, version, len));
    }

    /// Answers rightly: absent.
    pub fn absent(&mut self, ask: &Ask) {
        self.header(&ResponseHeader::plain(Status::Absent, Some(Op::Get), ask.request_id));
    }

    /// Answers with a status and a reason.
    pub fn refuse(&mut self, ask: &Ask, status: Status, reason: &str) {
        let mut bytes = Vec::new();
        encode_error(&mut bytes, ResponseHeader::plain(status, Some(Op::Get), ask.request_id), reason);
        self.raw(&bytes);
    }

    /// Answers rightly with what the key's name tells, absent if it tells no length.
    pub fn answer_by_name(&mut self, ask: &Ask) {
        match content::named_len(&ask.key) {
            Some(len) => self.content(ask, 1, len),
            None => self.absent(ask),
        }
    }

    /// Writes one byte at a time with a pause after each, until all is written, the client is gone or the
    /// origin ends.
    pub fn trickle(&mut self, bytes: &[u8], pause: Duration) {
        for byte in bytes {
            self.raw(&[*byte]);
            if self.broken || self.pause(pause) {
                return;
            }
        }
    }

    /// Waits. True if the origin ends meanwhile.
    pub fn pause(&self, pause: Duration) -> bool {
        self.state.stopped.wait_for(pause, |stopped| *stopped)
    }

    /// Waits until the client closes the connection or the origin ends. Bytes that arrive are ignored.
    pub fn until_closed(&mut self) {
        let mut buffer = [0; 4096];
        while matches!(self.stream.read(&mut buffer), Ok(1..)) {}
    }

    fn end(self, then: Then) {
        if then == Then::Reset {
            let _ = linger_zero(&self.stream);
        } else {
            let _ = self.stream.shutdown(Shutdown::Both);
        }
        // The list of streams holds a second descriptor of the socket, without which it would stay open.
        let own = self.stream.as_raw_fd();
        let peer = self.stream.peer_addr().ok();
        self.state.streams.change(|streams| {
            streams
                .retain(|other| other.as_raw_fd() == own || other.peer_addr().ok() != peer || peer.is_none());
        });
    }
}

/// Makes the close of a socket a reset.
fn linger_zero(stream: &TcpStream) -> io::Result<()> {
    let linger = libc::linger { l_onoff: 1, l_linger: 0 };
    // SAFETY: passes the address and size of a local.
    let result = unsafe {
        libc::setsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_LINGER,
            (&raw const linger).cast(),
            size_of::<libc::linger>() as libc::socklen_t,
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// An address where nobody listens (for the moment: the port was free just now).
pub fn closed_port() -> Address {
    let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
    listener.local_addr().expect("local_addr").into()
}

/// An address that accepts no connection and refuses none, like a machine that is gone: the kernel drops what asks
/// for one, because the queue of a listener that never accepts is full.
pub struct DeafPeer {
    address: Address,
    _queue: Vec<TcpStream>,
    _listener: OwnedFd,
}

impl DeafPeer {
    /// Takes a free loopback port.
    pub fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
        let address = listener.local_addr().expect("local_addr");
        let listener = OwnedFd::from(listener);
        // SAFETY: no pointers. Listening again only makes the queue shorter.
        assert_eq!(unsafe { libc::listen(listener.as_raw_fd(), 0) }, 0);
        let mut queue = Vec::new();
        // The queue is full when an attempt is left without an answer.
        while let Ok(stream) = TcpStream::connect_timeout(&address, Duration::from_millis(200)) {
            queue.push(stream);
            assert!(queue.len() < 100, "a queue of length 0 takes {} connections", queue.len());
        }
        Self { address: address.into(), _queue: queue, _listener: listener }
    }

    /// Where nobody answers.
    pub fn address(&self) -> Address {
        self.address.clone()
    }
}
