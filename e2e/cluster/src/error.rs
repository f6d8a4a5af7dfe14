//! Errors of this crate. Messages name the step, the command and the log file.

use std::path::PathBuf;

/// A failed step of the test cluster.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A program could not be started.
    #[error("{step}: cannot start `{command}`")]
    Start {
        /// The step.
        step: String,
        /// The command line.
        command: String,
        /// The cause.
        source: std::io::Error,
    },
    /// A program failed.
    #[error("{step}: `{command}` ended with {status}\n{output}")]
    Command {
        /// The step.
        step: String,
        /// The command line.
        command: String,
        /// Its exit status.
        status: String,
        /// The last lines of its output.
        output: String,
    },
    /// A condition did not hold in time.
    #[error("{step}: not done after {seconds} s{detail}")]
    Timeout {
        /// The step.
        step: String,
        /// The time limit.
        seconds: u64,
        /// Name and last lines of a log file, or the last answer.
        detail: String,
    },
    /// A file operation failed.
    #[error("cannot {action} {path}")]
    File {
        /// The operation, starting with a verb.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// A system call failed.
    #[error("cannot {action}")]
    System {
        /// The operation.
        action: String,
        /// The cause.
        source: rustix::io::Errno,
    },
    /// A certificate could not be created.
    #[error("cannot create the certificate of {subject}")]
    Certificate {
        /// Holder of the certificate.
        subject: String,
        /// The cause.
        source: rcgen::Error,
    },
    /// A stored or received document could not be parsed.
    #[error("cannot parse {what}")]
    Document {
        /// Name of the document.
        what: String,
        /// The cause.
        source: serde_json::Error,
    },
    /// The request cannot be carried out; the message names a remedy.
    #[error("{0}")]
    Refused(String),
}

/// The result of a step.
pub(crate) type Result<T> = std::result::Result<T, Error>;

/// Adds file and operation to an `io::Error`.
pub(crate) trait FileContext<T> {
    /// Converts an `io::Error` into [`Error::File`].
    fn at(self, action: &'static str, path: impl Into<PathBuf>) -> Result<T>;
}

impl<T> FileContext<T> for std::io::Result<T> {
    fn at(self, action: &'static str, path: impl Into<PathBuf>) -> Result<T> {
        self.map_err(|source| Error::File { action, path: path.into(), source })
    }
}
