//! A blocking connection over TCP or a Unix socket. Knows nothing of the protocol.

use std::io::{IoSlice, Write};
use std::net::TcpStream;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use crate::{Address, SocketPath};

#[derive(Debug)]
pub(super) enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Stream {
    /// Connects. `timeout` bounds that, and then each send and receive.
    pub(super) fn connect(address: &Address, timeout: Duration) -> std::io::Result<Self> {
        match address {
            Address::Tcp(address) => {
                let stream = TcpStream::connect_timeout(address, timeout)?;
                stream.set_nodelay(true)?;
                stream.set_read_timeout(Some(timeout))?;
                stream.set_write_timeout(Some(timeout))?;
                Ok(Stream::Tcp(stream))
            }
            Address::Unix(path) => connect_unix(path, timeout).map(Stream::Unix),
        }
    }

    pub(super) fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> std::io::Result<usize> {
        match self {
            Stream::Tcp(stream) => stream.write_vectored(slices),
            Stream::Unix(stream) => stream.write_vectored(slices),
        }
    }
}

impl AsRawFd for Stream {
    fn as_raw_fd(&self) -> RawFd {
        match self {
            Stream::Tcp(stream) => stream.as_raw_fd(),
            Stream::Unix(stream) => stream.as_raw_fd(),
        }
    }
}

/// The standard library's `connect` waits without end for a server that does not accept.
fn connect_unix(path: &SocketPath, timeout: Duration) -> std::io::Result<UnixStream> {
    // SAFETY: a plain system call.
    let fd = unsafe { libc::socket(libc::AF_UNIX, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0) };
    if fd < 0 {
        return Err(std::io::Error::last_os_error());
    }
    // SAFETY: the descriptor was just made and belongs to nobody else.
    let stream = UnixStream::from(unsafe { OwnedFd::from_raw_fd(fd) });
    stream.set_read_timeout(Some(timeout))?;
    // The kernel takes this one for `connect` too.
    stream.set_write_timeout(Some(timeout))?;
    let (address, len) = path.kernel_form();
    // SAFETY: passes the address and length of a local.
    let result = unsafe { libc::connect(stream.as_raw_fd(), (&raw const address).cast(), len) };
    match result {
        0 => Ok(stream),
        _ => Err(std::io::Error::last_os_error()),
    }
}
