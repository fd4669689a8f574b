//! Errands: parts of a large value that another shard receives, so that more than one core works on one value.
//!
//! A shard whose own lanes have enough to do lends parts to shards that have no fills of their own. Such a shard asks
//! the same peer over its own lanes, receives straight into the extents of the value's owner, and sends the errand home
//! with the part's checksum. Everything else stays with the owner: room, order, what becomes of failures.
//!
//! ```text
//!  owner ── Request::Assist(errand) ──► helper's lanes ──► bytes into the owner's extents
//!    ▲                                                        │
//!    └───────────── Homecoming (Shared::homecomings) ─────────┘
//! ```
//!
//! An errand comes home exactly once, whatever happens to it; only then does the owner's fill let go of its room
//! ([`Fill::asked`](super::fills::Fill::asked)). The one exception is a helper that panicked while the kernel may still
//! write: its errands never come home, and the room stays taken.

use super::body::{Body, For};
use super::dispatch::{STRIPES_PER_LANE, bulk_lanes};
use super::fills::FillId;
use super::lane::{Ask, Receive, What};
use super::reactor::Reactor;
use super::request::Request;
use super::shared::Shared;
use super::transfer::{About, Part};
use crate::Error;
use crate::config::Config;
use crate::key::OwnedKey;
use crate::memory::ExtentList;
use crate::namespace::Namespaces;
use crate::wire::{self, ResponseHeader, Status};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Errands that one neighbour may have at a time: what its lanes take at once.
fn window(config: &Config) -> usize {
    STRIPES_PER_LANE * bulk_lanes(config)
}

/// Errands that one shard may have under way.
pub(super) fn errands_max(config: &Config) -> usize {
    (config.shards_per_value.min(config.shards) - 1) * window(config)
}

/// Another shard, to whom parts can be lent.
pub(super) struct Neighbour {
    shared: Arc<Shared>,
    /// Errands that have not come home.
    lent: usize,
    /// Asked for no help before this moment: it lately could not.
    spared_until: Option<Instant>,
}

impl Neighbour {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        Self { shared, lent: 0, spared_until: None }
    }

    /// True if it has nothing better to do. What it says about itself may be a little old: that costs a moment.
    fn is_free(&self, now: Instant) -> bool {
        self.shared.counters.fills_in_flight.get() == 0 && self.spared_until.is_none_or(|until| until <= now)
    }
}

/// A part to be received for another shard.
pub(crate) struct Errand {
    owner: Arc<Shared>,
    /// The owner's fill, and the number of this shard among the owner's neighbours.
    fill: FillId,
    neighbour: usize,
    pub(super) peer: usize,
    key: OwnedKey,
    about: About,
    pub(super) part: Part,
    /// Of the whole value, in the owner's arena.
    extents: ExtentList,
    /// Until when somebody waits for the value, as far as is known.
    deadline: Instant,
    outcome: Option<Outcome>,
}

/// What became of an errand.
pub(crate) enum Outcome {
    /// The bytes are in their extents.
    Arrived { crc32c: u32 },
    /// The peer said no.
    Refused(Status),
    /// The lane failed that was asked.
    Lost(Error),
    /// Nobody was asked.
    Untouched,
}

/// An errand that is over.
pub(crate) struct Homecoming {
    fill: FillId,
    neighbour: usize,
    part: Part,
    outcome: Outcome,
}

impl Errand {
    pub(super) fn end(mut self, outcome: Outcome) {
        self.outcome = Some(outcome);
    }
}

impl Drop for Errand {
    fn drop(&mut self) {
        if self.owner.fork.forked() {
            return;
        }
        let outcome = self.outcome.take().unwrap_or(Outcome::Untouched);
        let Self { fill, neighbour, part, .. } = *self;
        if self.owner.homecomings.push(Homecoming { fill, neighbour, part, outcome }).is_err() {
            unreachable!("the queue has a place for every errand that may be under way");
        }
        self.owner.bell.ring();
    }
}

impl Reactor {
    /// Lends the next part of the first large value that waits for this peer to a shard that is free. False if there is
    /// none.
    pub(super) fn lend(&mut self, peer: usize, now: Instant) -> bool {
        let Some(&id) = self.peers[peer].queues.bulk.front() else { return false };
        let Some(fill) = self.fills.get_mut(id).filter(|fill| !fill.is_suspect()) else { return false };
        let (Some(about), Some(transfer)) = (fill.about, fill.transfer.as_mut()) else { return false };
        let (helpers, window) = (self.config.shards_per_value - 1, window(&self.config));
        let in_use = self.neighbours.iter().filter(|neighbour| neighbour.lent > 0).count();
        let may = |neighbour: &Neighbour| {
            neighbour.lent < window && (neighbour.lent > 0 || in_use < helpers) && neighbour.is_free(now)
        };
        let candidates = self.neighbours.iter_mut().enumerate().filter(|(_, neighbour)| may(neighbour));
        let Some((index, neighbour)) = candidates.min_by_key(|(_, neighbour)| neighbour.lent) else {
            return false;
        };
        let Some(part) = transfer.next_part(self.config.stripe_bytes) else { return false };
        let errand = Errand {
            owner: self.shared.clone(),
            fill: id,
            neighbour: index,
            peer,
            key: fill.key.clone(),
            about,
            part,
            extents: transfer.room.extents.clone(),
            deadline: fill.deadline,
            outcome: None,
        };
        let more = transfer.wants_more();
        fill.asked += 1;
        neighbour.lent += 1;
        self.peers[peer].queues.bulk.pop_front();
        if more {
            self.peers[peer].queues.bulk.push_back(id);
        }
        // If it has no place for the request, the errand comes home untouched.
        drop(neighbour.shared.offer(Request::Assist(errand)));
        true
    }

    /// Another shard asks for help.
    pub(super) fn assist(&mut self, errand: Errand) {
        let peer = errand.peer;
        self.peers[peer].queues.errands.push_back(errand);
        self.pending_peers.push(peer);
    }

    /// Asks a lane for another shard's part.
    pub(super) fn ask_errand(&mut self, lane: u64, errand: Errand, now: Instant) {
        let request_id = self.next_request_id();
        let Some(lane) = self.lanes.get_mut(&lane) else { return };
        let mut request = Vec::new();
        let namespace = Namespaces::of_process().name(errand.key.namespace);
        let (part, version) = (errand.part, errand.about.version);
        let (namespace, key) = (namespace.as_bytes(), &errand.key.bytes);
        let encoded =
            wire::encode_get(&mut request, request_id, namespace, key, part.offset, part.len, version);
        // Keys and namespaces were checked against the wire's own limits when they came in.
        debug_assert!(encoded.is_ok());
        lane.ask(Ask { id: request_id, what: What::Errand(errand) }, now, |out| out.append(&mut request));
        lane.send_next(&mut *self.transport);
    }

    /// The answer to an errand begins.
    pub(super) fn errand_announced(&mut self, id: u64, header: ResponseHeader) -> Result<(), String> {
        let Some(lane) = self.lanes.get_mut(&id) else { return Ok(()) };
        let Some(What::Errand(errand)) = lane.asked(header.request_id) else { return Ok(()) };
        errand.about.check(errand.part, &header)?;
        let wanted = For::Errand { owner: errand.owner.clone(), deadline: errand.deadline };
        let (part, len, extents) = (errand.part, errand.about.len, errand.extents.clone());
        lane.receive = Receive::Body(Body::new(header.request_id, wanted, part, len, extents));
        Ok(())
    }

    pub(super) fn take_homecomings(&mut self) {
        while let Some(homecoming) = self.shared.homecomings.pop() {
            self.came_home(homecoming);
        }
    }

    fn came_home(&mut self, homecoming: Homecoming) {
        let Homecoming { fill: id, neighbour, part, outcome } = homecoming;
        let now = Instant::now();
        let neighbour = &mut self.neighbours[neighbour];
        neighbour.lent -= 1;
        if matches!(outcome, Outcome::Lost(_) | Outcome::Untouched) {
            neighbour.spared_until = Some(now + Duration::from_millis(self.config.backoff_max_ms));
        }
        let Some(fill) = self.fills.get_mut(id) else { return };
        let peer = fill.peer;
        match outcome {
            Outcome::Arrived { crc32c } => {
                if let Some(transfer) = fill.transfer.as_mut() {
                    transfer.received(part.len);
                    transfer.arrive(part, crc32c);
                }
                self.counters().parts_assisted.add(1);
                self.settled(id);
                self.conclude(id);
            }
            Outcome::Refused(status) => self.part_refused(id, peer, status),
            Outcome::Lost(why) => self.part_lost(id, part, &why, now),
            Outcome::Untouched => {
                if let Some(transfer) = fill.transfer.as_mut() {
                    transfer.put_back(part);
                }
                let bulk = &mut self.peers[peer].queues.bulk;
                if fill.live && !bulk.contains(&id) {
                    bulk.push_front(id);
                }
                self.settled(id);
            }
        }
        self.dispatch(peer);
    }
}
