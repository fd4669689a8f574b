//! Helpers of the integration tests: an origin that can misbehave, content that tells where it belongs,
//! gauges that must come back to rest, and child processes for what would spoil this one.
//!
//! Everything talks over real TCP sockets. Panics are the way in which these helpers fail: they are for
//! tests only.

pub mod child;
pub mod content;
pub mod gauges;
pub mod origin;
pub mod setup;
pub mod sync;
