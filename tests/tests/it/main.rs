//! The integration suite: one module per promise or topic. See README.md beside this crate's manifest.

mod leases;
mod roundtrip;
mod single_flight;
