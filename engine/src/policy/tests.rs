use super::*;
use proptest::prelude::*;
use std::collections::{HashMap, HashSet, VecDeque};

/// A table of the simplest kind.
#[derive(Default)]
struct Fake {
    hits: HashMap<u32, u8>,
    pinned: HashSet<u32>,
    asked: usize,
}

impl Slots for Fake {
    fn take_hits(&mut self, slot: u32) -> u8 {
        self.asked += 1;
        self.hits.remove(&slot).unwrap_or(0)
    }

    fn try_evict(&mut self, slot: u32) -> bool {
        !self.pinned.contains(&slot)
    }
}

impl Fake {
    fn hit(&mut self, slot: u32) {
        let hits = self.hits.entry(slot).or_default();
        *hits = (*hits + 1).min(3);
    }
}

const KINDS: [PolicyKind; 2] = [PolicyKind::S3Fifo, PolicyKind::Clock];

/// CLOCK as the textbook has it.
#[derive(Default)]
struct TextbookClock(VecDeque<u32>);

impl TextbookClock {
    fn evict(&mut self, fake: &mut Fake) -> Option<u32> {
        for _ in 0..2 * self.0.len() {
            let slot = self.0.pop_front()?;
            if fake.hits.remove(&slot).is_none_or(|hits| hits == 0) && !fake.pinned.contains(&slot) {
                return Some(slot);
            }
            self.0.push_back(slot);
        }
        None
    }
}

/// S3-FIFO as the paper's pseudocode has it (unit sizes, no pins), with the counter in the entry.
struct TextbookS3 {
    small: VecDeque<u32>,
    main: VecDeque<u32>,
    ghost: VecDeque<u64>,
    frequency: HashMap<u32, u8>,
    hash: HashMap<u32, u64>,
    share: usize,
    ghosts_max: usize,
}

impl TextbookS3 {
    fn insert(&mut self, slot: u32, hash: u64) {
        self.frequency.insert(slot, 0);
        self.hash.insert(slot, hash);
        if let Some(at) = self.ghost.iter().position(|&ghost| ghost == hash) {
            self.ghost.remove(at);
            self.main.push_back(slot);
        } else {
            self.small.push_back(slot);
        }
    }

    fn evict(&mut self) -> Option<u32> {
        loop {
            if self.small.len() > self.share || self.main.is_empty() {
                let slot = self.small.pop_front()?;
                if self.frequency[&slot] > 1 {
                    self.frequency.insert(slot, 0);
                    self.main.push_back(slot);
                } else {
                    self.ghost.push_back(self.hash[&slot]);
                    if self.ghost.len() > self.ghosts_max {
                        self.ghost.pop_front();
                    }
                    return Some(slot);
                }
            } else {
                let slot = self.main.pop_front()?;
                let frequency = self.frequency[&slot];
                if frequency == 0 {
                    return Some(slot);
                }
                self.frequency.insert(slot, frequency - 1);
                self.main.push_back(slot);
            }
        }
    }
}

proptest! {
    #[test]
    fn clock_evicts_what_the_textbook_evicts(steps in proptest::collection::vec((0u8..5, 0u32..16), 0..400)) {
        let mut policy = Clock::new(16);
        let mut textbook = TextbookClock::default();
        let (mut fake, mut twin) = (Fake::default(), Fake::default());
        for (kind, slot) in steps {
            let present = textbook.0.contains(&slot);
            match kind {
                0 if !present => { policy.inserted(slot, 1, 0); textbook.0.push_back(slot); }
                1 if present => { policy.removed(slot); textbook.0.retain(|&s| s != slot); }
                2 => { fake.hit(slot); twin.hit(slot); }
                3 => { if !fake.pinned.remove(&slot) { fake.pinned.insert(slot); } twin.pinned = fake.pinned.clone(); }
                4 => prop_assert_eq!(policy.evict(&mut fake), textbook.evict(&mut twin)),
                _ => {}
            }
            policy.validate();
            prop_assert_eq!(policy.len(), textbook.0.len());
        }
    }

    /// Without removals in between: those leave ghosts' places to chance in neither, but the paper has none.
    #[test]
    fn s3fifo_evicts_what_the_paper_evicts(steps in proptest::collection::vec((0u8..3, 0u32..20, 0u64..40), 0..500)) {
        const SLOTS: u32 = 20;
        let mut policy = S3Fifo::new(SLOTS, u64::from(SLOTS));
        let mut paper = TextbookS3 {
            small: VecDeque::new(), main: VecDeque::new(), ghost: VecDeque::new(), frequency: HashMap::new(),
            hash: HashMap::new(), share: SLOTS as usize / 10, ghosts_max: usize::MAX,
        };
        let mut fake = Fake::default();
        let mut present: HashMap<u32, u64> = HashMap::new();
        let mut evictions = 0;
        for (kind, slot, key) in steps {
            match kind {
                0 if !present.contains_key(&slot) && !present.values().any(|&k| k == key) => {
                    fake.hits.remove(&slot);
                    policy.inserted(slot, 1, key);
                    paper.insert(slot, key);
                    present.insert(slot, key);
                }
                1 if present.contains_key(&slot) => {
                    fake.hit(slot);
                    let frequency = paper.frequency.get_mut(&slot).unwrap();
                    *frequency = (*frequency + 1).min(3);
                }
                // Few enough that no ghost is forgotten: forgetting is checked on its own.
                2 if evictions < SLOTS => {
                    let victim = policy.evict(&mut fake);
                    prop_assert_eq!(victim, paper.evict());
                    if let Some(victim) = victim { present.remove(&victim); evictions += 1; }
                }
                _ => {}
            }
            policy.validate();
            prop_assert_eq!(policy.len(), present.len());
        }
    }

    #[test]
    fn any_sequence_keeps_the_lists_whole(
        kind in 0usize..2,
        steps in proptest::collection::vec((0u8..5, 0u32..12, 1u32..50), 0..400),
    ) {
        let mut policy = build(KINDS[kind], 12, 100);
        let mut fake = Fake::default();
        let mut present: HashSet<u32> = HashSet::new();
        for (step, slot, granules) in steps {
            match step {
                0 => if present.insert(slot) { policy.inserted(slot, granules, u64::from(slot % 5)); },
                1 => { policy.removed(slot); present.remove(&slot); }
                2 => fake.hit(slot),
                3 => { if !fake.pinned.remove(&slot) { fake.pinned.insert(slot); } }
                _ => match policy.evict(&mut fake) {
                    Some(victim) => prop_assert!(present.remove(&victim) && !fake.pinned.contains(&victim)),
                    None => prop_assert!(present.is_subset(&fake.pinned), "{present:?} {:?}", fake.pinned),
                },
            }
            policy.validate();
            prop_assert_eq!(policy.len(), present.len());
        }
    }
}

#[test]
fn all_pinned_is_found_out_in_bounded_time() {
    for kind in KINDS {
        const SLOTS: u32 = 100_000;
        let mut policy = build(kind, SLOTS, u64::from(SLOTS));
        let mut fake = Fake::default();
        for slot in 0..SLOTS {
            policy.inserted(slot, 1, slot.into());
            fake.hit(slot);
            fake.hit(slot);
            fake.pinned.insert(slot);
        }
        assert_eq!(policy.evict(&mut fake), None);
        assert!(fake.asked <= 10 * SLOTS as usize, "{} looks", fake.asked);
        fake.pinned.remove(&77);
        assert_eq!(policy.evict(&mut fake), Some(77), "{kind}");
    }
}

#[test]
fn a_hot_set_survives_a_scan_under_s3fifo() {
    let mut policy = S3Fifo::new(1000, 100);
    let mut fake = Fake::default();
    for slot in 0..50 {
        policy.inserted(slot, 1, slot.into());
        fake.hit(slot);
        fake.hit(slot);
    }
    let mut free: Vec<u32> = (50..1000).collect();
    for scanned in 0..1000u64 {
        while policy.len() >= 100 {
            free.push(policy.evict(&mut fake).unwrap());
        }
        let slot = free.remove(0);
        fake.hits.remove(&slot);
        policy.inserted(slot, 1, 1_000_000 + scanned);
        // The hot set is used now and then.
        fake.hit((scanned % 50) as u32);
    }
    assert!((0..50).all(|slot| !free.contains(&slot)), "a scanned-once value displaced a hot one");
}

#[test]
fn ghosts_are_bounded_and_bring_a_key_back_into_main() {
    let mut policy = S3Fifo::new(4, 4);
    let mut fake = Fake::default();
    for key in 0..1000 {
        policy.inserted(0, 1, key);
        assert_eq!(policy.evict(&mut fake), Some(0));
        policy.validate();
    }
    // The last evicted is remembered, the first is not.
    policy.inserted(1, 1, 999);
    policy.inserted(2, 1, 0);
    policy.inserted(3, 1, 5000);
    // Main has 1; small has 2 and 3, which is more than its share: they go first.
    assert_eq!([policy.evict(&mut fake), policy.evict(&mut fake)], [Some(2), Some(3)]);
    assert_eq!(policy.evict(&mut fake), Some(1));
}
