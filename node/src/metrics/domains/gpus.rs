//! GPUs of VMIs, as kubelet has allocated them.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use api::{VirtualMachineInstance, names};
use hyper_util::rt::TokioIo;
use kube::ResourceExt;
use tonic::transport::Endpoint;

use self::v1::{ListPodResourcesRequest, PodResources, pod_resources_lister_client::PodResourcesListerClient};
use crate::safe_dir::SafeDir;

/// kubelet's API about the resources of pods.
#[allow(
    missing_docs,
    unreachable_pub,
    clippy::all,
    reason = "generated from the proto file, which holds the documentation"
)]
mod v1 {
    tonic::include_proto!("v1");
}

/// Limit of the call to kubelet.
const TIMEOUT: Duration = Duration::from_secs(2);
/// kubelet's socket in its directory, and the directory below kubelet's own.
const SOCKET: &str = "kubelet.sock";
const DIRECTORY: &str = "pod-resources";
/// Most characters of the name of a launcher pod before its suffix, and the length of the suffix. Former releases let the API server append it.
const GENERATED: (usize, usize) = (58, 5);
/// Container of the domain.
const COMPUTE: &str = "compute";
/// Most GPUs of a VMI that are shown.
const MOST: usize = 64;

/// kubelet's socket.
#[derive(Clone)]
pub(super) struct Kubelet(PathBuf);

/// A GPU of a VMI.
#[derive(Debug, PartialEq)]
pub(super) struct Gpu<'a> {
    /// The launcher pod.
    pub(super) pod: &'a str,
    pub(super) resource: &'a str,
    /// The ID that the device plugin gave it.
    pub(super) id: &'a str,
}

impl Kubelet {
    /// Returns the socket below kubelet's directory.
    pub(super) fn new(root: &Path) -> Self {
        Self(root.join(DIRECTORY))
    }

    /// Returns the resources of all pods of the node; none if kubelet does not answer.
    pub(super) async fn pods(&self) -> Vec<PodResources> {
        let answer = tokio::time::timeout(TIMEOUT, self.list()).await;
        answer.ok().flatten().unwrap_or_else(|| {
            tracing::debug!("no resources of pods from kubelet");
            Vec::new()
        })
    }

    async fn list(&self) -> Option<Vec<PodResources>> {
        let directory = SafeDir::trusted(&self.0).ok()?;
        // The address is not used: the connector opens the socket.
        let channel = Endpoint::from_static("http://kubelet")
            .connect_with_connector(tower::service_fn(move |_| {
                let directory = directory.clone();
                async move { directory.connect(SOCKET, TIMEOUT).await.map(TokioIo::new) }
            }))
            .await
            .ok()?;
        let answer = PodResourcesListerClient::new(channel).list(ListPodResourcesRequest {}).await.ok()?;
        Some(answer.into_inner().pod_resources)
    }
}

/// Returns the names of the resources that a VMI requests as GPUs.
fn resources(vmi: &VirtualMachineInstance) -> impl Iterator<Item = &str> {
    vmi.spec.domain.devices.gpus.iter().filter_map(|gpu| gpu.device_name.as_deref())
}

/// Returns true if a VMI requests GPUs.
pub(super) fn has_gpus(vmi: &VirtualMachineInstance) -> bool {
    resources(vmi).next().is_some()
}

/// Returns the GPUs of a VMI among the resources of pods.
pub(super) fn of<'a>(vmi: &VirtualMachineInstance, pods: &'a [PodResources]) -> Vec<Gpu<'a>> {
    let (namespace, beginning) = (vmi.namespace().unwrap_or_default(), beginning(&vmi.name_any()));
    let is_launcher = |pod: &&PodResources| {
        let random = pod.name.strip_prefix(beginning.as_str());
        pod.namespace == namespace && random.is_some_and(|random| random.len() == GENERATED.1 && !random.contains('-'))
    };
    let containers = pods.iter().filter(is_launcher).flat_map(|pod| {
        let compute = pod.containers.iter().filter(|container| container.name == COMPUTE);
        compute.flat_map(|container| &container.devices).map(move |devices| (pod.name.as_str(), devices))
    });
    let gpus = containers.filter(|(_, devices)| resources(vmi).any(|name| name == devices.resource_name));
    let gpus = gpus.flat_map(|(pod, devices)| {
        devices.device_ids.iter().map(move |id| Gpu { pod, resource: &devices.resource_name, id })
    });
    gpus.take(MOST).collect()
}

/// Returns the beginning of the name of a VMI's launcher pods.
fn beginning(vmi: &str) -> String {
    let mut name = format!("virt-launcher-{}-", names::shortened(vmi, names::LABEL_LIMIT));
    name.truncate(GENERATED.0);
    name
}

#[cfg(test)]
#[allow(clippy::disallowed_methods, reason = "tests create the files of kubelet")]
mod tests {
    use serde_json::json;

    use tokio::net::UnixListener;
    use tokio_stream::wrappers::UnixListenerStream;
    use tonic::{Request, Response, Status, async_trait, transport::Server};

    use super::{
        v1::{
            ContainerDevices, ContainerResources, ListPodResourcesResponse,
            pod_resources_lister_server::{PodResourcesLister, PodResourcesListerServer},
        },
        *,
    };

    fn pod(namespace: &str, name: &str, container: &str, devices: &[(&str, &[&str])]) -> PodResources {
        let devices = devices.iter().map(|(resource, ids)| ContainerDevices {
            resource_name: (*resource).to_owned(),
            device_ids: ids.iter().map(|id| (*id).to_owned()).collect(),
        });
        let container = ContainerResources { name: container.to_owned(), devices: devices.collect() };
        PodResources { namespace: namespace.to_owned(), name: name.to_owned(), containers: vec![container] }
    }

    fn vmi(name: &str) -> VirtualMachineInstance {
        serde_json::from_value(json!({
            "metadata": {"name": name, "namespace": "ns"},
            "spec": {"domain": {"devices": {"gpus": [
                {"name": "a", "deviceName": "v.org/gpu"}, {"name": "b", "deviceName": "v.org/gpu"},
                {"name": "c", "claimName": "c", "requestName": "r"},
            ]}}},
        }))
        .unwrap()
    }

    #[test]
    fn gpus_are_those_of_the_vmis_own_launcher_pods() {
        let gpu = |ids: &'static [&'static str]| [("v.org/gpu", ids), ("devices.kubevirt.io/kvm", &["kvm0"][..])];
        let pods = [
            pod("ns", "virt-launcher-web-abcde", "compute", &gpu(&["g1", "g2"])),
            // A migration target.
            pod("ns", "virt-launcher-web-fghij", "compute", &gpu(&["g3"])),
            pod("ns", "virt-launcher-web-abcde", "other", &gpu(&["g4"])),
            pod("other", "virt-launcher-web-abcde", "compute", &gpu(&["g5"])),
            pod("ns", "virt-launcher-web-2-abcde", "compute", &gpu(&["g6"])),
            pod("ns", "web", "compute", &gpu(&["g7"])),
        ];
        let found = |name: &str| -> Vec<String> {
            of(&vmi(name), &pods).iter().map(|gpu| format!("{} {} {}", gpu.pod, gpu.resource, gpu.id)).collect()
        };
        assert_eq!(
            found("web"),
            [
                "virt-launcher-web-abcde v.org/gpu g1",
                "virt-launcher-web-abcde v.org/gpu g2",
                "virt-launcher-web-fghij v.org/gpu g3",
            ]
        );
        assert_eq!(found("web-2"), ["virt-launcher-web-2-abcde v.org/gpu g6"]);
        assert_eq!(found("we"), Vec::<String>::new());
        assert!(has_gpus(&vmi("web")) && !has_gpus(&VirtualMachineInstance::default()));
    }

    #[test]
    fn long_names_are_cut_as_the_api_server_does() {
        let long = "a".repeat(80);
        assert_eq!(beginning(&long).len(), GENERATED.0);
        assert_eq!(beginning("web"), "virt-launcher-web-");
    }

    struct FakeKubelet(Vec<PodResources>);

    #[async_trait]
    impl PodResourcesLister for FakeKubelet {
        async fn list(
            &self,
            _: Request<ListPodResourcesRequest>,
        ) -> Result<Response<ListPodResourcesResponse>, Status> {
            Ok(Response::new(ListPodResourcesResponse { pod_resources: self.0.clone() }))
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn resources_are_read_from_kubelet() {
        let root = std::env::temp_dir().join(format!("ferrovirt-pod-resources-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&root);
        let directory = root.join(DIRECTORY);
        std::fs::create_dir_all(&directory).unwrap();
        let pods = vec![pod("ns", "virt-launcher-web-abcde", "compute", &[("v.org/gpu", &["g1"])])];
        let listener = UnixListener::bind(directory.join(SOCKET)).unwrap();
        let server = Server::builder().add_service(PodResourcesListerServer::new(FakeKubelet(pods.clone())));
        tokio::spawn(server.serve_with_incoming(UnixListenerStream::new(listener)));
        assert_eq!(Kubelet::new(&root).pods().await, pods);
        std::fs::remove_dir_all(&root).unwrap();
    }

    #[tokio::test]
    async fn kubelet_that_does_not_answer_gives_nothing() {
        assert_eq!(Kubelet::new(Path::new("/nonexistent")).pods().await, []);
    }
}
