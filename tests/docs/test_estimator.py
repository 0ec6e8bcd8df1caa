"""The page about Estimators has every name of TensorFlow, and each of its counterparts works."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Generator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from sklearn import cluster, ensemble

import stratagem as sg
from tests.unit.estimator.migration_lines import LINES
from tests.unit.estimator.tensorflow_symbols import SYMBOLS

_FOLDER = Path(__file__).parents[2] / "docs" / "guides"
_PAGE = (_FOLDER / "estimator.md").read_text(encoding="utf-8")
_ROW = re.compile(r"^\| (?P<names>`tf\..*?) \| (?P<ours>none|`sg\.[\w.]+`) \| (?P<note>.*?) ?\|$")
_CODE = re.compile(r"`([^`]+)`")
_SAME = re.compile(r"^Same name: (.*?)\.$", re.MULTILINE | re.DOTALL)
# Names of TensorFlow 1 that the page replaces as it does those of TensorFlow 2.
_OLDER = {
    "tf.estimator.": "tf.compat.v1.train.",
    "tf.summary.": "tf.compat.v1.summary.",
}
# Dotted names of these may stand in a note; `sklearn` is what the tests have.
_ROOTS = {"sg": sg, "keras": keras, "jax": jax, "sklearn": importlib.import_module("sklearn")}


def _rows() -> list[tuple[list[str], str | None, str]]:
    page = _PAGE.partition("## From TensorFlow")[2]
    lines = [line for line in page.splitlines() if line.startswith("| `")]
    rows = [(line, _ROW.match(line)) for line in lines]
    assert all(row for _, row in rows), [line for line, row in rows if not row]
    found = [
        (
            _CODE.findall(row["names"]),
            None if row["ours"] == "none" else row["ours"].strip("`"),
            row["note"],
        )
        for _, row in rows
        if row is not None
    ]
    same = [name for names in _SAME.findall(page) for name in _CODE.findall(names) if "." in name]
    found += [([name], "sg" + name.removeprefix("tf"), "") for name in same]
    return [(names + _older(names), ours, note) for names, ours, note in found]


def _older(names: list[str]) -> list[str]:
    older = [
        new + name.removeprefix(old)
        for name in names
        for old, new in _OLDER.items()
        if name.startswith(old)
    ]
    return [name for name in older if name in SYMBOLS and f"`{name}`" not in _PAGE]


ROWS = _rows()


def _resolved(name: str) -> Any:
    found: Any = _ROOTS[name.partition(".")[0]]
    for part in name.split(".")[1:]:
        found = getattr(found, part)
    return found


def test_page_has_every_name_of_tensorflow_once() -> None:
    names = [name for names, _, _ in ROWS for name in names]
    assert sorted(names) == sorted(SYMBOLS)
    assert len(set(SYMBOLS)) == len(SYMBOLS)
    assert LINES.keys() >= {names[0] for names, _, _ in ROWS}
    assert LINES.keys() <= set(names)


def test_names_of_ours_exist() -> None:
    for _, ours, _ in ROWS:
        if ours is not None:
            assert _resolved(ours) is not None


def test_what_is_missing_has_a_way_out() -> None:
    """A note names it; dotted names in notes exist."""
    for names, ours, note in ROWS:
        code = _CODE.findall(note)
        assert ours is not None or code, f"{names} has no way out"
        for name in code:
            match = re.match(r"(sg|keras|jax|sklearn)(\.\w+)+$", name)
            if match:
                _resolved(name)


def test_line_of_a_row_uses_what_the_row_names() -> None:
    for names, ours, _ in ROWS:
        if ours is not None:
            last = ours.rpartition(".")[2]
            assert last in LINES[names[0]], f"{LINES[names[0]]!r} does not try {ours}"


def _model_fn(features: Any, labels: Any, mode: str) -> Any:
    outputs = keras.layers.Dense(1)(features)
    if mode == sg.estimator.ModeKeys.PREDICT:
        return sg.estimator.EstimatorSpec(mode, predictions={"sum": outputs})
    loss = keras.ops.mean((outputs[:, 0] - labels) ** 2)
    train_op = sg.estimator.minimize(keras.optimizers.SGD(0.01), loss)
    return sg.estimator.EstimatorSpec(mode, {"sum": outputs}, loss, train_op)


def _compiled(layer: Any) -> keras.Model:
    inputs = keras.Input((3, 2))
    model = keras.Model(inputs, layer(inputs))
    model.compile("sgd", "mse")
    return model


def _mean_of(predictions: Any) -> keras.metrics.Metric:
    metric = keras.metrics.Mean()
    metric.update_state(predictions["sum"])
    return metric


@pytest.fixture(scope="module")
def namespace(tmp_path_factory: pytest.TempPathFactory) -> Generator[dict[str, Any]]:
    """What the lines may use."""
    folder = tmp_path_factory.mktemp("migration")
    x = np.random.default_rng(0).normal(size=(4, 4)).astype("float32")
    y = np.array([0, 1, 2, 1], "int32")
    columns = [sg.feature_column.numeric_column("x", 4)]

    def data() -> Any:
        return x, y.astype("float32")

    estimator = sg.estimator.Estimator(_model_fn, str(folder / "model")).train(data, steps=1)
    vocabulary = folder / "words.txt"
    vocabulary.write_text("a\nb\n")
    writer = sg.summary.create_file_writer(str(folder / "summaries"))
    yield {
        "cluster": cluster,
        "columns": columns,
        "compiled": _compiled,
        "data": data,
        "encoded": sg.feature_column.encode_features({"x": x}, columns),
        "ensemble": ensemble,
        "estimator": estimator,
        "folder": str(folder / "other"),
        "head": sg.estimator.RegressionHead(),
        "importlib": importlib,
        "jax": jax,
        "jnp": jnp,
        "keras": keras,
        "keras_model": _compiled(keras.layers.Flatten()),
        "config": None,
        "mean_of": _mean_of,
        "model_fn": lambda features, labels, mode, params=None: _model_fn(features, labels, mode),
        "np": np,
        "pytest": pytest,
        "receiver_fn": sg.estimator.export.build_raw_serving_input_receiver_fn({"x": x}),
        "run": lambda hook: estimator.train(data, hooks=[hook], steps=1),
        "sg": sg,
        "signature": inspect.signature,
        "strategy": sg.MirroredStrategy(["cpu:0", "cpu:1"]),
        "vocabulary": str(vocabulary),
        "words": sg.feature_column.categorical_column_with_vocabulary_list("word", ["a", "b"]),
        "writer": writer,
        "x": x,
        "y": y,
    }
    writer.close()


@pytest.mark.parametrize("name", LINES)
def test_line_runs(name: str, namespace: dict[str, Any]) -> None:
    exec(LINES[name], dict(namespace))


def test_links_lead_to_files() -> None:
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", _PAGE)
    assert targets
    assert [target for target in targets if not (_FOLDER / target).exists()] == []
