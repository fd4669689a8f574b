//! What keys cost whose peer is gone.

use super::args::BenchArgs;
use super::bars::Bar;
use super::rows::{self, PATIENCE};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

const READS: u32 = 1000;

/// As many reads as a request of an engine has keys, one after the other, all of them from a machine that does not answer
/// any more.
pub fn reads(args: &BenchArgs) -> Result<Bar, String> {
    let failed = |error: std::io::Error| format!("a port that does not answer: {error}");
    let (address, _port) = deaf_port().map_err(failed)?;
    let cache = rows::open(args, 32 << 20, Some(address))?;
    let started = Instant::now();
    for i in 0..READS {
        if cache.get(&format!("gone/{i}"), PATIENCE).is_ok() {
            return Err(format!("{address} should not have answered"));
        }
    }
    let took = started.elapsed().as_secs_f64();
    let one = cache.config().connect_timeout_ms as f64 / 1e3;
    let note =
        format!("{took:.2} s; one connect time-out is {one} s; {} attempts", cache.stats().lanes_failed);
    let what = format!("{READS} reads of keys on a dead peer, against one connect time-out");
    Ok(Bar::at_most(what, took / one, 2.0, "×", note))
}

/// A loopback port that neither accepts nor refuses: the queue of a listener that never accepts, full.
fn deaf_port() -> std::io::Result<(SocketAddr, (OwnedFd, Vec<TcpStream>))> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    let listener = OwnedFd::from(listener);
    // SAFETY: no pointers. Listening again only makes the queue shorter.
    if unsafe { libc::listen(listener.as_raw_fd(), 0) } != 0 {
        return Err(std::io::Error::last_os_error());
    }
    let mut queue = Vec::new();
    while let Ok(stream) = TcpStream::connect_timeout(&address, Duration::from_millis(200)) {
        queue.push(stream);
    }
    Ok((address, (listener, queue)))
}
