//! `expose`: creates a Service for a VM, a VMI, or the VMIs of a replica set or pool.

use std::net::IpAddr;

use api::{constants::label::VMI_ID, names, pool};
use clap::{Args, ValueEnum};
use http::Method;
use serde_json::{Map, Value, json};

use crate::{Connection, Error, guest::read, object_name};

/// Labels that controllers add to running VMIs. They are useless as selectors.
const OWN_LABELS: [&str; 7] = [
    "kubevirt.io/memory-hotplug-overhead-ratio",
    "kubevirt.io/migrationTargetNodeName",
    "kubevirt.io/nodeName",
    "kubevirt.io/outdatedLauncherImage",
    "kubevirt.io/vm-pool-revision-name",
    "kubevirt.io/vmi-pod-cpu-resource-limits",
    "kubevirt.io/vmi-pod-memory-resource-requests",
];

/// Type of the exposed object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Subject {
    /// A VirtualMachine
    #[value(alias = "vms", alias = "virtualmachine", alias = "virtualmachines")]
    Vm,
    /// A VirtualMachineInstance
    #[value(alias = "vmis", alias = "virtualmachineinstance", alias = "virtualmachineinstances")]
    Vmi,
    /// A VirtualMachineInstanceReplicaSet
    #[value(alias = "vmirss", alias = "virtualmachineinstancereplicaset", alias = "virtualmachineinstancereplicasets")]
    Vmirs,
    /// A VirtualMachinePool
    #[value(alias = "vmpools", alias = "virtualmachinepool", alias = "virtualmachinepools")]
    Vmpool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Protocol {
    #[value(name = "TCP")]
    Tcp,
    #[value(name = "UDP")]
    Udp,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum ServiceType {
    #[value(name = "ClusterIP")]
    ClusterIp,
    #[value(name = "NodePort")]
    NodePort,
    #[value(name = "LoadBalancer")]
    LoadBalancer,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Family {
    #[value(name = "IPv4")]
    V4,
    #[value(name = "IPv6")]
    V6,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum FamilyPolicy {
    #[value(name = "SingleStack")]
    Single,
    #[value(name = "PreferDualStack")]
    PreferDual,
    #[value(name = "RequireDualStack")]
    RequireDual,
}

/// Options of `expose`.
#[derive(Args)]
pub(crate) struct ExposeOptions {
    /// Type of the object to expose: vm, vmi, vmirs or vmpool
    #[arg(value_name = "TYPE", ignore_case = true)]
    subject: Subject,
    /// Name of the object to expose
    #[arg(value_name = "NAME")]
    object: String,
    /// Name of the Service
    #[arg(long = "name", value_name = "SERVICE")]
    service: String,
    /// Port of the Service; default: the ports that the VMI declares
    #[arg(long)]
    port: Option<u16>,
    /// Port of the guest, as number or name; default: that of the Service
    #[arg(long, requires = "port")]
    target_port: Option<String>,
    /// Name of the port
    #[arg(long, requires = "port")]
    port_name: Option<String>,
    /// Protocol of the port
    #[arg(long, requires = "port", value_enum, ignore_case = true)]
    protocol: Option<Protocol>,
    /// Port of the Service on each node
    #[arg(long, requires = "port")]
    node_port: Option<u16>,
    /// Type of the Service
    #[arg(long = "type", value_enum, ignore_case = true, default_value_t = ServiceType::ClusterIp)]
    kind: ServiceType,
    /// Address of the Service in the cluster, or None for a Service without one
    #[arg(long, value_name = "ADDRESS")]
    cluster_ip: Option<String>,
    /// External address that routes to the nodes
    #[arg(long, value_name = "ADDRESS")]
    external_ip: Option<IpAddr>,
    /// Address of the load balancer
    #[arg(long, value_name = "ADDRESS")]
    load_balancer_ip: Option<IpAddr>,
    /// IP families of the Service in order of preference: IPv4, IPv6 or both, separated by a comma
    #[arg(long, value_enum, ignore_case = true, value_delimiter = ',')]
    ip_family: Vec<Family>,
    /// IP family policy of the Service
    #[arg(long, value_enum, ignore_case = true)]
    ip_family_policy: Option<FamilyPolicy>,
}

impl Subject {
    fn resource(self) -> &'static str {
        match self {
            Self::Vm => "virtualmachines",
            Self::Vmi => "virtualmachineinstances",
            Self::Vmirs => "virtualmachineinstancereplicasets",
            Self::Vmpool => "virtualmachinepools",
        }
    }

    fn api_version(self) -> &'static str {
        match self {
            Self::Vm | Self::Vmi | Self::Vmirs => "kubevirt.io/v1",
            Self::Vmpool => pool::API_VERSION,
        }
    }

    fn kind(self) -> &'static str {
        match self {
            Self::Vm => "VirtualMachine",
            Self::Vmi => "VirtualMachineInstance",
            Self::Vmirs => "VirtualMachineInstanceReplicaSet",
            Self::Vmpool => "VirtualMachinePool",
        }
    }

    /// Returns the VMI specification inside the object.
    fn vmi_spec(self, object: &Value) -> &Value {
        match self {
            Self::Vm | Self::Vmirs => &object["spec"]["template"]["spec"],
            Self::Vmpool => &object["spec"]["virtualMachineTemplate"]["spec"]["template"]["spec"],
            Self::Vmi => &object["spec"],
        }
    }

    /// Returns labels that select the launcher pods: labels of the object, or else the label with the VMI's name. The selector of a
    /// pool selects VMs, so that the labels of its VMIs count.
    fn selector(self, object: &Value, name: &str) -> Result<Value, Error> {
        let labels = match self {
            Self::Vm => &object["spec"]["template"]["metadata"]["labels"],
            Self::Vmi => &object["metadata"]["labels"],
            Self::Vmpool => &object["spec"]["virtualMachineTemplate"]["spec"]["template"]["metadata"]["labels"],
            Self::Vmirs => {
                let selector = &object["spec"]["selector"];
                if selector["matchExpressions"].as_array().is_some_and(|list| !list.is_empty()) {
                    return Err(Error::Usage("a selector with matchExpressions cannot be used for a Service".into()));
                }
                &selector["matchLabels"]
            }
        };
        let labels: Map<String, Value> = labels
            .as_object()
            .into_iter()
            .flatten()
            .filter(|(label, _)| !OWN_LABELS.contains(&label.as_str()))
            .map(|(label, value)| (label.clone(), value.clone()))
            .collect();
        match self {
            _ if !labels.is_empty() => Ok(Value::Object(labels)),
            Self::Vm | Self::Vmi => Ok(json!({VMI_ID: names::label_value(name)})),
            Self::Vmirs => Err(Error::Usage(format!("{name} has no labels that a Service can select"))),
            Self::Vmpool => Err(Error::Usage(format!(
                "the VMIs of {name} have no labels that a Service can select: set spec.virtualMachineTemplate.spec.template.metadata.labels"
            ))),
        }
    }
}

/// Parses a port number or name.
fn target_port(text: &str) -> Value {
    text.parse::<u16>().map_or_else(|_| json!(text), |number| json!(number))
}

impl ExposeOptions {
    /// Returns the port from the options, or the ports that the VMI declares.
    fn ports(&self, vmi_spec: &Value) -> Result<Vec<Value>, Error> {
        if let Some(number) = self.port {
            let mut port = json!({"port": number, "protocol": word(self.protocol.unwrap_or(Protocol::Tcp))});
            let target = self.target_port.as_deref().map(target_port);
            for (field, value) in [
                ("targetPort", target),
                ("name", self.port_name.as_ref().map(|name| json!(name))),
                ("nodePort", self.node_port.map(|number| json!(number))),
            ] {
                if let Some(value) = value {
                    port[field] = value;
                }
            }
            return Ok(vec![port]);
        }
        // A Service reaches only the network with the address of the pod.
        let networks = vmi_spec["networks"].as_array().into_iter().flatten();
        let is_primary = |network: &&Value| network["pod"].is_object() || network["multus"]["default"] == true;
        let of_pod = networks.filter(is_primary).map(|network| &network["name"]).collect::<Vec<_>>();
        let interfaces = vmi_spec["domain"]["devices"]["interfaces"].as_array().into_iter().flatten();
        let interfaces = interfaces.filter(|interface| of_pod.contains(&&interface["name"]));
        let declared = interfaces.filter_map(|interface| interface["ports"].as_array()).flatten();
        let ports = declared.enumerate().map(|(index, declared)| {
            // As virtctl names them, whatever the VMI calls them.
            let name = format!("port-{}", index + 1);
            json!({"name": name, "port": declared["port"], "protocol": declared["protocol"].as_str().unwrap_or("TCP")})
        });
        let ports = ports.collect::<Vec<_>>();
        if ports.is_empty() {
            return Err(Error::Usage("set --port: the VMI declares no ports on the pod network".into()));
        }
        Ok(ports)
    }

    /// Renders the Service for an object.
    fn manifest(&self, object: &Value, name: &str) -> Result<Value, Error> {
        let families = self.ip_family.iter().map(|family| word(*family)).collect::<Vec<_>>();
        // Without a policy, a single-stack cluster rejects two families.
        let policy = self.ip_family_policy.or_else(|| (families.len() > 1).then_some(FamilyPolicy::PreferDual));
        let mut spec = json!({
            "type": word(self.kind),
            "selector": self.subject.selector(object, name)?,
            "ports": self.ports(self.subject.vmi_spec(object))?,
        });
        for (field, value) in [
            ("clusterIP", self.cluster_ip.as_ref().map(|address| json!(address))),
            ("externalIPs", self.external_ip.map(|address| json!([address]))),
            ("loadBalancerIP", self.load_balancer_ip.map(|address| json!(address))),
            ("ipFamilies", (!families.is_empty()).then(|| json!(families))),
            ("ipFamilyPolicy", policy.map(|policy| json!(word(policy)))),
        ] {
            if let Some(value) = value {
                spec[field] = value;
            }
        }
        // The owner reference deletes the Service with the object. The user who deletes the object may lack the right to delete
        // Services.
        let owner = json!({
            "apiVersion": self.subject.api_version(),
            "kind": self.subject.kind(),
            "name": name,
            "uid": object["metadata"]["uid"],
            "blockOwnerDeletion": false,
        });
        let metadata = json!({"name": self.service, "ownerReferences": [owner]});
        Ok(json!({"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec}))
    }
}

/// Returns the value as Kubernetes spells it.
fn word<V: ValueEnum>(value: V) -> String {
    value.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
}

pub(crate) async fn run(connection: &Connection, options: &ExposeOptions) -> Result<(), Error> {
    let name = object_name(&options.object)?;
    let namespace = &connection.namespace;
    let (version, resource) = (options.subject.api_version(), options.subject.resource());
    let path = format!("/apis/{version}/namespaces/{namespace}/{resource}/{name}");
    let object = read(&connection.call(Method::GET, &path, Vec::new()).await?)?;
    let service = options.manifest(&object, name)?.to_string().into_bytes();
    connection.call(Method::POST, &format!("/api/v1/namespaces/{namespace}/services"), service).await?;
    say!("Service {} successfully exposed for {} {name}", options.service, word(options.subject))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command_line::{Command, parse};

    fn service(words: &[&str], object: &Value) -> Result<Value, Error> {
        let cli =
            parse([&["kubectl-virt", "expose"], words].concat()).map_err(|error| Error::Usage(error.to_string()))?;
        let Command::Expose(options) = cli.command else { panic!("another command") };
        options.manifest(object, words[1])
    }

    fn made(words: &[&str], object: &Value) -> Result<Value, Error> {
        service(words, object).map(|service| service["spec"].clone())
    }

    fn vm() -> Value {
        json!({"spec": {"template": {
            "metadata": {"labels": {"app": "web"}},
            "spec": {
                "networks": [{"name": "other", "multus": {"networkName": "n"}}, {"name": "default", "pod": {}}],
                "domain": {"devices": {"interfaces": [
                    {"name": "other", "ports": [{"port": 22}]},
                    {"name": "default", "ports": [{"name": "http", "port": 80}, {"port": 53, "protocol": "UDP"}]},
                ]}},
            },
        }}})
    }

    #[test]
    fn port_is_exposed_with_the_labels_of_the_vm() {
        let words =
            ["vm", "web", "--name=svc", "--port=8080", "--target-port=80", "--type=nodeport", "--node-port=30080"];
        assert_eq!(
            made(&words, &vm()).unwrap(),
            json!({
                "type": "NodePort",
                "selector": {"app": "web"},
                "ports": [{"port": 8080, "protocol": "TCP", "targetPort": 80, "nodePort": 30080}],
            })
        );
        let named =
            made(&["vm", "web", "--name=svc", "--port=53", "--protocol=udp", "--target-port=dns"], &vm()).unwrap();
        assert_eq!(named["ports"], json!([{"port": 53, "protocol": "UDP", "targetPort": "dns"}]));
    }

    #[test]
    fn service_is_owned_by_the_exposed_object() {
        let object = json!({"metadata": {"uid": "u1", "labels": {"app": "web"}}});
        let service = service(&["vmi", "web", "--name=svc", "--port=22"], &object).unwrap();
        assert_eq!(
            service["metadata"],
            json!({"name": "svc", "ownerReferences": [{
                "apiVersion": "kubevirt.io/v1",
                "kind": "VirtualMachineInstance",
                "name": "web",
                "uid": "u1",
                "blockOwnerDeletion": false,
            }]})
        );
    }

    #[test]
    fn pool_is_exposed_with_the_labels_of_its_vmis() {
        let mut pool = json!({
            "metadata": {"uid": "u1"},
            "spec": {"selector": {"matchLabels": {"vms": "web"}}, "virtualMachineTemplate": vm()},
        });
        let words = ["vmpool", "web", "--name=svc"];
        let service = service(&words, &pool).unwrap();
        assert_eq!(service["spec"]["selector"], json!({"app": "web"}));
        assert_eq!(service["spec"]["ports"][0]["port"], 80);
        let owner = &service["metadata"]["ownerReferences"][0];
        assert_eq!(
            (&owner["apiVersion"], &owner["kind"]),
            (&json!("pool.kubevirt.io/v1beta1"), &json!("VirtualMachinePool"))
        );
        pool["spec"]["virtualMachineTemplate"]["spec"]["template"]["metadata"] = json!({});
        assert!(made(&words, &pool).is_err());
    }

    #[test]
    fn declared_ports_are_exposed_by_default() {
        assert_eq!(
            made(&["VirtualMachines", "web", "--name=svc", "--cluster-ip=None"], &vm()).unwrap(),
            json!({
                "type": "ClusterIP",
                "clusterIP": "None",
                "selector": {"app": "web"},
                "ports": [
                    {"name": "port-1", "port": 80, "protocol": "TCP"},
                    {"name": "port-2", "port": 53, "protocol": "UDP"},
                ],
            })
        );
        let mut of_multus = vm();
        of_multus["spec"]["template"]["spec"]["networks"] =
            json!([{"name": "other", "multus": {"networkName": "n", "default": true}}]);
        assert_eq!(made(&["vm", "web", "--name=svc"], &of_multus).unwrap()["ports"][0]["port"], 22);
        assert!(made(&["vmi", "web", "--name=svc"], &json!({"spec": {}})).unwrap_err().to_string().contains("--port"));
    }

    #[test]
    fn vmi_without_own_labels_is_selected_by_name() {
        let bare = json!({"metadata": {"labels": {"kubevirt.io/nodeName": "n"}}});
        let spec = made(&["vmi", "web", "--name=svc", "--port=22"], &bare).unwrap();
        assert_eq!(spec["selector"], json!({"vmi.kubevirt.io/id": "web"}));
        for length in [63, 64, 169, 253] {
            let name = "a".repeat(length);
            let spec = made(&["vm", &name, "--name=svc", "--port=22"], &bare).unwrap();
            assert_eq!(spec["selector"], json!({"vmi.kubevirt.io/id": names::label_value(&name)}));
        }
        let labelled = json!({"metadata": {"labels": {"kubevirt.io/nodeName": "n", "kubevirt.io/vm": "fleet"}}});
        let spec = made(&["vmi", "web", "--name=svc", "--port=22"], &labelled).unwrap();
        assert_eq!(spec["selector"], json!({"kubevirt.io/vm": "fleet"}));
        for selector in [json!({}), json!({"matchExpressions": [{"key": "a", "operator": "Exists"}]})] {
            let set = json!({"spec": {"selector": selector}});
            assert!(made(&["vmirs", "web", "--name=svc", "--port=22"], &set).is_err(), "{set}");
        }
    }

    #[test]
    fn ip_families_are_those_requested() {
        let words = ["vm", "web", "--name=svc", "--port=22"];
        assert_eq!(made(&words, &vm()).unwrap().get("ipFamilies"), None);
        let dual =
            made(&[&words[..], &["--ip-family=ipv6,IPv4", "--ip-family-policy=preferdualstack"]].concat(), &vm());
        let dual = dual.unwrap();
        let both = made(&[&words[..], &["--ip-family=ipv4,ipv6"]].concat(), &vm()).unwrap();
        assert_eq!(both["ipFamilyPolicy"], "PreferDualStack");
        let one = made(&[&words[..], &["--ip-family=ipv6"]].concat(), &vm()).unwrap();
        assert_eq!(one.get("ipFamilyPolicy"), None);
        assert_eq!(
            (&dual["ipFamilies"], &dual["ipFamilyPolicy"]),
            (&json!(["IPv6", "IPv4"]), &json!("PreferDualStack"))
        );
    }

    #[test]
    fn wrong_arguments_are_rejected() {
        for words in [
            &["vm", "web", "--port=22"][..],
            &["pod", "web", "--name=svc", "--port=22"],
            &["vm", "web", "--name=svc", "--port=22", "--type=ExternalName"],
            &["vm", "web", "--name=svc", "--target-port=22"],
            &["vm", "web", "--name=svc", "--port=22", "--protocol=SCTP"],
            &["vm", "web", "--name=svc", "--port=22", "--ip-family=IPv5"],
        ] {
            assert!(made(words, &vm()).is_err(), "{words:?}");
        }
    }
}
