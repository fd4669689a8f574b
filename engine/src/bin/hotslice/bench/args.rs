//! What can be asked of `hotslice bench`. Knows nothing of how it is measured.

use hotslice::memory::PagePolicy;
use hotslice::size::parse_bytes;
use hotslice::{Config, TransportKind};
use serde::{Serialize, Serializer};
use std::net::{SocketAddr, ToSocketAddrs};

/// Largest value that is benched: what `memory` can hold in one piece.
const VALUE_BYTES_MAX: u64 = 1 << 30;

/// Settings of the bench; each is explained in `hotslice bench --help`.
#[derive(Clone, Debug, clap::Args, Serialize)]
#[command(
    after_help = "Exit codes: 0 done; 1 a wrong byte or another error; 2 bad arguments; 3 a bar was missed \
                        (with --strict).\nFigures depend on what else the machine does: compare ratios, not times."
)]
pub struct BenchArgs {
    /// Value sizes, each with the size of its cache
    #[arg(long, value_name = "VALUE=CACHE", value_delimiter = ',', default_value = "10MB=400MB,25MB=800MB",
          value_parser = parse_geometry)]
    pub sizes: Vec<Geometry>,
    /// Values of each size
    #[arg(long, default_value_t = 25, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub count: u32,
    /// Keys per call of the batch rows
    #[arg(long, default_value_t = 5, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub batch: u32,
    /// Rounds over all keys; the first one is also reported on its own
    #[arg(long, default_value_t = 10, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(2..=100_000))]
    pub rounds: u32,
    /// Use this slice server, which must be writable, instead of starting one; what is stored there for the
    /// bench is removed again
    #[arg(long, value_name = "HOST:PORT", value_parser = parse_origin)]
    pub origin: Option<SocketAddr>,
    /// Shards of the caches
    #[arg(long, default_value_t = 1, value_name = "COUNT")]
    pub shards: usize,
    /// Cores for the shards, one each
    #[arg(long, value_name = "CORE", value_delimiter = ',')]
    pub cores: Vec<usize>,
    /// Connections of a shard to the server at most
    #[arg(long, default_value_t = 2, value_name = "COUNT")]
    pub lanes: usize,
    /// Bytes per receive operation at most
    #[arg(long, default_value = "1MiB", value_name = "SIZE",
          value_parser = |text: &str| parse_bytes("receive-bytes", text))]
    pub receive_bytes: u64,
    /// What shards move bytes with: auto, io_uring or epoll
    #[arg(long, value_name = "KIND", default_value = "auto", value_parser = parse_transport)]
    pub transport: TransportKind,
    /// Hugepages: required, preferred or off
    #[arg(long, default_value = "preferred", value_name = "POLICY")]
    #[serde(serialize_with = "as_text")]
    pub pages: PagePolicy,
    /// Only these parts
    #[arg(long, value_delimiter = ',', value_name = "PART")]
    pub only: Vec<Part>,
    /// Fewer values and rounds, for a first look or for CI; everything is still checked
    #[arg(long)]
    pub quick: bool,
    /// Exit with 3 if a bar is missed
    #[arg(long)]
    pub strict: bool,
    /// Print one JSON document instead of tables
    #[arg(long)]
    pub json: bool,
}

/// A part of the report.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Part {
    /// The table of reads.
    Rows,
    /// Copies and the receive loop.
    Floors,
    /// The figures that the engine is held to.
    Bars,
}

/// Values of one size and the cache that they are read through.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Geometry {
    pub value_bytes: usize,
    pub cache_bytes: u64,
}

fn as_text<S: Serializer>(pages: &PagePolicy, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(pages)
}

fn parse_geometry(text: &str) -> Result<Geometry, String> {
    let (value, cache) = text.split_once('=').ok_or("expected VALUE=CACHE, such as 10MB=400MB")?;
    let bytes = |text| parse_bytes("sizes", text).map_err(|e| e.to_string());
    let (value_bytes, cache_bytes) = (bytes(value)?, bytes(cache)?);
    if !(1..=VALUE_BYTES_MAX.min(cache_bytes)).contains(&value_bytes) {
        return Err("a value has 1 byte to 1 GiB and fits into its cache".to_owned());
    }
    Ok(Geometry { value_bytes: value_bytes as usize, cache_bytes })
}

fn parse_transport(text: &str) -> Result<TransportKind, String> {
    text.parse().map_err(|()| "auto, io_uring or epoll".to_owned())
}

fn parse_origin(text: &str) -> Result<SocketAddr, String> {
    let mut addresses = text.to_socket_addrs().map_err(|e| format!("expected HOST:PORT: {e}"))?;
    addresses.next().ok_or_else(|| "the name has no address".to_owned())
}

impl BenchArgs {
    /// Applies `--quick`.
    pub fn shortened(mut self) -> Self {
        if self.quick {
            self.count = self.count.min(5);
            self.rounds = self.rounds.min(3);
        }
        self
    }

    /// Whether a part is wanted.
    pub fn wants(&self, part: Part) -> bool {
        self.only.is_empty() || self.only.contains(&part)
    }

    /// A cache of that capacity with the settings asked for and no origin.
    pub fn config(&self, capacity_bytes: u64) -> Config {
        let mut config = Config::new(capacity_bytes);
        config.shards = self.shards;
        config.cores = self.cores.clone();
        config.lanes_per_peer = self.lanes;
        config.receive_bytes = self.receive_bytes;
        config.pages = self.pages;
        config.transport = self.transport;
        config
    }

    /// Keys of values of one size.
    pub fn keys(&self, value_bytes: usize) -> Vec<String> {
        (0..self.count).map(|i| format!("hotslice-bench/{value_bytes}/{i}")).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn geometries_are_read_and_refused() {
        let geometry = Geometry { value_bytes: 10_000_000, cache_bytes: 400_000_000 };
        assert_eq!(parse_geometry("10MB=400MB"), Ok(geometry));
        for text in ["", "10MB", "10MB=", "=400MB", "0=400MB", "2MB=1MB", "2GiB=8GiB", "x=y", "1=2=3"] {
            assert!(parse_geometry(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn origins_are_names_or_addresses_with_a_port() {
        assert_eq!(parse_origin("127.0.0.1:7110"), Ok(SocketAddr::from(([127, 0, 0, 1], 7110))));
        assert!(parse_origin("localhost:1").is_ok_and(|address| address.ip().is_loopback()));
        assert!(parse_origin("127.0.0.1").is_err());
    }
}
