"""Lengths and rows of data and numbers of steps, which must be equal in all processes of `fit`.

Each process reads the same arrays and uses its part of each batch. With another array, such as a
part of its own, most of the data would never be read.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Mapping, Sequence, Sized
from typing import Any

import jax
import keras
import numpy as np

from stratagem.input.device_rows import is_on_accelerator
from stratagem.keras.training.dataset_adapter import DatasetAdapter
from stratagem.messages import explain

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
_ARRAYS = ("x", "y", "sample_weight", "validation_data")
_NUM_ROWS, _MOST_OF_A_ROW = 16, 65_536
_LIBRARIES = ("pandas", "tensorflow", "torch")
_FIX = (
    "pass the same arguments everywhere. If each worker reads its own data, pass "
    "strategy.distribute_datasets_from_function(...), or a dataset with AutoShardPolicy.OFF."
)
_EXPECTED = (
    "the same call with the same data on every worker, which takes its own part of each batch."
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
                    expected=_EXPECTED,
                    fix=_FIX,
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


def data_rows(arguments: Mapping[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """Returns a number for each of some rows of the arrays among the arguments of a call."""
    found: dict[str, np.ndarray[Any, Any]] = {}
    for name in _ARRAYS:
        data = arguments.get(name)
        if isinstance(data, DatasetAdapter):
            data = data.arrays_of_all
        for path, leaf in keras.tree.flatten_with_path(data):
            with contextlib.suppress(Exception):  # of another library; Keras reports what is wrong
                if (numbers := _numbers(leaf)) is not None:
                    found[name + "".join(f"[{key!r}]" for key in path)] = numbers
    return found


def require_equal_rows(
    of_processes: Sequence[dict[str, np.ndarray[Any, Any]]], labels: Sequence[str]
) -> None:
    """Raises ValueError, with the first row that differs, if a process has other arrays."""
    first, *others = of_processes
    for label, other in zip(labels[1:], others, strict=True):
        for name in [name for name in first if name in other]:
            mine, theirs = first[name], other[name]
            if mine.shape != theirs.shape:
                continue  # of other lengths, which Keras or the lengths of all tell
            # Rows may be computed by unlike processors.
            known = np.abs(mine[1][np.isfinite(mine[1])])
            least = 1e-4 * float(np.median(known)) if len(known) else 0.0
            are_close = np.isclose(mine[1], theirs[1], rtol=1e-3, atol=least, equal_nan=True)
            if not are_close.all():
                row = int(mine[0][np.argmin(are_close)])
                raise ValueError(
                    explain(
                        f"The workers differ in the values of {name}: row {row} is another on "
                        f"{label} than on {labels[0]}.",
                        expected=_EXPECTED,
                        fix=_FIX,
                        code="SG507",
                    )
                )


def _numbers(leaf: Any) -> np.ndarray[Any, Any] | None:
    """Returns the places of some rows of an array, and a number of each; None for other data."""
    is_known = isinstance(leaf, np.ndarray | jax.Array)
    if not is_known and type(leaf).__module__.partition(".")[0] not in _LIBRARIES:
        return None
    if (
        not leaf.shape
        or not leaf.shape[0]
        or (isinstance(leaf, jax.Array) and not leaf.is_fully_addressable)
    ):
        return None
    places = np.unique(np.linspace(0, leaf.shape[0] - 1, _NUM_ROWS).astype(int))
    if is_on_accelerator(leaf):
        rows = np.asarray(leaf[places])  # not the whole array
    else:
        leaf = np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf
        rows = [np.asarray(leaf[place : place + 1]) for place in places]
    numbers = [_number(np.reshape(row, -1)[:_MOST_OF_A_ROW]) for row in rows]
    return None if None in numbers else np.array([places, numbers], "float64")


def _number(row: np.ndarray[Any, Any]) -> float | None:
    if row.dtype.kind in "SU":
        return float(zlib.crc32(row.tobytes()))
    if row.dtype.kind not in "biufcV":
        return None
    values = np.abs(row) if row.dtype.kind == "c" else row.astype("float64")
    return float(values @ np.linspace(1, 2, len(values)))
