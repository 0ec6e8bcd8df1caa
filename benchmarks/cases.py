"""What a benchmark compares: sides, cases, and the places where they run."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.workers.protocol import WorkerOptions
from benchmarks.workloads import WORKLOADS

__all__ = [
    "Case",
    "Environments",
    "Place",
    "Side",
    "jax_side",
    "tensorflow_side",
    "whole_side",
]

_ROOT = Path(__file__).parents[1]
_PEERS = _ROOT / ".venv-peers" / "bin" / "python"

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
_BY_HAND = "jax_"
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

# As many as stratagem.environment.size_cpu_thread_pool gives XLA:CPU: with a smaller pool JAX
# deadlocks in collectives between virtual CPU devices, and with another one the pools and not the
# frameworks would be compared.
_POOL_THREADS_PER_DEVICE = 4


@dataclasses.dataclass(frozen=True)
class Place:
    """Devices of one kind in one machine."""

    platform: str
    num_devices: int

    @classmethod
    def parse(cls, text: str) -> Place:
        """Reads "2" or "cpu:2" (that many CPU devices) and "gpu"."""
        platform, _, count = text.strip().rpartition(":")
        if not platform:
            platform, count = ("cpu", count) if count.isdecimal() else (count, "1")
        if platform not in ("cpu", "gpu") or not count.isdecimal() or not int(count):
            raise ValueError(
                f"{text!r} is no place to run. Expected: a number of CPU devices, or gpu. "
                'For example "1,2,gpu".'
            )
        return cls(platform, int(count))

    def __str__(self) -> str:
        return f"{self.num_devices} {self.platform.upper()}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Side:
    """One of the things that are compared: a worker and what it is started with.

    Args:
        name: in tables.
        module: the worker's program.
        options: what it trains.
        variables: of its environment, beside those of the shell.
        environment: "ours", "peers" or "tfra": which packages it needs.
    """

    name: str
    module: str
    options: WorkerOptions
    variables: dict[str, str] = dataclasses.field(default_factory=dict)
    environment: str = "ours"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Ours beside one or more references, on the same work.

    Args:
        name: in tables.
        ours: the side that is compared.
        references: what it is compared with.
        is_main: whether it is measured when all benchmarks run, too.
    """

    name: str
    ours: Side
    references: tuple[Side, ...]
    is_main: bool = True


@dataclasses.dataclass(frozen=True)
class Environments:
    """The interpreters that sides run in.

    Args:
        ours: the one with Stratagem.
        peers: the one with the other frameworks.
        tfra: the one with TensorFlow's recommenders-addons; docs/design/dependencies.md makes it.
    """

    ours: Path = Path(sys.executable)
    peers: Path = _PEERS
    tfra: Path = _ROOT / "build" / "tfra" / "bin" / "python"

    def interpreter(self, side: Side) -> Path:
        """Returns the interpreter that has a side's packages."""
        return getattr(self, side.environment)

    def why_not(self, side: Side) -> str | None:
        """Says why a side cannot run here; None if it can."""
        if side.environment == "ours" or self.interpreter(side).is_file():
            return None
        how = {
            "peers": "`make .venv-peers/.complete` makes it",
            "tfra": "docs/design/dependencies.md says how to make it",
        }[side.environment]
        return f"{self.interpreter(side)} is not there, {how}"

    def anywhere(self, side: Side) -> Side:
        """Returns a side of ours, in our own environment where the one it asks for is missing."""
        return side if self.why_not(side) is None else dataclasses.replace(side, environment="ours")

    def references(self, ours: Side, wanted: Sequence[Side]) -> list[Side]:
        """Returns the sides that can run here, for the smallest size; ours again if none can."""
        possible = [side for side in wanted if self.why_not(side) is None]
        return possible or [dataclasses.replace(ours, name=f"{ours.name}, again")]

    def command(self, side: Side) -> list[str]:
        options = json.dumps(dataclasses.asdict(side.options))
        return [str(self.interpreter(side)), "-m", side.module, options]

    def variables(self, side: Side) -> dict[str, str]:
        return {**self.shell_variables(), **side.variables}

    def shell_variables(self) -> dict[str, str]:
        """Returns the variables of the shell, without those that choose how a side runs."""
        return {name: text for name, text in os.environ.items() if name not in _OWN_VARIABLES}


def jax_side(
    name: str, module: str, workload: str, place: Place, steps_per_call: int = 1, **options: Any
) -> Side:
    """A side on JAX.

    Args:
        name: in tables.
        module: in `benchmarks.workers`.
        workload: key of `WORKLOADS`.
        place: where it trains.
        steps_per_call: `steps_per_execution`.
        **options: others of `WorkerOptions`.
    """
    assert workload in WORKLOADS
    variables = {"KERAS_BACKEND": "jax"}
    if place.platform == "cpu":
        variables["JAX_PLATFORMS"] = "cpu"
        if module.startswith(_BY_HAND):
            variables["GLIBC_TUNABLES"] = _KEPT_MEMORY
        if place.num_devices > 1:
            variables["NPROC"] = str(_POOL_THREADS_PER_DEVICE * place.num_devices)
    else:
        # All sides of a case hold memory of the same device at the same time.
        variables["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    return Side(
        name=name,
        module=f"benchmarks.workers.{module}",
        options=WorkerOptions(
            workload=workload,
            platform=place.platform,
            num_devices=place.num_devices,
            steps_per_call=steps_per_call,
            **options,
        ),
        variables=variables,
    )


def whole_side(name: str, module: str, environment: str = "ours") -> Side:
    """A side of a benchmark that tells its workers itself what to do, on the CPU.

    Args:
        name: in tables.
        module: in `benchmarks.workers`.
        environment: which installed packages it needs.
    """
    return Side(
        name=name,
        module=f"benchmarks.workers.{module}",
        options=WorkerOptions(workload=""),
        variables={"KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"} if environment == "ours" else {},
        environment=environment,
    )


def tensorflow_side(
    name: str, module: str, workload: str, place: Place, steps_per_call: int
) -> Side:
    """A side on TensorFlow, which has only the CPU.

    Args:
        name: in tables.
        module: in `benchmarks.workers`.
        workload: key of `WORKLOADS`.
        place: where it trains.
        steps_per_call: steps in one call of the host.
    """
    return Side(
        name=name,
        module=f"benchmarks.workers.{module}",
        options=WorkerOptions(
            workload=workload,
            platform=place.platform,
            num_devices=place.num_devices,
            steps_per_call=steps_per_call,
        ),
        variables={
            "KERAS_BACKEND": "tensorflow",
            "CUDA_VISIBLE_DEVICES": "",
            "TF_CPP_MIN_LOG_LEVEL": "2",
        },
        environment="peers",
    )
