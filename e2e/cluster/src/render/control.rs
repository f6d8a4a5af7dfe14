//! The control plane: etcd, API server, controllers, scheduler and DNS server, all in one network namespace.

use std::{net::SocketAddr, path::Path};

use serde_json::json;

use super::{After, Init, Service, flags, text};
use crate::{
    certificates::FRONT_PROXY_CLIENT,
    plan::{API_PORT, CLUSTER_DOMAIN, INSTALLATION_NAMESPACE, Plan},
};

/// Returns the configuration of the control plane's first process. `bin` is the folder of the components, `driver` the storage
/// driver.
#[must_use]
pub(crate) fn init(plan: &Plan, bin: &Path, driver: &Path) -> Init {
    let api = SocketAddr::from((plan.control_address(), API_PORT));
    let service = |name: &str, command: Vec<String>, after: Option<After>| Service {
        name: name.into(),
        command,
        log: plan.logs().join(format!("{name}.log")),
        after,
    };
    Init {
        hostname: plan.control_namespace(),
        own_run: false,
        binds: Vec::new(),
        sysctls: [Some("net/ipv4/ip_forward"), plan.variant.dual_stack.then_some("net/ipv6/conf/all/forwarding")]
            .into_iter()
            .flatten()
            .map(|name| (name.into(), "1".into()))
            .collect(),
        cgroup: plan.system_cgroup(),
        path: bin.to_path_buf(),
        services: [
            service("etcd", etcd(plan, bin), None),
            service("kube-apiserver", api_server(plan, bin), None),
            service("kube-controller-manager", controller_manager(plan, bin), Some(After::Command(ready(plan, bin)))),
            service("kube-scheduler", scheduler(plan, bin), Some(After::Tcp(api))),
            service("coredns", dns(plan, bin), Some(After::Tcp(api))),
        ]
        .into_iter()
        .chain(super::storage::control_services(plan, bin, driver))
        .collect(),
    }
}

/// Returns a check for the complete start of the API server, including roles. Controllers exit if they start earlier.
fn ready(plan: &Plan, bin: &Path) -> Vec<String> {
    let kubeconfig = plan.control().join("controller-manager.kubeconfig");
    vec![text(&bin.join("kubectl")), "--kubeconfig".into(), text(&kubeconfig), "get".into(), "--raw=/readyz".into()]
}

fn etcd(plan: &Plan, bin: &Path) -> Vec<String> {
    let mut command = flags(
        bin.join("etcd"),
        &[
            ("name", "control".into()),
            ("data-dir", text(&plan.control().join("etcd"))),
            ("listen-client-urls", "http://127.0.0.1:2379".into()),
            ("advertise-client-urls", "http://127.0.0.1:2379".into()),
            ("listen-peer-urls", "http://127.0.0.1:2380".into()),
            ("initial-advertise-peer-urls", "http://127.0.0.1:2380".into()),
            ("initial-cluster", "control=http://127.0.0.1:2380".into()),
            ("log-level", "warn".into()),
            // As on clusters of kubeadm. Without it, watches of quiet resources have no bookmark for up to 10 minutes.
            ("watch-progress-notify-interval", "5s".into()),
        ],
    );
    // The data is removed with the cluster and need not survive a power failure.
    command.push("--unsafe-no-fsync".into());
    command
}

fn api_server(plan: &Plan, bin: &Path) -> Vec<String> {
    let pki = |name: &str| text(&plan.pki().join(name));
    let mut command = flags(
        bin.join("kube-apiserver"),
        &[
            ("advertise-address", plan.control_address().to_string()),
            ("secure-port", API_PORT.to_string()),
            ("etcd-servers", "http://127.0.0.1:2379".into()),
            ("service-cluster-ip-range", plan.families(plan.services(), plan.services6())),
            ("allow-privileged", "true".into()),
            ("authorization-mode", "Node,RBAC".into()),
            ("enable-admission-plugins", "NodeRestriction".into()),
            ("client-ca-file", pki("ca.crt")),
            ("tls-cert-file", pki("apiserver.crt")),
            ("tls-private-key-file", pki("apiserver.key")),
            ("kubelet-certificate-authority", pki("ca.crt")),
            ("kubelet-client-certificate", pki("apiserver-kubelet-client.crt")),
            ("kubelet-client-key", pki("apiserver-kubelet-client.key")),
            ("kubelet-preferred-address-types", "InternalIP".into()),
            ("service-account-issuer", format!("https://kubernetes.default.svc.{CLUSTER_DOMAIN}")),
            ("service-account-key-file", pki("service-accounts.pub")),
            ("service-account-signing-key-file", pki("service-accounts.key")),
            ("requestheader-client-ca-file", pki("front-proxy-ca.crt")),
            ("requestheader-allowed-names", FRONT_PROXY_CLIENT.into()),
            ("requestheader-username-headers", "X-Remote-User".into()),
            ("requestheader-group-headers", "X-Remote-Group".into()),
            ("requestheader-extra-headers-prefix", "X-Remote-Extra-".into()),
            ("proxy-client-cert-file", pki("front-proxy-client.crt")),
            ("proxy-client-key-file", pki("front-proxy-client.key")),
            // The API server has no kube-proxy and dials pods of webhooks and APIServices directly.
            ("enable-aggregator-routing", "true".into()),
            ("audit-policy-file", text(&plan.control().join("audit-policy.yaml"))),
            ("audit-log-path", text(&plan.audit_log())),
            // In MiB. The default of 100 would rotate the log during a test run.
            ("audit-log-maxsize", "4096".into()),
            ("profiling", "false".into()),
        ],
    );
    command.extend(super::feature_gates(plan));
    command
}

/// Renders the audit policy: one line for each completed write, and for each call of the installation's service accounts, which
/// a test compares with their rights.
#[must_use]
pub(crate) fn audit_policy() -> String {
    super::json_text(&json!({
        "apiVersion": "audit.k8s.io/v1",
        "kind": "Policy",
        "omitStages": ["RequestReceived"],
        "omitManagedFields": true,
        "rules": [
            {"level": "Metadata", "verbs": ["create", "update", "patch", "delete", "deletecollection"]},
            {"level": "Metadata", "userGroups": [format!("system:serviceaccounts:{INSTALLATION_NAMESPACE}")]},
            {"level": "None"},
        ],
    }))
}

fn controller_manager(plan: &Plan, bin: &Path) -> Vec<String> {
    let pki = |name: &str| text(&plan.pki().join(name));
    let kubeconfig = text(&plan.control().join("controller-manager.kubeconfig"));
    let mut command = flags(
        bin.join("kube-controller-manager"),
        &[
            ("kubeconfig", kubeconfig.clone()),
            ("authentication-kubeconfig", kubeconfig.clone()),
            ("authorization-kubeconfig", kubeconfig),
            ("bind-address", "127.0.0.1".into()),
            ("leader-elect", "false".into()),
            ("cluster-name", "ferrovirt".into()),
            ("cluster-cidr", plan.families(plan.pods(), plan.pods6())),
            ("service-cluster-ip-range", plan.families(plan.services(), plan.services6())),
            // `up` assigns the pod networks of nodes.
            ("allocate-node-cidrs", "false".into()),
            ("cluster-signing-cert-file", pki("ca.crt")),
            ("cluster-signing-key-file", pki("ca.key")),
            ("root-ca-file", pki("ca.crt")),
            ("service-account-private-key-file", pki("service-accounts.key")),
            ("use-service-account-credentials", "true".into()),
            ("profiling", "false".into()),
        ],
    );
    command.extend(super::feature_gates(plan));
    command
}

fn scheduler(plan: &Plan, bin: &Path) -> Vec<String> {
    let kubeconfig = text(&plan.control().join("scheduler.kubeconfig"));
    let mut command = flags(
        bin.join("kube-scheduler"),
        &[
            ("kubeconfig", kubeconfig.clone()),
            ("authentication-kubeconfig", kubeconfig.clone()),
            ("authorization-kubeconfig", kubeconfig),
            ("bind-address", "127.0.0.1".into()),
            ("leader-elect", "false".into()),
            ("profiling", "false".into()),
        ],
    );
    command.extend(super::feature_gates(plan));
    command
}

fn dns(plan: &Plan, bin: &Path) -> Vec<String> {
    vec![text(&bin.join("coredns")), "-conf".into(), text(&plan.control().join("Corefile"))]
}

/// Renders the configuration of CoreDNS with only the cluster's names. Pods cannot reach addresses outside of the host.
#[must_use]
pub(crate) fn corefile(plan: &Plan) -> String {
    format!(
        ".:53 {{
    errors
    health 127.0.0.1:8080
    ready 127.0.0.1:8181
    kubernetes {CLUSTER_DOMAIN} in-addr.arpa ip6.arpa {{
        kubeconfig {kubeconfig}
        pods insecure
        ttl 5
    }}
    cache 5
}}
",
        kubeconfig = plan.control().join("dns.kubeconfig").display(),
    )
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    fn plan() -> Plan {
        Plan::new(PathBuf::from("/src"), 0).unwrap()
    }

    #[test]
    fn api_server_has_the_aggregation_layer_and_the_audit_log_on() {
        let command = api_server(&plan(), Path::new("/bin")).join(" ");
        for part in [
            "--requestheader-client-ca-file=/src/build/cluster/pki/front-proxy-ca.crt",
            "--requestheader-allowed-names=front-proxy-client",
            "--proxy-client-cert-file=",
            "--enable-aggregator-routing=true",
            "--audit-log-path=/src/build/cluster/audit.log",
            "--audit-policy-file=",
        ] {
            assert!(command.contains(part), "{part}");
        }
        assert!(!command.contains("feature-gates"), "the cluster is a stock one");
    }

    #[test]
    fn feature_gates_reach_api_server_controllers_and_scheduler() {
        let mut plan = plan();
        plan.variant.feature_gates.insert("ImageVolume".into(), false);
        for command in [api_server, controller_manager, scheduler] {
            let command = command(&plan, Path::new("/bin"));
            assert_eq!(command.last().map(String::as_str), Some("--feature-gates=ImageVolume=false"));
        }
    }

    #[test]
    fn services_have_both_families_only_if_the_cluster_has() {
        let mut plan = plan();
        for (dual_stack, expected) in [(false, "10.212.0.0/16"), (true, "10.212.0.0/16,fd66:7600:0:200::/112")] {
            plan.variant.dual_stack = dual_stack;
            for command in [api_server, controller_manager] {
                let expected = format!("--service-cluster-ip-range={expected}");
                assert!(command(&plan, Path::new("/bin")).contains(&expected), "{expected}");
            }
        }
    }

    #[test]
    fn front_proxy_has_a_root_of_its_own() {
        let command = api_server(&plan(), Path::new("/bin"));
        let value = |flag: &str| command.iter().find_map(|part| part.strip_prefix(flag)).map(str::to_owned);
        assert_ne!(value("--requestheader-client-ca-file="), value("--client-ca-file="));
    }

    #[test]
    fn audit_policy_logs_metadata_of_changing_calls_and_of_the_installation() {
        let policy: serde_json::Value = serde_json::from_str(&audit_policy()).unwrap();
        assert_eq!(policy["rules"][0]["level"], "Metadata");
        assert!(policy["rules"][0]["verbs"].as_array().unwrap().iter().all(|verb| verb != "get" && verb != "list"));
        assert_eq!(policy["rules"][1], json!({"level": "Metadata", "userGroups": ["system:serviceaccounts:kubevirt"]}));
        assert_eq!(policy["rules"][2], json!({"level": "None"}));
    }

    #[test]
    fn everything_but_etcd_api_server_and_storage_driver_waits_for_the_api() {
        for service in init(&plan(), Path::new("/bin"), Path::new("/bin/csi-driver")).services {
            let first = ["etcd", "kube-apiserver", "csi-driver"].contains(&service.name.as_str());
            assert_eq!(service.after.is_none(), first, "{}", service.name);
        }
    }

    #[test]
    fn dns_serves_the_cluster_domain() {
        assert!(corefile(&plan()).contains("kubernetes cluster.local in-addr.arpa ip6.arpa {"));
    }
}
