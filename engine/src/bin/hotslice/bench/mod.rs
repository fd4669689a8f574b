//! In work on its own branch.

/// In work.
#[derive(clap::Args)]
pub struct BenchArgs {}

pub fn run(_args: BenchArgs) -> std::process::ExitCode {
    std::process::ExitCode::FAILURE
}
