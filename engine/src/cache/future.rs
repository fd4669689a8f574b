//! The front for `async` callers, under any executor: nothing here needs one, and no thread is used up.
//!
//! A future's work begins when it is made, not when it is first polled, so that hits are served at once and
//! misses are on their way while the caller does something else. Dropping a future gives up on the call: what
//! comes all the same goes back to the shard. Deadlines are kept by the shards.

use super::Cache;
use super::core::{Core, Front, LeaseBatch, Miss, hit};
use super::wait::{Pending, count_of, reservation_of, value_of};
use crate::deadline::Deadline;
use crate::key::Key;
use crate::shard::Lease;
use crate::shard::request::Answer;
use crate::{Error, Result};
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};

/// Who is to be woken when an answer comes.
#[derive(Clone, Default)]
struct Waiting(Arc<Mutex<Option<Waker>>>);

impl Waiting {
    fn front(&self) -> Front {
        let waiting = self.clone();
        Front::told(move || {
            let waker = waiting.0.lock().unwrap_or_else(PoisonError::into_inner).take();
            if let Some(waker) = waker {
                waker.wake();
            }
        })
    }

    /// Hands all answers that have come to `each`. If there are none, the task is woken for the next.
    fn drain(&self, pending: &Pending, context: &Context<'_>, mut each: impl FnMut(usize, Answer)) -> bool {
        let mut each = |position: u32, answer| each(position as usize, answer);
        if pending.call.drain(&mut each) {
            return true;
        }
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(context.waker().clone());
        // An answer that came before the waker stood there told nobody.
        pending.call.drain(&mut each)
    }
}

/// A call with one position.
struct One {
    pending: Pending,
    waiting: Waiting,
}

impl One {
    fn new(start: impl FnOnce(Front) -> Pending) -> Self {
        let waiting = Waiting::default();
        Self { pending: start(waiting.front()), waiting }
    }

    fn poll(&self, context: &Context<'_>) -> Poll<Option<Answer>> {
        let mut only = None;
        if self.waiting.drain(&self.pending, context, |_, answer| only = Some(answer)) {
            Poll::Ready(only)
        } else {
            Poll::Pending
        }
    }
}

/// See [`Cache::get_async`].
#[must_use = "dropping the future gives up on the value"]
pub struct GetFuture(Get);

enum Get {
    Known(Result<Option<Lease>>),
    Fetching(One),
    Finished,
}

impl Future for GetFuture {
    type Output = Result<Option<Lease>>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        if let Get::Fetching(one) = &self.0 {
            let Poll::Ready(answer) = one.poll(context) else { return Poll::Pending };
            self.0 = Get::Known(value_of(answer));
        }
        match std::mem::replace(&mut self.0, Get::Finished) {
            Get::Known(result) => Poll::Ready(result),
            _ => unreachable!("polled after it was finished"),
        }
    }
}

/// See [`Cache::get_batch_async`].
#[must_use = "dropping the future gives up on the values"]
pub struct BatchFuture {
    results: Vec<Option<Result<Option<Lease>>>>,
    /// Position in the batch of every position of the call.
    positions: Vec<usize>,
    call: Option<One>,
    left: usize,
}

impl Future for BatchFuture {
    type Output = Vec<Result<Option<Lease>>>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let Self { results, positions, call, left } = &mut *self;
        while *left > 0 {
            let Some(One { pending, waiting }) = call else { break };
            let some = waiting.drain(pending, context, |i, answer| {
                results[positions[i]] = Some(value_of(Some(answer)));
                *left -= 1;
            });
            if !some {
                return Poll::Pending;
            }
        }
        *call = None;
        let results = std::mem::take(results);
        Poll::Ready(results.into_iter().map(|result| result.unwrap_or(Err(Error::ShutDown))).collect())
    }
}

/// See [`Cache::put_async`].
#[must_use = "dropping the future gives up on the put, unless it is done already"]
pub struct PutFuture<V> {
    core: Arc<Core>,
    value: V,
    deadline: Deadline,
    step: Put,
}

enum Put {
    Failed(Option<Error>),
    Reserving(One),
    Committing(One),
}

impl<V: AsRef<[u8]> + Unpin> Future for PutFuture<V> {
    type Output = Result<()>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        loop {
            match &mut this.step {
                Put::Failed(error) => return Poll::Ready(Err(error.take().unwrap_or(Error::ShutDown))),
                Put::Reserving(one) => {
                    let Poll::Ready(answer) = one.poll(context) else { return Poll::Pending };
                    this.step = match reservation_of(answer) {
                        Err(error) => Put::Failed(Some(error)),
                        Ok(mut reservation) => {
                            let crc32c = reservation.write(&[this.value.as_ref()]);
                            let commit = |front| this.core.commit(reservation, crc32c, this.deadline, front);
                            Put::Committing(One::new(commit))
                        }
                    };
                }
                Put::Committing(one) => {
                    return one.poll(context).map(|answer| count_of(answer).map(drop));
                }
            }
        }
    }
}

impl Cache {
    /// [`Cache::get`] for `async` callers. A hit is looked up here and now; a miss is handed over here and now, and
    /// fails with [`Error::Overloaded`] where the blocking form would wait for a place in the shard's ring.
    pub fn get_async<'k>(&self, key: impl Into<Key<'k>>, deadline: impl Into<Deadline>) -> GetFuture {
        let look_up = || {
            let key = key.into().check()?;
            let (hash, shared) = self.core.shard_of(key)?;
            Ok(hit(shared, hash, key).ok_or(Miss::new(0, hash, key)))
        };
        GetFuture(match look_up() {
            Err(error) => Get::Known(Err(error)),
            Ok(Ok(lease)) => Get::Known(Ok(Some(lease))),
            Ok(Err(miss)) => {
                Get::Fetching(One::new(|front| self.core.fetch(&[miss], Vec::new(), deadline.into(), front)))
            }
        })
    }

    /// [`Cache::get_batch`] for `async` callers: done when every position is. As [`Cache::get_async`].
    pub fn get_batch_async(&self, keys: &[Key<'_>], deadline: impl Into<Deadline>) -> BatchFuture {
        let waiting = Waiting::default();
        let LeaseBatch { results, positions, pending } =
            self.core.lease_batch(keys, deadline.into(), waiting.front());
        let call = pending.map(|pending| One { pending, waiting });
        BatchFuture { results, left: positions.len(), positions, call }
    }

    /// [`Cache::put`] for `async` callers. The value is copied by the task's own thread when there is room for it.
    pub fn put_async<'k, V: AsRef<[u8]> + Unpin>(
        &self,
        key: impl Into<Key<'k>>,
        value: V,
        deadline: impl Into<Deadline>,
    ) -> PutFuture<V> {
        let (deadline, len) = (deadline.into(), value.as_ref().len() as u64);
        let waiting = Waiting::default();
        let step = match self.core.reserve(key.into(), len, deadline, waiting.front()) {
            Ok(pending) => Put::Reserving(One { pending, waiting }),
            Err(error) => Put::Failed(Some(error)),
        };
        PutFuture { core: self.core.clone(), value, deadline, step }
    }
}
