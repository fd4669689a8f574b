//! Batches whose values must be held together: room for all of them at once, or nothing.
//!
//! A call for many leases pins what it gets until it has everything. Two such calls, each holding half of the memory and
//! waiting for the other half, would wait for ever. So a group takes what it needs in one step: while it waits it has
//! neither room nor pins, and when its turn comes it pins what is there, reserves room for everything else, and needs
//! nothing more. Across shards the same holds by the order of [`Turn`].

use super::fills::{Fill, FillId, Stage};
use super::reactor::Reactor;
use super::request::{Answer, Fetch, Member};
use super::room::Starving;
use super::store::{NoRoom, Room};
use super::turn::Turn;
use crate::Error;
use crate::key::OwnedKey;
use crate::memory::{GRANULE_BYTES, granules_for};
use std::cmp::Reverse;
use std::collections::HashMap;
use std::time::Instant;

/// Names a group. Never used twice by one shard.
pub(super) type GroupId = u64;

pub(super) struct Group {
    /// Who has no answer yet.
    members: Vec<Member>,
    deadline: Instant,
    /// When it came: what it gets must not be known to be out of date before that.
    since: Instant,
    /// It stands among those who wait for room.
    starving: bool,
    /// Something is not known yet; nothing changes before it is told of.
    waiting: bool,
    /// What it needed when it last found no room.
    wanted_bytes: u64,
    turn: Option<Turn>,
}

impl Group {
    /// Bytes of memory that it will hold, as far as is known: each value once.
    fn bytes(&self) -> u64 {
        self.bytes_where(|_| true)
    }

    fn bytes_where(&self, counts: impl Fn(&OwnedKey) -> bool) -> u64 {
        let known = self.members.iter().filter(|member| counts(&member.key));
        let known = known.filter_map(|member| Some((member.hash, &member.key, member.len?)));
        let (mut seen, mut bytes) = (HashMap::with_capacity(self.members.len()), 0);
        for (hash, key, len) in known {
            // Of two keys with one hash both count.
            if seen.insert(hash, key).is_none_or(|other| other != key) {
                bytes += granules_for(len) * GRANULE_BYTES as u64;
            }
        }
        bytes
    }

    /// Gives up the pins: nothing is held while something is waited for that others may hold.
    fn let_go(&mut self) {
        self.members.iter_mut().for_each(|member| member.lease = None);
    }
}

/// How an attempt ended.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Attempt {
    /// Every member has its answer or waits for a value that has room.
    Over,
    /// Something is not known yet.
    Unknown,
    /// Other shards come first.
    NotItsTurn,
    NoRoom,
    /// The quota of a namespace keeps it waiting.
    NoQuota,
}

impl Reactor {
    pub(super) fn begin_group(&mut self, members: Vec<Member>, turn: Option<Turn>, deadline: Instant) {
        self.last_group += 1;
        let group = Group { members, deadline, since: Instant::now(), starving: false, waiting: false, wanted_bytes: 0, turn };
        self.groups.insert(self.last_group, group);
        self.groups_to_try.push(self.last_group);
    }

    /// Tries the groups for which something has changed.
    pub(super) fn try_groups(&mut self) {
        let mut ids = std::mem::take(&mut self.groups_to_try);
        ids.sort_unstable();
        ids.dedup();
        for id in ids {
            let Some(group) = self.groups.get_mut(&id) else { continue };
            group.waiting = false;
            if group.starving {
                // Its turn comes in `feed_starving`.
                continue;
            }
            match self.attempt(id) {
                Attempt::NoRoom => self.starve(Starving::Group(id)),
                Attempt::NoQuota => self.wait_for_quota(Starving::Group(id)),
                _ => {}
            }
        }
    }

    /// The same for all of them: it may be their turn now.
    pub(super) fn try_all_groups(&mut self) {
        self.groups_to_try.extend(self.groups.keys());
    }

    /// Tries a group that is the first to be given room. False if it goes on waiting in front.
    pub(super) fn feed_group(&mut self, id: GroupId) -> bool {
        match self.groups.get(&id) {
            None => return true,
            Some(group) if group.waiting => return false,
            Some(_) => {}
        }
        match self.attempt(id) {
            Attempt::Over | Attempt::NotItsTurn => true,
            Attempt::NoRoom | Attempt::Unknown => false,
            Attempt::NoQuota => {
                self.wait_for_quota(Starving::Group(id));
                true
            }
        }
    }

    /// Tries a group that waits for the quota of a namespace, and queues it again if it still must.
    pub(super) fn feed_quota_group(&mut self, id: GroupId) {
        let Some(group) = self.groups.get(&id) else { return };
        let attempt = if group.waiting { Attempt::Unknown } else { self.attempt(id) };
        match attempt {
            Attempt::Over | Attempt::NotItsTurn => {}
            Attempt::NoRoom => self.starve(Starving::Group(id)),
            Attempt::NoQuota | Attempt::Unknown => self.wait_for_quota(Starving::Group(id)),
        }
    }

    /// Somebody waits for room: whoever holds pins while waiting for something else lets go of them.
    pub(super) fn groups_let_go(&mut self) {
        self.groups.values_mut().for_each(Group::let_go);
    }

    pub(super) fn group_is_starving(&mut self, id: GroupId) {
        if let Some(group) = self.groups.get_mut(&id) {
            group.starving = true;
        }
    }

    fn attempt(&mut self, id: GroupId) -> Attempt {
        let Some(mut group) = self.groups.remove(&id) else { return Attempt::Over };
        let (gone, left) =
            std::mem::take(&mut group.members).into_iter().partition(|member| member.waiter.is_gone());
        group.members = left;
        self.leave(gone, None);
        let needs = self.look(id, &mut group);
        let bytes = group.bytes();
        let exceeds_quota = self.exceeds_quota(&group);
        let attempt = match (needs, exceeds_quota) {
            _ if group.members.is_empty() => Attempt::Over,
            _ if bytes > self.store.arena_bytes() => {
                self.refuse(&mut group, bytes);
                Attempt::Over
            }
            (_, Some(error)) => {
                self.leave(std::mem::take(&mut group.members), Some(&error));
                Attempt::Over
            }
            (None, None) => {
                group.waiting = true;
                Attempt::Unknown
            }
            (Some(_), _) if group.turn.as_ref().is_some_and(|turn| !turn.has_come()) => {
                group.let_go();
                // It leaves the line: others here must not wait for what another shard waits for, for they may be it.
                group.starving = false;
                Attempt::NotItsTurn
            }
            (Some(unplaced), _) => match self.rooms_for(&unplaced) {
                Ok(rooms) => {
                    self.grant(&mut group, rooms);
                    Attempt::Over
                }
                Err(why) => {
                    group.wanted_bytes = bytes;
                    group.let_go();
                    why
                }
            },
        };
        if attempt != Attempt::Over {
            if group.starving || !self.starving.is_empty() {
                group.let_go();
            }
            self.groups.insert(id, group);
        }
        attempt
    }

    /// Pins what is there and finds out about the rest. The fills whose values are known and have no room, or `None` if
    /// something is not known yet.
    fn look(&mut self, id: GroupId, group: &mut Group) -> Option<Vec<FillId>> {
        let (mut unplaced, mut known) = (Vec::new(), true);
        let mut unknown = Vec::new();
        let now = Instant::now();
        for mut member in std::mem::take(&mut group.members) {
            if member.lease.is_none()
                && let Some(slot) = self.store.lookup(member.hash, member.key.borrow())
                && self.serves(slot, group.since)
                && let Some(pin) = self.store.pin(slot)
            {
                member.lease = Some(self.shared.grant(pin));
            }
            if let Some(lease) = &member.lease {
                member.len = Some(lease.len());
            } else if let Some(fill_id) = self.fills.find(member.hash, member.key.borrow()) {
                if !self.is_in_time(fill_id, group.since) {
                    known = false;
                    self.group_waits_for_end(fill_id, id);
                    group.members.push(member);
                    continue;
                }
                let Some(fill) = self.fills.get_mut(fill_id) else { continue };
                if let Some(about) = fill.about {
                    member.len = Some(about.len);
                    if fill.stage == Stage::NoRoom {
                        unplaced.push(fill_id);
                    }
                } else {
                    known = false;
                    if fill.deadline < group.deadline {
                        fill.deadline = group.deadline;
                        self.deadlines.push(Reverse((group.deadline, fill_id)));
                    }
                    if fill.groups.last() != Some(&id) {
                        fill.groups.push(id);
                    }
                    if fill.stage == Stage::Queued && group.starving {
                        // First bytes are not asked for while somebody waits for room; what the value is can be.
                        unknown.push(fill_id);
                    }
                }
            } else if self.peers.is_empty() || self.absent.contains(member.hash, member.key.borrow(), now) {
                self.counters().absent_hits.add(u64::from(!self.peers.is_empty()));
                member.waiter.answer(Answer::Value(Ok(None)));
                continue;
            } else {
                known = false;
                let fill_id = self.start_fill(member.hash, member.key.clone(), group.deadline);
                if let Some(fill) = self.fills.get_mut(fill_id) {
                    fill.groups.push(id);
                }
                unknown.push(fill_id);
            }
            group.members.push(member);
        }
        // One that waits for room in front of all others stands in no queue while it is looked at.
        self.ask_about(unknown, !group.starving && self.starving.is_empty());
        unplaced.sort_unstable();
        unplaced.dedup();
        known.then_some(unplaced)
    }

    /// Room for every value that has none, or for none of them.
    fn rooms_for(&mut self, unplaced: &[FillId]) -> Result<Vec<(FillId, Room)>, Attempt> {
        let mut rooms = Vec::with_capacity(unplaced.len());
        for &id in unplaced {
            let Some((fill, about)) = self.fills.get(id).and_then(|fill| Some((fill, fill.about?))) else { continue };
            match self.store.reserve(fill.hash, fill.key.namespace, about.len, &self.shared.counters) {
                Ok(room) => rooms.push((id, room)),
                Err(why) => {
                    for (_, room) in rooms {
                        self.store.cancel(room, &self.shared.counters);
                    }
                    return Err(match why {
                        NoRoom::Pinned | NoRoom::Never => Attempt::NoRoom,
                        NoRoom::PinnedInQuota | NoRoom::NeverInQuota => Attempt::NoQuota,
                    });
                }
            }
        }
        Ok(rooms)
    }

    /// Everybody gets what is there, or waits for what now has room.
    fn grant(&mut self, group: &mut Group, rooms: Vec<(FillId, Room)>) {
        for Member { hash, key, waiter, lease, .. } in group.members.drain(..) {
            if let Some(lease) = lease {
                waiter.answer(Answer::Value(Ok(Some(lease))));
            } else if let Some(id) = self.fills.find(hash, key.borrow())
                && let Some(fill) = self.fills.get_mut(id)
            {
                fill.waiters.push((waiter, group.deadline));
                fill.deadline = fill.deadline.max(group.deadline);
                self.deadlines.push(Reverse((group.deadline, id)));
            }
        }
        for (id, room) in rooms {
            if let Some(about) = self.fills.get(id).and_then(|fill| fill.about) {
                self.begin_transfer(id, about, room);
            }
        }
    }

    /// The error if what it wants of a namespace is more than that may have.
    fn exceeds_quota(&self, group: &Group) -> Option<Error> {
        let mut namespaces: Vec<_> = group.members.iter().map(|member| member.key.namespace).collect();
        namespaces.sort_unstable();
        namespaces.dedup();
        namespaces.into_iter().find_map(|namespace| {
            let share_bytes = self.store.share_bytes(namespace)?;
            let bytes = group.bytes_where(|key| key.namespace == namespace);
            (bytes > share_bytes).then(|| self.quota_error(namespace, bytes))
        })
    }

    /// All of it can never be held: what is there is given out, and the rest is refused.
    fn refuse(&mut self, group: &mut Group, batch_bytes: u64) {
        let values = group.members.len();
        let error = Error::BatchTooLarge { values, batch_bytes, arena_bytes: self.store.arena_bytes() };
        self.leave(std::mem::take(&mut group.members), Some(&error));
    }

    /// Members that wait no longer: with the error, where there is no value, unless they have gone by themselves. What
    /// nobody else wants is not kept waiting for room.
    fn leave(&mut self, members: Vec<Member>, error: Option<&Error>) {
        for member in members {
            let unwanted = |fill: &Fill| {
                fill.stage == Stage::NoRoom
                    && fill.waiters.is_empty()
                    && fill.groups.is_empty()
                    && !fill.starving
            };
            if let Some(id) = self.fills.find(member.hash, member.key.borrow())
                && self.fills.get(id).is_some_and(unwanted)
            {
                drop(self.fills.kill(id));
                self.counters().fills_discarded.add(1);
                self.bury(id);
            }
            if let Some(error) = error {
                member.settle(error);
            }
        }
    }

    /// The groups of a fill that ended without a value hear how.
    pub(super) fn tell_groups(&mut self, fill: &Fill, answer: impl Fn() -> Answer) {
        self.tell_groups_of(&fill.groups, fill.hash, &fill.key, answer);
    }

    pub(super) fn tell_groups_of(
        &mut self,
        groups: &[GroupId],
        hash: u64,
        key: &OwnedKey,
        answer: impl Fn() -> Answer,
    ) {
        for id in groups {
            let Some(group) = self.groups.get_mut(id) else { continue };
            let concerned =
                |member: &Member| member.hash == hash && member.key == *key && member.lease.is_none();
            let (told, left) = std::mem::take(&mut group.members).into_iter().partition(concerned);
            group.members = left;
            let told: Vec<Member> = told;
            told.into_iter().for_each(|member| member.waiter.answer(answer()));
            self.groups_to_try.push(*id);
        }
    }

    pub(super) fn next_group_deadline(&self) -> Option<Instant> {
        self.groups.values().map(|group| group.deadline).min()
    }

    pub(super) fn expire_groups(&mut self, now: Instant) {
        let late: Vec<GroupId> =
            self.groups.iter().filter(|(_, group)| group.deadline <= now).map(|(&id, _)| id).collect();
        for id in late {
            let Some(mut group) = self.groups.remove(&id) else { continue };
            let starving = group.starving || !self.starving.is_empty();
            let error = match starving {
                true => self.pinned_error(group.wanted_bytes.max(self.first_starving_bytes().unwrap_or(0))),
                false => Error::DeadlinePassed { stage: Stage::Asked.as_str() },
            };
            self.leave(std::mem::take(&mut group.members), Some(&error));
        }
    }

    pub(super) fn group_wants(&self, id: GroupId) -> Option<u64> {
        self.groups.get(&id).map(|group| group.wanted_bytes)
    }

    /// Starts to fetch what is wanted by itself, and asks about all of it at once where that is more than one thing.
    pub(super) fn fetch(&mut self, keys: Vec<Fetch>, deadline: Instant) {
        let mut unknown = Vec::new();
        for fetch in keys {
            unknown.extend(self.fetch_one(fetch, deadline));
        }
        self.ask_about(unknown, self.starving.is_empty());
    }

    /// Queues fills of which nothing is known: those of one peer together where there is more than one, or where there is
    /// no room for the first bytes of a single one.
    pub(super) fn ask_about(&mut self, unknown: Vec<FillId>, room: bool) {
        let mut per_peer: HashMap<usize, Vec<FillId>> = HashMap::new();
        for id in unknown {
            if let Some(fill) = self.fills.get(id) {
                per_peer.entry(fill.peer).or_default().push(id);
            }
        }
        for (peer, fills) in per_peer {
            let queues = &mut self.peers[peer].queues;
            match fills.as_slice() {
                &[only] if room && !self.fills.get(only).is_some_and(|fill| fill.confirms) => queues.heads.push_back(only),
                _ => queues.locates.push_back(fills),
            }
            self.pending_peers.push(peer);
        }
    }
}
