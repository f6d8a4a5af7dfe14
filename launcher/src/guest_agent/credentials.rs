//! Puts SSH keys and passwords into the guest through the guest agent, and follows changes of their secrets.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    time::Duration,
};

use api::{VirtualMachineInstance, vmi::access};
use base64::Engine;
use protocol::AccessCredentials;
use serde_json::json;
use thiserror::Error;
use tokio::{
    sync::watch,
    time::{Instant, sleep},
};

use super::{GuestAgent, GuestAgentError};
use crate::{
    files::{FileError, UntrustedDir},
    hypervisor::HypervisorError,
    paths::Paths,
};

/// Interval of reads of the secrets and of retries after a failure.
const TICK: Duration = Duration::from_secs(5);
/// Interval after which unchanged credentials are written again: the guest may have changed them.
const RENEW: Duration = Duration::from_secs(300);
/// Time limit of one command.
const COMMAND_DEADLINE: Duration = Duration::from_secs(10);
/// Limit of a secret's file, in bytes.
const FILE_LIMIT: u64 = 64 * 1024;

/// Failure to bring credentials into the guest, in the reference's words.
#[derive(Debug, Error)]
enum CredentialError {
    /// A secret cannot be read.
    #[error(transparent)]
    Secret(#[from] FileError),
    /// Reading the secrets has failed.
    #[error("cannot read the secrets")]
    Read,
    /// The guest agent does not answer.
    #[error("Guest agent is offline")]
    Offline,
    /// A user's SSH keys cannot be written.
    #[error("Error encountered writing ssh pub key access credentials for user [{user}]: {source}")]
    Keys { user: String, source: GuestAgentError },
    /// A user's password cannot be set.
    #[error("Error encountered setting password for user [{user}]: {source}")]
    Password { user: String, source: GuestAgentError },
}

impl CredentialError {
    /// Reports a refusal of the guest agent for one user, which does not affect other users. A guest agent that does not
    /// answer ends the attempt.
    const fn is_refusal(&self) -> bool {
        matches!(
            self,
            Self::Keys { source, .. } | Self::Password { source, .. }
                if matches!(
                    source,
                    GuestAgentError::Unsupported(_)
                        | GuestAgentError::Hypervisor(HypervisorError::GuestAgentRefused(_))
                )
        )
    }
}

/// Mounted secrets with the guest's credentials.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Sources {
    /// Directories with SSH keys, by user of the guest.
    keys: BTreeMap<String, Vec<PathBuf>>,
    /// Directories with passwords, each in a file named after its user.
    passwords: Vec<PathBuf>,
}

/// Credentials the guest should have. Secret: no `Debug`.
#[derive(Default, PartialEq, Eq)]
struct GuestCredentials {
    keys: BTreeMap<String, Vec<String>>,
    passwords: BTreeMap<String, String>,
}

impl Sources {
    /// Returns the secrets of all credentials that the guest agent propagates.
    pub(crate) fn of(vmi: &VirtualMachineInstance, paths: &Paths) -> Self {
        let mut sources = Self::default();
        let directory = |name: &str| {
            let name = access::pod_volume(name);
            Paths::is_single_component(&name).then(|| paths.secret(&name))
        };
        for credential in &vmi.spec.access_credentials {
            if let Some(key) = &credential.ssh_public_key
                && let Some(way) = &key.propagation_method.qemu_guest_agent
                && let Some(directory) = key.source.secret.as_ref().and_then(|secret| directory(&secret.secret_name))
            {
                for user in &way.users {
                    sources.keys.entry(user.clone()).or_default().push(directory.clone());
                }
            }
            if let Some(password) = &credential.user_password
                && password.propagation_method.qemu_guest_agent.is_some()
                && let Some(directory) =
                    password.source.secret.as_ref().and_then(|secret| directory(&secret.secret_name))
            {
                sources.passwords.push(directory);
            }
        }
        sources
    }

    /// Reports that the guest agent propagates no credentials.
    pub(crate) fn is_empty(&self) -> bool {
        self.keys.is_empty() && self.passwords.is_empty()
    }

    fn read(&self) -> Result<GuestCredentials, FileError> {
        let mut wanted = GuestCredentials::default();
        for (user, directories) in &self.keys {
            let keys = wanted.keys.entry(user.clone()).or_default();
            for directory in directories {
                for content in files(directory)?.into_values() {
                    // The guest agent takes one key at a time and rejects other lines.
                    let lines = content.lines().map(str::trim);
                    keys.extend(lines.filter(|line| !line.is_empty() && !line.starts_with('#')).map(str::to_owned));
                }
            }
        }
        for directory in &self.passwords {
            let passwords = files(directory)?.into_iter().map(|(user, content)| (user, content.trim().to_owned()));
            wanted.passwords.extend(passwords.filter(|(_, password)| !password.is_empty()));
        }
        Ok(wanted)
    }
}

/// Reads the files of a mounted secret.
fn files(directory: &Path) -> Result<BTreeMap<String, String>, FileError> {
    let directory = UntrustedDir::open(directory)?;
    let mut files = BTreeMap::new();
    for name in directory.keys(Path::new("."))? {
        match directory.read(Path::new(&name), FILE_LIMIT) {
            Ok(content) => {
                files.insert(name, String::from_utf8_lossy(&content).into_owned());
            }
            Err(FileError::NotRegular(_)) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(files)
}

/// Keeps the guest's credentials in line with the sources and reports the result, until aborted.
pub(crate) async fn follow(agent: GuestAgent, sources: Sources, report: watch::Sender<Option<AccessCredentials>>) {
    let mut done: Option<(GuestCredentials, Instant)> = None;
    loop {
        let reading = sources.clone();
        let read = tokio::task::spawn_blocking(move || reading.read()).await;
        let result = match read {
            Ok(Ok(wanted)) => {
                let holds = done.as_ref().is_some_and(|(known, at)| *known == wanted && at.elapsed() < RENEW);
                if holds {
                    Ok(())
                } else {
                    let result = agent.put(&wanted).await;
                    done = result.is_ok().then(|| (wanted, Instant::now()));
                    result
                }
            }
            Ok(Err(error)) => Err(error.into()),
            Err(_) => Err(CredentialError::Read),
        };
        let message = result.as_ref().err().map(ToString::to_string).unwrap_or_default();
        let outcome = AccessCredentials { succeeded: result.is_ok(), message };
        report.send_if_modified(|known| {
            let changed = known.as_ref() != Some(&outcome);
            if changed {
                tracing::info!(succeeded = outcome.succeeded, message = outcome.message, "credentials of the guest");
                *known = Some(outcome);
            }
            changed
        });
        sleep(TICK).await;
    }
}

impl GuestAgent {
    /// Puts credentials into the guest. Returns the first failure; a user missing in the guest does not affect other users.
    async fn put(&self, wanted: &GuestCredentials) -> Result<(), CredentialError> {
        self.order("guest-ping", None, COMMAND_DEADLINE).await.map_err(|_| CredentialError::Offline)?;
        let mut refused = None;
        for (user, keys) in &wanted.keys {
            let arguments = json!({"username": user, "keys": keys, "reset": true});
            let result = self.order("guest-ssh-add-authorized-keys", Some(arguments), COMMAND_DEADLINE).await;
            let user = user.clone();
            note_refusal(result.map_err(|source| CredentialError::Keys { user, source }), &mut refused)?;
        }
        for (user, password) in &wanted.passwords {
            let password = base64::engine::general_purpose::STANDARD.encode(password);
            let arguments = json!({"username": user, "password": password, "crypted": false});
            let result = self.order("guest-set-user-password", Some(arguments), COMMAND_DEADLINE).await;
            let user = user.clone();
            note_refusal(result.map_err(|source| CredentialError::Password { user, source }), &mut refused)?;
        }
        refused.map_or(Ok(()), Err)
    }
}

/// Keeps the first refusal for one user; other failures end the attempt.
fn note_refusal<T>(
    result: Result<T, CredentialError>,
    refused: &mut Option<CredentialError>,
) -> Result<(), CredentialError> {
    match result {
        Ok(_) => {}
        Err(error) if error.is_refusal() => {
            refused.get_or_insert(error);
        }
        Err(error) => return Err(error),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use futures::future::BoxFuture;
    use serde_json::Value;

    use super::*;
    use crate::{guest_agent::Channel, tasks::Tasks};

    /// An agent of a guest without a certain user.
    struct Wire(Arc<Mutex<Vec<String>>>);

    impl Channel for Wire {
        fn ask(&self, command: String, _: Duration) -> BoxFuture<'static, Result<String, HypervisorError>> {
            let refuses = command.contains("absent");
            self.0.lock().unwrap().push(command);
            Box::pin(async move {
                if refuses {
                    Err(HypervisorError::GuestAgentRefused("no such user".to_owned()))
                } else {
                    Ok(r#"{"return":{}}"#.to_owned())
                }
            })
        }
    }

    #[tokio::test]
    async fn a_missing_user_does_not_affect_other_users() {
        let asked = Arc::new(Mutex::new(Vec::new()));
        let thaw_at = std::env::temp_dir().join(format!("launcher-credentials-thaw-{}", std::process::id()));
        let agent = GuestAgent::new(Wire(asked.clone()), thaw_at, Tasks::new().0);
        agent.attend(true, false);
        let wanted = GuestCredentials {
            keys: ["absent", "root"].map(|user| (user.to_owned(), vec!["ssh-ed25519 A".to_owned()])).into(),
            passwords: [("root".to_owned(), "s3cret".to_owned())].into(),
        };
        let error = agent.put(&wanted).await.unwrap_err();
        assert_eq!(
            error.to_string(),
            "Error encountered writing ssh pub key access credentials for user [absent]: no such user"
        );
        let asked = asked.lock().unwrap();
        for command in ["guest-ssh-add-authorized-keys", "guest-set-user-password"] {
            assert!(asked.iter().any(|text| text.contains(command) && text.contains("root")), "{command}: {asked:?}");
        }
    }

    fn vmi_with(credentials: &Value) -> VirtualMachineInstance {
        let spec = json!({"domain": {"devices": {}}, "accessCredentials": credentials});
        serde_json::from_value(json!({"metadata": {"name": "m"}, "spec": spec})).unwrap()
    }

    #[test]
    fn credentials_are_read_from_the_mounted_secrets() {
        let root = std::env::temp_dir().join(format!("launcher-credentials-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&root);
        let paths = Paths { private: root.clone(), ..Paths::default() };
        for (secret, file, content) in [
            ("one", "a", "ssh-ed25519 A\n# mine\n\nssh-ed25519 B\n"),
            ("two.example", ".b", "ssh-ed25519 C"),
            ("three", "debian", " s3cret\n"),
            ("three", "nobody", "\n"),
        ] {
            let directory = paths.secret(&access::pod_volume(secret));
            std::fs::create_dir_all(directory.join("..data")).unwrap();
            std::fs::write(directory.join(file), content).unwrap();
        }
        let keys = |secret: &str, way: Value| {
            let source = json!({"secret": {"secretName": secret}});
            json!({"sshPublicKey": {"source": source, "propagationMethod": way}})
        };
        let of_agent = |users: &[&str]| json!({"qemuGuestAgent": {"users": users}});
        let vmi = vmi_with(&json!([
            keys("one", of_agent(&["root", "debian"])),
            keys("two.example", of_agent(&["root"])),
            keys("absent", json!({"noCloud": {}})),
            {"userPassword": {"source": {"secret": {"secretName": "three"}},
                "propagationMethod": {"qemuGuestAgent": {}}}},
        ]));
        let wanted = Sources::of(&vmi, &paths).read().unwrap();
        assert_eq!(wanted.keys["root"], ["ssh-ed25519 A", "ssh-ed25519 B", "ssh-ed25519 C"]);
        assert_eq!(wanted.keys["debian"], ["ssh-ed25519 A", "ssh-ed25519 B"]);
        assert_eq!(wanted.passwords, BTreeMap::from([("debian".to_owned(), "s3cret".to_owned())]));
        let gone = Sources::of(&vmi_with(&json!([keys("absent", of_agent(&["root"]))])), &paths);
        assert!(gone.read().is_err());
        let outside = Sources::of(&vmi_with(&json!([keys("../one", of_agent(&["root"]))])), &paths);
        assert!(outside.is_empty() && Sources::of(&vmi_with(&json!([])), &paths).is_empty());
        std::fs::remove_dir_all(root).unwrap();
    }
}
