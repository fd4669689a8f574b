//! Ends: of lanes, with what they owed, and of fills whose time is up.

use super::errands::Outcome;
use super::fills::{FillId, Stage};
use super::lane::{Ask, HEAD_BYTES, Lane, LaneState, Receive, What};
use super::reactor::Reactor;
use super::request::Answer;
use super::transfer::Part;
use crate::Error;
use std::cmp::Reverse;
use std::time::{Duration, Instant};

/// Lanes that may fail under one part of a value before its fill fails.
const ATTEMPTS: u32 = 2;

impl Reactor {
    /// How long the peer may owe the present step of a lane.
    pub(super) fn lane_patience(&self, lane: &Lane) -> Duration {
        let connects = matches!(lane.state, LaneState::Connecting | LaneState::Greeting);
        let ms = match connects || lane.owes_a_sign_of_life() {
            true => self.config.connect_timeout_ms,
            false => self.config.receive_timeout_ms,
        };
        Duration::from_millis(ms)
    }

    /// The lane's time is up: a slow one ends, an idle one is asked for a sign of life.
    pub(super) fn lane_is_due(&mut self, id: u64, now: Instant) {
        let Some(lane) = self.lanes.get(&id) else { return };
        if lane.owed_since.is_some() {
            let allowed_ms = self.lane_patience(lane).as_millis();
            let reason = format!("no progress within {allowed_ms} ms, {}", lane.progress());
            return self.break_lane(id, reason);
        }
        let request_id = self.next_request_id();
        if let Some(lane) = self.lanes.get_mut(&id) {
            let ask = Ask { id: request_id, what: What::Ping };
            lane.ask(ask, now, |out| crate::wire::encode_ping(out, request_id));
            lane.send_next(&mut *self.transport);
        }
    }

    /// The kernel has given back everything of a closing lane: drop it, and see to the fills it owed.
    pub(super) fn lane_gone(&mut self, id: u64) {
        let Some(mut lane) = self.lanes.remove(&id) else { return };
        self.transport.forget(id);
        self.counters().lanes.set(self.lanes.len() as u64);
        let LaneState::Closing(why) = &lane.state else { return };
        let peer = lane.peer;
        self.peers[peer].lanes.retain(|&other| other != id);
        let now = Instant::now();
        let idle = lane.outstanding.is_empty();
        if !self.is_stopping() && (!idle || !lane.delivered) {
            self.counters().lanes_failed.add(1);
            // A connection that is lost before it answers may be the fault of what was asked; more of them
            // in a row than one key can break are the peer's.
            let useless = !lane.delivered && (idle || self.peers[peer].lost_in_a_row() > ATTEMPTS);
            if lane.spare && idle && self.peers[peer].queues.is_empty() {
                let (min, max) = self.backoff();
                self.peers[peer].reconnect_failed(now, min, max);
            } else if !lane.connected || useless {
                self.shun(peer, now, now.saturating_duration_since(lane.opened), why.clone());
            }
        }
        for Ask { what, .. } in std::mem::take(&mut lane.outstanding).into_iter().rev() {
            match what {
                What::Head(fill) => {
                    let attempts = self.fills.get_mut(fill).map_or(0, |fill| {
                        fill.attempts += 1;
                        fill.attempts
                    });
                    self.settled(fill);
                    self.retry_or_fail(fill, attempts, why, now);
                }
                What::Part(fill, part) | What::Stripe(fill, part) => self.part_lost(fill, part, why, now),
                What::Errand(errand) => errand.end(Outcome::Lost(why.clone())),
                // It was none of the keys' fault, most likely; should it be, asking one by one will show.
                What::Locate(fills) => self.ask_one_by_one(&fills),
                What::Ping | What::Challenge(_) | What::Authenticate(_) => {}
            }
        }
        self.dispatch(peer);
        if lane.delivered && self.peers[peer].lanes.is_empty() && !self.is_stopping() {
            self.reconnect(peer, now);
        }
    }

    /// The lane is gone that was asked for a part.
    pub(super) fn part_lost(&mut self, id: FillId, part: Part, why: &Error, now: Instant) {
        let transfer = self.fills.get_mut(id).and_then(|fill| fill.transfer.as_mut());
        let attempts = transfer.map_or(0, |transfer| transfer.lose(part));
        self.settled(id);
        self.retry_or_fail(id, attempts, why, now);
    }

    /// Connects although nobody waits, so that the next fill finds a lane.
    pub(super) fn reconnect(&mut self, peer: usize, now: Instant) {
        self.peers[peer].reconnecting();
        let before = self.last_lane;
        self.open_lane(peer, now);
        if self.last_lane != before
            && let Some(lane) = self.lanes.get_mut(&self.last_lane)
        {
            lane.spare = true;
        }
    }

    fn retry_or_fail(&mut self, id: FillId, attempts: u32, why: &Error, now: Instant) {
        let Some(fill) = self.fills.get_mut(id).filter(|fill| fill.live) else { return };
        if attempts >= ATTEMPTS || fill.deadline <= now {
            return self.fail_fill(id, why);
        }
        let queues = &mut self.peers[fill.peer].queues;
        let queue = match fill.about {
            None => &mut queues.heads,
            Some(about) if about.len <= HEAD_BYTES => &mut queues.small,
            Some(_) => &mut queues.bulk,
        };
        if fill.about.is_none() {
            fill.stage = Stage::Queued;
        }
        if !queue.contains(&id) {
            queue.push_front(id);
        }
    }

    /// Ends a fill with an error to all who wait.
    pub(super) fn fail_fill(&mut self, id: FillId, error: &Error) {
        let Some(fill) = self.fills.get_mut(id).filter(|fill| fill.live) else { return };
        let groups = std::mem::take(&mut fill.groups);
        let (hash, key) = (fill.hash, fill.key.clone());
        let waiters = self.fills.kill(id);
        // Counted before anybody is told.
        self.counters().fills_failed.add(1);
        self.bury(id);
        for (waiter, _) in waiters {
            waiter.fail(error.clone());
        }
        self.tell_groups_of(&groups, hash, &key, || Answer::Value(Err(error.clone())));
    }

    /// A deadline of the fill has passed: of one who waits for it, or its own.
    pub(super) fn expire_fill(&mut self, id: FillId, now: Instant) {
        let Some(fill) = self.fills.get(id).filter(|fill| fill.live) else { return };
        let stage = fill.stage;
        let error = match self.short_of_bytes(stage, fill.about.map(|about| about.len)) {
            Some(value_bytes) => self.pinned_error(value_bytes),
            None => Error::DeadlinePassed { stage: stage.as_str() },
        };
        let Some(fill) = self.fills.get_mut(id) else { return };
        fill.fail_late_waiters(now, &error);
        if fill.deadline > now {
            return;
        }
        match stage {
            Stage::Receiving => self.receive_for_nobody(id, now),
            _ => self.fail_fill(id, &error),
        }
    }

    /// If a fill in this stage does not go on for want of room: how many bytes are wanted.
    fn short_of_bytes(&self, stage: Stage, len: Option<u64>) -> Option<u64> {
        let held_back = stage == Stage::Queued && !self.starving.is_empty();
        (stage == Stage::NoRoom || held_back)
            .then(|| len.or_else(|| self.first_starving_bytes()).unwrap_or(0))
    }

    /// Nobody waits any longer for a value that is arriving. Whoever asks next is glad of it, unless it comes so slowly
    /// that it would keep its lanes from others for longer than a silent peer may.
    fn receive_for_nobody(&mut self, id: FillId, now: Instant) {
        let patience = self.config.receive_timeout();
        let Some(fill) = self.fills.get_mut(id) else { return };
        let left = fill.transfer.as_ref().and_then(|transfer| transfer.time_left(now));
        if left.is_some_and(|left| left <= patience) {
            fill.deadline = now + patience;
            self.deadlines.push(Reverse((fill.deadline, id)));
            return;
        }
        self.fail_fill(id, &Error::DeadlinePassed { stage: Stage::Receiving.as_str() });
        let slow = |receive: &Receive| match receive {
            Receive::Body(body) if body.fill() == Some(id) => body.time_left(now).is_none_or(|left| left > patience),
            _ => false,
        };
        let lanes: Vec<u64> =
            self.lanes.values().filter(|lane| slow(&lane.receive)).map(|lane| lane.id).collect();
        for lane in lanes {
            let progress = self.lanes.get(&lane).map_or_else(String::new, Lane::progress);
            self.break_lane(lane, format!("too slow to wait for, {progress}"));
        }
    }
}
