//! Shards: one pinned thread per core with its own ring, arena, slots, policy and fills.
//!
//! The shard is the only writer of all it owns, so nothing in here takes a lock. Callers reach it through
//! one bounded ring of requests (`shared`) and are answered through their own calls (`request`).
//!
//! | file | what |
//! |---|---|
//! | `shared` | what callers and the shard share |
//! | `request` | what is asked, and how every path answers |
//! | `value` | published values and leases |
//! | `store` | slots, extents and eviction kept in step; no I/O |
//! | `fills` | single flight; no I/O |
//! | `resize` | blocks mapped and unmapped while the shard works |
//! | `peers` | choice of the peer, back-off; no I/O |
//! | `lane` | one connection and the buffers that the kernel may touch |
//! | `ring` | io_uring, the only file that names it |
//! | `reactor`, `arrivals` | the loop, and what completions mean |

mod absent;
mod arrivals;
mod dispatch;
mod fills;
mod lane;
mod peers;
mod reactor;
mod resize;
pub(crate) mod request;
pub(crate) mod shared;
mod store;
#[cfg(test)]
mod store_tests;
mod transport;
mod value;

pub use transport::{TransportReport, probe_ring};
pub(crate) use shared::Shared;
pub use value::{Lease, Segments};

use crate::bell::Bell;
use crate::config::Config;
use crate::fork::ForkGuard;
use crate::memory::{Arena, ArenaConfig, ArenaReport, ExtentAllocator, LockPolicy};
use crate::table::Table;
use crate::{Error, Result, policy};
use reactor::Reactor;
use serde::Serialize;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use store::Store;

/// What a shard obtained at start.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct ShardReport {
    /// Core that the thread is pinned to, if it is.
    pub core: Option<usize>,
    /// Memory of the arena.
    pub arena: ArenaReport,
    /// What it moves bytes with.
    pub transport: TransportReport,
    /// Slots of the table: the most values that the shard can hold.
    pub slots: u32,
    /// Bytes of the table and its index, beside the arena.
    pub table_bytes: usize,
    /// Time from the start of the thread until it was ready, in milliseconds.
    pub start_ms: f64,
}

/// A running shard.
pub(crate) struct Shard {
    pub(crate) shared: Arc<Shared>,
    pub(crate) report: ShardReport,
    pub(crate) thread: JoinHandle<()>,
}

type Ready = Result<(Arc<Shared>, ShardReport)>;

/// Starts all shards at once, each populating its own arena on its own core, and waits until all are ready.
/// If one cannot start, those that did are ended again.
pub(crate) fn start(config: &Arc<Config>) -> Result<Vec<Shard>> {
    let cores = choose_cores(config)?;
    let mut starting = Vec::new();
    for (index, core) in cores.into_iter().enumerate() {
        let (ready, is_ready) = mpsc::sync_channel::<Ready>(1);
        let config = config.clone();
        let thread = std::thread::Builder::new()
            .name(format!("hotslice-{index}"))
            .spawn(move || run(index, core, &config, &ready))
            .map_err(|error| Error::ShardStart {
                shard: index,
                reason: format!("cannot start a thread: {error} (limits: ulimit -u, TasksMax=, pids.max)").into(),
            });
        starting.push(thread.map(|thread| (thread, is_ready)));
    }
    let mut shards = Vec::new();
    let mut failed = None;
    for (index, started) in starting.into_iter().enumerate() {
        let outcome = started.and_then(|(thread, is_ready)| match is_ready.recv() {
            Ok(Ok((shared, report))) => Ok(Shard { shared, report, thread }),
            Ok(Err(error)) => Err(error),
            Err(_) => Err(Error::ShardStart { shard: index, reason: "its thread panicked".into() }),
        });
        match outcome {
            Ok(shard) => shards.push(shard),
            Err(error) => failed = Some(error),
        }
    }
    match failed {
        None => Ok(shards),
        Some(error) => {
            end(shards);
            Err(error)
        }
    }
}

/// Ends shards: waits until their threads have reaped every operation.
pub(crate) fn end(shards: Vec<Shard>) {
    for shard in &shards {
        shard.shared.submit(request::Request::Shutdown, std::time::Duration::MAX.into());
    }
    for shard in shards {
        // A shard that panicked has closed itself.
        let _ = shard.thread.join();
    }
}

/// The thread of one shard.
fn run(
    index: usize,
    core: Option<usize>,
    config: &Arc<Config>,
    ready: &mpsc::SyncSender<Ready>,
) {
    let mut reactor = match set_up(index, core, config) {
        Err(error) => {
            let _ = ready.send(Err(error));
            return;
        }
        Ok((reactor, report)) => {
            if ready.send(Ok((reactor.shared.clone(), report))).is_err() {
                return;
            }
            reactor
        }
    };
    let shared = reactor.shared.clone();
    let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| reactor.run()));
    if ended.is_err() {
        tracing::error!(shard = index, "the shard panicked; the cache answers `ShutDown` from now on");
        // The kernel may still own buffers: they, the ring and the arena must never be freed. Those who wait
        // are answered: by the requests that are dropped here, and by the fills that are taken apart.
        shared.close();
        reactor.abandon();
        std::mem::forget(reactor);
        std::mem::forget(shared);
    }
}

fn set_up(
    index: usize,
    core: Option<usize>,
    config: &Arc<Config>,
) -> Result<(Reactor, ShardReport)> {
    let started = std::time::Instant::now();
    let failed = |reason: String| Error::ShardStart { shard: index, reason: reason.into() };
    if let Some(core) = core {
        pin_to(core).map_err(|error| failed(format!("cannot run on core {core}: {error}")))?;
    }
    let arena = Arena::map(&ArenaConfig {
        capacity_bytes: usize::try_from(config.shard_bytes())
            .map_err(|_| failed("capacity exceeds the address space".to_owned()))?,
        capacity_max_bytes: usize::try_from(config.shard_bytes_max())
            .map_err(|_| failed("capacity exceeds the address space".to_owned()))?,
        block_bytes: usize::try_from(config.block_bytes)
            .map_err(|_| failed("block size exceeds the address space".to_owned()))?,
        pages: config.pages,
        lock: config.lock,
    })?;
    for warning in &arena.report().warnings {
        tracing::warn!(shard = index, "{warning}");
    }
    let mut transport = transport::open(config.transport).map_err(failed)?;
    if let Some(reason) = &transport.report().fallback {
        tracing::warn!(shard = index, "io_uring cannot be had, epoll is used, which costs more calls: {reason}");
    }
    if config.register != LockPolicy::Off
        && let Err(reason) = transport.register(&arena)
    {
        if config.register == LockPolicy::Required {
            return Err(failed(format!("blocks cannot be registered with the ring: {reason}")));
        }
        if transport.report().registers() {
            tracing::warn!(shard = index, "blocks are not registered with the ring: {reason}");
        }
    }
    // For as many values as the arena can ever hold: tables do not grow.
    let slots = config.shard_slots((arena.block_count_max() * arena.block_bytes()) as u64);
    let bell = Arc::new(Bell::new()?);
    let wake = bell.clone();
    let (table, writer) = Table::new(slots, Box::new(move || wake.nudge()));
    let extents = ExtentAllocator::with_room(
        arena.block_count() as u32,
        arena.block_count_max() as u32,
        arena.granules_per_block(),
    );
    let policy = policy::build(config.policy, slots, u64::from(extents.total_granules()));
    let report = ShardReport {
        core,
        arena: arena.report(),
        transport: transport.report().clone(),
        slots,
        table_bytes: Table::<value::Value>::bytes_for(slots),
        start_ms: started.elapsed().as_secs_f64() * 1e3,
    };
    let fork = ForkGuard::new();
    let shared = Arc::new(Shared::new(index, table, slots, arena, bell, config.request_ring, fork));
    shared.counters.arena_bytes.set(shared.arena.bytes() as u64);
    let store = Store::new(writer, extents, policy);
    Ok((Reactor::new(shared, config.clone(), store, transport), report))
}

/// One core per shard, or none where pinning would only get in the way.
fn choose_cores(config: &Config) -> Result<Vec<Option<usize>>> {
    let allowed = allowed_cores()?;
    if config.cores.is_empty() {
        let pin = allowed.len() > 1 && config.shards <= allowed.len();
        return Ok((0..config.shards).map(|i| pin.then(|| allowed[i])).collect());
    }
    for core in &config.cores {
        if !allowed.contains(core) {
            return Err(Error::Config {
                setting: "cores",
                value: core.to_string(),
                allowed: format!("cores that this process may run on: {allowed:?}"),
            });
        }
    }
    Ok(config.cores.iter().copied().map(Some).collect())
}

fn allowed_cores() -> Result<Vec<usize>> {
    // SAFETY: all-zero bytes are a valid, empty set.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: passes the address and size of a local.
    if unsafe { libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &mut set) } != 0 {
        return Err(crate::error::system("sched_getaffinity"));
    }
    // SAFETY: reads a local; the index is below CPU_SETSIZE.
    Ok((0..libc::CPU_SETSIZE as usize).filter(|&core| unsafe { libc::CPU_ISSET(core, &set) }).collect())
}

fn pin_to(core: usize) -> std::io::Result<()> {
    // SAFETY: all-zero bytes are a valid, empty set.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: writes a local; `core` came from a set of this size.
    unsafe { libc::CPU_SET(core, &mut set) };
    // SAFETY: passes the address and size of a local.
    match unsafe { libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &set) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}
