//! `hotslice config`: the configuration that a cache would get here, and where each value comes from.

use comfy_table::{Table, presets};
use hotslice::Config;
use std::path::PathBuf;
use std::process::ExitCode;

/// Arguments of `hotslice config`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "The environment goes before the file, the file before the defaults. Exit codes: 0 valid, 1 not \
                        valid, 2 no cache is asked for."
)]
pub struct ConfigArgs {
    /// This TOML file instead of the one that HOTSLICE_CONFIG names
    #[arg(long, value_name = "PATH")]
    file: Option<PathBuf>,
    /// Print one JSON document instead of a table
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn run(args: ConfigArgs) -> ExitCode {
    let loaded = match Config::load(args.file.as_deref()) {
        Ok(Some(loaded)) => loaded,
        Ok(None) => {
            eprintln!("no cache is asked for: set capacity_bytes in a file or HOTSLICE_CAPACITY_BYTES");
            return ExitCode::from(2);
        }
        Err(error) => {
            eprintln!("error: {error}");
            return ExitCode::from(1);
        }
    };
    if args.json {
        match serde_json::to_string_pretty(&loaded.settings) {
            Ok(text) => println!("{text}"),
            Err(error) => {
                eprintln!("error: {error}");
                return ExitCode::from(1);
            }
        }
        return ExitCode::SUCCESS;
    }
    let mut table = Table::new();
    table.load_style(presets::ASCII_MARKDOWN).set_header(["setting", "value", "from"]);
    for setting in &loaded.settings {
        table.add_row([setting.name, &setting.value, &setting.source.to_string()]);
    }
    println!("{table}");
    ExitCode::SUCCESS
}
