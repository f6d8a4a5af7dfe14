// Shows the display of a VMI with noVNC in headless Chromium, through the API server's websocket.
//
// usage: node novnc.mjs PORT NAMESPACE NAME [PICTURE]
//
// PORT is the port of `kubectl proxy --www=e2e/clients --www-prefix=/static/`.

import puppeteer from 'puppeteer-core';

const [port, namespace, name, picture] = process.argv.slice(2);
if (!name) {
  console.error('usage: node novnc.mjs PORT NAMESPACE NAME [PICTURE]');
  process.exit(2);
}

const browser = await puppeteer.launch({
  executablePath: process.env.CHROMIUM ?? '/usr/bin/chromium',
  args: ['--no-sandbox', '--disable-gpu'],
});
try {
  const page = await browser.newPage();
  page.on('console', (message) => console.log('browser:', message.text()));
  page.on('pageerror', (error) => console.log('browser:', error.message));
  await page.goto(`http://127.0.0.1:${port}/static/novnc.html?namespace=${namespace}&name=${name}`);
  await page.waitForFunction(() => window.state === 'connected', { timeout: 30000 });
  // Counts the pixels of the canvas that are not black.
  const lit = () =>
    page.evaluate(() => {
      const canvas = document.querySelector('#screen canvas');
      const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
      let lit = 0;
      for (let i = 0; i < pixels.length; i += 4) lit += pixels[i] + pixels[i + 1] + pixels[i + 2] > 0 ? 1 : 0;
      return { width: canvas.width, height: canvas.height, lit };
    });
  let seen;
  for (let attempt = 0; attempt < 40; attempt += 1) {
    seen = await lit();
    if (seen.lit > 0) break;
    await new Promise((resolve) => setTimeout(resolve, 500));
  }
  if (!seen.lit) throw new Error('the display is black');
  if (picture) await page.screenshot({ path: picture });
  console.log(`noVNC shows ${seen.width}x${seen.height}, ${seen.lit} pixels lit`);
} finally {
  await browser.close();
}
