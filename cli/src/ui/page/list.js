// The first page: the list of VMs, live, with their actions.

import { apply, emptyList, rowsOf, VM, VMI } from './rows.js';
import { act, connect } from './server.js';
import { tableOf } from './table.js';

/** Longest pause between attempts to connect again, in milliseconds. */
const LONGEST_PAUSE = 30_000;
/** Actions that end the guest's work. */
const ASKED = { stop: 'Stop', restart: 'Restart' };
/** Messages of refusals that are shown at a time. */
const MOST_PROBLEMS = 5;

const element = (id) => document.getElementById(id);
const problems = element('problems');
const filter = element('filter');
let list = emptyList();
let drawing = 0;

function report(message) {
  const item = document.createElement('li');
  const text = document.createElement('span');
  const close = Object.assign(document.createElement('button'), { type: 'button', textContent: 'Dismiss' });
  text.textContent = message;
  close.addEventListener('click', () => item.remove());
  item.append(text, close);
  problems.append(item);
  while (problems.children.length > MOST_PROBLEMS) {
    problems.firstElementChild.remove();
  }
}

/** Asks for confirmation. */
function confirmed(word, row) {
  const [question, yes, no] = [element('question'), element('question-yes'), element('question-no')];
  element('question-text').textContent = `${word} ${row.name} in namespace ${row.namespace}? Programs of its guest end.`;
  yes.textContent = word;
  return new Promise((resolve) => {
    let answer = false;
    yes.onclick = () => {
      answer = true;
      question.close();
    };
    no.onclick = () => question.close();
    question.onclose = () => resolve(answer);
    question.showModal();
  });
}

async function carryOut(row, action) {
  if (action in ASKED && !(await confirmed(ASKED[action], row))) {
    return;
  }
  try {
    await act(row, action);
  } catch (error) {
    report(`${action} ${row.namespace}/${row.name}: ${error.message}`);
  }
}

const show = tableOf(document.querySelector('#vms tbody'), carryOut);

function draw() {
  drawing = 0;
  const rows = rowsOf(list, filter.value);
  element('scope').textContent = list.namespace === null ? 'in all namespaces' : `in namespace ${list.namespace}`;
  element('vms').classList.toggle('one-namespace', list.namespace !== null);
  const failure = [VM, VMI].map((kind) => list.errors[kind]).find(Boolean);
  const loading = !list.complete[VM] || !list.complete[VMI];
  const count = `${rows.length} ${rows.length === 1 ? 'virtual machine' : 'virtual machines'}`;
  const text = failure ? `The API server refused the list: ${failure}` : loading ? 'Loading…' : count;
  if (element('state').textContent !== text) {
    element('state').textContent = text;
  }
  show(rows);
}

/** Draws once for all changes of a moment. */
function drawSoon() {
  drawing ||= setTimeout(draw, 50);
}

function watch(pause) {
  const socket = connect('watch');
  const arriving = emptyList();
  let next = Math.min(2 * pause, LONGEST_PAUSE);
  socket.addEventListener('message', (event) => {
    apply(arriving, JSON.parse(event.data));
    list = arriving;
    next = 1000;
    drawSoon();
  });
  socket.addEventListener('close', () => {
    clearTimeout(drawing);
    drawing = 0;
    element('state').textContent = 'kubectl virt ui does not answer: it may have ended. Trying again…';
    setTimeout(() => watch(next), pause);
  });
}

filter.addEventListener('input', drawSoon);
watch(1000);
