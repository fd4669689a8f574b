//! What this machine can do without us: a copy, and a blocking receive loop.

use super::content::Content;
use super::measure::{Cost, Latencies, Percentiles, process_cpu};
use hotslice::memory::copy::{CopyMethod, calibrate, copy_with};
use hotslice::memory::{Arena, ArenaConfig, LockPolicy, PagePolicy};
use hotslice::wire::{self, RESPONSE_HEADER_BYTES, ResponseHeader, Status};
use serde::Serialize;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsRawFd;
use std::time::Instant;

/// Memory of the kind that caches use, one region per value, each within its own blocks.
pub struct Regions {
    arena: Arena,
    len: usize,
}

impl Regions {
    pub fn new(count: usize, len: usize, pages: PagePolicy) -> Result<Self, String> {
        let block_bytes = len.next_power_of_two().max(2 << 20);
        let config =
            ArenaConfig { capacity_bytes: count * block_bytes, block_bytes, pages, lock: LockPolicy::Off };
        let arena = Arena::map(&config).map_err(|e| e.to_string())?;
        Ok(Self { arena, len })
    }

    pub fn count(&self) -> usize {
        self.arena.block_count()
    }

    pub fn ptr(&self, index: usize) -> *mut u8 {
        self.arena.block(index).base().as_ptr()
    }

    /// The first `count` regions as slices.
    pub fn slices(&mut self, count: usize) -> Vec<&mut [u8]> {
        assert!(count <= self.count());
        // SAFETY: as in `slice`; the blocks are different ones.
        (0..count).map(|i| unsafe { std::slice::from_raw_parts_mut(self.ptr(i), self.len) }).collect()
    }

    /// The region as a slice. Exclusive by `&mut`.
    pub fn slice(&mut self, index: usize) -> &mut [u8] {
        assert!(index < self.count());
        // SAFETY: a block of this arena holds at least `len` bytes, is mapped while `self` lives, and is lent
        // out by `&mut self` alone.
        unsafe { std::slice::from_raw_parts_mut(self.ptr(index), self.len) }
    }
}

#[derive(Clone, Debug, Serialize)]
pub struct CopyFloor {
    pub method: &'static str,
    pub value_bytes: usize,
    pub used_by_engine: bool,
    pub ms: Percentiles,
    pub gb_per_s: f64,
}

/// Every way to copy, over rotating regions, so that nothing is left in a cache from the round before.
pub fn copies(len: usize, count: usize, rounds: usize, pages: PagePolicy) -> Result<Vec<CopyFloor>, String> {
    let (mut from, to) = (Regions::new(count, len, pages)?, Regions::new(count, len, pages)?);
    for index in 0..from.count() {
        from.slice(index).fill(index as u8);
    }
    let methods: Vec<CopyMethod> = CopyMethod::ALL.into_iter().filter(|method| method.available()).collect();
    let mut latencies: Vec<Latencies> = methods.iter().map(|_| Latencies::new()).collect();
    for _ in 0..rounds {
        for (&method, latencies) in methods.iter().zip(&mut latencies) {
            for index in 0..from.count() {
                let started = Instant::now();
                // SAFETY: two arenas, both regions hold `len` bytes, the method is available.
                unsafe { copy_with(method, to.ptr(index), from.ptr(index), len) };
                latencies.record(started.elapsed());
            }
        }
    }
    Ok(methods
        .iter()
        .zip(&latencies)
        .map(|(&method, latencies)| CopyFloor {
            method: method.name(),
            value_bytes: len,
            used_by_engine: method == calibrate().fastest(),
            ms: latencies.percentiles_ms(),
            gb_per_s: len as f64 / latencies.quantile_ns(0.5) as f64,
        })
        .collect())
}

/// A plain client: one connection, one request at a time, `recv(MSG_WAITALL)` of the whole value straight into
/// memory of the kind that caches use. No checksum, no cache, nothing in the way.
pub struct ReceiveLoop {
    stream: TcpStream,
    regions: Regions,
    next_region: usize,
    request_id: u64,
    pub latencies: Latencies,
    pub cost: Cost,
}

impl ReceiveLoop {
    pub fn connect(server: SocketAddr, count: usize, len: usize, pages: PagePolicy) -> Result<Self, String> {
        let stream = TcpStream::connect(server).map_err(|e| format!("cannot connect to {server}: {e}"))?;
        stream.set_nodelay(true).map_err(|e| e.to_string())?;
        Ok(Self {
            stream,
            regions: Regions::new(count, len, pages)?,
            next_region: 0,
            request_id: 0,
            latencies: Latencies::new(),
            cost: Cost::default(),
        })
    }

    /// Reads one value, timed, and checks it, untimed.
    pub fn read(&mut self, key: &str) -> Result<(), String> {
        self.request_id += 1;
        let mut request = Vec::new();
        let id = self.request_id;
        wire::encode_get(&mut request, id, b"", key.as_bytes(), 0, wire::RANGE_TO_END, wire::ANY_VERSION)
            .map_err(|e| e.to_string())?;
        let index = self.next_region;
        self.next_region = (index + 1) % self.regions.count();
        let (cpu, started) = (process_cpu(), Instant::now());
        let len = self.exchange(&request, index)?;
        let wall = started.elapsed();
        self.cost.cpu += process_cpu() - cpu;
        self.cost.wall += wall;
        self.cost.bytes += len as u64;
        self.latencies.record(wall);
        Content::of(key)
            .check(0, &self.regions.slice(index)[..len])
            .map_err(|d| format!("the receive loop read a wrong byte of `{key}`: {d:?}"))
    }

    fn exchange(&mut self, request: &[u8], index: usize) -> Result<usize, String> {
        let mut header = [0; RESPONSE_HEADER_BYTES];
        self.stream.write_all(request).map_err(|e| format!("send: {e}"))?;
        self.stream.read_exact(&mut header).map_err(|e| format!("receive: {e}"))?;
        let header = ResponseHeader::decode(&header).map_err(|e| e.to_string())?;
        let len = header.body_len as usize;
        if header.status != Status::Ok || len > self.regions.len {
            return Err(format!("the server answered {} with {len} bytes", header.status));
        }
        let into = self.regions.slice(index).as_mut_ptr();
        // SAFETY: the region holds `len` bytes and is this loop's own.
        let got = unsafe { libc::recv(self.stream.as_raw_fd(), into.cast(), len, libc::MSG_WAITALL) };
        if usize::try_from(got) != Ok(len) {
            return Err(format!("recv gave {got} of {len} bytes: {}", std::io::Error::last_os_error()));
        }
        Ok(len)
    }

    /// The congestion control of the connection (this side's; the server's default is the system's).
    pub fn congestion_control(&self) -> String {
        let mut name = [0u8; 16];
        let mut len = name.len() as libc::socklen_t;
        // SAFETY: passes the address and size of locals.
        let result = unsafe {
            libc::getsockopt(
                self.stream.as_raw_fd(),
                libc::IPPROTO_TCP,
                libc::TCP_CONGESTION,
                name.as_mut_ptr().cast(),
                &mut len,
            )
        };
        let end = name.iter().position(|&byte| byte == 0).unwrap_or(name.len());
        if result == 0 { String::from_utf8_lossy(&name[..end]).into_owned() } else { "unknown".to_owned() }
    }
}
