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
