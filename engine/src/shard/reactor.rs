//! The shard's loop: requests in, operations out, sleep. What the rest of the shard does between two sleeps is in the
//! files named in [`super`].

use super::absent::Absent;
use super::errands::Neighbour;
use super::fills::{Fill, FillId, Fills, Stage};
use super::groups::{Group, GroupId};
use super::lane::Lane;
use super::namespaces::Waiting;
use super::peers::{self, Peer};
use super::request::{Answer, Fetch, Request, Reservation, Scope, Waiter};
use super::resize::Resizing;
use super::room::Starving;
use super::shared::Shared;
use super::store::Store;
use super::transport::Transport;
use super::value::Value;
use crate::Error;
use crate::auth::Secret;
use crate::config::{Admission, Config};
use crate::key::OwnedKey;
use crate::namespace::Namespaces;
use crate::stats::ShardCounters;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Requests taken per turn of the loop, so that a flood of them does not keep completions waiting.
const REQUESTS_PER_TURN: usize = 64;

pub(super) struct Reactor {
    /// First, so that it is dropped before what keeps the arena mapped.
    pub(super) transport: Box<dyn Transport>,
    pub(super) shared: Arc<Shared>,
    pub(super) config: Arc<Config>,
    /// What peers demand, and are to prove.
    pub(super) secret: Option<Secret>,
    pub(super) store: Store,
    pub(super) fills: Fills,
    pub(super) absent: Absent,
    pub(super) peers: Vec<Peer>,
    /// Other shards, to whom parts of large values can be lent.
    pub(super) neighbours: Vec<Neighbour>,
    pub(super) lanes: HashMap<u64, Lane>,
    pub(super) starving: VecDeque<Starving>,
    pub(super) waiting: Waiting,
    /// Somebody waits for room, or did a moment ago: first bytes were not asked for.
    pub(super) holding_back: bool,
    pub(super) groups: HashMap<GroupId, Group>,
    /// Groups for which something has changed.
    pub(super) groups_to_try: Vec<GroupId>,
    pub(super) last_group: GroupId,
    pub(super) last_lane: u64,
    last_request: u64,
    pub(super) resizing: Resizing,
    /// Deadlines of fills, earliest first. Outdated entries are skipped when they come up.
    pub(super) deadlines: BinaryHeap<Reverse<(Instant, FillId)>>,
    /// Peers with queued fills that were not yet looked at.
    pub(super) pending_peers: Vec<usize>,
    bell_armed: bool,
    stopping: bool,
}

impl Reactor {
    pub(super) fn new(
        shared: Arc<Shared>,
        config: Arc<Config>,
        secret: Option<Secret>,
        store: Store,
        transport: Box<dyn Transport>,
    ) -> Self {
        Self {
            peers: config.origin.iter().cloned().map(Peer::new).collect(),
            absent: Absent::new(),
            shared,
            config,
            secret,
            store,
            transport,
            fills: Fills::default(),
            neighbours: Vec::new(),
            lanes: HashMap::new(),
            starving: VecDeque::new(),
            waiting: Waiting::default(),
            holding_back: false,
            groups: HashMap::new(),
            groups_to_try: Vec::new(),
            last_group: 0,
            last_lane: 0,
            last_request: 0,
            resizing: Resizing::default(),
            deadlines: BinaryHeap::new(),
            pending_peers: Vec::new(),
            bell_armed: false,
            stopping: false,
        }
    }

    pub(super) fn counters(&self) -> &ShardCounters {
        &self.shared.counters
    }

    /// Runs until shutdown. When it returns no operation is in flight.
    pub(super) fn run(&mut self) {
        let mut completions = Vec::with_capacity(512);
        loop {
            self.take_requests();
            self.take_dropped_reservations();
            self.take_homecomings();
            // Before looking for what it was about: a pin that goes from here on nudges anew.
            if self.shared.bell.doorbell().take_nudge() {
                self.try_all_groups();
            }
            // Also when nobody wants room: the gauges tell what is in use.
            self.store.reclaim(&self.shared.counters);
            self.look_again();
            self.try_groups();
            self.go_on_resizing();
            self.feed_starving();
            for peer in std::mem::take(&mut self.pending_peers) {
                self.dispatch(peer);
            }
            if self.stopping && self.transport.in_flight() == usize::from(self.bell_armed) {
                break;
            }
            self.rest();
            self.counters().transport_calls.set(self.transport.calls());
            self.transport.completions(&mut completions);
            for (token, result) in completions.drain(..) {
                self.complete(token, result);
            }
            self.expire(Instant::now());
        }
        self.end_bell(&mut completions);
    }

    /// The bell's read is the last operation in flight: end it by ringing.
    fn end_bell(&mut self, completions: &mut Vec<(super::transport::Token, i32)>) {
        if self.bell_armed {
            self.shared.bell.doorbell().going_to_sleep();
            self.shared.bell.ring();
        }
        while self.transport.in_flight() > 0 {
            self.transport.wait(None);
            self.transport.completions(completions);
        }
    }

    /// Submits; sleeps until there is something to do, if there is nothing now.
    fn rest(&mut self) {
        if !self.bell_armed {
            self.bell_armed = true;
            self.transport.read_bell(self.shared.bell.event());
        }
        self.transport.poll();
        if self.transport.has_completions() || self.shared.has_news() {
            return;
        }
        let spin_until = Instant::now() + Duration::from_micros(self.config.spin_us);
        while self.config.spin_us > 0 && Instant::now() < spin_until {
            std::hint::spin_loop();
            self.transport.poll();
            if self.transport.has_completions() || self.shared.has_news() {
                return;
            }
        }
        let timeout = self.next_deadline().map(|at| at.saturating_duration_since(Instant::now()));
        let doorbell = self.shared.bell.doorbell();
        doorbell.going_to_sleep();
        if !self.shared.has_news() {
            self.transport.wait(timeout);
        }
        self.shared.bell.doorbell().awake();
    }

    pub(super) fn bell_rang(&mut self) {
        self.bell_armed = false;
    }

    fn take_requests(&mut self) {
        for _ in 0..REQUESTS_PER_TURN {
            let Some(request) = self.shared.next_request() else { return };
            match request {
                Request::Fetch { keys, deadline } => self.fetch(keys, deadline),
                Request::Group { members, turn, deadline } => self.begin_group(members, turn, deadline),
                Request::Reserve { hash, key, len, deadline, waiter } => {
                    self.reserve(hash, key, len, deadline, waiter);
                }
                Request::Commit { reservation, crc32c, waiter } => self.commit(reservation, crc32c, waiter),
                Request::Invalidate { scope, waiter } => self.invalidate(&scope, waiter),
                Request::SetNamespace { namespace, settings, waiter } => {
                    self.set_namespace(namespace, settings, waiter);
                }
                Request::Resize { blocks, waiter } => self.resize(blocks, waiter),
                Request::Meet(others) => self.neighbours = others.into_iter().map(Neighbour::new).collect(),
                Request::Assist(errand) => self.assist(errand),
                Request::Shutdown => self.stop(),
            }
        }
    }

    /// Answers one who wants a value, or lets it wait for the value's fill. Returns the fill if it is a new one, which
    /// is then to be queued.
    pub(super) fn fetch_one(&mut self, fetch: Fetch, deadline: Instant) -> Option<FillId> {
        let Fetch { hash, key, waiter } = fetch;
        if waiter.as_ref().is_some_and(Waiter::is_gone) {
            return None;
        }
        let since = Instant::now();
        if let Some(slot) = self.store.lookup(hash, key.borrow()).filter(|&slot| self.serves(slot, since)) {
            self.counters().late_hits.add(1);
            // Pinned only for somebody: a prefetch would never let go of it.
            if let Some(waiter) = waiter
                && let Some(pin) = self.store.pin(slot)
            {
                waiter.answer(Answer::Value(Ok(Some(self.shared.grant(pin)))));
            }
            return None;
        }
        if let Some(id) = self.fills.find(hash, key.borrow()) {
            self.counters().joined.add(1);
            match self.is_in_time(id, since) {
                true => self.join(id, waiter, deadline),
                false => self.wait_for_end(id, Fetch { hash, key, waiter }, deadline),
            }
            return None;
        }
        let known_absent = self.absent.contains(hash, key.borrow(), since);
        self.counters().absent_hits.add(u64::from(known_absent));
        if self.peers.is_empty() || known_absent {
            if let Some(waiter) = waiter {
                waiter.answer(Answer::Value(Ok(None)));
            }
            return None;
        }
        let id = self.start_fill(hash, key, deadline);
        self.join(id, waiter, deadline);
        Some(id)
    }

    /// Lets somebody wait for a fill.
    fn join(&mut self, id: FillId, waiter: Option<Waiter>, deadline: Instant) {
        let Some(fill) = self.fills.get_mut(id) else { return };
        fill.waiters.extend(waiter.map(|waiter| (waiter, deadline)));
        fill.deadline = fill.deadline.max(deadline);
        self.deadlines.push(Reverse((deadline, id)));
        if fill.stage == Stage::NoRoom {
            // Of a group that waits for more than this; now it is wanted by itself.
            self.want_room(id);
        }
    }

    /// Begins a fill, which is then to be queued.
    pub(super) fn start_fill(&mut self, hash: u64, key: OwnedKey, deadline: Instant) -> FillId {
        let peer = peers::choose(&self.peers, &Namespaces::of_process().name(key.namespace), &key);
        let confirms = self.asks_about(hash, &key);
        let id = self.fills.start(Fill { confirms, ..Fill::new(hash, key, peer, deadline) });
        self.counters().fills.add(1);
        self.count_fills();
        self.deadlines.push(Reverse((deadline, id)));
        id
    }

    /// A name for a request on the wire.
    pub(super) fn next_request_id(&mut self) -> u64 {
        self.last_request += 1;
        self.last_request
    }

    pub(super) fn count_fills(&self) {
        self.counters().fills_in_flight.set(self.fills.len() as u64);
    }

    fn commit(&mut self, reservation: Reservation, crc32c: u32, waiter: Waiter) {
        let Some((hash, key, room, len)) = self.store.take_back(reservation.commit()) else { return };
        let fill = self.fills.find(hash, key.borrow());
        self.absent.forget(hash);
        let value = Value::new(key, room.extents, len, 0, crc32c);
        self.store.date(room.slot, Instant::now());
        let keep = self.config.admission == Admission::FirstMiss;
        let _ = self.store.publish(room.slot, hash, value, 0, keep, &self.shared.counters);
        self.counters().puts.add(1);
        self.counters().put_bytes.add(len);
        if let Some(fill) = fill {
            self.fence(fill);
        }
        waiter.answer(Answer::Done(Ok(1)));
    }

    /// Breaks a fill's fence: what it brings is older than what just happened to its key, and will not be
    /// published. Those who waited for it are served anew.
    fn fence(&mut self, id: FillId) {
        let Some(fill) = self.fills.get_mut(id) else { return };
        let (hash, key) = (fill.hash, fill.key.clone());
        self.groups_to_try.append(&mut fill.groups);
        let waiters = self.fills.kill(id);
        self.bury(id);
        self.counters().fills_discarded.add(1);
        self.count_fills();
        let mut unknown = Vec::new();
        for (waiter, deadline) in waiters {
            unknown.extend(self.fetch_one(Fetch { hash, key: key.clone(), waiter: Some(waiter) }, deadline));
        }
        self.ask_about(unknown, self.starving.is_empty());
    }

    fn invalidate(&mut self, scope: &Scope, waiter: Waiter) {
        let count = self.store.invalidate(scope, &self.shared.counters);
        self.absent.invalidate(scope);
        let fills: Vec<FillId> = match scope {
            Scope::Key(hash, key) => self.fills.find(*hash, key.borrow()).into_iter().collect(),
            _ => {
                let covered = |fill: &Fill| fill.live && scope.covers(fill.key.borrow());
                self.fills.iter().filter(|(_, fill)| covered(fill)).map(|(id, _)| id).collect()
            }
        };
        for id in fills {
            // A request that was not sent yet will be answered with what is true then.
            if self.fills.get(id).is_some_and(|fill| fill.stage != Stage::Queued) {
                self.fence(id);
            }
        }
        waiter.answer(Answer::Done(Ok(count)));
    }

    fn take_dropped_reservations(&mut self) {
        while let Some(slot) = self.shared.dropped_reservations.pop() {
            if let Some((_, _, room, _)) = self.store.take_back(slot) {
                self.store.cancel(room, &self.shared.counters);
            }
        }
    }

    fn next_deadline(&self) -> Option<Instant> {
        let fill = self.deadlines.peek().map(|Reverse((at, _))| *at);
        let lane = self.lanes.values().filter_map(|lane| self.lane_deadline(lane)).min();
        let reconnect = self.peers.iter().filter_map(Peer::reconnect_at).min();
        let (put, group) = (self.next_put_deadline(), self.next_group_deadline());
        let late = self.next_late_deadline();
        fill.into_iter().chain(lane).chain(reconnect).chain(put).chain(group).chain(late).min()
    }

    /// When the lane's peer has owed the present step for too long, or an idle lane must be looked after.
    fn lane_deadline(&self, lane: &Lane) -> Option<Instant> {
        let idle = || (self.config.keepalive_ms > 0 && lane.is_up()).then_some(lane.used);
        match lane.owed_since {
            Some(since) => Some(since + self.lane_patience(lane)),
            None => idle().map(|used| used + Duration::from_millis(self.config.keepalive_ms)),
        }
    }

    fn expire(&mut self, now: Instant) {
        while let Some(&Reverse((at, id))) = self.deadlines.peek()
            && at <= now
        {
            self.deadlines.pop();
            self.expire_fill(id, now);
        }
        let late: Vec<u64> = self
            .lanes
            .values()
            .filter(|lane| self.lane_deadline(lane).is_some_and(|at| at <= now))
            .map(|lane| lane.id)
            .collect();
        for lane in late {
            self.lane_is_due(lane, now);
        }
        for peer in 0..self.peers.len() {
            if self.peers[peer].reconnect_at().is_some_and(|at| at <= now) {
                self.reconnect(peer, now);
            }
        }
        self.expire_puts(now);
        self.expire_groups(now);
        self.expire_late(now);
    }

    /// Begins the end: everybody is told, every operation is cancelled. The loop goes on until the kernel has
    /// given every buffer back.
    fn stop(&mut self) {
        self.stopping = true;
        self.shared.close();
        self.resizing = Resizing::default();
        self.starving.clear();
        self.waiting = Waiting::default();
        self.groups.clear();
        let ids: Vec<FillId> = self.fills.iter().map(|(id, _)| id).collect();
        for id in ids {
            self.fail_fill(id, &Error::ShutDown);
        }
        for lane in self.lanes.values_mut() {
            lane.close(Error::ShutDown, &mut *self.transport);
        }
        let quiet: Vec<u64> = self.lanes.values().filter(|l| l.is_quiet()).map(|l| l.id).collect();
        for lane in quiet {
            self.lane_gone(lane);
        }
    }

    /// After a panic: answers everybody, and touches nothing that the kernel may own.
    pub(super) fn abandon(&mut self) {
        self.resizing = Resizing::default();
        self.starving.clear();
        self.waiting = Waiting::default();
        self.groups.clear();
        self.fills = Fills::default();
        for peer in &mut self.peers {
            peer.queues.errands.clear();
        }
    }

    pub(super) fn is_stopping(&self) -> bool {
        self.stopping
    }
}
