//! What a process can run out of or be forbidden: descriptors, hugepages, locked memory, io_uring; a fork of the
//! host; and that a hit makes no system call. Each in a child process of its own.

use hotslice::memory::{LockPolicy, MemoryError, PagePolicy, hugepage_pool};
use hotslice::{Cache, CompletionQueue, Error, Invalidate, Key, Outcome, Target, TransportKind};
use hotslice_tests::child::{forbid, in_child, kill_at_any_system_call, killed_by, limit_files, skip};
use hotslice_tests::content::{self, name};
use hotslice_tests::gauges::{Resources, alone, finish};
use hotslice_tests::origin::{FakeOrigin, closed_port};
use hotslice_tests::setup::{MIB, config, open, open_local, open_with, server, soon, store};
use hotslice_tests::sync::eventually;
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::time::Instant;

#[test]
fn no_descriptor_left_for_a_connection() {
    in_child("process::no_descriptor_left_for_a_connection", || {
        let origin = FakeOrigin::well_behaved();
        let mut config = config(4 * MIB, &[origin.address()]);
        (config.backoff_min_ms, config.backoff_max_ms) = (1, 5);
        let cache = open_with(config);
        cache.put("local", b"value", soon()).unwrap();
        let before = Resources::now().descriptors;
        let former = limit_files(3);
        for _ in 0..10 {
            match cache.get("remote", soon()) {
                Err(Error::PeerUnavailable { reason, .. }) => {
                    assert!(reason.contains("RLIMIT_NOFILE"), "{reason}");
                }
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(cache.get("local", soon()).unwrap().unwrap().as_slice(), Some(&b"value"[..]));
        cache.put("local", b"other", soon()).unwrap();
        limit_files(former);
        assert_eq!(Resources::now().descriptors, before);
        let name = name(100_000, 0);
        eventually(|| "service again".to_owned(), || cache.get(&name, soon()).is_ok());
        content::check_lease(name.as_bytes(), 1, 100_000, &cache.get(&name, soon()).unwrap().unwrap());
        finish(cache);
    });
}

#[test]
fn no_descriptor_left_to_open_a_cache() {
    in_child("process::no_descriptor_left_to_open_a_cache", || {
        let before = Resources::now();
        // Every number of descriptors from none to enough: each fails cleanly or opens.
        let mut refused = 0;
        for spare in 0..8 {
            let mut holders = Vec::new();
            let former = limit_files(before.descriptors as u64 + spare);
            // Numbers below the limit that are free would count as spare.
            while holders.len() < 64 {
                match std::fs::File::open("/dev/null") {
                    Ok(file) => holders.push(file),
                    Err(_) => break,
                }
            }
            holders.truncate(holders.len().saturating_sub(spare as usize));
            let opened = Cache::open(config(MIB, &[]));
            limit_files(former);
            match opened {
                Ok(cache) => finish(cache),
                Err(error) => {
                    let text = error.to_string();
                    assert!(text.contains("ulimit -n") || text.contains("open files"), "{text}");
                    refused += 1;
                }
            }
            drop(holders);
            eventually(|| format!("{spare} spare: {before:?}"), || Resources::now() == before);
        }
        assert!(refused >= 2, "{refused}");
    });
}

#[test]
fn io_uring_is_refused() {
    in_child("process::io_uring_is_refused", || {
        if !forbid(&[libc::SYS_io_uring_setup]) {
            skip("seccomp filters cannot be installed");
        }
        let before = Resources::now();
        let mut only = config(4 * MIB, &[]);
        only.transport = TransportKind::IoUring;
        let error = Cache::open(only).expect_err("no ring, no cache");
        let text = error.to_string();
        assert!(matches!(error, Error::ShardStart { shard: 0, .. }), "{error:?}");
        for word in ["io_uring_setup", "kernel.io_uring_disabled", "seccomp"] {
            assert!(text.contains(word), "{text}");
        }
        assert_eq!(Resources::now(), before);
        // Unless it insists, the cache does without, and says why.
        let origin = FakeOrigin::well_behaved();
        let mut auto = config(4 * MIB, &[origin.address()]);
        auto.transport = TransportKind::Auto;
        let cache = open_with(auto);
        let report = &cache.reports()[0].transport;
        assert_eq!(report.name, "epoll");
        assert!(report.fallback.as_ref().is_some_and(|reason| reason.contains("seccomp")), "{report:?}");
        let key = name(1_000_001, 1);
        content::check_lease(key.as_bytes(), 1, 1_000_001, &cache.get(&key, soon()).unwrap().unwrap());
        let stats = cache.stats();
        assert!(stats.epoll_shards == 1 && stats.transport_calls > 2, "{stats:?}");
        finish(cache);
    });
}

#[test]
fn hugepages_are_exhausted() {
    let pool = hugepage_pool();
    let page = pool.page_bytes.max(2 * MIB);
    let too_much = (pool.total as usize + 1) * page + 16 * MIB;
    alone(|| {
        let mut config = config(too_much, &[]);
        config.block_bytes = page as u64;
        config.pages = PagePolicy::Required;
        match Cache::open(config) {
            Err(Error::Memory(error)) if matches!(*error, MemoryError::Hugepages { .. }) => {
                let text = error.to_string();
                assert!(text.contains("nr_hugepages") && text.contains("`pages` is required"), "{text}");
            }
            other => panic!("{other:?}"),
        }
    });
    if too_much > 1 << 30 {
        return eprintln!("the rest is skipped: the pool of hugepages is large");
    }
    alone(|| {
        let mut config = config(too_much, &[]);
        config.block_bytes = page as u64;
        config.pages = PagePolicy::Preferred;
        let cache = open_with(config);
        let arena = &cache.reports()[0].arena;
        assert!(arena.hugetlb_bytes < arena.arena_bytes, "{arena:?}");
        assert_eq!(arena.hugetlb_bytes + arena.transparent_bytes + arena.base_bytes, arena.arena_bytes);
        assert!(arena.warnings.iter().any(|warning| warning.contains("hugepage")), "{arena:?}");
        let value = content::bytes(b"k", 1, 10_000_000);
        cache.put("k", &value, soon()).unwrap();
        content::check_lease(b"k", 1, 10_000_000, &cache.peek("k").unwrap().unwrap());
        finish(cache);
    });
}

/// Gives up the right to lock memory beyond `bytes`.
fn without_memlock(bytes: u64) {
    let limit = libc::rlimit { rlim_cur: bytes, rlim_max: bytes };
    // SAFETY: reads a local.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_MEMLOCK, &limit) }, 0);
    // SAFETY: plain system calls. With the user the capabilities go, CAP_IPC_LOCK among them.
    unsafe {
        if libc::geteuid() == 0 {
            const NOBODY: u32 = 65_534;
            assert_eq!(libc::setresgid(NOBODY, NOBODY, NOBODY), 0);
            assert_eq!(libc::setresuid(NOBODY, NOBODY, NOBODY), 0);
        }
    }
}

#[test]
fn memlock_is_too_small() {
    in_child("process::memlock_is_too_small", || {
        without_memlock(64 << 10);
        let mut required = config(8 * MIB, &[]);
        required.lock = LockPolicy::Required;
        match Cache::open(required) {
            Err(Error::Memory(error)) if matches!(*error, MemoryError::Lock { .. }) => {
                let text = error.to_string();
                for word in ["`lock` is required", "RLIMIT_MEMLOCK", "ulimit -l"] {
                    assert!(text.contains(word), "{text}");
                }
            }
            other => panic!("{other:?}"),
        }
        let mut preferred = config(8 * MIB, &[]);
        preferred.lock = LockPolicy::Preferred;
        let cache = open_with(preferred);
        let report = &cache.reports()[0];
        assert!(report.arena.locked_bytes < 8 * MIB);
        assert!(report.arena.warnings.iter().any(|warning| warning.contains("RLIMIT_MEMLOCK")), "{report:?}");
        // Registering with the ring is charged to the same limit.
        let on_epoll = report.transport.name == "epoll";
        let reason = report.transport.not_registered.as_deref().unwrap_or("");
        assert!(on_epoll || reason.contains("RLIMIT_MEMLOCK"), "{report:?}");
        cache.put("k", &content::bytes(b"k", 1, 5_000_000), soon()).unwrap();
        content::check_lease(b"k", 1, 5_000_000, &cache.peek("k").unwrap().unwrap());
        finish(cache);
        let mut register = config(8 * MIB, &[]);
        register.register = LockPolicy::Required;
        let error = Cache::open(register).expect_err("cannot be registered").to_string();
        assert!(error.contains("registered"), "{error}");
        assert!(on_epoll || error.contains("RLIMIT_MEMLOCK"), "{error}");
    });
}

/// Forks. The child runs `body` and ends with its verdict; the parent waits for it.
fn fork(body: impl FnOnce()) {
    // SAFETY: the child runs what a host's child might run; the C library makes its allocator usable there.
    let child = unsafe { libc::fork() };
    assert!(child >= 0);
    if child == 0 {
        let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body));
        // SAFETY: ends the process without running the parent's destructors.
        unsafe { libc::_exit(i32::from(ended.is_err())) };
    }
    let mut status = 0;
    // SAFETY: writes a local.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0, "the fork ended with {status:#x}");
}

#[test]
fn the_host_forks() {
    in_child("process::the_host_forks", || {
        let origin = FakeOrigin::well_behaved();
        let cache = open(4 * MIB, origin.address());
        let (held, later) = (name(700_001, 0), name(300_000, 1));
        let lease = cache.get(&held, soon()).unwrap().unwrap();
        let mut handed_over = Some((cache, lease));
        fork(|| {
            let (cache, lease) = handed_over.take().unwrap();
            let key: Key<'_> = held.as_str().into();
            assert!(matches!(cache.get(key, soon()), Err(Error::Forked)));
            assert!(matches!(cache.peek(key), Err(Error::Forked)));
            assert!(matches!(cache.get_into(key, &mut [0; 8], soon()), Err(Error::Forked)));
            assert!(matches!(cache.get_range(key, 0, &mut [0; 8], soon()), Err(Error::Forked)));
            assert!(matches!(cache.get_batch(&[key], soon())[..], [Err(Error::Forked)]));
            assert!(matches!(cache.contains(key), Err(Error::Forked)));
            assert!(matches!(cache.put(key, b"v", soon()), Err(Error::Forked)));
            assert!(matches!(cache.prefetch(&[key]), Err(Error::Forked)));
            assert!(matches!(cache.invalidate(Invalidate::All, soon()), Err(Error::Forked)));
            cache.shutdown();
            // The arena is not here: a lease shows nothing, and is no way to a crash.
            assert_eq!(lease.segments().count(), 0);
            assert!(matches!(lease.copy_range(0, &mut [0; 8]), Err(Error::Forked)));
            assert!(matches!(lease.verify(), Err(Error::Forked)));
            drop(lease);
            drop(cache);
            // A cache of its own works.
            let own = open(4 * MIB, origin.address());
            content::check_lease(held.as_bytes(), 1, 700_001, &own.get(&held, soon()).unwrap().unwrap());
            finish(own);
        });
        // The parent never noticed.
        let (cache, lease) = handed_over.take().unwrap();
        content::check_lease(held.as_bytes(), 1, 700_001, &lease);
        drop(lease);
        for _ in 0..2 {
            content::check_lease(later.as_bytes(), 1, 300_000, &cache.get(&later, soon()).unwrap().unwrap());
        }
        assert_eq!(cache.stats().pins, 0);
        finish(cache);
    });
}

/// Hits of every form, none of which may need the kernel. Ends the process; the verdict is its exit status.
fn hits_without_the_kernel(and_then: fn()) -> ! {
    let cache = open_local(8 * MIB);
    let (small, large) = (name(4096, 0), name(3_000_001, 1));
    for name in [&small, &large] {
        let len = content::named_len(name.as_bytes()).unwrap();
        cache.put(name, &content::bytes(name.as_bytes(), 1, len), soon()).unwrap();
    }
    let (mut buffer, mut part) = (vec![0; 3_000_001], vec![0; 1_000_001]);
    let (deadline, past) = (soon(), Instant::now());
    let mut queue = CompletionQueue::new(&cache, 1).unwrap();
    let mut context = Context::from_waker(Waker::noop());
    let mut hits = || {
        let mut good = cache.get(&small, deadline).is_ok_and(|lease| lease.is_some_and(|l| l.len() == 4096));
        good &= cache.get(&large, past).is_ok_and(|lease| lease.is_some());
        good &= cache.peek(&small).is_ok_and(|lease| lease.is_some());
        good &= cache.contains(&large).is_ok_and(|there| there);
        good &= cache.get_into(&large, &mut buffer, deadline).is_ok_and(|len| len == Some(3_000_001));
        good &= cache.get_range(&large, 17, &mut part, deadline).is_ok_and(|len| len.is_some());
        let (left, right) = buffer.split_at_mut(1_500_000);
        let list: &mut [&mut [u8]] = &mut [left, &mut [], right];
        good &= cache.get_scatter(&large, list, deadline).is_ok_and(|len| len.is_some());
        queue.get(&small, Target::Lease, 1, deadline);
        queue.get_batch([(Key::from(&small), Target::Lease), (Key::from(&large), Target::Lease)], 2, past);
        for _ in 0..3 {
            good &= queue.poll().is_some_and(|done| matches!(done.result, Ok(Outcome::Lease(_))));
        }
        let waited = pin!(cache.get_async(&large, past)).as_mut().poll(&mut context);
        good &= matches!(waited, Poll::Ready(Ok(Some(_))));
        good
    };
    // What is set up once (the thread's counters, the choice of a copy) is set up here.
    assert!(hits());
    if !kill_at_any_system_call() {
        skip("seccomp filters cannot be installed");
    }
    let mut good = true;
    for _ in 0..200 {
        good &= hits();
    }
    and_then();
    good &= content::difference(large.as_bytes(), 1, 0, &buffer).is_none();
    // SAFETY: the one system call that is left.
    unsafe { libc::_exit(i32::from(!good)) };
}

#[test]
fn a_hit_makes_no_system_call() {
    in_child("process::a_hit_makes_no_system_call", || hits_without_the_kernel(|| {}));
}

#[test]
fn one_system_call_among_the_hits_would_be_noticed() {
    killed_by(libc::SIGSYS, "process::one_system_call_among_the_hits_would_be_noticed", || {
        hits_without_the_kernel(|| {
            // SAFETY: a harmless call, forbidden at this point.
            unsafe { libc::syscall(libc::SYS_getppid) };
        })
    });
}

#[test]
fn the_server_and_the_cache_give_every_descriptor_back() {
    alone(|| {
        let before = Resources::now();
        let server = server(4 * MIB);
        let names: Vec<String> = (0..20).map(|i| name(10_000 + i, i)).collect();
        store(&server, &names);
        let mut config = config(4 * MIB, &[server.addr(), closed_port()]);
        (config.lanes_per_peer, config.lane_depth) = (8, 1);
        let cache = open_with(config);
        for name in &names {
            // Half of them live on the peer that is not there.
            let _ = cache.get(name, soon()).map(drop);
        }
        finish(cache);
        drop(server);
        assert_eq!(Resources::now(), before);
    });
}
