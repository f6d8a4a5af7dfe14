//! Hands hot-plugged volumes from their attachment pods to launcher pods, and takes them back.
//!
//! The kernel's tables are the record: the mounts of the launcher tell which volumes it has, its control group which devices
//! it may open. A restarted virt-handler reads both. Each volume has a thread and a time limit of its own, so that storage
//! which does not answer delays no other volume.

mod published;

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use api::{VirtualMachineInstance, hotplug};
use daemon::errors;
use futures::future::join_all;
use protocol::holder;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::UnixStream,
};

pub(crate) use self::published::Published;

use crate::{
    devices::cgroup::{self, Change},
    safe_dir::{
        self, Kind, Peer, SafeDir, connect_pod,
        namespace::{Form, Target, clone_device, clone_directory, clone_dump, clone_image, clone_memory},
        pod_calls::{self, PodCalls},
    },
};

/// The user QEMU runs as in a launcher pod.
const RUNTIME_USER: u32 = 107;
/// Longest wait for the socket of an attachment pod, which may still start. virt-handler tries again later.
const SOCKET_WAIT: Duration = Duration::from_millis(500);
/// Longest wait for the answer of an attachment pod, which answers one connection at a time.
const ANSWER_WAIT: Duration = Duration::from_secs(3);
/// Most bytes of an answer that are read.
const MAX_ANSWER: u64 = 64;
/// Longest name of a volume: a DNS label.
const MAX_NAME: usize = 63;

/// A volume to hand over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Handover {
    pub(crate) volume: String,
    /// What the launcher gets of its claim.
    pub(crate) content: Content,
    /// UID of the attachment pod.
    pub(crate) pod: String,
}

/// What the launcher gets of the claim of a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Content {
    /// The block device that the claim is.
    Device,
    /// The image of a disk in the file system.
    Image,
    /// The file of this name, to which the guest's memory is written.
    Dump(String),
    /// The file of this name with the memory of a hibernated guest, which is made if it is new.
    Memory { file: String, is_new: bool },
    /// The directory of the whole file system.
    Directory,
}

impl Content {
    const fn form(&self) -> Form {
        match self {
            Self::Device => Form::Device,
            Self::Image | Self::Dump(_) | Self::Memory { .. } => Form::Image,
            Self::Directory => Form::Directory,
        }
    }
}

/// Volumes to hand over and to take back.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Work {
    /// Volumes to hand over. Those that the launcher has are granted again.
    pub(crate) attach: Vec<Handover>,
    /// Volumes to take back.
    pub(crate) detach: Vec<String>,
}

/// Reason why a volume was not handed over or taken back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    pub(crate) message: String,
    /// The attachment pod is not ready yet: nothing is wrong.
    pub(crate) waiting: bool,
}

/// The volumes of a launcher after some work.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Volumes {
    /// Volumes that the launcher has.
    pub(crate) mounted: BTreeSet<String>,
    /// Failures by volume.
    pub(crate) failures: BTreeMap<String, Failure>,
}

/// Failure of one step.
#[derive(Debug, thiserror::Error)]
enum Error {
    /// The name cannot be one of a volume.
    #[error("{0:?} is not the name of a volume")]
    Name(String),
    /// The attachment pod does not listen yet.
    #[error("the attachment pod is not ready yet")]
    NotReady,
    /// The attachment pod does not hold this volume for this VMI.
    #[error("attachment pod {pod} does not hold this volume of VMI {vmi}")]
    Foreign {
        /// UID of the pod.
        pod: String,
        /// UID of the VMI.
        vmi: String,
    },
    /// The attachment pod does not answer the question.
    #[error("attachment pod {pod} does not answer for its volumes; one of a former release is replaced")]
    Silent {
        /// UID of the pod.
        pod: String,
    },
    /// The call did not return, or was not started.
    #[error(transparent)]
    Call(#[from] pod_calls::Error),
    /// The call failed.
    #[error(transparent)]
    Path(#[from] safe_dir::Error),
    /// The device was not granted.
    #[error(transparent)]
    Grant(#[from] cgroup::Error),
}

impl Error {
    fn failure(&self) -> Failure {
        let waiting = match self {
            Self::NotReady => true,
            Self::Path(error) => matches!(error, safe_dir::Error::NotMounted(_) | safe_dir::Error::PeerGone(_)),
            _ => false,
        };
        Failure { message: errors::chain(self), waiting }
    }
}

/// A launcher and what is needed to work for it.
pub(crate) struct Desk<'a> {
    /// kubelet's directory of pods.
    pub(crate) pods: &'a SafeDir,
    /// Block devices that kubelet has attached to pods.
    pub(crate) published: &'a Arc<Published>,
    /// Threads for calls that can hang.
    pub(crate) calls: &'a PodCalls,
    pub(crate) launcher: &'a Arc<Peer>,
    /// UID of its pod.
    pub(crate) pod: &'a str,
    pub(crate) vmi: &'a VirtualMachineInstance,
}

impl Desk<'_> {
    /// Does the work for all volumes at the same time, and returns which volumes the launcher has then.
    pub(crate) async fn work(&self, work: Work) -> Result<Volumes, safe_dir::Error> {
        let before = self.volumes()?;
        let attached = join_all(work.attach.iter().map(|handover| self.attach(handover, &before)));
        let detached = join_all(work.detach.iter().map(|volume| self.detach(volume, &before)));
        let (attached, detached) = tokio::join!(attached, detached);
        let volumes = work.attach.iter().map(|handover| &handover.volume).chain(&work.detach);
        let failed = |(volume, outcome): (&String, Result<(), Error>)| {
            let error = outcome.err()?;
            tracing::debug!(volume, error = errors::chain(&error), "the volume was not handed over or taken back");
            Some((volume.clone(), error.failure()))
        };
        let failures = volumes.zip(attached.into_iter().chain(detached)).filter_map(failed).collect();
        let mounted = self.volumes()?.into_keys().collect();
        Ok(Volumes { mounted, failures })
    }

    /// Returns the volumes that the launcher has.
    fn volumes(&self) -> Result<BTreeMap<String, Form>, safe_dir::Error> {
        let names = self.launcher.hotplugged_names()?;
        if names.is_empty() {
            return Ok(BTreeMap::new());
        }
        let directory = self.pods.open_dir(pod_volume(self.pod))?;
        Ok(volumes_of(names, &directory))
    }

    fn target(&self, volume: &str, form: Form) -> Result<Target, Error> {
        let directory = self.pods.open_dir(pod_volume(self.pod))?;
        Ok(Target { directory, name: hotplug::file_name(volume, form != Form::Image), form })
    }

    /// Runs a call about one volume on a thread of its own.
    async fn call<T: Send + 'static>(
        &self,
        volume: &str,
        what: &'static str,
        work: impl FnOnce() -> Result<T, safe_dir::Error> + Send + 'static,
    ) -> Result<T, Error> {
        let metadata = &self.vmi.metadata;
        let namespace = metadata.namespace.as_deref().unwrap_or_default();
        let key = format!("{}/{volume}", metadata.uid.as_deref().unwrap_or_default());
        Ok(self.calls.run(namespace, &key, what, work).await??)
    }

    async fn attach(&self, handover: &Handover, before: &BTreeMap<String, Form>) -> Result<(), Error> {
        let Handover { volume, content, pod } = handover;
        if !is_name(volume) {
            return Err(Error::Name(volume.clone()));
        }
        // What is mounted stays, also after the end of the attachment pod. A device is granted again.
        match before.get(volume) {
            Some(Form::Device) => return self.grant_again(volume).await,
            Some(_) => return Ok(()),
            None => {}
        }
        let holder = self.holder(volume, pod).await?;
        let (name, wanted) = (volume.clone(), content.clone());
        let (published, of_pod) = (self.published.clone(), pod.clone());
        let clone = move || match wanted {
            Content::Dump(file) => clone_dump(&holder, &name, &file, RUNTIME_USER),
            Content::Memory { file, is_new } => clone_memory(&holder, &name, &file, is_new, RUNTIME_USER),
            Content::Device => clone_device(&holder, &name, &published.numbers(&of_pod)?, RUNTIME_USER),
            Content::Image => clone_image(&holder, &name),
            Content::Directory => clone_directory(&holder, &name),
        };
        let source = self.call(volume, "clone the mount of a hot-plugged volume", clone).await?;
        if let Some(device) = source.device {
            cgroup::apply(self.launcher, Change::Grant(device))?;
        }
        let (target, launcher) = (self.target(volume, content.form())?, self.launcher.clone());
        let device = source.device;
        let attach = move || target.create().and_then(|()| target.attach(&launcher, &source));
        let attached = self.call(volume, "attach a hot-plugged volume", attach).await;
        if let (Err(_), Some(device)) = (&attached, device) {
            cgroup::apply(self.launcher, Change::Withdraw(device))?;
        }
        if attached.is_ok() {
            tracing::info!(volume, form = ?content.form(), ?device, "handed the hot-plugged volume to virt-launcher");
        }
        attached
    }

    /// Returns the process that holds a volume: one of the pod, which answers for this volume of this VMI.
    async fn holder(&self, volume: &str, pod: &str) -> Result<Peer, Error> {
        let socket = pod_volume(pod).join(hotplug::SOCKET);
        let (stream, peer) = match connect_pod(self.pods, pod, socket, SOCKET_WAIT).await {
            Err(error) if error.is_not_found() || error.is_timeout() || error.is_refused() => {
                return Err(Error::NotReady);
            }
            connected => connected?,
        };
        // The pod is the one in the status of the VMI, which others than virt-controller may have written.
        let vmi = self.vmi.metadata.uid.as_deref().unwrap_or_default();
        require_held(stream, pod, vmi, volume).await.map(|()| peer)
    }

    /// Grants the device that the launcher has as a volume. Only mounts of virt-handler can be there.
    async fn grant_again(&self, volume: &str) -> Result<(), Error> {
        let (target, launcher) = (self.target(volume, Form::Device)?, self.launcher.clone());
        let device = self.call(volume, "look at a hot-plugged device", move || target.device(&launcher)).await?;
        match device {
            Some(device) => Ok(cgroup::apply(self.launcher, Change::Grant(device))?),
            None => Ok(()),
        }
    }

    async fn detach(&self, volume: &str, before: &BTreeMap<String, Form>) -> Result<(), Error> {
        let Some(form) = before.get(volume).copied() else { return Ok(()) };
        let (target, launcher) = (self.target(volume, form)?, self.launcher.clone());
        let place = target.clone();
        let detach = move || place.detach(&launcher);
        let device = self.call(volume, "detach a hot-plugged volume", detach).await?;
        if let Some(device) = device {
            cgroup::apply(self.launcher, Change::Withdraw(device))?;
        }
        match target.remove() {
            Err(error) if !error.is_not_found() => return Err(error.into()),
            _ => {}
        }
        tracing::info!(volume, ?form, ?device, "took the hot-plugged volume back from virt-launcher");
        Ok(())
    }
}

/// Asks the program of an attachment pod for a volume of a VMI, and fails unless it holds it.
async fn require_held(mut stream: UnixStream, pod: &str, vmi: &str, volume: &str) -> Result<(), Error> {
    let asked = async {
        stream.write_all(holder::question(vmi, volume).as_bytes()).await?;
        let mut answer = Vec::new();
        (&mut stream).take(MAX_ANSWER).read_to_end(&mut answer).await.map(|_| answer)
    };
    let answer = tokio::time::timeout(ANSWER_WAIT, asked).await.map_err(|_| Error::NotReady)?;
    match answer.as_deref() {
        Ok(answer) if answer == holder::HELD.as_bytes() => Ok(()),
        Ok(answer) if !answer.is_empty() => Err(Error::Foreign { pod: pod.to_owned(), vmi: vmi.to_owned() }),
        // Closed without an answer.
        Ok(_) | Err(_) => Err(Error::Silent { pod: pod.to_owned() }),
    }
}

/// Returns the volumes of mounts with these names. `directory` has the entries beneath the mounts, which the node sees: the
/// storage is not looked at.
fn volumes_of(names: Vec<String>, directory: &SafeDir) -> BTreeMap<String, Form> {
    let volume = |name: String| match name.strip_suffix(".img") {
        Some(volume) => (volume.to_owned(), Form::Image),
        None => {
            let is_directory = directory.stat(&name).is_ok_and(|stat| stat.kind == Kind::Directory);
            (name, if is_directory { Form::Directory } else { Form::Device })
        }
    };
    names.into_iter().map(volume).collect()
}

/// Returns the directory of hot-plugged volumes of a pod beneath kubelet's directory of pods.
fn pod_volume(pod: &str) -> PathBuf {
    [pod, "volumes", "kubernetes.io~empty-dir", hotplug::POD_VOLUME].iter().collect()
}

/// Accepts the names that volumes can have: each is a path component in pods.
fn is_name(volume: &str) -> bool {
    (1..=MAX_NAME).contains(&volume.len())
        && volume.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-')
}

#[cfg(test)]
mod tests;
