//! The slice server as a child process that never outlives the bench.

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

/// A running server; ends with this value, and with the process however that ends.
pub struct ServerChild {
    child: Child,
    pub address: SocketAddr,
}

impl ServerChild {
    /// Starts `hotslice serve` on a free loopback port.
    pub fn start(capacity_bytes: u64) -> Result<Self, String> {
        let program = std::env::current_exe().map_err(|e| format!("cannot find the own executable: {e}"))?;
        let mut command = Command::new(program);
        command
            .args(["serve", "--listen", "127.0.0.1:0", "--writable", "--json", "--capacity"])
            .arg(capacity_bytes.to_string())
            .stdin(Stdio::null())
            .stdout(Stdio::piped());
        // SAFETY: the closure makes one system call, which is allowed between fork and exec.
        unsafe {
            command.pre_exec(|| {
                // The kernel ends the child should this thread end without doing so.
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                Ok(())
            });
        }
        let mut child = command.spawn().map_err(|e| format!("cannot start the slice server: {e}"))?;
        let Some(stdout) = child.stdout.take() else { return Err("the server has no output".into()) };
        let mut line = String::new();
        let read = BufReader::new(stdout).read_line(&mut line);
        let mut started = Self { child, address: SocketAddr::from(([0, 0, 0, 0], 0)) };
        read.map_err(|e| format!("cannot read from the slice server: {e}"))?;
        let ready: serde_json::Value = serde_json::from_str(&line)
            .map_err(|e| format!("the slice server did not start (it said `{}`): {e}", line.trim()))?;
        let address = ready["listening"].as_str().unwrap_or_default();
        started.address =
            address.parse().map_err(|e| format!("the slice server listens on `{address}`: {e}"))?;
        Ok(started)
    }
}

impl Drop for ServerChild {
    fn drop(&mut self) {
        // Both fail only if it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
