// The table of VMs. Rows are changed in place, so that the focus stays. All texts of the cluster become text nodes.

import { mood } from './rows.js';
import { pageOf } from './server.js';

const ACTIONS = [
  ['start', 'Start'],
  ['stop', 'Stop'],
  ['restart', 'Restart'],
  ['pause', 'Pause'],
  ['unpause', 'Unpause'],
  ['migrate', 'Migrate'],
];
const PAGES = [
  ['console', 'Console'],
  ['display', 'Display'],
];

function create(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

function setText(element, text) {
  if (element.textContent !== text) {
    element.textContent = text;
  }
}

/** Creates the cells of a row. `act` is called with the row and the action. */
function createRow(act) {
  const cells = {
    name: create('span'),
    system: create('span', { className: 'detail' }),
    namespace: create('td', { className: 'namespace' }),
    status: create('span'),
    message: create('span', { className: 'detail' }),
    node: create('td'),
    addresses: create('td'),
    pages: PAGES.map(([, text]) => create('a', { textContent: text, target: '_blank' })),
    row: null,
  };
  cells.actions = ACTIONS.map(([action, text]) =>
    create('button', { type: 'button', textContent: text, onclick: () => act(cells.row, action) }),
  );
  cells.element = create(
    'tr',
    {},
    create('th', { scope: 'row' }, cells.name, cells.system),
    cells.namespace,
    create('td', {}, cells.status, cells.message),
    cells.node,
    cells.addresses,
    create('td', {}, create('div', { className: 'buttons' }, ...cells.pages)),
    create('td', {}, create('div', { className: 'buttons' }, ...cells.actions)),
  );
  return cells;
}

function updateRow(cells, row) {
  cells.row = row;
  setText(cells.name, row.name);
  setText(cells.system, row.kind === 'VMI' ? ['VMI without VM', row.system].filter(Boolean).join(', ') : row.system);
  setText(cells.namespace, row.namespace);
  setText(cells.status, row.status);
  cells.status.className = mood(row.status);
  setText(cells.message, row.message);
  setText(cells.node, row.node);
  setText(cells.addresses, row.addresses);
  PAGES.forEach(([page, text], index) => {
    const link = cells.pages[index];
    link.hidden = !row.can[page];
    link.href = pageOf(`${page}.html`, row);
    link.setAttribute('aria-label', `${text} of ${row.name}`);
  });
  ACTIONS.forEach(([action, text], index) => {
    const button = cells.actions[index];
    button.disabled = !row.can[action];
    button.setAttribute('aria-label', `${text} ${row.name}`);
    // Pause and Unpause share a place.
    button.hidden = (action === 'pause' && row.can.unpause) || (action === 'unpause' && !row.can.unpause);
    if (action === 'migrate') {
      button.title = row.can.migrate ? '' : row.whyNot;
    }
  });
}

/** Returns a function that shows rows in the body of a table. */
export function tableOf(body, act) {
  const shown = new Map();
  return (rows) => {
    const keys = new Set(rows.map((row) => row.key));
    for (const [key, cells] of shown) {
      if (!keys.has(key)) {
        cells.element.remove();
        shown.delete(key);
      }
    }
    let next = body.firstElementChild;
    for (const row of rows) {
      if (!shown.has(row.key)) {
        shown.set(row.key, createRow(act));
      }
      const cells = shown.get(row.key);
      updateRow(cells, row);
      if (cells.element === next) {
        next = next.nextElementSibling;
      } else {
        body.insertBefore(cells.element, next);
      }
    }
  };
}
