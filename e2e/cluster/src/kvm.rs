//! Whether the nodes' KVM can run a guest: found out by running one.
//!
//! `/dev/kvm` being there says little: on some virtualized hosts machines can be created but no guest kernel gets
//! anywhere. So a pod boots the tiny guest's kernel under KVM, and its first line of output is the proof.

use std::{fs, path::Path, time::Duration};

use serde_json::json;

use crate::{
    command::wait,
    error::{Error, Result},
    plan::Plan,
    progress::Progress,
    target::Target,
};

const NAMESPACE: &str = "ferrovirt-kvm-check";
/// How long the kernel may take to its first line. It takes well under a second where KVM works.
const LIMIT: Duration = Duration::from_secs(8);

/// The names of the images used.
#[derive(Clone, Copy, Debug)]
pub struct Images<'a> {
    /// Has QEMU.
    pub launcher: &'a str,
    /// Has a kernel.
    pub kernel: &'a str,
}

/// Whether guests run under KVM there.
///
/// # Errors
/// When the check itself cannot be done.
pub fn usable(plan: &Plan, target: &Target, images: Images<'_>, progress: &Progress) -> Result<bool> {
    if target.own && !Path::new("/dev/kvm").exists() {
        progress.step("no /dev/kvm: machines run under software emulation");
        return Ok(false);
    }
    // The answer holds as long as the host is up.
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let memory = plan.build().join("kvm.json");
    if target.own
        && let Some(known) = fs::read_to_string(&memory).ok().and_then(|text| recall(&text, boot.trim()))
    {
        progress.step(verdict(known));
        return Ok(known);
    }
    progress.step("trying whether KVM can run a guest");
    let usable = try_guest(target, images);
    // The rest of the namespace goes by itself, and nothing waits for it.
    target.kubectl.run(
        "removing the check",
        &["delete", "namespace", NAMESPACE, "--ignore-not-found", "--wait=false", "--grace-period=1"],
    )?;
    let usable = usable?;
    progress.step(verdict(usable));
    if target.own {
        // Only a shortcut: without it the check is done again.
        let _ = fs::write(memory, json!({"boot": boot.trim(), "usable": usable}).to_string());
    }
    Ok(usable)
}

fn verdict(usable: bool) -> &'static str {
    if usable { "KVM runs guests" } else { "KVM runs no guest here: machines run under software emulation" }
}

fn recall(text: &str, boot: &str) -> Option<bool> {
    let value: serde_json::Value = serde_json::from_str(text).ok()?;
    (value["boot"].as_str()? == boot).then(|| value["usable"].as_bool()).flatten()
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
    // A namespace's service account is made a moment after it, and pods are refused until then.
    wait(
        "starting the KVM check",
        Duration::from_secs(60),
        Duration::from_millis(300),
        || kubectl.apply("starting the KVM check", &manifest(images)).map(|_| true).or(Ok(false)),
        String::new,
    )?;
    let phase = || {
        let get = ["get", "pod", "guest", "-n", NAMESPACE, "-o", "jsonpath={.status.phase}"];
        kubectl.answer("looking at the KVM check", &get).map(Option::unwrap_or_default)
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
        // A node without /dev/kvm does not start it.
        Err(Error::Timeout { .. }) => return Ok(false),
        Err(error) => return Err(error),
    }
    let mut spoke = false;
    let ended = wait(
        "waiting for the guest's kernel",
        LIMIT,
        Duration::from_millis(300),
        || {
            // In this order: what it says before it ends is seen.
            let ended = phase()? != "Running";
            let log = kubectl.answer("reading the guest's output", &["logs", "guest", "-n", NAMESPACE])?;
            spoke = log.is_some_and(|log| log.contains("Linux version"));
            Ok(spoke || ended)
        },
        String::new,
    );
    match ended {
        Ok(()) | Err(Error::Timeout { .. }) => Ok(spoke),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answer_is_remembered_for_the_same_boot_only() {
        let text = json!({"boot": "one", "usable": true}).to_string();
        assert_eq!(recall(&text, "one"), Some(true));
        assert_eq!(recall(&text, "two"), None);
        assert_eq!(recall("not json", "one"), None);
    }

    #[test]
    fn check_boots_a_kernel_under_kvm() {
        let text = manifest(Images { launcher: "l", kernel: "k" });
        assert!(text.contains("accel=kvm") && text.contains("/kernel/boot/vmlinuz"));
    }
}
