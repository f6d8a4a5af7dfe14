//! The chart and the manifests of a release, as text.

use std::{collections::BTreeMap, fmt::Write};

use crate::error::{Error, Result};

/// Registry and digests of the images of a release.
#[derive(Debug, Clone)]
pub(super) struct Published {
    /// Registry host and path.
    pub registry: String,
    /// Digests by name and tag of the image.
    pub digests: BTreeMap<String, String>,
}

fn unfit(detail: impl Into<String>) -> Error {
    Error::NotReleasable(detail.into())
}

/// Returns the appVersion of a Chart.yaml.
pub(super) fn app_version(chart: &str) -> Result<String> {
    chart
        .lines()
        .find_map(|line| line.strip_prefix("appVersion:"))
        .map(|version| version.trim().trim_matches('"').to_owned())
        .ok_or_else(|| unfit("Chart.yaml has no appVersion"))
}

/// Returns a Chart.yaml that lists the published images.
pub(super) fn metadata(text: &str, version: &str, published: &Published) -> Result<String> {
    let mut found = 0;
    let lines = text.lines().map(|line| {
        let name = line.strip_prefix("      image: ferrovirt.io/").and_then(|image| image.split_once(':'));
        match name {
            Some((name, _)) => {
                found += 1;
                format!("      image: {}/{name}:{version}\n", published.registry)
            }
            None => format!("{line}\n"),
        }
    });
    let text = lines.collect();
    if found > 0 { Ok(text) } else { Err(unfit("Chart.yaml lists no images")) }
}

/// Rejects versions that are not semantic ones, as Helm requires, or not tags of images: these have no `+`.
pub(super) fn check_version(version: &str) -> Result<()> {
    let (numbers, pre) = version.split_once('-').map_or((version, None), |(numbers, pre)| (numbers, Some(pre)));
    let number = |part: &str| {
        !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit()) && (part == "0" || !part.starts_with('0'))
    };
    let identifier =
        |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
    let three = numbers.split('.').count() == 3 && numbers.split('.').all(number);
    if three && pre.is_none_or(|pre| pre.split('.').all(identifier)) {
        return Ok(());
    }
    Err(unfit(format!("version {version:?} has not the form 1.2.3 or 1.2.3-rc.1")))
}

/// Returns the values of the chart with the registry and the digests of the published images. Comments and order stay.
pub(super) fn values(values: &str, published: &Published) -> Result<String> {
    let digests = published.digests.iter().map(|(name, digest)| format!("    {name}: {digest}\n")).collect::<String>();
    let new = BTreeMap::from([
        ("  registry:", format!("  registry: {}\n", published.registry)),
        // Empty means the version of the chart, which the digests belong to.
        ("  tag:", "  tag: \"\"\n".to_owned()),
        ("  digests:", format!("  digests:\n{digests}")),
    ]);
    let mut missing: Vec<&str> = new.keys().copied().collect();
    let (mut text, mut in_image) = (String::new(), false);
    for line in values.split_inclusive('\n') {
        if line.starts_with(|first: char| first.is_ascii_alphabetic()) {
            in_image = line.starts_with("image:");
        }
        match new.iter().find(|(key, _)| in_image && line.starts_with(**key)) {
            Some((key, replacement)) => {
                missing.retain(|missing| missing != key);
                text.push_str(replacement);
            }
            None => text.push_str(line),
        }
    }
    if missing.is_empty() { Ok(text) } else { Err(unfit(format!("values.yaml lacks in image:{}", missing.concat()))) }
}

/// Returns manifests for `kubectl apply` from a chart rendered without hooks: with the namespace, which must permit the privileged
/// pods of virt-handler, and without labels that name Helm as the manager.
pub(super) fn manifests(rendered: &str, namespace: &str) -> Result<String> {
    let mut text = format!(
        "# Apply crds.yaml before, and importer-crds.yaml where CDI is not installed.\n---\napiVersion: v1\n\
         kind: Namespace\nmetadata:\n  name: {namespace}\n  labels:\n    \
         pod-security.kubernetes.io/enforce: privileged\n"
    );
    for line in rendered.lines() {
        let trimmed = line.trim_start();
        if trimmed.starts_with("helm.sh/chart:") {
            continue;
        }
        if trimmed.starts_with("helm.sh/hook") {
            return Err(unfit("a hook of Helm is among the manifests"));
        }
        // Writing to a string cannot fail.
        let _ = match line.split_once("app.kubernetes.io/managed-by:") {
            Some((before, _)) => writeln!(text, "{before}app.kubernetes.io/managed-by: kubectl"),
            None => writeln!(text, "{line}"),
        };
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    use super::*;

    fn published() -> Published {
        Published {
            registry: "registry.example.com/ferrovirt".to_owned(),
            digests: [("virt-api:1.2.3".to_owned(), "sha256:aa".to_owned())].into(),
        }
    }

    #[test]
    fn versions_are_semantic_ones_without_build_metadata() {
        for good in ["0.1.0", "1.22.333", "1.0.0-rc.1", "1.0.0-alpha-2"] {
            assert!(check_version(good).is_ok(), "{good}");
        }
        for bad in
            ["", "1", "1.2", "v1.2.3", "1.2.3.4", "01.2.3", "1.2.3-", "1.2.3-a..b", "1.2.3+build", "1.2.x", "1.2.3-a/b"]
        {
            assert!(check_version(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn registry_and_digests_replace_the_values_and_the_rest_stays() {
        let before = "# a\nimage:\n  # b\n  registry: ferrovirt.io\n  tag: devel\n  digests: {}\nother:\n  tag: x\n";
        let after = "# a\nimage:\n  # b\n  registry: registry.example.com/ferrovirt\n  tag: \"\"\n  digests:\n    virt-api:1.2.3: sha256:aa\n\
                     other:\n  tag: x\n";
        assert_eq!(values(before, &published()).unwrap(), after);
        let error = values("image:\n  tag: a\nother:\n  registry: b\n  digests: {}\n", &published()).unwrap_err();
        assert!(error.to_string().contains("  digests:  registry:"), "{error}");
    }

    #[test]
    fn values_and_version_of_the_chart_are_found() {
        let chart = Path::new(env!("CARGO_MANIFEST_DIR")).join("../charts/ferrovirt");
        let text = values(&fs::read_to_string(chart.join("values.yaml")).unwrap(), &published()).unwrap();
        assert_eq!(text.matches("sha256:aa").count(), 1);
        let text = fs::read_to_string(chart.join("Chart.yaml")).unwrap();
        check_version(&app_version(&text).unwrap()).unwrap();
        let released = metadata(&text, "1.2.3", &published()).unwrap();
        assert_eq!(released.matches("      image: registry.example.com/ferrovirt/virt-").count(), 5);
        assert!(released.contains("/virt-api:1.2.3\n") && !released.contains("image: ferrovirt.io/"), "{released}");
        assert!(metadata("name: ferrovirt\n", "1.2.3", &published()).is_err());
    }

    #[test]
    fn manifests_have_a_namespace_and_do_not_name_helm() {
        let rendered = "---\nkind: A\nmetadata:\n  labels:\n    app.kubernetes.io/managed-by: Helm\n    helm.sh/chart: ferrovirt-1\n    a: b\n";
        let text = manifests(rendered, "kubevirt").unwrap();
        assert!(text.contains("kind: Namespace\nmetadata:\n  name: kubevirt\n"));
        assert!(text.contains("pod-security.kubernetes.io/enforce: privileged\n---\nkind: A\n"));
        assert!(text.ends_with("    app.kubernetes.io/managed-by: kubectl\n    a: b\n"));
        assert!(manifests("    helm.sh/hook: test\n", "kubevirt").is_err());
    }
}
