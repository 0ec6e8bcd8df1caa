"""Starts of processes by themselves: imports, and two workers beside one process."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.cases import Environments, whole_side
from benchmarks.first_step.cases import FirstStepSide
from benchmarks.first_step.report import Start
from benchmarks.runner import Effort, order_of_round
from benchmarks.worker_process import WorkerError, WorkerProcess
from benchmarks.workers.protocol import ANSWER_PREFIX, WorkerOptions

__all__ = ["import_program", "time_imports", "time_workers"]

_REPOSITORY = Path(__file__).parents[2]
_MODULE = "benchmarks.workers.first_step_of_worker"
_NUM_WORKERS = 2
_END_LIMIT_S = 30.0
_MAX_WORKERS_RATIO, _MAX_IMPORT_S, _MAX_IMPORT_RATIO = 1.3, 0.1, 1.0


def time_imports(num_rounds: int, environments: Environments, effort: Effort) -> list[Start]:
    """Measures imports in fresh interpreters, without the start of the interpreter.

    Raises:
        WorkerError: an import failed.
    """

    def once(before: str, module: str) -> float:
        command = [str(environments.ours), "-c", import_program(before, module)]
        with WorkerProcess(f"import {module}", command, _variables(environments)) as worker:
            return worker.read_answer(effort.start_limit_s)["seconds"]

    ours, after, alone = _in_turns(
        num_rounds,
        lambda: once("", "stratagem"),
        lambda: once("import stratagem", "keras"),
        lambda: once("", "keras"),
    )
    return [
        Start(name="import stratagem", seconds=ours, wanted_s=_MAX_IMPORT_S),
        Start(
            name="import keras after stratagem",
            seconds=after,
            reference_name="import keras",
            reference_s=alone,
            wanted=_MAX_IMPORT_RATIO,
        ),
    ]


def import_program(before: str, module: str) -> str:
    """Returns a program that times an import, and itself imports nothing that it could share."""
    return (
        f"import time\n{before}\nstart_s = time.perf_counter()\nimport {module}\n"
        "seconds = time.perf_counter() - start_s\n"
        f"print('{ANSWER_PREFIX}{{\"seconds\": %f}}' % seconds)"
    )


def time_workers(num_rounds: int, environments: Environments, effort: Effort) -> list[Start]:
    """Measures from the start of the launcher to the end of the last worker's first step.

    Raises:
        WorkerError: a worker failed, or did not end in time.
    """
    module = ["-m", _MODULE]
    launch = [str(environments.ours.with_name("stratagem")), "launch"]
    two, one = _in_turns(
        num_rounds,
        lambda: _run([*launch, "--workers", str(_NUM_WORKERS), *module], environments, effort),
        lambda: _run([str(environments.ours), *module], environments, effort),
    )
    return [
        Start(
            name=f"MLP, {_NUM_WORKERS} workers by `stratagem launch`",
            seconds=two,
            reference_name="one process",
            reference_s=one,
            wanted=_MAX_WORKERS_RATIO,
        )
    ]


def _in_turns(num_rounds: int, *measures: Callable[[], float]) -> list[list[float]]:
    """Calls each once in each round; the first round fills the machine's caches and is dropped."""
    found: list[list[float]] = [[] for _ in measures]
    for number in range(1 + num_rounds):
        for place in order_of_round(len(measures), number):
            seconds = measures[place]()
            if number:
                found[place].append(seconds)
    return found


def _run(command: list[str], environments: Environments, effort: Effort) -> float:
    options = WorkerOptions(workload="mlp", steps_per_epoch=1)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as output:
        begin_s = time.monotonic()
        process = subprocess.Popen(
            [*command, folder, json.dumps(dataclasses.asdict(options))],
            cwd=_REPOSITORY,
            env=_variables(environments),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            code: Any = process.wait(effort.answer_limit_s)
        except subprocess.TimeoutExpired:
            process.terminate()  # a launcher ends its workers
            code = f"none within {effort.answer_limit_s:g} s"
            process.wait(_END_LIMIT_S)
        if code != 0:
            output.seek(0)
            tail = output.read()[-3000:].decode(errors="replace")
            raise WorkerError(f"Exit code of {command}: {code}. The end of its output:\n{tail}")
        return max(float(path.read_text()) for path in Path(folder).iterdir()) - begin_s


def _variables(environments: Environments) -> dict[str, str]:
    one = FirstStepSide(side=whole_side("", ""))
    return {**environments.variables(one.side), **one.variables(Path())}
