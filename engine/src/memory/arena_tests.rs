//! Tests of arenas: what is obtained under each policy, and that nothing is left behind.
//!
//! Limits and mappings belong to the process, so tests about them run in a process of their own ([`alone`]).
//! The hugepage pool belongs to the machine: tests about it hold [`POOL`], add pages if they may, and
//! compare with the pool they found.

use std::fs;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::*;
use crate::memory::{HugepagePool, NumaPolicy, PagePolicy, ThpMode, memlock_limit, thp_mode};

const MIB: usize = 1 << 20;
const ALONE: &str = "HOTSLICE_TEST_ALONE";

fn config(capacity_bytes: usize, block_bytes: usize, pages: PagePolicy, lock: LockPolicy) -> ArenaConfig {
    let (numa, node) = (NumaPolicy::Local, Some(0));
    ArenaConfig { capacity_bytes, capacity_max_bytes: 0, block_bytes, pages, lock, numa, node }
}

/// Runs `body` in a process of its own: this test again, `test` being its name in this file. With
/// `memlock_bytes` the process has that soft and hard limit and no capability to exceed or raise it.
fn alone(test: &str, memlock_bytes: Option<(u64, u64)>, body: fn()) {
    if std::env::var_os(ALONE).is_some() {
        return body();
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([&format!("memory::arena::tests::{test}"), "--exact", "--nocapture", "--test-threads=1"]);
    command.env(ALONE, "1");
    if let Some((rlim_cur, rlim_max)) = memlock_bytes {
        let restrict = move || {
            const CAP_SYS_RESOURCE: libc::c_ulong = 24;
            const CAP_IPC_LOCK: libc::c_ulong = 14;
            let limit = libc::rlimit { rlim_cur, rlim_max };
            // SAFETY: system calls on plain values, allowed between fork and exec. Who may not drop capabilities
            // has none.
            unsafe {
                if libc::setrlimit(libc::RLIMIT_MEMLOCK, &raw const limit) != 0 {
                    return Err(std::io::Error::last_os_error());
                }
                libc::prctl(libc::PR_CAPBSET_DROP, CAP_SYS_RESOURCE, 0, 0, 0);
                libc::prctl(libc::PR_CAPBSET_DROP, CAP_IPC_LOCK, 0, 0, 0);
            }
            Ok(())
        };
        // SAFETY: the closure makes system calls only.
        unsafe { command.pre_exec(restrict) };
    }
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("1 passed"), "{test} in its own process:\n{text}");
}

/// Mappings of this process.
fn mapping_count() -> usize {
    fs::read_to_string("/proc/self/maps").unwrap().lines().count()
}

fn status_kib(name: &str) -> usize {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
    line.trim().trim_end_matches("kB").trim().parse().unwrap()
}

static POOL: Mutex<()> = Mutex::new(());
const NR_HUGEPAGES: &str = "/proc/sys/vm/nr_hugepages";

/// Pages added to the machine's pool, taken away again on drop.
struct PoolPages {
    added: u64,
    _turn: MutexGuard<'static, ()>,
}

impl PoolPages {
    /// Adds up to `pages` pages: none where the machine or a lack of rights does not allow it.
    fn add(pages: u64) -> PoolPages {
        let turn = POOL.lock().unwrap_or_else(PoisonError::into_inner);
        let before = persistent_pages();
        let wrote = fs::write(NR_HUGEPAGES, (before + pages).to_string()).is_ok();
        let added = if wrote { persistent_pages().saturating_sub(before) } else { 0 };
        PoolPages { added, _turn: turn }
    }
}

impl Drop for PoolPages {
    fn drop(&mut self) {
        if self.added > 0 {
            let _ = fs::write(NR_HUGEPAGES, persistent_pages().saturating_sub(self.added).to_string());
        }
    }
}

/// Pages that stay in the pool. (The total counts pages in use besides that leave it when they are freed.)
fn persistent_pages() -> u64 {
    fs::read_to_string(NR_HUGEPAGES).ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0)
}

fn usable_pages(pool: HugepagePool) -> usize {
    pool.free.saturating_sub(pool.reserved) as usize
}

/// Writes a pattern over the whole arena through extents and reads it back.
fn fill_and_check(arena: &Arena) {
    let granules = arena.block_count() as u32 * arena.granules_per_block();
    let value = |granule: u32| granule.wrapping_mul(2_654_435_761);
    for granule in 0..granules {
        let place = arena.ptr(Extent { start: granule, len: 1 }).cast::<u32>();
        // SAFETY: a granule of a mapped arena that this test alone uses; aligned to 4 KiB.
        unsafe { place.write(value(granule)) };
    }
    for granule in 0..granules {
        let place = arena.ptr(Extent { start: granule, len: 1 }).cast::<u32>();
        // SAFETY: as above.
        assert_eq!(unsafe { place.read() }, value(granule), "granule {granule}");
    }
}

fn check_report(arena: &Arena) {
    let report = arena.report();
    assert_eq!(
        report.hugetlb_bytes + report.transparent_bytes + report.base_bytes,
        arena.bytes(),
        "{report:?}"
    );
    assert_eq!(report.arena_bytes, arena.bytes());
    let on_nodes: usize = report.bytes_by_node.values().sum();
    assert!(on_nodes == arena.bytes() || on_nodes == 0, "{report:?}");
    assert_eq!(report.block_count, arena.block_count());
    let locked: usize = arena.blocks().iter().filter(|block| block.is_locked()).map(Block::bytes).sum();
    assert_eq!(report.locked_bytes, locked);
    assert_eq!(report.not_locked.is_none(), locked == arena.bytes(), "{report:?}");
    let huge: usize = arena.blocks().iter().map(Block::huge_bytes).sum();
    assert_eq!(report.base_bytes, arena.bytes() - huge);
    for block in arena.blocks() {
        match block.kind() {
            PageKind::HugeTlb => assert_eq!(block.huge_bytes(), block.bytes()),
            PageKind::Transparent => assert!((1..=block.bytes()).contains(&block.huge_bytes())),
            PageKind::Base => assert_eq!(block.huge_bytes(), 0),
        }
    }
}

#[test]
fn an_arena_without_hugepages_is_on_base_pages() {
    let wanted = config(5 * MIB + 12_345, MIB, PagePolicy::Off, LockPolicy::Off);
    let arena = Arena::map(&wanted).unwrap();
    assert_eq!((arena.block_count(), arena.block_bytes(), arena.bytes()), (5, MIB, 5 * MIB));
    assert_eq!(arena.granules_per_block(), 256);
    assert_eq!(arena.report().remainder_bytes, 12_345);
    assert_eq!(arena.report().base_bytes, 5 * MIB);
    assert_eq!(arena.report().warnings, Vec::<String>::new());
    assert_eq!(arena.report().not_locked.as_deref(), Some("setting `lock` is off"));
    check_report(&arena);
    fill_and_check(&arena);
    let range = |block: &Block| (block.base().addr().get(), block.bytes());
    let ranges: Vec<_> = arena.blocks().iter().map(range).collect();
    assert_eq!(procfs::huge_bytes_in(&ranges), [0; 5]);
    serde_json::to_string(&arena.report()).unwrap();
}

#[test]
fn a_preferred_arena_says_what_it_is_made_of() {
    let arena = Arena::map(&config(16 * MIB, 4 * MIB, PagePolicy::Preferred, LockPolicy::Off)).unwrap();
    check_report(&arena);
    fill_and_check(&arena);
    let report = arena.report();
    let thp = matches!(thp_mode(), ThpMode::Always | ThpMode::Madvise);
    assert!(thp || report.transparent_bytes == 0, "{report:?}");
    assert!(report.base_bytes == 0 || report.warnings.iter().any(|text| text.contains("on base pages")));
    assert!(report.hugetlb_bytes == arena.bytes() || !report.warnings.is_empty(), "{report:?}");
    for block in arena.blocks().iter().filter(|block| block.kind() != PageKind::Base) {
        assert_eq!(block.base().addr().get() % (2 * MIB), 0);
    }
}

/// Runs `attempt` until it says that what it saw is right. Others use the machine's pool meanwhile, so a
/// single attempt may meet a pool that has just changed; it says what it saw instead.
fn eventually(mut attempt: impl FnMut() -> Result<(), String>) {
    let mut seen = Vec::new();
    for _ in 0..20 {
        match attempt() {
            Ok(()) => return,
            Err(other) => seen.push(other),
        }
    }
    panic!("20 attempts saw: {seen:#?}");
}

#[test]
fn a_pool_that_is_too_small_gives_a_mixed_arena() {
    let _pages = PoolPages::add(3);
    let pool = hugepage_pool();
    if pool.page_bytes != 2 * MIB || usable_pages(pool) == 0 {
        eprintln!("skipped: no hugepages of 2 MiB to be had");
        return;
    }
    eventually(|| {
        let usable = usable_pages(hugepage_pool());
        let wanted = config((usable + 2) * 2 * MIB, 2 * MIB, PagePolicy::Preferred, LockPolicy::Off);
        let arena = Arena::map(&wanted).unwrap();
        check_report(&arena);
        fill_and_check(&arena);
        let kinds: Vec<_> = arena.blocks().iter().map(Block::kind).collect();
        let warnings = arena.report().warnings.join("\n");
        let blocks = format!("2 of {} blocks got no explicit hugepages", usable + 2);
        let mixed = usable > 0
            && kinds[..usable].iter().all(|&kind| kind == PageKind::HugeTlb)
            && kinds[usable..].iter().all(|&kind| kind != PageKind::HugeTlb);
        if mixed && warnings.contains(&blocks) && warnings.contains("vm.nr_hugepages=") {
            return Ok(());
        }
        Err(format!("{usable} pages, blocks {kinds:?}, warnings {warnings}"))
    });
}

#[test]
fn required_hugepages_are_all_or_an_error() {
    let _pages = PoolPages::add(2);
    eventually(|| {
        let page_bytes = hugepage_pool().page_bytes.max(2 * MIB);
        let usable = usable_pages(hugepage_pool());
        let map = |blocks: usize| {
            Arena::map(&config(blocks * page_bytes, page_bytes, PagePolicy::Required, LockPolicy::Required))
        };
        let Err(error) = map(usable + 1) else { return Err("one page more than there is was had".into()) };
        let error = error.to_string();
        let place = format!("block {usable} of {}", usable + 1);
        for part in ["setting `pages` is required", &place, "vm.nr_hugepages="] {
            if !error.contains(part) {
                return Err(error);
            }
        }
        if usable > 0 {
            // Every page came back from the failed attempt.
            let arena = map(usable).map_err(|error| error.to_string())?;
            assert_eq!(arena.report().hugetlb_bytes, arena.bytes());
            assert_eq!(arena.report().warnings, Vec::<String>::new());
            check_report(&arena);
        }
        Ok(())
    });
}

#[test]
fn more_memory_than_there_is_is_refused_before_it_is_touched() {
    let wanted = config(8 << 40, 1 << 30, PagePolicy::Off, LockPolicy::Off);
    match Arena::map(&wanted).err() {
        Some(MemoryError::NotEnoughMemory { needed_bytes, available_bytes, .. }) => {
            assert_eq!(needed_bytes, 8 << 40);
            assert!(available_bytes < needed_bytes);
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn arenas_leave_no_mapping_behind() {
    alone("arenas_leave_no_mapping_behind", Some((3 << 20, 3 << 20)), || {
        let attempt = |pages, lock| Arena::map(&config(16 * MIB, 2 * MIB, pages, lock)).map(drop);
        // The first attempts make the C library and the standard library map what they keep.
        let _ = attempt(PagePolicy::Preferred, LockPolicy::Off);
        let _ = attempt(PagePolicy::Off, LockPolicy::Required);
        let before = (mapping_count(), status_kib("VmSize:"));
        for _ in 0..10 {
            for pages in [PagePolicy::Preferred, PagePolicy::Off] {
                attempt(pages, LockPolicy::Off).unwrap();
                attempt(pages, LockPolicy::Preferred).unwrap();
            }
            let error = attempt(PagePolicy::Off, LockPolicy::Required).err();
            assert!(matches!(error, Some(MemoryError::Lock { .. })), "{error:?}");
        }
        assert_eq!((mapping_count(), status_kib("VmSize:")), before);
    });
}

/// An arena of 4 MiB on base pages, to be locked.
fn lockable(lock: LockPolicy) -> Result<Arena, MemoryError> {
    Arena::map(&config(4 * MIB, MIB, PagePolicy::Off, lock))
}

#[test]
fn a_limit_that_is_too_small_is_an_error_where_locking_is_required() {
    alone(
        "a_limit_that_is_too_small_is_an_error_where_locking_is_required",
        Some((64 << 10, 64 << 10)),
        || {
            let limit = memlock_limit();
            assert_eq!((limit.soft_bytes, limit.exempt), (Some(64 << 10), false));
            let error = lockable(LockPolicy::Required).err().unwrap().to_string();
            for part in [
                "RLIMIT_MEMLOCK is 65536 bytes",
                "4194304 bytes are to be locked",
                "ulimit -l",
                "LimitMEMLOCK=",
                "docker run --ulimit memlock=-1:-1",
            ] {
                assert!(error.contains(part), "`{part}` is missing in: {error}");
            }
        },
    );
}

#[test]
fn a_limit_that_is_too_small_is_a_warning_where_locking_is_preferred() {
    let limit = (2 * MIB as u64, 2 * MIB as u64);
    alone("a_limit_that_is_too_small_is_a_warning_where_locking_is_preferred", Some(limit), || {
        let arena = lockable(LockPolicy::Preferred).unwrap();
        check_report(&arena);
        assert_eq!(arena.report().locked_bytes, 2 * MIB, "as much as the limit allows");
        assert!(arena.report().warnings[0].contains("RLIMIT_MEMLOCK is 2097152 bytes"));
        assert_eq!(status_kib("VmLck:"), 2048);
        drop(arena);
        assert_eq!(status_kib("VmLck:"), 0);
    });
}

#[test]
fn the_soft_limit_is_raised_to_the_hard_limit() {
    if memlock_limit().hard_bytes.is_some_and(|bytes| bytes < 8 << 20) {
        eprintln!("skipped: the hard limit on locked memory is too small");
        return;
    }
    alone("the_soft_limit_is_raised_to_the_hard_limit", Some((64 << 10, 8 << 20)), || {
        let arena = lockable(LockPolicy::Required).unwrap();
        check_report(&arena);
        assert_eq!(arena.report().locked_bytes, 4 * MIB);
        assert_eq!(status_kib("VmLck:"), 4096);
        assert_eq!(memlock_limit().soft_bytes, Some(8 << 20));
    });
}

#[test]
fn explicit_hugepages_need_no_lock_limit() {
    let pages = PoolPages::add(2);
    if std::env::var_os(ALONE).is_none() && pages.added < 2 {
        eprintln!("skipped: no hugepages can be added to the pool");
        return;
    }
    alone("explicit_hugepages_need_no_lock_limit", Some((0, 0)), || {
        let wanted = config(2 * MIB, 2 * MIB, PagePolicy::Required, LockPolicy::Required);
        let arena = Arena::map(&wanted).unwrap();
        check_report(&arena);
        assert_eq!(arena.report().locked_bytes, 2 * MIB);
    });
}

/// Whether a page is mapped in this process.
fn is_mapped(base: NonNull<u8>) -> bool {
    let mut resident = 0u8;
    // SAFETY: mincore only writes the one byte for the one page asked about; an unmapped page is ENOMEM.
    unsafe { libc::mincore(base.as_ptr().cast(), 1, &raw mut resident) == 0 }
}

#[test]
fn a_forked_child_has_no_part_of_the_arena() {
    let _pages = PoolPages::add(1);
    for pages in [PagePolicy::Off, PagePolicy::Preferred] {
        let arena = Arena::map(&config(4 * MIB, 2 * MIB, pages, LockPolicy::Off)).unwrap();
        assert!(arena.blocks().iter().all(|block| is_mapped(block.base())));
        // SAFETY: the child calls only mincore and _exit, which are safe after a fork in a process with threads.
        let child = unsafe { libc::fork() };
        assert!(child >= 0, "fork failed");
        if child == 0 {
            let seen = arena.blocks().iter().any(|block| is_mapped(block.base()));
            // SAFETY: ends the child without running anything of the test harness.
            unsafe { libc::_exit(i32::from(seen)) };
        }
        let mut status = 0;
        // SAFETY: waits for the child just made; `status` is a valid place for its status.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0, "the child saw a block ({pages})");
    }
}

#[test]
fn extents_map_to_addresses_inside_their_block() {
    fn assert_shared<T: Send + Sync>(_: &T) {}
    let arena = Arena::map(&config(2 * MIB, MIB, PagePolicy::Off, LockPolicy::Off)).unwrap();
    assert_shared(&arena);
    let second = arena.block(1).unwrap().base();
    assert_eq!(arena.ptr(Extent { start: 0, len: 256 }), arena.block(0).unwrap().base());
    assert_eq!(arena.ptr(Extent { start: 256, len: 256 }), second);
    let last = Extent { start: 511, len: 1 };
    assert_eq!(arena.ptr(last).addr().get(), second.addr().get() + MIB - last.bytes());
    assert_eq!((arena.block_of(last), last.end()), (1, 512));
    for outside in [(0, 0), (0, 257), (255, 2), (256, 257), (512, 1), (u32::MAX, 1), (5, u32::MAX)] {
        let extent = Extent { start: outside.0, len: outside.1 };
        let asked = std::panic::catch_unwind(|| arena.ptr(extent));
        assert!(asked.is_err(), "{extent:?} was accepted");
    }
}

#[test]
fn on_a_machine_with_one_node_all_memory_is_there() {
    if super::super::mapper::machine_nodes() > 1 {
        return eprintln!("skipped: there is more than one node");
    }
    for pages in [PagePolicy::Off, PagePolicy::Preferred] {
        let report = Arena::map(&config(8 * MIB, 2 * MIB, pages, LockPolicy::Off)).unwrap().report();
        if report.bytes_by_node.is_empty() {
            return eprintln!("skipped: the kernel does not say where memory is");
        }
        assert_eq!(report.bytes_by_node, BTreeMap::from([(0, 8 * MIB)]));
        assert!(!report.warnings.iter().any(|warning| warning.contains("NUMA")), "{report:?}");
    }
}

#[test]
fn blocks_are_added_and_removed_at_run_time() {
    let mut wanted = config(2 * MIB, MIB, PagePolicy::Off, LockPolicy::Off);
    wanted.capacity_max_bytes = 4 * MIB + 5;
    let arena = Arena::map(&wanted).unwrap();
    assert_eq!((arena.block_count(), arena.block_count_max()), (2, 4));
    let beyond = Extent { start: 3 * 256, len: 1 };
    let asked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| arena.ptr(beyond)));
    assert!(asked.is_err(), "there is no block 3 yet");
    let mut mapper = arena.mapper(1);
    let block = arena.add(3, &mut mapper).unwrap();
    assert_eq!(arena.settle(mapper), Vec::<String>::new());
    assert_eq!((arena.ptr(beyond), arena.block_count()), (block.base(), 3));
    check_report(&arena);
    assert!(is_mapped(block.base()));
    // SAFETY: nobody has an address in either block.
    unsafe {
        arena.remove(3);
        arena.remove(0);
        arena.remove(2);
    }
    assert!(!is_mapped(block.base()), "another test's mapping may lie there, but hardly at once");
    assert_eq!((arena.block_count(), arena.bytes()), (1, MIB));
    check_report(&arena);
    assert!(arena.block(0).is_none() && arena.block(1).is_some() && arena.block(7).is_none());
    assert!(Arena::map(&ArenaConfig { capacity_max_bytes: MIB, ..wanted }).is_err());
}

#[test]
fn growth_that_cannot_be_had_says_why_and_leaves_the_arena_as_it_was() {
    let mut wanted = config(16 * MIB, 16 * MIB, PagePolicy::Off, LockPolicy::Off);
    wanted.capacity_max_bytes = 8 << 40;
    let arena = Arena::map(&wanted).unwrap();
    let mut mapper = arena.mapper(arena.block_count_max() - 1);
    match arena.add(1, &mut mapper) {
        Err(MemoryError::NotEnoughMemory { needed_bytes, .. }) => {
            assert_eq!(needed_bytes, (8 << 40) - 16 * MIB as u64)
        }
        other => panic!("{other:?}"),
    }
    assert_eq!((arena.block_count(), arena.block(1).is_none()), (1, true));
    check_report(&arena);
}

/// Prints how long arenas of 1 GiB (explicit hugepages: as much as the pool has) take until they are ready:
///
/// `cargo test --release -p hotslice --lib print_start_times -- --ignored --nocapture`
#[test]
#[ignore = "a measurement: needs 1 GiB and says nothing under load"]
fn print_start_times() {
    let pool = hugepage_pool();
    let pool_bytes = usable_pages(pool) * pool.page_bytes / (16 * MIB) * (16 * MIB);
    println!(
        "{:<12} {:>9} {:>9} {:>11} {:>11}  made of",
        "pages", "MiB", "ready ms", "populate ms", "ms per GiB"
    );
    let print = |name: &str, bytes: usize, pages| {
        for _ in 0..3 {
            let arena = Arena::map(&config(bytes, 16 * MIB, pages, LockPolicy::Preferred)).unwrap();
            let report = arena.report();
            let ready_ms = report.ready_us as f64 / 1e3;
            println!(
                "{name:<12} {:>9} {ready_ms:>9.1} {:>11.1} {:>11.1}  hugetlb {} MiB, transparent {} MiB, base {} MiB, locked {} MiB",
                bytes / MIB,
                report.populate_us as f64 / 1e3,
                ready_ms * (1 << 30) as f64 / bytes as f64,
                report.hugetlb_bytes / MIB,
                report.transparent_bytes / MIB,
                report.base_bytes / MIB,
                report.locked_bytes / MIB,
            );
        }
    };
    if pool_bytes > 0 {
        print("required", pool_bytes.min(1 << 30), PagePolicy::Required);
    }
    print("preferred", 1 << 30, PagePolicy::Preferred);
    print("off", 1 << 30, PagePolicy::Off);
}
