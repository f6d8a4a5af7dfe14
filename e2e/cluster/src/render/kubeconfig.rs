//! Renders self-contained kubeconfig files, which can be copied.

use base64::{Engine, engine::general_purpose::STANDARD};
use serde_json::json;

use crate::certificates::Pair;

/// Renders a kubeconfig with one cluster, one user and one context, all called `name`.
#[must_use]
pub(crate) fn kubeconfig(name: &str, server: &str, authority: &str, user: &Pair) -> String {
    super::json_text(&json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": name, "cluster": {
            "server": server,
            "certificate-authority-data": STANDARD.encode(authority),
        }}],
        "users": [{"name": name, "user": {
            "client-certificate-data": STANDARD.encode(&user.certificate),
            "client-key-data": STANDARD.encode(&user.key),
        }}],
        "contexts": [{"name": name, "context": {"cluster": name, "user": name}}],
        "current-context": name,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kubeconfig_selects_its_own_context_and_carries_the_key_inline() {
        let pair = Pair { certificate: "CERT".into(), key: "KEY".into() };
        let text = kubeconfig("ferrovirt", "https://10.0.0.1:6443", "CA", &pair);
        let value: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(value["current-context"], "ferrovirt");
        assert_eq!(value["users"][0]["user"]["client-key-data"], STANDARD.encode("KEY"));
        assert_eq!(value["clusters"][0]["cluster"]["server"], "https://10.0.0.1:6443");
    }
}
