//! In work on its own branch.

/// In work.
#[derive(clap::Args)]
pub struct ServeArgs {}

pub fn run(_args: ServeArgs) -> std::process::ExitCode {
    std::process::ExitCode::FAILURE
}
