"""Lengths of data and numbers of steps, which must be equal on all processes of a `fit` call."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence, Sized
from typing import Any

import keras

from stratagem.keras.training.dataset_adapter import DatasetAdapter
from stratagem.messages import explain

__all__ = ["data_lengths", "require_equal_lengths"]

_DATA = ("x", "validation_data")
_NUMBERS = (
    "batch_size",
    "epochs",
    "initial_epoch",
    "steps",
    "steps_per_epoch",
    "validation_batch_size",
    "validation_steps",
)


def data_lengths(arguments: Mapping[str, Any]) -> dict[str, int]:
    """Returns the known lengths and numbers among the arguments of a call, by their names."""
    found = {name: arguments.get(name) for name in _NUMBERS}
    found |= {f"the length of {name}": _length(arguments.get(name)) for name in _DATA}
    return {name: number for name, number in found.items() if isinstance(number, int)}


def require_equal_lengths(of_processes: Sequence[dict[str, int]], labels: Sequence[str]) -> None:
    """Raises ValueError, with the number of each process, if a known one differs."""
    for name in dict.fromkeys(name for lengths in of_processes for name in lengths):
        numbers = [lengths.get(name) for lengths in of_processes]
        if len({number for number in numbers if number is not None}) > 1:
            each = ", ".join(
                f"{'unknown' if number is None else number} on {label}"
                for label, number in zip(labels, numbers, strict=True)
            )
            raise ValueError(
                explain(
                    f"The workers differ in {name}: {each}.",
                    expected="the same call with the same data on every worker, which takes its "
                    "own part of each batch.",
                    fix="pass the same arguments everywhere. If each worker reads its own data, "
                    "pass strategy.distribute_datasets_from_function(...), or a dataset with "
                    "AutoShardPolicy.OFF.",
                    code="SG507",
                )
            )


def _length(data: object) -> int | None:
    """Returns the number of examples of arrays, or of batches of a dataset; None if unknown."""
    if isinstance(data, DatasetAdapter):
        return data.num_batches
    shapes: list[tuple[int, ...]] = [
        getattr(leaf, "shape", ()) for leaf in keras.tree.flatten(data)
    ]
    if shapes and all(shapes):
        return int(shapes[0][0])
    with contextlib.suppress(TypeError):  # of unknown length
        return len(data) if isinstance(data, Sized) else None
    return None
