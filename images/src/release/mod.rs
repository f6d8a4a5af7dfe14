//! Makes a release: images and chart in a registry, and the files of `build/release`.
//!
//! ```text
//! archives -> digests ----> values of the chart -> helm package, helm template -> chart, install.yaml, crds.yaml
//!          -> packages --+
//! cargo metadata --------+> SBOM, THIRD_PARTY_NOTICES
//! program crds -----------> importer-crds.yaml
//! former chart, new chart -> RELEASE_NOTES.md
//! ```
//!
//! The images are pushed first and the chart last: a chart in the registry never names an image that is missing.

mod chart;
mod crates;
mod debian;
mod notes;
mod notices;
mod rights;
mod sbom;
mod signature;

use std::{
    collections::BTreeMap,
    env,
    ffi::OsStr,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use sha2::{Digest, Sha256};

use self::{chart::Published, crates::Crate, debian::Package, signature::Key};
use crate::{
    EPOCH_TEXT, Image, archive_path,
    cache::hex,
    error::{At, Error, Result},
    oci, registry, run, services,
    source::Source,
};

/// Archives of a release.
const RELEASED: [&str; 7] = [
    "virt-api",
    "virt-controller",
    "virt-handler",
    "virt-launcher",
    "virt-launcher-debug",
    "virt-launcher-arm64",
    "virt-importer",
];

/// The chart in the working tree.
const CHART: &str = "charts/ferrovirt";

/// Name of the chart, and of the release in rendered manifests.
const NAME: &str = "ferrovirt";

/// Namespace in rendered manifests.
const NAMESPACE: &str = "kubevirt";

/// Version of Kubernetes for which manifests are rendered. No template depends on it; Helm compares it with the chart's minimum.
const KUBERNETES: &str = "1.36.0";

/// Inputs of a release.
#[derive(Debug, Clone)]
pub struct Options {
    /// Registry host and path, such as `registry.example.org/ferrovirt`.
    pub registry: String,
    /// Version of chart and images; default: the chart's appVersion.
    pub version: Option<String>,
    /// Folder of the archives.
    pub images: PathBuf,
    /// Folder of the release binaries.
    pub bin_dir: PathBuf,
    /// Folder for the files of the release.
    pub out: PathBuf,
    /// The program helm.
    pub helm: PathBuf,
    /// Packaged chart of the release before, whose rights are compared.
    pub former: Option<PathBuf>,
    /// True for a registry with plain HTTP.
    pub insecure: bool,
    /// Replaces images and a chart of the same version.
    pub overwrite: bool,
    /// Private key that signs images and checksums.
    pub sign_key: Option<PathBuf>,
}

/// A released image.
#[derive(Debug, Clone)]
struct Released {
    image: Image,
    digest: String,
    packages: Vec<Package>,
    crates: Vec<Crate>,
}

/// Makes a release from the working tree in the current folder. Returns the lines of a report.
pub fn release(options: &Options) -> Result<Vec<String>> {
    let version = match &options.version {
        Some(version) => version.clone(),
        None => chart::app_version(&read(&Path::new(CHART).join("Chart.yaml"))?)?,
    };
    chart::check_version(&version)?;
    let key = options.sign_key.as_deref().map(Key::read).transpose()?;
    if options.out.exists() {
        fs::remove_dir_all(&options.out).at(&options.out)?;
    }
    fs::create_dir_all(&options.out).at(&options.out)?;

    let released = describe(options)?;
    let published = Published {
        registry: options.registry.trim_end_matches('/').to_owned(),
        digests: released.iter().map(|one| (tagged(one.image, &version), one.digest.clone())).collect(),
    };
    let helm = Helm { program: &options.helm };
    let package = package(options, &helm, &version, &published)?;
    let rendered = helm.template(&package, &["--no-hooks"])?;
    let put = |name: &str, text: String| {
        let path = options.out.join(name);
        fs::write(&path, text).at(&path)
    };
    put("install.yaml", chart::manifests(&rendered, NAMESPACE)?)?;
    put("crds.yaml", definitions(&Path::new(CHART).join("crds"))?)?;
    put("importer-crds.yaml", importer_definitions(&options.bin_dir)?)?;
    let source = Source::of(Path::new("."));
    let created = source.as_ref().map_or(EPOCH_TEXT, Source::date);
    let bom = sbom::document(&version, created, &published.registry, &released);
    put(&format!("{NAME}-{version}.spdx.json"), format!("{}\n", serde_json::to_string_pretty(&bom)?))?;
    put("THIRD_PARTY_NOTICES", notices::text(&licensed(&released)?, &packages_of(&released)))?;
    let rights = match &options.former {
        Some(former) => Some(rights::compare(
            &rights::read(&helm.template(former, &[])?)?,
            &rights::read(&helm.template(&package, &[])?)?,
        )),
        None => None,
    };
    let images =
        released.iter().map(|released| (reference(&published, released.image, &version), released.digest.clone()));
    let notes =
        notes::text(&version, &images.collect::<Vec<_>>(), &read(Path::new("CHANGELOG.md"))?, rights.as_deref());
    put("RELEASE_NOTES.md", notes)?;
    let sums = checksums(&options.out)?;
    if let Some(key) = &key {
        let path = options.out.join("SHA256SUMS.sig");
        fs::write(&path, key.sign(sums.as_bytes())?).at(&path)?;
    }
    put("SHA256SUMS", sums)?;

    let charts = format!("oci://{}/charts", published.registry);
    if !options.overwrite {
        refuse_replacement(options, &published, &version, &package)?;
    }
    let mut report = Vec::new();
    for released in &released {
        let archive = archive_path(&options.images, released.image.name);
        let target = registry::push(
            &archive,
            &published.registry,
            released.image.path,
            &released.image.tag(&version),
            options.insecure,
        )?;
        report.push(format!("{target}@{}", released.digest));
        if let Some(key) = &key {
            let repository = format!("{}/{}", published.registry, released.image.path);
            let layout = options.out.join("signature");
            let tag = key.write_layout(&layout, &repository, &released.digest)?;
            let target = format!("{repository}:{tag}");
            registry::copy(&format!("oci:{}", layout.display()), &target, options.insecure)?;
            fs::remove_dir_all(&layout).at(&layout)?;
            report.push(target);
        }
    }
    helm.push(&package, &charts, options.insecure)?;
    report.push(format!("{charts}/{NAME}:{version}"));
    report.push(format!("files in {}", options.out.display()));
    Ok(report)
}

/// Fails if a tag of the release names something else in the registry. Installations of the version would change.
fn refuse_replacement(options: &Options, published: &Published, version: &str, package: &Path) -> Result<()> {
    let chart = registry::digest(&fs::read(package).at(package)?);
    let images = published.digests.iter().map(|(tagged, digest)| (format!("{}/{tagged}", published.registry), digest));
    for (reference, digest) in images.chain([(format!("{}/charts/{NAME}:{version}", published.registry), &chart)]) {
        let found = registry::manifest(&reference, options.insecure)?;
        if found.is_some_and(|found| !names(&found, digest)) {
            return Err(Error::NotReleasable(format!(
                "{reference} exists with another content than {digest}: release another version, or replace it with --overwrite"
            )));
        }
    }
    Ok(())
}

/// Returns true if a manifest has the digest, or is that of a chart whose package has it.
fn names(manifest: &[u8], digest: &str) -> bool {
    registry::digest(manifest) == digest || String::from_utf8_lossy(manifest).contains(&format!("\"{digest}\""))
}

fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).at(path)
}

/// Returns name and tag of an image.
fn tagged(image: Image, version: &str) -> String {
    format!("{}:{}", image.path, image.tag(version))
}

fn reference(published: &Published, image: Image, version: &str) -> String {
    format!("{}/{}", published.registry, tagged(image, version))
}

/// Reads what each image contains.
fn describe(options: &Options) -> Result<Vec<Released>> {
    let graph = crates::Graph::of_workspace()?;
    let mut all = Vec::new();
    for name in RELEASED {
        let image = Image::find(name).ok_or_else(|| Error::NotReleasable(format!("{name} is not an image")))?;
        let archive = archive_path(&options.images, name);
        if !archive.exists() {
            return Err(Error::NotReleasable(format!("{} does not exist: build it first", archive.display())));
        }
        let packages = debian::packages(&archive)?;
        let crates = graph.linked_into(services::binaries(name))?;
        all.push(Released { image, digest: oci::read(&archive)?.digest, packages, crates });
    }
    Ok(all)
}

/// Packages the chart with the references of the published images, and returns the archive.
fn package(options: &Options, helm: &Helm<'_>, version: &str, published: &Published) -> Result<PathBuf> {
    let staged = options.out.join("staged");
    let chart = staged.join(NAME);
    copy(Path::new(CHART), &chart)?;
    let values = chart.join("values.yaml");
    fs::write(&values, chart::values(&read(&values)?, published)?).at(&values)?;
    let metadata = chart.join("Chart.yaml");
    fs::write(&metadata, chart::metadata(&read(&metadata)?, version, published)?).at(&metadata)?;
    helm.run(&[
        OsStr::new("package"),
        chart.as_os_str(),
        OsStr::new("--version"),
        OsStr::new(version),
        OsStr::new("--app-version"),
        OsStr::new(version),
        OsStr::new("--destination"),
        options.out.as_os_str(),
    ])?;
    fs::remove_dir_all(&staged).at(&staged)?;
    Ok(options.out.join(format!("{NAME}-{version}.tgz")))
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to).at(to)?;
    for entry in fs::read_dir(from).at(from)? {
        let entry = entry.at(from)?;
        let (from, to) = (entry.path(), to.join(entry.file_name()));
        if from.is_dir() { copy(&from, &to)? } else { fs::copy(&from, &to).map(drop).at(&from)? }
    }
    Ok(())
}

/// Joins all custom resource definitions.
fn definitions(folder: &Path) -> Result<String> {
    files(folder)?.iter().map(|path| Ok(format!("---\n{}", read(path)?))).collect()
}

/// Returns the definitions of the importer, which are not in the chart: CDI has them, too. A hook applies them otherwise.
fn importer_definitions(bin_dir: &Path) -> Result<String> {
    let text = run::run(Command::new(bin_dir.join("crds")).arg("--importer"), "built by `make build`")?;
    Ok(format!("# Apply this only where CDI is not installed.\n{}", String::from_utf8_lossy(&text)))
}

fn files(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut paths = Vec::new();
    for entry in fs::read_dir(folder).at(folder)? {
        paths.push(entry.at(folder)?.path());
    }
    paths.sort();
    Ok(paths)
}

/// Returns all crates with the licence texts in their sources.
fn licensed(released: &[Released]) -> Result<Vec<(Crate, Vec<String>)>> {
    let all: BTreeMap<_, _> = released
        .iter()
        .flat_map(|released| &released.crates)
        .filter(|krate| !krate.ours)
        .map(|krate| ((&krate.name, &krate.version), krate))
        .collect();
    let texts = |krate: &Crate| Ok((krate.clone(), notices::licence_texts(&krate.folder)?));
    let mut licensed = all.into_values().map(texts).collect::<Result<Vec<_>>>()?;
    notices::complete(&mut licensed, &read(Path::new("LICENSE"))?);
    Ok(licensed)
}

/// Returns all Debian packages with the images that contain them.
fn packages_of(released: &[Released]) -> BTreeMap<Package, Vec<&'static str>> {
    let mut all: BTreeMap<Package, Vec<&'static str>> = BTreeMap::new();
    for released in released {
        for package in &released.packages {
            all.entry(package.clone()).or_default().push(released.image.name);
        }
    }
    all
}

/// Returns the text of SHA256SUMS for the files of a folder.
fn checksums(folder: &Path) -> Result<String> {
    let mut text = String::new();
    for path in files(folder)? {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        text.push_str(&format!("{}  {name}\n", hex(&Sha256::digest(fs::read(&path).at(&path)?))));
    }
    Ok(text)
}

/// The program helm.
struct Helm<'a> {
    program: &'a Path,
}

impl Helm<'_> {
    fn run<S: AsRef<OsStr>>(&self, arguments: &[S]) -> Result<String> {
        let mut command = Command::new(self.program);
        command.args(arguments);
        let output = run::run(&mut command, "built by `cluster build-helm`")?;
        Ok(String::from_utf8_lossy(&output).into_owned())
    }

    /// Renders a chart with its default values.
    fn template(&self, chart: &Path, more: &[&str]) -> Result<String> {
        let chart = chart.to_string_lossy();
        let mut arguments = vec!["template", NAME, &*chart, "--namespace", NAMESPACE, "--kube-version", KUBERNETES];
        arguments.extend(more);
        self.run(&arguments)
    }

    /// Pushes a packaged chart. One log-in suffices for images and chart: Helm gets the credentials of skopeo, unless it has its
    /// own.
    fn push(&self, chart: &Path, to: &str, plain_http: bool) -> Result<()> {
        let chart = chart.to_string_lossy().into_owned();
        let mut arguments = vec!["push".to_owned(), chart, to.to_owned()];
        if plain_http {
            arguments.push("--plain-http".to_owned());
        }
        if env::var_os("HELM_REGISTRY_CONFIG").is_none()
            && let Ok(file) = env::var("REGISTRY_AUTH_FILE")
        {
            arguments.push(format!("--registry-config={file}"));
        }
        self.run(&arguments).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn manifest_is_found_by_its_digest_or_that_of_its_package() {
        let (manifest, package) = (br#"{"layers": [{"digest": "sha256:00ff"}]}"#, "sha256:00ff");
        for (digest, same) in [(registry::digest(manifest).as_str(), true), (package, true), ("sha256:00fe", false)] {
            assert_eq!(names(manifest, digest), same, "{digest}");
        }
    }
}
