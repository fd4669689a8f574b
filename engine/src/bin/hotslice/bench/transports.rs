//! epoll against io_uring: the same cold reads by both.

use super::args::BenchArgs;
use super::bars::{Bar, COMPARED_BYTES};
use super::measure::{Cost, CpuMeter, Latencies};
use super::rows;
use hotslice::{Cache, TransportKind};
use std::net::SocketAddr;

/// Fewer than the other comparisons: two caches at once.
const CACHE_BYTES: u64 = 200_000_000;

struct Side {
    cache: Cache,
    latencies: Latencies,
    cost: Cost,
}

impl Side {
    fn open(args: &BenchArgs, transport: TransportKind, server: SocketAddr) -> Result<Self, String> {
        let cache = rows::open_off(&BenchArgs { transport, ..args.clone() }, CACHE_BYTES, server)?;
        Ok(Self { cache, latencies: Latencies::new(), cost: Cost::default() })
    }

    fn read(&mut self, key: &String) -> Result<(), String> {
        let mut meter = CpuMeter::start();
        let read = rows::read_leases(&self.cache, std::slice::from_ref(key), &mut meter)?;
        self.latencies.record(read.wall);
        self.cost.cpu += meter.spent();
        self.cost.wall += read.wall;
        self.cost.bytes += read.bytes;
        Ok(())
    }
}

/// Speed of epoll, key by key in alternation with io_uring. `None` where io_uring is forbidden.
pub fn compare(args: &BenchArgs, keys: &[String], server: SocketAddr) -> Result<Option<Bar>, String> {
    let Ok(mut ring) = Side::open(args, TransportKind::IoUring, server) else { return Ok(None) };
    let mut epoll = Side::open(args, TransportKind::Epoll, server)?;
    for round in 0..if args.quick { 3 } else { 9 } {
        for key in keys {
            ring.read(key)?;
            epoll.read(key)?;
        }
        if round == 0 {
            // It warmed connections and memory up.
            for side in [&mut ring, &mut epoll] {
                (side.latencies, side.cost) = (Latencies::new(), Cost::default());
            }
        }
    }
    let ms = |side: &Side| side.latencies.quantile_ns(0.5) as f64 / 1e6;
    let note = format!(
        "p50 {:.2} ms against {:.2} ms; {:.3} s/GB of CPU against {:.3} s/GB",
        ms(&epoll),
        ms(&ring),
        epoll.cost.cpu_s_per_gb(),
        ring.cost.cpu_s_per_gb()
    );
    let what = format!("cold read, {} MB, speed of epoll against io_uring", COMPARED_BYTES / 1_000_000);
    Ok(Some(Bar::at_least(what, ms(&ring) / ms(&epoll), 0.8, "×", note)))
}
