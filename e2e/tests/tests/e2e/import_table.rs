//! Imports of every source and format into claims of both modes.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{Story, own_cluster, story_large};
use serde_json::json;

use crate::{
    data_volumes::{
        MINUTES, SHA256, SIZE, TINY, contents, data_volume, http, remove, server, storage, wait_phase, with_driver,
    },
    image_registry::{Registry, layer},
};

/// Files of the server that contain its disk. Each is imported from a web server and from a container image, into file systems and block
/// devices.
const FILES: [&str; 11] = [
    "disk.raw",
    "disk.raw.gz",
    "disk.raw.xz",
    "disk.raw.zst",
    "disk.qcow2",
    "disk.qcow2.gz",
    "compressed.qcow2",
    "zstd.qcow2",
    "disk.vmdk",
    "disk.vhdx",
    "disk.vdi",
];
/// MiB of a claim, more than the disk has.
const CLAIM: u32 = 24;
/// Blocks of 512 bytes that a sparse image of the disk may have: it has 16 texts.
const SPARSE: u64 = (8 << 20) / 512;

#[test]
fn images_of_every_format_arrive_whole_in_files_and_devices() {
    story_large("import-table", async |s| {
        with_driver(s, async |s| {
            server(s).await?;
            for mode in ["Filesystem", "Block"] {
                formats(s, mode, |file| http(file, "")).await.with_context(|| mode.to_owned())?;
                remove(s).await?;
            }
            Ok(())
        })
        .await
    });
}

#[test]
fn images_of_every_format_arrive_whole_from_container_images() {
    story_large("import-formats", async |s| with_driver(s, container_images).await);
}

async fn container_images(s: &Story) -> Result<()> {
    server(s).await?;
    let address = own_cluster()?.context("no test cluster")?.registry();
    let mut images = BTreeMap::new();
    for file in FILES {
        images.insert(repository(file), layer(s, file).await?);
    }
    let _registry = Registry::start(&address, images).await?;
    for mode in ["Filesystem", "Block"] {
        let source =
            |file: &str| format!("source: {{registry: {{url: 'docker://{address}/{}:devel'}}}}", repository(file));
        formats(s, mode, source).await.with_context(|| mode.to_owned())?;
        remove(s).await?;
    }
    Ok(())
}

/// Returns the name of the image with a file.
fn repository(file: &str) -> String {
    format!("formats/{}", name(file))
}

/// Returns the name of the DataVolume of a file.
fn name(file: &str) -> String {
    file.replace('.', "-")
}

/// Imports all files at once and compares the claims with the disk.
async fn formats(s: &Story, mode: &str, source: impl Fn(&str) -> String) -> Result<()> {
    let manifest: String = FILES
        .iter()
        .map(|file| data_volume(&name(file), &format!("{}, storage: {}", source(file), storage("csi", mode, CLAIM))))
        .collect();
    s.apply(manifest.trim_end_matches("---\n")).await?;
    let names: Vec<String> = FILES.iter().map(|file| name(file)).collect();
    for name in &names {
        wait_phase(s, name, "Succeeded").await?;
    }
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    for (file, content) in FILES.iter().zip(contents(s, &names).await?) {
        ensure!(content.sum == SHA256 && content.further == 0, "{file}: {content:?}");
        ensure!(content.blocks < SPARSE, "{file} is not sparse: {content:?}");
    }
    Ok(())
}

#[test]
fn container_disks_arrive_whole_and_preallocated_images_have_all_blocks() {
    story_large("import-registry", async |s| with_driver(s, registry).await);
}

async fn registry(s: &Story) -> Result<()> {
    server(s).await?;
    for (name, mode) in [("file", "Filesystem"), ("device", "Block")] {
        s.apply(&data_volume(name, &format!("source: {{{TINY}}}, storage: {}", storage("csi", mode, 96)))).await?;
    }
    let full =
        format!("{}, preallocation: true, storage: {}", http("disk.qcow2", ""), storage("csi", "Filesystem", 16));
    s.apply(&data_volume("full", &full)).await?;
    for name in ["file", "device", "full"] {
        wait_phase(s, name, "Succeeded").await?;
    }
    let expected = converted(s).await?;
    let found = contents(s, &["file", "device", "full"]).await?;
    for (name, content) in ["file", "device"].iter().zip(&found) {
        ensure!(content.sum == expected, "{name}: {content:?}, expected {expected}");
        // The rest of the disk.
        ensure!(content.further > 0, "{name}: {content:?}");
    }
    let full = found.last().context("nothing read")?;
    ensure!(full.sum == SHA256 && full.blocks >= SIZE / 512, "the image is not preallocated: {full:?}");
    Ok(())
}

/// Returns the SHA-256 of the first [`SIZE`] bytes of the tiny container disk, as `qemu-img` converts it.
async fn converted(s: &Story) -> Result<String> {
    let restricted = json!({"allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]}});
    let container = |name: &str, image: &str, command: &[&str]| {
        json!({
            "name": name, "image": format!("ferrovirt.io/{image}:devel"), "imagePullPolicy": "IfNotPresent",
            "command": command, "securityContext": restricted,
            "volumeMounts": [{"name": "tiny", "mountPath": "/tiny"}, {"name": "raw", "mountPath": "/raw"}],
        })
    };
    let convert = ["qemu-img", "convert", "-O", "raw", "/tiny/disk/disk.qcow2", "/raw/disk.raw"];
    let sum = format!("head -c {SIZE} /raw/disk.raw | sha256sum | cut -c 1-64");
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "convert"},
        "spec": {
            "restartPolicy": "Never", "automountServiceAccountToken": false,
            "securityContext": {"runAsNonRoot": true, "runAsUser": 107, "fsGroup": 107,
                "seccompProfile": {"type": "RuntimeDefault"}},
            "initContainers": [container("convert", "virt-launcher", &convert)],
            "containers": [container("sum", "toolbox", &["sh", "-ec", &sum])],
            "volumes": [{"name": "raw", "emptyDir": {}},
                {"name": "tiny", "image": {"reference": "ferrovirt.io/guests/tiny:devel", "pullPolicy": "IfNotPresent"}}],
        },
    });
    s.apply(&pod.to_string()).await?;
    s.wait("Pod", "convert", "succeed", MINUTES, |pod| pod["status"]["phase"] == "Succeeded").await?;
    Ok(s.log("convert", "sum").await?.trim().to_owned())
}

#[test]
fn servers_are_read_with_credentials_headers_and_after_a_cut() {
    story_large("import-http", async |s| with_driver(s, servers).await);
}

async fn servers(s: &Story) -> Result<()> {
    server(s).await?;
    // The credentials are user:word.
    s.apply(
        "
apiVersion: v1
kind: Secret
metadata: {name: credentials}
stringData: {accessKeyId: user, secretKey: word}
---
apiVersion: v1
kind: Secret
metadata: {name: header}
stringData: {token: 'X-Token: secret'}
",
    )
    .await?;
    let rows = [
        ("credentials", "disk.raw?basic=dXNlcjp3b3Jk", ", secretRef: credentials".to_owned()),
        ("header", "disk.qcow2?header=X-Story", ", extraHeaders: ['X-Story: yes']".to_owned()),
        ("secret-header", "disk.raw.gz?header=X-Token", ", secretExtraHeaders: [header]".to_owned()),
        ("sum", "disk.raw", format!(", checksum: 'sha256:{SHA256}'")),
        ("cut", "disk.raw?cut=50", format!(", checksum: 'sha256:{SHA256}'")),
        ("cut-qcow2", "zstd.qcow2?cut=50", String::new()),
    ];
    for (name, file, more) in &rows {
        let fields = format!("{}, storage: {}", http(file, more), storage("csi", "Filesystem", CLAIM));
        s.apply(&data_volume(name, &fields)).await?;
    }
    for (name, ..) in &rows {
        wait_phase(s, name, "Succeeded").await?;
    }
    let names: Vec<&str> = rows.iter().map(|(name, ..)| *name).collect();
    for (name, content) in names.iter().zip(contents(s, &names).await?) {
        ensure!(content.sum == SHA256 && content.further == 0, "{name}: {content:?}");
    }
    let cut = s.get("DataVolume", "cut").await?;
    ensure!(cut["status"]["restartCount"].as_u64().unwrap_or_default() == 0, "a cut restarted the import: {cut}");
    Ok(())
}
