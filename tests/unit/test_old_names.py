"""TensorFlow names spelled differently here: aliases, and errors that name the replacement."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stratagem as sg
from stratagem.errors import OLD_METHODS, OLD_NAMES, SAME_METHODS


@pytest.fixture
def strategy() -> Any:
    return sg.MirroredStrategy(["cpu:0", "cpu:1"])


@pytest.mark.parametrize("name", sorted(OLD_NAMES))
def test_old_name_of_the_root_names_the_new_one(name) -> None:
    with pytest.raises(AttributeError, match=re.escape(f"Fix: use {OLD_NAMES[name]}")):
        getattr(sg, name)
    assert not hasattr(sg, name)
    assert name not in dir(sg)


@pytest.mark.parametrize("name", sorted(OLD_METHODS))
def test_old_method_names_the_new_one(strategy, name) -> None:
    with pytest.raises(AttributeError, match=f"has no method '{name}'") as caught:
        getattr(strategy, name)
    assert OLD_METHODS[name] in str(caught.value)
    assert not hasattr(strategy, name)
    assert name not in dir(strategy)


def test_same_methods_work_with_a_warning(strategy) -> None:
    assert not SAME_METHODS.keys() & set(dir(strategy))
    with pytest.warns(DeprecationWarning, match="experimental_run_v2 is an older name of Mirrored"):
        ones = strategy.experimental_run_v2(lambda: jnp.ones(()))
    with pytest.warns(DeprecationWarning, match="unwrap is an older name"):
        assert [*map(float, strategy.unwrap(ones))] == [1.0, 1.0]


def test_method_that_is_in_no_table_is_an_ordinary_error(strategy) -> None:
    with pytest.raises(AttributeError, match="'MirroredStrategy' object has no attribute 'no_s"):
        _ = strategy.no_such


@pytest.mark.parametrize("name", ["num_gpus", "num_gpus_per_worker"])
def test_old_arguments_name_the_new_ones(name) -> None:
    make: Any = sg.MirroredStrategy
    with pytest.raises(TypeError, match=f"MirroredStrategy received {name}=2"):
        make(**{name: 2})


def test_decorator_with_arguments_is_the_decorator() -> None:
    @sg.function()
    def double(x: Any) -> Any:
        return 2 * x

    @sg.function(jit_compile=True, reduce_retracing=True)
    def triple(x: Any) -> Any:
        return 3 * x

    assert (float(double(2.0)), float(triple(2.0))) == (4.0, 6.0)


def test_what_sg_function_does_not_take_is_named() -> None:
    with pytest.raises(TypeError, match="function received input_signature="):
        sg.function(input_signature=[jax.ShapeDtypeStruct((), "float32")])
    with pytest.raises(TypeError, match="function received 3 of type int"):
        sg.function(3)


def test_local_results_of_a_pytree_are_one_pytree_a_replica(strategy) -> None:
    x = strategy.distribute_values_from_function(lambda c: float(c.replica_id_in_sync_group))
    assert strategy.local_results({"x": x, "rest": ["text", None]}) == (
        {"x": 0.0, "rest": ["text", None]},
        {"x": 1.0, "rest": ["text", None]},
    )
    assert strategy.local_results({"x": 1.0}) == ({"x": 1.0},)
    doubled = strategy.local_results(jax.tree.map(lambda parts: 2 * parts, x))
    assert [*map(float, doubled)] == [0.0, 2.0]


@pytest.mark.parametrize("eagerly", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_run_steps_calls_a_function_as_run_does(strategy, eagerly) -> None:
    x = np.arange(8.0, dtype="float32")
    dataset = strategy.distribute_dataset(sg.input.Dataset((x, 2 * x), batch_size=4))

    def of_parts(x: Any, y: Any) -> Any:
        return jnp.sum(x * y)

    def of_batch(batch: Any) -> Any:
        return of_parts(*batch)

    expected = [float(np.sum(2 * part**2)) for part in (x[:4], x[4:])]
    sg.config.run_eagerly(eagerly)
    try:
        for fn in (of_parts, of_batch, lambda *batch: of_batch(*batch)):
            sums = strategy.run_steps(fn, iter(dataset), 2, reduce="sum")
            np.testing.assert_allclose(sums, expected)
            one = [strategy.run(of_parts, args=batch) for batch in dataset]
            np.testing.assert_allclose(
                [strategy.reduce("SUM", value, axis=None) for value in one], expected
            )
    finally:
        sg.config.run_eagerly(False)
