//! Who waits for room, oldest first.
//!
//! The first is served first: a large value, or a group, is not overtaken for ever by small ones.

use super::fills::FillId;
use super::groups::GroupId;
use super::reactor::Reactor;
use super::request::{Answer, Reservation, Waiter};
use super::store::NoRoom;
use crate::Error;
use crate::key::OwnedKey;
use std::collections::VecDeque;
use std::time::Instant;

pub(super) enum Starving {
    /// A known value.
    Fill(FillId),
    /// All that a batch must hold.
    Group(GroupId),
    /// A value that a caller will write.
    Put { hash: u64, key: OwnedKey, len: u64, deadline: Instant, waiter: Waiter },
}

impl Reactor {
    /// Queues somebody who found no room.
    pub(super) fn starve(&mut self, starving: Starving) {
        if let Starving::Group(id) = starving {
            self.group_is_starving(id);
        }
        self.starving.push_back(starving);
        self.holding_back = true;
        self.groups_let_go();
    }

    /// Says whether a fill stands in a line.
    pub(super) fn fill_is_starving(&mut self, id: FillId, starving: bool) {
        if let Some(fill) = self.fills.get_mut(id) {
            fill.starving = starving;
        }
    }

    pub(super) fn starve_fill(&mut self, id: FillId) {
        if let Some(fill) = self.fills.get_mut(id).filter(|fill| !fill.starving) {
            fill.starving = true;
            self.starve(Starving::Fill(id));
        }
    }

    pub(super) fn reserve(&mut self, hash: u64, key: OwnedKey, len: u64, deadline: Instant, waiter: Waiter) {
        if waiter.is_gone() {
            return;
        }
        if self.is_quota_queued(key.namespace) {
            self.wait_for_quota(Starving::Put { hash, key, len, deadline, waiter });
        } else if !self.starving.is_empty() {
            self.starve(Starving::Put { hash, key, len, deadline, waiter });
        } else if let Err(starving) = self.try_reserve(hash, key, len, deadline, waiter) {
            self.starve(starving);
        }
    }

    /// Gives room to a caller, or lets it wait for its namespace's quota. An error is one who must wait for room.
    pub(super) fn try_reserve(
        &mut self,
        hash: u64,
        key: OwnedKey,
        len: u64,
        deadline: Instant,
        waiter: Waiter,
    ) -> Result<(), Starving> {
        match self.store.reserve(hash, key.namespace, len, &self.shared.counters) {
            Ok(room) => {
                let reservation = Reservation::new(self.shared.clone(), room.slot, room.extents.clone(), len);
                self.store.lend(hash, key, room, len, &self.shared.counters);
                waiter.answer(Answer::Reserved(Ok(reservation)));
            }
            Err(NoRoom::Never) => {
                let arena_bytes = self.store.arena_bytes();
                waiter.fail(Error::ValueTooLarge { value_bytes: len, arena_bytes });
            }
            Err(NoRoom::NeverInQuota) => waiter.fail(self.quota_error(key.namespace, len)),
            Err(NoRoom::PinnedInQuota) => self.wait_for_quota(Starving::Put { hash, key, len, deadline, waiter }),
            Err(NoRoom::Pinned) => return Err(Starving::Put { hash, key, len, deadline, waiter }),
        }
        Ok(())
    }

    /// Serves those who wait for room, in order, as far as there is room.
    pub(super) fn feed_starving(&mut self) {
        self.feed_quota_queue();
        while let Some(next) = self.starving.pop_front() {
            let left = match next {
                Starving::Fill(id) => {
                    // Before: it may have to wait for a quota instead, in the other line.
                    self.fill_is_starving(id, false);
                    let left = !self.place(id);
                    if left {
                        self.fill_is_starving(id, true);
                    }
                    left.then_some(Starving::Fill(id))
                }
                Starving::Group(id) => (!self.feed_group(id)).then_some(Starving::Group(id)),
                Starving::Put { waiter, .. } if waiter.is_gone() => None,
                Starving::Put { hash, key, len, deadline, waiter } => {
                    self.try_reserve(hash, key, len, deadline, waiter).err()
                }
            };
            if let Some(left) = left {
                self.starving.push_front(left);
                return;
            }
        }
        // Also where somebody found room at the last moment, or gave up.
        if self.waiting.for_quota.is_empty() {
            self.store.sated();
        }
        if std::mem::take(&mut self.holding_back) {
            self.pending_peers.extend(0..self.peers.len());
        }
    }

    /// What the first of those who wait wants.
    pub(super) fn first_starving_bytes(&self) -> Option<u64> {
        match self.starving.front()? {
            Starving::Fill(id) => self.fills.get(*id)?.about.map(|about| about.len),
            Starving::Group(id) => self.group_wants(*id),
            Starving::Put { len, .. } => Some(*len),
        }
    }

    /// Why something found no room.
    pub(super) fn pinned_error(&self, value_bytes: u64) -> Error {
        Error::Pinned {
            value_bytes,
            pinned_bytes: self.store.pinned_bytes(),
            arena_bytes: self.store.arena_bytes(),
        }
    }

    /// When the first put that waits gives up. (Fills and groups have deadlines of their own.)
    pub(super) fn next_put_deadline(&self) -> Option<Instant> {
        let put = |starving: &Starving| match starving {
            Starving::Put { deadline, .. } => Some(*deadline),
            _ => None,
        };
        self.starving.iter().chain(&self.waiting.for_quota).filter_map(put).min()
    }

    pub(super) fn expire_puts(&mut self, now: Instant) {
        let late = |starving: &Starving| matches!(starving, Starving::Put { deadline, .. } if *deadline <= now);
        for gone in [&mut self.starving, &mut self.waiting.for_quota].map(|waiting| take(waiting, late)) {
            for starving in gone {
                if let Starving::Put { len, waiter, .. } = starving {
                    waiter.fail(self.pinned_error(len));
                }
            }
        }
    }
}

/// Takes out those of whom `is` holds.
fn take(waiting: &mut VecDeque<Starving>, is: impl Fn(&Starving) -> bool) -> VecDeque<Starving> {
    if !waiting.iter().any(&is) {
        return VecDeque::new();
    }
    let (taken, left) = std::mem::take(waiting).into_iter().partition(is);
    *waiting = left;
    taken
}
