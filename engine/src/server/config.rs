//! Settings of the slice server.

use std::time::Duration;

use crate::auth::Secret;
use crate::memory::{LockPolicy, PagePolicy};
use crate::wire::{MAX_SMALL_BODY_BYTES, MAX_VALUE_BYTES};
use crate::{Address, Error, Result};

/// Settings of a [`Server`](super::Server).
#[derive(Clone, Debug)]
pub struct ServerConfig {
    /// Where to listen, one address at least. Default: loopback, a port that the kernel chooses.
    pub listen: Vec<Address>,
    /// Permissions of the files of Unix sockets. Who may write to the file may connect. Default: 0600.
    pub socket_mode: u32,
    /// What clients must prove to know before they are served. Default: nothing.
    pub secret: Option<Secret>,
    /// Memory for values in bytes. Default: 1 GiB.
    pub capacity_bytes: usize,
    /// Size of one block of that memory in bytes. Default: 16 MiB.
    pub block_bytes: usize,
    /// Which pages the memory is made of. Default: hugepages if they can be had.
    pub pages: PagePolicy,
    /// Whether the memory is locked. Default: not, because the server does not hand it to devices.
    pub lock: LockPolicy,
    /// Whether Put and Remove are served. Default: no.
    pub writable: bool,
    /// Most connections at a time; the ones beyond it are told that the server is busy. Default: 1,024.
    pub max_connections: usize,
    /// Most connections at a time of one client: one address, or one user on Unix sockets. Default: 512, which is
    /// 64 processes on one machine with 4 lanes each, and as many again.
    pub max_connections_per_client: usize,
    /// Most answers that wait to be sent on one connection; further requests are not read until the
    /// client fetches some. Default: 256.
    pub max_outstanding: usize,
    /// Most bytes of answers, values included, that wait to be sent on one connection; further requests are not
    /// read until the client fetches some. One answer may exceed it. Default: 64 MiB.
    pub max_outstanding_bytes: u64,
    /// Longest body of a request without the value of a Put, in bytes. Default: the protocol's limit, 1 MiB, which
    /// clients expect of lookups.
    pub max_frame_bytes: usize,
    /// Longest value that is taken, in bytes. Default: the protocol's limit, 1 TiB; the capacity bounds it anyway.
    pub max_value_bytes: u64,
    /// How long a connection may be without a request. Default: 10 minutes.
    pub idle_timeout: Duration,
    /// How long a connection may move no byte in the middle of a request or of an answer, and how long it may
    /// take to authenticate. Default: 30 seconds.
    pub stall_timeout: Duration,
    /// Memory for keys and their bookkeeping in bytes: what bounds the number of tiny values.
    /// Default: 256 MiB.
    pub index_bytes_max: usize,
}

impl Default for ServerConfig {
    fn default() -> Self {
        ServerConfig {
            listen: vec![([127, 0, 0, 1], 0).into()],
            socket_mode: 0o600,
            secret: None,
            capacity_bytes: 1 << 30,
            block_bytes: 16 << 20,
            pages: PagePolicy::Preferred,
            lock: LockPolicy::Off,
            writable: false,
            max_connections: 1024,
            max_connections_per_client: 512,
            max_outstanding: 256,
            max_outstanding_bytes: 64 << 20,
            max_frame_bytes: MAX_SMALL_BODY_BYTES,
            max_value_bytes: MAX_VALUE_BYTES,
            idle_timeout: Duration::from_secs(600),
            stall_timeout: Duration::from_secs(30),
            index_bytes_max: 256 << 20,
        }
    }
}

/// Most connections that can be configured: beyond it the kernel grants no ring that large.
const CONNECTIONS_LIMIT: u64 = 32_000;
/// Most answers in waiting that can be configured.
const OUTSTANDING_LIMIT: u64 = 65_536;
/// A Get with the longest key must fit.
const FRAME_BYTES_MIN: u64 = 8 << 10;

impl ServerConfig {
    /// Checks what the memory module does not check itself.
    pub(super) fn validate(&self) -> Result<()> {
        if self.listen.is_empty() {
            let allowed = "at least one address is needed".to_string();
            return Err(Error::Config { setting: "listen", value: "empty".into(), allowed });
        }
        if self.socket_mode > 0o777 {
            let (value, allowed) =
                (format!("{:o}", self.socket_mode), "0 to 777 (octal) are allowed".to_string());
            return Err(Error::Config { setting: "socket_mode", value, allowed });
        }
        let ranges = [
            ("max_connections", self.max_connections as u64, 1, CONNECTIONS_LIMIT),
            ("max_connections_per_client", self.max_connections_per_client as u64, 1, CONNECTIONS_LIMIT),
            ("max_outstanding", self.max_outstanding as u64, 1, OUTSTANDING_LIMIT),
            ("max_outstanding_bytes", self.max_outstanding_bytes, 1 << 10, MAX_VALUE_BYTES),
            ("max_frame_bytes", self.max_frame_bytes as u64, FRAME_BYTES_MIN, MAX_SMALL_BODY_BYTES as u64),
            ("max_value_bytes", self.max_value_bytes, 0, MAX_VALUE_BYTES),
        ];
        for (setting, value, min, max) in ranges {
            if !(min..=max).contains(&value) {
                let allowed = format!("{min} to {max} are allowed");
                return Err(Error::Config { setting, value: value.to_string(), allowed });
            }
        }
        let timeouts = [("idle_timeout", self.idle_timeout), ("stall_timeout", self.stall_timeout)];
        for (setting, value) in timeouts {
            if value < Duration::from_millis(1) {
                let allowed = "at least 1 ms is needed".to_string();
                return Err(Error::Config { setting, value: format!("{value:?}"), allowed });
            }
        }
        Ok(())
    }

    /// The addresses that other machines may reach, if whoever reaches them is served.
    pub(super) fn open_to_the_network(&self) -> Vec<&Address> {
        let beyond = |address: &&Address| match address {
            Address::Tcp(tcp) => !tcp.ip().to_canonical().is_loopback(),
            Address::Unix(_) => false,
        };
        match self.secret {
            Some(_) => Vec::new(),
            None => self.listen.iter().filter(beyond).collect(),
        }
    }
}
