// The display of a VMI.

import RFB from './novnc/core/rfb.js';
import { openStream } from './server.js';

const screen = document.getElementById('screen');
const display = new RFB(screen, openStream('Display', 'display'));
display.scaleViewport = true;
display.addEventListener('connect', () => display.focus());
document.getElementById('keys').addEventListener('click', () => {
  display.sendCtrlAltDel();
  display.focus();
});
document.getElementById('full').addEventListener('click', async () => {
  await screen.requestFullscreen();
  display.focus();
});
