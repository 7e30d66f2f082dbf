"""A headless Chromium, driven by its DevTools protocol over two pipes: no driver and no package needed."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
MISSING = "needs Chromium (apt-get install chromium)"
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--remote-debugging-pipe",
    "--window-size=1400,1000",
)  # fmt: skip


class Page:
    """One tab. ``requests`` are the URLs it asked for, ``errors`` what the console and uncaught exceptions said."""

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read, self._buffer, self._last = write, read, b"", 0
        self._session: str | None = None
        self.requests: list[str] = []
        self.errors: list[str] = []
        self._loaded = False
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._call(f"{domain}.enable")

    def open(self, path: Path) -> None:
        self._loaded = False
        self._call("Page.navigate", url=path.as_uri())
        while not self._loaded:
            self._handle(self._receive())

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression; an exception in it is an AssertionError."""
        result = self._call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def type(self, text: str) -> None:
        self._call("Input.insertText", text=text)

    def click(self, selector: str) -> None:
        """A real mouse click in the middle of an element."""
        box = self.run(
            f"(e => (e.scrollIntoView(), (r => [r.x + r.width / 2, r.y + r.height / 2])(e.getBoundingClientRect())))"
            f"(document.querySelector({json.dumps(selector)}))"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self._call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot")["data"]))

    def _call(self, method: str, **parameters: Any) -> Any:
        self._last += 1
        message = {"id": self._last, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._last:
                assert "error" not in answer, answer["error"]
                return answer["result"]
            self._handle(answer)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            part = os.read(self._read, 1 << 16)
            if not part:
                raise ConnectionError("Chromium closed the connection")
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def _handle(self, event: dict[str, Any]) -> None:
        parameters = event.get("params", {})
        match event.get("method"):
            case "Page.loadEventFired":
                self._loaded = True
            case "Network.requestWillBeSent":
                self.requests.append(parameters["request"]["url"])
            case "Log.entryAdded":
                self.errors.append(parameters["entry"]["text"])
            case "Runtime.exceptionThrown":
                self.errors.append(str(parameters["exceptionDetails"]))
            case "Runtime.consoleAPICalled":
                self.errors.append(str(parameters["args"]))


@contextlib.contextmanager
def browser(profile: Path) -> Iterator[Page]:
    """A tab of a new browser with an empty profile in ``profile``."""
    assert CHROMIUM is not None
    commands_read, commands_write = os.pipe()
    answers_read, answers_write = os.pipe()
    # The browser reads commands from descriptor 3 and answers on 4.
    shell = f'exec "$@" 3<&{commands_read} 4>&{answers_write}'
    process = subprocess.Popen(
        ["bash", "-c", shell, "bash", CHROMIUM, *_FLAGS, f"--user-data-dir={profile}"],
        pass_fds=(commands_read, answers_write),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(commands_read)
    os.close(answers_write)
    try:
        yield Page(commands_write, answers_read)
    finally:
        os.close(commands_write)
        os.close(answers_read)
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        time.sleep(0.1)
