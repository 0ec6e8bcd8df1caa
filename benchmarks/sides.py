"""What is compared: sides, which are processes, and the tasks of a case that they take turns at."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.workloads import WORKLOADS

ROOT = Path(__file__).parents[1]

# What a shell may have set and one side would follow and another not.
_OWN_VARIABLES = (
    "KERAS_BACKEND",
    "NPROC",
    "OMP_NUM_THREADS",
    "XLA_FLAGS",
    "JAX_NUM_CPU_DEVICES",
    "STRATAGEM_RUN_EAGERLY",
    "STRATAGEM_KEEP_FREED_MEMORY",
    "GLIBC_TUNABLES",
)

# A loop by hand keeps freed memory as we do: else malloc and not the loops would be compared.
_KEPT_MEMORY = ":".join(
    f"glibc.malloc.{name}={value}"
    for name, value in {
        "arena_max": 1,
        "mmap_max": 0,
        "trim_threshold": 2**62,
        "top_pad": 2**26,
        "hugetlb": 1,
    }.items()
)

# As many as `stratagem.environment.size_cpu_thread_pool` gives XLA:CPU: with a smaller pool JAX
# deadlocks in collectives between virtual CPU devices, and with another one the pools and not the
# frameworks would be compared.
_POOL_THREADS_PER_DEVICE = 4

# What all processes of a side answer to one question.
Answers = Sequence[Mapping[str, Any]]
Figure = Callable[[int, Answers], float]


@dataclasses.dataclass(frozen=True)
class Place:
    """Devices of one kind in one machine."""

    platform: str
    num_devices: int

    def __str__(self) -> str:
        return f"{self.num_devices} {self.platform.upper()}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Side:
    """One of the things that are compared: a worker's program and what it is started with."""

    name: str  # in tables
    module: str  # the program
    # its argument, as JSON.
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    # of its environment, beside those of the shell.
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    environment: str = "ours"  # "ours", "peers" or "nightly": which packages it needs
    # returns variables of each process, where they are several.
    spread: Callable[[], Sequence[Mapping[str, str]]] = lambda: [{}]
    folder: Path = ROOT  # tree of files that it runs from

    def replaced(self, **options: Any) -> Side:
        """Returns the side with other options."""
        return dataclasses.replace(self, options={**self.options, **options})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """A piece of work that the sides of a case do in turns."""

    name: str = ""  # in tables, behind that of the case
    question: Callable[[int], dict[str, Any]]  # that asks for an amount of work
    # how much a second, of an amount and the answers to it; a row of the table each.
    figures: Mapping[str, Figure]
    unit: str = "steps/s"  # of the figures
    least: int = 1  # the smallest amount that can be timed
    # True if all sides do the same amount in a round, because a question has a price of its own,
    # such as a call of `fit`; False if each does as much as fills the round.
    is_even: bool = True
    is_timed: bool = True  # False if the amount is always `least`
    # figures beside the speed, of what each process answered first and in a round.
    details: Callable[[Answers], dict[str, Any]] = lambda answers: {}


EPOCHS = Task(
    question=lambda amount: {"epochs": amount},
    figures={
        "": lambda amount, answers: answers[0]["steps"] / max(one["seconds"] for one in answers)
    },
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Ours beside one or more references, on the same work."""

    name: str  # in tables
    ours: Side  # the side that is compared
    references: tuple[Side, ...]  # what it is compared with
    tasks: tuple[Task, ...] = (EPOCHS,)  # what they do
    is_main: bool = True  # whether it is measured when all benchmarks run, too
    is_fresh: bool = False  # whether each round has new processes
    num_dropped: int = 0  # rounds that are not counted, before the others
    prepared: Mapping[str, Any] | None = None  # a question to all sides before the first task
    wanted: float | None = None  # the least ratio; None where nobody asked for one


@dataclasses.dataclass(frozen=True)
class Environments:
    """The interpreters that sides run in."""

    ours: Path = Path(sys.executable)  # the one with Stratagem
    peers: Path = ROOT / ".venv-peers" / "bin" / "python"  # the one with the other frameworks
    # the one with the nightly build of Keras.
    nightly: Path = ROOT / "build" / "keras-nightly" / "bin" / "python"

    def interpreter(self, side: Side) -> Path:
        return getattr(self, side.environment)

    def why_not(self, side: Side) -> str | None:
        """Says why a side cannot run here; None if it can."""
        if side.environment == "ours" or self.interpreter(side).is_file():
            return None
        how = {
            "peers": "`make .venv-peers/.complete` makes it",
            "nightly": "docs/performance.md says how to make it",
        }[side.environment]
        return f"{self.interpreter(side)} is not there, {how}"

    def variables(self, side: Side) -> dict[str, str]:
        """Returns the environment of a side's processes: that of the shell, and its own files."""
        shell = {name: text for name, text in os.environ.items() if name not in _OWN_VARIABLES}
        paths = [str(side.folder / "src"), str(side.folder)]
        if side.environment == "ours" and "PYTHONPATH" in shell:
            paths.append(shell["PYTHONPATH"])
        return {**shell, "PYTHONPATH": os.pathsep.join(paths), **side.variables}


def jax_side(name: str, module: str, workload: str, place: Place, **options: Any) -> Side:
    """Returns a side that trains on JAX; options are those of `WorkerOptions`."""
    assert workload in WORKLOADS
    variables = {"KERAS_BACKEND": "jax"}
    if place.platform == "gpu":
        # All sides of a case hold memory of the same device at the same time.
        variables["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    else:
        variables["JAX_PLATFORMS"] = "cpu"
        if module.startswith("jax_"):
            variables["GLIBC_TUNABLES"] = _KEPT_MEMORY
        if place.num_devices > 1:
            variables["NPROC"] = str(_POOL_THREADS_PER_DEVICE * place.num_devices)
    return worker_side(name, module, variables=variables, **_trained(workload, place), **options)


def tensorflow_side(name: str, kind: str, workload: str, place: Place, **options: Any) -> Side:
    """Returns a side that trains on TensorFlow, which has only the CPU, by "fit" or a "loop"."""
    variables = {"KERAS_BACKEND": "tensorflow", **QUIET_TENSORFLOW}
    options |= _trained(workload, place)
    return worker_side(name, "tensorflow_training", "peers", variables, kind=kind, **options)


QUIET_TENSORFLOW = {"CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "2"}


def worker_side(
    name: str,
    module: str,
    environment: str = "ours",
    variables: Mapping[str, str] | None = None,
    **options: Any,
) -> Side:
    """Returns a side whose program is in `benchmarks.workers`, on the CPU by default."""
    if variables is None:
        on_jax = {"KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"}
        variables = on_jax if environment in ("ours", "nightly") else {}
    return Side(
        name=name,
        module=f"benchmarks.workers.{module}",
        options=options,
        variables=variables,
        environment=environment,
    )


def _trained(workload: str, place: Place) -> dict[str, Any]:
    """Returns options without those that are as usual: an older revision may not know them."""
    options: dict[str, Any] = {"workload": workload}
    if place != Place("cpu", 1):
        options |= {"platform": place.platform, "num_devices": place.num_devices}
    return options
