//! In work on its own branch.

/// In work.
#[derive(clap::Args)]
pub struct DoctorArgs {}

pub fn run(_args: DoctorArgs) -> std::process::ExitCode {
    std::process::ExitCode::FAILURE
}
