//! Contract between virt-controller and the import pod.
//!
//! The task is a JSON object in one environment variable. The result is the termination message of the container. While the
//! program runs, virt-controller reads its progress by HTTP.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Environment variable with the [`Task`].
pub const TASK_VARIABLE: &str = "IMPORT_TASK";
/// Mount point of the claim in file-system mode.
pub const DATA_DIR: &str = "/data";
/// Disk image in a claim in file-system mode.
pub const DISK_FILE: &str = "disk.img";
/// Device of the claim in block mode.
pub const BLOCK_DEVICE: &str = "/dev/cdi-block-volume";
/// Mount point of the image of a registry source.
pub const IMAGE_DIR: &str = "/image";
/// Mount point of the claim that is copied, in file-system mode, read-only.
pub const SOURCE_DIR: &str = "/source";
/// Device of the claim that is copied, in block mode.
pub const SOURCE_DEVICE: &str = "/dev/cdi-source-volume";
/// Mount point of an `emptyDir` for images that are converted from a file, and for compressed ones.
pub const SCRATCH_DIR: &str = "/scratch";
/// Mount point of the ConfigMap with certificates of authorities.
pub const CERTS_DIR: &str = "/certs";
/// Mount point of the Secret with the keys [`ACCESS_KEY`] and [`SECRET_KEY`].
pub const SECRET_DIR: &str = "/secret";
/// Key of the Secret: name of the user.
pub const ACCESS_KEY: &str = "accessKeyId";
/// Key of the Secret: password.
pub const SECRET_KEY: &str = "secretKey";
/// Port of the progress server.
pub const PROGRESS_PORT: u16 = 8085;
/// Path of the progress server.
pub const PROGRESS_PATH: &str = "/progress";
/// Limit of an answer with [`Progress`], in bytes.
pub const PROGRESS_LIMIT: usize = 1024;
/// File for the [`Report`].
pub const TERMINATION_LOG: &str = "/dev/termination-log";
/// Limit of a termination message, in bytes. kubelet cuts longer ones.
pub const REPORT_LIMIT: usize = 4096;

/// Returns the limit of the `emptyDir` at [`SCRATCH_DIR`] for a claim of which this much is requested, in bytes: an eighth more, and
/// some MiB, for the tables of an image. kubelet evicts a pod that exceeds it.
#[must_use]
pub const fn scratch_limit(request: u64) -> u64 {
    request.saturating_add(request / 8).saturating_add(256 << 20)
}

/// Import of one disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Task {
    /// Origin of the disk.
    pub source: Source,
    /// Content of the claim.
    #[serde(default)]
    pub content_type: ContentType,
    /// Mode of the claim.
    pub target: Target,
    /// Least size of the disk in bytes: the request of the claim.
    #[serde(default)]
    pub size: Option<u64>,
    /// Allocates all blocks of the disk.
    #[serde(default)]
    pub preallocation: bool,
    /// Bytes of the claim that the disk, or the files of an archive, may take, if fewer than the file system has free.
    #[serde(default)]
    pub overhead_free: Option<u64>,
}

/// Origin of a disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Source {
    /// The only file in folder `disk` of an image that is mounted at [`IMAGE_DIR`].
    Registry {},
    /// A file that is served by HTTP or HTTPS.
    Http(HttpSource),
    /// Another claim, at [`SOURCE_DIR`] or [`SOURCE_DEVICE`].
    Claim {},
    /// An empty disk.
    Blank {},
    /// None: the claim has its content from its driver, and nothing is written. The pod is the first consumer of the claim.
    Existing {},
}

/// A file that is served by HTTP or HTTPS.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct HttpSource {
    /// URL.
    pub url: String,
    /// Trusts the authorities in the files of [`CERTS_DIR`] besides the public ones.
    #[serde(default)]
    pub certs: bool,
    /// Authenticates with user and password of [`SECRET_DIR`].
    #[serde(default)]
    pub secret: bool,
    /// Further headers, `Name: value`.
    #[serde(default)]
    pub headers: Vec<String>,
    /// Paths of files that contain one further header each, `Name: value`. A path of a folder means all files in it.
    #[serde(default)]
    pub secret_header_files: Vec<String>,
    /// Checksum of the file as it is served, `algorithm:hex`: md5, sha1, sha256 or sha512.
    #[serde(default)]
    pub checksum: Option<String>,
    /// Accepts every certificate of the server.
    #[serde(default)]
    pub insecure_skip_verify: bool,
}

/// Content of a claim.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum ContentType {
    /// A disk.
    #[default]
    Kubevirt,
    /// Files of a tar archive.
    Archive,
}

/// Mode of a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Target {
    /// Device [`BLOCK_DEVICE`].
    Block,
    /// File system at [`DATA_DIR`].
    Filesystem,
}

/// Progress of an import that runs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Progress {
    /// Share of the work that is done, 0 to 100. Absent while the amount of work is unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub percent: Option<f64>,
    /// Current step.
    pub phase: Phase,
}

/// Step of an import.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Phase {
    /// Reads the source.
    Download,
    /// Writes the disk from an image that is at hand.
    Convert,
    /// A step of a newer version.
    #[serde(other)]
    Unknown,
}

/// Result of an import: the termination message.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Report {
    /// Success or failure.
    pub result: Outcome,
    /// Class of the result.
    pub reason: Reason,
    /// Cause, for users.
    pub message: String,
    /// Another attempt would fail in the same way.
    #[serde(default)]
    pub fatal: bool,
    /// Size of the disk in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub virtual_size: Option<u64>,
    /// Labels for the claim.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
}

/// Success or failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Outcome {
    /// The claim is filled.
    Complete,
    /// The claim is not filled.
    Failed,
}

/// Class of a result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reason {
    /// The claim is filled.
    Completed,
    /// The file has another checksum. Fatal.
    ChecksumError,
    /// The claim is smaller than the disk.
    TooSmall,
    /// The image refers to another file, or exceeds a limit. Fatal.
    RefusedImage,
    /// The source cannot be read.
    SourceError,
    /// Another failure, or a class of a newer version.
    #[serde(other)]
    Error,
}

impl Report {
    /// Returns the JSON of this report, with a message that is cut so that all fits into [`REPORT_LIMIT`].
    pub fn to_termination_message(&self) -> String {
        let mut report = self.clone();
        loop {
            let text = serde_json::to_string(&report).unwrap_or_default();
            if text.len() <= REPORT_LIMIT || report.message.is_empty() {
                return text;
            }
            // One byte takes up to six in JSON.
            let keep = report.message.len().saturating_sub((text.len() - REPORT_LIMIT).div_ceil(6));
            report.message.truncate(report.message.floor_char_boundary(keep));
        }
    }

    /// Reads a termination message. Anything else, such as the output of a program that was killed, is `None`.
    pub fn parse(message: &str) -> Option<Self> {
        serde_json::from_str(message).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tasks_are_read_as_the_contract_has_them() {
        let task: Task = serde_json::from_str(r#"{"source": {"registry": {}}, "target": "block"}"#).unwrap();
        assert_eq!(task.source, Source::Registry {});
        assert_eq!((task.target, task.content_type, task.size), (Target::Block, ContentType::Kubevirt, None));
        let text = r#"{"source": {"http": {"url": "https://a/b", "insecureSkipVerify": true, "checksum": "md5:00"}},
            "contentType": "archive", "target": "filesystem", "size": 5, "preallocation": true, "overheadFree": null}"#;
        let task: Task = serde_json::from_str(text).unwrap();
        let Source::Http(http) = &task.source else { panic!("{task:?}") };
        assert!(http.insecure_skip_verify && !http.certs && http.checksum.as_deref() == Some("md5:00"));
        assert_eq!((task.size, task.content_type), (Some(5), ContentType::Archive));
        assert_eq!(serde_json::from_str::<Task>(&serde_json::to_string(&task).unwrap()).unwrap(), task);
        assert!(serde_json::from_str::<Task>(r#"{"source": {"ftp": {}}, "target": "block"}"#).is_err());
    }

    #[test]
    fn reports_survive_unknown_values_and_are_cut_to_the_limit_of_kubelet() {
        let report = Report {
            result: Outcome::Failed,
            reason: Reason::SourceError,
            message: "ä\"".repeat(REPORT_LIMIT),
            fatal: false,
            virtual_size: None,
            labels: BTreeMap::new(),
        };
        let text = report.to_termination_message();
        assert!(text.len() <= REPORT_LIMIT && text.len() > REPORT_LIMIT - 8, "{}", text.len());
        assert_eq!(Report::parse(&text).unwrap().reason, Reason::SourceError);
        let newer = r#"{"result": "failed", "reason": "Moon", "message": "", "new": 1}"#;
        assert_eq!(Report::parse(newer).unwrap().reason, Reason::Error);
        assert_eq!(Report::parse("Killed"), None);
    }
}
