//! Failures that a storage class injects, by its parameter `faults`.
//!
//! `faults: create=slow:5,stage=refused,expand=full` delays creation by five seconds and fails the two other operations.

use std::{collections::BTreeMap, fmt, str::FromStr, time::Duration};

use serde::{Deserialize, Serialize};
use tonic::Status;

/// Longest delay in seconds.
const LONGEST: u64 = 300;

/// An operation that can fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Operation {
    /// Creation of a volume.
    Create,
    /// Deletion of a volume.
    Delete,
    /// Expansion of a volume.
    Expand,
    /// Creation of a snapshot of a volume.
    Snapshot,
    /// Preparation of a volume on a node.
    Stage,
}

/// A failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Fault {
    /// A delay in seconds, without an error.
    Slow(u64),
    /// No space is left.
    Full,
    /// The storage refuses the operation.
    Refused,
}

/// The failures of a volume.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Faults(BTreeMap<Operation, Fault>);

/// A value of the parameter that has no meaning.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("parameter faults: {0} is not OPERATION=slow:SECONDS (up to {LONGEST}), OPERATION=full or OPERATION=refused")]
pub(crate) struct BadFault(String);

impl FromStr for Faults {
    type Err = BadFault;

    fn from_str(text: &str) -> Result<Self, BadFault> {
        let parts = text.split(',').map(str::trim).filter(|part| !part.is_empty());
        parts.map(|part| parse(part).ok_or_else(|| BadFault(part.to_owned()))).collect::<Result<_, _>>().map(Self)
    }
}

fn parse(part: &str) -> Option<(Operation, Fault)> {
    let (operation, fault) = part.split_once('=')?;
    let operation = match operation {
        "create" => Operation::Create,
        "delete" => Operation::Delete,
        "expand" => Operation::Expand,
        "snapshot" => Operation::Snapshot,
        "stage" => Operation::Stage,
        _ => return None,
    };
    let fault = match fault {
        "full" => Fault::Full,
        "refused" => Fault::Refused,
        slow => Fault::Slow(slow.strip_prefix("slow:")?.parse().ok().filter(|seconds| *seconds <= LONGEST)?),
    };
    Some((operation, fault))
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self:?}")
    }
}

impl Faults {
    /// Waits or fails, if the storage class wants it for this operation.
    pub(crate) async fn inject(&self, operation: Operation) -> Result<(), Status> {
        let reason = || format!("{operation}: injected by parameter faults of the storage class");
        match self.0.get(&operation) {
            None => Ok(()),
            Some(Fault::Slow(seconds)) => {
                tokio::time::sleep(Duration::from_secs(*seconds)).await;
                Ok(())
            }
            // RESOURCE_EXHAUSTED leaves it open if a snapshot is made: csi-snapshotter then deletes none until another answer.
            Some(Fault::Full) if operation == Operation::Snapshot => {
                Err(Status::internal(format!("no space left: {}", reason())))
            }
            Some(Fault::Full) => Err(Status::resource_exhausted(format!("no space left: {}", reason()))),
            Some(Fault::Refused) => Err(Status::permission_denied(format!("refused: {}", reason()))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_are_parsed() {
        let parsed: Faults = "create=slow:5, stage=refused,expand=full".parse().unwrap();
        let expected =
            [(Operation::Create, Fault::Slow(5)), (Operation::Stage, Fault::Refused), (Operation::Expand, Fault::Full)];
        assert_eq!(parsed.0, expected.into_iter().collect());
        assert_eq!("".parse(), Ok(Faults::default()));
        for bad in ["create", "create=slow", "create=slow:301", "publish=full", "create=empty"] {
            assert_eq!(bad.parse::<Faults>(), Err(BadFault(bad.to_owned())));
        }
        let text = serde_json::to_string(&parsed).unwrap();
        assert_eq!(serde_json::from_str::<Faults>(&text).unwrap(), parsed);
    }

    #[tokio::test]
    async fn faults_fail_their_operation_only() {
        let faults: Faults = "create=full,stage=refused".parse().unwrap();
        assert_eq!(faults.inject(Operation::Create).await.unwrap_err().code(), tonic::Code::ResourceExhausted);
        assert_eq!(faults.inject(Operation::Stage).await.unwrap_err().code(), tonic::Code::PermissionDenied);
        assert!(faults.inject(Operation::Delete).await.is_ok());
    }
}
