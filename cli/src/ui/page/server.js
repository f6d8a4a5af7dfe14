// Requests to kubectl virt ui. Their paths are relative: the path of the page contains the token.

/** Returns the path of a VM or VMI, which other pages get as the query of theirs. */
export const pathOf = ({ namespace, name }) => `vms/${encodeURIComponent(namespace)}/${encodeURIComponent(name)}`;

/** Returns the address of a page about a VM or VMI. */
export const pageOf = (page, { namespace, name }) => `${page}?${new URLSearchParams({ namespace, name })}`;

/** Requests an action; fails with the message of the API server. */
export async function act(row, action) {
  const response = await fetch(`${pathOf(row)}/${action}`, { method: 'POST' });
  if (!response.ok) {
    throw new Error((await response.text()) || `the server answered ${response.status}`);
  }
}

/** Opens a WebSocket. */
export function connect(path) {
  const url = new URL(path, document.baseURI);
  url.protocol = 'ws:';
  const socket = new WebSocket(url);
  socket.binaryType = 'arraybuffer';
  return socket;
}

/** Prepares the page of a stream: its title, its end, and the way of the focus out of it. Returns the WebSocket. */
export function openStream(kind, word) {
  const row = Object.fromEntries(new URLSearchParams(location.search));
  const element = (id) => document.getElementById(id);
  element('title').textContent = `${kind} of ${row.name}`;
  document.title = `${row.name}: ${kind.toLowerCase()}`;
  const again = element('again');
  again.addEventListener('click', () => location.reload());
  const leave = (event) => {
    if (event.ctrlKey && event.altKey && event.key === 'Home') {
      event.preventDefault();
      event.stopImmediatePropagation();
      document.querySelector('nav button:not([hidden]), nav a').focus();
    }
  };
  window.addEventListener('keydown', leave, true);
  let reason = 'Disconnected.';
  const socket = connect(`${pathOf(row)}/${word}`);
  socket.addEventListener('open', () => { element('state').textContent = 'Connected.'; });
  // Binary messages are the stream; a text is the reason of its end.
  socket.addEventListener('message', (event) => {
    if (typeof event.data === 'string') {
      reason = `Disconnected: ${event.data}`;
      event.stopImmediatePropagation();
    }
  });
  socket.addEventListener('close', () => {
    element('state').textContent = reason;
    again.hidden = false;
  });
  return socket;
}
