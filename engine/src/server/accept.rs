//! Accepting, admitting and reaping connections; orderly stop.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::future::Future;
use std::rc::Rc;
use std::time::{Duration, Instant};

use tokio::sync::Notify;

use super::ServerConfig;
use super::answers::send_answers;
use super::connection::{Answer, Connection};
use super::listen::Acceptor;
use super::requests::{RECEIVE_BYTES, linger, serve_requests};
use super::store::{ServerStats, Store};
use super::stream::{Client, Peer, Stream};
use crate::wire::{Limits, ResponseHeader, Status};

/// Connections beyond the limits that are still told why they are turned away.
const REFUSALS_MAX: usize = 16;
/// Pause after the first failed accept; doubled up to the longest.
const ACCEPT_PAUSE: Duration = Duration::from_millis(10);
const ACCEPT_PAUSE_MAX: Duration = Duration::from_secs(1);
/// Longest time between two looks for overdue connections.
const SWEEP_PERIOD_MAX: Duration = Duration::from_secs(1);

/// What all tasks of one server share.
pub(super) struct Shared {
    pub(super) store: Store,
    pub(super) config: ServerConfig,
    stats: RefCell<ServerStats>,
    connections: RefCell<HashMap<u64, Rc<Connection>>>,
    /// Connections that are being served, by client.
    clients: RefCell<HashMap<Client, usize>>,
    /// Connections that are being told why they are turned away.
    refusing: Cell<usize>,
    next_connection: Cell<u64>,
    stopping: Cell<bool>,
    stop: Notify,
    connection_ended: Notify,
}

impl Shared {
    pub(super) fn new(store: Store, config: ServerConfig) -> Self {
        Shared {
            store,
            config,
            stats: RefCell::default(),
            connections: RefCell::default(),
            clients: RefCell::default(),
            refusing: Cell::new(0),
            next_connection: Cell::new(0),
            stopping: Cell::new(false),
            stop: Notify::new(),
            connection_ended: Notify::new(),
        }
    }

    pub(super) fn limits(&self) -> Limits {
        Limits { small_body_bytes_max: self.config.max_frame_bytes, ..Limits::default() }
    }

    pub(super) fn count(&self, change: impl FnOnce(&mut ServerStats)) {
        change(&mut self.stats.borrow_mut());
    }

    pub(super) fn stats(&self) -> ServerStats {
        let mut stats = self.stats.borrow().clone();
        stats.connections = self.connections.borrow().len() as u64;
        self.store.tell(&mut stats);
        stats
    }

    /// Waits for `time` or the stop, whichever is first. False: stop.
    async fn pause(&self, time: Duration) -> bool {
        // One thread: nothing can happen between the check and the first poll of the notification.
        if !self.stopping.get() {
            // An error means that the time has passed.
            let _ = tokio::time::timeout(time, self.stop.notified()).await;
        }
        !self.stopping.get()
    }
}

/// Serves until `shutdown` is ready and every connection has ended.
pub(super) async fn serve(shared: Rc<Shared>, acceptors: Vec<Acceptor>, shutdown: impl Future<Output = ()>) {
    let accept = |acceptor| tokio_uring::spawn(accept_all(Rc::clone(&shared), acceptor));
    let accepting: Vec<_> = acceptors.into_iter().map(accept).collect();
    let sweeping = tokio_uring::spawn(sweep(Rc::clone(&shared)));
    shutdown.await;
    shared.stopping.set(true);
    shared.stop.notify_waiters();
    for task in &accepting {
        task.abort();
    }
    for connection in shared.connections.borrow().values() {
        connection.close();
    }
    for task in accepting.into_iter().chain([sweeping]) {
        if let Err(error) = task.await
            && !error.is_cancelled()
        {
            tracing::error!(%error, "a task of the slice server ended abnormally");
        }
    }
    while !shared.connections.borrow().is_empty() {
        shared.connection_ended.notified().await;
    }
}

/// Accepts until it is aborted, which it may be at any of its waits.
async fn accept_all(shared: Rc<Shared>, acceptor: Acceptor) {
    let mut pause = ACCEPT_PAUSE;
    while !shared.stopping.get() {
        match acceptor.accept().await {
            Ok((stream, peer)) => {
                pause = ACCEPT_PAUSE;
                admit(&shared, stream, peer);
            }
            Err(error) => {
                // Out of descriptors, most likely: connections wait in the backlog until some close.
                shared.count(|stats| stats.accept_errors += 1);
                if pause == ACCEPT_PAUSE {
                    tracing::warn!(%error, "cannot accept connections; trying again (`ulimit -n`?)");
                }
                if !shared.pause(pause).await {
                    return;
                }
                pause = (2 * pause).min(ACCEPT_PAUSE_MAX);
            }
        }
    }
}

/// Why a connection of this client is turned away now, if it is.
fn too_many(shared: &Shared, client: Client) -> Option<String> {
    let config = &shared.config;
    let served = shared.connections.borrow().len() - shared.refusing.get();
    if served >= config.max_connections {
        return Some(format!("all {} connections are in use", config.max_connections));
    }
    let own = shared.clients.borrow().get(&client).copied().unwrap_or(0);
    let max = config.max_connections_per_client;
    (own >= max).then(|| format!("{client} has {own} connections already, {max} are allowed"))
}

fn admit(shared: &Rc<Shared>, stream: Stream, peer: Peer) {
    let refusal = too_many(shared, peer.client());
    if shared.stopping.get() || (refusal.is_some() && shared.refusing.get() >= REFUSALS_MAX) {
        shared.count(|stats| stats.connections_refused += 1);
        return;
    }
    if let Stream::Tcp(stream) = &stream
        && let Err(error) = stream.set_nodelay(true)
    {
        tracing::debug!(%peer, %error, "connection ended before it was served");
        return;
    }
    let connection = Rc::new(Connection::new(stream, peer, &shared.config));
    if shared.config.secret.is_some() {
        connection.must_authenticate(shared.config.stall_timeout);
    }
    let registered = Registered::new(shared, connection, refusal.is_none());
    match refusal {
        None => {
            shared.count(|stats| stats.connections_accepted += 1);
            tokio_uring::spawn(serve_connection(registered));
        }
        Some(reason) => {
            tracing::debug!(%peer, reason, "connection turned away");
            shared.count(|stats| stats.connections_refused += 1);
            tokio_uring::spawn(refuse_connection(registered, reason));
        }
    }
}

/// A connection's place in the server's tables, given back however its task ends.
struct Registered {
    shared: Rc<Shared>,
    connection: Rc<Connection>,
    id: u64,
    served: bool,
}

impl Registered {
    fn new(shared: &Rc<Shared>, connection: Rc<Connection>, served: bool) -> Self {
        let id = shared.next_connection.get();
        shared.next_connection.set(id + 1);
        shared.connections.borrow_mut().insert(id, Rc::clone(&connection));
        match served {
            true => *shared.clients.borrow_mut().entry(connection.peer.client()).or_default() += 1,
            false => shared.refusing.set(shared.refusing.get() + 1),
        }
        Registered { shared: Rc::clone(shared), connection, id, served }
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        self.connection.finish();
        self.shared.connections.borrow_mut().remove(&self.id);
        if self.served {
            let mut clients = self.shared.clients.borrow_mut();
            let client = self.connection.peer.client();
            // Clients without connections are forgotten: the table is no larger than that of connections.
            match clients.get_mut(&client) {
                Some(own) if *own > 1 => *own -= 1,
                _ => drop(clients.remove(&client)),
            }
        } else {
            self.shared.refusing.set(self.shared.refusing.get() - 1);
        }
        self.shared.connection_ended.notify_one();
    }
}

impl Registered {
    fn start_writer(&self) -> tokio::task::JoinHandle<()> {
        let (shared, connection) = (Rc::clone(&self.shared), Rc::clone(&self.connection));
        tokio_uring::spawn(async move { send_answers(&shared, &connection).await })
    }
}

async fn serve_connection(registered: Registered) {
    let writer = registered.start_writer();
    serve_requests(&registered.shared, &registered.connection).await;
    registered.connection.finish();
    if let Err(error) = writer.await {
        tracing::error!(%error, "sending ended abnormally");
    }
}

async fn refuse_connection(registered: Registered, reason: String) {
    let writer = registered.start_writer();
    let header = ResponseHeader::plain(Status::Busy, None, 0);
    registered.connection.answer(Answer::plain(header, &reason));
    linger(&registered.connection, Vec::with_capacity(RECEIVE_BYTES)).await;
    registered.connection.finish();
    if let Err(error) = writer.await {
        tracing::error!(%error, "sending ended abnormally");
    }
}

/// Ends connections that are without progress for too long.
async fn sweep(shared: Rc<Shared>) {
    let (idle, stall) = (shared.config.idle_timeout, shared.config.stall_timeout);
    let period = SWEEP_PERIOD_MAX.min(idle.min(stall) / 4).max(Duration::from_millis(1));
    while shared.pause(period).await {
        let now = Instant::now();
        for connection in shared.connections.borrow().values() {
            if !connection.is_closed() && connection.overdue(now, idle, stall) {
                tracing::debug!(peer = %connection.peer, "no progress for too long");
                shared.count(|stats| stats.connections_timed_out += 1);
                connection.close();
            }
        }
    }
}
