//! loom models of the slot's life. Run with `scripts/loom`.
//!
//! An entry is a loom cell that the "shard" writes and "readers" read: loom reports any access that is
//! not ordered, which is what a use after reuse would be.

use super::*;
use crate::sync::AtomicBool;
use loom::cell::UnsafeCell as Tracked;
use loom::thread;

/// A value's bytes, as loom sees them: the shard overwrites them when it reuses the extent.
struct Bytes(Arc<Tracked<u64>>);
// SAFETY: loom checks every access to the cell.
unsafe impl Send for Bytes {}
// SAFETY: as above.
unsafe impl Sync for Bytes {}

struct Entry {
    key: u64,
    bytes: Bytes,
}

fn extent() -> Arc<Tracked<u64>> {
    #[allow(clippy::arc_with_non_send_sync)]
    Arc::new(Tracked::new(0))
}

fn fill(extent: &Arc<Tracked<u64>>, value: u64) {
    // SAFETY: loom reports a race if a reader can still look.
    extent.with_mut(|bytes| unsafe { *bytes = value });
}

fn entry(key: u64, extent: &Arc<Tracked<u64>>) -> Entry {
    Entry { key, bytes: Bytes(extent.clone()) }
}

fn read(table: &Table<Entry>, key: u64) -> bool {
    match table.acquire(0, |entry| entry.key == key) {
        None => false,
        Some(pin) => {
            let entry = table.entry(&pin);
            assert_eq!(entry.key, key);
            // SAFETY: loom reports a race if the shard can write meanwhile.
            assert_eq!(entry.bytes.0.with(|bytes| unsafe { *bytes }), key * 100);
            table.release(pin);
            true
        }
    }
}

/// A reader pins while the shard evicts and reuses slot and extent for a second key under the same hash.
#[test]
fn pin_against_evict_and_reuse() {
    loom::model(|| {
        let (table, mut writer) = Table::new(1, Box::new(|| {}));
        let bytes = extent();
        fill(&bytes, 100);
        let slot = writer.reserve(0).unwrap();
        let _ = writer.publish(slot, 0, entry(1, &bytes), 0, None);
        let readers: Vec<_> = [1, 2]
            .map(|key| {
                let table = table.clone();
                thread::spawn(move || read(&table, key))
            })
            .into_iter()
            .collect();
        if let Evict::Freed(_) = writer.evict(slot) {
            fill(&bytes, 200);
            let slot = writer.reserve(0).unwrap();
            let _ = writer.publish(slot, 0, entry(2, &bytes), 0, None);
        }
        for reader in readers {
            reader.join().unwrap();
        }
        writer.validate();
    });
}

/// Publication against lookup: a reader sees nothing or everything.
#[test]
fn publish_against_lookup() {
    loom::model(|| {
        let (table, mut writer) = Table::new(1, Box::new(|| {}));
        let bytes = extent();
        let reader = {
            let table = table.clone();
            thread::spawn(move || read(&table, 1))
        };
        fill(&bytes, 100);
        let slot = writer.reserve(0).unwrap();
        for pin in writer.publish(slot, 0, entry(1, &bytes), 1, None) {
            table.release(pin);
        }
        reader.join().unwrap();
        assert!(read(&table, 1));
    });
}

/// Two leases end while the shard invalidates: the slot comes back exactly once, and only after both.
#[test]
fn condemn_against_last_release() {
    loom::model(|| {
        let (table, mut writer) = Table::new(1, Box::new(|| {}));
        let bytes = extent();
        fill(&bytes, 100);
        let slot = writer.reserve(0).unwrap();
        let pins = writer.publish(slot, 0, entry(1, &bytes), 2, None);
        let readers: Vec<_> = pins
            .into_iter()
            .map(|pin| {
                let table = table.clone();
                thread::spawn(move || {
                    // SAFETY: loom reports a race if the shard can write meanwhile.
                    assert_eq!(table.entry(&pin).bytes.0.with(|bytes| unsafe { *bytes }), 100);
                    table.release(pin);
                })
            })
            .collect();
        let mut freed = matches!(writer.condemn(slot, true), Evict::Freed(_));
        assert!(table.acquire(0, |_| true).is_none(), "condemned slots are not found");
        if writer.reclaim().is_some() {
            assert!(!freed);
            freed = true;
        }
        if freed {
            fill(&bytes, 300);
        }
        for reader in readers {
            reader.join().unwrap();
        }
        assert!(freed != writer.reclaim().is_some(), "returned once");
        fill(&bytes, 300);
        writer.validate();
    });
}

/// The shard starves while the only pin goes: it finds the slot evictable, or it is woken.
#[test]
fn starvation_loses_no_wake_up() {
    loom::model(|| {
        let woken = Arc::new(AtomicBool::new(false));
        let seen = woken.clone();
        let (table, mut writer) = Table::new(1, Box::new(move || seen.store(true, Ordering::Relaxed)));
        let bytes = extent();
        fill(&bytes, 100);
        let slot = writer.reserve(0).unwrap();
        let mut pins = writer.publish(slot, 0, entry(1, &bytes), 1, None);
        let reader = {
            let (table, pin) = (table.clone(), pins.remove(0));
            thread::spawn(move || table.release(pin))
        };
        writer.set_wake_on(WakeOn::Anything);
        let found = matches!(writer.evict(slot), Evict::Freed(_));
        reader.join().unwrap();
        assert!(found || woken.load(Ordering::Relaxed), "asleep beside an evictable slot");
    });
}

/// A shard that waits for a condemned slot finds it returned, or is woken by its last release.
#[test]
fn the_last_release_of_a_condemned_slot_wakes() {
    loom::model(|| {
        let woken = Arc::new(AtomicBool::new(false));
        let seen = woken.clone();
        let (table, mut writer) = Table::new(1, Box::new(move || seen.store(true, Ordering::Relaxed)));
        let bytes = extent();
        fill(&bytes, 100);
        let slot = writer.reserve(0).unwrap();
        let mut pins = writer.publish(slot, 0, entry(1, &bytes), 1, None);
        let reader = {
            let (table, pin) = (table.clone(), pins.remove(0));
            thread::spawn(move || table.release(pin))
        };
        let freed = matches!(writer.condemn(slot, true), Evict::Freed(_));
        writer.set_wake_on(WakeOn::Condemned);
        let found = freed || writer.reclaim().is_some();
        reader.join().unwrap();
        assert!(found || woken.load(Ordering::Relaxed), "asleep beside a slot that came back");
    });
}

/// A replacement: a reader sees the old value or the new one, never neither.
#[test]
fn replacement_is_never_a_gap() {
    loom::model(|| {
        let (table, mut writer) = Table::new(2, Box::new(|| {}));
        let (old_bytes, new_bytes) = (extent(), extent());
        fill(&old_bytes, 100);
        let old = writer.reserve(0).unwrap();
        let _ = writer.publish(old, 0, entry(1, &old_bytes), 0, None);
        let reader = {
            let table = table.clone();
            thread::spawn(move || read(&table, 1))
        };
        fill(&new_bytes, 100);
        let new = writer.reserve(0).unwrap();
        let _ = writer.publish(new, 0, entry(1, &new_bytes), 0, Some(old));
        let _ = writer.condemn(old, false);
        // The reader may have loaded the old entry and come too late to pin it: that is a miss to the
        // reader, which the shard answers from its own lookup. It never reads wrong bytes.
        let _ = reader.join().unwrap();
        assert!(read(&table, 1));
        writer.validate();
    });
}
