// `node --test cli/src/ui/page` runs these tests.

import assert from 'node:assert/strict';
import { test } from 'node:test';

import { abilities, apply, emptyList, mood, rowsOf, VM, VMI } from './rows.js';

const able = (vm, vmi) => Object.entries(abilities(vm, vmi)).filter(([, can]) => can).map(([word]) => word).join(' ');

test('actions follow the state of VM and VMI', () => {
  const running = { phase: 'Running', migratable: true, console: true, display: true };
  for (const [vm, vmi, expected] of [
    [{ strategy: 'Halted' }, undefined, 'start'],
    [{ strategy: 'Manual' }, undefined, 'start'],
    [{ strategy: 'Always' }, undefined, 'stop'],
    [{ strategy: 'Manual' }, { phase: 'Succeeded' }, 'start'],
    [{ strategy: 'Once' }, { phase: 'Succeeded' }, 'stop'],
    [{ strategy: 'RerunOnFailure' }, undefined, 'start'],
    [{ strategy: 'RerunOnFailure' }, { phase: 'Succeeded' }, 'start'],
    [{ strategy: 'RerunOnFailure' }, { phase: 'Failed' }, ''],
    [{ strategy: 'RerunOnFailure' }, { phase: 'Scheduling' }, 'stop restart'],
    [{ strategy: 'Always' }, { phase: 'Scheduling' }, 'stop restart'],
    [{ strategy: 'Always' }, running, 'stop restart pause migrate console display'],
    [{ strategy: 'Always', status: 'Migrating' }, running, 'stop restart pause console display'],
    [{ strategy: 'Always' }, { ...running, migratable: false, display: false }, 'stop restart pause console'],
    [{ strategy: 'Halted' }, { ...running, paused: true }, 'stop restart unpause migrate console display'],
    [undefined, running, 'pause console display'],
  ]) {
    assert.equal(able(vm, vmi), expected, JSON.stringify([vm, vmi]));
  }
});

test('changes are applied, and a new list replaces the former one when it is complete', () => {
  const list = emptyList();
  const row = (name, more) => ({ namespace: 'a', name, ...more });
  const names = () => rowsOf(list, '').map((one) => one.name).join(' ');
  apply(list, { event: 'scope', namespace: 'a' });
  apply(list, { event: 'begin', kind: VM });
  apply(list, { event: 'apply', kind: VM, row: row('vm-10') });
  apply(list, { event: 'apply', kind: VM, row: row('vm-9') });
  assert.equal(names(), '');
  apply(list, { event: 'complete', kind: VM });
  assert.equal(names(), 'vm-9 vm-10');
  apply(list, { event: 'delete', kind: VM, row: row('vm-9') });
  apply(list, { event: 'apply', kind: VMI, row: row('alone', { phase: 'Running', paused: true }) });
  assert.equal(names(), 'alone vm-10');
  assert.deepEqual(rowsOf(list, '').map((one) => [one.kind, one.status]), [['VMI', 'Paused'], ['VM', 'Pending']]);
  apply(list, { event: 'error', kind: VM, message: 'forbidden' });
  assert.equal(list.errors[VM], 'forbidden');
  apply(list, { event: 'begin', kind: VM });
  apply(list, { event: 'apply', kind: VM, row: row('new') });
  apply(list, { event: 'complete', kind: VM });
  assert.equal(names(), 'alone new');
  assert.equal(list.errors[VM], null);
});

test('filter takes rows with all of its words', () => {
  const list = emptyList();
  apply(list, { event: 'apply', kind: VM, row: { namespace: 'a', name: 'web', status: 'Running' } });
  apply(list, { event: 'apply', kind: VM, row: { namespace: 'b', name: 'db', status: 'Stopped' } });
  for (const [filter, expected] of [['', 'web db'], ['RUN', 'web'], ['b stop', 'db'], ['web stop', '']]) {
    assert.equal(rowsOf(list, filter).map((one) => one.name).join(' '), expected, filter);
  }
});

test('statuses have moods', () => {
  for (const [status, expected] of [
    ['Running', 'good'], ['Paused', 'wait'], ['Starting', 'wait'], ['Stopped', 'quiet'],
    ['ErrorUnschedulable', 'bad'], ['CrashLoopBackOff', 'bad'], ['ErrImagePull', 'bad'], ['<b>', 'wait'],
  ]) {
    assert.equal(mood(status), expected, status);
  }
});
