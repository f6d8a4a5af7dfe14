//! `credentials`: SSH keys and passwords in the Secrets of a VM's access credentials. The guest agent gives them to the guest.

use std::{collections::BTreeMap, fs::File, io::Read, path::PathBuf};

use clap::{Args, Subcommand};
use http::Method;
use k8s_openapi::{ByteString, api::core::v1::Secret};
use serde_json::{Value, json};

use crate::{Connection, Error, create::random_name, guest::read, object_name};

/// Longest file with keys.
const MAX_FILE: u64 = 64 * 1024;
/// Attempts to write an object that others write, too.
const ATTEMPTS: u32 = 5;

/// Commands about credentials.
#[derive(Subcommand)]
pub(crate) enum CredentialsCommand {
    /// Add an SSH key
    AddSshKey(AddOptions),
    /// Remove an SSH key
    RemoveSshKey(RemoveOptions),
    /// Set the password of a user
    SetPassword(PasswordOptions),
}

/// User and Secret.
#[derive(Args)]
pub(crate) struct Subject {
    /// Name of the VM
    #[arg(value_name = "VM")]
    vm: String,
    /// Name of the user
    #[arg(long, short = 'u')]
    user: String,
    /// Name of the Secret, if there are several
    #[arg(long)]
    secret: Option<String>,
    /// Change the Secret even if the VM does not own it
    #[arg(long)]
    force: bool,
}

/// An SSH key.
#[derive(Args)]
#[group(required = true, multiple = false)]
pub(crate) struct Key {
    /// File with the public key
    #[arg(long, short = 'f', value_name = "FILE")]
    file: Option<PathBuf>,
    /// The public key
    #[arg(long, value_name = "KEY")]
    value: Option<String>,
}

/// Options of `credentials add-ssh-key`.
#[derive(Args)]
pub(crate) struct AddOptions {
    #[command(flatten)]
    subject: Subject,
    #[command(flatten)]
    key: Key,
    /// Create a Secret. A running VM uses it after a restart, and needs --force
    #[arg(long, conflicts_with = "update_secret")]
    create_secret: bool,
    /// Add the key to a Secret that the VM has
    #[arg(long)]
    update_secret: bool,
}

/// Options of `credentials remove-ssh-key`.
#[derive(Args)]
pub(crate) struct RemoveOptions {
    #[command(flatten)]
    subject: Subject,
    #[command(flatten)]
    key: Key,
}

/// Options of `credentials set-password`.
#[derive(Args)]
pub(crate) struct PasswordOptions {
    #[command(flatten)]
    subject: Subject,
    /// The password. Other users of this host can see it: prefer --password-file
    #[arg(long, short = 'p', required_unless_present = "password_file")]
    password: Option<String>,
    /// File with the password
    #[arg(long, value_name = "FILE", conflicts_with = "password")]
    password_file: Option<PathBuf>,
}

pub(crate) async fn run(connection: &Connection, command: &CredentialsCommand) -> Result<(), Error> {
    match command {
        CredentialsCommand::AddSshKey(options) => add(connection, options).await,
        CredentialsCommand::RemoveSshKey(options) => remove(connection, options).await,
        CredentialsCommand::SetPassword(options) => set_password(connection, options).await,
    }
}

/// Returns the given text, else the content of the file.
fn given(value: Option<&String>, file: Option<&PathBuf>, what: &str) -> Result<String, Error> {
    let mut text = value.cloned().unwrap_or_default();
    if let (None, Some(file)) = (value, file) {
        let read = File::open(file).and_then(|opened| opened.take(MAX_FILE).read_to_string(&mut text));
        read.map_err(Error::io(format!("error getting {what}: cannot read {}", file.display())))?;
    }
    Ok(text)
}

impl PasswordOptions {
    fn read(&self) -> Result<String, Error> {
        let text = given(self.password.as_ref(), self.password_file.as_ref(), "password")?;
        // The line end of a file is no part of the password.
        Ok(if self.password.is_some() { text } else { text.trim_end_matches(['\r', '\n']).to_owned() })
    }
}

impl Key {
    fn read(&self) -> Result<String, Error> {
        let text = given(self.value.as_ref(), self.file.as_ref(), "ssh key")?;
        match text.trim() {
            "" => Err(Error::Usage("error getting ssh key: it is empty".to_owned())),
            key => Ok(key.to_owned()),
        }
    }
}

/// Returns the Secrets with keys of a user.
fn key_secrets<'a>(vm: &'a Value, user: &str) -> Vec<&'a str> {
    let of = |credential: &'a Value| {
        let key = &credential["sshPublicKey"];
        let users = key["propagationMethod"]["qemuGuestAgent"]["users"].as_array()?;
        users.iter().any(|known| known == user).then_some(())?;
        key["source"]["secret"]["secretName"].as_str()
    };
    credentials(vm).iter().filter_map(of).collect()
}

/// Returns the Secrets with passwords.
fn password_secrets<'a>(vm: &'a Value) -> Vec<&'a str> {
    let of = |credential: &'a Value| {
        let password = &credential["userPassword"];
        (!password["propagationMethod"]["qemuGuestAgent"].is_null()).then_some(())?;
        password["source"]["secret"]["secretName"].as_str()
    };
    credentials(vm).iter().filter_map(of).collect()
}

fn credentials(vm: &Value) -> &[Value] {
    vm["spec"]["template"]["spec"]["accessCredentials"].as_array().map(Vec::as_slice).unwrap_or_default()
}

/// Returns the Secret to change.
fn chosen<'a>(wanted: Option<&str>, secrets: &[&'a str]) -> Result<&'a str, Error> {
    match (wanted, secrets) {
        (None, [one]) => Ok(one),
        (None, _) => Err(Error::Usage(
            "multiple secrets specified, use option --secret to specify which secret to modify".to_owned(),
        )),
        (Some(wanted), _) => match secrets.iter().find(|secret| **secret == wanted) {
            Some(secret) => Ok(secret),
            None => Err(Error::Usage(format!("secret {wanted} was not assigned"))),
        },
    }
}

/// Fails if the VM does not own the Secret: other VMs may use it.
fn check_owner(secret: &Secret, vm: &Value) -> Result<(), Error> {
    let owners = secret.metadata.owner_references.as_deref().unwrap_or_default();
    let is_vm = owners
        .iter()
        .any(|owner| owner.kind == "VirtualMachine" && Some(owner.uid.as_str()) == vm["metadata"]["uid"].as_str());
    let (secret, vm) = (secret.metadata.name.as_deref().unwrap_or_default(), vm["metadata"]["name"].as_str());
    let vm = vm.unwrap_or_default();
    match is_vm {
        true => Ok(()),
        false => Err(Error::Usage(format!(
            "secret {secret} does not have an owner reference pointing to VM {vm}; use --force to change it"
        ))),
    }
}

/// Returns true if a line holds the key, which needs no comment. A type of keys alone must not select all of them.
fn has_key(line: &str, key: &str) -> bool {
    let line = line.trim();
    let is_complete = key.contains(char::is_whitespace);
    line.strip_prefix(key).is_some_and(|rest| rest.is_empty() || (is_complete && rest.starts_with(char::is_whitespace)))
}

/// Returns the changes of a Secret's data that remove a key.
fn without_key(data: &BTreeMap<String, ByteString>, key: &str) -> Value {
    let mut changes = json!({"data": {}, "stringData": {}});
    for (name, content) in data {
        let text = String::from_utf8_lossy(&content.0);
        if !text.lines().any(|line| has_key(line, key)) {
            continue;
        }
        let rest = text.lines().filter(|line| !has_key(line, key) && !line.trim().is_empty()).collect::<Vec<_>>();
        match rest.is_empty() {
            true => changes["data"][name] = Value::Null,
            false => changes["stringData"][name] = json!(rest.join("\n")),
        }
    }
    changes
}

impl Connection {
    async fn read_vm(&self, vm: &str) -> Result<Value, Error> {
        let path = self.object_path("virtualmachines", object_name(vm)?);
        let answer = self.call(Method::GET, &path, Vec::new()).await;
        read(&answer.map_err(crate::failed_while("getting virtual machine"))?)
    }

    fn secret_path(&self, name: &str) -> Result<String, Error> {
        Ok(format!("/api/v1/namespaces/{}/secrets/{}", self.namespace, object_name(name)?))
    }

    async fn read_secret(&self, name: &str) -> Result<Secret, Error> {
        let answer = self.call(Method::GET, &self.secret_path(name)?, Vec::new()).await;
        let answer = answer.map_err(crate::failed_while("getting secret"))?;
        serde_json::from_slice(&answer).map_err(|error| Error::Transport(format!("unreadable secret {name}: {error}")))
    }
}

/// Repeats a change while others write the object.
async fn retried(mut change: impl AsyncFnMut() -> Result<(), Error>) -> Result<(), Error> {
    let mut attempt = 1;
    loop {
        match change().await {
            Err(Error::Refused { code: 409, .. }) if attempt < ATTEMPTS => attempt += 1,
            done => return done,
        }
    }
}

async fn add(connection: &Connection, options: &AddOptions) -> Result<(), Error> {
    let subject = &options.subject;
    let key = options.key.read()?;
    let vm = connection.read_vm(&subject.vm).await?;
    let secrets = key_secrets(&vm, &subject.user);
    if options.create_secret || (secrets.is_empty() && !options.update_secret) {
        return create_secret(connection, &vm, subject, &key).await;
    }
    if secrets.is_empty() {
        return Err(Error::Usage(format!("no secrets specified for user: {}", subject.user)));
    }
    let name = chosen(subject.secret.as_deref(), &secrets)?;
    let secret = connection.read_secret(name).await?;
    let data = secret.data.clone().unwrap_or_default();
    let lists_key = |content: &ByteString| String::from_utf8_lossy(&content.0).lines().any(|line| has_key(line, &key));
    if data.values().any(lists_key) {
        return say!("Secret \"{name}\" already contains this SSH key.");
    }
    if !subject.force {
        check_owner(&secret, &vm)?;
    }
    let patch = json!({"stringData": {random_name("ssh-key-", 6): key}}).to_string().into_bytes();
    connection.patch(&connection.secret_path(name)?, patch).await?;
    say!("Successfully added the key to secret \"{name}\"")
}

/// Creates a Secret with the key and adds it to the access credentials of the VM.
async fn create_secret(connection: &Connection, vm: &Value, subject: &Subject, key: &str) -> Result<(), Error> {
    let name = object_name(&subject.vm)?;
    let vmi = connection.find(&connection.object_path("virtualmachineinstances", name)).await?;
    if vmi.is_some() && !subject.force {
        return Err(Error::Usage(format!(
            "virtual machine {name} is running. Use --force flag to update a running VM, it will take effect after restart"
        )));
    }
    let path = format!("/api/v1/namespaces/{}/secrets", connection.namespace);
    let secret = new_secret(vm, name, key).to_string().into_bytes();
    let created = connection.call(Method::POST, &path, secret).await;
    let created = read(&created.map_err(crate::failed_while("creating secret"))?)?;
    let secret = created["metadata"]["name"].as_str().unwrap_or_default();
    let added = json!({"sshPublicKey": {
        "source": {"secret": {"secretName": secret}},
        "propagationMethod": {"qemuGuestAgent": {"users": [subject.user]}},
    }});
    retried(async || {
        let vm = connection.read_vm(&subject.vm).await?;
        let all = [credentials(&vm), std::slice::from_ref(&added)].concat();
        let patch = json!({
            "metadata": {"resourceVersion": vm["metadata"]["resourceVersion"]},
            "spec": {"template": {"spec": {"accessCredentials": all}}},
        });
        let path = connection.object_path("virtualmachines", name);
        connection.patch(&path, patch.to_string().into_bytes()).await.map(drop)
    })
    .await?;
    say!("Successfully created secret \"{secret}\" with the key for user {} of VM {name}", subject.user)
}

fn new_secret(vm: &Value, name: &str, key: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Secret",
        "metadata": {
            "generateName": format!("{name}-ssh-key-"),
            "ownerReferences": [{
                "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "name": name, "uid": vm["metadata"]["uid"],
                "controller": true,
            }],
        },
        "stringData": {random_name("ssh-key-", 6): key},
    })
}

async fn remove(connection: &Connection, options: &RemoveOptions) -> Result<(), Error> {
    let subject = &options.subject;
    let key = options.key.read()?;
    let vm = connection.read_vm(&subject.vm).await?;
    let mut secrets = key_secrets(&vm, &subject.user);
    if secrets.is_empty() {
        return say!("No secrets associated with user {}", subject.user);
    }
    if let Some(wanted) = &subject.secret {
        secrets.retain(|secret| secret == wanted);
        if secrets.is_empty() {
            let why = format!("secret {wanted} is not associated with user {}", subject.user);
            return Err(Error::Usage(why));
        }
    }
    for name in secrets {
        retried(async || remove_from(connection, &vm, name, &key, subject.force).await).await?;
    }
    Ok(())
}

async fn remove_from(connection: &Connection, vm: &Value, name: &str, key: &str, force: bool) -> Result<(), Error> {
    let secret = match connection.read_secret(name).await {
        Err(error) if crate::is_not_found(&error) => return Ok(()),
        read => read?,
    };
    let mut patch = without_key(&secret.data.clone().unwrap_or_default(), key);
    if patch["data"] == json!({}) && patch["stringData"] == json!({}) {
        return say!("Secret \"{name}\" does not contain this SSH key.");
    }
    if !force {
        check_owner(&secret, vm)?;
    }
    patch["metadata"] = json!({"resourceVersion": secret.metadata.resource_version});
    connection.patch(&connection.secret_path(name)?, patch.to_string().into_bytes()).await?;
    say!("Successfully removed the key from secret \"{name}\"")
}

async fn set_password(connection: &Connection, options: &PasswordOptions) -> Result<(), Error> {
    let subject = &options.subject;
    let password = options.read()?;
    let vm = connection.read_vm(&subject.vm).await?;
    let secrets = password_secrets(&vm);
    if secrets.is_empty() {
        return Err(Error::Usage("no secrets assigned to UserPassword AccessCredentials".to_owned()));
    }
    let name = chosen(subject.secret.as_deref(), &secrets)?;
    if !subject.force {
        check_owner(&connection.read_secret(name).await?, &vm)?;
    }
    let patch = json!({"stringData": {subject.user.as_str(): password}}).to_string().into_bytes();
    connection.patch(&connection.secret_path(name)?, patch).await?;
    say!("Successfully set password in secret \"{name}\"")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command_line::parse;

    fn vm() -> Value {
        let key = |secret: &str, user: &str| {
            json!({"sshPublicKey": {
                "source": {"secret": {"secretName": secret}},
                "propagationMethod": {"qemuGuestAgent": {"users": [user]}},
            }})
        };
        let no_agent = json!({"sshPublicKey": {
            "source": {"secret": {"secretName": "d"}}, "propagationMethod": {"noCloud": {}},
        }});
        let password = json!({"userPassword": {
            "source": {"secret": {"secretName": "p"}}, "propagationMethod": {"qemuGuestAgent": {}},
        }});
        json!({
            "metadata": {"name": "m", "uid": "u1"},
            "spec": {"template": {"spec": {"accessCredentials": [
                key("a", "root"), key("b", "joe"), key("c", "joe"), no_agent, password,
            ]}}},
        })
    }

    #[test]
    fn secrets_are_those_of_the_user() {
        let vm = vm();
        assert_eq!(key_secrets(&vm, "root"), ["a"]);
        assert_eq!(key_secrets(&vm, "joe"), ["b", "c"]);
        assert_eq!(password_secrets(&vm), ["p"]);
        for (wanted, secrets, expected) in [
            (None, &["a"][..], Ok("a")),
            (Some("b"), &["a", "b"], Ok("b")),
            (None, &["a", "b"], Err("multiple secrets specified")),
            (Some("x"), &["a"], Err("secret x was not assigned")),
        ] {
            match (chosen(wanted, secrets), expected) {
                (Ok(found), Ok(expected)) => assert_eq!(found, expected),
                (Err(error), Err(expected)) => assert!(error.to_string().starts_with(expected), "{error}"),
                (found, expected) => panic!("{found:?} instead of {expected:?}"),
            }
        }
    }

    #[test]
    fn secret_of_others_needs_force() {
        let secret = |uid: &str| -> Secret {
            serde_json::from_value(json!({"metadata": {"name": "s", "ownerReferences": [
                {"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "name": "m", "uid": uid},
            ]}}))
            .unwrap()
        };
        assert!(check_owner(&secret("u1"), &vm()).is_ok());
        for other in [secret("u2"), Secret::default()] {
            assert!(check_owner(&other, &vm()).unwrap_err().to_string().contains("does not have an owner reference"));
        }
        let created = new_secret(&vm(), "m", "ssh-ed25519 A");
        assert!(check_owner(&serde_json::from_value(created).unwrap(), &vm()).is_ok());
    }

    #[test]
    fn removed_key_leaves_the_others() {
        let content = |text: &str| ByteString(text.as_bytes().to_vec());
        let data = BTreeMap::from([
            ("both".to_owned(), content("ssh-ed25519 A me\n\nssh-ed25519 B you\n")),
            ("one".to_owned(), content("ssh-ed25519 A\n")),
            ("other".to_owned(), content("ssh-ed25519 C\n")),
        ]);
        assert_eq!(
            without_key(&data, "ssh-ed25519 A"),
            json!({"data": {"one": null}, "stringData": {"both": "ssh-ed25519 B you"}})
        );
        for none in ["ssh-rsa", "ssh-ed25519", "ssh-ed25519 A m", "ssh-ed25519 A me too"] {
            assert_eq!(without_key(&data, none), json!({"data": {}, "stringData": {}}), "{none}");
        }
    }

    #[test]
    fn password_can_be_in_a_file() {
        let path = std::env::temp_dir().join(format!("set-password-{}", std::process::id()));
        std::fs::write(&path, " p w \r\n").unwrap();
        let file = format!("--password-file={}", path.display());
        for (word, expected) in [(file.as_str(), " p w "), ("--password=p\n", "p\n")] {
            let cli = parse(vec!["kubectl-virt", "credentials", "set-password", "m", "--user=joe", word]).unwrap();
            let crate::command_line::Command::Credentials(CredentialsCommand::SetPassword(options)) = cli.command
            else {
                panic!("another command")
            };
            assert_eq!(options.read().unwrap(), expected, "{word}");
        }
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn user_is_one_of_the_guest() {
        let cli =
            parse(vec!["kubectl-virt", "credentials", "set-password", "m", "--user=joe", "--password=p"]).unwrap();
        let crate::command_line::Command::Credentials(CredentialsCommand::SetPassword(options)) = cli.command else {
            panic!("another command")
        };
        assert_eq!((options.subject.user.as_str(), options.subject.vm.as_str()), ("joe", "m"));
    }

    #[test]
    fn wrong_arguments_are_rejected_before_any_request() {
        for words in [
            &["add-ssh-key", "m", "--user=u"][..],
            &["add-ssh-key", "m", "--value=k"],
            &["add-ssh-key", "m", "-u=u", "--value=k", "--file=f"],
            &["add-ssh-key", "m", "-u=u", "--value=k", "--create-secret", "--update-secret"],
            &["set-password", "m", "--user=u"],
            &["set-password", "m", "--user=u", "--password=p", "--password-file=f"],
        ] {
            assert!(parse([&["kubectl-virt", "credentials"], words].concat()).is_err(), "{words:?}");
        }
    }
}
