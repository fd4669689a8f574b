//! Where shards run: a core and a NUMA node for each, and what is to be said about it. No system calls.

use crate::config::Config;
use crate::machine::{CpuQuota, Topology, cores};
use crate::{Error, Result};

/// A place for every shard.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Placement {
    /// Core to pin each shard to, or none where pinning would only get in the way.
    pub(super) cores: Vec<Option<usize>>,
    /// The node of each shard's core, or the one that all cores it may run on are on.
    pub(super) nodes: Vec<Option<u32>>,
    /// Idle shards must not poll: it would keep their only core from the callers that they wait for.
    pub(super) no_spinning: bool,
    pub(super) warnings: Vec<String>,
}

/// Places the shards of a process that may run on the `allowed` cores.
pub(super) fn place(
    config: &Config,
    allowed: &[usize],
    topology: &Topology,
    quota: Option<&CpuQuota>,
) -> Result<Placement> {
    if let Some(core) = config.cores.iter().find(|core| !allowed.contains(core)) {
        return Err(Error::Config {
            setting: "cores",
            value: core.to_string(),
            allowed: format!("cores that this process may run on: {allowed:?}"),
        });
    }
    let single = allowed.len() == 1;
    let cores: Vec<Option<usize>> = match config.cores.as_slice() {
        // There is nowhere else to go: pinning says nothing.
        _ if single => vec![None; config.shards],
        [] if config.shards <= allowed.len() => {
            cores::spread(allowed, topology, config.shards).into_iter().map(Some).collect()
        }
        [] => vec![None; config.shards],
        chosen => chosen.iter().copied().map(Some).collect(),
    };
    let node = |core: &Option<usize>| match core {
        Some(core) => topology.node_of(*core),
        None => topology.common_node(allowed),
    };
    let mut warnings = Vec::new();
    if single && config.spin_us > 0 {
        warnings.push(format!(
            "setting `spin_us` is {} and is taken for 0: this process may run on one core only ({}), and polling \
             would keep callers from it",
            config.spin_us, allowed[0]
        ));
    }
    if let Some(CpuQuota { cores: quota, file }) = quota
        && config.shards as f64 > quota.floor().max(1.0)
    {
        warnings.push(format!(
            "setting `shards` is {}, but {file} of the control group allows {quota} cores' worth of CPU time: \
             shards will be stopped for parts of every period; fewer shards or a larger quota mend it",
            config.shards
        ));
    }
    Ok(Placement { nodes: cores.iter().map(node).collect(), cores, no_spinning: single, warnings })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::Node;

    fn two_nodes() -> Topology {
        let node = |number, cores: std::ops::Range<usize>| Node { number, cores: cores.collect() };
        Topology::new(vec![node(0, 0..4), node(1, 4..8)])
    }

    fn config(shards: usize, cores: &[usize]) -> Config {
        let mut config = Config::new(1 << 30);
        (config.shards, config.cores) = (shards, cores.to_vec());
        config
    }

    #[test]
    fn shards_are_spread_over_nodes_and_know_theirs() {
        let all: Vec<usize> = (0..8).collect();
        let placement = place(&config(3, &[]), &all, &two_nodes(), None).unwrap();
        assert_eq!(placement.cores, [Some(0), Some(4), Some(1)]);
        assert_eq!(placement.nodes, [Some(0), Some(1), Some(0)]);
        assert!(placement.warnings.is_empty() && !placement.no_spinning);
        // What was chosen is what is used.
        let placement = place(&config(2, &[5, 6]), &all, &two_nodes(), None).unwrap();
        assert_eq!((placement.cores, placement.nodes), (vec![Some(5), Some(6)], vec![Some(1), Some(1)]));
        // More shards than cores roam; in a cpuset of one node they have that node all the same.
        let placement = place(&config(3, &[]), &[4, 5], &two_nodes(), None).unwrap();
        assert_eq!((placement.cores, placement.nodes), (vec![None; 3], vec![Some(1); 3]));
        assert_eq!(place(&config(9, &[]), &all, &two_nodes(), None).unwrap().nodes, [None; 9]);
    }

    #[test]
    fn cores_outside_the_mask_are_refused() {
        let error = place(&config(1, &[3]), &[0, 1], &two_nodes(), None).unwrap_err().to_string();
        assert!(error.contains("`cores` is 3") && error.contains("[0, 1]"), "{error}");
    }

    #[test]
    fn with_one_core_nothing_is_pinned_and_nothing_polls() {
        let mut config = config(2, &[6, 6]);
        config.spin_us = 50;
        let placement = place(&config, &[6], &two_nodes(), None).unwrap();
        assert_eq!((placement.cores, placement.nodes), (vec![None; 2], vec![Some(1); 2]));
        assert!(placement.no_spinning);
        assert!(placement.warnings[0].contains("`spin_us` is 50"), "{:?}", placement.warnings);
    }

    #[test]
    fn more_shards_than_cpu_time_is_a_warning_that_names_both() {
        let quota = |cores| CpuQuota { cores, file: "cpu.max".to_owned() };
        let warnings = |shards, cores| {
            place(&config(shards, &[]), &[0, 1, 2, 3], &two_nodes(), Some(&quota(cores))).unwrap().warnings
        };
        let found = warnings(3, 2.5).join("");
        for part in ["`shards` is 3", "cpu.max", "2.5 cores"] {
            assert!(found.contains(part), "{found}");
        }
        assert!(warnings(2, 2.5).is_empty() && warnings(1, 0.5).is_empty());
    }
}
