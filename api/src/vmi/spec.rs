//! The spec of a VMI.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Affinity;
use k8s_openapi::api::core::v1::ExecAction;
use k8s_openapi::api::core::v1::HTTPGetAction;
use k8s_openapi::api::core::v1::PodDNSConfig;
use k8s_openapi::api::core::v1::TCPSocketAction;
use k8s_openapi::api::core::v1::Toleration;
use k8s_openapi::api::core::v1::TopologySpreadConstraint;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::enums::EvictionStrategy;
use crate::enums::StartStrategy;
use crate::vmi::access::AccessCredential;
use crate::vmi::domain::DomainSpec;
use crate::vmi::network::Network;
use crate::vmi::volumes::Volume;

/// Spec of a VMI: guest hardware, volumes, networks and scheduling.
#[derive(Clone, CustomResource, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[kube(
    group = "kubevirt.io",
    version = "v1",
    kind = "VirtualMachineInstance",
    plural = "virtualmachineinstances",
    singular = "virtualmachineinstance",
    shortname = "vmi",
    shortname = "vmis",
    category = "all",
    namespaced,
    derive = "Default",
    derive = "PartialEq",
    doc = "A running virtual machine. Each one has a launcher pod.",
    status = "crate::vmi::status::VirtualMachineInstanceStatus",
    printcolumn = r#"{"name":"Age","type":"date","jsonPath":".metadata.creationTimestamp"}"#,
    printcolumn = r#"{"name":"Phase","type":"string","jsonPath":".status.phase"}"#,
    printcolumn = r#"{"name":"IP","type":"string","jsonPath":".status.interfaces[0].ipAddress"}"#,
    printcolumn = r#"{"name":"NodeName","type":"string","jsonPath":".status.nodeName"}"#,
    printcolumn = r#"{"name":"Ready","type":"string","jsonPath":".status.conditions[?(@.type=='Ready')].status"}"#,
    printcolumn = r#"{"name":"Live-Migratable","type":"string","jsonPath":".status.conditions[?(@.type=='LiveMigratable')].status","priority":1}"#,
    printcolumn = r#"{"name":"Paused","type":"string","jsonPath":".status.conditions[?(@.type=='Paused')].status","priority":1}"#
)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineInstanceSpec {
    /// Credentials applied in the guest by cloud-init or by the guest agent.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub access_credentials: Vec<AccessCredential>,
    /// Affinity of the launcher pod, copied unchanged.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub affinity: Option<Box<Affinity>>,
    /// CPU architecture of the guest (`amd64`, `arm64`, `s390x`); default: that of the cluster.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub architecture: Option<String>,
    /// DNS settings of the launcher pod; the guest gets them by DHCP.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dns_config: Option<Box<PodDNSConfig>>,
    /// DNS policy of the launcher pod; default: `ClusterFirst`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dns_policy: Option<String>,
    /// The virtual hardware.
    pub domain: DomainSpec,
    /// Effect of a node drain on the VMI; default: the cluster's setting.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub eviction_strategy: Option<EvictionStrategy>,
    /// Host name of pod and guest; default: the name of the object.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hostname: Option<String>,
    /// Probe whose failure ends the launcher pod.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub liveness_probe: Option<Box<Probe>>,
    /// Networks for the interfaces, matched by name.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub networks: Vec<Network>,
    /// Labels that the node must have.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub node_selector: BTreeMap<String, String>,
    /// Priority class of the launcher pod.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub priority_class_name: Option<String>,
    /// Probe that decides the VMI's `Ready` condition.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub readiness_probe: Option<Box<Probe>>,
    /// Dynamic resource claims of the launcher pod.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub resource_claims: Vec<VirtualMachineInstanceResourceClaim>,
    /// Scheduler of the launcher pod; default: that of the cluster.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scheduler_name: Option<String>,
    /// Service account of the launcher pod. Its token is only mounted for a serviceAccount volume.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub service_account_name: Option<String>,
    /// `Paused` leaves the guest paused before its first instruction.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub start_strategy: Option<StartStrategy>,
    /// Subdomain of the pod's and guest's fully qualified name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub subdomain: Option<String>,
    /// Seconds between the ACPI shutdown request and the forced stop; default: 30.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub termination_grace_period_seconds: Option<i64>,
    /// Node taints that the launcher pod tolerates.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tolerations: Vec<Toleration>,
    /// Topology spread constraints of the launcher pod.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub topology_spread_constraints: Vec<TopologySpreadConstraint>,
    /// Claims mounted into the launcher pod without a disk.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub utility_volumes: Vec<UtilityVolume>,
    /// Sources of the disks, matched by name.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub volumes: Vec<Volume>,
}

/// Template of VMIs.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineInstanceTemplateSpec {
    /// Labels and annotations of the VMI.
    #[serde(default)]
    pub metadata: ObjectMeta,
    /// Spec of the VMI.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub spec: Option<VirtualMachineInstanceSpec>,
}

/// A check on the guest; exactly one handler is set.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Probe {
    /// Command run in the guest by the guest agent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exec: Option<ExecAction>,
    /// Consecutive failures before the check fails; default: 3.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failure_threshold: Option<i32>,
    /// Ping the guest agent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub guest_agent_ping: Option<GuestAgentPing>,
    /// HTTP request to the guest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub http_get: Option<HTTPGetAction>,
    /// Seconds before the first check.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub initial_delay_seconds: Option<i32>,
    /// Seconds between checks; default: 10.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub period_seconds: Option<i32>,
    /// Consecutive successes before the check succeeds; default: 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub success_threshold: Option<i32>,
    /// TCP connection to the guest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tcp_socket: Option<TCPSocketAction>,
    /// Time limit of a check in seconds; default: 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timeout_seconds: Option<i32>,
}

/// Marker for the guest agent check.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
pub struct GuestAgentPing {}

/// A dynamic resource claim.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineInstanceResourceClaim {
    /// Name that devices refer to.
    pub name: String,
    /// Existing claim in the namespace.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resource_claim_name: Option<String>,
    /// Template from which a claim is created.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resource_claim_template_name: Option<String>,
}

/// A claim mounted without a disk.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct UtilityVolume {
    /// Claim in the VMI's namespace.
    pub claim_name: String,
    /// Name of the volume.
    pub name: String,
    /// Mount read-only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub read_only: Option<bool>,
    /// Purpose of the volume.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub type_: Option<String>,
}
