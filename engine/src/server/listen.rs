//! Listening sockets.

use std::net::TcpListener;

use crate::{Address, Error, Result};

/// A listening socket.
pub(super) struct Listener {
    pub(super) socket: TcpListener,
    address: Address,
}

impl Listener {
    /// Listens on the address.
    pub(super) fn bind(address: &Address) -> Result<Listener> {
        let cannot = |reason: String| Error::System {
            what: format!("cannot listen on {address}"),
            reason: reason.into(),
        };
        let failed = |error: std::io::Error| cannot(error.to_string());
        let Some(tcp) = address.tcp() else {
            return Err(cannot("only TCP is served so far".into()));
        };
        let socket = TcpListener::bind(tcp).map_err(failed)?;
        let address = socket.local_addr().map_err(failed)?.into();
        Ok(Listener { socket, address })
    }

    /// Where it listens.
    pub(super) fn local_addr(&self) -> &Address {
        &self.address
    }
}
