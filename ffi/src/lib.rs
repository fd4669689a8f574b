//! hotslice ffi.
