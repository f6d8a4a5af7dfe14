//! Pure functions.

use super::super::*;

#[test]
fn plain_errors_keep_the_codes_for_retries() {
    for (error, kept) in [
        (ApiError::NotAvailable("attestation"), true),
        (ApiError::TooManyRequests("too many".into()), true),
        (ApiError::Handler("no answer".into()), false),
        (ApiError::BadRequest("wrong".into()), false),
    ] {
        assert_eq!(keeps_its_code(&error), kept, "{error}");
    }
}

fn user(name: &str) -> User {
    User { name: name.into(), groups: vec![], uid: None, extra: std::collections::BTreeMap::new() }
}

#[test]
fn account_of_virt_controller_is_that_of_the_install_namespace() {
    for (name, expected) in [
        ("system:serviceaccount:kubevirt:kubevirt-controller", true),
        ("system:serviceaccount:mine:kubevirt-controller", false),
        ("system:serviceaccount:kubevirt:kubevirt-handler", false),
        ("system:serviceaccount:kubevirt:kubevirt-controller:x", false),
        ("kubevirt:kubevirt-controller", false),
    ] {
        assert_eq!(is_controller(&user(name), "kubevirt"), expected, "{name}");
    }
}

#[test]
fn streams_of_a_user_count_under_a_hash() {
    let named = |name: &str| holder(&user(name));
    assert_eq!((named("Ольга").len(), named("").len()), (64, 64));
    assert!(named("a") != named("b") && named("a").bytes().all(|byte| byte.is_ascii_hexdigit()));
}

#[test]
fn options_contains_the_method_of_the_path() {
    let base = "/apis/subresources.kubevirt.io/v1/namespaces/a";
    for (path, method) in [
        ("virtualmachines/b/start", Some("PUT")),
        ("virtualmachineinstances/b/vnc/screenshot", Some("GET")),
        ("expand-vm-spec", Some("PUT")),
        ("virtualmachines/b/nothing", None),
        ("secrets/b/start", None),
    ] {
        let response = options_response(&format!("{base}/{path}"));
        let allow = response.headers().get(header::ALLOW).and_then(|value| value.to_str().ok());
        assert_eq!(allow, method, "{path}");
    }
}
