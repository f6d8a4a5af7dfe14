//! The order of the crates (design, section 2).

use std::{collections::BTreeMap, path::Path, process::Command};

use serde_json::Value;

use crate::Error;

/// Crates that every crate may use, each of them those before it.
const GROUND: &[&str] = &["api", "protocol", "profiler", "daemon"];
/// Uses of one crate by another beyond [`GROUND`]. virt-api serves the webhooks; virt-controller gives a VMI the instance type
/// and the defaults by the same functions as the webhooks, and writes the tasks of import pods.
const ALLOWED: &[(&str, &[&str])] = &[("apiserver", &["admission"]), ("controllers", &["admission", "importer"])];
/// Crates that are not part of the product: they may use any.
const TOOLS: &[&str] = &["fuzz", "layout", "e2e/bench", "e2e/cluster", "e2e/csi", "e2e/tests", "images", "skips"];

/// Returns the dependencies of each crate on others of the workspace, by folder. Those of tests are left out.
///
/// # Errors
/// When cargo does not describe the workspace.
pub fn dependencies(root: &Path) -> Result<BTreeMap<String, Vec<String>>, Error> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let arguments = ["metadata", "--no-deps", "--offline", "--format-version=1"];
    let output = Command::new(cargo).args(arguments).current_dir(root).output();
    let output = output.map_err(|error| Error::Metadata(error.to_string()))?;
    let metadata: Value = serde_json::from_slice(&output.stdout).map_err(|_| {
        let text = String::from_utf8_lossy(&output.stderr);
        Error::Metadata(text.into_owned())
    })?;
    let folder = |path: &str| Path::new(path).strip_prefix(root).ok()?.to_str().map(str::to_owned);
    let packages = metadata["packages"].as_array().into_iter().flatten();
    Ok(packages
        .filter_map(|package| {
            let user = folder(package["manifest_path"].as_str()?.strip_suffix("/Cargo.toml")?)?;
            let dependencies = package["dependencies"].as_array().into_iter().flatten();
            let product = dependencies.filter(|dependency| dependency["kind"] != "dev");
            Some((user, product.filter_map(|dependency| folder(dependency["path"].as_str()?)).collect()))
        })
        .collect())
}

/// Returns a line for each dependency that the order does not allow.
#[must_use]
pub fn violations(dependencies: &BTreeMap<String, Vec<String>>) -> Vec<String> {
    let mut lines = Vec::new();
    for (user, used) in dependencies {
        for used in used.iter().filter(|used| !allowed(user, used)) {
            lines.push(format!("{user} must not depend on {used}"));
        }
    }
    lines
}

fn allowed(user: &str, used: &str) -> bool {
    let place = |name| GROUND.iter().position(|ground| *ground == name);
    let exceptions = ALLOWED.iter().filter(|(name, _)| *name == user).flat_map(|(_, used)| *used);
    match (place(user), place(used)) {
        _ if TOOLS.contains(&user) => true,
        (Some(user), Some(used)) => used < user,
        (None, Some(_)) => true,
        (_, None) => exceptions.into_iter().any(|exception| *exception == used),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order_of_crates_is_kept() {
        for (user, used, expected) in [
            ("daemon", "api", true),
            ("api", "daemon", false),
            ("node", "daemon", true),
            ("apiserver", "admission", true),
            ("node", "admission", false),
            ("admission", "apiserver", false),
            ("launcher", "node", false),
            ("e2e/tests", "admission", true),
        ] {
            assert_eq!(allowed(user, used), expected, "{user} on {used}");
        }
    }
}
