"""Processes of Flower on this machine, which end with this one, whatever they start themselves.

Flower's processes start others, some of them in sessions of their own, so each inherits a mark in its environment by
which all are found again. A second group on the same directory has to wait until the first has ended.
"""

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from priory.core.errors import UsageError
from priory.core.files import locked, private_directory

Process = subprocess.Popen[bytes]
HOST, MARK = "127.0.0.1", "PRIORY_FLEET"
SETTINGS = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Seconds between looks for work. At a tenth, two nodes with nothing to do cost a fifth of a core, to no gain.
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.5",
    # Flower's clients obey the proxy settings of the environment, and no proxy reaches this machine's loopback.
    **dict.fromkeys(["NO_PROXY", "no_proxy"], HOST),
    "PYTHONUNBUFFERED": "1",  # so that a log says all that an app has written, even if it was killed
}
START, STOP = 120.0, 10.0  # seconds for a process to come up, and to go down before it is killed


class FlowerError(RuntimeError):
    """A command or process of Flower failed; the message ends with what it said itself."""


class FlowerProcesses:
    """The processes of one directory, with their logs in logs/ and Flower's own files in home/."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory.resolve()
        self._started: list[Process] = []
        self._token = hashlib.sha256(str(self.directory).encode()).hexdigest()[:16]
        self._held = contextlib.ExitStack()
        self._log_starts: dict[str, int] = {}  # where in its log the present life of a process begins

    def processes(self, name: str = "") -> list[int]:
        """Return the ids of all processes that live, orphans included, or of "superlink", "node-0" or all "node-"."""
        mark = f"\0{MARK}={self._token}/{name}".encode() + (b"" if name in ("", "node-") else b"\0")
        pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
        found = [pid for pid in pids if mark in b"\0" + _read(pid, "environ")]
        return found + [pid for pid in pids if name in ("", "gateway") and self._is_gateway(pid)]

    def _is_gateway(self, pid: int) -> bool:
        """Return whether a process is our nginx, which writes its title over its environment."""
        try:
            return _read(pid, "cmdline").startswith(b"nginx: ") and Path(f"/proc/{pid}/cwd").samefile(self._gateway)
        except OSError:
            return False

    def log(self, name: str) -> str:
        """Return what a process, such as "superlink" or "node-0", and its apps have written since it was last started.

        What a server app writes is in the log of its run.
        """
        with (self.directory / "logs" / f"{name}.log").open("rb") as log:
            log.seek(self._log_starts[name])
            return log.read().decode(errors="replace")

    def close(self) -> None:
        """End all processes, and raise if one survives."""
        try:
            self._end("node-", signal.SIGTERM)  # while there is a SuperLink from which they can take their leave
            self._end("", signal.SIGTERM)
        finally:  # so that a second Ctrl-C leaves nothing behind either
            self._end("", signal.SIGKILL)
            self._held.close()
        if left := self.processes():
            raise FlowerError(f"Processes {left} of the fleet in {self.directory} survived SIGKILL.")

    def _hold(self) -> None:
        """Keep other fleets off the directory, for as long as this process lives."""
        private_directory(self.directory, ours=(self.directory / "lock").exists())
        try:
            self._held.enter_context(locked(self.directory / "lock", wait=False))
        except BlockingIOError:
            raise UsageError(f"{self.directory} holds a fleet that is up; take it down, or use another.") from None

    @property
    def _gateway(self) -> Path:
        return self.directory / "gateway"

    def _await(self, name: str, process: Process | None, sign: str) -> None:
        """Wait for a sign in the log of a process; raise with the log's end if it dies first or takes too long."""
        assert process is not None
        deadline = time.monotonic() + START
        while (code := process.poll()) is None and time.monotonic() < deadline:
            if sign in self.log(name):
                return
            time.sleep(0.1)
        fate = f"was not ready after {START:.0f} s" if code is None else f"ended with exit code {code}"
        raise FlowerError(f"{name} {fate}; its log ends:\n{self.log(name)[-2000:]}")

    def _start(
        self,
        name: str,
        extra: Mapping[str, str],
        program: str,
        *arguments: str,
        goes_on: bool = False,
        cwd: Path | None = None,
    ) -> Process:
        """Start a process in a session of its own, writing to the log of that name.

        Args:
            goes_on: Whether it writes to the log of a process that runs.
        """
        path = self.directory / "logs" / f"{name}.log"
        if not goes_on:
            self._log_starts[name] = path.stat().st_size if path.exists() else 0
        with path.open("ab") as log:
            output: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
            command, environment = [_executable(program), *arguments], {**self._environment(name), **extra}
            how: dict[str, Any] = {"cwd": cwd or self.directory, "env": environment, "start_new_session": True}
            # Flower gives files the modes that the umask allows, its state.db with clients' weights among them.
            process = Process(command, umask=0o077, **how, **output)
        self._started.append(process)
        return process

    def _end(self, name: str, how: signal.Signals) -> None:
        """Send a signal once to each process of that name, new ones included, until all are gone or `STOP` is over."""
        told, deadline = set[int](), time.monotonic() + STOP
        while (alive := self.processes(name)) and time.monotonic() < deadline:
            for pid in set(alive) - told:
                with contextlib.suppress(ProcessLookupError):  # it was faster
                    os.kill(pid, how)
            told |= set(alive)
            time.sleep(0.05)
        for process in self._started:
            if process.poll() is None and process.pid in told - set(alive):
                process.wait()  # it is ending; this takes it off the kernel's books

    def _environment(self, name: str) -> dict[str, str]:
        """Return our environment, Flower's switches, the mark, and a Flower home of its own.

        Each process unpacks the app in its home; in a common one they would do so over one another.
        """
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
        own = {"PATH": path, "FLWR_HOME": str(self.directory / "home" / name), MARK: f"{self._token}/{name}"}
        return {**os.environ, **SETTINGS, **own}

    def _ask(self, *arguments: str) -> dict[str, Any]:
        """Return the answer of Flower's command line. Asked for JSON it ends with code 0 even when it fails."""
        said = self._flwr(*arguments, "--format", "json")
        answer: dict[str, Any] = json.loads(said[said.index("{") :])
        if not answer["success"]:
            raise FlowerError(f"flwr {' '.join(arguments)} failed: {answer['error-message']}")
        return answer

    def _flwr(self, *arguments: str) -> str:
        """Return what Flower's command line prints."""
        command, environment = [_executable("flwr"), *arguments], self._environment("command")
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=START)
        if done.returncode:
            raise FlowerError(f"flwr {' '.join(arguments)} failed: {done.stdout}{done.stderr}")
        return done.stdout


def _executable(name: str) -> str:
    """Return the path of a program of Flower's, which is installed next to Python."""
    path = Path(sys.executable).parent / name  # an absolute name stays as it is
    if not path.exists():
        raise UsageError(f"{name} is not installed next to {sys.executable}; pip install 'priory[flower]' brings it.")
    return str(path)


def _read(pid: int, file: str) -> bytes:
    """Return a file of the kernel's on a process; empty if the process has ended or is not ours."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/{file}").read_bytes()
    return b""
