"""Exported models: folders and calls that are refused."""

from __future__ import annotations

import json

import jax
import pytest

import stratagem as sg
from tests.unit.estimator.model_functions import (
    dataset_of,
    dense_classifier,
    estimator_of,
    examples,
)

export = sg.estimator.export
X, Y = examples(19)

DATA = dataset_of(X, Y, 4)
RAW = export.build_raw_serving_input_receiver_fn(jax.ShapeDtypeStruct((1, 5), "float32"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    estimator = estimator_of(
        dense_classifier, tmp_path_factory.mktemp("model"), strategy, save_checkpoints_steps=2
    )
    return estimator.train(DATA)


def test_what_is_no_export_is_refused(trained, tmp_path) -> None:
    with pytest.raises(ValueError, match="contains no exported model"):
        sg.estimator.load_exported(tmp_path)
    folder = trained.export_saved_model(tmp_path, RAW)
    serve = sg.estimator.load_exported(folder)["serving_default"]
    for call in (lambda: serve(x=X), lambda: serve(X, X), serve):
        with pytest.raises(ValueError, match="The signature 'serving_default' was called with"):
            call()
    file = tmp_path / folder / "signatures.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "format": 2}))
    with pytest.raises(ValueError, match="was exported in format 2"):
        sg.estimator.load_exported(folder)
