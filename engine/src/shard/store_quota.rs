//! Namespaces in the store: what they may take, and how old what they have may be. No I/O.

use super::{NoRoom, Store};
use crate::key::Namespace;
use crate::memory::{GRANULE_BYTES, granules_for};
use crate::namespace::{NamespaceMode, NamespaceSettings};
use crate::shard::transfer::About;
use crate::stats::ShardCounters;
use crate::table::Evict;
use std::time::Instant;

impl Store {
    /// Settings of a namespace.
    pub(crate) fn settings(&self, namespace: Namespace) -> NamespaceSettings {
        self.ledger.settings(namespace)
    }

    /// True if values of this namespace are asked about when they are no longer fresh.
    pub(crate) fn validates(&self, namespace: Namespace) -> bool {
        matches!(self.settings(namespace).mode, NamespaceMode::Validate { .. })
    }

    /// The same of the value in a slot.
    pub(crate) fn validates_slot(&self, slot: u32) -> bool {
        self.writer.peek(slot).is_some_and(|value| self.validates(value.key.namespace))
    }

    /// Changes the settings of a namespace. A quota that is exceeded is met as far as pins allow.
    pub(crate) fn set_namespace(
        &mut self,
        namespace: Namespace,
        settings: NamespaceSettings,
        counters: &ShardCounters,
    ) {
        for (slot, dated) in self.ledger.set(namespace, settings) {
            if let Some(value) = self.writer.peek(slot) {
                value.set_dated(dated);
            }
        }
        if let Some(share) = self.ledger.share_granules(namespace) {
            self.evict_of(namespace, share, counters);
        }
    }

    /// Bytes that the namespace may have on this shard, if it has a quota.
    pub(crate) fn share_bytes(&self, namespace: Namespace) -> Option<u64> {
        self.ledger.share_granules(namespace).map(|granules| granules * GRANULE_BYTES as u64)
    }

    /// The value that will be published in `slot` is what the origin had at this moment, or later.
    pub(crate) fn date(&mut self, slot: u32, at: Instant) {
        self.ledger.date(slot, at);
    }

    /// Whether the value may be given to a lookup that began at `since`, without asking.
    pub(crate) fn serves(&self, slot: u32, since: Instant) -> bool {
        self.writer.peek(slot).is_some_and(|value| {
            // As on the callers' side: what has no date needs no look.
            !value.is_dated() || self.ledger.serves(slot, value.key.namespace, since)
        })
    }

    /// True if the value is the one that the origin has: of what it says, or, where it has none, put locally.
    pub(crate) fn is_present(&self, slot: u32, about: Option<About>) -> bool {
        self.writer.peek(slot).is_some_and(|value| match about {
            Some(about) => about == About { len: value.len, version: value.version, crc32c: value.crc32c },
            None => value.version == 0,
        })
    }

    /// The origin, asked at this moment or later, said that the value is the present one.
    pub(crate) fn confirm(&mut self, slot: u32, at: Instant) {
        if let Some(namespace) = self.writer.peek(slot).map(|value| value.key.namespace) {
            self.ledger.confirm(slot, namespace, at);
        }
    }

    /// Lets a value go that the origin no longer has.
    pub(crate) fn drop_value(&mut self, slot: u32, counters: &ShardCounters) {
        counters.invalidated.add(1);
        self.condemn(slot, true, counters);
    }

    /// Makes the namespace small enough for so many granules more.
    pub(super) fn make_way(
        &mut self,
        namespace: Namespace,
        granules: u64,
        counters: &ShardCounters,
    ) -> Result<(), NoRoom> {
        let Some(share) = self.ledger.share_granules(namespace) else { return Ok(()) };
        if granules > share {
            return Err(NoRoom::NeverInQuota);
        }
        // The empty value takes nothing.
        if granules == 0 || self.evict_of(namespace, share - granules, counters) {
            return Ok(());
        }
        Err(NoRoom::PinnedInQuota)
    }

    /// Evicts the namespace's oldest values until it has at most so many granules. If pins keep it from getting there,
    /// nothing is evicted, and it is false.
    fn evict_of(&mut self, namespace: Namespace, granules: u64, counters: &ShardCounters) -> bool {
        let over = self.ledger.used_granules(namespace).saturating_sub(granules);
        if over == 0 {
            return true;
        }
        let (mut victims, mut found) = (Vec::new(), 0);
        for slot in self.ledger.oldest_first(namespace) {
            let len = self.writer.peek(slot).map_or(0, |value| value.len);
            if len > 0 && self.writer.pins(slot) == 0 {
                victims.push(slot);
                found += granules_for(len);
            }
            if found >= over {
                break;
            }
        }
        if found < over {
            return false;
        }
        for slot in victims {
            // One that was pinned meanwhile stays.
            if let Evict::Freed(value) = self.writer.evict(slot) {
                self.policy.removed(slot);
                self.evicted(slot, value, counters);
            }
        }
        self.ledger.used_granules(namespace) <= granules
    }

    /// Checks that the lists of namespaces hold every ready slot once; for tests.
    #[cfg(test)]
    pub(super) fn validate_namespaces(&self) {
        let mut listed = vec![false; self.slots() as usize];
        for number in 0..self.ledger.namespace_count() {
            let namespace = Namespace(number);
            for slot in self.ledger.oldest_first(namespace) {
                assert!(!std::mem::replace(&mut listed[slot as usize], true), "slot {slot} is listed twice");
                assert_eq!(self.writer.peek(slot).map(|value| value.key.namespace), Some(namespace));
            }
        }
        for slot in 0..self.slots() {
            assert_eq!(listed[slot as usize], self.writer.is_ready(slot), "slot {slot}");
        }
    }
}
