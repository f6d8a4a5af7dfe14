//! The target of a migration: the launcher is prepared to receive the domain, and ends if that fails.

use api::constants::annotation::BLOCK_MIGRATION_TARGET;
use protocol::AbortMigrationRequest;

use super::*;
use crate::vmi::{
    calls::PrepareMigration,
    migration::{
        is_annotated,
        target::{self, Progress},
    },
    migration_facts::{Migration, Route},
};

/// Prepares the launcher of this node to receive the domain.
pub(super) fn receive(observed: &Observed, now: Now, decision: &mut Decision) {
    if target::is_given_up(observed) {
        return give_up(observed, now, decision);
    }
    let Some(migration) = observed.target_migration() else { return };
    let progress = target::progress(observed, migration);
    // The address is published when connections are accepted.
    if let (Candidates::One(pod), Link::Up { .. }) = (&observed.facts.pods, &observed.link) {
        relay(observed, migration, pod, &progress, decision);
    }
    if observed.object == ObjectState::Current {
        write(observed, target::desired(observed, now), now, decision);
    }
    let Candidates::One(pod) = &observed.facts.pods else { return };
    if let Link::Down { retry_at, .. } = &observed.link {
        if !observed.is_busy(CONNECT) && decision.due(*retry_at, now) {
            decision.push(Effect::Connect { pod: pod.clone(), within: CONNECT_WAIT });
        }
        return;
    }
    if progress == Progress::Connecting {
        if !observed.is_busy(Hello::SLOT) && decision.due(observed.call_at(), now) {
            decision.call(Hello);
        }
        return;
    }
    let is_over = matches!(progress, Progress::NotMoved(_) | Progress::Moved(_));
    let is_asked = observed.is_busy(AbortMigrationRequest::SLOT)
        || observed.aborted_migration.as_deref() == Some(migration.uid.as_str());
    if let Some(at) = target::decides_at(observed, migration)
        && decision.due(at, now)
        && !is_over
        && !is_asked
    {
        decision.call(AbortMigrationRequest { migration: migration.uid.clone() });
    }
    let failed = migration.endpoint.is_none() && target::failure(observed, migration).is_some();
    if is_over || failed {
        return;
    }
    if !observed.is_busy(NETWORK)
        && let Some(work) = SetUpNetwork::of(observed)
        && decision.due(observed.call_at(), now)
    {
        decision.call(work);
    }
    hand_volumes(observed, now, decision);
    let is_prepared = observed.prepared_migration.as_deref() == Some(migration.uid.as_str());
    // A restarted launcher has lost the services that it made for the domain: it is prepared once over each connection.
    if observed.reported
        && target::is_equipped(observed)
        && !is_prepared
        && !is_annotated(&observed.vmi, BLOCK_MIGRATION_TARGET)
        && !target::is_held(observed, migration)
        && !observed.is_busy(PrepareMigration::SLOT)
        && decision.due(observed.call_at(), now)
    {
        decision.call(PrepareMigration::of(observed, &migration.uid));
    }
}

/// Accepts the connections of the source once the launcher is prepared.
fn relay(observed: &Observed, migration: &Migration, pod: &str, progress: &Progress<'_>, decision: &mut Decision) {
    let is_open = match progress {
        Progress::Ready(_) | Progress::Copying(_) | Progress::Moved(_) => true,
        // The connection to the launcher was lost: those of the migration may go on.
        Progress::Connecting => observed.route.is_some(),
        // The source may still ask whether the domain is here.
        Progress::NotMoved(_) => migration.endpoint.is_some(),
        Progress::Preparing => false,
    };
    let wanted = is_open.then(|| Route::Target {
        migration: migration.uid.clone(),
        source_node: migration.source_node.clone(),
        pod: pod.to_owned(),
    });
    if observed.route != wanted {
        decision.push(Effect::Relay(wanted));
    }
}

/// The domain does not come: nothing of it may stay here. virt-controller deletes the pod if it does not end.
pub(super) fn give_up(observed: &Observed, now: Now, decision: &mut Decision) {
    if observed.route.is_some() {
        decision.push(Effect::Relay(None));
    }
    let removal = target::desired(observed, now).filter(|_| observed.object == ObjectState::Current);
    let is_recorded = removal.is_none() && observed.object != ObjectState::Unverified;
    write(observed, removal, now, decision);
    if end_launcher(observed, now, decision) && is_recorded && !observed.is_busy(RECORD) {
        decision.push(Effect::Retire);
    }
}

/// Another launcher of this node is to receive the domain: ends the one that was to.
pub(super) fn make_way(observed: &Observed, now: Now, decision: &mut Decision) {
    if observed.route.is_some() {
        decision.push(Effect::Relay(None));
    }
    if !observed.was_target || end_launcher(observed, now, decision) {
        decision.push(Effect::Retire);
    }
}

/// Ends the launcher. Returns true if nothing is left to do for it.
fn end_launcher(observed: &Observed, now: Now, decision: &mut Decision) -> bool {
    if observed.finished || !matches!(observed.link, Link::Up { greeted: true, .. }) {
        return true;
    }
    if [KillRequest::SLOT, FinishRequest::SLOT, PrepareMigration::SLOT].iter().any(|slot| observed.is_busy(slot)) {
        return false;
    }
    let Some(stopping) = observed.stopping.filter(|stopping| stopping.killed) else {
        decision.call(KillRequest {});
        return false;
    };
    if !decision.due_before(stopping.since + LAST_CONNECT_LIMIT, now) {
        return true;
    }
    if observed.domain().is_alive() {
        if decision.due(stopping.signalled + SIGNAL_INTERVAL, now) {
            decision.call(KillRequest {});
        }
    } else if decision.due(observed.call_at(), now) {
        decision.call(FinishRequest {});
    }
    false
}
