"""EstimatorSpec follows TensorFlow's rules."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.estimator.spec import DEFAULT_SIGNATURE, EstimatorSpec, Minimize


def trained(**changes) -> EstimatorSpec:
    parts = {"loss": 0.5, "train_op": keras.optimizers.SGD()} | changes
    return EstimatorSpec("train", **parts)


def test_modes_have_tensorflows_names() -> None:
    modes = sg.estimator.ModeKeys
    assert (modes.TRAIN, modes.EVAL, modes.PREDICT) == ("train", "eval", "infer")


def test_parts_come_in_tensorflows_order() -> None:
    names = "mode predictions loss train_op eval_metric_ops export_outputs training_chief_hooks"
    names += " training_hooks scaffold evaluation_hooks prediction_hooks"
    assert [field.name for field in dataclasses.fields(EstimatorSpec)] == names.split()


def test_parts_left_out_are_empty() -> None:
    spec = EstimatorSpec("eval", loss=np.float32(2.0))
    assert (spec.predictions, spec.eval_metric_ops, spec.export_outputs) == ({}, {}, None)
    hooks = spec.training_hooks, spec.training_chief_hooks, spec.evaluation_hooks
    assert (*hooks, spec.prediction_hooks) == ((), (), (), ())


def test_parts_of_a_trace_are_taken() -> None:
    specs = []

    def step(x):
        loss = jnp.mean(x)
        specs.append(trained(loss=loss, predictions={"x": x}, train_op=Minimize("sgd", loss, None)))
        return specs[0].loss

    assert jax.jit(step)(np.ones(3, "float32")) == 1.0
    assert isinstance(specs[0].predictions["x"], jax.core.Tracer)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_loss_of_one_element_is_a_scalar(shape) -> None:
    loss = EstimatorSpec("eval", loss=np.full(shape, 3.0, "float32")).loss
    assert (loss.shape, float(loss)) == ((), 3.0)


@pytest.mark.parametrize("shape", [(2,), (0,), (3, 1)])
def test_loss_that_is_no_scalar_is_an_error(shape) -> None:
    with pytest.raises(ValueError, match=r"loss has shape \(\d"):
        EstimatorSpec("eval", loss=np.zeros(shape))


@pytest.mark.parametrize(
    ("mode", "parts", "missing"),
    [
        ("train", {"loss": 0.5}, "train_op"),
        ("train", {"train_op": keras.optimizers.SGD()}, "loss"),
        ("eval", {"predictions": np.ones(2)}, "loss"),
        ("infer", {"loss": 0.5}, "predictions"),
    ],
)
def test_missing_part_is_an_error(mode, parts, missing) -> None:
    with pytest.raises(ValueError, match=rf"The EstimatorSpec for mode '{mode}' has no {missing}"):
        EstimatorSpec(mode, **parts)


def test_unknown_mode_is_an_error() -> None:
    with pytest.raises(ValueError, match="mode='predict' is unknown"):
        EstimatorSpec("predict", predictions=np.ones(2))


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


WRONG = [
    ({"train_op": "sgd"}, r"received train_op='sgd' of type str"),
    ({"train_op": []}, r"received train_op=\[\] of type list"),
    ({"train_op": [keras.optimizers.SGD(), 1]}, "received train_op=1 of type int"),
    ({"loss": "low"}, "received loss='low' of type str"),
    ({"loss": lambda: 0.5}, "received loss=.* of type function"),
    ({"predictions": {"p": "cat"}}, r"received predictions\['p'\]='cat' of type str"),
    ({"predictions": [1, 2]}, r"received predictions\['predictions'\]="),
    ({"eval_metric_ops": [1]}, r"received eval_metric_ops=\[1\] of type list"),
    ({"eval_metric_ops": {"m": (1, 2)}}, r"received eval_metric_ops\['m'\]="),
    ({"export_outputs": [1]}, r"received export_outputs=\[1\] of type list"),
    ({"training_hooks": [object()]}, "training_hooks=.* is not a list of SessionRunHook objects"),
    ({"training_hooks": Hook()}, "training_hooks=.* is not a list of SessionRunHook objects"),
    ({"evaluation_hooks": [Hook]}, "evaluation_hooks=.* is not a list of SessionRunHook objects"),
    ({"scaffold": 1}, "received scaffold=1 of type int"),
]


@pytest.mark.parametrize(("parts", "words"), WRONG)
def test_part_of_another_type_is_an_error(parts, words) -> None:
    with pytest.raises(TypeError, match=words):
        trained(**parts)


def test_hooks_and_metrics_are_kept_in_order() -> None:
    hooks, metrics = [Hook(), Hook()], {"b": keras.metrics.Mean(), "a": keras.metrics.Sum()}
    spec = trained(training_hooks=hooks, prediction_hooks=tuple(hooks), eval_metric_ops=metrics)
    assert spec.training_hooks == spec.prediction_hooks == tuple(hooks)
    assert list(spec.eval_metric_ops) == ["b", "a"]


def test_single_export_output_is_the_default() -> None:
    outputs = trained(export_outputs={"scores": 1}).export_outputs
    assert outputs == {"scores": 1, DEFAULT_SIGNATURE: 1}
    named = {"scores": 1, DEFAULT_SIGNATURE: 2}
    assert trained(export_outputs=named).export_outputs == named
    assert trained(export_outputs={}).export_outputs == {}


def test_several_export_outputs_without_default_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"signatures \['a', 'b'\] without a default"):
        trained(export_outputs={"a": 1, "b": 2})


def test_scaffold_calls_its_function_with_itself_and_the_session() -> None:
    calls = []
    scaffold = sg.estimator.Scaffold(init_fn=lambda *arguments: calls.append(arguments))
    scaffold.init_fn("session")
    sg.estimator.Scaffold().init_fn("session")
    assert calls == [(scaffold, "session")]
    assert trained(scaffold=scaffold).scaffold is scaffold


def test_scaffold_of_wrong_parts_is_an_error() -> None:
    with pytest.raises(TypeError, match="init_fn=3 is not callable"):
        sg.estimator.Scaffold(init_fn=3)
    with pytest.raises(TypeError, match="saver=3 has no `save` method"):
        sg.estimator.Scaffold(saver=3)
