"""A coordinator, two servers and two workers, whose state is compared with the history."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import urlsplit

from validation.chaos.faults.kinds import Fault
from validation.chaos.history import Cell, Final, check, read_history
from validation.chaos.jobs import Ended, Outcome
from validation.chaos.sandbox import Sandbox, Started

__all__ = [
    "RUN",
    "ParameterServers",
    "RunningServers",
    "Settings",
    "names_cause",
    "read_final",
    "variables_of",
]

# Functions of different coordinators of a run have different numbers.
RUN = 10**6
_MOST_STARTS = 6
_RESUME_LIMIT_S = 120.0
_TAIL_CHARACTERS = 1500
_VARIABLES = {
    "STRATAGEM_PEER_TIMEOUT_S": "4",
    "STRATAGEM_JOIN_TIMEOUT_S": "120",
    "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}
_NOTICED = re.compile(r"RuntimeWarning: (Parameter servers restarted|A function ran again)")
_CUT = re.compile(r"The end of the journal \S*server-(\d+)\.journal is damaged")
# The end that is promised when a server is silent for too long, and faults that bring it about.
_SILENT = "gave no answer for"
_SILENCING = {
    *("delay", "packets lost", "partition", "partition one-way", "half-open", "reset"),
    *("SIGSTOP", "SIGSTOP for a while", "disk slow"),
}
# A path that is too long for Unix sockets: all messages go by TCP then.
_LONG = "a-folder-with-a-long-name-" * 4
# Exit codes of a coordinator that a signal of its user ended.
_OF_SIGNALS = {-signal.SIGTERM: "SIGTERM", -signal.SIGINT: "SIGINT", 130: "SIGINT", 143: "SIGTERM"}


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of a run."""

    journals: str
    num_functions: int = 400
    num_workers: int = 2
    num_servers: int = 2
    is_durable: bool = False
    journal_interval_s: float = 0.5


class ParameterServers:
    """Functions that update variables on servers in all ways."""

    name = "parameter servers"

    def start(self, sandbox: Sandbox, chance: Random) -> RunningServers:
        """Starts a run, with settings that are drawn."""
        settings = Settings(
            str(sandbox.work / "journals"),
            is_durable=chance.random() < 0.5,
            journal_interval_s=chance.choice((0.2, 0.5, 1.0)),
        )
        return RunningServers(sandbox, settings, variables_of(sandbox, chance))


def variables_of(sandbox: Sandbox, chance: Random) -> dict[str, str]:
    """Returns the environment of a run; half of them use TCP."""
    programs = sandbox.tree / "runs" / "chaos" / "cache" / "programs"
    variables = {**_VARIABLES, "JAX_COMPILATION_CACHE_DIR": str(programs)}
    if chance.random() < 0.5:
        folder = Path("/tmp") / _LONG
        folder.mkdir()
        variables["TMPDIR"] = str(folder)
    return variables


class RunningServers:
    """A run of `program`, whose coordinator is started again when it was killed."""

    program = "validation.chaos.programs.parameter_servers"

    def __init__(self, sandbox: Sandbox, settings: Settings, variables: Mapping[str, str]) -> None:
        self.sandbox = sandbox
        self.settings = settings
        self._variables = variables
        self._output = ""  # of earlier starts
        self.num_starts = 0
        (sandbox.notes / "records").mkdir()
        fields = json.dumps(dataclasses.asdict(settings))
        (sandbox.notes / "settings.json").write_text(fields)
        self._started = self._start()

    def processes(self) -> dict[str, int]:
        """Returns the living processes by role."""
        living = self.sandbox.processes()
        found = {"coordinator": self._started.process.pid, **self._roles("processes")}
        for pid, command in living.items():
            if '"modules"' in command and pid not in found.values():
                found["fork server"] = pid
        return {name: pid for name, pid in found.items() if pid in living}

    def ports(self) -> dict[str, tuple[str, int]]:
        """Returns the TCP addresses of servers and workers, which may have a Unix socket too."""
        found = {
            name: urlsplit(addresses.split()[0]) for name, addresses in self._roles("ports").items()
        }
        return {name: (str(one.hostname), int(one.port or 0)) for name, one in found.items()}

    def files(self) -> dict[str, list[Path]]:
        """Returns the journals."""
        journals = Path(self.settings.journals)
        return {"journal": [one for one in journals.rglob("*") if one.suffix != ".lock"]}

    def steps(self) -> int:
        """Returns the number of functions whose results have arrived."""
        with contextlib.suppress(FileNotFoundError):
            return (self.sandbox.notes / "steps").stat().st_size
        return 0

    def hurry(self) -> None:
        """Ends the pauses of functions."""
        (self.sandbox.notes / "hurry").touch()

    def noticed_s(self) -> list[float]:
        """Returns the times of warnings about losses and repetitions."""
        return [at_s for at_s, line in list(self._started.lines) if _NOTICED.search(line)]

    def wait(self, timeout_s: float) -> Ended:
        """Waits for the coordinator, and starts it again if it was killed."""
        code = self._started.wait(timeout_s)
        output = f"{self._output}{self._started.output}"
        if code == -signal.SIGKILL and self.num_starts < _MOST_STARTS:
            self._output = f"{output}\n"
            self._started = self._start()
            code = None
        return Ended(code, output)

    def verdict(self, ended: Ended, faults: Sequence[Fault]) -> Outcome:
        """Compares the state with the history; a run that ended early has to resume."""
        if ended.hang:
            return Outcome("hang", f"over the limit: {ended.output[-_TAIL_CHARACTERS:]}")
        if ended.code == 0:
            return self._compared(ended.output)
        tail = ended.output[-_TAIL_CHARACTERS:]
        if not names_cause(ended, faults):
            return Outcome("unnamed", f"exit code {ended.code}: {tail}")
        return self._resumed(faults, ended.output)

    def _resumed(self, faults: Sequence[Fault], before: str) -> Outcome:
        """Starts a run that ended early again, without faults."""
        (self.sandbox.notes / "final.json").unlink(missing_ok=True)
        self._started = self._start()
        again = Ended(self._started.wait(_RESUME_LIMIT_S), self._started.output)
        if again.hang:
            return Outcome("hang", "the next start is over the limit")
        if again.code == 0:
            compared = self._compared(before + again.output)
            return Outcome("error", compared.why) if compared.kind == "promised" else compared
        causes = [fault.causes for fault in faults if fault.kind.startswith(("journal", "disk"))]
        if causes and re.search("|".join(causes), again.output):
            self.remove_long_folder()
            return Outcome("error", "the damaged journal was refused")
        return Outcome("wrong", f"the next start ended too: {again.output[-_TAIL_CHARACTERS:]}")

    def _compared(self, output: str) -> Outcome:
        final = read_final(self.sandbox.notes / "final.json")
        # The state tells it only of the last start of each server.
        cut = {int(server) for server in _CUT.findall(output)}
        final = dataclasses.replace(final, cut_servers=final.cut_servers | cut)
        history = read_history(self.sandbox.notes / "records")
        findings = check(history, final, is_durable=self.settings.is_durable)
        if findings:
            return Outcome("wrong", "\n".join(map(str, findings[:20])))
        self.remove_long_folder()
        assert final.reported is not None
        lost = sum(counts["lost"] for counts in final.reported.values())
        repeated = sum(counts["repeated"] for counts in final.reported.values())
        return Outcome("promised", f"{lost} lost, {repeated} repeated; {self.num_starts} starts")

    def remove_long_folder(self) -> None:
        """Removes the temporary folder of a run that ended well."""
        if "TMPDIR" in self._variables:
            with contextlib.suppress(OSError):  # what is in it is a leftover
                Path(self._variables["TMPDIR"]).rmdir()

    def _start(self) -> Started:
        self.num_starts += 1
        (self.sandbox.notes / "roles.json").unlink(missing_ok=True)
        command = [sys.executable, "-m", self.program, str(self.sandbox.notes)]
        return self.sandbox.start(command, self._variables)

    def _roles(self, what: str) -> dict[str, Any]:
        with contextlib.suppress(FileNotFoundError):
            return json.loads((self.sandbox.notes / "roles.json").read_text())[what]
        return {}


def names_cause(ended: Ended, faults: Sequence[Fault]) -> bool:
    """Returns True if the end names its cause, or is that of a signal to the coordinator."""
    for fault in faults:
        if fault.where == "coordinator" and fault.kind == _OF_SIGNALS.get(ended.code or 0):
            return True
    # Servers end with their fork server, and its next one loads all libraries before it forks any.
    is_silencing = (fault.kind in _SILENCING or fault.where == "fork server" for fault in faults)
    if _SILENT in ended.output and any(is_silencing):
        return True
    causes = [fault.causes for fault in faults if fault.causes]
    return bool(causes) and re.search("|".join(causes), ended.output) is not None


def read_final(path: Path) -> Final:
    """Reads the end of a run."""
    fields = json.loads(path.read_text())
    cells = {
        name: Cell(cell["kind"], dict(enumerate(cell["counts"])), dict(enumerate(cell["servers"])))
        for name, cell in fields["cells"].items()
    }
    return Final(
        cells,
        fields["reported"],
        metric=fields["metric"],
        register=fields["register"],
        cut_servers=frozenset(fields["cut_servers"]),
        first_function=fields["run"] * RUN,
    )
