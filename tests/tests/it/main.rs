//! The integration suite: one module per promise or topic. See README.md beside this crate's manifest.
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod authentication;
mod chaos;
mod config;
mod errands;
mod eviction;
mod futures;
mod keys;
mod lanes;
mod leases;
mod namespaces;
mod origin_faults;
mod origin_lies;
mod parts;
mod placement;
mod process;
mod queue;
mod quotas;
mod resize;
mod restart;
mod roundtrip;
mod shards;
mod shutdown;
mod single_flight;
mod staleness;
mod stats;
mod storm;
mod unix;
mod utilisation;
