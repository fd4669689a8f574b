//! `hotslice serve`: a stand-alone slice server.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use hotslice::auth::Secret;
use hotslice::memory::{ArenaReport, LockPolicy, PagePolicy};
use hotslice::server::{Server, ServerConfig};
use hotslice::size::{format_bytes, parse_bytes};
use hotslice::{Address, Error, Result};
use tokio::sync::oneshot;

/// Settings of the server; each is explained in `hotslice serve --help`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Values are held in memory up to the capacity and are lost when the server ends. Whoever can \
                  connect can read them unless a secret is demanded; nothing is encrypted: listen on an \
                  address that only the cluster reaches."
)]
pub struct ServeArgs {
    /// Where to listen: address:port (port 0 takes a free one) or unix:/path; may be given several times
    #[arg(long, default_value = "127.0.0.1:7110", value_name = "ADDRESS")]
    listen: Vec<Address>,
    /// Permissions of a Unix socket's file, octal; who may write to it may connect
    #[arg(long, default_value = "0600", value_name = "MODE", value_parser = parse_mode)]
    socket_mode: u32,
    /// Memory for values, such as 800MB or 8GiB; a put beyond it is refused
    #[arg(long, default_value = "1GiB", value_name = "SIZE",
          value_parser = |text: &str| parse_bytes("capacity", text))]
    capacity: u64,
    /// Size of one memory block, a power of two
    #[arg(long, default_value = "16MiB", value_name = "SIZE",
          value_parser = |text: &str| parse_bytes("block", text))]
    block: u64,
    /// Hugepages: required, preferred or off
    #[arg(long, default_value = "preferred", value_name = "POLICY")]
    pages: PagePolicy,
    /// Locking the memory (mlock): required, preferred or off
    #[arg(long, default_value = "off", value_name = "POLICY")]
    lock: LockPolicy,
    /// Serve only clients that prove to know the secret in this file (16 bytes or more; others may not read it)
    #[arg(long, value_name = "FILE")]
    secret_file: Option<PathBuf>,
    /// Take put and remove; without it the server is read-only
    #[arg(long)]
    writable: bool,
    /// Most connections at a time
    #[arg(long, default_value_t = 1024, value_name = "COUNT")]
    max_connections: usize,
    /// Most connections at a time of one client: one address, or one user on Unix sockets
    #[arg(long, default_value_t = 512, value_name = "COUNT")]
    max_connections_per_client: usize,
    /// Most answers in waiting on one connection
    #[arg(long, default_value_t = 256, value_name = "COUNT")]
    max_outstanding: usize,
    /// Most bytes of answers in waiting on one connection, values included; one answer may exceed it
    #[arg(long, default_value = "64MiB", value_name = "SIZE",
          value_parser = |text: &str| parse_bytes("max_outstanding_bytes", text))]
    max_outstanding_bytes: u64,
    /// Longest body of a request without its value; clients look up as many keys as 1MiB holds
    #[arg(long, default_value = "1MiB", value_name = "SIZE",
          value_parser = |text: &str| parse_bytes("max_frame_bytes", text))]
    max_frame_bytes: u64,
    /// Longest value that is taken
    #[arg(long, default_value = "1TiB", value_name = "SIZE",
          value_parser = |text: &str| parse_bytes("max_value_bytes", text))]
    max_value_bytes: u64,
    /// End connections without a request for this long, in milliseconds
    #[arg(long, default_value_t = 600_000, value_name = "MS")]
    idle_timeout_ms: u64,
    /// End connections that move no byte of a request or answer for this long, or do not authenticate within it,
    /// in milliseconds
    #[arg(long, default_value_t = 30_000, value_name = "MS")]
    stall_timeout_ms: u64,
    /// Memory for keys and their bookkeeping
    #[arg(long, default_value = "256MiB", value_name = "SIZE",
          value_parser = |text: &str| parse_bytes("index", text))]
    index: u64,
    /// When ready, print one line of JSON instead of text
    #[arg(long)]
    json: bool,
}

/// What a parent process reads from the first line with `--json`.
#[derive(serde::Serialize)]
struct Ready<'a> {
    /// The first of `addresses`.
    listening: &'a Address,
    addresses: &'a [Address],
    pid: u32,
    writable: bool,
    memory: ArenaReport,
}

/// Runs the server until SIGINT or SIGTERM; a second one ends the process at once. Exits with 0 after
/// the first, with 1 when the server could not start.
pub fn run(args: ServeArgs) -> ExitCode {
    match serve(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn serve(args: &ServeArgs) -> Result<()> {
    let stopped = stop_on_signal()?;
    let server = Server::bind(ServerConfig {
        listen: args.listen.clone(),
        socket_mode: args.socket_mode,
        secret: args.secret_file.as_deref().map(Secret::read).transpose()?,
        capacity_bytes: to_usize("capacity", args.capacity)?,
        block_bytes: to_usize("block", args.block)?,
        pages: args.pages,
        lock: args.lock,
        writable: args.writable,
        max_connections: args.max_connections,
        max_connections_per_client: args.max_connections_per_client,
        max_outstanding: args.max_outstanding,
        max_outstanding_bytes: args.max_outstanding_bytes,
        max_frame_bytes: to_usize("max_frame_bytes", args.max_frame_bytes)?,
        max_value_bytes: args.max_value_bytes,
        idle_timeout: Duration::from_millis(args.idle_timeout_ms),
        stall_timeout: Duration::from_millis(args.stall_timeout_ms),
        index_bytes_max: to_usize("index", args.index)?,
    })?;
    announce(args, &server)?;
    server.run(async {
        // An error means that the signal thread is gone: stop as well.
        let _ = stopped.await;
    });
    Ok(())
}

fn parse_mode(text: &str) -> Result<u32, String> {
    let mode = u32::from_str_radix(text, 8).ok().filter(|mode| *mode <= 0o777);
    mode.ok_or_else(|| "an octal number from 0 to 0777 is allowed, such as 0660".to_owned())
}

fn to_usize(setting: &'static str, bytes: u64) -> Result<usize> {
    usize::try_from(bytes).map_err(|_| Error::Config {
        setting,
        value: format_bytes(bytes),
        allowed: format!("at most {} can be addressed here", format_bytes(usize::MAX as u64)),
    })
}

fn announce(args: &ServeArgs, server: &Server) -> Result<()> {
    let memory = server.memory_report();
    let text = if args.json {
        serde_json::to_string(&Ready {
            listening: &server.local_addrs()[0],
            addresses: server.local_addrs(),
            pid: std::process::id(),
            writable: args.writable,
            memory,
        })
        .map_err(|error| failed("cannot write JSON", &error))?
    } else {
        for warning in &memory.warnings {
            eprintln!("warning: {warning}");
        }
        let mode = if args.writable { "writable" } else { "read-only" };
        format!(
            "serving on {}, {} for values, {mode}",
            server.local_addrs().iter().map(Address::to_string).collect::<Vec<_>>().join(" and "),
            format_bytes(memory.arena_bytes as u64)
        )
    };
    let mut out = std::io::stdout().lock();
    writeln!(out, "{text}")
        .and_then(|()| out.flush())
        .map_err(|error| failed("cannot write to standard output", &error))
}

fn failed(what: &str, error: &dyn std::error::Error) -> Error {
    Error::System { what: what.into(), reason: error.to_string().into() }
}

/// Routes SIGINT and SIGTERM to a thread that waits for them. To be called before any other thread is
/// started, because threads inherit the mask.
fn stop_on_signal() -> Result<oneshot::Receiver<()>> {
    let mut signals = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: sigemptyset initialises the set; the others take it then. pthread_sigmask changes the
    // calling thread's mask and accepts a null pointer for the former one.
    let signals = unsafe {
        libc::sigemptyset(signals.as_mut_ptr());
        libc::sigaddset(signals.as_mut_ptr(), libc::SIGINT);
        libc::sigaddset(signals.as_mut_ptr(), libc::SIGTERM);
        let errno = libc::pthread_sigmask(libc::SIG_BLOCK, signals.as_ptr(), std::ptr::null_mut());
        if errno != 0 {
            return Err(failed("cannot block signals", &std::io::Error::from_raw_os_error(errno)));
        }
        signals.assume_init()
    };
    let (stop, stopped) = oneshot::channel();
    let wait = move || {
        let mut signal: libc::c_int = 0;
        // SAFETY: both pointers are to this thread's own variables. It fails only for an invalid set.
        unsafe { libc::sigwait(&raw const signals, &raw mut signal) };
        tracing::info!(signal, "stopping");
        // Nobody receives when the server could not start.
        let _ = stop.send(());
        // SAFETY: as above.
        unsafe { libc::sigwait(&raw const signals, &raw mut signal) };
        std::process::exit(128 + signal);
    };
    std::thread::Builder::new()
        .name("hotslice-signal".into())
        .spawn(wait)
        .map_err(|error| failed("cannot start the signal thread", &error))?;
    Ok(stopped)
}
