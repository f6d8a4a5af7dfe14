//! A registry on the host, from which the nodes of the test cluster pull images of one file each.

use std::{collections::BTreeMap, sync::Arc};

use anyhow::{Context, Result};
use base64::{Engine, prelude::BASE64_STANDARD};
use ferrovirt_e2e_tests::Story;
use serde_json::json;
use sha2::{Digest, Sha256};
use tokio::{
    io::{self, AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    task::JoinHandle,
};

const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
const LAYER: &str = "application/vnd.oci.image.layer.v1.tar+gzip";
/// Tag of all images.
const TAG: &str = "devel";
/// Longest request.
const REQUEST: usize = 16 << 10;

/// The layer of an image.
pub(crate) struct Layer {
    /// A tar archive, compressed by gzip.
    archive: Vec<u8>,
    /// SHA-256 of the archive before its compression.
    uncompressed: String,
}

/// Packs a file of the pod `images` into the folder `/disk` of a layer.
pub(crate) async fn layer(s: &Story, file: &str) -> Result<Layer> {
    let script = format!(
        "cd /images && rm -rf layer && mkdir -p layer/disk && cp {file} layer/disk/ && chmod -R a+rX layer && \
         tar -C layer -cf layer.tar disk && sha256sum layer.tar | cut -c 1-64 && gzip -f layer.tar && base64 layer.tar.gz && \
         rm -r layer layer.tar.gz"
    );
    let output = s.exec("images", &["sh", "-ec", &script]).await?;
    let (uncompressed, archive) = output.split_once('\n').with_context(|| format!("no layer of {file}"))?;
    let archive: String = archive.split_whitespace().collect();
    Ok(Layer { archive: BASE64_STANDARD.decode(archive)?, uncompressed: uncompressed.to_owned() })
}

/// Content type and content by path.
type Files = BTreeMap<String, (&'static str, Vec<u8>)>;

/// A registry, until it is dropped.
pub(crate) struct Registry(JoinHandle<()>);

impl Registry {
    /// Serves images `NAME:devel` at an address.
    pub(crate) async fn start(address: &str, images: BTreeMap<String, Layer>) -> Result<Self> {
        let listener = TcpListener::bind(address).await.with_context(|| format!("listen on {address}"))?;
        let mut files = Files::new();
        for (name, layer) in images {
            add(&mut files, &name, layer);
        }
        let files = Arc::new(files);
        Ok(Self(tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let files = files.clone();
                tokio::spawn(async move { answer(stream, &files).await });
            }
        })))
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        self.0.abort();
    }
}

fn digest(bytes: &[u8]) -> String {
    let hex: String = Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect();
    format!("sha256:{hex}")
}

fn add(files: &mut Files, name: &str, layer: Layer) {
    let config = json!({"architecture": "amd64", "os": "linux", "config": {},
        "rootfs": {"type": "layers", "diff_ids": [format!("sha256:{}", layer.uncompressed)]}})
    .to_string()
    .into_bytes();
    let described = |kind: &str, bytes: &[u8]| json!({"mediaType": kind, "digest": digest(bytes), "size": bytes.len()});
    let manifest = json!({"schemaVersion": 2, "mediaType": MANIFEST, "config": described(CONFIG, &config),
        "layers": [described(LAYER, &layer.archive)]})
    .to_string()
    .into_bytes();
    for reference in [TAG.to_owned(), digest(&manifest)] {
        files.insert(format!("/v2/{name}/manifests/{reference}"), (MANIFEST, manifest.clone()));
    }
    for bytes in [config, layer.archive] {
        files.insert(format!("/v2/{name}/blobs/{}", digest(&bytes)), ("application/octet-stream", bytes));
    }
}

async fn answer(mut stream: TcpStream, files: &Files) -> io::Result<()> {
    let (mut request, mut part) = (Vec::new(), [0; 1024]);
    while !request.windows(4).any(|end| end == b"\r\n\r\n") {
        let count = stream.read(&mut part).await?;
        if count == 0 || request.len() > REQUEST {
            return Ok(());
        }
        request.extend_from_slice(&part[..count]);
    }
    let text = String::from_utf8_lossy(&request);
    let mut words = text.split_whitespace();
    let (method, target) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let path = target.split('?').next().unwrap_or_default();
    let head = match files.get(path) {
        Some((kind, bytes)) => format!(
            "HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {}\r\nDocker-Content-Digest: {}\r\n",
            bytes.len(),
            digest(bytes)
        ),
        None if path == "/v2/" => "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n".to_owned(),
        None => "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n".to_owned(),
    };
    stream.write_all(format!("{head}Connection: close\r\n\r\n").as_bytes()).await?;
    if let Some((_, bytes)) = files.get(path).filter(|_| method == "GET") {
        stream.write_all(bytes).await?;
    }
    stream.shutdown().await
}
