//! What the kernel says about memory: hugepage pool, transparent hugepages, smaps, free memory.
//!
//! Reads only. Every file may be missing or hold something unexpected (containers mask `/proc` and `/sys`):
//! then the answer is "none" or "unknown", never a panic.

use std::fs::{self, File};
use std::io::{BufRead, BufReader};

use serde::Serialize;

use crate::machine::Machine;

/// The kernel's pool of explicit hugepages of the default size.
#[derive(Copy, Clone, Debug, Default, Eq, PartialEq, Serialize)]
pub struct HugepagePool {
    /// Bytes per page; 0 if the kernel has no explicit hugepages or `/proc/meminfo` cannot be read.
    pub page_bytes: usize,
    /// Pages in the pool.
    pub total: u64,
    /// Pages not in use, reserved ones included.
    pub free: u64,
    /// Free pages that are promised to a mapping already.
    pub reserved: u64,
}

impl HugepagePool {
    /// Pages that a new mapping can have.
    pub fn available(&self) -> u64 {
        self.free.saturating_sub(self.reserved)
    }
}

/// Whether the kernel gives transparent hugepages to anonymous memory.
#[derive(Copy, Clone, Debug, Eq, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ThpMode {
    /// To every mapping that is large enough.
    Always,
    /// To mappings that ask with `madvise`, as arenas do.
    Madvise,
    /// To none: `echo madvise > /sys/kernel/mm/transparent_hugepage/enabled` changes it.
    Never,
    /// The kernel has none, or does not say.
    Unavailable,
}

impl std::fmt::Display for ThpMode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            ThpMode::Always => "always",
            ThpMode::Madvise => "madvise",
            ThpMode::Never => "never",
            ThpMode::Unavailable => "unavailable",
        })
    }
}

/// The pool of explicit hugepages now. Blocking: reads `/proc/meminfo`.
pub fn hugepage_pool() -> HugepagePool {
    parse_pool(&fs::read_to_string("/proc/meminfo").unwrap_or_default())
}

/// The mode of transparent hugepages now. Blocking: reads a file in `/sys`.
pub fn thp_mode() -> ThpMode {
    parse_thp_mode(&fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or_default())
}

/// Bytes of a transparent hugepage; 0 if the kernel has none.
pub(super) fn thp_page_bytes() -> usize {
    fs::read_to_string("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
        .ok()
        .and_then(|text| text.trim().parse().ok())
        .filter(|bytes: &usize| bytes.is_power_of_two())
        .unwrap_or(0)
}

/// The tightest limit on memory that is known, with its name: what the machine has available, or what is left
/// below the limit of a control group that this process is in.
pub(super) fn memory_limit() -> Option<(u64, String)> {
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let available = meminfo_bytes(&meminfo, "MemAvailable:").map(|bytes| (bytes, "MemAvailable".to_owned()));
    let group = Machine::here().group_memory();
    let group = group.map(|limit| (limit.available_bytes, format!("what is left below {}", limit.file)));
    available.into_iter().chain(group).min_by_key(|(bytes, _)| *bytes)
}

fn meminfo_bytes(meminfo: &str, name: &str) -> Option<u64> {
    let rest = meminfo.lines().find_map(|line| line.strip_prefix(name))?;
    let kibibytes: u64 = rest.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kibibytes.checked_mul(1024)
}

fn parse_pool(meminfo: &str) -> HugepagePool {
    let count = |name| {
        let rest = meminfo.lines().find_map(|line| line.strip_prefix(name))?;
        rest.trim().parse::<u64>().ok()
    };
    let page_bytes = meminfo_bytes(meminfo, "Hugepagesize:")
        .and_then(|bytes| usize::try_from(bytes).ok())
        .filter(|bytes| bytes.is_power_of_two());
    let Some(page_bytes) = page_bytes else { return HugepagePool::default() };
    HugepagePool {
        page_bytes,
        total: count("HugePages_Total:").unwrap_or(0),
        free: count("HugePages_Free:").unwrap_or(0),
        reserved: count("HugePages_Rsvd:").unwrap_or(0),
    }
}

fn parse_thp_mode(enabled: &str) -> ThpMode {
    let chosen = enabled.split_whitespace().find_map(|word| word.strip_prefix('[')?.strip_suffix(']'));
    match chosen {
        Some("always") => ThpMode::Always,
        Some("madvise") => ThpMode::Madvise,
        Some("never") => ThpMode::Never,
        _ => ThpMode::Unavailable,
    }
}

/// Bytes of transparent hugepages behind each of `ranges` (start address, bytes), in their order, as
/// `/proc/self/smaps` reports them. A range counts the mappings that lie wholly inside it. All zero if smaps
/// cannot be read.
///
/// Blocking, and slow in a large process (the kernel walks the page tables of every mapping up to the last
/// one of ours), so it is called once per arena.
pub(super) fn huge_bytes_in(ranges: &[(usize, usize)]) -> Vec<usize> {
    match File::open("/proc/self/smaps") {
        Ok(file) => parse_smaps(BufReader::with_capacity(64 << 10, file), ranges),
        Err(_) => vec![0; ranges.len()],
    }
}

fn parse_smaps(smaps: impl BufRead, ranges: &[(usize, usize)]) -> Vec<usize> {
    let mut huge_bytes = vec![0; ranges.len()];
    let mut order: Vec<usize> = (0..ranges.len()).collect();
    order.sort_unstable_by_key(|&index| ranges[index].0);
    let Some(&highest) = order.last() else { return huge_bytes };
    let end_of_ours = ranges[highest].0 + ranges[highest].1;

    let mut inside = None;
    for line in smaps.lines() {
        let Ok(line) = line else { break };
        if let Some((start, end)) = parse_mapping(&line) {
            if start >= end_of_ours {
                break;
            }
            let after = order.partition_point(|&index| ranges[index].0 <= start);
            inside = order[..after].last().copied().filter(|&index| end <= ranges[index].0 + ranges[index].1);
        } else if let (Some(index), Some(bytes)) = (inside, meminfo_bytes(&line, "AnonHugePages:")) {
            huge_bytes[index] += usize::try_from(bytes).unwrap_or(0);
        }
    }
    huge_bytes
}

/// Start and end address of a mapping, if `line` is the first line of one (`7f00-7f10 rw-p ...`).
fn parse_mapping(line: &str) -> Option<(usize, usize)> {
    let (start, end) = line.split_once(' ')?.0.split_once('-')?;
    Some((usize::from_str_radix(start, 16).ok()?, usize::from_str_radix(end, 16).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pool_is_read_from_meminfo() {
        let meminfo = "MemTotal: 1 kB\nHugePages_Total:      24\nHugePages_Free:        7\n\
                       HugePages_Rsvd:        3\nHugePages_Surp:        0\nHugepagesize:       2048 kB\n";
        let pool = HugepagePool { page_bytes: 2 << 20, total: 24, free: 7, reserved: 3 };
        assert_eq!(parse_pool(meminfo), pool);
        let none = HugepagePool::default();
        for odd in [
            "",
            "MemTotal: 1 kB",
            "Hugepagesize: x kB",
            "Hugepagesize: 3 kB",
            "Hugepagesize: 2048",
            "Hugepagesize: 18446744073709551615 kB",
        ] {
            assert_eq!(parse_pool(odd), none, "{odd}");
        }
    }

    #[test]
    fn the_bracketed_thp_mode_counts() {
        assert_eq!(parse_thp_mode("always [madvise] never\n"), ThpMode::Madvise);
        assert_eq!(parse_thp_mode("[always] madvise never"), ThpMode::Always);
        assert_eq!(parse_thp_mode("always madvise [never]"), ThpMode::Never);
        assert_eq!(parse_thp_mode(""), ThpMode::Unavailable);
    }

    #[test]
    fn smaps_counts_only_mappings_inside_a_range() {
        let smaps = "1000-3000 rw-p 0 00:00 0\nAnonHugePages:  4 kB\n\
                     3000-5000 rw-p 0 00:00 0\nRss: 9 kB\nAnonHugePages:  8 kB\nVmFlags: rd wr\n\
                     5000-6000 ---p 0 00:00 0\nAnonHugePages:  99 kB\n\
                     8000-a000 rw-p 0 00:00 0\nAnonHugePages:  8 kB\n\
                     a000-b000 rw-p 0 00:00 0\nAnonHugePages:  4 kB\n\
                     f000-f800 rw-p 0 00:00 0\nAnonHugePages:  77 kB\n";
        // The first range is made of two mappings; the second is cut short by a mapping that sticks out.
        let ranges = [(0x8000, 0x3000), (0x1000, 0x4000), (0x4800, 0x900)];
        assert_eq!(parse_smaps(smaps.as_bytes(), &ranges), [12 << 10, 12 << 10, 0]);
        assert_eq!(parse_smaps(&b"\xff\xfe nonsense"[..], &ranges), [0, 0, 0]);
        assert!(parse_smaps(smaps.as_bytes(), &[]).is_empty());
    }

    #[test]
    fn the_memory_limit_is_sane_where_proc_says_it() {
        if let Some((bytes, name)) = memory_limit() {
            assert!(bytes > 1 << 20, "{name} is {bytes}");
        }
    }
}
