//! The NUMA nodes of devices and of CPUs, as the kernel reports them in `/sys`.

use std::fs;

use crate::sys::numa::{allowed_cpus, bind_thread_to};

/// Returns the node that a device is attached to, by its PCI bus id such as `0000:C1:00.0`. None if
/// the machine has no nodes.
pub fn node_of_pci(id: &str) -> Option<usize> {
    let id = id.to_ascii_lowercase();
    let node = fs::read_to_string(format!("/sys/bus/pci/devices/{id}/numa_node")).ok()?;
    // -1 if the firmware does not report it.
    node.trim().parse().ok()
}

/// The CPUs to which the readers of a load are bound: those of the nodes that its devices are
/// attached to.
#[derive(Debug, Default)]
pub struct Affinity {
    /// Nodes, each with those of its CPUs on which this process may run.
    nodes: Vec<(usize, Vec<usize>)>,
    /// The number of CPUs on which this process may run.
    allowed: usize,
}

impl Affinity {
    /// Returns the affinity for devices on these nodes.
    pub fn of(nodes: impl Iterator<Item = Option<usize>>) -> Self {
        let mut device_nodes: Vec<usize> = nodes.flatten().collect();
        device_nodes.sort_unstable();
        device_nodes.dedup();
        let allowed = if device_nodes.is_empty() {
            Vec::new()
        } else {
            allowed_cpus().unwrap_or_else(|_| Vec::new())
        };
        let nodes = device_nodes.into_iter().map(|node| {
            let cpus = cpus_of(node).into_iter().filter(|cpu| allowed.contains(cpu));
            (node, cpus.collect())
        });
        Affinity { nodes: nodes.collect(), allowed: allowed.len() }
    }

    /// Returns the node of a reader, if there are several: readers are distributed over the nodes
    /// in turn.
    pub fn node(&self, reader: usize) -> Option<usize> {
        let several = self.nodes.len() > 1;
        let (node, _) = self.nodes.get(reader.checked_rem(self.nodes.len())?)?;
        several.then_some(*node)
    }

    /// Returns the CPUs to which a reader is bound; none if it may run on all. A node gets no more
    /// readers than it has CPUs; further readers are not bound.
    fn cpus(&self, reader: usize) -> &[usize] {
        let Some(turn) = reader.checked_rem(self.nodes.len()) else { return &[] };
        let Some((_, cpus)) = self.nodes.get(turn) else { return &[] };
        let has_own_cpu = reader / self.nodes.len() < cpus.len();
        if has_own_cpu && cpus.len() < self.allowed { cpus } else { &[] }
    }

    /// Binds this thread to the CPUs of its node. It must be a reader thread, which ends with its
    /// call.
    pub fn bind_thread(&self, reader: usize) {
        let cpus = self.cpus(reader);
        if !cpus.is_empty() {
            let _ = bind_thread_to(cpus);
        }
    }
}

/// Returns the CPUs of a node; none if that is not known.
fn cpus_of(node: usize) -> Vec<usize> {
    let path = format!("/sys/devices/system/node/node{node}/cpulist");
    fs::read_to_string(path).map_or_else(|_| Vec::new(), |list| parse_cpu_list(&list))
}

/// Parses a list of CPUs such as `0-3,8`. Malformed parts are ignored.
fn parse_cpu_list(list: &str) -> Vec<usize> {
    /// The highest CPU number that is accepted; no kernel has more CPUs.
    const MOST: usize = 1 << 16;
    let mut cpus = Vec::new();
    for range in list.trim().split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        if let (Ok(first), Ok(last)) = (first.parse::<usize>(), last.parse::<usize>()) {
            cpus.extend(first..=last.min(MOST));
        }
    }
    cpus
}

#[cfg(all(test, not(feature = "models")))]
mod tests {
    use super::*;

    #[test]
    fn cpu_lists_are_parsed() {
        for (list, cpus) in [
            ("0-3,8\n", vec![0, 1, 2, 3, 8]),
            ("5", vec![5]),
            ("", vec![]),
            ("\n", vec![]),
            ("3-1,x,7-,2", vec![2]),
        ] {
            assert_eq!(parse_cpu_list(list), cpus, "{list:?}");
        }
        assert_eq!(parse_cpu_list("0-18446744073709551615").len(), (1 << 16) + 1);
    }

    #[test]
    fn readers_take_turns_among_nodes_as_long_as_these_have_cpus() {
        let affinity = Affinity { nodes: vec![(0, vec![0, 1]), (2, vec![4, 5, 6])], allowed: 8 };
        let cpus = |reader| affinity.cpus(reader).to_vec();
        assert_eq!(
            (0..4).map(|reader| affinity.node(reader)).collect::<Vec<_>>(),
            [Some(0), Some(2), Some(0), Some(2)]
        );
        assert_eq!([cpus(0), cpus(1), cpus(2)], [vec![0, 1], vec![4, 5, 6], vec![0, 1]]);
        // The third reader of node 0 runs anywhere, the third of node 2 does not.
        assert_eq!([cpus(4), cpus(5), cpus(7)], [vec![], vec![4, 5, 6], vec![]]);
    }

    #[test]
    fn readers_are_not_bound_on_a_machine_with_one_node() {
        let all = Affinity { nodes: vec![(0, vec![0, 1])], allowed: 2 };
        assert!(all.cpus(0).is_empty() && all.node(0).is_none());
        let none = Affinity::default();
        assert!(none.cpus(0).is_empty() && none.node(0).is_none());
        // A node without CPUs that this process may use.
        let elsewhere = Affinity { nodes: vec![(1, vec![])], allowed: 2 };
        assert!(elsewhere.cpus(0).is_empty());
    }
}
