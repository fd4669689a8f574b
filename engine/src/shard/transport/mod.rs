//! How a shard moves bytes: operations are started, complete later, and are told apart by tokens.
//!
//! io_uring where the kernel lets us (`ring`), else epoll and non-blocking calls (`epoll`) that behave the same:
//! every operation has one completion, also a cancelled one, and until then its buffer belongs to the transport. The
//! two are the only users of socket calls besides [`Lane`](super::lane::Lane), which makes and configures sockets.

mod epoll;
mod ring;

use crate::config::TransportKind;
use crate::memory::{Arena, Block};
use crate::{Address, Error, Result};
use epoll::Epoll;
use ring::Ring;
use serde::Serialize;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::time::Duration;

/// What a shard moves bytes with.
#[derive(Clone, Debug, Default, Serialize)]
#[non_exhaustive]
pub struct TransportReport {
    /// `io_uring` or `epoll`.
    pub name: &'static str,
    /// Why it is not io_uring where that was asked for if it can be had, with what to change.
    pub fallback: Option<String>,
    /// Set-up flags that the kernel accepted beyond the plain ring.
    pub setup: Vec<&'static str>,
    /// Blocks of the arena registered as fixed buffers.
    pub registered_blocks: usize,
    /// Why blocks are not registered, with what to change.
    pub not_registered: Option<String>,
    /// True if the wait itself takes a timeout (Linux 5.11); otherwise timeouts are operations.
    pub wait_timeout: bool,
}

impl TransportReport {
    /// True if it can register blocks at all.
    pub(in crate::shard) fn registers(&self) -> bool {
        self.name == "io_uring"
    }
}

/// What a completion is about. Travels through the kernel in 64 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::shard) enum Token {
    /// The doorbell's eventfd was read.
    Bell,
    /// A timeout operation of a sleep; nothing to do.
    Timeout,
    /// A cancel request; the cancelled operation completes by itself.
    Cancel,
    /// A lane's operation. Numbers of lanes are never used twice.
    Lane { op: LaneOp, lane: u64 },
}

/// A lane's kinds of operation; each lane has at most one of each in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::shard) enum LaneOp {
    Connect = 3,
    Send = 4,
    Receive = 5,
}

/// Bits of a token that hold the lane's number: at a million lanes a second they last two thousand years.
const LANE_BITS: u32 = 56;

impl Token {
    fn pack(self) -> u64 {
        match self {
            Token::Bell => 0,
            Token::Timeout => 1 << LANE_BITS,
            Token::Cancel => 2 << LANE_BITS,
            Token::Lane { op, lane } => (op as u64) << LANE_BITS | lane,
        }
    }

    fn unpack(word: u64) -> Self {
        let op = match word >> LANE_BITS {
            0 => return Token::Bell,
            1 => return Token::Timeout,
            3 => LaneOp::Connect,
            4 => LaneOp::Send,
            5 => LaneOp::Receive,
            _ => return Token::Cancel,
        };
        Token::Lane { op, lane: word & ((1 << LANE_BITS) - 1) }
    }
}

/// What a shard's loop needs of the kernel. Used by one thread, the one that made it.
pub(in crate::shard) trait Transport {
    /// What was obtained.
    fn report(&self) -> &TransportReport;

    /// System calls made so far: what the transport costs beside the copying.
    fn calls(&self) -> u64;

    /// Registers the arena's blocks, so that the kernel pins their pages once. The error says what to change.
    ///
    /// The caller keeps the arena mapped until the transport is dropped.
    fn register(&mut self, arena: &Arena) -> Result<(), String>;

    /// A block was added to the arena: registers it, if the others are registered.
    ///
    /// The caller keeps it mapped until [`Transport::block_removed`].
    fn block_added(&mut self, index: usize, block: &Block) -> Result<(), String>;

    /// A block is about to be unmapped: lets go of it. Where this fails its pages stay with the kernel.
    fn block_removed(&mut self, index: usize) -> Result<(), String>;

    /// Operations that have not been handed out as completed, of every kind.
    fn in_flight(&self) -> usize;

    /// Starts to read the doorbell's eventfd, which is always the same.
    fn read_bell(&mut self, event: &OwnedFd);

    /// Connects.
    ///
    /// # Safety
    /// `address` must stay in place until the completion.
    unsafe fn connect(&mut self, fd: &OwnedFd, address: &SocketAddress, token: Token);

    /// Sends from `bytes`; completes with the number of bytes, which may be fewer.
    ///
    /// # Safety
    /// `bytes` must stay in place and unchanged until the completion.
    unsafe fn send(&mut self, fd: &OwnedFd, bytes: &[u8], token: Token);

    /// Receives `len` bytes to `into`, fewer only at the end of the stream, on an error, or on kernels whose RECV
    /// does not honour MSG_WAITALL.
    ///
    /// # Safety
    /// `into` must be valid for writes of `len` bytes, and untouched by anyone else, until the completion.
    unsafe fn receive(&mut self, fd: &OwnedFd, into: *mut u8, len: usize, token: Token);

    /// Asks for an operation to end early. Its completion still comes.
    fn cancel(&mut self, token: Token);

    /// A lane without operations in flight is about to close its descriptor.
    fn forget(&mut self, lane: u64);

    /// Starts what was asked for and notices what has completed, without waiting.
    fn poll(&mut self);

    /// Sleeps until something completes or `timeout` passes (`None`: no limit).
    fn wait(&mut self, timeout: Option<Duration>);

    /// Takes the completions that are there.
    fn completions(&mut self, into: &mut Vec<(Token, i32)>);

    /// True if [`Transport::completions`] would find some.
    fn has_completions(&mut self) -> bool;
}

/// Sets up the transport that the configuration asks for. Must run on the thread that will use it.
pub(in crate::shard) fn open(kind: TransportKind) -> Result<Box<dyn Transport>, String> {
    if kind == TransportKind::Epoll {
        return Ok(Box::new(Epoll::new(None)?));
    }
    match Ring::new() {
        Ok(ring) => Ok(Box::new(ring)),
        Err(reason) if kind == TransportKind::Auto => Ok(Box::new(Epoll::new(Some(reason))?)),
        Err(reason) => Err(reason),
    }
}

/// A socket address in the kernel's form.
pub(in crate::shard) struct SocketAddress {
    storage: libc::sockaddr_storage,
    len: libc::socklen_t,
}

impl SocketAddress {
    fn as_ptr(&self) -> *const libc::sockaddr {
        (&raw const self.storage).cast()
    }

    fn len(&self) -> libc::socklen_t {
        self.len
    }

    pub(in crate::shard) fn is_tcp(&self) -> bool {
        self.family() != libc::AF_UNIX
    }

    pub(in crate::shard) fn family(&self) -> libc::c_int {
        libc::c_int::from(self.storage.ss_family)
    }
}

impl From<&Address> for SocketAddress {
    fn from(address: &Address) -> Self {
        // SAFETY: all-zero bytes are a valid sockaddr_storage.
        let mut storage: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
        let len = match address {
            Address::Tcp(SocketAddr::V4(v4)) => {
                let place: *mut libc::sockaddr_in = (&raw mut storage).cast();
                // SAFETY: sockaddr_storage is large enough and aligned for every address family.
                let place = unsafe { &mut *place };
                place.sin_family = libc::AF_INET as libc::sa_family_t;
                place.sin_port = v4.port().to_be();
                place.sin_addr.s_addr = u32::from_ne_bytes(v4.ip().octets());
                size_of::<libc::sockaddr_in>()
            }
            Address::Tcp(SocketAddr::V6(v6)) => {
                let place: *mut libc::sockaddr_in6 = (&raw mut storage).cast();
                // SAFETY: as above.
                let place = unsafe { &mut *place };
                place.sin6_family = libc::AF_INET6 as libc::sa_family_t;
                place.sin6_port = v6.port().to_be();
                place.sin6_addr.s6_addr = v6.ip().octets();
                place.sin6_flowinfo = v6.flowinfo();
                place.sin6_scope_id = v6.scope_id();
                size_of::<libc::sockaddr_in6>()
            }
            Address::Unix(path) => {
                let (address, len) = path.kernel_form();
                let place: *mut libc::sockaddr_un = (&raw mut storage).cast();
                // SAFETY: as above.
                unsafe { place.write(address) };
                len as usize
            }
        };
        Self { storage, len: len as libc::socklen_t }
    }
}

/// Tries to set up a ring as a shard would; for `doctor`.
pub fn probe_ring() -> Result<TransportReport> {
    match Ring::new() {
        Ok(ring) => Ok(ring.report().clone()),
        Err(reason) => Err(Error::ShardStart { shard: 0, reason: reason.into() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_survive_the_kernel() {
        for token in [
            Token::Bell,
            Token::Timeout,
            Token::Cancel,
            Token::Lane { op: LaneOp::Connect, lane: 0 },
            Token::Lane { op: LaneOp::Send, lane: (1 << LANE_BITS) - 1 },
            Token::Lane { op: LaneOp::Receive, lane: 7 },
        ] {
            assert_eq!(Token::unpack(token.pack()), token);
        }
    }
}
