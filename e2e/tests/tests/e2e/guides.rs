//! The manifests of the guides and of `README.md` work as they are written.

use std::{path::Path, time::Duration};

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{
    Story, repository,
    storage::{Storage, delete_vmis},
    story,
};
use kube::api::GroupVersionKind;
use serde_json::Value;

const MINUTES: Duration = Duration::from_secs(300);

/// Check of a manifest that the story does not apply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Trial {
    /// The API server accepts it in a dry run.
    DryRun,
    /// The same, if the cluster serves the kind. The test cluster does not install all tools that the guides mention.
    DryRunIfServed,
}

/// Manifests that are not applied: document, kind and name, check, reason.
const NOT_APPLIED: &[(&str, &str, Trial, &str)] = &[
    (
        "docs/guides/networking.md",
        "NetworkAttachmentDefinition/lan",
        Trial::DryRunIfServed,
        "the network plugin leaves its bridge on the node; networks.rs applies the same and removes the bridge",
    ),
    (
        "docs/guides/networking.md",
        "VirtualMachineInstance/two-networks",
        Trial::DryRun,
        "needs the network above; networks.rs runs two such VMIs",
    ),
    (
        "docs/guides/migration.md",
        "NetworkAttachmentDefinition/migrations",
        Trial::DryRunIfServed,
        "virt-handlers must be attached to it; migration_network.rs does so with a network of the nodes of the test",
    ),
    (
        "docs/guides/guests-and-cloud-init.md",
        "VirtualMachine/debian",
        Trial::DryRun,
        "Debian boots for minutes under emulation; guest_agent.rs runs the same guest with the same credentials",
    ),
];

/// A manifest of one object in a document.
#[derive(Clone, Debug, PartialEq)]
struct Manifest {
    /// Path of the document in the repository.
    document: String,
    /// Line of the manifest's first line.
    line: usize,
    text: String,
    object: Value,
}

impl Manifest {
    fn kind(&self) -> &str {
        self.object["kind"].as_str().unwrap_or_default()
    }

    fn name(&self) -> &str {
        self.object["metadata"]["name"].as_str().unwrap_or_default()
    }

    fn title(&self) -> String {
        format!("{}/{}", self.kind(), self.name())
    }

    fn place(&self) -> String {
        format!("{}:{}: {}", self.document, self.line, self.title())
    }

    /// Returns the check, if the manifest is not applied.
    fn trial(&self) -> Option<Trial> {
        let listed =
            NOT_APPLIED.iter().find(|(document, title, ..)| *document == self.document && *title == self.title());
        listed.map(|(_, _, trial, _)| *trial)
    }

    /// Returns the name of the VMI that runs when the object exists.
    fn running(&self) -> Option<&str> {
        let strategy = self.object["spec"]["runStrategy"].as_str().unwrap_or_default();
        let runs = match self.kind() {
            "VirtualMachineInstance" => true,
            "VirtualMachine" => ["Always", "RerunOnFailure", "Once"].contains(&strategy),
            _ => false,
        };
        runs.then(|| self.name())
    }
}

/// Returns the texts of the blocks of code marked `yaml`, each with its first line.
fn blocks(markdown: &str) -> Vec<(usize, String)> {
    let mut blocks = Vec::new();
    // The fence of the present block, and its text if it is YAML.
    let mut open: Option<(&str, Option<(usize, String)>)> = None;
    for (index, line) in markdown.lines().enumerate() {
        let trimmed = line.trim_start();
        let ticks = trimmed.len() - trimmed.trim_start_matches('`').len();
        match &mut open {
            None if ticks >= 3 => {
                let (fence, language) = trimmed.split_at(ticks);
                open = Some((fence, (language.trim() == "yaml").then(|| (index + 2, String::new()))));
            }
            Some((fence, block)) if trimmed.trim_end() == *fence => {
                blocks.extend(block.take());
                open = None;
            }
            Some((_, Some((_, text)))) => {
                text.push_str(line);
                text.push('\n');
            }
            _ => {}
        }
    }
    blocks
}

/// Returns the manifests of a document in their order.
fn manifests(document: &str, markdown: &str) -> Result<Vec<Manifest>> {
    let mut manifests = Vec::new();
    for (start, block) in blocks(markdown) {
        let mut line = start;
        for text in block.split_inclusive('\n').collect::<Vec<_>>().split(|line| line.trim_end() == "---") {
            let lines = text.len();
            let text = text.concat();
            let object = serde_saphyr::from_str(&text).with_context(|| format!("{document}:{line}: not YAML"))?;
            let manifest = Manifest { document: document.to_owned(), line, text, object };
            let complete = !manifest.kind().is_empty() && !manifest.name().is_empty();
            ensure!(complete, "{document}:{line}: not a manifest with kind and name");
            manifests.push(manifest);
            line += lines + 1;
        }
    }
    Ok(manifests)
}

/// Returns the manifests of all documents, one list per document.
fn documents() -> Result<Vec<Vec<Manifest>>> {
    let root = repository();
    let mut paths = vec!["README.md".to_owned()];
    for entry in std::fs::read_dir(root.join("docs/guides")).context("no folder docs/guides")? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "md") {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            paths.push(format!("docs/guides/{name}"));
        }
    }
    paths.sort();
    let read = |path: &String| {
        let text = std::fs::read_to_string(root.join(Path::new(path))).with_context(|| path.clone())?;
        manifests(path, &text)
    };
    paths.iter().map(read).filter(|found| !found.as_ref().is_ok_and(Vec::is_empty)).collect()
}

#[test]
fn manifests_of_the_guides_are_accepted_and_their_vms_run() {
    story("guides", async |s| {
        for manifests in documents()? {
            let mut storage = Vec::new();
            let result = follow(s, &manifests, &mut storage).await;
            // VMIs are removed before their storage.
            let gone = clean(s, &manifests).await;
            for storage in &storage {
                storage.remove(s).await?;
            }
            result.and(gone)?;
        }
        Ok(())
    });
}

/// Applies the manifests of a document in order and waits until their VMIs run.
async fn follow(s: &Story, manifests: &[Manifest], storage: &mut Vec<Storage>) -> Result<()> {
    for manifest in manifests {
        let outcome = match manifest.trial() {
            Some(trial) => try_out(s, manifest, trial).await,
            None => apply(s, manifest, storage).await,
        };
        outcome.with_context(|| manifest.place())?;
    }
    for manifest in manifests.iter().filter(|manifest| manifest.trial().is_none()) {
        if let Some(vmi) = manifest.running() {
            s.wait_running(vmi).await.with_context(|| manifest.place())?;
        }
    }
    Ok(())
}

async fn apply(s: &Story, manifest: &Manifest, storage: &mut Vec<Storage>) -> Result<()> {
    if manifest.kind() == "PersistentVolumeClaim" {
        storage.push(Storage::for_claim(s, manifest.name(), &manifest.object["spec"]).await?);
    }
    s.apply(&manifest.text).await?;
    // The next manifest of a guide may need the outcome, and a restore that goes on makes its VM again after the guide.
    let is_done: Option<fn(&Value) -> bool> = match manifest.kind() {
        "VirtualMachineSnapshot" => Some(|snapshot| snapshot["status"]["readyToUse"] == true),
        "VirtualMachineRestore" => Some(|restore| restore["status"]["complete"] == true),
        "VirtualMachineClone" => Some(|clone| clone["status"]["phase"] == "Succeeded"),
        _ => None,
    };
    if let Some(is_done) = is_done {
        s.wait(manifest.kind(), manifest.name(), "be done", MINUTES, is_done).await?;
    }
    Ok(())
}

/// Checks a manifest without storing it.
async fn try_out(s: &Story, manifest: &Manifest, trial: Trial) -> Result<()> {
    let version = manifest.object["apiVersion"].as_str().unwrap_or_default();
    let (group, version) = version.split_once('/').unwrap_or(("", version));
    let kind = GroupVersionKind::gvk(group, version, manifest.kind());
    if trial == Trial::DryRunIfServed && kube::discovery::pinned_kind(&s.client, &kind).await.is_err() {
        return Ok(());
    }
    s.dry_run(&manifest.text).await.map(drop)
}

/// Removes the objects of a document. Their guests are not asked to shut down.
async fn clean(s: &Story, manifests: &[Manifest]) -> Result<()> {
    let applied = || manifests.iter().filter(|manifest| manifest.trial().is_none());
    for manifest in applied().filter(|manifest| manifest.kind() == "VirtualMachine") {
        if s.api("vm").get_opt(manifest.name()).await?.is_some() {
            // It fails for a VM that does not run, which is deleted below nevertheless.
            let _ = s.virt(&["stop", manifest.name(), "--force", "--grace-period=0"]).await;
        }
    }
    delete_vmis(s).await?;
    for manifest in applied().filter(|manifest| manifest.kind() != "VirtualMachine") {
        if s.api(manifest.kind()).get_opt(manifest.name()).await?.is_some() {
            s.delete(manifest.kind(), manifest.name()).await?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_of_yaml_are_found_with_their_lines() {
        let markdown = "a\n```yaml\nb: 1\n```\n```console\n```` \n$ c\n```\n````yaml\n```\nd: 2\n````\n```yaml values\ne: 3\n```\n";
        assert_eq!(blocks(markdown), [(3, "b: 1\n".to_owned()), (10, "```\nd: 2\n".to_owned())]);
        assert_eq!(blocks("```yaml\nnever: closed\n"), []);
    }

    #[test]
    fn manifests_have_the_lines_of_their_objects() {
        let markdown = "\n```yaml\nkind: A\nmetadata: {name: a}\n---\nkind: B\nmetadata: {name: b}\n```\n";
        let found = manifests("x.md", markdown).unwrap();
        let places: Vec<String> = found.iter().map(Manifest::place).collect();
        assert_eq!(places, ["x.md:3: A/a", "x.md:6: B/b"]);
        for broken in ["```yaml\nkind: A\n```\n", "```yaml\n: [\n```\n"] {
            assert!(manifests("x.md", broken).unwrap_err().to_string().starts_with("x.md:2: not"), "{broken}");
        }
    }

    #[test]
    fn objects_that_run_are_known() {
        for (object, running) in [
            ("kind: VirtualMachine\nmetadata: {name: a}\nspec: {runStrategy: Always}", true),
            ("kind: VirtualMachine\nmetadata: {name: a}\nspec: {runStrategy: Halted}", false),
            ("kind: VirtualMachineInstance\nmetadata: {name: a}", true),
            ("kind: Service\nmetadata: {name: a}", false),
        ] {
            let found = manifests("x.md", &format!("```yaml\n{object}\n```\n")).unwrap();
            assert_eq!(found[0].running().is_some(), running, "{object}");
        }
    }

    #[test]
    fn documents_are_read_and_exceptions_name_manifests() {
        let all: Vec<Manifest> = documents().unwrap().into_iter().flatten().collect();
        for (document, title, ..) in NOT_APPLIED {
            let named = all.iter().any(|manifest| manifest.document == *document && manifest.title() == *title);
            assert!(named, "{document} has no manifest {title}");
        }
        let booted = all.iter().filter(|manifest| manifest.trial().is_none() && manifest.running().is_some());
        assert!((5..15).contains(&booted.count()), "guests that the story boots");
        assert!(all.iter().any(|manifest| manifest.document == "README.md"), "README.md has no manifest");
    }
}
