use super::*;
use std::sync::Arc;
use std::time::Duration;

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

#[test]
fn results_come_in_the_order_of_completion_and_once() {
    let call = Call::new(3, Wake::Sleeper);
    call.complete(2, "c").unwrap();
    call.complete(0, "a").unwrap();
    let mut seen = Vec::new();
    assert!(call.wait(soon(), |position, result| seen.push((position, result))));
    seen.sort_unstable();
    assert_eq!(seen, [(0, "a"), (2, "c")]);
    assert!(!call.wait(Instant::now(), |_, _| panic!("nothing is left")));
    assert_eq!(call.abandon(2), None);
}

#[test]
fn an_abandoned_position_gives_its_result_back() {
    let call = Call::new(1, Wake::Sleeper);
    assert_eq!(call.abandon(0), None);
    assert!(call.is_abandoned(0));
    assert_eq!(call.complete(0, 5), Err(5));
}

#[test]
fn a_result_that_beats_the_abandoning_is_taken() {
    let call = Call::new(1, Wake::Sleeper);
    call.complete(0, 5).unwrap();
    assert_eq!(call.abandon(0), Some(5));
    assert_eq!(call.abandon(0), None);
}

#[test]
fn a_past_deadline_still_takes_what_is_there() {
    let call = Call::new(1, Wake::Sleeper);
    call.complete(0, 5).unwrap();
    let mut got = None;
    assert!(call.wait(Instant::now(), |_, result| got = Some(result)));
    assert_eq!(got, Some(5));
}

#[test]
fn results_nobody_took_are_dropped_with_the_call() {
    let result = Arc::new(());
    let call = Call::new(2, Wake::Sleeper);
    call.complete(1, result.clone()).unwrap();
    drop(call);
    assert_eq!(Arc::strong_count(&result), 1);
}

#[test]
fn many_threads_complete_one_call() {
    const EACH: u32 = 2_000;
    let call = Call::new(4 * EACH as usize, Wake::Sleeper);
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let call = &call;
            scope.spawn(move || {
                for i in 0..EACH {
                    call.complete(thread * EACH + i, thread * EACH + i).unwrap();
                }
            });
        }
        let mut left = 4 * EACH;
        while left > 0 {
            assert!(call.wait(soon(), |position, result| {
                assert_eq!(position, result);
                left -= 1;
            }));
        }
    });
}
