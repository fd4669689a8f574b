//! What a peer's answers mean to fills.
//!
//! ```text
//!  head asked ──► announced ──► room ──► first bytes received ─┬─► complete: checked, published
//!  located ─────────┘            │                             │
//!                                └─► waits for room ──► parts asked, received over any lanes
//! ```
//!
//! A value of which the first bytes come while there is no room waits without them; they are asked for again. All parts
//! of a value are asked for in the version that was announced; if the peer has another by then, the fill begins anew.

use super::body::{Body, For};
use super::errands::Outcome;
use super::fills::{Fill, FillId, Stage};
use super::lane::{Entries, HEAD_BYTES, Receive, What};
use super::reactor::Reactor;
use super::request::Answer;
use super::room::Starving;
use super::store::{NoRoom, Room};
use super::transfer::{About, Part, Transfer};
use super::value::Value;
use crate::Error;
use crate::config::Admission;
use crate::wire::{
    ANY_VERSION, LOOKUP_ENTRY_BYTES, LookupEntry, MAX_REASON_BYTES, Op, ResponseHeader, Status,
};
use std::time::Instant;

/// How often a value may change under one fill before the fill fails.
const RENEWALS: u32 = 3;

impl Reactor {
    /// An answer's header is there. Sets what the lane receives next. Errors are breaches of the protocol.
    pub(super) fn answered(&mut self, id: u64, header: ResponseHeader) -> Result<(), String> {
        let Some(lane) = self.lanes.get_mut(&id) else { return Ok(()) };
        let Some(what) = lane.asked(header.request_id) else {
            return self.answered_nothing(id, header);
        };
        let ok = header.status == Status::Ok;
        let op = match what {
            What::Head(_) | What::Part(..) | What::Stripe(..) | What::Errand(_) => Op::Get,
            What::Locate(_) => Op::Lookup,
            What::Ping => Op::Ping,
            What::Challenge(_) => Op::Challenge,
            What::Authenticate(_) => Op::Authenticate,
        };
        if ok && header.op != Some(op) {
            return Err(format!("{op:?} was asked, {:?} was answered", header.op));
        }
        let announced = match (ok, what) {
            (false, _) => None,
            (true, &What::Head(fill)) => Some((fill, None)),
            (true, &What::Part(fill, part) | &What::Stripe(fill, part)) => Some((fill, Some(part))),
            (true, What::Locate(fills)) => {
                let (want, got) = ((fills.len() * LOOKUP_ENTRY_BYTES) as u64, header.body_len);
                if got != want {
                    return Err(format!("{got} bytes about {} keys, {want} were asked for", fills.len()));
                }
                lane.receive = Receive::Entries(Entries::new(header.request_id, want as usize));
                None
            }
            (true, What::Challenge(_) | What::Authenticate(_)) => {
                // A nonce or a proof: the header's own rules say how long.
                lane.receive = Receive::Entries(Entries::new(header.request_id, header.body_len as usize));
                None
            }
            (true, What::Errand(_)) => {
                self.errand_announced(id, header)?;
                None
            }
            (true, What::Ping) => {
                drop(lane.settle(header.request_id));
                None
            }
        };
        if let Some(lane) = self.lanes.get_mut(&id).filter(|lane| !lane.delivered && lane.is_up()) {
            lane.delivered = true;
            self.peers[lane.peer].delivered();
        }
        match announced {
            Some((fill, None)) => self.head_announced(id, fill, header),
            Some((fill, Some(part))) => self.part_announced(id, fill, part, header),
            None if ok => Ok(()),
            None => self.refused(id, header),
        }
    }

    fn answered_nothing(&mut self, id: u64, header: ResponseHeader) -> Result<(), String> {
        if header.status == Status::Ok || header.request_id != 0 {
            return Err(format!("answer to request {}, which is not outstanding", header.request_id));
        }
        let reason = format!("the peer refused the connection: {}", header.status);
        if header.status != Status::Busy {
            return Err(reason);
        }
        self.break_lane(id, reason);
        Ok(())
    }

    fn refused(&mut self, id: u64, header: ResponseHeader) -> Result<(), String> {
        let (status, len) = (header.status, header.body_len);
        if len > MAX_REASON_BYTES as u64 {
            return Err(format!(
                "{len} bytes of reason for `{status}`, at most {MAX_REASON_BYTES} are allowed"
            ));
        }
        self.discard(id, len);
        let Some(lane) = self.lanes.get_mut(&id) else { return Ok(()) };
        let peer = lane.peer;
        match lane.settle(header.request_id) {
            Some(What::Head(fill)) => {
                self.settled(fill);
                match status {
                    Status::Absent => self.absent(fill),
                    _ => self.refused_fill(fill, peer, status),
                }
            }
            Some(What::Part(fill, _) | What::Stripe(fill, _)) => self.part_refused(fill, peer, status),
            Some(What::Errand(errand)) => errand.end(Outcome::Refused(status)),
            Some(What::Locate(fills)) => self.ask_one_by_one(&fills),
            Some(What::Challenge(_) | What::Authenticate(_)) => {
                let peer = self.peers[peer].address.clone();
                let reason = format!("{status}, when authentication was asked for").into();
                self.end_lane(id, Error::Refused { peer, reason });
                return Ok(());
            }
            Some(What::Ping) | None => {}
        }
        self.dispatch(peer);
        Ok(())
    }

    /// The peer does not give a part of a value that it had a moment ago.
    pub(super) fn part_refused(&mut self, fill: FillId, peer: usize, status: Status) {
        self.settled(fill);
        match status {
            Status::Absent | Status::VersionMismatch | Status::RangeOutside => self.renew(fill, peer, status),
            _ => self.refused_fill(fill, peer, status),
        }
    }

    fn refused_fill(&mut self, fill: FillId, peer: usize, status: Status) {
        let peer = self.peers[peer].address.clone();
        self.fail_fill(fill, &Error::Refused { peer, reason: status.to_string().into() });
    }

    /// A lane is through with one request for this fill. The end of a dead one, if it was the last.
    pub(super) fn settled(&mut self, id: FillId) {
        if let Some(fill) = self.fills.get_mut(id) {
            fill.asked -= 1;
            self.bury(id);
        }
    }

    /// Ends a dead fill that no lane has anything to do with any more.
    pub(super) fn bury(&mut self, id: FillId) {
        if self.fills.get(id).is_some_and(|fill| !fill.live && fill.asked == 0)
            && let Some(fill) = self.fills.remove(id)
        {
            if let Some(transfer) = fill.transfer {
                self.store.cancel(transfer.room, &self.shared.counters);
            }
            self.count_fills();
        }
    }

    /// The origin has no such key.
    fn absent(&mut self, id: FillId) {
        if !self.fills.get(id).is_some_and(|fill| fill.live) || self.confirmed(id, None) {
            return;
        }
        if let Some(mut fill) = self.fills.remove(id) {
            // Counted before anybody is told.
            self.counters().fills_absent.add(1);
            self.count_fills();
            self.vanished(&fill);
            let good_for = self.absent_for(fill.key.namespace, fill.since);
            self.absent.remember(fill.hash, fill.key.clone(), Instant::now(), good_for);
            fill.answer_absent();
            self.tell_groups(&fill, || Answer::Value(Ok(None)));
        }
    }

    /// The peer does not answer questions about many keys: each is asked for by itself.
    pub(super) fn ask_one_by_one(&mut self, fills: &[FillId]) {
        for &id in fills {
            if let Some(fill) = self.fills.get_mut(id) {
                fill.asked -= 1;
                if fill.live {
                    fill.stage = Stage::Queued;
                    self.peers[fill.peer].queues.heads.push_back(id);
                }
            }
            self.bury(id);
        }
    }

    /// What the peer has under the keys of a batch.
    pub(super) fn located(&mut self, id: u64, entries: Entries) -> Result<(), String> {
        let Some(lane) = self.lanes.get_mut(&id) else { return Ok(()) };
        let peer = lane.peer;
        let (chunks, _) = entries.bytes.as_chunks::<LOOKUP_ENTRY_BYTES>();
        let decode = |chunk| LookupEntry::decode(chunk).map_err(|error| error.to_string());
        // Before anything is settled: fills of a breach are those of a lane that ends.
        let decoded: Vec<LookupEntry> = chunks.iter().map(decode).collect::<Result<_, _>>()?;
        if decoded.iter().any(|entry| entry.status == Status::Ok && entry.version == ANY_VERSION) {
            return Err("a value without a version".to_owned());
        }
        let Some(What::Locate(fills)) = lane.settle(entries.id) else { return Ok(()) };
        for (&fill_id, entry) in fills.iter().zip(decoded) {
            self.settled(fill_id);
            match entry.status {
                _ if !self.fills.get(fill_id).is_some_and(|fill| fill.live) => {}
                Status::Ok => {
                    let LookupEntry { value_len: len, version, crc32c, .. } = entry;
                    self.known(fill_id, About { len, version, crc32c });
                }
                Status::Absent => self.absent(fill_id),
                status => self.refused_fill(fill_id, peer, status),
            }
        }
        self.dispatch(peer);
        Ok(())
    }

    /// A live fill's value is known, and not asked for.
    fn known(&mut self, id: FillId, about: About) {
        if self.confirmed(id, Some(about)) {
            return;
        }
        let arena_bytes = self.store.arena_bytes();
        if about.len > arena_bytes {
            return self.fail_fill(id, &Error::ValueTooLarge { value_bytes: about.len, arena_bytes });
        }
        let Some(fill) = self.fills.get_mut(id) else { return };
        (fill.about, fill.stage) = (Some(about), Stage::NoRoom);
        let groups = std::mem::take(&mut fill.groups);
        // Who wants it together with others takes room for all of them at once.
        if !fill.waiters.is_empty() || groups.is_empty() {
            self.want_room(id);
        }
        self.groups_to_try.extend(groups);
    }

    /// Finds room for a known value, at once if nobody waits for room, or queues it.
    pub(super) fn want_room(&mut self, id: FillId) {
        if self.fills.get(id).is_some_and(|fill| self.is_quota_queued(fill.key.namespace)) {
            self.wait_for_quota(Starving::Fill(id));
        } else if !self.starving.is_empty() || !self.place(id) {
            self.starve_fill(id);
        }
    }

    /// Finds room for a known value and lets its bytes be asked for, or lets it wait for its namespace's quota. False if
    /// there is none.
    pub(super) fn place(&mut self, id: FillId) -> bool {
        let Some(fill) = self.fills.get(id).filter(|fill| fill.live && fill.stage == Stage::NoRoom) else {
            return true;
        };
        let Some(about) = fill.about else { return true };
        let namespace = fill.key.namespace;
        match self.store.reserve(fill.hash, namespace, about.len, &self.shared.counters) {
            Ok(room) => self.begin_transfer(id, about, room),
            Err(NoRoom::Pinned) => return false,
            Err(NoRoom::PinnedInQuota) => self.wait_for_quota(Starving::Fill(id)),
            Err(NoRoom::NeverInQuota) => {
                let error = self.quota_error(namespace, about.len);
                self.fail_fill(id, &error);
            }
            Err(NoRoom::Never) => {
                let arena_bytes = self.store.arena_bytes();
                self.fail_fill(id, &Error::ValueTooLarge { value_bytes: about.len, arena_bytes });
            }
        }
        true
    }

    /// Gives a known value its room and lets its bytes be asked for.
    pub(super) fn begin_transfer(&mut self, id: FillId, about: About, room: Room) {
        let Some(fill) = self.fills.get_mut(id) else {
            return self.store.cancel(room, &self.shared.counters);
        };
        fill.stage = Stage::Receiving;
        fill.transfer = Some(Transfer::new(about, room, Instant::now()));
        let queues = &mut self.peers[fill.peer].queues;
        match about.len {
            0 => return self.conclude(id),
            len if len <= HEAD_BYTES => queues.small.push_back(id),
            _ => queues.bulk.push_back(id),
        }
        let peer = fill.peer;
        self.pending_peers.push(peer);
    }

    /// The first bytes of a value begin to arrive, and with them the knowledge what it is.
    fn head_announced(&mut self, id: u64, fill_id: FillId, header: ResponseHeader) -> Result<(), String> {
        let len = header.value_len.min(HEAD_BYTES);
        if header.range_offset != 0 || header.body_len != len || header.value_version == ANY_VERSION {
            return Err(format!(
                "asked for the first {HEAD_BYTES} bytes of a whole value, got bytes {}+{} of {} in version {}",
                header.range_offset, header.body_len, header.value_len, header.value_version
            ));
        }
        let about = About { len: header.value_len, version: header.value_version, crc32c: header.value_crc32c };
        let Some(fill) = self.fills.get(fill_id).filter(|fill| fill.live) else {
            return self.head_unwanted(id, fill_id, header, None);
        };
        let (hash, namespace, confirms) = (fill.hash, fill.key.namespace, fill.confirms);
        // What may be there already is looked for before room is.
        let room = match self.starving.is_empty() && !confirms && !self.is_quota_queued(namespace) {
            true => self.store.reserve(hash, namespace, about.len, &self.shared.counters).ok(),
            false => None,
        };
        let (Some(room), Some(fill), Some(lane)) = (room, self.fills.get_mut(fill_id), self.lanes.get_mut(&id)) else {
            return self.head_unwanted(id, fill_id, header, Some(about));
        };
        let mut transfer = Transfer::new(about, room, Instant::now());
        let part = transfer.take_head(len);
        let more = transfer.wants_more();
        let body = Body::new(header.request_id, For::Fill(fill_id), part, about.len, transfer.room.extents.clone());
        (fill.stage, fill.about, fill.transfer) = (Stage::Receiving, Some(about), Some(transfer));
        lane.turn_into_part(header.request_id, part);
        let (peer, groups) = (fill.peer, std::mem::take(&mut fill.groups));
        self.groups_to_try.extend(groups);
        if len == 0 {
            self.part_arrived(id, body);
        } else {
            lane.receive = Receive::Body(body);
        }
        if more {
            self.peers[peer].queues.bulk.push_back(fill_id);
            self.dispatch(peer);
        }
        Ok(())
    }

    /// First bytes that nobody wants, or for which there is no room now.
    fn head_unwanted(
        &mut self,
        id: u64,
        fill: FillId,
        header: ResponseHeader,
        about: Option<About>,
    ) -> Result<(), String> {
        self.discard(id, header.body_len);
        if let Some(lane) = self.lanes.get_mut(&id) {
            lane.settle(header.request_id);
            let peer = lane.peer;
            self.settled(fill);
            if let Some(about) = about {
                self.known(fill, about);
            }
            self.dispatch(peer);
        }
        Ok(())
    }

    fn part_announced(
        &mut self,
        id: u64,
        fill_id: FillId,
        part: Part,
        header: ResponseHeader,
    ) -> Result<(), String> {
        let (Some(fill), Some(lane)) = (self.fills.get(fill_id), self.lanes.get_mut(&id)) else {
            return Ok(());
        };
        let Some(about) = fill.about else { return Ok(()) };
        about.check(part, &header)?;
        let room = fill.transfer.as_ref().filter(|_| fill.live).map(|transfer| &transfer.room);
        if let Some(room) = room {
            let extents = room.extents.clone();
            lane.receive = Receive::Body(Body::new(header.request_id, For::Fill(fill_id), part, about.len, extents));
            return Ok(());
        }
        lane.settle(header.request_id);
        let peer = lane.peer;
        self.settled(fill_id);
        self.discard(id, header.body_len);
        self.dispatch(peer);
        Ok(())
    }

    /// Sets the lane to throw `bytes` away: never more than were asked for at once.
    fn discard(&mut self, id: u64, bytes: u64) {
        if let Some(lane) = self.lanes.get_mut(&id) {
            lane.receive =
                if bytes == 0 { Receive::Header { got: 0 } } else { Receive::Discard { left: bytes } };
        }
    }

    /// A part is here; with the last of them the value is.
    pub(super) fn part_arrived(&mut self, id: u64, body: Body) {
        let Some(lane) = self.lanes.get_mut(&id) else { return };
        let peer = lane.peer;
        match lane.settle(body.id) {
            Some(What::Errand(errand)) => errand.end(Outcome::Arrived { crc32c: body.crc }),
            Some(What::Part(fill, part) | What::Stripe(fill, part)) => {
                if let Some(transfer) = self.fills.get_mut(fill).and_then(|fill| fill.transfer.as_mut()) {
                    transfer.arrive(part, body.crc);
                }
                self.settled(fill);
                self.conclude(fill);
            }
            _ => unreachable!("a body is a part of something that was asked for"),
        }
        self.dispatch(peer);
    }

    /// Checks and publishes a value if it is complete.
    pub(super) fn conclude(&mut self, id: FillId) {
        let complete = |fill: &Fill| fill.live && fill.transfer.as_ref().is_some_and(Transfer::is_complete);
        if !self.fills.get(id).is_some_and(complete) {
            return;
        }
        let Some(mut fill) = self.fills.remove(id) else { return };
        let Some(mut transfer) = fill.transfer.take() else { return };
        self.count_fills();
        let (about, crc) = (transfer.about, transfer.crc32c());
        let Transfer { room, .. } = transfer;
        if crc != about.crc32c {
            self.store.cancel(room, &self.shared.counters);
            self.counters().checksum_failures.add(1);
            self.counters().fills_failed.add(1);
            let peer = self.peers[fill.peer].address.clone();
            let error = Error::Checksum { peer, got: crc, want: about.crc32c };
            fill.fail_waiters(&error);
            self.tell_groups(&fill, || Answer::Value(Err(error.clone())));
            return;
        }
        fill.waiters.retain(|(waiter, _)| !waiter.is_gone());
        let slot = room.slot;
        let (len, version) = (about.len, about.version);
        let value = Value::new(fill.key, room.extents, len, version, crc);
        self.store.date(slot, fill.since);
        let keep = self.config.admission == Admission::FirstMiss;
        let pins = fill.waiters.len() as u32;
        let pins = self.store.publish(slot, fill.hash, value, pins, keep, &self.shared.counters);
        self.counters().fills_published.add(1);
        for ((waiter, _), pin) in fill.waiters.drain(..).zip(pins) {
            waiter.answer(Answer::Value(Ok(Some(self.shared.grant(pin)))));
        }
        self.groups_to_try.append(&mut fill.groups);
    }

    /// The value changed at the origin while it was on its way: begins anew.
    fn renew(&mut self, id: FillId, peer: usize, status: Status) {
        let Some(fill) = self.fills.get(id).filter(|fill| fill.live) else { return };
        if fill.renewals == RENEWALS {
            return self.refused_fill(id, peer, status);
        }
        let renewals = fill.renewals + 1;
        let (hash, key, deadline, groups) = (fill.hash, fill.key.clone(), fill.deadline, fill.groups.clone());
        let waiters = self.fills.kill(id);
        self.counters().fills_discarded.add(1);
        self.bury(id);
        let id = self.start_fill(hash, key, deadline);
        if let Some(fill) = self.fills.get_mut(id) {
            (fill.waiters, fill.renewals, fill.groups) = (waiters, renewals, groups);
            self.peers[peer].queues.heads.push_front(id);
        }
    }
}
