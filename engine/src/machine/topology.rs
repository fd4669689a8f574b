//! NUMA nodes and the cores on them.

use super::{Machine, parse_list};

/// One NUMA node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// Its number.
    pub number: u32,
    /// Its cores, in ascending order; none for a node of memory alone.
    pub cores: Vec<usize>,
}

/// The nodes of a machine. Empty if the kernel does not say.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Topology {
    nodes: Vec<Node>,
}

impl Machine {
    /// The nodes that are online. Blocking.
    pub fn topology(&self) -> Topology {
        let base = "sys/devices/system/node";
        let online = self.read(format!("{base}/online")).and_then(|text| parse_list(&text));
        let node = |number: usize| {
            let cores = self.read(format!("{base}/node{number}/cpulist"));
            let cores = cores.and_then(|text| parse_list(&text)).unwrap_or_default();
            Some(Node { number: u32::try_from(number).ok()?, cores })
        };
        Topology::new(online.unwrap_or_default().into_iter().filter_map(node).collect())
    }
}

impl Topology {
    /// Of these nodes.
    pub fn new(nodes: Vec<Node>) -> Self {
        Self { nodes }
    }

    /// The nodes, in ascending order.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// The node that a core is on.
    pub fn node_of(&self, core: usize) -> Option<u32> {
        self.nodes.iter().find(|node| node.cores.contains(&core)).map(|node| node.number)
    }

    /// The node that all of these cores are on, if it is one.
    pub fn common_node(&self, cores: &[usize]) -> Option<u32> {
        let first = self.node_of(*cores.first()?)?;
        cores.iter().all(|&core| self.node_of(core) == Some(first)).then_some(first)
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::Fixture;
    use super::*;

    #[test]
    fn two_nodes_are_read() {
        let files = [
            ("sys/devices/system/node/online", "0-1\n"),
            ("sys/devices/system/node/node0/cpulist", "0-3,8-11\n"),
            ("sys/devices/system/node/node1/cpulist", "4-7,12-15\n"),
        ];
        let fixture = Fixture::new("two-nodes", &files);
        let topology = fixture.0.topology();
        assert_eq!(topology.nodes().len(), 2);
        assert_eq!(
            [0, 9, 4, 15, 16].map(|core| topology.node_of(core)),
            [Some(0), Some(0), Some(1), Some(1), None]
        );
        assert_eq!(topology.common_node(&[0, 11]), Some(0));
        assert_eq!(topology.common_node(&[0, 4]), None);
        assert_eq!(topology.common_node(&[]), None);
    }

    #[test]
    fn a_node_without_cores_and_a_kernel_without_nodes_are_no_trouble() {
        let files = [
            ("sys/devices/system/node/online", "0,2"),
            ("sys/devices/system/node/node0/cpulist", "0-1"),
            ("sys/devices/system/node/node2/cpulist", "\n"),
        ];
        let fixture = Fixture::new("memory-node", &files);
        let node = |number, cores: &[usize]| Node { number, cores: cores.to_vec() };
        assert_eq!(fixture.0.topology().nodes(), [node(0, &[0, 1]), node(2, &[])]);
        assert_eq!(Fixture::new("no-nodes", &[]).0.topology(), Topology::default());
    }

    #[test]
    fn this_machine_has_every_allowed_core_on_a_node_if_it_has_nodes() {
        let topology = Machine::here().topology();
        if topology.nodes().is_empty() {
            return eprintln!("skipped: the kernel names no nodes");
        }
        for core in super::super::cores::allowed().unwrap() {
            assert!(topology.node_of(core).is_some(), "core {core} in {topology:?}");
        }
    }
}
