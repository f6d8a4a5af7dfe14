//! Complete reviews, as the API server sends them.

#![allow(clippy::unwrap_used, reason = "a test ends here")]

mod other_kinds;
mod vm;
mod vmi;

use admission::{LookupResult, Lookups, Selection, WEBHOOKS, context::lookups::MAX_QUERIES, handle};
use api::{FeatureGate, config::ClusterConfig};
use base64::{Engine, engine::general_purpose::STANDARD};
use serde_json::{Value, json};

const CONTROLLER: &str = "system:serviceaccount:kubevirt:kubevirt-controller";
const HANDLER: &str = "system:serviceaccount:kubevirt:kubevirt-handler";

/// Returns the response in a cluster without other objects.
fn respond(path: &str, body: &[u8]) -> admission::AdmissionReview {
    respond_beside(path, body, &ClusterConfig::default(), &|_| vec![])
}

/// Returns the response in a cluster with these objects by plural.
fn respond_beside(
    path: &str,
    body: &[u8],
    config: &ClusterConfig,
    objects: &dyn Fn(&str) -> Vec<Value>,
) -> admission::AdmissionReview {
    let mut lookups = Lookups::new();
    loop {
        match handle(path, body, config, "kubevirt", &lookups) {
            Ok(evaluation) => return evaluation.review,
            Err(queries) => {
                assert!(lookups.len() < MAX_QUERIES);
                for query in queries {
                    let result = match query.selection {
                        Selection::List { .. } => LookupResult::List(objects(&query.plural)),
                        _ => LookupResult::Object(objects(&query.plural).into_iter().next()),
                    };
                    lookups.insert(query, result);
                }
            }
        }
    }
}

struct Call {
    path: &'static str,
    plural: &'static str,
    operation: &'static str,
    user: &'static str,
    object: Value,
    old: Value,
    node: Option<&'static str>,
    group: &'static str,
    beside: Vec<(&'static str, Value)>,
    config: ClusterConfig,
}

impl Call {
    fn new(path: &'static str, plural: &'static str, operation: &'static str, object: Value) -> Self {
        Self {
            path,
            plural,
            operation,
            user: "jane",
            object,
            old: Value::Null,
            node: None,
            group: "kubevirt.io",
            beside: vec![],
            config: ClusterConfig::default(),
        }
    }

    fn by(self, user: &'static str) -> Self {
        Self { user, ..self }
    }

    /// Adds an object of a plural to the cluster.
    fn beside(mut self, plural: &'static str, object: Value) -> Self {
        self.beside.push((plural, object));
        self
    }

    /// Enables a feature gate.
    fn with(mut self, gate: FeatureGate) -> Self {
        self.config.feature_gates.push(gate.name().to_owned());
        self
    }

    fn was(self, old: Value) -> Self {
        Self { old, ..self }
    }

    fn version(&self) -> &'static str {
        match self.group {
            "pool.kubevirt.io" => "v1beta1",
            "migrations.kubevirt.io" => "v1alpha1",
            _ => "v1",
        }
    }

    fn send(&self) -> Value {
        let extra = match self.node {
            Some(node) => json!({"authentication.kubernetes.io/node-name": [node]}),
            None => json!({}),
        };
        let body = json!({
            "apiVersion": "admission.k8s.io/v1",
            "kind": "AdmissionReview",
            "request": {
                "uid": "the-uid",
                "kind": {"group": "kubevirt.io", "version": "v1", "kind": "Any"},
                "resource": {"group": self.group, "version": self.version(), "resource": self.plural},
                "namespace": "default",
                "operation": self.operation,
                "userInfo": {"username": self.user, "groups": ["system:authenticated"], "extra": extra},
                "object": self.object,
                "oldObject": self.old,
                "dryRun": false,
            },
        });
        let beside = |plural: &str| {
            self.beside.iter().filter(|(of, _)| *of == plural).map(|(_, object)| object.clone()).collect()
        };
        let review = respond_beside(self.path, body.to_string().as_bytes(), &self.config, &beside);
        let review = serde_json::to_value(review).unwrap();
        assert_eq!(review["response"]["uid"], "the-uid");
        review["response"].clone()
    }

    /// Returns the object after the patch of the response.
    fn patched(&self) -> Value {
        let response = self.allowed();
        let mut object = self.object.clone();
        if let Some(patch) = response["patch"].as_str() {
            let patch: json_patch::Patch = serde_json::from_slice(&STANDARD.decode(patch).unwrap()).unwrap();
            json_patch::patch(&mut object, &patch).unwrap();
        }
        object
    }

    fn refused(&self, message: &str) {
        let response = self.send();
        assert_eq!(response["allowed"], false, "{response}");
        let got = response["status"]["message"].as_str().unwrap();
        assert!(got.contains(message), "wanted {message}\ngot {got}");
    }

    fn allowed(&self) -> Value {
        let response = self.send();
        assert_eq!(response["allowed"], true, "{response}");
        response
    }
}

fn vmi() -> Value {
    json!({
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachineInstance",
        "metadata": {"name": "m", "namespace": "default", "labels": {"app": "web"}},
        "spec": {
            "domain": {
                "devices": {"disks": [{"name": "root", "disk": {"bus": "virtio", "readonly": false}}]},
                "memory": {"guest": "128Mi"},
            },
            "volumes": [{"name": "root", "containerDisk": {"image": "a:b"}}],
        },
    })
}

fn vm() -> Value {
    json!({
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachine",
        "metadata": {"name": "v", "namespace": "default"},
        "spec": {
            "runStrategy": "Always",
            "template": {
                "metadata": {"creationTimestamp": null, "labels": {"app": "web"}},
                "spec": vmi()["spec"],
            },
        },
    })
}

fn create(object: Value) -> Call {
    Call::new("/virtualmachineinstances-mutate", "virtualmachineinstances", "CREATE", object)
}

fn validate(object: Value) -> Call {
    Call::new("/virtualmachineinstances-validate-create", "virtualmachineinstances", "CREATE", object)
}

fn update(object: Value, old: Value) -> Call {
    Call::new("/virtualmachineinstances-validate-update", "virtualmachineinstances", "UPDATE", object).was(old)
}

fn validate_vm(object: Value) -> Call {
    Call::new("/virtualmachines-validate", "virtualmachines", "CREATE", object)
}

fn preset(name: &str, domain: Value) -> Value {
    json!({
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachineInstancePreset",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"selector": {"matchLabels": {"app": "web"}}, "domain": domain},
    })
}

#[test]
fn schema_errors_name_the_field() {
    let mut object = vmi();
    object["spec"]["domain"].as_object_mut().unwrap().remove("devices");
    create(object.clone()).refused("spec.domain.devices in body is required");
    validate(object).refused("spec.domain.devices in body is required");
    create(json!("text")).refused("the request carries no object");
    create(Value::Null).refused("the request carries no object");
    let was = json!({"status": {"phase": "Running"}});
    for object in [json!("text"), Value::Null] {
        let call = Call::new("/virtualmachineinstances-mutate", "virtualmachineinstances", "UPDATE", object);
        call.was(was.clone()).refused("the request carries no object");
    }
}

#[test]
fn other_resources_and_paths_are_refused() {
    Call::new("/virtualmachines-mutate", "pods", "CREATE", vm()).refused("expect resource to be 'virtualmachines'");
    Call::new("/nowhere", "virtualmachines", "CREATE", vm()).refused("there is no webhook at /nowhere");
}

#[test]
fn every_body_gets_a_review() {
    let deep = format!("{}{}", "[".repeat(10_000), "]".repeat(10_000));
    let odd = json!({"request": {
        "uid": "u",
        "operation": "CREATE",
        "object": {"spec": []},
        "resource": {"group": "kubevirt.io", "resource": "virtualmachines"},
    }})
    .to_string();
    for path in WEBHOOKS.iter().map(|webhook| webhook.path) {
        for body in ["", "null", "0", "\"\"", "{}", "{\"request\":{}}", "{\"request\":{\"uid\":1}}", "\u{0}", &deep] {
            let review = respond(path, body.as_bytes());
            assert!(!review.response.allowed, "{path} {body}");
            assert_eq!(review.response.status.unwrap().code, 400, "{path} {body}");
        }
        // Only the existence of a response matters here.
        let review = respond(path, odd.as_bytes());
        assert_eq!(review.response.uid, "u");
    }
}
