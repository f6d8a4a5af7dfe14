//! The hand-over against a small model of the API server: every order of the writes of the controller, of the volume controller and
//! of users, with caches that lag behind. A controller that is killed and starts again is one that decides again.

use std::collections::{BTreeSet, VecDeque};

use k8s_openapi::api::core::v1::ObjectReference;
use serde_json::{Value, json};

use super::super::handover::{self, Objects, Step};
use crate::{
    cache::Key,
    resources::{claims::CachedClaim, volumes::CachedVolume},
    runtime::Effect,
};

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
    temporary: Option<Claim>,
    target: Option<Claim>,
    volume: Option<Volume>,
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

fn start() -> Cluster {
    let temporary = Claim { number: 0, bound: true, deleting: false };
    let volume = Volume { marked: false, record: None, policy: CLASS_POLICY.to_owned(), phase: "Bound", holder: 0 };
    Cluster { temporary: Some(temporary), volume: Some(volume), made: 1, ..Cluster::default() }
}

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
    CachedClaim {
        metadata: serde_json::from_value(metadata).unwrap(),
        phase: if claim.bound { "Bound" } else { "Pending" }.to_owned(),
        volume: (claim.bound || claim.number % 2 == 1).then(|| VOLUME.to_owned()),
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

/// Carries out the step that the controller decides on from its caches.
fn controller(world: &Cluster, seen: &Cluster) -> Option<Cluster> {
    let temporary = seen.temporary.as_ref().map(cached);
    let target = seen.target.as_ref().map(cached);
    let volume = seen.volume.as_ref().filter(|volume| volume.marked).map(cached_volume);
    let receiver = Key::new("user", "disk");
    let objects = Objects {
        uid: UID,
        receiver: &receiver,
        temporary: temporary.as_ref(),
        target: target.as_ref(),
        volume: volume.as_ref(),
    };
    let step = if seen.ends { handover::next_of_end(&objects) } else { handover::next(&objects) };
    let mut after = world.clone();
    match (&step, handover::write(&objects, &step)) {
        (Step::Refuse(message), _) => panic!("{world:?} seen as {seen:?}: {message}"),
        (Step::Fill | Step::Create(_), _) => {
            let claim = if step == Step::Fill { &mut after.temporary } else { &mut after.target };
            if claim.is_some() || world.made > 6 {
                return None;
            }
            let is_temporary = step == Step::Fill;
            let number = world.made + u8::from(world.made.is_multiple_of(2) != is_temporary);
            *claim = Some(Claim { number, bound: is_temporary, deleting: false });
            if is_temporary {
                let policy = CLASS_POLICY.to_owned();
                after.volume = Some(Volume { marked: false, record: None, policy, phase: "Bound", holder: number });
            }
            after.made = number + 1;
        }
        (Step::Complete, _) => after.complete = true,
        (_, Some(Effect::Patch { patch: change, resource_version: _, .. })) => {
            // A change of the volume that was seen, and not of another version. The mark has no condition.
            if !matches!(step, Step::Mark(_)) && world.volume != seen.volume {
                return None;
            }
            patch(&mut after, &change)?;
        }
        (_, Some(Effect::Delete { uid, .. })) => {
            let claims = [&mut after.temporary, &mut after.target];
            let is_meant = |claim: &&mut Claim| Some(claim.number.to_string()) == uid;
            claims.into_iter().flatten().find(is_meant)?.deleting = true;
        }
        _ => return None,
    }
    Some(after)
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
    if world.temporary.as_ref().is_some_and(|claim| claim.deleting) {
        add(&|after| after.temporary = None);
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
    next
}

/// Returns the states in which one cache has caught up.
fn caches((world, seen): &State) -> Vec<State> {
    let changes: [&dyn Fn(&mut Cluster); 4] = [
        &|seen| seen.temporary.clone_from(&world.temporary),
        &|seen| seen.target.clone_from(&world.target),
        &|seen| seen.volume.clone_from(&world.volume),
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
fn explore(may_delete_temporary: bool, check: impl Fn(&Cluster, &Cluster)) -> Vec<Cluster> {
    let first = (start(), start());
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
    for may_delete_temporary in [false, true] {
        let ends = explore(may_delete_temporary, |_, _| {});
        for end in ends {
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
    explore(false, |before, after| {
        let lost = before.volume.as_ref().filter(|_| after.volume.is_none() && !before.ends);
        assert!(lost.is_none_or(|volume| !volume.marked && volume.holder % 2 == 1), "{before:?}");
    });
}
