"""What `fit`, `evaluate` and `predict` take as data; each kind gives what arrays give in Keras."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem as sg
from tests.marks import slow
from tests.parity.comparison import (
    Scope,
    differences,
    evaluated,
    fitted,
    mirrored,
    plain_keras,
    regression,
)

_X, _Y = regression(10)
_LEFT, _RIGHT = _X[:, :2], _X[:, 2:]
_BATCH_SIZE = 4


def _two_inputs(scope: Scope) -> Any:
    """A model of two named inputs, which can be given as a list, a tuple or a dict."""
    with scope():
        left, right = keras.Input((2,), name="left"), keras.Input((1,), name="right")
        joined = keras.layers.Concatenate()([left, right])
        outputs = keras.layers.Dense(1, kernel_initializer="ones")(joined)
        model = keras.Model([left, right], outputs)
        model.compile(optimizer=keras.optimizers.SGD(0.05), loss="mse", weighted_metrics=["mae"])
    return model


def _job(model: Any, make: Callable[[], Any]) -> dict[str, Any]:
    """Trains, evaluates and predicts; a new source for each, as generators end."""
    steps = len(_slices())  # a generator that ends before it has to would be warned about
    measured = fitted(model, make(), epochs=1, steps_per_epoch=steps)
    measured |= evaluated(model, make(), steps=steps)
    return {**measured, "predict": model.predict(make(), verbose=0, steps=steps)}


def _slices() -> list[slice]:
    return [slice(start, start + _BATCH_SIZE) for start in range(0, len(_X), _BATCH_SIZE)]


class _Batches(keras.utils.PyDataset):
    def __init__(self, batches: list[Any], **arguments: Any) -> None:
        super().__init__(**arguments)
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> Any:
        return self._batches[index]


@pytest.fixture(scope="module")
def expected() -> dict[str, np.ndarray]:
    """Plain Keras on arrays, without weights."""
    return plain_keras(lambda scope: _array_job(scope, [_LEFT, _RIGHT], _Y))


def _array_job(scope: Scope, x: Any, y: Any, **arguments: Any) -> dict[str, Any]:
    model = _two_inputs(scope)
    measured = fitted(model, x, y, **{"epochs": 1, "batch_size": _BATCH_SIZE, **arguments})
    measured |= evaluated(model, x, y, batch_size=_BATCH_SIZE)
    return {**measured, "predict": model.predict(x, batch_size=_BATCH_SIZE, verbose=0)}


def _under_two(job: Callable[[Scope], dict[str, Any]]) -> dict[str, np.ndarray]:
    return plain_keras(lambda _: job(mirrored(2).scope))


_ARRAYS = {
    "list": [_LEFT, _RIGHT],
    "dict": {"left": _LEFT, "right": _RIGHT},
    "jax": [jnp.asarray(_LEFT), jnp.asarray(_RIGHT)],
    "double": [_LEFT.astype("float64"), _RIGHT.astype("float64")],  # made single
}


@pytest.mark.parametrize("name", [n if n == "dict" else slow(n) for n in _ARRAYS])
def test_arrays(name: str, expected: dict[str, np.ndarray]) -> None:
    y = _Y.astype("float64") if name == "double" else _Y
    measured = _under_two(lambda scope: _array_job(scope, _ARRAYS[name], y))
    assert differences(measured, expected) == []


def _make_generator() -> Any:
    return (((_LEFT[rows], _RIGHT[rows]), _Y[rows]) for rows in _slices())


def _as_dicts(convert: Callable[[Any], Any]) -> Any:
    for rows in _slices():
        yield {"left": convert(_LEFT[rows]), "right": convert(_RIGHT[rows])}, _Y[rows], None


def _make_torch_loader() -> Any:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")

    class Examples(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return len(_X)

        def __getitem__(self, index: int) -> Any:
            return (_LEFT[index], _RIGHT[index]), _Y[index]

    return torch.utils.data.DataLoader(Examples(), batch_size=_BATCH_SIZE)


def _make_tensorflow_dataset() -> Any:
    tensorflow = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
    examples = ((_LEFT, _RIGHT), _Y)
    return tensorflow.data.Dataset.from_tensor_slices(examples).batch(_BATCH_SIZE)


_SOURCES = {
    "generator": _make_generator,
    "tensorflow": _make_tensorflow_dataset,
    "py_dataset": lambda: _Batches(list(_as_dicts(np.asarray))),
    "threads": lambda: _Batches(list(_make_generator()), workers=2),
    "generator_of_jax_arrays": lambda: _as_dicts(jnp.asarray),
}
_QUICK = ("generator", "tensorflow")


@pytest.mark.parametrize("name", [n if n in _QUICK else slow(n) for n in _SOURCES])
def test_source_of_batches(name: str, expected: dict[str, np.ndarray]) -> None:
    if name == "threads":  # which Keras reads ahead, and then in another order
        expected = plain_keras(lambda scope: _job(_two_inputs(scope), _SOURCES[name]))
    measured = _under_two(lambda scope: _job(_two_inputs(scope), _SOURCES[name]))
    assert differences(measured, expected) == []


def test_torch_data_loader(expected: dict[str, np.ndarray]) -> None:
    measured = _under_two(lambda scope: _job(_two_inputs(scope), _make_torch_loader))
    assert differences(measured, expected) == []


class _AddIfGiven(keras.layers.Layer):
    def call(self, x: Any, added: Any = None) -> Any:
        return x if added is None else x + added

    def compute_output_shape(self, x_shape: Any, added_shape: Any = None) -> Any:
        return x_shape


def _optional_input(scope: Scope, *, is_first: bool) -> Any:
    with scope():
        left = keras.Input((2,), name="left")
        added = keras.Input((2,), name="added", optional=True)
        outputs = keras.layers.Dense(1, kernel_initializer="ones")(_AddIfGiven()(left, added))
        model = keras.Model([added, left] if is_first else [left, added], outputs)
        model.compile(optimizer=keras.optimizers.SGD(0.05), loss="mse", weighted_metrics=["mae"])
    return model


@pytest.mark.parametrize(("is_first", "is_generator"), [(False, True), (True, False)])
def test_optional_input_that_is_none(is_first: bool, is_generator: bool) -> None:
    def of(left: Any) -> Any:
        return [None, left] if is_first else [left, None]

    def job(scope: Scope) -> dict[str, Any]:
        model = _optional_input(scope, is_first=is_first)
        if is_generator:
            batches = ((tuple(of(_LEFT[rows])), _Y[rows]) for rows in _slices())
            return fitted(model, batches, epochs=1, steps_per_epoch=len(_slices()))
        return fitted(model, of(_LEFT), _Y, epochs=1, batch_size=_BATCH_SIZE)

    assert differences(_under_two(job), plain_keras(job)) == []


def test_predict_takes_inputs_alone_in_every_form(expected: dict[str, np.ndarray]) -> None:
    model = _two_inputs(mirrored(3).scope)
    for value, name in zip(model.weights, ("variable 0 kernel", "variable 1 bias"), strict=True):
        value.assign(expected[name])
    forms = [
        [_LEFT, _RIGHT],
        _Batches([((_LEFT[rows], _RIGHT[rows]),) for rows in _slices()]),
        (((_LEFT[rows], _RIGHT[rows]),) for rows in _slices()),
    ]
    for form in forms:
        steps = None if isinstance(form, list) else len(_slices())
        predicted = model.predict(form, verbose=0, steps=steps)
        np.testing.assert_allclose(predicted, expected["predict"], rtol=1e-5, atol=1e-6)


def test_outputs_of_predict_keep_their_structure_dtype_and_order() -> None:
    with mirrored(3).scope():
        inputs = keras.Input((3,))
        model = keras.Model(
            inputs,
            {
                "half": keras.layers.Rescaling(0.5, dtype="float16")(inputs),
                "pair": [keras.layers.Flatten()(inputs), keras.ops.argmax(inputs, axis=-1)],
            },
        )
    predicted = model.predict(_X, batch_size=4, verbose=0)
    assert isinstance(predicted["pair"], list)
    assert predicted["half"].dtype == "float16"
    np.testing.assert_allclose(predicted["half"], (_X * 0.5), rtol=2e-3, atol=1e-3)
    np.testing.assert_array_equal(predicted["pair"][0], _X)
    np.testing.assert_array_equal(predicted["pair"][1], _X.argmax(-1))


def _fit_on_dataset(scope: Scope, wrap: Callable[[Any, Any], Any]) -> Any:
    """Two epochs on the batches of `wrap(model, dataset)`, validated on them; a model's numbers."""
    model = _two_inputs(scope)
    data = wrap(model, sg.input.Dataset(((_LEFT, _RIGHT), _Y), batch_size=_BATCH_SIZE))
    measured = fitted(model, data, validation_data=data) | evaluated(model, data)
    return {**measured, "predict": model.predict(data, verbose=0)}


@pytest.mark.slow
def test_datasets_of_ours_need_no_number_of_steps() -> None:
    def same(_: Any, dataset: Any) -> Any:
        return dataset

    def of_steps(_: Any, dataset: Any) -> Any:
        return sg.input.Dataset(((_LEFT, _RIGHT), _Y), batch_size=2 * _BATCH_SIZE)

    x = [_LEFT, _RIGHT]
    expected = plain_keras(
        lambda scope: _array_job(scope, x, _Y, epochs=2, validation_data=(x, _Y))
    )
    wider = _under_two(lambda scope: _fit_on_dataset(scope, of_steps))
    # Of replicas, two batches of 4 a step: the last one has 2, and a replica without any.
    ways: list[Any] = [
        (same, expected),
        (lambda model, data: model.distribute_strategy.distribute_dataset(data), expected),
        (
            lambda model, data: model.distribute_strategy.distribute_datasets_from_function(
                lambda _: data
            ),
            wider,
        ),
    ]
    for wrap, wanted in ways:
        measured = _under_two(lambda scope, wrap=wrap: _fit_on_dataset(scope, wrap))
        assert differences(measured, wanted) == []
    measured = plain_keras(lambda scope: _fit_on_dataset(scope, same))
    assert differences(measured, expected) == []


def _losses_of_batches(strategy: Any, data: Any, **options: Any) -> list[float]:
    """Of a model without a shape, which is built on the first batch, and always says 0."""
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(1, kernel_initializer="zeros")])
        model.compile(keras.optimizers.SGD(0.0), loss="mse")
    seen: list[dict[str, float]] = []
    log = keras.callbacks.LambdaCallback(on_train_batch_end=lambda _, logs: seen.append(logs))
    model.fit(strategy.distribute_dataset(data), verbose=0, callbacks=[log], **options)
    return [logs["loss"] for logs in seen]


def test_building_a_model_loses_no_batch_and_each_epoch_has_the_order_of_a_loop() -> None:
    strategy = mirrored(2)
    batches = ((np.full((4, 1), float(i)), np.full((4, 1), float(i))) for i in range(1, 4))
    averages = _losses_of_batches(strategy, batches, steps_per_epoch=3)
    np.testing.assert_allclose(averages, [1.0, 5 / 2, 14 / 3], rtol=1e-6)
    x = np.arange(1.0, 9.0, dtype="float32")[:, None]
    dataset = sg.input.Dataset((x, x), batch_size=4, shuffle=True, seed=5)
    distributed = strategy.distribute_dataset(dataset)
    expected: list[float] = []
    for _ in range(2):
        squares = [np.mean(np.square(strategy.gather(batch[0], axis=0))) for batch in distributed]
        expected += [squares[0], np.mean(squares)]
    averages = _losses_of_batches(strategy, dataset, epochs=2)
    np.testing.assert_allclose(averages, expected, rtol=1e-6)


def test_datasets_that_do_not_fit_are_refused() -> None:
    model = _two_inputs(mirrored(2).scope)
    dataset = sg.input.Dataset(((_LEFT, _RIGHT), _Y), batch_size=_BATCH_SIZE)
    with pytest.raises(ValueError, match="received a dataset of MirroredStrategy"):
        model.fit(mirrored(3).distribute_dataset(dataset), verbose=0)
    with pytest.raises(ValueError, match="received both a Dataset and y and class_weight"):
        model.fit(dataset, _Y, class_weight={0: 1.0}, verbose=0)


class _SemiSupervised(keras.Model):
    """Trains on labeled rows, and keeps its outputs for unlabeled ones small."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(2)

    def call(self, x: Any) -> Any:
        return self.dense(x["labeled"])

    def compute_loss(self, x: Any = None, *args: Any, **kwargs: Any) -> Any:
        unlabeled = next(value for key, value in x.items() if key != "labeled")
        return super().compute_loss(x, *args, **kwargs) + keras.ops.mean(self.dense(unlabeled) ** 2)


def _uneven_batches(unlabeled: str) -> list[Any]:
    """Batches of labeled and unlabeled rows; Keras counts the rows of the first key."""
    draw = np.random.default_rng(0).normal
    return [
        (
            {"labeled": _float(draw(size=(few, 3))), unlabeled: _float(draw(size=(many, 3)))},
            _float(draw(size=(few, 2))),
            _float(np.arange(few) % 3),
        )
        for few, many in ((4, 12), (4, 12), (4, 9), (3, 2))
    ]


def _float(array: Any) -> Any:
    return np.asarray(array, "float32")


@pytest.mark.parametrize(
    ("unlabeled", "options"),  # "more" comes after "labeled", "extra" before
    [("more", {}), ("extra", {"steps_per_execution": 2}), slow("extra", {"run_eagerly": True})],
    ids=str,
)
def test_arrays_of_a_batch_may_differ_in_their_rows_on_one_device(unlabeled, options) -> None:
    batches = _uneven_batches(unlabeled)

    def results(scope: Any) -> list[Any]:
        keras.utils.set_random_seed(0)
        with scope:
            model = _SemiSupervised()
            model.compile("sgd", "mse", metrics=["mae"], weighted_metrics=["mse"], **options)
        fitted = model.fit((one for one in batches), steps_per_epoch=4, verbose=0, shuffle=False)
        again = model.fit(_Batches(batches), verbose=0, shuffle=False)
        logs = model.evaluate(_Batches(batches), verbose=0)
        outputs = model.predict(_Batches(batches), verbose=0)
        return [*fitted.history.values(), *again.history.values(), logs, outputs]

    expected = results(contextlib.nullcontext())
    for got, wanted in zip(results(sg.MirroredStrategy(["cpu:1"]).scope()), expected, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5)
    two = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    with pytest.raises(ValueError, match=r"(?s)which 2 replicas share.*reshape 24 rows"):
        results(two.scope())
