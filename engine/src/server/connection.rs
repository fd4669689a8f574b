//! What the reading and the writing half of one connection share.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::net::Shutdown;
use std::time::{Duration, Instant};

use tokio::sync::Notify;

use super::ServerConfig;
use super::stream::{Peer, Stream};
use super::value::SendPiece;

/// Slowest speed at which a value may arrive once the stall timeout has passed.
const VALUE_BYTES_PER_S_MIN: u64 = 1 << 20;

/// Heap bytes of answers (lookups above all) that may wait on one connection; more hold back its requests.
const ANSWER_BYTES_MAX: usize = 1 << 20;

/// One answer: its pieces in order.
pub(super) struct Answer {
    pub(super) pieces: VecDeque<SendPiece>,
    /// Of all pieces.
    pub(super) bytes: u64,
    /// Of those that are not a value's memory.
    pub(super) heap_bytes: usize,
}

/// One client's connection. Lives on the server's thread only.
pub(super) struct Connection {
    pub(super) stream: Stream,
    pub(super) peer: Peer,
    queue: RefCell<VecDeque<Answer>>,
    /// Answers queued or being written.
    outstanding: Cell<usize>,
    /// Heap bytes of them.
    outstanding_heap_bytes: Cell<usize>,
    /// Bytes of them that are still to be sent.
    unsent_bytes: Cell<u64>,
    outstanding_max: usize,
    unsent_bytes_max: u64,
    /// No request is read any more; the writer ends when the queue is empty.
    finished: Cell<bool>,
    /// The sockets are shut down: nothing more can be sent.
    closed: Cell<bool>,
    /// By when it must have proved that it knows the secret.
    proof_due: Cell<Option<Instant>>,
    /// By when the value that is arriving must be there.
    value_due: Cell<Option<Instant>>,
    /// In the middle of a request.
    pub(super) mid_request: Cell<bool>,
    last_received: Cell<Instant>,
    /// Last time that bytes were sent or that sending became due.
    last_sent: Cell<Instant>,
    wake_writer: Notify,
    wake_reader: Notify,
}

impl Connection {
    pub(super) fn new(stream: Stream, peer: Peer, config: &ServerConfig) -> Self {
        let now = Instant::now();
        Connection {
            stream,
            peer,
            queue: RefCell::default(),
            outstanding: Cell::new(0),
            outstanding_heap_bytes: Cell::new(0),
            unsent_bytes: Cell::new(0),
            outstanding_max: config.max_outstanding,
            unsent_bytes_max: config.max_outstanding_bytes,
            finished: Cell::new(false),
            closed: Cell::new(false),
            mid_request: Cell::new(false),
            last_received: Cell::new(now),
            last_sent: Cell::new(now),
            proof_due: Cell::new(None),
            value_due: Cell::new(None),
            wake_writer: Notify::new(),
            wake_reader: Notify::new(),
        }
    }

    /// It must prove within `time` that it knows the secret.
    pub(super) fn must_authenticate(&self, time: Duration) {
        self.proof_due.set(Some(Instant::now() + time));
    }

    /// It has.
    pub(super) fn authenticated(&self) {
        self.proof_due.set(None);
    }

    /// A value begins to arrive, or is over (`None`). From now on it holds memory that others may want: it may take
    /// as long as a stall, and beyond that must come at a certain speed.
    pub(super) fn value_arrives(&self, value_bytes: Option<u64>, stall: Duration) {
        let due = |bytes: u64| Instant::now() + stall + Duration::from_secs(bytes / VALUE_BYTES_PER_S_MIN);
        self.value_due.set(value_bytes.map(due));
    }

    /// Queues an answer. Never blocks: readers call [`Connection::room`] before they take the next request.
    pub(super) fn answer(&self, answer: Answer) {
        if self.closed.get() {
            return;
        }
        if self.outstanding.get() == 0 {
            self.last_sent.set(Instant::now());
        }
        self.outstanding.set(self.outstanding.get() + 1);
        self.outstanding_heap_bytes.set(self.outstanding_heap_bytes.get() + answer.heap_bytes);
        self.unsent_bytes.set(self.unsent_bytes.get() + answer.bytes);
        self.queue.borrow_mut().push_back(answer);
        self.wake_writer.notify_one();
    }

    /// Waits until another request may be taken. False: the connection is closed.
    pub(super) async fn room(&self) -> bool {
        while !self.closed.get()
            && (self.outstanding.get() >= self.outstanding_max
                || self.outstanding_heap_bytes.get() >= ANSWER_BYTES_MAX
                || self.unsent_bytes.get() >= self.unsent_bytes_max)
        {
            self.wake_reader.notified().await;
        }
        !self.closed.get()
    }

    /// Waits until every answer is sent or the connection is closed.
    pub(super) async fn drained(&self) {
        while !self.closed.get() && self.outstanding.get() > 0 {
            self.wake_reader.notified().await;
        }
    }

    /// The writer's side: the next answer; `None` when there will be none.
    pub(super) async fn next_answer(&self) -> Option<Answer> {
        loop {
            if self.closed.get() {
                return None;
            }
            if let Some(answer) = self.queue.borrow_mut().pop_front() {
                return Some(answer);
            }
            if self.finished.get() {
                return None;
            }
            self.wake_writer.notified().await;
        }
    }

    /// The next answer if there is one already.
    pub(super) fn ready_answer(&self) -> Option<Answer> {
        self.queue.borrow_mut().pop_front()
    }

    /// Answers left the queue and were sent in full.
    pub(super) fn answers_sent(&self, count: usize, heap_bytes: usize) {
        self.outstanding.set(self.outstanding.get() - count);
        self.outstanding_heap_bytes.set(self.outstanding_heap_bytes.get() - heap_bytes);
        self.wake_reader.notify_one();
    }

    pub(super) fn note_received(&self) {
        self.last_received.set(Instant::now());
    }

    /// Bytes of answers were sent.
    pub(super) fn note_sent(&self, bytes: u64) {
        self.last_sent.set(Instant::now());
        let before = self.unsent_bytes.get();
        self.unsent_bytes.set(before - bytes);
        if before >= self.unsent_bytes_max && before - bytes < self.unsent_bytes_max {
            self.wake_reader.notify_one();
        }
    }

    /// No more requests will be taken.
    pub(super) fn finish(&self) {
        self.finished.set(true);
        self.wake_writer.notify_one();
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed.get()
    }

    /// Ends both directions: operations in flight complete at once, and what waited is dropped.
    pub(super) fn close(&self) {
        self.closed.set(true);
        // It fails when the peer has ended the connection already: as good.
        let _ = self.stream.shutdown(Shutdown::Both);
        self.queue.borrow_mut().clear();
        self.wake_writer.notify_one();
        self.wake_reader.notify_one();
    }

    /// Whether it has been without progress for too long.
    pub(super) fn overdue(&self, now: Instant, idle: Duration, stall: Duration) -> bool {
        if [&self.proof_due, &self.value_due].iter().any(|due| due.get().is_some_and(|due| now >= due)) {
            return true;
        }
        let receiving = now.duration_since(self.last_received.get());
        let sending = now.duration_since(self.last_sent.get());
        if self.outstanding.get() > 0 {
            // Requests that keep coming are no excuse for not fetching answers.
            return sending >= stall;
        }
        if self.mid_request.get() || self.finished.get() {
            return receiving >= stall;
        }
        receiving.min(sending) >= idle
    }
}
