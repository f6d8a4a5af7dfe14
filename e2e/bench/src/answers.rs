//! Measures the first signs of life that a user sees: the first byte of a console, and the first answer through a Service.
//!
//! The console is opened by the plugin as soon as the VMI runs. The Service exists before the VMI; a pod in the cluster asks it every
//! 100 ms, also while earlier questions have no answer. Guest and bare pod run the same web server.

use std::{
    process::Stdio,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use ferrovirt_e2e_tests::Story;
use serde_json::json;
use tokio::{io::AsyncReadExt, time::timeout};

use crate::{
    Figures, add_medians,
    start::{is_running, manifest, out_of_phase, wait},
};

/// Rounds of each kind: a guest boots in each.
const ROUNDS: usize = 3;
/// Time limit of an answer.
const TIMEOUT: Duration = Duration::from_secs(120);
/// Starts a web server, also in the guest.
const SERVE: &str = "mkdir -p /tmp/www && echo hello >/tmp/www/index.html && httpd -p 8080 -h /tmp/www";
/// Pod that asks the Services.
const CLIENT: &str = "asking";

/// Measures both and reports the medians.
pub(crate) async fn measure(story: &Story, rounds: usize, figures: &mut Figures) -> Result<()> {
    story.toolbox(CLIENT).await?;
    let (mut bytes, mut opened, mut pods, mut vmis) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for round in 0..rounds.min(ROUNDS) {
        let (created, command) = first_byte(story, &format!("talks-{round}")).await?;
        bytes.push(created);
        opened.push(command);
        let name = format!("pod-answers-{round}");
        pods.push(first_answer(story, "Pod", &name, story.apply(&serving_pod(&name))).await?);
        let name = format!("vmi-answers-{round}");
        vmis.push(first_answer(story, "vmi", &name, story.apply(&serving_vmi(&name))).await?);
    }
    story.delete("Pod", CLIENT).await?;
    let measured = [
        ("console_first_byte_s", bytes),
        ("console_first_byte_after_command_s", opened),
        ("pod_first_answer_s", pods),
        ("vmi_first_answer_s", vmis),
    ];
    add_medians(figures, measured)
}

/// Returns the seconds from the creation of a VMI, and from the command, until its console shows a first byte.
async fn first_byte(story: &Story, name: &str) -> Result<(f64, f64)> {
    out_of_phase().await;
    let created = Instant::now();
    story.apply(&manifest(name)).await?;
    wait(story.api("vmi"), name, is_running).await.context("VMI was not Running")?;
    let began = Instant::now();
    // The end of the input would end the command.
    let mut console = story
        .virt_command(&["console", name])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .context("cannot start kubectl-virt")?;
    let mut output = console.stdout.take().context("no output")?;
    timeout(TIMEOUT, output.read_u8()).await.context("the console shows nothing")??;
    let times = (created.elapsed().as_secs_f64(), began.elapsed().as_secs_f64());
    console.kill().await?;
    story.delete("vmi", name).await?;
    story.wait_gone("vmi", name, TIMEOUT).await?;
    println!("  {name}: first byte {:.2} s after the creation, {:.2} s after the command", times.0, times.1);
    Ok(times)
}

/// Returns the seconds from `create`, which makes an object with the label `app`, until a pod has an answer through its Service.
async fn first_answer(story: &Story, kind: &str, name: &str, create: impl Future<Output = Result<()>>) -> Result<f64> {
    let service = json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": name},
        "spec": {"selector": {"app": name}, "ports": [{"port": 80, "targetPort": 8080}]}});
    story.apply(&service.to_string()).await?;
    let service = story.get("Service", name).await?;
    // Names would need the time of DNS.
    let address = service["spec"]["clusterIP"].as_str().context("service without address")?;
    let ask = format!(
        "until [ -e /tmp/{name} ]; do \
           (wget -q -T 2 -O /dev/null http://{address}/ && touch /tmp/{name}) >/dev/null 2>&1 & sleep 0.1; \
         done"
    );
    let command = ["sh", "-c", &ask];
    let asking = story.exec(CLIENT, &command);
    let created = async {
        out_of_phase().await;
        let created = Instant::now();
        create.await?;
        Ok::<_, anyhow::Error>(created)
    };
    let answered = async {
        timeout(TIMEOUT, asking).await.with_context(|| format!("{name} does not answer"))??;
        Ok::<_, anyhow::Error>(Instant::now())
    };
    let (created, answered) = tokio::try_join!(created, answered)?;
    story.delete("Service", name).await?;
    story.delete(kind, name).await?;
    story.wait_gone(kind, name, TIMEOUT).await?;
    let seconds = answered.duration_since(created).as_secs_f64();
    println!("  {name}: first answer {seconds:.2} s after the creation");
    Ok(seconds)
}

fn serving_pod(name: &str) -> String {
    format!(
        "
apiVersion: v1
kind: Pod
metadata: {{name: {name}, labels: {{app: {name}}}}}
spec:
  terminationGracePeriodSeconds: 0
  securityContext: {{runAsNonRoot: true, runAsUser: 1000, seccompProfile: {{type: RuntimeDefault}}}}
  containers:
  - name: toolbox
    image: ferrovirt.io/toolbox:devel
    imagePullPolicy: IfNotPresent
    command: [sh, -c, '{SERVE} -f']
    securityContext: {{allowPrivilegeEscalation: false, capabilities: {{drop: [ALL]}}}}
"
    )
}

fn serving_vmi(name: &str) -> String {
    format!(
        "
apiVersion: kubevirt.io/v1
kind: VirtualMachineInstance
metadata: {{name: {name}, labels: {{app: {name}}}}}
spec:
  terminationGracePeriodSeconds: 0
  domain:
    memory: {{guest: 128Mi}}
    devices:
      disks:
      - {{name: root, disk: {{bus: virtio}}}}
      - {{name: seed, disk: {{bus: virtio}}}}
      interfaces: [{{name: default, masquerade: {{}}}}]
  networks: [{{name: default, pod: {{}}}}]
  volumes:
  - {{name: root, containerDisk: {{image: 'ferrovirt.io/guests/tiny:devel', imagePullPolicy: IfNotPresent}}}}
  - name: seed
    cloudInitNoCloud:
      userData: |
        #cloud-config
        runcmd:
        - {SERVE}
"
    )
}
