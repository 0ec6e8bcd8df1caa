"""Launch from one terminal: starts the launcher of each host by the `ssh` program."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import select
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import IO

from stratagem import environment
from stratagem.cluster.addresses import join_address
from stratagem.errors import explain
from stratagem.group.authentication.secret import Secret, find_secret, new_secret
from stratagem.launch.nodes.rendezvous import DEFAULT_PORT
from stratagem.launch.plan.options import (
    Host,
    LaunchOptions,
    node_range,
    read_hosts,
    remote_flags,
    remote_variables,
)
from stratagem.launch.restart.launcher import Outcome
from stratagem.launch.restart.task_group import CaughtSignals
from stratagem.launch.tasks.exit_status import ExitStatus, describe_exit
from stratagem.launch.tasks.output.screen import STDERR, Screen

# Standard input of a launcher started by SSH, which ends it when the terminal goes away.

VARIABLE = "STRATAGEM_SSH_LEASE"
"""Set in the launcher of a host; it is not passed on to tasks."""
BEAT_S = 5.0
"""Interval between the empty lines that the terminal sends."""
# Longer than a short loss of the connection, which TCP repairs.
_LIMIT_S = 60.0
# After the grace time, for the report.
_LEASE_MARGIN_S = 5.0


def hold_lease(grace_s: float) -> None:
    """Watches standard input if this launcher was started by SSH.

    A line has the number of a signal to raise here, or is empty. After the end, or a minute of
    silence, this process gets SIGTERM and, if it then takes too long, SIGKILL.
    """
    if environment.take(VARIABLE) is not None:
        watch = threading.Thread(target=_watch, args=(grace_s,), name="stratagem-ssh", daemon=True)
        watch.start()


def _watch(grace_s: float) -> None:
    rest = b""
    while select.select([0], [], [], _LIMIT_S)[0] and (data := os.read(0, 1024)):
        *lines, rest = (rest + data).split(b"\n")
        for line in filter(None, lines):
            os.kill(os.getpid(), int(line))
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace_s + _LEASE_MARGIN_S)
    os.kill(os.getpid(), signal.SIGKILL)


_POLL_S = 0.05
# Until a host whose launcher has ended is tried again.
_RETRY_S = 5.0
# After the grace time, for reports.
_MARGIN_S = 5.0
_LAST_LINES = 20
_JOINED = "[launch] This is node"
# The command, its folder and its variables come as a line of standard input: a remote shell does
# not see them, nor do other users.
_PROGRAM = """
import json, os, sys
line = b""
while not line.endswith(b"\\n"):
    line += os.read(0, 1) or sys.exit(1)
job = json.loads(line)
try:
    os.chdir(job["folder"])
except OSError as error:
    sys.exit(f"Cannot enter the working folder: {error}")
os.environ.update(job["variables"])
os.execv(sys.executable, [sys.executable, *job["arguments"]])
"""
_SSH = ("-o", "BatchMode=yes", "-o", "ServerAliveInterval=10", "-o", "ServerAliveCountMax=6", "-T")


def launch_over_ssh(command: Sequence[str], options: LaunchOptions) -> Outcome:
    """Starts the launcher on all hosts; returns when they have ended.

    `command` has the script and its arguments, as on the command line. Raises ValueError for
    options that contradict the hosts, OSError if there is no program `ssh`.
    """
    hosts = read_hosts(options)
    nnodes = options.nnodes or len(hosts)
    if node_range(nnodes)[1] != len(hosts) or options.node_rank is not None:
        raise ValueError(
            explain(
                f"nnodes={nnodes!r} and node_rank={options.node_rank} with {len(hosts)} hosts.",
                expected="as many nodes as hosts, or MIN:MAX with as many as MAX, and no rank.",
                fix="omit --node-rank; correct --nnodes or the hosts.",
            )
        )
    secret = find_secret() or Secret(new_secret())
    variables = {**remote_variables(options, environment.snapshot()), **secret.variables()}
    variables[VARIABLE] = "1"
    first = hosts[0].name.rpartition("@")[2]
    endpoint = options.rdzv_endpoint or join_address(first, DEFAULT_PORT)
    screen, lock = Screen([host.name for host in hosts]), threading.Lock()
    nodes: list[_RemoteNode] = []
    for rank, host in enumerate(hosts):
        flags = remote_flags(options, host, rank=rank, endpoint=endpoint)
        job = {
            "folder": os.getcwd(),
            "variables": variables,
            "arguments": ["-m", "stratagem", "launch", *flags, *command],
        }
        nodes.append(
            _RemoteNode(rank, host, job, shlex.split(options.ssh_options or ""), screen, lock)
        )
    with CaughtSignals() as caught:
        return _Terminal(nodes, options, screen, caught).run()


class _RemoteNode:
    """The `ssh` process of one host. It can be started again."""

    def __init__(
        self,
        rank: int,
        host: Host,
        job: Mapping[str, object],
        ssh_options: Sequence[str],
        screen: Screen,
        lock: threading.Lock,
    ) -> None:
        self.label = f"node {rank} ({host.name})"
        self.has_joined = False
        self.lines = collections.deque[str](maxlen=_LAST_LINES)
        self._name = host.name
        self._job = job
        program = f"exec {shlex.quote(sys.executable)} -c {shlex.quote(_PROGRAM)}"
        # The first value of an option counts.
        self._command = ("ssh", *ssh_options, *_SSH, "--", host.name, program)
        self._screen = screen
        self._lock = lock
        self._readers: list[threading.Thread] = []
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts the launcher of the host."""
        self.has_joined = False
        self._process = subprocess.Popen(  # noqa: S603 - the command that the user gave
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches the launchers as a message
        )
        streams = (self._process.stdout, self._process.stderr)
        self._readers = [
            threading.Thread(target=self._show, args=(stream, index), daemon=True)
            for index, stream in enumerate(streams)
        ]
        for reader in self._readers:
            reader.start()
        self.write(json.dumps(self._job))

    def write(self, line: str) -> None:
        """Sends a line to the launcher."""
        pipe = None if self._process is None else self._process.stdin
        if pipe is not None and not pipe.closed:
            with contextlib.suppress(OSError):
                pipe.write(f"{line}\n".encode())
                pipe.flush()

    def returncode(self) -> int | None:
        """Returns the exit code, or None while it runs; all its output is then shown."""
        assert self._process is not None
        code = self._process.poll()
        if code is not None:
            for reader in self._readers:
                reader.join(_MARGIN_S)
        return code

    def let_go(self) -> None:
        """Ends standard input, on which the launcher of the host ends too."""
        pipe = None if self._process is None else self._process.stdin
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()

    def kill(self) -> None:
        """Kills `ssh`, if it runs."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def _show(self, stream: IO[bytes], index: int) -> None:
        with stream:
            for data in stream:
                line = data.decode("utf-8", "replace").rstrip("\n")
                self.has_joined = self.has_joined or line.startswith(_JOINED)
                with self._lock:
                    if index == STDERR:
                        self.lines.append(line)
                    self._screen.show(self._name, [line], stream=index)


@dataclasses.dataclass
class _Terminal:
    """Loop of the terminal: sends signals, notices ended hosts, and ends all."""

    nodes: list[_RemoteNode]
    options: LaunchOptions
    screen: Screen
    caught: CaughtSignals
    codes: dict[_RemoteNode, int] = dataclasses.field(default_factory=dict["_RemoteNode", int])
    retry_s: dict[_RemoteNode, float] = dataclasses.field(
        default_factory=dict["_RemoteNode", float]
    )
    absent: _RemoteNode | None = None
    let_go_s: float = float("inf")
    num_interrupts: int = 0

    def run(self) -> Outcome:
        """Returns when the launchers of all hosts have ended."""
        beaten_s = 0.0
        try:
            for node in self.nodes:
                node.start()
            while len(self.codes) < len(self.nodes):
                now_s = time.monotonic()
                if now_s - beaten_s > BEAT_S:
                    beaten_s = now_s
                    self.write_all("")
                self.forward()
                self.look(now_s)
                if now_s > self.let_go_s:
                    break
                time.sleep(_POLL_S)
        finally:
            self.end()
        return self.outcome()

    def write_all(self, line: str) -> None:
        """Sends a line to all hosts."""
        for node in self.nodes:
            node.write(line)

    def forward(self) -> None:
        """Sends signals to node 0, which passes them on; a second Ctrl-C ends all."""
        for signum in self.caught.take():
            self.num_interrupts += signum == signal.SIGINT
            self.nodes[0].write(str(int(signum)))
            if self.num_interrupts > 1 or self.nodes[0] in self.codes:
                self.let_go_s = time.monotonic()

    def look(self, now_s: float) -> None:
        """Records the launchers that have ended, and starts those again that may return."""
        for node in self.nodes:
            if node in self.codes:
                continue
            if node in self.retry_s:
                if now_s >= self.retry_s[node]:
                    del self.retry_s[node]
                    node.start()
                continue
            code = node.returncode()
            if code is not None:
                self.note_end(node, code, now_s)

    def note_end(self, node: _RemoteNode, code: int, now_s: float) -> None:
        """Decides what follows the end of one launcher."""
        is_first = node is self.nodes[0]
        if code and not is_first and self.options.max_restarts and not self.is_ending:
            self.retry_s[node] = now_s + _RETRY_S
            self.screen.say([f"{node.label} ended by {describe_exit(code)}: starting it again."])
            return
        self.codes[node] = code
        patience_s = self.options.grace_s + _MARGIN_S
        if code and not node.has_joined and not is_first:
            self.screen.say([f"{node.label} did not start ({describe_exit(code)}): ending all."])
            self.absent, self.let_go_s = node, now_s
        elif code and not is_first:
            # Node 0 notices it too, and its report has the cause.
            patience_s += self.options.node_timeout_s
        if code or is_first:
            self.let_go_s = min(self.let_go_s, now_s + patience_s)
            for other in self.retry_s:
                self.codes[other] = 0

    @property
    def is_ending(self) -> bool:
        """True if no launcher is started again."""
        return self.nodes[0] in self.codes or self.caught.ending is not None

    def end(self) -> None:
        """Ends what still runs: by the end of standard input, then by a signal to `ssh`."""
        for node in self.nodes:
            node.let_go()
        deadline_s = time.monotonic() + self.options.grace_s + 2 * _MARGIN_S
        while len(self.codes) < len(self.nodes) and time.monotonic() < deadline_s:
            self.look(time.monotonic())
            time.sleep(_POLL_S)
        for node in self.nodes:
            node.kill()

    def outcome(self) -> Outcome:
        """Returns the end of a host that did not start, of node 0, or of another that failed."""
        order = sorted(self.codes, key=lambda node: node is not self.nodes[0])
        failed = self.absent or next((node for node in order if self.codes[node]), self.nodes[0])
        status = ExitStatus(
            name=failed.label,
            returncode=self.codes.get(failed, -signal.SIGKILL),
            at_s=0.0,
            lines=tuple(failed.lines),
            was_shown=True,
        )
        return Outcome(statuses=(status,), signum=self.caught.ending, restart=0)
