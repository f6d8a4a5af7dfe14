//! Tests of networks.

use super::*;

#[test]
fn networks_are_requested_by_annotations() {
    let interfaces = json!([
        {"name": "default", "masquerade": {}},
        {"name": "lan", "bridge": {}},
        {"name": "far", "bridge": {}, "macAddress": "02-00-00-00-00-0A"},
        {"name": "gone", "bridge": {}, "state": "absent"},
    ]);
    let networks = json!([
        {"name": "default", "pod": {}},
        {"name": "lan", "multus": {"networkName": "blue"}},
        {"name": "far", "multus": {"networkName": "depot/green"}},
        {"name": "gone", "multus": {"networkName": "grey"}},
    ]);
    let change = json!({"domain": {"devices": {"interfaces": interfaces}}, "networks": networks});
    let annotations = rendered(merged(small(), &change))["metadata"]["annotations"].clone();
    let asked: Value = serde_json::from_str(annotations["k8s.v1.cni.cncf.io/networks"].as_str().unwrap()).unwrap();
    assert_eq!(
        asked,
        json!([
            {"name": "blue", "namespace": "shop", "interface": "pod094a367b026"},
            {"name": "green", "namespace": "depot", "mac": "02:00:00:00:00:0a", "interface": "pod512eea46ceb"},
        ])
    );
    assert_eq!(annotations["v1.multus-cni.io/default-network"], Value::Null);
    assert_eq!(annotations["traffic.sidecar.istio.io/kubevirtInterfaces"], "k6t-eth0");

    let change = json!({
        "domain": {"devices": {"interfaces": [{"name": "main", "bridge": {}}]}},
        "networks": [{"name": "main", "multus": {"networkName": "depot/green", "default": true}}],
    });
    let annotations = rendered(merged(small(), &change))["metadata"]["annotations"].clone();
    assert_eq!(annotations["v1.multus-cni.io/default-network"], "depot/green");
    assert_eq!(annotations["k8s.v1.cni.cncf.io/networks"], Value::Null);
}

#[test]
fn resources_of_networks_are_requested_unless_another_program_does() {
    let change = json!({
        "domain": {"devices": {"interfaces": [{"name": "a", "bridge": {}}, {"name": "b", "bridge": {}}, {"name": "c", "bridge": {}}]}},
        "networks": [
            {"name": "a", "multus": {"networkName": "cards"}},
            {"name": "b", "multus": {"networkName": "shop/cards"}},
            {"name": "c", "multus": {"networkName": "depot/plain"}},
        ],
    });
    let (instance, config, claims) = (vmi(merged(small(), &change)), ClusterConfig::default(), BTreeMap::new());
    let definition = |resource: Option<&str>| {
        Arc::new(CachedNetwork { resource: resource.map(str::to_owned), ..CachedNetwork::default() })
    };
    let mut definitions = BTreeMap::from([("shop/cards".to_owned(), definition(Some("example.org/card")))]);
    let render_with = |definitions: Option<&BTreeMap<String, Arc<CachedNetwork>>>| {
        let inputs = Inputs { definitions, ..inputs(&instance, &config, &claims) };
        render(&inputs).map(|pod| serde_json::to_value(pod).unwrap()["spec"]["containers"][0]["resources"].clone())
    };
    assert_eq!(render_with(Some(&definitions)), Err(RenderError::DefinitionNotFound("depot/plain".to_owned())));
    definitions.insert("depot/plain".to_owned(), definition(None));
    let resources = render_with(Some(&definitions)).unwrap();
    assert_eq!(
        (&resources["requests"]["example.org/card"], &resources["limits"]["example.org/card"]),
        (&json!("2"), &json!("2"))
    );
    assert_eq!(render_with(None).unwrap()["requests"]["example.org/card"], Value::Null);
}

#[test]
fn resource_of_a_network_that_the_user_requests_as_well_is_counted_once() {
    let change = json!({
        "domain": {
            "devices": {"interfaces": [{"name": "a", "bridge": {}}]},
            "resources": {"limits": {"example.org/card": "1"}},
        },
        "networks": [{"name": "a", "multus": {"networkName": "cards"}}],
    });
    let (instance, config, claims) = (vmi(merged(small(), &change)), ClusterConfig::default(), BTreeMap::new());
    let card = CachedNetwork { resource: Some("example.org/card".to_owned()), ..CachedNetwork::default() };
    let definitions = BTreeMap::from([("shop/cards".to_owned(), Arc::new(card))]);
    let pod = render(&Inputs { definitions: Some(&definitions), ..inputs(&instance, &config, &claims) }).unwrap();
    let resources = serde_json::to_value(pod).unwrap()["spec"]["containers"][0]["resources"].clone();
    for amounts in ["requests", "limits"] {
        assert_eq!(resources[amounts]["example.org/card"], "1", "{resources}");
    }
}

#[test]
fn annotation_of_plugins_is_not_copied_from_a_vmi() {
    let mut instance = vmi(small());
    let annotations = instance.metadata.annotations.get_or_insert_default();
    annotations.insert("k8s.v1.cni.cncf.io/network-status".to_owned(), "[]".to_owned());
    annotations.insert("k8s.v1.cni.cncf.io/networks".to_owned(), "blue".to_owned());
    let pod = rendered_vmi(&instance, &ClusterConfig::default(), NamespaceLimits::default()).unwrap();
    assert_eq!(pod["metadata"]["annotations"]["k8s.v1.cni.cncf.io/network-status"], Value::Null);
    // As on any pod.
    assert_eq!(pod["metadata"]["annotations"]["k8s.v1.cni.cncf.io/networks"], "blue");
}

#[test]
fn ports_of_the_pod_are_those_of_its_primary_network() {
    let interfaces = json!([
        {"name": "default", "bridge": {}, "ports": [{"name": "http", "port": 80}]},
        {"name": "lan", "bridge": {}, "ports": [{"name": "Web Server", "port": 80}]},
    ]);
    for primary in [json!({"pod": {}}), json!({"multus": {"networkName": "depot/green", "default": true}})] {
        let networks =
            json!([merged(json!({"name": "default"}), &primary), {"name": "lan", "multus": {"networkName": "blue"}}]);
        let change = json!({"domain": {"devices": {"interfaces": interfaces}}, "networks": networks});
        let pod = rendered(merged(small(), &change));
        let ports = json!([{"name": "http", "containerPort": 80, "protocol": "TCP"}]);
        assert_eq!(pod["spec"]["containers"][0]["ports"], ports);
    }
}
