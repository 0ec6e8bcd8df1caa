"""EstimatorSpec follows TensorFlow's rules; model functions are called by name."""

from __future__ import annotations

import dataclasses
import functools

import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.estimator.spec import (
    DEFAULT_SIGNATURE,
    EstimatorSpec,
    Minimize,
    ModelFunction,
    arguments_of,
    as_train_ops,
)


def trained(**changes) -> EstimatorSpec:
    parts = {"loss": 0.5, "train_op": keras.optimizers.SGD()} | changes
    return EstimatorSpec("train", **parts)


def test_parts_come_in_tensorflows_order_and_are_empty_or_kept() -> None:
    names = "mode predictions loss train_op eval_metric_ops export_outputs training_chief_hooks"
    names += " training_hooks scaffold evaluation_hooks prediction_hooks"
    assert [field.name for field in dataclasses.fields(EstimatorSpec)] == names.split()
    spec = EstimatorSpec("eval", loss=np.float32(2.0))
    assert (spec.predictions, spec.eval_metric_ops, spec.export_outputs) == ({}, {}, None)
    hooks = spec.training_hooks, spec.training_chief_hooks, spec.evaluation_hooks
    assert (*hooks, spec.prediction_hooks) == ((), (), (), ())
    hooks, metrics = [Hook(), Hook()], {"b": keras.metrics.Mean(), "a": keras.metrics.Sum()}
    spec = trained(training_hooks=hooks, prediction_hooks=tuple(hooks), eval_metric_ops=metrics)
    assert spec.training_hooks == spec.prediction_hooks == tuple(hooks)
    assert list(spec.eval_metric_ops) == ["b", "a"]


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_loss_of_one_element_is_a_scalar(shape) -> None:
    loss = EstimatorSpec("eval", loss=np.full(shape, 3.0, "float32")).loss
    assert (loss.shape, float(loss)) == ((), 3.0)


@pytest.mark.parametrize(
    ("mode", "parts", "words"),
    [
        ("train", {"loss": 0.5}, "The EstimatorSpec for mode 'train' has no train_op"),
        ("train", {"train_op": keras.optimizers.SGD()}, "for mode 'train' has no loss"),
        ("eval", {"predictions": np.ones(2)}, "for mode 'eval' has no loss"),
        ("infer", {"loss": 0.5}, "for mode 'infer' has no predictions"),
        ("predict", {"predictions": np.ones(2)}, "received mode='predict'"),
        ("eval", {"loss": np.zeros(2)}, r"loss has shape \(2,\)"),
        ("eval", {"loss": np.zeros(0)}, r"loss has shape \(0,\)"),
        (
            "infer",
            {"predictions": 1.0, "export_outputs": {"a": 1, "b": 2}},
            r"signatures \['a', 'b'\] without a default",
        ),
    ],
)
def test_missing_part_and_unknown_mode_are_errors(mode, parts, words) -> None:
    with pytest.raises(ValueError, match=words):
        EstimatorSpec(mode, **parts)


@pytest.mark.parametrize(
    "op",
    [
        keras.optimizers.SGD(),
        Minimize("optimizer", 0.5, None),
        [Minimize("a", 0.5, None), Minimize("b", 0.5, None)],
        (keras.optimizers.SGD(),),
    ],
)
def test_train_op_is_an_update_or_several(op) -> None:
    assert trained(train_op=op).train_op is op


class Hook(sg.estimator.SessionRunHook):
    pass


WRONG_OF_SPEC = [
    ({"train_op": "sgd"}, r"train_op='sgd' is of type str"),
    ({"train_op": []}, r"train_op=\[\] is of type list"),
    ({"train_op": [keras.optimizers.SGD(), 1]}, "train_op=1 is of type int"),
    ({"loss": "low"}, "loss='low' is of type str"),
    ({"loss": lambda: 0.5}, "loss=.* is of type function"),
    ({"predictions": {"p": "cat"}}, r"predictions\['p'\]='cat' is of type str"),
    ({"predictions": [1, 2]}, "is of type list"),
    ({"eval_metric_ops": [1]}, r"eval_metric_ops=\[1\] is of type list"),
    ({"eval_metric_ops": {"m": (1, 2)}}, r"eval_metric_ops\['m'\]="),
    ({"export_outputs": [1]}, r"export_outputs=\[1\] is of type list"),
    ({"training_hooks": [object()]}, r"training_hooks=(?s:.)*a list or tuple of SessionRunHook"),
    ({"evaluation_hooks": [Hook]}, r"evaluation_hooks=(?s:.)*a list or tuple of SessionRunHook"),
    ({"scaffold": 1}, "scaffold=1 is of type int"),
]


@pytest.mark.parametrize(("parts", "words"), WRONG_OF_SPEC)
def test_part_of_another_type_is_an_error(parts, words) -> None:
    with pytest.raises(TypeError, match=words):
        trained(**parts)


def test_single_export_output_is_the_default() -> None:
    outputs = trained(export_outputs={"scores": 1}).export_outputs
    assert outputs == {"scores": 1, DEFAULT_SIGNATURE: 1}
    named = {"scores": 1, DEFAULT_SIGNATURE: 2}
    assert trained(export_outputs=named).export_outputs == named
    assert trained(export_outputs={}).export_outputs == {}


def test_scaffold_calls_its_function_with_itself_and_the_session() -> None:
    calls = []
    scaffold = sg.estimator.Scaffold(init_fn=lambda *arguments: calls.append(arguments))
    scaffold.init_fn("session")
    sg.estimator.Scaffold().init_fn("session")
    assert calls == [(scaffold, "session")]
    assert trained(scaffold=scaffold).scaffold is scaffold


# minimize records updates.


def test_loss_may_be_a_function_that_is_called_at_once() -> None:
    calls = []
    op = sg.estimator.minimize(keras.optimizers.SGD(), lambda: calls.append(1) or 0.5)
    assert (op.loss, calls) == (0.5, [1])


def test_optimizers_minimize_the_loss_of_the_spec() -> None:
    optimizer = keras.optimizers.SGD()
    variable = keras.Variable(1.0)
    op = sg.estimator.minimize(optimizer, 2.0, [variable])
    plain, given = as_train_ops([optimizer, op], 0.5)
    assert (plain.optimizer, plain.loss, plain.variables) == (optimizer, 0.5, None)
    assert given is op
    assert given.variables is not None
    assert given.variables[0] is variable
    assert [one.loss for one in as_train_ops(optimizer, 0.25)] == [0.25]
    with pytest.raises(TypeError, match="optimizer='sgd' is of type str"):
        sg.estimator.minimize("sgd", 0.5)


# Model functions receive their arguments and are checked.

SPEC = sg.estimator.EstimatorSpec("infer", predictions=1.0)


def test_arguments_are_passed_by_name() -> None:
    seen = []

    def model_fn(mode, features, *, config, params, labels):
        seen.append((mode, features, labels, params, config))
        return SPEC

    assert ModelFunction(model_fn, {"a": 1}, "config")("x", "y", "train") is SPEC
    assert ModelFunction(lambda features: SPEC, None, None)("x", None, "infer") is SPEC
    assert seen == [("train", "x", "y", {"a": 1}, "config")]


def test_what_partial_has_given_is_no_argument() -> None:
    def model_fn(features, size):
        return SPEC

    assert arguments_of(functools.partial(model_fn, size=3)) == ("features",)


@pytest.mark.parametrize(
    ("function", "params", "match"),
    [
        (None, None, "model_fn=None is of type NoneType"),
        (lambda labels: SPEC, None, "but not `features`"),
        (lambda features: SPEC, {"a": 1}, "but not `params`"),
        (lambda features, size: SPEC, None, r"received the unknown names \['size'\]"),
        (lambda features: SPEC, None, "but not `labels`, which input_fn returns"),
        (lambda features, labels: 3, None, "model_fn=3 is of type int"),
    ],
)
def test_other_functions_are_refused(function, params, match) -> None:
    with pytest.raises(ValueError, match=match):
        ModelFunction(function, params, None)("x", "y", "train")
