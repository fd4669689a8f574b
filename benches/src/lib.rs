//! hotslice benches.
