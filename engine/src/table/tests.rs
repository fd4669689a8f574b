//! Single-threaded behaviour of the table, and one run of real threads; interleavings are loom's work.

#![allow(clippy::unwrap_used)]

use super::*;
use proptest::prelude::*;
use std::collections::HashMap;

fn table(slots: u32) -> (Arc<Table<u64>>, Writer<u64>) {
    Table::new(slots, Box::new(|| {}))
}

fn publish(writer: &mut Writer<u64>, key: u64) -> u32 {
    let slot = writer.reserve(key).unwrap();
    assert!(writer.publish(slot, key, key, 0, None).is_empty());
    slot
}

#[test]
fn a_condemned_slot_keeps_its_entry_until_the_last_release() {
    let (table, mut writer) = table(4);
    let slot = publish(&mut writer, 7);
    let first = table.acquire(7, |&e| e == 7).unwrap();
    let second = table.acquire(7, |&e| e == 7).unwrap();
    assert!(matches!(writer.evict(slot), Evict::Pinned));
    assert!(matches!(writer.condemn(slot, true), Evict::Pinned));
    assert!(table.acquire(7, |_| true).is_none(), "no new pins");
    assert_eq!(*table.entry(&first), 7);
    table.release(first);
    assert!(writer.reclaim().is_none());
    assert_eq!(*table.entry(&second), 7);
    table.release(second);
    assert_eq!(writer.reclaim(), Some((slot, 7)));
    assert_eq!(writer.condemned_slots(), 0);
    writer.validate();
}

#[test]
fn a_successor_is_found_as_soon_as_it_is_published() {
    let (table, mut writer) = table(4);
    let old = publish(&mut writer, 7);
    let held = table.acquire(7, |_| true).unwrap();
    let new = writer.reserve(7).unwrap();
    let pins = writer.publish(new, 7, 70, 1, Some(old));
    assert!(matches!(writer.condemn(old, false), Evict::Pinned));
    let found = table.acquire(7, |_| true).unwrap();
    assert_eq!((*table.entry(&found), *table.entry(&held)), (70, 7));
    table.release(found);
    table.release(held);
    for pin in pins {
        table.release(pin);
    }
    assert_eq!(writer.reclaim(), Some((old, 7)));
    assert!(matches!(writer.evict(new), Evict::Freed(70)));
    writer.validate();
}

#[test]
fn hits_saturate_and_are_taken_once() {
    let (table, mut writer) = table(1);
    let slot = publish(&mut writer, 1);
    for _ in 0..10 {
        let pin = table.acquire(1, |_| true).unwrap();
        table.release(pin);
    }
    assert_eq!((writer.take_hits(slot), writer.take_hits(slot)), (3, 0));
}

#[test]
fn reuse_changes_the_identity() {
    let (table, mut writer) = table(1);
    publish(&mut writer, 1);
    let pin = table.acquire(1, |_| true).unwrap();
    let first = table.identity(&pin);
    table.release(pin);
    assert!(matches!(writer.evict(first.0), Evict::Freed(1)));
    publish(&mut writer, 1);
    let pin = table.acquire(1, |_| true).unwrap();
    assert_ne!(table.identity(&pin), first);
    table.release(pin);
}

#[test]
fn only_a_starved_shard_is_woken() {
    use std::sync::atomic::AtomicUsize;
    let woken = std::sync::Arc::new(AtomicUsize::new(0));
    let seen = woken.clone();
    let (table, mut writer) = Table::<u64>::new(
        1,
        Box::new(move || {
            seen.fetch_add(1, Ordering::Relaxed);
        }),
    );
    publish(&mut writer, 1);
    let once = |writer: &Writer<u64>, wake_on| {
        writer.set_wake_on(wake_on);
        let pin = table.acquire(1, |_| true).unwrap();
        table.release(pin);
        woken.load(Ordering::Relaxed)
    };
    assert_eq!((once(&writer, WakeOn::Nothing), once(&writer, WakeOn::Anything)), (0, 1));
    assert_eq!((once(&writer, WakeOn::Nothing), once(&writer, WakeOn::Condemned)), (1, 1));
    // The last release of a condemned slot is what the middle one waits for.
    let pin = table.acquire(1, |_| true).unwrap();
    assert!(matches!(writer.condemn(0, true), Evict::Pinned));
    table.release(pin);
    assert_eq!(woken.load(Ordering::Relaxed), 2);
    assert!(writer.reclaim().is_some());
}

#[derive(Clone, Debug)]
enum Step {
    Publish(u64),
    Evict(u64),
    Condemn(u64),
    Acquire(u64),
    Release(usize),
    Reclaim,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        (0u64..8).prop_map(Step::Publish),
        (0u64..8).prop_map(Step::Evict),
        (0u64..8).prop_map(Step::Condemn),
        (0u64..8).prop_map(Step::Acquire),
        any::<usize>().prop_map(Step::Release),
        Just(Step::Reclaim),
    ]
}

proptest! {
    /// The table against a map of published keys and a list of held pins. All keys share few hashes.
    #[test]
    fn behaves_like_a_map_with_pins(steps in proptest::collection::vec(step(), 0..300)) {
        let (table, mut writer) = table(6);
        let mut ready: HashMap<u64, u32> = HashMap::new();
        let mut held: Vec<(Pin, u64)> = Vec::new();
        let hash = |key: u64| key % 3;
        for step in steps {
            match step {
                Step::Publish(key) => {
                    let old = ready.get(&key).copied();
                    prop_assert_eq!(writer.lookup(hash(key), |&e| e == key), old);
                    if let Some(slot) = writer.reserve(key) {
                        let _ = writer.publish(slot, hash(key), key, 0, old);
                        if let Some(old) = old {
                            let pinned = held.iter().any(|(pin, _)| pin.slot == old);
                            prop_assert_eq!(matches!(writer.condemn(old, false), Evict::Pinned), pinned);
                        }
                        ready.insert(key, slot);
                    }
                }
                Step::Evict(key) => if let Some(&slot) = ready.get(&key) {
                    let pinned = held.iter().any(|(pin, _)| pin.slot == slot);
                    match writer.evict(slot) {
                        Evict::Freed(entry) => { prop_assert_eq!((entry, pinned), (key, false)); ready.remove(&key); }
                        Evict::Pinned => prop_assert!(pinned),
                    }
                },
                Step::Condemn(key) => if let Some(slot) = ready.remove(&key) {
                    let pinned = held.iter().any(|(pin, _)| pin.slot == slot);
                    prop_assert_eq!(matches!(writer.condemn(slot, true), Evict::Pinned), pinned);
                },
                Step::Acquire(key) => {
                    let pin = table.acquire(hash(key), |&e| e == key);
                    prop_assert_eq!(pin.is_some(), ready.contains_key(&key));
                    held.extend(pin.map(|pin| (pin, key)));
                }
                Step::Release(which) => if !held.is_empty() {
                    let (pin, key) = held.swap_remove(which % held.len());
                    prop_assert_eq!(*table.entry(&pin), key);
                    table.release(pin);
                },
                Step::Reclaim => while writer.reclaim().is_some() {},
            }
            writer.validate();
            for (pin, key) in &held {
                prop_assert_eq!(table.entry(pin), key);
            }
        }
        for (pin, _) in held {
            table.release(pin);
        }
        while writer.reclaim().is_some() {}
        prop_assert_eq!(writer.condemned_slots(), 0);
    }
}

/// Real threads: readers must only ever see the entry of the key they asked for, while the writer churns.
#[test]
fn readers_never_see_another_keys_entry() {
    use std::sync::atomic::AtomicBool;
    let (table, mut writer) = Table::<[u64; 4]>::new(8, Box::new(|| {}));
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for reader in 0..2u64 {
            let (table, stop) = (&table, &stop);
            scope.spawn(move || {
                let mut key = reader;
                let mut hits = 0u64;
                while !stop.load(Ordering::Relaxed) || hits == 0 {
                    key = (key + 1) % 16;
                    if let Some(pin) = table.acquire(key % 4, |e| e[0] == key) {
                        assert_eq!(*table.entry(&pin), [key; 4]);
                        table.release(pin);
                        hits += 1;
                    }
                }
            });
        }
        let mut slots: Vec<(u64, u32)> = Vec::new();
        for round in 0..200_000u64 {
            let key = round % 16;
            while writer.reclaim().is_some() {}
            if slots.len() == 4 {
                let (_, slot) = slots.remove(0);
                if matches!(writer.evict(slot), Evict::Pinned) {
                    let _ = writer.condemn(slot, true);
                }
            }
            if let Some(slot) = writer.reserve(key) {
                let _ = writer.publish(slot, key % 4, [key; 4], 0, None);
                slots.push((key, slot));
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
    while writer.reclaim().is_some() {}
    writer.validate();
}
