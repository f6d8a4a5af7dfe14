//! The source of a migration: the launcher is asked to move the domain, and ends once another node owns the VMI.

use protocol::{AbortMigrationRequest, MigrationMode, features::Feature};

use super::*;
use crate::vmi::{migration::source::Progress, migration_facts::Route, observed::MIGRATE};

/// Time in which the domain of another node's VMI ends by itself.
const END_WAIT: Duration = Duration::from_secs(30);
/// Time for the release of the launcher. virt-controller deletes its pod anyway.
const LEAVE_LIMIT: Duration = Duration::from_secs(120);

/// Opens and ends the connections of a migration. Those of a domain that arrived stay until the migration is completed, and those
/// of a domain that left until ownership has passed: the last words of both launchers may be under way.
pub(super) fn relay(observed: &Observed, decision: &mut Decision) {
    let wanted = match (&observed.facts.migration, observed.source_migration(), &observed.facts.pods) {
        (_, Some(migration), Candidates::One(pod)) => {
            let is_open = match migration::source::progress(observed, migration) {
                Progress::Waiting => is_called(observed, &migration.uid) || may_begin(observed),
                Progress::Copying(_) | Progress::Gone(_) => true,
                Progress::Failed { .. } => false,
            };
            migration.endpoint.filter(|_| is_open).map(|(address, port)| Route::Source {
                migration: migration.uid.clone(),
                node: migration.target_node.clone(),
                address,
                port,
                pod: pod.clone(),
            })
        }
        (Some(migration), None, _) if !migration.over => {
            let is_same =
                |route: &&Route| matches!(route, Route::Target { migration: uid, .. } if *uid == migration.uid);
            observed.route.as_ref().filter(is_same).cloned()
        }
        _ => None,
    };
    if observed.route != wanted {
        decision.push(Effect::Relay(wanted));
    }
}

fn is_called(observed: &Observed, uid: &str) -> bool {
    observed.is_busy(MIGRATE) || observed.called_migration.as_deref() == Some(uid)
}

/// Returns true if the launcher can be asked to begin: the domain runs, and no call is in progress that may change it. Writes of the
/// status change no domain. A virt-handler that is about to stop begins no migration, because its end would cut it.
fn may_begin(observed: &Observed) -> bool {
    let Link::Up { greeted: true, features, .. } = &observed.link else { return false };
    observed.busy.iter().all(|slot| *slot == RECORD)
        && !observed.draining
        && observed.reported
        && observed.domain() == Domain::Alive
        && features.contains(&Feature::LiveMigration)
        && !observed.is_leaving()
        && !observed.facts.is_final()
}

/// Returns true if the domain has ended here, and the target runs the guest or is about to: there is nothing to stop here.
pub(super) fn is_gone(observed: &Observed) -> bool {
    let progress = observed.source_migration().map(|migration| migration::source::progress(observed, migration));
    matches!(progress, Some(Progress::Gone(_)))
}

/// Asks the launcher to begin the migration, or to abort it.
pub(super) fn advance(observed: &Observed, now: Now, decision: &mut Decision) {
    let Some(migration) = observed.source_migration() else { return };
    if !matches!(observed.link, Link::Up { greeted: true, .. }) {
        return;
    }
    match migration::source::progress(observed, migration) {
        Progress::Waiting if migration.endpoint.is_some() && !is_called(observed, &migration.uid) => {
            if may_begin(observed) && !migration.abort_requested && decision.due(observed.call_at(), now) {
                decision.call(migration::source::request(&observed.vmi, &migration.uid));
            }
        }
        // The launcher accepted the migration, and its report is under way.
        Progress::Waiting if !is_called(observed, &migration.uid) => {}
        progress @ (Progress::Waiting | Progress::Copying(_)) => {
            let is_wanted = migration.abort_requested || observed.is_leaving() || observed.facts.is_final();
            let is_busy = observed.is_busy(AbortMigrationRequest::SLOT) || observed.is_busy(MIGRATE);
            let at = abort_at(observed, &migration.uid, &progress).filter(|_| is_wanted && !is_busy);
            if at.is_some_and(|at| decision.due(observed.call_at().max(at), now)) {
                decision.call(AbortMigrationRequest { migration: migration.uid.clone() });
            }
        }
        Progress::Gone(_) | Progress::Failed { .. } => {}
    }
}

/// Returns the earliest time of the request to abort a migration; `None` if it was made and has not failed. A guest in post-copy cannot
/// come back.
fn abort_at(observed: &Observed, uid: &str, progress: &Progress<'_>) -> Option<Duration> {
    if observed.aborted_migration.as_deref() != Some(uid) {
        return Some(Duration::ZERO);
    }
    let Progress::Copying(report) = progress else { return None };
    let has_failed = !report.abort_failure.is_empty() && report.mode() != MigrationMode::PostCopy;
    has_failed.then_some(observed.abort_at)
}

/// Another node owns the VMI: the launcher from which the domain came may exit.
pub(super) fn leave(observed: &Observed, now: Now, decision: &mut Decision) {
    let left_at = observed.left_at.unwrap_or(now.since_start);
    if observed.finished || !decision.due_before(left_at + LEAVE_LIMIT, now) {
        decision.push(Effect::Retire);
        return;
    }
    match &observed.link {
        Link::Down { pod_missing_since: Some(_), .. } => decision.push(Effect::Retire),
        Link::Down { retry_at, .. } => {
            let Candidates::One(pod) = &observed.facts.pods else {
                decision.push(Effect::Retire);
                return;
            };
            if !observed.is_busy(CONNECT) && decision.due(*retry_at, now) {
                decision.push(Effect::Connect { pod: pod.clone(), within: LAST_CONNECT_WAIT });
            }
        }
        Link::Up { greeted: false, .. } => {
            if !observed.is_busy(Hello::SLOT) && decision.due(observed.call_at(), now) {
                decision.call(Hello);
            }
        }
        Link::Up { .. }
            if !observed.reported || observed.is_busy(FinishRequest::SLOT) || observed.is_busy(KillRequest::SLOT) => {}
        Link::Up { .. } => match observed.domain() {
            Domain::Ended(_) if decision.due(observed.call_at(), now) => decision.call(FinishRequest {}),
            Domain::Ended(_) => {}
            // A restarted launcher that finds no domain is ended by Kill.
            Domain::None => {
                let since = observed.no_domain_since.unwrap_or(left_at);
                if decision.due((since + SEARCH_LIMIT).max(observed.call_at()), now) {
                    let is_killed = observed.stopping.is_some_and(|stopping| stopping.killed);
                    if is_killed { decision.call(FinishRequest {}) } else { decision.call(KillRequest {}) }
                }
            }
            // Never two guests. The report of the end may be under way.
            Domain::Alive | Domain::ShuttingDown | Domain::Unclear => {
                let again = observed.stopping.map_or(Duration::ZERO, |stopping| stopping.signalled + SIGNAL_INTERVAL);
                if decision.due((left_at + END_WAIT).max(again), now) {
                    decision.call(KillRequest {});
                }
            }
        },
    }
}
