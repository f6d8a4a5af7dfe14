//! What can go wrong, said so that the reader knows which step, which command and where to look.

use std::path::PathBuf;

/// A failed step of the test cluster.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A program could not be started at all.
    #[error("{step}: cannot start `{command}`")]
    Start {
        /// What was being done.
        step: String,
        /// The command line.
        command: String,
        /// Why.
        source: std::io::Error,
    },
    /// A program ran and failed.
    #[error("{step}: `{command}` ended with {status}\n{output}")]
    Command {
        /// What was being done.
        step: String,
        /// The command line.
        command: String,
        /// Its exit status.
        status: String,
        /// The last lines of what it printed.
        output: String,
    },
    /// Something did not become true in time.
    #[error("{step}: not done after {seconds} s{detail}")]
    Timeout {
        /// What was awaited.
        step: String,
        /// The limit.
        seconds: u64,
        /// Log file and its last lines, or the last answer.
        detail: String,
    },
    /// A file operation failed.
    #[error("cannot {action} {path}")]
    File {
        /// The operation, as a verb.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A system call failed.
    #[error("cannot {action}")]
    System {
        /// The operation.
        action: String,
        /// Why.
        source: nix::Error,
    },
    /// A certificate could not be made.
    #[error("cannot make the certificate of {subject}")]
    Certificate {
        /// Whose certificate.
        subject: String,
        /// Why.
        source: rcgen::Error,
    },
    /// A stored or received document could not be understood.
    #[error("cannot understand {what}")]
    Document {
        /// Which document.
        what: String,
        /// Why.
        source: serde_json::Error,
    },
    /// The request makes no sense here; the text says what to do about it.
    #[error("{0}")]
    Refused(String),
}

/// The result of a step.
pub type Result<T> = std::result::Result<T, Error>;

/// Names file and operation of an `io::Error`.
pub trait FileContext<T> {
    /// Turns an `io::Error` into [`Error::File`].
    fn at(self, action: &'static str, path: impl Into<PathBuf>) -> Result<T>;
}

impl<T> FileContext<T> for std::io::Result<T> {
    fn at(self, action: &'static str, path: impl Into<PathBuf>) -> Result<T> {
        self.map_err(|source| Error::File { action, path: path.into(), source })
    }
}
