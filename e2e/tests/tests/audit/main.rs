//! Tests after all stories: the calls of each service account match its rights, and the namespaces of stories end.
//!
//! The audit log is on this host only for the test cluster. With `STORIES_LEFT_OUT` set, rights may be unused.

#![allow(missing_docs, reason = "names of tests describe them")]

mod justified;

use std::{
    collections::BTreeSet,
    fs::File,
    io::{BufRead, BufReader},
    process::Command,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_cluster::audit::{Call, Grant, judge};
use ferrovirt_e2e_tests::{TIMEOUT, audit_log, connect, kubeconfig, repository, skip};
use k8s_openapi::api::{
    admissionregistration::v1::ValidatingAdmissionPolicy,
    core::v1::Namespace,
    rbac::v1::{ClusterRole, ClusterRoleBinding, Role, RoleBinding, RoleRef, Subject},
};
use kube::{Api, Client, ResourceExt, api::ListParams};
use serde_json::{Value, json};

/// Namespace of the installation.
const NAMESPACE: &str = "kubevirt";
/// The account whose writes are limited by policies.
const CONTROLLER: &str = "kubevirt-controller";

#[test]
fn each_service_account_uses_its_rights_and_no_other() -> Result<()> {
    let path = audit_log();
    let Ok(log) = File::open(&path) else {
        return skip("audit log");
    };
    let mut grants = runtime()?.block_on(async { installed(&connect().await?).await })?;
    grants.extend(of_hooks()?);
    let accounts: BTreeSet<String> = grants.iter().map(|grant| grant.account.clone()).collect();
    let mut calls = BTreeSet::new();
    for line in BufReader::new(log).lines() {
        calls.extend(Call::parse(&line?, NAMESPACE).filter(|call| accounts.contains(&call.account)));
    }
    ensure!(!calls.is_empty(), "no call of {accounts:?} in {}", path.display());
    println!("{} rights of {}, {} different calls", grants.len(), accounts.len(), calls.len());
    let complete = std::env::var_os("STORIES_LEFT_OUT").is_none();
    let wrong = judge(&grants, &calls, justified::RIGHTS, complete);
    ensure!(
        wrong.is_empty(),
        "rights and calls since the cluster was made differ in {} places. A right that the stories cannot use belongs into \
         e2e/tests/tests/audit/justified.rs, with the reason; remove those that nobody needs.\n{}",
        wrong.len(),
        wrong.join("\n")
    );
    Ok(())
}

#[test]
fn namespaces_of_stories_end() -> Result<()> {
    runtime()?.block_on(async {
        let namespaces = Api::<Namespace>::all(connect().await?);
        // That of the last story has just been deleted.
        let deadline = tokio::time::Instant::now() + 3 * TIMEOUT;
        loop {
            let left = namespaces.list(&ListParams::default().labels("ferrovirt.io/e2e")).await?.items;
            if left.is_empty() {
                return Ok(());
            }
            ensure!(tokio::time::Instant::now() < deadline, "left: {}", serde_json::to_string(&left)?);
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
    })
}

#[test]
fn each_write_of_virt_controller_is_limited_by_a_policy_or_justified() -> Result<()> {
    let (grants, policies) = runtime()?.block_on(async {
        let client = connect().await?;
        let policies = Api::<ValidatingAdmissionPolicy>::all(client.clone()).list(&ListParams::default()).await?;
        Ok::<_, anyhow::Error>((installed(&client).await?, policies.items))
    })?;
    let unrestricted = unrestricted()?;
    // Objects with a resource name in RBAC, and all objects in its namespace, belong to the installation.
    let writes: Vec<&Grant> = grants
        .iter()
        .filter(|grant| grant.account == CONTROLLER && !["get", "list", "watch"].contains(&grant.verb.as_str()))
        .filter(|grant| grant.name.is_none() || grant.verb == "patch" && grant.namespace.is_none())
        .collect();
    let words = |grant: &Grant| grant.right().split(' ').nth(1).unwrap_or_default().to_owned();
    let limits = |policy: &&ValidatingAdmissionPolicy, grant: &Grant| {
        let operation = match grant.verb.as_str() {
            "create" => "CREATE",
            "delete" => "DELETE",
            _ => "UPDATE",
        };
        let holds = |list: &Option<Vec<String>>, value: &str| list.iter().flatten().any(|one| one == value);
        let constraints = policy.spec.as_ref().and_then(|spec| spec.match_constraints.as_ref());
        let rules = constraints.and_then(|constraints| constraints.resource_rules.as_ref());
        policy.name_any().starts_with("kubevirt-controller-")
            && rules.into_iter().flatten().any(|rule| {
                holds(&rule.api_groups, &grant.group)
                    && holds(&rule.resources, &grant.resource)
                    && holds(&rule.operations, operation)
            })
    };
    let mut wrong = Vec::new();
    for grant in &writes {
        let limited = policies.iter().any(|policy| limits(&policy, grant));
        if limited == unrestricted.contains(&words(grant)) {
            let how = if limited { "is limited by a policy, and listed as unrestricted" } else { "is not limited" };
            wrong.push(format!("{grant} {how}"));
        }
    }
    for resource in unrestricted {
        if !writes.iter().any(|grant| words(grant) == resource) {
            wrong.push(format!("{resource} is listed as unrestricted, and virt-controller does not write it"));
        }
    }
    ensure!(wrong.is_empty(), "charts/ferrovirt/policies/controller.yaml:\n{}", wrong.join("\n"));
    Ok(())
}

fn runtime() -> Result<tokio::runtime::Runtime> {
    Ok(tokio::runtime::Builder::new_current_thread().enable_all().build()?)
}

/// Returns the rights of all service accounts of the installation.
async fn installed(client: &Client) -> Result<Vec<Grant>> {
    let all = ListParams::default();
    let mut grants = Vec::new();
    for binding in Api::<ClusterRoleBinding>::all(client.clone()).list(&all).await? {
        grants.extend(of_binding(client, None, binding.subjects.as_deref(), &binding.role_ref).await?);
    }
    for binding in Api::<RoleBinding>::all(client.clone()).list(&all).await? {
        let namespace = binding.namespace();
        grants.extend(of_binding(client, namespace.as_deref(), binding.subjects.as_deref(), &binding.role_ref).await?);
    }
    ensure!(grants.iter().any(|grant| grant.account == CONTROLLER), "{CONTROLLER} has no rights");
    Ok(grants)
}

async fn of_binding(
    client: &Client,
    namespace: Option<&str>,
    subjects: Option<&[Subject]>,
    role: &RoleRef,
) -> Result<Vec<Grant>> {
    let ours = |subject: &&Subject| {
        subject.kind == "ServiceAccount" && subject.namespace.as_deref() == Some(NAMESPACE) && subject.name != "default"
    };
    let accounts: Vec<&Subject> = subjects.unwrap_or_default().iter().filter(ours).collect();
    if accounts.is_empty() {
        return Ok(Vec::new());
    }
    let rules = rules(client, namespace, role).await?;
    let name = format!("{} {}", role.kind, role.name);
    Ok(accounts.into_iter().flat_map(|account| Grant::of_rules(&account.name, &name, namespace, &rules)).collect())
}

/// Returns the rules of a role of the installation. Roles of Kubernetes are skipped.
async fn rules(client: &Client, namespace: Option<&str>, role: &RoleRef) -> Result<Value> {
    const PART_OF: &str = "app.kubernetes.io/part-of";
    let (rules, metadata) = match (role.kind.as_str(), namespace) {
        ("Role", Some(namespace)) => {
            let found = Api::<Role>::namespaced(client.clone(), namespace).get(&role.name).await;
            let found = found.with_context(|| format!("Role {namespace}/{}", role.name))?;
            (found.rules, found.metadata)
        }
        _ => {
            let found = Api::<ClusterRole>::all(client.clone()).get(&role.name).await;
            let found = found.with_context(|| format!("ClusterRole {}", role.name))?;
            (found.rules, found.metadata)
        }
    };
    let ours = metadata.labels.iter().flatten().any(|(key, value)| key == PART_OF && value == "ferrovirt");
    Ok(if ours { json!(rules) } else { json!([]) })
}

/// Returns the rights of the chart's hooks, whose service accounts exist only while they run.
fn of_hooks() -> Result<Vec<Grant>> {
    let output = Command::new("helm")
        .args(["get", "hooks", "ferrovirt", "--namespace", NAMESPACE])
        .env("KUBECONFIG", kubeconfig())
        .output()
        .context("cannot run helm: it must be on the PATH")?;
    ensure!(output.status.success(), "helm get hooks: {}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).context("hooks are not text")?;
    let objects: Vec<Value> = serde_saphyr::from_multiple(&text).context("hooks are not YAML")?;
    let mut grants = Vec::new();
    for binding in &objects {
        let kind = binding["kind"].as_str().unwrap_or_default();
        let Some(kind) = kind.strip_suffix("Binding") else { continue };
        let role = objects
            .iter()
            .find(|object| object["kind"] == kind && object["metadata"]["name"] == binding["roleRef"]["name"])
            .with_context(|| format!("hooks without {kind} {}", binding["roleRef"]["name"]))?;
        for subject in binding["subjects"].as_array().into_iter().flatten() {
            let account = subject["name"].as_str().context("subject without name")?;
            let name = format!("{kind} {}", role["metadata"]["name"].as_str().unwrap_or_default());
            grants.extend(Grant::of_rules(account, &name, role["metadata"]["namespace"].as_str(), &role["rules"]));
        }
    }
    ensure!(!grants.is_empty(), "the hooks have no rights");
    Ok(grants)
}

/// Returns the writes that no policy limits, from the table in the chart. The rest of the file is a template.
fn unrestricted() -> Result<BTreeSet<String>> {
    let path = repository().join("charts/ferrovirt/policies/controller.yaml");
    let text = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    let (_, list) = text.split_once("\nunrestricted:\n").context("table without the list `unrestricted`")?;
    let list: Value = serde_saphyr::from_str(list).context("the list `unrestricted` is not YAML")?;
    let mut resources = BTreeSet::new();
    for entry in list.as_array().into_iter().flatten() {
        ensure!(entry["reason"].as_str().is_some_and(|reason| !reason.is_empty()), "{entry} has no reason");
        resources.insert(entry["resource"].as_str().context("entry without resource")?.to_owned());
    }
    Ok(resources)
}
