"""Input functions of arrays and data frames, against NumPy."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.estimator import experimental
from stratagem.estimator import experimental as early_stopping
from stratagem.estimator.estimator import EstimatorProtocol, check_estimator
from stratagem.estimator.inputs import numpy_input_fn, pandas_input_fn
from stratagem.estimator.spec import DEFAULT_SIGNATURE, EstimatorSpec, Minimize, as_train_ops

X = {"a": np.arange(5), "b": np.arange(10).reshape(5, 2)}
Y = np.arange(5) * 10


def labels_of(input_fn, **options) -> list[list[int]]:
    return [labels.tolist() for _, labels in input_fn(**options)]


def test_batches_hold_the_rows_in_order() -> None:
    batches = list(numpy_input_fn(X, Y, batch_size=2, shuffle=False)())
    assert [len(labels) for _, labels in batches] == [2, 2, 1]
    for name, array in X.items():
        got = np.concatenate([features[name] for features, _ in batches])
        np.testing.assert_array_equal(got, array)
    np.testing.assert_array_equal(np.concatenate([labels for _, labels in batches]), Y)


def test_array_and_dict_of_labels_keep_their_form() -> None:
    features, labels = next(iter(numpy_input_fn(Y, {"y": Y + 1}, 3, shuffle=False)()))
    assert features.tolist() == [0, 10, 20]
    assert {name: value.tolist() for name, value in labels.items()} == {"y": [1, 11, 21]}


def test_without_labels_batches_are_features() -> None:
    batches = list(numpy_input_fn(X, batch_size=4, shuffle=False)())
    assert [batch["a"].tolist() for batch in batches] == [[0, 1, 2, 3], [4]]
    assert [batch.tolist() for batch in numpy_input_fn(Y, None, 4, shuffle=False)()] == [
        [0, 10, 20, 30],
        [40],
    ]


def test_batches_go_over_the_ends_of_epochs() -> None:
    input_fn = numpy_input_fn(X, Y, batch_size=4, num_epochs=3, shuffle=False)
    assert labels_of(input_fn) == [
        [0, 10, 20, 30],
        [40, 0, 10, 20],
        [30, 40, 0, 10],
        [20, 30, 40],
    ]


def test_batch_larger_than_an_epoch_holds_several() -> None:
    input_fn = numpy_input_fn(X, Y, batch_size=12, num_epochs=3, shuffle=False)
    assert [len(labels) for labels in labels_of(input_fn)] == [12, 3]


def test_without_number_of_epochs_it_never_ends() -> None:
    dataset = numpy_input_fn(X, Y, batch_size=4, num_epochs=None, shuffle=False)()
    iterator = iter(dataset)
    got = np.concatenate([next(iterator)[1] for _ in range(25)])
    np.testing.assert_array_equal(got, np.tile(Y, 20))


@pytest.mark.parametrize(("num_epochs", "steps"), [(1, 2), (3, 4)])
def test_dataset_knows_its_length(num_epochs, steps) -> None:
    dataset = numpy_input_fn(X, Y, 4, num_epochs, shuffle=False)()
    assert dataset.as_source().cardinality == steps
    assert len(list(dataset)) == steps


def test_endless_dataset_has_no_length() -> None:
    source = numpy_input_fn(X, Y, 4, num_epochs=None, shuffle=False)().as_source()
    assert source.cardinality < 0
    with pytest.raises(TypeError, match="Data with num_epochs=None has no length"):
        len(source._batches)


def test_each_epoch_is_shuffled_anew_and_complete() -> None:
    x = np.arange(64)
    batches = list(numpy_input_fn(x, None, 64, num_epochs=3, shuffle=True)())
    assert all(sorted(batch) == list(range(64)) for batch in batches)
    orders = {tuple(batch) for batch in batches} | {tuple(x)}
    assert len(orders) == 4


def test_rows_of_all_arrays_stay_together() -> None:
    for features, labels in numpy_input_fn(X, Y, 3, 4, shuffle=True)():
        np.testing.assert_array_equal(features["a"] * 10, labels)
        np.testing.assert_array_equal(features["b"][:, 0] * 5, labels)


def test_order_follows_the_global_seed() -> None:
    input_fn = numpy_input_fn(np.arange(64), None, 64, shuffle=True)
    orders = []
    for seed in (1, 1, 2):
        keras.utils.set_random_seed(seed)
        orders.append(next(iter(input_fn())).tolist())
    assert orders[0] == orders[1] != orders[2]


def test_dataset_read_twice_has_the_same_order() -> None:
    dataset = numpy_input_fn(np.arange(64), None, 64, shuffle=True)()
    assert next(iter(dataset)).tolist() == next(iter(dataset)).tolist()


@pytest.mark.parametrize("shuffle", [False, True])
def test_workers_share_the_examples(shuffle) -> None:
    input_fn = numpy_input_fn(X, Y, 2, shuffle=shuffle)
    shares = [
        np.concatenate(labels_of(input_fn, input_context=sg.InputContext(2, worker, 2)))
        for worker in range(2)
    ]
    assert [sorted(share) for share in shares] == [[0, 20, 40], [10, 30]]


def test_fewer_examples_than_workers_are_an_error() -> None:
    with pytest.raises(ValueError, match="5 examples are too few for 6 workers"):
        numpy_input_fn(X, Y, shuffle=False)(sg.InputContext(6, 0, 6))


def test_strings_are_batched_as_they_are() -> None:
    names = np.array(["a", "bc", "d"])
    batches = [batch["n"].tolist() for batch in numpy_input_fn({"n": names}, None, 2, 1, False)()]
    assert batches == [["a", "bc"], ["d"]]


WRONG = [
    (ValueError, "shuffle=None is not a bool", {"shuffle": None}),
    (ValueError, "shuffle=1 is not a bool", {"shuffle": 1}),
    (ValueError, "batch_size=0 is out of range", {"batch_size": 0}),
    (ValueError, "num_epochs=0 is out of range", {"num_epochs": 0}),
    (ValueError, "x is empty or contains an empty array", {"x": {}}),
    (ValueError, "x is empty or contains an empty array", {"x": np.zeros((0, 3))}),
    (ValueError, "x is empty or contains an empty array", {"x": np.array(3)}),
    (ValueError, "y is empty or contains an empty array", {"y": {}}),
    (ValueError, r"names \['a'\] are in both", {"y": {"a": Y}}),
    (ValueError, r"The arrays of x and y have the shapes", {"y": np.arange(4)}),
    (TypeError, "x is or contains ", {"x": [1, 2]}),
    (TypeError, "y is or contains ", {"y": [1, 2, 3, 4, 5]}),
    (TypeError, "x is or contains ", {"x": {"a": [1, 2]}}),
]


@pytest.mark.parametrize(("error", "words", "changes"), WRONG)
def test_what_cannot_be_read_is_an_error(error, words, changes) -> None:
    with pytest.raises(error, match=words):
        numpy_input_fn(**{"x": X, "y": Y, "shuffle": False, **changes})


class Column:
    """Fake pandas Series."""

    def __init__(self, values, index=None) -> None:
        self._values = np.asarray(values)
        self.index = np.arange(len(self._values)) if index is None else np.asarray(index)

    def __len__(self) -> int:
        return len(self._values)

    def to_numpy(self):
        return self._values


class Frame:
    """Fake pandas DataFrame."""

    def __init__(self, columns, index=None) -> None:
        self._columns = {name: Column(values, index) for name, values in columns.items()}
        self.columns = list(columns)
        first = next(iter(self._columns.values()))
        self.index = first.index

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, name):
        return self._columns[name]

    def to_numpy(self):
        return np.stack([column.to_numpy() for column in self._columns.values()], 1)


FRAME = Frame({"a": [1, 2, 3], "s": ["x", "y", "z"]}, index=[7, 8, 9])


def test_frame_gives_a_dict_of_columns_and_the_series() -> None:
    input_fn = pandas_input_fn(FRAME, Column([0.1, 0.2, 0.3], [7, 8, 9]), 2, shuffle=False)
    got = [({k: v.tolist() for k, v in x.items()}, y.tolist()) for x, y in input_fn()]
    assert got == [({"a": [1, 2], "s": ["x", "y"]}, [0.1, 0.2]), ({"a": [3], "s": ["z"]}, [0.3])]


def test_frame_of_labels_gives_a_dict() -> None:
    y = Frame({"a": [4, 5, 6], "t": [0, 1, 0]}, index=[7, 8, 9])
    ((features, labels),) = pandas_input_fn(FRAME, y, shuffle=False)()
    assert features["a"].tolist() == [1, 2, 3]
    assert {name: value.tolist() for name, value in labels.items()} == {
        "a": [4, 5, 6],
        "t": [0, 1, 0],
    }
    (features,) = pandas_input_fn(FRAME, shuffle=False)()
    assert sorted(features) == ["a", "s"]


WRONG_FRAMES = [
    (TypeError, "x is of type dict", {"x": {"a": Y}}),
    (TypeError, "x is of type Column", {"x": Column([1])}),
    (TypeError, "y is of type list", {"y": [1, 2, 3]}),
    (TypeError, "target_column=3 is of type int", {"target_column": 3}),
    (ValueError, "The data frame x has no rows", {"x": Frame({"a": []})}),
    (ValueError, "x has a column 'a', the name of the labels", {"target_column": "a"}),
    (ValueError, "x and y have different indices", {"y": Column([1, 2, 3])}),
    (ValueError, "shuffle=None is not a bool", {"shuffle": None}),
]


@pytest.mark.parametrize(("error", "words", "changes"), WRONG_FRAMES)
def test_frame_that_cannot_be_read_is_an_error(error, words, changes) -> None:
    y = Column([1, 2, 3], [7, 8, 9])
    with pytest.raises(error, match=words):
        pandas_input_fn(**{"x": FRAME, "y": y, "shuffle": False, **changes})


# EstimatorSpec follows TensorFlow's rules.


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


WRONG_OF_SPEC = [
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


@pytest.mark.parametrize(("parts", "words"), WRONG_OF_SPEC)
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


def test_what_is_no_optimizer_is_refused() -> None:
    with pytest.raises(TypeError, match="minimize received optimizer='sgd' of type str"):
        sg.estimator.minimize("sgd", 0.5)


def test_an_empty_list_of_variables_is_refused() -> None:
    with pytest.raises(ValueError, match="minimize received an empty var_list"):
        sg.estimator.minimize(keras.optimizers.SGD(), 0.5, [])


# Objects that count as Estimators.


def test_estimators_and_fakes_with_all_members_are_taken(tmp_path) -> None:
    check_estimator(sg.estimator.Estimator(lambda features, labels: None, str(tmp_path)))
    assert issubclass(sg.estimator.DNNClassifier, sg.estimator.Estimator)


@pytest.mark.parametrize("member", ["train", "evaluate", "latest_checkpoint", "eval_dir"])
def test_class_that_lacks_a_member_is_refused(member) -> None:
    names = {"config", "model_dir", "train", "evaluate", "latest_checkpoint", "eval_dir"}
    complete = type("Complete", (), dict.fromkeys(names, len))
    assert isinstance(complete(), EstimatorProtocol)
    with pytest.raises(TypeError, match="of type Partial"):
        check_estimator(type("Partial", (), dict.fromkeys(names - {member}, len))())


@pytest.mark.parametrize("other", [None, "model", sg.estimator.RunConfig()])
def test_other_objects_are_refused(other) -> None:
    with pytest.raises(TypeError, match=r"estimator=.*is of type .*\nExpected an Estimator"):
        check_estimator(other)


# Names of `tf.estimator.experimental` that are offered, each the function of early stopping.


def test_names_are_those_of_tensorflow_and_lead_to_early_stopping() -> None:
    assert sg.estimator.experimental is experimental
    assert set(experimental.__all__) == {
        "make_early_stopping_hook",
        "stop_if_higher_hook",
        "stop_if_lower_hook",
        "stop_if_no_decrease_hook",
        "stop_if_no_increase_hook",
    }
    for name in experimental.__all__:
        assert getattr(experimental, name) is getattr(early_stopping, name)
