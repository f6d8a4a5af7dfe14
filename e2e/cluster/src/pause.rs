//! The sandbox image: one static program of 156 bytes that sleeps, as an OCI archive.
//!
//! The process of a sandbox holds the pod's namespaces. With a shared process namespace it is also process 1. It ignores
//! SIGCHLD so that the kernel reaps orphans.

use std::path::Path;

use serde_json::json;
use sha2::{Digest, Sha256};

use crate::{
    archive::Archive,
    error::{FileContext, Result},
};

/// The name of the image.
pub(crate) const IMAGE: &str = "ferrovirt.io/pause:devel";

/// x86-64 machine code and its data.
#[rustfmt::skip]
const CODE: [u8; 68] = [
    0xb8, 0x0d, 0x00, 0x00, 0x00,             //      mov  eax, 13        rt_sigaction
    0xbf, 0x11, 0x00, 0x00, 0x00,             //      mov  edi, 17        SIGCHLD
    0x48, 0x8d, 0x35, 0x13, 0x00, 0x00, 0x00, //      lea  rsi, [action]
    0x31, 0xd2,                               //      xor  edx, edx
    0x41, 0xba, 0x08, 0x00, 0x00, 0x00,       //      mov  r10d, 8        size of a signal set
    0x0f, 0x05,                               //      syscall
    0xb8, 0x22, 0x00, 0x00, 0x00,             // 1:   mov  eax, 34        pause
    0x0f, 0x05,                               //      syscall
    0xeb, 0xf7,                               //      jmp  1b
    // action: handler SIG_IGN, no flags, no restorer, empty mask
    1, 0, 0, 0, 0, 0, 0, 0,  0, 0, 0, 0, 0, 0, 0, 0,  0, 0, 0, 0, 0, 0, 0, 0,  0, 0, 0, 0, 0, 0, 0, 0,
];

/// Load address of the program.
const LOAD: u64 = 0x40_0000;
const ELF_HEADER: u16 = 64;
const PROGRAM_HEADER: u16 = 56;

/// Returns the program as an ELF file with a single segment.
#[must_use]
pub(crate) fn program() -> Vec<u8> {
    let code = u64::from(ELF_HEADER + PROGRAM_HEADER);
    let size = code + CODE.len() as u64;
    let mut elf = Vec::new();
    // Identification: magic, 64 bit, little endian, version 1, System V.
    elf.extend_from_slice(&[0x7f, b'E', b'L', b'F', 2, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    elf.extend_from_slice(&2_u16.to_le_bytes()); // executable
    elf.extend_from_slice(&62_u16.to_le_bytes()); // x86-64
    elf.extend_from_slice(&1_u32.to_le_bytes()); // version
    elf.extend_from_slice(&(LOAD + code).to_le_bytes()); // entry point
    elf.extend_from_slice(&u64::from(ELF_HEADER).to_le_bytes()); // program headers
    elf.extend_from_slice(&0_u64.to_le_bytes()); // no sections
    elf.extend_from_slice(&0_u32.to_le_bytes()); // flags
    for value in [ELF_HEADER, PROGRAM_HEADER, 1, 0, 0, 0] {
        elf.extend_from_slice(&value.to_le_bytes());
    }
    elf.extend_from_slice(&1_u32.to_le_bytes()); // to be loaded
    elf.extend_from_slice(&5_u32.to_le_bytes()); // readable, executable
    for value in [0, LOAD, LOAD, size, size, 0x1000] {
        elf.extend_from_slice(&value.to_le_bytes());
    }
    elf.extend_from_slice(&CODE);
    elf
}

/// Returns the image as an OCI archive that containerd can import.
#[must_use]
pub(crate) fn oci_archive() -> Vec<u8> {
    let mut layer = Archive::default();
    layer.file("pause", 0o755, &program());
    let layer = layer.finish();
    let config = json!({
        "architecture": "amd64",
        "os": "linux",
        "config": {"Entrypoint": ["/pause"], "User": "65535:65535"},
        "rootfs": {"type": "layers", "diff_ids": [digest(&layer)]},
    })
    .to_string();
    let descriptor = |kind: &str, content: &[u8]| {
        json!({
            "mediaType": format!("application/vnd.oci.image.{kind}"),
            "digest": digest(content),
            "size": content.len(),
        })
    };
    let manifest = json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": descriptor("config.v1+json", config.as_bytes()),
        "layers": [descriptor("layer.v1.tar", &layer)],
    })
    .to_string();
    let mut entry = descriptor("manifest.v1+json", manifest.as_bytes());
    entry["annotations"] = json!({"io.containerd.image.name": IMAGE, "org.opencontainers.image.ref.name": "devel"});
    let index = json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.index.v1+json",
        "manifests": [entry],
    })
    .to_string();
    let mut archive = Archive::default();
    archive.file("oci-layout", 0o644, br#"{"imageLayoutVersion":"1.0.0"}"#);
    for blob in [layer.as_slice(), config.as_bytes(), manifest.as_bytes()] {
        archive.file(&digest(blob).replacen(':', "/", 1).replacen("sha256", "blobs/sha256", 1), 0o644, blob);
    }
    archive.file("index.json", 0o644, index.as_bytes());
    archive.finish()
}

/// Writes the archive to a file.
///
/// # Errors
/// Fails if the file cannot be written.
pub(crate) fn write(path: &Path) -> Result<()> {
    std::fs::write(path, oci_archive()).at("write", path)
}

fn digest(content: &[u8]) -> String {
    format!("sha256:{}", crate::hex::hex(&Sha256::digest(content)))
}

#[cfg(test)]
mod tests {
    use std::{os::unix::fs::PermissionsExt, process::Command, time::Duration};

    use super::*;

    #[test]
    fn archive_names_the_image_and_holds_every_blob_it_refers_to() {
        let archive = oci_archive();
        let text = String::from_utf8_lossy(&archive);
        assert!(text.contains(IMAGE));
        assert!(text.contains(&digest(&{
            let mut layer = Archive::default();
            layer.file("pause", 0o755, &program());
            layer.finish()
        })));
        assert_eq!(oci_archive(), archive, "same input, same bytes");
    }

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn program_sleeps_until_it_is_killed() {
        let path = std::env::temp_dir().join(format!("ferrovirt-pause-{}", std::process::id()));
        std::fs::write(&path, program()).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        let mut child = Command::new(&path).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(200));
        let ended = child.try_wait().unwrap();
        let status = std::fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        std::fs::remove_file(path).unwrap();
        assert!(ended.is_none(), "it crashed or ended");
        let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap();
        let ignored = u64::from_str_radix(ignored.trim(), 16).unwrap();
        assert_eq!(ignored & (1 << 16), 1 << 16, "SIGCHLD is not ignored: {status}");
    }
}
