"""A coordinator that trains keyed tables by numbered updates, and saves versions beside it.

Its argument is the folder of the run, which has `settings.json`. A restarted coordinator continues
with the next update. What was saved is in `states`, and the end in `final.json`.
"""

from __future__ import annotations

import functools
import json
import os
import random
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

from stratagem.parameter_server.server.tables.saved_tables import TableVersions
from validation.chaos.jobs.keyed_tables import TableSettings
from validation.chaos.programs.parameter_servers import Watch
from validation.chaos.recording import Recorder, read_records
from validation.chaos.table_states import TABLES, WIDTH, Plan, read_snapshot

_MOST_WAITING = 8
_FUNCTION_S = 0.02
_NUM_LAST, _LAST_PAUSE_S = 40, 0.3
_ENTRY_EVERY, _PAIR_EVERY = 30, 50
_SAVE_PAUSE_S = 0.4
_OPERATIONS = ("save", "save", "save", "full", "publish", "publish", "compact", "rollback")


class Tables:
    """The tables of a run, and the update that a function makes to all of them at once."""

    def __init__(self, strategy: Any, settings: TableSettings, plan: Plan) -> None:
        options: dict[str, dict[str, Any]] = {
            "recent": {"eviction": sg.embedding.LeastRecent(), "max_rows": 24},
            "aged": {
                "admission": sg.embedding.AfterSightings(2),
                "eviction": sg.embedding.NotSeenFor(40),
            },
            "tiered": {"eviction": sg.embedding.LeastRecent(), "max_rows": 60},
        }
        if settings.has_tiers:
            tiers = sg.embedding.TierOptions(memory_bytes=12 * WIDTH * 4, folder=settings.tiers)
            options["tiered"]["tiers"] = tiers
        zeros = keras.initializers.Constant(0.0)
        with strategy.scope():
            self._layers = [
                sg.embedding.DynamicEmbedding(WIDTH, initializer=zeros, name=name, **options[name])
                for name in TABLES
            ]
            for layer in self._layers:
                layer.build()
            self._optimizer = keras.optimizers.SGD(1.0)
            self._optimizer.build([layer.embeddings for layer in self._layers])
        self._plan = plan
        self._step = functools.partial(_step, self._optimizer, self._layers)

    def update(self, number: int) -> None:
        """Makes an update."""
        keys = [sg.embedding.keys(self._plan.keys(number, name)) for name in TABLES]
        rows = [jnp.asarray(self._plan.gradient(number, name)) for name in TABLES]
        sg.get_strategy().run(self._step, args=(keys, rows))


def _step(optimizer: Any, layers: Sequence[Any], keys: Sequence[Any], rows: Sequence[Any]) -> None:
    def loss() -> Any:
        found = zip(layers, keys, rows, strict=True)
        return -sum(jnp.sum(layer(own) * row) for layer, own, row in found)

    tables = [layer.embeddings for layer in layers]
    _, gradients = sg.value_and_grad(loss, tables)
    optimizer.apply_gradients(zip(gradients, tables, strict=True))


class Saver:
    """Saves, publishes, compacts and rolls back in a thread, and records what each one reported."""

    def __init__(self, folder: Path, settings: TableSettings, strategy: Any, plan: Plan) -> None:
        self._saved = Path(settings.saved)
        self._states = folder / "states"
        self._strategy = strategy
        self._plan = plan
        self._recorder = Recorder(folder / "records")
        self._chance = random.Random(f"{settings.seed} {time.monotonic_ns()}")
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        numbers = TableVersions(self._saved).numbers
        self._last = numbers[-1] if numbers else None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends after the operation that runs."""
        self._is_over.set()
        self._thread.join()

    def save_pair(self) -> None:
        """Saves changes, and then all rows, while no update is made."""
        with self._lock:
            begun_s = time.monotonic()
            pair = self.made("save"), self.made("full")
            if None not in pair:
                self._recorder.note("pair", pair=pair, begun_s=begun_s)

    def restore(self) -> None:
        """Restores a version, and saves all rows."""
        with self._lock:
            begun_s = time.monotonic()
            self._recorder.note("restoring")
            version = self._chance.choice(TableVersions(self._saved).numbers)
            sg.embedding.restore(self._saved, version, strategy=self._strategy)
            if (number := self.made("full")) is not None:
                pair = version, number
                self._recorder.note("pair", pair=pair, begun_s=begun_s, is_restored=True)

    def made(self, operation: str) -> int | None:
        """Runs an operation; returns the number of the version that it reported."""
        begun_s = time.monotonic()
        versions = TableVersions(self._saved)
        try:
            number = self._operations()[operation](versions)
        except OSError as error:
            if isinstance(error, sg.errors.DataLossError):
                raise
            self._recorder.note("failed", operation=operation, begun_s=begun_s, why=repr(error))
            return None
        self._recorder.note("made", operation=operation, number=number, begun_s=begun_s)
        if operation in ("compact", "rollback"):
            return None
        snapshot = read_snapshot(self._saved, number, self._plan, begun_s, time.monotonic())
        (self._states / f"{number}.json.new").write_text(snapshot.to_json())
        (self._states / f"{number}.json.new").replace(self._states / f"{number}.json")
        self._recorder.note("state", number=number, digest=snapshot.digest)
        self._last = number
        return number

    def _operations(self) -> dict[str, Callable[[TableVersions], int]]:
        def rollback(versions: TableVersions) -> int:
            number = self._chance.choice(versions.numbers)
            sg.embedding.rollback(self._saved, number)
            return number

        def compact(versions: TableVersions) -> int:
            number = self._chance.choice(versions.numbers[-4:])
            sg.embedding.compact(self._saved, number)
            return number

        own = {"strategy": self._strategy}
        return {
            "save": lambda versions: sg.embedding.save(
                self._saved, self._last if self._last in versions.numbers else None, **own
            ),
            "full": lambda _: sg.embedding.save(self._saved, **own),
            "publish": lambda _: sg.embedding.publish(self._saved, **own),
            "compact": compact,
            "rollback": rollback,
        }

    def _run(self) -> None:
        try:
            while not self._is_over.wait(self._chance.uniform(0, _SAVE_PAUSE_S)):
                operation = self._chance.choice(_OPERATIONS)
                if TableVersions(self._saved).numbers or operation in ("save", "full", "publish"):
                    with self._lock:
                        self.made(operation)
        except BaseException as error:
            self._recorder.note("torn", why=repr(error))
            raise


class Run:
    """One coordinator of a run."""

    def __init__(self, folder: Path, settings: TableSettings, strategy: Any) -> None:
        self._folder = folder
        self._settings = settings
        self._strategy = strategy
        self._recorder = Recorder(folder / "records")
        self._coordinator = sg.coordinator.ClusterCoordinator(strategy)
        self._first = self._note_start()
        self._watch = Watch(self._coordinator, self._recorder, folder)
        plan = Plan(settings.seed, settings.num_functions)
        self._tables = Tables(strategy, settings, plan)
        with self._recorder.span("entry"):
            strategy.placement.remote.variables.secure()
        self._saver = Saver(folder, settings, strategy, plan)
        self._waiting: deque[Any] = deque()

    def train(self) -> None:
        """Schedules the updates, waits for them and writes the end."""
        work = _function(self._tables, self._folder)
        hurry = self._folder / "hurry"
        for number in range(self._first, self._settings.num_functions):
            if self._settings.num_functions - number < _NUM_LAST and not hurry.exists():
                time.sleep(_LAST_PAUSE_S)
            self._recorder.note("scheduled", number=number)
            self._waiting.append(self._coordinator.schedule(work, args=(number,)))
            if len(self._waiting) >= _MOST_WAITING:
                self._take()
            if number % _ENTRY_EVERY == 0:
                with self._recorder.span("entry"):
                    self._strategy.placement.remote.variables.secure()
            if number % _PAIR_EVERY == _PAIR_EVERY - 1:
                self._settle()
                self._saver.save_pair()
        self._settle()
        self._watch.close()
        self._saver.close()
        self._saver.save_pair()
        self._saver.restore()
        self._write_end()

    def _settle(self) -> None:
        while self._waiting:
            self._take()
        self._coordinator.join()

    def _take(self) -> None:
        self._waiting.popleft().fetch()
        with (self._folder / "steps").open("ab") as file:
            file.write(b".")

    def _note_start(self) -> int:
        """Records this start and the loss of the last servers; returns the next update."""
        starts: list[str] = []
        last_s: dict[str, float] = {}
        first = 0
        for client, fields in read_records(self._folder / "records"):
            last_s[client] = fields["at_s"]
            if fields["event"] == "start":
                starts.append(client)
            if fields["event"] == "scheduled":
                first = max(first, fields["number"] + 1)
        if starts:
            begun_s = max(last_s[client] for client in starts)
            for server in range(self._settings.num_servers):
                self._recorder.note("lost", server=server, begun_s=begun_s, is_counted=False)
        self._recorder.note("start")
        return first

    def _write_end(self) -> None:
        self._recorder.note("end")
        client = self._strategy.placement.remote.variables.client
        described = client.describe()
        cut = [key for key, state in described.items() if state["num_dropped_records"]]
        stats = sg.embedding.stats(self._strategy)
        final = {
            "cut_servers": cut,
            "evicted": sum(one.evicted for one in stats.values()),
        }
        (self._folder / "final.json").write_text(json.dumps(final))


def _function(tables: Tables, folder: Path) -> Callable[[int], None]:
    made: dict[int, Recorder] = {}

    def work(number: int) -> None:
        recorder = made.setdefault(os.getpid(), Recorder(folder / "records"))
        if not (folder / "hurry").exists():
            threading.Event().wait(_FUNCTION_S)
        with recorder.span("update", number=number, cells=TABLES):
            tables.update(number)

    return work


def main() -> None:
    folder = Path(sys.argv[1])
    settings = TableSettings(**json.loads((folder / "settings.json").read_text()))
    strategy = sg.ParameterServerStrategy(
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
