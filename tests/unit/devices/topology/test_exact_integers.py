"""64-bit integers that JAX would change are refused on each way to the devices."""

from __future__ import annotations

import decimal
from collections.abc import Callable
from typing import Any

import jax
import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import stratagem as sg
from stratagem.devices.exact_integers import require_exact_integers

LARGE = np.array([[1], [2**31], [-7], [3]])
STRATEGIES: dict[str, Callable[[], Any]] = {
    "default": sg.get_strategy,
    "one device": lambda: sg.OneDeviceStrategy("cpu:0"),
    "mirrored": lambda: sg.MirroredStrategy(["cpu:0", "cpu:1"]),
}
TARGETS = np.zeros((4, 2), np.float32)
DOES_NOT_FIT = "of its values do not fit int32"


@given(
    st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-(2**31) - 2, 2**31 + 1)),
    st.sampled_from(["int64", "uint64", "int32", "float64"]),
)
def test_an_error_is_raised_where_jax_changes_a_value(values, dtype) -> None:
    array = np.array(values, np.int64).astype(dtype)
    kept = np.asarray(jax.device_put(array))
    num_changed = sum(
        decimal.Decimal(int(one)) != int(other)
        for one, other in zip(array.tolist(), kept.tolist(), strict=True)
    )
    if num_changed and array.dtype.kind != "f":
        with pytest.raises(OverflowError, match=f"{num_changed} of its values do not fit"):
            require_exact_integers([array])
    else:
        require_exact_integers([array])


def test_error_names_the_array_and_never_a_value() -> None:
    arrays = [np.zeros(3), np.array([5, 123456789012])]
    with pytest.raises(OverflowError, match="array 1 has dtype int64 and shape") as caught:
        require_exact_integers(arrays, lambda place: f"array {place}")
    assert "1234" not in str(caught.value)
    assert "SG311" in str(caught.value)


def test_other_values_pass() -> None:
    numbers = [7, "text", None, np.array(["a"]), np.array([2**40], object), jax.numpy.ones(2)]
    require_exact_integers([*numbers, np.int64(2**31 - 1), np.uint64(2**32 - 1), np.array([], int)])
    with pytest.raises(OverflowError, match=r"and shape \(\)"):
        require_exact_integers([np.int64(2**31)])
    with jax.enable_x64(True):
        require_exact_integers([LARGE])


def batches(name: str, count: int, bad: int) -> list[Any]:
    good = np.zeros((4, 1), np.int64)
    return [{"x": good, name: LARGE if place == bad else good} for place in range(count)]


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("bad", [0, 40])  # transferred one by one, and later many at once
def test_batches(name, bad) -> None:
    strategy = STRATEGIES[name]()
    iterator = iter(strategy.distribute_dataset(batches("user", 48, bad)))
    with pytest.raises(OverflowError, match=rf"batch\['user'\] has dtype int64.*1 {DOES_NOT_FIT}"):
        list(iterator)


@pytest.mark.parametrize("name", ["one device", "mirrored"])
def test_fit_evaluate_and_predict(name) -> None:
    with STRATEGIES[name]().scope():
        model = small_model()
    for call in (model.fit, model.evaluate, model.predict):
        targets = () if call == model.predict else (TARGETS,)
        with pytest.raises(OverflowError, match=DOES_NOT_FIT):
            call(LARGE, *targets, verbose=0)


def test_fit_of_a_distributed_dataset_without_a_strategy() -> None:
    dataset = sg.get_strategy().distribute_dataset([(LARGE, TARGETS)])
    with pytest.raises(OverflowError, match=DOES_NOT_FIT):
        small_model().fit(dataset, verbose=0)


def small_model() -> keras.Model:
    model = keras.Sequential([keras.layers.Embedding(10, 2), keras.layers.Flatten()])
    model.compile("sgd", "mse")
    model.build((None, 1))
    return model


@pytest.mark.parametrize("is_eager", [False, True])
@pytest.mark.parametrize("name", STRATEGIES)
def test_arguments_of_run(name, is_eager) -> None:
    strategy = STRATEGIES[name]()
    sg.config.run_eagerly(is_eager)
    try:
        for value in (LARGE, np.int64(2**40)):
            with pytest.raises(OverflowError, match=DOES_NOT_FIT):
                strategy.run(lambda ids: ids, args=(value,))
    finally:
        sg.config.run_eagerly(False)


def test_values_from_functions() -> None:
    strategy = STRATEGIES["mirrored"]()
    with pytest.raises(OverflowError, match=DOES_NOT_FIT):
        strategy.distribute_values_from_function(lambda _: LARGE)


def test_arguments_of_functions() -> None:
    with pytest.raises(OverflowError, match=f"An argument .* 1 {DOES_NOT_FIT}"):
        sg.function(lambda ids: ids + 1)(LARGE)


def test_lookups() -> None:
    with pytest.raises(OverflowError, match=f"An array of ids .* 1 {DOES_NOT_FIT}"):
        sg.nn.embedding_lookup(np.ones((4, 2), np.float32), LARGE)


@pytest.mark.parametrize("method", ["to_dense", "combined"])
def test_indices_of_rows(method) -> None:
    slices = sg.IndexedSlices(np.ones((4, 2), np.float32), LARGE[:, 0], (8, 2))
    with pytest.raises(OverflowError, match=f"An array of indices .* 1 {DOES_NOT_FIT}"):
        getattr(slices, method)()


def test_keys_travel_as_pairs() -> None:
    """As the error says."""
    keys = np.array([[2**40 + 5, -1, 2**31]])
    (batch,) = STRATEGIES["one device"]().distribute_dataset([keys[..., None].view("uint32")])
    assert batch.shape == (1, 3, 2)
    assert np.asarray(batch).view(np.int64)[..., 0].tolist() == keys.tolist()
