//! The reading half of a connection: requests in, answers into the queue.

use std::net::Shutdown;

use super::accept::Shared;
use super::access::{Access, Next};
use super::answers::about;
use super::connection::{Answer, Connection};
use super::store::PendingPut;
use crate::wire::{
    ANY_VERSION, GetRequest, LookupEntry, Op, RequestDecoder, RequestError, RequestEvent,
    ResponseHeader, Status,
};

/// Size of a connection's receive buffer in bytes: requests, and the first bytes of a Put.
pub(super) const RECEIVE_BYTES: usize = 64 << 10;
/// Most bytes of a value received by one operation: what still is in the core's cache when its checksum
/// is taken.
const VALUE_RECEIVE_BYTES: usize = 1 << 20;
/// What is read and thrown away after framing was lost, so that the error's reason arrives before the
/// kernel resets the connection.
const LINGER_BYTES: usize = 16 << 20;

/// The Put whose value is arriving.
enum Arriving {
    /// None, or one that was refused: bytes are dropped.
    Nothing,
    Value(PendingPut),
}

/// Serves requests until the client ends, breaks the protocol, or the connection is closed.
pub(super) async fn serve_requests(shared: &Shared, connection: &Connection) {
    let mut access = Access::new(shared);
    let mut decoder = RequestDecoder::new(access.limits(shared.limits()));
    let mut arriving = Arriving::Nothing;
    let mut buffer = Vec::with_capacity(RECEIVE_BYTES);
    loop {
        let mut input = &buffer[..];
        loop {
            if !connection.room().await {
                return;
            }
            match decoder.next(&mut input) {
                Ok(None) => break,
                Ok(Some(event)) => match access.serve(shared, connection, &event) {
                    None => serve_event(shared, connection, &mut arriving, event),
                    Some(Next::GoOn) => {}
                    Some(Next::Unlocked) => decoder.set_limits(shared.limits()),
                    Some(Next::End) => return linger(connection, buffer).await,
                },
                Err(error) => {
                    refuse_malformed(shared, connection, &access, &error);
                    if error.framing_lost {
                        return linger(connection, buffer).await;
                    }
                }
            }
        }
        connection.mid_request.set(!decoder.at_boundary());
        buffer.clear();
        let wanted = decoder.value_bytes_wanted();
        let received = match &mut arriving {
            Arriving::Value(put) if wanted > 0 => receive_value(connection, put, &mut decoder).await,
            _ => {
                let (result, returned) = connection.stream.read(buffer).await;
                buffer = returned;
                result
            }
        };
        match received {
            Ok(0) => return,
            Ok(_) => connection.note_received(),
            Err(error) => {
                tracing::debug!(peer = %connection.peer, %error, "receiving failed");
                return;
            }
        }
    }
}

/// Receives the rest of an arriving value straight into its place. `Ok(0)`: the peer ended first.
async fn receive_value(
    connection: &Connection,
    put: &mut PendingPut,
    decoder: &mut RequestDecoder,
) -> std::io::Result<usize> {
    let mut last = 0;
    while decoder.value_bytes_wanted() > 0
        && let Some(place) = put.draft.next_place(VALUE_RECEIVE_BYTES)
    {
        let (result, place) = connection.stream.read(place).await;
        last = result?;
        if last == 0 || connection.is_closed() {
            return Ok(0);
        }
        connection.note_received();
        put.draft.received(&place, last);
        decoder.value_received(last as u64);
    }
    Ok(last)
}

fn serve_event(shared: &Shared, connection: &Connection, arriving: &mut Arriving, event: RequestEvent<'_>) {
    match event {
        RequestEvent::Get { request_id, get } => connection.answer(answer_get(shared, request_id, &get)),
        RequestEvent::Lookup { request_id, lookup } => {
            shared.count(|stats| stats.lookups += lookup.len() as u64);
            let entries = lookup.iter().map(|key| {
                shared.store.get(key).map_or(LookupEntry::ABSENT, |value| LookupEntry {
                    status: Status::Ok,
                    crc32c: value.crc32c,
                    value_len: value.len(),
                    version: value.version,
                })
            });
            connection.answer(Answer::lookup(request_id, lookup.len(), entries));
        }
        RequestEvent::PutStart { request_id, put } => match shared.store.begin_put(&put) {
            Ok(pending) => {
                connection.value_arrives(Some(put.value_len), shared.config.stall_timeout);
                *arriving = Arriving::Value(pending);
            }
            Err(refusal) => {
                // The bytes still come, and are dropped; who sends them need not wait to be told.
                *arriving = Arriving::Nothing;
                connection.answer(refuse(shared, Op::Put, request_id, refusal));
            }
        },
        RequestEvent::PutBytes(bytes) => {
            if let Arriving::Value(put) = arriving {
                put.draft.copy_in(bytes);
            }
        }
        RequestEvent::PutEnd { request_id } => {
            let Arriving::Value(put) = std::mem::replace(arriving, Arriving::Nothing) else {
                return;
            };
            connection.value_arrives(None, shared.config.stall_timeout);
            connection.answer(match shared.store.finish_put(put) {
                Ok(value) => {
                    shared.count(|stats| stats.puts += 1);
                    Answer::plain(about(&value, Status::Ok, Op::Put, request_id), "")
                }
                Err(refusal) => refuse(shared, Op::Put, request_id, refusal),
            });
        }
        RequestEvent::Remove { request_id, key } => connection.answer(match shared.store.remove(key) {
            Ok(removed) => {
                shared.count(|stats| stats.removes += u64::from(removed));
                let status = if removed { Status::Ok } else { Status::Absent };
                Answer::plain(ResponseHeader::plain(status, Some(Op::Remove), request_id), "")
            }
            Err(refusal) => refuse(shared, Op::Remove, request_id, refusal),
        }),
        RequestEvent::Ping { request_id } => {
            let header = ResponseHeader::plain(Status::Ok, Some(Op::Ping), request_id);
            connection.answer(Answer::plain(header, ""));
        }
        RequestEvent::Stats { request_id } => connection.answer(match serde_json::to_vec(&shared.stats()) {
            Ok(json) => Answer::stats(request_id, &json),
            Err(error) => refuse(shared, Op::Stats, request_id, (Status::Internal, error.to_string())),
        }),
        RequestEvent::Challenge { .. } | RequestEvent::Authenticate { .. } => {
            unreachable!("these are served by `Access`")
        }
    }
}

fn answer_get(shared: &Shared, request_id: u64, get: &GetRequest<'_>) -> Answer {
    let Some(value) = shared.store.get(get.key) else {
        return Answer::plain(ResponseHeader::plain(Status::Absent, Some(Op::Get), request_id), "");
    };
    if get.expected_version != ANY_VERSION && get.expected_version != value.version {
        shared.count(|stats| stats.refusals += 1);
        return Answer::plain(about(&value, Status::VersionMismatch, Op::Get, request_id), "");
    }
    let Some(available) = value.len().checked_sub(get.range_offset) else {
        shared.count(|stats| stats.refusals += 1);
        return Answer::plain(about(&value, Status::RangeOutside, Op::Get, request_id), "");
    };
    let len = available.min(get.range_len);
    shared.count(|stats| stats.gets += 1);
    Answer::range(request_id, &value, get.range_offset, len)
}

pub(super) fn refuse(shared: &Shared, op: Op, request_id: u64, (status, reason): (Status, String)) -> Answer {
    shared.count(|stats| stats.refusals += 1);
    Answer::plain(ResponseHeader::plain(status, Some(op), request_id), &reason)
}

fn refuse_malformed(shared: &Shared, connection: &Connection, access: &Access, error: &RequestError) {
    tracing::debug!(peer = %connection.peer, %error, "malformed request");
    shared.count(|stats| stats.refusals += 1);
    let (status, reason) = access.judge(error);
    let header = ResponseHeader::plain(status, error.op, error.request_id);
    connection.answer(Answer::plain(header, &reason));
}

/// Sends what is queued, tells the peer that no more will come, and reads what it still sends, so that
/// closing does not take the error's reason back.
pub(super) async fn linger(connection: &Connection, mut buffer: Vec<u8>) {
    connection.mid_request.set(true);
    connection.drained().await;
    if connection.is_closed() || connection.stream.shutdown(Shutdown::Write).is_err() {
        return;
    }
    let mut dropped = 0;
    while dropped < LINGER_BYTES {
        buffer.clear();
        let (result, returned) = connection.stream.read(buffer).await;
        buffer = returned;
        match result {
            Ok(0) | Err(_) => return,
            Ok(received) => dropped += received,
        }
        connection.note_received();
    }
}
