//! The command `hotslice`.
fn main() {}
