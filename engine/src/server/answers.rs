//! The writing half of a connection: answers in large gathered writes.

use std::collections::VecDeque;

use super::accept::Shared;
use super::connection::{Answer, Connection};
use super::value::{SendPiece, Value};
use crate::wire::{self, LookupEntry, Op, ResponseHeader, Status};

/// Most pieces of one gathered write. Far below the kernel's 1,024; a write of large extents fills the
/// socket's buffer with a few.
const PIECES_MAX: usize = 64;
/// Most bytes of one gathered write. The kernel copies them while every other connection waits. Measured twice with
/// four clients that fetch 64 MiB values, on two cores with other work: a 64 KiB answer took 0.7 to 0.9 ms in the
/// median with this bound and 9 to 11 ms without; beside it 2.2 to 2.3 GB/s went out with it, 1.8 to 2.9 without, and
/// 1.1 to 1.4 with 128 KiB. To be measured again on a quiet machine: `small_answers_beside_large_ones`.
const WRITE_BYTES_MAX: usize = 512 << 10;

impl Answer {
    fn of(bytes: Vec<u8>) -> Self {
        let (len, heap_bytes) = (bytes.len() as u64, bytes.capacity());
        Answer { pieces: VecDeque::from([SendPiece::from_bytes(bytes)]), bytes: len, heap_bytes }
    }

    /// An answer without a body, or with the reason of an error.
    pub(super) fn plain(header: ResponseHeader, reason: &str) -> Self {
        let mut bytes = Vec::with_capacity(wire::RESPONSE_HEADER_BYTES + reason.len());
        wire::encode_error(&mut bytes, header, reason);
        Answer::of(bytes)
    }

    /// A range of a value. `offset + len ≤ value.len()`.
    pub(super) fn range(request_id: u64, value: &Value, offset: u64, len: u64) -> Self {
        let header = ResponseHeader {
            body_len: len,
            range_offset: offset,
            ..about(value, Status::Ok, Op::Get, request_id)
        };
        let mut bytes = Vec::with_capacity(wire::RESPONSE_HEADER_BYTES);
        header.encode(&mut bytes);
        let mut answer = Answer::of(bytes);
        answer.pieces.extend(value.pieces(offset, len));
        answer.bytes += len;
        answer
    }

    /// The entries of a Lookup.
    pub(super) fn lookup(request_id: u64, count: usize, entries: impl Iterator<Item = LookupEntry>) -> Self {
        let body_bytes = count * wire::LOOKUP_ENTRY_BYTES;
        let mut bytes = Vec::with_capacity(wire::RESPONSE_HEADER_BYTES + body_bytes);
        ResponseHeader::lookup(request_id, count).encode(&mut bytes);
        entries.for_each(|entry| entry.encode(&mut bytes));
        Answer::of(bytes)
    }

    /// A nonce or a proof.
    pub(super) fn token(op: Op, request_id: u64, token: &[u8; wire::TOKEN_BYTES]) -> Self {
        let mut bytes = Vec::with_capacity(wire::RESPONSE_HEADER_BYTES + token.len());
        wire::encode_token(&mut bytes, op, request_id, token);
        Answer::of(bytes)
    }

    /// The text of a Stats answer.
    pub(super) fn stats(request_id: u64, json: &[u8]) -> Self {
        let header = ResponseHeader {
            body_len: json.len() as u64,
            ..ResponseHeader::plain(Status::Ok, Some(Op::Stats), request_id)
        };
        let mut bytes = Vec::with_capacity(wire::RESPONSE_HEADER_BYTES + json.len());
        header.encode(&mut bytes);
        bytes.extend_from_slice(json);
        Answer::of(bytes)
    }
}

/// A header that tells of a value.
pub(super) fn about(value: &Value, status: Status, op: Op, request_id: u64) -> ResponseHeader {
    ResponseHeader {
        value_len: value.len(),
        value_version: value.version,
        value_crc32c: value.crc32c,
        ..ResponseHeader::plain(status, Some(op), request_id)
    }
}

/// Sends answers until the connection is finished or closed. Closes it when sending fails.
pub(super) async fn send_answers(shared: &Shared, connection: &Connection) {
    while let Some(answer) = connection.next_answer().await {
        if let Err(error) = send_batch(shared, connection, answer).await {
            tracing::debug!(peer = %connection.peer, %error, "sending failed");
            connection.close();
            return;
        }
    }
}

/// Sends `first` and what has queued up behind it, as far as it fits one gathered write.
async fn send_batch(shared: &Shared, connection: &Connection, first: Answer) -> std::io::Result<()> {
    let mut waiting = first.pieces;
    let mut heap_bytes = first.heap_bytes;
    let mut answers = 1;
    while waiting.len() < PIECES_MAX
        && let Some(answer) = connection.ready_answer()
    {
        waiting.extend(answer.pieces);
        heap_bytes += answer.heap_bytes;
        answers += 1;
    }
    let mut pieces: Vec<SendPiece> = Vec::with_capacity(waiting.len().min(PIECES_MAX));
    loop {
        fill(&mut pieces, &mut waiting);
        if pieces.is_empty() {
            break;
        }
        let (result, returned) = connection.stream.writev(pieces).await;
        pieces = returned;
        let sent = result?;
        if sent == 0 {
            return Err(std::io::ErrorKind::WriteZero.into());
        }
        connection.note_sent(sent as u64);
        shared.count(|stats| {
            stats.sent_bytes += sent as u64;
            stats.largest_write_bytes = stats.largest_write_bytes.max(sent as u64);
        });
        advance(&mut pieces, sent);
    }
    connection.answers_sent(answers, heap_bytes);
    Ok(())
}

/// Takes from what waits what still fits into one write.
fn fill(pieces: &mut Vec<SendPiece>, waiting: &mut VecDeque<SendPiece>) {
    let mut free = WRITE_BYTES_MAX.saturating_sub(pieces.iter().map(SendPiece::remaining).sum());
    while free > 0
        && pieces.len() < PIECES_MAX
        && let Some(first) = waiting.front_mut()
    {
        let piece = first.split_front(free);
        free = free.saturating_sub(piece.remaining());
        pieces.push(piece);
        if first.remaining() == 0 {
            waiting.pop_front();
        }
    }
}

/// Drops the first `count` bytes of the pieces.
fn advance(pieces: &mut Vec<SendPiece>, mut count: usize) {
    let mut done = 0;
    for piece in pieces.iter_mut() {
        let now = count.min(piece.remaining());
        piece.advance(now);
        count -= now;
        if piece.remaining() > 0 {
            break;
        }
        done += 1;
    }
    pieces.drain(..done);
}
