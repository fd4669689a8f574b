//! A hit allocates nothing. In a binary of its own, because it replaces the allocator of the whole process.

use hotslice::{CompletionQueue, Namespace, Outcome, Read, Target};
use hotslice_tests::content::{self, name};
use hotslice_tests::gauges::finish;
use hotslice_tests::setup::{MIB, open_local, soon};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

/// Counts what each thread asks of the system's allocator.
struct Counting;

thread_local!(static COUNT: Cell<u64> = const { Cell::new(0) });

fn count() {
    // A thread that is being torn down has nothing to count for.
    let _ = COUNT.try_with(|count| count.set(count.get() + 1));
}

// SAFETY: hands everything on to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller's contract is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, place: *mut u8, layout: Layout) {
        count();
        // SAFETY: the caller's contract is the same.
        unsafe { System.dealloc(place, layout) }
    }

    unsafe fn realloc(&self, place: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        count();
        // SAFETY: the caller's contract is the same.
        unsafe { System.realloc(place, layout, bytes) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Calls of the allocator on this thread while `body` runs a second time; the first may set up what lasts.
fn calls(mut body: impl FnMut()) -> u64 {
    body();
    let before = COUNT.get();
    for _ in 0..1000 {
        body();
    }
    COUNT.get() - before
}

#[test]
fn the_counter_counts() {
    assert_eq!(calls(|| drop(std::hint::black_box(Box::new(1)))), 2000);
}

#[test]
fn a_hit_allocates_nothing() {
    let cache = open_local(16 * MIB);
    for len in [0, 4096, 100_001, 3 * MIB] {
        let name = name(len, 0);
        let key = Namespace::DEFAULT.key(&name);
        cache.put(key, &content::bytes(name.as_bytes(), 1, len), soon()).unwrap();
        let mut buffer = vec![0; len];
        let (left, right) = (len / 3, len - len / 3);
        let (mut one, mut two) = (vec![0; left], vec![0; right]);
        assert_eq!(calls(|| drop(cache.get(key, soon()).unwrap().unwrap())), 0, "get of {len}");
        assert_eq!(calls(|| drop(cache.peek(key).unwrap().unwrap())), 0, "peek of {len}");
        assert_eq!(calls(|| assert!(cache.contains(key).unwrap())), 0, "contains of {len}");
        let whole = calls(|| assert!(cache.get_into(key, &mut buffer, soon()).unwrap().is_some()));
        assert_eq!(whole, 0, "get_into of {len}");
        let scatter = calls(|| {
            let list: &mut [&mut [u8]] = &mut [&mut one, &mut [], &mut two];
            assert!(cache.get_scatter(key, list, soon()).unwrap().is_some());
        });
        assert_eq!(scatter, 0, "get_scatter of {len}");
        let range = calls(|| {
            assert!(cache.get_range(key, left as u64, &mut two, soon()).unwrap().is_some());
        });
        assert_eq!(range, 0, "get_range of {len}");
        let lease = calls(|| {
            let lease = cache.get(key, soon()).unwrap().unwrap();
            let bytes: usize = lease.segments().map(<[u8]>::len).sum();
            assert_eq!(bytes, len);
        });
        assert_eq!(lease, 0, "segments of {len}");
        let mut queue = CompletionQueue::new(&cache, 1).unwrap();
        let queued = calls(|| {
            queue.get(key, Target::Lease, 0, soon());
            assert!(matches!(queue.poll().unwrap().result, Ok(Outcome::Lease(_))));
        });
        assert_eq!(queued, 0, "get through a queue of {len}");
        content::check(name.as_bytes(), 1, 0, &buffer);
        content::check(name.as_bytes(), 1, left, &two);
    }
    // The batch forms allocate their results, and nothing per byte: see `Cache::get_into_batch`.
    let name = name(4096, 0);
    let mut buffer = [0; 4096];
    let mut reads = [Read { key: Namespace::DEFAULT.key(&name), into: &mut buffer }];
    assert!(matches!(cache.get_into_batch(&mut reads, soon())[0], Ok(Some(4096))));
    finish(cache);
}
