//! CRDs of backup.kubevirt.io: backups and trackers. Their validation rules are CEL and need no webhook.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::CustomResourceExt;
use serde_json::{Value, json};

use super::{CrdError, Definition, Rule};
use crate::backup::{VirtualMachineBackup, VirtualMachineBackupTracker};

fn cel(rules: &[(&str, &str)]) -> Value {
    let rules: Vec<Value> = rules.iter().map(|(rule, message)| json!({"rule": rule, "message": message})).collect();
    json!({"x-kubernetes-validations": rules})
}

const IMMUTABLE: (&str, &str) = ("self == oldSelf", "spec is immutable after creation");
const NAMED: (&str, &str) = ("self.name != ''", "name is required");

const BACKUP: &[Rule] = &[
    ("spec", || {
        cel(&[
            IMMUTABLE,
            ("has(self.pvcName) && self.pvcName != ''", "pvcName is required"),
            (
                "!has(self.mode) || self.mode != 'Pull' || (has(self.tokenSecretRef) && self.tokenSecretRef != '')",
                "tokenSecretRef is required when mode is Pull",
            ),
        ])
    }),
    ("spec.mode", || json!({"enum": ["Push", "Pull"]})),
    ("spec.source", || {
        cel(&[
            ("has(self.apiGroup)", "apiGroup is required"),
            (
                "!has(self.apiGroup) || self.apiGroup in ['kubevirt.io', 'backup.kubevirt.io']",
                "apiGroup must be kubevirt.io or backup.kubevirt.io",
            ),
            (
                "!has(self.apiGroup) || (self.apiGroup == 'kubevirt.io' && self.kind == 'VirtualMachine') || \
                 (self.apiGroup == 'backup.kubevirt.io' && self.kind == 'VirtualMachineBackupTracker')",
                "kind must be VirtualMachine for kubevirt.io or VirtualMachineBackupTracker for backup.kubevirt.io",
            ),
            NAMED,
        ])
    }),
];

/// Rules of Kubernetes' own condition type, with its bounds.
const STATUS: &[Rule] = &[
    ("conditions", || json!({"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]})),
    ("conditions[].message", || json!({"maxLength": 32768})),
    ("conditions[].observedGeneration", || json!({"minimum": 0})),
    (
        "conditions[].reason",
        || json!({"minLength": 1, "maxLength": 1024, "pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"}),
    ),
    ("conditions[].status", || json!({"enum": ["True", "False", "Unknown"]})),
    ("conditions[].type", || {
        json!({
            "maxLength": 316,
            "pattern": r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])$",
        })
    }),
];

const TRACKER: &[Rule] = &[
    ("spec", || cel(&[IMMUTABLE])),
    ("spec.source", || {
        cel(&[
            ("has(self.apiGroup) && self.apiGroup == 'kubevirt.io'", "apiGroup must be kubevirt.io"),
            ("self.kind == 'VirtualMachine'", "kind must be VirtualMachine"),
            NAMED,
        ])
    }),
];

/// Returns the CRDs of the group.
pub(super) fn definitions() -> Result<Vec<CustomResourceDefinition>, CrdError> {
    Ok(vec![
        Definition::new(&VirtualMachineBackup::crd())?
            .rules("", BACKUP)?
            .rules("status", STATUS)?
            .without_conversion()
            .finish()?,
        Definition::new(&VirtualMachineBackupTracker::crd())?.rules("", TRACKER)?.without_conversion().finish()?,
    ])
}
