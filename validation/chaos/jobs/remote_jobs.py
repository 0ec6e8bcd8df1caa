"""A function that a client sends to a Ray head, and sends again until it has returned."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random

from validation.chaos.faults.kinds import Fault
from validation.chaos.jobs import Ended, Outcome
from validation.chaos.sandbox import PATIENCE, Sandbox, Started

__all__ = ["RemoteJobs", "RunningRemote", "wrong_steps"]

_NUM_STEPS = 300
_CLUSTER = {"worker": ["127.0.0.1:2222"]}
_CLIENT = "validation.chaos.programs.remote_client"
_VARIABLES = {
    "RAY_AUTH_TOKEN": "0123456789abcdef" * 4,
    "STRATAGEM_PEER_TIMEOUT_S": "6",
    # Shorter than a trial waits for progress, since a client waits so long for a lost cluster.
    "STRATAGEM_JOIN_TIMEOUT_S": str(45 * PATIENCE),
    "STRATAGEM_CLIENT_TIMEOUT_S": "6",
}
_MOST_STARTS = 8
_RESUME_LIMIT_S = 240.0
_STOP_S = 30.0
_RAY_ENDS_S = 60.0
_POLL_S = 0.1
_TAIL_CHARACTERS = 1500
# Processes by a part of their command line.
_ROLES = {
    "gcs": "/gcs/gcs_server",
    "raylet": "/raylet/raylet ",
    "dashboard": "/dashboard/dashboard.py",
    "agent": "ray::DashboardAgent",
    "supervisor": "ray::JobSupervisor",
    "driver": "python3 -m stratagem.launch.remote.job",
    "actor": "ray::JobProcess",
}
_NOTICED = re.compile(r"try \d+ failed|Ray ended on this machine")
_NAMED = re.compile(r"UnavailableError|DeadlineExceededError|PermissionError|did not finish on")
_OF_SIGNALS = {-signal.SIGTERM: "SIGTERM", -signal.SIGINT: "SIGINT", 130: "SIGINT", 143: "SIGTERM"}


class RemoteJobs:
    """One function on a cluster of one machine."""

    name = "remote jobs"

    def start(self, sandbox: Sandbox, chance: Random) -> RunningRemote:
        """Starts the server and the client."""
        return RunningRemote(sandbox)


class RunningRemote:
    """A server and a client, each started again when it ends too early."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._output = ""  # of earlier starts
        self.num_starts = 0
        self._server = self._start_server()
        self._client = self._start_client()

    def processes(self) -> dict[str, int]:
        """Returns the living processes by role."""
        living = self._sandbox.processes()
        found = {"server": self._server.process.pid, "client": self._client.process.pid}
        for pid, command in living.items():
            for name, part in _ROLES.items():
                if part in f"{command} " and not command.startswith("/bin/sh"):
                    found.setdefault(name, pid)
        with contextlib.suppress(OSError, ValueError, IndexError):
            last = (self._sandbox.notes / "counted").read_text().splitlines()[-1]
            found["function"] = int(last.split()[1])
        return {name: pid for name, pid in found.items() if pid in living}

    def ports(self) -> dict[str, tuple[str, int]]:
        """Returns the ports of the head: of the cluster, and for jobs."""
        return {"gcs": ("127.0.0.1", 2222), "jobs": ("127.0.0.1", 8265)}

    def files(self) -> dict[str, list[Path]]:
        """Returns nothing: the steps so far are all that is kept."""
        return {}

    def steps(self) -> int:
        """Returns the number of counted steps."""
        with contextlib.suppress(OSError):
            return (self._sandbox.notes / "counted").read_bytes().count(b"\n")
        return 0

    def hurry(self) -> None:
        """Ends the pauses between steps."""
        (self._sandbox.notes / "hurry").touch()

    def noticed_s(self) -> list[float]:
        """Returns the times of failures that the client or the server reported."""
        lines = [*self._client.lines, *self._server.lines]
        return [at_s for at_s, line in lines if _NOTICED.search(line)]

    def wait(self, timeout_s: float) -> Ended:
        """Waits for the client; starts the server, or a killed client, again."""
        code = self._client.wait(timeout_s)
        if self._server.process.poll() is not None and self.num_starts < _MOST_STARTS:
            self._output += f"{self._server.output}\n"
            self._server = self._start_server()
        output = f"{self._output}{self._client.output}"
        if code == -signal.SIGKILL and self.num_starts < _MOST_STARTS:
            self._output = f"{output}\n"
            self._client = self._start_client()
            code = None
        return Ended(code, output)

    def verdict(self, ended: Ended, faults: Sequence[Fault]) -> Outcome:
        """Checks that each step was counted once; a client that ended early has to resume."""
        if ended.hang:
            return Outcome("hang", f"over the limit: {self._tail(ended)}")
        kind, why = "promised", ""
        if ended.code != 0:
            if not _names_cause(ended, faults):
                return Outcome("unnamed", f"exit code {ended.code}: {self._tail(ended)}")
            kind, why = "error", f"exit code {ended.code}; "
            self._client = self._start_client()
            again = Ended(self._wait_for_end(), self._client.output)
            if again.code != 0:
                how = "hang" if again.hang else "wrong"
                return Outcome(how, f"the next client ended with {again.code}: {self._tail(again)}")
        wrong = wrong_steps((self._sandbox.notes / "counted").read_text(), _NUM_STEPS)
        value = int((self._sandbox.notes / "value").read_text())
        if wrong or value != sum(range(_NUM_STEPS)):
            return Outcome("wrong", wrong or f"the value is {value}")
        if not self._stop():
            return Outcome("hang", f"the server does not end: {self._server.output[-1000:]}")
        return Outcome(kind, f"{why}{self.num_starts} starts")

    def _wait_for_end(self) -> int | None:
        for _ in range(int(_RESUME_LIMIT_S)):
            ended = self.wait(1.0)
            if ended.code is not None:
                return ended.code
        return None

    def _stop(self) -> bool:
        """Stops the server, and waits for Ray's processes, which notice it in their own time.

        Removes what Ray leaves: the logs of its sessions, and sockets of its dashboard.
        """
        self._server.process.send_signal(signal.SIGTERM)
        is_over = self._server.wait(_STOP_S) is not None
        deadline_s = time.monotonic() + _RAY_ENDS_S
        while self._sandbox.processes() and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
        for path in (Path("/tmp/ray"), *Path("/tmp").glob("pymp-*")):
            shutil.rmtree(path, ignore_errors=True)
        return is_over

    def _tail(self, ended: Ended) -> str:
        return f"{ended.output[-_TAIL_CHARACTERS:]}\nserver: {self._server.output[-1000:]}"

    def _start_server(self) -> Started:
        self.num_starts += 1
        config = {"cluster": _CLUSTER, "task": {"type": "worker", "index": 0}}
        command = [sys.executable, "-m", "stratagem", "server"]
        variables = {**_VARIABLES, "TF_CONFIG": json.dumps(config)}
        return self._sandbox.start(command, variables)

    def _start_client(self) -> Started:
        self.num_starts += 1
        arguments = [json.dumps(_CLUSTER), str(self._sandbox.notes), str(_NUM_STEPS)]
        return self._sandbox.start([sys.executable, "-m", _CLIENT, *arguments], _VARIABLES)


def wrong_steps(text: str, count: int) -> str:
    """Returns the first step that was not counted once and in order; "" for none."""
    steps = [int(line.split()[0]) for line in text.splitlines()]
    for expected, step in itertools.zip_longest(range(count), steps):
        if step != expected:
            return f"step {step} was counted where {expected} is expected"
    return ""


def _names_cause(ended: Ended, faults: Sequence[Fault]) -> bool:
    """Returns True if the end names its cause, or is that of a signal to the client."""
    of_signal = _OF_SIGNALS.get(ended.code or 0)
    if any(fault.where == "client" and fault.kind == of_signal for fault in faults):
        return True
    return _NAMED.search(ended.output) is not None
