//! DataVolumes that have ended, and their claims.

use super::*;

#[test]
fn deletion_of_a_claim_that_could_not_be_filled_begins_anew() {
    let failed = |claim| Observed { claim, ..observed(&json!({"status": {"phase": "Failed"}})) };
    assert!(decide(&failed(claim("Bound", &json!({})))).unwrap().is_settled());
    let deleting = json!({"metadata": {"deletionTimestamp": at(1).to_string()}});
    let shown_of = |observed: &Observed| {
        let shown = next(observed).unwrap().unwrap().shown.unwrap();
        (shown.phase, shown.bound.reason)
    };
    let going = failed(claim("Bound", &deleting));
    assert_eq!(shown_of(&going), ("Pending", "ErrResourceMarkedForDeletion".to_owned()));
    assert_eq!(shown_of(&failed(None)), ("Pending", "NotFound".to_owned()));
    // The next pass creates the claim.
    assert_eq!(writes(&decide(&failed(None)).unwrap()), ["patch datavolumes/status"]);
    let restored = json!({"metadata": {"ownerReferences": null, "annotations": {
        "cdi.kubevirt.io/createdForDataVolume": null, "cdi.kubevirt.io/storage.populatedFor": "d"}}});
    assert_eq!(shown_of(&failed(claim("Bound", &restored))).0, "Succeeded");
}

#[test]
fn claim_of_a_filled_volume_is_followed() {
    let filled = json!({"metadata": {"annotations": {"cdi.kubevirt.io/storage.populatedFor": "d"}}});
    let of =
        |phase: &str, status: &Value| Observed { claim: claim(phase, &filled), ..observed(&json!({"status": status})) };
    let mut known = json!({"phase": "Succeeded"});
    for (phase, shows, reason) in
        [("Pending", "Succeeded", "Pending"), ("Bound", "Succeeded", "Bound"), ("Lost", "Failed", "ClaimLost")]
    {
        let seen = of(phase, &known);
        let step = next(&seen).unwrap().unwrap();
        let is_event = |effect: &Effect| matches!(effect, Effect::Event(event) if event.reason == "ErrClaimLost");
        assert_eq!(step.after.iter().any(is_event), phase == "Lost", "{phase}");
        let shown = step.shown.unwrap();
        assert_eq!((shown.phase, shown.bound.reason.as_str()), (shows, reason));
        known = serde_json::to_value(status::status(&seen.volume, &shown, seen.now)).unwrap();
        assert!(decide(&of(phase, &known)).unwrap().is_settled(), "{phase}");
    }
    // The volume is there again, with its content or without.
    assert_eq!(shown(&of("Bound", &known)).0, "Succeeded");
    let empty = json!({"metadata": {"annotations": {"cdi.kubevirt.io/storage.pod.phase": "Pending"}}});
    assert!(decide(&Observed { claim: claim("Bound", &empty), ..of("Bound", &known) }).unwrap().is_settled());
    // CDI shows it.
    let mut change = begun();
    change["status"] = json!({"phase": "Succeeded"});
    let beside = Observed { begins: false, claim: claim("Pending", &filled), ..observed(&change) };
    assert_eq!(writes(&decide(&beside).unwrap()), ["patch datavolumes"]);
}
