//! Rules of the matchers of a VM: its references to instance type and preference.

use api::{
    VirtualMachine,
    instancetype::matcher::{Matcher, Role},
};

use crate::context::FieldErrors;

/// Values of the policy for volumes without labels.
const POLICIES: [&str; 2] = ["Reject", "Ignore"];

/// Rejects matchers that cannot be resolved, with the errors of the first invalid one.
pub(super) fn check(vm: &VirtualMachine) -> Result<(), FieldErrors> {
    for role in Role::ALL {
        let Some(matcher) = Matcher::of(vm, role) else { continue };
        let errors = check_one(role, &matcher);
        if !errors.is_empty() {
            return Err(errors);
        }
    }
    Ok(())
}

fn check_one(role: Role, matcher: &Matcher) -> FieldErrors {
    let mut errors = FieldErrors::new();
    let path = format!("spec.{}", role.field());
    let infers = !matcher.infer_from_volume.is_empty();
    if matcher.name.is_empty() && !infers {
        errors.not_found(
            &path,
            format!("Either Name or InferFromVolume should be provided within the {}", role.matcher()),
        );
    }
    if infers && !matcher.name.is_empty() {
        errors.not_supported(
            format!("{path}.name"),
            "Name already set, should be cleared before setting inferFromVolume",
        );
    }
    if infers && !matcher.kind.is_empty() {
        errors.not_supported(
            format!("{path}.kind"),
            "Kind already set, should be cleared before setting inferFromVolume",
        );
    }
    let policy = matcher.infer_from_volume_failure_policy.as_str();
    if !policy.is_empty() && !POLICIES.contains(&policy) {
        errors.invalid(
            format!("{path}.inferFromVolumeFailurePolicy"),
            format!("Invalid value '{policy}' for InferFromVolumeFailurePolicy"),
        );
    }
    errors
}

/// Rejects a matcher whose name changed but whose revision did not; adds only the first error.
pub(super) fn check_update(vm: &VirtualMachine, old: &VirtualMachine) -> Result<(), FieldErrors> {
    for role in Role::ALL {
        let (Some(new), Some(old)) = (Matcher::of(vm, role), Matcher::of(old, role)) else { continue };
        if !new.revision_name.is_empty() && new.name != old.name && new.revision_name == old.revision_name {
            let mut errors = FieldErrors::new();
            errors.invalid(
                format!("spec.{}.revisionName", role.field()),
                "the Matcher Name has been updated without updating the RevisionName",
            );
            return Err(errors);
        }
    }
    Ok(())
}
