//! `kubectl virt support-bundle`.

use std::{collections::BTreeMap, path::Path};

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::story;
use tokio::process::Command;

use crate::manifests;

#[test]
fn support_bundle_contains_logs_and_objects_without_secrets() {
    story("support", async |s| {
        s.apply(&manifests::vm("seeded", "Halted")).await?;
        s.apply(&manifests::kernel_vmi("box")).await?;
        s.wait_running("box").await?;
        let directory = std::env::temp_dir().join(&s.namespace);
        std::fs::create_dir_all(&directory)?;
        let archive = directory.join("bundle.tar.gz");
        let archive = archive.to_str().context("the directory is not UTF-8")?;
        let result = async {
            let output = s.virt(&["support-bundle", "--output", archive, "--log-lines", "200"]).await?;
            let files = unpacked(archive, &directory.join("all")).await?;
            ensure!(output.contains(&format!("{} files", files.len())), "{output}, not {:?}", files.keys());
            // Everybody may read the versions.
            let output = s.virt(&["support-bundle", "--output", archive, "--as", "nobody"]).await?;
            let limited = unpacked(archive, &directory.join("limited")).await?;
            ensure!(output.contains("errors.txt"), "{output}");
            let errors = limited.get("errors.txt").context("no list of errors")?;
            ensure!(errors.contains("cluster/nodes.yaml: ") && errors.contains("forbidden"), "{errors}");
            Ok(files)
        };
        let result = result.await;
        std::fs::remove_dir_all(&directory)?;
        check(&s.namespace, &result?)
    });
}

fn check(namespace: &str, files: &BTreeMap<String, String>) -> Result<()> {
    let tenant = format!("namespaces/{namespace}");
    let holds = |file: &str, text: &str| -> Result<()> {
        let found = files.iter().filter(|(path, _)| path.starts_with(file)).any(|(_, content)| content.contains(text));
        ensure!(found, "no {text:?} in {file}: {:?}, errors: {:?}", files.keys(), files.get("errors.txt"));
        Ok(())
    };
    for (file, text) in [
        ("versions.yaml", "gitVersion"),
        ("cluster/nodes.yaml", "kubevirt.io/schedulable"),
        ("cluster/definitions.yaml", "virtualmachines.kubevirt.io"),
        ("cluster/apiservices.yaml", "v1.subresources.kubevirt.io"),
        ("cluster/validatingwebhookconfigurations.yaml", "virt-api-validator"),
        ("installation/kubevirts.yaml", "phase: Deployed"),
        ("installation/pods.yaml", "virt-handler"),
        ("installation/logs/virt-controller", ""),
        ("installation/logs/virt-handler", ""),
        (&format!("{tenant}/virtualmachines.yaml"), "<redacted>"),
        (&format!("{tenant}/virtualmachineinstances.yaml"), "name: box"),
        (&format!("{tenant}/events.yaml"), "SuccessfulCreate"),
        (&format!("{tenant}/logs/virt-launcher-box"), ""),
        (&format!("{tenant}/domains/virt-launcher-box"), "<domain"),
    ] {
        holds(file, text)?;
    }
    for (path, content) in files {
        for secret in ["password: story", "caBundle: L", "PRIVATE KEY-----"] {
            ensure!(!content.contains(secret), "{path} contains {secret}");
        }
    }
    Ok(())
}

/// Unpacks an archive and returns its files by their paths below its directory.
async fn unpacked(archive: &str, into: &Path) -> Result<BTreeMap<String, String>> {
    std::fs::create_dir_all(into)?;
    let mut command = Command::new("tar");
    command.arg("-xzf").arg(archive).arg("-C").arg(into).arg("--strip-components=1");
    let output = command.output().await.context("cannot run tar")?;
    ensure!(output.status.success(), "tar: {}", String::from_utf8_lossy(&output.stderr));
    let (mut files, mut directories) = (BTreeMap::new(), vec![into.to_owned()]);
    while let Some(directory) = directories.pop() {
        for entry in std::fs::read_dir(&directory)? {
            let path = entry?.path();
            if path.is_dir() {
                directories.push(path);
                continue;
            }
            let name = path.strip_prefix(into)?.display().to_string();
            files.insert(name, String::from_utf8_lossy(&std::fs::read(&path)?).into_owned());
        }
    }
    Ok(files)
}
