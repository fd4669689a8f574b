//! What the machine and the container give this process: cores, NUMA nodes, CPU time, limits on memory.
//!
//! Reads only, from `/proc` and `/sys`, and one system call for the affinity mask. Every file may be missing or
//! hold something unexpected (containers mask them): then the answer is "no limit" or "unknown", never a panic.
//! It must not know what the answers are used for.
//!
//! | file | what |
//! |---|---|
//! | `cores.rs` | the cores that this process may run on, pinning, and a spread over nodes |
//! | `topology.rs` | NUMA nodes and their cores |
//! | `groups.rs` | limits of control groups, of both versions |
//!
//! Nodes were tested against texts of machines with two of them; only a machine with one was run.

pub(crate) mod cores;
mod groups;
mod topology;

pub use groups::{CpuQuota, GroupLimit};
pub use topology::{Node, Topology};

use std::path::{Path, PathBuf};

/// Where to look: `/`, or a made-up tree in tests.
#[derive(Clone, Debug)]
pub struct Machine {
    root: PathBuf,
}

impl Machine {
    /// The machine that this runs on.
    pub fn here() -> Self {
        Self::under("/")
    }

    /// Another tree with `proc` and `sys` in it.
    pub fn under(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// A file's text without the blanks around it. Blocking.
    pub fn read(&self, path: impl AsRef<Path>) -> Option<String> {
        std::fs::read_to_string(self.root.join(path)).ok().map(|text| text.trim().to_owned())
    }
}

/// The numbers of a list as the kernel writes it: `0-3,8`. `None` if it is not one.
pub fn parse_list(text: &str) -> Option<Vec<usize>> {
    /// More than any kernel's cores and nodes; a file that says otherwise is not such a list.
    const NUMBERS_MAX: usize = 1 << 16;
    let mut numbers = Vec::new();
    for part in text.trim().split(',').filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        if first > last || last >= NUMBERS_MAX {
            return None;
        }
        numbers.extend(first..=last);
    }
    Some(numbers)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A made-up machine of these files, gone when it is dropped.
    pub(crate) struct Fixture(pub(crate) Machine);

    impl Fixture {
        pub(crate) fn new(name: &str, files: &[(&str, &str)]) -> Self {
            let root = std::env::temp_dir().join(format!("hotslice-machine-{}-{name}", std::process::id()));
            for (path, text) in files {
                let path = root.join(path);
                std::fs::create_dir_all(path.parent().unwrap()).unwrap();
                std::fs::write(path, text).unwrap();
            }
            std::fs::create_dir_all(&root).unwrap();
            Self(Machine::under(root))
        }
    }

    impl Drop for Fixture {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0.root);
        }
    }

    #[test]
    fn lists_are_read_as_the_kernel_writes_them() {
        assert_eq!(parse_list("0-3,8,10-11\n"), Some(vec![0, 1, 2, 3, 8, 10, 11]));
        assert_eq!(parse_list("0"), Some(vec![0]));
        assert_eq!(parse_list("\n"), Some(vec![]));
        for odd in ["x", "3-1", "0-", "0-99999999999", "-1", "1 2"] {
            assert_eq!(parse_list(odd), None, "{odd}");
        }
    }
}
