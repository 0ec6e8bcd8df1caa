"""A coordinator that schedules numbered updates of each kind, and records all that happens.

Its argument is the folder of the run, which has `settings.json`. A restarted coordinator makes the
updates that the journals do not have. The state at the end is in `final.json`. Functions are slow
until there is a file `hurry`, and the last ones are scheduled slowly.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import stratagem as sg  # isort: skip - before keras, because it selects the JAX backend

import jax.numpy as jnp
import keras
import numpy as np

from validation.chaos.jobs.parameter_servers import RUN, Settings
from validation.chaos.recording import Recorder, read_records

KINDS = {
    "adds": "assign_add",
    "rows": "scatter_add",
    "first": "push",
    "second": "push",
}
_MOST_WAITING = 16
_FUNCTION_S = 0.02
_NUM_LAST, _LAST_PAUSE_S = 60, 0.3
_ENTRY_EVERY = 40
_POLL_S = 0.01


class Variables:
    """The variables of a run, and the updates that a function makes to them."""

    def __init__(self, strategy: Any, count: int) -> None:
        zeros = np.zeros(count, "float32")
        with strategy.scope():
            self.adds = sg.Variable(zeros, name="adds")
            self.first = sg.Variable(zeros, name="first")
            self.second = sg.Variable(zeros, name="second")
            self.rows = sg.Variable(zeros[:, None], name="rows")
            self.register = sg.Variable(np.float32(0), name="register")
            self.optimizer = keras.optimizers.SGD(1.0)
            self.optimizer.build([self.first, self.second])
            self.metric = keras.metrics.Sum()
        self._count = count
        # A step is compiled once for each function.
        self._pushes = {
            names: functools.partial(_push, self.optimizer, [getattr(self, name) for name in names])
            for names in (("first",), ("second",), ("first", "second"))
        }

    def update(self, recorder: Recorder, function: int, number: int, cells: Sequence[str]) -> None:
        """Makes the updates of a number, in a fixed order."""
        fields = {"number": number, "function": function}
        one = np.zeros(self._count, "float32")
        one[number] = 1
        if "adds" in cells:
            with recorder.span("update", cells=["adds"], **fields):
                self.adds.assign_add(one)
        if "rows" in cells:
            with recorder.span("update", cells=["rows"], **fields):
                row = sg.IndexedSlices(np.ones((1, 1), "float32"), np.array([number]))
                self.rows.scatter_add(row)
        pushed = tuple(name for name in ("first", "second") if name in cells)
        if pushed:
            with recorder.span("update", cells=pushed, **fields):
                sg.get_strategy().run(self._pushes[pushed], args=(jnp.asarray(one),))
        if "register" in cells:
            with recorder.span("update", cells=["register"], **fields):
                self.register.assign(np.float32(number))
        self.metric.update_state(1.0)

    def counts(self, name: str) -> list[float]:
        """Returns how often each update of a cell was made."""
        return np.asarray(getattr(self, name).value).ravel().tolist()


def _push(optimizer: Any, variables: Sequence[Any], gradient: Any) -> None:
    optimizer.apply([-gradient] * len(variables), variables)


class Watch:
    """Records losses of servers, and writes the process ids of all roles to a file."""

    def __init__(self, coordinator: Any, recorder: Recorder, folder: Path) -> None:
        self._coordinator = coordinator
        self._servers = coordinator.strategy.cluster.servers
        self._recorder = recorder
        self._folder = folder
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops watching."""
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        alive_s = dict.fromkeys(range(len(self._servers.pids)), time.monotonic())
        lost: set[int] = set()
        written: dict[str, int] = {}
        while not self._is_over.is_set():
            now_s = time.monotonic()
            servers = dict(enumerate(self._servers.pids))
            for server, pid in servers.items():
                if _is_alive(pid):
                    if pid not in lost:
                        alive_s[server] = now_s
                elif pid not in lost:
                    lost.add(pid)
                    self._recorder.note(
                        "lost", server=server, begun_s=alive_s[server], is_counted=True
                    )
            workers = dict(enumerate(self._coordinator.workers.pids))
            roles = {f"server {index}": pid for index, pid in servers.items()}
            roles |= {f"worker {index}": pid for index, pid in workers.items()}
            if roles != written:
                written = roles
                self._write({**roles, "coordinator": os.getpid()})
            self._is_over.wait(_POLL_S)

    def _write(self, processes: dict[str, int]) -> None:
        addresses = {
            "server": self._servers.addresses,
            "worker": self._coordinator.workers.addresses,
        }
        ports = {
            f"{kind} {index}": address
            for kind, some in addresses.items()
            for index, address in enumerate(some)
        }
        new = self._folder / "roles.json.new"
        new.write_text(json.dumps({"processes": processes, "ports": ports}))
        new.replace(self._folder / "roles.json")


def _is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


class Run:
    """One coordinator of a run."""

    def __init__(self, folder: Path, settings: Settings, strategy: Any) -> None:
        self._folder = folder
        self._settings = settings
        self._strategy = strategy
        self._records = folder / "records"
        self._hurry = folder / "hurry"
        self._recorder = Recorder(self._records)
        self._coordinator = sg.coordinator.ClusterCoordinator(strategy)
        self._number = self._note_start()
        self._watch = Watch(self._coordinator, self._recorder, self._folder)
        self._variables = Variables(strategy, settings.num_functions)
        self._waiting: deque[tuple[int, Any]] = deque()

    def train(self) -> None:
        """Schedules all functions, waits for them and writes the end."""
        work = _function(self._variables, self._folder)
        outstanding = self._outstanding()
        for place, (number, cells) in enumerate(outstanding):
            if len(outstanding) - place < _NUM_LAST and not self._hurry.exists():
                time.sleep(_LAST_PAUSE_S)
            function = self._number * RUN + number
            result = self._coordinator.schedule(work, args=(function, number, cells))
            self._waiting.append((function, result))
            if len(self._waiting) >= _MOST_WAITING:
                self._take()
        while self._waiting:
            self._take()
        self._coordinator.join()
        self._watch.close()
        self._write_end()

    def _note_start(self) -> int:
        """Records this start, and the loss of the servers of the last coordinator."""
        starts: list[str] = []
        last_s: dict[str, float] = {}
        for client, fields in read_records(self._records):
            last_s[client] = fields["at_s"]
            if fields["event"] == "start":
                starts.append(client)
        if starts:
            begun_s = max(last_s[client] for client in starts)
            for server in range(self._settings.num_servers):
                self._recorder.note("lost", server=server, begun_s=begun_s, is_counted=False)
        self._recorder.note("start")
        return len(starts)

    def _outstanding(self) -> list[tuple[int, list[str]]]:
        """Returns the updates that are not in the state, by number."""
        if not self._number:
            return [
                (number, [*KINDS, "register"]) for number in range(self._settings.num_functions)
            ]
        counts = {name: self._variables.counts(name) for name in KINDS}
        missing = [
            (number, [name for name, own in counts.items() if not own[number]])
            for number in range(self._settings.num_functions)
        ]
        return [(number, cells) for number, cells in missing if cells]

    def _take(self) -> None:
        function, result = self._waiting.popleft()
        client = result.fetch()
        self._recorder.note("done", number=function, client=str(client))
        with (self._folder / "steps").open("ab") as file:
            file.write(b".")
        if function % _ENTRY_EVERY == 0:
            with self._recorder.span("entry"):
                self._strategy.placement.remote.variables.secure()

    def _write_end(self) -> None:
        self._recorder.note("end")
        client = self._strategy.placement.remote.variables.client
        cells: dict[str, Any] = {}
        for name in KINDS:
            layout = client.placement_of(getattr(self._variables, name).place.name)
            shards = zip(layout.servers, layout.first_rows, strict=True)
            servers = [0] * self._settings.num_functions
            for server, first in shards:
                servers[first:] = [server] * (self._settings.num_functions - first)
            cells[name] = {
                "kind": KINDS[name],
                "counts": self._variables.counts(name),
                "servers": servers,
            }
        cut = [key for key, state in client.describe().items() if state["num_dropped_records"]]
        final = {
            "cells": cells,
            "reported": self._coordinator.updates(),
            "metric": float(self._variables.metric.result()),
            "run": self._number,
            "register": float(np.asarray(self._variables.register.value)),
            "cut_servers": cut,
        }
        (self._folder / "final.json").write_text(json.dumps(final))


def _function(variables: Variables, folder: Path) -> Callable[..., str]:
    made: dict[int, Recorder] = {}

    def work(function: int, number: int, cells: list[str]) -> str:
        recorder = made.setdefault(os.getpid(), Recorder(folder / "records"))
        with recorder.span("function", number=function):
            if not (folder / "hurry").exists():
                threading.Event().wait(_FUNCTION_S)  # libfaketime breaks time.sleep after a fork
            variables.update(recorder, function, number, cells)
        return recorder.client

    return work


def _in_halves(shape: Sequence[int], dtype: object, axis: int = 0) -> list[int]:
    """Splits tables over both servers, and vectors not at all."""
    return [2 if len(shape) > 1 and index == axis else 1 for index in range(len(shape))]


def main() -> None:
    folder = Path(sys.argv[1])
    settings = Settings(**json.loads((folder / "settings.json").read_text()))
    strategy = sg.ParameterServerStrategy(
        variable_partitioner=_in_halves,
        journal_dir=settings.journals,
        num_workers=settings.num_workers,
        num_servers=settings.num_servers,
        options=sg.coordinator.options(
            durable_updates=settings.is_durable,
            journal_interval_s=settings.journal_interval_s,
        ),
    )
    with strategy:
        Run(folder, settings, strategy).train()


if __name__ == "__main__":
    main()
