use k8s_openapi::api::certificates::v1::CertificateSigningRequest;
use rcgen::{CertificateParams, DnType, KeyPair};
use serde_json::{Value, json};

use super::*;

/// The objects that certificates are kept in, with the effects applied as the API server would.
struct Store {
    authority: Option<Secret>,
    bundle: Option<ConfigMap>,
    leaves: BTreeMap<String, Secret>,
    lives: Lives,
    is_configured: bool,
    now: Timestamp,
}

impl Store {
    fn new() -> Self {
        Self {
            authority: None,
            bundle: None,
            leaves: BTreeMap::new(),
            lives: Lives::default(),
            is_configured: true,
            now: "2030-01-01T00:00:00Z".parse().unwrap(),
        }
    }

    fn with<T>(&self, ask: impl FnOnce(&Observed) -> T) -> T {
        let leaves = self.leaves.iter().map(|(name, secret)| (name.clone(), Arc::new(secret.clone())));
        ask(&Observed {
            namespace: "kubevirt".into(),
            authority: self.authority.clone().map(Arc::new),
            bundle: self.bundle.clone().map(Arc::new),
            leaves: leaves.collect(),
            lives: self.lives,
            is_configured: self.is_configured,
            carriers: Vec::new(),
            now: self.now,
        })
    }

    fn steps(&self) -> Vec<Step> {
        self.with(|observed| plan(observed).0)
    }

    fn apply(&mut self, effect: Effect) {
        let (kind, name, change) = match effect {
            Effect::Create { kind, object, .. } => {
                (kind, object["metadata"]["name"].as_str().unwrap().to_owned(), object)
            }
            Effect::Patch { kind, name, patch, .. } => (kind, name, patch),
            other => panic!("{other:?}"),
        };
        fn merged<T: serde::Serialize + serde::de::DeserializeOwned>(former: Option<&T>, change: &Value) -> Option<T> {
            let mut object = former.map_or_else(|| json!({}), |former| serde_json::to_value(former).unwrap());
            json_patch::merge(&mut object, change);
            Some(serde_json::from_value(object).unwrap())
        }
        match kind {
            Kind::ConfigMap => self.bundle = merged(self.bundle.as_ref(), &change),
            Kind::Secret if name == tls::CA_SECRET => self.authority = merged(self.authority.as_ref(), &change),
            Kind::Secret => {
                let secret = merged(self.leaves.get(&name), &change).unwrap();
                self.leaves.insert(name, secret);
            }
            other => panic!("{other:?}"),
        }
    }

    /// Lets decisions be carried out until nothing is left to do.
    fn settle(&mut self) {
        for _ in 0..10 {
            let effects = self.with(|observed| decide(observed).unwrap().effects);
            if effects.is_empty() {
                return;
            }
            effects.into_iter().for_each(|effect| self.apply(effect));
        }
        panic!("certificates never settle");
    }

    fn bundle_size(&self) -> usize {
        bundle::text(self.bundle.as_ref()).unwrap().matches("BEGIN CERTIFICATE").count()
    }

    fn issuer(&self, name: &str) -> String {
        self.leaves[name].metadata.annotations.as_ref().unwrap()[ISSUER].clone()
    }

    fn pass(&mut self, hours: i64) {
        self.now = self.now.checked_add(SignedDuration::from_hours(hours)).unwrap();
    }
}

#[test]
fn bundle_is_published_before_anything_is_signed() {
    let mut store = Store::new();
    assert_eq!(store.steps(), [Step::MakeAuthority]);
    let effects = store.with(|observed| decide(observed).unwrap().effects);
    effects.into_iter().for_each(|effect| store.apply(effect));
    assert!(matches!(store.steps().as_slice(), [Step::Publish(_)]));
    store.settle();
    assert_eq!(store.leaves.len(), 3);
    assert!(store.steps().is_empty());
}

#[test]
fn leaf_is_replaced_after_four_fifths_of_its_life() {
    let mut store = Store::new();
    store.settle();
    store.pass(19);
    assert!(store.steps().is_empty());
    store.pass(1);
    assert_eq!(store.steps().len(), 3);
    store.settle();
}

#[test]
fn next_authority_is_known_to_all_before_it_signs_and_the_former_one_stays_known() {
    let mut store = Store::new();
    store.settle();
    let first = store.issuer(tls::API_SERVER_SECRET);
    store.pass(7 * 24 * 4 / 5 + 1);
    assert_eq!(store.steps(), [Step::StageAuthority]);
    store.settle();
    assert_eq!(store.bundle_size(), 2);
    assert_eq!(store.issuer(tls::API_SERVER_SECRET), first);
    store.now = store.now.checked_add(SETTLE).unwrap();
    assert_eq!(store.steps(), [Step::PromoteAuthority]);
    store.settle();
    assert_ne!(store.issuer(tls::API_SERVER_SECRET), first);
    assert_eq!(store.bundle_size(), 2);
    store.pass(48);
    store.settle();
    assert_eq!(store.bundle_size(), 1);
}

#[test]
fn process_that_starts_late_in_the_life_of_the_authority_settles_and_replaces_it() {
    let mut store = Store::new();
    store.settle();
    let first = store.issuer(tls::API_SERVER_SECRET);
    store.pass(7 * 24 - 2);
    // Leaves end with the authority, however often they are renewed.
    store.settle();
    assert_eq!(store.issuer(tls::API_SERVER_SECRET), first);
    store.now = store.now.checked_add(SETTLE).unwrap();
    store.settle();
    assert_ne!(store.issuer(tls::API_SERVER_SECRET), first);
}

#[test]
fn lost_or_damaged_authority_is_replaced_without_forgetting_what_it_signed() {
    let mut store = Store::new();
    store.settle();
    store.authority = None;
    store.settle();
    assert_eq!(store.bundle_size(), 2);
    store.authority.as_mut().unwrap().data.as_mut().unwrap().insert(tls::KEY_KEY.to_owned(), ByteString(b"x".to_vec()));
    assert_eq!(store.steps(), [Step::MakeAuthority]);
}

#[test]
fn damaged_leaf_is_replaced() {
    let mut store = Store::new();
    store.settle();
    let leaf = store.leaves.get_mut(tls::API_CLIENT_SECRET).unwrap();
    leaf.data.as_mut().unwrap().remove(tls::KEY_KEY);
    assert_eq!(store.steps(), [Step::Issue(Role::ApiClient)]);
}

#[test]
fn process_that_starts_after_everything_has_ended_starts_over() {
    let mut store = Store::new();
    store.settle();
    store.pass(24 * 30);
    assert_eq!(store.steps(), [Step::StageAuthority]);
    store.settle();
    assert!(store.steps().is_empty());
    assert_eq!(store.bundle_size(), 2, "the clock may be wrong");
    store.pass(25);
    store.settle();
    assert_eq!(store.bundle_size(), 1);
}

#[test]
fn certificates_from_the_future_are_replaced_and_nothing_that_is_valid_is_forgotten() {
    // Minutes by which the clock of a leader is ahead; it replaces the authority, and the next leader does.
    for (ahead, replaces, repairs) in [
        (0, false, false),
        (4, false, false),
        // 80 % of the life are over.
        (6 * 24 * 60, true, true),
        (8 * 24 * 60, true, true),
        (10 * 365 * 24 * 60, true, true),
    ] {
        let mut store = Store::new();
        store.settle();
        let (right, first) = (store.now, store.issuer(tls::API_SERVER_SECRET));
        let valid = bundle::text(store.bundle.as_ref()).unwrap().to_owned();
        store.now = right.checked_add(SignedDuration::from_mins(ahead)).unwrap();
        store.settle();
        store.now = store.now.checked_add(SETTLE).unwrap();
        store.settle();
        let second = store.issuer(tls::API_SERVER_SECRET);
        assert_eq!(second != first, replaces, "{ahead}");
        // virt-handlers have certificates of the first authority, which are valid.
        assert!(bundle::text(store.bundle.as_ref()).unwrap().contains(&valid), "{ahead}");
        store.now = right.checked_add(SignedDuration::from_mins(5)).unwrap();
        store.settle();
        assert!(bundle::text(store.bundle.as_ref()).unwrap().contains(&valid), "{ahead}");
        assert_eq!(store.issuer(tls::API_SERVER_SECRET) != second, repairs, "{ahead}");
        for secret in store.leaves.values().chain(&store.authority) {
            assert!(facts(secret, tls::CERT_KEY).unwrap().is_valid(store.now), "{ahead}");
        }
        store.pass(25);
        store.settle();
        assert!(store.bundle_size() <= 2, "{ahead} {}", store.bundle_size());
    }
}

#[test]
fn leaf_from_the_future_is_replaced() {
    let mut store = Store::new();
    store.settle();
    let right = store.now;
    store.leaves.clear();
    store.pass(24);
    store.settle();
    store.now = right;
    assert_eq!(store.steps(), Role::ALL.map(Step::Issue));
    store.settle();
    assert!(store.steps().is_empty());
}

#[test]
fn next_authority_of_a_clock_that_was_ahead_is_replaced() {
    let mut store = Store::new();
    store.settle();
    let (right, first) = (store.now, store.issuer(tls::API_SERVER_SECRET));
    store.pass(6 * 24);
    store.settle();
    store.now = right;
    // It is left out until the current one is to be replaced.
    store.settle();
    store.pass(6 * 24 - 1);
    store.settle();
    store.now = store.now.checked_add(SETTLE).unwrap();
    store.settle();
    assert_ne!(store.issuer(tls::API_SERVER_SECRET), first);
    for secret in store.leaves.values().chain(&store.authority) {
        assert!(facts(secret, tls::CERT_KEY).unwrap().is_valid(store.now));
    }
}

/// Returns lives of so many hours.
fn of_hours(authority: i64, leaf: i64) -> Lives {
    Lives::of(SignedDuration::from_hours(authority), None, SignedDuration::from_hours(leaf), None)
}

#[test]
fn changed_lives_replace_certificates_at_once_and_then_nothing_more() {
    let week = 7 * 24;
    // Leaves end with their authority at the latest.
    for (authority, leaf) in [(week, 12), (week, 48), (week, 240), (720, 24), (48, 24), (48, 12), (12, 24)] {
        let case = format!("{authority} {leaf}");
        let mut store = Store::new();
        store.settle();
        let first = store.issuer(tls::API_SERVER_SECRET);
        store.pass(1);
        assert!(store.steps().is_empty(), "{case}");
        store.lives = of_hours(authority, leaf);
        let is_other = authority != week;
        let expected = if is_other { vec![Step::StageAuthority] } else { Role::ALL.map(Step::Issue).to_vec() };
        assert_eq!(store.steps(), expected, "{case}");
        store.settle();
        store.now = store.now.checked_add(SETTLE).unwrap();
        store.settle();
        assert_eq!(store.issuer(tls::API_SERVER_SECRET) != first, is_other, "{case}");
        let signer = facts(store.authority.as_ref().unwrap(), tls::CERT_KEY).unwrap();
        assert_eq!(signer.surplus(store.lives.authority), SignedDuration::ZERO, "{case}");
        for secret in store.leaves.values() {
            let facts = facts(secret, tls::CERT_KEY).unwrap();
            let is_whole = facts.surplus(store.lives.leaf) == SignedDuration::ZERO;
            assert!(is_whole || facts.not_after == signer.not_after, "{case}: {facts:?}");
        }
        store.pass(2);
        assert!(store.steps().is_empty(), "{case}");
    }
}

#[test]
fn end_of_the_configuration_replaces_no_certificates() {
    let mut store = Store::new();
    store.lives = of_hours(48, 12);
    store.settle();
    (store.lives, store.is_configured) = (Lives::default(), false);
    assert!(store.steps().is_empty());
    store.is_configured = true;
    assert_eq!(store.steps(), [Step::StageAuthority]);
}

#[test]
fn lives_that_change_all_the_time_push_no_authority_out_of_the_bundle() {
    let mut store = Store::new();
    store.settle();
    let first = bundle::text(store.bundle.as_ref()).unwrap().to_owned();
    for more in 0..20 {
        store.lives = of_hours(100 + more, 24);
        store.settle();
        store.now = store.now.checked_add(SETTLE).unwrap();
        store.settle();
    }
    assert_eq!(store.bundle_size(), BUNDLE_LIMIT);
    assert!(bundle::text(store.bundle.as_ref()).unwrap().contains(&first));
}

#[test]
fn lives_come_from_the_configuration_and_nonsense_is_left_out() {
    let lives = |strategy: Value| Lives::from_strategy(&serde_json::from_value(strategy).unwrap());
    let short =
        lives(json!({"selfSigned": {"ca": {"duration": "20h", "renewBefore": "5h"}, "server": {"duration": "10h"}}}));
    assert_eq!(short.authority, SignedDuration::from_hours(20));
    assert_eq!(short.authority_before, SignedDuration::from_hours(5));
    assert_eq!((short.leaf, short.leaf_before), (SignedDuration::from_hours(10), SignedDuration::from_hours(2)));
    assert_eq!(lives(json!({"selfSigned": {"ca": {"duration": "soon"}}})), Lives::default());
    // A new certificate is used for a while before it is replaced.
    let shortest = lives(json!({"selfSigned": {"ca": {"duration": "1s"}, "server": {"duration": "1s"}}}));
    assert_eq!((shortest.authority, shortest.authority_before), (SHORTEST_LIFE, LEAST_OVERLAP));
    assert_eq!((shortest.leaf, shortest.leaf_before), (SHORTEST_LIFE, SignedDuration::from_mins(2)));
    let endless = lives(json!({"selfSigned": {"ca": {"duration": "99999999h", "renewBefore": "99999998h"}}}));
    assert_eq!(endless.authority, LONGEST_LIFE);
    assert!(endless.authority_before < LONGEST_LIFE);
    let hasty = lives(json!({"selfSigned": {"server": {"duration": "20m", "renewBefore": "19m59s"}}}));
    assert_eq!((hasty.leaf, hasty.leaf_before), (SignedDuration::from_mins(20), SignedDuration::from_mins(19)));
}

fn request(change: &Value, common_name: &str, dns_name: &str) -> CertificateSigningRequest {
    let key = KeyPair::generate().unwrap();
    let mut params = CertificateParams::new(vec![dns_name.to_owned()]).unwrap();
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, common_name);
    let pem = params.serialize_request(&key).unwrap().pem().unwrap();
    let mut request = json!({
        "metadata": {"name": "virt-handler-n-1", "resourceVersion": "1"},
        "spec": {
            "signerName": "kubevirt.io/virt-handler",
            "username": "system:serviceaccount:kubevirt:kubevirt-handler",
            "extra": {"authentication.kubernetes.io/node-name": ["n"]},
            "usages": ["server auth", "client auth", "digital signature"],
            "request": ByteString(pem.into_bytes()),
        },
    });
    json_patch::merge(&mut request, change);
    serde_json::from_value(request).unwrap()
}

fn outcome(request: &CertificateSigningRequest) -> Vec<Value> {
    let now = "2030-01-01T00:00:00Z".parse().unwrap();
    let authority = Authority::make(now, SignedDuration::from_hours(48)).unwrap();
    let decision = request::decide(request, "kubevirt", Some(&authority), Lives::default(), now).unwrap();
    let patch = |effect: Effect| match effect {
        Effect::Patch { patch, .. } => patch["status"].clone(),
        other => panic!("{other:?}"),
    };
    decision.effects.into_iter().map(patch).collect()
}

#[test]
fn request_of_virt_handler_for_its_own_node_is_approved_and_signed() {
    let answers = outcome(&request(&json!({}), tls::HANDLER_CN, &tls::handler_server_name("n")));
    assert_eq!(answers.len(), 2);
    assert_eq!(answers[0]["conditions"][0]["type"], "Approved");
    let encoded: ByteString = serde_json::from_value(answers[1]["certificate"].clone()).unwrap();
    let facts = authority::facts(&encoded.0).unwrap();
    assert_eq!(facts.common_name.as_deref(), Some(tls::HANDLER_CN));
    assert_eq!(facts.dns_names, [tls::handler_server_name("n")]);
    assert!(!facts.is_authority);
    assert_eq!(facts.not_after, "2030-01-02T00:00:00Z".parse().unwrap());
}

#[test]
fn certificate_for_guests_is_not_valid_for_a_server() {
    let name = tls::handler_server_name("n");
    for (common_name, serves) in [(tls::HANDLER_CN, true), (tls::GUEST_CLIENT_CN, false)] {
        let answers = outcome(&request(&json!({}), common_name, &name));
        let encoded: ByteString = serde_json::from_value(answers[1]["certificate"].clone()).unwrap();
        assert_eq!(authority::facts(&encoded.0).unwrap().common_name.as_deref(), Some(common_name));
        let (_, pem) = x509_parser::pem::parse_x509_pem(&encoded.0).unwrap();
        let certificate = pem.parse_x509().unwrap();
        let usage = certificate.extended_key_usage().unwrap().unwrap().value;
        assert_eq!((usage.server_auth, usage.client_auth), (serves, true), "{common_name}");
    }
    let elsewhere = outcome(&request(&json!({}), tls::GUEST_CLIENT_CN, &tls::handler_server_name("m")));
    assert_eq!(elsewhere[0]["conditions"][0]["type"], "Denied");
}

#[test]
fn request_that_is_not_from_virt_handler_on_the_node_it_names_is_denied() {
    let own = tls::handler_server_name("n");
    let refused = [
        request(&json!({"spec": {"username": "system:serviceaccount:default:x"}}), tls::HANDLER_CN, &own),
        request(&json!({"spec": {"extra": null}}), tls::HANDLER_CN, &own),
        request(
            &json!({"spec": {"extra": {"authentication.kubernetes.io/node-name": ["n", "m"]}}}),
            tls::HANDLER_CN,
            &own,
        ),
        request(&json!({}), tls::HANDLER_CN, &tls::handler_server_name("m")),
        request(&json!({}), tls::API_CLIENT_CN, &own),
        request(&json!({"spec": {"usages": ["cert sign"]}}), tls::HANDLER_CN, &own),
        request(&json!({"spec": {"request": ByteString(b"nonsense".to_vec())}}), tls::HANDLER_CN, &own),
    ];
    for request in refused {
        let answers = outcome(&request);
        assert_eq!(answers.len(), 1);
        assert_eq!(answers[0]["conditions"][0]["type"], "Denied", "{:?}", request.spec);
        assert_eq!(answers[0].get("certificate"), None);
    }
}

#[test]
fn wrong_request_approved_by_another_hand_is_still_not_signed() {
    let approved = json!({
        "spec": {"username": "someone"},
        "status": {"conditions": [{"type": "Approved", "status": "True"}]},
    });
    let answers = outcome(&request(&approved, tls::HANDLER_CN, &tls::handler_server_name("n")));
    assert_eq!(answers.len(), 1);
    assert_eq!(answers[0]["conditions"][1]["type"], "Failed");
}

#[test]
fn answered_request_and_those_of_other_signers_are_left_alone() {
    let own = tls::handler_server_name("n");
    for change in [
        json!({"status": {"certificate": ByteString(b"x".to_vec())}}),
        json!({"status": {"conditions": [{"type": "Denied", "status": "True"}]}}),
        json!({"spec": {"signerName": "kubernetes.io/kube-apiserver-client"}}),
    ] {
        assert!(outcome(&request(&change, tls::HANDLER_CN, &own)).is_empty());
    }
}
