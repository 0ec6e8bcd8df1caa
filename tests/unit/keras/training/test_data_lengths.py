"""Lengths that processes compare at the start of `fit`."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import stratagem as sg
from stratagem.input.distributed import DistributedDataset
from stratagem.keras.training.dataset_adapter import DatasetAdapter
from stratagem.keras.training.several_processes import (
    data_lengths,
    data_rows,
    require_equal_lengths,
    require_equal_rows,
)

LABELS = ("worker 0 (a:1)", "worker 1 (b:1)")


class _OfUnknownLength:
    def __len__(self) -> int:
        raise TypeError("unknown")


def _batches() -> DatasetAdapter:
    strategy = sg.MirroredStrategy(["cpu:0"])
    return DatasetAdapter(strategy.distribute_dataset([np.ones((2, 3))] * 5))


@pytest.mark.parametrize(
    ("data", "length"),
    [
        (np.ones((7, 2)), 7),
        ({"a": np.ones((6,)), "b": np.ones((6, 1))}, 6),
        (([np.ones((5, 2))], np.ones((5,))), 5),
        ([1.0, 2.0, 3.0], 3),
        (_batches, 5),
        (_OfUnknownLength(), None),
        (iter([]), None),
        (np.float32(1.0), None),
        (None, None),
    ],
)
def test_length_is_that_of_arrays_or_of_batches(data: Any, length: int | None) -> None:
    data = data() if callable(data) else data
    known = {} if length is None else {"the length of x": length}
    assert data_lengths({"x": data, "epochs": 3, "steps_per_epoch": None}) == {"epochs": 3} | known


def test_equal_and_unknown_lengths_pass() -> None:
    require_equal_lengths([{"epochs": 3, "steps": 2}, {"epochs": 3}], LABELS)


def test_error_names_the_length_on_each_worker() -> None:
    words = r"length of x: 64 on worker 0 \(a:1\), 80 on worker 1 \(b:1\)\.(?s:.)*AutoShardPolicy"
    with pytest.raises(ValueError, match=words):
        require_equal_lengths([{"the length of x": 64}, {"the length of x": 80}], LABELS)


_NUMBERS = np.random.default_rng(0).normal(size=(40, 3)).astype("float32")
# Two shards of each.
_SHARDS: dict[str, tuple[Any, Any]] = {
    "float32": (_NUMBERS[:20], _NUMBERS[20:]),
    "bfloat16": (jnp.bfloat16(_NUMBERS[:20]), jnp.bfloat16(_NUMBERS[20:])),
    "jax": (jnp.asarray(_NUMBERS[:20]), jnp.asarray(_NUMBERS[20:])),
    "complex": (_NUMBERS[:20] * 1j, _NUMBERS[20:] * 1j),
    "classes": (np.arange(20), np.arange(20)[::-1].copy()),
    "one-hot": (np.eye(20)[:10], np.eye(20)[10:]),
    "bytes": (np.frombuffer(b"abcd", "S1"), np.frombuffer(b"efgh", "S1")),
    "text": (np.array(["a", "b"]), np.array(["c", "d"])),
    "with nan": (np.where(_NUMBERS > 0, np.nan, _NUMBERS)[:20], _NUMBERS[20:]),
    "one row": (np.full((1, 2), 3.0), np.full((1, 2), 4.0)),
    "wide rows": (np.zeros((2, 500_000)), np.ones((2, 500_000))),
}


@pytest.mark.parametrize("name", ["x", "y", "sample_weight", "validation_data"])
@pytest.mark.parametrize(("mine", "theirs"), _SHARDS.values(), ids=_SHARDS)
def test_shards_of_equal_length_are_refused_by_name_and_row(mine, theirs, name) -> None:
    rows = [data_rows({name: {"a": part}}) for part in (mine, mine, theirs)]
    require_equal_rows(rows[:2], LABELS)
    words = rf"in the values of {name}\['a'\]: row \d+ is another on worker 2 than on worker 0"
    with pytest.raises(ValueError, match=rf"{words}\.(?s:.)*distribute_datasets_from_function"):
        require_equal_rows(rows, ["worker 0", "worker 1", "worker 2"])


@pytest.mark.parametrize(
    "data",
    [
        None,
        iter([]),
        [1.0, 2.0],
        np.float32(1.0),
        np.zeros((0, 3)),
        np.array([object(), None], object),
        np.array(["2024-01-01"], "datetime64[D]"),
        _OfUnknownLength(),
        lambda: iter([]),
    ],
    ids=[
        "none",
        "iterator",
        "list",
        "number",
        "no rows",
        "objects",
        "dates",
        "unknown length",
        "function",
    ],
)
def test_other_data_is_not_looked_at(data: Any) -> None:
    assert data_rows({"x": data}) == {}


@pytest.mark.parametrize("policy", [sg.AutoShardPolicy.AUTO, sg.AutoShardPolicy.OFF])
def test_arrays_of_a_dataset_are_looked_at_unless_they_are_of_one_process(policy) -> None:
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    context = sg.InputContext(num_input_pipelines=2, num_replicas_in_sync=2)
    dataset = DistributedDataset(
        strategy,
        sg.input.Dataset((_NUMBERS, _NUMBERS[:, 0]), batch_size=4).as_source(),
        is_global=True,
        options=sg.InputOptions(auto_shard_policy=policy),
        context=context,
    )
    names = ["x[0]", "x[1]"] if policy is sg.AutoShardPolicy.AUTO else []
    assert list(data_rows({"x": DatasetAdapter(dataset)})) == names
    own = strategy.distribute_datasets_from_function(lambda _: [_NUMBERS])
    assert data_rows({"x": DatasetAdapter(own)}) == {}


def test_values_of_other_processors_are_equal() -> None:
    """The last bits of what each process has computed may differ."""
    other = _NUMBERS * np.float32(1 + 1e-6)
    require_equal_rows([data_rows({"x": one}) for one in (_NUMBERS, other)], LABELS)
