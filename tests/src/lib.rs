//! hotslice tests.
