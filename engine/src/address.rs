//! Where a slice server listens: a TCP address or the path of a Unix socket.
//!
//! It knows the two ways to write an address and what fits the kernel's form of it; it opens no socket and
//! resolves no name.

use std::net::{SocketAddr, ToSocketAddrs};
use std::path::Path;
use std::sync::Arc;

/// Longest path of a Unix socket in bytes: the kernel's `sun_path` without its final 0.
pub const SOCKET_PATH_BYTES_MAX: usize = 107;

const UNIX_PREFIX: &str = "unix:";

/// Address of a slice server. Written `host:port` or `unix:/absolute/path`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Address {
    /// A TCP address.
    Tcp(SocketAddr),
    /// A Unix socket in the file system.
    Unix(SocketPath),
}

/// Path of a Unix socket that the kernel can take: absolute, at most [`SOCKET_PATH_BYTES_MAX`] bytes. Cheap to
/// clone.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SocketPath(Arc<str>);

/// A text or path that is no address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is not an address: {allowed}")]
pub struct AddressError {
    /// What was given.
    pub text: String,
    /// What is allowed.
    pub allowed: String,
}

impl SocketPath {
    /// A path that can be a socket's.
    ///
    /// # Errors
    ///
    /// A path that is relative, too long or not UTF-8, or has a comma (which separates addresses) or a 0 in it.
    pub fn new(path: impl AsRef<Path>) -> Result<Self, AddressError> {
        let path = path.as_ref();
        let refused =
            |allowed: String| AddressError { text: format!("{UNIX_PREFIX}{}", path.display()), allowed };
        let Some(text) = path.to_str() else {
            return Err(refused("the path of a Unix socket must be UTF-8".to_owned()));
        };
        if !text.starts_with('/') {
            return Err(refused(
                "the path of a Unix socket begins with `/`, as in unix:/run/hotslice.sock".to_owned(),
            ));
        }
        if text.len() > SOCKET_PATH_BYTES_MAX {
            let len = text.len();
            return Err(refused(format!(
                "the path of a Unix socket has at most {SOCKET_PATH_BYTES_MAX} bytes, not {len}"
            )));
        }
        if text.contains([',', '\0']) {
            return Err(refused("the path of a Unix socket has no comma and no 0 byte".to_owned()));
        }
        Ok(Self(text.into()))
    }

    /// The path.
    pub fn as_path(&self) -> &Path {
        Path::new(&*self.0)
    }

    /// The kernel's form of it, and the length of that.
    pub(crate) fn kernel_form(&self) -> (libc::sockaddr_un, libc::socklen_t) {
        // SAFETY: all-zero bytes are a valid sockaddr_un.
        let mut place: libc::sockaddr_un = unsafe { std::mem::zeroed() };
        place.sun_family = libc::AF_UNIX as libc::sa_family_t;
        // A path is shorter than `sun_path`: a 0 stays behind it.
        for (to, from) in place.sun_path.iter_mut().zip(self.0.as_bytes()) {
            *to = *from as libc::c_char;
        }
        let len = std::mem::offset_of!(libc::sockaddr_un, sun_path) + self.0.len() + 1;
        (place, len as libc::socklen_t)
    }
}

impl Address {
    /// The address of a Unix socket.
    ///
    /// # Errors
    ///
    /// Those of [`SocketPath::new`].
    pub fn unix(path: impl AsRef<Path>) -> Result<Self, AddressError> {
        SocketPath::new(path).map(Address::Unix)
    }

    /// The TCP address, if it is one.
    pub fn tcp(&self) -> Option<SocketAddr> {
        match self {
            Address::Tcp(address) => Some(*address),
            Address::Unix(_) => None,
        }
    }

    /// Reads an address and resolves its host name, which may block; a name gives its first address.
    ///
    /// # Errors
    ///
    /// A text of another form, and a name that has no address.
    pub fn resolve(text: &str) -> Result<Self, AddressError> {
        if text.starts_with(UNIX_PREFIX) {
            return text.parse();
        }
        let refused = |allowed: String| AddressError { text: text.to_owned(), allowed };
        let mut addresses = text.to_socket_addrs().map_err(|error| {
            refused(format!("host:port that resolves, or unix:/absolute/path, is allowed ({error})"))
        })?;
        let first = addresses.next();
        first.map(Address::Tcp).ok_or_else(|| refused("a name that has an address is allowed".to_owned()))
    }
}

impl std::fmt::Display for Address {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Address::Tcp(address) => address.fmt(f),
            Address::Unix(path) => write!(f, "{UNIX_PREFIX}{}", path.0),
        }
    }
}

/// Resolves no names: see [`Address::resolve`].
impl std::str::FromStr for Address {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        if let Some(path) = text.strip_prefix(UNIX_PREFIX) {
            return Address::unix(path);
        }
        text.parse().map(Address::Tcp).map_err(|_| AddressError {
            text: text.to_owned(),
            allowed: "address:port or unix:/absolute/path is allowed".to_owned(),
        })
    }
}

impl From<SocketAddr> for Address {
    fn from(address: SocketAddr) -> Self {
        Address::Tcp(address)
    }
}

impl From<([u8; 4], u16)> for Address {
    fn from(address: ([u8; 4], u16)) -> Self {
        Address::Tcp(address.into())
    }
}

impl From<&Address> for Address {
    fn from(address: &Address) -> Self {
        address.clone()
    }
}

/// For the standard library's TCP calls. A Unix address is an error.
impl ToSocketAddrs for Address {
    type Iter = std::option::IntoIter<SocketAddr>;

    fn to_socket_addrs(&self) -> std::io::Result<Self::Iter> {
        match self.tcp() {
            Some(address) => Ok(Some(address).into_iter()),
            None => Err(std::io::Error::new(
                std::io::ErrorKind::InvalidInput,
                format!("{self} is not a TCP address"),
            )),
        }
    }
}

impl serde::Serialize for Address {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_written_as_they_are_read() {
        for text in ["127.0.0.1:7110", "[::1]:7110", "unix:/run/hotslice/serve.sock", "unix:/ü"] {
            let address: Address = text.parse().unwrap();
            assert_eq!(address.to_string(), text);
            assert_eq!(Address::resolve(text).unwrap(), address);
            assert_eq!(address.tcp().is_some(), !text.starts_with("unix:"));
            assert_eq!(address.to_socket_addrs().is_ok(), address.tcp().is_some());
        }
    }

    #[test]
    fn the_kernel_gets_the_path_and_a_zero() {
        let text = format!("/{}", "x".repeat(SOCKET_PATH_BYTES_MAX - 1));
        let (form, len) = SocketPath::new(&text).unwrap().kernel_form();
        assert_eq!((len as usize, form.sun_path[107]), (size_of::<libc::sockaddr_un>(), 0));
        assert!(form.sun_path.iter().zip(text.bytes()).all(|(got, want)| *got as u8 == want));
    }

    #[test]
    fn what_is_no_address_is_told_what_would_be() {
        let longest = format!("/{}", "x".repeat(SOCKET_PATH_BYTES_MAX - 1));
        assert!(Address::unix(&longest).is_ok());
        let cases = [
            (format!("unix:{longest}x"), "107"),
            ("unix:relative".to_owned(), "begins with `/`"),
            ("unix:".to_owned(), "begins with `/`"),
            ("unix:/a,b".to_owned(), "comma"),
            ("unix:/a\0b".to_owned(), "0 byte"),
            ("nowhere".to_owned(), "unix:/absolute/path"),
            ("/run/hotslice.sock".to_owned(), "unix:/absolute/path"),
            ("127.0.0.1".to_owned(), "address:port"),
        ];
        for (text, word) in cases {
            let error = text.parse::<Address>().unwrap_err().to_string();
            assert!(error.contains(word) && error.contains(text.trim_end_matches('x')), "{error}");
        }
        use std::os::unix::ffi::OsStrExt;
        let error = Address::unix(std::ffi::OsStr::from_bytes(b"/\xff")).unwrap_err().to_string();
        assert!(error.contains("UTF-8"), "{error}");
        assert!(Address::resolve("no port").is_err());
    }
}
