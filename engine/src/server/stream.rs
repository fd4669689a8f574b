//! An accepted connection's socket, TCP or Unix, and who is at its other end. Knows nothing of the protocol.

use std::net::{IpAddr, Shutdown, SocketAddr};
use std::os::fd::AsRawFd;

use tokio_uring::BufResult;
use tokio_uring::buf::{BoundedBuf, BoundedBufMut};
use tokio_uring::net::{TcpStream, UnixStream};

pub(super) enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Stream {
    pub(super) async fn read<T: BoundedBufMut>(&self, buffer: T) -> BufResult<usize, T> {
        match self {
            Stream::Tcp(stream) => stream.read(buffer).await,
            Stream::Unix(stream) => stream.read(buffer).await,
        }
    }

    pub(super) async fn writev<T: BoundedBuf>(&self, buffers: Vec<T>) -> BufResult<usize, Vec<T>> {
        match self {
            Stream::Tcp(stream) => stream.writev(buffers).await,
            Stream::Unix(stream) => stream.writev(buffers).await,
        }
    }

    pub(super) fn shutdown(&self, how: Shutdown) -> std::io::Result<()> {
        match self {
            Stream::Tcp(stream) => stream.shutdown(how),
            Stream::Unix(stream) => stream.shutdown(how),
        }
    }
}

/// The other end of one connection.
#[derive(Clone, Copy, Debug)]
pub(super) enum Peer {
    Tcp(SocketAddr),
    /// A process on this machine, by its user.
    Unix {
        uid: u32,
    },
}

impl std::fmt::Display for Peer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Peer::Tcp(address) => address.fmt(f),
            Peer::Unix { uid } => write!(f, "user {uid} of this machine"),
        }
    }
}

/// Whose connections count together.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(super) enum Client {
    /// Everybody behind one address.
    Ip(IpAddr),
    /// Every process of one user.
    User(u32),
}

impl Peer {
    pub(super) fn client(&self) -> Client {
        match self {
            // An IPv4 client is the same one, however it came.
            Peer::Tcp(address) => Client::Ip(address.ip().to_canonical()),
            Peer::Unix { uid } => Client::User(*uid),
        }
    }
}

impl std::fmt::Display for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Client::Ip(address) => address.fmt(f),
            Client::User(uid) => write!(f, "user {uid}"),
        }
    }
}

/// The user at the other end of a Unix connection, as the kernel has noted it when the connection was made.
pub(super) fn peer_uid(socket: &impl AsRawFd) -> std::io::Result<u32> {
    let mut credentials = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: passes the addresses of two locals and the size of the first; the kernel writes no more.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut credentials).cast(),
            &raw mut len,
        )
    };
    if result == 0 { Ok(credentials.uid) } else { Err(std::io::Error::last_os_error()) }
}
