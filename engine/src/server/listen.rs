//! Listening sockets: binding, accepting, and the file of a Unix socket.
//!
//! The rules for that file: it never has wider permissions than asked for; one that somebody listens on is
//! left alone, one that nobody answers on is replaced; it is removed at the end, if it still is the one made
//! here. Servers that start at the same time take turns by a lock on the file's directory.

use std::fs::File;
use std::io::{Error as IoError, ErrorKind};
use std::net::TcpListener;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::{Duration, Instant};

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::stream::{Peer, Stream, peer_uid};
use crate::{Address, Error, Result, SocketPath};

/// Connections that the kernel holds until they are accepted.
const BACKLOG: libc::c_int = 1024;
/// How long another server's start in the same directory is waited for.
const LOCK_WAIT: Duration = Duration::from_secs(2);

/// A listening socket.
#[derive(Debug)]
pub(super) struct Listener {
    // Before the socket: the file goes while its socket still answers, so that nobody takes it for stale and
    // has a new one in its place when it is removed.
    file: Option<SocketFile>,
    socket: Socket,
    address: Address,
}

#[derive(Debug)]
enum Socket {
    Tcp(TcpListener),
    Unix(UnixListener),
}

impl AsRawFd for Socket {
    fn as_raw_fd(&self) -> RawFd {
        match self {
            Socket::Tcp(socket) => socket.as_raw_fd(),
            Socket::Unix(socket) => socket.as_raw_fd(),
        }
    }
}

impl Listener {
    /// Listens. `socket_mode` is for the file of a Unix socket.
    pub(super) fn bind(address: &Address, socket_mode: u32) -> Result<Listener> {
        let listen = || match address {
            Address::Tcp(address) => {
                let socket = TcpListener::bind(address)?;
                socket.set_nonblocking(true)?;
                let address = socket.local_addr()?.into();
                Ok(Listener { file: None, socket: Socket::Tcp(socket), address })
            }
            Address::Unix(path) => {
                let (socket, file) = listen_unix(path, socket_mode)?;
                Ok(Listener { file: Some(file), socket: Socket::Unix(socket), address: address.clone() })
            }
        };
        listen().map_err(|error: IoError| Error::System {
            what: format!("cannot listen on {address}"),
            reason: error.to_string().into(),
        })
    }

    /// Where it listens.
    pub(super) fn local_addr(&self) -> &Address {
        &self.address
    }

    /// Hands the socket to the runtime of the calling thread.
    pub(super) fn start(self) -> std::io::Result<Acceptor> {
        // SAFETY: the descriptor is the socket's own and always the same; the registration owns the socket and
        // ends before it.
        let socket = unsafe { AsyncFd::register_with_interest(self.socket, Interest::READABLE) }?;
        Ok(Acceptor { _file: self.file, socket })
    }
}

/// A listening socket whose connections can be awaited. Nothing of it is in the kernel's hands between calls:
/// it may be dropped at any time.
pub(super) struct Acceptor {
    _file: Option<SocketFile>,
    socket: AsyncFd<Socket>,
}

impl Acceptor {
    /// The next connection.
    pub(super) async fn accept(&self) -> std::io::Result<(Stream, Peer)> {
        self.socket.async_io(Interest::READABLE, Socket::accept).await
    }
}

impl Socket {
    fn accept(&self) -> std::io::Result<(Stream, Peer)> {
        match self {
            Socket::Tcp(socket) => {
                let (stream, peer) = socket.accept()?;
                let stream = tokio_uring::net::TcpStream::from_std(stream);
                Ok((Stream::Tcp(stream), Peer::Tcp(peer)))
            }
            Socket::Unix(socket) => {
                let (stream, _) = socket.accept()?;
                let uid = peer_uid(&stream)?;
                let stream = tokio_uring::net::UnixStream::from_std(stream);
                Ok((Stream::Unix(stream), Peer::Unix { uid }))
            }
        }
    }
}

/// The file of a Unix socket that this server has made. Dropping it removes the file.
#[derive(Debug)]
struct SocketFile {
    path: SocketPath,
    device: u64,
    inode: u64,
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let path = self.path.as_path();
        let ours = std::fs::symlink_metadata(path)
            .is_ok_and(|file| (file.dev(), file.ino()) == (self.device, self.inode));
        if ours && let Err(error) = std::fs::remove_file(path) {
            tracing::warn!(path = %path.display(), %error, "cannot remove the socket's file");
        }
    }
}

fn listen_unix(path: &SocketPath, mode: u32) -> std::io::Result<(UnixListener, SocketFile)> {
    // Until the socket listens: a socket that is bound only would look stale to another server.
    let _turn = lock_directory(path.as_path())?;
    let socket = match bind_unix(path, mode) {
        Err(error) if error.kind() == ErrorKind::AddrInUse => {
            remove_stale(path.as_path())?;
            bind_unix(path, mode)
        }
        done => done,
    }?;
    let made = std::fs::symlink_metadata(path.as_path())?;
    let file = SocketFile { path: path.clone(), device: made.dev(), inode: made.ino() };
    // What the process's umask has taken away. Nobody can connect before the socket listens.
    std::fs::set_permissions(path.as_path(), std::fs::Permissions::from_mode(mode))?;
    // SAFETY: no pointers; the descriptor is open.
    if unsafe { libc::listen(socket.as_raw_fd(), BACKLOG) } != 0 {
        return Err(IoError::last_os_error());
    }
    let socket = UnixListener::from(socket);
    socket.set_nonblocking(true)?;
    Ok((socket, file))
}

/// A socket bound to a new file with at most the permissions `mode`.
fn bind_unix(path: &SocketPath, mode: u32) -> std::io::Result<OwnedFd> {
    // SAFETY: a plain system call.
    let fd = unsafe { libc::socket(libc::AF_UNIX, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0) };
    if fd < 0 {
        return Err(IoError::last_os_error());
    }
    // SAFETY: the descriptor was just made and belongs to nobody else.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    // The file that `bind` makes has the socket's own mode, less the umask: it is never wider, not for a moment,
    // and the umask, which is the whole process's, stays as it is.
    // SAFETY: no pointers.
    if unsafe { libc::fchmod(fd, mode) } != 0 {
        return Err(IoError::last_os_error());
    }
    let (address, len) = path.kernel_form();
    // SAFETY: passes the address and length of a local.
    if unsafe { libc::bind(fd, (&raw const address).cast(), len) } != 0 {
        return Err(IoError::last_os_error());
    }
    Ok(socket)
}

/// Removes a socket's file that nobody answers on; an error for every other file.
fn remove_stale(path: &Path) -> std::io::Result<()> {
    let in_the_way = |what: &str| IoError::new(ErrorKind::AddrInUse, format!("{} {what}", path.display()));
    if !std::fs::symlink_metadata(path)?.file_type().is_socket() {
        return Err(in_the_way("exists and is no socket"));
    }
    // Non-blocking: a server whose queue is full is there all the same.
    match connect_at_once(path) {
        Err(error) if error.kind() == ErrorKind::ConnectionRefused => {
            tracing::info!(path = %path.display(), "replacing a socket's file that nobody answers on");
            std::fs::remove_file(path)
        }
        Err(error) if error.kind() == ErrorKind::PermissionDenied => {
            Err(in_the_way("belongs to somebody else"))
        }
        _ => Err(in_the_way("has a server that listens on it")),
    }
}

fn connect_at_once(path: &Path) -> std::io::Result<UnixStream> {
    let path = SocketPath::new(path).map_err(|error| IoError::new(ErrorKind::InvalidInput, error))?;
    // SAFETY: a plain system call.
    let fd = unsafe {
        libc::socket(libc::AF_UNIX, libc::SOCK_STREAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK, 0)
    };
    if fd < 0 {
        return Err(IoError::last_os_error());
    }
    // SAFETY: the descriptor was just made and belongs to nobody else.
    let stream = UnixStream::from(unsafe { OwnedFd::from_raw_fd(fd) });
    let (address, len) = path.kernel_form();
    // SAFETY: passes the address and length of a local.
    match unsafe { libc::connect(fd, (&raw const address).cast(), len) } {
        0 => Ok(stream),
        _ => Err(IoError::last_os_error()),
    }
}

/// Locks the directory of `path` until the returned file is dropped.
fn lock_directory(path: &Path) -> std::io::Result<File> {
    let directory = path.parent().unwrap_or(Path::new("/"));
    let named = |error: IoError| IoError::new(error.kind(), format!("{}: {error}", directory.display()));
    let file = File::open(directory).map_err(named)?;
    let give_up = Instant::now() + LOCK_WAIT;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(std::fs::TryLockError::Error(error)) => return Err(named(error)),
            Err(std::fs::TryLockError::WouldBlock) if Instant::now() < give_up => {
                std::thread::sleep(Duration::from_millis(5));
            }
            Err(std::fs::TryLockError::WouldBlock) => {
                let reason = format!("another process keeps {} locked", directory.display());
                return Err(IoError::new(ErrorKind::TimedOut, reason));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::Directory;
    use super::*;

    fn mode(path: &Path) -> u32 {
        std::fs::symlink_metadata(path).unwrap().permissions().mode() & 0o7777
    }

    #[test]
    fn the_file_has_no_wider_mode_from_the_first_moment_on() {
        let directory = Directory::new("mode");
        let path = SocketPath::new(directory.path().join("bound")).unwrap();
        // Bound only: what `listen_unix` widens afterwards is not yet done.
        let _socket = bind_unix(&path, 0o600).unwrap();
        assert_eq!(mode(path.as_path()) & !0o600, 0);
        for wanted in [0o600, 0o660, 0o666, 0o700] {
            let listener = Listener::bind(&directory.address(), wanted).unwrap();
            assert_eq!(mode(&directory.path().join("s")), wanted);
            drop(listener);
            assert!(!directory.path().join("s").exists(), "removed at the end");
        }
    }

    #[test]
    fn a_stale_file_is_replaced_and_a_living_one_is_not() {
        let directory = Directory::new("stale");
        let (path, address) = (directory.path().join("s"), directory.address());
        // The standard library leaves its file behind.
        drop(UnixListener::bind(&path).unwrap());
        assert!(path.exists());
        let living = Listener::bind(&address, 0o600).unwrap();
        let error = Listener::bind(&address, 0o600).unwrap_err().to_string();
        assert!(error.contains("listens on it") && error.contains("unix:/"), "{error}");
        UnixStream::connect(&path).unwrap();
        // Another file in its place is not ours to remove.
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, "precious").unwrap();
        drop(living);
        let error = Listener::bind(&address, 0o600).unwrap_err().to_string();
        assert!(error.contains("is no socket"), "{error}");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "precious");
    }

    #[test]
    fn a_socket_with_a_full_queue_is_not_stale() {
        let directory = Directory::new("full");
        let path = SocketPath::new(directory.path().join("s")).unwrap();
        let socket = bind_unix(&path, 0o600).unwrap();
        // SAFETY: no pointers; the descriptor is open.
        assert_eq!(unsafe { libc::listen(socket.as_raw_fd(), 0) }, 0);
        let mut queue = Vec::new();
        while let Ok(stream) = connect_at_once(path.as_path()) {
            queue.push(stream);
        }
        let error = Listener::bind(&directory.address(), 0o600).unwrap_err().to_string();
        assert!(error.contains("listens on it"), "{error}");
    }

    #[test]
    fn servers_that_start_at_once_do_not_take_each_others_file() {
        let directory = Directory::new("race");
        drop(UnixListener::bind(directory.path().join("s")).unwrap());
        let address = directory.address();
        let started: Vec<_> = std::thread::scope(|scope| {
            let start = || Listener::bind(&address, 0o600);
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(start)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert_eq!(started.iter().filter(|started| started.is_ok()).count(), 1);
        UnixStream::connect(directory.path().join("s")).unwrap();
    }

    #[test]
    fn a_directory_that_is_not_there_is_named() {
        let error =
            Listener::bind(&Address::unix("/nowhere/at/all").unwrap(), 0o600).unwrap_err().to_string();
        assert!(error.contains("/nowhere/at"), "{error}");
    }
}
