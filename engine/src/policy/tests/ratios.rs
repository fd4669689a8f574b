//! Hit ratios: a cache around a policy, exact LRU and OPT as bounds, a seeded Zipf stream and recorded traces.
//!
//! Tables: `cargo test -p hotslice --release --lib policy -- --ignored --nocapture`, for a trace with
//! `HOTSLICE_TRACE=FILE` (JSON lines with `hash_ids`, the ids of a request's prefix blocks in order).

use super::*;
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// A cache of one shard without bytes.
pub(super) struct Simulated {
    policy: Box<dyn Policy>,
    table: Fake,
    slots: HashMap<u64, u32>,
    keys: Vec<u64>,
    free: Vec<u32>,
    capacity_granules: u64,
    pub(super) evictions: u64,
}

impl Simulated {
    pub(super) fn new(policy: Box<dyn Policy>, slots: u32, capacity_granules: u64) -> Self {
        Self {
            policy,
            table: Fake::new(slots),
            slots: HashMap::new(),
            keys: vec![0; slots as usize],
            free: (0..slots).rev().collect(),
            capacity_granules,
            evictions: 0,
        }
    }

    pub(super) fn contains(&self, key: u64) -> bool {
        self.slots.contains_key(&key)
    }

    /// True if it is a hit; else it is taken in.
    pub(super) fn access(&mut self, key: u64, granules: u32) -> bool {
        if let Some(&slot) = self.slots.get(&key) {
            self.table.hit(slot);
            return true;
        }
        while self.free.is_empty() || self.policy.granules() + u64::from(granules) > self.capacity_granules {
            let slot = self.policy.evict(&mut self.table).expect("nothing is pinned");
            self.slots.remove(&self.keys[slot as usize]);
            self.free.push(slot);
            self.evictions += 1;
        }
        let slot = self.free.pop().expect("one was evicted");
        self.table.published(slot);
        self.policy.inserted(slot, granules, hash(key));
        self.keys[slot as usize] = key;
        self.slots.insert(key, slot);
        false
    }
}

/// SplitMix64's finalizer: keys' hashes, and the stream of random numbers.
fn hash(number: u64) -> u64 {
    let mut x = number.wrapping_add(0x9E37_79B9_7F4A_7C15);
    x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

/// `accesses` keys of 0..`keys`, of which the one of rank r comes with a probability like r^-`skew`.
fn zipf(keys: usize, skew: f64, accesses: usize) -> Vec<u64> {
    let mut sum = 0.0;
    let sums: Vec<f64> = (1..=keys)
        .map(|rank| {
            sum += (rank as f64).powf(-skew);
            sum
        })
        .collect();
    let uniform = |i: usize| hash(0x5EED + i as u64) as f64 / 2f64.powi(64) * sum;
    (0..accesses).map(|i| sums.partition_point(|&below| below < uniform(i)) as u64).collect()
}

/// Requests, each a list of keys. What is resident when a request arrives counts as hit; then its keys are
/// presented in turn.
type Requests = Vec<Vec<u64>>;

/// Hits of a policy with `capacity` values.
fn hits_of(policy: Box<dyn Policy>, capacity: u32, requests: &Requests) -> usize {
    let mut cache = Simulated::new(policy, capacity, capacity.into());
    requests
        .iter()
        .map(|request| {
            let hits = request.iter().filter(|&&key| cache.contains(key)).count();
            for &key in request {
                cache.access(key, 1);
            }
            hits
        })
        .sum()
}

/// Hits of exact LRU.
fn hits_of_lru(capacity: u32, requests: &Requests) -> usize {
    let (mut last_use, mut by_time) = (HashMap::new(), BTreeMap::new());
    let (mut now, mut hits) = (0u64, 0);
    for request in requests {
        hits += request.iter().filter(|key| last_use.contains_key(*key)).count();
        for &key in request {
            now += 1;
            if let Some(before) = last_use.insert(key, now) {
                by_time.remove(&before);
            } else if by_time.len() == capacity as usize
                && let Some((_, oldest)) = by_time.pop_first()
            {
                last_use.remove(&oldest);
            }
            by_time.insert(now, key);
        }
    }
    hits
}

/// Hits of Belady's OPT with bypass: what is used furthest in the future goes, be it the newcomer.
fn hits_of_opt(capacity: u32, requests: &Requests) -> usize {
    let mut next_use = vec![Vec::new(); requests.len()];
    let mut later: HashMap<u64, usize> = HashMap::new();
    for (at, request) in requests.iter().enumerate().rev() {
        next_use[at] = request.iter().map(|key| later.get(key).copied().unwrap_or(usize::MAX)).collect();
        later.extend(request.iter().map(|&key| (key, at)));
    }
    let (mut kept, mut order) = (HashMap::new(), BTreeSet::new());
    let mut hits = 0;
    for (request, next) in requests.iter().zip(&next_use) {
        hits += request.iter().filter(|key| kept.contains_key(*key)).count();
        for (&key, &next) in request.iter().zip(next) {
            if let Some(before) = kept.insert(key, next) {
                order.remove(&(before, key));
            }
            order.insert((next, key));
            if order.len() > capacity as usize
                && let Some((_, furthest)) = order.pop_last()
            {
                kept.remove(&furthest);
            }
        }
    }
    hits
}

fn s3fifo(capacity: u32, small_percent: u8, promote_hits: u8, ghost_percent: u32) -> Box<dyn Policy> {
    // So many slots that the ghosts are bounded by granules alone, as they are in practice.
    let slots = 2 * capacity * ghost_percent.div_ceil(100).max(1);
    let shape = S3FifoShape { small_percent, promote_hits, ghost_percent };
    Box::new(S3Fifo::new(slots, capacity.into(), shape))
}

/// A line of a table: its name, and what it hits with a capacity.
type Row = (String, Box<dyn Fn(u32, &Requests) -> usize>);

fn rows() -> Vec<Row> {
    let mut rows: Vec<Row> = vec![
        ("OPT with bypass".to_owned(), Box::new(hits_of_opt)),
        ("LRU, exact".to_owned(), Box::new(hits_of_lru)),
        ("lru (CLOCK)".to_owned(), Box::new(|c, r| hits_of(build(PolicyKind::Clock, c, c.into()), c, r))),
        // As in practice there are more slots than values, and so as many ghosts as the shape allows.
        ("s3fifo as built".to_owned(), Box::new(|c, r| hits_of(build(PolicyKind::S3Fifo, 4 * c, c.into()), c, r))),
    ];
    for small in [10, 25, 50] {
        for promote in [1, 2] {
            for ghost in [0, 90, 200, 400] {
                rows.push((
                    format!("s3fifo small {small} % promote {promote} ghost {ghost} %"),
                    Box::new(move |c, r| hits_of(s3fifo(c, small, promote, ghost), c, r)),
                ));
            }
        }
    }
    rows
}

/// Prints hits as a share of the accesses that are not the first of their key.
fn print_table(requests: &Requests) {
    let accesses: usize = requests.iter().map(Vec::len).sum();
    let distinct = requests.iter().flatten().collect::<BTreeSet<_>>().len();
    let again = accesses - distinct;
    println!("{accesses} accesses to {distinct} keys; hits in % of the {again} re-references");
    const PERMILLE: [usize; 8] = [5, 10, 20, 30, 50, 100, 150, 200];
    print!("{:44}", "capacity in % of the keys");
    PERMILLE.iter().for_each(|&p| print!("{:>7.1}", p as f64 / 10.0));
    println!();
    for (name, hits) in rows() {
        print!("{name:44}");
        for permille in PERMILLE {
            let capacity = (distinct * permille).div_ceil(1000) as u32;
            print!("{:7.1}", 100.0 * hits(capacity, requests) as f64 / again as f64);
        }
        println!();
    }
}

fn singles(keys: Vec<u64>) -> Requests {
    keys.into_iter().map(|key| vec![key]).collect()
}

#[test]
fn on_a_zipf_stream_the_ratios_lie_where_they_should() {
    const ACCESSES: usize = 200_000;
    let requests = singles(zipf(20_000, 0.9, ACCESSES));
    for capacity in [200, 1000, 4000] {
        let percent = |hits: usize| 100.0 * hits as f64 / ACCESSES as f64;
        let opt = percent(hits_of_opt(capacity, &requests));
        let lru = percent(hits_of_lru(capacity, &requests));
        let of = |kind| percent(hits_of(build(kind, capacity, capacity.into()), capacity, &requests));
        let (clock, s3fifo) = (of(PolicyKind::Clock), of(PolicyKind::S3Fifo));
        let all = format!("{capacity}: OPT {opt:.2}, LRU {lru:.2}, CLOCK {clock:.2}, S3-FIFO {s3fifo:.2}");
        // Second chance keeps what is popular a little better than exact recency does.
        assert!(clock > lru - 0.5 && clock < lru + 4.0, "{all}");
        assert!(s3fifo > lru + 2.0 && s3fifo > clock, "{all}");
        assert!(s3fifo < opt && clock < opt, "{all}");
    }
}

#[test]
#[ignore = "prints a table"]
fn print_hit_ratios_on_a_zipf_stream() {
    print_table(&singles(zipf(20_000, 0.9, 400_000)));
}

#[test]
#[ignore = "prints a table for the trace in HOTSLICE_TRACE"]
fn print_hit_ratios_on_a_trace() {
    #[derive(serde::Deserialize)]
    struct Line {
        hash_ids: Vec<u64>,
    }
    let path = std::env::var_os("HOTSLICE_TRACE").expect("HOTSLICE_TRACE names a file of JSON lines");
    let text = std::fs::read_to_string(&path).expect("the trace can be read");
    let requests = text
        .lines()
        .map(|line| {
            let Line { mut hash_ids } = serde_json::from_str(line).expect("a line is an object with hash_ids");
            // Tail first: of a chain the last blocks are worth nothing without the first.
            hash_ids.reverse();
            hash_ids
        })
        .collect();
    print_table(&requests);
}
