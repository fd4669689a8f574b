//! Facts of the machine that a figure means nothing without.

use serde::Serialize;

/// What is printed beside the figures.
#[derive(Clone, Debug, Serialize)]
pub struct Machine {
    pub kernel: String,
    pub architecture: &'static str,
    pub processor: String,
    pub cores: usize,
    pub congestion_control: String,
    pub hugepages_free: u64,
    pub transparent_hugepages: String,
}

impl Machine {
    pub fn look() -> Self {
        let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default().trim().to_owned();
        let processor = read("/proc/cpuinfo")
            .lines()
            .find_map(|line| {
                line.strip_prefix("model name")?.split_once(':').map(|(_, name)| name.trim().to_owned())
            })
            .unwrap_or_else(|| "unknown processor".to_owned());
        Self {
            kernel: read("/proc/sys/kernel/osrelease"),
            architecture: std::env::consts::ARCH,
            processor,
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            congestion_control: read("/proc/sys/net/ipv4/tcp_congestion_control"),
            hugepages_free: hotslice::memory::hugepage_pool().available(),
            transparent_hugepages: hotslice::memory::thp_mode().to_string(),
        }
    }

    pub fn text(&self) -> String {
        format!(
            "Linux {} {}, {}, {} cores; TCP congestion control {}; {} hugepages free before, transparent \
             hugepages {}",
            self.kernel,
            self.architecture,
            self.processor,
            self.cores,
            self.congestion_control,
            self.hugepages_free,
            self.transparent_hugepages
        )
    }
}
