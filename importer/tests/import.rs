//! Imports from an HTTP server into folders that stand for the mounts of an import pod.

#![allow(clippy::unwrap_used, reason = "tests")]

mod server;

use std::{
    fs,
    io::Write,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    process::Command,
    sync::Arc,
    time::Duration,
};

use importer::{
    ImportError, Meter, Places, import,
    task::{ContentType, HttpSource, Reason, Source, Target, Task},
};
use server::{Behaviour, Server};

const MIB: u64 = 1 << 20;

/// The mounts of a pod.
struct Pod(PathBuf);

impl Pod {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("importer-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        for folder in ["data", "image/disk", "source", "scratch", "certs", "secret"] {
            fs::create_dir_all(path.join(folder)).unwrap();
        }
        Self(path)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    fn places(&self) -> Places {
        Places {
            data: self.path("data"),
            device: self.path("device"),
            image: self.path("image"),
            source: self.path("source"),
            source_device: self.path("source-device"),
            scratch: self.path("scratch"),
            certs: self.path("certs"),
            secret: self.path("secret"),
            qemu_img: qemu_img().unwrap_or_default(),
            silence: Duration::from_millis(500),
            stall: Duration::from_secs(60),
        }
    }

    async fn import(&self, task: &Task) -> Result<u64, ImportError> {
        import(task.clone(), self.places(), Arc::new(Meter::default())).await
    }

    /// Returns the disk, after a look at the rest of the claim.
    fn disk(&self) -> Vec<u8> {
        let names: Vec<_> = fs::read_dir(self.path("data")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(names, ["disk.img"]);
        fs::read(self.path("data/disk.img")).unwrap()
    }

    fn is_clean(&self) -> bool {
        fs::read_dir(self.path("data")).unwrap().count() == 0
    }
}

impl Drop for Pod {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Returns qemu-img, if this host has it.
fn qemu_img() -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|folder| folder.join("qemu-img")).find(|file| file.is_file())
}

fn task(source: Source) -> Task {
    Task {
        source,
        content_type: ContentType::Kubevirt,
        target: Target::Filesystem,
        size: None,
        preallocation: false,
        overhead_free: None,
    }
}

fn http(url: String) -> HttpSource {
    HttpSource { url, ..HttpSource::default() }
}

/// A disk with data, a hole, and a length that is no multiple of a MiB.
fn disk_image() -> Vec<u8> {
    let mut state = 1_u32;
    let mut noise = |length: usize| -> Vec<u8> {
        (0..length)
            .map(|_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                state.to_be_bytes()[0]
            })
            .collect()
    };
    let (start, end) = (noise(3 << 19), noise(100 << 10));
    [start, vec![0; 5 << 20], end].concat()
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(vec![], flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn sha256(bytes: &[u8]) -> String {
    use sha2::Digest;
    let digest: String = sha2::Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect();
    format!("sha256:{digest}")
}

#[tokio::test(flavor = "multi_thread")]
async fn raw_images_stay_sparse_and_grow_to_the_size_of_the_claim() {
    let image = disk_image();
    let server = Server::start(image.clone(), Behaviour::default()).await;
    let pod = Pod::new("raw");
    let mut task = task(Source::Http(HttpSource { checksum: Some(sha256(&image)), ..http(server.url("/disk")) }));
    assert_eq!(pod.import(&task).await.unwrap(), image.len() as u64);
    assert!(pod.disk() == image);
    let blocks = |pod: &Pod| fs::metadata(pod.path("data/disk.img")).unwrap().blocks() * 512;
    assert!(blocks(&pod) < 3 * MIB, "{}", blocks(&pod));
    task.size = Some(16 * MIB);
    assert_eq!(pod.import(&task).await.unwrap(), 16 * MIB);
    assert!(pod.disk().starts_with(&image) && pod.disk().len() as u64 == 16 * MIB);
    task.preallocation = true;
    pod.import(&task).await.unwrap();
    assert!(blocks(&pod) >= 16 * MIB);
    task.overhead_free = Some(4 * MIB);
    let error = pod.import(&task).await.unwrap_err();
    assert_eq!(error.report().reason, Reason::TooSmall);
    let text = format!("the disk has {} bytes, the claim has space for {}", image.len(), 4 * MIB);
    assert_eq!(error.to_string(), format!("DataVolume too small to contain image: {text}"));
    // The disk of the import before would take its space.
    assert!(pod.is_clean());
}

#[tokio::test(flavor = "multi_thread")]
async fn compressed_images_are_unpacked_on_the_way() {
    let image = disk_image();
    for (name, bytes) in [("gzip", gzip(&image)), ("zstd", zstd::encode_all(&image[..], 1).unwrap())] {
        let server = Server::start(bytes.clone(), Behaviour { chunked: true, ..Behaviour::default() }).await;
        let pod = Pod::new(name);
        let source = HttpSource { checksum: Some(sha256(&bytes)), ..http(server.url("/no-name-tells")) };
        pod.import(&task(Source::Http(source))).await.unwrap();
        assert!(pod.disk() == image, "{name}");
        fs::write(pod.path("image/disk/image"), &bytes).unwrap();
        pod.import(&task(Source::Registry {})).await.unwrap();
        assert!(pod.disk() == image, "{name}");
        let small = Task { overhead_free: Some(2 * MIB), ..task(Source::Registry {}) };
        assert_eq!(pod.import(&small).await.unwrap_err().report().reason, Reason::TooSmall, "{name}");
        fs::write(pod.path("image/disk/image"), gzip(&bytes)).unwrap();
        assert_eq!(pod.import(&task(Source::Registry {})).await.unwrap_err().report().reason, Reason::RefusedImage);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_checksum_is_fatal_and_leaves_nothing() {
    let image = disk_image();
    let server = Server::start(image.clone(), Behaviour::default()).await;
    let pod = Pod::new("checksum");
    let source = HttpSource { checksum: Some(sha256(b"other")), ..http(server.url("/disk")) };
    let report = pod.import(&task(Source::Http(source))).await.unwrap_err().report();
    assert!(report.reason == Reason::ChecksumError && report.fatal, "{report:?}");
    assert!(report.message.contains(&sha256(&image)[7..]) && report.message.contains(&sha256(b"other")[7..]));
    assert!(pod.is_clean());
}

#[tokio::test(flavor = "multi_thread")]
async fn downloads_are_resumed_after_cuts_and_silence() {
    let image = disk_image();
    for (name, behaviour) in [
        ("cut", Behaviour { cut_after: Some(1_000_000), ..Behaviour::default() }),
        ("silent", Behaviour { cut_after: Some(2_000_000), silent: true, ..Behaviour::default() }),
        ("no-ranges", Behaviour { cut_after: Some(5_000_000), ranges: false, failures: 2, ..Behaviour::default() }),
        ("unavailable", Behaviour { unavailable: 2, ..Behaviour::default() }),
    ] {
        let server = Server::start(image.clone(), behaviour).await;
        let pod = Pod::new(name);
        let source = HttpSource { checksum: Some(sha256(&image)), ..http(server.url("/disk")) };
        pod.import(&task(Source::Http(source))).await.unwrap();
        assert!(pod.disk() == image, "{name}");
        assert!(server.requests() > 1, "{name}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_changes_or_has_no_validator_is_not_resumed() {
    for (name, behaviour, message) in [
        ("changed", Behaviour { changes: true, ..Behaviour::default() }, "the file has changed"),
        ("bare", Behaviour { validator: false, ..Behaviour::default() }, "was cut after"),
    ] {
        let behaviour = Behaviour { cut_after: Some(1_000_000), ..behaviour };
        let server = Server::start(disk_image(), behaviour).await;
        let pod = Pod::new(name);
        let error = pod.import(&task(Source::Http(http(server.url("/disk"))))).await.unwrap_err();
        assert_eq!(error.report().reason, Reason::SourceError, "{error}");
        assert!(error.to_string().contains(message), "{name}: {error}");
        assert!(pod.is_clean());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn failures_of_the_server_are_named() {
    let server = Server::start(disk_image(), Behaviour::default()).await;
    let pod = Pod::new("failures");
    for (path, message) in [
        ("/missing", "returned 404 Not Found"),
        ("/loop", "more than 10 redirects"),
        ("/to-ftp", "neither HTTP nor HTTPS"),
        ("/page", "a web page as a disk is not supported"),
        ("/empty", "is empty"),
    ] {
        let error = pod.import(&task(Source::Http(http(server.url(path))))).await.unwrap_err();
        assert!(error.to_string().contains(message), "{path}: {error}");
        assert!(pod.is_clean(), "{path}");
    }
    // The address of a redirect is shown without what it may be signed with.
    for (path, message) in [
        ("/to-signed", "/signed returned 403 Forbidden"),
        ("/to-signed-ftp", "redirects to ftp://a/b, which is neither HTTP nor HTTPS"),
    ] {
        let error = pod.import(&task(Source::Http(http(server.url(path))))).await.unwrap_err().to_string();
        assert!(error.contains(message) && !error.contains("s3cr3t"), "{path}: {error}");
    }
    for url in ["ftp://a/b", "nothing"] {
        let error = pod.import(&task(Source::Http(http(url.to_owned())))).await.unwrap_err();
        assert!(error.to_string().contains("is invalid"), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn credentials_reach_the_server_of_the_url_only() {
    let image = disk_image();
    let other = Server::start(image.clone(), Behaviour::default()).await;
    let server =
        Server::start(image.clone(), Behaviour { elsewhere: Some(other.url("/disk")), ..Behaviour::default() }).await;
    let pod = Pod::new("credentials");
    fs::write(pod.path("secret/accessKeyId"), "user\n").unwrap();
    fs::write(pod.path("secret/secretKey"), "password").unwrap();
    fs::write(pod.path("secret/header"), "X-Secret: s3").unwrap();
    let source = HttpSource {
        secret: true,
        headers: vec!["X-Plain: 1".to_owned()],
        secret_header_files: vec![pod.path("secret/header").display().to_string()],
        ..http(server.url("/private"))
    };
    pod.import(&task(Source::Http(source.clone()))).await.unwrap();
    assert!(pod.disk() == image);
    pod.import(&task(Source::Http(HttpSource { url: server.url("/elsewhere"), ..source }))).await.unwrap();
    let head = other.last_request();
    assert!(!["authorization", "x-plain", "x-secret"].iter().any(|name| head.contains(name)), "{head}");
    let report = pod.import(&task(Source::Http(http(server.url("/private"))))).await.unwrap_err().report();
    assert!(report.message.contains("401") && report.message.contains("secretRef"), "{report:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn servers_need_a_certificate_of_a_known_authority() {
    let image = disk_image();
    let (server, certificate) = Server::start_tls(image.clone()).await;
    let pod = Pod::new("tls");
    let source = http(server.url("/disk"));
    let error = pod.import(&task(Source::Http(source.clone()))).await.unwrap_err();
    assert!(error.to_string().contains("certificate"), "{error}");
    let trusting = HttpSource { certs: true, ..source.clone() };
    let error = pod.import(&task(Source::Http(trusting.clone()))).await.unwrap_err();
    assert!(error.to_string().contains("no certificate in PEM format"), "{error}");
    fs::write(pod.path("certs/ca.pem"), certificate).unwrap();
    pod.import(&task(Source::Http(trusting))).await.unwrap();
    pod.import(&task(Source::Http(HttpSource { insecure_skip_verify: true, ..source }))).await.unwrap();
    assert!(pod.disk() == image);
}

#[tokio::test(flavor = "multi_thread")]
async fn claims_images_and_blank_disks_fill_files_and_devices() {
    let image = disk_image();
    let pod = Pod::new("local");
    let error = pod.import(&task(Source::Registry {})).await.unwrap_err();
    assert!(error.to_string().contains("exactly one disk"), "{error}");
    fs::write(pod.path("image/disk/any"), &image).unwrap();
    fs::write(pod.path("source/disk.img"), &image).unwrap();
    for source in [Source::Registry {}, Source::Claim {}] {
        pod.import(&task(source.clone())).await.unwrap();
        assert!(pod.disk() == image);
        // Old content, and more space than the disk needs.
        fs::write(pod.path("device"), vec![7; 10 << 20]).unwrap();
        let block = Task { target: Target::Block, ..task(source) };
        pod.import(&block).await.unwrap();
        assert!(fs::read(pod.path("device")).unwrap() == [image.clone(), vec![0; (10 << 20) - image.len()]].concat());
        fs::write(pod.path("device"), vec![7; 2 << 20]).unwrap();
        assert_eq!(pod.import(&block).await.unwrap_err().report().reason, Reason::TooSmall);
    }
    let blank = Task { size: Some(3 * MIB), ..task(Source::Blank {}) };
    pod.import(&blank).await.unwrap();
    assert!(pod.disk() == vec![0; 3 << 20]);
    pod.import(&Task { target: Target::Block, ..blank }).await.unwrap();
    assert!(fs::read(pod.path("device")).unwrap() == vec![0; 2 << 20]);
}

#[tokio::test(flavor = "multi_thread")]
async fn content_that_exists_is_left_alone() {
    let pod = Pod::new("existing");
    for (file, target) in [("data/disk.img", Target::Filesystem), ("device", Target::Block)] {
        fs::write(pod.path(file), "content").unwrap();
        pod.import(&Task { target, ..task(Source::Existing {}) }).await.unwrap();
        assert_eq!(fs::read_to_string(pod.path(file)).unwrap(), "content");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn archives_are_unpacked_from_http_only() {
    let mut builder = tar::Builder::new(vec![]);
    let mut header = tar::Header::new_gnu();
    header.set_size(5);
    header.set_mode(0o644);
    builder.append_data(&mut header, "folder/file", &b"hello"[..]).unwrap();
    let bytes = gzip(&builder.into_inner().unwrap());
    let server = Server::start(bytes.clone(), Behaviour::default()).await;
    let pod = Pod::new("archive");
    let source = HttpSource { checksum: Some(sha256(&bytes)), ..http(server.url("/files")) };
    let wrong = HttpSource { checksum: Some(sha256(b"")), ..source.clone() };
    let archive = |source| Task { content_type: ContentType::Archive, ..task(source) };
    assert!(pod.import(&archive(Source::Http(wrong))).await.is_err() && pod.is_clean());
    pod.import(&archive(Source::Http(source.clone()))).await.unwrap();
    assert_eq!(fs::read_to_string(pod.path("data/folder/file")).unwrap(), "hello");
    assert!(pod.import(&archive(Source::Blank {})).await.is_err());
    assert!(pod.import(&Task { target: Target::Block, ..archive(Source::Http(source)) }).await.is_err());
}

fn run(program: &Path, arguments: &[&str]) {
    let output = Command::new(program).args(arguments).output().unwrap();
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
}

#[tokio::test(flavor = "multi_thread")]
async fn images_of_all_formats_are_converted() {
    let Some(qemu_img) = qemu_img() else { return skips::skip("qemu-img") };
    let pod = Pod::new("formats");
    let image = [disk_image(), vec![0; 512 - disk_image().len() % 512]].concat();
    let (raw, converted) = (pod.path("raw"), pod.path("converted"));
    fs::write(&raw, &image).unwrap();
    for (format, options) in [
        ("qcow2", vec![]),
        ("qcow2", vec!["-c"]),
        ("qcow2", vec!["-c", "-o", "compression_type=zstd"]),
        ("vmdk", vec![]),
        ("vmdk", vec!["-o", "subformat=streamOptimized"]),
        ("vhdx", vec![]),
        ("vdi", vec![]),
    ] {
        let mut arguments = vec!["convert", "-O", format];
        arguments.extend(&options);
        arguments.extend([raw.to_str().unwrap(), converted.to_str().unwrap()]);
        run(&qemu_img, &arguments);
        let bytes = fs::read(&converted).unwrap();
        let server =
            Server::start(bytes.clone(), Behaviour { cut_after: Some(2_000_000), ..Behaviour::default() }).await;
        let source = HttpSource { checksum: Some(sha256(&bytes)), ..http(server.url("/disk")) };
        pod.import(&task(Source::Http(source.clone()))).await.unwrap();
        assert!(starts_with(&pod.disk(), &image), "{format} {options:?}");
        fs::write(pod.path("image/disk/image"), &bytes).unwrap();
        fs::write(pod.path("device"), vec![7; 16 << 20]).unwrap();
        pod.import(&Task { target: Target::Block, ..task(Source::Registry {}) }).await.unwrap();
        assert!(starts_with(&fs::read(pod.path("device")).unwrap(), &image), "{format} {options:?}");
        // Compressed in the image of a registry.
        fs::write(pod.path("image/disk/image"), gzip(&bytes)).unwrap();
        pod.import(&task(Source::Registry {})).await.unwrap();
        assert!(starts_with(&pod.disk(), &image), "{format} {options:?}");
        if (format, options.len()) != ("qcow2", 0) {
            continue;
        }
        let wrong = HttpSource { checksum: Some(sha256(b"")), ..source.clone() };
        fs::write(pod.path("device"), vec![7; 16 << 20]).unwrap();
        for target in [Target::Filesystem, Target::Block] {
            let wrong = Task { target, ..task(Source::Http(wrong.clone())) };
            assert_eq!(pod.import(&wrong).await.unwrap_err().report().reason, Reason::ChecksumError);
        }
        // Without its first part, the device holds no disk.
        assert!(fs::read(pod.path("device")).unwrap()[..1 << 20].iter().all(|byte| *byte == 0));
        let small = Task { overhead_free: Some(4 * MIB), ..task(Source::Http(source)) };
        assert_eq!(pod.import(&small).await.unwrap_err().report().reason, Reason::TooSmall);
    }
}

/// The formats round sizes up.
fn starts_with(disk: &[u8], image: &[u8]) -> bool {
    disk.starts_with(image) && disk[image.len()..].iter().all(|byte| *byte == 0)
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_with_a_backing_file_is_refused() {
    let Some(qemu_img) = qemu_img() else { return skips::skip("qemu-img") };
    let pod = Pod::new("backing");
    let (base, overlay) = (pod.path("base"), pod.path("image/disk/overlay"));
    fs::write(&base, disk_image()).unwrap();
    let arguments = ["create", "-f", "qcow2", "-F", "raw", "-b", base.to_str().unwrap(), overlay.to_str().unwrap()];
    run(&qemu_img, &arguments);
    let report = pod.import(&task(Source::Registry {})).await.unwrap_err().report();
    assert!(report.reason == Reason::RefusedImage && report.fatal, "{report:?}");
    assert!(report.message.contains("refers to another file") && pod.is_clean(), "{report:?}");
}
