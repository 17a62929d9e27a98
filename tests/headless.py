"""A headless Chromium, asked over a pipe by the protocol of its developer tools."""

import base64
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.needed_programs import BROWSERS

BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
needs_browser = pytest.mark.skipif(
    BROWSER is None, reason="no Chromium is installed (chromium-headless-shell)"
)
KEYS = {
    "ArrowLeft": 37,
    "ArrowUp": 38,
    "ArrowRight": 39,
    "ArrowDown": 40,
    "Enter": 13,
    "Escape": 27,
    "Home": 36,
    "End": 35,
    "Tab": 9,
}


class Tab:
    """One page in a browser.

    Attributes:
        console: what pages wrote to the console, refusals by their policies included.
        requests: the addresses that were asked for.
    """

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._buffer, self._last, self._session = b"", 0, ""
        self.console: list[str] = []
        self.requests: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def show(
        self, address: str, *, width: int = 1600, height: int = 1000, dark: bool = False
    ) -> None:
        """Open an address in a window of a size in pixels, and wait until it is drawn."""
        self.resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        self._call("Page.navigate", url=address)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def resize(self, width: int, height: int) -> None:
        """Give the window another size."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", **size)

    def wait(self, condition: str, timeout_s: float = 20.0) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + timeout_s
        while not self.value(condition):
            assert time.monotonic() < end, f"never true: {condition}"
            time.sleep(0.02)

    def value(self, expression: str) -> Any:
        """Return the value of an expression on the page."""
        done = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def press(self, *keys: str) -> None:
        """Press keys, one after the other."""
        for key in keys:
            code = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key]}
            if key == "Enter":
                code["text"] = "\r"
            self._call("Input.dispatchKeyEvent", type="keyDown", **code)
            self._call("Input.dispatchKeyEvent", type="keyUp", **code)

    def click(self, selector: str) -> None:
        """Click the middle of the first line of an element."""
        x, y = self.value(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'center'}); const b = e.getClientRects()[0];"
            "return [b.left + b.width / 2, b.top + b.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def picture(self, path: Path) -> None:
        """Write what the window shows as a PNG."""
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot")["data"]))

    def overflowing(self) -> list[str]:
        """Return elements that stand out of the window, or whose text is cut off in them."""
        found: list[str] = self.value(
            """(() => {
  const name = (e) => `${e.tagName.toLowerCase()}#${e.id}.${e.getAttribute("class") || ""}`;
  const found = [];
  if (document.documentElement.scrollWidth > innerWidth) found.push("the page");
  for (const e of document.body.querySelectorAll("*")) {
    if (e.closest("thead") || e.closest("svg")) continue;
    const box = e.getBoundingClientRect();
    if (box.width && (box.right > innerWidth + 1 || box.left < -1)) found.push(name(e));
    if (e.clientWidth && e.scrollWidth > e.clientWidth + 1) found.push(`within ${name(e)}`);
  }
  return found.slice(0, 10);
})()"""
        )
        return found

    def _call(self, method: str, **parameters: Any) -> Any:
        self._last += 1
        message = {"id": self._last, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._last:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self._note(answer)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            piece = os.read(self._answers, 1 << 20)
            assert piece, "the browser ended"
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\0")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _note(self, event: dict[str, Any]) -> None:
        told = event.get("params", {})
        if event.get("method") == "Log.entryAdded":
            self.console.append(str(told["entry"]["text"]))
        elif event.get("method") in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown"):
            self.console.append(json.dumps(told))
        elif event.get("method") == "Network.requestWillBeSent":
            self.requests.append(str(told["request"]["url"]))


# The protocol is spoken over these descriptors.
_AT_THREE_AND_FOUR = """
import os, sys
reading, writing = (os.dup2(int(given), 50 + n) for n, given in enumerate(sys.argv[1:3]))
os.dup2(reading, 3), os.dup2(writing, 4)
os.execvp(sys.argv[3], sys.argv[3:])
"""


@contextmanager
def browser_tab(folder: Path) -> Iterator[Tab]:
    """Run a browser during the block, whose profile lies in a folder."""
    to_browser, commands = os.pipe()
    answers, from_browser = os.pipe()
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars")
    line = [str(BROWSER), *options, "--remote-debugging-pipe", f"--user-data-dir={folder}/profile"]
    started = [sys.executable, "-c", _AT_THREE_AND_FOUR, str(to_browser), str(from_browser), *line]
    process = subprocess.Popen(
        started, pass_fds=(to_browser, from_browser), stderr=subprocess.DEVNULL
    )
    os.close(to_browser)
    os.close(from_browser)
    try:
        yield Tab(commands, answers)
    finally:
        process.terminate()
        process.wait(timeout=30)
        os.close(commands)
        os.close(answers)
