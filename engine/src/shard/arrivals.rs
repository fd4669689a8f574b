//! What completions mean to lanes: connections made, bytes sent and received.

use super::lane::{Arrived, LaneState, Receive};
use super::reactor::Reactor;
use super::transport::{LaneOp, Token};
use crate::Error;
use std::time::Instant;

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
            (LaneOp::Send, n) if n == -libc::EINTR || n == -libc::EAGAIN => {
                lane.sent(0, &mut *self.transport)
            }
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
        if let Some(secret) = self.secret.clone() {
            return self.greet(id, &secret);
        }
        if let Some(lane) = self.lanes.get_mut(&id) {
            lane.up();
            let peer = lane.peer;
            self.counters().lanes_opened.add(1);
            self.receive_next(id);
            self.dispatch(peer);
        }
    }

    pub(super) fn receive_next(&mut self, id: u64) {
        let receive_bytes = self.config.receive_bytes as usize;
        if let Some(lane) = self.lanes.get_mut(&id).filter(|lane| lane.is_open()) {
            lane.receive_next(&mut *self.transport, &self.shared.arena, receive_bytes);
        }
    }

    fn received(&mut self, id: u64, bytes: usize) {
        let Some(lane) = self.lanes.get_mut(&id) else { return };
        match &lane.receive {
            Receive::Body(body) => {
                self.shared.counters.received_direct_bytes.add(bytes as u64);
                if body.is_too_late(Instant::now(), self.config.receive_timeout()) {
                    let reason = format!("too slow to wait for, {}", lane.progress());
                    return self.break_lane(id, reason);
                }
                let fill = body.fill().and_then(|fill| self.fills.get_mut(fill));
                if let Some(transfer) = fill.and_then(|fill| fill.transfer.as_mut()) {
                    transfer.received(bytes as u64);
                }
            }
            Receive::Discard { .. } => self.shared.counters.received_discarded_bytes.add(bytes as u64),
            _ => {}
        }
        match lane.received(bytes, Instant::now(), &self.shared.arena) {
            Ok(Arrived::More | Arrived::Discarded) => self.receive_next(id),
            Ok(Arrived::Header(header)) => match self.answered(id, header) {
                Ok(()) => self.receive_next(id),
                Err(reason) => self.breach(id, reason),
            },
            Ok(Arrived::Part(body)) => {
                // Ask for the next bytes first: the peer need not wait while this value is published.
                self.receive_next(id);
                self.part_arrived(id, body);
            }
            Ok(Arrived::Entries(entries)) => {
                self.receive_next(id);
                if let Err(reason) = self.told(id, entries) {
                    self.breach(id, reason);
                }
            }
            Err(reason) => self.breach(id, reason),
        }
    }

    /// The peer broke the protocol.
    pub(super) fn breach(&mut self, id: u64, reason: String) {
        if let Some(lane) = self.lanes.get(&id) {
            let peer = self.peers[lane.peer].address.clone();
            tracing::warn!(%peer, reason, "the peer broke the protocol; closing its connection");
            self.end_lane(id, Error::Protocol { peer, reason: reason.into() });
        }
    }

    /// The connection is of no more use.
    pub(super) fn break_lane(&mut self, id: u64, reason: String) {
        if let Some(lane) = self.lanes.get(&id) {
            let peer = self.peers[lane.peer].address.clone();
            self.end_lane(id, Error::PeerUnavailable { peer, reason: reason.into() });
        }
    }

    pub(super) fn end_lane(&mut self, id: u64, why: Error) {
        let Some(lane) = self.lanes.get_mut(&id) else { return };
        lane.close(why, &mut *self.transport);
        if lane.is_quiet() {
            self.lane_gone(id);
        }
    }
}
