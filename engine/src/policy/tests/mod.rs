//! What every policy owes its caller, and what each one owes its paper.

mod fake;
mod ratios;
mod reference;

use super::*;
use fake::Fake;
use proptest::prelude::*;
use reference::{ReferenceClock, ReferenceS3Fifo};

const KINDS: [PolicyKind; 2] = [PolicyKind::S3Fifo, PolicyKind::Clock];
const SLOTS: u32 = 12;

/// One thing that a shard or a reader does.
#[derive(Clone, Copy, Debug)]
enum Step {
    Insert { slot: u32, granules: u32, key: u64 },
    Remove(u32),
    Hit(u32),
    Pin(u32),
    Unpin(u32),
    Evict,
}

fn step() -> impl Strategy<Value = Step> {
    let slot = 0..SLOTS;
    prop_oneof![
        // Few keys, so that ghosts are met; sizes of which one may be most of the cache.
        5 => (slot.clone(), 1u32..20, 0u64..24).prop_map(|(slot, granules, key)| Step::Insert { slot, granules, key }),
        1 => slot.clone().prop_map(Step::Remove),
        6 => slot.clone().prop_map(Step::Hit),
        1 => slot.clone().prop_map(Step::Pin),
        1 => slot.prop_map(Step::Unpin),
        3 => Just(Step::Evict),
    ]
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    proptest::collection::vec(step(), 0..400)
}

fn shape() -> impl Strategy<Value = S3FifoShape> {
    (0u8..=100, 1u8..=HITS_MAX, 0u32..=300).prop_map(|(small_percent, promote_hits, ghost_percent)| {
        S3FifoShape { small_percent, promote_hits, ghost_percent }
    })
}

/// Does the steps with a policy and its reference, each with a table of its own, and compares the victims.
fn compare(policy: &mut dyn Policy, reference: &mut dyn Policy, steps: Vec<Step>) -> Result<(), TestCaseError> {
    let mut table = Fake::new(SLOTS);
    let mut twin = table.clone();
    let mut present = [None; SLOTS as usize];
    for step in steps {
        match step {
            Step::Insert { slot, granules, key } if present[slot as usize].is_none() => {
                table.published(slot);
                policy.inserted(slot, granules, key);
                twin.published(slot);
                reference.inserted(slot, granules, key);
                present[slot as usize] = Some(granules);
            }
            Step::Insert { .. } => {}
            // Also of slots that are not there: that is allowed.
            Step::Remove(slot) => {
                policy.removed(slot);
                reference.removed(slot);
                present[slot as usize] = None;
            }
            Step::Hit(slot) => [&mut table, &mut twin].into_iter().for_each(|table| table.hit(slot)),
            Step::Pin(slot) => [&mut table, &mut twin].into_iter().for_each(|table| table.pin(slot)),
            Step::Unpin(slot) => [&mut table, &mut twin].into_iter().for_each(|table| table.unpin(slot)),
            Step::Evict => {
                let victim = policy.evict(&mut table);
                prop_assert_eq!(victim, reference.evict(&mut twin));
                match victim {
                    Some(slot) => {
                        prop_assert!(!table.is_pinned(slot));
                        prop_assert!(present[slot as usize].take().is_some(), "{} was not there", slot);
                    }
                    None => {
                        prop_assert!((0..SLOTS).all(|s| present[s as usize].is_none() || table.is_pinned(s)));
                    }
                }
            }
        }
        policy.validate();
        prop_assert_eq!(policy.len(), present.iter().flatten().count());
        prop_assert_eq!(policy.granules(), present.iter().flatten().map(|&g| u64::from(g)).sum::<u64>());
    }
    // What is left must go in the same order too.
    (0..SLOTS).for_each(|slot| [&mut table, &mut twin].into_iter().for_each(|table| table.unpin(slot)));
    for _ in 0..=policy.len() {
        prop_assert_eq!(policy.evict(&mut table), reference.evict(&mut twin));
        policy.validate();
    }
    prop_assert!(policy.is_empty());
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn clock_evicts_what_the_textbook_evicts(steps in steps()) {
        compare(&mut Clock::new(SLOTS), &mut ReferenceClock::default(), steps)?;
    }

    #[test]
    fn s3fifo_evicts_what_the_paper_evicts(steps in steps(), shape in shape(), capacity in 1u64..120) {
        let mut policy = S3Fifo::new(SLOTS, capacity, shape);
        compare(&mut policy, &mut ReferenceS3Fifo::new(SLOTS, capacity, shape), steps)?;
    }
}

#[test]
fn all_pinned_is_found_out_in_linear_time() {
    const SLOTS: u32 = 100_000;
    for kind in KINDS {
        // Pinned and unused; pinned and used; and half of them in `main` already.
        for hits in 0..=HITS_MAX {
            let mut policy = build(kind, SLOTS, u64::from(SLOTS));
            let mut table = Fake::new(SLOTS);
            for slot in 0..SLOTS {
                policy.inserted(slot, 1, slot.into());
                table.pin(slot);
                (0..hits).for_each(|_| table.hit(slot));
            }
            for call in 0..3 {
                (table.looks, table.tries) = (0, 0);
                assert_eq!(policy.evict(&mut table), None);
                let slots = SLOTS as usize;
                assert!(table.looks <= 5 * slots, "{kind}, {hits} hits, call {call}: {} looks", table.looks);
                assert!(table.tries <= 3 * slots, "{kind}, {hits} hits, call {call}: {} tries", table.tries);
            }
            assert_eq!(policy.len(), SLOTS as usize);
            policy.validate();
            table.unpin(77);
            assert_eq!(policy.evict(&mut table), Some(77), "{kind}");
        }
    }
}

/// A table whose readers hit every slot faster than anybody can look.
struct Storm {
    looks: usize,
    pinned: Option<u32>,
}

impl Slots for Storm {
    fn take_hits(&mut self, _slot: u32) -> u8 {
        self.looks += 1;
        HITS_MAX
    }

    fn try_evict(&mut self, slot: u32) -> bool {
        self.pinned != Some(slot)
    }
}

#[test]
fn a_storm_of_hits_is_not_taken_for_pins() {
    for kind in KINDS {
        let mut policy = build(kind, 100, 100);
        let mut storm = Storm { looks: 0, pinned: Some(3) };
        for slot in 0..100 {
            policy.inserted(slot, 1, slot.into());
        }
        for left in (1..100).rev() {
            storm.looks = 0;
            assert!(policy.evict(&mut storm).is_some_and(|slot| slot != 3), "{kind}");
            assert_eq!(policy.len(), left);
            assert!(storm.looks <= 5 * (left + 1), "{kind}: {} looks", storm.looks);
            policy.validate();
        }
        assert_eq!(policy.evict(&mut storm), None, "{kind}: only the pinned one is left");
    }
}

#[test]
fn recency_is_not_inverted_by_the_scan() {
    let mut policy = Clock::new(8);
    let mut table = Fake::new(8);
    for slot in 0..8 {
        policy.inserted(slot, 1, slot.into());
        table.hit(slot);
    }
    // All were hit: the hand comes round once, and the one that came first is the first to go.
    assert_eq!(policy.evict(&mut table), Some(0));
    table.hit(2);
    table.hit(1);
    let order: Vec<_> = (0..7).filter_map(|_| policy.evict(&mut table)).collect();
    assert_eq!(order, [3, 4, 5, 6, 7, 1, 2]);
}

/// Puts `hot` values to use, then streams `scan` values through, of which each is used once; every hot one is
/// hit `rounds` times during the scan. Returns how many hot ones are left.
fn hot_left_after_scan(kind: PolicyKind, slots: u32, capacity: u64, hot: u64, rounds: u64) -> usize {
    let mut cache = ratios::Simulated::new(build(kind, slots, capacity), slots, capacity);
    for _ in 0..3 {
        for key in 0..hot {
            cache.access(key, 1);
        }
    }
    let resident_max = capacity.min(slots.into());
    let scan = 10 * resident_max;
    for scanned in 0..scan {
        cache.access(1_000_000 + scanned, 1);
        if rounds > 0 && scanned % (scan / rounds) == 0 {
            for key in 0..hot {
                // Only hits: one that is gone does not come back.
                if cache.contains(key) {
                    cache.access(key, 1);
                }
            }
        }
    }
    (0..hot).filter(|&key| cache.contains(key)).count()
}

#[test]
fn a_hot_set_survives_a_scan_of_ten_times_the_cache_under_s3fifo() {
    // Not hit at all during the scan: it stays since the scan only displaces itself in `small`.
    assert_eq!(hot_left_after_scan(PolicyKind::S3Fifo, 1000, 1000, 500, 0), 500);
    // The same if slots run out long before memory does.
    assert_eq!(hot_left_after_scan(PolicyKind::S3Fifo, 1000, 1_000_000, 500, 0), 500);
    // CLOCK is not scan-resistant: what is not hit while the scan fills the cache goes.
    assert_eq!(hot_left_after_scan(PolicyKind::Clock, 1000, 1000, 500, 0), 0);
    // Hit at least once per pass of the hand, it stays there too.
    assert_eq!(hot_left_after_scan(PolicyKind::Clock, 1000, 1000, 500, 40), 500);
}

#[test]
fn a_batch_as_large_as_the_cache_stays_while_there_is_room() {
    for kind in KINDS {
        let mut cache = ratios::Simulated::new(build(kind, 64, 64), 64, 64);
        (0..64).for_each(|key| assert!(!cache.access(key, 1)));
        assert_eq!(cache.evictions, 0);
        assert!((0..64).all(|key| cache.access(key, 1)), "{kind}: a first-time value went before it had to");
    }
}

#[test]
fn a_ghost_brings_its_key_back_into_main() {
    let mut policy = S3Fifo::new(4, 4, S3FifoShape::default());
    let mut table = Fake::new(4);
    for key in 0..1000 {
        policy.inserted(0, 1, key);
        assert_eq!(policy.evict(&mut table), Some(0));
        policy.validate();
    }
    // The last evicted is remembered, the first is not.
    policy.inserted(1, 1, 999);
    policy.inserted(2, 1, 0);
    policy.inserted(3, 1, 5000);
    // Main has 1; small has 2 and 3, which is more than its share: they go first.
    assert_eq!([policy.evict(&mut table), policy.evict(&mut table)], [Some(2), Some(3)]);
    assert_eq!(policy.evict(&mut table), Some(1));
}

#[test]
fn extreme_sizes_do_not_overflow() {
    for kind in KINDS {
        let mut policy = build(kind, 3, u64::MAX);
        let mut table = Fake::new(3);
        for slot in 0..3 {
            policy.inserted(slot, if slot == 1 { 0 } else { u32::MAX }, slot.into());
        }
        policy.validate();
        assert_eq!(policy.granules(), 2 * u64::from(u32::MAX));
        let order: Vec<_> = (0..3).filter_map(|_| policy.evict(&mut table)).collect();
        assert_eq!((order, policy.granules()), (vec![0, 1, 2], 0));
        assert_eq!(policy.evict(&mut table), None);
    }
}

#[test]
#[should_panic(expected = "in a queue already")]
fn a_slot_cannot_be_inserted_twice() {
    let mut policy = Clock::new(2);
    policy.inserted(1, 1, 1);
    policy.inserted(1, 1, 1);
}

#[test]
fn names_are_read_and_written_alike() {
    for kind in KINDS {
        let text = kind.to_string();
        assert_eq!(text.parse(), Ok(kind));
        assert_eq!(build(kind, 1, 1).name(), text);
        let json = serde_json::to_string(&kind).unwrap();
        assert_eq!(json, format!("\"{text}\""));
        assert_eq!(serde_json::from_str::<PolicyKind>(&json).unwrap(), kind);
    }
    assert!("LRU".parse::<PolicyKind>().unwrap_err().contains("`LRU`"));
}
