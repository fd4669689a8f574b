//! Transport on io_uring: set-up by probing, operations, sleep. The only file that names the crate.
//!
//! The oldest kernel it is written for is 5.10: RECV, SEND, CONNECT, READ, TIMEOUT and ASYNC_CANCEL are
//! there. Newer set-up flags are tried from the best downwards, and what was had is reported.

use super::{SocketAddress, Token, Transport, TransportReport};
use crate::memory::{Arena, Block};
use io_uring::{IoUring, Probe, cqueue, opcode, squeue, types};
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Duration;

/// Submission entries. Each lane has at most three operations in flight; a full queue is submitted.
const ENTRIES: u32 = 256;

/// `IORING_ENTER_GETEVENTS` of the kernel's interface, which the crate does not export.
const ENTER_GETEVENTS: u32 = 1;

/// Blocks registered at most: the kernel's limit on registered buffers.
const BUFFERS_MAX: usize = 16_384;

pub(super) struct Ring {
    ring: IoUring,
    report: TransportReport,
    /// Operations submitted and not completed, of every kind.
    in_flight: usize,
    /// By block: whether it is registered. Empty if none can be.
    registered: Vec<bool>,
    /// Completions taken early, to make room for submissions.
    backlog: Vec<(Token, i32)>,
    /// Target of the eventfd read; boxed so that it stays where it is while the kernel owns it.
    bell_buffer: Box<u64>,
    timeout: Box<types::Timespec>,
    calls: u64,
}

impl Ring {
    /// Sets up the ring. Must run on the thread that will use it.
    pub(super) fn new() -> Result<Self, String> {
        let (ring, setup) = build()?;
        check_operations(&ring)?;
        let report = TransportReport {
            name: "io_uring",
            setup,
            wait_timeout: ring.params().is_feature_ext_arg(),
            ..TransportReport::default()
        };
        Ok(Self {
            ring,
            report,
            in_flight: 0,
            registered: Vec::new(),
            backlog: Vec::new(),
            bell_buffer: Box::new(0),
            timeout: Box::new(types::Timespec::new()),
            calls: 0,
        })
    }

    /// Puts a buffer, or none, into a place of the table of registered ones. Nothing in flight refers to the table
    /// (receives name addresses), so the kernel lets go of the former one at once.
    fn update(&mut self, index: usize, buffer: libc::iovec) -> Result<(), String> {
        // SAFETY: as in `register`.
        unsafe { self.ring.submitter().register_buffers_update(index as u32, &[buffer], None) }
            .map_err(|error| format!("io_uring_register: {error} (Linux before 5.13 cannot; ENOMEM: RLIMIT_MEMLOCK)"))?;
        self.registered[index] = buffer.iov_len > 0;
        self.count_registered();
        Ok(())
    }

    fn count_registered(&mut self) {
        self.report.registered_blocks = self.registered.iter().filter(|&&registered| registered).count();
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

    fn check(&mut self, entered: std::io::Result<usize>) {
        self.calls += 1;
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

    fn take_completions(&mut self) {
        let before = self.backlog.len();
        let fresh = self.ring.completion();
        let unpack = |entry: cqueue::Entry| (Token::unpack(entry.user_data()), entry.result());
        self.backlog.extend(fresh.map(unpack));
        self.in_flight -= self.backlog.len() - before;
    }
}

impl Transport for Ring {
    fn report(&self) -> &TransportReport {
        &self.report
    }

    fn calls(&self) -> u64 {
        self.calls
    }

    fn register(&mut self, arena: &Arena) -> Result<(), String> {
        let places = arena.block_count_max().min(BUFFERS_MAX);
        // A place for every block that there can be, empty where there is none yet.
        let mut buffers: Vec<libc::iovec> =
            (0..places).map(|index| arena.block(index).map_or(NO_BUFFER, |block| buffer_of(&block))).collect();
        // SAFETY: the blocks are mapped for as long as the ring lives or until they are taken out of it: the shard
        // holds the arena, drops the ring first, and calls `block_removed` before it unmaps.
        let mut registered = unsafe { self.ring.submitter().register_buffers(&buffers) };
        if registered.as_ref().is_err_and(|error| error.raw_os_error() == Some(libc::EFAULT)) {
            // Linux before 5.13 knows no empty places. At start the blocks that are there come first.
            buffers.retain(|buffer| buffer.iov_len > 0);
            // SAFETY: as above.
            registered = unsafe { self.ring.submitter().register_buffers(&buffers) };
        }
        match registered {
            Ok(()) => {
                self.registered = buffers.iter().map(|buffer| buffer.iov_len > 0).collect();
                self.count_registered();
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

    fn block_added(&mut self, index: usize, block: &Block) -> Result<(), String> {
        if self.registered.is_empty() {
            return Ok(());
        }
        if index >= self.registered.len() {
            return Err(format!(
                "there are {} places for registered blocks (this kernel's limit, or Linux before 5.13 where an \
                 arena cannot grow registered)",
                self.registered.len()
            ));
        }
        self.update(index, buffer_of(block))
    }

    fn block_removed(&mut self, index: usize) -> Result<(), String> {
        if !self.registered.get(index).is_some_and(|&registered| registered) {
            return Ok(());
        }
        self.update(index, NO_BUFFER)
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    fn read_bell(&mut self, event: &OwnedFd) {
        let buffer: *mut u64 = &mut *self.bell_buffer;
        let entry = opcode::Read::new(types::Fd(event.as_raw_fd()), buffer.cast(), 8).build();
        self.push(entry, Token::Bell);
    }

    unsafe fn connect(&mut self, fd: &OwnedFd, address: &SocketAddress, token: Token) {
        let entry = opcode::Connect::new(types::Fd(fd.as_raw_fd()), address.as_ptr(), address.len()).build();
        self.push(entry, token);
    }

    unsafe fn send(&mut self, fd: &OwnedFd, bytes: &[u8], token: Token) {
        // A longer buffer is sent in several operations; the lane goes on after each.
        let len = bytes.len().min(i32::MAX as usize) as u32;
        let entry = opcode::Send::new(types::Fd(fd.as_raw_fd()), bytes.as_ptr(), len)
            .flags(libc::MSG_NOSIGNAL)
            .build();
        self.push(entry, token);
    }

    unsafe fn receive(&mut self, fd: &OwnedFd, into: *mut u8, len: usize, token: Token) {
        let entry = opcode::Recv::new(types::Fd(fd.as_raw_fd()), into, len.min(i32::MAX as usize) as u32)
            .flags(libc::MSG_WAITALL)
            .build();
        self.push(entry, token);
    }

    fn cancel(&mut self, token: Token) {
        self.push(opcode::AsyncCancel::new(token.pack()).build(), Token::Cancel);
    }

    fn forget(&mut self, _lane: u64) {}

    fn poll(&mut self) {
        let pushed = self.ring.submission().len() as u32;
        // With DEFER_TASKRUN completions are posted only by a call that asks for them, hence GETEVENTS.
        // SAFETY: no argument structure is passed; what the entries point to is in place, see `push`.
        let entered = unsafe { self.ring.submitter().enter::<()>(pushed, 0, ENTER_GETEVENTS, None) };
        self.check(entered);
    }

    fn wait(&mut self, timeout: Option<Duration>) {
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

    fn completions(&mut self, into: &mut Vec<(Token, i32)>) {
        self.take_completions();
        into.append(&mut self.backlog);
    }

    fn has_completions(&mut self) -> bool {
        !self.backlog.is_empty() || !self.ring.completion().is_empty()
    }
}

/// An empty place in the table of registered buffers.
const NO_BUFFER: libc::iovec = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };

fn buffer_of(block: &Block) -> libc::iovec {
    libc::iovec { iov_base: block.base().as_ptr().cast(), iov_len: block.bytes() }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_name_the_setting_to_change() {
        for (errno, word) in
            [(libc::EPERM, "io_uring_disabled"), (libc::ENOMEM, "RLIMIT_MEMLOCK"), (libc::ENOSYS, "5.10")]
        {
            assert!(explain(&std::io::Error::from_raw_os_error(errno)).contains(word));
        }
    }
}
