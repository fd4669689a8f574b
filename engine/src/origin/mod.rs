//! Where values come from: talking to the stores behind the cache. Knows nothing of the table.

mod client_error;
mod slice_client;
mod stream;

#[cfg(test)]
mod tests;

pub use client_error::ClientError;
pub use slice_client::{SliceClient, Value, ValueInfo};
