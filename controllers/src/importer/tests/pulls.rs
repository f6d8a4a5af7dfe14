//! Images that kubelet cannot pull.

use super::*;

#[test]
fn failed_pull_is_progress_unless_the_node_pulls() {
    let source = |method: &str| json!({"registry": {"pullMethod": method}});
    let http = json!({"registry": null, "http": {"url": "http://s/i"}});
    for (source, waits, phase) in [
        (json!({}), "ErrImagePull", "ImportInProgress"),
        (source("pod"), "ImagePullBackOff", "ImportInProgress"),
        (source("pod"), "ContainerCreating", "ImportScheduled"),
        (source("node"), "ImagePullBackOff", "ImportScheduled"),
        (http, "ImagePullBackOff", "ImportScheduled"),
    ] {
        let mut change = begun();
        change["spec"]["source"] = source.clone();
        let pod = pod("Pending", &json!({"state": {"waiting": {"reason": waits, "message": "m"}}}), 50);
        let observed = Observed { claim: claim("Bound", &json!({})), pod, ..observed(&change) };
        let reason = if waits == "ContainerCreating" { waits } else { "ImagePullFailed" };
        assert_eq!(shown(&observed), (phase.to_owned(), reason.to_owned()), "{source} {waits}");
    }
}

#[test]
fn image_of_the_importer_that_cannot_be_pulled_is_no_progress() {
    let waiting = json!({"reason": "ImagePullBackOff", "message": "Back-off pulling image \"importer:1\""});
    let pod = pod("Pending", &json!({"state": {"waiting": waiting}}), 50);
    let observed = Observed { claim: claim("Bound", &json!({})), pod, ..observed(&begun()) };
    assert_eq!(shown(&observed).0, "ImportScheduled");
}
