//! A world in memory, with one planted bug or none: it shows that the checks find bugs, and that few steps remain.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result};
use futures::executor::block_on;

use super::{
    actions::{Action, Kill, Model, Snapshot, Step, Strategy, Vm, generate},
    play::{Seen, SeenVm, World, failed_at, play, shrink},
};

/// A bug of the kind that the invariants are about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Bug {
    /// A restore brings the content of the newest snapshot.
    WrongSnapshot,
    /// A restore of a VM that runs never releases the lease.
    ForgottenLease,
    /// The claim of a VM that was restored outlives the VM.
    OrphanedClaim,
    /// A guest whose worker is killed during a snapshot is started a second time.
    SecondGuest,
    /// A clone's snapshot stays if the leader is killed meanwhile.
    TemporarySnapshot,
    /// A guest that crashes loses what it wrote last.
    LostWrite,
}

/// Most steps that remain of the fifty.
const FEW: usize = 8;

#[derive(Clone, Debug, Default)]
struct FakeVm {
    guests: usize,
    is_always: bool,
    is_manual: bool,
    is_held: bool,
    is_restored: bool,
    data: u32,
    former: u32,
}

#[derive(Default)]
struct Fake {
    bug: Option<Bug>,
    vms: BTreeMap<Vm, FakeVm>,
    /// VM and content, the newest last.
    snapshots: Vec<(Snapshot, Vm, u32)>,
    claims: BTreeSet<Vm>,
    written: u32,
    wrong: Vec<String>,
}

impl Fake {
    fn vm(&mut self, name: Vm) -> &mut FakeVm {
        self.vms.entry(name).or_default()
    }

    fn has(&self, bug: Bug) -> bool {
        self.bug == Some(bug)
    }

    /// Returns VM and content of a snapshot.
    fn content(&self, name: Snapshot) -> Result<(Vm, u32)> {
        let found = match self.has(Bug::WrongSnapshot) {
            true => self.snapshots.last(),
            false => self.snapshots.iter().find(|(known, ..)| *known == name),
        };
        let of = self.snapshots.iter().find(|(known, ..)| *known == name).context("no such snapshot")?.1;
        Ok((of, found.context("no snapshot")?.2))
    }

    fn make(&mut self, name: Vm, data: u32, kill: Option<Kill>) {
        self.vms.insert(name, FakeVm { data, ..FakeVm::default() });
        self.claims.insert(name);
        if self.has(Bug::TemporarySnapshot) && kill == Some(Kill::Leader) {
            self.wrong.push("snapshot tmp-snapshot is left".to_owned());
        }
    }

    fn end(&mut self, name: Vm) {
        let vm = self.vm(name);
        vm.guests = usize::from(vm.is_always);
    }
}

impl World for Fake {
    async fn act(&mut self, step: Step, _: &Model, _: &Model) -> Result<()> {
        match step.action {
            Action::Create { vm, strategy } => {
                let (is_always, is_manual) = (strategy == Strategy::Always, strategy == Strategy::Manual);
                let guests = usize::from(is_always);
                self.vms.insert(vm, FakeVm { guests, is_always, is_manual, ..FakeVm::default() });
                self.claims.insert(vm);
            }
            Action::Start(vm) => {
                let vm = self.vm(vm);
                (vm.guests, vm.is_always) = (1, !vm.is_manual);
            }
            Action::Stop(vm) => (self.vm(vm).guests, self.vm(vm).is_always) = (0, false),
            Action::Restart(_) => {}
            Action::Write(vm) => {
                self.written += 1;
                let written = self.written;
                let vm = self.vm(vm);
                vm.former = std::mem::replace(&mut vm.data, written);
            }
            Action::PowerOff(vm) => self.end(vm),
            Action::Crash(vm) => {
                self.end(vm);
                if self.has(Bug::LostWrite) {
                    self.vm(vm).data = self.vm(vm).former;
                }
            }
            Action::Snapshot { vm, snapshot } => {
                let data = self.vm(vm).data;
                self.snapshots.push((snapshot, vm, data));
                if self.has(Bug::SecondGuest) && step.kill == Some(Kill::Worker(vm)) {
                    self.vm(vm).guests += 1;
                }
            }
            Action::Restore { snapshot, .. } => {
                let (name, data) = self.content(snapshot)?;
                let is_held = self.has(Bug::ForgottenLease) && self.vm(name).guests > 0;
                let vm = self.vm(name);
                (vm.guests, vm.is_always, vm.data, vm.former) = (0, false, data, data);
                (vm.is_restored, vm.is_held) = (true, is_held);
            }
            Action::RestoreTo { snapshot, vm } => self.make(vm, self.content(snapshot)?.1, None),
            Action::Clone { vm, to } => {
                let data = self.vm(vm).data;
                self.make(to, data, step.kill);
            }
            Action::CloneSnapshot { snapshot, to } => self.make(to, self.content(snapshot)?.1, None),
            Action::DeleteVm(vm) => {
                let is_restored = self.vms.remove(vm).is_some_and(|vm| vm.is_restored);
                if !(is_restored && self.has(Bug::OrphanedClaim)) {
                    self.claims.remove(vm);
                }
            }
            Action::DeleteSnapshot(snapshot) => self.snapshots.retain(|(name, ..)| *name != snapshot),
        }
        Ok(())
    }

    async fn look(&mut self, _: &Model) -> Result<Seen> {
        let strategy = |vm: &FakeVm| match (vm.is_manual, vm.is_always) {
            (true, _) => "Manual",
            (_, true) => "Always",
            _ => "Halted",
        };
        let seen = |vm: &FakeVm| SeenVm {
            guests: vm.guests,
            strategy: strategy(vm).to_owned(),
            holder: vm.is_held.then(|| "restore".to_owned()),
            data: (vm.guests > 0).then_some(vm.data),
        };
        let orphans = self.claims.iter().filter(|claim| !self.vms.contains_key(**claim));
        let orphans = orphans.map(|claim| format!("claim of {claim} belongs to nobody"));
        Ok(Seen {
            vms: self.vms.iter().map(|(name, vm)| ((*name).to_owned(), seen(vm))).collect(),
            snapshots: self.snapshots.iter().map(|(name, ..)| (*name).to_owned()).collect(),
            wrong: self.wrong.iter().cloned().chain(orphans).collect(),
        })
    }
}

async fn play_with(bug: Option<Bug>, steps: &[Step]) -> Result<()> {
    play(&mut Fake { bug, ..Fake::default() }, steps).await
}

fn outcome(bug: Option<Bug>, steps: &[Step]) -> Result<()> {
    block_on(play_with(bug, steps))
}

#[test]
fn world_without_a_bug_is_as_the_model_says() {
    for seed in 0..20 {
        outcome(None, &generate(seed, 50)).unwrap();
    }
}

#[test]
fn planted_bugs_are_found_and_reduced_to_few_steps() {
    for (bug, text) in [
        (Bug::WrongSnapshot, "the disk of VM"),
        (Bug::ForgottenLease, "is held: restore"),
        (Bug::OrphanedClaim, "belongs to nobody"),
        (Bug::SecondGuest, "has 2 guests instead of 1"),
        (Bug::TemporarySnapshot, "tmp-snapshot is left"),
        (Bug::LostWrite, "the disk of VM"),
    ] {
        let failing = (0..20).map(|seed| generate(seed, 50)).find_map(|steps| {
            let error = outcome(Some(bug), &steps).err()?;
            Some(steps[..=failed_at(&error)?].to_vec())
        });
        let failing = failing.unwrap_or_else(|| panic!("{bug:?} is not found"));
        let fails = async |steps: &[Step]| Ok(play_with(Some(bug), steps).await.is_err());
        let reduced = block_on(shrink(failing, usize::MAX, fails));
        let reduced = reduced.unwrap();
        let error = outcome(Some(bug), &reduced).unwrap_err().to_string();
        assert!(error.contains(text), "{bug:?}: {error}");
        assert!(reduced.len() <= FEW, "{bug:?}: {reduced:?}");
        assert!(outcome(None, &reduced).is_ok(), "{bug:?}: {reduced:?}");
    }
}

#[test]
fn reduction_ends_after_its_attempts() {
    let steps = generate(1, 50);
    let mut attempts = 0;
    let reduced = block_on(shrink(steps.clone(), 3, async |_: &[Step]| {
        attempts += 1;
        Ok(false)
    }));
    assert_eq!((reduced.unwrap(), attempts), (steps, 3));
}
