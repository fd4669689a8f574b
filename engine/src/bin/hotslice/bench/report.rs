//! What the bench says, for people and for programs.

use super::bars::Bar;
use super::floors::CopyFloor;
use super::machine::Machine;
use super::measure::Percentiles;
use super::rows::{Mode, Row};
use comfy_table::{CellAlignment, ContentArrangement, Table, presets};
use hotslice::size::format_bytes;
use serde::Serialize;

#[derive(Clone, Debug, Serialize)]
pub struct ReceiveFloor {
    pub value_bytes: usize,
    pub ms: Percentiles,
    pub gb_per_s: f64,
    pub cpu_s_per_gb: f64,
    pub congestion_control: String,
}

/// Everything that was measured.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    pub machine: Machine,
    /// Pages that the largest cache obtained.
    pub memory: Option<hotslice::ShardReport>,
    pub rows: Vec<Row>,
    pub copy_floors: Vec<CopyFloor>,
    pub receive_floors: Vec<ReceiveFloor>,
    pub bars: Vec<Bar>,
    pub values_checked: u64,
    pub bytes_checked: u64,
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

impl Report {
    pub fn print(&self) {
        println!("machine: {}", self.machine.text());
        if let Some(report) = &self.memory {
            let arena = &report.arena;
            println!(
                "cache memory: {} in blocks of {}: {} on hugetlb, {} on transparent hugepages, {} on base pages; {} \
                 locked; ring {}",
                format_bytes(arena.arena_bytes as u64),
                format_bytes(arena.block_bytes as u64),
                format_bytes(arena.hugetlb_bytes as u64),
                format_bytes(arena.transparent_bytes as u64),
                format_bytes(arena.base_bytes as u64),
                format_bytes(arena.locked_bytes as u64),
                report.ring.setup.join("|"),
            );
        }
        self.print_rows();
        self.print_floors();
        self.print_bars();
        println!(
            "\nchecked {} values, {:.1} GB, byte by byte: no difference",
            self.values_checked,
            self.bytes_checked as f64 / 1e9
        );
    }

    fn print_rows(&self) {
        if self.rows.is_empty() {
            return;
        }
        println!("\nreads over TCP (times in ms per key; GB = 10^9 bytes)");
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
            "direct %",
        ]);
        for row in &self.rows {
            let [p50, p90, p99, p99_9, max] = percentiles(&row.ms);
            let received = row.received_direct_bytes + row.received_copied_bytes;
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
                format!("{:.0}", row.hit_ratio * 100.0),
                format!("{:.0}", 100.0 * row.received_direct_bytes as f64 / received.max(1) as f64),
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
                table.add_row([
                    floor.method.to_owned(),
                    format_bytes(floor.value_bytes as u64),
                    p50,
                    p90,
                    p99,
                    p99_9,
                    max,
                    format!("{:.2}", floor.gb_per_s),
                    if floor.used_by_engine { "yes" } else { "" }.to_owned(),
                ]);
            }
            right_align(&mut table, 2);
            println!("{table}");
        }
        if !self.receive_floors.is_empty() {
            println!(
                "\nfloor: blocking recv(MSG_WAITALL) loop, same server, same kind of memory (ms per value)"
            );
            let mut table = table(&[
                "value",
                "p50",
                "p90",
                "p99",
                "p99.9",
                "max",
                "GB/s",
                "CPU s/GB",
                "congestion control",
            ]);
            for floor in &self.receive_floors {
                let [p50, p90, p99, p99_9, max] = percentiles(&floor.ms);
                table.add_row([
                    format_bytes(floor.value_bytes as u64),
                    p50,
                    p90,
                    p99,
                    p99_9,
                    max,
                    format!("{:.2}", floor.gb_per_s),
                    format!("{:.4}", floor.cpu_s_per_gb),
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
        let mut table = table(&["figure", "measured", "bar", ""]);
        for bar in &self.bars {
            let verdict = if bar.met { "met" } else { "MISSED" };
            table.add_row([bar.what.as_str(), &bar.figure, &bar.bar, verdict]);
        }
        println!("{table}");
    }
}
