//! The volume for cloud-init.

use std::{fmt::Write, fs::File, io::Read, path::Path};

use serde_json::json;

use super::{
    super::{object, params::invalid},
    Options, Parts,
    access::Access,
};
use crate::Error;

const NAME: &str = "cloudinitdisk";
const HEADER: &str = "#cloud-config";
/// Texts that YAML takes for another value.
const WORDS: [&str; 9] = ["true", "false", "null", "yes", "no", "on", "off", "y", "n"];
/// Longest file with a password.
const MAX_PASSWORD: u64 = 4096;

/// Adds the volume if flags ask for it, and if it has content or its type was chosen.
pub(super) fn add(parts: &mut Parts, options: &Options, access: &Access) -> Result<(), Error> {
    let network_data = options.cloud_init_network_data.as_deref().unwrap_or_default();
    let user_data = options.cloud_init_user_data.as_deref().unwrap_or_default();
    let is_chosen = options.cloud_init.is_some() || access.cloud_init.is_some();
    // User data of the user stays as they are.
    let lets_agent_write = options.ga_manage_ssh.unwrap_or(access.agent_writes_keys);
    if options.password_file.is_some() {
        eprintln!("WARNING: --password-file: The password is stored in cleartext in the VM definition!");
    }
    let chosen = options.cloud_init.as_deref().or(access.cloud_init).unwrap_or("nocloud").to_ascii_lowercase();
    let has_content = options.password_file.is_some()
        || !options.ssh_key.is_empty()
        || options.ga_manage_ssh.is_some()
        || access.agent_writes_keys
        || options.cloud_init_user_data.is_some()
        || options.cloud_init_network_data.is_some();
    let field = match chosen.as_str() {
        "none" => {
            if has_content {
                let ignored = "not creating a data source although other cloud-init options were set";
                eprintln!("WARNING: --cloud-init: was set to none, {ignored}");
            }
            return Ok(());
        }
        "configdrive" => "cloudInitConfigDrive",
        _ => "cloudInitNoCloud",
    };
    let generated = if user_data.is_empty() { config(options, lets_agent_write)? } else { String::new() };
    if !is_chosen && user_data.is_empty() && network_data.is_empty() && generated == HEADER {
        return Ok(());
    }
    if parts.volume(NAME).is_some() {
        return Err(Error::Usage(format!("there is already a volume with name \"{NAME}\"")));
    }
    let source = object([
        ("userData", json!(generated)),
        ("userDataBase64", json!(user_data)),
        ("networkDataBase64", json!(network_data)),
    ]);
    parts.add("cloud-init", NAME, json!({field: source}), None)
}

/// Returns the configuration for cloud-init.
fn config(options: &Options, lets_agent_write: bool) -> Result<String, Error> {
    let mut config = HEADER.to_owned();
    // Writing to a text cannot fail.
    if let Some(user) = options.user.as_deref().filter(|user| !user.is_empty()) {
        let _ = write!(config, "\nuser: {}", scalar(user));
    }
    if let Some(file) = &options.password_file {
        let password = password(file)?;
        if !password.is_empty() {
            let _ = write!(config, "\npassword: {}\nchpasswd: {{ expire: False }}", scalar(&password));
        }
    }
    if !options.ssh_key.is_empty() {
        config.push_str("\nssh_authorized_keys:");
        for key in &options.ssh_key {
            let _ = write!(config, "\n  - {key}");
        }
    }
    if lets_agent_write {
        config.push_str("\nruncmd:\n  - [ setsebool, -P, 'virt_qemu_ga_manage_ssh', 'on' ]");
    }
    Ok(config)
}

/// Returns a text as in YAML. virtctl never quotes, so that a password such as `12#4` or `1234` does not reach the guest.
fn scalar(text: &str) -> String {
    let is_plain = text.starts_with(|first: char| first.is_ascii_alphabetic())
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte))
        && !WORDS.iter().any(|word| word.eq_ignore_ascii_case(text));
    if is_plain { text.to_owned() } else { json!(text).to_string() }
}

fn password(file: &Path) -> Result<String, Error> {
    let mut text = String::new();
    let read = File::open(file).and_then(|opened| opened.take(MAX_PASSWORD).read_to_string(&mut text));
    read.map_err(|error| invalid("password-file", format_args!("{}: {error}", file.display())))?;
    Ok(text.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    #[test]
    fn texts_stay_texts_in_yaml() {
        for (text, expected) in [
            ("fedora", "fedora"),
            ("joe-1.a_b", "joe-1.a_b"),
            ("1234", "\"1234\""),
            ("a #b", "\"a #b\""),
            ("a: b", "\"a: b\""),
            ("No", "\"No\""),
            ("a\"\nb\u{e9}", "\"a\\\"\\nb\u{e9}\""),
        ] {
            assert_eq!(scalar(text), expected);
            let read: Value = serde_saphyr::from_str(&format!("password: {}", scalar(text))).unwrap();
            assert_eq!(read["password"], text);
        }
    }
}
