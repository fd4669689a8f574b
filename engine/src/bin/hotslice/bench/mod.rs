//! `hotslice bench`: the whole way of the data, measured against this machine's floors, every byte checked.
//!
//! | file | what |
//! |---|---|
//! | `args` | what can be asked for |
//! | `content` | contents that derive from key and offset, and their check |
//! | `child` | the slice server as a child process |
//! | `regions` | callers' buffers and floors' memory |
//! | `measure` | clocks, histograms, spreads |
//! | `rows` | reads through the engine |
//! | `floors` | copies and the blocking receive loop |
//! | `hits`, `fronts`, `dead_peer`, `transports`, `bars` | the figures that the engine is held to |
//! | `machine`, `report` | what is printed |
//!
//! It uses the public API alone, as a host would.

mod args;
mod bars;
mod child;
mod content;
mod dead_peer;
mod floors;
mod fronts;
mod hits;
mod machine;
mod measure;
mod regions;
mod report;
mod rows;
mod stripes;
mod transports;

pub use args::BenchArgs;

use args::{Geometry, Part};
use child::ServerChild;
use content::Content;
use floors::{Copies, ROTATION, ReceiveLoop};
use hotslice::origin::SliceClient;
use hotslice::size::format_bytes;
use indicatif::{ProgressBar, ProgressStyle};
use machine::Machine;
use report::{CacheReport, Report};
use std::net::SocketAddr;
use std::process::ExitCode;
use std::time::Duration;

/// Runs the command.
pub fn run(args: BenchArgs) -> ExitCode {
    let args = args.shortened();
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

/// Progress on standard error, if that is a terminal; its unit is a value stored or read.
struct Progress(ProgressBar);

impl Progress {
    fn new(values: u64) -> Self {
        let bar = ProgressBar::new(values);
        if let Ok(style) = ProgressStyle::with_template("{msg:36} {wide_bar} {pos}/{len} {eta}") {
            bar.set_style(style);
        }
        Self(bar)
    }

    fn say(&self, what: impl Into<String>) {
        self.0.set_message(what.into());
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

fn measure(args: &BenchArgs) -> Result<Report, String> {
    let machine = Machine::look();
    let child = match args.origin {
        Some(_) => None,
        None => Some(ServerChild::start(server_bytes(args), &args.pages.to_string())?),
    };
    let server = match (&child, args.origin) {
        (Some(child), _) => child.ready.listening,
        (None, Some(origin)) => origin,
        (None, None) => return Err("there is no server".to_owned()),
    };
    let mut bench = Bench {
        args,
        server,
        stored: Vec::new(),
        progress: Progress::new(values_total(args)),
        report: Report {
            settings: args.clone(),
            machine,
            server_memory: child.as_ref().map(|child| child.ready.memory),
            caches: Vec::new(),
            rows: Vec::new(),
            copy_floors: Vec::new(),
            receive_floors: Vec::new(),
            bars: Vec::new(),
        },
    };
    let measured = bench.measure();
    if child.is_none() {
        bench.clean_up();
    }
    measured.map(|()| bench.report)
}

/// Memory that the server needs for all values.
fn server_bytes(args: &BenchArgs) -> u64 {
    let bytes = |count: usize, value_bytes: usize| count as u64 * (value_bytes as u64 + 4096);
    let rows: u64 = args.sizes.iter().map(|g| bytes(args.count as usize, g.value_bytes)).sum();
    let striped =
        bytes(stripes::STRIPED_COUNT, stripes::STRIPED_BYTES) + bytes(1, stripes::large_bytes(args));
    let small = bytes(stripes::SMALL_COUNT, stripes::SMALL_BYTES);
    let compared = bytes(ROTATION, bars::COMPARED_BYTES);
    let bars = if args.wants(Part::Bars) { compared + striped + small } else { 0 };
    // A value that replaces one of an earlier size in the list is there twice for a moment.
    let largest = args.sizes.iter().map(|g| g.value_bytes as u64).max().unwrap_or(0);
    rows + bars + largest + (64 << 20)
}

fn values_total(args: &BenchArgs) -> u64 {
    let per_size = if args.wants(Part::Rows) { 1 + 8 * u64::from(args.rounds) } else { 1 };
    args.sizes.len() as u64 * u64::from(args.count) * per_size
}

/// A run under way.
struct Bench<'a> {
    args: &'a BenchArgs,
    server: SocketAddr,
    /// Keys that the server holds for this run.
    stored: Vec<String>,
    progress: Progress,
    report: Report,
}

impl Bench<'_> {
    fn measure(&mut self) -> Result<(), String> {
        let args = self.args;
        for &geometry in &args.sizes {
            let keys = args.keys(geometry.value_bytes);
            if args.wants(Part::Rows) || args.wants(Part::Floors) {
                self.store(&keys, geometry.value_bytes)?;
            }
            if args.wants(Part::Rows) {
                self.rows(geometry, &keys)?;
            }
            if args.wants(Part::Floors) {
                self.floors(geometry, &keys)?;
            }
        }
        if args.wants(Part::Bars) { self.bars() } else { Ok(()) }
    }

    fn client(&self) -> Result<SliceClient, String> {
        SliceClient::connect(self.server, Duration::from_secs(30)).map_err(|e| e.to_string())
    }

    /// Puts values into the server.
    fn store(&mut self, keys: &[String], value_bytes: usize) -> Result<(), String> {
        self.progress.say(format!("storing {} × {}", keys.len(), format_bytes(value_bytes as u64)));
        let mut client = self.client()?;
        for key in keys {
            let value = Content::of(key).bytes(value_bytes);
            self.stored.push(key.clone());
            client.put(b"", key.as_bytes(), &value).map_err(|e| format!("cannot store `{key}`: {e}"))?;
            self.progress.0.inc(1);
        }
        Ok(())
    }

    /// Takes the values out of a server that was there before. What fails is only said: the figures hold.
    fn clean_up(&self) {
        let removed = self.client().and_then(|mut client| {
            self.stored
                .iter()
                .try_for_each(|key| client.remove(b"", key.as_bytes()).map(|_| ()).map_err(|e| e.to_string()))
        });
        if let Err(error) = removed {
            eprintln!("warning: values of the bench may be left in the server: {error}");
        }
    }

    fn rows(&mut self, geometry: Geometry, keys: &[String]) -> Result<(), String> {
        let progress = &self.progress;
        let done = |what: &str, values| {
            progress.say(format!("{what}, {}", format_bytes(geometry.value_bytes as u64)));
            progress.0.inc(values);
        };
        let (rows, shards) = rows::run_all(self.args, geometry, keys, self.server, &done)?;
        self.report.rows.extend(rows);
        self.report.caches.push(CacheReport { cache_bytes: geometry.cache_bytes, shards });
        Ok(())
    }

    fn floors(&mut self, geometry: Geometry, keys: &[String]) -> Result<(), String> {
        self.progress.say(format!("floors, {}", format_bytes(geometry.value_bytes as u64)));
        let mut copies = Copies::new(geometry.value_bytes, ROTATION, self.args.pages)?;
        for _ in 0..self.args.rounds {
            (0..copies.count()).for_each(|index| drop(copies.step(index)));
        }
        self.report.copy_floors.extend(copies.report());
        // Their memory goes before the receive loop's comes.
        drop(copies);
        let mut receive = ReceiveLoop::connect(self.server, ROTATION, geometry.value_bytes, self.args.pages)?;
        for _ in 0..self.args.rounds {
            keys.iter().try_for_each(|key| receive.read(key).map(|_| ()))?;
        }
        self.report.receive_floors.push(receive.report());
        Ok(())
    }

    fn bars(&mut self) -> Result<(), String> {
        let mut keys = self.args.keys(bars::COMPARED_BYTES);
        keys.truncate(ROTATION);
        if !keys.iter().all(|key| self.stored.contains(key)) {
            self.store(&keys, bars::COMPARED_BYTES)?;
        }
        let (args, server) = (self.args, self.server);
        self.progress.say("leased hits");
        self.report.bars.extend(hits::leased_hits(args)?);
        self.report.bars.push(dead_peer::reads(args)?);
        self.progress.say("copying hits");
        self.report.bars.push(bars::copying_hit(args, &keys, server)?);
        self.progress.say("cold reads");
        self.report.bars.extend(bars::cold_read(args, &keys, server)?);
        self.report.bars.extend(transports::compare(args, &keys, server)?);
        self.progress.say("stripes");
        let name = |bytes: usize, i| format!("hotslice-bench/stripes/{bytes}/{i}");
        let striped: Vec<_> = (0..stripes::STRIPED_COUNT).map(|i| name(stripes::STRIPED_BYTES, i)).collect();
        self.store(&striped, stripes::STRIPED_BYTES)?;
        self.report.bars.push(stripes::against_one_lane(args, &striped, server)?);
        let small: Vec<_> = (0..stripes::SMALL_COUNT).map(|i| name(stripes::SMALL_BYTES, i)).collect();
        self.store(&small, stripes::SMALL_BYTES)?;
        let large = name(stripes::large_bytes(args), 100);
        self.store(std::slice::from_ref(&large), stripes::large_bytes(args))?;
        self.report.bars.push(stripes::fairness(args, &small, &large, server)?);
        self.progress.say("utilisation");
        self.report.bars.extend(bars::utilisation(args)?);
        self.progress.say("start");
        self.report.bars.push(bars::start(args)?);
        Ok(())
    }
}
