//! What a shard keeps about its namespaces: their settings, which slots hold their values in the order of publication,
//! and when those were published and confirmed. No I/O, no memory management: the store tells it what happens.

use super::freshness::{ALWAYS, Freshness};
use crate::Result;
use crate::config::Config;
use crate::key::Namespace;
use crate::memory::GRANULE_BYTES;
use crate::namespace::{NamespaceMode, NamespaceSettings, Namespaces};
use std::sync::Arc;
use std::time::Instant;

/// No slot.
const NONE: u32 = u32::MAX;

pub(crate) struct Ledger {
    freshness: Arc<Freshness>,
    shards: u64,
    /// Of namespaces that have none of their own.
    default: NamespaceSettings,
    /// By number, as far as they have come up.
    namespaces: Vec<Kept>,
    /// By slot.
    notes: Box<[Note]>,
}

struct Kept {
    settings: NamespaceSettings,
    /// Ends of the list of its values that lookups can find, in the order of publication.
    oldest: u32,
    newest: u32,
}

#[derive(Clone)]
struct Note {
    published_ns: u64,
    /// Nothing that the origin was told before this moment is missing in the value.
    confirmed_ns: u64,
    older: u32,
    newer: u32,
}

impl Ledger {
    pub(crate) fn new(freshness: Arc<Freshness>, slots: u32, config: &Config) -> Result<Self> {
        let mut ledger = Self {
            freshness,
            shards: config.shards.max(1) as u64,
            default: NamespaceSettings { mode: config.namespace_mode, quota_bytes: 0 },
            namespaces: Vec::new(),
            notes: vec![Note { published_ns: 0, confirmed_ns: 0, older: NONE, newer: NONE }; slots as usize]
                .into(),
        };
        for (name, settings) in &config.namespaces {
            let namespace = Namespaces::of_process().get(name)?;
            ledger.kept(namespace).settings = *settings;
        }
        Ok(ledger)
    }

    /// Bytes of what is kept by slot, here and in [`Freshness`].
    pub(crate) fn bytes_for(slots: u32) -> usize {
        slots as usize * (size_of::<Note>() + size_of::<u64>())
    }

    fn kept(&mut self, namespace: Namespace) -> &mut Kept {
        let number = namespace.0 as usize;
        if self.namespaces.len() <= number {
            let settings = self.default;
            self.namespaces.resize_with(number + 1, || Kept { settings, oldest: NONE, newest: NONE });
        }
        &mut self.namespaces[number]
    }

    pub(crate) fn settings(&self, namespace: Namespace) -> NamespaceSettings {
        self.namespaces.get(namespace.0 as usize).map_or(self.default, |kept| kept.settings)
    }

    /// Granules that the namespace may have on this shard, if it has a quota.
    pub(crate) fn share_granules(&self, namespace: Namespace) -> Option<u64> {
        let quota_bytes = self.settings(namespace).quota_bytes;
        (quota_bytes > 0).then(|| (quota_bytes / self.shards / GRANULE_BYTES as u64).max(1))
    }

    /// Granules that it has.
    pub(crate) fn used_granules(&self, namespace: Namespace) -> u64 {
        self.freshness.usages.get(namespace).map_or(0, |usage| usage.granules.get())
    }

    /// Granules were taken for a value.
    pub(crate) fn took(&self, namespace: Namespace, granules: u64) {
        self.freshness.usages.of(namespace).granules.add(granules);
    }

    /// Granules of a value were given back.
    pub(crate) fn gave_back(&self, namespace: Namespace, granules: u64) {
        self.freshness.usages.of(namespace).granules.sub(granules);
    }

    /// The value that will be published in `slot` is what the origin had at this moment, or later.
    pub(crate) fn date(&mut self, slot: u32, at: Instant) {
        self.notes[slot as usize].confirmed_ns = self.freshness.ns(at);
    }

    /// A value is about to be published. True if its age matters.
    pub(crate) fn publishing(&mut self, slot: u32, namespace: Namespace) -> bool {
        let published_ns = self.freshness.ns(Instant::now());
        let kept = self.kept(namespace);
        let older = std::mem::replace(&mut kept.newest, slot);
        if older == NONE {
            kept.oldest = slot;
        } else {
            self.notes[older as usize].newer = slot;
        }
        let note = &mut self.notes[slot as usize];
        (note.published_ns, note.older, note.newer) = (published_ns, older, NONE);
        self.freshness.usages.of(namespace).entries.add(1);
        self.settle(slot, namespace)
    }

    /// Lookups find the value no longer.
    pub(crate) fn left(&mut self, slot: u32, namespace: Namespace) {
        let note = &mut self.notes[slot as usize];
        let (older, newer) =
            (std::mem::replace(&mut note.older, NONE), std::mem::replace(&mut note.newer, NONE));
        if older != NONE {
            self.notes[older as usize].newer = newer;
        }
        if newer != NONE {
            self.notes[newer as usize].older = older;
        }
        let kept = self.kept(namespace);
        if older == NONE {
            kept.oldest = newer;
        }
        if newer == NONE {
            kept.newest = older;
        }
        self.freshness.usages.of(namespace).entries.sub(1);
    }

    /// The origin, asked at this moment or later, said that the value is the present one.
    pub(crate) fn confirm(&mut self, slot: u32, namespace: Namespace, at: Instant) {
        let at = self.freshness.ns(at);
        let note = &mut self.notes[slot as usize];
        note.confirmed_ns = note.confirmed_ns.max(at);
        self.settle(slot, namespace);
    }

    /// Sets until when a value may be served. True if that is not for ever.
    fn settle(&self, slot: u32, namespace: Namespace) -> bool {
        let note = &self.notes[slot as usize];
        let until = match self.settings(namespace).mode {
            NamespaceMode::Immutable => ALWAYS,
            NamespaceMode::Ttl { ttl_ms } => note.published_ns.saturating_add(ttl_ms * 1_000_000),
            NamespaceMode::Validate { validate_ms } => {
                note.confirmed_ns.saturating_add(validate_ms * 1_000_000)
            }
        };
        self.freshness.set_until(slot, until);
        until != ALWAYS
    }

    /// Whether a value may be given to a lookup that began at `since` without asking: it was fresh then, or it is of
    /// later than that.
    pub(crate) fn serves(&self, slot: u32, namespace: Namespace, since: Instant) -> bool {
        let (until, note) = (self.freshness.until(slot), &self.notes[slot as usize]);
        let of = match self.settings(namespace).mode {
            NamespaceMode::Immutable => return true,
            NamespaceMode::Ttl { .. } => note.published_ns,
            NamespaceMode::Validate { .. } => note.confirmed_ns,
        };
        let since = self.freshness.ns(since);
        until > since || of >= since
    }

    /// Changes settings. Returns, of the values that lookups can find, the slot and whether its age matters now.
    pub(crate) fn set(&mut self, namespace: Namespace, settings: NamespaceSettings) -> Vec<(u32, bool)> {
        self.kept(namespace).settings = settings;
        let slots: Vec<u32> = self.oldest_first(namespace).collect();
        slots.into_iter().map(|slot| (slot, self.settle(slot, namespace))).collect()
    }

    /// Namespaces that have come up; for tests.
    #[cfg(test)]
    pub(crate) fn namespace_count(&self) -> u32 {
        self.namespaces.len() as u32
    }

    /// Slots of the namespace's values that lookups can find, in the order of publication.
    pub(crate) fn oldest_first(&self, namespace: Namespace) -> impl Iterator<Item = u32> {
        let first = self.namespaces.get(namespace.0 as usize).map_or(NONE, |kept| kept.oldest);
        let some = |slot: u32| (slot != NONE).then_some(slot);
        std::iter::successors(some(first), move |&slot| some(self.notes[slot as usize].newer))
    }
}
