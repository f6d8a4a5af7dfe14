//! NUMA nodes of the host that the guest sees: those of its pinned CPUs, each with a part of its memory. Pure.

use std::collections::BTreeMap;

use thiserror::Error;

use super::{host_topology::HostCell, xml::Element};

/// Failure to give a guest the NUMA nodes of its CPUs.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub(crate) enum NumaError {
    #[error("passing through a numa topology is restricted to VMIs with hugepages enabled")]
    NoHugePages,
    #[error("no vCPU is pinned")]
    NoPins,
    #[error("vcpu {vcpu} is mapped to a not existing host cpu set {cpu}")]
    NoNode { vcpu: usize, cpu: u32 },
    #[error("{memory} bytes of memory are less than one huge page of {page} bytes for each of {cells} NUMA nodes")]
    TooSmall { memory: u64, page: u64, cells: usize },
    #[error("{memory} bytes of memory are no multiple of huge pages of {page} bytes")]
    NotAligned { memory: u64, page: u64 },
}

/// A cell of the guest.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Cell {
    /// The node of the host.
    host: u32,
    vcpus: Vec<usize>,
    /// Bytes.
    memory: u64,
    /// Distance to each cell of the guest.
    distances: Vec<Option<u32>>,
}

/// The cells of a guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Numa {
    cells: Vec<Cell>,
}

impl Numa {
    /// Returns a cell for each node of the host on which vCPUs run. `pins` is the CPU of each vCPU, `most` the number of vCPUs with
    /// those that can be plugged later. Memory is divided evenly, in whole pages; the first cells have what is left.
    pub(crate) fn new(
        nodes: &[HostCell],
        pins: &[u32],
        most: usize,
        memory: u64,
        page: u64,
    ) -> Result<Self, NumaError> {
        let mut of_node: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for (vcpu, cpu) in pins.iter().enumerate() {
            let node = nodes.iter().position(|node| node.cpus.iter().any(|known| known.id == *cpu));
            of_node.entry(node.ok_or(NumaError::NoNode { vcpu, cpu: *cpu })?).or_default().push(vcpu);
        }
        // libvirt puts vCPUs that no cell names there as well.
        if let Some(mut first) = of_node.first_entry() {
            first.get_mut().extend(pins.len()..most);
        }
        let cells = of_node.len();
        let (pages, rest) = (memory.checked_div(page).unwrap_or(0), memory.checked_rem(page).unwrap_or(0));
        let count = u64::try_from(cells).unwrap_or(u64::MAX);
        let share = pages.checked_div(count).ok_or(NumaError::NoPins)?;
        if share == 0 {
            return Err(NumaError::TooSmall { memory, page, cells });
        }
        if rest != 0 {
            return Err(NumaError::NotAligned { memory, page });
        }
        let more = pages - share * count;
        let hosts: Vec<u32> = of_node.keys().filter_map(|node| Some(nodes.get(*node)?.id)).collect();
        let cells = of_node.into_iter().zip(0_u64..).filter_map(|((node, vcpus), index)| {
            let node = nodes.get(node)?;
            let memory = (share + u64::from(index < more)) * page;
            let distance = |host: &u32| Some(node.distances.iter().find(|to| to.id == *host)?.value);
            let distances = hosts.iter().map(distance).collect();
            Some(Cell { host: node.id, vcpus, memory, distances })
        });
        Ok(Self { cells: cells.collect() })
    }

    /// Renders the cells as the guest sees them.
    pub(super) fn cells(&self) -> Element {
        let sibling = |(id, distance): (usize, Option<u32>)| {
            Some(Element::new("sibling").with("id", id.to_string()).with("value", distance?.to_string()))
        };
        let cell = |(id, cell): (usize, &Cell)| {
            let distances: Vec<Element> = cell.distances.iter().copied().enumerate().filter_map(sibling).collect();
            let distances = (!distances.is_empty()).then(|| Element::new("distances").children(distances));
            Element::new("cell")
                .with("id", id.to_string())
                .with("cpus", list(cell.vcpus.iter()))
                .with("memory", cell.memory.to_string())
                .with("unit", "b")
                .children(distances)
        };
        Element::new("numa").children(self.cells.iter().enumerate().map(cell))
    }

    /// Renders the nodes of the host from which the cells have their memory.
    pub(super) fn tune(&self) -> Element {
        let strict = |element: &'static str| Element::new(element).with("mode", "strict");
        let of_cell = |(id, cell): (usize, &Cell)| {
            Element::new("memnode")
                .with("cellid", id.to_string())
                .with("mode", "strict")
                .with("nodeset", cell.host.to_string())
        };
        Element::new("numatune")
            .child(strict("memory").with("nodeset", list(self.cells.iter().map(|cell| cell.host))))
            .children(self.cells.iter().enumerate().map(of_cell))
    }
}

fn list(numbers: impl Iterator<Item = impl ToString>) -> String {
    numbers.map(|number| number.to_string()).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::host_topology::{HostCpu, HostDistance};

    const MIB: u64 = 1 << 20;
    const PAGE: u64 = 2 * MIB;

    fn nodes() -> Vec<HostCell> {
        let node = |id: u32, cpus: &[u32], distances: [u32; 3]| {
            let cpus = cpus.iter().map(|id| HostCpu { id: *id, siblings: vec![*id] }).collect();
            let distances = [0, 1, 4].into_iter().zip(distances).map(|(id, value)| HostDistance { id, value });
            HostCell { id, cpus, distances: distances.collect() }
        };
        vec![node(0, &[0, 2], [10, 21, 31]), node(1, &[1, 3], [21, 10, 32]), node(4, &[4, 5], [31, 32, 10])]
    }

    #[test]
    fn guest_has_a_cell_for_each_node_of_its_cpus() {
        // CPUs of the vCPUs and memory; node, vCPUs and memory of each cell.
        for (pins, memory, expected) in [
            (&[3][..], 64, vec![(1, vec![0], 64)]),
            (&[0, 2], 64, vec![(0, vec![0, 1], 64)]),
            (&[4, 0, 5], 66, vec![(0, vec![1], 34), (4, vec![0, 2], 32)]),
            (&[5, 3, 0], 70, vec![(0, vec![2], 24), (1, vec![1], 24), (4, vec![0], 22)]),
        ] {
            let numa = Numa::new(&nodes(), pins, pins.len(), memory * MIB, PAGE).unwrap();
            let cells: Vec<_> = numa.cells.into_iter().map(|cell| (cell.host, cell.vcpus, cell.memory / MIB)).collect();
            assert_eq!(cells, expected, "{pins:?}");
        }
    }

    #[test]
    fn what_the_host_cannot_give_is_named() {
        for (pins, memory, error) in [
            (&[][..], 64 * MIB, NumaError::NoPins),
            (&[0, 7], 64 * MIB, NumaError::NoNode { vcpu: 1, cpu: 7 }),
            (&[0, 1], PAGE, NumaError::TooSmall { memory: PAGE, page: PAGE, cells: 2 }),
            (&[0], 3 * MIB, NumaError::NotAligned { memory: 3 * MIB, page: PAGE }),
        ] {
            assert_eq!(Numa::new(&nodes(), pins, 2, memory, PAGE), Err(error), "{pins:?}");
        }
    }

    #[test]
    fn cells_and_their_nodes_become_xml() {
        let numa = Numa::new(&nodes(), &[4, 0], 4, 64 * MIB, PAGE).unwrap();
        let lines = |xml: String| xml.lines().map(str::trim).collect::<String>();
        assert_eq!(
            lines(numa.cells().to_xml()),
            "<numa><cell id='0' cpus='1,2,3' memory='33554432' unit='b'><distances><sibling id='0' value='10'/>\
             <sibling id='1' value='31'/></distances></cell><cell id='1' cpus='0' memory='33554432' unit='b'><distances>\
             <sibling id='0' value='31'/><sibling id='1' value='10'/></distances></cell></numa>"
        );
        assert_eq!(
            lines(numa.tune().to_xml()),
            "<numatune><memory mode='strict' nodeset='0,4'/><memnode cellid='0' mode='strict' nodeset='0'/>\
             <memnode cellid='1' mode='strict' nodeset='4'/></numatune>"
        );
    }
}
