//! The page ladder: one block of memory, from the best kind of page that can be had.

use super::limits::hugepage_pool;
use serde::Serialize;
use std::alloc::Layout;
use std::io;
use std::ptr::NonNull;

macro_rules! words {
    ($type:ident { $($word:literal => $variant:ident),* $(,)? }) => {
        impl std::str::FromStr for $type {
            type Err = String;

            fn from_str(text: &str) -> Result<Self, String> {
                match text {
                    $($word => Ok(Self::$variant),)*
                    _ => Err(format!("`{text}` is none of {}", [$($word),*].join(", "))),
                }
            }
        }

        impl std::fmt::Display for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(match self { $(Self::$variant => $word),* })
            }
        }
    };
}

/// Where pages may come from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum PagePolicy {
    /// Explicit hugepages or an error.
    Required,
    /// Explicit hugepages, else transparent ones, else 4 KiB pages, block by block.
    #[default]
    Preferred,
    /// Base pages (4 KiB on x86-64).
    Off,
}
words!(PagePolicy { "required" => Required, "preferred" => Preferred, "off" => Off });

/// Whether something that the machine may refuse (locking, registering) is asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum LockPolicy {
    /// A refusal is an error.
    Required,
    /// A refusal is a warning.
    #[default]
    Preferred,
    /// Not asked for.
    Off,
}
words!(LockPolicy { "required" => Required, "preferred" => Preferred, "off" => Off });

/// The kind of page that a block really has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum PageKind {
    /// Explicit hugepages (hugetlb): never split, never swapped.
    HugeTlb,
    /// Transparent hugepages, as smaps said after populating.
    Transparent,
    /// Base pages.
    Base,
}

/// Mapped, populated memory of one block. Unmapped on drop.
#[derive(Debug)]
pub(super) struct Mapping {
    base: NonNull<u8>,
    bytes: usize,
    kind: PageKind,
}

// SAFETY: a mapping is an address range; who may touch its bytes is decided by its users.
unsafe impl Send for Mapping {}
// SAFETY: as above; the methods only read the fields.
unsafe impl Sync for Mapping {}

impl Mapping {
    pub(super) fn base(&self) -> NonNull<u8> {
        self.base
    }

    pub(super) fn kind(&self) -> PageKind {
        self.kind
    }

    /// Explicit hugepages, or `None` if the pool has too few.
    pub(super) fn hugetlb(bytes: usize) -> Option<io::Result<Self>> {
        let layout = hugetlb_layout(bytes)?;
        // SAFETY: the layout is not empty.
        let base = NonNull::new(unsafe { hugepage_rs::alloc(layout) })?;
        Some(Self { base, bytes, kind: PageKind::HugeTlb }.prepared())
    }

    /// Base pages, or transparent hugepages if `huge` and the kernel gives them: see [`Mapping::confirm`].
    pub(super) fn anonymous(bytes: usize, huge: bool) -> io::Result<Self> {
        let align = if huge { huge_align() } else { base_page_bytes() };
        let mapping = Self { base: reserve(bytes, align)?, bytes, kind: PageKind::Base };
        if huge {
            // A refusal (no THP in this kernel) leaves base pages, which `confirm` finds.
            let _ = mapping.advise(libc::MADV_HUGEPAGE);
        }
        mapping.prepared()
    }

    /// Takes note of what smaps says about an anonymous mapping: all of it huge, or not.
    pub(super) fn confirm(&mut self, smaps: &[SmapsEntry]) {
        let start = self.base.as_ptr() as usize;
        if self.kind == PageKind::Base && huge_bytes(smaps, start, start + self.bytes) == self.bytes {
            self.kind = PageKind::Transparent;
        }
    }

    /// Populates, and keeps the pages out of forks and core dumps.
    fn prepared(self) -> io::Result<Self> {
        // A child that shared these pages would make the parent's next write move them (copy on write) under
        // a device that has their addresses.
        self.advise(libc::MADV_DONTFORK)?;
        self.advise(libc::MADV_DONTDUMP)?;
        self.populate()?;
        Ok(self)
    }

    fn advise(&self, advice: libc::c_int) -> io::Result<()> {
        // SAFETY: the range is this mapping's own; none of the advices used here changes its contents.
        match unsafe { libc::madvise(self.base.as_ptr().cast(), self.bytes, advice) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Backs every page, for writing.
    fn populate(&self) -> io::Result<()> {
        // Linux 5.14. It fails with an error where touching would raise SIGBUS (a cgroup's hugetlb limit).
        match self.advise(libc::MADV_POPULATE_WRITE) {
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => self.touch(),
            done => done,
        }
    }

    fn touch(&self) -> io::Result<()> {
        for offset in (0..self.bytes).step_by(base_page_bytes()) {
            // SAFETY: inside this mapping, which nobody else knows yet. Volatile: it must happen.
            unsafe { self.base.as_ptr().add(offset).write_volatile(0) };
        }
        Ok(())
    }

    /// Locks the pages. Explicit hugepages are never swapped and need no lock.
    pub(super) fn lock(&self) -> io::Result<()> {
        if self.kind == PageKind::HugeTlb {
            return Ok(());
        }
        // SAFETY: the range is this mapping's own.
        match unsafe { libc::mlock(self.base.as_ptr().cast(), self.bytes) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        match (self.kind, hugetlb_layout(self.bytes)) {
            // SAFETY: allocated with this very layout by `hugetlb`; nobody uses it any longer.
            (PageKind::HugeTlb, Some(layout)) => unsafe {
                hugepage_rs::dealloc(self.base.as_ptr(), layout);
            },
            // SAFETY: mapped by `anonymous` with this length; nobody uses it any longer.
            _ => unsafe {
                libc::munmap(self.base.as_ptr().cast(), self.bytes);
            },
        }
    }
}

/// The layout of a block of explicit hugepages; `None` where the kernel has none (the crate would panic).
fn hugetlb_layout(bytes: usize) -> Option<Layout> {
    let page_bytes = hugepage_bytes();
    if page_bytes == 0 || !bytes.is_multiple_of(page_bytes) {
        return None;
    }
    Layout::from_size_align(bytes, page_bytes).ok()
}

/// Size of explicit hugepages, 0 where there are none. Does not change while the system runs.
pub(super) fn hugepage_bytes() -> usize {
    static BYTES: std::sync::OnceLock<usize> = std::sync::OnceLock::new();
    *BYTES.get_or_init(|| hugepage_pool().page_bytes)
}

fn base_page_bytes() -> usize {
    // SAFETY: a plain query.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096)
}

/// Alignment at which transparent hugepages can form.
fn huge_align() -> usize {
    match hugepage_bytes() {
        0 => 2 << 20,
        bytes => bytes,
    }
}

/// Maps `bytes` of private anonymous memory at a multiple of `align`, by mapping more and giving back.
fn reserve(bytes: usize, align: usize) -> io::Result<NonNull<u8>> {
    let all = bytes.checked_add(align).ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))?;
    // SAFETY: a new mapping at an address of the kernel's choice.
    let start = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            all,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        )
    };
    if start == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    let before = (start as usize).next_multiple_of(align) - start as usize;
    let base = start.cast::<u8>().wrapping_add(before);
    for (from, len) in [(start.cast::<u8>(), before), (base.wrapping_add(bytes), align - before)] {
        if len > 0 {
            // SAFETY: gives back parts of the mapping made above that nobody has seen.
            unsafe { libc::munmap(from.cast(), len) };
        }
    }
    NonNull::new(base).ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))
}

/// One entry of /proc/self/smaps: address range and bytes of transparent hugepages in it.
pub(super) struct SmapsEntry {
    from: usize,
    to: usize,
    huge_bytes: usize,
}

/// Reads /proc/self/smaps; empty if it cannot be read, which then confirms nothing.
pub(super) fn smaps() -> Vec<SmapsEntry> {
    parse_smaps(&std::fs::read_to_string("/proc/self/smaps").unwrap_or_default())
}

fn parse_smaps(text: &str) -> Vec<SmapsEntry> {
    let mut entries: Vec<SmapsEntry> = Vec::new();
    let address = |text| usize::from_str_radix(text, 16).ok();
    for line in text.lines() {
        let mut words = line.split_whitespace();
        let first = words.next().unwrap_or("");
        if first == "AnonHugePages:" {
            let kb = words.next().and_then(|kb| kb.parse::<usize>().ok()).unwrap_or(0);
            if let Some(entry) = entries.last_mut() {
                entry.huge_bytes = kb * 1024;
            }
        } else if let Some((from, to)) = first.split_once('-')
            && let (Some(from), Some(to)) = (address(from), address(to))
        {
            entries.push(SmapsEntry { from, to, huge_bytes: 0 });
        }
    }
    entries
}

/// Bytes of `[start, end)` that are surely huge. The kernel merges neighbouring blocks into one entry; what
/// is not huge in an entry is counted against every range in it.
fn huge_bytes(entries: &[SmapsEntry], start: usize, end: usize) -> usize {
    let credit = |entry: &SmapsEntry| {
        let overlap = entry.to.min(end).saturating_sub(entry.from.max(start));
        overlap.saturating_sub((entry.to - entry.from).saturating_sub(entry.huge_bytes))
    };
    entries.iter().map(credit).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn smaps_are_read_with_care() {
        let smaps = "7f0000000000-7f0002000000 rw-p 00000000 00:00 0 \nRss: 1 kB\nAnonHugePages:     32768 kB\n\
                     7f0002000000-7f0003000000 rw-p 00000000 00:00 0 \nAnonHugePages:     2048 kB\nVmFlags: rd\n";
        let base = 0x7f00_0000_0000;
        let entries = parse_smaps(smaps);
        assert_eq!(huge_bytes(&entries, base, base + (16 << 20)), 16 << 20);
        assert_eq!(huge_bytes(&entries, base + (32 << 20), base + (48 << 20)), 2 << 20);
        assert_eq!(huge_bytes(&entries, base + (32 << 20), base + (33 << 20)), 0);
        assert_eq!(huge_bytes(&entries, 0, 4096), 0);
    }

    #[test]
    fn words_round_trip() {
        for policy in [PagePolicy::Required, PagePolicy::Preferred, PagePolicy::Off] {
            assert_eq!(policy.to_string().parse(), Ok(policy));
        }
        assert!("Required".parse::<LockPolicy>().unwrap_err().contains("preferred"));
    }

    #[test]
    fn blocks_are_aligned_and_zero() {
        for huge in [false, true] {
            let mapping = Mapping::anonymous(4 << 20, huge).unwrap();
            let align = if huge { 2 << 20 } else { 4096 };
            assert!((mapping.base().as_ptr() as usize).is_multiple_of(align));
            // SAFETY: populated above, and nobody writes to it.
            let bytes = unsafe { std::slice::from_raw_parts(mapping.base().as_ptr(), 4 << 20) };
            assert!(bytes.iter().all(|&byte| byte == 0));
        }
    }
}
