//! A stolen token of virt-controller permits only the writes that virt-controller needs.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{Story, story};
use http::{Method, Request};
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};

use crate::manifests;

/// Changes a launcher pod.
type Change = fn(&mut Value);

/// Pods that virt-controller must not be able to create, as changes of a launcher pod.
const REFUSED_PODS: &[(&str, Change)] = &[
    ("privileged", |pod| {
        pod["spec"]["containers"][0]["securityContext"] = json!({"privileged": true});
    }),
    ("root", |pod| {
        pod["spec"]["containers"][0]["securityContext"]["runAsUser"] = json!(0);
        pod["spec"]["containers"][0]["securityContext"]["runAsNonRoot"] = json!(false);
    }),
    ("root by the pod", |pod| {
        pod["spec"]["securityContext"]["runAsUser"] = json!(0);
        pod["spec"]["securityContext"]["runAsNonRoot"] = json!(false);
    }),
    ("capability", |pod| {
        pod["spec"]["containers"][0]["securityContext"]["capabilities"]["add"] = json!(["SYS_ADMIN"]);
    }),
    ("unconfined", |pod| pod["spec"]["securityContext"]["seccompProfile"] = json!({"type": "Unconfined"})),
    ("SELinux", |pod| pod["spec"]["securityContext"]["seLinuxOptions"] = json!({"type": "spc_t"})),
    ("network of the node", |pod| pod["spec"]["hostNetwork"] = json!(true)),
    ("processes of the node", |pod| pod["spec"]["hostPID"] = json!(true)),
    ("node of its choice", |pod| pod["spec"]["nodeName"] = json!("somewhere")),
    ("directory of the node", |pod| {
        push(&mut pod["spec"]["volumes"], json!({"name": "host", "hostPath": {"path": "/"}}));
    }),
    ("directory of the node for a disk, without its feature gate", |pod| {
        let directory = json!({"path": "/srv", "type": "Directory"});
        push(&mut pod["spec"]["volumes"], json!({"name": "host", "hostPath": directory}));
    }),
    ("no owner", |pod| pod["metadata"]["ownerReferences"] = json!([])),
    ("owner of another kind", |pod| {
        pod["metadata"]["ownerReferences"][0]["apiVersion"] = json!("apps/v1");
        pod["metadata"]["ownerReferences"][0]["kind"] = json!("ReplicaSet");
    }),
    ("owner that does not control it", |pod| pod["metadata"]["ownerReferences"][0]["controller"] = json!(false)),
    ("owner that its label does not name", |pod| pod["metadata"]["ownerReferences"][0]["uid"] = json!("another")),
    ("no launcher", |pod| pod["metadata"]["labels"]["kubevirt.io"] = json!("virt-handler")),
    ("image of its own with a Secret", |pod| {
        pod["spec"]["containers"][0]["image"] = json!("ferrovirt.io/toolbox:devel");
        with_secret(pod);
    }),
    ("image of a similar name", |pod| {
        let image = pod["spec"]["containers"][0]["image"].as_str().unwrap_or_default().replace(':', "-2:");
        pod["spec"]["containers"][0]["image"] = json!(image);
    }),
    ("second container with a Secret", |pod| {
        with_secret(pod);
        let mount = json!({"name": "stolen", "mountPath": "/stolen"});
        push(
            &mut pod["spec"]["containers"],
            json!({"name": "reader", "image": "ferrovirt.io/toolbox:devel", "volumeMounts": [mount]}),
        );
    }),
    ("init container with a Secret", |pod| {
        let env = json!({"name": "A", "valueFrom": {"secretKeyRef": {"name": "of-the-tenant", "key": "a"}}});
        let container = json!({"name": "first", "image": "ferrovirt.io/toolbox:devel", "env": [env]});
        pod["spec"]["initContainers"] = json!([container]);
    }),
    ("second container with all of a Secret", |pod| {
        let from = json!({"secretRef": {"name": "of-the-tenant"}});
        let container = json!({"name": "reader", "image": "ferrovirt.io/toolbox:devel", "envFrom": [from]});
        push(&mut pod["spec"]["containers"], container);
    }),
    ("privileged second container", |pod| {
        let context = json!({"privileged": true});
        let container = json!({"name": "second", "image": "ferrovirt.io/toolbox:devel", "securityContext": context});
        push(&mut pod["spec"]["containers"], container);
    }),
    ("another program of the launcher's image", |pod| {
        pod["spec"]["containers"][0]["command"] = json!(["/bin/sh", "-c", "env"]);
    }),
    ("hook", |pod| {
        pod["spec"]["containers"][0]["lifecycle"] = json!({"postStart": {"exec": {"command": ["/bin/sh"]}}});
    }),
    ("probe", |pod| pod["spec"]["containers"][0]["livenessProbe"] = json!({"exec": {"command": ["/bin/sh"]}})),
    ("library of its own", |pod| {
        push(&mut pod["spec"]["containers"][0]["env"], json!({"name": "LD_PRELOAD", "value": "/x.so"}));
    }),
    ("worker of its own", |pod| {
        push(&mut pod["spec"]["containers"][0]["env"], json!({"name": "VIRT_LAUNCHER_WORKER", "value": "/bin/sh"}));
    }),
    ("search path of its own", |pod| {
        push(&mut pod["spec"]["containers"][0]["env"], json!({"name": "PATH", "value": "/var/run/kubevirt-private"}));
    }),
    ("another directory of configurations", |pod| {
        push(&mut pod["spec"]["containers"][0]["env"], json!({"name": "XDG_CONFIG_HOME", "value": "/var/run/x"}));
    }),
    ("environment of a ConfigMap", |pod| {
        pod["spec"]["containers"][0]["envFrom"] = json!([{"configMapRef": {"name": "of-the-tenant"}}]);
    }),
    ("startup probe", |pod| pod["spec"]["containers"][0]["startupProbe"] = json!({"exec": {"command": ["/bin/sh"]}})),
    ("programs of its own", |pod| mount_private(pod, 0, "/usr/bin")),
    ("programs of its own by a detour", |pod| mount_private(pod, 0, "/var/run/../../usr/bin")),
    ("configuration of libvirt of its own", |pod| mount_private(pod, 0, "/var/run/libvirt/qemu.conf")),
    ("second container with a volume of the launcher", |pod| {
        push(&mut pod["spec"]["containers"], json!({"name": "second", "image": "ferrovirt.io/toolbox:devel"}));
        mount_private(pod, 1, "/tmp");
    }),
    // kube-apiserver mounts the token into all containers.
    ("second container in a pod with a token", |pod| {
        push(&mut pod["spec"]["containers"], json!({"name": "second", "image": "ferrovirt.io/toolbox:devel"}));
        pod["spec"]["automountServiceAccountToken"] = json!(true);
    }),
    ("init container in a pod with a token", |pod| {
        pod["spec"]["initContainers"] = json!([{"name": "first", "image": "ferrovirt.io/toolbox:devel"}]);
        pod["spec"]["automountServiceAccountToken"] = json!(true);
    }),
    ("second container with a projected token", |pod| {
        let token = json!({"serviceAccountToken": {"path": "token"}});
        push(&mut pod["spec"]["volumes"], json!({"name": "token", "projected": {"sources": [token]}}));
        let mount = json!({"name": "token", "mountPath": "/token"});
        push(
            &mut pod["spec"]["containers"],
            json!({"name": "second", "image": "ferrovirt.io/toolbox:devel", "volumeMounts": [mount]}),
        );
    }),
];

/// Mounts a volume of the launcher into a container.
fn mount_private(pod: &mut Value, container: usize, path: &str) {
    let mount = json!({"name": "private", "mountPath": path});
    push(&mut pod["spec"]["containers"][container]["volumeMounts"], mount);
}

/// Namespaces in which virt-controller must not be able to create a launcher pod.
const REFUSED_NAMESPACES: [&str; 3] = ["kube-system", "kube-public", "kubevirt"];

/// Pods that attach volumes and that virt-controller must not be able to create, as changes of a permitted one.
const REFUSED_ATTACHMENTS: &[(&str, Change)] = &[
    ("root", |pod| pod["spec"]["securityContext"] = json!({"runAsUser": 0})),
    ("owner of another kind", |pod| pod["metadata"]["ownerReferences"][0]["kind"] = json!("Node")),
    ("another program", |pod| pod["spec"]["containers"][0]["command"] = json!(["/bin/sh", "-c", "env", "x"])),
    ("another image", |pod| pod["spec"]["containers"][0]["image"] = json!("ferrovirt.io/toolbox:devel")),
    ("directory of the node", |pod| {
        push(&mut pod["spec"]["volumes"], json!({"name": "host", "hostPath": {"path": "/"}}));
    }),
    ("Secret", |pod| {
        push(&mut pod["spec"]["volumes"], json!({"name": "s", "secret": {"secretName": "of-the-tenant"}}))
    }),
    ("token", |pod| pod["spec"]["automountServiceAccountToken"] = json!(true)),
    ("probe", |pod| pod["spec"]["containers"][0]["livenessProbe"] = json!({"exec": {"command": ["/bin/sh"]}})),
    ("programs of its own", |pod| {
        let mount = json!({"name": "hotplug-disks", "mountPath": "/volumes/../usr/bin"});
        push(&mut pod["spec"]["containers"][0]["volumeMounts"], mount);
    }),
    ("second container", |pod| {
        push(&mut pod["spec"]["containers"], json!({"name": "second", "image": "ferrovirt.io/toolbox:devel"}));
    }),
];

/// Returns a pod that attaches a volume of a launcher pod.
fn attachment_of(launcher: &Value) -> Value {
    let own = json!({"allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]}});
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"generateName": "hp-volume-", "labels": {"kubevirt.io": "hotplug-disk"}, "ownerReferences": [{
            "apiVersion": "v1", "kind": "Pod", "controller": true,
            "name": launcher["metadata"]["name"], "uid": launcher["metadata"]["uid"]}]},
        "spec": {
            "automountServiceAccountToken": false,
            "securityContext": {"runAsNonRoot": true, "runAsUser": 107, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [{
                "name": "hotplug-disk", "image": launcher["spec"]["containers"][0]["image"], "securityContext": own,
                "command": ["/usr/bin/virt-launcher", "hold-volumes", "--socket", "/path/hp.sock", "--vmi-uid", "u",
                    "--volume", "data"],
                "volumeMounts": [{"name": "hotplug-disks", "mountPath": "/path"}],
                "volumeDevices": [{"name": "data", "devicePath": "/path/data/uid"}],
            }],
            "volumes": [
                {"name": "hotplug-disks", "emptyDir": {}},
                {"name": "data", "persistentVolumeClaim": {"claimName": "data"}},
            ],
        },
    })
}

/// Pods that read the mark of a migration and that virt-controller must not be able to create, as changes of a permitted one.
const REFUSED_RECOVERIES: &[(&str, Change)] = &[
    ("root", |pod| pod["spec"]["securityContext"] = json!({"runAsUser": 0})),
    ("owner of another kind", |pod| pod["metadata"]["ownerReferences"][0]["kind"] = json!("VirtualMachine")),
    ("another program", |pod| pod["spec"]["containers"][0]["command"][1] = json!("hold-volumes")),
    ("another image", |pod| pod["spec"]["containers"][0]["image"] = json!("ferrovirt.io/toolbox:devel")),
    ("Secret", |pod| {
        push(&mut pod["spec"]["volumes"], json!({"name": "s", "secret": {"secretName": "of-the-tenant"}}))
    }),
    ("token", |pod| pod["spec"]["automountServiceAccountToken"] = json!(true)),
    ("claim to write to", |pod| pod["spec"]["containers"][0]["volumeMounts"][0]["readOnly"] = json!(false)),
    ("programs of its own", |pod| pod["spec"]["containers"][0]["volumeMounts"][0]["mountPath"] = json!("/usr/bin")),
];

/// Returns a pod that reads the mark of a migration.
fn recovery_of(launcher: &Value) -> Value {
    let own = json!({"allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]}});
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": "recover-m", "labels": {"kubevirt.io": "virt-state-recovery"}, "ownerReferences": [{
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstanceMigration", "controller": true, "name": "m", "uid": "u"}]},
        "spec": {
            "automountServiceAccountToken": false,
            "securityContext": {"runAsNonRoot": true, "runAsUser": 107, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [{
                "name": "recovery", "image": launcher["spec"]["containers"][0]["image"], "securityContext": own,
                "command": ["/usr/bin/virt-launcher", "find-migrated", "--directory", "/state", "--migration", "u"],
                "resources": {"limits": {"cpu": "200m", "memory": "60M"}},
                "volumeMounts": [{"name": "vm-state", "mountPath": "/state", "readOnly": true}],
            }],
            "volumes": [{"name": "vm-state", "persistentVolumeClaim": {"claimName": "of-the-tenant"}}],
        },
    })
}

fn push(list: &mut Value, item: Value) {
    match list.as_array_mut() {
        Some(list) => list.push(item),
        None => *list = json!([item]),
    }
}

fn with_secret(pod: &mut Value) {
    push(&mut pod["spec"]["volumes"], json!({"name": "stolen", "secret": {"secretName": "of-the-tenant"}}));
    let mount = json!({"name": "stolen", "mountPath": "/var/run/stolen"});
    push(&mut pod["spec"]["containers"][0]["volumeMounts"], mount);
}

#[test]
fn virt_controller_creates_and_deletes_launcher_pods_only() {
    story("controller-pods", async |s| {
        // Pod security of the story's namespace would refuse most of these pods.
        let label = json!({"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "privileged"}}});
        let namespaces = s.cluster_api("Namespace");
        namespaces.patch(&s.namespace, &PatchParams::default(), &Patch::Merge(label)).await?;
        s.apply(&manifests::kernel_vmi("box")).await?;
        s.wait_running("box").await?;
        let launcher = serde_json::to_value(s.launcher_pod("box").await?)?;
        let pods = format!("/api/v1/namespaces/{}/pods", s.namespace);

        let launcher_name = launcher["metadata"]["name"].as_str().context("a pod without name")?.to_owned();
        let mut original = copy(&launcher);
        original["metadata"]["generateName"] = json!("virt-launcher-box-");
        let answer = send(s, &Method::POST, &format!("{pods}?dryRun=All"), &original).await?;
        ensure!(answer.is_none(), "a launcher pod is refused: {answer:?}");
        // As it is scheduled while a claim waits for its first consumer.
        let mut temporary = original.clone();
        temporary["spec"]["containers"][0]["command"] = json!(["/usr/bin/virt-launcher", "bind-claims"]);
        let answer = send(s, &Method::POST, &format!("{pods}?dryRun=All"), &temporary).await?;
        ensure!(answer.is_none(), "a temporary pod is refused: {answer:?}");
        let mut with_sidecar = original.clone();
        push(&mut with_sidecar["spec"]["volumes"], json!({"name": "own", "emptyDir": {}}));
        let mount = json!({"name": "own", "mountPath": "/tmp"});
        push(
            &mut with_sidecar["spec"]["containers"],
            json!({"name": "proxy", "image": "ferrovirt.io/toolbox:devel", "volumeMounts": [mount]}),
        );
        let answer = send(s, &Method::POST, &format!("{pods}?dryRun=All"), &with_sidecar).await?;
        ensure!(answer.is_none(), "a launcher pod with a sidecar is refused: {answer:?}");
        let mut with_token = original.clone();
        with_token["spec"]["automountServiceAccountToken"] = json!(true);
        let answer = send(s, &Method::POST, &format!("{pods}?dryRun=All"), &with_token).await?;
        ensure!(answer.is_none(), "a launcher pod with a token is refused: {answer:?}");
        let mut with_cloud = original.clone();
        let token = json!({"serviceAccountToken": {"path": "token", "audience": "cloud.test"}});
        push(&mut with_cloud["spec"]["volumes"], json!({"name": "cloud", "projected": {"sources": [token]}}));
        let mount = json!({"name": "cloud", "mountPath": "/var/run/secrets/cloud.test/serviceaccount"});
        push(&mut with_cloud["spec"]["containers"][0]["volumeMounts"], mount);
        let answer = send(s, &Method::POST, &format!("{pods}?dryRun=All"), &with_cloud).await?;
        ensure!(answer.is_none(), "a launcher pod with the token of a cloud is refused: {answer:?}");
        let mut wrong = Vec::new();
        for (what, change) in REFUSED_PODS {
            let mut pod = original.clone();
            change(&mut pod);
            let answer = send(s, &Method::POST, &format!("{pods}?dryRun=All"), &pod).await?;
            // The API server names one of the policies that refuse a pod.
            if !["pod-creation", "pod-host-paths"].iter().any(|policy| by_policy(answer.as_ref(), policy)) {
                wrong.push(format!("{what}: {answer:?}"));
            }
        }
        for namespace in REFUSED_NAMESPACES {
            let mut pod = original.clone();
            pod["metadata"]["namespace"] = json!(namespace);
            let path = format!("/api/v1/namespaces/{namespace}/pods?dryRun=All");
            let answer = send(s, &Method::POST, &path, &pod).await?;
            if !by_policy(answer.as_ref(), "pod-creation") {
                wrong.push(format!("namespace {namespace}: {answer:?}"));
            }
            let vmi = json!({"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance",
                "metadata": {"name": "box"}, "spec": {"domain": {"devices": {}, "memory": {"guest": "64Mi"}}}});
            let path = format!("/apis/kubevirt.io/v1/namespaces/{namespace}/virtualmachineinstances?dryRun=All");
            let request = Request::post(path).header("Content-Type", "application/json");
            match s.client.request_text(request.body(vmi.to_string().into_bytes())?).await {
                Err(kube::Error::Api(status)) if status.message.contains("no pods of VMIs are created in it") => {}
                answer => wrong.push(format!("VMI in namespace {namespace}: {answer:?}")),
            }
        }
        let attachment = attachment_of(&launcher);
        let answer = send(s, &Method::POST, &format!("{pods}?dryRun=All"), &attachment).await?;
        ensure!(answer.is_none(), "a pod that attaches a volume is refused: {answer:?}");
        for (what, change) in REFUSED_ATTACHMENTS {
            let mut pod = attachment.clone();
            change(&mut pod);
            let answer = send(s, &Method::POST, &format!("{pods}?dryRun=All"), &pod).await?;
            if !by_policy(answer.as_ref(), "pod-creation") {
                wrong.push(format!("attachment, {what}: {answer:?}"));
            }
        }
        let recovery = recovery_of(&launcher);
        let answer = send(s, &Method::POST, &format!("{pods}?dryRun=All"), &recovery).await?;
        ensure!(answer.is_none(), "a pod that reads the mark of a migration is refused: {answer:?}");
        for (what, change) in REFUSED_RECOVERIES {
            let mut pod = recovery.clone();
            change(&mut pod);
            let answer = send(s, &Method::POST, &format!("{pods}?dryRun=All"), &pod).await?;
            if !by_policy(answer.as_ref(), "pod-creation") {
                wrong.push(format!("recovery, {what}: {answer:?}"));
            }
        }
        ensure!(wrong.is_empty(), "pods that no policy refuses:\n{}", wrong.join("\n"));
        // Nobody else makes a pod from which virt-handler would take volumes.
        let forged = s.client.request_text(
            Request::post(format!("{pods}?dryRun=All"))
                .header("Content-Type", "application/json")
                .body(attachment.to_string().into_bytes())?,
        );
        let Err(kube::Error::Api(refusal)) = forged.await else {
            anyhow::bail!("a user may attach volumes to a launcher")
        };
        ensure!(refusal.message.contains("kubevirt-attachment-owner-policy"), "{}", refusal.message);

        s.apply(
            "
apiVersion: v1
kind: Pod
metadata: {name: bystander, labels: {kubevirt.io: virt-launcher}}
spec:
  schedulerName: nobody
  containers:
  - {name: compute, image: 'ferrovirt.io/toolbox:devel', resources: {requests: {cpu: 100m}}}
",
        )
        .await?;
        let (bystander, launcher) = (format!("{pods}/bystander"), format!("{pods}/{launcher_name}"));
        let owners = &original["metadata"]["ownerReferences"];
        for (name, owners) in [("of-a-user", &json!([])), ("of-a-vmi", owners)] {
            let budget = json!({"apiVersion": "policy/v1", "kind": "PodDisruptionBudget",
                "metadata": {"name": name, "ownerReferences": owners},
                "spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": name}}}});
            s.apply(&budget.to_string()).await?;
        }
        // virt-controller deletes this one itself.
        s.wait_gone("PodDisruptionBudget", "of-a-vmi", Duration::from_secs(60)).await?;
        let vmi = owners[0]["name"].as_str().context("the launcher has no owner")?;
        let deletion = s.wait_event(vmi, "SuccessfulDelete", Duration::from_secs(10)).await?;
        ensure!(deletion == "Deleted PodDisruptionBudget of-a-vmi", "{deletion}");
        let budgets = format!("/apis/policy/v1/namespaces/{}/poddisruptionbudgets", s.namespace);
        let adoption =
            json!({"metadata": {"ownerReferences": owners, "labels": {"kubevirt.io/created-by": owners[0]["uid"]}}});
        let delete = json!({"dryRun": ["All"]});
        let eviction = json!({"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": "bystander"},
            "deleteOptions": delete});
        // Neither True nor False: the pod may have either, and what changes nothing is permitted.
        let status = json!({"status": {"conditions": [{"type": "Ready", "status": "Unknown"}]}});
        let resources = json!({"requests": {"cpu": "111m"}});
        let resize = json!({"spec": {"containers": [{"name": "compute", "resources": resources}]}});
        let gate = json!({"status": {"conditions": [
            {"type": "kubevirt.io/virtual-machine-unpaused", "status": "True", "reason": "Again"}]}});
        check(
            s,
            &[
                (Method::DELETE, bystander.clone(), delete.clone(), Some("pod-deletion")),
                (Method::DELETE, launcher.clone(), delete.clone(), None),
                (Method::DELETE, format!("{budgets}/of-a-user"), delete, Some("budget-deletion")),
                (Method::POST, format!("{bystander}/eviction"), eviction, Some("pod-eviction")),
                (Method::PATCH, bystander.clone(), labels("kubevirt.io/nodeName", "x"), Some("pods")),
                (Method::PATCH, launcher.clone(), labels("kubevirt.io/nodeName", "x"), None),
                (Method::PATCH, launcher.clone(), labels("app", "x"), Some("pods")),
                (Method::PATCH, launcher.clone(), labels("kubevirt.io", "x"), Some("pods")),
                (Method::PATCH, launcher.clone(), labels("kubevirt.io", "virt-launcher"), None),
                (Method::PATCH, launcher.clone(), labels("kubevirt.io/created-by", "x"), Some("pods")),
                (Method::PATCH, bystander.clone(), adoption, Some("pods")),
                (Method::PATCH, launcher.clone(), json!({"spec": {"activeDeadlineSeconds": 1}}), Some("pods")),
                (Method::PATCH, launcher.clone(), json!({"metadata": {"ownerReferences": null}}), Some("pods")),
                (Method::PATCH, launcher.clone(), json!({"metadata": {"finalizers": ["x.io/y"]}}), Some("pods")),
                (Method::PATCH, launcher.clone(), json!({"metadata": {"annotations": {"a": "b"}}}), Some("pods")),
                (Method::PATCH, format!("{bystander}/status"), gate.clone(), Some("pod-status")),
                (Method::PATCH, format!("{launcher}/status"), gate, None),
                (Method::PATCH, format!("{launcher}/status"), status, Some("pod-status")),
                (Method::PATCH, format!("{launcher}/resize"), resize.clone(), None),
                (Method::PATCH, format!("{bystander}/resize"), resize, Some("pod-resize")),
                (
                    Method::PATCH,
                    format!("{launcher}/status"),
                    json!({"status": {"podIP": "10.0.0.1"}}),
                    Some("pod-status"),
                ),
            ],
        )
        .await
    });
}

#[test]
fn virt_controller_changes_only_what_it_needs() {
    story("controller-patches", async |s| {
        s.apply(&manifests::kernel_vm("box", "Halted")).await?;
        s.apply(&manifests::kernel_vmi("lonely")).await?;
        let running = s.wait_running("lonely").await?;
        let node = running["status"]["nodeName"].as_str().context("the VMI names no node")?;
        let node = format!("/api/v1/nodes/{node}");
        let kubevirt = format!("/apis/kubevirt.io/v1/namespaces/{}", s.namespace);
        let (vm, vmi) =
            (format!("{kubevirt}/virtualmachines/box"), format!("{kubevirt}/virtualmachineinstances/lonely"));
        let vmis = format!("{kubevirt}/virtualmachineinstances");
        let claims = format!("/api/v1/namespaces/{}/persistentvolumeclaims", s.namespace);
        let resources = json!({"requests": {"storage": "1Mi"}});
        let claim = json!({
            "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "unowned"},
            "spec": {"accessModes": ["ReadWriteOnce"], "resources": resources},
        });
        for (name, labels) in [("of-a-user", json!({})), ("moving", json!({"kubevirt.io/migrationName": "m"}))] {
            let mut existing = claim.clone();
            existing["metadata"] = json!({"name": name, "labels": labels});
            existing["spec"]["storageClassName"] = json!("none");
            s.apply(&existing.to_string()).await?;
        }
        let state_of = |kind: &str| {
            let mut state = claim.clone();
            state["metadata"] = json!({
                "name": "persistent-state-for-box-1", "labels": {"persistent-state-for": "box"},
                "ownerReferences": [{"apiVersion": "kubevirt.io/v1", "kind": kind, "name": "box", "uid": "u", "controller": true}],
            });
            state
        };
        let installation = "/apis/kubevirt.io/v1/namespaces/kubevirt/kubevirts/kubevirt";
        let held = json!({"metadata": {"finalizers": ["kubevirt.io/foregroundDeleteKubeVirt"]}});
        let lonely = s.get("vmi", "lonely").await?["spec"].clone();
        let with_lan = |interface: Value, network: Value| {
            let (mut interfaces, mut networks) =
                (lonely["domain"]["devices"]["interfaces"].clone(), lonely["networks"].clone());
            for (list, mut new) in [(&mut interfaces, interface), (&mut networks, network)] {
                new["name"] = json!("lan");
                push(list, new);
            }
            json!({"spec": {"networks": networks, "domain": {"devices": {"interfaces": interfaces}}}})
        };
        let mut unowned = copy(&running);
        unowned["metadata"] = json!({"name": "another"});
        let mut foreign_vm = copy(&s.get("vm", "box").await?);
        foreign_vm["metadata"] = json!({"name": "foreign"});
        let revisions = format!("/apis/apps/v1/namespaces/{}/controllerrevisions", s.namespace);
        let revision = json!({"apiVersion": "apps/v1", "kind": "ControllerRevision", "metadata": {"name": "a"}, "data": {}, "revision": 1});
        let hooks = "/apis/admissionregistration.k8s.io/v1";
        let (mutator, validator) = (
            format!("{hooks}/mutatingwebhookconfigurations/virt-api-mutator"),
            format!("{hooks}/validatingwebhookconfigurations/virt-api-validator"),
        );
        let of_webhook = |name: &str, change: Value| {
            let mut webhook = json!({"name": name});
            json_patch::merge(&mut webhook, &change);
            json!({"webhooks": [webhook]})
        };
        let mutating = |change: Value| of_webhook("virtualmachines-mutator.kubevirt.io", change);
        let validating = |change: Value| of_webhook("virtualmachine-validator.kubevirt.io", change);
        let service = format!("{}/v1.subresources.kubevirt.io", "/apis/apiregistration.k8s.io/v1/apiservices");
        let roles = "/apis/rbac.authorization.k8s.io/v1/clusterroles";
        let own = "/api/v1/namespaces/kubevirt";
        let named = |kind: &str, name: &str| json!({"apiVersion": "v1", "kind": kind, "metadata": {"name": name}});
        let lease = json!({"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": "foreign"}});
        let leases = "/apis/coordination.k8s.io/v1/namespaces/kubevirt/leases";
        let types = "/apis/instancetype.kubevirt.io/v1beta1/virtualmachineclusterinstancetypes";
        let of_types = |metadata: Value, spec: Value| {
            let mut object = json!({
                "apiVersion": "instancetype.kubevirt.io/v1beta1", "kind": "VirtualMachineClusterInstancetype",
                "metadata": metadata, "spec": {"cpu": {"guest": 1}, "memory": {"guest": "1Gi"}},
            });
            json_patch::merge(&mut object["spec"], &spec);
            object
        };
        let mark = json!({"ferrovirt.io/written-content": "x"});
        let common = json!({"name": "common", "annotations": mark});
        let device = json!({"hostDevices": [{"name": "a", "deviceName": "example.com/a"}]});
        let restores = format!("/apis/snapshot.kubevirt.io/v1beta1/namespaces/{}/virtualmachinerestores", s.namespace);
        let uid = s.get("vm", "box").await?["metadata"]["uid"].clone();
        let owned_by = |kind: &str, name: &str| {
            let owner = json!({"apiVersion": "kubevirt.io/v1", "kind": kind, "name": name, "uid": uid});
            json!({"metadata": {"ownerReferences": [owner]}})
        };
        for (name, target, mut restore) in
            [("free", "gone", json!({"metadata": {}})), ("owned", "box", owned_by("VirtualMachine", "box"))]
        {
            (restore["apiVersion"], restore["kind"]) =
                (json!("snapshot.kubevirt.io/v1beta1"), json!("VirtualMachineRestore"));
            restore["metadata"]["name"] = json!(name);
            // It waits for its snapshot.
            restore["spec"] = json!({
                "target": {"apiGroup": "kubevirt.io", "kind": "VirtualMachine", "name": target},
                "virtualMachineSnapshotName": "none",
            });
            s.apply(&restore.to_string()).await?;
        }
        let (free, owned) = (format!("{restores}/free"), format!("{restores}/owned"));
        let of_a_user = s.cluster_api("VirtualMachineClusterInstancetype");
        let name = format!("of-a-user-{}", s.namespace);
        let object = serde_json::from_value(of_types(json!({"name": name}), json!({})))?;
        of_a_user.create(&PostParams::default(), &object).await?;
        let foreign = format!("{types}/{name}");
        let checked = check(
            s,
            &[
                (Method::PATCH, node.clone(), labels("kubevirt.io/schedulable", "perhaps"), None),
                (Method::PATCH, node.clone(), labels("scheduling.node.kubevirt.io/tsc-frequency-7", "true"), None),
                (Method::PATCH, node.clone(), labels("kubevirt.io/realtime", "true"), Some("nodes")),
                (Method::PATCH, node.clone(), labels("node-role.kubernetes.io/control-plane", ""), Some("nodes")),
                (Method::PATCH, node.clone(), json!({"metadata": {"annotations": {"a": "b"}}}), Some("nodes")),
                (Method::PATCH, node.clone(), json!({"spec": {"unschedulable": true}}), Some("nodes")),
                (Method::PATCH, vm.clone(), json!({"spec": {"runStrategy": "Always"}}), None),
                (Method::PATCH, vm.clone(), labels("a", "b"), Some("vms")),
                (Method::PATCH, vm.clone(), json!({"metadata": {"finalizers": ["x.io/y"]}}), Some("vms")),
                (Method::PATCH, vm.clone(), json!({"spec": {"updateVolumesStrategy": "Replacement"}}), Some("vms")),
                (Method::PATCH, vmi.clone(), json!({"status": {"reason": "x"}}), None),
                (Method::PATCH, vmi.clone(), labels("kubevirt.io/nodeName", "another"), None),
                (Method::PATCH, vmi.clone(), labels("a", "b"), Some("vmis")),
                (Method::PATCH, vmi.clone(), json!({"metadata": {"finalizers": ["x.io/y"]}}), Some("vmis")),
                (Method::PATCH, vmi.clone(), json!({"spec": {"hostname": "another"}}), Some("vmis")),
                (
                    Method::PATCH,
                    vmi.clone(),
                    json!({"spec": {"domain": {"memory": {"maxGuest": "64Mi"}}}}),
                    Some("vmis"),
                ),
                (Method::PATCH, vmi.clone(), json!({"spec": {"domain": {"cpu": {"sockets": 2}}}}), None),
                (Method::PATCH, vmi.clone(), json!({"spec": {"domain": {"cpu": {"cores": 2}}}}), Some("vmis")),
                (
                    Method::PATCH,
                    vmi.clone(),
                    json!({"spec": {"domain": {"resources": {"limits": {"a.b/c": "1"}}}}}),
                    Some("vmis"),
                ),
                (Method::PATCH, vmi.clone(), json!({"spec": {"domain": {"devices": {"rng": {}}}}}), Some("vmis")),
                (
                    Method::PATCH,
                    vmi.clone(),
                    with_lan(json!({"bridge": {}}), json!({"multus": {"networkName": "n"}})),
                    None,
                ),
                (Method::PATCH, vmi.clone(), with_lan(json!({"masquerade": {}}), json!({"pod": {}})), Some("vmis")),
                (Method::PATCH, vmi.clone(), with_lan(json!({"bridge": {}}), json!({"pod": {}})), Some("vmis")),
                (
                    Method::PATCH,
                    vmi.clone(),
                    json!({"spec": {"domain": {"devices": {"interfaces": []}}}}),
                    Some("vmis"),
                ),
                (
                    Method::PATCH,
                    vmi.clone(),
                    json!({"spec": {"networks": [{"name": "default", "multus": {"networkName": "n"}}]}}),
                    Some("vmis"),
                ),
                (Method::DELETE, vmi.clone(), json!({"dryRun": ["All"]}), Some("vmi-deletion")),
                (Method::DELETE, vm.clone(), json!({"dryRun": ["All"]}), Some("vm-deletion")),
                (Method::PATCH, installation.to_owned(), labels("a", "b"), Some("installation")),
                (
                    Method::PATCH,
                    installation.to_owned(),
                    json!({"spec": {"uninstallStrategy": "RemoveWorkloads"}}),
                    Some("installation"),
                ),
                (Method::PATCH, installation.to_owned(), held, None),
                (Method::POST, vmis, unowned, Some("vmi-creation")),
                (Method::POST, format!("{kubevirt}/virtualmachines"), foreign_vm, Some("vm-creation")),
                // The VM of a restore becomes its owner, and is removed again.
                (Method::PATCH, free.clone(), owned_by("VirtualMachine", "gone"), None),
                (Method::PATCH, free.clone(), owned_by("VirtualMachine", "box"), Some("restores")),
                (Method::PATCH, free, owned_by("VirtualMachinePool", "gone"), Some("restores")),
                (Method::PATCH, owned.clone(), json!({"metadata": {"ownerReferences": null}}), None),
                (Method::PATCH, owned, owned_by("VirtualMachine", "gone"), Some("restores")),
                (Method::POST, claims.clone(), claim.clone(), Some("claim-creation")),
                (Method::POST, claims.clone(), state_of("VirtualMachine"), None),
                (Method::POST, claims.clone(), state_of("VirtualMachinePool"), Some("claim-creation")),
                // Nothing of a user becomes the state of a VM, or is deleted as such.
                (Method::PATCH, format!("{claims}/of-a-user"), labels("persistent-state-for", "box"), Some("claims")),
                // With this mark a VM could take it over.
                (
                    Method::PATCH,
                    format!("{claims}/of-a-user"),
                    json!({"metadata": {"annotations": {"restore.kubevirt.io/owned-by-vm": "box"}}}),
                    Some("claims"),
                ),
                (Method::DELETE, format!("{claims}/of-a-user"), json!({"dryRun": ["All"]}), Some("claim-deletion")),
                (Method::PATCH, format!("{claims}/moving"), labels("persistent-state-for", "box"), None),
                (Method::POST, revisions, revision, Some("revision-creation")),
                (Method::POST, format!("{own}/secrets"), named("Secret", "foreign"), Some("own-objects")),
                (Method::POST, format!("{own}/configmaps"), named("ConfigMap", "foreign"), Some("own-objects")),
                (Method::POST, leases.to_owned(), lease, Some("own-leases")),
                (Method::POST, types.to_owned(), of_types(common.clone(), json!({})), None),
                (Method::POST, types.to_owned(), of_types(common, device), Some("common-instancetypes")),
                (
                    Method::POST,
                    types.to_owned(),
                    of_types(json!({"name": "other"}), json!({})),
                    Some("common-instancetypes"),
                ),
                (
                    Method::PATCH,
                    foreign.clone(),
                    json!({"metadata": {"annotations": mark}}),
                    Some("common-instancetypes"),
                ),
                (Method::DELETE, foreign, json!({"dryRun": ["All"]}), Some("common-instancetype-deletion")),
                (Method::PATCH, mutator.clone(), mutating(json!({"clientConfig": {"caBundle": "YQ=="}})), None),
                (Method::PATCH, mutator.clone(), mutating(json!({"clientConfig": {"service": {"path": "/x"}}})), None),
                (
                    Method::PATCH,
                    mutator.clone(),
                    mutating(json!({"clientConfig": {"service": {"namespace": "default"}}})),
                    Some("webhooks"),
                ),
                (Method::PATCH, mutator, mutating(json!({"failurePolicy": "Ignore"})), Some("webhooks")),
                (Method::PATCH, validator.clone(), validating(json!({"rules": []})), Some("webhooks")),
                (Method::PATCH, validator.clone(), validating(json!({"$patch": "delete"})), Some("webhooks")),
                (Method::PATCH, validator.clone(), labels("a", "b"), Some("webhooks")),
                (Method::PATCH, service.clone(), json!({"spec": {"caBundle": "YQ=="}}), None),
                (
                    Method::PATCH,
                    service,
                    json!({"spec": {"service": {"namespace": "default", "name": "another"}}}),
                    Some("api-services"),
                ),
                (Method::PATCH, format!("{roles}/kubevirt.io:edit"), json!({"rules": []}), Some("roles")),
            ],
        )
        .await;
        of_a_user.delete(&name, &DeleteParams::default()).await?;
        checked
    });
}

fn labels(key: &str, value: &str) -> Value {
    json!({"metadata": {"labels": {key: value}}})
}

/// Sends each request as virt-controller and compares the answer with the policy that must refuse it, if any.
async fn check(s: &Story, requests: &[(Method, String, Value, Option<&str>)]) -> Result<()> {
    let mut wrong = Vec::new();
    for (method, path, body, policy) in requests {
        let answer = send(s, method, &format!("{path}?dryRun=All"), body).await?;
        let right = match policy {
            Some(policy) => by_policy(answer.as_ref(), policy),
            None => answer.is_none(),
        };
        if !right {
            wrong.push(format!("{method} {path} {body}: {answer:?}, not {policy:?}"));
        }
    }
    ensure!(wrong.is_empty(), "{} answers are wrong:\n{}", wrong.len(), wrong.join("\n"));
    Ok(())
}

fn by_policy(answer: Option<&String>, policy: &str) -> bool {
    answer.is_some_and(|text| text.contains(&format!("ValidatingAdmissionPolicy 'kubevirt-controller-{policy}'")))
}

/// Sends a request as virt-controller and returns the error if it is refused.
pub(crate) async fn send(s: &Story, method: &Method, path: &str, body: &Value) -> Result<Option<String>> {
    let kind = match *method {
        // virt-controller names webhooks in a list.
        Method::PATCH
            if path.contains("webhookconfigurations") || path.contains("/status") || path.contains("/resize") =>
        {
            "application/strategic-merge-patch+json"
        }
        Method::PATCH => "application/merge-patch+json",
        _ => "application/json",
    };
    let request = Request::builder()
        .method(method)
        .uri(path)
        .header("Impersonate-User", "system:serviceaccount:kubevirt:kubevirt-controller")
        .header("Impersonate-Group", "system:serviceaccounts:kubevirt")
        .header("Impersonate-Group", "system:authenticated")
        .header("Content-Type", kind);
    match s.client.request_text(request.body(body.to_string().into_bytes())?).await {
        Ok(_) => Ok(None),
        Err(kube::Error::Api(status)) => Ok(Some(status.message.clone())),
        Err(error) => Err(error).with_context(|| format!("{method} {path}")),
    }
}

/// Returns an object without the fields that the API server sets.
fn copy(object: &Value) -> Value {
    let mut copy = object.clone();
    if let Some(all) = copy.as_object_mut() {
        all.remove("status");
    }
    if let Some(metadata) = copy["metadata"].as_object_mut() {
        for field in ["name", "uid", "resourceVersion", "creationTimestamp", "generation", "managedFields"] {
            metadata.remove(field);
        }
    }
    if let Some(spec) = copy["spec"].as_object_mut() {
        spec.remove("nodeName");
    }
    copy
}
