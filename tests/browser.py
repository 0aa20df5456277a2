"""A real Chromium for tests, driven over a pipe by the DevTools protocol; nothing but the browser is needed."""

import base64
import itertools
import json
import os
import select
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    "--headless=new",
    "--no-sandbox",  # a container has no user that the sandbox could change to
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--remote-debugging-pipe",
)
SECONDS = 60.0  # that an answer may take


class Page:
    """A tab: what it logged, what it asked the network for, and what its scripts say."""

    def __init__(self, sink: int, source: int) -> None:
        self._sink, self._source, self._buffer = sink, source, b""
        self._numbers, self._session = itertools.count(1), None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of a DevTools command."""
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._sink, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def open(self, path: Path, *, dark: bool = False, width: int = 1200, offline: bool = True) -> None:
        """Load a file as a reader would, and wait until all figures are there."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        self.call(
            "Network.emulateNetworkConditions", offline=offline, latency=0, downloadThroughput=-1, uploadThroughput=-1
        )
        self.events.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        deadline = time.monotonic() + SECONDS
        while not self.run("document.documentElement?.dataset.drawn || ''"):
            assert time.monotonic() < deadline, f"the figures of {path} are not drawn: {self.complaints()}"
            time.sleep(0.05)

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression in the page."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def complaints(self) -> list[str]:
        """Every warning, error and uncaught exception that the page has logged."""
        self.run("0")  # collects what has arrived
        found = []
        for event in self.events:
            params = event.get("params", {})
            if event.get("method") == "Runtime.consoleAPICalled" and params["type"] in ("warning", "error", "assert"):
                found.append(" ".join(str(one.get("value", one.get("description"))) for one in params["args"]))
            elif event.get("method") == "Runtime.exceptionThrown":
                found.append(json.dumps(params["exceptionDetails"]))
            elif event.get("method") == "Log.entryAdded":
                found.append(params["entry"]["text"])
        return found

    def requests(self) -> list[str]:
        """Every address that was asked for, but for what the page has in itself."""
        self.run("0")
        sent = [e["params"]["request"]["url"] for e in self.events if e.get("method") == "Network.requestWillBeSent"]
        return [url for url in sent if not url.startswith(("data:", "blob:"))]

    def screenshot(self, path: Path) -> None:
        """Write a picture of the whole page."""
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))

    def print(self, path: Path) -> None:
        """Write the page as it is printed, as a PDF."""
        path.write_bytes(base64.b64decode(self.call("Page.printToPDF", printBackground=True)["data"]))

    def _receive(self) -> dict[str, Any]:
        deadline = time.monotonic() + SECONDS
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._source], [], [], max(deadline - time.monotonic(), 0))
            chunk = os.read(self._source, 1 << 20) if ready else b""
            assert chunk, "the browser does not answer"
            self._buffer += chunk
        raw, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(raw)


@contextmanager
def browser() -> Iterator[Page]:
    """A tab of a browser that ends with the block."""
    assert CHROMIUM is not None
    to_read, to_write = os.pipe()
    from_read, from_write = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}"]
        # The browser reads from descriptor 3 and writes to 4. Spawning is no fork, which JAX warns of.
        actions = [
            (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
            (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
            (os.POSIX_SPAWN_DUP2, to_read, 3),
            (os.POSIX_SPAWN_DUP2, from_write, 4),
        ]
        process = os.posix_spawn(CHROMIUM, command, os.environ, file_actions=actions)
        os.close(to_read)
        os.close(from_write)
        try:
            yield Page(to_write, from_read)
        finally:
            os.close(to_write)
            os.kill(process, signal.SIGTERM)
            os.waitpid(process, 0)
            os.close(from_read)
