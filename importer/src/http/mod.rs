//! Downloads by HTTP and HTTPS.
//!
//! ```text
//!             answer          chunk               end
//!   request ─────────▶ body ◀──────▶ body ──────────────────▶ complete
//!      ▲  │ redirect    │ cut, stalled
//!      └──┘             ▼
//!                    pause ──▶ request from the byte that is missing ──▶ body, if the file is the same
//! ```

mod body;
mod client;
mod tls;

pub(crate) use body::{Body, download};
pub(crate) use client::Client;

use std::{io, time::Duration};

use http::StatusCode;
use thiserror::Error;

/// Failure of a download.
#[derive(Debug, Error)]
pub enum SourceError {
    /// The URL is invalid.
    #[error("URL {url} is invalid: {reason}")]
    Url {
        /// The URL, without password.
        url: String,
        /// Cause.
        reason: String,
    },
    /// A header or credential of the task is invalid.
    #[error("header {0} is invalid")]
    Header(String),
    /// A file with certificates, headers or credentials is unusable.
    #[error("cannot read {path}: {reason}")]
    File {
        /// The file.
        path: String,
        /// Cause.
        reason: String,
    },
    /// There was no answer.
    #[error("cannot connect to {url}: {reason}")]
    Connect {
        /// The URL.
        url: String,
        /// Chain of causes.
        reason: String,
    },
    /// The server did not answer, or stopped to send.
    #[error("{url} sent nothing for {} seconds", after.as_secs())]
    Silent {
        /// The URL.
        url: String,
        /// Time without data.
        after: Duration,
    },
    /// The server answered with a failure.
    #[error("{url} returned {status}{}", hint(*status))]
    Status {
        /// The URL.
        url: String,
        /// Status of the answer.
        status: StatusCode,
    },
    /// The number of redirects exceeds the limit.
    #[error("{url} leads to more than {limit} redirects, the last one to {last}")]
    Redirects {
        /// The first URL.
        url: String,
        /// The limit.
        limit: usize,
        /// The last URL.
        last: String,
    },
    /// A redirect leads to an address that is not used.
    #[error("{url} redirects to {to}, {reason}")]
    Redirect {
        /// The URL.
        url: String,
        /// Target of the redirect.
        to: String,
        /// Cause.
        reason: &'static str,
    },
    /// The connection ended before the file was complete.
    #[error("download of {url} was cut after {bytes} bytes: {reason}")]
    Cut {
        /// The URL.
        url: String,
        /// Bytes that were received.
        bytes: u64,
        /// Cause.
        reason: String,
    },
    /// The rest of a file cannot be requested.
    #[error("download of {url} was cut after {bytes} bytes and cannot be resumed: {reason}")]
    Changed {
        /// The URL.
        url: String,
        /// Bytes that were received.
        bytes: u64,
        /// Cause.
        reason: &'static str,
    },
}

fn hint(status: StatusCode) -> &'static str {
    match status {
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => "; check secretRef of the source",
        StatusCode::NOT_FOUND | StatusCode::GONE => "; check the URL of the source",
        _ => "",
    }
}

impl SourceError {
    /// A later attempt may succeed.
    fn is_transient(&self) -> bool {
        match self {
            Self::Connect { .. } | Self::Silent { .. } | Self::Cut { .. } => true,
            Self::Status { status, .. } => {
                status.is_server_error()
                    || [StatusCode::TOO_MANY_REQUESTS, StatusCode::REQUEST_TIMEOUT].contains(status)
            }
            _ => false,
        }
    }
}

impl From<SourceError> for io::Error {
    fn from(error: SourceError) -> Self {
        Self::other(error)
    }
}

/// Returns an error with its causes.
fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let next = error.to_string();
        if !text.contains(&next) {
            text = format!("{text}: {next}");
        }
        cause = error.source();
    }
    text
}
