//! Clocks, and latencies in a histogram.

use hdrhistogram::Histogram;
use serde::Serialize;
use std::time::Duration;

/// CPU time of this process, all threads, user and system.
pub fn process_cpu() -> Duration {
    clock(libc::CLOCK_PROCESS_CPUTIME_ID)
}

fn clock(id: libc::clockid_t) -> Duration {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes a local; the clock exists on every Linux.
    unsafe { libc::clock_gettime(id, &mut now) };
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

/// Latencies of one kind of operation, in nanoseconds, with three significant digits.
pub struct Latencies(Histogram<u64>);

/// Percentiles in milliseconds.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Percentiles {
    pub count: u64,
    pub p50: f64,
    pub p90: f64,
    pub p99: f64,
    pub p99_9: f64,
    pub max: f64,
}

impl Latencies {
    pub fn new() -> Self {
        match Histogram::new_with_bounds(1, 600_000_000_000, 3) {
            Ok(histogram) => Self(histogram),
            Err(_) => unreachable!("1 ns to 10 minutes with three digits is a valid range"),
        }
    }

    pub fn record(&mut self, latency: Duration) {
        self.record_ns(u64::try_from(latency.as_nanos()).unwrap_or(u64::MAX));
    }

    pub fn record_ns(&mut self, ns: u64) {
        self.0.saturating_record(ns.max(1));
    }

    pub fn quantile_ns(&self, quantile: f64) -> u64 {
        self.0.value_at_quantile(quantile)
    }

    pub fn percentiles_ms(&self) -> Percentiles {
        let ms = |quantile| self.0.value_at_quantile(quantile) as f64 / 1e6;
        Percentiles {
            count: self.0.len(),
            p50: ms(0.5),
            p90: ms(0.9),
            p99: ms(0.99),
            p99_9: ms(0.999),
            max: self.0.max() as f64 / 1e6,
        }
    }
}

/// Bytes, wall and CPU time of one side of a comparison.
#[derive(Clone, Copy, Debug, Default)]
pub struct Cost {
    pub bytes: u64,
    pub wall: Duration,
    pub cpu: Duration,
}

impl Cost {
    pub fn gb_per_s(&self) -> f64 {
        self.bytes as f64 / 1e9 / self.wall.as_secs_f64().max(1e-12)
    }

    pub fn cpu_s_per_gb(&self) -> f64 {
        self.cpu.as_secs_f64() / (self.bytes as f64 / 1e9).max(1e-12)
    }
}

/// The middle value.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
