//! Cold reads of 100 MB by number of lanes, bytes per part and bytes per receive operation: why the defaults are what
//! they are.
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

/// Lanes, MiB per part, KiB per receive operation.
const SETTINGS: [(usize, u64, u64); 13] = [
    (1, 4, 1024),
    (1, 16, 1024),
    (1, 128, 1024),
    (2, 4, 1024),
    (2, 16, 1024),
    (2, 64, 1024),
    (3, 16, 1024),
    (4, 4, 1024),
    (4, 16, 1024),
    (4, 32, 1024),
    (8, 16, 1024),
    (2, 16, 256),
    (2, 16, 4096),
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
        "{:>5} {:>11} {:>12} {:>9} {:>9} {:>7}",
        "lanes", "MiB / part", "KiB / recv", "p50 ms", "p90 ms", "ratio"
    );
    let first = histograms[0].value_at_quantile(0.5) as f64;
    for ((lanes, part, receive), histogram) in SETTINGS.iter().zip(&histograms) {
        let at = |quantile| histogram.value_at_quantile(quantile) as f64;
        let (p50, p90) = (at(0.5), at(0.9));
        let ratio = first / p50;
        println!("{lanes:>5} {part:>11} {receive:>12} {:>9.2} {:>9.2} {ratio:>6.2}×", p50 / 1e3, p90 / 1e3);
    }
    if after("--origin").is_some() {
        let mut client = SliceClient::connect(&origin, PATIENCE)?;
        KEYS.iter().try_for_each(|key| client.remove(b"", key.as_bytes()).map(drop))?;
    }
    Ok(())
}

/// A cache in which nothing stays: every read is a cold one.
fn open(origin: &Address, (lanes, part_mib, receive_kib): (usize, u64, u64)) -> hotslice::Result<Cache> {
    let mut config = Config::new(112 * MIB);
    config.admission = Admission::Off;
    config.origin = vec![origin.clone()];
    config.lanes_per_peer = lanes;
    config.stripe_bytes = part_mib * MIB;
    config.receive_bytes = receive_kib << 10;
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
