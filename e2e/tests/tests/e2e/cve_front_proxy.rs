//! Calls to virt-api that bypass the API server, with forged headers of a front proxy.

use std::time::SystemTime;

use anyhow::{Context, Result, ensure};
use base64::{Engine, prelude::BASE64_STANDARD};
use bytes::Bytes;
use ferrovirt_e2e_cluster::certificates::{Authority, FRONT_PROXY_CLIENT, Pair, Subject};
use ferrovirt_e2e_tests::{Story, kubeconfig, own_cluster, skip, story, webhook::Endpoint};
use http::Method;
use serde_json::Value;

/// Headers of kube-apiserver for an administrator.
const FORGED: [(&str, &str); 3] =
    [("X-Remote-User", "kubernetes-admin"), ("X-Remote-Group", "system:masters"), ("X-Remote-Uid", "0")];

/// Requests for a VM that does not exist. An authenticated user gets 404.
const ASKED: [(Method, &str); 7] = [
    (Method::GET, "virtualmachineinstances/none/console"),
    (Method::GET, "virtualmachineinstances/none/vnc/screenshot"),
    (Method::GET, "virtualmachineinstances/none/portforward/22"),
    (Method::GET, "virtualmachineinstances/none/guestosinfo"),
    (Method::PUT, "virtualmachineinstances/none/pause"),
    (Method::PUT, "virtualmachines/none/stop"),
    (Method::GET, "virtualmachines/none/expand-spec"),
];

#[test]
fn cve_2025_64432_forged_headers_are_ignored_without_the_certificate_of_the_front_proxy() {
    story("cve-headers", async |s| {
        let api = Endpoint::of_cluster(&s.client).await?.without_prefix();
        let now = SystemTime::now();
        let mut strangers = vec![("no certificate".to_owned(), api.clone())];
        // Another authority with the same name.
        let (authority, own) = Authority::create("ferrovirt-front-proxy-ca", now)?;
        strangers.push(("a certificate signed by itself".to_owned(), showing(&api, &own)?));
        let pair = authority.sign(&client(FRONT_PROXY_CLIENT))?;
        strangers.push(("the right name by another authority".to_owned(), showing(&api, &pair)?));
        match administrator()? {
            Some(pair) => strangers.push(("the administrator's certificate".to_owned(), showing(&api, &pair)?)),
            None => skip("client certificate in the kubeconfig")?,
        }
        let plan = own_cluster()?;
        let authority = plan.map(|plan| Authority::load(&plan.pki(), "front-proxy-ca", now)).transpose()?;
        if let Some(authority) = &authority {
            for name in ["kubernetes-admin", "Front-Proxy-Client", "front-proxy-client.", "front-proxy-client ", ""] {
                let pair = authority.sign(&client(name))?;
                strangers.push((format!("the front proxy's authority, name {name:?}"), showing(&api, &pair)?));
            }
            let server = Subject { client: false, ..client(FRONT_PROXY_CLIENT) };
            let pair = authority.sign(&server)?;
            strangers.push(("the front proxy's authority, for a server".to_owned(), showing(&api, &pair)?));
        }
        for (who, stranger) in &strangers {
            for (method, path, code) in codes(s, stranger).await.with_context(|| who.clone())? {
                ensure!(code == 401, "{who}: {method} {path} was answered with {code}");
            }
        }
        // Counter-check: the certificate of the front proxy is accepted.
        if let Some(authority) = &authority {
            let proxy = showing(&api, &authority.sign(&client(FRONT_PROXY_CLIENT))?)?;
            for (method, path, code) in codes(s, &proxy).await.context("the front proxy")? {
                ensure!(code != 401 && code != 403, "the front proxy: {method} {path} was answered with {code}");
            }
        } else {
            skip("key of the front proxy's authority")?;
        }
        Ok(())
    });
}

fn client(name: &str) -> Subject {
    Subject { common_name: name.to_owned(), organization: None, names: Vec::new(), client: true }
}

fn showing(api: &Endpoint, pair: &Pair) -> Result<Endpoint> {
    api.with_client_certificate(&pair.certificate, &pair.key)
}

/// Returns the certificate of the kubeconfig's first user, if it has one.
fn administrator() -> Result<Option<Pair>> {
    let file = std::fs::read_to_string(kubeconfig()).context("cannot read the kubeconfig")?;
    let file: Value = serde_saphyr::from_str(&file)?;
    let user = &file["users"][0]["user"];
    let pem = |field: &str| -> Result<Option<String>> {
        let Some(text) = user[field].as_str() else { return Ok(None) };
        Ok(Some(String::from_utf8(BASE64_STANDARD.decode(text)?)?))
    };
    let pair = pem("client-certificate-data")?.zip(pem("client-key-data")?);
    Ok(pair.map(|(certificate, key)| Pair { certificate, key }))
}

/// Returns the status codes of all calls, each on its own connection.
async fn codes(s: &Story, api: &Endpoint) -> Result<Vec<(Method, String, u16)>> {
    let mut codes = Vec::new();
    for version in ["v1", "v1alpha3"] {
        for (method, object) in ASKED {
            let path = format!("/apis/subresources.kubevirt.io/{version}/namespaces/{}/{object}", s.namespace);
            let mut connection = api.connect().await?;
            let answer = connection.request(method.clone(), &path, &FORGED, Bytes::new()).await?;
            codes.push((method, path, answer.status));
        }
    }
    Ok(codes)
}
