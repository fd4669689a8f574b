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
//! | `ledger`, `freshness` | namespaces: settings, usage, ages; no I/O |
//! | `fills`, `transfer` | single flight; a value's parts; no I/O |
//! | `resize` | blocks mapped and unmapped while the shard works |
//! | `placement` | cores and nodes of the shards; no I/O |
//! | `peers` | choice of the peer, back-off; no I/O |
//! | `absent` | keys that the origin lately said it does not have; no I/O |
//! | `lane`, `body` | one connection and the buffers that the kernel may touch |
//! | `transport` | io_uring or epoll |
//! | `reactor` | the loop |
//! | `room`, `groups`, `turn` | who waits for room; batches that must be held together |
//! | `namespaces` | values that are too old, questions about them, quotas |
//! | `dispatch` | which lane is asked for what |
//! | `errands` | parts that another shard receives |
//! | `greeting` | authentication |
//! | `arrivals`, `answers`, `ends` | what completions mean to lanes, and answers and failures to fills |

mod absent;
mod answers;
mod arrivals;
mod body;
mod dispatch;
mod ends;
mod errands;
mod fills;
pub(crate) mod freshness;
mod greeting;
mod groups;
mod lane;
mod ledger;
mod namespaces;
mod peers;
mod placement;
mod reactor;
mod resize;
pub(crate) mod request;
mod room;
pub(crate) mod shared;
mod store;
#[cfg(test)]
mod store_tests;
mod transfer;
mod transport;
pub(crate) mod turn;
mod value;

pub use transport::{TransportReport, probe_ring};
pub(crate) use shared::Shared;
pub use value::{Lease, Segments};

use crate::bell::Bell;
use crate::config::Config;
use crate::fork::ForkGuard;
use crate::machine::{Machine, cores};
use crate::memory::{Arena, ArenaConfig, ArenaReport, ExtentAllocator, LockPolicy};
use crate::table::Table;
use crate::{Error, Result, policy};
use ledger::Ledger;
use reactor::Reactor;
use request::Request;
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
    /// NUMA node of that core, or the one node of all cores that it may run on.
    pub node: Option<u32>,
    /// What is worse than it could be about cores and CPU time, each with the way to mend it. What concerns all
    /// shards stands with the first.
    pub warnings: Vec<String>,
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

/// Where one shard runs.
struct Place {
    core: Option<usize>,
    node: Option<u32>,
    /// What is to be reported about the placement of all.
    warnings: Vec<String>,
}

type Ready = Result<(Arc<Shared>, ShardReport)>;

/// Starts all shards at once, each populating its own arena on its own core, and waits until all are ready.
/// If one cannot start, those that did are ended again.
pub(crate) fn start(config: &Arc<Config>) -> Result<Vec<Shard>> {
    let machine = Machine::here();
    let allowed = cores::allowed()?;
    let mut placement =
        placement::place(config, &allowed, &machine.topology(), machine.cpu_quota().as_ref())?;
    for warning in &placement.warnings {
        tracing::warn!("{warning}");
    }
    let config = &match placement.no_spinning {
        true => Arc::new(Config { spin_us: 0, ..(**config).clone() }),
        false => config.clone(),
    };
    let mut starting = Vec::new();
    for (index, (core, node)) in placement.cores.into_iter().zip(placement.nodes).enumerate() {
        let place = Place { core, node, warnings: std::mem::take(&mut placement.warnings) };
        let (ready, is_ready) = mpsc::sync_channel::<Ready>(1);
        let config = config.clone();
        let thread = std::thread::Builder::new()
            .name(format!("hotslice-{index}"))
            .spawn(move || run(index, place, &config, &ready))
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
        None => {
            introduce(config, &shards);
            Ok(shards)
        }
        Some(error) => {
            end(shards);
            Err(error)
        }
    }
}

/// Makes shards of one node known to each other, so that they can help each other out; the next ones first, so that
/// not all turn to the same.
fn introduce(config: &Config, shards: &[Shard]) {
    if config.shards_per_value == 1 {
        return;
    }
    for (index, shard) in shards.iter().enumerate() {
        let others = shards[index + 1..].iter().chain(&shards[..index]);
        // Memory of another node is the slower way.
        let near = others.filter(|other| other.report.node == shard.report.node);
        let neighbours = near.map(|other| other.shared.clone()).collect();
        shard.shared.submit(Request::Meet(neighbours), std::time::Duration::MAX.into());
    }
}

/// Ends shards: waits until their threads have reaped every operation.
pub(crate) fn end(shards: Vec<Shard>) {
    for shard in &shards {
        shard.shared.submit(Request::Shutdown, std::time::Duration::MAX.into());
    }
    for shard in shards {
        // A shard that panicked has closed itself.
        let _ = shard.thread.join();
    }
}

/// The thread of one shard.
fn run(
    index: usize,
    place: Place,
    config: &Arc<Config>,
    ready: &mpsc::SyncSender<Ready>,
) {
    let mut reactor = match set_up(index, place, config) {
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
    place: Place,
    config: &Arc<Config>,
) -> Result<(Reactor, ShardReport)> {
    let started = std::time::Instant::now();
    let failed = |reason: String| Error::ShardStart { shard: index, reason: reason.into() };
    let Place { core, node, warnings } = place;
    // First of all, so that a file that is wrong fails the start at once.
    let secret = config.secret()?;
    if let Some(core) = core {
        cores::pin_to(core).map_err(|error| failed(format!("cannot run on core {core}: {error}")))?;
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
        numa: config.numa,
        node,
    })?;
    for warning in &arena.report().warnings {
        tracing::warn!(shard = index, "{warning}");
    }
    let mut transport = transport::open(config.transport).map_err(failed)?;
    if let Some(reason) = &transport.report().fallback {
        tracing::warn!(shard = index, "io_uring cannot be had, epoll is used, which makes several calls where io_uring makes one (Stats::transport_calls): {reason}");
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
        node,
        warnings,
        arena: arena.report(),
        transport: transport.report().clone(),
        slots,
        table_bytes: Table::<value::Value>::bytes_for(slots) + Ledger::bytes_for(slots),
        start_ms: started.elapsed().as_secs_f64() * 1e3,
    };
    let fork = ForkGuard::new();
    let shared = Arc::new(Shared::new(index, table, slots, arena, bell, config, fork));
    shared.counters.epoll_shards.set(u64::from(report.transport.name == "epoll"));
    shared.counters.arena_bytes.set(shared.arena.bytes() as u64);
    let ledger = Ledger::new(shared.freshness.clone(), slots, config)?;
    let store = Store::new(writer, extents, policy, ledger);
    Ok((Reactor::new(shared, config.clone(), secret, store, transport), report))
}
