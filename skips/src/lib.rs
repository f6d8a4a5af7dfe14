//! Skipping of tests, or of parts of them, that need what a host or a cluster lacks.
//!
//! Tests call [`skip`] before they return early. With `CI=true` it fails the test, unless [`ACCEPTED`] lists the need with a
//! reason. A test of `layout/` keeps tests from skipping in another way.

use std::io::Write;

/// Needs that may be missing where `CI=true`, with the reason.
pub const ACCEPTED: &[(&str, &str)] = &[
    ("/dev/kvm, for defining domains that use it", "KVM is optional; their XML is still checked by libvirt's schema"),
    ("node", "nothing else needs Node.js; the story of the web console uses the same modules in a browser"),
    (
        "chromium",
        "the story of the web console is the only one that needs a browser, of which the packages take 300 MB",
    ),
    (
        "metrics-server",
        "`make test-all` and `make test-long` build it; another story scales a pool by a metric of its own",
    ),
    ("swtpm, for its programs", "stories with a TPM run those of the launcher image"),
    ("qemu-img", "stories import images of all formats with that of the image virt-importer"),
    (
        "a node with a static CPU manager",
        "clusters of `cluster up --static-cpus` have one; the reason on others is checked",
    ),
    ("foreign cluster: a node with a static CPU manager", "kubelets of other clusters are configured by their owners"),
    (
        "image volumes that are off",
        "Kubernetes has them on from 1.35 on; `make versions` runs the story with the gate off",
    ),
    ("a node with 64 huge pages", "a host can refuse to reserve them"),
    (
        "nodes with both address families",
        "clusters of `cluster up --dual-stack` have them; `make node-test` runs the story on one",
    ),
    ("foreign cluster: nodes with both address families", "most clusters have one family"),
    (
        "a node with a processor that no other node offers",
        "where KVM runs guests, the node in a VM has the processor of the host",
    ),
    (
        "a node with huge pages and a static CPU manager",
        "it needs a cluster of its own: `FERROVIRT_STATIC_CPUS=node-1,node-2 make up`, where the guest also migrates",
    ),
    ("a node whose kernel can merge pages, and does not", "merging belongs to the host, which can have it on already"),
    ("foreign cluster: audit log", "only the test cluster writes an audit log to a file of this host"),
    ("foreign cluster: client certificate in the kubeconfig", "a kubeconfig may have a token instead"),
    ("foreign cluster: key of the front proxy's authority", "only the test cluster has its keys on this host"),
    ("foreign cluster: Multus", "a cluster of KUBECONFIG is used as it is, and Multus is optional"),
    ("foreign cluster: route to pods", "the attacker runs on this host and dials pod addresses"),
    ("foreign cluster: route from pods", "the collector of traces listens on this host"),
    ("foreign cluster: storage that all nodes share", "on other clusters volumes are made on the disk of one node"),
    ("foreign cluster: the test cluster's storage driver", "classes of other clusters have no known abilities"),
    ("foreign cluster: a layer-2 network of all nodes", "the bridges of other clusters are not known"),
    ("foreign cluster: directory of a kubelet on this host", "the device plugin of the story listens there"),
    ("foreign cluster: two nodes", "a cluster of KUBECONFIG may have one node, from which no VM can migrate"),
    ("foreign cluster: no other VMI", "a cluster of KUBECONFIG may run VMIs of others, which the story would evict"),
];

/// Prefix of needs that only a cluster of `KUBECONFIG` may lack.
pub const FOREIGN_CLUSTER: &str = "foreign cluster: ";

/// Reports that a test does not run, or not in full, because `need` is missing here.
///
/// # Panics
/// Panics with `CI=true` unless [`ACCEPTED`] lists the need.
#[track_caller]
pub fn skip(need: &str) {
    let ci = std::env::var_os("CI").is_some_and(|value| value == "true");
    match decide(ci, need) {
        // Written directly: the test harness shows the captured output of failed tests only.
        Ok(line) => drop(writeln!(std::io::stderr(), "SKIPPED {}: {line}", std::panic::Location::caller())),
        #[expect(clippy::panic, reason = "fails the test")]
        Err(line) => panic!("{line}"),
    }
}

fn decide(ci: bool, need: &str) -> Result<String, String> {
    match ACCEPTED.iter().find(|(accepted, _)| *accepted == need) {
        Some((_, reason)) => Ok(format!("{need}: {reason}")),
        None if ci => Err(format!("missing here, and not accepted by skips/src/lib.rs: {need}")),
        None => Ok(format!("missing here: {need}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_accepted_needs_may_be_missing_in_ci() {
        for (ci, need, skipped) in [
            (false, "device nodes", true),
            (true, "device nodes", false),
            (false, "foreign cluster: Multus", true),
            (true, "foreign cluster: Multus", true),
            (true, "Multus", false),
        ] {
            let outcome = decide(ci, need);
            assert_eq!(outcome.is_ok(), skipped, "{ci} {need}: {outcome:?}");
        }
    }

    #[test]
    fn each_accepted_need_is_listed_once_with_a_reason() {
        for (index, (need, reason)) in ACCEPTED.iter().enumerate() {
            assert!(!reason.is_empty(), "{need}");
            assert!(ACCEPTED[..index].iter().all(|(other, _)| other != need), "{need}");
        }
    }
}
