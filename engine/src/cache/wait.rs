//! Calls under way. The blocking front: a thread sleeps until every position is answered or the deadline passes.

use crate::call::Call;
use crate::deadline::Deadline;
use crate::shard::Lease;
use crate::shard::request::{Answer, Reservation};
use crate::{Error, Result};
use std::sync::Arc;
use std::time::Duration;

/// How long a call waits past its deadline for the shard's own word on why it failed, which says more than
/// "deadline passed". Matters only when a shard is so busy that it is late.
const LAST_WORD: Duration = Duration::from_millis(20);

/// A call under way.
pub(crate) struct Pending {
    pub(crate) call: Arc<Call<Answer>>,
    pub(crate) len: usize,
    pub(crate) deadline: Deadline,
}

impl Pending {
    /// Waits for all positions and hands each answer over as it comes; `None` for those that did not come in time.
    pub(super) fn finish(self, mut each: impl FnMut(usize, Option<Answer>)) {
        // A moment so far away that nothing can be added to it needs no more.
        let end = self.deadline.instant();
        let last_word = end.checked_add(LAST_WORD).unwrap_or(end);
        let mut waiting = vec![true; self.len];
        let mut left = self.len;
        while left > 0 {
            let in_time = self.call.wait(last_word, |position, answer| {
                waiting[position as usize] = false;
                left -= 1;
                each(position as usize, Some(answer));
            });
            if !in_time {
                for position in (0..self.len).filter(|&position| waiting[position]) {
                    each(position, self.call.abandon(position as u32));
                }
                return;
            }
        }
    }

    /// Waits for the answer to the only position.
    pub(super) fn answer(self) -> Option<Answer> {
        let mut only = None;
        self.finish(|_, answer| only = answer);
        only
    }
}

/// Whoever drops it waits no longer: what comes all the same goes back.
impl Drop for Pending {
    fn drop(&mut self) {
        for position in 0..self.len {
            drop(self.call.abandon(position as u32));
        }
    }
}

fn no_answer(answer: Option<Answer>) -> Error {
    match answer {
        Some(_) => Error::ShutDown,
        None => Error::DeadlinePassed { stage: "waiting for the shard" },
    }
}

/// What an answer to a fetch says.
pub(super) fn value_of(answer: Option<Answer>) -> Result<Option<Lease>> {
    match answer {
        Some(Answer::Value(value)) => value,
        other => Err(no_answer(other)),
    }
}

/// What an answer to a reservation says.
pub(super) fn reservation_of(answer: Option<Answer>) -> Result<Reservation> {
    match answer {
        Some(Answer::Reserved(reservation)) => reservation,
        other => Err(no_answer(other)),
    }
}

/// What an answer to a commit or an invalidation says.
pub(super) fn count_of(answer: Option<Answer>) -> Result<u64> {
    match answer {
        Some(Answer::Done(count)) => count,
        other => Err(no_answer(other)),
    }
}
