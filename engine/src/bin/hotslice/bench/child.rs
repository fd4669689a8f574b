//! The slice server as a child process that never outlives the bench.

use serde::{Deserialize, Serialize};
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdout, Command, Stdio};

/// A running server; ends with this value, and with the process however that ends.
pub struct ServerChild {
    /// What it said when it was ready.
    pub ready: Ready,
    _process: Process,
    /// Held so that the server's standard output stays open.
    _output: BufReader<ChildStdout>,
}

/// The first line of `hotslice serve --json`, as far as it matters here.
#[derive(Clone, Debug, Deserialize)]
pub struct Ready {
    pub listening: SocketAddr,
    pub memory: ServerMemory,
}

/// The pages that the server's values lie on.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
pub struct ServerMemory {
    pub arena_bytes: usize,
    pub hugetlb_bytes: usize,
    pub transparent_bytes: usize,
    pub base_bytes: usize,
}

/// Ends the process when dropped, so also where starting it gets stuck half way.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        // Both fail only if it has ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl ServerChild {
    /// Starts `hotslice serve` on a free loopback port, from the thread that will outlive it: the kernel ends
    /// the server with that thread.
    pub fn start(capacity_bytes: u64, pages: &str) -> Result<Self, String> {
        let program = std::env::current_exe().map_err(|e| format!("cannot find the own executable: {e}"))?;
        let mut command = Command::new(program);
        command
            .args(["serve", "--listen", "127.0.0.1:0", "--writable", "--json", "--pages", pages])
            .args(["--capacity", &capacity_bytes.to_string()])
            .stdin(Stdio::null())
            .stdout(Stdio::piped());
        let parent = std::process::id();
        // SAFETY: the closure makes two system calls, which is allowed between fork and exec.
        unsafe {
            command.pre_exec(move || {
                // Covers what no destructor does: a signal, `exit`, a panic that aborts.
                if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) != 0 {
                    return Err(std::io::Error::last_os_error());
                }
                // Had the parent died before that call, nobody would be told.
                match u32::try_from(libc::getppid()) == Ok(parent) {
                    true => Ok(()),
                    false => Err(std::io::Error::from_raw_os_error(libc::ESRCH)),
                }
            });
        }
        let child = command.spawn().map_err(|e| format!("cannot start the slice server: {e}"))?;
        let mut process = Process(child);
        let output = process.0.stdout.take().ok_or("the slice server has no standard output")?;
        let mut output = BufReader::new(output);
        let mut line = String::new();
        output.read_line(&mut line).map_err(|e| format!("cannot read from the slice server: {e}"))?;
        Ok(Self { ready: parse_ready(&line)?, _process: process, _output: output })
    }
}

fn parse_ready(line: &str) -> Result<Ready, String> {
    serde_json::from_str(line)
        .map_err(|e| format!("the slice server did not start (it said `{}`): {e}", line.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_line_is_read_or_quoted() {
        let memory = r#"{"arena_bytes":4,"hugetlb_bytes":1,"transparent_bytes":2,"base_bytes":1,"more":0}"#;
        let ready = parse_ready(&format!(r#"{{"listening":"127.0.0.1:5","pid":1,"memory":{memory}}}"#));
        assert!(ready.is_ok_and(|r| r.listening.port() == 5 && r.memory.transparent_bytes == 2));
        assert!(parse_ready("no memory\n").is_err_and(|e| e.contains("`no memory`")));
        assert!(parse_ready("").is_err());
        assert!(parse_ready("{}").is_err());
    }
}
