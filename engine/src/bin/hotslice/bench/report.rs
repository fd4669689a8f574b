//! What the bench says, for people and for programs.

use super::args::BenchArgs;
use super::bars::{Bar, Bound};
use super::child::ServerMemory;
use super::floors::{CopyFloor, ReceiveFloor};
use super::machine::Machine;
use super::measure::Percentiles;
use super::rows::{Mode, Row};
use comfy_table::{CellAlignment, ContentArrangement, Table, presets};
use hotslice::ShardReport;
use hotslice::size::format_bytes;
use serde::Serialize;

/// Everything that was measured.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    pub settings: BenchArgs,
    pub machine: Machine,
    /// Pages of the server, if the bench started it.
    pub server_memory: Option<ServerMemory>,
    pub caches: Vec<CacheReport>,
    pub rows: Vec<Row>,
    pub copy_floors: Vec<CopyFloor>,
    pub receive_floors: Vec<ReceiveFloor>,
    pub bars: Vec<Bar>,
}

/// What the shards of a cache obtained.
#[derive(Clone, Debug, Serialize)]
pub struct CacheReport {
    pub cache_bytes: u64,
    pub shards: Vec<ShardReport>,
}

fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::ASCII_MARKDOWN).set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(header.to_vec());
    table
}

fn right_align(table: &mut Table, from: usize) {
    for column in table.column_iter_mut().skip(from) {
        column.set_cell_alignment(CellAlignment::Right);
    }
}

fn percentiles(ms: &Percentiles) -> [String; 5] {
    [ms.p50, ms.p90, ms.p99, ms.p99_9, ms.max].map(milliseconds)
}

/// Four significant digits: hits take microseconds, misses milliseconds.
fn milliseconds(ms: f64) -> String {
    match ms {
        ms if ms < 0.01 => format!("{ms:.5}"),
        ms if ms < 1.0 => format!("{ms:.4}"),
        ms => format!("{ms:.2}"),
    }
}

/// How memory is spread over kinds of pages.
fn pages(bytes: usize, hugetlb: usize, transparent: usize, base: usize) -> String {
    let part = |part: usize, name: &str| (part > 0).then(|| format!("{} {name}", format_bytes(part as u64)));
    let parts =
        [part(hugetlb, "hugetlb"), part(transparent, "transparent hugepages"), part(base, "base pages")];
    let parts: Vec<String> = parts.into_iter().flatten().collect();
    format!("{} ({})", format_bytes(bytes as u64), parts.join(", "))
}

impl Report {
    /// Prints it for people, on standard output.
    pub fn print(&self) {
        println!("machine: {}", self.machine.text());
        if let Some(memory) = &self.server_memory {
            let ServerMemory { arena_bytes, hugetlb_bytes, transparent_bytes, base_bytes } = *memory;
            println!("server: {}", pages(arena_bytes, hugetlb_bytes, transparent_bytes, base_bytes));
        }
        self.caches.iter().for_each(print_cache);
        self.print_rows();
        self.print_floors();
        self.print_bars();
        println!(
            "\nevery byte of every value that was read over TCP or copied out was checked: no difference"
        );
    }

    fn print_rows(&self) {
        if self.rows.is_empty() {
            return;
        }
        println!(
            "\nreads, ms per key (GB = 10^9 bytes; all columns but the two of rounds are over all rounds)"
        );
        let mut table = table(&[
            "call",
            "value",
            "cache",
            "as",
            "first round",
            "later rounds",
            "p50",
            "p90",
            "p99",
            "p99.9",
            "max",
            "GB/s",
            "CPU s/GB",
            "hits %",
            "GB direct",
            "GB copied",
        ]);
        for row in &self.rows {
            let [p50, p90, p99, p99_9, max] = percentiles(&row.ms);
            table.add_row([
                if row.batch == 1 { "get".to_owned() } else { format!("batch of {}", row.batch) },
                format_bytes(row.value_bytes as u64),
                match row.cache_on {
                    true => format_bytes(row.cache_bytes),
                    false => "off".to_owned(),
                },
                match row.mode {
                    Mode::Lease => "lease".to_owned(),
                    Mode::Copy => "copy".to_owned(),
                },
                milliseconds(row.first_round_ms),
                milliseconds(row.later_rounds_ms),
                p50,
                p90,
                p99,
                p99_9,
                max,
                format!("{:.2}", row.gb_per_s),
                format!("{:.4}", row.cpu_s_per_gb),
                format!("{:.0}", row.traffic.hit_ratio * 100.0),
                gigabytes(row.traffic.received_direct_bytes),
                gigabytes(row.traffic.received_copied_bytes),
            ]);
        }
        right_align(&mut table, 4);
        println!("{table}");
    }

    fn print_floors(&self) {
        if !self.copy_floors.is_empty() {
            println!("\nfloor: copies over rotating blocks (ms per copy)");
            let mut table =
                table(&["method", "value", "p50", "p90", "p99", "p99.9", "max", "GB/s", "the engine's"]);
            for floor in &self.copy_floors {
                let [p50, p90, p99, p99_9, max] = percentiles(&floor.ms);
                let value = format_bytes(floor.value_bytes as u64);
                let speed = format!("{:.2}", floor.gb_per_s);
                let ours = if floor.used_by_engine { "yes" } else { "" }.to_owned();
                table.add_row([floor.method.to_owned(), value, p50, p90, p99, p99_9, max, speed, ours]);
            }
            right_align(&mut table, 2);
            println!("{table}");
        }
        if !self.receive_floors.is_empty() {
            println!(
                "\nfloor: blocking recv(MSG_WAITALL) loop, same server, same kind of memory, no checksum (ms per \
                 value)"
            );
            let head =
                ["value", "p50", "p90", "p99", "p99.9", "max", "GB/s", "CPU s/GB", "congestion control"];
            let mut table = table(&head);
            for floor in &self.receive_floors {
                let [p50, p90, p99, p99_9, max] = percentiles(&floor.ms);
                let value = format_bytes(floor.value_bytes as u64);
                let (speed, cpu) = (format!("{:.2}", floor.gb_per_s), format!("{:.4}", floor.cpu_s_per_gb));
                table.add_row([
                    value,
                    p50,
                    p90,
                    p99,
                    p99_9,
                    max,
                    speed,
                    cpu,
                    floor.congestion_control.clone(),
                ]);
            }
            right_align(&mut table, 1);
            println!("{table}");
        }
    }

    fn print_bars(&self) {
        if self.bars.is_empty() {
            return;
        }
        println!("\nbars (ratios are of medians within this run)");
        let mut table = table(&["figure", "measured", "bar", "", "made of"]);
        for bar in &self.bars {
            let sign = match bar.bound {
                Bound::AtLeast => '≥',
                Bound::AtMost => '≤',
            };
            let measured = match bar.unit {
                "×" | "s" => format!("{:.2} {}", bar.value, bar.unit),
                unit => format!("{:.0} {unit}", bar.value),
            };
            let verdict = if bar.met { "pass" } else { "MISS" };
            let limit = format!("{sign} {} {}", bar.bar, bar.unit);
            table.add_row([bar.what.as_str(), measured.trim_end(), limit.trim_end(), verdict, &bar.note]);
        }
        if let Some(column) = table.column_mut(1) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        println!("{table}");
    }
}

fn gigabytes(bytes: u64) -> String {
    format!("{:.2}", bytes as f64 / 1e9)
}

fn print_cache(cache: &CacheReport) {
    for (index, shard) in cache.shards.iter().enumerate() {
        let arena = &shard.arena;
        println!(
            "cache of {}, shard {index}: {} in blocks of {}, {} locked, ready after {:.0} ms, {} {}",
            format_bytes(cache.cache_bytes),
            pages(arena.arena_bytes, arena.hugetlb_bytes, arena.transparent_bytes, arena.base_bytes),
            format_bytes(arena.block_bytes as u64),
            format_bytes(arena.locked_bytes as u64),
            shard.start_ms,
            shard.transport.name,
            shard.transport.setup.join("|"),
        );
        arena.warnings.iter().for_each(|warning| println!("  note: {warning}"));
        if let Some(reason) = &arena.not_locked {
            println!("  note: not locked: {reason}");
        }
        if let Some(reason) = &shard.transport.not_registered
            && shard.transport.name == "io_uring"
        {
            println!("  note: blocks are not registered with the ring: {reason}");
        }
    }
}
