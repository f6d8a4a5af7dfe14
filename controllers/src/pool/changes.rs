//! The writes by which VMs and revisions become those that the pool wants.

use std::time::Duration;

use api::{
    VirtualMachinePool,
    constants::{event, label},
    names,
};
use k8s_openapi::{
    api::{apps::v1::ControllerRevision, core::v1::ObjectReference},
    apimachinery::pkg::{apis::meta::v1::ObjectMeta, runtime::RawExtension},
};

use super::{
    BURST, Member, Observed, healing, manifest,
    preservation::preserves,
    selection::select,
    update::{self, FAILED_ROLL, Roll},
    wanted_replicas,
};
use crate::{
    resources::{
        pool_revisions::{PoolRevision, PoolTemplate},
        vms::is_held_by_pool,
    },
    runtime::{Decision, Effect, Event, Failure, Kind},
};

/// Reason of a revision that could not be deleted.
pub(super) const FAILED_PRUNING: &str = "FailedRevisionPruning";
/// Wait until a revision is looked for again whose name that of a former pool may still have.
const RECORD_RETRY: Duration = Duration::from_secs(5);

/// The changes.
#[derive(Default)]
pub(super) struct Changes<'a> {
    /// Numbers of VMs to create.
    created: Vec<u32>,
    /// VMs to delete.
    deleted: Vec<&'a Member>,
    /// VMs that get the present template, with their numbers.
    updated: Vec<(&'a Member, u32)>,
    /// VMIs of a former template.
    rolled: Vec<(&'a Member, Roll)>,
    /// Revisions that nothing names.
    pruned: Vec<&'a PoolRevision>,
    /// Name of the revision with the present template.
    revision: String,
    /// It exists.
    is_recorded: bool,
    /// VMs or VMIs have its name although it does not exist, and its creation is due.
    is_lost: bool,
    /// Time of the next look at VMs that fail.
    wake: Option<Duration>,
}

impl<'a> Changes<'a> {
    pub(super) fn of(observed: &'a Observed, owned: &[&'a Member]) -> Self {
        let pool = &observed.pool.spec;
        let template = PoolTemplate::of(pool);
        let recorded = recorded(observed, &template);
        let revision = recorded.map_or_else(|| revision_name(&observed.pool), str::to_owned);
        let wanted = wanted_replicas(pool);
        let active: Vec<&Member> = owned.iter().copied().filter(|member| !member.is_deleting()).collect();
        let (failing, wake) = healing::failing(pool, &active, observed.now);
        let healthy = without(&active, &failing);
        let surplus = surplus(observed, &healthy, wanted);
        let kept = without(&healthy, &surplus);
        let is_current = |member: &&Member| {
            let known = member.revision();
            known == Some(revision.as_str())
                || known
                    .and_then(|name| update::template_of(observed, name))
                    .is_some_and(|known| known.is_same(&template))
        };
        let (current, outdated): (Vec<&Member>, Vec<&Member>) =
            update::candidates(pool, &kept).unwrap_or_default().into_iter().partition(is_current);
        // Without the finalizer its disks would go with it.
        let may_go = |member: &Member| !preserves(pool) || is_held_by_pool(&member.vm);
        let rolled =
            if update::is_proactive(pool) { update::rolled(observed, &current, &kept, &template) } else { Vec::new() };
        let numbered =
            outdated.into_iter().filter_map(|member| Some((member, manifest::index(&observed.pool, &member.vm)?)));
        let updated: Vec<(&Member, u32)> = numbered.take(BURST).collect();
        let missing = wanted.saturating_sub(owned.len()).min(BURST);
        let created: Vec<u32> = observed.free.iter().copied().take(missing).collect();
        let is_needed = !created.is_empty() || !updated.is_empty();
        let is_lost = recorded.is_none() && is_lost(observed, owned, &revision);
        Self {
            created,
            deleted: failing.into_iter().chain(surplus).filter(|member| may_go(member)).take(BURST).collect(),
            updated,
            rolled: rolled.into_iter().take(BURST).collect(),
            pruned: unused(observed, Some(revision.as_str()).filter(|_| is_needed)),
            is_recorded: recorded.is_some(),
            is_lost,
            revision,
            wake,
        }
    }

    /// Returns true if a write that was refused for this reason is part of the changes.
    pub(super) fn want(&self, reason: &str) -> bool {
        match reason {
            event::FAILED_CREATE => !self.created.is_empty(),
            event::FAILED_DELETE => !self.deleted.is_empty(),
            event::FAILED_UPDATE => !self.updated.is_empty() || self.is_lost,
            FAILED_ROLL => !self.rolled.is_empty(),
            FAILED_PRUNING => !self.pruned.is_empty(),
            _ => false,
        }
    }

    /// Adds the writes. A refused one waits, and the other kinds continue. When they are refused, too, all wait, and the kind that was
    /// refused last comes last: only the last refusal is looked at, and two kinds in turns would hardly wait.
    pub(super) fn carry_out(
        &self,
        observed: &Observed,
        failure: Option<&Failure>,
        decision: &mut Decision,
    ) -> Result<(), serde_json::Error> {
        self.wake.into_iter().for_each(|wait| decision.wake(wait));
        let blocking = failure.filter(|failure| failure.blocks(observed.now));
        if let Some(failure) = blocking {
            decision.wake(failure.remaining(observed.now));
        }
        let proceeds = |kind: &str| blocking.is_none_or(|failure| failure.attempts == 1 && kind_of(failure) != kind);
        let may_use_revision = self.is_recorded || proceeds(self.recording_failure());
        let mut kinds = [
            (event::FAILED_DELETE, self.deletions(observed)),
            (event::FAILED_UPDATE, self.updates(observed, may_use_revision)?),
            (event::FAILED_CREATE, if may_use_revision { self.creations(observed)? } else { Vec::new() }),
            (FAILED_PRUNING, self.prunings()),
        ];
        kinds.sort_by_key(|(kind, _)| failure.is_some_and(|failure| kind_of(failure) == *kind));
        let needs_revision = !self.created.is_empty() || !self.updated.is_empty() || self.is_lost;
        let mut recording = if needs_revision && !self.is_recorded && may_use_revision {
            record(observed, &self.revision, self.recording_failure())?
        } else {
            Vec::new()
        };
        if !recording.is_empty() && observed.left.is_some() {
            decision.wake(RECORD_RETRY);
        }
        for (kind, mut effects) in kinds.into_iter().filter(|(kind, _)| proceeds(kind)) {
            if [event::FAILED_UPDATE, event::FAILED_CREATE].contains(&kind) {
                decision.effects.append(&mut recording);
            }
            // Each attempt begins with another VM, so that one whose change is refused holds up no other. Numbers stay in order.
            let refused = failure.filter(|failure| kind_of(failure) == kind && kind != event::FAILED_CREATE);
            if let Some(failure) = refused {
                let first = usize::try_from(failure.attempts).unwrap_or(0).checked_rem(effects.len()).unwrap_or(0);
                effects.rotate_left(first);
            }
            decision.effects.extend(effects);
        }
        Ok(())
    }

    fn deletions(&self, observed: &Observed) -> Vec<Effect> {
        let regarding = || Kind::Pool.reference(&observed.pool.metadata);
        self.deleted.iter().map(|member| delete(member, regarding)).collect()
    }

    fn updates(&self, observed: &Observed, may_use_revision: bool) -> Result<Vec<Effect>, serde_json::Error> {
        let mut effects = Vec::new();
        for (member, index) in self.updated.iter().filter(|_| may_use_revision) {
            effects.extend(change(observed, member, *index, &self.revision)?);
        }
        for (member, roll) in &self.rolled {
            effects.extend(update::write(observed, member, *roll)?);
        }
        Ok(effects)
    }

    fn creations(&self, observed: &Observed) -> Result<Vec<Effect>, serde_json::Error> {
        self.created.iter().map(|index| create(observed, *index, &self.revision)).collect()
    }

    fn prunings(&self) -> Vec<Effect> {
        let deletion = |revision: &&PoolRevision| Effect::delete(Kind::ControllerRevision, &revision.metadata);
        self.pruned.iter().map(deletion).map(|effect| effect.refused_as(FAILED_PRUNING)).collect()
    }

    /// Returns the reason under which a revision that could not be created is remembered.
    fn recording_failure(&self) -> &'static str {
        if self.created.is_empty() { event::FAILED_UPDATE } else { event::FAILED_CREATE }
    }
}

/// Returns the kind of writes to which a refused one belongs. VMs and their VMIs are updated together.
fn kind_of(failure: &Failure) -> &'static str {
    if failure.reason == FAILED_ROLL { event::FAILED_UPDATE } else { failure.reason }
}

fn without<'a>(members: &[&'a Member], others: &[&'a Member]) -> Vec<&'a Member> {
    let is_other = |member: &&Member| others.iter().any(|other| std::ptr::eq(*other, *member));
    members.iter().copied().filter(|member| !is_other(member)).collect()
}

/// Returns the VMs that the pool deletes because there are more than wanted.
fn surplus<'a>(observed: &Observed, members: &[&'a Member], wanted: usize) -> Vec<&'a Member> {
    let count = members.len().saturating_sub(wanted);
    let strategy = observed.pool.spec.scale_in_strategy.as_ref();
    let is_left_to_others =
        strategy.is_some_and(|strategy| strategy.unmanaged.is_some() || strategy.opportunistic.is_some());
    if count == 0 || is_left_to_others {
        return Vec::new();
    }
    let proactive = strategy.and_then(|strategy| strategy.proactive.as_ref());
    let selected = select(proactive.and_then(|proactive| proactive.selection_policy.as_ref()), members.to_vec());
    selected.into_iter().take(count).collect()
}

/// Returns the name of the newest revision with this template.
fn recorded<'a>(observed: &'a Observed, template: &PoolTemplate) -> Option<&'a str> {
    let same =
        observed.revisions.iter().filter(|known| known.template.as_ref().is_some_and(|known| known.is_same(template)));
    same.max_by_key(|revision| revision.generation)?.metadata.name.as_deref()
}

/// Returns true if a VM or VMI has the name of a revision that the pool lacks, unless its creation was tried a short time ago.
fn is_lost(observed: &Observed, owned: &[&Member], name: &str) -> bool {
    // A refusal has times of its own.
    let is_refused = observed.failure.as_ref().is_some_and(|failure| failure.reason == event::FAILED_UPDATE);
    if observed.is_tried && !is_refused {
        return false;
    }
    let is_own = observed.revisions.iter().any(|known| known.metadata.name.as_deref() == Some(name));
    !is_own && owned.iter().any(|member| [member.revision(), member.vmi_revision()].contains(&Some(name)))
}

/// Returns the name of a new revision. It is the value of a label.
pub(super) fn revision_name(pool: &VirtualMachinePool) -> String {
    let generation = pool.metadata.generation.unwrap_or(0);
    let name = pool.metadata.name.as_deref().unwrap_or_default();
    names::shortened(&format!("{name}-{generation}"), names::LABEL_LIMIT)
}

/// Returns the revisions that no VM and no VMI names, except the one that VMs get now.
fn unused<'a>(observed: &'a Observed, needed: Option<&str>) -> Vec<&'a PoolRevision> {
    let named: Vec<&str> =
        observed.members.iter().flat_map(|member| [member.revision(), member.vmi_revision()]).flatten().collect();
    let is_used = |revision: &&PoolRevision| {
        revision.metadata.name.as_deref().is_some_and(|name| needed == Some(name) || named.contains(&name))
    };
    observed.revisions.iter().map(|revision| &**revision).filter(|revision| !is_used(revision)).take(BURST).collect()
}

/// Returns the creation of a revision. That of a former pool, which is about to go, makes room for it.
fn record(observed: &Observed, name: &str, reason: &'static str) -> Result<Vec<Effect>, serde_json::Error> {
    let pool = &observed.pool.metadata;
    let revision = ControllerRevision {
        metadata: ObjectMeta {
            name: Some(name.to_owned()),
            namespace: pool.namespace.clone(),
            labels: Some([(label::OF_POOL.to_owned(), String::new())].into()),
            owner_references: Some(vec![Kind::Pool.owner_reference(pool)]),
            ..ObjectMeta::default()
        },
        data: Some(RawExtension(serde_json::to_value(&observed.pool.spec)?)),
        revision: pool.generation.unwrap_or(0),
    };
    let failed = format!("Error recording the template in ControllerRevision {name}: {{error}}");
    let failed = Event::warning(Kind::Pool.reference(pool), reason, failed);
    let left = observed.left.iter().map(|left| Effect::delete(Kind::ControllerRevision, &left.metadata));
    let mut effects: Vec<Effect> = left.map(|effect| effect.refused_as(reason)).collect();
    // A record of KubeVirt has no label. Without a record, updates depend on what the VM controller reports.
    let effect = Effect::create(Kind::ControllerRevision, pool.namespace.as_deref(), &revision)?;
    effects.push(effect.or_existing().on_failure(failed));
    Ok(effects)
}

fn create(observed: &Observed, index: u32, revision: &str) -> Result<Effect, serde_json::Error> {
    let pool = &*observed.pool;
    let vm = manifest::vm(pool, index, revision);
    let namespace = pool.metadata.namespace.as_deref();
    let created = format!("Created VM {}/{}", namespace.unwrap_or_default(), manifest::name(pool, index));
    let regarding = || Kind::Pool.reference(&pool.metadata);
    Ok(Effect::create(Kind::VirtualMachine, namespace, &vm)?
        .on_success(Event::normal(regarding(), event::SUCCESSFUL_CREATE, created))
        .on_failure(Event::warning(regarding(), event::FAILED_CREATE, "Error creating VM: {error}")))
}

fn delete(member: &Member, regarding: impl Fn() -> ObjectReference) -> Effect {
    let (path, metadata) = (member.path(), &member.vm.metadata);
    let deleted = format!("Deleted VM {path} with uid {} from pool", metadata.uid.as_deref().unwrap_or_default());
    let failed = format!("Error deleting virtual machine {path}: {{error}}");
    Effect::delete(Kind::VirtualMachine, metadata)
        .on_success(Event::normal(regarding(), event::SUCCESSFUL_DELETE, deleted))
        .on_failure(Event::warning(regarding(), event::FAILED_DELETE, failed))
}

fn change(
    observed: &Observed,
    member: &Member,
    index: u32,
    revision: &str,
) -> Result<Option<Effect>, serde_json::Error> {
    let former = member.revision().and_then(|name| update::template_of(observed, name));
    let changed = manifest::changed(&observed.pool, &member.vm, index, revision, former);
    let updated = format!("Updated VM {}", member.path());
    let metadata = &member.vm.metadata;
    let text = |part: &Option<String>| part.clone().unwrap_or_default();
    // KubeVirt has them in this order.
    let swapped = format!("{}/{}", text(&metadata.name), text(&metadata.namespace));
    let failed = format!("Error updating virtual machine {swapped}: {{error}}");
    let effect = Effect::change(Kind::VirtualMachine, &*member.vm, &changed, None)?;
    let (done, refused) = ((event::SUCCESSFUL_UPDATE, updated), (event::FAILED_UPDATE, failed));
    Ok(effect.map(|effect| effect.reported(Kind::Pool.reference(&observed.pool.metadata), done, refused)))
}
