//! Values generated once for a request: time and UUIDs.

use k8s_openapi::{apimachinery::pkg::apis::meta::v1::Time, jiff::Timestamp};
use serde::Deserialize;
use uuid::Uuid;

use super::AdmissionRequest;

/// Values generated for one request.
#[derive(Clone, Debug, PartialEq)]
pub struct Generated {
    /// Current time.
    pub now: Time,
    /// Random UUID of the firmware.
    pub uuid: String,
    /// Random UUID used as serial number.
    pub serial: String,
}

impl Generated {
    /// Generates values from the UID of a request, which is random. A request that is evaluated more than once gets the
    /// same values each time.
    pub(crate) fn for_request(request: &AdmissionRequest) -> Self {
        let created =
            request.object.pointer("/metadata/creationTimestamp").and_then(|time| Time::deserialize(time).ok());
        let generate = |name: &str| match request.uid.as_str() {
            "" => Uuid::new_v4(),
            uid => Uuid::new_v5(&Uuid::NAMESPACE_OID, format!("{name} of request {uid}").as_bytes()),
        };
        Self {
            now: created.unwrap_or_else(|| Time(Timestamp::now())),
            uuid: generate("firmware UUID").to_string(),
            serial: generate("serial number").to_string(),
        }
    }
}
