//! CRDs of migrations and migration policies.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::CustomResourceExt;
use serde_json::{Value, json};

use super::{CONDITION, CrdError, Definition, OLD, Rule, V1ALPHA3_WARNING};
use crate::{MigrationPolicy, VirtualMachineInstanceMigration};

const AT_LEAST_ONE: fn() -> Value = || json!({"minimum": 1});
const NOT_NEGATIVE: fn() -> Value = || json!({"minimum": 0});

/// Rules for migration options.
pub(super) const OPTIONS: &[Rule] = &[
    ("maxDowntimeMs", || json!({"minimum": 1, "maximum": 2_000_000})),
    ("experimental.compression", || json!({"enum": ["none", "zstd"]})),
    ("experimental.downtimeTuning.cooldownSeconds", AT_LEAST_ONE),
    ("experimental.downtimeTuning.initialMs", AT_LEAST_ONE),
    ("experimental.downtimeTuning.startAfterIteration", AT_LEAST_ONE),
    ("experimental.downtimeTuning.steps", AT_LEAST_ONE),
    ("experimental.stallDetector.stallMargin", || json!({"minimum": 0, "maximum": 100})),
    ("experimental.stallDetector.stallProgressTimeout", NOT_NEGATIVE),
    ("experimental.stallDetector.switchoverTimeout", NOT_NEGATIVE),
];

/// Returns the CRDs of the group.
pub(super) fn definitions() -> Result<Vec<CustomResourceDefinition>, CrdError> {
    Ok(vec![
        Definition::new(&VirtualMachineInstanceMigration::crd())?
            .rules("status", CONDITION)?
            .rules("status.migrationState.migrationConfiguration", OPTIONS)?
            .deprecated_version(OLD, V1ALPHA3_WARNING)
            .finish()?,
        Definition::new(&MigrationPolicy::crd())?
            .rules("spec", OPTIONS)?
            .rules("", &[("status", || json!({"nullable": true}))])?
            .finish()?,
    ])
}
