"""Batches are encoded one by one where they are read, whatever the dataset is."""

from __future__ import annotations

import numpy as np
import pytest

import stratagem as sg
from stratagem.estimator.loops.host_parts import HostParts


def upper(batch, mode):
    features, labels = batch if isinstance(batch, tuple) else (batch, None)
    return {"x": np.char.upper(features["x"]), "mode": np.array([mode])}, labels


ROWS = {"x": np.array(["a", "b", "c"])}
LABELS = np.arange(3)


def test_batch_of_a_dict_is_encoded_at_once() -> None:
    parts = HostParts(encode=upper)
    features, labels = parts.encoded((ROWS, LABELS), "train")
    assert features["x"].tolist() == ["A", "B", "C"]
    assert features["mode"].tolist() == ["train"]
    assert labels is LABELS
    assert parts.encoded(ROWS, "infer")[1] is None


@pytest.mark.parametrize(
    "make",
    [
        lambda: sg.input.Dataset((ROWS, LABELS), batch_size=2),
        lambda: [
            ({"x": ROWS["x"][rows]}, LABELS[rows]) for rows in (slice(0, 2), slice(2, 3))
        ],
    ],
    ids=["dataset", "list"],
)  # fmt: skip
def test_batches_of_a_dataset_are_encoded_as_they_are_read(make) -> None:
    source = HostParts(encode=upper).encoded(make(), "eval")
    assert source.cardinality == 2
    reader = source.open(0)
    assert next(reader)[0]["x"].tolist() == ["A", "B"]
    again = source.open(0)
    again.restore(reader.state())
    assert [next(one)[0]["x"].tolist() for one in (reader, again)] == [["C"], ["C"]]
    reader.close()


def test_without_functions_everything_stays_as_it_is() -> None:
    made = [ROWS]
    assert HostParts().encoded(made, "train") is made
    assert HostParts().decoded(ROWS) is ROWS
    assert HostParts(decode=lambda batch: batch["x"]).decoded(ROWS) is ROWS["x"]
