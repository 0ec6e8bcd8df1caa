"""Sides that take a first step, and the caches that each finds."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from benchmarks.cases import Place, Side, jax_side, tensorflow_side
from benchmarks.workers.protocol import WorkerOptions

__all__ = ["HEAVY", "LIGHT", "PEERS", "REFERENCE", "SMALLEST", "FirstStepSide", "first_step_sides"]

HEAVY, LIGHT = ("bert", "gpt2", "small_resnet50"), "mlp"
REFERENCE = "Keras on JAX"
_ONE_DEVICE, _TWO_DEVICES = "Stratagem, 1 device", "Stratagem, 2 devices"
SMALLEST = _ONE_DEVICE
_DATA_PARALLEL = "Keras DataParallel, 2 devices"
PEERS = {
    _ONE_DEVICE: REFERENCE,
    _TWO_DEVICES: _DATA_PARALLEL,
    f"{_ONE_DEVICE}, warm": f"{REFERENCE}, warm",
}
_MAX_RATIO, _MAX_WARM_RATIO = 1.15, 0.5
_ONE, _TWO = Place("cpu", 1), Place("cpu", 2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FirstStepSide:
    """A side with an empty persistent cache, or with one that an earlier run has filled.

    Args:
        side: the worker that trains.
        is_warm: whether the cache is filled.
        wanted: the largest ratio of its first step to that of plain Keras, cold.
        num_rounds: the most rounds it takes part in; None for all.
    """

    side: Side
    is_warm: bool = False
    wanted: float | None = None
    num_rounds: int | None = None

    @property
    def name(self) -> str:
        return f"{self.side.name}, warm" if self.is_warm else self.side.name

    def variables(self, cache: Path) -> dict[str, str]:
        """Returns variables of the environment that make the side use a cache, or none."""
        # An installed package has its bytecode; the source tree gets it on the first run.
        common = {"PYTHONDONTWRITEBYTECODE": "", "TF_CONFIG": ""}
        if self.side.options.compiled:
            return {**common, "TORCHINDUCTOR_CACHE_DIR": str(cache)}
        if not self.is_warm:
            return {**common, "JAX_ENABLE_COMPILATION_CACHE": "false"}
        common["JAX_ENABLE_COMPILATION_CACHE"] = "true"
        if self.side.name.startswith("Stratagem"):  # its own cache, with its own defaults
            return {**common, "JAX_COMPILATION_CACHE_DIR": "", "STRATAGEM_CACHE_DIR": str(cache)}
        return {
            **common,
            "JAX_COMPILATION_CACHE_DIR": str(cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }


def first_step_sides(workload: str, *, has_slow: bool = True) -> Sequence[FirstStepSide]:
    """Returns the sides of a workload, with those that take a minute if `has_slow`.

    Plain Keras runs in our environment: with TensorFlow installed beside it, it imports it.
    """
    ours = [
        jax_side(_ONE_DEVICE, "stratagem_fit", workload, _ONE, steps_per_epoch=1),
        jax_side(_TWO_DEVICES, "stratagem_fit", workload, _TWO, steps_per_epoch=1),
    ]
    keras = jax_side(REFERENCE, "keras_fit", workload, _ONE, steps_per_epoch=1)
    data_parallel = jax_side(_DATA_PARALLEL, "keras_fit", workload, _TWO, steps_per_epoch=1)
    tensorflow = tensorflow_side("Keras on TensorFlow", "tensorflow_fit", workload, _ONE, 1)
    options = dataclasses.replace(tensorflow.options, steps_per_epoch=1)
    tensorflow = dataclasses.replace(tensorflow, options=options)
    torch = Side(
        name="torch.compile",
        module="benchmarks.workers.torch_ddp",
        options=WorkerOptions(workload=workload, steps_per_epoch=1, compiled=True),
        environment="peers",
    )
    slow = []
    if has_slow or workload == LIGHT:
        slow.append(FirstStepSide(side=tensorflow))
    if has_slow:
        # A run takes a minute, and its ratio is far from every bound.
        slow.append(FirstStepSide(side=torch, num_rounds=1))
    return [
        *(FirstStepSide(side=side, wanted=_MAX_RATIO) for side in ours),
        FirstStepSide(side=keras),
        FirstStepSide(side=data_parallel),
        *slow,
        *(FirstStepSide(side=side, is_warm=True, wanted=_MAX_WARM_RATIO) for side in ours),
        FirstStepSide(side=keras, is_warm=True),
    ]
