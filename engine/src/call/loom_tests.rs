//! loom models of the waiter and of sleep/wake. Run with `scripts/loom`.

use super::*;
use crate::sync::{Arc, ArrayQueue};
use loom::thread;

fn far() -> Instant {
    Instant::now() + std::time::Duration::from_secs(3600)
}

/// Two shards complete one call while the caller waits: no result is lost, no wake-up is lost.
#[test]
fn wait_sees_every_completion() {
    loom::model(|| {
        let call = Arc::new(Call::new(2, Wake::Sleeper));
        let shards: Vec<_> = (0..2)
            .map(|position| {
                let call = call.clone();
                thread::spawn(move || call.complete(position, position).unwrap())
            })
            .collect();
        let mut left = 2;
        while left > 0 {
            assert!(call.wait(far(), |position, result| {
                assert_eq!(position, result);
                left -= 1;
            }));
        }
        for shard in shards {
            shard.join().unwrap();
        }
    });
}

/// Giving up races with completing: exactly one side ends up with the result.
#[test]
fn abandon_and_complete_share_nothing() {
    loom::model(|| {
        let call = Arc::new(Call::new(1, Wake::Sleeper));
        let result = Arc::new(());
        let shard = {
            let (call, result) = (call.clone(), result.clone());
            thread::spawn(move || call.complete(0, result).is_err())
        };
        let taken = call.abandon(0).is_some();
        let given_back = shard.join().unwrap();
        assert!(taken != given_back);
        drop(call);
        assert_eq!(Arc::strong_count(&result), 1);
    });
}

/// The caller takes what has come and gives up on the rest, as at a deadline.
#[test]
fn a_deadline_between_two_completions() {
    loom::model(|| {
        let call = Arc::new(Call::new(2, Wake::Sleeper));
        let shard = {
            let call = call.clone();
            thread::spawn(move || {
                let first = call.complete(0, 0).is_err();
                let second = call.complete(1, 1).is_err();
                first as u32 + second as u32
            })
        };
        let mut taken = 0;
        assert!(call.wait(far(), |_, _| taken += 1));
        for position in 0..2 {
            taken += call.abandon(position).is_some() as u32;
        }
        assert_eq!(taken + shard.join().unwrap(), 2);
    });
}

/// The consumer never sleeps on an item: if the producer did not ring, the consumer saw the item.
#[test]
fn doorbell_loses_no_wake_up() {
    loom::model(|| {
        let bell = Arc::new(Doorbell::new());
        let queue = Arc::new(ArrayQueue::new(1));
        let producer = {
            let (bell, queue) = (bell.clone(), queue.clone());
            thread::spawn(move || {
                queue.push(1).unwrap();
                bell.ring()
            })
        };
        bell.going_to_sleep();
        let slept = queue.is_empty();
        if !slept {
            bell.awake();
        }
        let rang = producer.join().unwrap();
        assert!(!slept || rang, "asleep beside an item that nobody announced");
        assert_eq!(queue.pop(), Some(1));
    });
}

/// A caller that is told collects every result, and sleeps beside none: two shards complete positions of one call
/// while their owner collects what it is told of and then lies down.
#[test]
fn a_told_owner_misses_nothing() {
    loom::model(|| {
        let (bell, ready) = (Arc::new(Doorbell::new()), Arc::new(ArrayQueue::new(2)));
        let rung = Arc::new(crate::sync::AtomicBool::new(false));
        let tell = {
            let (bell, ready, rung) = (bell.clone(), ready.clone(), rung.clone());
            Box::new(move || {
                ready.push(()).unwrap();
                if bell.ring() {
                    rung.store(true, Ordering::Relaxed);
                }
            })
        };
        let call = Arc::new(Call::new(2, Wake::Told(tell)));
        let shards: Vec<_> = (0..2)
            .map(|position| {
                let call = call.clone();
                thread::spawn(move || call.complete(position, position).unwrap())
            })
            .collect();
        let mut got = 0;
        let mut collect = || {
            while ready.pop().is_some() {
                call.drain(|position, result| {
                    assert_eq!(position, result);
                    got += 1;
                });
            }
        };
        collect();
        bell.going_to_sleep();
        let slept = ready.is_empty();
        for shard in shards {
            shard.join().unwrap();
        }
        assert!(!slept || ready.is_empty() || rung.load(Ordering::Relaxed), "asleep beside a result");
        collect();
        assert_eq!(got, 2);
    });
}

/// A nudge is not lost between the consumer's look around and its sleep: what the producer did is seen by the look
/// that follows the taking of the nudge, or the sleeper is rung.
#[test]
fn doorbell_loses_no_nudge() {
    loom::model(|| {
        let bell = Arc::new(Doorbell::new());
        let pin_is_gone = Arc::new(crate::sync::AtomicBool::new(false));
        let producer = {
            let (bell, pin_is_gone) = (bell.clone(), pin_is_gone.clone());
            thread::spawn(move || {
                pin_is_gone.store(true, Ordering::Relaxed);
                bell.nudge()
            })
        };
        bell.take_nudge();
        let mut seen = pin_is_gone.load(Ordering::Relaxed);
        bell.going_to_sleep();
        let slept = !bell.is_nudged();
        if !slept {
            bell.awake();
            bell.take_nudge();
            seen |= pin_is_gone.load(Ordering::Relaxed);
        }
        let rang = producer.join().unwrap();
        assert!(seen || (slept && rang), "asleep, and nobody tells that the pin is gone");
    });
}

/// A producer of a full queue gets the place that the consumer makes.
#[test]
fn space_loses_no_wake_up() {
    loom::model(|| {
        let space = Arc::new(Space::new());
        let queue = Arc::new(ArrayQueue::new(1));
        queue.push(0).unwrap();
        let producer = {
            let (space, queue) = (space.clone(), queue.clone());
            thread::spawn(move || assert!(space.wait(far(), || queue.push(1).is_ok())))
        };
        assert_eq!(queue.pop(), Some(0));
        space.freed();
        producer.join().unwrap();
        assert_eq!(queue.pop(), Some(1));
    });
}
