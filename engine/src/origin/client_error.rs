//! Errors of the blocking slice client.

use std::sync::Arc;
use std::time::Duration;

use crate::wire::{Status, WireError};
use crate::{Address, Error};

/// Why the client could not do what was asked. Absent is not among them.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// No connection could be made.
    #[error("cannot connect to {peer}: {source}")]
    Connect {
        /// Address of the server.
        peer: Address,
        /// What the system said.
        source: std::io::Error,
    },
    /// The connection failed; the client cannot be used any more.
    #[error("connection to {peer} failed while {doing}: {source}")]
    Io {
        /// Address of the server.
        peer: Address,
        /// What was being done.
        doing: &'static str,
        /// What the system said.
        source: std::io::Error,
    },
    /// The server was too slow; the client cannot be used any more.
    #[error("{peer} did not finish within {waited:?} while {doing}")]
    TimedOut {
        /// Address of the server.
        peer: Address,
        /// What was being done.
        doing: &'static str,
        /// How long it was waited for.
        waited: Duration,
    },
    /// The server's bytes are not an answer to the request; the client cannot be used any more.
    #[error("{peer} broke the protocol: {reason}")]
    Protocol {
        /// Address of the server.
        peer: Address,
        /// What was wrong.
        reason: String,
    },
    /// An earlier error has ended the connection.
    #[error("the connection to {peer} was ended by an earlier error; connect again")]
    Ended {
        /// Address of the server.
        peer: Address,
    },
    /// The server refused the request.
    #[error("{peer} refused: {status}{}{reason}", if reason.is_empty() { "" } else { ": " })]
    Refused {
        /// Address of the server.
        peer: Address,
        /// Why, as a number.
        status: Status,
        /// Why, in the server's words; may be empty.
        reason: String,
    },
    /// The server did not prove that it knows the secret: it is somebody else, or has another one. The client
    /// cannot be used any more.
    #[error("{peer} does not know the secret: it is another server, or its secret is another one")]
    ServerProof {
        /// Address of the server.
        peer: Address,
    },
    /// No random bytes could be had for a proof.
    #[error(transparent)]
    Random(Error),
    /// The bytes received are not those that the server has stored.
    #[error("checksum mismatch from {peer}: CRC32C {got:#010x}, the server says {want:#010x}")]
    Checksum {
        /// Address of the server.
        peer: Address,
        /// Of the bytes received.
        got: u32,
        /// What the server says.
        want: u32,
    },
    /// The value does not fit the buffer. Nothing was written to it.
    #[error("the buffer holds {buffer_bytes} bytes, the value has {value_bytes}")]
    BufferTooSmall {
        /// Size of the buffer in bytes.
        buffer_bytes: u64,
        /// Size of the value in bytes.
        value_bytes: u64,
    },
    /// The memory for a value could not be allocated.
    #[error("no memory for a value of {value_bytes} bytes")]
    OutOfMemory {
        /// Size of the value in bytes.
        value_bytes: u64,
    },
    /// The request breaks a limit of the protocol; nothing was sent.
    #[error(transparent)]
    Request(WireError),
}

impl ClientError {
    /// The status with which the server refused, if that is what happened.
    pub fn status(&self) -> Option<Status> {
        match self {
            ClientError::Refused { status, .. } => Some(*status),
            _ => None,
        }
    }
}

impl From<ClientError> for Error {
    fn from(error: ClientError) -> Self {
        let reason: Arc<str> = error.to_string().into();
        match error {
            ClientError::Connect { peer, .. }
            | ClientError::Io { peer, .. }
            | ClientError::TimedOut { peer, .. }
            | ClientError::Ended { peer } => Error::PeerUnavailable { peer, reason },
            ClientError::Protocol { peer, .. } | ClientError::ServerProof { peer } => {
                Error::Protocol { peer, reason }
            }
            ClientError::Random(error) => error,
            ClientError::Refused { peer, .. } => Error::Refused { peer, reason },
            ClientError::Checksum { peer, got, want } => Error::Checksum { peer, got, want },
            ClientError::BufferTooSmall { buffer_bytes, value_bytes } => {
                Error::BufferTooSmall { buffer_bytes, value_bytes }
            }
            ClientError::Request(WireError::KeyLength { got, max }) => Error::KeyLength { len: got, max },
            ClientError::Request(_) | ClientError::OutOfMemory { .. } => {
                Error::System { what: "slice request".into(), reason }
            }
        }
    }
}
