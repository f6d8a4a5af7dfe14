#![allow(clippy::disallowed_methods, reason = "tests create the files that virt-handler finds")]

use std::{fs, path::Path, sync::Arc};

use api::config::ClusterConfig;
use serde_json::json;
use tokio::{net::UnixListener, sync::mpsc};
use tonic::{Request, Response, Status, transport::Channel};

use super::{
    v1beta1::{
        AllocateRequest, ContainerAllocateRequest, Empty,
        device_plugin_client::DevicePluginClient,
        registration_server::{Registration, RegistrationServer},
    },
    *,
};

/// A kubelet that registers plugins.
struct Kubelet(mpsc::Sender<RegisterRequest>);

#[tonic::async_trait]
impl Registration for Kubelet {
    async fn register(&self, request: Request<RegisterRequest>) -> Result<Response<Empty>, Status> {
        let _ = self.0.send(request.into_inner()).await;
        Ok(Response::new(Empty {}))
    }
}

fn start_kubelet(directory: &Path) -> (mpsc::Receiver<RegisterRequest>, tokio::task::JoinHandle<()>) {
    let (sender, requests) = mpsc::channel(16);
    // kubelet removes the files of its predecessor.
    for entry in fs::read_dir(directory).unwrap() {
        fs::remove_file(entry.unwrap().path()).unwrap();
    }
    let listener = UnixListener::bind(directory.join(KUBELET_SOCKET)).unwrap();
    let server = Server::builder()
        .add_service(RegistrationServer::new(Kubelet(sender)))
        .serve_with_incoming(UnixListenerStream::new(listener));
    (requests, tokio::spawn(async move { server.await.unwrap() }))
}

async fn dial(directory: &Path, socket: &str) -> DevicePluginClient<Channel> {
    let (directory, socket) = (SafeDir::trusted(directory).unwrap(), Arc::<str>::from(socket));
    let channel = Endpoint::from_static("http://plugin")
        .connect_with_connector(tower::service_fn(move |_| {
            let (directory, socket) = (directory.clone(), Arc::clone(&socket));
            async move { directory.connect(&*socket, REGISTER_TIMEOUT).await.map(TokioIo::new) }
        }))
        .await
        .unwrap();
    DevicePluginClient::new(channel)
}

#[tokio::test]
async fn plugins_register_serve_and_register_again_with_a_new_kubelet() {
    let directory = std::env::temp_dir().join(format!("ferrovirt-plugins-{}", std::process::id()));
    let _ = fs::remove_dir_all(&directory);
    let (plugins, dev) = (directory.join("plugins"), directory.join("dev"));
    fs::create_dir_all(&plugins).unwrap();
    fs::create_dir_all(dev.join("net")).unwrap();
    let stop = CancellationToken::new();
    let (offers, mut known) = watch::channel(Offers::new());
    let sys_dir = directory.join("sys");
    let config = Config { plugins_dir: plugins.clone(), dev_dir: dev.clone(), sys_dir, max_devices: 1000 };
    // The number of the cluster configuration.
    let cluster =
        ConfigHandle::fixed(ClusterConfig { virtual_machine_instances_per_node: Some(3), ..ClusterConfig::default() });
    let running = tokio::spawn(run(config, cluster, watch::channel(false).1, offers, stop.clone()));

    let (mut requests, kubelet) = start_kubelet(&plugins);
    let mut resources = Vec::new();
    for _ in 0..5 {
        let request = requests.recv().await.unwrap();
        assert_eq!(request.version, "v1beta1");
        assert_eq!(request.endpoint, format!("kubevirt-{}.sock", request.resource_name.rsplit('/').next().unwrap()));
        resources.push(request.resource_name);
    }
    resources.sort();
    let all =
        ["kvm", "tun", "userfaultfd", "vhost-net", "vhost-vsock"].map(|name| format!("devices.kubevirt.io/{name}"));
    assert_eq!(resources, all);
    tokio::time::timeout(Duration::from_secs(5), known.wait_for(all_known)).await.unwrap().unwrap();

    // The device is missing: units are unhealthy.
    let mut client = dial(&plugins, "kubevirt-tun.sock").await;
    let mut list = client.list_and_watch(Empty {}).await.unwrap().into_inner();
    let devices = list.message().await.unwrap().unwrap().devices;
    let ids: Vec<&str> = devices.iter().map(|device| device.id.as_str()).collect();
    assert_eq!(ids, ["tun0", "tun1", "tun2"]);
    assert!(devices.iter().all(|device| device.health == "Unhealthy"));
    // A regular file of this name is not the device.
    fs::write(dev.join("net/tun"), "").unwrap();
    fs::remove_file(dev.join("net/tun")).unwrap();
    let number = rustix::fs::makedev(10, 200);
    let mode = rustix::fs::Mode::from_raw_mode(0o600);
    let made =
        rustix::fs::mknodat(rustix::fs::CWD, dev.join("net/tun"), rustix::fs::FileType::CharacterDevice, mode, number);
    if made.is_ok() {
        let devices =
            tokio::time::timeout(Duration::from_secs(5), list.message()).await.unwrap().unwrap().unwrap().devices;
        assert!(devices.iter().all(|device| device.health == "Healthy"));
    } else {
        skips::skip("permission to make device nodes: root");
    }
    let request =
        AllocateRequest { container_requests: vec![ContainerAllocateRequest { devices_ids: vec!["tun1".into()] }] };
    let mut responses = client.allocate(request).await.unwrap().into_inner().container_responses;
    let devices = responses.pop().unwrap().devices;
    assert_eq!((devices[0].host_path.as_str(), devices[0].container_path.as_str()), ("/dev/net/tun", "/dev/net/tun"));
    assert!(devices[0].permissions.starts_with("rw"));
    let options = client.get_device_plugin_options(Empty {}).await.unwrap().into_inner();
    assert!(!options.pre_start_required);
    drop((client, list));

    // kubelet restarts: it removes the sockets, and plugins have to register again.
    kubelet.abort();
    let _ = kubelet.await;
    let (mut requests, kubelet) = start_kubelet(&plugins);
    for _ in 0..5 {
        tokio::time::timeout(Duration::from_secs(10), requests.recv()).await.expect("not registered again").unwrap();
    }
    tokio::time::timeout(Duration::from_secs(5), known.wait_for(all_known)).await.unwrap().unwrap();

    stop.cancel();
    tokio::time::timeout(Duration::from_secs(5), running).await.unwrap().unwrap();
    assert!(!plugins.join("kubevirt-kvm.sock").exists(), "sockets are removed in the end");
    kubelet.abort();
    fs::remove_dir_all(directory).unwrap();
}

#[tokio::test]
async fn permitted_devices_of_the_node_are_resources_of_their_own() {
    let directory = std::env::temp_dir().join(format!("ferrovirt-permitted-{}", std::process::id()));
    let _ = fs::remove_dir_all(&directory);
    let (plugins, dev, sys) = (directory.join("plugins"), directory.join("dev"), directory.join("sys"));
    let card = sys.join("bus/pci/devices/0000:3b:00.0");
    for path in [&plugins, &dev.join("vfio"), &card] {
        fs::create_dir_all(path).unwrap();
    }
    for (file, content) in [("vendor", "0x10de\n"), ("device", "0x1eb8\n"), ("numa_node", "0\n")] {
        fs::write(card.join(file), content).unwrap();
    }
    std::os::unix::fs::symlink("../../../bus/pci/drivers/vfio-pci", card.join("driver")).unwrap();
    std::os::unix::fs::symlink("../../../kernel/iommu_groups/17", card.join("iommu_group")).unwrap();
    let permitted = serde_json::from_value(json!({"pciHostDevices": [
        {"pciVendorSelector": "10de:1eb8", "resourceName": "nvidia.com/T4"},
        {"pciVendorSelector": "8086:37c9", "resourceName": "intel.com/absent"},
    ]}));
    let cluster = ClusterConfig { permitted_host_devices: permitted.unwrap(), ..ClusterConfig::default() };
    let config = Config { plugins_dir: plugins.clone(), dev_dir: dev.clone(), sys_dir: sys, max_devices: 1 };
    let stop = CancellationToken::new();
    let (mut requests, kubelet) = start_kubelet(&plugins);
    let running = tokio::spawn(permitted::run(config, ConfigHandle::fixed(cluster), stop.clone()));

    let request = tokio::time::timeout(Duration::from_secs(5), requests.recv()).await.unwrap().unwrap();
    assert_eq!(request.resource_name, "nvidia.com/T4");
    let mut client = dial(&plugins, &request.endpoint).await;
    let mut list = client.list_and_watch(Empty {}).await.unwrap().into_inner();
    let devices = list.message().await.unwrap().unwrap().devices;
    assert_eq!((devices[0].id.as_str(), devices[0].health.as_str()), ("17", "Unhealthy"), "there is no node yet");
    let allocate = |id: &str| AllocateRequest {
        container_requests: vec![ContainerAllocateRequest { devices_ids: vec![id.to_owned()] }],
    };
    assert!(client.allocate(allocate("17")).await.is_err() && client.allocate(allocate("18")).await.is_err());
    let node = |name: &str| {
        let mode = rustix::fs::Mode::from_raw_mode(0o600);
        let number = rustix::fs::makedev(10, 196);
        let kind = rustix::fs::FileType::CharacterDevice;
        rustix::fs::mknodat(rustix::fs::CWD, dev.join("vfio").join(name), kind, mode, number).is_ok()
    };
    if node("vfio") && node("17") {
        let soon = tokio::time::timeout(Duration::from_secs(10), list.message());
        assert_eq!(soon.await.unwrap().unwrap().unwrap().devices[0].health, "Healthy");
        let response = client.allocate(allocate("17")).await.unwrap().into_inner().container_responses.remove(0);
        assert_eq!(response.envs["PCI_RESOURCE_NVIDIA_COM_T4"], "0000:3b:00.0");
        let paths: Vec<&str> = response.devices.iter().map(|device| device.host_path.as_str()).collect();
        assert_eq!(paths, ["/dev/vfio/17", "/dev/vfio/vfio"]);
    } else {
        skips::skip("permission to make device nodes: root");
    }
    assert!(requests.try_recv().is_err(), "a resource without devices is not offered");

    stop.cancel();
    drop((client, list));
    tokio::time::timeout(Duration::from_secs(5), running).await.unwrap().unwrap();
    assert!(!plugins.join(&request.endpoint).exists(), "sockets are removed in the end");
    kubelet.abort();
    fs::remove_dir_all(directory).unwrap();
}
