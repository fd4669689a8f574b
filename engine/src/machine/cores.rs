//! Cores: which this process may use, which to choose, and pinning.

use super::Topology;
use crate::Result;

/// The cores that the calling thread may run on: its affinity mask, which a cpuset narrows. In ascending order.
pub(crate) fn allowed() -> Result<Vec<usize>> {
    // SAFETY: all-zero bytes are a valid, empty set.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: passes the address and size of a local.
    if unsafe { libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &mut set) } != 0 {
        return Err(crate::error::system("sched_getaffinity"));
    }
    // SAFETY: reads a local; the index is below CPU_SETSIZE.
    Ok((0..libc::CPU_SETSIZE as usize).filter(|&core| unsafe { libc::CPU_ISSET(core, &set) }).collect())
}

/// Keeps the calling thread on one core.
pub(crate) fn pin_to(core: usize) -> std::io::Result<()> {
    // SAFETY: all-zero bytes are a valid, empty set.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: writes a local; `core` came from a set of this size.
    unsafe { libc::CPU_SET(core, &mut set) };
    // SAFETY: passes the address and size of a local.
    match unsafe { libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &set) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

/// `count` of the allowed cores, from each node in turn, so that every node's memory and channels are used alike.
/// With one node, or none known, simply the first. Fewer if there are fewer.
pub(crate) fn spread(allowed: &[usize], topology: &Topology, count: usize) -> Vec<usize> {
    let mut groups: Vec<Vec<usize>> = topology
        .nodes()
        .iter()
        .map(|node| allowed.iter().copied().filter(|core| node.cores.contains(core)).collect())
        .collect();
    // Cores that are on no known node come last.
    groups.push(allowed.iter().copied().filter(|&core| topology.node_of(core).is_none()).collect());
    let (homeless, groups) = (groups.pop().unwrap_or_default(), groups);
    let rounds = groups.iter().map(Vec::len).max().unwrap_or(0);
    let in_turn =
        (0..rounds).flat_map(|round| groups.iter().filter_map(move |cores| cores.get(round).copied()));
    in_turn.chain(homeless).take(count).collect()
}

#[cfg(test)]
mod tests {
    use super::super::Node;
    use super::*;

    #[test]
    fn cores_are_taken_from_each_node_in_turn() {
        let node = |number, cores: std::ops::Range<usize>| Node { number, cores: cores.collect() };
        let two = Topology::new(vec![node(0, 0..4), node(1, 4..8)]);
        let all: Vec<usize> = (0..8).collect();
        assert_eq!(spread(&all, &two, 3), [0, 4, 1]);
        assert_eq!(spread(&all, &two, 9), [0, 4, 1, 5, 2, 6, 3, 7]);
        // A cpuset that leaves one core of the first node.
        assert_eq!(spread(&[2, 4, 5, 6], &two, 4), [2, 4, 5, 6]);
        assert_eq!(spread(&[4, 5], &two, 2), [4, 5]);
        assert_eq!(spread(&[1, 3], &Topology::default(), 2), [1, 3]);
        assert_eq!(spread(&[1, 9], &Topology::new(vec![node(0, 0..2)]), 2), [1, 9]);
    }
}
