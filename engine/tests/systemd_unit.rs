//! The systemd unit: systemd takes it, and the server takes what it passes.

#![allow(clippy::unwrap_used, reason = "a test's helpers may panic as its functions may")]

use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};

const UNIT: &str = include_str!("../../scripts/hotslice-serve.service");
const INSTALLED: &str = "/usr/local/bin/hotslice";

/// A directory that goes with the value.
struct Directory(PathBuf);

impl Directory {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("hotslice-unit-{name}-{}", std::process::id()));
        std::fs::create_dir(&path).unwrap();
        Directory(path)
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[test]
fn systemd_takes_the_unit() {
    let directory = Directory::new("verify");
    let file = directory.0.join("hotslice-serve.service");
    assert!(UNIT.contains(INSTALLED));
    std::fs::write(&file, UNIT.replace(INSTALLED, env!("CARGO_BIN_EXE_hotslice"))).unwrap();
    let verified = Command::new("systemd-analyze").args(["verify", "--man=no"]).arg(&file).output();
    let output = match verified {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            eprintln!("skipped: systemd-analyze is not installed");
            return;
        }
        output => output.unwrap(),
    };
    // It also complains about other units of this machine.
    let text = String::from_utf8_lossy(&output.stderr);
    let own: Vec<&str> = text.lines().filter(|line| line.contains("hotslice-serve")).collect();
    assert!(own.is_empty(), "{own:?}");
}

#[test]
fn the_server_takes_the_units_arguments() {
    let directory = Directory::new("arguments");
    let place = directory.0.to_str().unwrap();
    let secret = directory.0.join("secret");
    std::fs::write(&secret, "a secret of the right length").unwrap();
    std::fs::set_permissions(&secret, std::fs::Permissions::from_mode(0o400)).unwrap();
    let line = UNIT.lines().find_map(|line| line.strip_prefix("ExecStart=")).unwrap();
    let line = line.replace("/run/hotslice", place).replace("%d", place).replace("8GiB", "64MiB");
    let mut words = line.split(' ');
    assert_eq!(words.next(), Some(INSTALLED));
    let mut child = Command::new(env!("CARGO_BIN_EXE_hotslice"))
        .args(words)
        .arg("--json")
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut ready = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut ready).unwrap();
    let mode =
        std::fs::metadata(directory.0.join("serve.sock")).map(|file| file.permissions().mode() & 0o777);
    // SAFETY: kill touches no memory; the child is not waited for yet, so its id is its own.
    unsafe { libc::kill(child.id() as i32, libc::SIGTERM) };
    assert!(child.wait().unwrap().success(), "{ready}");
    assert_eq!(mode.unwrap(), 0o660);
    assert!(ready.contains("serve.sock"), "{ready}");
}
