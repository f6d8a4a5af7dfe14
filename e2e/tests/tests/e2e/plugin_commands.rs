//! Commands of `kubectl virt` that print manifests, the load of guests and pages about VMs, and those about credentials.

use std::time::Duration;

use anyhow::{Result, ensure};
use ferrovirt_e2e_tests::{Story, TIMEOUT, story};
use serde_json::Value;

use crate::manifests;

/// Pause between looks at what a command prints.
const PAUSE: Duration = Duration::from_millis(500);

/// Returns arguments for an instance type and a preference: those of the bundle, or like them in the story's namespace.
async fn sizes(s: &Story) -> Result<[&'static str; 2]> {
    let has = async |kind: &str, name: &str| s.command_line(&format!("kubectl get {kind} {name}"), "").await;
    let (instancetype, _) = has("virtualmachineclusterinstancetype", "u1.nano").await?;
    let (preference, _) = has("virtualmachineclusterpreference", "alpine").await?;
    if instancetype && preference {
        return Ok(["--instancetype=u1.nano", "--preference=alpine"]);
    }
    s.apply(&s.virt(&["create", "instancetype", "--name=nano", "--cpu=1", "--memory=512Mi"]).await?).await?;
    let preference = s.virt(&["create", "preference", "--name=linux", "--cpu-topology=sockets"]).await?;
    s.apply(&preference.replace("spec:\n", "spec:\n  devices: {preferredDiskBus: virtio}\n")).await?;
    Ok(["--instancetype=virtualmachineinstancetype/nano", "--preference=virtualmachinepreference/linux"])
}

#[test]
fn printed_manifest_of_a_vm_boots() {
    story("create-vm", async |s| {
        let sizes = sizes(s).await?;
        let image = "--volume-containerdisk=src:ferrovirt.io/guests/tiny:devel";
        let words =
            ["create", "vm", "--name=made", sizes[0], sizes[1], image, "--user=root", "--ssh-key=ssh-ed25519 A"];
        let manifest = s.virt(&words).await?;
        let (applied, said) = s.command_line("kubectl apply --filename -", &manifest).await?;
        ensure!(applied, "{said}\n{manifest}");
        let vmi = s.wait_running("made").await?;
        let memory = &vmi["spec"]["domain"]["memory"]["guest"];
        ensure!(memory == "512Mi", "the memory is {memory}, not that of the instance type");
        let volumes = vmi["spec"]["volumes"].to_string();
        ensure!(volumes.contains("made-containerdisk-0") && volumes.contains("cloudinitdisk"), "{volumes}");
        let mut console = s.console("made")?;
        console.login("root", "ferrovirt").await?;
        console.leave().await?;
        Ok(())
    });
}

#[test]
fn top_shows_the_load_of_a_running_guest_to_viewers() {
    story("top", async |s| {
        s.apply(&manifests::masqueraded("busy", "Always")).await?;
        s.apply(
            "
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: viewer}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: view}
subjects: [{apiGroup: rbac.authorization.k8s.io, kind: User, name: viewer-of-top}]
",
        )
        .await?;
        s.wait_running("busy").await?;
        let mut console = s.console("busy")?;
        console.login("root", "story").await?;
        console.run("(while :; do :; done) > /dev/null 2>&1 & sleep 0").await?;
        console.leave().await?;
        let deadline = tokio::time::Instant::now() + TIMEOUT;
        loop {
            let words = ["top", "busy", "--interval=3s", "--output=json", "--as=viewer-of-top"];
            // A busy node can be too late.
            let shown: Value = match s.virt(&words).await {
                Err(_) if tokio::time::Instant::now() < deadline => continue,
                printed => serde_json::from_str(&printed?)?,
            };
            let usage = &shown["items"][0]["usage"];
            // The hosts of tests are shared: the guest gets a part of a processor.
            if usage["cpuCores"].as_f64().is_some_and(|cores| cores > 0.2) {
                ensure!(usage["memory"]["usedBytes"].as_u64().is_some_and(|bytes| bytes > 0), "no memory: {usage}");
                ensure!(usage["disks"][0]["name"] == "root" && usage["interfaces"][0]["name"] == "default", "{usage}");
                break;
            }
            ensure!(tokio::time::Instant::now() < deadline, "the guest is busy, but top shows {shown}");
        }
        let table = s.virt(&["top", "--sort-by=cpu", "--devices"]).await?;
        ensure!(table.starts_with("NAME") && table.contains("busy") && table.contains("  default"), "{table}");
        let refused = s.virt(&["top", "busy", "--as=nobody-at-all"]).await;
        ensure!(refused.is_err(), "a user without rights sees {refused:?}");
        Ok(())
    });
}

#[test]
fn describe_names_what_a_vm_waits_for() {
    story("describe", async |s| {
        let nowhere = manifests::vm("stuck", "Always").replace(
            "      terminationGracePeriodSeconds",
            "      nodeSelector: {zone: nowhere}\n      terminationGracePeriodSeconds",
        );
        s.apply(&nowhere).await?;
        let with_tpm = manifests::vm("halted", "Halted")
            .replace("        devices:\n", "        devices:\n          tpm: {persistent: true}\n");
        s.apply(&with_tpm).await?;
        s.virt(&["snapshot", "halted", "kept"]).await?;
        let deadline = tokio::time::Instant::now() + TIMEOUT;
        loop {
            let report: Value = serde_json::from_str(&s.virt(&["describe", "stuck", "--output=json"]).await?)?;
            let detail = report["detail"].as_str().unwrap_or_default();
            let has_events = report["events"].as_array().is_some_and(|events| !events.is_empty());
            if detail.contains("nodes are available") && has_events {
                break;
            }
            ensure!(tokio::time::Instant::now() < deadline, "no reason for the wait: {report:#}");
            tokio::time::sleep(PAUSE).await;
        }
        let parts =
            ["State:", "nodes are available", "Volumes:", "root", "containerDisk", "Events:", "SuccessfulCreate"];
        loop {
            let page = s.virt(&["describe", "stuck"]).await?;
            let Some(part) = parts.iter().find(|part| !page.contains(**part)) else { break };
            ensure!(tokio::time::Instant::now() < deadline, "no {part:?} in\n{page}");
            tokio::time::sleep(PAUSE).await;
        }
        let page = s.virt(&["describe", "halted"]).await?;
        for part in ["start it with: kubectl virt start halted", "TPM      yes", "VirtualMachineSnapshot/kept"] {
            ensure!(page.contains(part), "no {part:?} in\n{page}");
        }
        let missing = s.virt(&["describe", "nothing"]).await;
        ensure!(missing.is_err_and(|error| error.to_string().contains("no VM or VMI nothing")), "a missing VM");
        Ok(())
    });
}

#[test]
fn ssh_keys_of_a_stopped_vm_are_added_and_removed() {
    story("credentials", async |s| {
        s.apply(&manifests::vm("keys", "Halted")).await?;
        let key = "--value=ssh-ed25519 AAAA me";
        s.virt(&["credentials", "add-ssh-key", "keys", "--user=root", key]).await?;
        let vm = s.get("vm", "keys").await?;
        let credential = &vm["spec"]["template"]["spec"]["accessCredentials"][0]["sshPublicKey"];
        ensure!(credential["propagationMethod"]["qemuGuestAgent"]["users"][0] == "root", "{credential}");
        let said = s.virt(&["credentials", "add-ssh-key", "keys", "--user=root", key]).await?;
        ensure!(said.contains("already contains this SSH key"), "{said}");
        let other = "--value=ssh-ed25519 BBBB you";
        let said = s.virt(&["credentials", "add-ssh-key", "keys", "--user=root", other]).await?;
        ensure!(said.contains("Successfully added the key to secret"), "{said}");
        let said = s.virt(&["credentials", "remove-ssh-key", "keys", "--user=root", key]).await?;
        ensure!(said.contains("Successfully removed the key"), "{said}");
        let said = s.virt(&["credentials", "remove-ssh-key", "keys", "--user=root", key]).await?;
        ensure!(said.contains("does not contain this SSH key"), "{said}");
        let secret = credential["source"]["secret"]["secretName"].as_str().unwrap_or_default();
        let secret = s.get("Secret", secret).await?;
        ensure!(secret["data"].as_object().is_some_and(|data| data.len() == 1), "the other key remains");
        Ok(())
    });
}

#[test]
fn settings_of_the_installation_are_shown_and_uploads_name_what_they_need() {
    story("settings", async |s| {
        let shown = s.virt(&["adm", "log-verbosity", "--all"]).await?;
        ensure!(shown.contains("virt-handler = ") && shown.contains("virt-api = "), "{shown}");
        let shown = s.virt(&["permitted-devices", "--as=nobody-at-all"]).await?;
        ensure!(shown.starts_with("Permitted Devices:"), "{shown}");
        s.apply(&manifests::vm("loud", "Halted")).await?;
        s.virt(&["adm", "log-verbosity", "--vm=loud", "--level=5"]).await?;
        let shown = s.virt(&["adm", "log-verbosity", "--vm=loud"]).await?;
        ensure!(shown.trim() == "loud = 5", "{shown}");
        s.virt(&["adm", "log-verbosity", "--reset=loud"]).await?;
        let labels = s.get("vm", "loud").await?["spec"]["template"]["metadata"]["labels"].clone();
        ensure!(labels.get("logVerbosity").is_none(), "{labels}");
        let (has_cdi, _) = s.command_line("kubectl get --raw /apis/upload.cdi.kubevirt.io/v1beta1", "").await?;
        let image = std::env::current_exe()?;
        let image = format!("--image-path={}", image.display());
        let uploaded = s.virt(&["image-upload", "dv", "disk", "--size=1Gi", &image]).await;
        if !has_cdi {
            let error = uploaded.err().map(|error| error.to_string()).unwrap_or_default();
            ensure!(error.contains("needs the upload API of CDI"), "{error}");
        }
        Ok(())
    });
}
