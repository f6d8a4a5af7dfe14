//! Measures changes of a running VM, from the request to their appearance in the guest: a claim as a disk, a vCPU, memory. Of a claim
//! also until its status follows. The floor of a claim is a bare pod with that claim.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use ferrovirt_e2e_tests::{
    Console, Story,
    storage::{Backing, Storage, delete_vmis, on_host},
};
use http::Method;
use kube::api::{DynamicObject, Patch, PatchParams};
use serde_json::{Value, json};

use crate::{
    Figures, add_medians,
    start::{out_of_phase, pod, wait},
};

/// Time limit of a change.
const TIMEOUT: Duration = Duration::from_secs(120);
/// Time in which the guest begins to wait for a change.
const LEAD: Duration = Duration::from_millis(300);

/// Makes the guest ready for devices: it loads only the drivers of those that it has at its boot.
const READY: &str = "dmesg -n 1; modprobe -qa virtio_scsi sd_mod virtio_mem; \
     echo online_movable > /sys/devices/system/memory/auto_online_blocks; \
     cpus() { cat /sys/bus/acpi/devices/LNXCPU:*/status | grep -cx 15; }; \
     memory() { awk '/MemTotal/ {print int($2 / 1024)}' /proc/meminfo; }";

const VM: &str = "
apiVersion: kubevirt.io/v1
kind: VirtualMachine
metadata: {name: changes}
spec:
  runStrategy: Always
  template:
    spec:
      terminationGracePeriodSeconds: 0
      domain:
        cpu: {sockets: 1, maxSockets: 32}
        memory: {guest: 1Gi, maxGuest: 2Gi}
        devices:
          disks: [{name: root, disk: {bus: virtio}}]
      volumes: [{name: root, containerDisk: {image: 'ferrovirt.io/guests/tiny:devel', imagePullPolicy: IfNotPresent}}]
";

/// Measures each change `rounds` times and reports the medians.
pub(crate) async fn measure(story: &Story, rounds: usize, figures: &mut Figures) -> Result<()> {
    let storage = Storage::make(story, "data", Backing::Directory).await?;
    let measured = measure_with(story, &storage, rounds, figures).await;
    let gone = delete_vmis(story).await;
    storage.remove(story).await?;
    measured.and(gone)
}

async fn measure_with(story: &Story, storage: &Storage, rounds: usize, figures: &mut Figures) -> Result<()> {
    let directory = &storage.directory;
    let image = format!("truncate -s 8M {directory}/disk.img && chown 107:107 {directory}/disk.img");
    on_host(story, &storage.node, &image).await?;
    let mut floor = Vec::new();
    for round in 0..rounds {
        let name = format!("claim-{round}");
        floor.push(pod(story, &name, pod_with_claim(story, &name)).await?.0);
    }
    story.apply(VM).await?;
    story.wait_running("changes").await?;
    let mut console = story.console("changes")?;
    console.login("root", "ferrovirt").await?;
    in_guest(&mut console, READY).await?;
    let (mut disk, mut unplug, mut cpu, mut memory) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let (mut ready, mut released) = (Vec::new(), Vec::new());
    for round in 0..rounds {
        let volume = json!({"name": "data", "disk": {"disk": {"bus": "scsi"}},
            "volumeSource": {"persistentVolumeClaim": {"claimName": "data"}}});
        let plug = subresource(story, "addvolume", &volume);
        let shown = wait(story.api("vmi"), "changes", |vmi: Option<&DynamicObject>| phase(vmi) == Some("Ready"));
        let (in_guest, in_status) = change_and_status(&mut console, "[ -e /dev/sda ]", plug, shown).await?;
        disk.push(in_guest);
        ready.push(in_status);
        let volume = json!({"name": "data"});
        let remove = subresource(story, "removevolume", &volume);
        let shown = wait(story.api("vmi"), "changes", |vmi: Option<&DynamicObject>| phase(vmi).is_none());
        let (in_guest, in_status) = change_and_status(&mut console, "[ ! -e /dev/sda ]", remove, shown).await?;
        unplug.push(in_guest);
        released.push(in_status);
        let sockets = round + 2;
        let size = json!({"cpu": {"sockets": sockets}});
        cpu.push(change(&mut console, &format!("[ $(cpus) = {sockets} ]"), resize(story, &size)).await?);
        let size = json!({"memory": {"guest": "2Gi"}});
        memory.push(change(&mut console, "[ $(memory) -gt 1700 ]", resize(story, &size)).await?);
        change(&mut console, "[ $(memory) -lt 1100 ]", resize(story, &json!({"memory": {"guest": "1Gi"}}))).await?;
        let settled = |vmi: &Value| !vmi["status"]["conditions"].to_string().contains("HotMemoryChange");
        story.wait("vmi", "changes", "have no change in progress", TIMEOUT, settled).await?;
    }
    console.leave().await?;
    let measured = [
        ("pod_with_claim_running_s", floor),
        ("volume_in_guest_s", disk),
        ("volume_out_of_guest_s", unplug),
        ("volume_ready_s", ready),
        ("volume_out_of_status_s", released),
        ("vcpu_in_guest_s", cpu),
        ("memory_in_guest_s", memory),
    ];
    add_medians(figures, measured)
}

async fn pod_with_claim(story: &Story, name: &str) -> Result<()> {
    story
        .apply(&format!(
            "
apiVersion: v1
kind: Pod
metadata: {{name: {name}}}
spec:
  securityContext: {{runAsNonRoot: true, runAsUser: 1000, seccompProfile: {{type: RuntimeDefault}}}}
  containers:
  - name: toolbox
    image: ferrovirt.io/toolbox:devel
    imagePullPolicy: IfNotPresent
    command: [sh, -c, 'trap \"exit 0\" TERM; sleep 3600 & wait']
    securityContext: {{allowPrivilegeEscalation: false, capabilities: {{drop: [ALL]}}}}
    volumeMounts: [{{name: data, mountPath: /data}}]
  volumes: [{{name: data, persistentVolumeClaim: {{claimName: data}}}}]
"
        ))
        .await
}

async fn subresource(story: &Story, name: &str, body: &Value) -> Result<()> {
    let (code, text) = story.call_subresource(&Method::PUT, "virtualmachines/changes", name, body).await?;
    ensure!(code == 202, "{name}: {code} {text}");
    Ok(())
}

async fn resize(story: &Story, domain: &Value) -> Result<()> {
    let patch = json!({"spec": {"template": {"spec": {"domain": domain}}}});
    story.api("VirtualMachine").patch("changes", &PatchParams::default(), &Patch::Merge(patch)).await?;
    Ok(())
}

/// Returns the phase of the claim in the status of the VMI, if it is there.
fn phase(vmi: Option<&DynamicObject>) -> Option<&str> {
    let volumes = vmi?.data["status"]["volumeStatus"].as_array()?;
    volumes.iter().find(|volume| volume["name"] == "data").map(|volume| volume["phase"].as_str().unwrap_or_default())
}

/// Returns the seconds from the request until the condition holds in the guest, whose shell polls it.
async fn change(console: &mut Console, condition: &str, request: impl Future<Output = Result<()>>) -> Result<f64> {
    Ok(change_and_status(console, condition, request, async { Ok(()) }).await?.0)
}

/// Returns the seconds from the request until the condition holds in the guest, and until `shown`, which ends once the status does.
async fn change_and_status(
    console: &mut Console,
    condition: &str,
    request: impl Future<Output = Result<()>>,
    shown: impl Future<Output = Result<()>>,
) -> Result<(f64, f64)> {
    let wait = format!("i=0; until {condition} || [ $i = 3000 ]; do usleep 20000; i=$((i+1)); done; {condition}");
    out_of_phase().await;
    let request = async {
        tokio::time::sleep(LEAD).await;
        let began = Instant::now();
        request.await?;
        Ok::<_, anyhow::Error>(began)
    };
    let shown = async {
        shown.await?;
        Ok::<_, anyhow::Error>(Instant::now())
    };
    let (seen, shown, began) = tokio::join!(in_guest(console, &wait), shown, request);
    let began = began?;
    Ok((seen?.duration_since(began).as_secs_f64(), shown?.duration_since(began).as_secs_f64()))
}

/// Runs a command that must succeed and returns the time of its end.
async fn in_guest(console: &mut Console, command: &str) -> Result<Instant> {
    console.output(command).await?;
    Ok(Instant::now())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn phase_is_that_of_the_claim() {
        let vmi = |volumes: Value| -> DynamicObject {
            serde_json::from_value(json!({"metadata": {"name": "a"}, "status": {"volumeStatus": volumes}})).unwrap()
        };
        let root = json!({"name": "root"});
        for (volumes, expected) in [
            (json!([root, {"name": "data", "phase": "Ready"}]), Some("Ready")),
            (json!([root, {"name": "data"}]), Some("")),
            (json!([root]), None),
            (Value::Null, None),
        ] {
            assert_eq!(phase(Some(&vmi(volumes.clone()))), expected, "{volumes}");
        }
        assert_eq!(phase(None), None);
    }
}
