"""Host transforms encode each batch where it is read."""

from __future__ import annotations

import numpy as np
import pytest

import stratagem as sg
from stratagem.estimator.loops.batches import HostTransforms


def upper(batch, mode):
    features, labels = batch if isinstance(batch, tuple) else (batch, None)
    return {"x": np.char.upper(features["x"]), "mode": np.array([mode])}, labels


ROWS = {"x": np.array(["a", "b", "c"])}
LABELS = np.arange(3)


def test_batch_of_a_dict_is_encoded_at_once() -> None:
    parts = HostTransforms(encode=upper)
    features, labels = parts.encode_source((ROWS, LABELS), "train")
    assert features["x"].tolist() == ["A", "B", "C"]
    assert features["mode"].tolist() == ["train"]
    assert labels is LABELS
    assert parts.encode_source(ROWS, "infer")[1] is None


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
    source = HostTransforms(encode=upper).encode_source(make(), "eval")
    assert source.cardinality == 2
    reader = source.open(0)
    assert next(reader)[0]["x"].tolist() == ["A", "B"]
    again = source.open(0)
    again.restore(reader.state())
    assert [next(one)[0]["x"].tolist() for one in (reader, again)] == [["C"], ["C"]]
    reader.close()


def test_without_functions_everything_stays_as_it_is() -> None:
    made = [ROWS]
    assert HostTransforms().encode_source(made, "train") is made
    assert HostTransforms().decode_predictions(ROWS) is ROWS
    assert HostTransforms(decode=lambda batch: batch["x"]).decode_predictions(ROWS) is ROWS["x"]
