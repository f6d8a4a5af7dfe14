// The list: what is known of VMs and VMIs, and what can be done with each of them.

export const VM = 'VirtualMachine';
export const VMI = 'VirtualMachineInstance';

const keyOf = ({ namespace, name }) => `${namespace}/${name}`;

/** Returns an empty list. */
export const emptyList = () => ({
  namespace: null,
  complete: { [VM]: false, [VMI]: false },
  errors: { [VM]: null, [VMI]: null },
  objects: { [VM]: new Map(), [VMI]: new Map() },
  arriving: { [VM]: null, [VMI]: null },
});

/** Applies a message of the server to the list. */
export function apply(list, { event, kind, row, message, namespace }) {
  if (event === 'scope') {
    list.namespace = namespace;
    return;
  }
  if (event === 'error') {
    list.errors[kind] = message;
    return;
  }
  if (event === 'begin') {
    list.arriving[kind] = new Map();
  } else if (event === 'complete') {
    list.objects[kind] = list.arriving[kind] ?? list.objects[kind];
    list.arriving[kind] = null;
    list.complete[kind] = true;
    list.errors[kind] = null;
  } else {
    const objects = list.arriving[kind] ?? list.objects[kind];
    if (event === 'delete') {
      objects.delete(keyOf(row));
    } else {
      objects.set(keyOf(row), row);
    }
    list.errors[kind] = null;
  }
}

const FINAL = ['Succeeded', 'Failed'];
/** Run strategies that the API server lets users start, and those that it stops without a VMI. */
const STARTED = ['Halted', 'Manual', 'RerunOnFailure'];
const STOPPED = ['Always', 'Once'];

/** Returns the actions and pages that the state of a VM and of its VMI permits. */
export function abilities(vm, vmi) {
  const lives = Boolean(vmi) && !FINAL.includes(vmi.phase);
  const runs = lives && vmi.phase === 'Running';
  const retries = vm?.strategy === 'RerunOnFailure' && vmi?.phase === 'Failed';
  return {
    start: Boolean(vm) && !lives && !retries && STARTED.includes(vm.strategy),
    stop: Boolean(vm) && (lives || STOPPED.includes(vm.strategy)),
    restart: Boolean(vm) && lives,
    pause: runs && !vmi.paused,
    unpause: runs && vmi.paused,
    migrate: Boolean(vm) && runs && vmi.migratable && vm.status !== 'Migrating',
    console: runs && vmi.console,
    display: runs && vmi.display,
  };
}

/** Returns the mood of a status, which chooses its colour. */
export function mood(status) {
  if (['Running', 'Paused', 'Migrating'].includes(status)) {
    return status === 'Running' ? 'good' : 'wait';
  }
  if (['Stopped', 'Succeeded'].includes(status)) {
    return 'quiet';
  }
  return /Error|Err|Failed|BackOff|Unknown/.test(status) ? 'bad' : 'wait';
}

/** Returns the rows whose texts contain all words of the filter, by namespace and name. */
export function rowsOf(list, filter) {
  const [vms, vmis] = [list.objects[VM], list.objects[VMI]];
  const words = filter.toLowerCase().split(/\s+/).filter(Boolean);
  const row = (key) => {
    const [vm, vmi] = [vms.get(key), vmis.get(key)];
    const { namespace, name } = vm ?? vmi;
    return {
      key,
      namespace,
      name,
      kind: vm || !list.complete[VM] ? 'VM' : 'VMI',
      status: (vm ? vm.status : vmi.paused ? 'Paused' : vmi.phase) || 'Pending',
      message: vm?.message || vmi?.message || '',
      node: vmi?.node || '',
      addresses: (vmi?.addresses ?? []).join(', '),
      system: vmi?.system || '',
      whyNot: vmi?.whyNot || '',
      can: abilities(vm, vmi),
    };
  };
  const matches = (one) => {
    const text = [one.namespace, one.name, one.status, one.node, one.addresses, one.system].join(' ').toLowerCase();
    return words.every((word) => text.includes(word));
  };
  const keys = new Set([...vms.keys(), ...vmis.keys()]);
  const compare = (a, b) => (a.namespace === b.namespace ? compareTexts(a.name, b.name) : compareTexts(a.namespace, b.namespace));
  return [...keys].map(row).filter(matches).sort(compare);
}

const { compare: compareTexts } = new Intl.Collator('en', { numeric: true });
