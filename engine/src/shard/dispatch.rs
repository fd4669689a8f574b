//! Which lane a fill is asked for on: lanes opened, work handed out, peers left alone.

use super::fills::{FillId, Stage};
use super::lane::Lane;
use super::reactor::Reactor;
use crate::namespace::Namespaces;
use crate::{Error, wire};
use std::time::{Duration, Instant};

impl Reactor {
    /// Gives queued fills of a peer to its lanes, opening one more when all are busy.
    pub(super) fn dispatch(&mut self, peer_index: usize) {
        let now = Instant::now();
        loop {
            let peer = &mut self.peers[peer_index];
            // Fills that ended while they were queued.
            while peer.queue.front().is_some_and(|&id| self.fills.get(id).is_none()) {
                peer.queue.pop_front();
            }
            if peer.queue.is_empty() {
                return;
            }
            // A stalled lane is the last resort: when there is no other and none can be opened.
            let lanes = peer.lanes.iter().filter_map(|id| self.lanes.get(id));
            let hope = peer.lanes.len() < self.config.lanes_per_peer || lanes.clone().any(|lane| !lane.is_up());
            let best = lanes
                .filter(|lane| lane.is_up() && !lane.suspect && lane.outstanding.len() < self.config.lane_depth)
                .filter(|lane| !(hope && lane.is_stalled(now)))
                .min_by_key(|lane| (lane.is_stalled(now), lane.outstanding.len()))
                .map(|lane| (lane.id, lane.outstanding.len()));
            if best.is_none_or(|(_, busy)| busy > 0) {
                self.open_lane(peer_index, now);
            }
            let Some((lane, busy)) = best else { break };
            let Some(id) = self.next_in_queue(peer_index, busy == 0) else { break };
            self.ask(lane, id, now);
        }
        self.give_up_if_shunned(peer_index, now);
    }

    /// Takes the fill to be asked for next. One under which a lane has failed may be why it did: it is asked for
    /// alone, so that it takes no other with it when it does that again.
    fn next_in_queue(&mut self, peer_index: usize, lane_is_idle: bool) -> Option<FillId> {
        if lane_is_idle {
            return self.peers[peer_index].queue.pop_front();
        }
        let queue = &self.peers[peer_index].queue;
        let unsuspected = |id: &FillId| self.fills.get(*id).is_none_or(|fill| fill.attempts == 0);
        let place = queue.iter().position(unsuspected)?;
        // A suspect's turn: one lane must fall idle for it, unless it has one already.
        let on_trial = |id: &u64| self.lanes.get(id).is_some_and(|lane| lane.suspect);
        if place > 0 && !self.peers[peer_index].lanes.iter().any(on_trial) {
            return None;
        }
        self.peers[peer_index].queue.remove(place)
    }

    fn ask(&mut self, lane: u64, id: FillId, now: Instant) {
        let (Some(lane), Some(fill)) = (self.lanes.get_mut(&lane), self.fills.get_mut(id)) else { return };
        fill.stage = Stage::Asked;
        lane.suspect = fill.attempts > 0;
        let namespace = Namespaces::of_process().name(fill.key.namespace);
        let encoded = lane.ask(id, now, |out| {
            wire::encode_get(
                out,
                id,
                namespace.as_bytes(),
                &fill.key.bytes,
                0,
                wire::RANGE_TO_END,
                wire::ANY_VERSION,
            )
        });
        // Keys and namespaces were checked against the wire's own limits when they came in.
        debug_assert!(encoded.is_ok());
        lane.send_next(&mut *self.transport);
    }

    /// Opens one more lane to the peer, if it may have one, none is being opened, and it is not shunned.
    fn open_lane(&mut self, peer_index: usize, now: Instant) {
        let peer = &self.peers[peer_index];
        let connecting = peer.lanes.iter().filter_map(|id| self.lanes.get(id)).any(|lane| !lane.is_up());
        if connecting || peer.lanes.len() >= self.config.lanes_per_peer || peer.shunned(now).is_some() {
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
                self.shun(peer_index, now, Duration::ZERO, format!("cannot make a socket: {error}{hint}"));
            }
        }
    }

    /// Leaves a peer alone for a while after a failure that took `took` to show.
    pub(super) fn shun(&mut self, peer_index: usize, now: Instant, took: Duration, reason: String) {
        let peer = &mut self.peers[peer_index];
        let error = Error::PeerUnavailable { peer: peer.address.clone(), reason: reason.into() };
        tracing::debug!(%error, "peer left alone for a while");
        peer.failed(
            now,
            error,
            took,
            Duration::from_millis(self.config.backoff_min_ms),
            Duration::from_millis(self.config.backoff_max_ms),
        );
    }

    /// A peer without a usable lane that may not be tried now: what waits for it fails at once.
    fn give_up_if_shunned(&mut self, peer_index: usize, now: Instant) {
        let peer = &mut self.peers[peer_index];
        if !peer.lanes.is_empty() {
            return;
        }
        let Some(error) = peer.shunned(now).cloned() else { return };
        for id in std::mem::take(&mut peer.queue) {
            self.fail_fill(id, &error);
        }
    }
}
