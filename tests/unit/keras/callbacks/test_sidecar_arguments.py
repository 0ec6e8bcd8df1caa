"""Arguments that an evaluator cannot work with, named before it waits for anything."""

from __future__ import annotations

from typing import Any

import keras
import pytest

import stratagem as sg
from tests.parity.comparison import mirrored, regression

_X, _Y = regression(11)


def _model() -> Any:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", loss="mse")
    return model


def test_model_of_workers_that_train_together_is_refused(tmp_path, monkeypatch) -> None:
    strategy = mirrored(2)
    with strategy.scope():
        model = _model()
    monkeypatch.setitem(vars(strategy.topology), "spans_processes", True)
    with pytest.raises(ValueError, match="which spans several processes"):
        sg.SidecarEvaluator(model, (_X, _Y), tmp_path)


_WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"model": 3}, TypeError, "model=3 is of type int"),
    ({"model": keras.Sequential(name="bare")}, ValueError, "'bare' is not compiled"),
    ({"data": (1, 2, 3, 4)}, ValueError, "data is a tuple of length 4"),
    ({"data": iter([])}, ValueError, "list_iterator(?s:.)*read again for each checkpoint"),
    ({"checkpoint_dir": 3}, TypeError, "checkpoint_dir=3 is of type int"),
    ({"checkpoint_dir": "gs://bucket/a"}, ValueError, "'gs://bucket/a' is not a local folder"),
    ({"checkpoint_dir": __file__}, ValueError, "test_sidecar_arguments.py' is not a local folder"),
    ({"steps": 0}, ValueError, "steps=0 leaves nothing to evaluate"),
    ({"steps": 1.5}, TypeError, "steps=1.5 is of type float"),
    ({"max_evaluations": -1}, ValueError, "max_evaluations=-1 leaves nothing to evaluate"),
    ({"max_evaluations": True}, TypeError, "max_evaluations=True is of type bool"),
    ({"timeout_s": 0}, ValueError, "timeout_s=0 is out of range"),
    ({"timeout_s": float("inf")}, ValueError, "a finite number of seconds above 0"),
    ({"poll_s": float("nan")}, ValueError, "poll_s=nan is out of range"),
    ({"poll_s": "1"}, TypeError, "poll_s='1' is of type str"),
    ({"callbacks": [print]}, TypeError, "of type builtin_function_or_method"),
    (
        {"callbacks": sg.SidecarEvaluatorModelExport("a/b.keras"), "checkpoint_dir": "a"},
        ValueError,
        "SidecarEvaluatorModelExport writes to checkpoint_dir, 'a'",
    ),
]


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    _WRONG,
    ids=lambda value: str(value).partition(" object at ")[0][:40],
)
def test_argument_that_cannot_be_right_is_named(wrong, error, words, tmp_path) -> None:
    arguments = {"model": _model(), "data": (_X, _Y), "checkpoint_dir": tmp_path, **wrong}
    with pytest.raises(error, match=words):
        sg.SidecarEvaluator(**arguments)
