//! Selects the objects, fields and logs of a bundle.

use std::collections::BTreeSet;

use serde_json::{Value, json};

/// Labels of pods that belong to VMIs.
const POD_TYPES: [&str; 3] = ["virt-launcher", "hotplug-disk", "virt-importer"];

/// The selected objects of a namespace.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Tenant {
    pub vms: Vec<Value>,
    pub vmis: Vec<Value>,
    pub migrations: Vec<Value>,
    pub replica_sets: Vec<Value>,
    pub pools: Vec<Value>,
    pub pods: Vec<Value>,
    pub claims: Vec<Value>,
    pub data_volumes: Vec<Value>,
    pub data_sources: Vec<Value>,
    pub events: Vec<Value>,
}

impl Tenant {
    /// Keeps the objects that belong to the VMs and VMIs with these names. No names: all VMs and VMIs.
    pub(super) fn select(mut self, names: &[String]) -> Self {
        let is_named =
            |name: &Value| names.is_empty() || name.as_str().is_some_and(|name| names.iter().any(|n| n == name));
        self.vms.retain(|vm| is_named(&vm["metadata"]["name"]));
        self.vmis.retain(|vmi| is_named(&vmi["metadata"]["name"]));
        self.migrations.retain(|migration| is_named(&migration["spec"]["vmiName"]));
        self.replica_sets.retain(|_| names.is_empty());
        self.pools.retain(|_| names.is_empty());
        let claims: BTreeSet<String> = self.vms.iter().chain(&self.vmis).flat_map(claims).collect();
        let is_claim = |name: &Value| name.as_str().is_some_and(|name| claims.contains(name));
        // Other pods of the namespace are of no concern.
        self.pods.retain(|pod| POD_TYPES.iter().any(|kind| pod["metadata"]["labels"]["kubevirt.io"] == *kind));
        if !names.is_empty() {
            let launchers: BTreeSet<String> =
                self.pods.iter().filter(|pod| owned(pod, "VirtualMachineInstance", is_named)).map(name).collect();
            let is_launcher = |owner: &Value| owner.as_str().is_some_and(|name| launchers.contains(name));
            self.pods.retain(|pod| {
                launchers.contains(&name(pod)) || owned(pod, "Pod", is_launcher) || owned(pod, "DataVolume", is_claim)
            });
        }
        self.claims.retain(|claim| is_claim(&claim["metadata"]["name"]));
        self.data_volumes.retain(|volume| is_claim(&volume["metadata"]["name"]));
        let sources: BTreeSet<String> = self.vms.iter().chain(&self.data_volumes).flat_map(data_sources).collect();
        self.data_sources.retain(|source| sources.contains(&name(source)));
        let known: BTreeSet<String> = self.objects().into_iter().flat_map(|(_, objects)| objects).map(name).collect();
        self.events.retain(|event| {
            let regarding = &event["involvedObject"];
            let is_ours = regarding["kind"].as_str().is_some_and(|kind| kind.starts_with("VirtualMachine"));
            known.contains(regarding["name"].as_str().unwrap_or_default()) || (is_ours && is_named(&regarding["name"]))
        });
        self
    }

    /// Returns the objects by plural, without events.
    pub(super) fn objects(&self) -> [(&'static str, &[Value]); 9] {
        [
            ("virtualmachines", &self.vms),
            ("virtualmachineinstances", &self.vmis),
            ("virtualmachineinstancemigrations", &self.migrations),
            ("virtualmachineinstancereplicasets", &self.replica_sets),
            ("virtualmachinepools", &self.pools),
            ("pods", &self.pods),
            ("persistentvolumeclaims", &self.claims),
            ("datavolumes", &self.data_volumes),
            ("datasources", &self.data_sources),
        ]
    }
}

/// Returns the name of an object.
pub(super) fn name(object: &Value) -> String {
    object["metadata"]["name"].as_str().unwrap_or_default().to_owned()
}

fn owned(object: &Value, kind: &str, is_owner: impl Fn(&Value) -> bool) -> bool {
    let owners = object["metadata"]["ownerReferences"].as_array();
    owners.into_iter().flatten().any(|owner| owner["kind"] == kind && is_owner(&owner["name"]))
}

/// Returns the names of the claims of a VM or VMI.
fn claims(object: &Value) -> Vec<String> {
    let specs = [object.pointer("/spec/template/spec/volumes"), object.pointer("/spec/volumes")];
    let volumes = specs.into_iter().flatten().filter_map(Value::as_array).flatten();
    let names = volumes.filter_map(|volume| {
        ["/persistentVolumeClaim/claimName", "/dataVolume/name", "/memoryDump/claimName"]
            .iter()
            .find_map(|pointer| volume.pointer(pointer)?.as_str())
    });
    names.map(str::to_owned).collect()
}

/// Returns the names of the DataSources of a DataVolume, or of the templates of a VM.
fn data_sources(object: &Value) -> Vec<String> {
    let templates = object.pointer("/spec/dataVolumeTemplates").and_then(Value::as_array).into_iter().flatten();
    let objects = templates.chain([object]);
    objects.filter_map(|object| object.pointer("/spec/sourceRef/name")?.as_str()).map(str::to_owned).collect()
}

/// Returns a node without what identifies it beyond its name: addresses, images and annotations of others.
pub(super) fn node(node: &Value) -> Value {
    let annotations = node["metadata"]["annotations"].as_object();
    let ours = annotations.into_iter().flatten().filter(|(key, _)| key.contains("kubevirt.io/"));
    let annotations: serde_json::Map<String, Value> = ours.map(|(key, value)| (key.clone(), value.clone())).collect();
    let status = &node["status"];
    json!({
        "kind": "Node",
        "metadata": {
            "name": node["metadata"]["name"], "labels": node["metadata"]["labels"], "annotations": annotations,
            "creationTimestamp": node["metadata"]["creationTimestamp"],
        },
        "spec": {"taints": node["spec"]["taints"], "unschedulable": node["spec"]["unschedulable"]},
        "status": {
            "conditions": status["conditions"], "capacity": status["capacity"], "allocatable": status["allocatable"],
            "nodeInfo": status["nodeInfo"],
        },
    })
}

/// Returns the versions and conditions of a definition.
pub(super) fn definition(definition: &Value) -> Value {
    let versions = definition["spec"]["versions"].as_array().into_iter().flatten();
    let versions: Vec<Value> = versions
        .map(|version| json!({"name": version["name"], "served": version["served"], "storage": version["storage"]}))
        .collect();
    json!({
        "kind": "CustomResourceDefinition",
        "metadata": {"name": definition["metadata"]["name"], "labels": definition["metadata"]["labels"]},
        "spec": {"versions": versions},
        "status": {
            "conditions": definition["status"]["conditions"],
            "storedVersions": definition["status"]["storedVersions"],
        },
    })
}

/// A log of a pod.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Log {
    pub pod: String,
    pub container: String,
    pub previous: bool,
}

impl Log {
    /// Returns the path of the file in the bundle, below the directory of the namespace.
    pub(super) fn file(&self) -> String {
        let kind = if self.previous { "previous.log" } else { "log" };
        format!("logs/{}/{}.{kind}", self.pod, self.container)
    }
}

/// Returns the logs of a pod: of each container that ran, and of its former run.
pub(super) fn logs(pod: &Value) -> Vec<Log> {
    let status = &pod["status"];
    let statuses = ["initContainerStatuses", "containerStatuses"].map(|field| status[field].as_array());
    let mut logs = Vec::new();
    for container in statuses.into_iter().flatten().flatten() {
        let log = |previous| Log {
            pod: name(pod),
            container: container["name"].as_str().unwrap_or_default().to_owned(),
            previous,
        };
        if container["containerID"].as_str().is_some_and(|id| !id.is_empty()) {
            logs.push(log(false));
        }
        if container["restartCount"].as_u64().unwrap_or(0) > 0 {
            logs.push(log(true));
        }
    }
    logs
}

/// Sorts pods by their interest: those that are not ready or were restarted, those on these nodes, the others.
pub(super) fn by_interest(pods: &mut [Value], nodes: &BTreeSet<String>) {
    pods.sort_by_key(|pod| {
        let statuses = pod["status"]["containerStatuses"].as_array();
        let is_well = statuses.is_some_and(|all| {
            all.iter().all(|container| container["ready"] == true && container["restartCount"].as_u64() == Some(0))
        });
        let is_near = pod["spec"]["nodeName"].as_str().is_some_and(|node| nodes.contains(node));
        // Of a Deployment all pods, since one of them leads.
        let is_of_node = pod["metadata"]["labels"]["kubevirt.io"] == "virt-handler";
        (is_well, is_of_node && !is_near)
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(name: &str, kind: &str, owner: (&str, &str)) -> Value {
        json!({"metadata": {"name": name, "labels": {"kubevirt.io": kind},
            "ownerReferences": [{"kind": owner.0, "name": owner.1}]}})
    }

    fn event(kind: &str, name: &str) -> Value {
        json!({"involvedObject": {"kind": kind, "name": name}})
    }

    fn tenant() -> Tenant {
        let named = |name: &str| json!({"metadata": {"name": name}});
        let with_claim = |name: &str, claim: &str| {
            let template = json!({"spec": {"sourceRef": {"kind": "DataSource", "name": format!("source-{name}")}}});
            json!({"metadata": {"name": name}, "spec": {"dataVolumeTemplates": [template], "template": {"spec": {"volumes": [
                {"name": "a", "containerDisk": {}}, {"name": "b", "persistentVolumeClaim": {"claimName": claim}},
            ]}}}})
        };
        Tenant {
            vms: vec![with_claim("a", "data-a"), with_claim("b", "data-b")],
            vmis: vec![named("a"), named("b")],
            migrations: vec![json!({"metadata": {"name": "m"}, "spec": {"vmiName": "b"}})],
            replica_sets: vec![named("set")],
            pools: vec![named("pool")],
            pods: vec![
                pod("virt-launcher-a", "virt-launcher", ("VirtualMachineInstance", "a")),
                pod("hp-a", "hotplug-disk", ("Pod", "virt-launcher-a")),
                pod("virt-launcher-b", "virt-launcher", ("VirtualMachineInstance", "b")),
                pod("importer-data-a", "virt-importer", ("DataVolume", "data-a")),
                pod("web", "", ("ReplicaSet", "web")),
            ],
            claims: vec![named("data-a"), named("data-b"), named("other")],
            data_volumes: vec![named("data-a"), named("other")],
            data_sources: vec![named("source-a"), named("source-b"), named("other")],
            events: vec![
                event("VirtualMachineInstance", "a"),
                event("Pod", "hp-a"),
                event("VirtualMachineInstance", "gone"),
                event("Pod", "web"),
                event("PersistentVolumeClaim", "data-b"),
            ],
        }
    }

    #[test]
    fn selection_contains_the_vms_and_what_belongs_to_them() {
        let names = |list: &[Value]| list.iter().map(name).collect::<Vec<_>>();
        let about = |list: &[Value]| {
            list.iter().map(|event| event["involvedObject"]["name"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
        };
        let all = tenant().select(&[]);
        assert_eq!(names(&all.vms), ["a", "b"]);
        assert_eq!(names(&all.pods), ["virt-launcher-a", "hp-a", "virt-launcher-b", "importer-data-a"]);
        assert_eq!(names(&all.claims), ["data-a", "data-b"]);
        assert_eq!((names(&all.data_volumes), names(&all.data_sources).len()), (vec!["data-a".to_owned()], 2));
        assert_eq!(about(&all.events), ["a", "hp-a", "gone", "data-b"]);
        let one = tenant().select(&["a".to_owned()]);
        assert_eq!((names(&one.vms), names(&one.vmis)), (vec!["a".to_owned()], vec!["a".to_owned()]));
        assert!(one.migrations.is_empty() && one.replica_sets.is_empty() && one.pools.is_empty());
        assert_eq!(names(&one.pods), ["virt-launcher-a", "hp-a", "importer-data-a"]);
        assert_eq!(
            (names(&one.claims), names(&one.data_sources)),
            (vec!["data-a".to_owned()], vec!["source-a".to_owned()])
        );
        assert_eq!(about(&one.events), ["a", "hp-a"]);
    }

    #[test]
    fn nodes_and_definitions_are_summaries() {
        let summary = node(&json!({
            "metadata": {"name": "n", "labels": {"a": "b"}, "annotations": {"kubevirt.io/heartbeat": "t", "x": "y"}},
            "spec": {"podCIDR": "10.0.0.0/24", "unschedulable": true},
            "status": {"addresses": [{"address": "192.0.2.1"}], "images": [{}], "capacity": {"cpu": "2"}},
        }));
        assert_eq!(summary["metadata"]["annotations"], json!({"kubevirt.io/heartbeat": "t"}));
        assert_eq!(
            (&summary["spec"]["unschedulable"], &summary["status"]["capacity"]["cpu"]),
            (&json!(true), &json!("2"))
        );
        let text = summary.to_string();
        assert!(!text.contains("192.0.2.1") && !text.contains("images") && !text.contains("10.0.0.0"), "{text}");
        let summary = definition(&json!({
            "metadata": {"name": "d"}, "spec": {"versions": [{"name": "v1", "served": true, "storage": true, "schema": {}}]},
            "status": {"storedVersions": ["v1"]},
        }));
        assert_eq!(summary["spec"]["versions"], json!([{"name": "v1", "served": true, "storage": true}]));
    }

    #[test]
    fn logs_are_those_of_containers_that_ran_and_of_their_former_runs() {
        let log = |container: &str, previous| Log { pod: "p".into(), container: container.into(), previous };
        let pod = json!({"metadata": {"name": "p"}, "status": {
            "initContainerStatuses": [{"name": "init", "containerID": "c://1", "restartCount": 0}],
            "containerStatuses": [
                {"name": "a", "containerID": "c://2", "restartCount": 2}, {"name": "waiting", "restartCount": 0},
            ],
        }});
        assert_eq!(logs(&pod), [log("init", false), log("a", false), log("a", true)]);
        assert_eq!(log("a", true).file(), "logs/p/a.previous.log");
        assert_eq!(logs(&json!({"metadata": {"name": "p"}})), []);
    }

    #[test]
    fn failing_components_and_those_of_the_vms_nodes_come_first() {
        let pod = |name: &str, app: &str, node: &str, restarts: u64| {
            json!({"metadata": {"name": name, "labels": {"kubevirt.io": app}}, "spec": {"nodeName": node},
                "status": {"containerStatuses": [{"ready": true, "restartCount": restarts}]}})
        };
        let mut pods = [
            pod("far", "virt-handler", "n1", 0),
            pod("near", "virt-handler", "n2", 0),
            pod("api", "virt-api", "n3", 0),
            pod("restarted", "virt-handler", "n4", 1),
        ];
        by_interest(&mut pods, &BTreeSet::from(["n2".to_owned()]));
        assert_eq!(pods.iter().map(name).collect::<Vec<_>>(), ["restarted", "near", "api", "far"]);
    }
}
