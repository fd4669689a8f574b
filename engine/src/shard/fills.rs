//! Fills: one per key at a time, however many wait. No I/O.

use super::groups::GroupId;
use super::request::{Answer, Waiter};
use super::transfer::{About, Transfer};
use crate::Error;
use crate::key::{Key, OwnedKey};
use std::collections::HashMap;
use std::time::Instant;

/// Names a fill. Never used twice by one shard.
pub(super) type FillId = u64;

/// Where a fill is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// In its peer's queue; nothing is known of the value.
    Queued,
    /// The peer was asked what it has, or for the first bytes.
    Asked,
    /// The value is known and waits for room.
    NoRoom,
    /// It has room: its bytes are asked for, or arriving.
    Receiving,
}

impl Stage {
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Stage::Queued => "waiting for a connection to the peer",
            Stage::Asked => "waiting for the peer's answer",
            Stage::NoRoom => "waiting for memory",
            Stage::Receiving => "receiving the value",
        }
    }
}

pub(super) struct Fill {
    pub(super) hash: u64,
    pub(super) key: OwnedKey,
    pub(super) peer: usize,
    pub(super) stage: Stage,
    /// False once the fence was broken (the key was invalidated or put) or nobody can use the result: what
    /// arrives is not published.
    pub(super) live: bool,
    /// Who waits, and until when.
    pub(super) waiters: Vec<(Waiter, Instant)>,
    /// Groups that want the value together with others, and will wait for it when they have room for all.
    pub(super) groups: Vec<GroupId>,
    /// The latest moment at which somebody still wants the value.
    pub(super) deadline: Instant,
    /// Lanes that failed before they told what the value is.
    pub(super) attempts: u32,
    /// The question was asked at this moment or later: what is brought is not older.
    pub(super) since: Instant,
    /// It asks about a value that is there, which may turn out to be the present one.
    pub(super) confirms: bool,
    /// How often the value changed at the origin while it was on its way.
    pub(super) renewals: u32,
    /// What the origin said, from `NoRoom` on.
    pub(super) about: Option<About>,
    /// From `Receiving` on.
    pub(super) transfer: Option<Transfer>,
    /// Requests for it that lanes have not done with. The room is not given back before they have.
    pub(super) asked: u32,
    /// It stands among those who wait for room.
    pub(super) starving: bool,
}

impl Fill {
    pub(super) fn new(hash: u64, key: OwnedKey, peer: usize, deadline: Instant) -> Self {
        Self {
            hash,
            key,
            peer,
            stage: Stage::Queued,
            live: true,
            waiters: Vec::new(),
            groups: Vec::new(),
            deadline,
            attempts: 0,
            since: Instant::now(),
            confirms: false,
            renewals: 0,
            about: None,
            transfer: None,
            asked: 0,
            starving: false,
        }
    }

    /// Whether what is to be asked for next may be why a lane failed.
    pub(super) fn is_suspect(&self) -> bool {
        self.transfer.as_ref().map_or(self.attempts > 0, Transfer::has_lost)
    }

    /// Answers everybody who waits with the same error.
    pub(super) fn fail_waiters(&mut self, error: &Error) {
        for (waiter, _) in self.waiters.drain(..) {
            waiter.fail(error.clone());
        }
    }

    /// Answers those whose deadline has passed.
    pub(super) fn fail_late_waiters(&mut self, now: Instant, error: &Error) {
        let (late, left) = std::mem::take(&mut self.waiters).into_iter().partition(|(_, at)| *at <= now);
        self.waiters = left;
        let late: Vec<(Waiter, Instant)> = late;
        for (waiter, _) in late {
            waiter.fail(error.clone());
        }
    }

    /// Answers everybody who waits: the origin has no such key.
    pub(super) fn answer_absent(&mut self) {
        for (waiter, _) in self.waiters.drain(..) {
            waiter.answer(Answer::Value(Ok(None)));
        }
    }
}

/// All fills of a shard.
#[derive(Default)]
pub(super) struct Fills {
    by_id: HashMap<FillId, Fill>,
    /// Live fills by hash of the key; more than one only where hashes collide.
    live: HashMap<u64, Vec<FillId>>,
    last_id: FillId,
}

impl Fills {
    pub(super) fn len(&self) -> usize {
        self.by_id.len()
    }

    pub(super) fn get(&self, id: FillId) -> Option<&Fill> {
        self.by_id.get(&id)
    }

    pub(super) fn get_mut(&mut self, id: FillId) -> Option<&mut Fill> {
        self.by_id.get_mut(&id)
    }

    /// The live fill of a key.
    pub(super) fn find(&self, hash: u64, key: Key<'_>) -> Option<FillId> {
        let ids = self.live.get(&hash)?;
        ids.iter().copied().find(|id| self.by_id.get(id).is_some_and(|fill| fill.key.borrow() == key))
    }

    /// Starts a fill. The key has no live one.
    pub(super) fn start(&mut self, fill: Fill) -> FillId {
        debug_assert!(fill.live && self.find(fill.hash, fill.key.borrow()).is_none());
        self.last_id += 1;
        self.live.entry(fill.hash).or_default().push(self.last_id);
        self.by_id.insert(self.last_id, fill);
        self.last_id
    }

    /// Breaks a fill's fence: what it brings will not be published. Returns those who waited.
    pub(super) fn kill(&mut self, id: FillId) -> Vec<(Waiter, Instant)> {
        let Some(fill) = self.by_id.get_mut(&id) else { return Vec::new() };
        if std::mem::replace(&mut fill.live, false) {
            let hash = fill.hash;
            let waiters = std::mem::take(&mut fill.waiters);
            self.unlink(hash, id);
            return waiters;
        }
        Vec::new()
    }

    /// Ends a fill.
    pub(super) fn remove(&mut self, id: FillId) -> Option<Fill> {
        let fill = self.by_id.remove(&id)?;
        if fill.live {
            self.unlink(fill.hash, id);
        }
        Some(fill)
    }

    fn unlink(&mut self, hash: u64, id: FillId) {
        if let Some(ids) = self.live.get_mut(&hash) {
            ids.retain(|&other| other != id);
            if ids.is_empty() {
                self.live.remove(&hash);
            }
        }
    }

    /// Every fill, to look at.
    pub(super) fn iter(&self) -> impl Iterator<Item = (FillId, &Fill)> {
        self.by_id.iter().map(|(&id, fill)| (id, fill))
    }
}
