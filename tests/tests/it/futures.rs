//! The futures: hits are ready when they are made, misses wake the task, and they work under any executor.

use hotslice::{Deadline, Error, Key};
use hotslice_tests::content::{self, name};
use hotslice_tests::gauges::{alone, assert_quiet, finish};
use hotslice_tests::origin::{FakeOrigin, Then};
use hotslice_tests::setup::{MIB, open, server, soon, store};
use hotslice_tests::sync::{Gate, eventually};
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;

/// An executor of one task: the thread parks until the task is woken.
fn block_on<F: Future>(future: F) -> F::Output {
    struct Unpark(Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut future = pin!(future);
    loop {
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(output) => return output,
            Poll::Pending => std::thread::park(),
        }
    }
}

#[test]
fn gets_and_puts_without_any_runtime() {
    alone(|| {
        let server = server(64 * MIB);
        let names: Vec<String> = (0..300).map(|i| name(1000 * i, i)).collect();
        store(&server, &names[..250]);
        let cache = open(64 * MIB, server.addr());
        block_on(async {
            cache.put_async("a", vec![5u8; 10_000], soon()).await.unwrap();
            let lease = cache.get_async("a", soon()).await.unwrap().unwrap();
            assert_eq!(lease.as_slice(), Some(&[5u8; 10_000][..]));
            assert!(cache.get_async("absent", soon()).await.unwrap().is_none());
            for _ in 0..2 {
                let keys: Vec<Key<'_>> = names.iter().map(Key::from).collect();
                let results = cache.get_batch_async(&keys, soon()).await;
                assert_eq!(results.len(), 300);
                for (i, result) in results.into_iter().enumerate() {
                    match result.unwrap() {
                        Some(lease) => content::check_lease(keys[i].bytes(), 1, 1000 * i, &lease),
                        None => assert!(i >= 250),
                    }
                }
            }
        });
        assert_quiet(&cache);
        finish(cache);
    });
}

#[test]
fn under_tokio_many_tasks_share_one_fill() {
    alone(|| {
        let gate = Arc::new(Gate::default());
        let inner = gate.clone();
        let origin = FakeOrigin::start(move |ask, line| {
            inner.pass();
            line.answer_by_name(ask);
            Then::GoOn
        });
        let cache = Arc::new(open(16 * MIB, origin.address()));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let key = name(2 * MIB + 1, 1);
        runtime.block_on(async {
            let tasks: Vec<_> = (0..100).map(|_| tokio::spawn(cache.get_async(&key, soon()))).collect();
            let other = tokio::spawn(cache.get_async(&name(10, 2), Deadline::after_ms(20)));
            assert!(matches!(other.await.unwrap(), Err(Error::DeadlinePassed { .. })));
            gate.open();
            for task in tasks {
                let lease = task.await.unwrap().unwrap().unwrap();
                content::check_lease(key.as_bytes(), 1, 2 * MIB + 1, &lease);
            }
        });
        assert_eq!(origin.requests_for(&key), 1);
        drop(runtime);
        finish(Arc::into_inner(cache).expect("nobody else has it"));
    });
}

#[test]
fn under_tokio_uring_beside_its_own_operations() {
    alone(|| {
        let server = server(16 * MIB);
        let names: Vec<String> = (0..20).map(|i| name(50_000 + i, i)).collect();
        store(&server, &names);
        let cache = Arc::new(open(16 * MIB, server.addr()));
        let tasks_cache = cache.clone();
        tokio_uring::start(async move {
            let tasks: Vec<_> = names
                .into_iter()
                .map(|name| {
                    let lease = tasks_cache.get_async(&name, soon());
                    tokio_uring::spawn(async move {
                        let lease = lease.await.unwrap().unwrap();
                        content::check_lease(name.as_bytes(), 1, lease.len() as usize, &lease);
                    })
                })
                .collect();
            let (read, _) =
                tokio_uring::fs::File::open("/proc/self/status").await.unwrap().read_at(vec![0; 16], 0).await;
            assert_eq!(read.unwrap(), 16);
            for task in tasks {
                task.await.unwrap();
            }
        });
        assert_quiet(&cache);
        finish(Arc::into_inner(cache).expect("nobody else has it"));
    });
}

#[test]
fn a_dropped_future_gives_its_value_back() {
    alone(|| {
        let gate = Arc::new(Gate::default());
        let inner = gate.clone();
        let origin = FakeOrigin::start(move |ask, line| {
            inner.pass();
            line.answer_by_name(ask);
            Then::GoOn
        });
        let cache = open(16 * MIB, origin.address());
        let dropped = cache.get_async(&name(100, 1), soon());
        let kept = cache.get_async(&name(100, 1), soon());
        origin.wait_requests(1);
        drop(dropped);
        gate.open();
        drop(block_on(kept).unwrap().unwrap());
        // Dropped unpolled: done or given back, nothing stays reserved.
        drop(cache.put_async("x", [1u8; 100], soon()));
        eventually(|| format!("quiet: {:?}", cache.stats()), || cache.stats().reservations == 0);
        assert_quiet(&cache);
        finish(cache);
    });
}
