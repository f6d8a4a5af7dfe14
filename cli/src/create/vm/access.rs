//! `--access-cred`: keys and passwords from Secrets.

use serde_json::{Value, json};

use super::{
    super::params::{Params, invalid},
    Options,
};
use crate::Error;

const FLAG: &str = "access-cred";

/// Access credentials, and what they need of cloud-init.
#[derive(Default)]
pub(super) struct Access {
    /// The credentials.
    pub credentials: Vec<Value>,
    /// The data source through which keys reach the guest.
    pub cloud_init: Option<&'static str>,
    /// True if the guest agent writes keys.
    pub agent_writes_keys: bool,
}

/// Returns the access credentials.
pub(super) fn credentials(options: &Options) -> Result<Access, Error> {
    let mut access = Access::default();
    for value in &options.access_cred {
        let params = Params::parse(FLAG, value, &["type", "src", "method", "user"])?;
        let secret = params.local_source("secret")?;
        let source = json!({"secret": {"secretName": secret}});
        let credential = match params.get("type").to_ascii_lowercase().as_str() {
            "" | "ssh" => {
                let method = key_method(&params, options, &mut access)?;
                json!({"sshPublicKey": {"source": source, "propagationMethod": method}})
            }
            "password" => {
                let method = params.get("method");
                if !["", "ga"].contains(&method.to_ascii_lowercase().as_str()) {
                    let why =
                        format!("invalid access credentials password method \"{method}\", supported values are: ga");
                    return Err(invalid(FLAG, why));
                }
                reject_user(&params)?;
                json!({"userPassword": {"source": source, "propagationMethod": {"qemuGuestAgent": {}}}})
            }
            other => {
                let why = format!("invalid access credential type \"{other}\", supported values are: ssh, password");
                return Err(invalid(FLAG, why));
            }
        };
        access.credentials.push(credential);
    }
    Ok(access)
}

fn reject_user(params: &Params) -> Result<(), Error> {
    match params.get("user") {
        "" => Ok(()),
        _ => Err(invalid(FLAG, "user cannot be specified with selected access credential type and method")),
    }
}

/// Returns the way by which keys reach the guest.
fn key_method(params: &Params, options: &Options, access: &mut Access) -> Result<Value, Error> {
    let (source, field) = match params.get("method").to_ascii_lowercase().as_str() {
        "" | "ga" => {
            let named = Some(params.get("user")).filter(|user| !user.is_empty());
            let user = named.or(options.user.as_deref().filter(|user| !user.is_empty())).ok_or_else(|| {
                let why =
                    "user must be specified with access credential ssh method ga (\"--user\" flag or param \"user\")";
                invalid(FLAG, why)
            })?;
            access.agent_writes_keys = true;
            return Ok(json!({"qemuGuestAgent": {"users": [user]}}));
        }
        "nocloud" => ("nocloud", "noCloud"),
        "configdrive" => ("configdrive", "configDrive"),
        other => {
            let why = format!(
                "invalid access credentials ssh method \"{other}\", supported values are: ga, nocloud, configdrive"
            );
            return Err(invalid(FLAG, why));
        }
    };
    reject_user(params)?;
    let chosen = options.cloud_init.as_deref().or(access.cloud_init);
    if let Some(other) = chosen.filter(|chosen| !chosen.eq_ignore_ascii_case(source)) {
        let why = format!("method param and value passed to --cloud-init have to match: {source} vs {other}");
        return Err(invalid(FLAG, why));
    }
    access.cloud_init = Some(source);
    Ok(json!({field: {}}))
}
