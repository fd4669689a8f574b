//! `hotslice bench`: the whole way of the data, measured against this machine's floors, every byte checked.

mod bars;
mod child;
mod content;
mod floors;
mod machine;
mod measure;
mod report;
mod rows;

use child::ServerChild;
use content::Content;
use floors::{ReceiveLoop, Regions};
use hotslice::memory::PagePolicy;
use hotslice::origin::SliceClient;
use hotslice::size::{format_bytes, parse_bytes};
use hotslice::{Admission, Config};
use indicatif::{ProgressBar, ProgressStyle};
use machine::Machine;
use report::{ReceiveFloor, Report};
use rows::{Mode, Plan};
use std::cell::Cell;
use std::net::SocketAddr;
use std::process::ExitCode;
use std::time::Duration;

/// Settings of the bench; each is explained in `hotslice bench --help`.
#[derive(Clone, Debug, clap::Args)]
#[command(
    after_help = "Exit codes: 0 done, 1 a wrong byte or another error, 2 bad arguments, 3 a bar was missed \
                        (with --strict).\nFigures depend on what else the machine does: compare ratios, not times."
)]
pub struct BenchArgs {
    /// Value sizes with the cache size for each
    #[arg(long, value_name = "VALUE=CACHE", value_delimiter = ',', default_value = "10MB=400MB,25MB=800MB",
          value_parser = parse_geometry)]
    sizes: Vec<Geometry>,
    /// Values of each size
    #[arg(long, default_value_t = 25, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    count: u32,
    /// Keys per call of the batch rows
    #[arg(long, default_value_t = 5, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    batch: u32,
    /// Rounds over all keys; the first one is reported on its own
    #[arg(long, default_value_t = 10, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(2..=100_000))]
    rounds: u32,
    /// Use this slice server, which must be writable, instead of starting one
    #[arg(long, value_name = "ADDRESS:PORT")]
    origin: Option<SocketAddr>,
    /// Shards of the caches
    #[arg(long, default_value_t = 1, value_name = "COUNT")]
    shards: usize,
    /// Cores for the shards, one each
    #[arg(long, value_name = "CORE", value_delimiter = ',')]
    cores: Vec<usize>,
    /// Connections to the server at most
    #[arg(long, default_value_t = 2, value_name = "COUNT")]
    lanes: usize,
    /// Bytes per receive operation at most
    #[arg(long, default_value = "1MiB", value_name = "SIZE", value_parser = |text: &str| parse_bytes("receive-bytes", text))]
    receive_bytes: u64,
    /// Hugepages: required, preferred or off
    #[arg(long, default_value = "preferred", value_name = "POLICY")]
    pages: PagePolicy,
    /// Only these parts
    #[arg(long, value_delimiter = ',', value_name = "PART")]
    only: Vec<Part>,
    /// Fewer values and rounds, for a first look or for CI; everything is still checked
    #[arg(long)]
    quick: bool,
    /// Exit with 3 if a bar is missed
    #[arg(long)]
    strict: bool,
    /// Print one JSON document instead of tables
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    /// The table of reads.
    Rows,
    /// Copies and the receive loop.
    Floors,
    /// The figures that the engine is held to.
    Bars,
}

#[derive(Clone, Copy, Debug)]
struct Geometry {
    value_bytes: usize,
    cache_bytes: u64,
}

fn parse_geometry(text: &str) -> Result<Geometry, String> {
    let (value, cache) = text.split_once('=').ok_or("expected VALUE=CACHE, such as 10MB=400MB")?;
    let bytes = |text| parse_bytes("sizes", text).map_err(|e| e.to_string());
    let (value_bytes, cache_bytes) = (bytes(value)?, bytes(cache)?);
    if value_bytes == 0 || value_bytes > cache_bytes {
        return Err("a value has at least one byte and fits into its cache".to_owned());
    }
    Ok(Geometry { value_bytes: value_bytes as usize, cache_bytes })
}

impl BenchArgs {
    fn wants(&self, part: Part) -> bool {
        self.only.is_empty() || self.only.contains(&part)
    }

    fn apply(&self, config: &mut Config) {
        config.shards = self.shards;
        config.cores = self.cores.clone();
        config.lanes_per_peer = self.lanes;
        config.receive_bytes = self.receive_bytes;
        config.pages = self.pages;
    }

    fn keys(&self, geometry: &Geometry) -> Vec<String> {
        (0..self.count).map(|i| format!("bench/{}/{i}", geometry.value_bytes)).collect()
    }
}

/// Runs the command.
pub fn run(mut args: BenchArgs) -> ExitCode {
    if args.quick {
        args.count = args.count.min(10);
        args.rounds = args.rounds.min(3);
    }
    let report = match measure(&args) {
        Ok(report) => report,
        Err(error) => {
            eprintln!("error: {error}");
            return ExitCode::from(1);
        }
    };
    if args.json {
        match serde_json::to_string_pretty(&report) {
            Ok(text) => println!("{text}"),
            Err(error) => {
                eprintln!("error: {error}");
                return ExitCode::from(1);
            }
        }
    } else {
        report.print();
    }
    if args.strict && report.bars.iter().any(|bar| !bar.met) { ExitCode::from(3) } else { ExitCode::SUCCESS }
}

/// Progress on standard error, if that is a terminal.
struct Progress {
    bar: ProgressBar,
    values: Cell<u64>,
}

impl Progress {
    fn new(total: u64) -> Self {
        let bar = ProgressBar::new(total);
        if let Ok(style) = ProgressStyle::with_template("{msg:36} {wide_bar} {pos}/{len} {eta}") {
            bar.set_style(style);
        }
        Self { bar, values: Cell::new(0) }
    }

    fn say(&self, what: String) {
        self.bar.set_message(what);
    }

    fn tick(&self, values: u64) {
        self.values.set(self.values.get() + values);
        self.bar.inc(values);
    }
}

fn measure(args: &BenchArgs) -> Result<Report, String> {
    let needed: u64 = args.sizes.iter().map(|g| u64::from(args.count) * (g.value_bytes as u64 + 4096)).sum();
    let bars_need = u64::from(args.count) * 10_004_096;
    let child = match args.origin {
        Some(_) => None,
        // Room for a block more per size, since values leave holes.
        None => Some(ServerChild::start(needed + bars_need + (256 << 20))?),
    };
    let server = match (&child, args.origin) {
        (Some(child), _) => child.address,
        (None, Some(origin)) => origin,
        (None, None) => return Err("there is no server".to_owned()),
    };
    let per_row = u64::from(args.count) * u64::from(args.rounds);
    let progress = Progress::new(args.sizes.len() as u64 * (u64::from(args.count) + 8 * per_row));
    let mut report = Report {
        machine: Machine::look(),
        memory: None,
        rows: Vec::new(),
        copy_floors: Vec::new(),
        receive_floors: Vec::new(),
        bars: Vec::new(),
        values_checked: 0,
        bytes_checked: 0,
    };
    for geometry in &args.sizes {
        let keys = args.keys(geometry);
        progress.say(format!("storing {} × {}", keys.len(), format_bytes(geometry.value_bytes as u64)));
        store(server, &keys, geometry.value_bytes, &progress)?;
        if args.wants(Part::Rows) {
            measure_rows(args, geometry, &keys, server, &mut report, &progress)?;
        }
        if args.wants(Part::Floors) {
            progress.say("floors".to_owned());
            measure_floors(args, geometry, &keys, server, &mut report)?;
        }
    }
    if args.wants(Part::Bars) {
        progress.say("bars".to_owned());
        measure_bars(args, server, &mut report, &progress)?;
    }
    progress.bar.finish_and_clear();
    Ok(report)
}

fn store(server: SocketAddr, keys: &[String], value_bytes: usize, progress: &Progress) -> Result<(), String> {
    let mut client = SliceClient::connect(server, Duration::from_secs(30)).map_err(|e| e.to_string())?;
    for key in keys {
        let value = Content::of(key).bytes(value_bytes);
        client.put(b"", key.as_bytes(), &value).map_err(|e| format!("cannot store `{key}`: {e}"))?;
        progress.tick(1);
    }
    Ok(())
}

fn measure_rows(
    args: &BenchArgs,
    geometry: &Geometry,
    keys: &[String],
    server: SocketAddr,
    report: &mut Report,
    progress: &Progress,
) -> Result<(), String> {
    let batch = (args.batch as usize).min(keys.len());
    let mut buffers = Regions::new(batch, geometry.value_bytes, args.pages)?;
    for cache_on in [false, true] {
        let mut config = Config::new(geometry.cache_bytes);
        config.admission = if cache_on { Admission::FirstMiss } else { Admission::Off };
        let cache = bars::open(args, config, &[server])?;
        report.memory = cache.reports().first().cloned();
        for batch in [1, batch] {
            for mode in [Mode::Lease, Mode::Copy] {
                progress.say(format!(
                    "{} × {} {}",
                    if batch == 1 { "get" } else { "batch" },
                    format_bytes(geometry.value_bytes as u64),
                    if cache_on { "with cache" } else { "cache off" }
                ));
                let plan = Plan {
                    keys,
                    value_bytes: geometry.value_bytes,
                    cache_bytes: geometry.cache_bytes,
                    cache_on,
                    batch,
                    rounds: args.rounds as usize,
                };
                let row = rows::run(&cache, &plan, mode, &mut buffers, &|n| progress.tick(n))?;
                report.values_checked += row.ms.count;
                report.bytes_checked += row.ms.count * geometry.value_bytes as u64;
                report.rows.push(row);
            }
        }
    }
    Ok(())
}

fn measure_floors(
    args: &BenchArgs,
    geometry: &Geometry,
    keys: &[String],
    server: SocketAddr,
    report: &mut Report,
) -> Result<(), String> {
    let rounds = args.rounds as usize;
    report.copy_floors.extend(floors::copies(geometry.value_bytes, keys.len(), rounds, args.pages)?);
    let mut receive = ReceiveLoop::connect(server, keys.len(), geometry.value_bytes, args.pages)?;
    for _ in 0..rounds {
        for key in keys {
            receive.read(key)?;
        }
    }
    report.values_checked += (rounds * keys.len()) as u64;
    report.bytes_checked += receive.cost.bytes;
    report.receive_floors.push(ReceiveFloor {
        value_bytes: geometry.value_bytes,
        ms: receive.latencies.percentiles_ms(),
        gb_per_s: receive.cost.gb_per_s(),
        cpu_s_per_gb: receive.cost.cpu_s_per_gb(),
        congestion_control: receive.congestion_control(),
    });
    Ok(())
}

fn measure_bars(
    args: &BenchArgs,
    server: SocketAddr,
    report: &mut Report,
    progress: &Progress,
) -> Result<(), String> {
    let geometry = Geometry { value_bytes: 10_000_000, cache_bytes: 400_000_000 };
    let keys = args.keys(&geometry);
    if !args.sizes.iter().any(|g| g.value_bytes == geometry.value_bytes) {
        store(server, &keys, geometry.value_bytes, progress)?;
    }
    report.bars.extend(bars::leased_hits(args)?);
    report.bars.push(bars::copying_hit(args, &keys, server)?);
    report.bars.extend(bars::cold_read(args, &keys, server)?);
    report.bars.extend(bars::utilisation(args)?);
    report.bars.push(bars::start(args)?);
    Ok(())
}
