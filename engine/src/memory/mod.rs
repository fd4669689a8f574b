//! placeholder of the first commit; replaced by the branch that builds it.

/// Why memory could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {}
