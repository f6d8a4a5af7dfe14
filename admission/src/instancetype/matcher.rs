//! What a VM may say about its instance type and preference.

use api::{
    VirtualMachine,
    instancetype::matcher::{Matcher, Role},
};

use crate::causes::Causes;

/// What to do when a volume names nothing, as it may be said.
const POLICIES: [&str; 2] = ["Reject", "Ignore"];

/// Refuses a VM whose matchers cannot be resolved. The first that is wrong answers.
pub(super) fn check(vm: &VirtualMachine) -> Result<(), Causes> {
    for role in Role::ALL {
        let Some(matcher) = Matcher::of(vm, role) else { continue };
        let causes = check_one(role, &matcher);
        if !causes.is_empty() {
            return Err(causes);
        }
    }
    Ok(())
}

fn check_one(role: Role, matcher: &Matcher) -> Causes {
    let mut causes = Causes::new();
    let path = format!("spec.{}", role.field());
    let infers = !matcher.infer_from_volume.is_empty();
    if matcher.name.is_empty() && !infers {
        causes.not_found(
            &path,
            format!("Either Name or InferFromVolume should be provided within the {}", role.matcher()),
        );
    }
    if infers && !matcher.name.is_empty() {
        causes.not_supported(
            format!("{path}.name"),
            "Name already set, should be cleared before setting inferFromVolume",
        );
    }
    if infers && !matcher.kind.is_empty() {
        causes.not_supported(
            format!("{path}.kind"),
            "Kind already set, should be cleared before setting inferFromVolume",
        );
    }
    let policy = matcher.infer_from_volume_failure_policy.as_str();
    if !policy.is_empty() && !POLICIES.contains(&policy) {
        causes.invalid(
            format!("{path}.inferFromVolumeFailurePolicy"),
            format!("Invalid value '{policy}' for InferFromVolumeFailurePolicy"),
        );
    }
    causes
}

/// Refuses a VM that names another object but keeps the copy of the former. The first matcher that does answers.
pub(super) fn check_update(vm: &VirtualMachine, old: &VirtualMachine) -> Result<(), Causes> {
    for role in Role::ALL {
        let (Some(new), Some(old)) = (Matcher::of(vm, role), Matcher::of(old, role)) else { continue };
        if !new.revision_name.is_empty() && new.name != old.name && new.revision_name == old.revision_name {
            let mut causes = Causes::new();
            causes.invalid(
                format!("spec.{}.revisionName", role.field()),
                "the Matcher Name has been updated without updating the RevisionName",
            );
            return Err(causes);
        }
    }
    Ok(())
}
