//! Assigns the CPUs of the pod to the threads of a domain: vCPUs, I/O threads and the emulator. Pure.
//!
//! The order is that of the reference: vCPUs first, whole cores before what is left of others, one NUMA cell after the other;
//! then the I/O threads of a supplemental pool; then the emulator. I/O threads of another policy have no CPU of their own: they
//! share those of the emulator, or else those of the vCPUs.

use std::collections::{BTreeSet, VecDeque};

use api::VirtualMachineInstance;
use thiserror::Error;

use super::{host_topology::HostTopology, numa::Numa, xml::Element};

/// Most bytes of a topology that another launcher has reported.
pub(crate) const TOPOLOGY_LIMIT: usize = 256 << 10;

/// Reason why the CPUs of the pod do not suffice.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub(crate) enum PinningError {
    /// Too few CPUs for the vCPUs.
    #[error("not enough exclusive threads provided, could not fit {0} core(s)")]
    TooFew(u32),
    /// A core of the guest would lie in two NUMA cells, which the mapped topology does not allow.
    #[error("could not fit {0} core(s) without crossing numa cell boundaries for individual cores")]
    CrossesCells(u32),
    /// No CPU is left for a thread.
    #[error("no {0}: no remaining unassigned threads")]
    NoneLeft(&'static str),
    /// The CPUs of the pod cannot be read.
    #[error("cannot read the CPUs of the pod: {0}")]
    Unreadable(String),
    /// Not a list of vCPUs.
    #[error("real-time mask {0:?} is no list of vCPUs")]
    Mask(String),
    /// The target of a migration has not reported them.
    #[error("the target of the migration has not reported the CPUs of its pod")]
    Unreported,
}

/// The CPUs of a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct HostCpus {
    /// CPUs that the pod may use.
    pub(crate) cpuset: BTreeSet<u32>,
    pub(crate) topology: HostTopology,
}

impl HostCpus {
    /// Returns the form in which another launcher gets them.
    pub(crate) fn report(&self) -> (Vec<u32>, String) {
        (self.cpuset.iter().copied().collect(), serde_json::to_string(&self.topology).unwrap_or_default())
    }

    /// Returns the CPUs of the target's pod from the status of a VMI that migrates.
    pub(crate) fn of_target(vmi: &VirtualMachineInstance) -> Result<Self, PinningError> {
        let state = vmi.status.as_ref().and_then(|status| status.migration_state.as_ref());
        let state = state.ok_or(PinningError::Unreported)?;
        let cpuset = state.target_cpu_set.iter().filter_map(|cpu| u32::try_from(*cpu).ok()).collect();
        let topology = state.target_node_topology.as_deref().filter(|text| text.len() <= TOPOLOGY_LIMIT);
        let topology = topology.and_then(|text| serde_json::from_str(text).ok()).ok_or(PinningError::Unreported)?;
        Ok(Self { cpuset, topology })
    }
}

/// Threads that need CPUs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Demand {
    /// Cores of the guest, and threads of each.
    pub(crate) cores: u32,
    pub(crate) threads: u32,
    /// I/O threads with a CPU of their own.
    pub(crate) pool: u32,
    /// Other I/O threads.
    pub(crate) shared: u32,
    /// CPUs of the emulator; 0: it shares those of the vCPUs.
    pub(crate) emulator: u32,
    /// Each core of the guest lies within one NUMA cell.
    pub(crate) strict: bool,
}

/// CPUs of threads.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Pinning {
    /// The CPU of each vCPU.
    pub(crate) vcpus: Vec<u32>,
    /// The CPUs of each I/O thread; they count from 1.
    pub(crate) io_threads: Vec<Vec<u32>>,
    /// The CPUs of the emulator; none: it is not pinned.
    pub(crate) emulator: Vec<u32>,
    /// vCPUs with real-time scheduling, in libvirt's syntax of lists.
    pub(crate) realtime: Option<String>,
    /// Cells of a guest that sees the NUMA nodes of its CPUs.
    pub(crate) numa: Option<Numa>,
}

impl Pinning {
    /// Renders the `<cputune>` element.
    pub(crate) fn element(&self) -> Element {
        let list = |cpus: &[u32]| cpus.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
        let vcpus = (0_u32..)
            .zip(&self.vcpus)
            .map(|(vcpu, cpu)| Element::new("vcpupin").with("vcpu", vcpu.to_string()).with("cpuset", cpu.to_string()));
        let emulator = Element::new("emulatorpin").with("cpuset", list(&self.emulator));
        let io_threads = (1_u32..).zip(&self.io_threads).map(|(thread, cpus)| {
            Element::new("iothreadpin").with("iothread", thread.to_string()).with("cpuset", list(cpus))
        });
        Element::new("cputune")
            .children(vcpus)
            .children((!self.emulator.is_empty()).then_some(emulator))
            .children(io_threads)
            .children(self.realtime.as_ref().map(|vcpus| {
                Element::new("vcpusched").with("vcpus", vcpus).with("scheduler", "fifo").with("priority", "1")
            }))
    }
}

/// CPUs that are not assigned: the threads of one core each.
type Group = Vec<u32>;

/// CPUs that are not assigned, by cell.
#[derive(Debug, Default)]
struct Pool {
    cells: Vec<Free>,
}

#[derive(Debug, Default)]
struct Free {
    /// Cores with enough threads for one of the guest.
    full: VecDeque<Group>,
    /// Threads of other cores.
    fragments: VecDeque<u32>,
}

impl Pool {
    fn new(host: &HostCpus, threads: usize) -> Self {
        let mut known = BTreeSet::<u32>::new();
        let mut cells = Vec::new();
        for cell in &host.topology.numa.cells {
            let mut free = Free::default();
            for cpu in cell.cpus.iter().filter(|cpu| host.cpuset.contains(&cpu.id)) {
                let own = std::iter::once(cpu.id).chain(cpu.siblings.iter().copied());
                let group: BTreeSet<u32> = own.filter(|id| host.cpuset.contains(id) && !known.contains(id)).collect();
                known.extend(&group);
                free.put_back(group.into_iter().collect(), threads);
            }
            cells.push(free);
        }
        Self { cells }
    }

    /// Takes the threads of `cores` cores of the guest.
    fn take_cores(&mut self, cores: u32, threads: usize, strict: bool) -> Result<Vec<u32>, PinningError> {
        let mut left = cores;
        let mut taken = Vec::new();
        for cell in &mut self.cells {
            while left > 0
                && let Some(mut group) = cell.full.pop_front()
            {
                let rest = group.split_off(threads.min(group.len()));
                taken.extend(group);
                cell.put_back(rest, threads);
                left -= 1;
            }
        }
        for cell in &mut self.cells {
            while left > 0 && cell.fragments.len() >= threads {
                taken.extend(cell.fragments.drain(..threads));
                left -= 1;
            }
        }
        if left > 0 && strict {
            return Err(PinningError::CrossesCells(left));
        }
        while left > 0 {
            let mut rest: Vec<u32> =
                self.cells.iter().flat_map(|cell| &cell.fragments).copied().take(threads).collect();
            if rest.len() < threads {
                return Err(PinningError::TooFew(left));
            }
            self.cells.iter_mut().for_each(|cell| cell.fragments.retain(|cpu| !rest.contains(cpu)));
            taken.append(&mut rest);
            left -= 1;
        }
        Ok(taken)
    }

    /// Takes one CPU, of a core that is not whole if there is one.
    fn take_one(&mut self) -> Option<u32> {
        if let Some(cell) = self.cells.iter_mut().find(|cell| !cell.fragments.is_empty()) {
            return cell.fragments.pop_front();
        }
        let cell = self.cells.iter_mut().find(|cell| !cell.full.is_empty())?;
        let mut group: VecDeque<u32> = cell.full.pop_front()?.into();
        let one = group.pop_front();
        cell.fragments.extend(group);
        one
    }
}

impl Free {
    /// Keeps the threads of a core for later.
    fn put_back(&mut self, group: Group, threads: usize) {
        if group.len() >= threads {
            self.full.push_front(group);
        } else {
            self.fragments.extend(group);
        }
    }
}

/// Assigns the CPUs of a pod.
pub(crate) fn assign(host: &HostCpus, demand: &Demand) -> Result<Pinning, PinningError> {
    let threads = usize::try_from(demand.threads.max(1)).unwrap_or(usize::MAX);
    let mut pool = Pool::new(host, threads);
    pool.cells.iter_mut().for_each(|cell| cell.full.make_contiguous().sort());
    let vcpus = pool.take_cores(demand.cores.max(1), threads, demand.strict)?;
    let mut one = |thread: &'static str| pool.take_one().ok_or(PinningError::NoneLeft(thread));
    let mut io_threads = Vec::new();
    for _ in 0..demand.pool {
        io_threads.push(vec![one("CPU allocated for the iothread")?]);
    }
    let mut emulator = Vec::new();
    for _ in 0..demand.emulator {
        emulator.push(one(match emulator.len() {
            0 => "CPU allocated for the emulation thread",
            _ => "second CPU allocated for the emulation thread",
        })?);
    }
    let of_others = if emulator.is_empty() { &vcpus } else { &emulator };
    io_threads.extend(shares(of_others, demand.shared, !emulator.is_empty()));
    Ok(Pinning { vcpus, io_threads, emulator, realtime: None, numa: None })
}

/// Distributes CPUs over threads. With more CPUs than threads each thread gets a part, of sizes that differ by one at most.
fn shares(cpus: &[u32], threads: u32, together: bool) -> Vec<Vec<u32>> {
    let count = usize::try_from(threads).unwrap_or(usize::MAX);
    if together {
        return vec![cpus.to_vec(); count];
    }
    if count >= cpus.len() {
        return cpus.iter().cycle().take(count).map(|cpu| vec![*cpu]).collect();
    }
    let (each, more) = (cpus.len() / count.max(1), cpus.len() % count.max(1));
    let mut rest = cpus;
    let part = |thread: usize| {
        let (part, after) = rest.split_at(each + usize::from(thread < more));
        rest = after;
        part.to_vec()
    };
    (0..count).map(part).collect()
}

/// Parses the kernel's list of CPUs: `0-2,5`.
pub(crate) fn parse_list(text: &str) -> Option<BTreeSet<u32>> {
    /// Most CPUs of a kernel.
    const MOST: u32 = 8192;
    let mut cpus = BTreeSet::new();
    for part in text.trim().split(',').filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (u32, u32) = (first.parse().ok()?, last.parse().ok()?);
        if last >= MOST {
            return None;
        }
        cpus.extend(first..=last);
    }
    Some(cpus)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::host_topology::{HostCell, HostCpu, HostNuma};

    /// Cells of cores, each the list of its threads.
    fn host(cpuset: &str, cells: &[&[&[u32]]]) -> HostCpus {
        let cells = (0_u32..).zip(cells).map(|(id, cores)| {
            let threads = |core: &&[u32]| core.iter().map(|id| (*id, core.to_vec())).collect::<Vec<_>>();
            let mut cpus: Vec<(u32, Vec<u32>)> = cores.iter().flat_map(threads).collect();
            cpus.sort();
            let cpus = cpus.into_iter().map(|(id, siblings)| HostCpu { id, siblings }).collect();
            HostCell { id, cpus, distances: Vec::new() }
        });
        let topology = HostTopology { numa: HostNuma { cells: cells.collect() } };
        HostCpus { cpuset: parse_list(cpuset).unwrap(), topology }
    }

    /// Two cells of four cores with two threads.
    const TWO_CELLS: &[&[&[u32]]] =
        &[&[&[0, 8], &[1, 9], &[2, 10], &[3, 11]], &[&[4, 12], &[5, 13], &[6, 14], &[7, 15]]];

    #[test]
    fn whole_cores_go_first_and_cells_in_order() {
        let demand = |cores, threads| Demand { cores, threads, ..Demand::default() };
        let cases: &[(&str, Demand, &[u32])] = &[
            ("0-15", demand(2, 2), &[0, 8, 1, 9]),
            // Threads of a core stay together, also as cores of the guest.
            ("0-15", demand(4, 1), &[0, 8, 1, 9]),
            ("1,4,12", demand(1, 2), &[4, 12]),
            ("1,4,12", demand(3, 1), &[1, 4, 12]),
            // Two halves of cores of one cell are a core of the guest if there is no better one.
            ("0-3", demand(2, 2), &[0, 1, 2, 3]),
            ("0,1,4,12", demand(2, 2), &[4, 12, 0, 1]),
            // And at last of two cells.
            ("0,4", demand(1, 2), &[0, 4]),
            ("5", demand(0, 0), &[5]),
        ];
        for (cpuset, demand, expected) in cases {
            assert_eq!(assign(&host(cpuset, TWO_CELLS), demand).unwrap().vcpus, *expected, "{cpuset} {demand:?}");
        }
    }

    #[test]
    fn missing_cpus_are_named() {
        let demand = Demand { cores: 2, threads: 2, ..Demand::default() };
        for (cpuset, demand, expected) in [
            ("0,8,1", demand, "not enough exclusive threads provided, could not fit 1 core(s)"),
            ("", demand, "not enough exclusive threads provided, could not fit 2 core(s)"),
            (
                "0,8,1,4",
                Demand { strict: true, ..demand },
                "could not fit 1 core(s) without crossing numa cell boundaries for individual cores",
            ),
            (
                "0,8,1,9",
                Demand { emulator: 1, ..demand },
                "no CPU allocated for the emulation thread: no remaining unassigned threads",
            ),
            (
                "0,8,1,9,2",
                Demand { emulator: 2, ..demand },
                "no second CPU allocated for the emulation thread: no remaining unassigned threads",
            ),
            (
                "0,8,1,9,2",
                Demand { pool: 2, ..demand },
                "no CPU allocated for the iothread: no remaining unassigned threads",
            ),
        ] {
            assert_eq!(assign(&host(cpuset, TWO_CELLS), &demand).unwrap_err().to_string(), expected, "{cpuset}");
        }
    }

    /// CPUs of the pod, demand, and the CPUs of each I/O thread and of the emulator.
    type Case<'a> = (&'a str, Demand, &'a [&'a [u32]], &'a [u32]);

    #[test]
    fn other_threads_have_own_cpus_or_share_those_of_vcpus() {
        let plain = Demand { cores: 2, threads: 1, ..Demand::default() };
        let cases: &[Case<'_>] = &[
            ("0-1", plain, &[], &[]),
            ("0-3", Demand { pool: 1, emulator: 1, ..plain }, &[&[2]], &[3]),
            ("0-3", Demand { emulator: 2, ..plain }, &[], &[2, 3]),
            // The rest of a core goes before a whole one.
            ("0-2,8,9,10", Demand { cores: 1, threads: 1, emulator: 1, ..plain }, &[], &[8]),
            ("0-3", Demand { shared: 2, emulator: 2, ..plain }, &[&[2, 3], &[2, 3]], &[2, 3]),
            ("0-1", Demand { shared: 3, ..plain }, &[&[0], &[1], &[0]], &[]),
            ("0-1", Demand { shared: 1, ..plain }, &[&[0, 1]], &[]),
            ("0-3", Demand { cores: 4, shared: 3, ..plain }, &[&[0, 1], &[2], &[3]], &[]),
        ];
        for (cpuset, demand, io_threads, emulator) in cases {
            let pinning = assign(&host(cpuset, TWO_CELLS), demand).unwrap();
            assert_eq!(
                (pinning.io_threads, pinning.emulator),
                (io_threads.iter().map(|l| l.to_vec()).collect(), emulator.to_vec()),
                "{cpuset} {demand:?}"
            );
        }
    }

    #[test]
    fn every_thread_of_the_domain_is_pinned() {
        let realtime = Some("0-1".to_owned());
        let pinning =
            Pinning { vcpus: vec![3, 1], io_threads: vec![vec![5]], emulator: vec![2, 4], realtime, numa: None };
        let expected = "<cputune>\n  <vcpupin vcpu='0' cpuset='3'/>\n  <vcpupin vcpu='1' cpuset='1'/>\n  \
                        <emulatorpin cpuset='2,4'/>\n  <iothreadpin iothread='1' cpuset='5'/>\n  \
                        <vcpusched vcpus='0-1' scheduler='fifo' priority='1'/>\n</cputune>\n";
        assert_eq!(pinning.element().to_xml(), expected);
    }

    #[test]
    fn cpus_of_a_target_arrive_by_the_status() {
        let sent = host("1,3", &[&[&[1, 3]]]);
        let (cpus, topology) = sent.report();
        assert_eq!(
            topology,
            r#"{"numa":{"cells":[{"id":0,"cpus":[{"id":1,"siblings":[1,3]},{"id":3,"siblings":[1,3]}],"distances":[]}]}}"#
        );
        let vmi = |state: serde_json::Value| -> VirtualMachineInstance {
            let status = serde_json::json!({"migrationState": state});
            let vmi = serde_json::json!({"metadata": {}, "spec": {"domain": {"devices": {}}}, "status": status});
            serde_json::from_value(vmi).unwrap()
        };
        let state = serde_json::json!({"targetCPUSet": cpus, "targetNodeTopology": topology});
        assert_eq!(HostCpus::of_target(&vmi(state)), Ok(sent));
        for state in [
            serde_json::json!({}),
            serde_json::json!({"targetCPUSet": [1], "targetNodeTopology": "{"}),
            serde_json::json!({"targetCPUSet": [1], "targetNodeTopology": " ".repeat(TOPOLOGY_LIMIT + 1)}),
        ] {
            assert_eq!(HostCpus::of_target(&vmi(state)), Err(PinningError::Unreported));
        }
    }

    #[test]
    fn lists_of_the_kernel_are_parsed() {
        for (text, expected) in [
            ("0-2,5\n", Some(vec![0, 1, 2, 5])),
            ("", Some(vec![])),
            ("7", Some(vec![7])),
            ("a", None),
            ("0-4294967295", None),
        ] {
            assert_eq!(parse_list(text), expected.map(|cpus| cpus.into_iter().collect()), "{text}");
        }
    }
}
