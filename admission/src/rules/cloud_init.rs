//! User data and network configuration that nothing in the guest reads. The reference accepts them, so that they cause
//! warnings only. A warning never quotes the data, which can contain passwords.

use std::fmt;

use api::VirtualMachineInstanceSpec;
use serde::{
    Deserialize, Deserializer,
    de::{IgnoredAny, MapAccess, SeqAccess, Visitor},
};

use super::volumes::{CLOUD_INIT_MAX, decode_base64};

/// Beginnings of user data that cloud-init reads, in lower case. It ignores the case, and blank lines before them.
const HEADERS: [&str; 6] =
    ["#cloud-config", "#!", "#include", "#cloud-boothook", "#part-handler", "## template: jinja"];
/// Beginnings for cloudbase-init, Ignition and Talos.
const OTHERS: [&str; 6] = ["#ps1", "rem cmd", "<powershell>", "<script>", "{", "version: v1alpha1"];
/// Beginning of compressed data.
const GZIP: [u8; 2] = [0x1f, 0x8b];
/// Bytes in which cloud-init looks for the header of a MIME message.
const MIME_WITHIN: usize = 4096;

/// Reasons why a guest does not use its data.
#[derive(Debug, Eq, PartialEq, thiserror::Error)]
enum Unread {
    #[error(
        "cloud-init ignores this user data: it must begin with #cloud-config, #! and a program, #include, #cloud-boothook, \
         #part-handler or ## template: jinja, or be a MIME message or compressed by gzip"
    )]
    Header,
    #[error("a script must begin with #!, without blank lines or spaces before it")]
    ScriptIndented,
    #[error("cloud-init ignores this #cloud-config: it is not valid YAML: {0}")]
    Yaml(String),
    #[error("cloud-init ignores this #cloud-config: it is no mapping of keys to values")]
    NoMapping,
    #[error("cloud-init ignores this network configuration: it is not valid YAML: {0}")]
    Network(String),
}

/// Checks data of one type.
type Check = fn(&[u8]) -> Result<(), Unread>;

/// Returns a warning for each inline cloud-init datum that no guest reads.
pub(crate) fn warnings(root: &str, spec: &VirtualMachineInstanceSpec) -> Vec<String> {
    let mut warnings = Vec::new();
    for (index, volume) in spec.volumes.iter().enumerate() {
        let sources = [
            volume.cloud_init_no_cloud.as_ref().map(|source| {
                let network = (&source.network_data, &source.network_data_base64);
                ("cloudInitNoCloud", (&source.user_data, &source.user_data_base64), network)
            }),
            volume.cloud_init_config_drive.as_ref().map(|source| {
                let network = (&source.network_data, &source.network_data_base64);
                ("cloudInitConfigDrive", (&source.user_data, &source.user_data_base64), network)
            }),
        ];
        for (source, user, network) in sources.into_iter().flatten() {
            let path = format!("{root}.volumes[{index}].{source}");
            let checks: [(_, _, Check); 2] =
                [("userData", user, check_user_data), ("networkData", network, check_network)];
            for (field, (text, encoded), check) in checks {
                let decoded = encoded.as_deref().filter(|encoded| !encoded.is_empty()).and_then(decode_base64);
                let plain = text.as_deref().map(|text| text.as_bytes().to_vec());
                for (suffix, data) in [("", plain), ("Base64", decoded)] {
                    // Longer and empty data has errors of its own.
                    let Some(data) = data.filter(|data| (1..=CLOUD_INIT_MAX).contains(&data.len())) else { continue };
                    warnings.extend(check(&data).err().map(|unread| format!("{path}.{field}{suffix}: {unread}")));
                }
            }
        }
    }
    warnings
}

fn check_user_data(data: &[u8]) -> Result<(), Unread> {
    let head = data.get(..MIME_WITHIN).unwrap_or(data).to_ascii_lowercase();
    if data.starts_with(&GZIP) || head.windows(13).any(|window| window == b"mime-version:") {
        return Ok(());
    }
    let text = std::str::from_utf8(data).map_err(|_| Unread::Header)?;
    let start = text.trim_start().to_ascii_lowercase();
    match HEADERS.into_iter().chain(OTHERS).find(|header| start.starts_with(header)) {
        None => Err(Unread::Header),
        Some("#!") if text.starts_with(char::is_whitespace) => Err(Unread::ScriptIndented),
        Some("#cloud-config") if !["-archive", "-jsonp"].iter().any(|other| start[13..].starts_with(other)) => {
            match parse(text).map_err(Unread::Yaml)? {
                Top::Mapping | Top::Empty => Ok(()),
                Top::Other => Err(Unread::NoMapping),
            }
        }
        Some(_) => Ok(()),
    }
}

fn check_network(data: &[u8]) -> Result<(), Unread> {
    let text = std::str::from_utf8(data).map_err(|error| Unread::Network(error.to_string()))?;
    parse(text).map(drop).map_err(Unread::Network)
}

/// Parses a document without its values. Returns the parser's message, without lines of the document.
fn parse(text: &str) -> Result<Top, String> {
    // cloud-init's parser takes the last of equal keys.
    let options = serde_saphyr::options! { duplicate_keys: serde_saphyr::DuplicateKeyPolicy::LastWins };
    serde_saphyr::from_str_with_options(text, options).map_err(|error| error.without_snippet().to_string())
}

/// Kind of the outermost value of a document.
#[derive(Debug, Eq, PartialEq)]
enum Top {
    Mapping,
    Empty,
    Other,
}

impl<'de> Deserialize<'de> for Top {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct AnyTop;

        impl<'de> Visitor<'de> for AnyTop {
            type Value = Top;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a document")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Top, A::Error> {
                while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
                Ok(Top::Mapping)
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Top, A::Error> {
                while items.next_element::<IgnoredAny>()?.is_some() {}
                Ok(Top::Other)
            }

            fn visit_unit<E>(self) -> Result<Top, E> {
                Ok(Top::Empty)
            }

            fn visit_none<E>(self) -> Result<Top, E> {
                Ok(Top::Empty)
            }

            fn visit_bool<E>(self, _: bool) -> Result<Top, E> {
                Ok(Top::Other)
            }

            fn visit_i64<E>(self, _: i64) -> Result<Top, E> {
                Ok(Top::Other)
            }

            fn visit_u64<E>(self, _: u64) -> Result<Top, E> {
                Ok(Top::Other)
            }

            fn visit_f64<E>(self, _: f64) -> Result<Top, E> {
                Ok(Top::Other)
            }

            fn visit_str<E>(self, _: &str) -> Result<Top, E> {
                Ok(Top::Other)
            }
        }

        deserializer.deserialize_any(AnyTop)
    }
}

#[cfg(test)]
mod tests {
    use base64::{Engine, engine::general_purpose::STANDARD};
    use serde_json::json;

    use super::*;
    use crate::rules::testing::vmi_spec;

    /// Returns the beginning of the reason why data is not read, or nothing.
    fn reason(data: &str) -> String {
        check_user_data(data.as_bytes()).err().map(|unread| unread.to_string()).unwrap_or_default()
    }

    #[test]
    fn headers_of_cloud_init_and_of_other_programs_are_known() {
        for data in [
            "#cloud-config\nhostname: a\n",
            "\n\n  #Cloud-Config\nhostname: a\n",
            "#cloud-config",
            "#cloud-config\nruncmd:\n- [sh, -c, 'echo a: b']\n1: c\na: 1\na: 2\nb: !!binary aGk=\n",
            "#cloud-config\n--- \n{a: *b, c: &b d}\n".replace("*b", "e").as_str(),
            "#cloud-config-archive\n- content: a\n",
            "#cloud-config-jsonp\n[]\n",
            "#!/bin/sh\necho a\n",
            "#include\nhttps://a\n",
            "#include-once\nhttps://a\n",
            "#cloud-boothook\necho a\n",
            "#part-handler\n",
            "## template: jinja\n#cloud-config\na: {{ v1 }}\n",
            "Content-Type: multipart/mixed; boundary=\"b\"\nMIME-Version: 1.0\n\n--b\n",
            "{\"ignition\": {\"version\": \"3.4.0\"}}",
            "#ps1_sysnative\nGet-Date\n",
            "version: v1alpha1\nmachine: {}\n",
        ] {
            assert_eq!(reason(data), "", "{data:?}");
        }
        assert_eq!(check_user_data(b"\x1f\x8b\x08\x00"), Ok(()));
    }

    #[test]
    fn data_that_no_guest_reads_is_found() {
        let header = "cloud-init ignores this user data: it must begin with";
        let yaml = "cloud-init ignores this #cloud-config: it is not valid YAML";
        let mapping = "cloud-init ignores this #cloud-config: it is no mapping";
        for (data, expected) in [
            ("hostname: a\n", header),
            ("# cloud-config\nhostname: a\n", header),
            ("\n\n#cloudconfig\nhostname: a\n", header),
            ("echo Hi\n", header),
            ("\u{feff}#cloud-config\na: b\n", header),
            ("\n#!/bin/sh\n", "a script must begin with #!"),
            ("#cloud-config\nhostname: a\n  user: b\n", yaml),
            ("#cloud-config\na: [b\n", yaml),
            ("#cloud-config\na:\tb\n\tc: d\n", yaml),
            ("#cloud-config\na: *missing\n", yaml),
            ("#cloud-config\na: b\n---\nc: d\n", yaml),
            ("#cloud-config\n- a\n", mapping),
            ("#cloud-config\nhostname\n", mapping),
        ] {
            assert!(reason(data).starts_with(expected), "{data:?}: {}", reason(data));
        }
        assert_eq!(check_user_data(b"\xff\xfe"), Err(Unread::Header));
        assert!(!reason("#cloud-config\npassword: secret\n  x: y\n").contains("secret"));
    }

    #[test]
    fn warnings_name_the_field_of_each_source() {
        let spec = vmi_spec(json!({"volumes": [
            {"name": "a", "cloudInitNoCloud": {"userData": "x", "networkData": "version: [", "userDataBase64": ""}},
            {"name": "b", "cloudInitConfigDrive": {"userDataBase64": STANDARD.encode("x"), "networkData": "{}"}},
            {"name": "c", "cloudInitConfigDrive": {"secretRef": {"name": "s"}, "userDataBase64": "%"}},
            {"name": "d", "cloudInitNoCloud": {"userData": "x".repeat(CLOUD_INIT_MAX + 1)}},
            {"name": "e", "cloudInitNoCloud": {"userDataBase64": STANDARD.encode("#cloud-config\na: b")}},
        ]}));
        let fields: Vec<String> =
            warnings("spec", &spec).iter().map(|text| text.split(": ").next().unwrap_or_default().to_owned()).collect();
        assert_eq!(
            fields,
            [
                "spec.volumes[0].cloudInitNoCloud.userData",
                "spec.volumes[0].cloudInitNoCloud.networkData",
                "spec.volumes[1].cloudInitConfigDrive.userDataBase64",
            ]
        );
    }
}
