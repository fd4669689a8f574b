//! What the modes and quotas of namespaces mean to those who want values.
//!
//! A lookup is served with what was true when it began, or later. A value that is too old for that stays where it is
//! while its fill asks the origin what it has: the same version ends the fill with the value that is there, anything
//! else goes on as any fill does. The question must not be older than the lookup either: who comes when it is already on
//! its way waits until that fill has ended, and then looks again.
//!
//! Who is kept waiting by the quota of a namespace stands in a line of its own, so that others do not wait behind it.

use super::fills::{Fill, FillId, Stage};
use super::groups::GroupId;
use super::reactor::Reactor;
use super::request::{Answer, Fetch, Waiter};
use super::room::Starving;
use super::transfer::About;
use crate::Error;
use crate::key::{Namespace, OwnedKey};
use crate::namespace::{NamespaceMode, NamespaceSettings, Namespaces};
use crate::shard::request::Scope;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Those who came too late for a question that is on its way, and those whom quotas keep waiting.
#[derive(Default)]
pub(super) struct Waiting {
    late: Vec<Late>,
    late_groups: Vec<(GroupId, FillId)>,
    pub(super) for_quota: VecDeque<Starving>,
}

struct Late {
    fill: FillId,
    hash: u64,
    key: OwnedKey,
    waiter: Waiter,
    deadline: Instant,
}

impl Reactor {
    pub(super) fn set_namespace(
        &mut self,
        namespace: Namespace,
        settings: NamespaceSettings,
        waiter: Waiter,
    ) {
        self.store.set_namespace(namespace, settings, &self.shared.counters);
        // Remembered for as long as the former mode allowed.
        self.absent.invalidate(&Scope::Namespace(namespace));
        waiter.answer(Answer::Done(Ok(1)));
    }

    /// Whether the value in a slot may be given to a lookup that began at `since`.
    pub(super) fn serves(&self, slot: u32, since: Instant) -> bool {
        let nobody_to_ask = |slot| self.peers.is_empty() && self.store.validates_slot(slot);
        self.store.serves(slot, since) || nobody_to_ask(slot)
    }

    /// Sees to it that what the fill brings is of no time before `since`, if that can still be had. False if its question
    /// was asked too early for a lookup that began then.
    pub(super) fn is_in_time(&mut self, id: FillId, since: Instant) -> bool {
        let Some(fill) = self.fills.get_mut(id) else { return true };
        match fill.stage {
            // The question is not on its way yet, or the version will be confirmed with the bytes. (An empty value has
            // none: one that waits for a slot is as old as that wait.)
            Stage::Queued | Stage::NoRoom => {
                fill.since = fill.since.max(since);
                true
            }
            Stage::Asked | Stage::Receiving => match self.store.settings(fill.key.namespace).mode {
                NamespaceMode::Validate { validate_ms } => {
                    fill.since + Duration::from_millis(validate_ms) > since
                }
                _ => true,
            },
        }
    }

    /// Somebody came too late for a fill's question, and will look again when the fill has ended.
    pub(super) fn wait_for_end(&mut self, fill: FillId, fetch: Fetch, deadline: Instant) {
        let Fetch { hash, key, waiter } = fetch;
        self.waiting.late.extend(waiter.map(|waiter| Late { fill, hash, key, waiter, deadline }));
    }

    /// The same for a group.
    pub(super) fn group_waits_for_end(&mut self, fill: FillId, group: GroupId) {
        if !self.waiting.late_groups.contains(&(group, fill)) {
            self.waiting.late_groups.push((group, fill));
        }
    }

    /// Lets those look again who waited for fills that have ended.
    pub(super) fn look_again(&mut self) {
        let fills = &self.fills;
        let over = |id: FillId| !fills.get(id).is_some_and(|fill| fill.live);
        if !self.waiting.late_groups.is_empty() {
            let groups = std::mem::take(&mut self.waiting.late_groups);
            let (again, left): (Vec<_>, _) = groups.into_iter().partition(|&(_, fill)| over(fill));
            self.waiting.late_groups = left;
            self.groups_to_try.extend(again.into_iter().map(|(group, _)| group));
        }
        if self.waiting.late.is_empty() {
            return;
        }
        let late = std::mem::take(&mut self.waiting.late);
        let (again, left): (Vec<_>, _) = late.into_iter().partition(|late| over(late.fill));
        self.waiting.late = left;
        let mut unknown = Vec::new();
        for Late { hash, key, waiter, deadline, .. } in again {
            unknown.extend(self.fetch_one(Fetch { hash, key, waiter: Some(waiter) }, deadline));
        }
        self.ask_about(unknown, self.starving.is_empty());
    }

    pub(super) fn next_late_deadline(&self) -> Option<Instant> {
        self.waiting.late.iter().map(|late| late.deadline).min()
    }

    pub(super) fn expire_late(&mut self, now: Instant) {
        if self.next_late_deadline().is_none_or(|at| at > now) {
            return;
        }
        let (gone, left): (Vec<_>, _) =
            std::mem::take(&mut self.waiting.late).into_iter().partition(|late| late.deadline <= now);
        self.waiting.late = left;
        for late in gone {
            late.waiter.fail(Error::DeadlinePassed { stage: Stage::Asked.as_str() });
        }
    }

    /// Whether a fill of this key asks about a value that is there.
    pub(super) fn asks_about(&self, hash: u64, key: &OwnedKey) -> bool {
        self.store.validates(key.namespace) && self.store.lookup(hash, key.borrow()).is_some()
    }

    /// Ends a fill if the origin's answer (`None`: it has nothing) says that the value in the cache is the present one.
    pub(super) fn confirmed(&mut self, id: FillId, about: Option<About>) -> bool {
        let Some(fill) = self.fills.get(id).filter(|fill| fill.live && fill.confirms) else { return false };
        let slot = self.store.lookup(fill.hash, fill.key.borrow());
        let Some(slot) = slot.filter(|&slot| self.store.is_present(slot, about)) else { return false };
        let Some(mut fill) = self.fills.remove(id) else { return false };
        self.store.confirm(slot, fill.since);
        // Counted before anybody is told.
        self.counters().fills_confirmed.add(1);
        self.count_fills();
        for (waiter, _) in fill.waiters.drain(..).filter(|(waiter, _)| !waiter.is_gone()) {
            match self.store.pin(slot) {
                Some(pin) => waiter.answer(Answer::Value(Ok(Some(self.shared.grant(pin))))),
                // As many pins as a slot can count.
                None => waiter.fail(self.pinned_error(0)),
            }
        }
        self.groups_to_try.append(&mut fill.groups);
        true
    }

    /// The origin has no such key: what is cached under it goes, unless it is not the origin's.
    pub(super) fn vanished(&mut self, fill: &Fill) {
        if let Some(slot) = self.store.lookup(fill.hash, fill.key.borrow()) {
            self.store.drop_value(slot, &self.shared.counters);
        }
    }

    /// For how long from now the origin's word that it has no such key, asked for at `since`, is good in this namespace.
    pub(super) fn absent_for(&self, namespace: Namespace, since: Instant) -> Duration {
        let all = Duration::from_millis(self.config.absent_ttl_ms);
        match self.store.settings(namespace).mode {
            NamespaceMode::Immutable => all,
            NamespaceMode::Ttl { ttl_ms: ms } | NamespaceMode::Validate { validate_ms: ms } => {
                all.min(Duration::from_millis(ms).saturating_sub(since.elapsed()))
            }
        }
    }

    /// Why so many bytes can never be had in a namespace.
    pub(super) fn quota_error(&self, namespace: Namespace, value_bytes: u64) -> Error {
        Error::Quota {
            namespace: Namespaces::of_process().name(namespace),
            value_bytes,
            quota_bytes: self.store.settings(namespace).quota_bytes,
            share_bytes: self.store.share_bytes(namespace).unwrap_or(0),
        }
    }

    /// Queues somebody who is kept waiting by a quota.
    pub(super) fn wait_for_quota(&mut self, starving: Starving) {
        match starving {
            Starving::Group(id) => self.group_is_starving(id),
            Starving::Fill(id) => {
                let Some(fill) = self.fills.get_mut(id).filter(|fill| !fill.starving) else { return };
                fill.starving = true;
            }
            Starving::Put { .. } => {}
        }
        self.waiting.for_quota.push_back(starving);
        self.groups_let_go();
    }

    /// True if others of the namespace wait for its quota already, and come first.
    pub(super) fn is_quota_queued(&self, namespace: Namespace) -> bool {
        self.waiting.for_quota.iter().any(|waiting| self.namespace_of(waiting) == Some(namespace))
    }

    fn namespace_of(&self, starving: &Starving) -> Option<Namespace> {
        match starving {
            Starving::Fill(id) => self.fills.get(*id).map(|fill| fill.key.namespace),
            Starving::Put { key, .. } => Some(key.namespace),
            // Of several, maybe.
            Starving::Group(_) => None,
        }
    }

    /// Serves those who wait for quotas, of each namespace in order, as far as there is room.
    pub(super) fn feed_quota_queue(&mut self) {
        let mut blocked: Vec<Namespace> = Vec::new();
        for next in std::mem::take(&mut self.waiting.for_quota) {
            let namespace = self.namespace_of(&next);
            if namespace.is_some_and(|namespace| blocked.contains(&namespace)) {
                self.waiting.for_quota.push_back(next);
                continue;
            }
            let before = self.waiting.for_quota.len();
            match next {
                Starving::Fill(id) => {
                    self.fill_is_starving(id, false);
                    if !self.place(id) {
                        self.starve_fill(id);
                    }
                }
                Starving::Group(id) => self.feed_quota_group(id),
                Starving::Put { waiter, .. } if waiter.is_gone() => {}
                Starving::Put { hash, key, len, deadline, waiter } => {
                    if let Err(starving) = self.try_reserve(hash, key, len, deadline, waiter) {
                        self.starve(starving);
                    }
                }
            }
            if self.waiting.for_quota.len() > before {
                blocked.extend(namespace);
            }
        }
    }
}
