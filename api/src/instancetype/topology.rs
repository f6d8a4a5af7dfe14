//! Distribution of an instance type's vCPUs over sockets, cores and threads.

use super::{preference::VirtualMachinePreferenceSpec, spec::VirtualMachineInstancetypeSpec};

/// Default number of cores per socket, or threads per core.
const DEFAULT_RATIO: u32 = 2;
/// Threads per core for `SocketsCoresThreads`.
const THREADS_PER_CORE: u32 = 2;

/// Topology of vCPUs.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Topology {
    /// One socket per vCPU.
    Sockets,
    /// Cores of one socket.
    Cores,
    /// Threads of one core.
    Threads,
    /// Spread over several levels.
    Spread(Across, u32),
    /// No preference; sockets.
    Any,
}

/// Levels over which vCPUs are spread.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Across {
    /// Sockets with several cores.
    SocketsCores,
    /// Cores with several threads, in one socket.
    CoresThreads,
    /// Sockets with several cores with two threads.
    SocketsCoresThreads,
}

impl Across {
    /// Returns the name in the API.
    pub const fn name(self) -> &'static str {
        match self {
            Self::SocketsCores => "SocketsCores",
            Self::CoresThreads => "CoresThreads",
            Self::SocketsCoresThreads => "SocketsCoresThreads",
        }
    }

    /// Parses a name; returns `None` for an unknown one.
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::SocketsCores, Self::CoresThreads, Self::SocketsCoresThreads]
            .into_iter()
            .find(|across| across.name() == name)
    }
}

/// Names of topologies: current and old one.
pub const NAMES: [(&str, &str); 5] = [
    ("sockets", "preferSockets"),
    ("cores", "preferCores"),
    ("threads", "preferThreads"),
    ("spread", "preferSpread"),
    ("any", "preferAny"),
];

/// Returns the preferred topology. Invalid names, which admission rejects, count as unset.
pub fn preferred(preference: Option<&VirtualMachinePreferenceSpec>) -> Topology {
    let cpu = preference.and_then(|preference| preference.cpu.as_ref());
    let given = cpu.and_then(|cpu| cpu.preferred_cpu_topology.as_deref()).unwrap_or_default();
    let name = NAMES.iter().find(|(name, old)| given == *name || given == *old).map_or("sockets", |(name, _)| name);
    match name {
        "cores" => Topology::Cores,
        "threads" => Topology::Threads,
        "any" => Topology::Any,
        "spread" => {
            let options = cpu.and_then(|cpu| cpu.spread_options.as_ref());
            let across = options.and_then(|options| Across::from_name(options.across.as_deref()?));
            let ratio = options
                .and_then(|options| options.ratio)
                .or_else(|| preference.and_then(|preference| preference.prefer_spread_socket_to_core_ratio))
                .filter(|ratio| *ratio > 0);
            Topology::Spread(across.unwrap_or(Across::SocketsCores), ratio.unwrap_or(DEFAULT_RATIO))
        }
        _ => Topology::Sockets,
    }
}

/// Returns sockets, cores and threads for `cpus` vCPUs.
pub fn parts(cpus: u32, topology: Topology) -> (u32, u32, u32) {
    if cpus <= 1 {
        return (1, 1, 1);
    }
    match topology {
        Topology::Sockets | Topology::Any => (cpus, 1, 1),
        Topology::Cores => (1, cpus, 1),
        Topology::Threads => (1, 1, cpus),
        Topology::Spread(Across::SocketsCores, ratio) => (cpus / ratio, ratio, 1),
        Topology::Spread(Across::CoresThreads, ratio) => (1, cpus / ratio, ratio),
        Topology::Spread(Across::SocketsCoresThreads, ratio) => {
            (cpus / THREADS_PER_CORE / ratio, ratio, THREADS_PER_CORE)
        }
    }
}

/// Returns an error message if the vCPUs of an instance type cannot be spread as the preference requires.
pub fn spread_error(
    instancetype: Option<&VirtualMachineInstancetypeSpec>,
    preference: Option<&VirtualMachinePreferenceSpec>,
) -> Option<String> {
    let cpus = instancetype?.cpu.guest;
    let Topology::Spread(across, ratio) = preferred(preference) else { return None };
    match across {
        Across::SocketsCores if !cpus.is_multiple_of(ratio) => Some(format!(
            "{cpus} vCPUs provided by the instance type are not divisible by the Spec.PreferSpreadSocketToCoreRatio or Spec.CPU.PreferSpreadOptions.Ratio of {ratio} provided by the preference"
        )),
        Across::CoresThreads if !cpus.is_multiple_of(ratio) => Some(format!(
            "{cpus} vCPUs provided by the instance type are not divisible by the number of threads per core {ratio}"
        )),
        Across::SocketsCoresThreads
            if !cpus.is_multiple_of(THREADS_PER_CORE) || !(cpus / THREADS_PER_CORE).is_multiple_of(ratio) =>
        {
            Some(format!(
                "{cpus} vCPUs provided by the instance type are not divisible by the number of threads per core {THREADS_PER_CORE} and Spec.PreferSpreadSocketToCoreRatio or Spec.CPU.PreferSpreadOptions.Ratio of {ratio}"
            ))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn preference(spec: Value) -> VirtualMachinePreferenceSpec {
        serde_json::from_value(spec).unwrap()
    }

    #[test]
    fn topology_follows_the_preference() {
        // preference, vCPUs, (sockets, cores, threads)
        for (spec, cpus, want) in [
            (json!({}), 4, (4, 1, 1)),
            (json!({"cpu": {"preferredCPUTopology": "preferSockets"}}), 4, (4, 1, 1)),
            (json!({"cpu": {"preferredCPUTopology": "any"}}), 4, (4, 1, 1)),
            (json!({"cpu": {"preferredCPUTopology": "cores"}}), 4, (1, 4, 1)),
            (json!({"cpu": {"preferredCPUTopology": "preferThreads"}}), 4, (1, 1, 4)),
            (json!({"cpu": {"preferredCPUTopology": "spread"}}), 6, (3, 2, 1)),
            (json!({"cpu": {"preferredCPUTopology": "spread"}}), 1, (1, 1, 1)),
            (
                json!({"cpu": {"preferredCPUTopology": "preferSpread"}, "preferSpreadSocketToCoreRatio": 3}),
                6,
                (2, 3, 1),
            ),
            (
                json!({"cpu": {"preferredCPUTopology": "spread", "spreadOptions": {"ratio": 4}}, "preferSpreadSocketToCoreRatio": 3}),
                8,
                (2, 4, 1),
            ),
            (
                json!({"cpu": {"preferredCPUTopology": "spread", "spreadOptions": {"across": "CoresThreads"}}}),
                6,
                (1, 3, 2),
            ),
            (
                json!({"cpu": {"preferredCPUTopology": "spread", "spreadOptions": {"across": "SocketsCoresThreads"}}}),
                8,
                (2, 2, 2),
            ),
            (json!({"cpu": {"preferredCPUTopology": "spread", "spreadOptions": {"ratio": 0}}}), 4, (2, 2, 1)),
        ] {
            assert_eq!(parts(cpus, preferred(Some(&preference(spec.clone())))), want, "{spec}");
        }
        assert_eq!(preferred(None), Topology::Sockets);
    }

    #[test]
    fn indivisible_spread_is_an_error() {
        let instancetype = |guest| VirtualMachineInstancetypeSpec {
            cpu: super::super::spec::CpuInstancetype { guest, ..Default::default() },
            ..Default::default()
        };
        for (across, cpus, want) in [
            ("SocketsCores", 4, None),
            (
                "SocketsCores",
                3,
                Some("3 vCPUs provided by the instance type are not divisible by the Spec.PreferSpread"),
            ),
            ("CoresThreads", 4, None),
            ("CoresThreads", 5, Some("are not divisible by the number of threads per core 2")),
            ("SocketsCoresThreads", 8, None),
            ("SocketsCoresThreads", 6, Some("per core 2 and Spec.PreferSpreadSocketToCoreRatio")),
        ] {
            let wanted =
                preference(json!({"cpu": {"preferredCPUTopology": "spread", "spreadOptions": {"across": across}}}));
            let error = spread_error(Some(&instancetype(cpus)), Some(&wanted));
            match want {
                None => assert_eq!(error, None, "{across} {cpus}"),
                Some(text) => assert!(error.unwrap().contains(text), "{across} {cpus}"),
            }
        }
        assert_eq!(spread_error(None, None), None);
        assert_eq!(spread_error(Some(&instancetype(3)), None), None);
    }
}
