//! Clocks, latencies in a histogram, and what is made of several rounds.

use hdrhistogram::Histogram;
use serde::Serialize;
use std::time::Duration;

/// CPU time of this process, all threads, user and system.
pub fn process_cpu() -> Duration {
    clock(libc::CLOCK_PROCESS_CPUTIME_ID)
}

/// CPU time of the calling thread, user and system.
pub fn thread_cpu() -> Duration {
    clock(libc::CLOCK_THREAD_CPUTIME_ID)
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
        let ns = u64::try_from(latency.as_nanos()).unwrap_or(u64::MAX);
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

/// CPU time of the whole process over a stretch of work, less what the calling thread spends on the bench's
/// own behalf. So it holds what the engine's threads do after a call has returned, too.
pub struct CpuMeter {
    started: Duration,
    excluded: Duration,
}

impl CpuMeter {
    pub fn start() -> Self {
        Self { started: process_cpu(), excluded: Duration::ZERO }
    }

    /// Does work of the bench's own (checking, other measurements) that is not to be counted.
    pub fn excluding<T>(&mut self, work: impl FnOnce() -> T) -> T {
        let before = thread_cpu();
        let result = work();
        self.excluded += thread_cpu().saturating_sub(before);
        result
    }

    pub fn spent(&self) -> Duration {
        process_cpu().saturating_sub(self.started + self.excluded)
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

/// Figures of several rounds: the middle one and how far the others lie apart.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Spread {
    pub median: f64,
    pub least: f64,
    pub most: f64,
}

impl Spread {
    /// Of at least one figure.
    pub fn of(mut figures: Vec<f64>) -> Self {
        figures.sort_by(f64::total_cmp);
        let at = |index: usize| figures.get(index).copied().unwrap_or(f64::NAN);
        Self { median: at(figures.len() / 2), least: at(0), most: at(figures.len().wrapping_sub(1)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spread_is_the_middle_and_the_ends() {
        let spread = Spread::of(vec![3.0, 1.0, 2.0, 9.0, 8.0]);
        assert_eq!((spread.median, spread.least, spread.most), (3.0, 1.0, 9.0));
        assert!(Spread::of(Vec::new()).median.is_nan());
    }

    #[test]
    fn excluded_work_is_not_counted() {
        let burn = || {
            let until = thread_cpu() + Duration::from_millis(40);
            while thread_cpu() < until {}
        };
        let mut meter = CpuMeter::start();
        meter.excluding(burn);
        burn();
        // Other tests of this process may add to it: only the lower bound is certain.
        let spent = meter.spent();
        assert!(spent >= Duration::from_millis(39), "{spent:?}");
        assert!(meter.excluded >= Duration::from_millis(40));
    }

    #[test]
    fn percentiles_are_in_milliseconds() {
        let mut latencies = Latencies::new();
        (1..=100u64).for_each(|ms| latencies.record(Duration::from_millis(ms)));
        let percentiles = latencies.percentiles_ms();
        assert_eq!(percentiles.count, 100);
        assert!((percentiles.p50 - 50.0).abs() < 0.1, "{percentiles:?}");
        assert!((percentiles.max - 100.0).abs() < 0.1, "{percentiles:?}");
    }
}
