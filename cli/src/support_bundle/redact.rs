//! Removes secrets from objects and texts before they become part of a bundle.
//!
//! Everything passes through here: objects through [`object`], logs and other texts through [`text`].

use serde_json::Value;

/// Replaces a secret.
const REDACTED: &str = "<redacted>";

/// Fields of which every text below is a secret, or names one: data for guests usually contains passwords and keys.
/// Headers of a DataVolume can authenticate its import.
const WHOLE: [&str; 7] = [
    "accesscredentials",
    "userdata",
    "userdatabase64",
    "networkdata",
    "networkdatabase64",
    "ignitiondata",
    "extraheaders",
];
/// Lists of names with values that are secrets.
const NAMED_VALUES: [&str; 2] = ["env", "httpheaders"];
/// Annotation with a second copy of the object.
const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";
/// Names with such an end whose values are names of Secrets.
const REFERENCES: [&str; 2] = ["secret", "imagepullsecret"];
/// Ends of names whose values are secrets, in lower case without `-` and `_`.
const SECRET_NAMES: [&str; 18] = [
    "password",
    "passwd",
    "passphrase",
    "token",
    "secret",
    "apikey",
    "accesskey",
    "secretkey",
    "privatekey",
    "credential",
    "credentials",
    "authorization",
    "signature",
    "userdata",
    "userdatabase64",
    "networkdata",
    "networkdatabase64",
    "ignitiondata",
];
/// Path of webhooks; the secret segment follows.
const WEBHOOK_PATH: &str = "/admission/";
/// Shortest text that is a segment.
const MIN_SEGMENT: usize = 16;

/// Removes secrets from an object, and the metadata that no report needs. Objects of kind Secret keep nothing but their names.
pub(super) fn object(value: &mut Value) {
    if let Some(metadata) = value.get_mut("metadata").and_then(Value::as_object_mut) {
        metadata.remove("managedFields");
        if let Some(annotations) = metadata.get_mut("annotations").and_then(Value::as_object_mut) {
            annotations.remove(LAST_APPLIED);
        }
    }
    match value["kind"].as_str() {
        Some("Secret") => {
            for field in ["data", "stringData"] {
                if value.get(field).is_some() {
                    value[field] = REDACTED.into();
                }
            }
        }
        // The paths of webhooks contain a secret segment, which keeps pods from calling them.
        Some("ValidatingWebhookConfiguration" | "MutatingWebhookConfiguration") => {
            for webhook in value["webhooks"].as_array_mut().into_iter().flatten() {
                for (pointer, field) in [("/clientConfig/service", "path"), ("/clientConfig", "url")] {
                    if let Some(parent) = webhook.pointer_mut(pointer).and_then(Value::as_object_mut)
                        && let Some(secret) = parent.get_mut(field)
                    {
                        *secret = REDACTED.into();
                    }
                }
            }
        }
        _ => {}
    }
    fields(value);
}

/// Removes secrets from the fields of a value.
fn fields(value: &mut Value) {
    match value {
        Value::Object(map) => {
            for (name, inner) in map {
                let name = plain(name);
                let is_whole = WHOLE.contains(&name.as_str()) || (inner.is_string() && is_secret_name(&name));
                if is_whole {
                    whole(inner);
                } else if NAMED_VALUES.contains(&name.as_str()) && inner.is_array() {
                    for entry in inner.as_array_mut().into_iter().flatten() {
                        match entry.get_mut("value") {
                            Some(secret) => *secret = REDACTED.into(),
                            None => fields(entry),
                        }
                    }
                } else if name == "cabundle" {
                    let length = inner.as_str().map_or(0, str::len);
                    *inner = format!("<{length} characters>").into();
                } else {
                    fields(inner);
                }
            }
        }
        Value::Array(items) => items.iter_mut().for_each(fields),
        Value::String(string) => *string = string_value(string),
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

/// Returns a text of an object without secrets. A text of JSON, as in annotations, is treated as an object.
fn string_value(string: &str) -> String {
    if string.starts_with(['{', '['])
        && let Ok(mut inner) = serde_json::from_str::<Value>(string)
    {
        object(&mut inner);
        return inner.to_string();
    }
    text(string)
}

/// Replaces all texts of a value.
fn whole(value: &mut Value) {
    match value {
        Value::Object(map) => map.values_mut().for_each(whole),
        Value::Array(items) => items.iter_mut().for_each(whole),
        Value::String(string) => *string = REDACTED.to_owned(),
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

/// Returns a name in lower case without separators.
fn plain(name: &str) -> String {
    name.chars().filter(char::is_ascii_alphanumeric).map(|c| c.to_ascii_lowercase()).collect()
}

fn is_secret_name(plain: &str) -> bool {
    SECRET_NAMES.iter().any(|end| plain.ends_with(end)) && !REFERENCES.contains(&plain)
}

/// Removes the secret segments from paths of webhooks, which kube-apiserver repeats in errors.
fn without_segments(text: &str) -> String {
    let mut parts = text.split(WEBHOOK_PATH);
    let mut result = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        result.push_str(WEBHOOK_PATH);
        let end = part.find(|c: char| !c.is_ascii_hexdigit()).unwrap_or(part.len());
        if end >= MIN_SEGMENT {
            result.push_str(REDACTED);
            result.push_str(&part[end..]);
        } else {
            result.push_str(part);
        }
    }
    result
}

/// Removes secrets from a text: private keys, tokens, passwords and signatures in URLs, segments of webhooks, and values after
/// names such as `password`.
pub(super) fn text(text: &str) -> String {
    let text = without_segments(text);
    let mut result = String::with_capacity(text.len());
    let mut in_key = false;
    for line in text.split_inclusive('\n') {
        if in_key {
            in_key = !is_key_edge(line, "-----END ");
            continue;
        }
        if let Some((before, rest)) = split_key(line) {
            result.push_str(&self::line(before));
            result.push_str(REDACTED);
            result.push('\n');
            in_key = !is_key_edge(rest, "-----END ");
            continue;
        }
        result.push_str(&self::line(line));
    }
    result
}

/// Splits a line before the begin of a private key.
fn split_key(line: &str) -> Option<(&str, &str)> {
    let begin = line.find("-----BEGIN ")?;
    let (before, rest) = line.split_at(begin);
    is_key_edge(rest, "-----BEGIN ").then_some((before, rest))
}

fn is_key_edge(line: &str, mark: &str) -> bool {
    line.split(mark).skip(1).any(|rest| rest.split("-----").next().is_some_and(|name| name.contains("PRIVATE KEY")))
}

/// Returns true for characters of words: everything but space, quotes and separators of lists.
fn is_of_word(c: char) -> bool {
    !c.is_whitespace() && !"\"'`,;()[]{}<>&|\\".contains(c)
}

/// Removes secrets from a line.
fn line(line: &str) -> String {
    words(line, false)
}

/// Removes secrets from words. `in_query`: they begin within the query of a URL.
fn words(line: &str, mut in_query: bool) -> String {
    let mut result = String::with_capacity(line.len());
    let mut rest = line;
    while let Some(first) = rest.chars().next() {
        let is_word = is_of_word(first);
        let end = rest.find(|c| is_of_word(c) != is_word).unwrap_or(rest.len());
        let (part, after) = rest.split_at(end);
        if is_word {
            in_query |= part.contains('?');
        } else {
            // Texts of JSON and HTML escape the separator of parameters.
            in_query &= part.chars().all(|c| "&;\\".contains(c));
        }
        if !is_word {
            result.push_str(part);
            rest = after;
        } else if in_query && let Some(at) = signature_at(part) {
            result.push_str(&part[..at]);
            result.push_str(REDACTED);
            rest = after;
        } else if let Some(at) = secret_at(part, after) {
            let (name, value) = rest.split_at(at);
            let (lead, value_end) = value_of(value);
            result.push_str(name);
            result.push_str(&value[..lead]);
            if value_end > lead {
                result.push_str(REDACTED);
            }
            rest = &value[value_end..];
        } else {
            result.push_str(&word(part));
            rest = after;
        }
    }
    result
}

/// Returns where the value begins if a parameter of a query is the signature of a URL, with which anybody can read the data.
fn signature_at(parameter: &str) -> Option<usize> {
    let at = parameter.find('=').filter(|_| !parameter.contains("://"))?;
    let name = plain(parameter[..at].rsplit('?').next()?);
    let name = name.strip_prefix("u0026").unwrap_or(&name);
    (name == "sig" || name.ends_with("signature")).then_some(at + 1)
}

fn is_scheme(word: &str) -> bool {
    ["bearer", "basic"].contains(&word.to_ascii_lowercase().as_str())
}

/// Returns where the secret value begins that a word names: `password=x`, `password: x`, `"password": "x"`, `--password x`,
/// `Bearer x`.
fn secret_at(word: &str, after: &str) -> Option<usize> {
    if is_scheme(word) {
        // Words of a sentence follow "basic"; a token has no such length.
        let next = after.split_whitespace().next().unwrap_or_default();
        return (after.starts_with(' ') && next.len() >= 16).then_some(word.len());
    }
    if word.contains("://") {
        return None;
    }
    let mut begin = 0;
    for (at, _) in word.match_indices(['=', ':']) {
        if is_secret_name(&plain(&word[begin..at])) {
            return Some(at + 1);
        }
        begin = at + 1;
    }
    let is_assigned =
        word.starts_with("--") || after.trim_start_matches(['"', '\'', '\\']).trim_start().starts_with([':', '=']);
    (is_assigned && is_secret_name(&plain(&word[begin..]))).then_some(word.len())
}

/// Returns the begin and the end of a secret value. It ends at its closing quote, or at a space.
fn value_of(text: &str) -> (usize, usize) {
    let is_lead = |c: char| c.is_whitespace() || "=:\"'\\".contains(c);
    let Some(start) = text.find(|c| !is_lead(c)) else { return (text.len(), text.len()) };
    let (lead, value) = text.split_at(start);
    let end = match lead.chars().next_back() {
        Some(quote @ ('"' | '\'')) => value.find([quote, '\n']),
        _ => value.find(char::is_whitespace),
    };
    let end = start + end.unwrap_or(value.len());
    if is_scheme(&text[start..end]) {
        let (lead, next) = value_of(&text[end..]);
        return (end + lead, end + next);
    }
    (start, end)
}

/// Removes secrets from a word that names none: the user of a URL, and tokens.
fn word(word: &str) -> String {
    if let Some(at) = word.find("://") {
        let (scheme, rest) = word.split_at(at + 3);
        let authority = rest.find(['/', '?']).unwrap_or(rest.len());
        let (user, rest) = match rest[..authority].rfind('@') {
            Some(user) => (REDACTED, &rest[user..]),
            None => ("", rest),
        };
        // A query may contain a token.
        return match rest.split_once('?') {
            Some((path, query)) => format!("{scheme}{user}{path}?{}", words(query, true)),
            None => format!("{scheme}{user}{rest}"),
        };
    }
    let begin = word.rfind(['=', ':']).map_or(0, |at| at + 1);
    if is_token(&word[begin..]) {
        return format!("{}{REDACTED}", &word[..begin]);
    }
    word.to_owned()
}

/// Returns true for a JSON web token, as service accounts have.
fn is_token(word: &str) -> bool {
    let parts: Vec<&str> = word.split('.').collect();
    let is_part =
        |part: &&str| part.len() >= 4 && part.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_=".contains(&b));
    parts.len() == 3 && word.starts_with("eyJ") && parts.iter().all(is_part)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn objects_lose_secrets_and_nothing_else() {
        let token = "eyJhbGciOi.eyJpc3MiOi.c2lnbmF0dXJl";
        for (given, expected) in [
            (
                json!({"volumes": [{"cloudInitNoCloud": {"userData": "#cloud-config\npassword: x", "networkData": "a",
                    "secretRef": {"name": "seed"}}}]}),
                json!({"volumes": [{"cloudInitNoCloud": {"userData": REDACTED, "networkData": REDACTED,
                    "secretRef": {"name": "seed"}}}]}),
            ),
            (
                json!({"cloudInitConfigDrive": {"userDataBase64": "eA==", "networkDataBase64": "eA=="}}),
                json!({"cloudInitConfigDrive": {"userDataBase64": REDACTED, "networkDataBase64": REDACTED}}),
            ),
            (
                json!({"accessCredentials": [{"sshPublicKey": {"source": {"secret": {"secretName": "keys"}}}}]}),
                json!({"accessCredentials": [{"sshPublicKey": {"source": {"secret": {"secretName": REDACTED}}}}]}),
            ),
            (json!({"sysprep": {"secret": {"name": "answers"}}}), json!({"sysprep": {"secret": {"name": "answers"}}})),
            (
                json!({"env": [{"name": "A", "value": "b"}, {"name": "C", "valueFrom": {"fieldRef": {"fieldPath": "d"}}}]}),
                json!({"env": [{"name": "A", "value": REDACTED},
                    {"name": "C", "valueFrom": {"fieldRef": {"fieldPath": "d"}}}]}),
            ),
            (
                json!({"httpGet": {"httpHeaders": [{"name": "X-Auth", "value": "b"}]}}),
                json!({"httpGet": {"httpHeaders": [{"name": "X-Auth", "value": REDACTED}]}}),
            ),
            (
                json!({"adminPassword": "p", "api_token": "t"}),
                json!({"adminPassword": REDACTED, "api_token": REDACTED}),
            ),
            (json!({"automountServiceAccountToken": false}), json!({"automountServiceAccountToken": false})),
            (json!({"token": {"expirationSeconds": 1}}), json!({"token": {"expirationSeconds": 1}})),
            (json!({"message": format!("got {token}")}), json!({"message": format!("got {REDACTED}")})),
            (
                json!({"metadata": {"name": "a", "managedFields": [], "annotations": {
                    LAST_APPLIED: "{\"spec\": {\"userData\": \"x\"}}", "copy": "{\"userData\":\"x\",\"a\":1}"}}}),
                json!({"metadata": {"name": "a", "annotations": {
                    "copy": format!("{{\"a\":1,\"userData\":\"{REDACTED}\"}}")}}}),
            ),
            (
                json!({"kind": "Secret", "metadata": {"name": "a"}, "data": {"k": "eA=="}, "stringData": {"k": "x"}}),
                json!({"kind": "Secret", "metadata": {"name": "a"}, "data": REDACTED, "stringData": REDACTED}),
            ),
            (
                json!({"kind": "ValidatingWebhookConfiguration", "webhooks": [{"name": "w", "clientConfig": {
                    "caBundle": "eA==", "service": {"name": "virt-api", "path": "/segment/x"}}}]}),
                json!({"kind": "ValidatingWebhookConfiguration", "webhooks": [{"name": "w", "clientConfig": {
                    "caBundle": "<4 characters>", "service": {"name": "virt-api", "path": REDACTED}}}]}),
            ),
            (
                json!({"metadata": {"annotations": {"kubevirt.io/ignitiondata": "{\"ignition\": {}}"}}}),
                json!({"metadata": {"annotations": {"kubevirt.io/ignitiondata": REDACTED}}}),
            ),
            (
                json!({"domain": {"firmware": {"uuid": "5d307ca9-b3ef-428c-8861-06e72d69f223"}, "cpu": {"cores": 2}}}),
                json!({"domain": {"firmware": {"uuid": "5d307ca9-b3ef-428c-8861-06e72d69f223"}, "cpu": {"cores": 2}}}),
            ),
        ] {
            let mut found = given.clone();
            object(&mut found);
            assert_eq!(found, expected, "{given}");
        }
    }

    #[test]
    fn urls_lose_signatures() {
        for (given, expected) in [
            (
                "https://a.blob.core.windows.net/c/d.img?sv=2024-11-04&sp=r&sig=aB%2Bc%3D next",
                "https://a.blob.core.windows.net/c/d.img?sv=2024-11-04&sp=r&sig=<redacted> next",
            ),
            ("Get \"https://a.net/b?SIG=x+y/z=&sp=r\": EOF", "Get \"https://a.net/b?SIG=<redacted>&sp=r\": EOF"),
            ("GET /c/d?sp=r&amp;sig=x", "GET /c/d?sp=r&amp;sig=<redacted>"),
            (
                "{\"url\":\"https://a.net/b?sp=r\\u0026sig=x\",\"code\":403}",
                "{\"url\":\"https://a.net/b?sp=r\\u0026sig=<redacted>\",\"code\":403}",
            ),
            (
                "https://b.s3.amazonaws.com/k?X-Amz-Date=1&X-Amz-Signature=0f&X-Amz-Expires=9",
                "https://b.s3.amazonaws.com/k?X-Amz-Date=1&X-Amz-Signature=<redacted>&X-Amz-Expires=9",
            ),
            (
                "https://b.s3.amazonaws.com/k?X-Amz-Date=1&X-Amz-Credential=A%2F1&X-Amz-Signature=0f next",
                "https://b.s3.amazonaws.com/k?X-Amz-Date=1&X-Amz-Credential=<redacted> next",
            ),
            (
                "https://storage.googleapis.com/b/o?GoogleAccessId=a%40b&Signature=x%2By%3D&Expires=1",
                "https://storage.googleapis.com/b/o?GoogleAccessId=a%40b&Signature=<redacted>&Expires=1",
            ),
            ("https://a.net/o?X-Goog-Signature=0f", "https://a.net/o?X-Goog-Signature=<redacted>"),
            ("x-signature: 0f", "x-signature: <redacted>"),
            // Not signatures.
            ("audit: pid=1 sig=11", "audit: pid=1 sig=11"),
            ("why? sig=11", "why? sig=11"),
            ("https://a.net/b?design=x&sign=y", "https://a.net/b?design=x&sign=y"),
        ] {
            assert_eq!(text(given), expected, "{given}");
        }
    }

    #[test]
    fn texts_lose_secrets_and_nothing_else() {
        let jwt = "eyJhbGciOiJSUzI1NiJ9.eyJpc3MiOiJrOHMifQ.c2lnbmF0dXJl";
        for (given, expected) in [
            (format!("token {jwt} used"), "token <redacted> used"),
            (format!("Authorization: Bearer {jwt}"), "Authorization: Bearer <redacted>"),
            ("authorization: Basic dXNlcjpwYXNzd29yZA==".into(), "authorization: Basic <redacted>"),
            (format!("jwt={jwt}"), "jwt=<redacted>"),
            ("password: hunter2".into(), "password: <redacted>"),
            ("PASSWORD=hunter2 next".into(), "PASSWORD=<redacted> next"),
            ("{\"password\":\"hunter2\",\"a\":1}".into(), "{\"password\":\"<redacted>\",\"a\":1}"),
            ("{\"clientSecret\": \"hunter2\"}".into(), "{\"clientSecret\": \"<redacted>\"}"),
            ("qemu --password hunter2 -m 1".into(), "qemu --password <redacted> -m 1"),
            ("api_key=ab,c(d b=c".into(), "api_key=<redacted> b=c"),
            ("{\"password\": \"two words\", \"a\": 1}".into(), "{\"password\": \"<redacted>\", \"a\": 1}"),
            ("{\\\"password\\\":\\\"x\\\"}".into(), "{\\\"password\\\":\\\"<redacted>\"}"),
            ("passwd='a b' c".into(), "passwd='<redacted>' c"),
            ("password:\n".into(), "password:\n"),
            ("a=b:token=c".into(), "a=b:token=<redacted>"),
            ("GET https://joe:pw@example.com/a?b=c".into(), "GET https://<redacted>@example.com/a?b=c"),
            ("wss://a:b@example.com/x?token=abc".into(), "wss://<redacted>@example.com/x?token=<redacted>"),
            ("userData: I2Nsb3Vk".into(), "userData: <redacted>"),
            (
                "a\n-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----\nb\n".into(),
                "a\n<redacted>\nb\n",
            ),
            ("key: -----BEGIN PRIVATE KEY-----MIIE-----END PRIVATE KEY-----\nb".into(), "key: <redacted>\nb"),
            ("-----BEGIN PRIVATE KEY-----\nthe log ends".into(), "<redacted>\n"),
            ("kubevirt.io/ignitiondata: eA==".into(), "kubevirt.io/ignitiondata: <redacted>"),
            (
                "Post \"https://virt-api.kubevirt.svc:443/admission/0123456789abcdef0123/vmis-mutate?timeout=5s\": EOF"
                    .into(),
                "Post \"https://virt-api.kubevirt.svc:443/admission/<redacted>/vmis-mutate?timeout=5s\": EOF",
            ),
            ("path=/admission/0123456789abcdef0123".into(), "path=/admission/<redacted>"),
            // Not secrets.
            ("GET /admission/abc/x".into(), "GET /admission/abc/x"),
            ("-----BEGIN CERTIFICATE-----\nMIIE\n".into(), "-----BEGIN CERTIFICATE-----\nMIIE\n"),
            ("no basic support for it".into(), "no basic support for it"),
            ("login: root, 2 users".into(), "login: root, 2 users"),
            ("a token is read; the secret exists".into(), "a token is read; the secret exists"),
            ("node=\"a\" phase: Running".into(), "node=\"a\" phase: Running"),
            ("image registry.example.com/a:v1.2.3@sha256:0".into(), "image registry.example.com/a:v1.2.3@sha256:0"),
            ("12:30:01 http://example.com/a?b=c".into(), "12:30:01 http://example.com/a?b=c"),
            ("Passwörter: äöü 🙂".into(), "Passwörter: äöü 🙂"),
        ] {
            assert_eq!(text(&given), expected, "{given}");
        }
    }
}
