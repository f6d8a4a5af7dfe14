//! Documents, and the users who may read them.

use super::*;
use crate::auth::authentication::{ALLOWED_NAMES_KEY, CLIENT_CA_KEY};

#[tokio::test]
async fn profiles_are_for_users_who_may_read_their_document() {
    use rcgen::{BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair};

    let mut params = CertificateParams::new(Vec::<String>::new()).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let key = KeyPair::generate().unwrap();
    let authority = params.self_signed(&key).unwrap().pem();
    let issuer = Issuer::new(params, key);
    let mut params = CertificateParams::new(Vec::<String>::new()).unwrap();
    params.distinguished_name.push(DnType::CommonName, "front-proxy-client");
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    let leaf = params.signed_by(&KeyPair::generate().unwrap(), &issuer).unwrap();
    let peer = Peer::new("10.0.0.1:1".parse().unwrap(), &[leaf.der().clone()]);
    let trust = FrontProxy::fixed(
        [(CLIENT_CA_KEY.to_owned(), authority), (ALLOWED_NAMES_KEY.to_owned(), "[]".to_owned())].into(),
    );

    const REVIEWS: &str = "/apis/authorization.k8s.io/v1/subjectaccessreviews";
    const PODS: &str = "/api/v1/namespaces/kubevirt/pods";
    for (allowed, code, calls_made) in [(false, StatusCode::UNAUTHORIZED, 1), (true, StatusCode::OK, 2)] {
        let review = json!({"spec": {}, "status": {"allowed": allowed}});
        let pods = json!({"apiVersion": "v1", "kind": "PodList", "metadata": {}, "items": []});
        let config = ClusterConfig { cluster_profiler: true, ..ClusterConfig::default() };
        let (server, calls) = server(config, vec![(REVIEWS, review), (PODS, pods)]);
        let server = Server { front_proxy: trust.clone(), ..server };
        let request = Request::get("/apis/subresources.kubevirt.io/v1/start-cluster-profiler")
            .header("X-Remote-User", "alice")
            .header("X-Remote-Group", "system:authenticated")
            .body(Body::empty())
            .unwrap();
        let (status, text) = read(Box::pin(server.answer(&peer, request)).await).await;
        assert_eq!(status, code, "{text}");
        let calls = calls.lock().unwrap();
        assert_eq!(calls.len(), calls_made, "{calls:?}");
        assert_eq!(calls[0].0, format!("POST {REVIEWS}"));
        assert_eq!(calls[0].1["spec"]["user"], "alice");
        assert_eq!(
            calls[0].1["spec"]["resourceAttributes"],
            json!({
                "verb": "list", "group": "subresources.kubevirt.io", "version": "v1",
                "resource": "start-cluster-profiler",
            })
        );
    }
}

#[tokio::test]
async fn image_is_cached() {
    let installation = json!({
        "apiVersion": "kubevirt.io/v1", "kind": "KubeVirt", "metadata": {"name": "kubevirt"}, "spec": {},
        "status": {"observedKubeVirtRegistry": "registry.example", "observedKubeVirtVersion": "v1"},
    });
    let list = json!({"apiVersion": "kubevirt.io/v1", "kind": "KubeVirtList", "metadata": {}, "items": [installation]});
    let objects = vec![("/apis/kubevirt.io/v1/namespaces/kubevirt/kubevirts", list)];
    let (server, calls) = server(ClusterConfig::default(), objects);
    for _ in 0..3 {
        let (status, text) = read(server.guestfs.answer(&server.client, &server.namespace).await).await;
        assert_eq!(status, StatusCode::OK, "{text}");
    }
    assert_eq!(calls.lock().unwrap().len(), 1);
    let (without, calls) = self::server(ClusterConfig::default(), vec![]);
    for _ in 0..3 {
        let (status, text) = read(without.guestfs.answer(&without.client, &without.namespace).await).await;
        assert_eq!(status, StatusCode::INTERNAL_SERVER_ERROR, "{text}");
    }
    assert_eq!(calls.lock().unwrap().len(), 1);
}

#[tokio::test]
async fn front_proxy_certificate_proves_its_address_with_any_request() {
    use std::collections::BTreeMap;

    use k8s_openapi::api::core::v1::ConfigMap;
    use rcgen::{BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair};

    let params = |name: &str| {
        let mut params = CertificateParams::new(Vec::<String>::new()).unwrap();
        params.distinguished_name.push(DnType::CommonName, name);
        params
    };
    let authority = || {
        let mut params = params("front-proxy-ca");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        let pem = params.self_signed(&key).unwrap().pem();
        (pem, Issuer::new(params, key))
    };
    let leaf = |issuer: &Issuer<'_, KeyPair>, name: &str| {
        let mut params = params(name);
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        vec![params.signed_by(&KeyPair::generate().unwrap(), issuer).unwrap().der().clone()]
    };
    let ((pem, issuer), (_, other)) = (authority(), authority());
    let (server, _) = server(ClusterConfig::default(), vec![]);
    server.front_proxy.apply(Some(ConfigMap {
        data: Some(BTreeMap::from([
            (CLIENT_CA_KEY.to_owned(), pem),
            (ALLOWED_NAMES_KEY.to_owned(), r#"["front-proxy-client"]"#.to_owned()),
        ])),
        ..ConfigMap::default()
    }));
    for (number, (chain, proves)) in [
        (vec![], false),
        (leaf(&other, "front-proxy-client"), false),
        (leaf(&issuer, "another-name"), false),
        (leaf(&issuer, "front-proxy-client"), true),
    ]
    .into_iter()
    .enumerate()
    {
        let peer = Peer::new(([192, 0, 2, u8::try_from(number).unwrap()], 1).into(), &chain);
        let request = Request::get("/apis/subresources.kubevirt.io/v1").body(Body::empty()).unwrap();
        assert_eq!(server.answer(&peer, request).await.status(), StatusCode::OK);
        assert_eq!(server.trusted.contains(peer.address.ip()), proves, "{number}");
    }
}
