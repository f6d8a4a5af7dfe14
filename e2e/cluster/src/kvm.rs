//! Checks if KVM on the nodes can run a guest.
//!
//! `/dev/kvm` alone proves little: on some virtualized hosts VMs can be created but no guest kernel makes progress. The check
//! boots the tiny guest's kernel in a pod under KVM and waits for its first line of output.

use std::{path::Path, time::Duration};

use serde_json::json;

use crate::{
    command::wait,
    error::{Error, Result},
    kvm_result,
    plan::Plan,
    progress::Progress,
    target::Target,
};

const NAMESPACE: &str = "ferrovirt-kvm-check";
/// Time limit for the first line of the kernel. With working KVM it takes well under a second.
const LIMIT: Duration = Duration::from_secs(8);

/// Names of the images used by the check.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Images<'a> {
    /// Image with QEMU.
    pub launcher: &'a str,
    /// Image with a kernel.
    pub kernel: &'a str,
}

/// Returns true if guests run under KVM.
///
/// # Errors
/// Fails if the check cannot be carried out.
pub(crate) fn usable(plan: &Plan, target: &Target, images: Images<'_>, progress: &Progress) -> Result<bool> {
    if target.own && !Path::new("/dev/kvm").exists() {
        progress.step("no /dev/kvm: guests run under software emulation");
        return Ok(false);
    }
    if target.own
        && let Some(known) = kvm_result::read(plan)
    {
        progress.step(verdict(known));
        return Ok(known);
    }
    progress.step("checking that KVM can run a guest");
    let usable = try_guest(target, images);
    // The namespace is deleted in the background.
    target.kubectl.run(
        "removing the check",
        &["delete", "namespace", NAMESPACE, "--ignore-not-found", "--wait=false", "--grace-period=1"],
    )?;
    let usable = usable?;
    progress.step(verdict(usable));
    if target.own {
        kvm_result::write(plan, usable);
    }
    Ok(usable)
}

fn verdict(usable: bool) -> &'static str {
    if usable { "KVM runs guests" } else { "KVM cannot run guests here: they run under software emulation" }
}

fn manifest(images: Images<'_>) -> String {
    let qemu = [
        "/usr/bin/qemu-system-x86_64",
        "-machine",
        "q35,accel=kvm",
        "-cpu",
        "host",
        "-m",
        "256",
        "-nodefaults",
        "-display",
        "none",
        "-no-reboot",
        "-serial",
        "stdio",
        "-kernel",
        "/kernel/boot/vmlinuz",
        "-initrd",
        "/kernel/boot/initrd",
        "-append",
        "console=ttyS0 earlyprintk=ttyS0",
    ];
    json!({
        "apiVersion": "v1",
        "kind": "List",
        "items": [
            {
                "apiVersion": "v1",
                "kind": "Namespace",
                "metadata": {"name": NAMESPACE, "labels": {"pod-security.kubernetes.io/enforce": "privileged"}},
            },
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": "guest", "namespace": NAMESPACE},
                "spec": {
                    "restartPolicy": "Never",
                    "activeDeadlineSeconds": 60,
                    "terminationGracePeriodSeconds": 0,
                    "automountServiceAccountToken": false,
                    "containers": [{
                        "name": "guest",
                        "image": images.launcher,
                        "imagePullPolicy": "IfNotPresent",
                        "command": qemu,
                        "securityContext": {"privileged": true, "runAsUser": 0, "runAsNonRoot": false},
                        "volumeMounts": [
                            {"name": "kvm", "mountPath": "/dev/kvm"},
                            {"name": "kernel", "mountPath": "/kernel", "readOnly": true},
                        ],
                    }],
                    "volumes": [
                        {"name": "kvm", "hostPath": {"path": "/dev/kvm", "type": "CharDevice"}},
                        {"name": "kernel", "image": {"reference": images.kernel, "pullPolicy": "IfNotPresent"}},
                    ],
                },
            },
        ],
    })
    .to_string()
}

fn try_guest(target: &Target, images: Images<'_>) -> Result<bool> {
    let kubectl = &target.kubectl;
    // Pods are rejected until the controllers have created the service account of the new namespace.
    wait(
        "starting the KVM check",
        Duration::from_secs(60),
        Duration::from_millis(300),
        || kubectl.apply("starting the KVM check", &manifest(images)).map(|_| true).or(Ok(false)),
        String::new,
    )?;
    let phase = || {
        let get = ["get", "pod", "guest", "-n", NAMESPACE, "-o", "jsonpath={.status.phase}"];
        kubectl.answer("reading the pod of the KVM check", &get).map(Option::unwrap_or_default)
    };
    let started = wait(
        "starting the KVM check",
        Duration::from_secs(40),
        Duration::from_millis(300),
        || Ok(phase()? != "Pending"),
        String::new,
    );
    match started {
        Ok(()) => {}
        // The pod does not start on a node without /dev/kvm.
        Err(Error::Timeout { .. }) => return Ok(false),
        Err(error) => return Err(error),
    }
    let mut booted = false;
    let ended = wait(
        "waiting for the guest's kernel",
        LIMIT,
        Duration::from_millis(300),
        || {
            // The phase is read before the log so that output just before the exit is seen.
            let ended = phase()? != "Running";
            let log = kubectl.answer("reading the guest's output", &["logs", "guest", "-n", NAMESPACE])?;
            booted = log.is_some_and(|log| log.contains("Linux version"));
            Ok(booted || ended)
        },
        String::new,
    );
    match ended {
        Ok(()) | Err(Error::Timeout { .. }) => Ok(booted),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn check_boots_a_kernel_under_kvm() {
        let text = manifest(Images { launcher: "l", kernel: "k" });
        assert!(text.contains("accel=kvm") && text.contains("/kernel/boot/vmlinuz"));
    }
}
