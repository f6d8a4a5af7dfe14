"""Connects a third-party VNC client to the display of a VMI, types into the guest, and checks that the screen changes.

usage: vnc.py PORT [PICTURE]

PORT is the port of `kubectl virt vnc NAME --proxy-only`. The guest must show a login prompt or a shell on its first virtual terminal.
PICTURE is a file for the last screenshot as PNG.
"""

import asyncio
import sys

import asyncvnc
import numpy
from PIL import Image

TYPED = "echo typed-by-a-client"


async def main(port: int, picture: str | None) -> None:
    async with asyncvnc.connect("127.0.0.1", port) as client:
        print(f"connected: {client.video.name}, {client.video.width}x{client.video.height}")
        before = await client.screenshot()
        if not before[:, :, :3].any():
            raise SystemExit("the display is black")
        client.keyboard.write(TYPED)
        client.keyboard.press("Return")
        for _ in range(20):
            await asyncio.sleep(0.5)
            after = await client.screenshot()
            changed = 0
            if after.shape == before.shape:
                changed = int(numpy.any(after != before, axis=2).sum())
            # A character of a text console has about 60 pixels, a blinking cursor has fewer.
            if changed > 20 * len(TYPED):
                break
        else:
            raise SystemExit(f"typing {TYPED!r} changed {changed} pixels only")
        if picture:
            Image.fromarray(after).save(picture)
        print(f"typing changed {changed} pixels")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    asyncio.run(asyncio.wait_for(main(int(sys.argv[1]), *sys.argv[2:3] or [None]), 60))
