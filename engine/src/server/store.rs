//! Keys and their values. Knows nothing of connections.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;

use serde::{Deserialize, Serialize};

use super::ServerConfig;
use super::value::{Draft, Memory, Value};
use crate::Result;
use crate::memory::Arena;
use crate::wire::{KeyRef, PutRequest, Status};

/// Charged per value besides its key's bytes: map entry, allocation, extent list, rounded up.
const ENTRY_OVERHEAD_BYTES: usize = 192;

/// Counters and gauges of a slice server, as its Stats answer tells them. Byte counts are of payload
/// unless said otherwise; counters are since the start.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(default)]
pub struct ServerStats {
    /// Values stored.
    pub values: u64,
    /// Sum of their lengths.
    pub value_bytes: u64,
    /// Memory that values hold, in whole granules; replaced values count until their last answer is sent.
    pub used_bytes: u64,
    /// Memory for values.
    pub capacity_bytes: u64,
    /// Memory charged for keys and bookkeeping.
    pub index_bytes: u64,
    /// Open connections.
    pub connections: u64,
    /// Connections accepted.
    pub connections_accepted: u64,
    /// Connections turned away because there were too many.
    pub connections_refused: u64,
    /// Connections cut off because they were idle or stalled.
    pub connections_timed_out: u64,
    /// Failures of accept, such as too many open files.
    pub accept_errors: u64,
    /// Gets answered with bytes.
    pub gets: u64,
    /// Keys looked up.
    pub lookups: u64,
    /// Puts stored.
    pub puts: u64,
    /// Keys removed.
    pub removes: u64,
    /// Requests answered with an error status other than "absent".
    pub refusals: u64,
    /// Wrong proofs of the secret.
    pub authentications_failed: u64,
    /// Bytes of values received straight into their place.
    pub received_direct_bytes: u64,
    /// Bytes of values that were copied into their place.
    pub received_copied_bytes: u64,
    /// Bytes sent, headers included.
    pub sent_bytes: u64,
    /// Most bytes that one system call has sent: for so long others have waited.
    pub largest_write_bytes: u64,
    /// Whether Put and Remove are served.
    pub writable: bool,
}

/// The values of one server.
#[derive(Debug)]
pub(super) struct Store {
    memory: Rc<Memory>,
    /// By namespace length, namespace and key in one run of bytes.
    values: RefCell<HashMap<Box<[u8]>, Value, foldhash::quality::RandomState>>,
    scratch: RefCell<Vec<u8>>,
    index_bytes: Cell<usize>,
    index_bytes_max: usize,
    value_bytes: Cell<u64>,
    last_version: Cell<u64>,
    writable: bool,
    value_bytes_max: u64,
}

impl Store {
    /// `epoch` (not 0) is the upper half of the versions of this run.
    pub(super) fn new(arena: Arena, config: &ServerConfig, epoch: u32) -> Self {
        Store {
            memory: Rc::new(Memory::new(arena)),
            values: RefCell::default(),
            scratch: RefCell::default(),
            index_bytes: Cell::new(0),
            index_bytes_max: config.index_bytes_max,
            value_bytes: Cell::new(0),
            last_version: Cell::new(u64::from(epoch) << 32),
            writable: config.writable,
            value_bytes_max: config.max_value_bytes,
        }
    }

    /// Runs `with` on the key's bytes in the map's form.
    fn with_map_key<T>(&self, key: KeyRef<'_>, with: impl FnOnce(&[u8]) -> T) -> T {
        let mut scratch = self.scratch.borrow_mut();
        scratch.clear();
        // The protocol's limit keeps a namespace below 256 bytes.
        scratch.push(key.namespace.len() as u8);
        scratch.extend_from_slice(key.namespace);
        scratch.extend_from_slice(key.key);
        with(&scratch)
    }

    pub(super) fn get(&self, key: KeyRef<'_>) -> Option<Value> {
        self.with_map_key(key, |map_key| self.values.borrow().get(map_key).cloned())
    }

    /// Begins a Put: memory for the value, or the status with which to refuse it.
    pub(super) fn begin_put(&self, put: &PutRequest<'_>) -> Result<PendingPut, (Status, String)> {
        if !self.writable {
            return Err((Status::ReadOnly, "start the server with --writable to allow it".into()));
        }
        if put.value_len > self.value_bytes_max {
            let reason = format!("{} bytes, {} are allowed", put.value_len, self.value_bytes_max);
            return Err((Status::TooLarge, reason));
        }
        let capacity = self.memory.capacity_bytes();
        if put.value_len > capacity {
            let reason = format!("{} bytes, the server holds {capacity}", put.value_len);
            return Err((Status::TooLarge, reason));
        }
        let map_key: Box<[u8]> = self.with_map_key(put.key, |map_key| map_key.into());
        self.index_room(&map_key)?;
        let Some(draft) = self.memory.draft(put.value_len) else {
            let free = self.memory.free_bytes();
            let reason = format!("{} bytes wanted, {free} of {capacity} bytes are free", put.value_len);
            return Err((Status::Full, reason));
        };
        Ok(PendingPut { map_key, draft, value_crc32c: put.value_crc32c })
    }

    fn index_room(&self, map_key: &[u8]) -> Result<(), (Status, String)> {
        let charge = map_key.len() + ENTRY_OVERHEAD_BYTES;
        let room = self.index_bytes.get() + charge <= self.index_bytes_max;
        if room || self.values.borrow().contains_key(map_key) {
            return Ok(());
        }
        Err((Status::Full, format!("the index holds {} bytes, its limit", self.index_bytes.get())))
    }

    /// Publishes a Put whose last byte has arrived.
    pub(super) fn finish_put(&self, put: PendingPut) -> Result<Value, (Status, String)> {
        let got = put.draft.crc32c();
        if got != put.value_crc32c {
            let reason = format!("CRC32C {got:#010x} arrived, {:#010x} was announced", put.value_crc32c);
            return Err((Status::ChecksumMismatch, reason));
        }
        // Other Puts may have taken the room since this one began.
        self.index_room(&put.map_key)?;
        let version = self.last_version.get().wrapping_add(1);
        self.last_version.set(version);
        let value = put.draft.finish(version);
        let charge = put.map_key.len() + ENTRY_OVERHEAD_BYTES;
        self.value_bytes.set(self.value_bytes.get() + value.len());
        match self.values.borrow_mut().insert(put.map_key, value.clone()) {
            Some(old) => self.value_bytes.set(self.value_bytes.get() - old.len()),
            None => self.index_bytes.set(self.index_bytes.get() + charge),
        }
        Ok(value)
    }

    /// Forgets a key. `Ok(false)`: it was not there.
    pub(super) fn remove(&self, key: KeyRef<'_>) -> Result<bool, (Status, String)> {
        if !self.writable {
            return Err((Status::ReadOnly, "start the server with --writable to allow it".into()));
        }
        let removed = self.with_map_key(key, |map_key| {
            let removed = self.values.borrow_mut().remove(map_key);
            removed.map(|value| (value.len(), map_key.len()))
        });
        let Some((value_len, key_len)) = removed else {
            return Ok(false);
        };
        self.value_bytes.set(self.value_bytes.get() - value_len);
        self.index_bytes.set(self.index_bytes.get() - key_len - ENTRY_OVERHEAD_BYTES);
        Ok(true)
    }

    /// Fills in what the store knows.
    pub(super) fn tell(&self, stats: &mut ServerStats) {
        stats.values = self.values.borrow().len() as u64;
        stats.value_bytes = self.value_bytes.get();
        stats.capacity_bytes = self.memory.capacity_bytes();
        stats.used_bytes = stats.capacity_bytes - self.memory.free_bytes();
        stats.index_bytes = self.index_bytes.get() as u64;
        stats.received_direct_bytes = self.memory.direct_bytes.get();
        stats.received_copied_bytes = self.memory.copied_bytes.get();
        stats.writable = self.writable;
    }
}

/// A Put between its head and its last byte. Dropping it stores nothing and frees its memory.
#[derive(Debug)]
pub(super) struct PendingPut {
    map_key: Box<[u8]>,
    pub(super) draft: Draft,
    value_crc32c: u32,
}

/// A number that no earlier run is likely to have drawn; never 0, so that no version is 0.
pub(super) fn random_epoch() -> Result<u32> {
    Ok(u32::from_ne_bytes(crate::random::bytes()?).max(1))
}
