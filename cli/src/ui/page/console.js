// The serial console of a VMI.

import { Terminal } from './xterm/lib/xterm.mjs';
import { openStream } from './server.js';

// Programs on a serial port expect 80 columns and 24 rows. Links of the guest are not followed.
const terminal = new Terminal({
  cols: 80,
  rows: 24,
  scrollback: 5000,
  screenReaderMode: true,
  linkHandler: { activate: () => {} },
});
const encoder = new TextEncoder();
const socket = openStream('Serial console', 'console');

const send = (bytes) => {
  if (socket.readyState === WebSocket.OPEN) {
    socket.send(bytes);
  }
};

terminal.open(document.getElementById('screen'));
terminal.onData((text) => send(encoder.encode(text)));
terminal.onBinary((text) => send(Uint8Array.from(text, (character) => character.charCodeAt(0))));
socket.addEventListener('message', (event) => terminal.write(new Uint8Array(event.data)));
terminal.focus();
