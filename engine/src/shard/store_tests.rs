//! The store against a model: a map of values, a list of leases, and a count of granules.

#![allow(clippy::unwrap_used)]

use super::freshness::Freshness;
use super::ledger::Ledger;
use super::request::Scope;
use super::store::{NoRoom, Room, Store};
use super::value::Value;
use crate::{Config, Namespace};
use crate::key::OwnedKey;
use crate::memory::{ExtentAllocator, granules_for};
use crate::policy::{self, PolicyKind};
use crate::stats::ShardCounters;
use crate::table::{Pin, Table};
use proptest::prelude::*;
use std::collections::HashMap;
use std::sync::Arc;

const BLOCKS: u32 = 3;
const BLOCKS_MAX: u32 = 5;
const GRANULES_PER_BLOCK: u32 = 16;
const SLOTS: u32 = 12;

struct Bed {
    store: Store,
    table: Arc<Table<Value>>,
    counters: ShardCounters,
    freshness: Arc<Freshness>,
    /// Bytes of the values that lookups must find, by key.
    resident: HashMap<u8, (u32, u64)>,
    /// Pins held, with the slot, key and length of what they pin.
    held: Vec<(Pin, u8, u64)>,
    filling: Vec<(Room, u8, u64)>,
}

fn key(key: u8) -> OwnedKey {
    Namespace(u32::from(key) % 2).key(&[key]).to_owned()
}

fn hash(key: u8) -> u64 {
    // Few hashes, so that keys collide.
    u64::from(key % 3)
}

impl Bed {
    fn new(kind: PolicyKind) -> Self {
        let (table, writer) = Table::new(SLOTS, Box::new(|| {}));
        let extents = ExtentAllocator::with_room(BLOCKS, BLOCKS_MAX, GRANULES_PER_BLOCK);
        let policy = policy::build(kind, SLOTS, u64::from(extents.total_granules()));
        let freshness = Arc::new(Freshness::new(SLOTS));
        let ledger = Ledger::new(freshness.clone(), SLOTS, &Config::new(0)).unwrap();
        let counters = ShardCounters::default();
        // As at the start of a shard.
        counters.arena_bytes.set(u64::from(BLOCKS * GRANULES_PER_BLOCK) * 4096);
        Self {
            store: Store::new(writer, extents, policy, ledger),
            table,
            counters,
            freshness,
            resident: HashMap::new(),
            held: Vec::new(),
            filling: Vec::new(),
        }
    }

    /// Drops from the model what the store has evicted; nothing else may have gone.
    fn sync(&mut self) {
        let store = &self.store;
        self.resident.retain(|&k, &mut (slot, _)| store.lookup(hash(k), key(k).borrow()) == Some(slot));
    }

    fn unpinned_granules(&self) -> u64 {
        let pinned = |k: u8, len: u64| self.held.iter().any(|&(_, held, l)| held == k && l == len);
        self.resident
            .iter()
            .filter(|&(&k, &(_, len))| !pinned(k, len))
            .map(|(_, &(_, len))| granules_for(len))
            .sum()
    }

    fn reserve(&mut self, k: u8, len: u64) {
        let total = u64::from(self.store.blocks() * GRANULES_PER_BLOCK);
        let could = self.free_granules() + self.unpinned_granules();
        let before = self.resident.len();
        match self.store.reserve(hash(k), key(k).namespace, len, &self.counters) {
            Ok(room) => {
                let granules: u64 = room.extents.iter().map(|e| u64::from(e.len)).sum();
                assert_eq!(granules, granules_for(len));
                self.filling.push((room, k, len));
            }
            Err(NoRoom::Never) => assert!(granules_for(len) > total),
            Err(NoRoom::NeverInQuota | NoRoom::PinnedInQuota) => panic!("no namespace has a quota"),
            Err(NoRoom::Pinned) => {
                let slots_left = self.held.len() + self.filling.len() >= SLOTS as usize;
                assert!(could < granules_for(len) || slots_left, "{could} granules could be had for {len} bytes");
                self.store.sated();
            }
        }
        self.sync();
        assert!(self.resident.len() <= before);
    }

    fn free_granules(&self) -> u64 {
        u64::from(self.store.free_granules())
    }

    /// Takes blocks out or in until there are `blocks`, as the reactor does.
    fn resize(&mut self, blocks: u32) {
        let before = self.resident.clone();
        while self.store.blocks() < blocks && self.store.keep_block(&self.counters) {}
        while self.store.take_retired(&self.counters).is_some() {}
        if self.store.blocks() > blocks {
            self.store.shrink_to(blocks, &self.counters);
        }
        while self.store.blocks() < blocks {
            let block = self.store.block_to_add().unwrap();
            self.store.add_block(block, &self.counters);
        }
        assert_eq!(self.store.blocks(), blocks);
        self.sync();
        let gone = (before.len() - self.resident.len()) as u64;
        assert!(gone == 0 || blocks < BLOCKS_MAX, "growing costs nothing");
        let mapped = u64::from(GRANULES_PER_BLOCK) * 4096;
        let out = self.counters.retiring_bytes.get();
        assert_eq!(self.counters.arena_bytes.get(), u64::from(blocks) * mapped + out);
        // What is neither pinned nor being filled is no reason to stay.
        assert!(out == 0 || !self.held.is_empty() || !self.filling.is_empty() || self.store.has_retired());
        assert!(self.store.retiring_blocks() == 0 || !self.held.is_empty() || !self.filling.is_empty());
    }

    fn publish(&mut self, keep: bool) {
        let Some((room, k, len)) = self.filling.pop() else { return };
        let slot = room.slot;
        let value = Value::new(key(k), room.extents, len, 0, 0);
        let pins = self.store.publish(slot, hash(k), value, 1, keep, &self.counters);
        self.held.extend(pins.into_iter().map(|pin| (pin, k, len)));
        self.resident.remove(&k);
        // What is published into a block that is on its way out does not stay.
        if keep && self.store.lookup(hash(k), key(k).borrow()) == Some(slot) {
            self.resident.insert(k, (slot, len));
        } else {
            assert!(!keep || self.store.retiring_blocks() > 0, "a published value is gone");
        }
    }

    fn check(&self) {
        self.store.validate();
        for (pin, k, len) in &self.held {
            let value = self.table.entry(pin);
            assert!(value.is(key(*k).borrow()) && value.len == *len, "a lease changed");
        }
        let bytes: u64 = self.resident.values().map(|(_, len)| len).sum();
        assert_eq!(self.counters.entries.get(), self.resident.len() as u64);
        assert_eq!(self.counters.value_bytes.get(), bytes);
        let usages = [0, 1].map(|number| self.freshness.usages.of(Namespace(number)));
        assert_eq!(usages.iter().map(|usage| usage.entries.get()).sum::<u64>(), self.resident.len() as u64);
        let granules: u64 = usages.iter().map(|usage| usage.granules.get()).sum();
        assert_eq!(granules * 4096, self.counters.used_bytes.get());
    }
}

fn step() -> impl Strategy<Value = (u8, u8, u64)> {
    (0u8..9, 0u8..10, prop_oneof![Just(0u64), 1u64..9_000, 1u64..250_000])
}

proptest! {
    #[test]
    fn slots_extents_and_policy_stay_in_step(
        clock in any::<bool>(),
        steps in proptest::collection::vec(step(), 0..250),
    ) {
        let mut bed = Bed::new(if clock { PolicyKind::Clock } else { PolicyKind::S3Fifo });
        for (kind, k, len) in steps {
            match kind {
                0 | 1 => bed.reserve(k, len),
                2 => bed.publish(true),
                3 => bed.publish(k % 2 == 0),
                4 => if let Some((room, ..)) = bed.filling.pop() { bed.store.cancel(room, &bed.counters) },
                5 => if let Some(pin) = bed.table.acquire(hash(k), |v| v.is(key(k).borrow())) {
                    let len = bed.table.entry(&pin).len;
                    prop_assert_eq!(bed.resident.get(&k).map(|r| r.1), Some(len));
                    bed.held.push((pin, k, len));
                },
                6 => if !bed.held.is_empty() {
                    let (pin, ..) = bed.held.swap_remove(len as usize % bed.held.len());
                    bed.table.release(pin);
                    bed.store.reclaim(&bed.counters);
                },
                8 => bed.resize(1 + u32::from(k) % BLOCKS_MAX),
                _ => {
                    let scope = match k {
                        0..=5 => Scope::Key(hash(k), key(k)),
                        6 => Scope::Prefix(Namespace(0).key(&[4]).to_owned()),
                        7 => Scope::Namespace(Namespace(1)),
                        _ => Scope::All,
                    };
                    let covered = bed.resident.keys().filter(|&&k| scope.covers(key(k).borrow())).count();
                    prop_assert_eq!(bed.store.invalidate(&scope, &bed.counters), covered as u64);
                    bed.resident.retain(|&k, _| !scope.covers(key(k).borrow()));
                }
            }
            bed.check();
        }
        for (pin, ..) in std::mem::take(&mut bed.held) {
            bed.table.release(pin);
        }
        for (room, ..) in std::mem::take(&mut bed.filling) {
            bed.store.cancel(room, &bed.counters);
        }
        bed.store.invalidate(&Scope::All, &bed.counters);
        bed.store.reclaim(&bed.counters);
        prop_assert_eq!((bed.counters.used_bytes.get(), bed.counters.condemned.get()), (0, 0));
        prop_assert_eq!(bed.store.retiring_blocks(), 0, "a block whose last pin went stays");
        bed.resident.clear();
        bed.check();
    }
}
