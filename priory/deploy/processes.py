"""A Flower federation on this machine: one SuperLink and a SuperNode for each client, all of them on 127.0.0.1.

    with Fleet(directory, nodes=[{"client": 0}, {"client": 1}]) as fleet:
        run = fleet.submit(app, {"rounds": 2})
        state = fleet.wait(run)

The processes are those of a real deployment, TLS and registered keys included; only the machine is the same. Whatever
happens inside the `with`, nothing runs after it.

Apps run in processes that a SuperExec starts (`--isolation process`), which proves itself by a secret: otherwise
whoever reaches a port of Flower's on this machine can take the place of the ServerApp or of a ClientApp. Where nginx is
installed, nodes connect to a gateway that admits nothing but their requests, as they do on a real network.

The directory, which only its owner can enter, contains certificates/, keys/, gateway/, logs/, state.db, and home/ with
Flower's own files.
"""

import contextlib
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self, cast

import tomli_w

from priory.core.errors import UsageError
from priory.deploy.flower_processes import HOST, START, FlowerError, FlowerProcesses, Process
from priory.deploy.gateway import CONFIG, Traffic, find_nginx, write_gateway
from priory.deploy.tls import SECRET, check_certificates, write_authority, write_node_key, write_secret

State = Literal["pending", "starting", "running", "finished", "failed", "stopped"]
OVER = ("finished", "failed", "stopped")
ACCEPTED = "SuperNode ID: "  # what a node writes, with its id, once the SuperLink has accepted it
LINK = "fleet"  # what Flower's command line calls our SuperLink
# Seconds. A SuperLink turns away a node that it believes to be there, and takes a minute to miss one that was killed.
MISSED = 75.0


class Fleet(FlowerProcesses):
    """A SuperLink and its SuperNodes, for as long as the `with` lasts.

    Attributes:
        directory: Where everything is kept; a second fleet on the same directory goes on with the same keys and state.
        nodes: The node config of each client.
        keys: The private key of each node.
        authority: The certificate by which nodes know the SuperLink.
        port: The SuperLink's port; gateway and nodes take the ports after it. Free ones are found unless given.
        secure: Whether to use TLS and registered keys.
        environments: More environment variables of each node; none unless they are set.
        traffic: What a gateway admits; without it, or without TLS or nginx, nodes connect to the SuperLink itself.
    """

    def __init__(
        self,
        directory: Path,
        nodes: Sequence[Mapping[str, Any]],
        port: int | None = None,
        secure: bool = True,
        traffic: Traffic | None = None,
    ) -> None:
        super().__init__(directory)
        self.secure, self.authority = secure, self.directory / "certificates" / "ca.crt"
        self.node_configs = list(map(pairs, nodes))
        self.environments: list[Mapping[str, str]] = [{} for _ in nodes]
        self._traffic, self._nginx = traffic, find_nginx() if secure and traffic else None
        self.port, self.gateway_port, self._inside, *self.node_ports = take_ports(3 + len(nodes), port)
        self.superlink: Process | None = None
        self.supernodes: list[Process | None] = [None for _ in nodes]
        self.keys = [self.directory / "keys" / f"client-{node}" for node in range(len(nodes))]

    def __enter__(self) -> Self:
        self._hold()
        try:
            self._end("", signal.SIGKILL)  # whoever held the directory before and was killed has left these behind
            known = (self.directory / "state.db").exists()  # then the nodes may be, and their last end a crash
            self._prepare()
            self._start_superlink()
            if self.has_gateway:
                self._start_gateway()
            for key in self.keys if self.secure else ():
                self._register(key)
            for node in range(len(self.supernodes)):
                self.start_node(node, wait=False)
            for node in range(len(self.supernodes)):
                self._await_node(node, MISSED if known else 0.0)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def has_gateway(self) -> bool:
        """Whether nodes connect to a gateway."""
        return self._nginx is not None

    def submit(self, app: Path, run_config: Mapping[str, Any] | None = None) -> int:
        """Start a run of the app in a directory and return its id; `run_config` overrides what pyproject.toml sets."""
        overrides = self.directory / "run-config.toml"
        overrides.write_text(tomli_w.dumps(dict(run_config or {})))
        return int(self._ask("run", str(app), LINK, "--run-config", str(overrides))["run-id"])

    def state_of(self, run: int) -> State:
        """Return the state of a run; one whose server app was killed counts as running for another minute."""
        status = self._ask("list", LINK, "--run-id", str(run))["runs"][0]["status"]
        return cast(State, status.removesuffix(":completed").removeprefix("finished:"))

    def wait(self, run: int, timeout: float = 600.0) -> State:
        """Return the state of a run when it is over, or after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while (state := self.state_of(run)) not in OVER and time.monotonic() < deadline:
            time.sleep(1.0)
        return state

    def log_of(self, run: int) -> str:
        """Return what the server app of a run has written so far."""
        return self._flwr("log", str(run), LINK, "--show")

    @property
    def node_ids(self) -> list[int]:
        """The ids by which a server app knows the nodes, in their order; a node that keeps its key keeps its id."""
        return [int(self.log(f"node-{node}").split(ACCEPTED)[1].split()[0]) for node in range(len(self.supernodes))]

    def start_node(self, node: int, wait: bool = True, patience: float = 0.0) -> None:
        """Start a node that does not run, and wait until the SuperLink has accepted it, unless told not to.

        Args:
            patience: Seconds to go on trying; `MISSED` is enough for one that was killed.
        """
        if (process := self.supernodes[node]) is not None and process.poll() is None:
            raise UsageError(f"Node {node} is running; kill it before starting it again.")
        self._start_node(node)
        if wait:
            self._await_node(node, patience)

    def kill_node(self, node: int, how: signal.Signals = signal.SIGKILL) -> None:
        """End a node with all it has started: as a crash does, or with SIGTERM as its owner would."""
        self._end(f"node-{node}", how)

    def restart_superlink(self) -> None:
        """Kill the SuperLink with all it has started, and start it again on the same port, state and certificates."""
        self._end("superlink", signal.SIGKILL)
        self._start_superlink()

    def _prepare(self) -> None:
        """Write certificates, keys and Flower's configuration, as far as they are missing."""
        if not Path("/proc/self/environ").exists():
            raise UsageError(f"A local fleet finds its processes in /proc, which {sys.platform} lacks; use Linux.")
        certificates = self.directory / "certificates"
        if self.secure:
            if not certificates.exists():
                write_authority(certificates)
            check_certificates(certificates)
            for key in self.keys:
                if not key.exists():
                    write_node_key(key)
        trust = {"root-certificates": str(certificates / "ca.crt")} if self.secure else {"insecure": True}
        config = {"superlink": {"default": LINK, LINK: {"address": f"{HOST}:{self.port}", **trust}}}
        for place in ("home/command", "logs"):
            (self.directory / place).mkdir(parents=True, exist_ok=True)
        if not self._secret.exists():
            write_secret(self._secret)
        (self.directory / "home/command/config.toml").write_text(tomli_w.dumps(config))

    def _start_superlink(self) -> None:
        """Start the SuperLink and wait until it answers."""
        certificates, trust = self.directory / "certificates", ["--insecure"]
        if self.secure:
            trust = ["--enable-supernode-auth", "--ssl-ca-certfile", str(certificates / "ca.crt")]
            trust += ["--ssl-certfile", str(certificates / "server.pem")]
            trust += ["--ssl-keyfile", str(certificates / "server.key")]
        where = ["--host", HOST, "--port", str(self.port), "--database", str(self.directory / "state.db")]
        offline = "--disable-runtime-dependency-installation"
        self.superlink = self._start("superlink", {}, "flower-superlink", *where, *trust, *self._isolation, offline)
        self._await("superlink", self.superlink, "Uvicorn running on")
        authority = ["--root-certificates", str(certificates / "ca.crt")] if self.secure else ["--insecure"]
        self._start_superexec("superlink", self.superlink, self.port, {}, authority)

    def _start_gateway(self) -> None:
        """Start nginx in front of the SuperLink and wait until it listens."""
        assert self._nginx is not None
        assert self._traffic is not None
        addresses = f"{HOST}:{self.gateway_port}", f"{HOST}:{self.port}"
        place, certificates = self._gateway, self.directory / "certificates"
        write_gateway(place, self._traffic, certificates, *addresses, self._traffic.nodes, self._inside)
        # Started by root, nginx would work as a user who may not enter our directory.
        rights = "daemon off; user root;" if os.geteuid() == 0 else "daemon off;"
        arguments = ["-p", str(self._gateway), "-c", CONFIG, "-g", rights]
        process = self._start("gateway", {}, self._nginx, *arguments, cwd=self._gateway)
        deadline = time.monotonic() + START
        while process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection((HOST, self.gateway_port), timeout=1.0):
                return
            time.sleep(0.05)
        raise FlowerError(f"nginx was not ready; its log ends:\n{self.log('gateway')[-2000:]}")

    def _start_superexec(
        self, name: str, parent: Process, port: int, extra: Mapping[str, str], trust: Sequence[str]
    ) -> None:
        """Start the process that starts the apps of a SuperLink or a node, and ends with it."""
        where = ["--runtime-api-address", f"{HOST}:{port}", "--parent-pid", str(parent.pid), *trust]
        secret = ["--superexec-auth-secret-file", str(self._secret)]
        self._start(name, extra, "flower-superexec", *where, *secret, goes_on=True)

    @property
    def _isolation(self) -> list[str]:
        return ["--isolation", "process", "--superexec-auth-secret-file", str(self._secret)]

    @property
    def _secret(self) -> Path:
        return self.directory / SECRET

    def _register(self, key: Path) -> None:
        """Register a node's public key with the SuperLink, unless it is registered."""
        try:
            self._ask("supernode", "register", f"{key}.pub", LINK, "--name", key.name)
        except FlowerError as error:
            if "already in use" not in str(error):  # a second fleet on the same directory
                raise

    def _start_node(self, node: int) -> None:
        trust = ["--insecure"]
        if self.secure:
            trust = ["--root-certificates", str(self.authority)]
            trust += ["--auth-supernode-private-key", str(self.keys[node])]
        server = self.gateway_port if self.has_gateway else self.port
        where = ["--superlink", f"{HOST}:{server}", "--host", HOST, "--port", str(self.node_ports[node])]
        config = ["--node-config", self.node_configs[node]] if self.node_configs[node] else []
        name, extra = f"node-{node}", self.environments[node]
        process = self._start(name, extra, "flower-supernode", *where, *trust, *self._isolation, *config)
        self.supernodes[node] = process
        self._start_superexec(name, process, self.node_ports[node], extra, ["--insecure"])

    def _await_node(self, node: int, patience: float) -> None:
        """Wait until the SuperLink has accepted a node, which is started again until then or until patience ends."""
        deadline = time.monotonic() + patience
        while True:
            try:
                return self._await(f"node-{node}", self.supernodes[node], ACCEPTED)
            except FlowerError:
                self.kill_node(node)
                if time.monotonic() > deadline:
                    raise
                self._start_node(node)


def take_ports(count: int, first: int | None = None) -> list[int]:
    """Return ports that are free on the loopback interface: those from `first` on if given, otherwise any."""
    with contextlib.ExitStack() as held:  # all at once, so that none is found twice
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for i, s in enumerate(sockets):
            port = 0 if first is None else first + i
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: closed connections do not count
            try:
                s.bind((HOST, port))
            except (OSError, OverflowError) as error:
                raise UsageError(f"Port {port} on {HOST} cannot be taken ({error}); choose another, or none.") from None
        return [s.getsockname()[1] for s in sockets]


def pairs(config: Mapping[str, Any]) -> str:
    """Return a node config as Flower's command line reads it: key=value, separated by spaces."""
    for key, value in config.items():
        if not isinstance(value, bool | int | float | str) or re.search(r'["\\\n]', str(value)):
            rule = "give a number, a truth value, or text without quotes, backslashes and line breaks"
            raise UsageError(f"{key}={value!r} does not fit into a node config; {rule}.")
    return " ".join(line.replace(" = ", "=", 1) for line in tomli_w.dumps(dict(config)).splitlines())
