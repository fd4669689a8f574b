//! Random bytes from the kernel.

use crate::{Error, Result};

/// `N` random bytes, at most 256: so many the kernel gives at once. Blocks only while a machine boots.
pub(crate) fn bytes<const N: usize>() -> Result<[u8; N]> {
    const { assert!(N <= 256) };
    let mut bytes = [0; N];
    loop {
        // SAFETY: the pointer and length are those of `bytes`; the call writes at most that many bytes.
        let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), N, 0) };
        if usize::try_from(got) == Ok(N) {
            return Ok(bytes);
        }
        let error = std::io::Error::last_os_error();
        if error.kind() != std::io::ErrorKind::Interrupted {
            let reason = error.to_string().into();
            return Err(Error::System { what: "cannot draw random bytes".into(), reason });
        }
    }
}
