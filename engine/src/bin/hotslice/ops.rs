//! In work on its own branch.

/// In work.
#[derive(clap::Args)]
pub struct PutArgs {}

pub fn put(_args: PutArgs) -> std::process::ExitCode {
    std::process::ExitCode::FAILURE
}

/// In work.
#[derive(clap::Args)]
pub struct GetArgs {}

pub fn get(_args: GetArgs) -> std::process::ExitCode {
    std::process::ExitCode::FAILURE
}

/// In work.
#[derive(clap::Args)]
pub struct ExistsArgs {}

pub fn exists(_args: ExistsArgs) -> std::process::ExitCode {
    std::process::ExitCode::FAILURE
}

/// In work.
#[derive(clap::Args)]
pub struct RmArgs {}

pub fn rm(_args: RmArgs) -> std::process::ExitCode {
    std::process::ExitCode::FAILURE
}
