//! The shard's loop: requests in, operations out, sleep. Which lane is asked for what is in `dispatch`, answers from
//! peers are in `arrivals`.

use super::absent::Absent;
use super::fills::{Fill, FillId, Fills, Stage};
use super::lane::Lane;
use super::peers::{self, Peer};
use super::resize::Resizing;
use super::request::{Answer, Fetch, Request, Reservation, Scope, Waiter};
use super::transport::Transport;
use super::shared::Shared;
use super::store::{NoRoom, Store};
use super::value::Value;
use crate::config::{Admission, Config};
use crate::key::OwnedKey;
use crate::namespace::Namespaces;
use crate::stats::ShardCounters;
use crate::Error;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Requests taken per turn of the loop, so that a flood of them does not keep completions waiting.
const REQUESTS_PER_TURN: usize = 64;

/// Who waits for room, oldest first. The first is served first: a large value is not overtaken for ever.
pub(super) enum Starving {
    Lane(u64),
    Put { hash: u64, key: OwnedKey, len: u64, deadline: Instant, waiter: Waiter },
}

pub(super) struct Reactor {
    /// First, so that it is dropped before what keeps the arena mapped.
    pub(super) transport: Box<dyn Transport>,
    pub(super) shared: Arc<Shared>,
    pub(super) config: Arc<Config>,
    pub(super) store: Store,
    pub(super) fills: Fills,
    pub(super) absent: Absent,
    pub(super) peers: Vec<Peer>,
    pub(super) lanes: HashMap<u64, Lane>,
    pub(super) starving: VecDeque<Starving>,
    pub(super) last_lane: u64,
    pub(super) resizing: Resizing,
    /// Deadlines of fills, earliest first. Outdated entries are skipped when they come up.
    deadlines: BinaryHeap<Reverse<(Instant, FillId)>>,
    /// Peers with queued fills that were not yet looked at.
    pending_peers: Vec<usize>,
    bell_armed: bool,
    stopping: bool,
}

impl Reactor {
    pub(super) fn new(
        shared: Arc<Shared>,
        config: Arc<Config>,
            store: Store,
        transport: Box<dyn Transport>,
    ) -> Self {
        Self {
            peers: config.origin.iter().map(|&address| Peer::new(address)).collect(),
            absent: Absent::new(Duration::from_millis(config.absent_ttl_ms)),
            shared,
            config,
            store,
            transport,
            fills: Fills::default(),
            lanes: HashMap::new(),
            starving: VecDeque::new(),
            last_lane: 0,
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
            // Before looking for what it was about: a pin that goes from here on nudges anew.
            self.shared.bell.doorbell().take_nudge();
            // Also when nobody wants room: the gauges tell what is in use.
            self.store.reclaim(&self.shared.counters);
            self.go_on_resizing();
            self.feed_starving();
            for peer in std::mem::take(&mut self.pending_peers) {
                self.dispatch(peer);
            }
            if self.stopping && self.transport.in_flight() == usize::from(self.bell_armed) {
                break;
            }
            self.rest();
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
                Request::Fetch { keys, deadline } => {
                    for fetch in keys {
                        self.fetch(fetch, deadline);
                    }
                }
                Request::Reserve { hash, key, len, deadline, waiter } => {
                    self.reserve(hash, key, len, deadline, waiter);
                }
                Request::Commit { reservation, crc32c, waiter } => self.commit(reservation, crc32c, waiter),
                Request::Invalidate { scope, waiter } => self.invalidate(&scope, waiter),
                Request::Resize { blocks, waiter } => self.resize(blocks, waiter),
                Request::Shutdown => self.stop(),
            }
        }
    }

    fn fetch(&mut self, fetch: Fetch, deadline: Instant) {
        let Fetch { hash, key, waiter } = fetch;
        if waiter.as_ref().is_some_and(Waiter::is_gone) {
            return;
        }
        if let Some(slot) = self.store.lookup(hash, key.borrow()) {
            self.counters().late_hits.add(1);
            // Pinned only for somebody: a prefetch would never let go of it.
            if let Some(waiter) = waiter
                && let Some(pin) = self.store.pin(slot)
            {
                waiter.answer(Answer::Value(Ok(Some(self.shared.grant(pin)))));
            }
            return;
        }
        if let Some(id) = self.fills.find(hash, key.borrow()) {
            self.counters().joined.add(1);
            if let Some(fill) = self.fills.get_mut(id) {
                fill.waiters.extend(waiter.map(|waiter| (waiter, deadline)));
                fill.deadline = fill.deadline.max(deadline);
                self.deadlines.push(Reverse((deadline, id)));
            }
            return;
        }
        let known_absent = self.absent.contains(hash, key.borrow(), Instant::now());
        self.counters().absent_hits.add(u64::from(known_absent));
        if self.peers.is_empty() || known_absent {
            if let Some(waiter) = waiter {
                waiter.answer(Answer::Value(Ok(None)));
            }
            return;
        }
        self.start_fill(hash, key, waiter, deadline);
    }

    fn start_fill(&mut self, hash: u64, key: OwnedKey, waiter: Option<Waiter>, deadline: Instant) {
        let peer = peers::choose(&self.peers, &Namespaces::of_process().name(key.namespace), &key);
        let waiters = waiter.into_iter().map(|waiter| (waiter, deadline)).collect();
        let fill =
            Fill { hash, key, peer, stage: Stage::Queued, live: true, waiters, deadline, attempts: 0 };
        let id = self.fills.start(fill);
        self.counters().fills.add(1);
        self.count_fills();
        self.deadlines.push(Reverse((deadline, id)));
        self.peers[peer].queue.push_back(id);
        self.pending_peers.push(peer);
    }

    pub(super) fn count_fills(&self) {
        self.counters().fills_in_flight.set(self.fills.len() as u64);
    }

    /// Ends a fill with an error to all who wait.
    pub(super) fn fail_fill(&mut self, id: FillId, error: &Error) {
        if let Some(mut fill) = self.fills.remove(id) {
            // Counted before anybody is told. A fill that is no longer live was counted when it died.
            self.counters().fills_failed.add(u64::from(fill.live));
            self.count_fills();
            fill.fail_waiters(error);
        }
    }

    fn reserve(&mut self, hash: u64, key: OwnedKey, len: u64, deadline: Instant, waiter: Waiter) {
        if waiter.is_gone() {
            return;
        }
        if !self.starving.is_empty() {
            self.starving.push_back(Starving::Put { hash, key, len, deadline, waiter });
            return;
        }
        self.try_reserve(hash, key, len, deadline, waiter);
    }

    /// False if it must wait (and has been queued again, in front).
    fn try_reserve(&mut self, hash: u64, key: OwnedKey, len: u64, deadline: Instant, waiter: Waiter) -> bool {
        match self.store.reserve(hash, len, &self.shared.counters) {
            Ok(room) => {
                let reservation =
                    Reservation::new(self.shared.clone(), room.slot, room.extents.clone(), len);
                self.store.lend(hash, key, room, len, &self.shared.counters);
                waiter.answer(Answer::Reserved(Ok(reservation)));
                true
            }
            Err(NoRoom::Never) => {
                let arena_bytes = self.store.arena_bytes();
                waiter.fail(Error::ValueTooLarge { value_bytes: len, arena_bytes });
                true
            }
            Err(NoRoom::Pinned) => {
                self.starving.push_front(Starving::Put { hash, key, len, deadline, waiter });
                false
            }
        }
    }

    fn commit(&mut self, reservation: Reservation, crc32c: u32, waiter: Waiter) {
        let Some((hash, key, room, len)) = self.store.take_back(reservation.commit()) else { return };
        let fill = self.fills.find(hash, key.borrow());
        self.absent.forget(hash);
        let value = Value { key, extents: room.extents, len, version: 0, crc32c };
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
        let Some(fill) = self.fills.get(id) else { return };
        let (stage, hash, key) = (fill.stage, fill.hash, fill.key.clone());
        let waiters = self.fills.kill(id);
        match stage {
            Stage::Queued => drop(self.fills.remove(id)),
            Stage::NoRoom => self.wake_paused(id),
            // The lane ends it when the peer's answer is over.
            Stage::Asked | Stage::Receiving => {}
        }
        self.counters().fills_discarded.add(1);
        self.count_fills();
        for (waiter, deadline) in waiters {
            self.fetch(Fetch { hash, key: key.clone(), waiter: Some(waiter) }, deadline);
        }
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

    /// Serves those who wait for room, in order, as far as there is room.
    fn feed_starving(&mut self) {
        while let Some(next) = self.starving.pop_front() {
            let served = match next {
                Starving::Lane(lane) => self.resume(lane),
                Starving::Put { waiter, .. } if waiter.is_gone() => true,
                Starving::Put { hash, key, len, deadline, waiter } => {
                    self.try_reserve(hash, key, len, deadline, waiter)
                }
            };
            if !served {
                return;
            }
        }
        self.store.sated();
    }

    /// Why a value found no room.
    pub(super) fn pinned_error(&self, value_bytes: u64) -> Error {
        Error::Pinned {
            value_bytes,
            pinned_bytes: self.store.pinned_bytes(),
            arena_bytes: self.store.arena_bytes(),
        }
    }

    fn next_deadline(&self) -> Option<Instant> {
        let fill = self.deadlines.peek().map(|Reverse((at, _))| *at);
        let lane = self.lanes.values().filter_map(|lane| self.lane_deadline(lane)).min();
        let put = self.starving.iter().filter_map(|starving| match starving {
            Starving::Put { deadline, .. } => Some(*deadline),
            Starving::Lane(_) => None,
        });
        fill.into_iter().chain(lane).chain(put).min()
    }

    /// When the lane's peer has owed the present step for too long.
    fn lane_deadline(&self, lane: &Lane) -> Option<Instant> {
        let allowed = match lane.state {
            super::lane::LaneState::Connecting => Duration::from_millis(self.config.connect_timeout_ms),
            _ => self.config.receive_timeout(),
        };
        if matches!(lane.receive, super::lane::Receive::NoRoom { .. }) {
            // It is us who keep the peer waiting.
            return None;
        }
        lane.owed_since.map(|since| since + allowed)
    }

    fn expire(&mut self, now: Instant) {
        if self.deadlines.peek().is_some_and(|Reverse((at, _))| *at <= now) {
            // Before the first of them ends: with it the pause may end that held up the others.
            let held_up = self.held_up();
            while let Some(&Reverse((at, id))) = self.deadlines.peek()
                && at <= now
            {
                self.deadlines.pop();
                self.expire_fill(id, now, &held_up);
            }
        }
        let late: Vec<u64> = self
            .lanes
            .values()
            .filter(|lane| self.lane_deadline(lane).is_some_and(|at| at <= now))
            .map(|lane| lane.id)
            .collect();
        for lane in late {
            self.lane_too_slow(lane);
        }
        self.expire_puts(now);
    }

    fn expire_puts(&mut self, now: Instant) {
        let late = |starving: &Starving| matches!(starving, Starving::Put { deadline, .. } if *deadline <= now);
        if !self.starving.iter().any(late) {
            return;
        }
        let all = std::mem::take(&mut self.starving);
        let (gone, left): (VecDeque<_>, VecDeque<_>) = all.into_iter().partition(late);
        self.starving = left;
        for starving in gone {
            if let Starving::Put { len, waiter, .. } = starving {
                waiter.fail(self.pinned_error(len));
            }
        }
    }

    /// Begins the end: everybody is told, every operation is cancelled. The loop goes on until the kernel has
    /// given every buffer back.
    fn stop(&mut self) {
        self.stopping = true;
        self.shared.close();
        self.resizing = Resizing::default();
        self.starving.clear();
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
        self.fills = Fills::default();
    }

    pub(super) fn is_stopping(&self) -> bool {
        self.stopping
    }
}
