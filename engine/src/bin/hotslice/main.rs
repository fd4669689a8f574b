//! The command `hotslice`: serve values, talk to a server, bench the engine, examine the machine.

use clap::{Parser, Subcommand};
use std::process::ExitCode;

mod bench;
mod doctor;
mod ops;
mod serve;
mod settings;

/// Node-local hot cache for LLM KV-cache slices.
#[derive(Parser)]
#[command(version, about, max_term_width = 110)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Serve values from hugepage memory over TCP.
    Serve(serve::ServeArgs),
    /// Store a value in a slice server.
    Put(ops::PutArgs),
    /// Read a value from a slice server.
    Get(ops::GetArgs),
    /// Ask a slice server whether it has keys.
    Exists(ops::ExistsArgs),
    /// Remove keys from a slice server.
    Rm(ops::RmArgs),
    /// Measure the engine against the floors of this machine, checking every byte.
    Bench(bench::BenchArgs),
    /// Print the configuration that a cache would get here, and where each value comes from.
    Config(settings::ConfigArgs),
    /// Examine this machine: what the cache can use, and what would mend the rest.
    Doctor(doctor::DoctorArgs),
}

impl Command {
    /// What is logged unless `HOTSLICE_LOG` says otherwise.
    fn default_log(&self) -> &'static str {
        match self {
            // It opens many caches and reports itself what they obtained.
            Command::Bench(_) => "warn,hotslice::shard=error,hotslice::shard::arrivals=warn",
            _ => "warn",
        }
    }
}

fn main() -> ExitCode {
    let command = Cli::parse().command;
    tracing_subscriber::fmt()
        .with_env_filter(
            tracing_subscriber::EnvFilter::try_from_env("HOTSLICE_LOG")
                .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new(command.default_log())),
        )
        .with_writer(std::io::stderr)
        .init();
    match command {
        Command::Serve(args) => serve::run(args),
        Command::Put(args) => ops::put(args),
        Command::Get(args) => ops::get(args),
        Command::Exists(args) => ops::exists(args),
        Command::Rm(args) => ops::rm(args),
        Command::Bench(args) => bench::run(args),
        Command::Config(args) => settings::run(args),
        Command::Doctor(args) => doctor::run(args),
    }
}
