//! The audit log of the test cluster: calls of the installation's service accounts, and the rights that they used.

use std::{
    collections::BTreeSet,
    fmt,
    path::{Path, PathBuf},
};

use serde_json::Value;

/// Returns the path of the audit log of the test cluster with this kubeconfig. It does not exist for other clusters.
#[must_use]
pub fn log(kubeconfig: &Path) -> PathBuf {
    let name = kubeconfig.file_name().unwrap_or_default().to_string_lossy();
    let instance = name.strip_prefix("kubeconfig").unwrap_or_default();
    kubeconfig.with_file_name(format!("cluster{instance}")).join("audit.log")
}

/// A call of a service account.
#[derive(Clone, Debug, Default, Eq, Ord, PartialEq, PartialOrd)]
pub struct Call {
    /// Name of the service account.
    pub account: String,
    verb: String,
    group: String,
    /// With the subresource, `pods/status` for example.
    resource: String,
    namespace: String,
    name: String,
    /// Path of a call without a resource.
    path: String,
    /// Kind and name of the role that permitted the call.
    role: String,
    /// Reason if RBAC or a policy of the installation refused the call.
    pub refusal: Option<String>,
}

impl Call {
    /// Parses a line of the log. Returns `None` unless a pod with a service account in `namespace` made the call. Tests that act
    /// as a service account impersonate it or have a token without a pod, so their calls do not count.
    #[must_use]
    pub fn parse(line: &str, namespace: &str) -> Option<Self> {
        let prefix = format!("system:serviceaccount:{namespace}:");
        // Cheaper than parsing lines of other users.
        if !line.contains(&prefix) {
            return None;
        }
        let event: Value = serde_json::from_str(line).ok()?;
        let text = |pointer: &str| event.pointer(pointer).and_then(Value::as_str).unwrap_or_default().to_owned();
        let account = event["user"]["username"].as_str()?.strip_prefix(&prefix)?.to_owned();
        let of_a_pod = event["user"]["extra"].get("authentication.kubernetes.io/pod-name").is_some();
        if !of_a_pod || event.get("impersonatedUser").is_some() {
            return None;
        }
        let object = event.get("objectRef").is_some();
        let mut resource = text("/objectRef/resource");
        let subresource = text("/objectRef/subresource");
        if !subresource.is_empty() {
            resource = format!("{resource}/{subresource}");
        }
        let uri = text("/requestURI");
        Some(Self {
            account,
            verb: text("/verb"),
            group: text("/objectRef/apiGroup"),
            resource,
            namespace: text("/objectRef/namespace"),
            name: text("/objectRef/name"),
            path: if object { String::new() } else { uri.split('?').next().unwrap_or_default().to_owned() },
            role: role(&text("/annotations/authorization.k8s.io~1reason")),
            refusal: refusal(&event),
        })
    }

    /// Group and resource, as grants write them.
    fn resource(&self) -> String {
        qualified(&self.resource, &self.group)
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} ", self.account, self.verb)?;
        if self.path.is_empty() {
            write!(f, "{}", self.resource())?
        } else {
            write!(f, "{}", self.path)?
        }
        if !self.name.is_empty() {
            write!(f, " {}", self.name)?;
        }
        if !self.namespace.is_empty() {
            write!(f, " in {}", self.namespace)?;
        }
        Ok(())
    }
}

/// Returns the reason if RBAC or a policy of the installation refused a call. Refusals by other admission, such as a quota,
/// and missing objects are expected.
fn refusal(event: &Value) -> Option<String> {
    if event["annotations"]["authorization.k8s.io/decision"] == "forbid" {
        return Some("no right".to_owned());
    }
    let message = event["responseStatus"]["message"].as_str()?;
    let policy = message.find("ValidatingAdmissionPolicy 'kubevirt-")?;
    message.get(policy..).map(str::to_owned)
}

/// Returns kind and name of the role in RBAC's reason for a permission, `RBAC: allowed by RoleBinding "a/n" of Role "a" to ...`.
fn role(reason: &str) -> String {
    let role = reason.split_once(" of ").map(|(_, rest)| rest).and_then(|rest| rest.split_once(" to "));
    role.map(|(role, _)| role.replace('"', "")).unwrap_or_default()
}

/// A right of a service account: a verb on a resource, and on one object if the rule names objects.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub struct Grant {
    /// Name of the service account.
    pub account: String,
    /// Kind and name of the role.
    pub role: String,
    /// Namespace of the binding; `None`: all.
    pub namespace: Option<String>,
    /// Verb.
    pub verb: String,
    /// API group.
    pub group: String,
    /// With the subresource; the path for a right on one.
    pub resource: String,
    /// Name of the object, if the rule names objects.
    pub name: Option<String>,
    is_path: bool,
}

impl Grant {
    /// Splits the rules of a role into rights of the service account to which it is bound.
    #[must_use]
    pub fn of_rules(account: &str, role: &str, namespace: Option<&str>, rules: &Value) -> Vec<Self> {
        let mut grants = Vec::new();
        for rule in rules.as_array().into_iter().flatten() {
            let texts = |field: &str| -> Vec<String> {
                let values = rule[field].as_array().into_iter().flatten();
                values.filter_map(|value| value.as_str().map(str::to_owned)).collect()
            };
            let names = texts("resourceNames");
            let names = if names.is_empty() { vec![None] } else { names.into_iter().map(Some).collect() };
            for verb in texts("verbs") {
                let grant = |group: &str, resource: &str, name: Option<String>, is_path: bool| Self {
                    account: account.to_owned(),
                    role: role.to_owned(),
                    namespace: namespace.map(str::to_owned),
                    verb: verb.clone(),
                    group: group.to_owned(),
                    resource: resource.to_owned(),
                    name,
                    is_path,
                };
                for group in texts("apiGroups") {
                    for resource in texts("resources") {
                        grants.extend(names.iter().map(|name| grant(&group, &resource, name.clone(), false)));
                    }
                }
                grants.extend(texts("nonResourceURLs").iter().map(|path| grant("", path, None, true)));
            }
        }
        grants
    }

    /// Returns true if this right permitted the call. If two roles have the same right, RBAC names the first one, and the other is
    /// unused.
    #[must_use]
    pub fn covers(&self, call: &Call) -> bool {
        let matches = |granted: &str, called: &str| granted == "*" || granted == called;
        let by_another_role = !call.role.is_empty() && call.role != self.role;
        if self.account != call.account || by_another_role || !matches(&self.verb, &call.verb) {
            return false;
        }
        if self.is_path {
            return match self.resource.strip_suffix('*') {
                Some(prefix) => !call.path.is_empty() && call.path.starts_with(prefix),
                None => self.resource == call.path,
            };
        }
        let subresource = |resource: &str| resource.split_once('/').map(|(_, subresource)| subresource.to_owned());
        let any_with_subresource = self
            .resource
            .strip_prefix("*/")
            .is_some_and(|granted| subresource(&call.resource).as_deref() == Some(granted));
        call.path.is_empty()
            && matches(&self.group, &call.group)
            && (matches(&self.resource, &call.resource) || any_with_subresource)
            && self.name.as_ref().is_none_or(|name| *name == call.name)
            && self.namespace.as_ref().is_none_or(|namespace| *namespace == call.namespace)
    }

    /// Returns the right as text: verb, resource and name.
    #[must_use]
    pub fn right(&self) -> String {
        let resource = qualified(&self.resource, &self.group);
        match &self.name {
            Some(name) => format!("{} {resource} {name}", self.verb),
            None => format!("{} {resource}", self.verb),
        }
    }
}

impl fmt::Display for Grant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.account, self.right())?;
        self.namespace.as_ref().map_or(Ok(()), |namespace| write!(f, " in {namespace}"))?;
        write!(f, " ({})", self.role)
    }
}

/// Returns a resource in the notation of RBAC's messages: `virtualmachines.kubevirt.io/status`.
fn qualified(resource: &str, group: &str) -> String {
    if group.is_empty() {
        return resource.to_owned();
    }
    match resource.split_once('/') {
        Some((resource, subresource)) => format!("{resource}.{group}/{subresource}"),
        None => format!("{resource}.{group}"),
    }
}

/// A right that may be unused after all stories.
#[derive(Clone, Copy, Debug)]
pub struct Justified {
    /// Name of the service account.
    pub account: &'static str,
    /// Verb, resource and name as [`Grant::right`] writes them; a word may have one `*` in place of any text.
    pub right: &'static str,
    /// True for a right that the stories use only in some runs.
    pub sometimes: bool,
    /// Reason for the right.
    pub reason: &'static str,
}

impl Justified {
    fn is_about(&self, grant: &Grant) -> bool {
        let (ours, right) = (self.right.split(' '), grant.right());
        self.account == grant.account
            && ours.clone().count() == right.split(' ').count()
            && ours.zip(right.split(' ')).all(|(pattern, word)| matches_pattern(pattern, word))
    }
}

fn matches_pattern(pattern: &str, word: &str) -> bool {
    match pattern.split_once('*') {
        Some((start, end)) => word.strip_prefix(start).is_some_and(|rest| rest.ends_with(end)),
        None => pattern == word,
    }
}

/// Compares rights and calls. Returns refused calls, unused rights without justification, and justifications of rights that are
/// used or do not exist. After a part of the stories (`complete` is false) unused rights are expected.
#[must_use]
pub fn judge(grants: &[Grant], calls: &BTreeSet<Call>, justified: &[Justified], complete: bool) -> Vec<String> {
    let refused = calls.iter().filter_map(|call| {
        let refusal = call.refusal.as_ref()?;
        Some(format!("refused: {call}: {refusal}"))
    });
    let is_used = |grant: &&Grant| calls.iter().any(|call| call.refusal.is_none() && grant.covers(call));
    let (used, unused): (Vec<&Grant>, Vec<&Grant>) = grants.iter().partition(is_used);
    let unjustified = unused
        .iter()
        .filter(|grant| complete && !justified.iter().any(|justified| justified.is_about(grant)))
        .map(|grant| format!("never used: {grant}"));
    let stale = justified.iter().filter_map(|justified| {
        let what = format!("{}: {} ({})", justified.account, justified.right, justified.reason);
        if unused.iter().any(|grant| justified.is_about(grant)) {
            None
        } else if !used.iter().any(|grant| justified.is_about(grant)) {
            Some(format!("justified, but not granted: {what}"))
        } else {
            (!justified.sometimes).then(|| format!("justified, but used: {what}"))
        }
    });
    refused.chain(unjustified).chain(stale).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn each_test_cluster_has_its_audit_log() {
        assert_eq!(log(Path::new("/src/build/kubeconfig")), Path::new("/src/build/cluster/audit.log"));
        assert_eq!(log(Path::new("/src/build/kubeconfig-5")), Path::new("/src/build/cluster-5/audit.log"));
    }

    fn event(verb: &str, object: Value) -> Value {
        json!({
            "stage": "ResponseComplete", "verb": verb, "requestURI": "/metrics?x=y", "objectRef": object,
            "user": {
                "username": "system:serviceaccount:kubevirt:a",
                "extra": {"authentication.kubernetes.io/pod-name": ["a-1"]},
            },
            "responseStatus": {"code": 200}, "annotations": {"authorization.k8s.io/decision": "allow"},
        })
    }

    fn call(verb: &str, object: Value) -> Call {
        Call::parse(&event(verb, object).to_string(), "kubevirt").unwrap()
    }

    #[test]
    fn only_calls_of_the_pods_of_the_installation_count() {
        let own = event("get", json!({"resource": "pods", "namespace": "n", "name": "p"}));
        assert_eq!(Call::parse(&own.to_string(), "kubevirt").unwrap().to_string(), "a: get pods p in n");
        let mut impersonated = own.clone();
        impersonated["impersonatedUser"] = json!({"username": "system:serviceaccount:kubevirt:b"});
        let mut token = own.clone();
        token["user"]["extra"] = json!({"authentication.kubernetes.io/credential-id": ["JTI=x"]});
        let mut foreign = own.clone();
        foreign["user"]["username"] = json!("system:serviceaccount:kubevirt2:a");
        for line in [impersonated.to_string(), token.to_string(), foreign.to_string(), "no JSON".to_owned()] {
            assert_eq!(Call::parse(&line, "kubevirt"), None, "{line}");
        }
    }

    #[test]
    fn refusals_of_rbac_and_of_our_policies_are_told_from_others() {
        let refused = |decision: &str, message: &str| {
            let mut event = event("create", json!({"resource": "pods"}));
            event["annotations"]["authorization.k8s.io/decision"] = json!(decision);
            event["responseStatus"] = json!({"code": 403, "message": message});
            Call::parse(&event.to_string(), "kubevirt").unwrap().refusal
        };
        assert_eq!(refused("forbid", "pods is forbidden").as_deref(), Some("no right"));
        let ours = "ValidatingAdmissionPolicy 'kubevirt-controller-pods' with binding 'b' denied request: no";
        assert_eq!(refused("allow", &format!("pods \"x\" is forbidden: {ours}")).as_deref(), Some(ours));
        assert_eq!(refused("allow", "pods \"x\" is forbidden: exceeded quota"), None);
        assert_eq!(refused("allow", "ValidatingAdmissionPolicy 'somebodys' denied request"), None);
    }

    #[test]
    fn a_grant_covers_what_rbac_permits_by_it() {
        let rule = |rule: Value| Grant::of_rules("a", "ClusterRole r", None, &json!([rule])).remove(0);
        let pods = |verb: &str, name: Option<&str>| {
            rule(json!({"apiGroups": [""], "resources": ["pods"], "verbs": [verb],
                "resourceNames": name.map_or_else(Vec::new, |name| vec![name])}))
        };
        let get = call("get", json!({"resource": "pods", "namespace": "n", "name": "p"}));
        let status = call("get", json!({"resource": "pods", "subresource": "status", "namespace": "n", "name": "p"}));
        let group = call("get", json!({"resource": "pods", "apiGroup": "x.io", "namespace": "n", "name": "p"}));
        let path = {
            let mut event = event("get", Value::Null);
            event.as_object_mut().unwrap().remove("objectRef");
            Call::parse(&event.to_string(), "kubevirt").unwrap()
        };
        for (grant, call, covers) in [
            (pods("get", None), &get, true),
            (pods("*", None), &get, true),
            (pods("list", None), &get, false),
            (pods("get", Some("p")), &get, true),
            (pods("get", Some("q")), &get, false),
            (pods("get", None), &status, false),
            (pods("get", None), &group, false),
            (pods("get", None), &path, false),
            (rule(json!({"apiGroups": [""], "resources": ["pods/status"], "verbs": ["get"]})), &status, true),
            (rule(json!({"apiGroups": [""], "resources": ["*/status"], "verbs": ["get"]})), &status, true),
            (rule(json!({"apiGroups": [""], "resources": ["*/status"], "verbs": ["get"]})), &get, false),
            (rule(json!({"apiGroups": ["*"], "resources": ["*"], "verbs": ["get"]})), &group, true),
            (rule(json!({"nonResourceURLs": ["/metrics"], "verbs": ["get"]})), &path, true),
            (rule(json!({"nonResourceURLs": ["/met*"], "verbs": ["get"]})), &path, true),
            (rule(json!({"nonResourceURLs": ["/healthz"], "verbs": ["get"]})), &path, false),
            (rule(json!({"nonResourceURLs": ["*"], "verbs": ["get"]})), &get, false),
        ] {
            assert_eq!(grant.covers(call), covers, "{grant} {call}");
        }
        let own = |namespace| {
            let rules = json!([{"apiGroups": [""], "resources": ["pods"], "verbs": ["get"]}]);
            Grant::of_rules("a", "Role r", Some(namespace), &rules).remove(0)
        };
        assert!(own("n").covers(&get) && !own("m").covers(&get));
        let others = Grant { account: "b".into(), ..own("n") };
        assert!(!others.covers(&get));
        let mut event = event("get", json!({"resource": "pods", "namespace": "n", "name": "p"}));
        event["annotations"]["authorization.k8s.io/reason"] =
            json!("RBAC: allowed by RoleBinding \"r/n\" of Role \"r\" to ServiceAccount \"a/kubevirt\"");
        let by_role = Call::parse(&event.to_string(), "kubevirt").unwrap();
        assert!(own("n").covers(&by_role) && !pods("get", None).covers(&by_role));
    }

    #[test]
    fn a_rule_is_split_into_single_rights() {
        let rules = json!([
            {"apiGroups": [""], "resources": ["secrets"], "resourceNames": ["x", "y"], "verbs": ["get", "patch"]},
            {"apiGroups": ["kubevirt.io"], "resources": ["virtualmachines/status"], "verbs": ["patch"]},
            {"nonResourceURLs": ["/metrics"], "verbs": ["get"]},
        ]);
        let rights: Vec<String> = Grant::of_rules("a", "Role r", Some("n"), &rules).iter().map(Grant::right).collect();
        assert_eq!(
            rights,
            [
                "get secrets x",
                "get secrets y",
                "patch secrets x",
                "patch secrets y",
                "patch virtualmachines.kubevirt.io/status",
                "get /metrics"
            ]
        );
    }

    #[test]
    fn refused_unused_and_stale_are_wrong() {
        let rules = json!([{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list"]}]);
        let grants = Grant::of_rules("a", "ClusterRole r", None, &rules);
        let justified = |right, sometimes| Justified { account: "a", right, sometimes, reason: "because" };
        let get = call("get", json!({"resource": "pods", "namespace": "n", "name": "p"}));
        let used: BTreeSet<Call> = [get.clone()].into();
        let judged = |justified: &[Justified]| judge(&grants, &used, justified, true);
        assert_eq!(judged(&[]), ["never used: a: list pods (ClusterRole r)"]);
        assert_eq!(judge(&grants, &used, &[], false), [""; 0]);
        assert_eq!(judged(&[justified("list pods", false)]), [""; 0]);
        assert_eq!(judged(&[justified("* pods", false)]), [""; 0]);
        assert_eq!(judged(&[justified("list p*s", false)]), [""; 0]);
        assert_eq!(
            judged(&[justified("list pods", false), justified("get pods", false)]),
            ["justified, but used: a: get pods (because)"]
        );
        assert_eq!(judged(&[justified("list pods", false), justified("get pods", true)]), [""; 0]);
        assert_eq!(
            judged(&[justified("list pods", false), justified("watch pods", true)]),
            ["justified, but not granted: a: watch pods (because)"]
        );
        // A refused call uses no right.
        let refused: BTreeSet<Call> = [Call { refusal: Some("no right".into()), ..get }].into();
        for complete in [true, false] {
            let wrong = judge(&grants, &refused, &[justified("* pods", false)], complete);
            assert_eq!(wrong, ["refused: a: get pods p in n: no right"]);
        }
    }
}
