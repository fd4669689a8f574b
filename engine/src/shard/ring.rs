//! The shard's io_uring: set-up by probing, operations, sleep. The only file that names the crate.
//!
//! The oldest kernel it is written for is 5.10: RECV, SEND, CONNECT, READ, TIMEOUT and ASYNC_CANCEL are
//! there. Newer set-up flags are tried from the best downwards, and what was had is reported.

use crate::memory::Arena;
use crate::{Error, Result};
use io_uring::{IoUring, Probe, cqueue, opcode, squeue, types};
use serde::Serialize;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Duration;

/// Submission entries. Each lane has at most three operations in flight; a full queue is submitted.
const ENTRIES: u32 = 256;

/// `IORING_ENTER_GETEVENTS` of the kernel's interface, which the crate does not export.
const ENTER_GETEVENTS: u32 = 1;

/// Blocks registered at most: the kernel's limit on registered buffers.
const BUFFERS_MAX: usize = 16_384;

/// How a shard's ring was set up.
#[derive(Clone, Debug, Default, Serialize)]
#[non_exhaustive]
pub struct RingReport {
    /// Set-up flags that the kernel accepted beyond the plain ring.
    pub setup: Vec<&'static str>,
    /// Blocks of the arena registered as fixed buffers.
    pub registered_blocks: usize,
    /// Why blocks are not registered, with what to change.
    pub not_registered: Option<String>,
    /// True if the wait itself takes a timeout (Linux 5.11); otherwise timeouts are operations.
    pub wait_timeout: bool,
}

/// What a completion is about. Travels through the kernel in 64 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Token {
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
pub(super) enum LaneOp {
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

pub(super) struct Ring {
    ring: IoUring,
    report: RingReport,
    /// Operations submitted and not completed, of every kind.
    in_flight: usize,
    /// Completions taken early, to make room for submissions.
    backlog: Vec<(Token, i32)>,
    /// Target of the eventfd read; boxed so that it stays where it is while the kernel owns it.
    bell_buffer: Box<u64>,
    timeout: Box<types::Timespec>,
}

impl Ring {
    /// Sets up the ring. Must run on the thread that will use it.
    pub(super) fn new() -> Result<Self, String> {
        let (ring, setup) = build()?;
        check_operations(&ring)?;
        let report =
            RingReport { setup, wait_timeout: ring.params().is_feature_ext_arg(), ..RingReport::default() };
        Ok(Self {
            ring,
            report,
            in_flight: 0,
            backlog: Vec::new(),
            bell_buffer: Box::new(0),
            timeout: Box::new(types::Timespec::new()),
        })
    }

    pub(super) fn report(&self) -> &RingReport {
        &self.report
    }

    /// Registers the arena's blocks, so that the kernel pins their pages once. The error says what to change.
    ///
    /// The caller keeps the arena mapped until the ring is dropped.
    pub(super) fn register(&mut self, arena: &Arena) -> Result<(), String> {
        let buffers: Vec<libc::iovec> = (0..arena.block_count().min(BUFFERS_MAX))
            .map(|block| libc::iovec {
                iov_base: arena.block(block).base().as_ptr().cast(),
                iov_len: arena.block_bytes(),
            })
            .collect();
        // SAFETY: the blocks are mapped for as long as the ring lives: the shard holds the arena and drops the
        // ring first.
        let registered = unsafe { self.ring.submitter().register_buffers(&buffers) };
        match registered {
            Ok(()) => {
                self.report.registered_blocks = buffers.len();
                Ok(())
            }
            Err(error) => {
                let reason = match error.raw_os_error() {
                    Some(libc::ENOMEM) => format!(
                        "{error}: RLIMIT_MEMLOCK is smaller than the {} bytes of the arena; raise it (ulimit -l, \
                         LimitMEMLOCK=, docker --ulimit memlock=-1) or set `register = off`",
                        arena.bytes()
                    ),
                    _ => format!("{error}; `register = off` does without"),
                };
                self.report.not_registered = Some(reason.clone());
                Err(reason)
            }
        }
    }

    /// Operations that the kernel has not completed, the doorbell's read aside.
    pub(super) fn in_flight(&self) -> usize {
        self.in_flight
    }

    fn push(&mut self, entry: squeue::Entry, token: Token) {
        let entry = entry.user_data(token.pack());
        loop {
            // SAFETY: what the entry points to is owned by whoever called the public method, whose contract
            // is to keep it in place until the completion.
            if unsafe { self.ring.submission().push(&entry) }.is_ok() {
                break;
            }
            self.poll();
            // A kernel whose completion queue overflowed takes submissions only after some were taken.
            self.take_completions();
        }
        self.in_flight += 1;
    }

    /// Arms the read of the doorbell.
    pub(super) fn read_bell(&mut self, event: &OwnedFd) {
        let buffer: *mut u64 = &mut *self.bell_buffer;
        let entry = opcode::Read::new(types::Fd(event.as_raw_fd()), buffer.cast(), 8).build();
        self.push(entry, Token::Bell);
    }

    /// Connects.
    ///
    /// # Safety
    /// `address` must stay in place until the completion.
    pub(super) unsafe fn connect(&mut self, fd: &OwnedFd, address: &SocketAddress, token: Token) {
        let entry = opcode::Connect::new(types::Fd(fd.as_raw_fd()), address.as_ptr(), address.len()).build();
        self.push(entry, token);
    }

    /// Sends from `bytes`.
    ///
    /// # Safety
    /// `bytes` must stay in place and unchanged until the completion.
    pub(super) unsafe fn send(&mut self, fd: &OwnedFd, bytes: &[u8], token: Token) {
        // A longer buffer is sent in several operations; the lane goes on after each.
        let len = bytes.len().min(i32::MAX as usize) as u32;
        let entry = opcode::Send::new(types::Fd(fd.as_raw_fd()), bytes.as_ptr(), len)
            .flags(libc::MSG_NOSIGNAL)
            .build();
        self.push(entry, token);
    }

    /// Receives `len` bytes to `into`, fewer only at the end of the stream, on an error, or on kernels whose
    /// RECV does not honour MSG_WAITALL.
    ///
    /// # Safety
    /// `into` must be valid for writes of `len` bytes, and untouched by anyone else, until the completion.
    pub(super) unsafe fn receive(&mut self, fd: &OwnedFd, into: *mut u8, len: usize, token: Token) {
        let entry = opcode::Recv::new(types::Fd(fd.as_raw_fd()), into, len.min(i32::MAX as usize) as u32)
            .flags(libc::MSG_WAITALL)
            .build();
        self.push(entry, token);
    }

    /// Asks the kernel to end an operation early. Its completion still comes.
    pub(super) fn cancel(&mut self, token: Token) {
        self.push(opcode::AsyncCancel::new(token.pack()).build(), Token::Cancel);
    }

    /// Submits what was pushed and lets the kernel post what has completed, without waiting.
    pub(super) fn poll(&mut self) {
        let pushed = self.ring.submission().len() as u32;
        // With DEFER_TASKRUN completions are posted only by a call that asks for them, hence GETEVENTS.
        // SAFETY: no argument structure is passed; what the entries point to is in place, see `push`.
        let entered = unsafe { self.ring.submitter().enter::<()>(pushed, 0, ENTER_GETEVENTS, None) };
        self.check(entered);
    }

    fn check(&self, entered: std::io::Result<usize>) {
        // EBUSY and EAGAIN: completions must be taken first; EINTR: a signal; ETIME: the wait's timeout.
        // Whatever is left in the queue goes with the next submission.
        if let Err(error) = entered
            && !matches!(
                error.raw_os_error(),
                Some(libc::EINTR | libc::ETIME | libc::EAGAIN | libc::EBUSY)
            )
        {
            tracing::error!(%error, "io_uring_enter");
        }
    }

    /// Submits and sleeps until something completes or `timeout` passes (`None`: no limit).
    pub(super) fn wait(&mut self, timeout: Option<Duration>) {
        let result = match timeout {
            None => self.ring.submit_and_wait(1),
            Some(timeout) if self.report.wait_timeout => {
                let timespec = types::Timespec::from(timeout);
                let args = types::SubmitArgs::new().timespec(&timespec);
                self.ring.submitter().submit_with_args(1, &args)
            }
            Some(timeout) => {
                *self.timeout = types::Timespec::from(timeout);
                // Completes with the next completion of any kind (count 1), so that none stays behind. The
                // kernel copies the time when it takes the entry.
                let entry = opcode::Timeout::new(&*self.timeout).count(1).build();
                self.push(entry, Token::Timeout);
                self.ring.submit_and_wait(1)
            }
        };
        self.check(result);
    }

    /// Takes the completions that are there.
    pub(super) fn completions(&mut self, into: &mut Vec<(Token, i32)>) {
        self.take_completions();
        into.append(&mut self.backlog);
    }

    pub(super) fn has_completions(&mut self) -> bool {
        !self.backlog.is_empty() || !self.ring.completion().is_empty()
    }

    fn take_completions(&mut self) {
        let before = self.backlog.len();
        let fresh = self.ring.completion();
        let unpack = |entry: cqueue::Entry| (Token::unpack(entry.user_data()), entry.result());
        self.backlog.extend(fresh.map(unpack));
        self.in_flight -= self.backlog.len() - before;
    }
}

fn build() -> Result<(IoUring, Vec<&'static str>), String> {
    let mut refused = None;
    for level in 0..3 {
        let mut builder = IoUring::builder();
        let flags: &[&str] = match level {
            0 => {
                builder.setup_single_issuer().setup_defer_taskrun();
                &["SINGLE_ISSUER", "DEFER_TASKRUN"]
            }
            1 => {
                builder.setup_coop_taskrun();
                &["COOP_TASKRUN"]
            }
            _ => &[],
        };
        match builder.dontfork().build(ENTRIES) {
            Ok(ring) => return Ok((ring, flags.to_vec())),
            // An unknown flag: the next level asks for less.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => refused = Some(error),
            Err(error) => return Err(explain(&error)),
        }
    }
    Err(refused.map_or_else(|| "io_uring refused".to_owned(), |error| explain(&error)))
}

/// What a refused set-up means and what mends it.
pub(crate) fn explain(error: &std::io::Error) -> String {
    let hint = match error.raw_os_error() {
        Some(libc::EPERM) => {
            "io_uring is forbidden to this process: set sysctl kernel.io_uring_disabled=0 (or, with 1, join \
             kernel.io_uring_group), and in a container allow io_uring_setup, io_uring_enter and \
             io_uring_register in the seccomp profile (docker --security-opt seccomp=…)"
        }
        Some(libc::ENOSYS) => "this kernel has no io_uring: Linux 5.10 or newer is needed",
        Some(libc::ENOMEM) => {
            "no locked memory left for the ring: raise RLIMIT_MEMLOCK (ulimit -l, LimitMEMLOCK=)"
        }
        Some(libc::EMFILE | libc::ENFILE) => "no file descriptor left: raise RLIMIT_NOFILE (ulimit -n)",
        _ => "see io_uring_setup(2)",
    };
    format!("io_uring_setup: {error}: {hint}")
}

fn check_operations(ring: &IoUring) -> Result<(), String> {
    let mut probe = Probe::new();
    ring.submitter().register_probe(&mut probe).map_err(|error| {
        format!("io_uring cannot be probed ({error}): Linux 5.10 or newer is needed")
    })?;
    for (name, code) in [
        ("RECV", opcode::Recv::CODE),
        ("SEND", opcode::Send::CODE),
        ("CONNECT", opcode::Connect::CODE),
        ("READ", opcode::Read::CODE),
        ("TIMEOUT", opcode::Timeout::CODE),
        ("ASYNC_CANCEL", opcode::AsyncCancel::CODE),
    ] {
        if !probe.is_supported(code) {
            return Err(format!("io_uring lacks {name}: Linux 5.10 or newer is needed"));
        }
    }
    Ok(())
}

/// A socket address in the kernel's form.
pub(super) struct SocketAddress {
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

    pub(super) fn family(&self) -> libc::c_int {
        libc::c_int::from(self.storage.ss_family)
    }
}

impl From<std::net::SocketAddr> for SocketAddress {
    fn from(address: std::net::SocketAddr) -> Self {
        // SAFETY: all-zero bytes are a valid sockaddr_storage.
        let mut storage: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
        let len = match address {
            std::net::SocketAddr::V4(v4) => {
                let place: *mut libc::sockaddr_in = (&raw mut storage).cast();
                // SAFETY: sockaddr_storage is large enough and aligned for every address family.
                let place = unsafe { &mut *place };
                place.sin_family = libc::AF_INET as libc::sa_family_t;
                place.sin_port = v4.port().to_be();
                place.sin_addr.s_addr = u32::from_ne_bytes(v4.ip().octets());
                size_of::<libc::sockaddr_in>()
            }
            std::net::SocketAddr::V6(v6) => {
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
        };
        Self { storage, len: len as libc::socklen_t }
    }
}

/// Tries to set up a ring as a shard would; for `doctor`.
pub fn probe_ring() -> Result<RingReport> {
    match Ring::new() {
        Ok(ring) => Ok(ring.report.clone()),
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

    #[test]
    fn refusals_name_the_setting_to_change() {
        for (errno, word) in
            [(libc::EPERM, "io_uring_disabled"), (libc::ENOMEM, "RLIMIT_MEMLOCK"), (libc::ENOSYS, "5.10")]
        {
            assert!(explain(&std::io::Error::from_raw_os_error(errno)).contains(word));
        }
    }
}
