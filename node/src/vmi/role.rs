//! The role of this node for a VMI: decided before anything else.
//!
//! A node whose domain moves away stays the owner until ownership passes, which is one write to the status. Only then is it
//! the migration source. The target of a migration that failed keeps its role until it has cleaned up and removed its label.

use api::{VirtualMachineInstance, constants::label};

/// Role of a node for a VMI.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// The domain runs here or starts here. Decides phase and loss.
    Owner,
    /// The domain has moved to another node; the launcher that it came from is still here.
    MigrationSource,
    /// The domain is about to move to this node, or was to.
    MigrationTarget,
    /// The VMI is not related to this node.
    None,
}

/// Decides the role of `node`.
///
/// Labels select what is watched, but users can write labels. Only components write the status, so a role needs both.
pub(super) fn decide(vmi: &VirtualMachineInstance, node: &str) -> Role {
    let labelled = |name: &str| vmi.metadata.labels.as_ref().and_then(|labels| labels.get(name)).is_some_and(is(node));
    let Some(status) = &vmi.status else { return Role::None };
    let runs_here = status.node_name.as_ref().is_some_and(is(node));
    if runs_here {
        return if labelled(label::NODE_NAME) { Role::Owner } else { Role::None };
    }
    let Some(migration) = &status.migration_state else { return Role::None };
    let is_target = |name: &String| migration.target_node.as_ref() == Some(name);
    if migration.source_node.as_ref().is_some_and(is(node)) {
        // The domain has moved on.
        let moved = !migration.failed && status.node_name.as_ref().is_some_and(is_target);
        if moved { Role::MigrationSource } else { Role::None }
    } else if labelled(label::MIGRATION_TARGET_NODE_NAME) && is_target(&node.to_owned()) {
        Role::MigrationTarget
    } else {
        Role::None
    }
}

fn is(node: &str) -> impl Fn(&String) -> bool {
    move |name| name == node
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_role_follows_labels_status_and_migration_state() {
        let (none, migration) = (json!(null), json!({"sourceNode": "a", "targetNode": "b"}));
        let ended = json!({"sourceNode": "a", "targetNode": "b", "completed": true});
        let failed = json!({"sourceNode": "a", "targetNode": "b", "failed": true});
        // Node label, target label, status.nodeName, status.migrationState, roles of the nodes a, b and c.
        use Role::{MigrationSource as Source, MigrationTarget as Target, None, Owner};
        let rows = [
            ("a", "", json!("a"), &none, [Owner, None, None]),
            ("a", "", json!("b"), &none, [None, None, None]),
            ("b", "", json!("a"), &none, [None, None, None]),
            ("", "", json!("a"), &none, [None, None, None]),
            ("a", "", json!(null), &none, [None, None, None]),
            ("a", "", json!(""), &none, [None, None, None]),
            // Before ownership passes the source is the owner.
            ("a", "b", json!("a"), &migration, [Owner, Target, None]),
            ("a", "", json!("a"), &migration, [Owner, None, None]),
            ("a", "c", json!("a"), &migration, [Owner, None, None]),
            // Afterwards the target is the owner.
            ("b", "b", json!("b"), &migration, [Source, Owner, None]),
            ("b", "b", json!("b"), &ended, [Source, Owner, None]),
            ("b", "", json!("b"), &ended, [Source, Owner, None]),
            ("c", "", json!("c"), &ended, [None, None, Owner]),
            // A failed migration ends with the label.
            ("a", "b", json!("a"), &failed, [Owner, Target, None]),
            ("a", "", json!("a"), &failed, [Owner, None, None]),
            ("", "b", json!(null), &failed, [None, Target, None]),
        ];
        for (node, target, runs_on, migration, expected) in rows {
            let vmi: VirtualMachineInstance = serde_json::from_value(json!({
                "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance",
                "metadata": {"name": "m", "labels": {
                    "kubevirt.io/nodeName": node, "kubevirt.io/migrationTargetNodeName": target,
                }},
                "spec": {"domain": {"devices": {}}},
                "status": {"nodeName": runs_on, "migrationState": migration},
            }))
            .unwrap();
            let roles = ["a", "b", "c"].map(|name| decide(&vmi, name));
            assert_eq!(roles, expected, "{node:?} {target:?} {runs_on} {migration}");
        }
    }
}
