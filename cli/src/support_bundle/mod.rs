//! `support-bundle`: collects what a bug report needs in an archive, without secrets.
//!
//! ```text
//! select     which objects, fields and logs
//! redact     removes secrets
//! archive    the file, with limits on its size and the list of errors
//! ```

mod archive;
mod redact;
mod select;

use std::{
    collections::BTreeSet,
    fs::{File, OpenOptions},
    io::Write,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    time::Duration,
};

use api::pool;
use clap::Args;
use http::Method;
use k8s_openapi::{api::core::v1::Pod, jiff::Timestamp};
use kube::{Api, api::AttachParams};
use serde_json::{Value, json};
use tokio::io::AsyncReadExt;

use self::{
    archive::Archive,
    select::{Log, Tenant, by_interest, logs, name},
};
use crate::{Connection, Error, object_name};

/// Objects of a list.
const MAX_OBJECTS: usize = 500;
/// Pods of the installation, and of the VMs, whose logs are read.
const MAX_PODS: usize = 50;
/// Bytes of a log.
const MAX_LOG: usize = 2 << 20;
/// Bytes of the XML of a domain.
const MAX_DOMAIN: u64 = 1 << 20;
/// Time limit of a request without `--request-timeout`. A request that hangs must not keep the rest from being collected.
const TIME_LIMIT: Duration = Duration::from_secs(30);

/// Options of `support-bundle`.
#[derive(Args)]
pub(crate) struct Options {
    /// Names of VMs or VMIs; default: all of the namespace
    #[arg(value_name = "VM")]
    vms: Vec<String>,
    /// File of the archive; default: ferrovirt-support-TIME.tar.gz
    #[arg(long, short, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Namespace of the installation
    #[arg(long, value_name = "NAMESPACE", default_value = "kubevirt")]
    install_namespace: String,
    /// Last lines of each log
    #[arg(long, value_name = "LINES", default_value_t = 5000)]
    log_lines: u32,
}

pub(crate) async fn run(connection: &Connection, options: &Options) -> Result<(), Error> {
    let names: Vec<String> =
        options.vms.iter().map(|vm| object_name(vm).map(str::to_owned)).collect::<Result<_, _>>()?;
    for namespace in [&options.install_namespace, &connection.namespace] {
        object_name(namespace)?;
    }
    let now = Timestamp::now();
    let title = format!("ferrovirt-support-{}", now.strftime("%Y%m%dT%H%M%SZ"));
    let path = options.output.clone().unwrap_or_else(|| PathBuf::from(format!("{title}.tar.gz")));
    let failed = format!("cannot create {}", path.display());
    let file = std::io::BufWriter::new(create(&path).map_err(Error::io(failed))?);
    let seconds = u64::try_from(now.as_second()).unwrap_or_default();
    let mut bundle = Bundle { connection, options, archive: Archive::new(file, &title, seconds) };
    bundle.versions(now).await?;
    bundle.cluster().await?;
    let nodes = bundle.tenant(&names).await?;
    bundle.installation(&nodes).await?;
    if bundle.archive.is_empty() {
        return Err(Error::Transport(format!("nothing could be read; {} is empty", path.display())));
    }
    let (files, errors) = bundle.archive.finish()?;
    say!("{}: {files} files", path.display())?;
    if errors > 0 {
        say!("{errors} could not be read completely, see errors.txt in the archive")?;
    }
    say!("Secrets that are known as such were left out. Read the files before you publish them.")
}

/// Creates the file, or replaces one. A link is never followed: in a directory of several users it can be another user's.
fn create(path: &Path) -> std::io::Result<File> {
    if std::fs::symlink_metadata(path).is_ok_and(|found| found.is_file()) {
        std::fs::remove_file(path)?;
    }
    // Logs may contain what only the administrator may read.
    OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)
}

/// Objects of the installation's namespace.
const INSTALLATION: [(&str, &str); 6] = [
    ("kubevirts", "/apis/kubevirt.io/v1"),
    ("deployments", "/apis/apps/v1"),
    ("daemonsets", "/apis/apps/v1"),
    ("events", "/api/v1"),
    ("leases", "/apis/coordination.k8s.io/v1"),
    ("poddisruptionbudgets", "/apis/policy/v1"),
];
/// Ends of the names of cluster-scoped objects.
const GROUP: &str = "kubevirt.io";
/// Webhook configurations of the installation.
const WEBHOOKS: [&str; 3] = ["virt-api-mutator", "virt-api-validator", "virt-operator-validator"];

struct Bundle<'a, W: Write> {
    connection: &'a Connection,
    options: &'a Options,
    archive: Archive<W>,
}

impl<W: Write> Bundle<'_, W> {
    async fn get(&self, path: &str) -> Result<Vec<u8>, Error> {
        let call = self.connection.call(Method::GET, path, Vec::new());
        let limit = Some(self.connection.request_timeout).filter(|limit| !limit.is_zero()).unwrap_or(TIME_LIMIT);
        match tokio::time::timeout(limit, call).await {
            Ok(answer) => Ok(answer?.to_vec()),
            Err(_) => Err(Error::Transport(format!("no answer within {limit:?}"))),
        }
    }

    async fn get_json(&self, path: &str) -> Result<Value, Error> {
        crate::guest::read(&self.get(path).await?)
    }

    /// Reads a list. An error is recorded for `file`.
    async fn list(&mut self, file: &str, path: &str) -> Vec<Value> {
        let listed = match self.get_json(&format!("{path}?limit={MAX_OBJECTS}")).await {
            Ok(listed) => listed,
            Err(error) => {
                self.archive.fail(file, &error);
                return Vec::new();
            }
        };
        if listed["metadata"]["continue"].as_str().is_some_and(|token| !token.is_empty()) {
            self.archive.fail(file, &Error::Usage(format!("only the first {MAX_OBJECTS} objects")));
        }
        items(listed)
    }

    /// Reads a list of a kind that a cluster may lack.
    async fn list_if_served(&mut self, file: &str, path: &str) -> Vec<Value> {
        match self.get_json(&format!("{path}?limit=1")).await {
            Err(Error::Refused { code: 404, .. }) => Vec::new(),
            _ => self.list(file, path).await,
        }
    }

    /// Adds a file with objects. No file is added for none.
    fn add_objects(&mut self, file: &str, objects: &[Value]) -> Result<(), Error> {
        if objects.is_empty() {
            return Ok(());
        }
        self.archive.add(file, rendered(objects))
    }

    async fn versions(&mut self, now: Timestamp) -> Result<(), Error> {
        let mut versions = json!({"client": format!("v{}", env!("CARGO_PKG_VERSION")), "time": now.to_string()});
        let mut is_known = false;
        for (name, path) in [("kubernetes", "/version"), ("ferrovirt", "/apis/subresources.kubevirt.io/v1/version")] {
            match self.get_json(path).await {
                Ok(version) => {
                    versions[name] = version;
                    is_known = true;
                }
                Err(error) => self.archive.fail(&format!("versions.yaml: {name}"), &error),
            }
        }
        if is_known { self.add_objects("versions.yaml", &[versions]) } else { Ok(()) }
    }

    async fn cluster(&mut self) -> Result<(), Error> {
        let file = "cluster/nodes.yaml";
        let nodes: Vec<Value> = self.list(file, "/api/v1/nodes").await.iter().map(select::node).collect();
        self.add_objects(file, &nodes)?;
        let file = "cluster/definitions.yaml";
        let definitions = self.list(file, "/apis/apiextensions.k8s.io/v1/customresourcedefinitions").await;
        let ours = definitions.iter().filter(|object| name(object).ends_with(GROUP));
        let definitions: Vec<Value> = ours.map(select::definition).collect();
        self.add_objects(file, &definitions)?;
        let file = "cluster/apiservices.yaml";
        let mut services = self.list(file, "/apis/apiregistration.k8s.io/v1/apiservices").await;
        services.retain(|object| name(object).ends_with(GROUP));
        self.add_objects(file, &services)?;
        for kind in ["mutatingwebhookconfigurations", "validatingwebhookconfigurations"] {
            let file = format!("cluster/{kind}.yaml");
            let mut webhooks = self.list(&file, &format!("/apis/admissionregistration.k8s.io/v1/{kind}")).await;
            webhooks.retain(|object| WEBHOOKS.contains(&name(object).as_str()));
            self.add_objects(&file, &webhooks)?;
        }
        Ok(())
    }

    /// Collects the objects of VMs. Returns the nodes with VMIs.
    async fn tenant(&mut self, names: &[String]) -> Result<BTreeSet<String>, Error> {
        let namespace = self.connection.namespace.clone();
        let directory = format!("namespaces/{namespace}");
        let file = |kind: &str| format!("{directory}/{kind}.yaml");
        let core = format!("/api/v1/namespaces/{namespace}");
        let group = format!("/apis/kubevirt.io/v1/namespaces/{namespace}");
        let pools = format!("/apis/{}/namespaces/{namespace}", pool::API_VERSION);
        let mut read = Vec::new();
        for (prefix, kind) in [
            (&group, "virtualmachines"),
            (&group, "virtualmachineinstances"),
            (&group, "virtualmachineinstancemigrations"),
            (&group, "virtualmachineinstancereplicasets"),
            (&pools, "virtualmachinepools"),
            (&core, "pods"),
            (&core, "persistentvolumeclaims"),
            (&core, "events"),
        ] {
            read.push(self.list(&file(kind), &format!("{prefix}/{kind}")).await);
        }
        let mut read = read.into_iter();
        let mut next = || read.next().unwrap_or_default();
        let mut tenant = Tenant {
            vms: next(),
            vmis: next(),
            migrations: next(),
            replica_sets: next(),
            pools: next(),
            pods: next(),
            claims: next(),
            events: next(),
            ..Tenant::default()
        };
        let cdi = format!("/apis/cdi.kubevirt.io/v1beta1/namespaces/{namespace}");
        for (kind, objects) in [("datavolumes", &mut tenant.data_volumes), ("datasources", &mut tenant.data_sources)] {
            *objects = self.list_if_served(&file(kind), &format!("{cdi}/{kind}")).await;
        }
        let tenant = tenant.select(names);
        for name in names.iter().filter(|wanted| !tenant.vms.iter().chain(&tenant.vmis).any(|vm| name(vm) == **wanted))
        {
            self.archive.fail(&directory, &Error::Usage(format!("there is no VM or VMI {name}")));
        }
        for (kind, objects) in tenant.objects().into_iter().chain([("events", tenant.events.as_slice())]) {
            self.add_objects(&file(kind), objects)?;
        }
        self.logs(&directory, &namespace, &tenant.pods).await?;
        for vmi in tenant.vmis.iter().filter(|vmi| vmi["status"]["phase"] == "Running").take(MAX_PODS) {
            let active = vmi["status"]["activePods"].as_object().into_iter().flatten();
            let uids: Vec<&String> = active.map(|(uid, _)| uid).collect();
            let pods = tenant.pods.iter().filter(|pod| {
                pod["status"]["phase"] == "Running"
                    && pod["metadata"]["uid"].as_str().is_some_and(|uid| uids.iter().any(|active| *active == uid))
            });
            for pod in pods {
                let file = format!("{directory}/domains/{}.xml", name(pod));
                let domain = self.domain(&namespace, &name(pod), &format!("{namespace}_{}", name(vmi))).await;
                self.archive.add(&file, domain)?;
            }
        }
        let nodes = tenant.vmis.iter().filter_map(|vmi| vmi["status"]["nodeName"].as_str());
        Ok(nodes.map(str::to_owned).collect())
    }

    async fn installation(&mut self, nodes: &BTreeSet<String>) -> Result<(), Error> {
        let namespace = self.options.install_namespace.clone();
        for (kind, prefix) in INSTALLATION {
            let file = format!("installation/{kind}.yaml");
            let objects = self.list(&file, &format!("{prefix}/namespaces/{namespace}/{kind}")).await;
            self.add_objects(&file, &objects)?;
        }
        let file = "installation/pods.yaml";
        let mut pods = self.list(file, &format!("/api/v1/namespaces/{namespace}/pods")).await;
        self.add_objects(file, &pods)?;
        by_interest(&mut pods, nodes);
        self.logs("installation", &namespace, &pods).await
    }

    async fn logs(&mut self, directory: &str, namespace: &str, pods: &[Value]) -> Result<(), Error> {
        if pods.len() > MAX_PODS {
            let left = format!("only the logs of {MAX_PODS} of {} pods", pods.len());
            self.archive.fail(&format!("{directory}/logs"), &Error::Usage(left));
        }
        for log in pods.iter().take(MAX_PODS).flat_map(logs) {
            let text = self.get(&log_path(namespace, &log, self.options.log_lines)).await;
            let text = text.map(|text| redact::text(&String::from_utf8_lossy(&text)).into_bytes());
            self.archive.add(&format!("{directory}/{}", log.file()), text)?;
        }
        Ok(())
    }

    /// Returns the XML of a domain, without passwords.
    async fn domain(&self, namespace: &str, pod: &str, domain: &str) -> Result<Vec<u8>, Error> {
        let failed = |error: String| Error::Transport(format!("cannot run virsh: {error}"));
        let api = Api::<Pod>::namespaced(self.connection.client.clone(), namespace);
        let parameters = AttachParams::default().container("compute").stdin(false).stdout(true).stderr(false);
        let read = async {
            let command = ["virsh", "--readonly", "dumpxml", domain];
            let mut process = api.exec(pod, command, &parameters).await.map_err(|error| failed(error.to_string()))?;
            let mut text = Vec::new();
            if let Some(output) = process.stdout() {
                let read = output.take(MAX_DOMAIN).read_to_end(&mut text).await;
                read.map_err(|error| failed(error.to_string()))?;
            }
            let status = match process.take_status() {
                Some(status) => status.await,
                None => None,
            };
            match status.and_then(|status| status.message) {
                Some(message) if text.is_empty() => Err(failed(message)),
                _ => Ok(redact::text(&String::from_utf8_lossy(&text)).into_bytes()),
            }
        };
        tokio::time::timeout(TIME_LIMIT, read)
            .await
            .unwrap_or_else(|_| Err(failed(format!("no end within {TIME_LIMIT:?}"))))
    }
}

fn log_path(namespace: &str, log: &Log, lines: u32) -> String {
    let previous = if log.previous { "&previous=true" } else { "" };
    format!(
        "/api/v1/namespaces/{namespace}/pods/{}/log?container={}&tailLines={lines}&limitBytes={MAX_LOG}{previous}",
        log.pod, log.container
    )
}

/// Returns the objects of a list, each with its kind.
fn items(mut list: Value) -> Vec<Value> {
    let kind = list["kind"].as_str().and_then(|kind| kind.strip_suffix("List")).map(str::to_owned);
    let api_version = list["apiVersion"].clone();
    let Value::Array(mut items) = list["items"].take() else { return Vec::new() };
    if let Some(kind) = kind {
        for item in items.iter_mut().filter(|item| item.is_object()) {
            item["kind"] = json!(kind);
            item["apiVersion"] = api_version.clone();
        }
    }
    items
}

/// Returns objects without secrets, as documents of YAML.
fn rendered(objects: &[Value]) -> Result<Vec<u8>, Error> {
    let mut text = String::new();
    for object in objects {
        let mut object = object.clone();
        redact::object(&mut object);
        let document = serde_saphyr::to_string(&object)
            .map_err(|error| Error::Transport(format!("cannot render an object: {error}")))?;
        text.push_str("---\n");
        text.push_str(&document);
    }
    Ok(text.into_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command_line::{Command, parse};

    #[test]
    fn options_have_defaults() {
        let read = |words: &[&str]| {
            let words = [&["kubectl-virt", "support-bundle"], words].concat();
            match parse(words).map(|cli| (cli.command, cli.cluster.namespace)) {
                Ok((Command::SupportBundle(options), namespace)) => (options, namespace),
                _ => panic!("not accepted"),
            }
        };
        let (options, namespace) = read(&[]);
        assert_eq!((options.vms.len(), options.output, options.install_namespace.as_str()), (0, None, "kubevirt"));
        assert_eq!((options.log_lines, namespace), (5000, None));
        let (options, namespace) = read(&["a", "vmi/b", "--output", "x.tar.gz", "-n", "tenant", "--log-lines=7"]);
        assert_eq!(options.vms, ["a", "vmi/b"]);
        assert_eq!((options.output, namespace.as_deref()), (Some("x.tar.gz".into()), Some("tenant")));
        assert_eq!(options.log_lines, 7);
    }

    #[test]
    fn archive_replaces_a_file_and_follows_no_link() {
        use std::os::unix::fs::MetadataExt;

        let directory = std::env::temp_dir().join(format!("support-bundle-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let (target, link, path) = (directory.join("target"), directory.join("link"), directory.join("bundle"));
        std::fs::write(&target, "mine").unwrap();
        std::os::unix::fs::symlink(&target, &link).unwrap();
        std::fs::hard_link(&target, &path).unwrap();
        assert!(create(&link).is_err());
        create(&path).unwrap().write_all(b"new").unwrap();
        assert_eq!(std::fs::read_to_string(&target).unwrap(), "mine");
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        std::fs::remove_dir_all(&directory).unwrap();
    }

    #[test]
    fn logs_are_read_with_limits() {
        let log = |previous| Log { pod: "p".into(), container: "c".into(), previous };
        let limits = format!("tailLines=9&limitBytes={MAX_LOG}");
        for (previous, end) in [(false, ""), (true, "&previous=true")] {
            let expected = format!("/api/v1/namespaces/n/pods/p/log?container=c&{limits}{end}");
            assert_eq!(log_path("n", &log(previous), 9), expected);
        }
    }

    #[test]
    fn objects_of_lists_have_their_kind_and_no_secrets() {
        let list = json!({"apiVersion": "v1", "kind": "SecretList", "items": [{"metadata": {"name": "a"}, "data": {"b": "c"}}]});
        let text = String::from_utf8(rendered(&items(list)).unwrap()).unwrap();
        assert!(text.starts_with("---\n") && text.contains("kind: Secret"), "{text}");
        assert!(text.contains("<redacted>") && !text.contains("b: c"), "{text}");
    }
}
