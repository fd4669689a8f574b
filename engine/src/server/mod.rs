//! The slice server: values in hugepage memory, served over TCP and Unix sockets by the
//! protocol of [`crate::wire`].
//!
//! It is the simplest origin of a cache, and the peer that tests and benches talk to. It is an I/O
//! program on tokio-uring with one thread; it knows nothing of the cache, its table or its shards.
//!
//! What it promises:
//!
//! * Values live in an [`Arena`]; a Put is received straight into its extents and a Get is sent straight
//!   from them. Only the bytes of a Put that arrived together with its header are copied.
//! * Capacity is a limit, not a hint: a Put that finds no room is answered [`Status::Full`], one that can
//!   never fit [`Status::TooLarge`]; nothing is evicted. A replacement needs room beside the value that it
//!   replaces. Keys and bookkeeping are charged to `index_bytes_max`.
//! * A Put is visible whole or not at all, and only when its CRC32C holds. A Get in flight goes on sending
//!   the version it began with; extents are freed at their last use.
//! * Versions count up from a start drawn at random for each run, so that a restarted server does not
//!   give an old version's number to another value.
//! * One client's behaviour costs that client only: it has its share of connections
//!   (`max_connections_per_client`); answers that are not fetched hold back its own requests
//!   (`max_outstanding`, `max_outstanding_bytes`); a peer that moves no byte while one is due is cut off
//!   (`stall_timeout`), as is one that asks for nothing (`idle_timeout`); and one write is so short that large
//!   values do not keep others' answers waiting.
//! * With a secret, only who proves to know it is served ([`auth`](crate::auth)).
//! * No operation of the kernel is abandoned: stopping shuts the sockets down and waits for the last
//!   completion before the memory goes away.
//!
//! [`Status::Full`]: crate::wire::Status::Full
//! [`Status::TooLarge`]: crate::wire::Status::TooLarge

mod accept;
mod access;
mod answers;
mod config;
mod connection;
mod handle;
mod listen;
mod requests;
mod store;
mod stream;
mod value;

#[cfg(test)]
mod auth_tests;
#[cfg(test)]
mod limit_tests;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod unix_tests;

pub use config::ServerConfig;
pub use handle::ServerHandle;
pub use store::ServerStats;

use std::future::Future;
use std::rc::Rc;

use crate::memory::{Arena, ArenaConfig, ArenaReport, NumaPolicy};
use crate::{Address, Error, Result};
use accept::Shared;
use listen::Listener;
use store::Store;

/// A slice server that has its memory and its ring and listens, but does not serve yet. Stays on the
/// thread that made it; [`ServerHandle`] runs one on a thread of its own.
pub struct Server {
    // Before the memory: fields are dropped in this order, and the ring must end first.
    runtime: tokio_uring::Runtime,
    listeners: Vec<Listener>,
    local_addrs: Vec<Address>,
    arena: Arena,
    config: ServerConfig,
    first_epoch: u32,
}

impl Server {
    /// Checks the settings, starts the ring, listens, and maps the memory on the calling thread. Blocks
    /// while memory is populated (about a second per GiB at worst).
    ///
    /// # Errors
    ///
    /// [`Error::Config`], [`Error::Memory`], and [`Error::System`] when io_uring is refused or the
    /// address cannot be had.
    pub fn bind(config: ServerConfig) -> Result<Server> {
        config.validate()?;
        let open = config.open_to_the_network();
        if !open.is_empty() {
            let open = open.iter().map(|address| address.to_string()).collect::<Vec<_>>().join(" and ");
            tracing::warn!(
                "{open} can be reached beyond this machine without a secret: whoever connects is served \
                 (--secret-file demands one)"
            );
        }
        // Memory last: it is dear, and the others fail more often.
        let runtime = start_ring(&config)?;
        let listeners = config
            .listen
            .iter()
            .map(|address| Listener::bind(address, config.socket_mode))
            .collect::<Result<Vec<_>>>()?;
        let local_addrs = listeners.iter().map(|listener| listener.local_addr().clone()).collect();
        let first_epoch = store::random_epoch()?;
        let arena = Arena::map(&ArenaConfig {
            capacity_bytes: config.capacity_bytes,
            capacity_max_bytes: 0,
            block_bytes: config.block_bytes,
            pages: config.pages,
            lock: config.lock,
            // Its one thread is not pinned.
            numa: NumaPolicy::Off,
            node: None,
        })?;
        Ok(Server { runtime, listeners, local_addrs, arena, config, first_epoch })
    }

    /// Where it listens, in the order of the settings; with the ports that were chosen where 0 was asked for.
    pub fn local_addrs(&self) -> &[Address] {
        &self.local_addrs
    }

    /// What memory was obtained.
    pub fn memory_report(&self) -> ArenaReport {
        self.arena.report()
    }

    /// Serves on the calling thread until `shutdown` is ready, then ends all connections and returns.
    /// `shutdown` may be woken from another thread. SIGPIPE is blocked on this thread from here on.
    pub fn run(self, shutdown: impl Future<Output = ()>) {
        block_sigpipe();
        let store = Store::new(self.arena, &self.config, self.first_epoch);
        let shared = Rc::new(Shared::new(store, self.config));
        tracing::info!(listen = ?self.local_addrs, "slice server ready");
        self.runtime.block_on(async {
            // Registering a socket needs the runtime; it fails only where memory or watches run out.
            let acceptors: std::io::Result<Vec<_>> =
                self.listeners.into_iter().map(Listener::start).collect();
            match acceptors {
                Ok(acceptors) => accept::serve(shared, acceptors, shutdown).await,
                Err(error) => tracing::error!(%error, "cannot wait for connections"),
            }
        });
        tracing::info!(listen = ?self.local_addrs, "slice server stopped");
    }
}

fn start_ring(config: &ServerConfig) -> Result<tokio_uring::Runtime> {
    // Two operations per connection can complete at the same time, plus accept.
    let completions = (2 * config.max_connections + 2).next_power_of_two() as u32;
    let mut ring = tokio_uring::uring_builder();
    ring.setup_cqsize(completions.clamp(2 * RING_ENTRIES, RING_COMPLETIONS_MAX));
    let mut builder = tokio_uring::builder();
    builder.entries(RING_ENTRIES).uring_builder(&ring);
    tokio_uring::Runtime::new(&builder).map_err(ring_refused)
}

/// Submission entries of the ring; more operations than that are submitted in several calls.
const RING_ENTRIES: u32 = 512;
/// Most completion entries that the kernel grants.
const RING_COMPLETIONS_MAX: u32 = 65_536;

fn ring_refused(error: std::io::Error) -> Error {
    let hint = match error.raw_os_error() {
        Some(libc::EPERM) => {
            ": io_uring is forbidden here; set `sysctl kernel.io_uring_disabled=0`, or allow io_uring_setup, \
             io_uring_enter and io_uring_register in the container's seccomp profile"
        }
        Some(libc::ENOSYS) => ": this kernel has no io_uring; Linux 5.10 or newer is needed",
        Some(libc::ENOMEM) => ": raise RLIMIT_MEMLOCK (`ulimit -l`), this kernel charges rings to it",
        Some(libc::EMFILE | libc::ENFILE) => ": raise the limit of open files (`ulimit -n`)",
        _ => "",
    };
    Error::System { what: "cannot start io_uring".into(), reason: format!("{error}{hint}").into() }
}

/// A peer that went away must cost an EPIPE, not the process. The kernel directs SIGPIPE at the thread
/// that wrote.
fn block_sigpipe() {
    // SAFETY: `set` is initialised by sigemptyset before it is read; pthread_sigmask changes the calling
    // thread's mask only and accepts a null pointer for the former one.
    unsafe {
        let mut set = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
        libc::sigemptyset(set.as_mut_ptr());
        libc::sigaddset(set.as_mut_ptr(), libc::SIGPIPE);
        libc::pthread_sigmask(libc::SIG_BLOCK, set.as_ptr(), std::ptr::null_mut());
    }
}
