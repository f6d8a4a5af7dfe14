//! One user in a namespace of their own.

use std::{
    future::Future,
    process::Stdio,
    sync::RwLock,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use anyhow::{Context, Result, anyhow, bail, ensure};
use futures::FutureExt;
use kube::{
    Api, Client, ResourceExt,
    api::{
        ApiResource, AttachParams, DeleteParams, DynamicObject, GroupVersionKind, ListParams, LogParams, Patch,
        PatchParams,
    },
    config::{KubeConfigOptions, Kubeconfig},
};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::{io::AsyncReadExt, process::Command};

use crate::{Console, diagnosis, kubeconfig, kubectl_virt};

/// Pause between two looks at an object that is waited for.
const LOOK: Duration = Duration::from_millis(250);
/// How long a story waits for what is bound to come, and comes within seconds on a machine that has nothing else to do.
/// Stories are no measurements: a machine that stalls must not fail them.
pub const PATIENCE: Duration = Duration::from_secs(120);
/// How long a namespace may take to go, machines in it included.
const CLEAN_UP: Duration = Duration::from_secs(120);

/// A user's view of the cluster: a client and a namespace of their own.
pub struct Story {
    /// The client, with the test cluster's administrator's rights.
    pub client: Client,
    /// The namespace.
    pub namespace: String,
}

/// Runs `body` in a namespace made for it, prints a diagnosis when it fails, and removes the namespace.
///
/// # Panics
/// When the story fails, or leaves something that keeps its namespace from going: that is how a test fails.
pub fn story<F>(name: &str, body: F)
where
    F: AsyncFnOnce(&Story) -> Result<()>,
{
    let _others = STAGE.read();
    tell(name, body);
}

/// As [`story`], with no other story told at the same time: for those that disturb the whole cluster.
///
/// # Panics
/// As [`story`].
pub fn story_alone<F>(name: &str, body: F)
where
    F: AsyncFnOnce(&Story) -> Result<()>,
{
    let _nobody_else = STAGE.write();
    tell(name, body);
}

/// Who tells a story now. A story that failed has poisoned it, which means nothing to the others.
static STAGE: RwLock<()> = RwLock::new(());

fn tell<F>(name: &str, body: F)
where
    F: AsyncFnOnce(&Story) -> Result<()>,
{
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let outcome = runtime.context("cannot start the runtime").and_then(|runtime| {
        runtime.block_on(async {
            let story = Story::begin(name).await?;
            // A failed assertion must not skip the cleaning up.
            let told = std::panic::AssertUnwindSafe(body(&story)).catch_unwind().await;
            let told = told.unwrap_or_else(|panic| {
                let text = panic.downcast_ref::<String>().cloned();
                let text = text.or_else(|| panic.downcast_ref::<&str>().map(|t| (*t).to_owned()));
                Err(anyhow!("assertion failed: {}", text.unwrap_or_default()))
            });
            if let Err(error) = &told {
                eprintln!("\n======== story {name} failed: {error:#}");
                diagnosis::print(&story).await;
            }
            let ended = story.end().await;
            told.and(ended)
        })
    });
    if let Err(error) = outcome {
        #[expect(clippy::panic, reason = "how a test fails")]
        {
            panic!("story {name}: {error:#}");
        }
    }
}

/// A client of the cluster under test, with its administrator's rights.
///
/// # Errors
/// When there is no kubeconfig that can be used.
pub async fn connect() -> Result<Client> {
    Ok(Client::try_from(config().await?)?)
}

/// The same client, which takes 429, 503 and 504 for answers and does not ask again.
///
/// # Errors
/// When there is no kubeconfig that can be used.
pub async fn connect_without_retries() -> Result<Client> {
    let mut config = config().await?;
    config.default_retry = false;
    Ok(Client::try_from(config)?)
}

async fn config() -> Result<kube::Config> {
    let path = kubeconfig();
    let file = Kubeconfig::read_from(&path)
        .with_context(|| format!("no kubeconfig at {}: bring the cluster up with `make up`", path.display()))?;
    Ok(kube::Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await?)
}

impl Story {
    async fn begin(name: &str) -> Result<Self> {
        let client = connect().await?;
        let nanos = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_nanos());
        let namespace = format!("e2e-{name}-{:05x}", nanos % 0xf_ffff);
        let story = Self { client, namespace };
        // Launcher pods must pass the strictest pod security there is.
        let object = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": story.namespace, "labels": {
            "ferrovirt.io/e2e": name, "pod-security.kubernetes.io/enforce": "restricted"}}});
        story.cluster_api("Namespace").create(&Default::default(), &serde_json::from_value(object)?).await?;
        story.wait("ServiceAccount", "default", "be created", PATIENCE, |_| true).await?;
        Ok(story)
    }

    async fn end(self) -> Result<()> {
        let namespaces = self.cluster_api("Namespace");
        namespaces.delete(&self.namespace, &DeleteParams::background()).await.context("cannot delete the namespace")?;
        let deadline = tokio::time::Instant::now() + CLEAN_UP;
        while let Some(namespace) = namespaces.get_opt(&self.namespace).await? {
            if tokio::time::Instant::now() > deadline {
                diagnosis::print(&self).await;
                bail!("namespace {} did not go: {}", self.namespace, namespace.data["status"]);
            }
            tokio::time::sleep(LOOK).await;
        }
        Ok(())
    }

    /// The API of a namespaced kind, by its kind or kubectl's short name.
    #[must_use]
    pub fn api(&self, kind: &str) -> Api<DynamicObject> {
        Api::namespaced_with(self.client.clone(), &self.namespace, &resource(kind))
    }

    /// The API of a kind in the namespace of the installation.
    #[must_use]
    pub fn installation_api(&self, kind: &str) -> Api<DynamicObject> {
        Api::namespaced_with(self.client.clone(), "kubevirt", &resource(kind))
    }

    /// The API of a cluster-wide kind, or of a kind in all namespaces.
    #[must_use]
    pub fn cluster_api(&self, kind: &str) -> Api<DynamicObject> {
        Api::all_with(self.client.clone(), &resource(kind))
    }

    /// Applies a manifest of one or more documents to the story's namespace, as `kubectl apply` does: unknown fields
    /// are errors.
    ///
    /// # Errors
    /// What the API server says against it.
    pub async fn apply(&self, manifest: &str) -> Result<()> {
        for document in serde_yaml::Deserializer::from_str(&crate::with_images(manifest)) {
            let mut value = Value::deserialize(document).context("manifest is not YAML")?;
            if value.is_null() {
                continue;
            }
            value["metadata"]["namespace"] = json!(self.namespace);
            let object: DynamicObject = serde_json::from_value(value)?;
            let kind = object.types.as_ref().map(|t| t.kind.clone()).context("manifest without kind")?;
            let mut params = PatchParams::apply("e2e").force();
            params.field_validation = Some(kube::api::ValidationDirective::Strict);
            self.api(&kind)
                .patch(&object.name_any(), &params, &Patch::Apply(&object))
                .await
                .with_context(|| format!("apply {kind} {}", object.name_any()))?;
        }
        Ok(())
    }

    /// What the API server would store of a manifest of one document; nothing is stored.
    ///
    /// # Errors
    /// What the API server says against it.
    pub async fn dry_run(&self, manifest: &str) -> Result<Value> {
        let mut value: Value = serde_yaml::from_str(manifest).context("manifest is not YAML")?;
        value["metadata"]["namespace"] = json!(self.namespace);
        let object: DynamicObject = serde_json::from_value(value)?;
        let kind = object.types.as_ref().map(|t| t.kind.clone()).context("manifest without kind")?;
        let mut params = PatchParams::apply("e2e").force().dry_run();
        params.field_validation = Some(kube::api::ValidationDirective::Strict);
        let stored = self.api(&kind).patch(&object.name_any(), &params, &Patch::Apply(&object)).await;
        let stored = stored.with_context(|| format!("apply {kind} {} without storing it", object.name_any()))?;
        Ok(serde_json::to_value(stored)?)
    }

    /// Applies a manifest that must be refused, and returns what the refusal says.
    ///
    /// # Errors
    /// When it is accepted.
    pub async fn refused(&self, manifest: &str) -> Result<String> {
        match self.apply(manifest).await {
            Ok(()) => bail!("accepted what must be refused:\n{manifest}"),
            Err(error) => Ok(format!("{error:#}")),
        }
    }

    /// Applies a manifest of one document as soon as it is accepted: what virt-api learns by a watch counts a moment after
    /// it is written.
    ///
    /// # Errors
    /// What is said against it when the time is over.
    pub async fn apply_when_accepted(&self, manifest: &str) -> Result<()> {
        let deadline = tokio::time::Instant::now() + PATIENCE;
        while let Err(error) = self.apply(manifest).await {
            if tokio::time::Instant::now() > deadline {
                return Err(error);
            }
            tokio::time::sleep(LOOK).await;
        }
        Ok(())
    }

    /// What is said against a manifest of one document as soon as it would be refused. Nothing is stored.
    ///
    /// # Errors
    /// When it is still accepted when the time is over.
    pub async fn refused_soon(&self, manifest: &str) -> Result<String> {
        let deadline = tokio::time::Instant::now() + PATIENCE;
        loop {
            if let Err(error) = self.dry_run(manifest).await {
                return Ok(format!("{error:#}"));
            }
            if tokio::time::Instant::now() > deadline {
                bail!("accepted what must be refused:\n{manifest}");
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    /// The object as it is now.
    ///
    /// # Errors
    /// When it is not there.
    pub async fn get(&self, kind: &str, name: &str) -> Result<Value> {
        let object = self.api(kind).get(name).await.with_context(|| format!("get {kind} {name}"))?;
        Ok(serde_json::to_value(object)?)
    }

    /// All objects of a kind in the namespace that have the labels.
    ///
    /// # Errors
    /// Those of the API server.
    pub async fn list(&self, kind: &str, labels: &str) -> Result<Vec<Value>> {
        let list = self.api(kind).list(&ListParams::default().labels(labels)).await?;
        list.items.into_iter().map(|object| Ok(serde_json::to_value(object)?)).collect()
    }

    /// Waits until the object is as `done` wants it; `what` says it in words ("be Running").
    ///
    /// # Errors
    /// When the time is over, with the object's last status.
    pub async fn wait(
        &self,
        kind: &str,
        name: &str,
        what: &str,
        within: Duration,
        done: impl Fn(&Value) -> bool,
    ) -> Result<Value> {
        let api = self.api(kind);
        let deadline = tokio::time::Instant::now() + within;
        loop {
            let seen = api.get_opt(name).await?.map(serde_json::to_value).transpose()?;
            if let Some(object) = &seen
                && done(object)
            {
                return Ok(object.clone());
            }
            if tokio::time::Instant::now() > deadline {
                let status = seen.map_or_else(|| "is not there".to_owned(), |o| format!("status: {}", o["status"]));
                bail!("{kind} {name} did not {what} within {within:?}; {status}");
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    /// Waits until the object is gone.
    ///
    /// # Errors
    /// When the time is over, with what is left of it.
    pub async fn wait_gone(&self, kind: &str, name: &str, within: Duration) -> Result<()> {
        let api = self.api(kind);
        let deadline = tokio::time::Instant::now() + within;
        while let Some(object) = api.get_opt(name).await? {
            if tokio::time::Instant::now() > deadline {
                bail!("{kind} {name} was not gone within {within:?}: {}", serde_json::to_string(&object)?);
            }
            tokio::time::sleep(LOOK).await;
        }
        Ok(())
    }

    /// Waits until the machine runs.
    ///
    /// # Errors
    /// When the time is over.
    pub async fn wait_running(&self, vmi: &str) -> Result<Value> {
        let within = Duration::from_secs(90);
        self.wait("vmi", vmi, "be Running", within, |vmi| vmi["status"]["phase"] == "Running").await
    }

    /// Waits for an event about the named object with this reason, and returns its message.
    ///
    /// # Errors
    /// When the time is over, with the reasons that were seen.
    pub async fn wait_event(&self, name: &str, reason: &str, within: Duration) -> Result<String> {
        let deadline = tokio::time::Instant::now() + within;
        loop {
            let events = self.list("Event", "").await?;
            let about: Vec<&Value> = events.iter().filter(|e| e["involvedObject"]["name"] == name).collect();
            if let Some(event) = about.iter().find(|e| e["reason"] == reason) {
                return Ok(event["message"].as_str().unwrap_or_default().to_owned());
            }
            if tokio::time::Instant::now() > deadline {
                let seen: Vec<&Value> = about.iter().map(|e| &e["reason"]).collect();
                bail!("no event {reason} about {name} within {within:?}; seen: {seen:?}");
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    /// Deletes the object, as `kubectl delete --wait=false` does.
    ///
    /// # Errors
    /// Those of the API server.
    pub async fn delete(&self, kind: &str, name: &str) -> Result<()> {
        self.api(kind)
            .delete(name, &DeleteParams::background())
            .await
            .with_context(|| format!("delete {kind} {name}"))?;
        Ok(())
    }

    /// The launcher pod of a running machine.
    ///
    /// # Errors
    /// When there is not exactly one.
    pub async fn launcher_pod(&self, vmi: &str) -> Result<Value> {
        let vmi = self.get("vmi", vmi).await?;
        let uid = vmi["metadata"]["uid"].as_str().context("vmi without uid")?;
        let mut pods = self.list("Pod", &format!("kubevirt.io/created-by={uid}")).await?;
        ensure!(pods.len() == 1, "{} launcher pods instead of one", pods.len());
        pods.pop().context("no launcher pod")
    }

    /// Runs `kubectl virt` with these arguments and returns what it printed.
    ///
    /// # Errors
    /// When it fails, with what it printed to standard error.
    pub async fn virt(&self, args: &[&str]) -> Result<String> {
        let output = self.virt_command(args).stdin(Stdio::null()).output().await.context("cannot run kubectl-virt")?;
        ensure!(
            output.status.success(),
            "kubectl virt {}: {} {}",
            args.join(" "),
            output.status,
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Runs `kubectl` with these arguments and returns what it printed.
    ///
    /// # Errors
    /// When it fails, with what it printed to standard error.
    pub async fn kubectl(&self, args: &[&str]) -> Result<String> {
        let mut command = Command::new("kubectl");
        command.arg("--kubeconfig").arg(kubeconfig()).arg("--namespace").arg(&self.namespace).args(args);
        let output = command.kill_on_drop(true).stdin(Stdio::null()).output().await.context("cannot run kubectl")?;
        ensure!(
            output.status.success(),
            "kubectl {}: {} {}",
            args.join(" "),
            output.status,
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// The command `kubectl virt` with these arguments, not yet started.
    #[must_use]
    pub fn virt_command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(kubectl_virt());
        command.arg("--kubeconfig").arg(kubeconfig()).arg("--namespace").arg(&self.namespace).args(args);
        command.kill_on_drop(true);
        command
    }

    /// Opens the machine's serial console.
    ///
    /// # Errors
    /// When the plugin cannot be started.
    pub fn console(&self, vmi: &str) -> Result<Console> {
        Console::open(self.virt_command(&["console", vmi]))
    }

    /// Opens the console again after a fault, as often as a user would, and logs in unless a former console did.
    ///
    /// # Errors
    /// When the machine cannot be reached for a minute.
    pub async fn console_again(&self, vmi: &str, user: &str, password: &str) -> Result<Console> {
        let deadline = tokio::time::Instant::now() + Duration::from_secs(60);
        loop {
            let mut console = self.console(vmi)?;
            match console.login_or_shell(user, password).await {
                Ok(()) => return Ok(console),
                Err(error) if tokio::time::Instant::now() > deadline => return Err(error),
                Err(_) => tokio::time::sleep(Duration::from_secs(1)).await,
            }
        }
    }

    /// Starts a pod with a shell and the usual network tools, and waits until it runs.
    ///
    /// # Errors
    /// When it does not come up.
    pub async fn toolbox(&self, name: &str) -> Result<()> {
        self.toolbox_without_wait(name).await?;
        let running = |pod: &Value| pod["status"]["phase"] == "Running";
        self.wait("Pod", name, "be Running", PATIENCE, running).await?;
        Ok(())
    }

    /// Creates the pod of [`Self::toolbox`].
    ///
    /// # Errors
    /// Those of the API server.
    pub async fn toolbox_without_wait(&self, name: &str) -> Result<()> {
        self.apply(&format!(
            "
apiVersion: v1
kind: Pod
metadata: {{name: {name}}}
spec:
  terminationGracePeriodSeconds: 0
  automountServiceAccountToken: false
  securityContext: {{runAsNonRoot: true, runAsUser: 1000, seccompProfile: {{type: RuntimeDefault}}}}
  containers:
  - name: toolbox
    image: ferrovirt.io/toolbox:devel
    imagePullPolicy: IfNotPresent
    command: [sleep, '3600']
    securityContext: {{allowPrivilegeEscalation: false, capabilities: {{drop: [ALL]}}}}
"
        ))
        .await
    }

    /// Runs a command in a pod and returns its standard output.
    ///
    /// # Errors
    /// When it exits with another code than 0, with its standard error.
    pub async fn exec(&self, pod: &str, command: &[&str]) -> Result<String> {
        let pods: Api<k8s_openapi::api::core::v1::Pod> = Api::namespaced(self.client.clone(), &self.namespace);
        exec(&pods, pod, command).await
    }

    /// As [`Self::exec`], in a container that is not the first of its pod.
    ///
    /// # Errors
    /// As [`Self::exec`].
    pub async fn exec_in(&self, pod: &str, container: &str, command: &[&str]) -> Result<String> {
        let pods: Api<k8s_openapi::api::core::v1::Pod> = Api::namespaced(self.client.clone(), &self.namespace);
        attached(&pods, pod, command, AttachParams::default().container(container)).await
    }

    /// The log of a pod's container.
    ///
    /// # Errors
    /// Those of the API server.
    pub async fn log(&self, pod: &str, container: &str) -> Result<String> {
        let pods: Api<k8s_openapi::api::core::v1::Pod> = Api::namespaced(self.client.clone(), &self.namespace);
        let params = LogParams { container: Some(container.to_owned()), ..LogParams::default() };
        Ok(pods.logs(pod, &params).await?)
    }
}

/// Runs a command in a pod and returns its standard output.
///
/// # Errors
/// When it exits with another code than 0, with its standard error.
pub async fn exec(pods: &Api<k8s_openapi::api::core::v1::Pod>, pod: &str, command: &[&str]) -> Result<String> {
    attached(pods, pod, command, AttachParams::default()).await
}

async fn attached(
    pods: &Api<k8s_openapi::api::core::v1::Pod>,
    pod: &str,
    command: &[&str],
    params: AttachParams,
) -> Result<String> {
    let params = params.stdout(true).stderr(true);
    let mut process =
        pods.exec(pod, command.iter().copied(), &params).await.with_context(|| format!("exec in {pod}"))?;
    let mut stdout = process.stdout().context("no standard output")?;
    let mut stderr = process.stderr().context("no standard error")?;
    let status = process.take_status().context("no status")?;
    let (mut out, mut err) = (String::new(), String::new());
    let (read_out, read_err, status) =
        futures::join!(stdout.read_to_string(&mut out), stderr.read_to_string(&mut err), with_status(status));
    read_out?;
    read_err?;
    ensure!(status, "{command:?} in {pod} failed: {err}{out}");
    Ok(out)
}

async fn with_status(
    status: impl Future<Output = Option<k8s_openapi::apimachinery::pkg::apis::meta::v1::Status>>,
) -> bool {
    status.await.and_then(|s| s.status).is_some_and(|s| s == "Success")
}

fn resource(kind: &str) -> ApiResource {
    let (group, version, kind, plural) = match kind {
        "vm" | "VirtualMachine" => ("kubevirt.io", "v1", "VirtualMachine", "virtualmachines"),
        "vmi" | "VirtualMachineInstance" => ("kubevirt.io", "v1", "VirtualMachineInstance", "virtualmachineinstances"),
        "vmirs" | "VirtualMachineInstanceReplicaSet" => {
            ("kubevirt.io", "v1", "VirtualMachineInstanceReplicaSet", "virtualmachineinstancereplicasets")
        }
        "VirtualMachineInstancePreset" => {
            ("kubevirt.io", "v1", "VirtualMachineInstancePreset", "virtualmachineinstancepresets")
        }
        "KubeVirt" => ("kubevirt.io", "v1", "KubeVirt", "kubevirts"),
        "VirtualMachineInstancetype" => {
            ("instancetype.kubevirt.io", "v1beta1", "VirtualMachineInstancetype", "virtualmachineinstancetypes")
        }
        "VirtualMachinePreference" => {
            ("instancetype.kubevirt.io", "v1beta1", "VirtualMachinePreference", "virtualmachinepreferences")
        }
        "VirtualMachineInstanceMigration" => {
            ("kubevirt.io", "v1", "VirtualMachineInstanceMigration", "virtualmachineinstancemigrations")
        }
        "VirtualMachinePool" => ("pool.kubevirt.io", "v1beta1", "VirtualMachinePool", "virtualmachinepools"),
        "VirtualMachineClone" => ("clone.kubevirt.io", "v1beta1", "VirtualMachineClone", "virtualmachineclones"),
        "VirtualMachineSnapshot" => {
            ("snapshot.kubevirt.io", "v1beta1", "VirtualMachineSnapshot", "virtualmachinesnapshots")
        }
        "VirtualMachineRestore" => {
            ("snapshot.kubevirt.io", "v1beta1", "VirtualMachineRestore", "virtualmachinerestores")
        }
        "VirtualMachineExport" => ("export.kubevirt.io", "v1", "VirtualMachineExport", "virtualmachineexports"),
        "StorageClass" => ("storage.k8s.io", "v1", "StorageClass", "storageclasses"),
        "PriorityClass" => ("scheduling.k8s.io", "v1", "PriorityClass", "priorityclasses"),
        "CustomResourceDefinition" => {
            ("apiextensions.k8s.io", "v1", "CustomResourceDefinition", "customresourcedefinitions")
        }
        "NetworkAttachmentDefinition" => {
            ("k8s.cni.cncf.io", "v1", "NetworkAttachmentDefinition", "network-attachment-definitions")
        }
        "Deployment" => ("apps", "v1", "Deployment", "deployments"),
        "DaemonSet" => ("apps", "v1", "DaemonSet", "daemonsets"),
        "MutatingWebhookConfiguration" => {
            ("admissionregistration.k8s.io", "v1", "MutatingWebhookConfiguration", "mutatingwebhookconfigurations")
        }
        "ValidatingWebhookConfiguration" => {
            ("admissionregistration.k8s.io", "v1", "ValidatingWebhookConfiguration", "validatingwebhookconfigurations")
        }
        "ControllerRevision" => ("apps", "v1", "ControllerRevision", "controllerrevisions"),
        "Role" => ("rbac.authorization.k8s.io", "v1", "Role", "roles"),
        "RoleBinding" => ("rbac.authorization.k8s.io", "v1", "RoleBinding", "rolebindings"),
        "ClusterRole" => ("rbac.authorization.k8s.io", "v1", "ClusterRole", "clusterroles"),
        "Event" => ("", "v1", "Event", "events"),
        core => return ApiResource::from_gvk(&GroupVersionKind::gvk("", "v1", core)),
    };
    ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk(group, version, kind), plural)
}
