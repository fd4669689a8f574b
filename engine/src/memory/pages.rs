//! One block's mapping: a rung of the page ladder, its advice, and pages behind all of it.
//!
//! Knows nothing of arenas and policies: each function does one rung or fails.
//!
//! * **Explicit hugepages** come from `hugepage_rs`: anonymous, private, reserved in the pool by the mapping
//!   itself, so a pool that is too small fails here and not at the first touch.
//! * **Other blocks** are placed at a multiple of the transparent hugepage by mapping more than needed and
//!   giving back what sticks out. A page without access stays behind each: a write past the end of a block
//!   faults instead of reaching a neighbour, and the kernel cannot merge two blocks into one mapping, which
//!   is what makes the figures in smaps exact per block.
//! * **Populating never raises SIGBUS**: the pages are asked for with MADV_POPULATE_WRITE, or on kernels
//!   before 5.14 by letting the kernel write into them, and both return an error if there is no page.
//! * **A forked child never sees a block** (MADV_DONTFORK): with copy-on-write, the parent's next write
//!   would move to a new page while a device or io_uring still uses the old one.

use std::alloc::Layout;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::process;
use std::ptr::{self, NonNull};

use super::error::last_errno;
use super::{MemoryError, PageKind};

/// iovecs per `readv` when pages are touched by the kernel: the kernel's limit (UIO_MAXIOV).
const TOUCHES_PER_CALL: usize = 1024;

/// What a mapping came from, to give it back the same way.
enum Source {
    /// `hugepage_rs::alloc` with this layout.
    HugeTlb(Layout),
    /// mmap of the block and the page without access behind it; this many bytes in all.
    Anonymous { mapped_bytes: usize },
}

/// A block's memory: readable and writable, owned, unmapped on drop.
pub(super) struct Mapping {
    base: NonNull<u8>,
    bytes: usize,
    /// Distance of the pages to touch when populating by hand.
    page_bytes: usize,
    source: Source,
    /// The process that mapped it. In a forked child the addresses are not mapped, or are something else's.
    owner_pid: u32,
}

// SAFETY: a mapping is plain memory without thread affinity, and `Mapping` gives out its address only; what
// threads do with the bytes is ordered by those who use the address.
unsafe impl Send for Mapping {}
// SAFETY: as above; `&Mapping` allows nothing but reading the fields, which never change.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `bytes` bytes of explicit hugepages of `page_bytes` bytes (0: the kernel has none). Nothing is
    /// populated yet. `bytes` is a non-zero multiple of the page size; anything else is EINVAL.
    pub(super) fn hugetlb(bytes: usize, page_bytes: usize) -> Result<Mapping, i32> {
        // hugepage_rs panics where /proc/meminfo names no hugepage size; there the caller has 0 here.
        if page_bytes == 0 {
            return Err(libc::ENOSYS);
        }
        if bytes == 0 || !bytes.is_multiple_of(page_bytes) {
            return Err(libc::EINVAL);
        }
        let layout = Layout::from_size_align(bytes, page_bytes).map_err(|_| libc::EINVAL)?;
        // SAFETY: the layout's size is not zero.
        let base = unsafe { hugepage_rs::alloc(layout) };
        let base = NonNull::new(base).ok_or_else(last_errno)?;
        let source = Source::HugeTlb(layout);
        Ok(Mapping { base, bytes, page_bytes, source, owner_pid: process::id() })
    }

    /// Maps `bytes` bytes of ordinary memory at a multiple of `align_bytes` (a power of two), with a page
    /// without access behind it. Nothing is populated yet.
    pub(super) fn anonymous(bytes: usize, align_bytes: usize) -> Result<Mapping, MemoryError> {
        let page_bytes = base_page_bytes();
        let align_bytes = align_bytes.max(page_bytes);
        // The block, the page behind it, and up to `align_bytes - page_bytes` to skip before it.
        let reserved_bytes = bytes + align_bytes;
        // SAFETY: a new anonymous mapping wherever the kernel likes; it replaces nothing.
        let reserved = unsafe {
            libc::mmap(
                ptr::null_mut(),
                reserved_bytes,
                libc::PROT_NONE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if reserved == libc::MAP_FAILED {
            return Err(MemoryError::Map { call: "mmap", bytes: reserved_bytes, errno: last_errno() });
        }
        let reserved = reserved.cast::<u8>();
        let head_bytes = reserved.addr().wrapping_neg() & (align_bytes - 1);
        let mapped_bytes = bytes + page_bytes;
        // SAFETY: inside the reservation: both are multiples of the page, so `head_bytes` is at most `align_bytes`
        // less a page, and `head_bytes + mapped_bytes` at most `reserved_bytes`.
        let base = unsafe { reserved.add(head_bytes) };
        unmap(reserved, head_bytes);
        unmap(base.wrapping_add(mapped_bytes), reserved_bytes - head_bytes - mapped_bytes);

        let Some(base) = NonNull::new(base) else {
            return Err(MemoryError::Map { call: "mmap", bytes, errno: libc::EFAULT });
        };
        // Owned from here on: an error below drops it.
        let source = Source::Anonymous { mapped_bytes };
        let mapping = Mapping { base, bytes, page_bytes, source, owner_pid: process::id() };
        // SAFETY: the range is ours and nobody has its address yet; the last page stays without access.
        match unsafe { libc::mprotect(base.as_ptr().cast(), bytes, libc::PROT_READ | libc::PROT_WRITE) } {
            0 => Ok(mapping),
            _ => Err(MemoryError::Map { call: "mprotect", bytes, errno: last_errno() }),
        }
    }

    /// First byte.
    pub(super) fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Bytes, without the page without access.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// The kind as it is known without smaps: explicit hugepages or not.
    pub(super) fn kind(&self) -> PageKind {
        match self.source {
            Source::HugeTlb(_) => PageKind::HugeTlb,
            Source::Anonymous { .. } => PageKind::Base,
        }
    }

    /// Keeps the block out of forked children and out of core dumps.
    pub(super) fn keep_private(&self) -> Result<(), MemoryError> {
        self.advise(libc::MADV_DONTFORK)
            .map_err(|errno| MemoryError::Advise { advice: "MADV_DONTFORK", errno })?;
        // Without it a core dump is larger, nothing else; so a refusal is no error.
        let _ = self.advise(libc::MADV_DONTDUMP);
        Ok(())
    }

    /// Asks for transparent hugepages, or declines them. A kernel without them says EINVAL; what was really
    /// obtained is read from smaps later.
    pub(super) fn want_transparent(&self, wanted: bool) {
        let _ = self.advise(if wanted { libc::MADV_HUGEPAGE } else { libc::MADV_NOHUGEPAGE });
    }

    /// Puts pages behind all of the block, zeroed, from the calling thread's NUMA node where the process's
    /// memory policy leaves it to first touch. Returns the errno if there are not enough.
    pub(super) fn populate(&self) -> Result<(), i32> {
        loop {
            match self.advise(libc::MADV_POPULATE_WRITE) {
                Err(libc::EINVAL) => return self.touch(),
                Err(libc::EINTR | libc::EAGAIN) => {}
                other => return other,
            }
        }
    }

    /// Populates on kernels before 5.14: the kernel writes one zero byte into each page. The fault is then
    /// the kernel's, so a page that cannot be had is EFAULT and not SIGBUS.
    fn touch(&self) -> Result<(), i32> {
        let zeroes = File::open("/dev/zero").map_err(|error| error.raw_os_error().unwrap_or(libc::EIO))?;
        let pages = self.bytes.div_ceil(self.page_bytes);
        let mut touches = Vec::with_capacity(TOUCHES_PER_CALL);
        let mut touched = 0;
        while touched < pages {
            touches.clear();
            touches.extend((touched..pages).take(TOUCHES_PER_CALL).map(|page| libc::iovec {
                iov_base: self.base.as_ptr().wrapping_add(page * self.page_bytes).cast(),
                iov_len: 1,
            }));
            let count = touches.len() as libc::c_int;
            // SAFETY: each iovec is one byte inside this mapping, which nobody else has seen yet; the kernel
            // checks the addresses besides.
            match unsafe { libc::readv(zeroes.as_raw_fd(), touches.as_ptr(), count) } {
                read if read > 0 => touched += read as usize,
                0 => return Err(libc::EIO),
                _ => match last_errno() {
                    libc::EINTR => {}
                    errno => return Err(errno),
                },
            }
        }
        Ok(())
    }

    fn advise(&self, advice: libc::c_int) -> Result<(), i32> {
        // SAFETY: the range is this mapping. The advice used here never drops or moves its bytes.
        match unsafe { libc::madvise(self.base.as_ptr().cast(), self.bytes, advice) } {
            0 => Ok(()),
            _ => Err(last_errno()),
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if process::id() != self.owner_pid {
            return;
        }
        match self.source {
            // SAFETY: the address came from `alloc` with this layout, and only this drop gives it back.
            Source::HugeTlb(layout) => unsafe { hugepage_rs::dealloc(self.base.as_ptr(), layout) },
            Source::Anonymous { mapped_bytes } => unmap(self.base.as_ptr(), mapped_bytes),
        }
    }
}

/// Bytes of the kernel's base page.
pub(super) fn base_page_bytes() -> usize {
    // SAFETY: sysconf reads a constant.
    let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(bytes).unwrap_or(super::GRANULE_BYTES)
}

/// Unmaps a part of a mapping that this file made; nothing for 0 bytes.
fn unmap(base: *mut u8, bytes: usize) {
    if bytes > 0 {
        // SAFETY: called with parts of this file's own mappings, each once, when nobody uses them any more: the
        // trimmed ends of a reservation, or a whole mapping in its drop. It cannot fail for whole pages, except
        // for a lack of kernel memory to split a mapping; then address space is lost, which is harmless.
        unsafe { libc::munmap(base.cast(), bytes) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn smaps_field(mapping: &Mapping, name: &str) -> String {
        let start = format!("{:x}-", mapping.base().addr());
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mut lines = smaps.lines().skip_while(|line| !line.starts_with(&start));
        assert!(lines.next().is_some(), "no mapping starts at {start}");
        lines.find_map(|line| line.strip_prefix(name)).unwrap().trim().to_owned()
    }

    #[test]
    fn ordinary_blocks_are_aligned_and_guarded() {
        for (bytes, align_bytes) in [(64 << 10, 4096), (2 << 20, 2 << 20), (16 << 20, 2 << 20), (1 << 20, 1)]
        {
            let mapping = Mapping::anonymous(bytes, align_bytes).unwrap();
            assert_eq!(mapping.base().addr().get() % align_bytes, 0);
            assert_eq!(mapping.bytes(), bytes);
            let start = mapping.base().addr().get();
            let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
            let ours = format!("{start:x}-{:x} rw-p", start + bytes);
            assert!(maps.lines().any(|line| line.starts_with(&ours)), "{ours} is not a mapping of its own");
            let guard = format!("{:x}-{:x} ---p", start + bytes, start + bytes + base_page_bytes());
            // The guard may be merged with inaccessible memory of others behind it.
            let guard_start = guard.split('-').next().unwrap().to_owned() + "-";
            assert!(
                maps.lines().any(|line| line.starts_with(&guard_start) && line.contains(" ---p ")),
                "no guard {guard}"
            );
        }
    }

    #[test]
    fn both_ways_of_populating_fill_all_pages() {
        for by_hand in [false, true] {
            let mapping = Mapping::anonymous(8 << 20, 2 << 20).unwrap();
            mapping.want_transparent(false);
            assert_eq!(smaps_field(&mapping, "Rss:"), "0 kB");
            if by_hand { mapping.touch() } else { mapping.populate() }.unwrap();
            assert_eq!(smaps_field(&mapping, "Rss:"), "8192 kB", "by hand: {by_hand}");
        }
    }

    #[test]
    fn blocks_stay_out_of_children_and_core_dumps() {
        let mapping = Mapping::anonymous(64 << 10, 4096).unwrap();
        mapping.keep_private().unwrap();
        let flags = smaps_field(&mapping, "VmFlags:");
        let has = |flag| flags.split_whitespace().any(|word| word == flag);
        assert!(has("dc") && has("dd"), "VmFlags are {flags}");
    }

    #[test]
    fn pages_that_cannot_be_had_are_an_error_and_no_signal() {
        // A mapping that may not be written stands for one without pages: the kernel's own write fails alike.
        let mapping = Mapping::anonymous(64 << 10, 4096).unwrap();
        // SAFETY: the mapping is this test's own and nobody uses its bytes.
        unsafe { libc::mprotect(mapping.base().as_ptr().cast(), 64 << 10, libc::PROT_READ) };
        assert_eq!(mapping.touch(), Err(libc::EFAULT));
        assert!(mapping.advise(libc::MADV_POPULATE_WRITE).is_err());
    }

    #[test]
    fn odd_hugetlb_requests_are_refused() {
        assert_eq!(Mapping::hugetlb(2 << 20, 0).err(), Some(libc::ENOSYS));
        assert_eq!(Mapping::hugetlb(0, 2 << 20).err(), Some(libc::EINVAL));
        assert_eq!(Mapping::hugetlb((2 << 20) + 4096, 2 << 20).err(), Some(libc::EINVAL));
    }

    #[test]
    fn a_child_does_not_unmap_what_it_does_not_own() {
        let mut mapping = Mapping::anonymous(64 << 10, 4096).unwrap();
        let (base, mapped_bytes) = (mapping.base().as_ptr(), (64 << 10) + base_page_bytes());
        mapping.owner_pid += 1;
        drop(mapping);
        // SAFETY: the drop left the mapping in place, as in a child; if it had not, the read would fault.
        assert_eq!(unsafe { base.read_volatile() }, 0);
        unmap(base, mapped_bytes);
    }
}
