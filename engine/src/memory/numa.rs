//! On which NUMA node memory lies: asked for before it is touched, and read back from the kernel afterwards.
//!
//! Knows nodes by number only. Only a machine with one node was run; what two look like is tested on texts.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::ptr::NonNull;

use super::error::last_errno;

/// Nodes that fit into the mask that is handed to the kernel.
const NODES_MAX: u32 = 1024;
/// Distance of the pages that are asked about where pages are small: the answer is for the memory around them.
const SAMPLE_BYTES: usize = 64 << 10;
/// Pages asked about in one call.
const PAGES_PER_CALL: usize = 1024;

/// Asks that pages yet to be touched come from `node` while it has any, and else from others: a node that is
/// full must not cost the process its life. Returns the errno of a refusal.
pub(super) fn prefer(base: NonNull<u8>, bytes: usize, node: u32) -> Result<(), i32> {
    if node >= NODES_MAX {
        return Err(libc::EINVAL);
    }
    const BITS: u32 = libc::c_ulong::BITS;
    let mut mask = [0 as libc::c_ulong; (NODES_MAX / BITS) as usize];
    mask[(node / BITS) as usize] = 1 << (node % BITS);
    // The kernel takes one bit less than it is told there are.
    let bits = libc::c_ulong::from(NODES_MAX + 1);
    // SAFETY: mbind reads the mask, which has that many bits (the last one is not read), and changes no bytes.
    let result = unsafe {
        libc::syscall(libc::SYS_mbind, base.as_ptr(), bytes, libc::MPOL_PREFERRED, mask.as_ptr(), bits, 0)
    };
    if result == 0 { Ok(()) } else { Err(last_errno()) }
}

/// Bytes on each node, for each of `ranges` (start address, bytes), which are populated with pages of
/// `page_bytes` at least. Empty maps where the kernel does not say.
pub(super) fn bytes_by_node(ranges: &[(usize, usize)], page_bytes: usize) -> Vec<BTreeMap<u32, usize>> {
    let step = page_bytes.max(SAMPLE_BYTES);
    let asked: Option<Vec<_>> = ranges.iter().map(|&(start, bytes)| ask(start, bytes, step)).collect();
    // Containers often forbid the question; the file says the same, for all of the process.
    asked.unwrap_or_else(|| match File::open("/proc/self/numa_maps") {
        Ok(file) => parse_numa_maps(BufReader::with_capacity(64 << 10, file), ranges),
        Err(_) => vec![BTreeMap::new(); ranges.len()],
    })
}

/// Asks about one page in every `step` bytes. `None` if the kernel does not answer.
fn ask(start: usize, bytes: usize, step: usize) -> Option<BTreeMap<u32, usize>> {
    let mut by_node = BTreeMap::new();
    let mut places = (start..start + bytes).step_by(step);
    loop {
        let pages: Vec<usize> = places.by_ref().take(PAGES_PER_CALL).collect();
        if pages.is_empty() {
            return Some(by_node);
        }
        let mut nodes = vec![-1 as libc::c_int; pages.len()];
        // SAFETY: without target nodes the call moves nothing: it reads as many addresses as it is told and writes
        // as many numbers. Addresses that are not mapped are answered with an error number.
        let result = unsafe {
            let none = std::ptr::null::<libc::c_int>();
            libc::syscall(libc::SYS_move_pages, 0, pages.len(), pages.as_ptr(), none, nodes.as_mut_ptr(), 0)
        };
        if result != 0 {
            return None;
        }
        for (page, node) in pages.into_iter().zip(nodes) {
            if let Ok(node) = u32::try_from(node) {
                *by_node.entry(node).or_insert(0) += step.min(start + bytes - page);
            }
        }
    }
}

/// Sums up the lines of `numa_maps` whose mapping starts in each of `ranges`.
fn parse_numa_maps(text: impl BufRead, ranges: &[(usize, usize)]) -> Vec<BTreeMap<u32, usize>> {
    let mut by_node = vec![BTreeMap::new(); ranges.len()];
    for line in text.lines() {
        let Ok(line) = line else { break };
        let mut words = line.split(' ');
        let Some(start) = words.next().and_then(|word| usize::from_str_radix(word, 16).ok()) else {
            continue;
        };
        let inside = |&(first, bytes): &(usize, usize)| (first..first + bytes).contains(&start);
        let Some(range) = ranges.iter().position(inside) else { continue };
        let page_kib = line.split(' ').find_map(|word| word.strip_prefix("kernelpagesize_kB=")?.parse().ok());
        let page_bytes = page_kib.unwrap_or(4usize) << 10;
        for word in words {
            let pages = word.strip_prefix('N').and_then(|rest| rest.split_once('='));
            if let Some((node, pages)) = pages
                && let (Ok(node), Ok(pages)) = (node.parse::<u32>(), pages.parse::<usize>())
            {
                *by_node[range].entry(node).or_insert(0) += pages * page_bytes;
            }
        }
    }
    by_node
}

#[cfg(test)]
mod tests {
    use super::super::pages::Mapping;
    use super::*;

    #[test]
    fn numa_maps_of_two_nodes_are_summed_up_by_range() {
        // As a machine with two nodes writes them: hugetlb, transparent hugepages, base pages, a file.
        let text = "7f0000000000 prefer:1 file=/anon_hugepage\\040(deleted) huge anon=8 dirty=8 N1=8 kernelpagesize_kB=2048\n\
                    7f0001000000 default anon=4096 dirty=4096 active=0 N0=1024 N1=3072 kernelpagesize_kB=4\n\
                    7f0002000000 default\n\
                    7f0003000000 default file=/usr/lib/libc.so.6 mapped=7 N0=7 kernelpagesize_kB=4\n\
                    nonsense N0=5\n";
        let ranges = [(0x7f00_0100_0000, 16 << 20), (0x7f00_0000_0000, 16 << 20), (0x7f00_0200_0000, 4096)];
        let expected =
            [BTreeMap::from([(0, 4 << 20), (1, 12 << 20)]), BTreeMap::from([(1, 16 << 20)]), BTreeMap::new()];
        assert_eq!(parse_numa_maps(text.as_bytes(), &ranges), expected);
        assert_eq!(parse_numa_maps(&b"\xff\xfe"[..], &ranges[..1]), [BTreeMap::new()]);
    }

    #[test]
    fn the_kernel_puts_memory_where_it_is_asked_to_and_says_so() {
        let mapping = Mapping::anonymous(4 << 20, 4096).unwrap();
        mapping.want_transparent(false);
        let preferred = prefer(mapping.base(), mapping.bytes(), 0);
        mapping.populate().unwrap();
        let range = (mapping.base().addr().get(), mapping.bytes());
        let found = bytes_by_node(&[range], 4096).remove(0);
        if preferred.is_err() || found.is_empty() {
            return eprintln!(
                "skipped: {preferred:?}, {found:?}: the kernel does not do NUMA for this process"
            );
        }
        assert_eq!(found.values().sum::<usize>(), 4 << 20);
        // Both ways of asking agree.
        let file = File::open("/proc/self/numa_maps").unwrap();
        assert_eq!(parse_numa_maps(BufReader::new(file), &[range]), std::slice::from_ref(&found));
        if super::super::mapper::machine_nodes() == 1 {
            assert_eq!(found, BTreeMap::from([(0, 4 << 20)]));
        }
        assert_eq!(prefer(mapping.base(), mapping.bytes(), NODES_MAX), Err(libc::EINVAL));
    }
}
