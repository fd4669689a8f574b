//! What this machine can do without the engine: a copy, and a blocking receive loop.

use super::content::Content;
use super::measure::{Cost, Latencies, Percentiles, thread_cpu};
use super::regions::Regions;
use hotslice::memory::PagePolicy;
use hotslice::memory::copy::{CopyMethod, calibrate, copy_with};
use hotslice::wire::{self, RESPONSE_HEADER_BYTES, ResponseHeader, Status};
use serde::Serialize;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

/// Regions that floors rotate over: more than a last-level cache holds at the sizes that matter.
pub const ROTATION: usize = 25;

/// How long the server may be silent before the receive loop gives up.
const SILENCE: Duration = Duration::from_secs(60);

/// One way to copy, measured.
#[derive(Clone, Debug, Serialize)]
pub struct CopyFloor {
    pub method: &'static str,
    pub value_bytes: usize,
    /// Whether the engine chose it for its large copies.
    pub used_by_engine: bool,
    pub ms: Percentiles,
    /// At the median.
    pub gb_per_s: f64,
}

/// Every way to copy, over rotating regions, so that nothing is left in a cache from the round before.
pub struct Copies {
    from: Regions,
    to: Regions,
    len: usize,
    methods: Vec<(CopyMethod, Latencies)>,
}

impl Copies {
    pub fn new(len: usize, count: usize, pages: PagePolicy) -> Result<Self, String> {
        let (mut from, to) = (Regions::new(count, len, pages)?, Regions::new(count, len, pages)?);
        for (i, region) in from.slices(count).into_iter().enumerate() {
            region.fill(i as u8);
        }
        let available = CopyMethod::ALL.into_iter().filter(|method| method.available());
        let methods = available.map(|method| (method, Latencies::new())).collect();
        Ok(Self { from, to, len, methods })
    }

    /// Copies one region by one method after the other, each to another place. Returns their times, in the
    /// methods' order.
    pub fn step(&mut self, index: usize) -> Vec<Duration> {
        let (len, count, methods) = (self.len, self.from.count(), self.methods.len());
        let mut times = Vec::with_capacity(methods);
        for (shift, (method, latencies)) in self.methods.iter_mut().enumerate() {
            // Each method at its own place in the rotation: none finds what another left in a cache.
            let at = (index + shift * count / methods) % count;
            let (to, from) = (self.to.ptr(at), self.from.ptr(at));
            let started = Instant::now();
            // SAFETY: two arenas, both regions hold `len` bytes, the method is available.
            unsafe { copy_with(*method, to, from, len) };
            let time = started.elapsed();
            latencies.record(time);
            times.push(time);
        }
        times
    }

    /// Number of regions.
    pub fn count(&self) -> usize {
        self.from.count()
    }

    /// Position of the method whose median is best.
    pub fn fastest(&self) -> usize {
        let medians = self.methods.iter().map(|(_, latencies)| latencies.quantile_ns(0.5));
        medians.enumerate().min_by_key(|&(_, median)| median).map_or(0, |(position, _)| position)
    }

    /// What was measured, method by method.
    pub fn report(&self) -> Vec<CopyFloor> {
        let floor = |(method, latencies): &(CopyMethod, Latencies)| CopyFloor {
            method: method.name(),
            value_bytes: self.len,
            used_by_engine: *method == calibrate().fastest(),
            ms: latencies.percentiles_ms(),
            gb_per_s: self.len as f64 / latencies.quantile_ns(0.5) as f64,
        };
        self.methods.iter().map(floor).collect()
    }
}

/// The receive loop, measured.
#[derive(Clone, Debug, Serialize)]
pub struct ReceiveFloor {
    pub value_bytes: usize,
    pub ms: Percentiles,
    pub gb_per_s: f64,
    /// Of the receiving thread.
    pub cpu_s_per_gb: f64,
    /// Of the receiving socket; the server's is the system's default, unless it is told otherwise.
    pub congestion_control: String,
}

/// A plain client: one connection, one request at a time, `recv(MSG_WAITALL)` of the whole value straight into
/// memory of the kind that caches use. No checksum, no cache, nothing in the way.
pub struct ReceiveLoop {
    stream: TcpStream,
    regions: Regions,
    next_region: usize,
    request_id: u64,
    len: usize,
    pub latencies: Latencies,
    pub cost: Cost,
}

impl ReceiveLoop {
    /// For values of `len` bytes, received into `count` regions in turn.
    pub fn connect(server: SocketAddr, count: usize, len: usize, pages: PagePolicy) -> Result<Self, String> {
        let connect = || {
            let stream = TcpStream::connect_timeout(&server, SILENCE)?;
            stream.set_nodelay(true)?;
            stream.set_read_timeout(Some(SILENCE))?;
            stream.set_write_timeout(Some(SILENCE))?;
            Ok(stream)
        };
        Ok(Self {
            stream: connect().map_err(|e: std::io::Error| format!("cannot connect to {server}: {e}"))?,
            regions: Regions::new(count, len, pages)?,
            next_region: 0,
            request_id: 0,
            len,
            latencies: Latencies::new(),
            cost: Cost::default(),
        })
    }

    /// Forgets what was measured.
    pub fn reset(&mut self) {
        (self.latencies, self.cost) = (Latencies::new(), Cost::default());
    }

    /// Reads one value, timed, and checks it, untimed. Returns the time.
    pub fn read(&mut self, key: &str) -> Result<Duration, String> {
        self.request_id += 1;
        let mut request = Vec::new();
        let id = self.request_id;
        wire::encode_get(&mut request, id, b"", key.as_bytes(), 0, wire::RANGE_TO_END, wire::ANY_VERSION)
            .map_err(|e| e.to_string())?;
        let index = self.next_region;
        self.next_region = (index + 1) % self.regions.count();
        self.regions.spoil(index);
        let (cpu, started) = (thread_cpu(), Instant::now());
        self.exchange(&request, index)?;
        let wall = started.elapsed();
        self.cost.cpu += thread_cpu().saturating_sub(cpu);
        self.cost.wall += wall;
        self.cost.bytes += self.len as u64;
        self.latencies.record(wall);
        let checked = Content::of(key).check(0, self.regions.slice(index));
        checked.map_err(|difference| format!("the receive loop, `{key}`: {difference}"))?;
        Ok(wall)
    }

    fn exchange(&mut self, request: &[u8], index: usize) -> Result<(), String> {
        let mut header = [0; RESPONSE_HEADER_BYTES];
        self.stream.write_all(request).map_err(|e| format!("send: {e}"))?;
        self.stream.read_exact(&mut header).map_err(|e| format!("receive: {e}"))?;
        let header = ResponseHeader::decode(&header).map_err(|e| e.to_string())?;
        if header.status != Status::Ok || header.body_len != self.len as u64 {
            return Err(format!("the server answered {} with {} bytes", header.status, header.body_len));
        }
        self.receive(index)
    }

    fn receive(&mut self, index: usize) -> Result<(), String> {
        let mut done = 0;
        // One call, unless a signal cuts it short.
        while done < self.len {
            let into = self.regions.ptr(index);
            // SAFETY: the region holds `len` bytes, is this loop's own, and `done` is less than `len`.
            let got = unsafe {
                libc::recv(self.stream.as_raw_fd(), into.add(done).cast(), self.len - done, libc::MSG_WAITALL)
            };
            let error = std::io::Error::last_os_error();
            match usize::try_from(got) {
                Ok(0) => {
                    return Err(format!("the server ended the connection after {done} bytes of a value"));
                }
                Ok(got) => done += got,
                Err(_) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(_) => return Err(format!("recv after {done} of {} bytes: {error}", self.len)),
            }
        }
        Ok(())
    }

    /// What was measured.
    pub fn report(&self) -> ReceiveFloor {
        ReceiveFloor {
            value_bytes: self.len,
            ms: self.latencies.percentiles_ms(),
            gb_per_s: self.cost.gb_per_s(),
            cpu_s_per_gb: self.cost.cpu_s_per_gb(),
            congestion_control: self.congestion_control(),
        }
    }

    fn congestion_control(&self) -> String {
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
