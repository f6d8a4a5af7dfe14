//! Permission of post-copy in the cluster, by the configuration or any migration policy. `/dev/userfaultfd` is offered only then.

use std::collections::BTreeSet;

use api::MigrationPolicy;
use daemon::config::ConfigHandle;
use futures::StreamExt;
use kube::{Api, Client, ResourceExt, runtime::watcher};
use tokio::sync::watch;

/// Policies of one page.
const PAGE: u32 = 100;

/// Names of the migration policies that permit post-copy.
#[derive(Default)]
struct Policies {
    permitting: BTreeSet<String>,
    /// Those of the list in progress.
    listed: BTreeSet<String>,
}

impl Policies {
    fn apply(&mut self, event: watcher::Event<MigrationPolicy>) {
        let permits = |policy: &MigrationPolicy| policy.spec.allow_post_copy == Some(true);
        match event {
            watcher::Event::Init => self.listed.clear(),
            watcher::Event::InitApply(policy) if permits(&policy) => drop(self.listed.insert(policy.name_any())),
            watcher::Event::InitApply(_) => {}
            watcher::Event::InitDone => self.permitting = std::mem::take(&mut self.listed),
            watcher::Event::Apply(policy) if permits(&policy) => drop(self.permitting.insert(policy.name_any())),
            watcher::Event::Apply(policy) | watcher::Event::Delete(policy) => {
                self.permitting.remove(&policy.name_any());
            }
        }
    }
}

/// Follows the permission. Never returns.
pub(crate) async fn follow(client: Client, mut cluster: ConfigHandle, permitted: watch::Sender<bool>) {
    let mut policies = Policies::default();
    let config = watcher::Config::default().page_size(PAGE);
    let mut events = daemon::watch::events(Api::<MigrationPolicy>::all(client), config).boxed();
    loop {
        let now = cluster.current().migrations.allow_post_copy || !policies.permitting.is_empty();
        permitted.send_if_modified(|known| std::mem::replace(known, now) != now);
        tokio::select! {
            () = cluster.changed() => {}
            Some(event) = events.next() => match event {
                Ok(event) => policies.apply(event),
                Err(error) => tracing::warn!(%error, "watch of migration policies was interrupted"),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn post_copy_is_permitted_while_any_policy_permits_it() {
        use watcher::Event::{Apply, Delete, Init, InitApply, InitDone};
        let policy = |name: &str, spec: serde_json::Value| {
            let mut spec = spec;
            spec["selectors"] = json!({});
            let policy = json!({"metadata": {"name": name}, "spec": spec,
                "apiVersion": "migrations.kubevirt.io/v1alpha1", "kind": "MigrationPolicy"});
            serde_json::from_value::<MigrationPolicy>(policy).unwrap()
        };
        let (yes, no) = (json!({"allowPostCopy": true}), json!({"allowPostCopy": false}));
        let mut policies = Policies::default();
        for (event, expected) in [
            (Init, false),
            (InitApply(policy("a", yes.clone())), false),
            (InitApply(policy("b", json!({}))), false),
            (InitDone, true),
            (Apply(policy("c", yes.clone())), true),
            (Apply(policy("a", no)), true),
            (Delete(policy("c", yes.clone())), false),
            (Apply(policy("d", yes)), true),
            (Init, true),
            (InitDone, false),
        ] {
            policies.apply(event);
            assert_eq!(!policies.permitting.is_empty(), expected);
        }
    }
}
