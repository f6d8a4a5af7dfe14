//! Chooses version and feature gates of a cluster's Kubernetes, and records those of the running one.

use std::fs;

use crate::{
    error::{Error, FileContext, Result},
    host,
    kubernetes::{FeatureGate, Kubernetes, Variant},
    plan::Plan,
};

/// Returns the variant that a command names. What it leaves open is that of the running cluster, or the default.
///
/// # Errors
/// Fails if the record of the running cluster cannot be read.
pub fn choose(
    plan: &Plan,
    kubernetes: Option<Kubernetes>,
    gates: &[FeatureGate],
    static_cpus: &[String],
    dual_stack: bool,
) -> Result<Variant> {
    let running = running(plan)?.unwrap_or_default();
    let gates: Vec<_> = gates.iter().map(|FeatureGate(name, enabled)| (name.clone(), *enabled)).collect();
    Ok(Variant {
        kubernetes: kubernetes.unwrap_or(running.kubernetes),
        feature_gates: if gates.is_empty() { running.feature_gates } else { gates.into_iter().collect() },
        static_cpus: if static_cpus.is_empty() { running.static_cpus } else { static_cpus.to_vec() },
        dual_stack: dual_stack || running.dual_stack,
    })
}

/// Returns the variant of the running cluster.
///
/// # Errors
/// Fails if the record cannot be read.
pub fn running(plan: &Plan) -> Result<Option<Variant>> {
    let path = plan.variant_record();
    if host::init_process(&plan.control_namespace()).is_none() || !path.exists() {
        return Ok(None);
    }
    let text = fs::read_to_string(&path).at("read", &path)?;
    let read = serde_json::from_str(&text);
    read.map(Some).map_err(|source| Error::Document { what: path.display().to_string(), source })
}

/// Records the variant of the cluster that is about to run.
pub(crate) fn record(plan: &Plan) -> Result<()> {
    let path = plan.variant_record();
    let text = serde_json::to_string(&plan.variant)
        .map_err(|source| Error::Document { what: path.display().to_string(), source })?;
    fs::write(&path, text).at("write", path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn named_values_win_and_the_rest_is_the_default_where_no_cluster_runs() {
        let folder = std::env::temp_dir().join(format!("ferrovirt-variant-{}", std::process::id()));
        // Not the number of CI, whose cluster may be up on this host.
        let mut plan = Plan::new(folder.clone(), 7).unwrap();
        assert_eq!(choose(&plan, None, &[], &[], false).unwrap(), Variant::default());
        let gates = ["ImageVolume=false".parse().unwrap()];
        plan.variant = choose(&plan, Some(Kubernetes::V1_35), &gates, &[], false).unwrap();
        assert_eq!(plan.variant.to_string(), "Kubernetes 1.35.4 with ImageVolume=false");
        fs::create_dir_all(plan.state()).unwrap();
        record(&plan).unwrap();
        let text = fs::read_to_string(plan.variant_record()).unwrap();
        assert_eq!(text, r#"{"kubernetes":"1.35","featureGates":{"ImageVolume":false}}"#);
        assert_eq!(serde_json::from_str::<Variant>(&text).unwrap(), plan.variant);
        assert!(choose(&plan, None, &[], &[], true).unwrap().dual_stack);
        // The record of a cluster that does not run counts for nothing.
        assert_eq!(choose(&plan, None, &[], &[], false).unwrap(), Variant::default());
        fs::remove_dir_all(folder).unwrap();
    }
}
