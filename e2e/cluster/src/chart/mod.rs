//! Checks the chart without a cluster: `helm lint`, rendered manifests against the schemas of Kubernetes and of our definitions,
//! and the rules for Prometheus.

mod schemas;

use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
    process::Command,
};

use flate2::{Compression, write::GzEncoder};
use serde_json::Value;

use crate::{
    command::{run, run_visibly},
    components::{self, KUBECONFORM, PROMTOOL},
    error::{Error, FileContext, Result},
    plan::{INSTALLATION_NAMESPACE, Plan},
    progress::Progress,
};

/// The chart in the working tree.
const CHART: &str = "charts/ferrovirt";
/// Module with the definitions of the Prometheus Operator, and the paths of those of our objects in it.
const OPERATOR: (&str, [&str; 2]) = (
    "github.com/prometheus-operator/prometheus-operator",
    [
        "example/prometheus-operator-crd/monitoring.coreos.com_servicemonitors.yaml",
        "example/prometheus-operator-crd/monitoring.coreos.com_prometheusrules.yaml",
    ],
);
/// Module with the OpenAPI document of Kubernetes, and its path in it.
const KUBERNETES: (&str, &str) = ("k8s.io/kubernetes", "api/openapi-spec/swagger.json");

/// Largest size of the Secret with the release, in bytes. The API server accepts 1 MiB.
const LARGEST_RELEASE: usize = 600_000;

/// Lints the chart, and checks what it renders with its defaults and with each file of `ci/`, and the size of the release.
///
/// # Errors
/// Fails if a check fails, or if a program cannot be built.
pub fn check(plan: &Plan, progress: &Progress) -> Result<()> {
    let helm = components::helm(plan, progress)?;
    let kubeconform = components::ensure_module(plan, &KUBECONFORM, progress)?.join("kubeconform");
    let work = plan.build().join("chart");
    let location = write_schemas(plan, &work)?;
    let chart = plan.workspace.join(CHART);
    let values = yaml_files(&chart.join("ci"))?;
    let mut rendered = Vec::new();
    for values in [None].into_iter().chain(values.iter().map(Some)) {
        let name = values.map_or("defaults".into(), |path| path.file_stem().unwrap_or_default().to_string_lossy());
        let mut lint = Command::new(&helm);
        lint.args(["lint", "--strict", "--quiet", "--namespace", INSTALLATION_NAMESPACE]).arg(&chart);
        lint.args(values.iter().flat_map(|path| [Path::new("--values"), path]));
        run(&format!("linting the chart with {name}"), &mut lint)?;
        let manifests = render(&helm, &chart, values.map(PathBuf::as_path), &["--include-crds"])?;
        let path = work.join(format!("{name}.yaml"));
        fs::write(&path, manifests).at("write", &path)?;
        rendered.push(path);
    }
    check_size(&helm, &chart, progress)?;
    let mut conform = Command::new(kubeconform);
    conform.args(["-strict", "-summary", "-schema-location", &location]).args(&rendered);
    run_visibly("checking rendered manifests with kubeconform", &mut conform)?;
    progress.step(format!("the chart is valid with {} sets of values", rendered.len()));
    Ok(())
}

/// Checks the rules for Prometheus and runs their tests.
///
/// # Errors
/// Fails if a check fails, or if a program cannot be built.
pub fn check_rules(plan: &Plan, progress: &Progress) -> Result<()> {
    let helm = components::helm(plan, progress)?;
    let promtool = components::ensure_module(plan, &PROMTOOL, progress)?.join("promtool");
    let chart = plan.workspace.join(CHART);
    let values = chart.join("ci/monitoring-values.yaml");
    let rendered = render(&helm, &chart, Some(&values), &["--show-only", "templates/monitoring.yaml"])?;
    let rules = rules(&rendered)?;
    // promtool finds the file from the tests, which name it relative to their own folder.
    let path = plan.build().join("rules.yaml");
    fs::create_dir_all(plan.build()).at("create", plan.build())?;
    fs::write(&path, rules.to_string()).at("write", &path)?;
    run_visibly("checking the rules", Command::new(&promtool).args(["check", "rules"]).arg(&path))?;
    let tests = yaml_files(&chart.join("tests"))?;
    run_visibly("testing the rules", Command::new(&promtool).args(["test", "rules"]).args(tests))
}

/// Checks the size of the release with the default values.
fn check_size(helm: &Path, chart: &Path, progress: &Progress) -> Result<()> {
    let mut install = Command::new(helm);
    install.args(["install", "ferrovirt", "--namespace", INSTALLATION_NAMESPACE, "--dry-run=client", "--output=json"]);
    let release = run("rendering the release", install.arg(chart))?;
    let size = secret_size(release.trim()).at("compress", chart)?;
    if size > LARGEST_RELEASE {
        return Err(Error::Refused(format!(
            "the Secret with the release of {CHART} has {size} bytes, more than {LARGEST_RELEASE}: definitions are most of it"
        )));
    }
    progress.step(format!("the Secret with the release has {size} bytes"));
    Ok(())
}

/// Returns the size of the data of the Secret in which Helm stores a release: compressed, and in Base64 twice, by Helm and in the
/// JSON of the Secret.
fn secret_size(release: &str) -> std::io::Result<usize> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
    encoder.write_all(release.as_bytes())?;
    let base64 = |bytes: usize| bytes.div_ceil(3) * 4;
    Ok(base64(base64(encoder.finish()?.len())))
}

/// Renders the chart.
fn render(helm: &Path, chart: &Path, values: Option<&Path>, flags: &[&str]) -> Result<String> {
    let mut template = Command::new(helm);
    template.args(["template", "ferrovirt", "--namespace", INSTALLATION_NAMESPACE]).args(flags).arg(chart);
    template.args(values.iter().flat_map(|path| [Path::new("--values"), path]));
    run("rendering the chart", &mut template)
}

/// Returns the rules of the PrometheusRule among manifests.
fn rules(manifests: &str) -> Result<Value> {
    let objects: Vec<Value> =
        serde_saphyr::from_multiple(manifests).map_err(|error| invalid("the rendered rules are not YAML", &error))?;
    let rule = objects.into_iter().find(|object| object["kind"] == "PrometheusRule");
    rule.map(|mut rule| rule["spec"].take())
        .ok_or_else(|| Error::Refused("the chart renders no PrometheusRule".to_owned()))
}

/// Writes the schemas of all kinds, and returns the template of their paths for kubeconform.
fn write_schemas(plan: &Plan, work: &Path) -> Result<String> {
    // Files of kinds that no longer exist would hide that.
    if work.exists() {
        fs::remove_dir_all(work).at("remove", work)?;
    }
    let folder = work.join("schemas");
    fs::create_dir_all(&folder).at("create", &folder)?;
    let document = components::module_folder(plan, &components::CLUSTER, KUBERNETES.0)?.join(KUBERNETES.1);
    let text = fs::read_to_string(&document).at("read", &document)?;
    let document: Value = serde_json::from_str(&text)
        .map_err(|error| invalid("the OpenAPI document of Kubernetes is not JSON", &error))?;
    let mut all = schemas::of_kubernetes(&document);
    let operator = components::module_folder(plan, &KUBECONFORM, OPERATOR.0)?;
    let ours = yaml_files(&plan.workspace.join(CHART).join("crds"))?;
    for path in ours.into_iter().chain(OPERATOR.1.map(|path| operator.join(path))) {
        let text = fs::read_to_string(&path).at("read", &path)?;
        let definition: Value =
            serde_saphyr::from_str(&text).map_err(|error| invalid(&path.display().to_string(), &error))?;
        all.extend(schemas::of_definition(&definition));
    }
    for (name, schema) in all {
        let path = folder.join(name);
        fs::write(&path, schema.to_string()).at("write", &path)?;
    }
    Ok(format!("{}/{}", folder.display(), schemas::TEMPLATE))
}

fn yaml_files(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(folder).at("list", folder)?.flatten().map(|entry| entry.path());
    let mut files: Vec<PathBuf> = entries.filter(|path| path.extension().is_some_and(|end| end == "yaml")).collect();
    files.sort();
    Ok(files)
}

fn invalid(what: &str, error: &dyn std::fmt::Display) -> Error {
    Error::Refused(format!("{what}: {error}"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn rules_are_those_of_the_prometheus_rule() {
        let manifests = "---\nkind: ServiceMonitor\n---\nkind: PrometheusRule\nspec:\n  groups: []\n";
        assert_eq!(rules(manifests).unwrap(), json!({"groups": []}));
        assert!(rules("kind: Service\n").is_err());
    }

    #[test]
    fn secret_has_the_compressed_release_in_base64_twice() {
        // A header of 10 bytes, an empty block of 2, and a trailer of 8 make 20, 28 and 40 bytes.
        assert_eq!(secret_size("").unwrap(), 40);
        assert!(secret_size(&"x".repeat(10_000)).unwrap() < 200);
    }

    #[test]
    fn modules_exist_in_the_working_tree() {
        let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        for module in [components::HELM, KUBECONFORM, PROMTOOL] {
            assert!(workspace.join(module.folder()).join("go.mod").is_file(), "{module:?}");
        }
    }
}
