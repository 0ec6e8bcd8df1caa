"""A dispatcher and workers in processes, each killed at random: every batch comes exactly once."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stratagem as sg

_ROOT = Path(__file__).parents[4]
_LIMIT_S = 240
_NUM_BATCHES = 1500


class ServiceProcesses:
    """A dispatcher and workers; `kill_at_random` kills and replaces them until it is stopped."""

    def __init__(self, folder: Path, num_workers: int) -> None:
        self._settings: dict[str, Any] = {
            "work_dir": str(folder),
            "fault_tolerant_mode": True,
            "worker_timeout_ms": 1500,
        }
        self._dispatcher, self.target = self._start("dispatcher", **self._settings)
        self._settings["port"] = int(self.target.rpartition(":")[2])
        self._workers = [self._start_worker() for _ in range(num_workers)]
        self.num_killed = {"worker": 0, "dispatcher": 0}

    def _start(self, kind: str, **arguments: Any) -> tuple[subprocess.Popen[str], str]:
        process = subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.service_process", kind, json.dumps(arguments)],
            cwd=_ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        process.stdout.close()
        assert address, f"the {kind} did not start"
        return process, address

    def _start_worker(self) -> subprocess.Popen[str]:
        return self._start("worker", dispatcher_address=self.target)[0]

    def kill_worker(self, number: int) -> None:
        self._workers[number].kill()
        self._workers[number].wait()
        self.num_killed["worker"] += 1
        self._workers[number] = self._start_worker()

    def kill_dispatcher(self) -> None:
        self._dispatcher.kill()
        self._dispatcher.wait()
        self.num_killed["dispatcher"] += 1
        self._dispatcher, _ = self._start("dispatcher", **self._settings)

    def kill_at_random(self, chance: random.Random, has_ended: threading.Event) -> None:
        while not has_ended.wait(2):
            if chance.random() < 0.3:
                self.kill_dispatcher()
            else:
                self.kill_worker(chance.randrange(len(self._workers)))

    def stop(self) -> None:
        for process in (self._dispatcher, *self._workers):
            process.kill()
            process.wait()


@contextlib.contextmanager
def service_processes(folder: Path, num_workers: int) -> Iterator[ServiceProcesses]:
    processes = ServiceProcesses(folder, num_workers)
    try:
        yield processes
    finally:
        processes.stop()


class _Batches:
    def __len__(self) -> int:
        return _NUM_BATCHES

    def __getitem__(self, number: int) -> np.ndarray:
        time.sleep(0.02)
        return np.array([number])


@pytest.mark.slow
@pytest.mark.parametrize("num_consumers", [1, 2])
def test_every_batch_is_visited_once_while_all_parts_are_killed(tmp_path, num_consumers) -> None:
    found: list[list[int]] = [[] for _ in range(num_consumers)]
    errors: list[Exception] = []
    with service_processes(tmp_path, 3) as processes:

        def consume(number: int) -> None:
            distribute = sg.input.service.distribute(
                "distributed_epoch",
                processes.target,
                job_name=None if num_consumers == 1 else "shared",
                exactly_once=True,
            )
            dataset = sg.input.Dataset(_Batches(), batch_size=1).apply(distribute)
            try:
                for batch in dataset:
                    found[number].append(batch.item())
            except Exception as error:  # noqa: BLE001 - raised below
                errors.append(error)

        has_ended = threading.Event()
        killing = threading.Thread(
            target=processes.kill_at_random, args=(random.Random(num_consumers), has_ended)
        )
        consumers = [
            threading.Thread(target=consume, args=(number,)) for number in range(num_consumers)
        ]
        killing.start()
        for consumer in consumers:
            consumer.start()
        for consumer in consumers:
            consumer.join(_LIMIT_S)
        has_ended.set()
        killing.join()
        if errors:
            raise errors[0]
        assert sorted([*itertools.chain.from_iterable(found)]) == list(range(_NUM_BATCHES))
        assert min(processes.num_killed.values()) > 0
