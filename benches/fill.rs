//! Cold reads of 100 MB by number of lanes, bytes per part and bytes per receive operation, and by one or two shards: why
//! the defaults are what they are.
//!
//! `cargo bench -p hotslice-benches --bench fill` reads from a slice server in this process, over loopback;
//! `… --bench fill -- --origin HOST:PORT` from one that is running and writable (`scripts/veth` starts one behind a pair of
//! virtual interfaces). Each round reads once with every setting, so that what the machine does meanwhile befalls all of
//! them; printed are medians in milliseconds and the ratio to the first line. `--quick` makes few rounds.

use hdrhistogram::Histogram;
use hotslice::origin::SliceClient;
use hotslice::server::{ServerConfig, ServerHandle};
use hotslice::{Address, Admission, Cache, Config};
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(60);
const VALUE_BYTES: usize = 100_000_000;
const KEYS: [&str; 2] = ["hotslice-bench/fill/0", "hotslice-bench/fill/1"];
const MIB: u64 = 1 << 20;

/// What is tried.
#[derive(Clone, Copy)]
struct Setting {
    shards: usize,
    shards_per_value: usize,
    lanes: usize,
    part_mib: u64,
    receive_kib: u64,
}

/// One shard; lanes, MiB per part, KiB per receive operation.
const fn one(lanes: usize, part_mib: u64, receive_kib: u64) -> Setting {
    Setting { shards: 1, shards_per_value: 1, lanes, part_mib, receive_kib }
}

/// Two shards, of which so many receive one value.
const fn two(shards_per_value: usize, lanes: usize) -> Setting {
    Setting { shards: 2, shards_per_value, ..one(lanes, 4, 1024) }
}

const SETTINGS: [Setting; 17] = [
    one(1, 4, 1024),
    one(1, 16, 1024),
    one(1, 128, 1024),
    one(2, 4, 1024),
    one(2, 16, 1024),
    one(2, 64, 1024),
    one(3, 16, 1024),
    one(4, 4, 1024),
    one(4, 16, 1024),
    one(4, 32, 1024),
    one(8, 16, 1024),
    one(2, 16, 256),
    one(2, 16, 4096),
    two(1, 2),
    two(2, 2),
    two(1, 4),
    two(2, 4),
];

type Failure = Box<dyn std::error::Error>;

fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().collect();
    let after = |flag: &str| arguments.iter().position(|a| a == flag).and_then(|i| arguments.get(i + 1));
    let rounds = if arguments.iter().any(|a| a == "--quick") { 4 } else { 25 };
    let (_server, origin) = match after("--origin") {
        Some(text) => (None, text.parse::<Address>().map_err(|error| format!("--origin {text}: {error:?}"))?),
        None => {
            let config =
                ServerConfig { capacity_bytes: 256 << 20, writable: true, ..ServerConfig::default() };
            let server = ServerHandle::spawn(config)?;
            let address = server.addr();
            (Some(server), address)
        }
    };
    store(&origin)?;
    let caches = SETTINGS.map(|setting| open(&origin, setting)).into_iter().collect::<Result<Vec<_>, _>>()?;
    let mut histograms = Vec::new();
    for _ in SETTINGS {
        histograms.push(Histogram::<u64>::new_with_bounds(1, 60_000_000, 3)?);
    }
    for round in 0..=rounds {
        for (cache, histogram) in caches.iter().zip(&mut histograms) {
            for key in KEYS {
                let started = Instant::now();
                let lease = cache.get(key, PATIENCE)?.ok_or("the value is there")?;
                // The first round warms connections and memory up.
                if round > 0 {
                    histogram.saturating_record(started.elapsed().as_micros() as u64);
                }
                assert_eq!(lease.len(), VALUE_BYTES as u64);
            }
        }
    }
    println!(
        "{:>14} {:>5} {:>10} {:>10} {:>8} {:>8} {:>7}",
        "shards (value)", "lanes", "MiB / part", "KiB / recv", "p50 ms", "p90 ms", "ratio"
    );
    let first = histograms[0].value_at_quantile(0.5) as f64;
    for (setting, histogram) in SETTINGS.iter().zip(&histograms) {
        let Setting { shards, shards_per_value, lanes, part_mib, receive_kib } = setting;
        let at = |quantile| histogram.value_at_quantile(quantile) as f64;
        let (p50, p90, ratio) = (at(0.5), at(0.9), first / at(0.5));
        let shards = format!("{shards} ({shards_per_value})");
        println!(
            "{shards:>14} {lanes:>5} {part_mib:>10} {receive_kib:>10} {:>8.2} {:>8.2} {ratio:>6.2}×",
            p50 / 1e3,
            p90 / 1e3
        );
    }
    if after("--origin").is_some() {
        let mut client = SliceClient::connect(&origin, PATIENCE)?;
        KEYS.iter().try_for_each(|key| client.remove(b"", key.as_bytes()).map(drop))?;
    }
    Ok(())
}

/// A cache in which nothing stays: every read is a cold one.
fn open(origin: &Address, setting: Setting) -> hotslice::Result<Cache> {
    let mut config = Config::new(112 * MIB * setting.shards as u64);
    config.admission = Admission::Off;
    config.origin = vec![origin.clone()];
    (config.shards, config.shards_per_value) = (setting.shards, setting.shards_per_value);
    config.lanes_per_peer = setting.lanes;
    config.stripe_bytes = setting.part_mib * MIB;
    config.receive_bytes = setting.receive_kib << 10;
    Cache::open(config)
}

fn store(origin: &Address) -> Result<(), Failure> {
    let mut client = SliceClient::connect(origin, PATIENCE)?;
    for key in KEYS {
        let value: Vec<u8> =
            (0..VALUE_BYTES).map(|i| (i ^ (i >> 8)) as u8 ^ key.as_bytes()[i % key.len()]).collect();
        client.put(b"", key.as_bytes(), &value)?;
    }
    Ok(())
}
