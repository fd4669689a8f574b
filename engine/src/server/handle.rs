//! A slice server on a thread of its own.

use std::sync::mpsc;
use std::thread::JoinHandle;

use tokio::sync::oneshot;

use super::{Server, ServerConfig};
use crate::{Address, Error, Result};

/// A running [`Server`](super::Server). Dropping it stops the server and waits for its thread.
#[derive(Debug)]
pub struct ServerHandle {
    addrs: Vec<Address>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl ServerHandle {
    /// Starts a server on a new thread and waits until it listens.
    ///
    /// # Errors
    ///
    /// Those of [`Server::bind`](super::Server::bind), and [`Error::System`] when no thread can be had.
    pub fn spawn(config: ServerConfig) -> Result<ServerHandle> {
        let (ready, when_ready) = mpsc::channel();
        let (stop, when_stopped) = oneshot::channel::<()>();
        let serve = move || {
            let server = match Server::bind(config) {
                Ok(server) => server,
                Err(error) => {
                    // Nobody listens only when `spawn` has panicked.
                    let _ = ready.send(Err(error));
                    return;
                }
            };
            let _ = ready.send(Ok(server.local_addrs().to_vec()));
            server.run(async {
                // An error means that the handle is gone: stop as well.
                let _ = when_stopped.await;
            });
        };
        let failed = |reason: String| Error::System {
            what: "cannot start the slice server".into(),
            reason: reason.into(),
        };
        let thread = std::thread::Builder::new()
            .name("hotslice-serve".into())
            .spawn(serve)
            .map_err(|error| failed(error.to_string()))?;
        let addrs = when_ready.recv().map_err(|_| failed("its thread panicked".into()))??;
        Ok(ServerHandle { addrs, stop: Some(stop), thread: Some(thread) })
    }

    /// Where it listens: the first of its addresses.
    pub fn addr(&self) -> Address {
        self.addrs[0].clone()
    }

    /// Where it listens, in the order of the settings; with the ports that were chosen where 0 was asked for.
    pub fn addrs(&self) -> &[Address] {
        &self.addrs
    }

    /// Ends all connections and waits until the server's memory is given back.
    ///
    /// # Errors
    ///
    /// [`Error::System`] when its thread panicked.
    pub fn stop(mut self) -> Result<()> {
        self.end()
    }

    fn end(&mut self) -> Result<()> {
        drop(self.stop.take());
        match self.thread.take().map(JoinHandle::join) {
            None | Some(Ok(())) => Ok(()),
            Some(Err(_)) => {
                Err(Error::System { what: "slice server".into(), reason: "its thread panicked".into() })
            }
        }
    }
}

impl Drop for ServerHandle {
    fn drop(&mut self) {
        if let Err(error) = self.end() {
            tracing::error!(%error, "slice server ended abnormally");
        }
    }
}
