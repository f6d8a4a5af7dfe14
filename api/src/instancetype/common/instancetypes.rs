//! Common instance types: series and their sizes.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use super::{entry, mark, metadata};
use crate::{
    instancetype::spec::{
        CpuInstancetype, MemoryInstancetype, VirtualMachineClusterInstancetype, VirtualMachineClusterInstancetypeSpec,
        VirtualMachineInstancetypeSpec,
    },
    vmi::{
        cpu::{Numa, NumaGuestMappingPassthrough, Realtime},
        memory::Hugepages,
    },
};

/// Name, vCPUs and memory of a size.
type Size = (&'static str, u32, &'static str);

/// vCPUs and memory of 1:4, shared by several series.
const UNIVERSAL: &[Size] = &[
    ("nano", 1, "512Mi"),
    ("micro", 1, "1Gi"),
    ("small", 1, "2Gi"),
    ("medium", 1, "4Gi"),
    ("2xmedium", 2, "4Gi"),
    ("large", 2, "8Gi"),
    ("xlarge", 4, "16Gi"),
    ("2xlarge", 8, "32Gi"),
    ("4xlarge", 16, "64Gi"),
    ("8xlarge", 32, "128Gi"),
];
const COMPUTE: &[Size] = &[
    ("medium", 1, "2Gi"),
    ("large", 2, "4Gi"),
    ("xlarge", 4, "8Gi"),
    ("2xlarge", 8, "16Gi"),
    ("4xlarge", 16, "32Gi"),
    ("8xlarge", 32, "64Gi"),
];
const MEMORY: &[Size] = &[
    ("large", 2, "16Gi"),
    ("xlarge", 4, "32Gi"),
    ("2xlarge", 8, "64Gi"),
    ("4xlarge", 16, "128Gi"),
    ("8xlarge", 32, "256Gi"),
];
const NETWORK: &[Size] = &[
    ("medium", 4, "4Gi"),
    ("large", 4, "8Gi"),
    ("xlarge", 8, "16Gi"),
    ("2xlarge", 16, "32Gi"),
    ("4xlarge", 32, "64Gi"),
    ("8xlarge", 64, "128Gi"),
];

/// A series of instance types.
struct Series {
    name: &'static str,
    class: &'static str,
    title: &'static str,
    icon: &'static str,
    description: &'static str,
    sizes: &'static [Size],
    /// Sizes of the list that the series lacks.
    without: &'static [&'static str],
    /// Suffix of the name and huge page size of each variant.
    pages: &'static [(&'static str, Option<&'static str>)],
    /// vCPUs and emulator thread have host CPUs of their own.
    dedicated: bool,
    /// Disks share IO threads by the policy `auto`.
    io_threads: bool,
    /// The guest sees the NUMA nodes of its host CPUs.
    numa: bool,
    /// The number of sockets is final.
    fixed_sockets: bool,
    realtime: bool,
    /// CRI-O leaves the pod's CPUs undisturbed.
    quiet_cpus: bool,
    overcommit_percent: i32,
}

const PLAIN: Series = Series {
    name: "u1",
    class: "general.purpose",
    title: "General Purpose",
    icon: "pficon-server-group",
    description: "For applications of all kinds. The VM shares the CPUs of its node with others.",
    sizes: UNIVERSAL,
    without: &[],
    pages: &[("", None)],
    dedicated: false,
    io_threads: false,
    numa: false,
    fixed_sockets: false,
    realtime: false,
    quiet_cpus: false,
    overcommit_percent: 0,
};

const SERIES: &[Series] = &[
    PLAIN,
    Series {
        name: "o1",
        class: "overcommitted",
        title: "Overcommitted",
        icon: "pficon-virtual-machine",
        description: "Like U, but the VM's pod requests half of the guest's memory.",
        without: &["2xmedium"],
        overcommit_percent: 50,
        ..PLAIN
    },
    Series {
        name: "d1",
        class: "dedicated.vcpu",
        title: "Dedicated vCPU",
        description: "Like U, with a host CPU for each vCPU and one for the emulator thread.",
        dedicated: true,
        io_threads: true,
        ..PLAIN
    },
    Series {
        name: "cx1",
        class: "compute.exclusive",
        title: "Compute Exclusive",
        icon: "pficon-registry",
        description: "For computations: host CPUs and huge pages of the VM's own, and the NUMA topology of these CPUs. \
                      Further CPUs are requested for the IO of disks and interfaces.",
        sizes: COMPUTE,
        pages: &[("", Some("2Mi")), ("1gi", Some("1Gi"))],
        dedicated: true,
        io_threads: true,
        numa: true,
        fixed_sockets: true,
        ..PLAIN
    },
    Series {
        name: "m1",
        class: "memory.intensive",
        title: "Memory Intensive",
        icon: "fa-memory",
        description: "For applications that need much memory, which is in huge pages.",
        sizes: MEMORY,
        pages: &[("", Some("2Mi")), ("1gi", Some("1Gi"))],
        ..PLAIN
    },
    Series {
        name: "n1",
        class: "network",
        title: "Network",
        icon: "pficon-network",
        description: "For network functions with DPDK. The nodes must be prepared for them.",
        sizes: NETWORK,
        pages: &[("", Some("1Gi"))],
        dedicated: true,
        quiet_cpus: true,
        ..PLAIN
    },
    Series {
        name: "rt1",
        class: "realtime",
        title: "Realtime",
        description: "For realtime applications. The nodes must be prepared for them.",
        without: &["nano", "2xmedium"],
        pages: &[("", Some("1Gi"))],
        dedicated: true,
        numa: true,
        realtime: true,
        quiet_cpus: true,
        ..PLAIN
    },
];

/// Annotations by which CRI-O leaves the CPUs of a pod undisturbed.
const QUIET_CPUS: [&str; 3] = ["cpu-load-balancing.crio.io", "cpu-quota.crio.io", "irq-load-balancing.crio.io"];

/// Returns the common instance types.
pub fn instancetypes() -> Vec<VirtualMachineClusterInstancetype> {
    let mut all = Vec::new();
    for series in SERIES {
        for (suffix, page) in series.pages {
            let sizes = series.sizes.iter().filter(|(name, ..)| !series.without.contains(name));
            all.extend(sizes.map(|size| series.instancetype(*size, suffix, *page)));
        }
    }
    all
}

impl Series {
    fn instancetype(
        &self,
        (size, cpus, memory): Size,
        suffix: &str,
        page: Option<&str>,
    ) -> VirtualMachineClusterInstancetype {
        let size = format!("{size}{suffix}");
        let spec = self.spec(cpus, memory, page);
        let mut labels = vec![
            entry("class", self.class),
            entry("cpu", &cpus),
            entry("icon-pf", self.icon),
            entry("memory", memory),
            entry("size", &size),
            entry("version", "1"),
        ];
        labels.extend(page.map(|page| entry("hugepages", page)));
        let traits = [
            ("dedicatedCPUPlacement", self.dedicated),
            ("isolateEmulatorThread", self.dedicated),
            ("numa", self.numa),
            ("realtime", self.realtime),
        ];
        labels.extend(traits.into_iter().filter(|(_, has)| *has).map(|(name, _)| entry(name, "true")));
        let annotations = [entry("displayName", self.title), entry("description", self.description)];
        let mut metadata = metadata(&format!("{}.{size}", self.name), labels, annotations);
        mark(&mut metadata, &spec);
        VirtualMachineClusterInstancetype { metadata, spec: VirtualMachineClusterInstancetypeSpec(spec) }
    }

    fn spec(&self, cpus: u32, memory: &str, page: Option<&str>) -> VirtualMachineInstancetypeSpec {
        let quiet = QUIET_CPUS.map(|key| (key.to_owned(), "disable".to_owned()));
        VirtualMachineInstancetypeSpec {
            annotations: if self.quiet_cpus { BTreeMap::from(quiet) } else { BTreeMap::new() },
            cpu: CpuInstancetype {
                guest: cpus,
                dedicated_cpu_placement: self.dedicated.then_some(true),
                isolate_emulator_thread: self.dedicated.then_some(true),
                max_sockets: self.fixed_sockets.then_some(cpus),
                numa: self
                    .numa
                    .then(|| Numa { guest_mapping_passthrough: Some(NumaGuestMappingPassthrough::default()) }),
                realtime: self.realtime.then(Realtime::default),
                ..CpuInstancetype::default()
            },
            io_threads_policy: self.io_threads.then(|| "auto".to_owned()),
            memory: MemoryInstancetype {
                guest: Quantity(memory.to_owned()),
                hugepages: page.map(|page| Hugepages { page_size: Some(page.to_owned()) }),
                overcommit_percent: self.overcommit_percent,
                ..MemoryInstancetype::default()
            },
            ..VirtualMachineInstancetypeSpec::default()
        }
    }
}
