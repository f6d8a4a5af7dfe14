//! Uninstalls Ferrovirt and checks what is left.

use crate::{
    command::run,
    error::{Error, Result},
    install::with_diagnosis,
    plan::INSTALLATION_NAMESPACE,
    progress::Progress,
    target::Target,
};

/// Cluster-scoped kinds of an installation.
const CLUSTER_WIDE: &str = "apiservices,certificatesigningrequests,clusterrolebindings,clusterroles,\
    mutatingwebhookconfigurations,priorityclasses,validatingadmissionpolicies,validatingadmissionpolicybindings,\
    validatingwebhookconfigurations";
/// Kinds of which an installation has common objects, and their label.
const COMMON: [&str; 2] = [
    "virtualmachineclusterinstancetypes.instancetype.kubevirt.io",
    "virtualmachineclusterpreferences.instancetype.kubevirt.io",
];
const BUNDLE: &str = "instancetype.kubevirt.io/common-instancetypes-version";
/// Namespaced kinds of an installation.
const NAMESPACED: &str = "all,configmaps,leases,networkpolicies,poddisruptionbudgets,rolebindings,roles,secrets,\
    serviceaccounts";
/// Objects that Kubernetes creates in each namespace.
const CREATED_BY_KUBERNETES: [&str; 2] = ["configmap/kube-root-ca.crt", "serviceaccount/default"];
/// A node label of another project, which must remain.
const FOREIGN_LABEL: &str = "cdi.kubevirt.io/foreign";
/// Created by this test cluster, not by the chart.
const CREATED_BY_THE_CLUSTER: &str = "ferrovirt:kubelet-api";

/// Uninstalls Ferrovirt. Only CRDs and objects of other projects may be left.
///
/// # Errors
/// Fails if Helm fails, objects are left, or a label of another project is removed.
pub fn uninstall(target: &Target, progress: &Progress) -> Result<()> {
    let foreign = format!("{FOREIGN_LABEL}=stays");
    target.kubectl.run("labelling the nodes", &["label", "nodes", "--all", "--overwrite", &foreign])?;
    progress.step("uninstalling the chart");
    let mut helm = target.helm(&["uninstall", "ferrovirt", "--namespace", INSTALLATION_NAMESPACE, "--timeout", "4m"]);
    run("uninstalling the chart", &mut helm).map_err(|error| with_diagnosis(error, target))?;

    let kubectl = &target.kubectl;
    let mut cluster = kubectl.run("listing what is left", &["get", CLUSTER_WIDE, "-o", "name"])?;
    for kind in COMMON {
        let definition = ["get", "crd", kind, "--ignore-not-found", "-o", "name"];
        if !kubectl.run("looking for a definition", &definition)?.trim().is_empty() {
            cluster += &kubectl.run("listing what is left", &["get", kind, "-l", BUNDLE, "-o", "name"])?;
        }
    }
    let namespace =
        kubectl.run("listing what is left", &["get", NAMESPACED, "-n", INSTALLATION_NAMESPACE, "-o", "name"])?;
    let keys = "jsonpath={range .items[*]}{.metadata.labels}{.metadata.annotations}{end}";
    let nodes = kubectl.run("reading the nodes", &["get", "nodes", "-o", keys])?;
    if !nodes.contains(FOREIGN_LABEL) {
        return Err(Error::Refused(format!(
            "uninstalling removed the label {FOREIGN_LABEL} of nodes, which belongs to another project"
        )));
    }
    target
        .kubectl
        .run("removing the label of the nodes", &["label", "nodes", "--all", &format!("{FOREIGN_LABEL}-")])?;
    let left = left_over(&cluster, &namespace, &nodes);
    if left.is_empty() {
        progress.step("nothing is left but CRDs");
        return Ok(());
    }
    Err(Error::Refused(format!("uninstalling left {}", left.join(", "))))
}

/// Returns the names of remaining objects, from the names in the cluster and in the namespace, and the labels and annotations
/// of the nodes.
fn left_over(cluster: &str, namespace: &str, nodes: &str) -> Vec<String> {
    let ours =
        |name: &&str| (name.contains("virt")) && !name.contains(CREATED_BY_THE_CLUSTER) && !is_served_by_crd(name);
    let cluster = cluster.lines().filter(ours);
    // A terminating pod is listed until kubelet has finished it.
    let namespace = namespace.lines().filter(|name| !CREATED_BY_KUBERNETES.contains(name) && !name.is_empty());
    let nodes = nodes.replace(FOREIGN_LABEL, "").contains("kubevirt.io/").then_some("labels or annotations of nodes");
    cluster.chain(namespace).chain(nodes).map(str::to_owned).collect()
}

/// Returns true if the API server created this APIService for a CRD.
fn is_served_by_crd(name: &str) -> bool {
    name.strip_prefix("apiservice.apiregistration.k8s.io/")
        .is_some_and(|service| service.ends_with("kubevirt.io") && !service.contains("subresources"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crds_and_default_objects_of_kubernetes_are_no_left_overs() {
        let cluster = "apiservice.apiregistration.k8s.io/v1.kubevirt.io\n\
            clusterrolebinding.rbac.authorization.k8s.io/ferrovirt:kubelet-api\n\
            clusterrole.rbac.authorization.k8s.io/view\n";
        let namespace = "configmap/kube-root-ca.crt\nserviceaccount/default\n";
        let nodes = r#"{"kubernetes.io/hostname":"a","cdi.kubevirt.io/foreign":"stays"}"#;
        assert!(left_over(cluster, namespace, nodes).is_empty());
    }

    #[test]
    fn each_left_over_is_named() {
        let cluster = "apiservice.apiregistration.k8s.io/v1.subresources.kubevirt.io\n\
            clusterrole.rbac.authorization.k8s.io/kubevirt.io:view\n\
            virtualmachineclusterinstancetype.instancetype.kubevirt.io/u1.nano\n";
        let left = left_over(cluster, "secret/kubevirt-ca\n", r#"{"kubevirt.io/schedulable":"true"}"#);
        assert_eq!(
            left,
            [
                "apiservice.apiregistration.k8s.io/v1.subresources.kubevirt.io",
                "clusterrole.rbac.authorization.k8s.io/kubevirt.io:view",
                "virtualmachineclusterinstancetype.instancetype.kubevirt.io/u1.nano",
                "secret/kubevirt-ca",
                "labels or annotations of nodes",
            ]
        );
    }
}
