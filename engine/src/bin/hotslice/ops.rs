//! `hotslice put`, `get`, `exists` and `rm`: a plain client of a slice server.

use hotslice::auth::Secret;
use hotslice::origin::{ClientError, SliceClient};
use hotslice::wire::Status;
use indicatif::ProgressBar;
use serde_json::json;
use std::io::{IsTerminal, Read, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

/// What every client command needs.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = EXIT_CODES)]
struct Target {
    /// The slice server: host:port or unix:/path
    #[arg(long, env = "HOTSLICE_ORIGIN", default_value = "127.0.0.1:7110", value_name = "ADDRESS")]
    origin: String,
    /// Namespace of the keys; empty is the default one
    #[arg(long, default_value = "", value_name = "NAME")]
    namespace: String,
    /// Give up after this long without progress, in milliseconds
    #[arg(long, default_value_t = 10_000, value_name = "MS", value_parser = clap::value_parser!(u64).range(1..=86_400_000))]
    timeout_ms: u64,
    /// File with the secret that the server demands
    #[arg(long, env = "HOTSLICE_SECRET_FILE", value_name = "FILE")]
    secret_file: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

const EXIT_CODES: &str = "Exit codes: 0 done, 1 a key is absent, 2 bad arguments or another error, 3 the server cannot be reached.";

/// Arguments of `hotslice put`.
#[derive(Debug, clap::Args)]
#[command(after_help = EXIT_CODES)]
pub struct PutArgs {
    #[command(flatten)]
    target: Target,
    /// The key
    key: String,
    /// File with the value; `-` is standard input
    file: PathBuf,
}

/// Arguments of `hotslice get`.
#[derive(Debug, clap::Args)]
#[command(after_help = EXIT_CODES)]
pub struct GetArgs {
    #[command(flatten)]
    target: Target,
    /// The key
    key: String,
    /// Write the value here instead of to standard output
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
}

/// Arguments of `hotslice exists`.
#[derive(Debug, clap::Args)]
#[command(after_help = EXIT_CODES)]
pub struct ExistsArgs {
    #[command(flatten)]
    target: Target,
    /// The keys
    #[arg(required = true)]
    keys: Vec<String>,
}

/// Arguments of `hotslice rm`.
#[derive(Debug, clap::Args)]
#[command(after_help = EXIT_CODES)]
pub struct RmArgs {
    #[command(flatten)]
    target: Target,
    /// The keys
    #[arg(required = true)]
    keys: Vec<String>,
}

/// How a command ended, other than well.
enum Failure {
    Absent,
    Unreachable(String),
    Other(String),
}

impl From<ClientError> for Failure {
    fn from(error: ClientError) -> Self {
        Failure::Other(error.to_string())
    }
}

impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Self {
        Failure::Other(error.to_string())
    }
}

fn finish(result: Result<(), Failure>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(Failure::Absent) => ExitCode::from(1),
        Err(Failure::Other(error)) => {
            eprintln!("error: {error}");
            ExitCode::from(2)
        }
        Err(Failure::Unreachable(error)) => {
            eprintln!("error: {error}");
            ExitCode::from(3)
        }
    }
}

impl Target {
    fn connect(&self) -> Result<SliceClient, Failure> {
        let peers = hotslice::config::parse_peers("origin", &self.origin)
            .map_err(|error| Failure::Other(error.to_string()))?;
        let [peer] = peers.as_slice() else {
            return Err(Failure::Other(format!("origin is `{}`: one server, not several", self.origin)));
        };
        let other = |error: hotslice::Error| Failure::Other(error.to_string());
        let secret = self.secret_file.as_deref().map(Secret::read).transpose().map_err(other)?;
        let mut client = SliceClient::connect(peer, Duration::from_millis(self.timeout_ms))
            .map_err(|error| Failure::Unreachable(error.to_string()))?;
        if let Some(secret) = secret {
            client.authenticate(&secret)?;
        }
        Ok(client)
    }
}

/// Writes to standard output; a reader that went away is not an error.
fn print(bytes: &[u8]) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    match out.write_all(bytes).and_then(|()| out.flush()) {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        done => Ok(done?),
    }
}

fn print_line(text: &str) -> Result<(), Failure> {
    print(format!("{text}\n").as_bytes())
}

/// A spinner on standard error while a transfer of unknown progress runs, if that is a terminal.
fn spinner(what: &str) -> ProgressBar {
    let spinner = ProgressBar::new_spinner().with_message(what.to_owned());
    spinner.enable_steady_tick(Duration::from_millis(200));
    spinner
}

/// Runs `hotslice put`.
pub fn put(args: PutArgs) -> ExitCode {
    finish(try_put(&args))
}

fn try_put(args: &PutArgs) -> Result<(), Failure> {
    let mut value = Vec::new();
    if args.file.as_os_str() == "-" {
        std::io::stdin().lock().read_to_end(&mut value)?;
    } else {
        let name = args.file.display();
        value = std::fs::read(&args.file).map_err(|error| Failure::Other(format!("{name}: {error}")))?;
    }
    let mut client = args.target.connect()?;
    let progress = spinner("storing");
    let info = client.put(args.target.namespace.as_bytes(), args.key.as_bytes(), &value)?;
    progress.finish_and_clear();
    if args.target.json {
        print_line(&json!({ "key": args.key, "bytes": value.len(), "version": info.version }).to_string())?;
    }
    Ok(())
}

/// Runs `hotslice get`.
pub fn get(args: GetArgs) -> ExitCode {
    finish(try_get(&args))
}

fn try_get(args: &GetArgs) -> Result<(), Failure> {
    if args.output.is_none() && !args.target.json && std::io::stdout().is_terminal() {
        return Err(Failure::Other("a value is binary: give --output FILE, or redirect".to_owned()));
    }
    let mut client = args.target.connect()?;
    let progress = spinner("reading");
    let value = client.get(args.target.namespace.as_bytes(), args.key.as_bytes())?;
    progress.finish_and_clear();
    let Some(value) = value else {
        eprintln!("`{}` is absent", args.key);
        return Err(Failure::Absent);
    };
    if let Some(file) = &args.output {
        let name = file.display();
        std::fs::write(file, &value.bytes).map_err(|error| Failure::Other(format!("{name}: {error}")))?;
    } else if !args.target.json {
        print(&value.bytes)?;
    }
    if args.target.json {
        let info = &value.info;
        print_line(
            &json!({ "key": args.key, "bytes": value.bytes.len(), "version": info.version, "crc32c": info.crc32c })
                .to_string(),
        )?;
    }
    Ok(())
}

/// Runs `hotslice exists`.
pub fn exists(args: ExistsArgs) -> ExitCode {
    finish(try_exists(&args))
}

fn try_exists(args: &ExistsArgs) -> Result<(), Failure> {
    let mut client = args.target.connect()?;
    let namespace = args.target.namespace.as_bytes();
    let keys: Vec<(&[u8], &[u8])> = args.keys.iter().map(|key| (namespace, key.as_bytes())).collect();
    let entries = client.lookup(&keys)?;
    let mut all = true;
    for (key, entry) in args.keys.iter().zip(entries) {
        let present = entry.status == Status::Ok;
        all &= present;
        if args.target.json {
            print_line(&json!({ "key": key, "exists": present, "bytes": entry.value_len }).to_string())?;
        } else if present {
            print_line(&format!("{key}\t{} bytes", entry.value_len))?;
        } else {
            print_line(&format!("{key}\tabsent"))?;
        }
    }
    if all { Ok(()) } else { Err(Failure::Absent) }
}

/// Runs `hotslice rm`.
pub fn rm(args: RmArgs) -> ExitCode {
    finish(try_rm(&args))
}

fn try_rm(args: &RmArgs) -> Result<(), Failure> {
    let mut client = args.target.connect()?;
    let mut all = true;
    for key in &args.keys {
        let removed = client.remove(args.target.namespace.as_bytes(), key.as_bytes())?;
        all &= removed;
        if args.target.json {
            print_line(&json!({ "key": key, "removed": removed }).to_string())?;
        } else if !removed {
            eprintln!("`{key}` is absent");
        }
    }
    if all { Ok(()) } else { Err(Failure::Absent) }
}
