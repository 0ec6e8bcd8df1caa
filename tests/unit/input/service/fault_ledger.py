"""Runs of the input service whose parts are hurt, with a ledger of each example.

`python -m tests.unit.input.service` prints the table of docs/design/input_service.md.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import multiprocessing
import os
import resource
import signal
import socket
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import stratagem as sg
from stratagem.input.service.address_book import BookClient, DispatcherConfig, DispatchServer
from stratagem.input.service.splits import ShardingPolicy
from stratagem.input.service.workers import WorkerConfig, WorkerServer
from tests.unit.launch.waiting import until

_NUM_FILES, _BATCHES_PER_FILE, _BATCH_SIZE = 8, 10, 4
NUM_EXAMPLES = _NUM_FILES * _BATCHES_PER_FILE * _BATCH_SIZE
_BATCH_S, _STEP_S = 0.03, 0.005
_HURT_AFTER = 60  # examples that the trainer has
_BAD_FILE = 5  # read by one worker first, some time after the start
_SILENCE_MS, _STUCK_S = 1000, 0.8
_LIMIT_S = 120.0
_SAVE_EVERY = 5
_OUT_OF_MEMORY_BYTES = 2**40


@dataclasses.dataclass(frozen=True)
class Mode:
    """A sharding policy, and whether each example must come exactly once."""

    policy: ShardingPolicy
    is_exact: bool = False

    def __str__(self) -> str:
        return self.policy.name + (", exactly once" if self.is_exact else "")


MODES = (
    Mode(ShardingPolicy.OFF),
    Mode(ShardingPolicy.DYNAMIC),
    Mode(ShardingPolicy.FILE),
    Mode(ShardingPolicy.DATA),
    Mode(ShardingPolicy.DYNAMIC, is_exact=True),
    Mode(ShardingPolicy.FILE, is_exact=True),
)


# What the parts run, each in a process of its own.


def _first_time(folder: Path, name: str) -> bool:
    """Returns True to the first process that asks."""
    try:
        (folder / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


class _File:
    """Examples of a file; reading one batch takes a while, and the faults of reading are here."""

    def __init__(self, folder: Path, fault: str, number: int) -> None:
        self._folder = folder
        self._fault = fault
        self._number = number

    def __iter__(self) -> Iterator[np.ndarray]:
        for batch in range(_BATCHES_PER_FILE):
            is_slow = self._fault == "worker slow" and os.getpid() == self._slow_pid()
            time.sleep(10 * _BATCH_S if is_slow else _BATCH_S)
            if (self._number, batch) == (_BAD_FILE, 3):
                self._fail_once()
            first = (self._number * _BATCHES_PER_FILE + batch) * _BATCH_SIZE
            yield np.arange(first, first + _BATCH_SIZE)

    def _slow_pid(self) -> int:
        return int((self._folder / "first_worker").read_text())

    def _fail_once(self) -> None:
        if self._fault == "worker stuck in a read" and _first_time(self._folder, "stuck"):
            time.sleep(_LIMIT_S)
        if self._fault == "worker out of memory, killed" and _first_time(self._folder, "memory"):
            os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does
        if self._fault == "worker out of memory, MemoryError":
            limits = resource.getrlimit(resource.RLIMIT_AS)
            resource.setrlimit(resource.RLIMIT_AS, (_OUT_OF_MEMORY_BYTES, limits[1]))
            try:
                bytearray(2 * _OUT_OF_MEMORY_BYTES)
            finally:
                resource.setrlimit(resource.RLIMIT_AS, limits)


def _open_files(folder: Path, fault: str, files: list[int]) -> Any:
    return sg.input.Dataset.from_generator(_read_files, [folder, fault, files])


def _read_files(folder: Path, fault: str, files: list[int]) -> Iterator[np.ndarray]:
    for number in files:
        yield from _File(folder, fault, number)


def _dispatcher(port: int, addresses: list[str]) -> None:
    config = DispatcherConfig(
        port=port, worker_timeout_ms=_SILENCE_MS, worker_addresses=addresses or None
    )
    DispatchServer(config).join()


def _worker(target: str, port: int) -> None:
    config = WorkerConfig(target, worker_address=f"127.0.0.1:{port}", port=port)
    WorkerServer(config).join()


def _trainer(target: str, folder: Path, mode: Mode, fault: str) -> None:
    """Notes the examples of each batch; its checkpoint is the position and the number of notes."""
    os.environ["STRATAGEM_STUCK_TIMEOUT_S"] = str(_STUCK_S)
    make = functools.partial(_open_files, folder, fault)
    dataset = sg.input.Dataset.from_files(list(range(_NUM_FILES)), make)
    distribute = sg.input.service.distribute(mode.policy, target, exactly_once=mode.is_exact)
    reader = dataset.apply(distribute).as_source().open(0)
    ledger, checkpoint = folder / "ledger", folder / "checkpoint"
    if checkpoint.exists():
        saved = json.loads(checkpoint.read_text())
        os.truncate(ledger, saved["size"])  # training since then is repeated
        reader.restore(saved["position"])
    try:
        with warnings.catch_warnings(), ledger.open("a") as notes:
            warnings.simplefilter("ignore")
            for number, batch in enumerate(reader, 1):
                time.sleep(_STEP_S)
                notes.write("".join(f"{example}\n" for example in batch))
                notes.flush()
                if number % _SAVE_EVERY == 0:
                    new = folder / "new"
                    new.write_text(json.dumps({"size": notes.tell(), "position": reader.state()}))
                    new.replace(checkpoint)
    except sg.errors.PoisonExampleError as error:
        (folder / "error").write_text(str(error))


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


class ServiceProcesses:
    """A dispatcher and workers in processes; each can be killed, and started again."""

    def __init__(self, is_listed: bool = False) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__name__])
        self._ports = [_free_port() for _ in range(3)]
        self.target = f"127.0.0.1:{self._ports[0]}"
        self._listed = [f"127.0.0.1:{port}" for port in self._ports[1:]] if is_listed else []
        self._all: list[Any] = []
        self.workers: list[Any] = []
        self.start_dispatcher()

    def _start(self, run: Callable[..., None], *arguments: Any) -> Any:
        process = self._context.Process(target=run, args=arguments, daemon=True)
        process.start()
        self._all.append(process)
        return process

    def start_dispatcher(self) -> None:
        self.dispatcher = self._start(_dispatcher, self._ports[0], self._listed)

    def start_worker(self, place: int) -> None:
        worker = self._start(_worker, self.target, self._ports[1 + place])
        self.workers[place : place + 1] = [worker]

    def kill_worker(self, place: int) -> None:
        self.workers[place].kill()
        self.workers[place].join()

    def kill_dispatcher(self) -> None:
        self.dispatcher.kill()
        self.dispatcher.join()

    def wait_for_workers(self) -> None:
        with BookClient(self.target) as book:
            until(
                lambda: (
                    sum(one is not None for one in book.ask("readers").fields["readers"])
                    == len(self.workers)
                )
            )

    def close(self) -> None:
        for process in self._all:
            process.kill()
            process.join()


class _Parts(ServiceProcesses):
    """The processes of a run."""

    def __init__(self, folder: Path, mode: Mode, fault: str) -> None:
        super().__init__(mode.policy >= ShardingPolicy.FILE)
        self.folder, self._mode, self._fault = folder, mode, fault
        self.start_worker(0)
        (folder / "first_worker").write_text(str(self.workers[0].pid))
        if fault != "worker joins late":
            self.start_worker(1)
        self.wait_for_workers()
        self.start_trainer()

    def start_trainer(self) -> None:
        self.trainer = self._start(_trainer, self.target, self.folder, self._mode, self._fault)

    def wait_for_examples(self, count: int) -> None:
        ledger, end_s = self.folder / "ledger", time.monotonic() + _LIMIT_S
        while not ledger.exists() or ledger.read_text().count("\n") < count:
            assert time.monotonic() < end_s, "the trainer got no examples"
            assert self.trainer.is_alive(), f"the trainer ended with {self.trainer.exitcode}"
            time.sleep(0.01)


def _kill_worker(parts: _Parts) -> None:
    parts.kill_worker(0)
    parts.start_worker(0)


def _stop_worker(parts: _Parts) -> None:
    os.kill(parts.workers[0].pid, signal.SIGSTOP)
    time.sleep(3 * _SILENCE_MS / 1000)
    os.kill(parts.workers[0].pid, signal.SIGCONT)


def _stop_worker_for_good(parts: _Parts) -> None:
    os.kill(parts.workers[0].pid, signal.SIGSTOP)


def _restart_dispatcher(parts: _Parts) -> None:
    parts.kill_dispatcher()
    parts.start_dispatcher()


def _kill_trainer(parts: _Parts) -> None:
    parts.trainer.kill()
    parts.trainer.join()
    parts.start_trainer()


def _add_worker(parts: _Parts) -> None:
    parts.start_worker(1)


def _nothing(parts: _Parts) -> None:
    pass


FAULTS: dict[str, Callable[[_Parts], None]] = {
    "none": _nothing,
    "worker killed, replaced": _kill_worker,
    "worker stopped for 3 s": _stop_worker,
    "worker stopped for good": _stop_worker_for_good,
    "worker stuck in a read": _nothing,
    "worker slow": _nothing,
    "worker out of memory, killed": _nothing,
    "worker out of memory, MemoryError": _nothing,
    "worker joins late": _add_worker,
    "address book killed": ServiceProcesses.kill_dispatcher,
    "address book killed, back": _restart_dispatcher,
    "trainer killed, resumed": _kill_trainer,
}
"""What is done once the trainer has some examples; faults of reading are in the data."""


def count_visits(folder: Path, mode: Mode, fault: str) -> tuple[dict[int, int], str | None]:
    """Returns how many examples were visited how often, and the error that ended the run."""
    parts = _Parts(folder, mode, fault)
    try:
        parts.wait_for_examples(_HURT_AFTER)
        FAULTS[fault](parts)
        parts.trainer.join(_LIMIT_S)
        assert parts.trainer.exitcode == 0, f"the trainer ended with {parts.trainer.exitcode}"
    finally:
        parts.close()
    visits = collections.Counter(map(int, (folder / "ledger").read_text().split()))
    counts = collections.Counter(visits[example] for example in range(NUM_EXAMPLES))
    assert set(visits) <= set(range(NUM_EXAMPLES))
    error = folder / "error"
    return dict(counts), error.read_text() if error.exists() else None
