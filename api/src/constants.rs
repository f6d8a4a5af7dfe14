//! Names other tools look for: labels, annotations, finalizers, conditions, reasons.

/// API group of the kinds in this crate.
pub const GROUP: &str = "kubevirt.io";
/// Storage version of the kinds in this crate.
pub const VERSION: &str = "v1";
/// `apiVersion` of the kinds in this crate.
pub const API_VERSION: &str = "kubevirt.io/v1";
/// API group of the subresources virt-api serves.
pub const SUBRESOURCES_GROUP: &str = "subresources.kubevirt.io";
/// Name of the KubeVirt object the chart makes.
pub const KUBEVIRT_NAME: &str = "kubevirt";
/// Namespace of an installation that says nothing else.
pub const DEFAULT_NAMESPACE: &str = "kubevirt";
/// UID and GID the launcher and QEMU run as.
pub const NON_ROOT_UID: u64 = 107;

/// Deployments, DaemonSets and the values of label [`label::APP`].
pub mod component {
    /// The aggregated API server and webhooks.
    pub const VIRT_API: &str = "virt-api";
    /// The cluster-wide controllers.
    pub const VIRT_CONTROLLER: &str = "virt-controller";
    /// The agent of each node.
    pub const VIRT_HANDLER: &str = "virt-handler";
    /// The pod of each machine.
    pub const VIRT_LAUNCHER: &str = "virt-launcher";
    /// Service account of virt-api.
    pub const API_SERVICE_ACCOUNT: &str = "kubevirt-apiserver";
    /// Service account of virt-controller.
    pub const CONTROLLER_SERVICE_ACCOUNT: &str = "kubevirt-controller";
    /// Service account of virt-handler.
    pub const HANDLER_SERVICE_ACCOUNT: &str = "kubevirt-handler";
    /// Service account of the synchronization service.
    pub const SYNCHRONIZATION_SERVICE_ACCOUNT: &str = "kubevirt-synchronization-controller";
    /// Container of the machine in a launcher pod.
    pub const COMPUTE_CONTAINER: &str = "compute";
}

/// Labels.
pub mod label {
    /// Component a pod belongs to.
    pub const APP: &str = "kubevirt.io";
    /// VM a thing belongs to.
    pub const VM: &str = "kubevirt.io/vm";
    /// Node a machine runs on.
    pub const NODE_NAME: &str = "kubevirt.io/nodeName";
    /// Node a machine migrates to.
    pub const MIGRATION_TARGET_NODE_NAME: &str = "kubevirt.io/migrationTargetNodeName";
    /// The machine's launcher is older than the control plane's.
    pub const OUTDATED_LAUNCHER_IMAGE: &str = "kubevirt.io/outdatedLauncherImage";
    /// Machine a migration is for.
    pub const VMI_NAME: &str = "kubevirt.io/vmi-name";
    /// Migration a pod is the target of.
    pub const MIGRATION_JOB_UID: &str = "kubevirt.io/migrationJobUID";
    /// UID of the machine a pod belongs to.
    pub const CREATED_BY: &str = "kubevirt.io/created-by";
    /// Whether a node takes machines.
    pub const SCHEDULABLE: &str = "kubevirt.io/schedulable";
    /// Reserved for installers.
    pub const INSTALL_STRATEGY: &str = "kubevirt.io/install-strategy";
    /// Name of the VM on launcher pods; old.
    pub const DEPRECATED_VM_NAME: &str = "vm.kubevirt.io/name";
    /// Identifier of the machine that fits a label value.
    pub const VMI_ID: &str = "vmi.kubevirt.io/id";
    /// Marks pods allowed to reach cluster services where network policies close them off.
    pub const ALLOW_ACCESS_CLUSTER_SERVICES: &str = "np.kubevirt.io/allow-access-cluster-services";
    /// Prefix of CPU feature labels on nodes.
    pub const CPU_FEATURE_PREFIX: &str = "cpu-feature.node.kubevirt.io/";
    /// Prefix of CPU model labels on nodes.
    pub const CPU_MODEL_PREFIX: &str = "cpu-model.node.kubevirt.io/";
    /// Prefix of labels with CPU models a node accepts from elsewhere.
    pub const CPU_MODEL_MIGRATION_PREFIX: &str = "cpu-model-migration.node.kubevirt.io/";
    /// Prefix of labels on the CPU's clock.
    pub const CPU_TIMER_PREFIX: &str = "cpu-timer.node.kubevirt.io/";
    /// Prefix of the CPU vendor label.
    pub const CPU_VENDOR_PREFIX: &str = "cpu-vendor.node.kubevirt.io/";
    /// Prefix of Hyper-V capability labels.
    pub const HYPERV_PREFIX: &str = "hyperv.node.kubevirt.io/";
    /// Prefix of the label naming a node's own CPU model.
    pub const HOST_MODEL_CPU_PREFIX: &str = "host-model-cpu.node.kubevirt.io/";
    /// Prefix of labels with features the host model needs.
    pub const HOST_MODEL_REQUIRED_FEATURES_PREFIX: &str = "host-model-required-features.node.kubevirt.io/";
    /// Prefix of machine type labels on nodes.
    pub const MACHINE_TYPE_PREFIX: &str = "machine-type.node.kubevirt.io/";
    /// Prefix of TSC frequency labels on nodes.
    pub const TSC_FREQUENCY_PREFIX: &str = "scheduling.node.kubevirt.io/tsc-frequency-";
    /// Whether the CPU manager of a node pins exclusively.
    pub const CPU_MANAGER: &str = "kubevirt.io/cpumanager";
    /// Whether a node serves real-time machines.
    pub const REALTIME: &str = "kubevirt.io/realtime";
    /// Whether a node offers SEV.
    pub const SEV: &str = "kubevirt.io/sev";
    /// Whether a node offers SEV-ES.
    pub const SEV_ES: &str = "kubevirt.io/sev-es";
    /// Whether a node offers SEV-SNP.
    pub const SEV_SNP: &str = "kubevirt.io/sev-snp";
    /// Whether a node offers TDX.
    pub const TDX: &str = "kubevirt.io/tdx";
    /// "true" makes libvirt log what it does.
    pub const DEBUG_LOGS: &str = "debugLogs";
    /// Prefix of labels with architectures a node can run.
    pub const VM_ARCH_PREFIX: &str = "kubevirt.io/vm-arch-";

    /// The CPU model of a node is one that VMIs no longer get by default.
    pub const OBSOLETE_HOST_MODEL: &str = "node-labeller.kubevirt.io/obsolete-host-model";
    /// Whether a node offers Secure Execution.
    pub const S390_PV: &str = "kubevirt.io/s390-pv";
    /// Old form of [`CPU_MANAGER`].
    pub const CPU_MANAGER_LEGACY: &str = "cpumanager";

    /// Labels that the components write to nodes, by their whole names.
    pub const ON_NODES: [&str; 10] = [
        SCHEDULABLE,
        CPU_MANAGER,
        CPU_MANAGER_LEGACY,
        REALTIME,
        SEV,
        SEV_ES,
        SEV_SNP,
        TDX,
        S390_PV,
        OBSOLETE_HOST_MODEL,
    ];
    /// Beginnings of further labels that the components write to nodes.
    pub const PREFIXES_ON_NODES: [&str; 11] = [
        CPU_FEATURE_PREFIX,
        CPU_MODEL_PREFIX,
        CPU_MODEL_MIGRATION_PREFIX,
        CPU_TIMER_PREFIX,
        CPU_VENDOR_PREFIX,
        HYPERV_PREFIX,
        HOST_MODEL_CPU_PREFIX,
        HOST_MODEL_REQUIRED_FEATURES_PREFIX,
        MACHINE_TYPE_PREFIX,
        TSC_FREQUENCY_PREFIX,
        VM_ARCH_PREFIX,
    ];

    /// Returns true for a label that the components write to nodes. Other projects use the domain `kubevirt.io` as well,
    /// `cdi.kubevirt.io` for example: a domain does not tell whose a label is.
    #[must_use]
    pub fn is_on_nodes(key: &str) -> bool {
        ON_NODES.contains(&key) || PREFIXES_ON_NODES.iter().any(|prefix| key.starts_with(prefix))
    }

    /// Labels of a machine that only the components may set.
    pub const RESERVED_ON_VMI: [&str; 6] =
        [CREATED_BY, MIGRATION_JOB_UID, NODE_NAME, MIGRATION_TARGET_NODE_NAME, SCHEDULABLE, INSTALL_STRATEGY];
}

/// Annotations.
pub mod annotation {
    /// API version a controller last saw an object in.
    pub const LATEST_OBSERVED_API_VERSION: &str = "kubevirt.io/latest-observed-api-version";
    /// API version an object is stored in.
    pub const STORAGE_OBSERVED_API_VERSION: &str = "kubevirt.io/storage-observed-api-version";
    /// Generation of the VM a machine was made from.
    pub const VM_GENERATION: &str = "kubevirt.io/vm-generation";
    /// Scheme of the guest's PCI addresses.
    pub const PCI_TOPOLOGY_VERSION: &str = "kubevirt.io/pci-topology-version";
    /// Value of [`PCI_TOPOLOGY_VERSION`] for new machines.
    pub const PCI_TOPOLOGY_V3: &str = "v3";
    /// Machine of a launcher pod.
    pub const DOMAIN: &str = "kubevirt.io/domain";
    /// Name of the machine that owns a pod.
    pub const OWNER_VMI_NAME: &str = "kubevirt.io/owner-vmi-name";
    /// UID of the machine that owns a pod.
    pub const OWNER_VMI_UID: &str = "kubevirt.io/owner-vmi-uid";
    /// Memory overhead in a launcher pod's requests, bytes.
    pub const MEMORY_OVERHEAD_BYTES: &str = "kubevirt.io/memory-overhead-bytes";
    /// Migration of a target pod.
    pub const MIGRATION_JOB_NAME: &str = "kubevirt.io/migrationJobName";
    /// Migrations go through the agent's unix socket.
    pub const MIGRATION_TRANSPORT_UNIX: &str = "kubevirt.io/migrationTransportUnix";
    /// When a node's agent last gave a sign of life.
    pub const HEARTBEAT: &str = "kubevirt.io/heartbeat";
    /// Annotations that the components write to nodes.
    pub const ON_NODES: [&str; 1] = [HEARTBEAT];
    /// On nodes, set by administrators: virt-handler leaves the labels of the node alone.
    pub const SKIP_NODE: &str = "node-labeller.kubevirt.io/skip-node";
    /// "false" turns shared memory backing off.
    pub const MEMFD: &str = "kubevirt.io/memfd";
    /// "true" puts devices on the root complex.
    pub const PLACE_PCI_DEVICES_ON_ROOT_COMPLEX: &str = "kubevirt.io/placePCIDevicesOnRootComplex";
    /// "true" turns the 64-bit PCI hole off.
    pub const DISABLE_PCI_HOLE64: &str = "kubevirt.io/disablePCIHole64";
    /// Log filters of libvirt.
    pub const LIBVIRT_LOG_FILTERS: &str = "kubevirt.io/libvirt-log-filters";
    /// The launcher stays after a failure, for a look.
    pub const KEEP_LAUNCHER_ALIVE: &str = "kubevirt.io/keep-launcher-alive-after-failure";
    /// The launcher fails at once, so that tests can see what becomes of a machine that does not start.
    pub const LAUNCHER_FAIL_FAST: &str = "kubevirt.io/func-test-virt-launcher-fail-fast";
    /// Migration with a bridge on the pod network is allowed.
    pub const ALLOW_POD_BRIDGE_MIGRATION: &str = "kubevirt.io/allow-pod-bridge-network-live-migration";
    /// "true" turns free page reporting off.
    pub const FREE_PAGE_REPORTING_DISABLED: &str = "kubevirt.io/free-page-reporting-disabled";
    /// Guest agent probes succeed without asking.
    pub const PAUSE_GUEST_AGENT_PROBES: &str = "kubevirt.io/pause-guest-agent-probes";
    /// DataVolumes are made even while the VM is halted.
    pub const IMMEDIATE_DATA_VOLUME_CREATION: &str = "kubevirt.io/immediate-data-volume-creation";
    /// "true" leaves the backup hooks of launcher pods out; on a VM, a machine or the KubeVirt object.
    pub const SKIP_BACKUP_HOOKS: &str = "kubevirt.io/skip-backup-hooks";
    /// Container in which Velero runs a command before it copies a pod's volumes.
    pub const BACKUP_PRE_CONTAINER: &str = "pre.hook.backup.velero.io/container";
    /// Ignition configuration of the guest.
    pub const IGNITION_DATA: &str = "kubevirt.io/ignitiondata";
    /// Networks that Multus connects a pod to beside its own, a JSON list.
    pub const NETWORKS: &str = "k8s.v1.cni.cncf.io/networks";
    /// The network that Multus gives a pod in place of the cluster's.
    pub const DEFAULT_NETWORK: &str = "v1.multus-cni.io/default-network";
    /// Resource of a node that a pod on a network needs, on the network's definition.
    pub const RESOURCE_NAME: &str = "k8s.v1.cni.cncf.io/resourceName";
    /// What Multus has connected a pod to, a JSON list.
    pub const NETWORK_STATUS: &str = "k8s.v1.cni.cncf.io/network-status";
    /// Hook sidecars, a JSON list.
    pub const HOOK_SIDECARS: &str = "hooks.kubevirt.io/hookSidecars";
    /// Who asked for the eviction.
    pub const EVICTION_SOURCE: &str = "kubevirt.io/eviction-source";
    /// Presets leave the machine alone.
    pub const EXCLUDE_PRESETS: &str = "virtualmachineinstancepresets.admission.kubevirt.io/exclude";
    /// Instance type a machine was made from.
    pub const INSTANCETYPE: &str = "kubevirt.io/instancetype-name";
    /// Cluster-wide instance type a machine was made from.
    pub const CLUSTER_INSTANCETYPE: &str = "kubevirt.io/cluster-instancetype-name";
    /// Preference a machine was made with.
    pub const PREFERENCE: &str = "kubevirt.io/preference-name";
    /// Cluster-wide preference a machine was made with.
    pub const CLUSTER_PREFERENCE: &str = "kubevirt.io/cluster-preference-name";
    /// The pod may be evicted only by request.
    pub const DESCHEDULER_REQUEST_EVICT_ONLY: &str = "descheduler.alpha.kubernetes.io/request-evict-only";
    /// Whether a descheduler may evict the pod, and whether it should rather not.
    pub const DESCHEDULER_EVICT: &str = "descheduler.alpha.kubernetes.io/evict";
    /// See [`DESCHEDULER_EVICT`].
    pub const DESCHEDULER_PREFER_NO_EVICTION: &str = "descheduler.alpha.kubernetes.io/prefer-no-eviction";
    /// An eviction of the pod is under way.
    pub const DESCHEDULER_EVICTION_IN_PROGRESS: &str = "descheduler.alpha.kubernetes.io/eviction-in-progress";
}

/// Finalizers.
pub mod finalizer {
    /// On machines: the pod must be gone and the end recorded first.
    pub const VMI: &str = "kubevirt.io/foregroundDeleteVirtualMachine";
    /// Old form of [`VMI`].
    pub const VMI_LEGACY: &str = "foregroundDeleteVirtualMachine";
    /// On VMs and their machines: the VM controller must have seen the end.
    pub const VM: &str = "kubevirt.io/virtualMachineControllerFinalize";
    /// On migrations.
    pub const MIGRATION: &str = "kubevirt.io/migrationJobFinalize";

    /// Finalizers that the components set and honour.
    pub const ALL: [&str; 4] = [VMI, VMI_LEGACY, VM, MIGRATION];
}

/// Condition types.
pub mod condition {
    /// The machine is ready to serve.
    pub const READY: &str = "Ready";
    /// The guest is paused.
    pub const PAUSED: &str = "Paused";
    /// A guest agent answers.
    pub const AGENT_CONNECTED: &str = "AgentConnected";
    /// The guest agent is too old.
    pub const AGENT_VERSION_NOT_SUPPORTED: &str = "AgentVersionNotSupported";
    /// Access credentials are in the guest.
    pub const ACCESS_CREDENTIALS_SYNCHRONIZED: &str = "AccessCredentialsSynchronized";
    /// The machine can be migrated.
    pub const LIVE_MIGRATABLE: &str = "LiveMigratable";
    /// The machine can be migrated with its storage.
    pub const STORAGE_LIVE_MIGRATABLE: &str = "StorageLiveMigratable";
    /// The machine's pod can be placed.
    pub const POD_SCHEDULED: &str = "PodScheduled";
    /// What was asked for could be carried out.
    pub const SYNCHRONIZED: &str = "Synchronized";
    /// Storage is being made.
    pub const PROVISIONING: &str = "Provisioning";
    /// DataVolumes are bound and filled.
    pub const DATA_VOLUMES_READY: &str = "DataVolumesReady";
    /// The machine is to leave its node.
    pub const EVICTION_REQUESTED: &str = "EvictionRequested";
    /// The guest runs without KVM.
    pub const SOFTWARE_EMULATION: &str = "SoftwareEmulation";
    /// A VM failed to act.
    pub const FAILURE: &str = "Failure";
    /// Changes wait for a restart.
    pub const RESTART_REQUIRED: &str = "RestartRequired";
    /// A person must step in.
    pub const MANUAL_RECOVERY_REQUIRED: &str = "ManualRecoveryRequired";
    /// Replicas are not being kept.
    pub const REPLICA_PAUSED: &str = "ReplicaPaused";
    /// Replicas could not be made or deleted.
    pub const REPLICA_FAILURE: &str = "ReplicaFailure";
    /// Of the installation: it is up.
    pub const AVAILABLE: &str = "Available";
    /// Of the installation: it is changing.
    pub const PROGRESSING: &str = "Progressing";
    /// Of the installation: it is impaired.
    pub const DEGRADED: &str = "Degraded";
    /// Of the installation: its objects exist.
    pub const CREATED: &str = "Created";
    /// Readiness gate of launcher pods: false while the guest is paused.
    pub const POD_UNPAUSED: &str = "kubevirt.io/virtual-machine-unpaused";
}

/// Reasons of conditions.
pub mod reason {
    /// Ready: no pod has a node yet.
    pub const POD_NOT_EXISTS: &str = "PodNotExists";
    /// Ready: the pod is going away.
    pub const POD_TERMINATING: &str = "PodTerminating";
    /// Ready: the guest does not run.
    pub const GUEST_NOT_RUNNING: &str = "GuestNotRunning";
    /// Ready: the pod says nothing.
    pub const POD_CONDITION_MISSING: &str = "PodConditionMissing";
    /// Ready of a VM: it has no machine.
    pub const VMI_NOT_EXISTS: &str = "VMINotExists";
    /// Ready of a VM: its machine says nothing.
    pub const VMI_CONDITION_MISSING: &str = "VMIConditionMissing";
    /// Paused by a user.
    pub const PAUSED_BY_USER: &str = "PausedByUser";
    /// Paused by an IO error.
    pub const PAUSED_IO_ERROR: &str = "PausedIOError";
    /// Paused by a migration that watches.
    pub const PAUSED_BY_MIGRATION_MONITOR: &str = "PausedByMigrationMonitor";
    /// PodScheduled: no node fits.
    pub const UNSCHEDULABLE: &str = "Unschedulable";
    /// Synchronized: the image cannot be pulled.
    pub const ERR_IMAGE_PULL: &str = "ErrImagePull";
    /// Synchronized: the image cannot be pulled; the next try waits.
    pub const IMAGE_PULL_BACK_OFF: &str = "ImagePullBackOff";
    /// Synchronized: the pod could not be made.
    pub const FAILED_CREATE: &str = "FailedCreate";
    /// Synchronized: the pod could not be deleted.
    pub const FAILED_DELETE: &str = "FailedDelete";
    /// Synchronized: a claim is missing.
    pub const FAILED_PVC_NOT_FOUND: &str = "FailedPvcNotFound";
    /// LiveMigratable: a disk stands in the way.
    pub const DISKS_NOT_LIVE_MIGRATABLE: &str = "DisksNotLiveMigratable";
    /// LiveMigratable: an interface stands in the way.
    pub const INTERFACE_NOT_LIVE_MIGRATABLE: &str = "InterfaceNotLiveMigratable";
    /// LiveMigratable: something else stands in the way.
    pub const NOT_MIGRATABLE: &str = "NotMigratable";
    /// Unpaused gate: the guest runs.
    pub const NOT_PAUSED: &str = "NotPaused";
    /// Unpaused gate: the guest is paused.
    pub const PAUSED: &str = "Paused";
}

/// Reasons of events.
pub mod event {
    /// An object was made.
    pub const SUCCESSFUL_CREATE: &str = "SuccessfulCreate";
    /// An object was deleted.
    pub const SUCCESSFUL_DELETE: &str = "SuccessfulDelete";
    /// An object could not be made.
    pub const FAILED_CREATE: &str = "FailedCreate";
    /// An object could not be deleted.
    pub const FAILED_DELETE: &str = "FailedDelete";
    /// The guest was made known to the hypervisor.
    pub const CREATED: &str = "Created";
    /// The guest started.
    pub const STARTED: &str = "Started";
    /// The guest ended.
    pub const STOPPED: &str = "Stopped";
    /// The guest was asked to shut down.
    pub const SHUTTING_DOWN: &str = "ShuttingDown";
    /// The machine was deleted.
    pub const DELETED: &str = "Deleted";
    /// The guest went on.
    pub const RESUMED: &str = "Resumed";
    /// What was asked for could not be carried out.
    pub const SYNC_FAILED: &str = "SyncFailed";
    /// A machine with an older launcher is being evicted.
    pub const SUCCESSFUL_EVICT: &str = "SuccessfulEvict";
    /// A machine with an older launcher could not be evicted.
    pub const FAILED_EVICT: &str = "FailedEvict";
    /// The agent of a node is silent.
    pub const NODE_UNRESPONSIVE: &str = "NodeUnresponsive";
}

/// Extended resources of the node agent's device plugins.
pub mod device {
    /// /dev/kvm.
    pub const KVM: &str = "devices.kubevirt.io/kvm";
    /// /dev/net/tun.
    pub const TUN: &str = "devices.kubevirt.io/tun";
    /// /dev/vhost-net.
    pub const VHOST_NET: &str = "devices.kubevirt.io/vhost-net";
    /// /dev/vhost-vsock.
    pub const VHOST_VSOCK: &str = "devices.kubevirt.io/vhost-vsock";
}

/// FNV-1a, 32 bits: the short hash in names made from longer names.
pub(crate) fn fnv1a32(bytes: &[u8]) -> u32 {
    bytes.iter().fold(0x811c_9dc5, |hash, byte| (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193))
}

/// A name of at most `max` bytes out of `base` and `suffix`, hashed where the plain join is too long. The same input
/// always gives the same name.
pub fn short_name(base: &str, suffix: &str, max: usize) -> String {
    let joined = format!("{base}-{suffix}");
    if joined.len() <= max {
        return joined;
    }
    let cut = |text: &str, mut at: usize| {
        at = at.min(text.len());
        while !text.is_char_boundary(at) {
            at -= 1;
        }
        text[..at].to_owned()
    };
    match max.checked_sub(10 + suffix.len()) {
        Some(room) if room > 0 => {
            format!("{}-{:08x}-{suffix}", cut(base, room), fnv1a32(base.as_bytes()))
        }
        _ => {
            let name = format!("{}-{:08x}", cut(base, max.saturating_sub(9)), fnv1a32(joined.as_bytes()));
            cut(&name, max)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hash_is_the_published_one() {
        assert_eq!(fnv1a32(b""), 0x811c_9dc5);
        assert_eq!(fnv1a32(b"a"), 0xe40c_292c);
    }

    #[test]
    fn short_names_fit_and_differ() {
        assert_eq!(short_name("a", "b", 63), "a-b");
        let one = short_name(&"x".repeat(70), "volume", 63);
        let two = short_name(&"x".repeat(71), "volume", 63);
        assert!(one.len() <= 63 && one.ends_with("-volume"));
        assert_ne!(one, two);
        assert!(short_name("abc", &"s".repeat(80), 63).len() <= 63);
    }
}
