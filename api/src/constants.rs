//! Names that other tools rely on: labels, annotations, finalizers, conditions, reasons.

/// API group of the kinds in this crate.
pub const GROUP: &str = "kubevirt.io";
/// Storage version of the kinds in this crate.
pub const VERSION: &str = "v1";
/// `apiVersion` of the kinds in this crate.
pub const API_VERSION: &str = "kubevirt.io/v1";
/// API group of the subresources virt-api serves.
pub const SUBRESOURCES_GROUP: &str = "subresources.kubevirt.io";
/// Name of the KubeVirt object that the chart creates.
pub const KUBEVIRT_NAME: &str = "kubevirt";
/// Default namespace of an installation.
pub const DEFAULT_NAMESPACE: &str = "kubevirt";
/// Name of the VMI of `helm test`, the only one in the namespace of an installation.
pub const HELM_TEST_VMI: &str = "ferrovirt-test";
/// Largest number of parts into which the VMs are divided among the replicas of virt-controller.
pub const MAX_SHARDS: u32 = 16;
/// UID and GID of virt-launcher and QEMU.
pub const NON_ROOT_UID: u64 = 107;

/// Seccomp profile below kubelet's directory of profiles, which virt-handler installs: it permits to bind memory to NUMA nodes.
pub const NUMA_SECCOMP_PROFILE: &str = "ferrovirt/numa.json";

/// Returns the name of the Lease of a shard of virt-controller. That of the first one is the leader's.
#[must_use]
pub fn controller_lease(shard: u32) -> String {
    let leader = component::VIRT_CONTROLLER;
    if shard == 0 { leader.to_owned() } else { format!("{leader}-{shard}") }
}

/// Names of Deployments and DaemonSets, and values of label [`label::APP`].
pub mod component {
    /// The aggregated API server and webhooks.
    pub const VIRT_API: &str = "virt-api";
    /// The cluster-wide controllers.
    pub const VIRT_CONTROLLER: &str = "virt-controller";
    /// The DaemonSet that manages VMIs on each node.
    pub const VIRT_HANDLER: &str = "virt-handler";
    /// The pod of each VMI.
    pub const VIRT_LAUNCHER: &str = "virt-launcher";
    /// Service account of virt-api.
    pub const API_SERVICE_ACCOUNT: &str = "kubevirt-apiserver";
    /// Service account of virt-controller.
    pub const CONTROLLER_SERVICE_ACCOUNT: &str = "kubevirt-controller";
    /// Service account of virt-handler.
    pub const HANDLER_SERVICE_ACCOUNT: &str = "kubevirt-handler";
    /// Service account of the synchronization service.
    pub const SYNCHRONIZATION_SERVICE_ACCOUNT: &str = "kubevirt-synchronization-controller";
    /// Pods that attach the claims of hot-plugged volumes.
    pub const HOTPLUG_DISK: &str = "hotplug-disk";
    /// Container of a pod that attaches a claim.
    pub const HOTPLUG_CONTAINER: &str = "hotplug-disk";
    /// Pods that fill the claims of DataVolumes.
    pub const VIRT_IMPORTER: &str = "virt-importer";
    /// Pods that read from a claim if a migration has taken the state of a VMI away from it.
    pub const STATE_RECOVERY: &str = "virt-state-recovery";
    /// Container of such a pod.
    pub const STATE_RECOVERY_CONTAINER: &str = "recovery";
    /// Container of a pod that fills a claim.
    pub const IMPORT_CONTAINER: &str = "importer";
    /// Main container of a launcher pod.
    pub const COMPUTE_CONTAINER: &str = "compute";
}

/// Labels.
pub mod label {
    /// Component of a pod.
    pub const APP: &str = "kubevirt.io";
    /// VM with whose memory a claim was made.
    pub const HIBERNATION_OF: &str = "ferrovirt.io/hibernation-of";
    /// UID of the DataVolume that gets a persistent volume from a temporary claim.
    pub const HAND_OVER: &str = "ferrovirt.io/hand-over";
    /// Name of the VM of whose snapshot a claim was restored.
    pub const RESTORE_SOURCE: &str = "restore.kubevirt.io/source-vm-name";
    /// Namespace of that VM.
    pub const RESTORE_SOURCE_NAMESPACE: &str = "restore.kubevirt.io/source-vm-namespace";
    /// VM that an object belongs to.
    pub const VM: &str = "kubevirt.io/vm";
    /// ControllerRevision of the pool from which a VM was created or changed last, also on its VMI.
    pub const POOL_REVISION: &str = "kubevirt.io/vm-pool-revision-name";
    /// Marks ControllerRevisions of pools.
    pub const OF_POOL: &str = "ferrovirt.io/pool-revision";
    /// VM whose volume a volume snapshot was taken of.
    pub const SNAPSHOT_SOURCE_NAME: &str = "snapshot.kubevirt.io/source-vm-name";
    /// Namespace of that VM.
    pub const SNAPSHOT_SOURCE_NAMESPACE: &str = "snapshot.kubevirt.io/source-vm-namespace";
    /// Node of a VMI.
    pub const NODE_NAME: &str = "kubevirt.io/nodeName";
    /// Target node of a VMI's migration.
    pub const MIGRATION_TARGET_NODE_NAME: &str = "kubevirt.io/migrationTargetNodeName";
    /// VMI whose TPM and UEFI variables are in a claim.
    pub const PERSISTENT_STATE_FOR: &str = "persistent-state-for";
    /// Migration that brings the TPM and the UEFI variables of a VMI to a claim.
    pub const STATE_MIGRATION: &str = "kubevirt.io/migrationName";
    /// Marks VMIs whose launcher image is older than the control plane.
    pub const OUTDATED_LAUNCHER_IMAGE: &str = "kubevirt.io/outdatedLauncherImage";
    /// VMI of a migration.
    pub const VMI_NAME: &str = "kubevirt.io/vmi-name";
    /// UID of the migration of a target pod, and of the pod that attaches its volumes.
    pub const MIGRATION_JOB_UID: &str = "kubevirt.io/migrationJobUID";
    /// VMI of a migration that brings volumes to other claims.
    pub const VOLUME_UPDATE_MIGRATION: &str = "kubevirt.io/volume-update-migration";
    /// UID of the VMI of a pod.
    pub const CREATED_BY: &str = "kubevirt.io/created-by";
    /// True if a node accepts VMIs.
    pub const SCHEDULABLE: &str = "kubevirt.io/schedulable";
    /// Reserved for installers.
    pub const INSTALL_STRATEGY: &str = "kubevirt.io/install-strategy";
    /// Old label with the name of the VM on launcher pods.
    pub const DEPRECATED_VM_NAME: &str = "vm.kubevirt.io/name";
    /// Identifier of the VMI that fits a label value.
    pub const VMI_ID: &str = "vmi.kubevirt.io/id";
    /// Marks pods that may reach cluster services despite network policies.
    pub const ALLOW_ACCESS_CLUSTER_SERVICES: &str = "np.kubevirt.io/allow-access-cluster-services";
    /// Prefix of CPU feature labels on nodes.
    pub const CPU_FEATURE_PREFIX: &str = "cpu-feature.node.kubevirt.io/";
    /// Prefix of CPU model labels on nodes.
    pub const CPU_MODEL_PREFIX: &str = "cpu-model.node.kubevirt.io/";
    /// Prefix of labels with CPU models that a node supports for incoming migrations.
    pub const CPU_MODEL_MIGRATION_PREFIX: &str = "cpu-model-migration.node.kubevirt.io/";
    /// Prefix of CPU timer labels on nodes.
    pub const CPU_TIMER_PREFIX: &str = "cpu-timer.node.kubevirt.io/";
    /// Prefix of the CPU vendor label.
    pub const CPU_VENDOR_PREFIX: &str = "cpu-vendor.node.kubevirt.io/";
    /// Prefix of Hyper-V capability labels.
    pub const HYPERV_PREFIX: &str = "hyperv.node.kubevirt.io/";
    /// Prefix of the label with the host CPU model of a node.
    pub const HOST_MODEL_CPU_PREFIX: &str = "host-model-cpu.node.kubevirt.io/";
    /// Prefix of labels with features that the host CPU model requires.
    pub const HOST_MODEL_REQUIRED_FEATURES_PREFIX: &str = "host-model-required-features.node.kubevirt.io/";
    /// Prefix of machine type labels on nodes.
    pub const MACHINE_TYPE_PREFIX: &str = "machine-type.node.kubevirt.io/";
    /// Prefix of TSC frequency labels on nodes.
    pub const TSC_FREQUENCY_PREFIX: &str = "scheduling.node.kubevirt.io/tsc-frequency-";
    /// True if the CPU manager of a node assigns exclusive CPUs.
    pub const CPU_MANAGER: &str = "kubevirt.io/cpumanager";
    /// True if a node supports real-time VMIs.
    pub const REALTIME: &str = "kubevirt.io/realtime";
    /// True if a node supports SEV.
    pub const SEV: &str = "kubevirt.io/sev";
    /// True if a node supports SEV-ES.
    pub const SEV_ES: &str = "kubevirt.io/sev-es";
    /// True if a node supports SEV-SNP.
    pub const SEV_SNP: &str = "kubevirt.io/sev-snp";
    /// True if a node supports TDX.
    pub const TDX: &str = "kubevirt.io/tdx";
    /// "true" enables debug logs of libvirt.
    pub const DEBUG_LOGS: &str = "debugLogs";
    /// Prefix of labels with architectures that a node supports.
    pub const VM_ARCH_PREFIX: &str = "kubevirt.io/vm-arch-";

    /// True if the CPU model of a node is obsolete: VMIs no longer get it by default.
    pub const OBSOLETE_HOST_MODEL: &str = "node-labeller.kubevirt.io/obsolete-host-model";
    /// True if a node supports Secure Execution.
    pub const S390_PV: &str = "kubevirt.io/s390-pv";
    /// Old form of [`CPU_MANAGER`].
    pub const CPU_MANAGER_LEGACY: &str = "cpumanager";

    /// True if kernel same-page merging of a node follows its memory.
    pub const KSM_ENABLED: &str = "kubevirt.io/ksm-enabled";

    /// Full keys of labels that the components write to nodes.
    pub const ON_NODES: [&str; 11] = [
        SCHEDULABLE,
        KSM_ENABLED,
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
    /// Prefixes of further labels that the components write to nodes.
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

    /// Returns true for a label that the components write to nodes. Other projects also use subdomains of `kubevirt.io`, for
    /// example `cdi.kubevirt.io`, so the domain is not sufficient.
    #[must_use]
    pub fn is_on_nodes(key: &str) -> bool {
        ON_NODES.contains(&key) || PREFIXES_ON_NODES.iter().any(|prefix| key.starts_with(prefix))
    }

    /// Labels of a VMI that only the components may set.
    pub const RESERVED_ON_VMI: [&str; 6] =
        [CREATED_BY, MIGRATION_JOB_UID, NODE_NAME, MIGRATION_TARGET_NODE_NAME, SCHEDULABLE, INSTALL_STRATEGY];
}

/// Annotations.
pub mod annotation {
    /// Namespace and name of the DataVolume that gets a persistent volume from a temporary claim, on both.
    pub const HAND_OVER_TO: &str = "ferrovirt.io/hand-over-to";
    /// Reclaim policy of a persistent volume before it was handed over.
    pub const HAND_OVER_RECLAIM_POLICY: &str = "ferrovirt.io/hand-over-reclaim-policy";
    /// UID of a DataVolume whose claim is filled by the importer of Ferrovirt.
    pub const IMPORT: &str = "ferrovirt.io/import";
    /// VirtualMachineSnapshot: volumes that it leaves out, separated by commas.
    pub const EXCLUDED_VOLUMES: &str = "ferrovirt.io/excluded-volumes";
    /// Claim, DataVolume: the restore that made or replaces it.
    pub const RESTORE: &str = "restore.kubevirt.io/name";
    /// VM, claim: name and UID of the restore that changed or made it.
    pub const LAST_RESTORE: &str = "restore.kubevirt.io/lastRestoreUID";
    /// Claim: the restore whose VM becomes its owner once it exists.
    pub const OWNED_BY_VM: &str = "restore.kubevirt.io/owned-by-vm";
    /// Claim: name and UID of the restore that deletes it to replace it.
    pub const REPLACED_BY: &str = "ferrovirt.io/replaced-by-restore";
    /// Name of the file with a memory dump, on its claim.
    pub const MEMORY_DUMP: &str = "kubevirt.io/memory-dump";
    /// Trace context of a start.
    pub const TRACEPARENT: &str = "ferrovirt.io/traceparent";
    /// API version in which a controller last observed an object.
    pub const LATEST_OBSERVED_API_VERSION: &str = "kubevirt.io/latest-observed-api-version";
    /// API version in which an object is stored.
    pub const STORAGE_OBSERVED_API_VERSION: &str = "kubevirt.io/storage-observed-api-version";
    /// Generation of the VM that a VMI was created from.
    pub const VM_GENERATION: &str = "kubevirt.io/vm-generation";
    /// The CPUs of a VMI with an isolated emulator are even in number. Set on a VMI, or on the `KubeVirt` object for new VMIs.
    pub const EMULATOR_THREAD_COMPLETE_TO_EVEN_PARITY: &str = "alpha.kubevirt.io/EmulatorThreadCompleteToEvenParity";
    /// Version of the guest's PCI address layout.
    pub const PCI_TOPOLOGY_VERSION: &str = "kubevirt.io/pci-topology-version";
    /// Value of [`PCI_TOPOLOGY_VERSION`] for new VMIs.
    pub const PCI_TOPOLOGY_V3: &str = "v3";
    /// Number of ports for interfaces, of guests whose layout is older than [`PCI_TOPOLOGY_V3`].
    pub const PCI_INTERFACE_SLOT_COUNT: &str = "kubevirt.io/pci-interface-slot-count";
    /// Annotations of the layout.
    pub const PCI_TOPOLOGY: [&str; 2] = [PCI_TOPOLOGY_VERSION, PCI_INTERFACE_SLOT_COUNT];
    /// "true" on a VMI whose guest has got or lost an interface since its start: the devices of a new domain would have other addresses.
    pub const INTERFACES_CHANGED: &str = "ferrovirt.io/interfaces-changed";
    /// Names of interfaces that were plugged into a running VMI and whose MAC address the VM's template does not have yet, separated by
    /// commas.
    pub const INTERFACES_WITHOUT_MAC: &str = "ferrovirt.io/interfaces-without-mac";
    /// Name of the VMI of a launcher pod.
    pub const DOMAIN: &str = "kubevirt.io/domain";
    /// Name of the VMI that owns a pod.
    pub const OWNER_VMI_NAME: &str = "kubevirt.io/owner-vmi-name";
    /// UID of the VMI that owns a pod.
    pub const OWNER_VMI_UID: &str = "kubevirt.io/owner-vmi-uid";
    /// Memory overhead in a launcher pod's requests, in bytes.
    pub const MEMORY_OVERHEAD_BYTES: &str = "kubevirt.io/memory-overhead-bytes";
    /// Launcher image, networks, vCPUs and memory for which a launcher pod was created: a JSON object with `launcher`, `networks`
    /// (a digest), `vcpus` and `memory` (bytes). Another pod for the same would not differ.
    pub const CREATED_FOR: &str = "ferrovirt.io/created-for";
    /// Name of the migration of a target pod, and of the pod that attaches its volumes.
    pub const MIGRATION_JOB_NAME: &str = "kubevirt.io/migrationJobName";
    /// Marks VMIs that migrate through unix sockets of virt-handler.
    pub const MIGRATION_TRANSPORT_UNIX: &str = "kubevirt.io/migrationTransportUnix";
    /// Time of virt-handler's last heartbeat on a node.
    pub const HEARTBEAT: &str = "kubevirt.io/heartbeat";
    /// "true" on nodes whose kernel same-page merging virt-handler has started.
    pub const KSM_HANDLER_MANAGED: &str = "kubevirt.io/ksm-handler-managed";
    /// Annotations that the components write to nodes.
    pub const ON_NODES: [&str; 2] = [HEARTBEAT, KSM_HANDLER_MANAGED];
    /// Set by administrators on nodes: pages that same-page merging scans more at each step while memory is scarce.
    pub const KSM_PAGES_BOOST: &str = "kubevirt.io/ksm-pages-boost-override";
    /// Set by administrators on nodes: change of the scanned pages at each step while memory is not scarce, at most 0.
    pub const KSM_PAGES_DECAY: &str = "kubevirt.io/ksm-pages-decay-override";
    /// Set by administrators on nodes: fewest pages that same-page merging scans; it stops below.
    pub const KSM_PAGES_MIN: &str = "kubevirt.io/ksm-pages-min-override";
    /// Set by administrators on nodes: most pages that same-page merging scans.
    pub const KSM_PAGES_MAX: &str = "kubevirt.io/ksm-pages-max-override";
    /// Set by administrators on nodes: pages that same-page merging scans first.
    pub const KSM_PAGES_INIT: &str = "kubevirt.io/ksm-pages-init-override";
    /// Set by administrators on nodes: milliseconds between two scans of same-page merging if 16 GiB are used.
    pub const KSM_SLEEP_BASELINE: &str = "kubevirt.io/ksm-sleep-ms-baseline-override";
    /// Set by administrators on nodes: share of available memory, 0 to 1, at which memory counts as scarce.
    pub const KSM_FREE_PERCENT: &str = "kubevirt.io/ksm-free-percent-override";
    /// Set by administrators on nodes whose labels virt-handler must not change.
    pub const SKIP_NODE: &str = "node-labeller.kubevirt.io/skip-node";
    /// "false" disables shared memory backing.
    pub const MEMFD: &str = "kubevirt.io/memfd";
    /// "true" puts devices on the root complex.
    pub const PLACE_PCI_DEVICES_ON_ROOT_COMPLEX: &str = "kubevirt.io/placePCIDevicesOnRootComplex";
    /// "true" disables the 64-bit PCI hole.
    pub const DISABLE_PCI_HOLE64: &str = "kubevirt.io/disablePCIHole64";
    /// Log filters of libvirt.
    pub const LIBVIRT_LOG_FILTERS: &str = "kubevirt.io/libvirt-log-filters";
    /// Keeps the launcher running after a failure, for debugging.
    pub const KEEP_LAUNCHER_ALIVE: &str = "kubevirt.io/keep-launcher-alive-after-failure";
    /// Makes the launcher fail at once, for tests of VMIs that do not start.
    pub const LAUNCHER_FAIL_FAST: &str = "kubevirt.io/func-test-virt-launcher-fail-fast";
    /// Allows migration with a bridge on the pod network.
    pub const ALLOW_POD_BRIDGE_MIGRATION: &str = "kubevirt.io/allow-pod-bridge-network-live-migration";
    /// "true" disables free page reporting.
    pub const FREE_PAGE_REPORTING_DISABLED: &str = "kubevirt.io/free-page-reporting-disabled";
    /// Makes guest agent probes succeed without a check.
    pub const PAUSE_GUEST_AGENT_PROBES: &str = "kubevirt.io/pause-guest-agent-probes";
    /// Marks pods that only let the scheduler bind claims.
    pub const EPHEMERAL_PROVISIONING: &str = "kubevirt.io/ephemeral-provisioning";
    /// Creates DataVolumes even if the VM is halted.
    pub const IMMEDIATE_DATA_VOLUME_CREATION: &str = "kubevirt.io/immediate-data-volume-creation";
    /// "true" omits the backup hooks of launcher pods; on a VM, a VMI or the KubeVirt object.
    pub const SKIP_BACKUP_HOOKS: &str = "kubevirt.io/skip-backup-hooks";
    /// Container in which Velero runs a command before it backs up the pod's volumes.
    pub const BACKUP_PRE_CONTAINER: &str = "pre.hook.backup.velero.io/container";
    /// Ignition configuration of the guest.
    pub const IGNITION_DATA: &str = "kubevirt.io/ignitiondata";
    /// Additional networks of a pod for Multus, a JSON list.
    pub const NETWORKS: &str = "k8s.v1.cni.cncf.io/networks";
    /// Network that Multus uses instead of the cluster's default network.
    pub const DEFAULT_NETWORK: &str = "v1.multus-cni.io/default-network";
    /// Node resource required by pods on a network, on its NetworkAttachmentDefinition.
    pub const RESOURCE_NAME: &str = "k8s.v1.cni.cncf.io/resourceName";
    /// Networks that Multus has attached to a pod, a JSON list.
    pub const NETWORK_STATUS: &str = "k8s.v1.cni.cncf.io/network-status";
    /// Hook sidecars, a JSON list.
    pub const HOOK_SIDECARS: &str = "hooks.kubevirt.io/hookSidecars";
    /// Progress of the migration of a VMI: a JSON object with `migration`, `total`, `processed`, `remaining`,
    /// `rate` and `time` (the minute).
    pub const MIGRATION_PROGRESS: &str = "ferrovirt.io/migration-progress";
    /// Node that a migration evacuates.
    pub const EVACUATION_MIGRATION: &str = "kubevirt.io/evacuationMigration";
    /// Marks migrations that bring a VMI in line with its spec or with the version of the launcher.
    pub const WORKLOAD_UPDATE_MIGRATION: &str = "kubevirt.io/workloadUpdateMigration";
    /// Seconds after which an unschedulable target pod of the migration is deleted.
    pub const MIGRATION_UNSCHEDULABLE_TIMEOUT: &str = "kubevirt.io/migrationUnschedulablePodTimeoutSeconds";
    /// Seconds after which a target pod of the migration that does not start is deleted.
    pub const MIGRATION_PENDING_TIMEOUT: &str = "kubevirt.io/migrationPendingPodTimeoutSeconds";
    /// Seconds that the migration waits for utility volumes to be detached.
    pub const MIGRATION_UTILITY_VOLUMES_TIMEOUT: &str = "kubevirt.io/migrationUtilityVolumesTimeoutSeconds";
    /// Makes migrations of a VMI fail once their target is ready, for tests of migrations that fail.
    pub const FORCE_MIGRATION_FAILURE: &str = "kubevirt.io/func-test-force-launcher-migration-failure";
    /// Keeps the target of a migration from being prepared, for tests of migrations that do not begin.
    pub const BLOCK_MIGRATION_TARGET: &str = "kubevirt.io/func-test-block-migration-target-preparation";
    /// Excludes a migration from the back-off after failures.
    pub const IGNORE_MIGRATION_BACKOFF: &str = "kubevirt.io/func-test-ignore-migration-backoff";
    /// Time at which the domain ran on the target, on target pods.
    pub const MIGRATION_TARGET_READY: &str = "kubevirt.io/migration-target-ready-timestamp";
    /// Origin of an eviction request.
    pub const EVICTION_SOURCE: &str = "kubevirt.io/eviction-source";
    /// Excludes a VMI from presets.
    pub const EXCLUDE_PRESETS: &str = "virtualmachineinstancepresets.admission.kubevirt.io/exclude";
    /// Instance type of a VMI.
    pub const INSTANCETYPE: &str = "kubevirt.io/instancetype-name";
    /// Cluster-wide instance type of a VMI.
    pub const CLUSTER_INSTANCETYPE: &str = "kubevirt.io/cluster-instancetype-name";
    /// Preference of a VMI.
    pub const PREFERENCE: &str = "kubevirt.io/preference-name";
    /// Cluster-wide preference of a VMI.
    pub const CLUSTER_PREFERENCE: &str = "kubevirt.io/cluster-preference-name";
    /// Permits only requests for eviction of the pod.
    pub const DESCHEDULER_REQUEST_EVICT_ONLY: &str = "descheduler.alpha.kubernetes.io/request-evict-only";
    /// True if the descheduler may evict the pod.
    pub const DESCHEDULER_EVICT: &str = "descheduler.alpha.kubernetes.io/evict";
    /// True if the descheduler should avoid evicting the pod.
    pub const DESCHEDULER_PREFER_NO_EVICTION: &str = "descheduler.alpha.kubernetes.io/prefer-no-eviction";
    /// Marks a pod whose eviction is in progress.
    pub const DESCHEDULER_EVICTION_IN_PROGRESS: &str = "descheduler.alpha.kubernetes.io/eviction-in-progress";
}

/// Finalizers.
pub mod finalizer {
    /// On VMIs: removed after the pod is deleted and the final state is recorded.
    pub const VMI: &str = "kubevirt.io/foregroundDeleteVirtualMachine";
    /// Old form of [`VMI`].
    pub const VMI_LEGACY: &str = "foregroundDeleteVirtualMachine";
    /// On VMs and their VMIs: removed after the VM controller has observed the final state.
    pub const VM: &str = "kubevirt.io/virtualMachineControllerFinalize";
    /// On migrations.
    pub const MIGRATION: &str = "kubevirt.io/migrationJobFinalize";
    /// On VMs of a pool that preserves the state of deleted VMs: removed after their disks are detached.
    pub const POOL: &str = "pool.kubevirt.io/finalizer";
    /// On DataVolumes while they are cloned from another namespace.
    pub const CLONE: &str = "ferrovirt.io/clone";
    /// On VMs while a snapshot is taken.
    pub const SNAPSHOT_SOURCE: &str = "snapshot.kubevirt.io/snapshot-source-protection";
    /// On snapshots of VMs.
    pub const SNAPSHOT: &str = "snapshot.kubevirt.io/vmsnapshot-protection";
    /// On contents of snapshots, while their snapshots exist.
    pub const SNAPSHOT_CONTENT: &str = "snapshot.kubevirt.io/vmsnapshotcontent-protection";
    /// On restores.
    pub const RESTORE: &str = "snapshot.kubevirt.io/vmrestore-protection";
    /// On the KubeVirt object while workloads exist that its deletion has to wait for.
    pub const KUBEVIRT: &str = "kubevirt.io/foregroundDeleteKubeVirt";

    /// Finalizers that the components set and honour.
    pub const ALL: [&str; 11] =
        [VMI, VMI_LEGACY, VM, MIGRATION, POOL, CLONE, SNAPSHOT_SOURCE, SNAPSHOT, SNAPSHOT_CONTENT, RESTORE, KUBEVIRT];
}

/// Condition types.
pub mod condition {
    /// The VMI is ready.
    pub const READY: &str = "Ready";
    /// The guest is paused.
    pub const PAUSED: &str = "Paused";
    /// The guest agent is connected.
    pub const AGENT_CONNECTED: &str = "AgentConnected";
    /// The guest agent is too old.
    pub const AGENT_VERSION_NOT_SUPPORTED: &str = "AgentVersionNotSupported";
    /// Access credentials are applied in the guest.
    pub const ACCESS_CREDENTIALS_SYNCHRONIZED: &str = "AccessCredentialsSynchronized";
    /// QEMU emulates the architecture of the guest.
    pub const SOFTWARE_EMULATION: &str = "SoftwareEmulation";
    /// The VMI can be migrated.
    pub const LIVE_MIGRATABLE: &str = "LiveMigratable";
    /// The VMI can be migrated with its storage.
    pub const STORAGE_LIVE_MIGRATABLE: &str = "StorageLiveMigratable";
    /// The launcher pod can be scheduled.
    pub const POD_SCHEDULED: &str = "PodScheduled";
    /// The spec has been applied.
    pub const SYNCHRONIZED: &str = "Synchronized";
    /// Settings of the KubeVirt object have no effect.
    pub const SETTINGS_IGNORED: &str = "SettingsIgnored";
    /// Storage is being created.
    pub const PROVISIONING: &str = "Provisioning";
    /// DataVolumes are bound and filled.
    pub const DATA_VOLUMES_READY: &str = "DataVolumesReady";
    /// The VMI must leave its node.
    pub const EVICTION_REQUESTED: &str = "EvictionRequested";
    /// The controller cannot create or delete the VMI.
    pub const FAILURE: &str = "Failure";
    /// Volumes of the VMI move to other claims.
    pub const VOLUMES_CHANGE: &str = "VolumesChange";
    /// The VMI waits for a migration that brings its pod in line with its spec.
    pub const MIGRATION_REQUIRED: &str = "MigrationRequired";
    /// The pod was created for a change or for the present launcher and yet lacks it, so that no migration or eviction follows.
    pub const WORKLOAD_UPDATE_INEFFECTIVE: &str = "WorkloadUpdateIneffective";
    /// vCPUs are being plugged into the guest; false if that failed.
    pub const HOT_VCPU_CHANGE: &str = "HotVCPUChange";
    /// The guest's memory is being changed; false if that failed.
    pub const HOT_MEMORY_CHANGE: &str = "HotMemoryChange";
    /// The guest uses all vCPUs, as its guest agent reports, after a change or if it does not. KubeVirt has no such condition.
    pub const GUEST_VCPUS_ONLINE: &str = "GuestVCPUsOnline";
    /// False: the guest has not taken all of the memory that was added. KubeVirt has no such condition.
    pub const GUEST_MEMORY_PLUGGED: &str = "GuestMemoryPlugged";
    /// The migration was deleted before it ended.
    pub const MIGRATION_ABORT_REQUESTED: &str = "migrationAbortRequested";
    /// A quota rejects the target pod of the migration.
    pub const MIGRATION_REJECTED_BY_QUOTA: &str = "migrationRejectedByResourceQuota";
    /// The migration waits for utility volumes to be detached.
    pub const MIGRATION_BLOCKED_BY_UTILITY_VOLUMES: &str = "migrationBlockedByUtilityVolumes";
    /// The migration has no running target pod yet, for this reason. KubeVirt has no such condition.
    pub const MIGRATION_WAITING: &str = "migrationWaiting";
    /// The migration waits for a backup.
    pub const MIGRATION_BLOCKED_BY_BACKUP: &str = "migrationBlockedByBackup";
    /// Changes require a restart.
    pub const RESTART_REQUIRED: &str = "RestartRequired";
    /// The memory of the guest is in a claim, and no guest runs. KubeVirt has no such condition.
    pub const HIBERNATED: &str = "Hibernated";
    /// Manual intervention is required.
    pub const MANUAL_RECOVERY_REQUIRED: &str = "ManualRecoveryRequired";
    /// The replica set is paused.
    pub const REPLICA_PAUSED: &str = "ReplicaPaused";
    /// Replicas could not be created or deleted.
    pub const REPLICA_FAILURE: &str = "ReplicaFailure";
    /// The installation is available.
    pub const AVAILABLE: &str = "Available";
    /// The installation is changing.
    pub const PROGRESSING: &str = "Progressing";
    /// The installation is degraded.
    pub const DEGRADED: &str = "Degraded";
    /// The objects of the installation exist.
    pub const CREATED: &str = "Created";
    /// Readiness gate of launcher pods: false while the guest is paused.
    pub const POD_UNPAUSED: &str = "kubevirt.io/virtual-machine-unpaused";
}

/// Reasons of conditions.
pub mod reason {
    /// Synchronized: the claim for the state of the VMI cannot be made.
    pub const FAILED_BACKEND_STORAGE_CREATE: &str = "FailedBackendStorageCreate";
    /// Synchronized: a claim with state that the VMI does not keep cannot be deleted. Spelled as in the reference.
    pub const FAILED_BACKEND_STORAGE_DELETE: &str = "Failed deleting backend storage";
    /// Synchronized: the claim for the state of the VMI cannot be used.
    pub const FAILED_BACKEND_STORAGE_PROBE: &str = "FailedBackendStorageProbe";
    /// Synchronized: the claim for the state of the VMI is not ready yet.
    pub const BACKEND_STORAGE_NOT_READY: &str = "BackendStorageNotReady";
    /// GuestVCPUsOnline, GuestMemoryPlugged: the guest is offered more than it uses.
    pub const OFFERED_NOT_TAKEN: &str = "OfferedNotTaken";
    /// Ready: the pod does not exist or has no node.
    pub const POD_NOT_EXISTS: &str = "PodNotExists";
    /// Ready: the pod is terminating.
    pub const POD_TERMINATING: &str = "PodTerminating";
    /// Ready: the guest does not run.
    pub const GUEST_NOT_RUNNING: &str = "GuestNotRunning";
    /// Ready: the pod has no Ready condition.
    pub const POD_CONDITION_MISSING: &str = "PodConditionMissing";
    /// Ready of a VM: it has no VMI.
    pub const VMI_NOT_EXISTS: &str = "VMINotExists";
    /// Ready of a VM: its VMI has no Ready condition.
    pub const VMI_CONDITION_MISSING: &str = "VMIConditionMissing";
    /// Paused by a user.
    pub const PAUSED_BY_USER: &str = "PausedByUser";
    /// Paused by an IO error.
    pub const PAUSED_IO_ERROR: &str = "PausedIOError";
    /// Paused by the migration monitor.
    pub const PAUSED_BY_MIGRATION_MONITOR: &str = "PausedByMigrationMonitor";
    /// SoftwareEmulation: the node has another architecture.
    pub const CROSS_ARCHITECTURE_EMULATION: &str = "CrossArchitectureEmulation";
    /// PodScheduled: no node fits.
    pub const UNSCHEDULABLE: &str = "Unschedulable";
    /// Synchronized: the image cannot be pulled.
    pub const ERR_IMAGE_PULL: &str = "ErrImagePull";
    /// Synchronized: the image cannot be pulled; the next attempt is delayed.
    pub const IMAGE_PULL_BACK_OFF: &str = "ImagePullBackOff";
    /// Synchronized: the pod could not be created.
    pub const FAILED_CREATE: &str = "FailedCreate";
    /// Synchronized: the pod could not be deleted.
    pub const FAILED_DELETE: &str = "FailedDelete";
    /// Synchronized: a claim is missing.
    pub const FAILED_PVC_NOT_FOUND: &str = "FailedPvcNotFound";
    /// DataVolumesReady: all DataVolumes are bound and filled.
    pub const ALL_DATA_VOLUMES_READY: &str = "AllDVsReady";
    /// LiveMigratable: a disk cannot be migrated.
    pub const DISKS_NOT_LIVE_MIGRATABLE: &str = "DisksNotLiveMigratable";
    /// LiveMigratable: an interface cannot be migrated.
    pub const INTERFACE_NOT_LIVE_MIGRATABLE: &str = "InterfaceNotLiveMigratable";
    /// LiveMigratable: the VMI cannot be migrated for another reason.
    pub const NOT_MIGRATABLE: &str = "NotMigratable";
    /// A migration that would bring the pod's networks in line with the VMI waits for another program to do so.
    pub const AUTO_MIGRATION_PENDING: &str = "AutoMigrationPending";
    /// Only a migration brings the pod in line with the VMI.
    pub const AUTO_MIGRATION_DUE_TO_LIVE_UPDATE: &str = "AutoMigrationDueToLiveUpdate";
    /// DataVolumesReady: a DataVolume is not usable.
    pub const NOT_ALL_DATA_VOLUMES_READY: &str = "NotAllDVsReady";
    /// Unpaused gate: the guest runs.
    pub const NOT_PAUSED: &str = "NotPaused";
    /// Unpaused gate: the guest is paused.
    pub const PAUSED: &str = "Paused";
}

/// Reasons of events.
pub mod event {
    /// An object was created.
    pub const SUCCESSFUL_CREATE: &str = "SuccessfulCreate";
    /// A VMI has volumes with paths of the container while their feature gate is off.
    pub const CONTAINER_PATH_VOLUMES_DISABLED: &str = "ContainerPathVolumesDisabled";
    /// An object was deleted.
    pub const SUCCESSFUL_DELETE: &str = "SuccessfulDelete";
    /// An object could not be created.
    pub const FAILED_CREATE: &str = "FailedCreate";
    /// An object could not be deleted.
    pub const FAILED_DELETE: &str = "FailedDelete";
    /// A VM of a pool was changed.
    pub const SUCCESSFUL_UPDATE: &str = "SuccessfulUpdate";
    /// A VM of a pool could not be changed.
    pub const FAILED_UPDATE: &str = "FailedUpdate";
    /// The domain was defined.
    pub const CREATED: &str = "Created";
    /// The guest started.
    pub const STARTED: &str = "Started";
    /// The guest stopped.
    pub const STOPPED: &str = "Stopped";
    /// The guest was requested to shut down.
    pub const SHUTTING_DOWN: &str = "ShuttingDown";
    /// The VMI was deleted.
    pub const DELETED: &str = "Deleted";
    /// The guest was resumed.
    pub const RESUMED: &str = "Resumed";
    /// The spec could not be applied.
    pub const SYNC_FAILED: &str = "SyncFailed";
    /// A VMI with an outdated launcher is being evicted.
    pub const SUCCESSFUL_EVICT: &str = "SuccessfulEvict";
    /// A VMI with an outdated launcher could not be evicted.
    pub const FAILED_EVICT: &str = "FailedEvict";
    /// A migration succeeded.
    pub const SUCCESSFUL_MIGRATION: &str = "SuccessfulMigration";
    /// A migration failed.
    pub const FAILED_MIGRATION: &str = "FailedMigration";
    /// A migration was handed over to virt-handler.
    pub const SUCCESSFUL_HAND_OVER: &str = "SuccessfulHandOver";
    /// A migration could not be handed over to virt-handler.
    pub const FAILED_HAND_OVER: &str = "FailedHandOver";
    /// virt-handler was asked to abort a migration.
    pub const SUCCESSFUL_ABORT_MIGRATION: &str = "SuccessfulAbortMigration";
    /// virt-handler could not be asked to abort a migration.
    pub const FAILED_ABORT_MIGRATION: &str = "FailedAbortMigration";
    /// A migration waits because former ones failed.
    pub const MIGRATION_BACKOFF: &str = "MigrationBackoff";
    /// No node can take the target pod of a migration.
    pub const MIGRATION_TARGET_POD_UNSCHEDULABLE: &str = "migrationTargetPodUnschedulable";
    /// No other node has the CPU model or the features with which a VMI with the host model migrates.
    pub const NO_SUITABLE_NODES_FOR_HOST_MODEL_MIGRATION: &str = "NoSuitableNodesForHostModelMigration";
    /// A migration waits for utility volumes to be detached.
    pub const UTILITY_VOLUME_MIGRATION_PENDING: &str = "UtilityVolumeMigrationPending";
    /// virt-handler of a node is unresponsive.
    pub const NODE_UNRESPONSIVE: &str = "NodeUnresponsive";
    /// A DataVolume was created.
    pub const SUCCESSFUL_DATA_VOLUME_CREATE: &str = "SuccessfulDataVolumeCreate";
    /// A DataVolume could not be created.
    pub const FAILED_DATA_VOLUME_CREATE: &str = "FailedDataVolumeCreate";
    /// The service account of a VM must not clone the source of a DataVolume.
    pub const UNAUTHORIZED_DATA_VOLUME_CREATE: &str = "UnauthorizedDataVolumeCreate";
    /// The launcher pod of a VMI with dedicated CPUs does not have the quality of service Guaranteed.
    pub const FAILED_GUARANTEE_RESOURCES: &str = "FailedGuaranteeResources";
    /// The launcher pod ended before the guest started, such as one that kubelet rejected. KubeVirt has no such event.
    pub const POD_REJECTED: &str = "PodRejected";
    /// A DataVolume could not be filled.
    pub const FAILED_DATA_VOLUME_IMPORT: &str = "FailedDataVolumeImport";
    /// A DataVolume was deleted because its source is gone, and is created from another one. KubeVirt has no such event.
    pub const DATA_VOLUME_REPLACED: &str = "DataVolumeReplaced";
    /// The VM of a snapshot cannot be snapshotted now. KubeVirt has no such event.
    pub const SNAPSHOT_SOURCE_NOT_LOCKED: &str = "SnapshotSourceNotLocked";
    /// A snapshot has failed. KubeVirt has no such event.
    pub const SNAPSHOT_FAILED: &str = "VirtualMachineSnapshotFailed";
    /// A snapshot lacks volumes that can be snapshotted. KubeVirt has no such event.
    pub const PARTIAL_SNAPSHOT: &str = "PartialSnapshot";
    /// The content of a snapshot was created.
    pub const SUCCESSFUL_SNAPSHOT_CONTENT_CREATE: &str = "SuccessfulVirtualMachineSnapshotContentCreate";
    /// The content of a snapshot could not be created. KubeVirt has no such event.
    pub const FAILED_SNAPSHOT_CONTENT_CREATE: &str = "FailedVirtualMachineSnapshotContentCreate";
    /// A volume snapshot was created.
    pub const SUCCESSFUL_VOLUME_SNAPSHOT_CREATE: &str = "SuccessfulVolumeSnapshotCreate";
    /// A volume snapshot could not be created. KubeVirt has no such event.
    pub const FAILED_VOLUME_SNAPSHOT_CREATE: &str = "FailedVolumeSnapshotCreate";
    /// A volume snapshot was deleted.
    pub const VOLUME_SNAPSHOT_MISSING: &str = "VolumeSnapshotMissing";
    /// The source of a DataVolume does not exist yet. The reference spells it so.
    pub const SOURCE_PVC_NOT_AVAILABLE: &str = "SourcePVCNotAvailabe";
}

/// Extended resources of virt-handler's device plugins.
pub mod device {
    /// /dev/kvm.
    pub const KVM: &str = "devices.kubevirt.io/kvm";
    /// /dev/net/tun.
    pub const TUN: &str = "devices.kubevirt.io/tun";
    /// /dev/vhost-net.
    pub const VHOST_NET: &str = "devices.kubevirt.io/vhost-net";
    /// /dev/userfaultfd, for the target of a migration that may switch to post-copy.
    pub const USERFAULTFD: &str = "devices.kubevirt.io/userfaultfd";
    /// /dev/vhost-vsock.
    pub const VHOST_VSOCK: &str = "devices.kubevirt.io/vhost-vsock";
}
