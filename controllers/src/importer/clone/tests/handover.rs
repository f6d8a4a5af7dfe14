//! Clones from another namespace against a small model of the API server: every order of the writes of the controller, of the volume
//! controller, of the scheduler and of users, with caches that lag behind. A controller that is killed and starts again is one that
//! decides again.

use std::collections::{BTreeSet, VecDeque};

use k8s_openapi::api::core::v1::ObjectReference;
use serde_json::Value;

use super::super::*;
use crate::resources::snapshots::CachedSnapshot;

const UID: &str = "dv";
const VOLUME: &str = "pv";
const CLASS_POLICY: &str = "Delete";

/// A claim: its number, which is its UID, and its state.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Claim {
    number: u8,
    bound: bool,
    deleting: bool,
}

/// The first consumer of a claim with this number.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Pod {
    claim: u8,
    deleting: bool,
}

/// The volume.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Volume {
    marked: bool,
    record: Option<String>,
    policy: String,
    phase: &'static str,
    holder: u8,
}

/// The objects of a cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Cluster {
    /// The class waits for the first consumer.
    late: bool,
    temporary: Option<Claim>,
    target: Option<Claim>,
    volume: Option<Volume>,
    pod: Option<Pod>,
    /// Claims that were made, of which even numbers are temporary.
    made: u8,
    /// The DataVolume is deleted.
    ends: bool,
    complete: bool,
    /// Interventions of users so far.
    interventions: u8,
}

/// The cluster, and what the caches of the controller show of it.
type State = (Cluster, Cluster);

fn key_of(number: u8) -> Key {
    match number % 2 {
        0 => Key::new("golden", format!("tmp-pvc-{UID}")),
        _ => Key::new("user", "disk"),
    }
}

fn cached(claim: &Claim) -> CachedClaim {
    let key = key_of(claim.number);
    let mut metadata = json!({"namespace": key.namespace, "name": key.name, "uid": claim.number.to_string()});
    if claim.deleting {
        metadata["deletionTimestamp"] = json!("2030-01-01T00:00:00Z");
    }
    let is_temporary = claim.number.is_multiple_of(2);
    if is_temporary {
        metadata["labels"] = json!({"cdi.kubevirt.io/OwnedByUID": UID});
    }
    CachedClaim {
        metadata: serde_json::from_value(metadata).unwrap(),
        phase: if claim.bound { "Bound" } else { "Pending" }.to_owned(),
        volume: (claim.bound || !is_temporary).then(|| VOLUME.to_owned()),
        data_source: is_temporary.then(|| ("VolumeSnapshot".to_owned(), "snapshot".to_owned())),
        ..CachedClaim::default()
    }
}

fn cached_volume(volume: &Volume) -> CachedVolume {
    let key = key_of(volume.holder);
    let mut metadata = json!({"name": VOLUME, "labels": {"ferrovirt.io/hand-over": UID},
        "annotations": {"ferrovirt.io/hand-over-to": "user/disk"}});
    if let Some(record) = &volume.record {
        metadata["annotations"]["ferrovirt.io/hand-over-reclaim-policy"] = json!(record);
    }
    CachedVolume {
        metadata: serde_json::from_value(metadata).unwrap(),
        phase: volume.phase.to_owned(),
        reclaim_policy: volume.policy.clone(),
        claim: Some(ObjectReference {
            namespace: Some(key.namespace),
            name: Some(key.name),
            uid: Some(volume.holder.to_string()),
            ..ObjectReference::default()
        }),
        provisioned: true,
        size: None,
    }
}

/// Applies a patch of the volume. Returns `None` if the API server or the admission policy refuses it.
fn patch(world: &mut Cluster, patch: &Value) -> Option<()> {
    let volume = world.volume.as_mut()?;
    match &patch["metadata"]["labels"]["ferrovirt.io/hand-over"] {
        Value::String(_) => volume.marked = true,
        Value::Null if patch["metadata"]["labels"].is_object() => (volume.marked, volume.record) = (false, None),
        _ => {}
    }
    if let Some(policy) = patch["metadata"]["annotations"]["ferrovirt.io/hand-over-reclaim-policy"].as_str() {
        volume.record = Some(policy.to_owned());
    }
    if let Some(policy) = patch["spec"]["persistentVolumeReclaimPolicy"].as_str() {
        volume.policy = policy.to_owned();
    }
    if let Some(uid) = patch["spec"]["claimRef"]["uid"].as_str() {
        assert_eq!(volume.phase, "Released", "the volume is taken from a claim");
        assert_eq!(volume.policy, "Retain");
        let former = volume.holder;
        let claims = [&world.temporary, &world.target];
        assert!(claims.into_iter().flatten().all(|claim| claim.number != former), "the former claim exists");
        (volume.holder, volume.phase) = (uid.parse().unwrap(), "Available");
    }
    Some(())
}

/// Carries out the step that the controller decides on from its caches: a clone of a snapshot by the driver.
fn controller(world: &Cluster, seen: &Cluster) -> Option<Cluster> {
    let temporary = seen.temporary.as_ref().map(cached);
    let target = seen.target.as_ref().map(cached);
    let volume = seen.volume.as_ref().filter(|volume| volume.marked).map(cached_volume);
    let pod = seen.pod.as_ref().filter(|pod| seen.temporary.as_ref().is_some_and(|claim| claim.number == pod.claim));
    let is_superfluous = seen.ends || temporary.as_ref().is_some_and(consumer::is_done);
    let mut after = world.clone();
    if pod.is_some_and(|pod| !pod.deleting && is_superfluous) {
        after.pod.as_mut()?.deleting = true;
        return Some(after);
    }
    let next = decided(seen, temporary.as_ref(), target.as_ref(), volume.as_ref());
    match (next.work, next.effects.iter().find(|effect| !effect.is_read())) {
        (Work::Consume(_), None) => {
            let claim = seen.temporary.as_ref()?.number;
            if pod.is_some() || world.pod.is_some() {
                return None;
            }
            after.pod = Some(Pod { claim, deleting: false });
        }
        (Work::Take(_), None) => create(&mut after, false)?,
        (Work::Complete, None) => after.complete = true,
        (Work::None, Some(Effect::Create { .. })) => create(&mut after, true)?,
        (Work::None, Some(Effect::Patch { patch: change, .. })) => {
            // A change of the volume that was seen, and not of another version. The mark has no condition.
            let is_mark = change["metadata"]["labels"]["ferrovirt.io/hand-over"].is_string();
            if !is_mark && world.volume != seen.volume {
                return None;
            }
            patch(&mut after, change)?;
        }
        (Work::None, Some(Effect::Delete { uid, .. })) => {
            let claims = [&mut after.temporary, &mut after.target];
            let is_meant = |claim: &&mut Claim| Some(claim.number.to_string()) == *uid;
            claims.into_iter().flatten().find(is_meant)?.deleting = true;
        }
        (Work::None, None) => return None,
        other => panic!("{world:?} seen as {seen:?}: {other:?}"),
    }
    Some(after)
}

/// Creates one of the claims. The driver makes the volume of the temporary one, at once or for its first consumer.
fn create(after: &mut Cluster, is_temporary: bool) -> Option<()> {
    let (made, late) = (after.made, after.late);
    let claim = if is_temporary { &mut after.temporary } else { &mut after.target };
    if claim.is_some() || made > 6 {
        return None;
    }
    let number = made + u8::from(made.is_multiple_of(2) != is_temporary);
    *claim = Some(Claim { number, bound: is_temporary && !late, deleting: false });
    if is_temporary && !late {
        after.volume = Some(provisioned(number));
    }
    after.made = number + 1;
    Some(())
}

fn provisioned(holder: u8) -> Volume {
    Volume { marked: false, record: None, policy: CLASS_POLICY.to_owned(), phase: "Bound", holder }
}

fn decided(
    seen: &Cluster,
    temporary: Option<&CachedClaim>,
    target: Option<&CachedClaim>,
    volume: Option<&CachedVolume>,
) -> Next {
    let metadata = json!({"namespace": "user", "name": "disk", "uid": UID, "annotations": {STRATEGY: "csi-clone"}});
    let snapshot = CachedSnapshot { ready: true, restore_size: Some(1), ..CachedSnapshot::default() };
    let class = Class { is_late: seen.late, is_csi: true, ..Class::default() };
    let observed = Observed {
        data_volume: &serde_json::from_value(metadata).unwrap(),
        source_key: &Key::new("golden", "snapshot"),
        source: Source::Snapshot(Some(&snapshot)),
        source_is_filled: true,
        source_provisioner: None,
        is_begun: true,
        is_permitted: true,
        spec: &PersistentVolumeClaimSpec::default(),
        class: Some(&class),
        is_immediate: false,
        target,
        temporary,
        volume,
        users: None,
        warning: None,
        is_copying: false,
        now: Timestamp::UNIX_EPOCH,
    };
    let next = if seen.ends { end(&observed) } else { decide(&observed).unwrap() };
    assert!(next.hold.is_none(), "{seen:?}: {next:?}");
    next
}

/// Returns the states that the volume controller and the garbage collector can lead to.
fn cluster(world: &Cluster) -> Vec<Cluster> {
    let mut next = Vec::new();
    let mut add = |change: &dyn Fn(&mut Cluster)| {
        let mut after = world.clone();
        change(&mut after);
        next.push(after);
    };
    let exists =
        |number: u8| [&world.temporary, &world.target].into_iter().flatten().any(|claim| claim.number == number);
    // A claim is removed when no pod uses it, and a pod without its claim is one without owner.
    let used = |claim: &Claim| claim.bound && world.pod.as_ref().is_some_and(|pod| pod.claim == claim.number);
    if world.temporary.as_ref().is_some_and(|claim| claim.deleting && !used(claim)) {
        add(&|after| after.temporary = None);
    }
    if let Some(pod) = &world.pod {
        if pod.deleting || !exists(pod.claim) {
            add(&|after| after.pod = None);
        } else if world.temporary.as_ref().is_some_and(|claim| !claim.bound && !claim.deleting) {
            add(&|after| {
                after.temporary.iter_mut().for_each(|claim| claim.bound = true);
                after.volume = Some(provisioned(pod.claim));
            });
        }
    }
    if world.target.as_ref().is_some_and(|claim| claim.deleting) {
        add(&|after| after.target = None);
    }
    // The claims of a DataVolume go with it, once it has no finalizer.
    if world.ends && world.complete && world.target.as_ref().is_some_and(|claim| !claim.deleting) {
        add(&|after| after.target.iter_mut().for_each(|claim| claim.deleting = true));
    }
    if let Some(volume) = &world.volume {
        if volume.phase == "Released" && volume.policy == "Delete" {
            add(&|after| after.volume = None);
        } else if volume.phase != "Released" && !exists(volume.holder) {
            add(&|after| after.volume.iter_mut().for_each(|volume| volume.phase = "Released"));
        } else if volume.phase == "Available" {
            let holder = volume.holder;
            add(&|after| {
                after.volume.iter_mut().for_each(|volume| volume.phase = "Bound");
                after.target.iter_mut().filter(|claim| claim.number == holder).for_each(|claim| claim.bound = true);
            });
        }
    }
    next
}

/// Returns the states that users can lead to.
fn users(world: &Cluster, may_delete_temporary: bool) -> Vec<Cluster> {
    if world.interventions == 2 || world.complete {
        return Vec::new();
    }
    let mut next = Vec::new();
    let mut add = |change: &dyn Fn(&mut Cluster)| {
        let mut after = Cluster { interventions: world.interventions + 1, ..world.clone() };
        change(&mut after);
        next.push(after);
    };
    add(&|after| after.ends = true);
    add(&|after| after.target.iter_mut().for_each(|claim| claim.deleting = true));
    if may_delete_temporary {
        add(&|after| after.temporary.iter_mut().for_each(|claim| claim.deleting = true));
    }
    if world.pod.is_some() {
        add(&|after| after.pod.iter_mut().for_each(|pod| pod.deleting = true));
    }
    next
}

/// Returns the states in which one cache has caught up.
fn caches((world, seen): &State) -> Vec<State> {
    let changes: [&dyn Fn(&mut Cluster); 5] = [
        &|seen| seen.temporary.clone_from(&world.temporary),
        &|seen| seen.target.clone_from(&world.target),
        &|seen| seen.volume.clone_from(&world.volume),
        &|seen| seen.pod.clone_from(&world.pod),
        &|seen| seen.ends = world.ends,
    ];
    changes
        .into_iter()
        .map(|change| {
            let mut seen = seen.clone();
            change(&mut seen);
            (world.clone(), seen)
        })
        .collect()
}

/// Visits all states that can follow the start, and returns those in which nothing happens any more.
fn explore(late: bool, may_delete_temporary: bool, check: impl Fn(&Cluster, &Cluster)) -> Vec<Cluster> {
    let start = Cluster { late, ..Cluster::default() };
    let first = (start.clone(), start);
    let mut known = BTreeSet::from([first.clone()]);
    let mut waiting = VecDeque::from([first]);
    let mut ends = Vec::new();
    while let Some(state) = waiting.pop_front() {
        let (world, seen) = &state;
        let by_controller = if world.complete { None } else { controller(world, seen) };
        // The answer to a write is in the cache before the next decision.
        let answered = by_controller.iter().map(|after| {
            let mut seen = seen.clone();
            if after.volume != world.volume {
                seen.volume.clone_from(&after.volume);
            }
            if after.temporary != world.temporary {
                seen.temporary.clone_from(&after.temporary);
            }
            if after.target != world.target {
                seen.target.clone_from(&after.target);
            }
            if after.pod != world.pod {
                seen.pod.clone_from(&after.pod);
            }
            (after.clone(), seen)
        });
        let by_others = cluster(world);
        let lagging = caches(&state).into_iter().filter(|next| *next != state);
        let next: Vec<State> =
            answered.chain(by_others.iter().map(|after| (after.clone(), seen.clone()))).chain(lagging).collect();
        if next.is_empty() {
            ends.push(world.clone());
        }
        let by_users = users(world, may_delete_temporary).into_iter().map(|after| (after, seen.clone()));
        for following in next.into_iter().chain(by_users) {
            check(world, &following.0);
            if known.insert(following.clone()) {
                waiting.push_back(following);
            }
        }
    }
    assert!(known.len() > 100, "{}", known.len());
    ends
}

#[test]
fn hand_over_ends_well_in_every_order_of_events() {
    for (late, may_delete_temporary) in [(false, false), (false, true), (true, false), (true, true)] {
        let ends = explore(late, may_delete_temporary, |_, _| {});
        for end in ends {
            assert!(end.pod.is_none(), "{end:?}: the pod is left");
            assert!(end.complete, "{end:?}: stuck");
            let Some(volume) = &end.volume else {
                // It goes with a complete claim that a user deletes.
                let is_deleted = end.interventions > 0 && end.target.is_none();
                assert!(end.ends || is_deleted, "{end:?}: the volume is lost");
                continue;
            };
            assert!(!volume.marked && volume.policy == CLASS_POLICY, "{end:?}: the policy is not restored");
            let holder =
                [&end.temporary, &end.target].into_iter().flatten().find(|claim| claim.number == volume.holder);
            assert!(holder.is_some_and(|claim| claim.bound), "{end:?}: the volume has no claim");
            assert!(end.temporary.is_none(), "{end:?}: the temporary claim is left");
        }
    }
}

#[test]
fn volume_is_lost_only_if_a_user_deletes_a_claim_that_has_it() {
    for late in [false, true] {
        explore(late, false, |before, after| {
            let lost = before.volume.as_ref().filter(|_| after.volume.is_none() && !before.ends);
            assert!(lost.is_none_or(|volume| !volume.marked && volume.holder % 2 == 1), "{before:?}");
        });
    }
}
