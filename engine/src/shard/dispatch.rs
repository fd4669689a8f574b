//! Which lane is asked for what: lanes opened, work handed out, peers left alone.
//!
//! Small things first: questions about batches, values that fit one answer, first bytes. Parts of large values come
//! after, a few per lane at a time and in turn between the values, and never on the last lane that is free of them
//! (where a peer may have more than one), so that nothing small waits behind more than it must.

use super::fills::{Fill, FillId, Stage};
use super::lane::{Ask, HEAD_BYTES, Lane, What};
use super::reactor::Reactor;
use super::transfer::Part;
use crate::Error;
use crate::config::Config;
use crate::namespace::Namespaces;
use crate::wire::{self, ANY_VERSION, Limits};
use std::time::{Duration, Instant};

/// Parts of large values that one lane may owe at a time: one on the wire and one to follow it without a pause.
pub(super) const STRIPES_PER_LANE: usize = 2;

/// Bytes of small values that one lane may owe beyond `lane_depth` requests: what hides a round trip of a fast network.
const SMALL_WINDOW_BYTES: u64 = 1 << 20;

/// Requests that one lane may owe in any case.
const LANE_DEPTH_MAX: usize = 1024;

impl Reactor {
    /// Gives what waits for a peer to its lanes, opening one more when all are busy.
    pub(super) fn dispatch(&mut self, peer: usize) {
        if self.peers[peer].queues.is_empty() {
            return;
        }
        let now = Instant::now();
        while self.dispatch_small(peer, now) {}
        while self.dispatch_bulk(peer, now) {}
        self.give_up_if_shunned(peer, now);
    }

    /// Asks one lane for something small. False if there is nothing, or no lane for it.
    fn dispatch_small(&mut self, peer_index: usize, now: Instant) -> bool {
        self.forget_ended(peer_index);
        let queues = &self.peers[peer_index].queues;
        let head = !queues.heads.is_empty() && self.starving.is_empty();
        if queues.locates.is_empty() && queues.small.is_empty() && !head {
            return false;
        }
        let next_len = queues.small.front().and_then(|&id| self.known_len(id));
        let best = self
            .lanes_to_use(peer_index, now)
            .filter(|lane| has_place(lane, next_len, self.config.lane_depth));
        let best = best.min_by_key(|lane| (lane.is_stalled(now), lane.owed_bytes, lane.outstanding.len()));
        let best = best.map(|lane| (lane.id, lane.outstanding.is_empty()));
        if best.is_none_or(|(_, idle)| !idle) {
            self.open_lane(peer_index, now);
        }
        let Some((lane, idle)) = best else { return false };
        if let Some(fills) = self.peers[peer_index].queues.locates.pop_front() {
            self.ask_locate(lane, fills, now);
            return true;
        }
        let Some((id, head)) = self.next_small(peer_index, idle) else { return false };
        if head {
            let suspect = self.fills.get(id).is_some_and(Fill::is_suspect);
            self.ask(lane, id, What::Head(id), suspect, now);
        } else {
            self.ask_part(lane, id, What::Part, now);
        }
        true
    }

    /// Lanes of a peer that may be given work. A stalled one is the last resort: only where there is no other and none
    /// can be opened.
    fn lanes_to_use(&self, peer: usize, now: Instant) -> impl Iterator<Item = &Lane> {
        let peer = &self.peers[peer];
        let lanes = peer.lanes.iter().filter_map(|id| self.lanes.get(id));
        let hope = peer.lanes.len() < self.config.lanes_per_peer || lanes.clone().any(|lane| !lane.is_up());
        lanes.filter(move |lane| lane.is_up() && !lane.suspect && !(hope && lane.is_stalled(now)))
    }

    fn known_len(&self, id: FillId) -> Option<u64> {
        self.fills.get(id)?.about.map(|about| about.len)
    }

    /// Drops fills that ended while they were queued, as far as they stand in front.
    fn forget_ended(&mut self, peer: usize) {
        let (fills, queues) = (&self.fills, &mut self.peers[peer].queues);
        let is =
            |id: FillId, stage: Stage| fills.get(id).is_some_and(|fill| fill.live && fill.stage == stage);
        while queues.small.front().is_some_and(|&id| !is(id, Stage::Receiving)) {
            queues.small.pop_front();
        }
        while queues.heads.front().is_some_and(|&id| !is(id, Stage::Queued)) {
            queues.heads.pop_front();
        }
        while queues.bulk.front().is_some_and(|&id| !is(id, Stage::Receiving)) {
            queues.bulk.pop_front();
        }
        while let Some(fills) = queues.locates.front_mut() {
            fills.retain(|&id| is(id, Stage::Queued));
            if !fills.is_empty() {
                break;
            }
            queues.locates.pop_front();
        }
    }

    /// Takes the small fill to be asked for next, and says whether its value is unknown. One under which a lane has
    /// failed may be why it did: it is asked for alone, so that it takes no other with it when it does that again.
    fn next_small(&mut self, peer_index: usize, lane_is_idle: bool) -> Option<(FillId, bool)> {
        // Without room for what they may bring, nothing unknown is asked for.
        let heads_too = self.starving.is_empty();
        let on_trial = |id: &u64| self.lanes.get(id).is_some_and(|lane| lane.suspect);
        let trial = self.peers[peer_index].lanes.iter().any(on_trial);
        for head in [false, true] {
            if head && !heads_too {
                break;
            }
            loop {
                let queues = &self.peers[peer_index].queues;
                let queue = if head { &queues.heads } else { &queues.small };
                let unsuspected = |id: &FillId| !self.fills.get(*id).is_some_and(Fill::is_suspect);
                let place =
                    if lane_is_idle { 0 } else { queue.iter().position(unsuspected).unwrap_or(queue.len()) };
                if queue.is_empty() {
                    break;
                }
                // A suspect's turn: one lane must fall idle for it, unless it has one already.
                if place == queue.len() || (place > 0 && !trial) {
                    return None;
                }
                let queues = &mut self.peers[peer_index].queues;
                let queue = if head { &mut queues.heads } else { &mut queues.small };
                let id = queue.remove(place)?;
                let stage = if head { Stage::Queued } else { Stage::Receiving };
                if self.fills.get(id).is_some_and(|fill| fill.live && fill.stage == stage) {
                    return Some((id, head));
                }
            }
        }
        None
    }

    /// Asks one lane for a part of a large value. False if there is none, or no lane for it.
    fn dispatch_bulk(&mut self, peer_index: usize, now: Instant) -> bool {
        self.forget_ended(peer_index);
        let queues = &self.peers[peer_index].queues;
        // Errands first: another shard has no more than a few of them here.
        let errand = !queues.errands.is_empty();
        let own = queues.bulk.front().copied().filter(|_| !errand);
        if own.is_none() && !errand {
            return false;
        }
        let suspect = own.and_then(|id| self.fills.get(id)).is_some_and(Fill::is_suspect);
        let stripe_bytes = self.config.stripe_bytes;
        let window = STRIPES_PER_LANE as u64 * stripe_bytes;
        let busy = self.lanes_to_use(peer_index, now).filter(|lane| lane.owed_bulk_bytes > 0).count();
        let another = busy < bulk_lanes(&self.config);
        let fits = |lane: &&Lane| match suspect {
            true => lane.outstanding.is_empty(),
            false if lane.owed_bulk_bytes == 0 => another,
            false => lane.owed_bulk_bytes + stripe_bytes <= window,
        };
        let best = self.lanes_to_use(peer_index, now).filter(fits);
        // The lane that brings the first bytes is warm, and the others are left to what is small.
        let best = best
            .min_by_key(|lane| (lane.is_stalled(now), lane.owed_bulk_bytes, !lane.receives(own), lane.owed_bytes))
            .map(|lane| (lane.id, lane.owed_bytes));
        // Also when the last lane without such parts is about to be taken: the next small thing needs one.
        if best.is_none_or(|(_, owed)| owed > 0 || self.peers[peer_index].lanes.len() == 1) {
            self.open_lane(peer_index, now);
        }
        let Some((lane, _)) = best else { return own.is_some() && self.lend(peer_index, now) };
        if let Some(errand) = self.peers[peer_index].queues.errands.pop_front() {
            self.ask_errand(lane, errand, now);
            return true;
        }
        let Some(id) = self.peers[peer_index].queues.bulk.pop_front() else { return false };
        self.ask_part(lane, id, What::Stripe, now);
        if self
            .fills
            .get(id)
            .and_then(|fill| fill.transfer.as_ref())
            .is_some_and(|transfer| transfer.wants_more())
        {
            self.peers[peer_index].queues.bulk.push_back(id);
        }
        true
    }

    /// Asks for the next part of a fill that has room.
    fn ask_part(&mut self, lane: u64, id: FillId, kind: fn(FillId, Part) -> What, now: Instant) {
        let stripe_bytes = self.config.stripe_bytes;
        let transfer = self.fills.get_mut(id).and_then(|fill| fill.transfer.as_mut());
        let suspect = transfer.as_ref().is_some_and(|transfer| transfer.has_lost());
        let Some(part) = transfer.and_then(|transfer| transfer.next_part(stripe_bytes)) else { return };
        self.ask(lane, id, kind(id, part), suspect, now);
    }

    /// Asks for a part, or for the first bytes. A suspect gets the lane for itself.
    fn ask(&mut self, lane: u64, id: FillId, what: What, suspect: bool, now: Instant) {
        let request_id = self.next_request_id();
        let (Some(lane), Some(fill)) = (self.lanes.get_mut(&lane), self.fills.get_mut(id)) else { return };
        fill.asked += 1;
        let (part, version) = match (&what, fill.about) {
            (What::Part(_, part) | What::Stripe(_, part), Some(about)) => (*part, about.version),
            _ => {
                fill.stage = Stage::Asked;
                (Part { offset: 0, len: HEAD_BYTES }, ANY_VERSION)
            }
        };
        lane.suspect = suspect;
        let namespace = Namespaces::of_process().name(fill.key.namespace);
        let encoded = lane.ask(Ask { id: request_id, what }, now, |out| {
            let key = &fill.key.bytes;
            wire::encode_get(out, request_id, namespace.as_bytes(), key, part.offset, part.len, version)
        });
        // Keys and namespaces were checked against the wire's own limits when they came in.
        debug_assert!(encoded.is_ok());
        lane.send_next(&mut *self.transport);
    }

    /// Asks what the peer has under the keys of these fills, as far as one request takes them.
    fn ask_locate(&mut self, lane: u64, mut fills: Vec<FillId>, now: Instant) {
        let request_id = self.next_request_id();
        let Some(lane) = self.lanes.get_mut(&lane) else { return };
        let names = Namespaces::of_process();
        let known: Vec<_> = fills.iter().filter_map(|&id| self.fills.get(id)).collect();
        let namespaces: Vec<_> = known.iter().map(|fill| names.name(fill.key.namespace)).collect();
        let keys =
            known.iter().zip(&namespaces).map(|(fill, namespace)| (namespace.as_bytes(), &*fill.key.bytes));
        let mut request = Vec::new();
        let Ok(taken) = wire::encode_lookup(&mut request, request_id, keys, &Limits::default()) else {
            return;
        };
        let peer = lane.peer;
        let rest = fills.split_off(taken);
        for &id in &fills {
            if let Some(fill) = self.fills.get_mut(id) {
                (fill.stage, fill.asked) = (Stage::Asked, fill.asked + 1);
            }
        }
        self.shared.counters.locates.add(1);
        lane.ask(Ask { id: request_id, what: What::Locate(fills) }, now, |out| out.append(&mut request));
        lane.send_next(&mut *self.transport);
        if !rest.is_empty() {
            self.peers[peer].queues.locates.push_front(rest);
        }
    }

    /// Opens one more lane to the peer, if it may have one, none is being opened, and it is not shunned.
    pub(super) fn open_lane(&mut self, peer_index: usize, now: Instant) {
        let peer = &self.peers[peer_index];
        let connecting = peer.lanes.iter().filter_map(|id| self.lanes.get(id)).any(|lane| !lane.is_up());
        if self.is_stopping()
            || connecting
            || peer.lanes.len() >= self.config.lanes_per_peer
            || peer.shunned(now).is_some()
        {
            return;
        }
        self.last_lane += 1;
        match Lane::connect(self.last_lane, peer_index, &peer.address, now, &mut *self.transport) {
            Ok(lane) => {
                self.peers[peer_index].lanes.push(lane.id);
                self.lanes.insert(lane.id, lane);
                self.counters().lanes.set(self.lanes.len() as u64);
            }
            Err(error) => {
                let hint = match error.raw_os_error() {
                    Some(libc::EMFILE | libc::ENFILE) => " (raise RLIMIT_NOFILE: ulimit -n, LimitNOFILE=)",
                    _ => "",
                };
                let reason = format!("cannot make a socket: {error}{hint}").into();
                let peer = self.peers[peer_index].address.clone();
                self.shun(peer_index, now, Duration::ZERO, Error::PeerUnavailable { peer, reason });
            }
        }
    }

    /// Leaves a peer alone for a while after a failure that took `took` to show.
    pub(super) fn shun(&mut self, peer_index: usize, now: Instant, took: Duration, why: Error) {
        let error = match why {
            // It was reached, and still is of no use.
            Error::Refused { .. } | Error::PeerUnavailable { .. } => why,
            Error::Protocol { peer, reason } => Error::PeerUnavailable { peer, reason },
            other => {
                let (peer, reason) = (self.peers[peer_index].address.clone(), other.to_string().into());
                Error::PeerUnavailable { peer, reason }
            }
        };
        tracing::debug!(%error, "peer left alone for a while");
        let (min, max) = self.backoff();
        self.peers[peer_index].failed(now, error, took, min, max);
    }

    /// Shortest and longest pause between attempts to reach a peer.
    pub(super) fn backoff(&self) -> (Duration, Duration) {
        let ms = Duration::from_millis;
        (ms(self.config.backoff_min_ms), ms(self.config.backoff_max_ms))
    }

    /// A peer without a usable lane that may not be tried now: what waits for it fails at once.
    fn give_up_if_shunned(&mut self, peer_index: usize, now: Instant) {
        let peer = &mut self.peers[peer_index];
        if !peer.lanes.is_empty() {
            return;
        }
        let Some(error) = peer.shunned(now).cloned() else { return };
        peer.queues.errands.clear();
        for id in peer.queues.take_all() {
            self.fail_fill(id, &error);
        }
    }
}

/// Lanes to one peer that may carry parts of large values: all but one, if there are several.
pub(super) fn bulk_lanes(config: &Config) -> usize {
    config.lanes_per_peer.saturating_sub(1).max(1)
}

/// Whether a lane may owe one more small answer, of this length if that is known.
fn has_place(lane: &Lane, len: Option<u64>, depth: usize) -> bool {
    let owed = lane.outstanding.len();
    owed < depth
        || len.is_some_and(|len| owed < LANE_DEPTH_MAX && lane.owed_bytes + len <= SMALL_WINDOW_BYTES)
}
