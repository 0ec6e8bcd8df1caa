"""`first_step`: time to the end of the first step, in fresh processes, and to start processes."""

from __future__ import annotations

import dataclasses
import functools
import json
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.report import make_row_of_times
from benchmarks.runner import Run, WorkerError, in_turns
from benchmarks.sides import ROOT, Case, Place, Side, Task, jax_side, tensorflow_side, worker_side
from benchmarks.workloads import WORKLOADS

_LIGHT, _HEAVY = "mlp", ("gpt2", "small_resnet50")
# A round of a heavy workload takes minutes; short ones vary more.
_MAX_ROUNDS, _LIGHT_ROUNDS_PER_ROUND = 2, 3
# Least ratios: 1.15 times the first step of plain Keras, and the start of one process 1.3 times.
_WANTED, _WANTED_WORKERS = 1 / 1.15, 1 / 1.3
_NUM_WORKERS, _END_LIMIT_S = 2, 30.0
_ONE, _TWO = Place("cpu", 1), Place("cpu", 2)

# An installed package has its bytecode; the source tree gets it on the first run.
_COMMON = {"PYTHONDONTWRITEBYTECODE": "", "TF_CONFIG": ""}
_COLD = {**_COMMON, "JAX_ENABLE_COMPILATION_CACHE": "false"}


def first_step(run: Run) -> None:
    """Measures workloads whose title is asked for, and "two workers".

    If nothing is asked for, one of the heavy workloads, in fewer rounds, without TensorFlow.
    """
    num_heavy = min(run.effort.num_rounds, _MAX_ROUNDS) if run.only else 1
    num_light = num_heavy * _LIGHT_ROUNDS_PER_ROUND if run.only else 2
    if run.effort.is_smallest:
        num_heavy = num_light = 1
    heavy = () if run.effort.is_brief or run.effort.is_smallest else _HEAVY
    for workload in (_LIGHT, *(heavy if run.only else heavy[:1])):
        if run.wants(WORKLOADS[workload].title):
            with tempfile.TemporaryDirectory() as folder:
                cases = _cases(workload, Path(folder), has_slow=bool(run.only))
                for case in cases[:1] if run.effort.is_smallest else cases:
                    run.compare(case, num_light if workload == _LIGHT else num_heavy)
    if run.wants("two workers"):
        with run.failing("two workers"), run.console.status("two workers"):
            _time_workers(run, num_light)


def _cases(workload: str, folder: Path, *, has_slow: bool) -> list[Case]:
    """Returns a case on one device, one on two, and one with a cache that an earlier run filled.

    The first round of each light workload is dropped: it reads files that later ones find read.
    """
    title = WORKLOADS[workload].title

    def side(name: str, module: str, place: Place, variables: Mapping[str, str]) -> Side:
        return _with(variables, jax_side(name, module, workload, place))

    def ours(place: Place, variables: Mapping[str, str]) -> Side:
        return side("Stratagem", "stratagem_fit", place, variables)

    peers = [side("Keras on JAX", "keras_fit", _ONE, _COLD)]
    if has_slow or workload == _LIGHT:
        tensorflow = tensorflow_side("Keras on TensorFlow", "fit", workload, _ONE)
        peers.append(_with(_COMMON, tensorflow))
    warm = {**_COMMON, "JAX_ENABLE_COMPILATION_CACHE": "true"}
    # Our own cache with its defaults, and JAX's of everything.
    ours_warm = {"JAX_COMPILATION_CACHE_DIR": "", "STRATAGEM_CACHE_DIR": str(folder / "ours")}
    keras_warm = {
        "JAX_COMPILATION_CACHE_DIR": str(folder / "keras"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    several = side("Keras DataParallel", "keras_fit", _TWO, _COLD)
    again = side("Keras on JAX, warm", "keras_fit", _ONE, {**warm, **keras_warm})
    sides = {
        "1 device": (ours(_ONE, _COLD), tuple(peers)),
        "2 devices": (ours(_TWO, _COLD), (several,)),
        "1 device, warm": (ours(_ONE, {**warm, **ours_warm}), (again,)),
    }
    task = Task(
        question=lambda amount: {"epochs": 1},
        figures={
            "from the call of fit": lambda amount, answers: 1 / answers[0]["seconds"],
            "from the start": lambda amount, answers: 1 / answers[0]["from_start_s"],
        },
        unit="1/s",
        # Processor time, without that of other processes, hardly depends on what else runs.
        details=lambda answers: {"CPU, s": answers[0]["cpu_s"]},
    )
    return [
        Case(
            name=f"{title}, {name}",
            ours=own,
            references=references,
            tasks=(task,),
            is_fresh=True,
            num_dropped=int(workload == _LIGHT or "warm" in name),
            wanted=_WANTED,
        )
        for name, (own, references) in sides.items()
    ]


def _with(variables: Mapping[str, str], side: Side) -> Side:
    side = side.replaced(steps_per_epoch=1)
    return dataclasses.replace(side, variables={**side.variables, **variables})


def _time_workers(run: Run, num_rounds: int) -> None:
    """Measures from the start of the launcher to the end of the last worker's first step."""
    module = ["-m", "benchmarks.workers.stratagem_fit"]
    launch = [str(run.environments.ours.with_name("stratagem")), "launch"]
    several = [*launch, "--workers", str(_NUM_WORKERS), *module]
    alone = [str(run.environments.ours), *module]
    measures = [functools.partial(_run_to_step, command, run) for command in (several, alone)]
    two, one = in_turns(measures, num_rounds, num_dropped=1)
    title = f"MLP, {_NUM_WORKERS} workers by `stratagem launch`"
    row = make_row_of_times(title, two, one, "one process")
    run.rows.append(row | {"has_peer": False, "wanted": _WANTED_WORKERS})


def _run_to_step(command: list[str], run: Run) -> float:
    side = worker_side("", "", variables={"KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu", **_COLD})
    options = {"workload": _LIGHT, "steps_per_epoch": 1}
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as output:
        begin_s = time.monotonic()
        process = subprocess.Popen(
            [*command, folder, json.dumps(options)],
            cwd=ROOT,
            env=run.environments.variables(side),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            code: Any = process.wait(run.effort.answer_limit_s)
        except subprocess.TimeoutExpired:
            process.terminate()  # a launcher ends its workers
            code = f"none within {run.effort.answer_limit_s:g} s"
            process.wait(_END_LIMIT_S)
        if code != 0:
            output.seek(0)
            tail = output.read()[-3000:].decode(errors="replace")
            raise WorkerError(f"Exit code of {command}: {code}. The end of its output:\n{tail}")
        return max(float(path.read_text()) for path in Path(folder).iterdir()) - begin_s
