//! What completions mean: connections made and lost, answers, values.

use super::fills::{FillId, Stage};
use super::lane::{Arrived, Body, Lane, LaneState, Receive};
use super::reactor::{Reactor, Starving};
use super::request::Answer;
use super::transport::{LaneOp, Token};
use super::store::{NoRoom, Room};
use super::value::Value;
use crate::config::Admission;
use crate::wire::{MAX_REASON_BYTES, Op, ResponseHeader, Status};
use crate::Error;
use std::collections::HashMap;
use std::time::Instant;

/// Lanes that may fail under one fill before the fill fails.
const ATTEMPTS: u32 = 2;

/// Unwanted answers up to this size are read and thrown away; larger ones cost the lane instead.
const DISCARD_BYTES_MAX: u64 = 8 << 20;

/// See [`Reactor::held_up`].
pub(super) type HeldUp = HashMap<FillId, Error>;

impl Reactor {
    pub(super) fn complete(&mut self, token: Token, result: i32) {
        match token {
            Token::Bell => self.bell_rang(),
            Token::Timeout | Token::Cancel => {}
            Token::Lane { op, lane } => self.lane_completed(lane, op, result),
        }
    }

    fn lane_completed(&mut self, id: u64, op: LaneOp, result: i32) {
        let Some(lane) = self.lanes.get_mut(&id) else { return };
        lane.completed(op);
        if matches!(lane.state, LaneState::Closing(_)) {
            if lane.is_quiet() {
                self.lane_gone(id);
            }
            return;
        }
        match (op, result) {
            (LaneOp::Connect, 0) => self.connected(id),
            // A signal, or a kernel that wants the operation again.
            (LaneOp::Send, n) if n == -libc::EINTR || n == -libc::EAGAIN => lane.sent(0, &mut *self.transport),
            (LaneOp::Send, n) if n > 0 => lane.sent(n as usize, &mut *self.transport),
            (LaneOp::Receive, n) if n == -libc::EINTR || n == -libc::EAGAIN => self.receive_next(id),
            (LaneOp::Receive, n) if n > 0 => self.received(id, n as usize),
            (LaneOp::Receive, 0) => {
                let reason = format!("the peer closed the connection {}", lane.progress());
                self.break_lane(id, reason);
            }
            (op, n) => {
                let what = match op {
                    LaneOp::Connect => "connect",
                    LaneOp::Send => "send",
                    LaneOp::Receive => "receive",
                };
                let error = std::io::Error::from_raw_os_error(-n);
                let reason = format!("{what} failed {}: {error}", lane.progress());
                self.break_lane(id, reason);
            }
        }
    }

    fn connected(&mut self, id: u64) {
        let receive_bytes = self.config.receive_bytes as usize;
        if let Some(lane) = self.lanes.get_mut(&id) {
            lane.up(&mut *self.transport, &self.shared.arena, receive_bytes);
            let peer = lane.peer;
            self.counters().lanes_opened.add(1);
            self.dispatch(peer);
        }
    }

    fn receive_next(&mut self, id: u64) {
        let receive_bytes = self.config.receive_bytes as usize;
        if let Some(lane) = self.lanes.get_mut(&id).filter(|lane| lane.is_up()) {
            lane.receive_next(&mut *self.transport, &self.shared.arena, receive_bytes);
        }
    }

    fn received(&mut self, id: u64, bytes: usize) {
        let Some(lane) = self.lanes.get_mut(&id) else { return };
        match lane.receive {
            Receive::Body(_) => self.shared.counters.received_direct_bytes.add(bytes as u64),
            Receive::Discard { .. } => self.shared.counters.received_discarded_bytes.add(bytes as u64),
            _ => {}
        }
        match lane.received(bytes, Instant::now(), &self.shared.arena) {
            Ok(Arrived::More | Arrived::Discarded) => self.receive_next(id),
            Ok(Arrived::Header(header)) => match self.answered(id, header) {
                Ok(()) => self.receive_next(id),
                Err(reason) => self.breach(id, reason),
            },
            Ok(Arrived::Value(body)) => {
                // Ask for the next bytes first: the peer need not wait while this value is published.
                self.receive_next(id);
                self.arrived(id, body);
            }
            Err(reason) => self.breach(id, reason),
        }
    }

    /// An answer's header is there. Sets what the lane receives next. Errors are breaches of the protocol.
    fn answered(&mut self, id: u64, header: ResponseHeader) -> Result<(), String> {
        let Some(lane) = self.lanes.get_mut(&id) else { return Ok(()) };
        let fill_id: FillId = header.request_id;
        if !lane.outstanding.contains(&fill_id) {
            if header.status != Status::Ok && header.request_id == 0 {
                let reason = format!("the peer refused the connection: {}", header.status);
                if header.status != Status::Busy {
                    return Err(reason);
                }
                self.break_lane(id, reason);
                return Ok(());
            }
            return Err(format!("answer to request {fill_id}, which is not outstanding"));
        }
        if !lane.delivered {
            lane.delivered = true;
            self.peers[lane.peer].delivered();
        }
        match header.status {
            Status::Ok => self.value_announced(id, header),
            status => {
                if header.body_len > MAX_REASON_BYTES as u64 {
                    return Err(format!(
                        "{} bytes of reason for `{status}`, at most {MAX_REASON_BYTES} are allowed",
                        header.body_len
                    ));
                }
                self.settle_outstanding(id, fill_id);
                self.discard(id, header.body_len);
                self.refused(fill_id, id, status);
                Ok(())
            }
        }
    }

    fn refused(&mut self, fill_id: FillId, lane: u64, status: Status) {
        if status == Status::Absent {
            if let Some(mut fill) = self.fills.remove(fill_id) {
                // Counted before anybody is told. A fill that is no longer live was counted when it died.
                self.counters().fills_absent.add(u64::from(fill.live));
                self.count_fills();
                if fill.live {
                    self.absent.remember(fill.hash, fill.key.clone(), Instant::now());
                }
                fill.answer_absent();
            }
        } else if let Some(peer) = self.lanes.get(&lane).map(|lane| self.peers[lane.peer].address.clone()) {
            let reason = status.to_string().into();
            self.fail_fill(fill_id, &Error::Refused { peer, reason });
        }
        self.dispatch_lane(lane);
    }

    fn value_announced(&mut self, id: u64, header: ResponseHeader) -> Result<(), String> {
        let whole = header.op == Some(Op::Get) && header.range_offset == 0 && header.body_len == header.value_len;
        if !whole {
            return Err(format!(
                "asked for a whole value, got bytes {}+{} of {}",
                header.range_offset, header.body_len, header.value_len
            ));
        }
        let fill_id = header.request_id;
        let live = self.fills.get(fill_id).is_some_and(|fill| fill.live);
        let arena_bytes = self.store.arena_bytes();
        if live && header.value_len <= arena_bytes {
            if !self.starving.is_empty() || !self.start_body(id, header) {
                self.pause(id, header);
            }
            return Ok(());
        }
        if live {
            let error = Error::ValueTooLarge { value_bytes: header.value_len, arena_bytes };
            self.fail_fill(fill_id, &error);
        } else {
            self.fills.remove(fill_id);
            self.count_fills();
        }
        self.settle_outstanding(id, fill_id);
        self.discard(id, header.body_len);
        self.dispatch_lane(id);
        Ok(())
    }

    /// Finds room and starts to receive into it. False if there is none.
    fn start_body(&mut self, id: u64, header: ResponseHeader) -> bool {
        // A fill that is gone has no key any more; its room may be anywhere.
        let hash = self.fills.get(header.request_id).map_or(0, |fill| fill.hash);
        let room = match self.store.reserve(hash, header.value_len, &self.shared.counters) {
            Ok(room) => room,
            Err(NoRoom::Pinned | NoRoom::Never) => return false,
        };
        if let Some(fill) = self.fills.get_mut(header.request_id) {
            fill.stage = Stage::Receiving;
        }
        let body = Body::new(header, room);
        if header.body_len == 0 {
            self.arrived(id, body);
        } else if let Some(lane) = self.lanes.get_mut(&id) {
            lane.receive = Receive::Body(body);
        }
        true
    }

    fn pause(&mut self, id: u64, header: ResponseHeader) {
        if let Some(fill) = self.fills.get_mut(header.request_id) {
            fill.stage = Stage::NoRoom;
        }
        if let Some(lane) = self.lanes.get_mut(&id) {
            lane.receive = Receive::NoRoom { header };
            self.starving.push_back(Starving::Lane(id));
        }
    }

    /// Tries to go on with a paused lane. False if it must go on waiting (and is queued again, in front).
    pub(super) fn resume(&mut self, id: u64) -> bool {
        let Some(lane) = self.lanes.get(&id) else { return true };
        let Receive::NoRoom { header } = lane.receive else { return true };
        if !lane.is_up() {
            return true;
        }
        if !self.fills.get(header.request_id).is_some_and(|fill| fill.live) {
            self.drop_paused(id, header);
            return true;
        }
        if !self.start_body(id, header) {
            self.starving.push_front(Starving::Lane(id));
            return false;
        }
        if let Some(lane) = self.lanes.get_mut(&id) {
            lane.owed_since = (!lane.outstanding.is_empty()).then(Instant::now);
            if matches!(lane.receive, Receive::NoRoom { .. }) {
                // The empty value: nothing to receive.
                lane.receive = Receive::Header { got: 0 };
            }
        }
        self.receive_next(id);
        true
    }

    /// The answer that a paused lane holds back is no longer wanted.
    fn drop_paused(&mut self, id: u64, header: ResponseHeader) {
        self.fills.remove(header.request_id);
        self.count_fills();
        self.settle_outstanding(id, header.request_id);
        if let Some(lane) = self.lanes.get_mut(&id) {
            // The pause was ours; the peer owes the next bytes from now on.
            lane.owed_since = (!lane.outstanding.is_empty()).then(Instant::now);
        }
        self.discard(id, header.body_len);
        self.receive_next(id);
        self.dispatch_lane(id);
    }

    /// Sets the lane to throw `bytes` away, or closes it if that would take too long.
    fn discard(&mut self, id: u64, bytes: u64) {
        if bytes > DISCARD_BYTES_MAX {
            if let Some(lane) = self.lanes.get_mut(&id) {
                lane.forgone = true;
            }
            self.break_lane(id, format!("an unwanted answer of {bytes} bytes is not worth receiving"));
        } else if let Some(lane) = self.lanes.get_mut(&id) {
            lane.receive =
                if bytes == 0 { Receive::Header { got: 0 } } else { Receive::Discard { left: bytes } };
        }
    }

    /// A value is complete: check and publish it.
    fn arrived(&mut self, id: u64, body: Body) {
        let Body { header, room, crc, .. } = body;
        self.settle_outstanding(id, header.request_id);
        self.conclude(id, header, room, crc);
        self.dispatch_lane(id);
    }

    fn conclude(&mut self, lane: u64, header: ResponseHeader, room: Room, crc: u32) {
        let Some(fill) = self.fills.remove(header.request_id) else {
            self.store.cancel(room, &self.shared.counters);
            return;
        };
        self.count_fills();
        if !fill.live {
            // Counted as discarded when the fence was broken.
            self.store.cancel(room, &self.shared.counters);
            return;
        }
        let mut fill = fill;
        if crc != header.value_crc32c {
            self.store.cancel(room, &self.shared.counters);
            self.counters().checksum_failures.add(1);
            self.counters().fills_failed.add(1);
            if let Some(lane) = self.lanes.get(&lane) {
                let peer = self.peers[lane.peer].address.clone();
                fill.fail_waiters(&Error::Checksum { peer, got: crc, want: header.value_crc32c });
            }
            return;
        }
        fill.waiters.retain(|(waiter, _)| !waiter.is_gone());
        let slot = room.slot;
        let value = Value {
            key: fill.key,
            extents: room.extents,
            len: header.value_len,
            version: header.value_version,
            crc32c: crc,
        };
        let keep = self.config.admission == Admission::FirstMiss;
        let pins = fill.waiters.len() as u32;
        let pins = self.store.publish(slot, fill.hash, value, pins, keep, &self.shared.counters);
        self.counters().fills_published.add(1);
        for ((waiter, _), pin) in fill.waiters.drain(..).zip(pins) {
            waiter.answer(Answer::Value(Ok(Some(self.shared.grant(pin)))));
        }
    }

    fn settle_outstanding(&mut self, id: u64, fill: FillId) {
        if let Some(lane) = self.lanes.get_mut(&id) {
            lane.outstanding.retain(|&other| other != fill);
            if lane.outstanding.is_empty() {
                (lane.owed_since, lane.suspect) = (None, false);
            }
        }
    }

    fn dispatch_lane(&mut self, id: u64) {
        if let Some(peer) = self.lanes.get(&id).map(|lane| lane.peer) {
            self.dispatch(peer);
        }
    }

    /// The peer broke the protocol.
    fn breach(&mut self, id: u64, reason: String) {
        if let Some(lane) = self.lanes.get(&id) {
            let peer = self.peers[lane.peer].address.clone();
            tracing::warn!(%peer, reason, "the peer broke the protocol; closing its connection");
            self.end_lane(id, Error::Protocol { peer, reason: reason.into() });
        }
    }

    /// The connection is of no more use.
    fn break_lane(&mut self, id: u64, reason: String) {
        if let Some(lane) = self.lanes.get(&id) {
            let peer = self.peers[lane.peer].address.clone();
            self.end_lane(id, Error::PeerUnavailable { peer, reason: reason.into() });
        }
    }

    pub(super) fn lane_too_slow(&mut self, id: u64) {
        if let Some(lane) = self.lanes.get(&id) {
            let allowed_ms = match lane.state {
                LaneState::Connecting => self.config.connect_timeout_ms,
                _ => self.config.receive_timeout_ms,
            };
            let reason = format!("no progress within {allowed_ms} ms, {}", lane.progress());
            self.break_lane(id, reason);
        }
    }

    fn end_lane(&mut self, id: u64, why: Error) {
        let Some(lane) = self.lanes.get_mut(&id) else { return };
        lane.close(why, &mut *self.transport);
        if lane.is_quiet() {
            self.lane_gone(id);
        }
    }

    /// The kernel has given back everything of a closing lane: drop it, and see to the fills it owed.
    pub(super) fn lane_gone(&mut self, id: u64) {
        let Some(mut lane) = self.lanes.remove(&id) else { return };
        self.transport.forget(id);
        self.counters().lanes.set(self.lanes.len() as u64);
        if let Receive::Body(body) = std::mem::replace(&mut lane.receive, Receive::Header { got: 0 }) {
            self.store.cancel(body.room, &self.shared.counters);
        }
        let LaneState::Closing(why) = &lane.state else { return };
        let peer = lane.peer;
        self.peers[peer].lanes.retain(|&other| other != id);
        if self.is_stopping() {
            return;
        }
        let now = Instant::now();
        if !lane.forgone && (!lane.outstanding.is_empty() || !lane.connected) {
            self.counters().lanes_failed.add(1);
            // A connection that is lost before it answers may be the fault of what was asked; more of them
            // in a row than one key can break are the peer's.
            if !lane.connected || (!lane.delivered && self.peers[peer].lost_in_a_row() > ATTEMPTS) {
                self.shun(peer, now, now.saturating_duration_since(lane.opened), reason_of(why));
            }
        }
        for &fill_id in lane.outstanding.iter().rev() {
            self.retry_or_fail(fill_id, why, u32::from(!lane.forgone), now);
        }
        self.dispatch(peer);
    }

    fn retry_or_fail(&mut self, id: FillId, why: &Error, attempts: u32, now: Instant) {
        let Some(fill) = self.fills.get_mut(id) else { return };
        fill.attempts += attempts;
        if !fill.live {
            self.fills.remove(id);
            self.count_fills();
        } else if fill.attempts < ATTEMPTS && fill.deadline > now {
            fill.stage = Stage::Queued;
            let peer = fill.peer;
            self.peers[peer].queue.push_front(id);
        } else {
            self.fail_fill(id, why);
        }
    }

    /// A deadline of the fill has passed: of one who waits for it, or its own.
    pub(super) fn expire_fill(&mut self, id: FillId, now: Instant, held_up: &HeldUp) {
        let Some(stage) = self.fills.get(id).map(|fill| fill.stage) else { return };
        let passed = || Error::DeadlinePassed { stage: stage.as_str() };
        let error = held_up.get(&id).cloned().unwrap_or_else(passed);
        let Some(fill) = self.fills.get_mut(id) else { return };
        fill.fail_late_waiters(now, &error);
        if !fill.live || fill.deadline > now {
            return;
        }
        match stage {
            Stage::Queued => self.fail_fill(id, &error),
            Stage::Receiving => self.receive_for_nobody(id, now),
            // The lane ends it when the peer's answer comes.
            Stage::Asked => self.forsake(id),
            Stage::NoRoom => {
                self.forsake(id);
                self.wake_paused(id);
            }
        }
    }

    /// Nobody waits any longer for a value that is arriving. Whoever asks next is glad of it, unless it comes so slowly
    /// that it would keep the lane from others for longer than a silent peer may.
    fn receive_for_nobody(&mut self, id: FillId, now: Instant) {
        let receives = |lane: &&Lane| matches!(&lane.receive, Receive::Body(body) if body.header.request_id == id);
        let Some(lane) = self.lanes.values().find(receives) else { return };
        let Receive::Body(body) = &lane.receive else { return };
        let left = body.time_left(now);
        if left.is_none_or(|left| left > self.config.receive_timeout()) {
            let id = lane.id;
            let reason = format!("too slow to wait for, {}", lane.progress());
            self.break_lane(id, reason);
        }
    }

    fn forsake(&mut self, id: FillId) {
        drop(self.fills.kill(id));
        self.counters().fills_failed.add(1);
    }

    /// The fills that do not go on because a value on their way has no room, and the error that says so:
    /// those of paused lanes, and those that wait for a lane of such a peer.
    pub(super) fn held_up(&self) -> HeldUp {
        let mut held_up = HeldUp::new();
        if self.starving.is_empty() {
            return held_up;
        }
        let mut pinned_bytes = None;
        for lane in self.lanes.values() {
            let Receive::NoRoom { header } = lane.receive else { continue };
            let error = Error::Pinned {
                value_bytes: header.value_len,
                pinned_bytes: *pinned_bytes.get_or_insert_with(|| self.store.pinned_bytes()),
                arena_bytes: self.store.arena_bytes(),
            };
            for &id in lane.outstanding.iter().chain(&self.peers[lane.peer].queue) {
                held_up.insert(id, error.clone());
            }
        }
        held_up
    }

    /// The lane that holds back the answer to this fill, for want of room.
    fn paused_lane(&self, id: FillId) -> Option<(u64, ResponseHeader)> {
        self.lanes.values().find_map(|lane| match lane.receive {
            Receive::NoRoom { header } if header.request_id == id => Some((lane.id, header)),
            _ => None,
        })
    }

    /// The lane that holds back the answer to a dead fill goes on without it.
    pub(super) fn wake_paused(&mut self, id: FillId) {
        let Some((lane, header)) = self.paused_lane(id) else { return };
        self.starving.retain(|starving| !matches!(starving, Starving::Lane(other) if *other == lane));
        self.drop_paused(lane, header);
    }
}

fn reason_of(error: &Error) -> String {
    match error {
        Error::PeerUnavailable { reason, .. } | Error::Protocol { reason, .. } => reason.to_string(),
        other => other.to_string(),
    }
}
