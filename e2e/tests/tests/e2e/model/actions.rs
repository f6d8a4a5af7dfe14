//! The model: VMs, snapshots, and what each action does to them.

use std::{
    collections::BTreeMap,
    fmt::{self, Display},
};

/// Names of VMs and of snapshots.
pub(super) const VMS: [Vm; 3] = ["a", "b", "c"];
pub(super) const SNAPSHOTS: [&str; 3] = ["s0", "s1", "s2"];

pub(super) type Vm = &'static str;
pub(super) type Snapshot = &'static str;

/// An action of a user, or the end of a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    Create {
        vm: Vm,
        strategy: Strategy,
    },
    Start(Vm),
    Stop(Vm),
    Restart(Vm),
    /// The guest writes another number to its disk.
    Write(Vm),
    /// The guest shuts down.
    PowerOff(Vm),
    /// QEMU is killed.
    Crash(Vm),
    Snapshot {
        vm: Vm,
        snapshot: Snapshot,
    },
    /// The VM of the snapshot is stopped and gets back its disk.
    Restore {
        snapshot: Snapshot,
        in_place: bool,
    },
    /// A VM is made from the snapshot.
    RestoreTo {
        snapshot: Snapshot,
        vm: Vm,
    },
    Clone {
        vm: Vm,
        to: Vm,
    },
    CloneSnapshot {
        snapshot: Snapshot,
        to: Vm,
    },
    DeleteVm(Vm),
    DeleteSnapshot(Snapshot),
}

/// A process that is killed during an action.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kill {
    Leader,
    VirtHandler,
    /// Of a VM that runs before and after.
    Worker(Vm),
    Libvirtd(Vm),
}

/// A step of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Step {
    pub(super) action: Action,
    pub(super) kill: Option<Kill>,
}

impl Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.action)?;
        self.kill.map_or(Ok(()), |kill| write!(f, ", killed meanwhile: {kill:?}"))
    }
}

/// The run strategy of a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Strategy {
    Always,
    Halted,
    Manual,
}

/// The guest of a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Guest {
    Off,
    Runs,
    /// It has ended by itself: its VMI is there.
    Ended,
}

/// A VM as it should be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct VmState {
    /// Distinguishes VMs that had the same name.
    identity: u32,
    pub(super) strategy: Strategy,
    pub(super) guest: Guest,
    /// The number on its disk.
    pub(super) data: u32,
}

/// A snapshot as it should be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Taken {
    pub(super) vm: Vm,
    identity: u32,
    data: u32,
}

/// The objects that should exist.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Model {
    pub(super) vms: BTreeMap<Vm, VmState>,
    pub(super) snapshots: BTreeMap<Snapshot, Taken>,
    identities: u32,
    numbers: u32,
}

impl Model {
    pub(super) fn guest(&self, vm: Vm) -> Option<Guest> {
        self.vms.get(vm).map(|state| state.guest)
    }

    fn runs(&self, vm: Vm) -> bool {
        self.guest(vm) == Some(Guest::Runs)
    }

    fn is_free(&self, vm: Vm) -> bool {
        !self.vms.contains_key(vm)
    }

    /// Returns true if a user can do this and it succeeds.
    fn permits(&self, action: Action) -> bool {
        match action {
            Action::Create { vm, .. } => self.is_free(vm),
            Action::Start(vm) => self.guest(vm).is_some_and(|guest| guest != Guest::Runs),
            Action::Stop(vm) | Action::Restart(vm) | Action::Write(vm) | Action::PowerOff(vm) | Action::Crash(vm) => {
                self.runs(vm)
            }
            Action::Snapshot { vm, snapshot } => !self.is_free(vm) && !self.snapshots.contains_key(snapshot),
            // A VM that was made again under the name is another one.
            Action::Restore { snapshot, .. } => self
                .snapshots
                .get(snapshot)
                .is_some_and(|taken| self.vms.get(taken.vm).is_some_and(|vm| vm.identity == taken.identity)),
            Action::RestoreTo { snapshot, vm: to } | Action::CloneSnapshot { snapshot, to } => {
                self.snapshots.contains_key(snapshot) && self.is_free(to)
            }
            Action::Clone { vm, to } => !self.is_free(vm) && self.is_free(to),
            Action::DeleteVm(vm) => !self.is_free(vm),
            Action::DeleteSnapshot(snapshot) => self.snapshots.contains_key(snapshot),
        }
    }

    /// Returns the step as it can be done: without a kill of a guest's process if the guest does not stay. `None`: it cannot be.
    pub(super) fn permitted(&self, step: Step) -> Option<Step> {
        let stays = |vm: Vm| self.runs(vm) && !step.action.ends_guest_of(self, vm);
        let kill = step.kill.filter(|kill| match kill {
            Kill::Leader | Kill::VirtHandler => true,
            Kill::Worker(vm) | Kill::Libvirtd(vm) => stays(vm),
        });
        self.permits(step.action).then_some(Step { kill, ..step })
    }

    /// Returns the model after a permitted action.
    pub(super) fn after(&self, action: Action) -> Self {
        let mut model = self.clone();
        match action {
            Action::Create { vm, strategy } => {
                let guest = if strategy == Strategy::Always { Guest::Runs } else { Guest::Off };
                model.add(vm, strategy, guest, 0);
            }
            Action::Restore { snapshot, .. } => {
                let taken = self.snapshots[snapshot].clone();
                model.change(taken.vm, VmState::stop);
                model.change(taken.vm, |vm| vm.data = taken.data);
            }
            Action::RestoreTo { snapshot, vm: to } | Action::CloneSnapshot { snapshot, to } => {
                model.add(to, Strategy::Halted, Guest::Off, self.snapshots[snapshot].data);
            }
            Action::Clone { vm, to } => model.add(to, Strategy::Halted, Guest::Off, self.vms[vm].data),
            Action::Start(vm) => model.change(vm, VmState::start),
            Action::Stop(vm) => model.change(vm, VmState::stop),
            Action::Restart(_) => {}
            Action::PowerOff(vm) | Action::Crash(vm) => model.change(vm, VmState::end),
            Action::Write(vm) => {
                model.numbers += 1;
                let number = model.numbers;
                model.change(vm, |vm| vm.data = number);
            }
            Action::Snapshot { vm, snapshot } => {
                let VmState { identity, data, .. } = self.vms[vm];
                model.snapshots.insert(snapshot, Taken { vm, identity, data });
            }
            Action::DeleteVm(vm) => drop(model.vms.remove(vm)),
            Action::DeleteSnapshot(snapshot) => drop(model.snapshots.remove(snapshot)),
        }
        model
    }

    fn add(&mut self, vm: Vm, strategy: Strategy, guest: Guest, data: u32) {
        self.identities += 1;
        self.vms.insert(vm, VmState { identity: self.identities, strategy, guest, data });
    }

    fn change(&mut self, vm: Vm, change: impl FnOnce(&mut VmState)) {
        if let Some(state) = self.vms.get_mut(vm) {
            change(state);
        }
    }

    /// Returns all actions that are possible now.
    fn possible(&self) -> Vec<Action> {
        let mut all = Vec::new();
        for vm in VMS {
            all.extend([Strategy::Always, Strategy::Manual].map(|strategy| Action::Create { vm, strategy }));
            all.extend([Action::Start(vm), Action::Stop(vm), Action::Restart(vm), Action::Write(vm)]);
            all.extend([Action::PowerOff(vm), Action::Crash(vm), Action::DeleteVm(vm)]);
            all.extend(VMS.map(|to| Action::Clone { vm, to }));
            for snapshot in SNAPSHOTS {
                all.extend([Action::Snapshot { vm, snapshot }, Action::RestoreTo { snapshot, vm }]);
                all.push(Action::CloneSnapshot { snapshot, to: vm });
            }
        }
        for snapshot in SNAPSHOTS {
            all.extend([true, false].map(|in_place| Action::Restore { snapshot, in_place }));
            all.push(Action::DeleteSnapshot(snapshot));
        }
        all.retain(|action| self.permits(*action));
        all
    }
}

impl VmState {
    fn start(&mut self) {
        self.guest = Guest::Runs;
        if self.strategy == Strategy::Halted {
            self.strategy = Strategy::Always;
        }
    }

    fn stop(&mut self) {
        self.guest = Guest::Off;
        if self.strategy == Strategy::Always {
            self.strategy = Strategy::Halted;
        }
    }

    /// Ends the guest, which `Always` starts again.
    fn end(&mut self) {
        if self.strategy != Strategy::Always {
            self.guest = Guest::Ended;
        }
    }
}

impl Action {
    /// Returns true if the present guest of a VM ends.
    fn ends_guest_of(self, model: &Model, vm: Vm) -> bool {
        match self {
            Self::Stop(of) | Self::Restart(of) | Self::PowerOff(of) | Self::Crash(of) | Self::DeleteVm(of) => of == vm,
            Self::Restore { snapshot, .. } => model.snapshots.get(snapshot).is_some_and(|taken| taken.vm == vm),
            _ => false,
        }
    }

    /// Returns how likely the kind of action is. Without much that is written, restored and looked at, one content is like another.
    const fn weight(self) -> usize {
        match self {
            Self::Write(_) => 6,
            Self::Start(_) | Self::Restore { .. } => 4,
            Self::Snapshot { .. } => 3,
            Self::RestoreTo { .. } | Self::CloneSnapshot { .. } => 2,
            _ => 1,
        }
    }

    /// Distinguishes the kinds of actions.
    fn kind(self) -> std::mem::Discriminant<Self> {
        std::mem::discriminant(&self)
    }
}

/// A generator of numbers (SplitMix64), the same for a seed everywhere.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        let limit = u64::try_from(limit.max(1)).unwrap_or(u64::MAX);
        usize::try_from((mixed ^ (mixed >> 31)) % limit).unwrap_or_default()
    }

    fn choose<T: Copy>(&mut self, of: &[T]) -> Option<T> {
        of.get(self.below(of.len())).copied()
    }
}

/// Returns the steps of a seed. Every third step has a kill, if there is a victim.
pub(super) fn generate(seed: u64, count: usize) -> Vec<Step> {
    let (mut random, mut model, mut steps) = (Random(seed), Model::default(), Vec::new());
    while steps.len() < count {
        let possible = model.possible();
        let mut kinds: Vec<_> = Vec::new();
        for action in &possible {
            if !kinds.contains(&action.kind()) {
                kinds.extend(std::iter::repeat_n(action.kind(), action.weight()));
            }
        }
        let Some(kind) = random.choose(&kinds) else { break };
        let of_kind: Vec<Action> = possible.into_iter().filter(|action| action.kind() == kind).collect();
        let Some(action) = random.choose(&of_kind) else { break };
        let vm = match action {
            // The guest takes part.
            Action::Write(vm) | Action::Snapshot { vm, .. } | Action::Clone { vm, .. } => vm,
            _ => VMS[random.below(VMS.len())],
        };
        let kills = [Kill::Leader, Kill::VirtHandler, Kill::Worker(vm), Kill::Libvirtd(vm)];
        let kill = random.choose(&kills).filter(|_| random.below(3) == 0);
        let Some(step) = model.permitted(Step { action, kill }) else { break };
        model = model.after(step.action);
        steps.push(step);
    }
    steps
}

#[test]
fn steps_of_a_seed_are_the_same_each_time_and_have_all_kinds_of_actions() {
    let steps: Vec<Step> = (0..20).flat_map(|seed| generate(seed, 50)).collect();
    assert_eq!(steps, (0..20).flat_map(|seed| generate(seed, 50)).collect::<Vec<_>>());
    assert_eq!(steps.len(), 1000);
    let mut kinds: Vec<_> = Vec::new();
    for step in &steps {
        if !kinds.contains(&step.action.kind()) {
            kinds.push(step.action.kind());
        }
    }
    assert_eq!(kinds.len(), 14, "{kinds:?}");
    let kills = steps.iter().filter(|step| step.kill.is_some()).count();
    assert!((200..400).contains(&kills), "{kills} kills");
}
