//! Installs Ferrovirt from this working tree: loads images, installs the chart and waits until it is available.

use std::{env, fs, time::Duration};

use crate::{
    command::{last_lines, output, run, wait},
    error::{Error, FileContext, Result},
    images,
    kvm::{self, Images},
    plan::{INSTALLATION_NAMESPACE, Plan},
    progress::Progress,
    target::Target,
};

/// Registry in the image names on our own cluster.
const OWN_REGISTRY: &str = "ferrovirt.io";
/// Tag of the images of this working tree. The chart's default is that of a release.
const TAG: &str = "devel";
/// Time limit for everything to become available.
const LIMIT: Duration = Duration::from_secs(480);

/// Installs or upgrades Ferrovirt.
///
/// # Errors
/// Fails if a step fails.
pub fn install(plan: &Plan, target: &Target, progress: &Progress) -> Result<()> {
    let registry = if target.own { OWN_REGISTRY.to_owned() } else { foreign_registry()? };
    let changed = target.own && load_images(plan, target, progress)?;
    let (launcher, kernel) =
        (format!("{registry}/virt-launcher:{TAG}"), format!("{registry}/guests/tiny-kernel:{TAG}"));
    let emulation = !kvm::usable(plan, target, Images { launcher: &launcher, kernel: &kernel }, progress)?;

    progress.step("installing the chart");
    let chart = plan.workspace.join("charts/ferrovirt");
    let mut helm = target.helm(&["upgrade", "--install", "ferrovirt"]);
    helm.arg(chart)
        .args(["--namespace", INSTALLATION_NAMESPACE, "--create-namespace", "--timeout", "8m"])
        .args(["--set", &format!("image.registry={registry},image.tag={TAG}")])
        // A story follows the strategy for roles.
        .args(["--set", "rbac.manageAggregation=true"])
        .args(["--set", &format!("kubevirt.configuration.developerConfiguration.useEmulation={emulation}")]);
    run("installing the chart", &mut helm).map_err(|error| with_diagnosis(error, target))?;
    if changed {
        // Image names do not change with the content, so running pods would keep the old images.
        let restart = ["rollout", "restart", "deployment,daemonset", "-n", INSTALLATION_NAMESPACE];
        target.kubectl.run("restarting on the new images", &restart)?;
    }
    wait_until_available(target, progress).map_err(|error| with_diagnosis(error, target))?;
    progress.step("Ferrovirt is available");
    Ok(())
}

/// Returns the registry from which another cluster pulls the images that `make push` sent.
fn foreign_registry() -> Result<String> {
    env::var("REGISTRY").ok().filter(|registry| !registry.is_empty()).ok_or_else(|| {
        Error::Refused(
            "a cluster of your own pulls images from a registry: `make push REGISTRY=...`, then \
             `make up REGISTRY=...` with the same"
                .into(),
        )
    })
}

/// Loads all images. Returns true if an image of a Ferrovirt process has changed.
fn load_images(plan: &Plan, target: &Target, progress: &Progress) -> Result<bool> {
    let folder = plan.build().join("images");
    let mut archives: Vec<_> = fs::read_dir(&folder)
        .at("list", &folder)?
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "tar"))
        .collect();
    archives.sort();
    if archives.is_empty() {
        return Err(Error::Refused("no images in build/images: run `make images guests` first".into()));
    }
    let Some(bin) = &target.bin else { return Ok(false) };
    let before = images::digests(plan, bin)?;
    images::load(plan, bin, &archives, progress)?;
    let after = images::digests(plan, bin)?;
    Ok(before.iter().any(|(name, digest)| name.contains("/virt-") && after.get(name).is_some_and(|new| new != digest)))
}

fn wait_until_available(target: &Target, progress: &Progress) -> Result<()> {
    let kubectl = &target.kubectl;
    let condition = "jsonpath={.status.conditions[?(@.type==\"Available\")].status}";
    let get = ["get", "kubevirt.kubevirt.io", "kubevirt", "-n", INSTALLATION_NAMESPACE, "-o", condition];
    let columns = "custom-columns=NAME:.metadata.name,PHASE:.status.phase,READY:.status.containerStatuses[*].ready";
    let pods = ["get", "pods", "-n", INSTALLATION_NAMESPACE, "--no-headers", "-o", columns];
    let mut shown = String::new();
    wait(
        "waiting until the KubeVirt object is Available",
        LIMIT,
        Duration::from_millis(500),
        || {
            let now = kubectl.answer("reading the pods", &pods)?.unwrap_or_default();
            if now != shown {
                progress.step(format!("  {}", summary(&now)));
                shown = now;
            }
            let available = kubectl.answer("reading the KubeVirt object", &get)?;
            Ok(available.is_some_and(|text| text == "True"))
        },
        String::new,
    )?;
    for workload in ["deployment/virt-api", "deployment/virt-controller", "daemonset/virt-handler"] {
        kubectl.run(
            &format!("waiting for {workload}"),
            &["rollout", "status", workload, "-n", INSTALLATION_NAMESPACE, "--timeout=300s", "--request-timeout=0"],
        )?;
    }
    Ok(())
}

/// Summarizes the table of pods in one line.
fn summary(table: &str) -> String {
    let pods: Vec<String> = table
        .lines()
        .filter_map(|line| {
            let mut words = line.split_whitespace();
            let (name, phase, ready) = (words.next()?, words.next()?, words.next().unwrap_or(""));
            let state = if ready == "true" { "ready" } else { phase };
            Some(format!("{name} {state}"))
        })
        .collect();
    if pods.is_empty() { "no pods yet".into() } else { pods.join(", ") }
}

/// Adds diagnostics to an error: pods, events and logs.
#[must_use]
pub fn with_diagnosis(error: Error, target: &Target) -> Error {
    let mut text = error.to_string();
    let calls: [&[&str]; 3] = [
        &["get", "pods", "-n", INSTALLATION_NAMESPACE, "-o", "wide"],
        &["get", "events", "-n", INSTALLATION_NAMESPACE, "--field-selector=type=Warning", "--sort-by=.lastTimestamp"],
        &[
            "logs",
            "-n",
            INSTALLATION_NAMESPACE,
            "-l",
            "kubevirt.io in (virt-api,virt-controller,virt-handler)",
            "--tail=8",
            "--prefix",
        ],
    ];
    for call in calls {
        let mut command = target.kubectl.command(call);
        if let Ok(found) = output("diagnosing", &mut command) {
            text.push_str(&format!("\n  kubectl {}:\n", call.join(" ")));
            text.push_str(&last_lines(&String::from_utf8_lossy(&found.stdout)));
        }
    }
    Error::Refused(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pods_are_summed_up_in_one_line() {
        let table = "virt-api-1   Running   true\nvirt-handler-2   Pending   <none>\n";
        assert_eq!(summary(table), "virt-api-1 ready, virt-handler-2 Pending");
        assert_eq!(summary(""), "no pods yet");
    }
}
