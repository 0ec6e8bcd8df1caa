"""Work that starves a device, the numbers of workers, and the sides that make the batches."""

from __future__ import annotations

import dataclasses
from typing import Any

from benchmarks.cases import Side, whole_side

__all__ = ["SIDES", "Starved", "by_name", "can_run"]

_VARIABLES = {
    "CUDA_VISIBLE_DEVICES": "",
    "JAX_PLATFORMS": "cpu",
    "KERAS_BACKEND": "jax",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "TOKENIZERS_PARALLELISM": "false",
}


def _side(name: str, module: str, environment: str) -> Side:
    return dataclasses.replace(whole_side(name, module, environment), variables=_VARIABLES)


SIDES = (
    # In the environment of TensorFlow, so that both have the same interpreter and libraries.
    _side("Stratagem", "stratagem_input_service", "peers"),
    _side("tf.data service", "tensorflow_input_service", "peers"),
    _side("Ray Data", "ray_data_input", "peers"),
)


@dataclasses.dataclass(frozen=True)
class Starved:
    """One kind of work.

    Args:
        work: one of `input_work.WORK`.
        title: in tables and plots.
        step_s: seconds of a step of the device: a part of what a batch takes.
        num_workers: how many are measured; 0 is the loop of the trainer.
    """

    work: str
    title: str
    step_s: float
    num_workers: tuple[int, ...]

    def arguments(self, num_workers: int) -> dict[str, Any]:
        """Returns the options of a side's program."""
        return {"work": self.work, "num_workers": num_workers, "step_s": self.step_s}


# Batches take 38, 29 and 165 ms on the machine of the figures. Two cores cannot make more than two
# of the first kinds at a time; workers that wait need no core.
_WORK = (
    Starved("jpeg", "JPEG: decode, crop, flip", 0.01, (0, 1, 2, 4)),
    Starved("tokens", "Tokens: byte pairs", 0.008, (0, 1, 2, 4)),
    Starved("objects", "Objects: 160 ms away", 0.02, (0, 1, 2, 4, 8)),
)


def by_name(only: str, *, is_smallest: bool) -> list[Starved]:
    """Returns what is measured: all, or what the name asks for."""
    chosen = [one for one in _WORK if only in one.title]
    if not is_smallest:
        return chosen
    return [dataclasses.replace(one, num_workers=(0, 1)) for one in chosen]


def can_run(side: Side, num_workers: int) -> bool:
    """Returns False for Ray Data without a worker: it has no such way."""
    return num_workers > 0 or side.name != "Ray Data"
