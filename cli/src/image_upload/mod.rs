//! `image-upload`: an image or archive of the local host to a DataVolume or claim, through the upload proxy of CDI.

mod claim;
mod client;
mod transfer;

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use http::Method;
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use serde_json::{Value, json};

use crate::{
    Connection, Error,
    error::is_not_found,
    guest::{read, text},
    object_name,
    wait::{self, Progress},
};

/// API of CDI that issues tokens for uploads.
const TOKENS: &str = "/apis/upload.cdi.kubevirt.io/v1beta1";
/// API of DataVolumes.
const CDI: &str = "/apis/cdi.kubevirt.io/v1beta1";
/// Longest processing of an uploaded image, in seconds.
const PROCESSING: u64 = 24 * 3600;

/// Kinds of targets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Target {
    /// A DataVolume
    Dv,
    /// A PersistentVolumeClaim
    Pvc,
}

/// Options of `image-upload`.
#[derive(Args)]
pub(crate) struct UploadOptions {
    /// Kind of the target
    #[arg(ignore_case = true)]
    target: Target,
    /// Name of the target
    #[arg(value_name = "NAME")]
    name: String,
    #[command(flatten)]
    source: Source,
    /// Size of the target that is created, such as 10Gi
    #[arg(long, alias = "pvc-size", required_unless_present = "no_create")]
    size: Option<String>,
    /// Storage class of the claim
    #[arg(long, value_name = "NAME")]
    storage_class: Option<String>,
    /// Access mode of the claim
    #[arg(long, value_parser = ["ReadWriteOnce", "ReadWriteMany", "ReadWriteOncePod"])]
    access_mode: Option<String>,
    /// Volume mode of the claim; default: that of the storage profile
    #[arg(long, value_parser = ["block", "filesystem"])]
    volume_mode: Option<String>,
    /// Use a target that exists
    #[arg(long, conflicts_with_all = ["default_instancetype", "default_preference"])]
    no_create: bool,
    /// Bind the claim at once, also if its class waits for a consumer
    #[arg(long)]
    force_bind: bool,
    /// Create or change the DataSource of the same name
    #[arg(long)]
    datasource: bool,
    /// Default instance type of VMs that boot from the image
    #[arg(long, value_name = "NAME")]
    default_instancetype: Option<String>,
    /// Kind of the default instance type
    #[arg(
        long,
        requires = "default_instancetype",
        value_parser = ["VirtualMachineClusterInstancetype", "VirtualMachineInstancetype"]
    )]
    default_instancetype_kind: Option<String>,
    /// Default preference of VMs that boot from the image
    #[arg(long, value_name = "NAME")]
    default_preference: Option<String>,
    /// Kind of the default preference
    #[arg(
        long,
        requires = "default_preference",
        value_parser = ["VirtualMachineClusterPreference", "VirtualMachinePreference"]
    )]
    default_preference_kind: Option<String>,
    /// Address of the upload proxy; default: that of CDI's configuration
    #[arg(long, value_name = "URL")]
    uploadproxy_url: Option<String>,
    /// Do not check the certificate of the upload proxy, and permit one without TLS
    #[arg(long)]
    insecure: bool,
    /// Seconds to wait until the upload can begin
    #[arg(long, value_name = "SECONDS", default_value_t = 300)]
    wait_secs: u64,
    /// Attempts to send the image
    #[arg(long, value_name = "NUMBER", default_value_t = 5)]
    retry: u32,
}

/// The local file.
#[derive(Args)]
#[group(required = true, multiple = false)]
pub(crate) struct Source {
    /// The image
    #[arg(long, value_name = "FILE")]
    image_path: Option<PathBuf>,
    /// The archive
    #[arg(long, value_name = "FILE")]
    archive_path: Option<PathBuf>,
}

impl UploadOptions {
    fn is_archive(&self) -> bool {
        self.source.archive_path.is_some()
    }

    fn file(&self) -> PathBuf {
        self.source.archive_path.clone().or_else(|| self.source.image_path.clone()).unwrap_or_default()
    }
}

pub(crate) async fn run(connection: &Connection, options: &UploadOptions) -> Result<(), Error> {
    let name = object_name(&options.name)?;
    if options.is_archive() && options.volume_mode.as_deref() == Some("block") {
        return Err(Error::Usage("In archive upload the volume mode should always be filesystem".to_owned()));
    }
    let file = transfer::Source::open(&options.file()).await?;
    ensure_cdi(connection).await?;
    let paths = Paths::new(&connection.namespace, name);
    prepare(connection, options, &paths, name).await?;
    let ready = ready(connection, options, &paths, name).await?;
    let proxy = match &options.uploadproxy_url {
        Some(url) => url.clone(),
        None => proxy_url(connection).await?,
    };
    let proxy = if proxy.contains("://") { proxy } else { format!("https://{proxy}") };
    say!("Uploading data to {proxy}")?;
    let token = async || token(connection, name).await;
    transfer::send(&file, &proxy, options.insecure, options.retry, token).await?;
    if options.datasource {
        data_source(connection, options, name).await?;
    }
    say!(
        "Uploading data completed successfully, waiting for processing to complete, you can hit ctrl-c without interrupting the \
         progress"
    )?;
    let late = |shown: &str| format!("the image is still processed after {PROCESSING} s: {shown}");
    wait::follow(PROCESSING, late, async || {
        let data_volume = find_if(connection, options.target == Target::Dv, &paths.data_volume).await?;
        let claim = connection.find(&paths.claim).await?;
        Ok(claim::processed(data_volume.as_ref(), claim.as_ref(), ready))
    })
    .await?;
    say!("Uploading {} completed successfully", options.file().display())
}

/// Paths of the target.
struct Paths {
    claim: String,
    claims: String,
    data_volume: String,
    data_volumes: String,
}

impl Paths {
    fn new(namespace: &str, name: &str) -> Self {
        let claims = format!("/api/v1/namespaces/{namespace}/persistentvolumeclaims");
        let data_volumes = format!("{CDI}/namespaces/{namespace}/datavolumes");
        Self { claim: format!("{claims}/{name}"), claims, data_volume: format!("{data_volumes}/{name}"), data_volumes }
    }
}

/// Fails in a cluster without CDI.
async fn ensure_cdi(connection: &Connection) -> Result<(), Error> {
    match connection.find(TOKENS).await? {
        Some(_) => Ok(()),
        None => Err(Error::Usage(
            "image-upload needs the upload API of CDI (upload.cdi.kubevirt.io), which this cluster does not have: install CDI, or \
             serve the image by HTTP or as a container disk and import it with a DataVolume, for example by kubectl virt create vm \
             --volume-import"
                .to_owned(),
        )),
    }
}

async fn find_if(connection: &Connection, wanted: bool, path: &str) -> Result<Option<Value>, Error> {
    if wanted { connection.find(path).await } else { Ok(None) }
}

/// Creates the target, or checks and marks the one that exists.
async fn prepare(connection: &Connection, options: &UploadOptions, paths: &Paths, name: &str) -> Result<(), Error> {
    let namespace = &connection.namespace;
    let Some(found) = connection.find(&paths.claim).await? else {
        let existing = find_if(connection, options.target == Target::Dv, &paths.data_volume).await?;
        if existing.is_some() && options.no_create {
            return Ok(());
        }
        if options.no_create {
            return Err(Error::Usage(format!("PVC {namespace}/{name} not found")));
        }
        let (path, kind, manifest) = match options.target {
            Target::Dv => (&paths.data_volumes, "DataVolume", claim::data_volume(options, name)?),
            Target::Pvc => (&paths.claims, "PersistentVolumeClaim", claim::claim(options, name)?),
        };
        connection.call(Method::POST, path, manifest.to_string().into_bytes()).await?;
        return say!("{kind} {namespace}/{name} created");
    };
    let data_volume = find_if(connection, options.target == Target::Dv, &paths.data_volume).await?;
    let parsed: PersistentVolumeClaim =
        serde_json::from_value(found).map_err(|error| Error::Transport(format!("unreadable PVC {name}: {error}")))?;
    if let Some(why) = claim::obstacle(options, name, &parsed, data_volume.as_ref(), namespace) {
        return Err(Error::Usage(why));
    }
    if !claim::is_target(&parsed) && options.target == Target::Pvc {
        let patch = json!({"metadata": {"annotations": {claim::TARGET: ""}}}).to_string().into_bytes();
        connection.patch(&paths.claim, patch).await?;
    }
    say!("Using existing PVC {namespace}/{name}")
}

/// Waits until data can be sent. Returns the number of restarts of the server so far.
async fn ready(connection: &Connection, options: &UploadOptions, paths: &Paths, name: &str) -> Result<u64, Error> {
    let mut restarts = 0;
    let late = |shown: &str| format!("{name} is not ready for an upload within {} s: {shown}", options.wait_secs);
    wait::follow(options.wait_secs, late, async || {
        let data_volume = find_if(connection, options.target == Target::Dv, &paths.data_volume).await?;
        restarts = data_volume.as_ref().map_or(0, claim::restarts);
        let found = connection.find(&paths.claim).await?;
        let progress = match options.target {
            Target::Dv => claim::data_volume_ready(data_volume.as_ref(), options.force_bind),
            Target::Pvc => claim::claim_ready(found.as_ref()),
        };
        Ok(match progress {
            Progress::Waiting(state) => {
                let why = cause(connection, name, data_volume.as_ref(), found.as_ref()).await;
                let why = why.map(|why| format!(": {why}")).unwrap_or_default();
                Progress::Waiting(format!("{state}{why}"))
            }
            ended => ended,
        })
    })
    .await?;
    Ok(restarts)
}

/// Returns why the target has no volume. A user who may not read events does not learn it.
async fn cause(
    connection: &Connection,
    name: &str,
    data_volume: Option<&Value>,
    claim: Option<&Value>,
) -> Option<String> {
    let namespace = &connection.namespace;
    let path = format!("/api/v1/namespaces/{namespace}/events?fieldSelector=involvedObject.name={name}");
    let events = connection.find(&path).await.ok().flatten()?;
    claim::cause(&events, data_volume, claim)
}

/// Reads the address of the upload proxy from CDI's configuration.
async fn proxy_url(connection: &Connection) -> Result<String, Error> {
    let config = connection.find(&format!("{CDI}/cdiconfigs/config")).await?.unwrap_or_default();
    claim::proxy_url(&config).ok_or_else(|| {
        Error::Usage(
            "uploadproxy URL not found: CDI's configuration has none; forward a port to the Service cdi-uploadproxy and pass \
             --uploadproxy-url"
                .to_owned(),
        )
    })
}

/// Requests a token for an upload. It is valid for five minutes at the start of a transfer.
async fn token(connection: &Connection, name: &str) -> Result<String, Error> {
    let request = json!({
        "apiVersion": "upload.cdi.kubevirt.io/v1beta1", "kind": "UploadTokenRequest",
        "metadata": {"name": "token-for-virtctl"}, "spec": {"pvcName": name},
    });
    let path = format!("{TOKENS}/namespaces/{}/uploadtokenrequests", connection.namespace);
    let answer = connection.call(Method::POST, &path, request.to_string().into_bytes()).await;
    let answer = read(&answer.map_err(crate::failed_while("requesting a token for the upload"))?)?;
    match answer["status"]["token"].as_str() {
        Some(token) if !token.is_empty() => Ok(token.to_owned()),
        _ => Err(Error::Transport("the answer to the request for an upload token has none".to_owned())),
    }
}

/// Creates or changes the DataSource of the same name.
async fn data_source(connection: &Connection, options: &UploadOptions, name: &str) -> Result<(), Error> {
    let namespace = &connection.namespace;
    let sources = format!("{CDI}/namespaces/{namespace}/datasources");
    let manifest = claim::data_source(options, name, namespace);
    let patch = claim::data_source_patch(&manifest).to_string().into_bytes();
    match connection.patch(&format!("{sources}/{name}"), patch).await {
        Ok(_) => say!("Updated an existing DataSource {namespace}/{name}"),
        Err(error) if is_not_found(&error) => {
            connection.call(Method::POST, &sources, manifest.to_string().into_bytes()).await?;
            say!("Created a new DataSource {namespace}/{name}")
        }
        Err(error) => Err(error),
    }
}

/// Returns the last condition with a message that is not met.
fn unmet(object: &Value) -> Option<String> {
    let conditions = object["status"]["conditions"].as_array()?;
    let is_unmet = |one: &&Value| one["status"] != "True" && one["message"].as_str().is_some_and(|m| !m.is_empty());
    conditions.iter().rfind(is_unmet).map(|one| text(&one["message"]))
}
