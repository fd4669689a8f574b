//! Transport on epoll, for where io_uring is forbidden: the same operations, done by non-blocking calls as far as they
//! go at once, and further when epoll says that the socket has moved (edge-triggered: one registration per socket).
//!
//! Each byte costs the same copy by the kernel, straight into the same extents; what io_uring saves is the calls.

use super::{LaneOp, SocketAddress, Token, Transport, TransportReport};
use crate::memory::{Arena, Block};
use std::collections::HashMap;
use std::io::Error;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::time::Duration;

/// Events taken per call.
const EVENTS: usize = 64;

/// Stands for the doorbell among the lanes' numbers, which are smaller.
const BELL: u64 = u64::MAX;

pub(super) struct Epoll {
    epoll: OwnedFd,
    report: TransportReport,
    sockets: HashMap<u64, Socket>,
    bell: Option<RawFd>,
    /// The reactor waits for the doorbell.
    bell_armed: bool,
    done: Vec<(Token, i32)>,
    in_flight: usize,
    calls: u64,
    events: Vec<libc::epoll_event>,
}

/// A lane's socket and the operations on it.
struct Socket {
    fd: RawFd,
    connecting: bool,
    send: Option<(*const u8, usize)>,
    receive: Option<Receive>,
}

#[derive(Clone, Copy)]
struct Receive {
    into: *mut u8,
    len: usize,
    got: usize,
}

impl Epoll {
    /// `fallback` is why it is not io_uring.
    pub(super) fn new(fallback: Option<String>) -> Result<Self, String> {
        // SAFETY: a plain system call.
        let fd = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
        if fd < 0 {
            return Err(format!("epoll_create1: {}", Error::last_os_error()));
        }
        Ok(Self {
            // SAFETY: the descriptor was just made and belongs to nobody else.
            epoll: unsafe { OwnedFd::from_raw_fd(fd) },
            report: TransportReport { name: "epoll", fallback, wait_timeout: true, ..TransportReport::default() },
            sockets: HashMap::new(),
            bell: None,
            bell_armed: false,
            done: Vec::new(),
            in_flight: 0,
            calls: 0,
            events: vec![libc::epoll_event { events: 0, u64: 0 }; EVENTS],
        })
    }

    fn watch(&self, fd: RawFd, name: u64, events: libc::c_int) -> Result<(), i32> {
        let mut event = libc::epoll_event { events: events as u32, u64: name };
        // SAFETY: reads the event, a local.
        match unsafe { libc::epoll_ctl(self.epoll.as_raw_fd(), libc::EPOLL_CTL_ADD, fd, &mut event) } {
            0 => Ok(()),
            _ => Err(errno(&Error::last_os_error())),
        }
    }

    fn completed(&mut self, op: LaneOp, lane: u64, result: i32) {
        self.done.push((Token::Lane { op, lane }, result));
    }

    /// Does what can be done of a lane's operations now.
    fn go_on(&mut self, lane: u64) {
        self.try_send(lane);
        self.try_receive(lane);
    }

    fn try_send(&mut self, lane: u64) {
        let Some(socket) = self.sockets.get_mut(&lane).filter(|socket| !socket.connecting) else { return };
        let Some((bytes, len)) = socket.send else { return };
        self.calls += 1;
        // SAFETY: `send`'s caller keeps the bytes in place until the completion.
        let result = retry(|| unsafe {
            libc::send(socket.fd, bytes.cast(), len, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL)
        });
        if result != -libc::EAGAIN {
            socket.send = None;
            self.completed(LaneOp::Send, lane, result);
        }
    }

    fn try_receive(&mut self, lane: u64) {
        let Some(socket) = self.sockets.get_mut(&lane).filter(|socket| !socket.connecting) else { return };
        let fd = socket.fd;
        let Some(receive) = &mut socket.receive else { return };
        let result = loop {
            self.calls += 1;
            // SAFETY: `receive`'s caller lent `len` bytes until the completion, and `got` is less.
            let got = retry(|| unsafe {
                let into = receive.into.add(receive.got);
                libc::recv(fd, into.cast(), receive.len - receive.got, libc::MSG_DONTWAIT)
            });
            match got {
                got if got == -libc::EAGAIN => return,
                // Told first what had come; the next operation meets the end, or the error, again.
                got if got <= 0 && receive.got > 0 => break receive.got as i32,
                got if got <= 0 => break got,
                got => {
                    receive.got += got as usize;
                    if receive.got == receive.len {
                        break receive.got as i32;
                    }
                }
            }
        };
        socket.receive = None;
        self.completed(LaneOp::Receive, lane, result);
    }

    fn lane_moved(&mut self, lane: u64) {
        let Some(socket) = self.sockets.get_mut(&lane) else { return };
        if socket.connecting {
            socket.connecting = false;
            let result = -connect_error(socket.fd);
            self.completed(LaneOp::Connect, lane, result);
        } else {
            self.go_on(lane);
        }
    }

    fn bell_moved(&mut self) {
        let Some(fd) = self.bell.filter(|_| self.bell_armed) else { return };
        let mut count = 0u64;
        self.calls += 1;
        // SAFETY: reads eight bytes into a local. The descriptor is readable, and nobody else reads it.
        unsafe { libc::read(fd, (&raw mut count).cast(), 8) };
        self.bell_armed = false;
        self.done.push((Token::Bell, 8));
    }

    fn take_events(&mut self, timeout_ms: libc::c_int) {
        self.calls += 1;
        // SAFETY: the buffer holds EVENTS events.
        let count = unsafe {
            libc::epoll_wait(
                self.epoll.as_raw_fd(),
                self.events.as_mut_ptr(),
                EVENTS as libc::c_int,
                timeout_ms,
            )
        };
        // An error is a signal: there will be another call.
        for i in 0..usize::try_from(count).unwrap_or(0) {
            match self.events[i].u64 {
                BELL => self.bell_moved(),
                lane => self.lane_moved(lane),
            }
        }
    }
}

impl Transport for Epoll {
    fn report(&self) -> &TransportReport {
        &self.report
    }

    fn calls(&self) -> u64 {
        self.calls
    }

    fn register(&mut self, _arena: &Arena) -> Result<(), String> {
        let reason = "epoll has no registered buffers; `register = off` does without".to_owned();
        self.report.not_registered = Some(reason.clone());
        Err(reason)
    }

    fn block_added(&mut self, _index: usize, _block: &Block) -> Result<(), String> {
        Ok(())
    }

    fn block_removed(&mut self, _index: usize) -> Result<(), String> {
        Ok(())
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    fn read_bell(&mut self, event: &OwnedFd) {
        self.in_flight += 1;
        self.bell_armed = true;
        if self.bell.is_none() {
            self.bell = Some(event.as_raw_fd());
            if let Err(errno) = self.watch(event.as_raw_fd(), BELL, libc::EPOLLIN) {
                // Out of memory for watches: a shard that cannot be woken would be worse than one that ends.
                panic!("epoll_ctl: {}", Error::from_raw_os_error(errno));
            }
        }
    }

    unsafe fn connect(&mut self, fd: &OwnedFd, address: &SocketAddress, token: Token) {
        let Token::Lane { lane, .. } = token else { return };
        let fd = fd.as_raw_fd();
        self.in_flight += 1;
        // SAFETY: plain calls; `connect` reads the address, whose length it is told.
        let result = unsafe {
            let flags = libc::fcntl(fd, libc::F_GETFL);
            libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK);
            match libc::connect(fd, address.as_ptr(), address.len()) {
                0 => 0,
                _ => -errno(&Error::last_os_error()),
            }
        };
        let connecting = result == -libc::EINPROGRESS;
        self.sockets.insert(lane, Socket { fd, connecting, send: None, receive: None });
        // Watched only now: a socket that is not connecting yet reports that it has hung up.
        let events = libc::EPOLLIN | libc::EPOLLOUT | libc::EPOLLRDHUP | libc::EPOLLET;
        let watched = self.watch(fd, lane, events);
        if let (false, _) | (true, Err(_)) = (connecting, watched) {
            if let Some(socket) = self.sockets.get_mut(&lane) {
                socket.connecting = false;
            }
            self.completed(LaneOp::Connect, lane, watched.map_or_else(|errno| -errno, |()| result));
        }
    }

    unsafe fn send(&mut self, _fd: &OwnedFd, bytes: &[u8], token: Token) {
        let Token::Lane { lane, .. } = token else { return };
        self.in_flight += 1;
        if let Some(socket) = self.sockets.get_mut(&lane) {
            socket.send = Some((bytes.as_ptr(), bytes.len().min(i32::MAX as usize)));
        }
        self.try_send(lane);
    }

    unsafe fn receive(&mut self, _fd: &OwnedFd, into: *mut u8, len: usize, token: Token) {
        let Token::Lane { lane, .. } = token else { return };
        self.in_flight += 1;
        if let Some(socket) = self.sockets.get_mut(&lane) {
            socket.receive = Some(Receive { into, len: len.min(i32::MAX as usize), got: 0 });
        }
        self.try_receive(lane);
    }

    fn cancel(&mut self, token: Token) {
        let Token::Lane { op, lane } = token else { return };
        let Some(socket) = self.sockets.get_mut(&lane) else { return };
        let was_in_flight = match op {
            LaneOp::Connect => std::mem::take(&mut socket.connecting),
            LaneOp::Send => socket.send.take().is_some(),
            LaneOp::Receive => socket.receive.take().is_some(),
        };
        if was_in_flight {
            self.completed(op, lane, -libc::ECANCELED);
        }
    }

    fn forget(&mut self, lane: u64) {
        // Closing the descriptor ends the watch.
        self.sockets.remove(&lane);
    }

    fn poll(&mut self) {
        self.take_events(0);
    }

    fn wait(&mut self, timeout: Option<Duration>) {
        if !self.done.is_empty() {
            return;
        }
        // Rounded up: waking before the time would only mean to go round again.
        let ms = |timeout: Duration| timeout.as_nanos().div_ceil(1_000_000);
        let ms = timeout.map_or(-1, |timeout| i32::try_from(ms(timeout)).unwrap_or(i32::MAX));
        self.take_events(ms);
    }

    fn completions(&mut self, into: &mut Vec<(Token, i32)>) {
        self.in_flight -= self.done.len();
        into.append(&mut self.done);
    }

    fn has_completions(&mut self) -> bool {
        !self.done.is_empty()
    }
}

fn errno(error: &Error) -> i32 {
    error.raw_os_error().unwrap_or(libc::EIO)
}

/// Calls until no signal interrupts it. The result as io_uring gives it: a count, or a negative error number.
fn retry(mut call: impl FnMut() -> libc::ssize_t) -> i32 {
    loop {
        match call() {
            // Lengths are limited to what fits.
            done if done >= 0 => return done as i32,
            _ => match errno(&Error::last_os_error()) {
                libc::EINTR => {}
                errno => return -errno,
            },
        }
    }
}

/// How a connection attempt ended: 0, or the error number.
fn connect_error(fd: RawFd) -> i32 {
    let mut error: libc::c_int = 0;
    let mut len = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: passes the address and size of locals.
    let result = unsafe {
        libc::getsockopt(fd, libc::SOL_SOCKET, libc::SO_ERROR, (&raw mut error).cast(), &raw mut len)
    };
    if result == 0 { error } else { errno(&Error::last_os_error()) }
}
